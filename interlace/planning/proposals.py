"""Proposals of the search for the fastest plan: the baseline's jobs, forms by name, schedules of the coarse model; and these with less
memory, less or more recomputation, or other waits of the host.

`fastest.py` calls the functions in `PROPOSALS` in this order. Each gets everything judged so far and returns the drafts that it adds; none
raises the memory limit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from interlace.passes import Schedule1F1B
from interlace.planning.coarse import COARSE_SCHEDULES, PAYS, Coarse
from interlace.planning.drafts import FAR, ROUNDS, Drafts, Form, Judged, fitting, nearest
from interlace.planning.making import SOONER
from interlace.planning.variants import (
    alternatives,
    deciding,
    holding_less,
    paddles_jobs,
    with_optimizer_alone,
    with_reductions_first,
    without_search,
)
from interlace.scheduler.whole_step.search import Numbers

FINALISTS = 1
"""Number of forms, fastest first, for which alternatives of later passes are tried too, if there is a budget (waits at the peak hold less
than those at the ends of jobs) or transfers are delayed (where the host waits then changes the step by 1 % at most). Otherwise all that
fit."""
TIGHTER = (0.95, 0.85)
"""Shares of the budget: forms that exceed the budget are drafted again as if these were the budget."""
MOST_TIGHTER = 3
"""Number of forms, fastest first, for which this is done."""
LITTLE = 0.01
"""A form that exceeds the budget by at most this share is drafted again with limits lowered by small multiples of the excess (`SOONER`):
offload moves whole values, and lowering the limits by a twentieth may cost more than the form gains."""
CLOSER, NEARLY = 2, 1.05
"""Where nothing is offloaded: how often schedules are searched again in less memory, for forms whose peak exceeds the limit by at most this
factor."""
MOST_ALIKE = 6
"""Number of forms, fastest first, for which the levels of the best one are tried."""
SMALLER = (0.975, 0.95)
"""Shares of the budget: a form is drafted again with as much recomputed as these budgets need."""
LESS = (0.03, 0.015)
"""Shares of the budget that recomputation leaves to offload, on one stage after the other: the first of these that offload can free. Trying
0.06 as well makes three of nine plans faster, by 0.1 % at most, and planning takes a fifth longer."""
MORE = (0.2, 0.1)
"""Shares of the budget that recomputation frees on one stage in addition, one stage after the other: the first of these with which the
draft is better. With the budgets of `benchmarks/budgets.py` three of 29 plans are faster, by 0.04 to 1.1 % (simulated), and none is slower;
the zoo's plans are the same, and planning them takes 4 % longer."""

HALVINGS = 4
"""How often, with a single stage, levels halfway between the best one and its nearest neighbours are tried."""
CLOSEST = 8
"""Between levels that are closer than this, none is tried."""


@dataclass(slots=True)
class Tried:
    """The state from which proposals start.

    Attributes:
        drafts: Makes drafts; knows what was asked for, and the budget (`given`).
        by_name: Forms by name that are possible for the program.
        limit: Device bytes that a plan may hold.
        baseline_peaks: Peak device bytes of the baseline, by rank.
        judged: All drafts so far.
    """

    drafts: Drafts
    coarse: Coarse
    by_name: Sequence[Schedule1F1B]
    limit: int
    baseline_peaks: Sequence[int]
    judged: list[Judged] = field(default_factory=list)

    def new(self, forms: Iterable[tuple[Numbers | None, Schedule1F1B]]) -> list[Judged]:
        """Drafts of forms with what each stage recomputes, but for those that were judged already."""
        known = {(each.recomputed, each.form) for each in self.judged}
        first = dict.fromkeys((recomputed, without_search(form)) for recomputed, form in forms)
        return self.drafted([each for each in first if each not in known])

    def drafted(self, forms: Sequence[tuple[Numbers | None, Schedule1F1B]]) -> list[Judged]:
        """Drafts of forms with what each stage recomputes."""
        self.foresee(forms)
        return [self.drafts.draft(*each, self.drafts.later, self.limit) for each in forms]

    def foresee(self, forms: Iterable[tuple[Numbers | None, Schedule1F1B]]) -> None:
        """Look at several drafts at once (`Drafts.foresee`)."""
        self.drafts.foresee([(*each, self.drafts.later) for each in forms], self.limit)

    def not_beaten(self, forms: Iterable[Schedule1F1B]) -> list[tuple[Numbers | None, Schedule1F1B]]:
        """Forms by name with what is recomputed, but for those that a run beats which there is already."""
        beaten = self.drafts.make.beaten.forms
        return [(self.drafts.needed, each) for each in map(without_search, forms) if each not in beaten]

    def named(self, forms: Iterable[Schedule1F1B]) -> list[Judged]:
        """Drafts of forms by name."""
        make = self.drafts.make
        found = self.new(self.not_beaten(forms))
        if not self.drafts.given:
            make.by_name |= {each.form: each.step_ns for each in found if each.step_ns is not None}
        return found

    def finalists(self) -> list[Judged]:
        """Forms that keep the limit, fastest first; or, if none does and there is a budget, those nearest to it."""
        return fitting(self.judged, self.limit) or (nearest(self.judged) if self.drafts.given else [])

    def best(self) -> Judged | None:
        """The first of the finalists; None if there are none."""
        return next(iter(self.finalists()), None)

    def draft_in(self, limit: int) -> None:
        """Make one more draft, of the schedule that the coarse model finds best within `limit` bytes; none if forward and backward do not
        alternate."""
        for recomputed, form in self.coarse.best_in(limit) if self.drafts.pipe.alternates else ():
            self.drafts.draft(recomputed, form, self.drafts.later, limit)


