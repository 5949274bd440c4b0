"""Paddle's baseline, with which every report compares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from interlace.cost_model import Costs
from interlace.ir import Op, Program
from interlace.passes.pipeline import built_in, ordered
from interlace.planning.variants import baseline

BASELINE = "Paddle's baseline"
"""Its name in reports."""
BASELINE_ORDER: Mapping[str, Any] = {"split_backward": "off", "overlap_column_backward": "off", "schedule_1f1b": {"interleave": "off"}}
"""Options that keep jobs and their operations in Paddle's baseline order, whatever other passes do. To run everything as Paddle itself
does, use the preset `baseline`."""


def is_paddles_order(captured: Program, planned: Program, costs: Costs) -> bool:
    """Whether a plan runs the operations that Paddle built, unchanged and in Paddle's baseline order. Streams, events, waits of the host
    and operations that end lifetimes do not count, as they have no effect on a CPU rank."""
    if not _has_all(planned, captured.ops):  # no pass of the baseline changes any of these
        return False
    baseline = baseline_plan(captured, costs)
    if not _has_all(planned, baseline.ops):
        return False
    plain = {op.id for op in baseline.ops}
    orders = [[item for job in program.jobs for item in job.items if item[0] in plain] for program in (baseline, planned)]
    return orders[0] == orders[1]


def _has_all(program: Program, ops: Iterable[Op]) -> bool:
    """Whether a program has these operations, apart from their streams."""
    own = {op.id: op for op in program.ops}
    return all(op.id in own and _without_stream(own[op.id]) == _without_stream(op) for op in ops)


def _without_stream(op: Op) -> Op:
    return msgspec.structs.replace(op, stream="", priority=0)


def refusal_of(programs: Iterable[Program]) -> str:
    """Why Paddle cannot run a baseline of these programs, so that it is only simulated; empty if it can."""
    return next((why for program in programs for why in program.refusals), "")


def baseline_plan(program: Program, costs: Costs) -> Program:
    """A captured program, planned as Paddle itself would run it (preset `baseline`); a program that has jobs is returned as it is. Raises
    PassError as `Pipeline.run`."""
    if program.jobs:
        return program
    passes = (baseline(kind()) for kind in built_in() if kind.is_default)
    return ordered(tuple(each for each in passes if each is not None)).run(program, costs)[0]
