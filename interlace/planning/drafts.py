"""Drafts of a form of the schedule and what each stage recomputes, judged by their simulated step and their peak."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import NamedTuple, TypeVar

from interlace.ir.remarks import Fact
from interlace.passes import Pass, Pipeline, Schedule1F1B
from interlace.planning.limits import Limit
from interlace.planning.making import Making
from interlace.planning.tasks import MemoryLimits, is_long
from interlace.planning.variants import deciding, drafted, holding_less, is_open, label, paddles_own, recomputing, schedule_label
from interlace.planning.world import Draft, Made
from interlace.scheduler.recompute.choices import LEVELS
from interlace.scheduler.whole_step.search import Numbers

ROUNDS = 4
"""Most plans that are made of one form; each has limits lowered by the bytes by which the one before exceeded the budget on a GPU."""
SHRINKS = 0.75
"""A form is given up if a plan with lower limits still exceeds the budget by more than this share of the previous excess."""
FAR = 0.25
"""A form that exceeds the budget by more than this share of it is not drafted again, with lower limits or with as much recomputed as the
best."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A drafted form of the schedule, with its figures.

    Attributes:
        later: The passes after the schedule.
        recomputed: Level of recomputation of each stage; None if the passes fix it.
        memory_limits: `Context.memory_limit` of each rank.
        step_ns: Simulated step; None if it never ends.
        peak_bytes: Peak of the fullest rank.
        joules: Energy of the step, summed over one rank of each kind; 0 if not known.
        unheld_ns: Simulated step with a host that never waits, for a form that exceeds a budget and takes longer than a known run (None for
            long steps, of which that is not simulated); else the same as `step_ns`.
    """

    form: Schedule1F1B
    later: tuple[Pass, ...]
    recomputed: Numbers | None
    memory_limits: MemoryLimits
    step_ns: int | None
    peak_bytes: int
    joules: float = 0.0
    unheld_ns: int | None = None

    def facts(self, asked: tuple[Pass, ...]) -> dict[str, Fact]:
        """Facts for remarks: the form, its recomputation, and how the later passes differ from those that were asked for (`asked`)."""
        found: dict[str, Fact] = {"jobs": "off"} if self.form.interleave == "off" else {"form": schedule_label(self.form)}
        if self.recomputed:
            found["recomputed"] = [level / LEVELS for level in self.recomputed]
        if others := [label(each) for each in self.later if each not in asked]:
            found["others"] = others
        return found


Form = tuple[Numbers | None, Schedule1F1B, tuple[Pass, ...]]
"""How much each stage recomputes, None where the passes say it; a form of the schedule; and the passes after it."""


class _Found(NamedTuple):
    judged: Judged
    made: Made


class Drafts:
    """Makes drafts with the forms of one schedule.

    Args:
        pipeline: The passes as asked for.
        asked: The schedule among them.
        limit: Under a memory budget.
    """

    def __init__(self, make: Making, pipeline: Pipeline, asked: Schedule1F1B, limit: Limit | None) -> None:
        self.make, self.world, self.pipeline, self.asked, self.given = make, make.world, pipeline, asked, limit
        self.pipe, self.draws = make.pipe, make.draws
        at = pipeline.passes.index(asked)
        self.earlier, self.later = Pipeline(pipeline.passes[:at]), pipeline.passes[at + 1 :]
        self.memory_limits = self.world.memory_limits(limit.budget if limit else None)
        self.chooses = make.levels.are_open and is_open(asked)
        """Whether a schedule may choose how much is recomputed; else the passes say it."""
        self.needed = limit.levels[0] if limit and limit.levels else None
        self.recomputes = any(each.recomputes for each in self.world.facts)
        self.optimizer_communicates = any(each.optimizer_communicates for each in self.world.facts)
        self.own = paddles_own(pipeline, limit is not None)
        """Paddle's own jobs and streams."""
        self.offloads = limit is not None and (deciding(self.later, "offload") is not None or make.levels.states is not None)
        """Whether under a budget offload moves what a plan holds too much."""
        asks = any(each.asks_ranks for each in (*self.later, *self.own.passes))
        self.ranks = tuple(self.world.all) if asks else self.world.firsts
        """Which ranks make drafts: one of each stage, and all where a pass asks them."""
        self.fastest_ns: int | None = make.beaten.step_ns or None
        """Simulated step of the fastest draft so far that keeps the memory, and no more than leaves something to win (`Making.beaten`)."""

    def draft(self, recomputed: Numbers | None, form: Schedule1F1B, later: tuple[Pass, ...], limit: int, part: float = 1.0) -> Judged:
        """Make a draft. With a budget, it is made again with limits lowered by its excess, as long as passes can free that, and it is not
        slower already than a draft that keeps the budget. `part` scales the limits to start from."""
        found = _end_of(_drafting(self, recomputed, form, later, limit, part))
        if found.judged.step_ns is not None and found.judged.peak_bytes <= limit:
            self.fastest_ns = min(found.judged.step_ns, self.fastest_ns or found.judged.step_ns)
        whole = Pipeline((*self.before(recomputed).passes.passes, form, *found.judged.later))
        self.world.drafts.append(Draft(found.made, found.judged.later, whole))
        return found.judged

    def foresee(self, forms: Iterable[Form], limit: int, parts: Iterable[float] = repeat(1.0)) -> None:
        """Simulate the first plans of drafts of these forms at once, where several processes can: the drafts then find them simulated.
        `parts` as `part` of `draft`, by form."""
        each = [*zip(forms, parts, strict=False)]
        if self.world.has_helpers and len(each) > 1:
            self.world.simulate([draft for form, part in each for draft in islice(_drafting(self, *form, limit, part), 1)])

    def before(self, recomputed: Numbers | None) -> Made:
        """The run of the passes before the schedule, with this much recomputed."""
        passes = self.earlier if recomputed is None else recomputing(self.earlier, recomputed)
        return self.world.run(passes, self.memory_limits)

    def peaks(self, made: Made, by_paddle: bool = False) -> list[int]:
        """Peak device bytes of the plan by rank: with a budget on a GPU, else with operations one after the other; 0 for a rank without
        jobs.

        `by_paddle`: whether Paddle's own jobs run rather than those of our lowering.
        """
        peaks = self.world.order_peaks(made, by_paddle)
        if not self.given:
            return peaks
        return [max(peak, on_gpu or 0) for peak, on_gpu in zip(peaks, self.world.gpu_peaks(made, by_paddle), strict=True)]

    def whole(self, judged: Judged) -> Made:
        before, passes = self.before(judged.recomputed), Pipeline((judged.form, *judged.later))
        return self.world.run(passes, judged.memory_limits, before)


