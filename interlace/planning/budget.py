"""The memory budget: what it is in bytes, and whether a planned step keeps it on the place where the host runs ahead."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec

from interlace.cost_model import Costs
from interlace.errors import BudgetError, PlanError
from interlace.ir import Program
from interlace.passes.base import Pass
from interlace.passes.peers import Peers, gather, plans_of_stages
from interlace.passes.pipeline import PassReport
from interlace.planning.stock import stock_plan
from interlace.scheduler.memory.throttle import gpu_peak
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.simulator import simulate
from interlace.scheduler.target import GPU, Target, with_paddles_jobs
from interlace.units import size


def budget_bytes(asked: float | None, program: Program, cost: Costs, peers: Peers | None = None) -> int:
    """A budget in bytes, the same on every rank; 0 without one.

    Args:
        asked: Bytes as a whole number, or a fraction of what Paddle's own plan holds on its fullest rank as a float.
        program: As captured.
        cost: Times of operations.
        peers: The ranks that plan at the same time.

    Raises:
        BudgetError: A fraction is asked for, and what Paddle's own plan holds is not known.
    """
    if not asked:
        return 0
    if isinstance(asked, int):
        return min(gather(peers, "memory budgets", asked))
    held = max(gather(peers, "what Paddle's own plan holds", stock_peak_bytes(program, cost) or 0))
    if not held:
        raise BudgetError(f"memory_budget {asked:g} of what Paddle's own plan holds: that is not known, its step cannot be simulated; "
                          "give bytes, such as 70GB")  # fmt: skip
    return int(asked * held)


def peak_bytes(planned: Program, cost: Costs, target: Target = GPU) -> int | None:
    """Device bytes of a plan at its peak on a GPU, however fast its host; None where the rank cannot be simulated."""
    try:
        return gpu_peak(planned, cost, target)
    except PlanError:
        return None


def bytes_over(planned: Program, budget: int, cost: Costs, peers: Peers | None = None) -> list[int]:
    """By how much each rank exceeds the budget on a GPU; 0 where it is not known to."""
    peak = peak_bytes(planned, cost) if planned.jobs else None
    return gather(peers, "bytes over the budget", max(0, peak - budget) if peak is not None else 0)


def bytes_over_in_step(planned: Program, budget: int, cost: Costs, peers: Peers | None, stands_for: dict[int, int]) -> list[int]:
    """By how much each rank exceeds the budget on a GPU, by itself or in the step of all: what a send reads is held for longer where the
    receiver is late."""
    alone = bytes_over(planned, budget, cost, peers)
    plans = plans_of_stages(planned, peers, stands_for)
    said = gather(peers, "peaks in the step", _Peaks(_peaks_in_step(plans, cost, stands_for)))[0].by_rank if stands_for else {}
    return [max(over, said.get(stands_for.get(rank, rank), 0) - budget) for rank, over in enumerate(alone)]


class _Peaks(msgspec.Struct, frozen=True):
    """What rank 0 simulated: bytes of those ranks that stand for all; nothing where the step would never end."""

    by_rank: dict[int, int]


def _peaks_in_step(plans: Sequence[Program], cost: Costs, stands_for: dict[int, int]) -> dict[int, int]:
    with suppress(PlanError):
        found = simulate(plans, cost, Options.of(GPU, stands_for=stands_for), target=GPU) if plans else None
        return {rank.rank: rank.peak_bytes for rank in found.ranks} if found else {}
    return {}


def stock_peak_bytes(program: Program, cost: Costs) -> int | None:
    """The same of Paddle's own plan of a captured program, run by Paddle's own jobs."""
    return peak_bytes(stock_plan(program, cost), cost, with_paddles_jobs(GPU))


def say_budget(planned: Program, passes: Sequence[Pass], reports: list[PassReport], budget: int, peak: int | None) -> list[PassReport]:
    """The reports, with the peak of the whole plan on a GPU against the budget in that of the last pass which follows one.

    Args:
        planned: A plan that keeps its budget, or cannot be simulated.
        passes: Those that made it.
        reports: What they say.
        budget: In bytes; 0 for none.
        peak: Of the plan on a GPU, None where it is not known.
    """
    if not budget or not planned.jobs:
        return reports
    asked = f"memory_budget {size(budget)}"
    if peak is None:
        line = f"{asked}: what a GPU holds is not known, the rank cannot be simulated; `interlace check` says where it stands"
    else:
        line = f"{asked}: on a GPU the plan holds {size(peak)} at most, however fast its host"
    ran = {report.name for report in reports}
    name = next((each.name for each in reversed(passes) if each.name in ran and each.follows_budget), reports[-1].name)
    return [_with(report, line, peak is not None) if report.name == name else report for report in reports]


def _with(report: PassReport, line: str, holds: bool) -> PassReport:
    if holds:
        return msgspec.structs.replace(report, changed=(line, *report.changed))
    return msgspec.structs.replace(report, declined=(line, *report.declined))
