"""The plan that needs the least memory, and the error for a budget that even it exceeds."""

from __future__ import annotations

from interlace.errors import BudgetError
from interlace.passes import Pipeline
from interlace.planning.limits import baseline_bytes
from interlace.planning.making import Making
from interlace.planning.tasks import could_repeat, holders
from interlace.planning.variants import (
    in_paddles_order,
    is_open,
    named,
    paddles_own,
    paddles_streams,
    recomputing,
    schedule_of,
    waiting,
    with_schedule,
)
from interlace.planning.world import Made
from interlace.scheduler.recompute.choices import LEVELS
from interlace.units import size

DESCENTS = 4
"""Most attempts to lower the peak of the smallest plan, each with less room than the plan before held."""
GAINS = 0.001
"""Attempts end when one lowers the peak by no more than this share."""
TIGHT = (0, LEVELS // 4, LEVELS // 2, 3 * LEVELS // 4, LEVELS)
"""Levels of recomputation that are compared; each stage takes the one with the lowest peak. Recomputing everything is not always best, as
it leaves nothing to move (a test with two stages: 720 bytes, against 640 with a level for each stage). Each level costs one more plan."""


def least_memory(make: Making) -> Made:
    """The plan with the lowest peak that was found: everything that can be is moved, and each stage is at the level of recomputation with
    the lowest peak.

    Drafts of these are compared: Paddle's baseline order with both alternatives of `throttle-host`, Paddle's own jobs and streams, and, if
    the form is open, the forms by name and Paddle's own jobs and streams with recomputation as captured. The best, and a version of it with
    less room if that holds less, are planned in full.
    """
    made, plain = (_at_least_held(make, each) for each in (in_paddles_order(make.asked), paddles_streams(make.asked)))
    asked = schedule_of(make.asked)
    by_name = named(asked, make.world.captured, make.draws) if asked and is_open(asked) else []
    forms = list(dict.fromkeys((waiting(made), made, plain)))
    forms += [with_schedule(made, each) for each in by_name]
    forms += [paddles_own(make.asked)] * bool(by_name)
    least = min((make.drafted(each, make.world.memory_limits(1)) for each in forms), key=make.most)
    less = _held_less(make, least)
    tried = [make.made(run.passes, run.memory_limits) for run in ((less, least) if less is not least else (least,))]
    return min(tried, key=make.most)


def _at_least_held(make: Making, made: Pipeline) -> Pipeline:
    """The passes with each stage at the level of recomputation with the lowest peak when everything that can be is moved."""
    if not make.levels.are_open:
        return made
    held = {
        level: make.levels.by_stage(make.world.gpu_peaks(make.drafted(recomputing(made, level), make.world.memory_limits(1))))
        for level in TIGHT
    }
    return recomputing(made, tuple(min(held, key=lambda level: (held[level][stage], level)) for stage in range(make.pipe.num_stages)))


def _held_less(make: Making, draft: Made) -> Made:
    """The draft, or a draft with a lower limit whose peak is lower: copies back take memory too, so moving less may hold less."""
    found = draft
    for _ in range(DESCENTS):
        below = make.most(found) - 1
        if below <= 0 or not make.offloads:
            break
        closer = make.with_lower_limits(make.drafted, make.drafted(draft.passes, make.world.memory_limits(below)), below)
        if closer is None or make.most(closer) > (1 - GAINS) * below:
            break
        found = closer
    return found


def refuse(make: Making, run: Made, budget: int) -> None:
    """Raise BudgetError, with the peak of the fullest rank in `run`, the plan that needs the least memory, and that of Paddle's
    baseline."""
    peaks = make.world.bytes_over(run, 0)
    rank = peaks.index(max(peaks))
    (what,) = filter(None, make.world.map(holders, run.programs, ranks=[rank]))
    repeats = make.levels.are_open and not make.levels.collectives and any(make.world.map(could_repeat))
    where = f"rank {rank if make.world.is_whole else make.world.captured.rank}, stage {make.world.facts[rank].stage}"
    more = "; choose_recompute: {repeat_collectives: on} may hold less" if repeats else ""
    baseline = baseline_bytes(make.world)
    counted = ". Counted is what a GPU holds, however fast its host"
    counted += f"; so counted, Paddle's baseline holds {baseline} bytes ({size(baseline)})" if baseline else ""
    raise BudgetError(
        f"memory_budget {size(budget)} ({budget} bytes) cannot be kept; the least feasible one is {peaks[rank]} bytes "
        f"({size(peaks[rank])}), which {where} holds with all recomputed and moved to the host that lowers it: "
        f"{what}{more}{counted}",
        peaks[rank],
    )