def baseline_jobs(tried: Tried) -> list[Judged]:
    """The baseline's jobs with all passes that were asked for."""
    mine = paddles_jobs(tried.drafts.asked)
    tried.foresee(tried.not_beaten([mine, *tried.by_name]))
    return tried.named([mine])


def forms_by_name(tried: Tried) -> list[Judged]:
    """Each form that has a name."""
    return tried.named(tried.by_name)


def coarse_schedules(tried: Tried) -> list[Judged]:
    """The schedules that the coarse model finds best; if forward and backward do not alternate, the other forms with the model's
    recomputation."""
    if tried.drafts.pipe.alternates:
        return tried.new(tried.coarse.schedules(tried.baseline_peaks, tried.limit))
    if not tried.drafts.chooses:
        return []
    forms = (paddles_jobs(tried.drafts.asked), *tried.by_name)
    return tried.new((level, form) for level in tried.coarse.recomputation(tried.limit) for form in forms)


def tighter(tried: Tried) -> list[Judged]:
    """Forms that exceed the budget and would be faster than all that keep it, and than any known run but for waits of the host, drafted
    again as if the budget were smaller (`TIGHTER`)."""
    drafts, judged, limit = tried.drafts, tried.judged, tried.limit
    if not drafts.given:
        return []
    best = next((each.step_ns or 0 for each in fitting(judged, limit)), None)
    over = [each for each in judged if each.step_ns is not None and each.peak_bytes > limit and (best is None or each.step_ns < best)]
    over = [each for each in over if drafts.fastest_ns is None or (each.unheld_ns or 0) < drafts.fastest_ns]
    over.sort(key=lambda each: each.step_ns or 0)
    found: dict[tuple[Numbers | None, Schedule1F1B, float], None] = {}
    levels = drafts.make.levels
    for part in TIGHTER if over else ():
        needed = [levels.within(int(part * limit), (0.0,))[-1]] if drafts.chooses else []
        if needed and levels.states is not None:
            needed += levels.to_free(int(part * limit), [(1.0, 0)], beside_states=True)
        for each in over[:MOST_TIGHTER]:
            more = [tuple(map(max, each.recomputed, level)) if each.recomputed else level for level in needed]
            found |= {(level, each.form, part): None for level in (each.recomputed, *more)}
    near = [each for each in over[:MOST_TIGHTER] if drafts.offloads and each.peak_bytes - limit <= LITTLE * limit]
    if drafts.fastest_ns is not None:  # the first plan of each is then simulated in any case
        first = [((each.recomputed, each.form, each.later), _little_less(each, SOONER[1], limit)) for each in near]
        first += [((more, form, drafts.later), part) for more, form, part in found]
        drafts.foresee((form for form, _ in first), limit, (part for _, part in first))
    closest = [drafted for each in near for drafted in _with_little_less_room(drafts, each, limit)]
    return [*closest, *(drafts.draft(more, form, drafts.later, limit, part) for more, form, part in found)]


def _with_little_less_room(drafts: Drafts, missed: Judged, limit: int) -> Iterator[Judged]:
    """Drafts of a form that exceeds the budget slightly, as if the budget were smaller by multiples of that excess."""
    for times in SOONER[1:]:
        part = _little_less(missed, times, limit)
        yield (found := drafts.draft(missed.recomputed, missed.form, missed.later, limit, part))
        if found.peak_bytes <= limit:
            return


def _little_less(missed: Judged, times: int, limit: int) -> float:
    """The budget without a multiple of what a form exceeds it by, as a share of it."""
    return 1 - times * (missed.peak_bytes - limit) / limit


