"""The plan that holds least, and what a budget that it does not keep is refused with."""

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
"""Times that what holds least is made again to hold less, each time with less room than it held; it ends before where nothing is gained."""
GAINS = 0.001
"""What holds less by no more than this part is not worth another plan."""
TIGHT = (0, LEVELS // 4, LEVELS // 2, 3 * LEVELS // 4, LEVELS)
"""Levels of recomputation of which each stage takes the one with which it holds least: with all recomputed nothing can be moved
(two stages: 720 bytes, 640 with the level chosen by stage), and each level more is a plan more for a refusal."""


def least_memory(make: Making) -> Made:
    """What holds least by itself: all moved that can be, and each stage at the level of recomputation with which it then holds least
    (what is recomputed cannot be moved, so that need not be the last). Tried are Paddle's baseline order and, where the form is open, those
    by name, each with a host that waits at the ends of jobs (the alternative of `throttle-host`) or where it must, and Paddle's own
    jobs and streams with and without recomputation. Drafts are compared."""
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
    """The passes with each stage at the level of recomputation with which it holds least, all moved that can be."""
    if not make.levels.are_open:
        return made
    held = {
        level: make.levels.by_stage(make.world.gpu_peaks(make.drafted(recomputing(made, level), make.world.memory_limits(1))))
        for level in TIGHT
    }
    return recomputing(made, tuple(min(held, key=lambda level: (held[level][stage], level)) for stage in range(make.pipe.num_stages)))


def _held_less(make: Making, draft: Made) -> Made:
    """The draft, or one that moves less and holds less all the same: copies back take room too."""
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
    """Raises BudgetError with what the fullest rank holds by what holds least, and what Paddle's baseline does, counted alike."""
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
