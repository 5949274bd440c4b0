"""The durations and budgets that planning needs, and their merging over ranks that must decide alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from interlace.cost_model import Costs
from interlace.errors import PlanError
from interlace.ir import Op, Program, Value
from interlace.scheduler.offload.saved_values import find_candidates

COPY_OUT, COPY_BACK = "pd_op.memcpy_d2h", "pd_op.memcpy_h2d"
PINNED = {"dst_place_type": 1}
"""Attributes of both copies; lowering builds the form that the device needs."""


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Input of planning besides the program and the options.

    Attributes:
        op_ns: Operation id -> duration.
        out_ns, back_ns: Bytes -> duration of a copy to and from the host; None where copies were not measured: copies back are then
            issued immediately before their readers.
        memory_budget: Limit of this rank's live device bytes, None without one.
    """

    op_ns: dict[int, int]
    out_ns: dict[int, int] | None = None
    back_ns: dict[int, int] | None = None
    memory_budget: int | None = None


def measure(program: Program, cost: Costs, memory_budget: int | None = None) -> Measured:
    """Durations by a cost model: of the program's operations, and of copies of every size that could be moved."""
    values = {value.id: value for value in program.values}
    groups, cost = {group.id: group for group in program.groups}, cost.for_world(program.world)
    op_ns = {op.id: cost.op_time(op, values, groups).dur_ns for op in program.ops}
    moved = {saved.size_bytes: values[saved.value] for saved in find_candidates(program).saved}
    return Measured(op_ns, copy_times(moved, cost, COPY_OUT), copy_times(moved, cost, COPY_BACK), memory_budget)


def copy_times(moved: Mapping[int, Value], cost: Costs, name: str) -> dict[int, int] | None:
    """Durations of copies of these sizes, one way; None where one was not measured."""
    found = {}
    for size_bytes, value in sorted(moved.items()):
        host = msgspec.structs.replace(value, id=value.id + 1, storage=value.id + 1, memory="pinned")
        pair = (value.id, host.id) if name == COPY_OUT else (host.id, value.id)
        op = Op(-1, name, pair[:1], pair[1:], "forward", attrs=dict(PINNED))
        estimate = cost.op_time(op, {value.id: value, host.id: host}, {})
        if estimate.how == "unknown":
            return None
        found[size_bytes] = estimate.dur_ns
    return found


def agree(measured: Sequence[Measured]) -> Measured:
    """Merge the input of ranks that must decide alike: the longest durations and the smallest budget.

    Copies count as measured only where every rank measured them.

    Raises:
        PlanError: The ranks time different operations or sizes.

    >>> agree([Measured({1: 5}, memory_budget=90), Measured({1: 7}, memory_budget=80)])
    Measured(op_ns={1: 7}, out_ns=None, back_ns=None, memory_budget=80)
    """
    budgets = [m.memory_budget for m in measured if m.memory_budget is not None]
    return Measured(
        _slowest([m.op_ns for m in measured], "operations") or {},
        _slowest([m.out_ns for m in measured], "sizes of copies out"),
        _slowest([m.back_ns for m in measured], "sizes of copies back"),
        min(budgets, default=None),
    )


def _slowest(tables: Sequence[Mapping[int, int] | None], what: str) -> dict[int, int] | None:
    known = [table for table in tables if table is not None]
    if len(known) < len(tables):
        return None
    every = set[int]().union(*known)
    different = sorted(key for key in every if any(key not in table for table in known))
    if different:
        raise PlanError(
            f"ranks of one group time different {what}: {different[:8]} are not known to all; merge only ranks that run the same program"
        )
    return {key: max(table[key] for table in known) for key in sorted(known[0])}