def _drafting(
    drafts: Drafts, recomputed: Numbers | None, form: Schedule1F1B, later: tuple[Pass, ...], limit: int, part: float = 1.0
) -> Generator[Draft, None, _Found]:
    """What `Drafts.draft` does. Gives each plan before it asks for its step."""
    world, before, last = drafts.world, drafts.before(recomputed), 0
    memory_limits = tuple(int(part * room) if room else None for room in drafts.memory_limits)
    for _ in range(ROUNDS):
        made = world.run(drafted(Pipeline((form, *later))), memory_limits, before, drafts.ranks)
        peaks = drafts.peaks(made)
        over, took = max(peaks) - limit, None
        if 0 < over <= FAR * limit and (less := holding_less(later)) != later:
            later = less
            continue
        if over <= 0 or over > FAR * limit or not drafts.offloads or (last and over > last * SHRINKS):
            break
        if drafts.fastest_ns is not None:
            yield Draft(made, later)
            took = world.step_ns(made, later)
            if took is None or took >= drafts.fastest_ns:
                break
        last, memory_limits = over, drafts.make.lower_limits(made, memory_limits, [peak - limit for peak in peaks])
    yield Draft(made, later)
    unheld = took = took or world.step_ns(made, later)
    if drafts.given and over > 0 and took is not None and took >= (drafts.fastest_ns or took + 1):
        unheld = None if is_long(world.captured) else world.step_ns_unheld(made)
    return _Found(Judged(form, later, recomputed, memory_limits, took, max(peaks), world.joules(made, later), unheld), made)


T = TypeVar("T")


def _end_of(steps: Generator[object, None, T]) -> T:
    """What a generator returns in the end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: T = end.value
            return found


def fitting(judged: Sequence[Judged], limit: int) -> list[Judged]:
    """Forms whose step ends and whose peak is within the limit, sorted by step, then by energy."""
    fit = (each for each in judged if each.step_ns is not None and each.peak_bytes <= limit)
    return sorted(fit, key=lambda each: (each.step_ns or 0, each.joules))


def nearest(judged: Sequence[Judged]) -> list[Judged]:
    """Forms whose step ends, sorted by peak, for when all exceed the budget."""
    return sorted((each for each in judged if each.step_ns is not None), key=lambda each: each.peak_bytes)
