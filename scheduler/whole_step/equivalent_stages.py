"""Stages that do the same work, so that the costs of their jobs need to be computed on only one of them."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from interlace.cost_model import Costs
from interlace.cost_model.base import tables_of
from interlace.ir import ABSENT, Program
from interlace.ir.kinds import is_boundary, is_comm
from interlace.scheduler.recompute.copies import COPY, ORIGINAL


def work_key(program: Program, cost: Costs) -> str:
    """A key that is equal for programs whose jobs cost the same: the same operations in order, on values with the same types and the same
    sharing of memory, with communication that takes the same time. Names and numbers of values, layers, parameters, streams and groups do
    not matter. O(ops)."""
    values, groups = tables_of(program)
    seen: dict[tuple[str, Any], int] = {}

    def number(kind: str, name: Any) -> int:
        return seen.setdefault((kind, name), len(seen))

    lines = []
    for op in program.ops:
        if is_boundary(op):
            continue
        attrs = sorted(
            (name, number("recomputation", each) if name in (ORIGINAL, COPY) else each)
            for name, each in op.attrs.items()
            if name != "ring_id"
        )
        took = (cost.category(op, values, groups), cost.op_time(op, values, groups).dur_ns) if is_comm(op) else ()
        touched = [value if value == ABSENT else number("value", value) for value in (*op.operands, *op.results)]
        lines.append(
            (
                op.name,
                op.role,
                op.chunk,
                touched,
                len(op.results),
                attrs,
                took,
                number("group", op.group),
                number("stream", op.stream),
                op.priority,
                op.no_buffer,
                op.inplace,
                op.views,
                op.num_blocks,
            )
        )
    types = []
    for kind, name in list(seen):
        if kind == "value":
            value = values[name]
            types.append((value.shape, value.dtype, number("storage", value.storage), value.persistable, value.memory, value.elements))
    return hashlib.sha256(msgspec.msgpack.encode((lines, types), enc_hook=str)).hexdigest()[:32]
