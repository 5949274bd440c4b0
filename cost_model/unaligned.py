"""Matrix products with rows that are no multiple of 16 bytes in memory, such as those over a vocabulary that nobody padded.

Kernels of matrix units load 16 bytes at a time. If a row of an operand or of the result is no multiple of that, other kernels run, which
take 2.7 to 7 times as long with bfloat16 on an H200 and 2 to 3 times with float32, nearly independently of the size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import gcd
from statistics import median

from interlace.cost_model.profile import OpSample, Unaligned
from interlace.cost_model.work import Part, Transposed, dims_of, gemm_part, transposed_of
from interlace.grouping import grouped
from interlace.ir.program import DTYPE_BYTES

LOADED = 16
"""Bytes that kernels load at a time if all rows are multiples of it."""
Form = tuple[str, int, Transposed]
"""Dtype, largest power of two that divides the bytes of all rows, and which operands are transposed in memory."""


def form_of(dtype: str, dims: Mapping[str, int]) -> Form:
    """The form of a product.

    >>> form_of("bfloat16", {"batch": 1, "m": 8, "n": 30522, "k": 64}), form_of("bfloat16", {"batch": 1, "m": 8, "n": 64, "k": 64})
    (('bfloat16', 4, (0, 0)), ('bfloat16', 16, (0, 0)))
    """
    transposed, width = transposed_of(dims), DTYPE_BYTES.get(dtype, 4)
    return dtype, gcd(LOADED, *(width * dims[name] for name in _row_dims(transposed))), transposed


def is_unaligned(dtype: str, dims: Mapping[str, int]) -> bool:
    """Whether this is a product and a row of its matrices is no multiple of 16 bytes."""
    return "m" in dims and form_of(dtype, dims)[1] < LOADED


def rounded(part: Part) -> Part:
    """The product with all rows rounded up to multiples of 16 bytes."""
    dims, step = dict(part.dims), max(1, LOADED // DTYPE_BYTES.get(part.dtype, 4))
    _, _, transposed = form_of(part.dtype, dims)
    dims |= {name: -(-dims[name] // step) * step for name in _row_dims(transposed)}
    return gemm_part(dims["batch"], dims["m"], dims["n"], dims["k"], part.dtype, transposed=(bool(transposed[0]), bool(transposed[1])))


def slowdowns(samples: Iterable[OpSample]) -> tuple[Unaligned, ...]:
    """What measured products say about each form: those with unaligned rows, against those with the same sizes rounded up. Products whose
    rounded sizes were not measured are left out."""
    products = {(each.dtype, dims_of(**each.dims)): each for each in samples if each.kind == "gemm"}
    ratios: list[tuple[Form, float]] = []
    for (dtype, dims), sample in products.items():
        if is_unaligned(dtype, sample.dims):
            other = products.get((dtype, rounded(Part("gemm", "gemm", dtype, dims, 0, 0)).dims))
            ratios += [(form_of(dtype, sample.dims), sample.dur_ns / other.dur_ns)] if other is not None else []
    rows = []
    for (dtype, size, (is_x, is_y)), found in sorted(grouped(ratios).items()):
        middle, least, most = (round(each, 3) for each in (median(found), min(found), max(found)))
        rows.append(Unaligned(dtype, size, middle, least, most, is_x, is_y, len(found)))
    return tuple(rows)


def _row_dims(transposed: Transposed) -> tuple[str, str, str]:
    """The sizes of a row of each operand and of the result."""
    return "m" if transposed[0] else "k", "k" if transposed[1] else "n", "n"
