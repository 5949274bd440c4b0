"""Paddle's baseline: what every report compares with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from interlace.cost_model import Costs
from interlace.ir import Op, Program
from interlace.passes.pipeline import built_in, ordered
from interlace.planning.variants import baseline

BASELINE = "Paddle's baseline"
"""What reports call it."""
BASELINE_ORDER: Mapping[str, Any] = {"split_backward": "off", "overlap_column_backward": "off", "schedule_1f1b": {"interleave": "off"}}
"""Options with which jobs and their operations keep Paddle's baseline order, whatever other passes do. What runs them as Paddle itself
does is the preset `baseline`."""


def is_paddles_order(captured: Program, planned: Program, costs: Costs) -> bool:
    """Whether a plan runs the operations that Paddle built, unchanged and in Paddle's baseline order; streams, events, waits of the host
    and operations that end lifetimes, which a CPU rank does not see, aside."""
    if not _has_all(planned, captured.ops):  # none of which a pass of the baseline changes
        return False
    baseline = baseline_plan(captured, costs)
    if not _has_all(planned, baseline.ops):
        return False
    plain = {op.id for op in baseline.ops}
    orders = [[item for job in program.jobs for item in job.items if item[0] in plain] for program in (baseline, planned)]
    return orders[0] == orders[1]


def _has_all(program: Program, ops: Iterable[Op]) -> bool:
    """Whether a program has these operations, streams aside."""
    own = {op.id: op for op in program.ops}
    return all(op.id in own and _without_stream(own[op.id]) == _without_stream(op) for op in ops)


def _without_stream(op: Op) -> Op:
    return msgspec.structs.replace(op, stream="", priority=0)


def refusal_of(programs: Iterable[Program]) -> str:
    """Why Paddle runs no baseline of these programs, so that it is simulated only; empty where it does."""
    return next((why for program in programs for why in program.refusals), "")


def baseline_plan(program: Program, costs: Costs) -> Program:
    """A captured program as Paddle itself would run it, as the preset `baseline` has it; one that has jobs stays as it is. Raises PassError
    as `Pipeline.run`."""
    if program.jobs:
        return program
    passes = (baseline(kind()) for kind in built_in() if kind.is_default)
    return ordered(tuple(each for each in passes if each is not None)).run(program, costs)[0]