def more_recomputed(tried: Tried) -> list[Judged]:
    """The best form so far with as much recomputed as smaller budgets would need (`SMALLER`), after all optimizer state that may leave the
    device has left it: recomputing values may take less time than copying to the host and back. No stage recomputes less than before."""
    drafts, best = tried.drafts, tried.best()
    if not drafts.given or not drafts.offloads or best is None or best.recomputed is None:
        return []
    levels = drafts.make.levels
    budgets = [int(part * tried.limit) for part in SMALLER]
    needed = [levels.to_free(budget, [(1.0, 0)], beside_states=levels.states is not None)[0] for budget in budgets]
    return tried.new((tuple(map(max, best.recomputed, each)), best.form) for each in needed)


def same_recomputed(tried: Tried) -> list[Judged]:
    """The fastest forms, each with as much recomputed as the best so far; without those that exceed the budget by far (`FAR`). The coarse
    model chose levels for them without knowing what copies and waits of the host cost."""
    drafts, best = tried.drafts, tried.best()
    if not drafts.given or best is None or best.recomputed is None:
        return []
    forms = dict.fromkeys(each.form for each in fitting(tried.judged, int((1 + FAR) * tried.limit)))
    return tried.new((best.recomputed, form) for form in [*forms][:MOST_ALIKE])


def less_recomputed(tried: Tried) -> list[Judged]:
    """The fastest that keeps the budget with less recomputed on one stage after the other, as long as that makes it faster: offload
    gives back what a stage then holds too much, and what that costs only a simulation of the whole step says."""
    drafts, limit, found = tried.drafts, tried.limit, list[Judged]()
    best = _fastest_of_both_means(tried)
    if best is None or best.recomputed is None:
        return found
    fewer = [drafts.make.levels.within(limit, (-part,))[-1] for part in LESS]
    stages = [*reversed(range(len(best.recomputed)))]
    first = [_with(best.recomputed, stage, fewer[0]) for stage in stages if fewer[0][stage] < best.recomputed[stage]]
    mine = [(recomputed, best.form, best.later) for recomputed in first]
    drafts.foresee([*mine, *_with_alternatives(drafts, best)], limit)  # few of them make another one the best
    for stage in stages:
        for levels in fewer:
            if levels[stage] < best.recomputed[stage]:
                found.append(drafts.draft(_with(best.recomputed, stage, levels), best.form, best.later, limit))
                if found[-1].peak_bytes <= limit:
                    break
        best = fitting((best, *found), limit)[0]
    return found


def more_on_one_stage(tried: Tried) -> list[Judged]:
    """The fastest that keeps the budget with more recomputation on one stage after the other, as long as that makes it faster: a stage need
    not copy what it recomputes, and may have the time while it waits for others. A stage that recomputes nothing has room enough."""
    drafts, limit, found = tried.drafts, tried.limit, list[Judged]()
    best = _fastest_of_both_means(tried)
    if best is None or best.recomputed is None:
        return found
    for stage in reversed(range(len(best.recomputed))):
        if not best.recomputed[stage]:
            continue
        more = [drafts.make.levels.higher(best.recomputed, [int(part * limit)] * len(drafts.memory_limits)) for part in MORE]
        levels = dict.fromkeys(_with(best.recomputed, stage, each) for each in more if each[stage] > best.recomputed[stage])
        forms = [(each, best.form, best.later) for each in levels]
        drafts.foresee(forms, limit)
        for form in forms:
            found.append(drafts.draft(*form, limit))
            if (faster := fitting((best, *found), limit)[0]) is not best:
                best = faster
                break
    return found


