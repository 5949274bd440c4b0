"""Whether a planned step keeps its memory budget on the place where the host runs ahead."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from interlace.cost_model import Costs
from interlace.errors import PlanError
from interlace.ir import Program
from interlace.passes.base import Pass
from interlace.passes.offload_activations import OffloadActivations
from interlace.passes.pipeline import PassReport
from interlace.scheduler.hold import place_peak

GIB = 1 << 30


def say_budget(planned: Program, passes: Sequence[Pass], reports: list[PassReport], cost: Costs) -> list[PassReport]:
    """The reports, that of `offload-activations` with what the whole plan holds on the GPU place against `memory_budget`.

    The planner keeps a budget for the order of operations; streams and the host are decided behind it.
    """
    offload = next((each for each in passes if isinstance(each, OffloadActivations) and each.memory_budget), None)
    if offload is None or not planned.jobs:
        return reports
    assert offload.memory_budget
    budget = offload.memory_budget
    asked = f"memory_budget {budget / GIB:.3f} GiB"
    try:
        peak = place_peak(planned, cost)
    except PlanError as error:
        lines, peak = f"{asked}: what the GPU place holds is not known, the rank cannot be simulated ({error})", budget + 1
    else:
        lines = f"{asked}: on the GPU place the plan holds {peak / GIB:.3f} GiB at most, however fast its host"
        if peak > budget:
            lines += (f"; that is over it by {peak - budget} bytes, which side streams hold: ask for memory_budget "
                      f"{2 * budget - peak}, or lower run_ahead_bytes of assign-streams")  # fmt: skip
    return [_with(report, lines, peak <= budget) if report.name == offload.name else report for report in reports]


def _with(report: PassReport, line: str, holds: bool) -> PassReport:
    if holds:
        return msgspec.structs.replace(report, changed=(line, *report.changed))
    return msgspec.structs.replace(report, declined=(line, *report.declined))
