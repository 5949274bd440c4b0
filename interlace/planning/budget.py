"""The peak memory of a rank on a GPU, where the host runs ahead, compared with its budget."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from interlace.cost_model import Costs
from interlace.errors import PlanError
from interlace.ir import Program
from interlace.ir.remarks import remark
from interlace.ir.target import GPU, Target, with_paddles_jobs
from interlace.passes.base import Pass
from interlace.passes.pipeline import PassReport
from interlace.planning.baseline import baseline_plan
from interlace.scheduler.host_waits.throttle import gpu_peak


def peak_bytes(planned: Program, cost: Costs, target: Target = GPU) -> int | None:
    """Peak device bytes of a plan on a GPU, however fast its host; None if the rank cannot be simulated."""
    try:
        return gpu_peak(planned, cost, target)
    except PlanError:
        return None


def baseline_peak_bytes(program: Program, cost: Costs) -> int | None:
    """Peak device bytes of Paddle's baseline of a captured program, as run by Paddle's own jobs; None if it cannot be simulated."""
    return peak_bytes(baseline_plan(program, cost), cost, with_paddles_jobs(GPU))


def say_budget(planned: Program, passes: Sequence[Pass], reports: list[PassReport], budget: int, peak: int | None) -> list[PassReport]:
    """Add a remark that compares the plan's peak on a GPU with the budget, or says that the peak is not known (None), to the report of the
    last pass that follows a budget. Returns the reports unchanged without a budget (0)."""
    if not budget or not planned.jobs:
        return reports
    ran = {report.name for report in reports}
    name = next((each.name for each in reversed(passes) if each.name in ran and each.follows_budget), reports[-1].name)
    said = (
        remark("declined", "peak-not-known", budget_bytes=budget).of(name)
        if peak is None
        else remark("analysis", "budget-kept", budget_bytes=budget, peak_bytes=peak).of(name)
    )
    return [msgspec.structs.replace(report, remarks=(said, *report.remarks)) if report.name == name else report for report in reports]
