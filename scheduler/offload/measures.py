"""The durations and limits that planning needs, merged over ranks that must make the same decision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from interlace.cost_model import Costs
from interlace.cost_model.base import tables_of
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
        memory_limit: Limit of this rank's live device bytes; None without one.
    """

    op_ns: dict[int, int]
    out_ns: dict[int, int] | None = None
    back_ns: dict[int, int] | None = None
    memory_limit: int | None = None


def measure(program: Program, cost: Costs, memory_limit: int | None = None) -> Measured:
    """Durations by a cost model: of the program's operations, and of copies of every activation that could be moved."""
    values, _ = tables_of(program)
    return durations(program, cost, (values[saved.value] for saved in find_candidates(program).saved), memory_limit)


def durations(program: Program, cost: Costs, moved: Iterable[Value], memory_limit: int | None) -> Measured:
    """Durations by a cost model: of the program's operations, and of copies of some values."""
    tables, cost = tables_of(program), cost.for_world(program.world)
    op_ns, sizes = {op.id: cost.op_time(op, *tables).dur_ns for op in program.ops}, {value.size_bytes: value for value in moved}
    out_ns, back_ns = (_copy_times(sizes, cost, way) for way in (COPY_OUT, COPY_BACK))
    is_known = out_ns is not None and back_ns is not None
    return Measured(op_ns, out_ns, back_ns, memory_limit) if is_known else Measured(op_ns, memory_limit=memory_limit)


def _copy_times(moved: Mapping[int, Value], cost: Costs, name: str) -> dict[int, int] | None:
    """Bytes -> duration of a copy in one direction, in nanoseconds; None if one of the sizes was not measured."""
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
    """Merge the input of ranks that must decide alike: the longest durations and the smallest limit. Copies count as measured only where
    every rank measured them. Raises PlanError where the ranks time different operations or sizes.

    >>> agree([Measured({1: 5}, memory_limit=90), Measured({1: 7}, memory_limit=80)])
    Measured(op_ns={1: 7}, out_ns=None, back_ns=None, memory_limit=80)
    """
    limits = [m.memory_limit for m in measured if m.memory_limit is not None]
    return Measured(
        _slowest([m.op_ns for m in measured], "operations") or {},
        _slowest([m.out_ns for m in measured], "sizes of copies out"),
        _slowest([m.back_ns for m in measured], "sizes of copies back"),
        min(limits, default=None),
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
