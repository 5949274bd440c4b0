"""The form of a schedule, and what each stage recomputes, with the shortest simulated step within the memory limit."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import repeat

from interlace.ir.remarks import Fact, Remark
from interlace.planning.coarse import Coarse
from interlace.planning.drafts import FAR, Drafts, Form, Judged, fitting
from interlace.planning.limits import beyond_baseline, is_unlimited
from interlace.planning.making import BASELINE_KEPT, FORM_TAKEN, said
from interlace.planning.proposals import PROPOSALS, Tried
from interlace.planning.variants import drafted, named, paddles_jobs, without_search
from interlace.planning.world import Made

PLANNED = 3
"""Most drafts that are planned in full, the fastest among them; and as many that leave more room."""
AS_FAST = 1.002
"""Where the full plan of the fastest draft exceeds the budget, no other is looked for if one is longer than that draft by this factor at
most: that of another draft, or the same with lower limits."""


def fastest(drafts: Drafts) -> tuple[Made, Tried]:
    """Run the passes with the form, and the recomputation, whose simulated step is shortest within the memory limit. Returns the run, and
    what was proposed for it; raises PassError as `Pipeline.run`.

    Every proposed form (`PROPOSALS`) is drafted, without local search inside its jobs, and simulated; the fastest is then planned in full.
    If that exceeds the budget, `_in_full` looks for another. If Paddle's own plan is the fastest, it is kept as it is.
    """
    made = drafts.world.run(drafted(drafts.own), drafts.memory_limits, ranks=drafts.ranks)
    peaks = drafts.peaks(made)
    own = Judged(
        paddles_jobs(drafts.asked), (), None, drafts.memory_limits, drafts.world.step_ns(made), max(drafts.peaks(made, by_paddle=True))
    )
    limit = drafts.given.budget if drafts.given else beyond_baseline(drafts.world, own.peak_bytes)
    by_name = named(drafts.asked, drafts.world.captured, drafts.draws)
    tried = Tried(drafts, Coarse(drafts), by_name, limit, peaks)
    for propose in PROPOSALS:
        tried.judged += propose(tried)
    judged = tried.judged
    best = tried.best()
    if best is None and own.step_ns is None and judged:
        run = replace(drafts.whole(judged[0]), memory_limits=drafts.memory_limits)
        return run.noted(said("declined", "no-form-judged"), *_lost(drafts, judged, limit)), tried
    if best is None or (max(peaks) <= limit and own.step_ns is not None and (best.step_ns or 0) >= own.step_ns):
        kept = said("decided", BASELINE_KEPT, **_baseline_facts(drafts, own))
        others = [each for each in judged if each.form.interleave != "off" or each.step_ns != own.step_ns]
        return drafts.world.run(drafts.own, drafts.memory_limits).noted(kept, *_lost(drafts, others, limit)), tried
    best, run = _in_full(tried, best)
    facts = best.facts(drafts.later) | _baseline_facts(drafts, own)
    facts |= {} if not drafts.given and is_unlimited(drafts.world) else {"limit_bytes": limit}
    taken = said("decided", FORM_TAKEN, step_ns=drafts.world.step_ns(run) or 0, **facts)
    return replace(run, notes=(taken, *run.notes)).noted(*_lost(drafts, [each for each in judged if each is not best], limit)), tried


def _in_full(tried: Tried, best: Judged) -> tuple[Judged, Made]:
    """The best draft and its full plan. If the draft keeps the budget and the full plan does not: another draft that is nearly as fast and
    whose full plan keeps it; else the fastest of the plan with lower limits and the plans of drafts that leave as much more room. If
    nothing is found, or drafts exceed the budget too, the full plan as it is, for the caller to make again."""
    drafts, first, limit = tried.drafts, tried.drafts.whole(best), tried.limit
    over = max(drafts.world.bytes_over_in_step(first, limit)) if drafts.given else 0
    if over <= 0 or best.peak_bytes > limit or over > FAR * limit:
        return best, first
    for other in tried.finalists()[1:PLANNED]:
        if other.peak_bytes > limit or (other.step_ns or 0) > AS_FAST * (best.step_ns or 0):
            break
        if not any(drafts.world.bytes_over_in_step(run := drafts.whole(other), limit)):
            return _instead(tried, best, over, other), run
    runs = list[tuple[int, Judged, Made]]()
    lowered = drafts.make.with_lower_limits(drafts.make.made, first, limit)
    if lowered is not None and (took := drafts.world.step_ns(lowered)) is not None:
        if took <= AS_FAST * (best.step_ns or 0):
            return best, lowered
        runs.append((took, best, lowered))
    for other in _with_room(tried, over, runs[0][0] if runs else None)[:PLANNED]:
        if runs and (other.step_ns or 0) >= min(took for took, *_ in runs):
            break
        run = drafts.whole(other)
        if (took := drafts.world.step_ns(run)) is not None and not any(drafts.world.bytes_over_in_step(run, limit)):
            runs.append((took, other, run))
    _, taken, run = min(runs, key=lambda each: each[0], default=(0, best, lowered or first))
    return (taken if taken is best else _instead(tried, best, over, taken)), run


def _instead(tried: Tried, missed: Judged, over: int, taken: Judged) -> Judged:
    """`taken`, in place of a draft whose full plan exceeds the limit by `over` bytes, which reports say of it."""
    tried.judged[tried.judged.index(missed)] = replace(missed, peak_bytes=tried.limit + over)
    return taken


def _with_room(tried: Tried, room: int, faster_than: int | None) -> list[Judged]:
    """Drafts that leave `room` bytes of the budget and whose step takes less than `faster_than` nanoseconds (None for any), fastest first:
    those there are, and the fastest of the others drafted again, with lower limits or, where nothing is offloaded, more recomputation. New
    drafts are added to `tried`."""
    drafts, within = tried.drafts, tried.limit - room
    most_ns = faster_than or sys.maxsize
    judged = [each for each in tried.finalists() if (each.step_ns or 0) < most_ns]
    again = [each for each in judged if each.peak_bytes > within][:PLANNED]
    freed, part, forms = [room] * len(drafts.memory_limits), within / tried.limit, list[Form]()
    for each in again:
        if drafts.offloads:
            forms.append((each.recomputed, each.form, each.later))
        elif drafts.chooses and each.recomputed is not None:
            forms.append((drafts.make.levels.higher(each.recomputed, freed), each.form, each.later))
    known, drafts.fastest_ns = drafts.fastest_ns, faster_than  # full plans of the drafts known as fastest may hold too much
    drafts.foresee(forms, within, repeat(part))
    made = [drafts.draft(*form, within, part) for form in forms]
    drafts.fastest_ns = known
    tried.judged += made
    return [each for each in fitting([*judged, *made], within) if (each.step_ns or 0) < most_ns]


def best_level(drafts: Drafts) -> Judged:
    """How much of the excess over the budget recomputation should free with a given form: the draft that exceeds the budget least, of those
    that keep it the fastest."""
    assert drafts.given is not None
    limit, form = drafts.given.budget, without_search(drafts.asked)
    judged = [drafts.draft(each, form, drafts.later, limit) for each in dict.fromkeys(drafts.given.levels)]
    return min(judged, key=lambda each: (max(0, each.peak_bytes - limit), each.step_ns is None, each.step_ns or 0))


def _baseline_facts(drafts: Drafts, own: Judged) -> dict[str, Fact]:
    """Facts for remarks about Paddle's own jobs and streams: their peak, their step, and the passes that a user asked for besides; and how
    the bytes of the choice are counted, if not as on a GPU."""
    found: dict[str, Fact] = {"baseline_peak_bytes": own.peak_bytes}
    if own.step_ns is not None:
        found["baseline_step_ns"] = own.step_ns
    if passes := [each.name for each in drafts.own.passes if not each.is_default]:
        found["baseline_passes"] = passes
    return found if drafts.given else {**found, "counted": "operations in turn"}


def _lost(drafts: Drafts, judged: list[Judged], limit: int) -> list[Remark]:
    """A remark for each form that was not taken, with the reason."""
    found = []
    for each in judged:
        facts = each.facts(drafts.later) | {"peak_bytes": each.peak_bytes}
        facts |= {"over_bytes": each.peak_bytes - limit} if each.peak_bytes > limit else {}
        if each.step_ns is None:
            found.append(said("declined", "form-would-stall", **facts))
        else:
            found.append(said("declined", "form-not-taken", step_ns=each.step_ns, **facts))
    return found