def levels_between(tried: Tried) -> list[Judged]:
    """With a single stage, the fastest that keeps the budget with levels of recomputation between its own and the nearest ones that were
    tried. The step changes irregularly with the level, as whole values are repeated or moved; with several stages, what others do at the
    time matters more, and the proposals before this one change one stage after the other."""
    drafts, limit, found = tried.drafts, tried.limit, list[Judged]()
    best = next(iter(fitting(tried.judged, limit)), None)
    if not drafts.given or not drafts.chooses or best is None or best.recomputed is None or len(best.recomputed) > 1:
        return found
    for _ in range(HALVINGS):
        (at,), known = best.recomputed, {level for each in (*tried.judged, *found) for level in each.recomputed or ()}
        below, above = max((each for each in known if each < at), default=at), min((each for each in known if each > at), default=at)
        levels = [(at + each) // 2 for each in (below, above) if abs(at - each) >= CLOSEST]
        forms = [((level,), best.form, best.later) for level in levels]
        drafts.foresee(forms, limit)
        found += [drafts.draft(*form, limit) for form in forms]
        best = fitting((best, *found), limit)[0]
        assert best.recomputed is not None
    return found


def _fastest_of_both_means(tried: Tried) -> Judged | None:
    """The fastest that keeps the budget; None if none does, if not both recomputation and offload may free memory for it, or if levels are
    not tried on one stage after the other."""
    drafts = tried.drafts
    both = drafts.given and drafts.chooses and drafts.offloads
    return next(iter(fitting(tried.judged, tried.limit)), None) if both and drafts.make.by_stage else None


def _with(recomputed: Numbers, stage: int, levels: Numbers) -> Numbers:
    """What each stage recomputes, with another level on one stage."""
    return (*recomputed[:stage], levels[stage], *recomputed[stage + 1 :])


def in_less_memory(tried: Tried) -> list[Judged]:
    """Where nothing is offloaded, schedules that the coarse model finds in less memory. Needed if a schedule of the model would be faster
    than all that fit, but holds more than the model expected, and more than the limit; the search then leaves this difference free."""
    drafts, coarse, limit = tried.drafts, tried.coarse, tried.limit
    if (drafts.given and drafts.offloads) or not drafts.pipe.alternates:
        return []
    newest, more, levels = list(tried.judged), list[Judged](), coarse.looked_at[0]
    for _ in range(CLOSER):
        best = next((each.step_ns or 0 for each in fitting((*tried.judged, *more), limit)), None)
        ranked = [each for each in newest if (each.recomputed, each.form) in coarse.expected]
        over = [
            each
            for each in ranked
            if each.step_ns is not None and limit < each.peak_bytes <= NEARLY * limit and (best is None or each.step_ns < (1 - PAYS) * best)
        ]
        if not over:
            break
        within = limit - max(each.peak_bytes - coarse.expected[each.recomputed, each.form] for each in over)
        found = coarse.as_forms(coarse.find(within, COARSE_SCHEDULES), levels)
        newest = tried.drafted([*dict.fromkeys((level, without_search(form)) for level, form in found)])
        more += newest
    return more


def in_paddles_order(tried: Tried) -> list[Judged]:
    """Without a budget, for a program that recomputes: Paddle's order with as much recomputation as that order needs, and with more if it
    still holds too much. Other orders may hold too much on a stage that recomputes everything already."""
    drafts, limit = tried.drafts, tried.limit
    judged, within = list[Judged](), limit
    for _ in range(ROUNDS if drafts.pipe.alternates and drafts.recomputes and drafts.chooses and not drafts.given else 0):
        judged.append(drafts.draft(drafts.make.levels.within(within, (0.0,))[-1], paddles_jobs(drafts.asked), drafts.later, limit))
        if judged[-1].peak_bytes <= limit:
            break
        within -= 2 * (judged[-1].peak_bytes - limit)
    return judged


def optimizer_alone(tried: Tried) -> list[Judged]:
    """The fastest form with the optimizer in a job of its own: of those that keep the limit, and of those that hold too much."""
    return _with_optimizer(tried, with_optimizer_alone)


def reductions_first(tried: Tried) -> list[Judged]:
    """The same with gradients that are reduced first."""
    return _with_optimizer(tried, with_reductions_first)


def _with_optimizer(tried: Tried, changed: Callable[[Schedule1F1B], Schedule1F1B]) -> list[Judged]:
    """The fastest forms that a change of the optimizer's place or order concerns, with it."""
    if not tried.drafts.optimizer_communicates:
        return []
    judged, found = fitting(tried.judged, sys.maxsize), list[tuple[Numbers | None, Schedule1F1B]]()
    for fits in (True, False):
        mine = [each for each in judged if (each.peak_bytes <= tried.limit) == fits and changed(each.form) != each.form]
        found += [(each.recomputed, changed(each.form)) for each in mine[:1]]
    return tried.new(found)


def with_other_waits(tried: Tried) -> list[Judged]:
    """The fastest forms, or with a budget that none keeps those nearest to it, with the alternatives of each later pass."""
    drafts, limit = tried.drafts, tried.limit
    few = drafts.given or deciding(drafts.later, "transfers") is not None
    forms = [form for final in tried.finalists()[: FINALISTS if few else None] for form in _with_alternatives(drafts, final)]
    drafts.foresee(forms, limit)
    return [drafts.draft(*form, limit) for form in forms]


def _with_alternatives(drafts: Drafts, judged: Judged) -> list[Form]:
    """A form with the alternatives of each pass after it."""
    later = judged.later
    others = [(*later[:k], other, *later[k + 1 :]) for k, each in enumerate(later) for other in alternatives(each)]
    return [(judged.recomputed, judged.form, each) for each in (*others, holding_less(later)) if each != later]


PROPOSALS: tuple[Callable[[Tried], list[Judged]], ...] = (
    baseline_jobs,
    forms_by_name,
    coarse_schedules,
    tighter,
    more_recomputed,
    same_recomputed,
    less_recomputed,
    in_less_memory,
    in_paddles_order,
    optimizer_alone,
    reductions_first,
    with_other_waits,
    more_on_one_stage,
    levels_between,
)
"""The proposals in the order in which they are called; each sees the drafts of those before it."""
