"""Sums and other reductions of equal-shaped arrays, in one fixed order and for every dtype Paddle has. No Paddle here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from interlace.errors import TransportError

Array = npt.NDArray[Any]

REDUCE_OPS = ("sum", "max", "min", "prod", "avg")
_WIDENED = {"float16", "bfloat16"}
_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}
_COMBINE_BOOL: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.logical_or,
    "max": np.logical_or,
    "prod": np.logical_and,
    "min": np.logical_and,
}


def bfloat16_to_float32(bits: Array) -> Array:
    """Widen bfloat16 bits (uint16, as Paddle returns them) to float32; exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: Array) -> Array:
    """Round float32 to bfloat16 bits (uint16), to nearest, ties to even; NaN stays NaN, values that are too large become infinite."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet_nan, rounded >> np.uint32(16)).astype(np.uint16)


def reduce_arrays(parts: Sequence[Array], op: str, dtype: str) -> Array:
    """Reduce `parts` (equal shapes, equal dtype) from first to last; the result is a fresh array of that dtype.

    `dtype` is Paddle's name of the element type; "bfloat16" arrays are uint16 bits. float16 and bfloat16 are
    accumulated in float32 and rounded once. "avg" of integers truncates towards zero, as in NCCL. For bool, sum and
    max mean "or", prod and min mean "and".

    Raises TransportError if the operation is not defined for the dtype (float8, max of complex, avg of bool).
    """
    combine = _combiner(op, dtype)
    total = widened(parts[0], dtype)
    for part in parts[1:]:
        total = combine(total, widened(part, dtype))
    if op == "avg":
        total = _divide(total, len(parts))
    return narrowed(total, dtype)


def _combiner(op: str, dtype: str) -> Callable[[Any, Any], Any]:
    table = _COMBINE_BOOL if dtype == "bool" else _COMBINE
    no_order = dtype.startswith("complex") and op in ("max", "min")
    if op not in table or no_order or dtype.startswith("float8"):
        raise TransportError(
            f"cannot reduce {dtype} values by {op!r}: expected one of {', '.join(REDUCE_OPS)} on a type for which it is "
            "defined; cast the value before the collective"
        )
    return table[op]


def widened(part: Array, dtype: str) -> Array:
    """The array in the type in which it is accumulated; it may share memory with `part`."""
    if dtype == "bfloat16":
        return bfloat16_to_float32(part)
    return part.astype(np.float32 if dtype in _WIDENED else part.dtype)


def narrowed(total: Array, dtype: str) -> Array:
    """An accumulated array, converted back to `dtype` (bfloat16 as uint16 bits)."""
    if dtype == "bfloat16":
        return float32_to_bfloat16(total)
    return np.asarray(total, dtype=np.dtype(dtype))


def _divide(total: Array, count: int) -> Array:
    if np.issubdtype(total.dtype, np.integer):
        sign = np.sign(total)
        return np.asarray(sign * (np.abs(total) // total.dtype.type(count)), dtype=total.dtype)
    return np.asarray(total / total.dtype.type(count))
