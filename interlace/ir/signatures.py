"""What ranks must agree on when they communicate."""

from __future__ import annotations

from collections.abc import Mapping

from interlace.ir.kinds import is_p2p
from interlace.ir.operation_kinds import UNEVEN
from interlace.ir.program import Op, Value

ROOTS = ("root", "root_id", "reduce_type")
"""Attributes that must be equal on all ranks of a call."""
Signature = tuple[str, int, str, str]


def signature(op: Op, values: Mapping[int, Value]) -> Signature:
    """Kind, bytes (-1: unknown until run time), dtype, root and reduction of a call.

    In a plan, ranks must also agree on which call of the captured program it is, and on the micro-batch (`skeleton.Calls`).
    """
    data = values.get(op.operands[0] if op.operands else op.results[0] if op.results else -1)
    kind = op.kind if not is_p2p(op) else "partial_p2p" if op.kind.startswith("partial") else "p2p"
    more = " ".join(f"{name}={op.attrs[name]}" for name in ROOTS if name in op.attrs)
    size = -1 if kind in UNEVEN else data.size_bytes if data else 0
    return kind, size, data.dtype if data else "", more


def agree(x: Signature, y: Signature) -> bool:
    """Whether two calls match; sizes that are unknown until run time match any."""
    return x == y or (x[0] == y[0] and x[2:] == y[2:] and -1 in (x[1], y[1]))
