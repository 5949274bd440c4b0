"""Whether a planned step keeps its memory budget on the place where the host runs ahead."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from interlace.cost_model import Costs
from interlace.errors import BudgetError, PlanError
from interlace.ir import Program
from interlace.passes.base import Pass
from interlace.passes.pipeline import PassReport
from interlace.scheduler.memory.throttle import gpu_peak
from interlace.units import size


def bytes_over(planned: Program, passes: Sequence[Pass], cost: Costs) -> int:
    """By how much the plan exceeds `memory_budget` on a GPU; 0 without a budget, or where that is not known.

    The offload planner keeps the budget for the order of operations; streams and waits of the host are decided after it.
    """
    budget = memory_budget(passes)
    peak = _peak(planned, cost) if budget and planned.jobs else None
    return max(0, peak - budget) if peak is not None else 0


def say_budget(planned: Program, passes: Sequence[Pass], reports: list[PassReport], cost: Costs) -> list[PassReport]:
    """The reports, with the peak of the whole plan on a GPU against `memory_budget` in that of the last pass which was given one.

    Raises:
        BudgetError: The peak exceeds the budget; the message has the bytes, and what to do.
    """
    budget = memory_budget(passes)
    if not budget or not planned.jobs:
        return reports
    asked, peak = f"memory_budget {size(budget)}", _peak(planned, cost)
    if peak is None:
        line = f"{asked}: what a GPU holds is not known, the rank cannot be simulated; `interlace check` says where it stands"
    elif peak > budget:
        raise BudgetError(f"rank {planned.rank}, stage {planned.pipeline.stage}: {asked} ({budget} bytes): on a GPU the plan holds "
                        f"{size(peak)}, of which side streams hold {size(peak - budget)}, however much is moved or recomputed; "
                        f"ask for {peak} bytes, or "
                        "lower run_ahead_bytes of throttle_host")  # fmt: skip
    else:
        line = f"{asked}: on a GPU the plan holds {size(peak)} at most, however fast its host"
    ran = {report.name for report in reports}
    name = next((each.name for each in reversed(passes) if each.name in ran and getattr(each, "memory_budget", None)), reports[-1].name)
    return [_with(report, line, peak is not None) if report.name == name else report for report in reports]


def memory_budget(passes: Sequence[Pass]) -> int:
    """Device bytes that a rank is to stay under, the least that a pass was given; 0 without a budget."""
    return min((budget for each in passes if (budget := getattr(each, "memory_budget", None))), default=0)


def _peak(planned: Program, cost: Costs) -> int | None:
    try:
        return gpu_peak(planned, cost)
    except PlanError:
        return None


def _with(report: PassReport, line: str, holds: bool) -> PassReport:
    if holds:
        return msgspec.structs.replace(report, changed=(line, *report.changed))
    return msgspec.structs.replace(report, declined=(line, *report.declined))
