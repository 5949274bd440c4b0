"""The form of a schedule, and what each stage recomputes, with the shortest simulated step within the memory limit."""

from __future__ import annotations

from dataclasses import replace

from interlace.ir.remarks import Fact, Remark
from interlace.planning.coarse import Coarse
from interlace.planning.drafts import Drafts, Judged
from interlace.planning.limits import beyond_baseline, is_unlimited
from interlace.planning.making import BASELINE_KEPT, FORM_TAKEN, said
from interlace.planning.proposals import PROPOSALS, Tried
from interlace.planning.variants import drafted, named, paddles_jobs, without_search
from interlace.planning.world import Made

PLANNED = 3
"""Most drafts that are planned in full."""
AS_FAST = 1.002
"""A draft is planned in full in place of the fastest, whose full plan exceeds the budget, if its step is longer by this factor at most."""


def fastest(drafts: Drafts) -> tuple[Made, Tried]:
    """Run the passes with the form, and the recomputation, whose simulated step is shortest within the memory limit. Returns the run, and
    what was proposed for it; raises PassError as `Pipeline.run`.

    Every proposed form (`PROPOSALS`) is drafted, without local search inside its jobs, and simulated; the fastest is then planned in full.
    If that exceeds the budget and others are nearly as fast (`AS_FAST`), the first of them whose full plan keeps it is taken. If Paddle's
    own plan is the fastest, it is kept as it is.
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
    return run.noted(taken, *_lost(drafts, [each for each in judged if each is not best], limit)), tried


def _in_full(tried: Tried, best: Judged) -> tuple[Judged, Made]:
    """The best draft and its full plan, or another one that is nearly as fast, if only its full plan keeps the budget. If none does, the
    caller makes the plan of the best again with lower limits."""
    drafts, first = tried.drafts, tried.drafts.whole(best)
    if not drafts.given or not any(drafts.world.bytes_over_in_step(first, tried.limit)):
        return best, first
    for other in tried.finalists()[1:PLANNED]:
        if other.peak_bytes > tried.limit or (other.step_ns or 0) > AS_FAST * (best.step_ns or 0):
            break
        if not any(drafts.world.bytes_over_in_step(run := drafts.whole(other), tried.limit)):
            return other, run
    return best, first


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
