"""The kernels of an operation and their sizes, computed from the operation's shapes alone.

`CostModel` turns them into nanoseconds. Shapes follow Paddle: matmul takes `[..., m, k]` and `[..., k, n]` (before transposes), attention
`[batch, seq, heads, head_dim]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from msgspec.structs import replace as replace_fields

from interlace.ir.kinds import HOST_PLACE, is_copy, is_p2p, is_send
from interlace.ir.operation_kinds import (
    ATTENTIONS,
    COLLECTIVES,
    EMBEDDINGS,
    GEMMS,
    NORMS,
    PICKS,
    VIEWS,
    Carried,
    forward_kind,
    is_free,
    memory_family,
)
from interlace.ir.program import ABSENT, DTYPE_BYTES, Op, Value

Values = Mapping[int, Value]
Dims = tuple[tuple[str, int], ...]
Transposed = tuple[int, ...]
"""Whether a product's first and second operand are transposed in memory."""

PRODUCTS = ("gemm", "attention")
"""Families of kernels that multiply matrices."""


@dataclass(frozen=True, slots=True)
class Part:
    """One kernel.

    Attributes:
        kind: Kind of sample to look up (`gemm`, `attention_grad`, `gelu`, `all_reduce`, `d2h`, ...).
        family: `gemm`, `attention`, a memory family, `comm`, `p2p`, `copy`, or `unknown`.
        dims: Sorted by name, as in `OpSample.dims`.
        flops: FLOPs; 0 if memory traffic determines the time.
        size_bytes: Bytes read and written; for a collective or copy, the size of its tensor.
    """

    kind: str
    family: str
    dtype: str
    dims: Dims
    flops: int
    size_bytes: int

    @property
    def result_elements(self) -> int:
        """Number of elements of a product's result."""
        return prod(size for name, size in self.dims if name in ("batch", "m", "n"))


@dataclass(frozen=True, slots=True)
class Work:
    """Kernels of one operation, run one after the other; a free operation has none.

    Attributes:
        parts: The kernels.
        unknown: Why the parts are only a lower bound; empty if they are complete.
        assumed: What was assumed: shapes that are known only at run time, from those of the operands, or the work of nested blocks; empty
            if nothing was.
    """

    parts: tuple[Part, ...] = ()
    unknown: str = ""
    assumed: str = ""


NOTHING = Work()
_ROW_WISE = ("norm", "norm_grad", "softmax", "softmax_grad")


def names_of_dims(kind: str) -> tuple[str, ...]:
    """Names of the dims of a kind's kernels, except `TRANSPOSES`, which products may also have.

    >>> names_of_dims("softmax_grad"), names_of_dims("gelu"), names_of_dims("gemm_batched")
    (('rows', 'cols'), ('elements',), ('batch', 'm', 'n', 'k'))
    """
    if kind in ("gemm", "gemm_batched"):
        return "batch", "m", "n", "k"
    if kind in ("attention", "attention_grad"):
        return "batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim", "causal"
    return ("rows", "cols") if memory_family(kind) in _ROW_WISE else ("elements",)


def dims_of(**sizes: int) -> Dims:
    """Sizes by name, sorted: `dims_of(n=2, m=1) == (("m", 1), ("n", 2))`."""
    return tuple(sorted(sizes.items()))


def transposed_of(dims: Mapping[str, int]) -> Transposed:
    """Which operands of a product are transposed; none for other kinds.

    >>> transposed_of({"batch": 1, "m": 8, "n": 8, "k": 64, "transpose_x": 1})
    (1, 0)
    """
    return tuple(dims.get(name, 0) for name in TRANSPOSES)


def flops_of(kind: str, dims: Mapping[str, int]) -> int:
    """FLOPs of a matrix product, or of attention: two products in forward, five in backward, over all pairs of positions, or half of them
    if causal; 0 for other kinds."""
    if "m" in dims:
        return 2 * dims["batch"] * dims["m"] * dims["n"] * dims["k"]
    if "seq_q" in dims:
        pairs = dims["batch"] * dims["heads"] * dims["seq_q"] * dims["seq_k"] // (2 if dims["causal"] else 1)
        return (10 if kind.endswith("_grad") else 4) * pairs * dims["head_dim"]
    return 0


def work_of(op: Op, values: Values) -> Work:
    """The kernels of an operation. O(operands)."""
    if is_free(op) or _is_view(op) or op.attrs.get("place") == HOST_PLACE:
        return NOTHING
    if op.num_blocks:
        sized = {**values, **_assumed(op, values)}
        return Work((_memory(op, op.kind, "unknown", sized),), assumed="control flow: blocks counted as one pass over what goes in and out")
    assumed = _assumed(op, values)
    work = _work_of_known(op, {**values, **assumed} if assumed else values)
    if not assumed:
        return work
    shapes = ", ".join(f"{list(values[v].shape)} as {list(value.shape)}" for v, value in assumed.items())
    return replace(work, assumed=f"known only at run time: {shapes}")


def products_of(op: Op, values: Values) -> tuple[Part, ...]:
    """The kernels of an operation that multiply matrices or attend."""
    return tuple(part for part in work_of(op, values).parts if part.family in PRODUCTS and part.flops)


def _work_of_known(op: Op, values: Values) -> Work:
    kind = op.kind
    base, grad = forward_kind(kind)
    if kind in COLLECTIVES or is_p2p(op):
        return _communication(op, values)
    if is_copy(op):
        return _copy(op, values)
    if base in GEMMS:
        return _gemm(op, base, grad, values)
    if base in ATTENTIONS:
        return _attention(op, base, grad, values)
    if base in EMBEDDINGS:
        return _embedding(op, grad, values)
    family = memory_family(kind)
    if not family:
        return Work((_memory(op, kind, "unknown", values),), unknown=f"kind {kind!r} is in no family of interlace/ir/operation_kinds.py")
    return Work((_memory(op, _sample_kind(op, values), family, values),))


def _assumed(op: Op, values: Values) -> dict[int, Value]:
    """Values of unknown shape, given a shape with as many elements as the largest known operand (one element if none is known), which is
    assumed to be their upper bound. For norms the last dim does not count, as statistics have one element per row.
    """
    unknown = [v for v in dict.fromkeys((*op.operands, *op.results)) if v != ABSENT and values[v].size_bytes < 0]
    if not unknown:
        return {}
    known = [values[v].shape for v in op.operands if v != ABSENT and v not in unknown and values[v].dtype not in ("vector", "null")]
    largest = max(known, key=prod, default=())
    if forward_kind(op.kind)[0] in NORMS:
        largest = largest[:-1]
    return {v: _with_shapes(values[v], prod(largest)) for v in unknown}


def _with_shapes(value: Value, elements: int) -> Value:
    if value.dtype == "vector":
        return replace_fields(value, elements=tuple(replace_fields(each, shape=_filled(each.shape, elements)) for each in value.elements))
    return replace_fields(value, shape=_filled(value.shape, elements))


def _filled(shape: tuple[int, ...], elements: int) -> tuple[int, ...]:
    """
    >>> _filled((-1, 4, -1), 32), _filled((-1,), 1), _filled((2,), 8)
    ((8, 4, 1), (1,), (2,))
    """
    left = max(1, elements // max(1, prod(dim for dim in shape if dim >= 0)))
    made = []
    for dim in shape:
        made.append(dim if dim >= 0 else left)
        left = 1 if dim < 0 else left
    return tuple(made)


def moved_bytes(op: Op, values: Values) -> int:
    """Bytes read and written. An operand that is read twice counts once; one whose contents are not read, only its shape, not at all."""
    read = sum(values[v].size_bytes for v in op.reads)
    written = sum(values[v].size_bytes for v in op.results)
    if op.kind in PICKS and op.operands:
        picked = op.operands[-1 if op.kind == "embedding" else 0]
        read -= max(0, values[picked].size_bytes - written) if picked in op.reads else 0
    return read + written


def is_weight_gradient(op: Op) -> bool:
    """Whether a matrix product is dW = x^T dy (its operands are both activations, contracted over tokens)."""
    if op.kind == "fused_linear_param_grad_add" or op.attrs.get("left_out") == 0:  # one-sided: only the second operand's gradient
        return True
    return op.kind in GEMMS and op.role == "backward" and bool(op.attrs.get("transpose_x"))


def _is_view(op: Op) -> bool:
    base, _ = forward_kind(op.kind)
    return base in VIEWS and bool(op.views or (op.inplace and base in _RESHAPES))


_RESHAPES = frozenset({"reshape", "squeeze", "unsqueeze", "flatten", "view_shape", "view_dtype", "assign", "share_data"})


def _sample_kind(op: Op, values: Values) -> str:
    """The kind of sample for an operation. `add_` into a buffer that lives across steps is gradient accumulation, with kinds of its own,
    also for mixed dtypes."""
    if op.kind != "add" or not op.inplace or ABSENT in op.operands or not values[op.operands[0]].persistable:
        return op.kind
    dtypes = {values[v].dtype for v in op.operands}
    return "grad_accumulate" if len(dtypes) == 1 else "grad_accumulate_mixed"


def _memory(op: Op, kind: str, family: str, values: Values) -> Part:
    tensors = [values[v] for v in (*op.operands, *op.results) if v != ABSENT and values[v].dtype not in ("vector", "null")]
    vectors = [values[v].elements[0] for v in (*op.operands, *op.results) if v != ABSENT and values[v].dtype == "vector"]
    first = (tensors + vectors)[0] if tensors or vectors else None
    if family in _ROW_WISE and tensors:
        first = max(tensors, key=lambda tensor: prod(tensor.shape))  # the gradient of a loss may have the classes first
    shape, dtype = (first.shape, first.dtype) if first else ((), "")
    if family in _ROW_WISE and shape:
        dims = dims_of(rows=prod(shape[:-1]), cols=shape[-1])
    else:
        dims = dims_of(elements=prod(shape))
    return Part(kind, family, dtype, dims, 0, moved_bytes(op, values))


def _embedding(op: Op, grad: bool, values: Values) -> Work:
    """One kernel that reads rows of the table; or for the gradient two: the sums of gradients in its rows, and zeros for the whole table,
    which may be much larger. The first gives the operation its category."""
    read = [values[v] for v in op.operands if v != ABSENT]
    ids = next((value for value in read if "int" in value.dtype), None)
    made = values[op.results[0]] if op.results and op.results[0] != ABSENT else None
    if ids is None or made is None:
        return Work((_memory(op, op.kind, "move", values),), unknown="expected row numbers, a table and a result")
    found = read[-1] if grad else made  # the gradient of the rows, or the rows
    rows = min(prod(ids.shape), prod(found.shape[:-1]))  # row numbers of unknown shape
    if not grad:
        return Work((Part("embedding", "move", made.dtype, dims_of(elements=rows), 0, moved_bytes(op, values)),))
    zeros = Part("full", "elementwise", made.dtype, dims_of(elements=prod(made.shape)), 0, made.size_bytes)
    moved = rows * DTYPE_BYTES[ids.dtype] + 2 * found.size_bytes
    return Work((Part("embedding_grad", "move", made.dtype, dims_of(elements=rows), 0, moved), zeros))


# -- matrix products ------------------------------------------------------------------------------------------------

TRANSPOSES = ("transpose_x", "transpose_y")
"""Dims, with value 1, of products whose first or second operand is transposed in memory. With TF32 they matter: on the H200, a product
takes 1.24 to 1.6 times as long with the first operand transposed (batched ones 0.99 to 1.3), and 0.66 to 1.06 times with the second; with
bfloat16 the medians are 1.0."""
_GRADIENTS = {
    (False, False): ((False, True), (True, False)),
    (False, True): ((False, False), (True, False)),
    (True, False): ((False, True), (False, False)),
    (True, True): ((True, True), (True, True)),
}
"""Transposes of a product -> transposes of the products that compute the gradients of its two operands."""


def gemm_part(batch: int, m: int, n: int, k: int, dtype: str, out_bytes: int = 0, transposed: tuple[bool, bool] = (False, False)) -> Part:
    """`batch` products of [m, k] by [k, n]; `out_bytes` replaces the bytes of the result if it is read and written in another dtype.

    `transposed`: which operands are transposed in memory ([k, m] and [n, k]); only these get an entry in the dims.
    """
    width = DTYPE_BYTES.get(dtype, 4)
    size = width * batch * (m * k + k * n) + (out_bytes or width * batch * m * n)
    kind = "gemm" if batch == 1 else "gemm_batched"
    transposes = {name: 1 for name, is_transposed in zip(TRANSPOSES, transposed, strict=True) if is_transposed}
    dims = dims_of(batch=batch, m=m, n=n, k=k, **transposes)
    return Part(kind, "gemm", dtype, dims, flops_of(kind, dict(dims)), size)


def matmul_sizes(x: tuple[int, ...], y: tuple[int, ...], transpose_x: bool, transpose_y: bool) -> tuple[int, int, int, int]:
    """(batch, m, n, k) of a product; the batch dims of an untransposed left operand count as rows if the right one is a matrix.

    >>> matmul_sizes((2, 8, 32), (32, 48), False, False)
    (1, 16, 48, 32)
    >>> matmul_sizes((4, 8, 64), (4, 16, 64), False, True)
    (4, 8, 16, 64)
    """
    if len(x) < 2:
        x = (1, x[0] if x else 1)
        transpose_x = False
    if len(y) < 2:
        y = (y[0] if y else 1, 1)
        transpose_y = False
    m, k = (x[-1], x[-2]) if transpose_x else (x[-2], x[-1])
    n = y[-2] if transpose_y else y[-1]
    lead_x, lead_y = prod(x[:-2]), prod(y[:-2])
    if lead_y == 1 and not transpose_x:
        return 1, lead_x * m, n, k
    return max(lead_x, lead_y), m, n, k


def _gemm(op: Op, base: str, grad: bool, values: Values) -> Work:
    if op.kind == "fused_linear_param_grad_add":
        return _param_grad_add(op, values)
    first = 1 if base in ("addmm", "baddbmm") else 0
    if len(op.operands) < first + 2 or ABSENT in op.operands[first : first + 2]:
        return Work(unknown="expected two matrices as operands")
    x, y = (values[op.operands[place]] for place in (first, first + 1))
    turn_x, turn_y = (bool(op.attrs.get(a, op.attrs.get(b, False))) for a, b in (("transpose_x", "trans_x"), ("transpose_y", "trans_y")))
    batch, m, n, k = matmul_sizes(x.shape, y.shape, turn_x, turn_y)
    if not grad:
        return Work((gemm_part(batch, m, n, k, x.dtype, transposed=(turn_x, turn_y)),))
    given = [values[v].dtype != "null" for v in op.results[first : first + 2]]
    of_x, of_y = (k, m, n) if turn_x else (m, k, n), (n, k, m) if turn_y else (k, n, m)
    sides = zip(given, (of_x, of_y), _GRADIENTS[turn_x, turn_y], strict=False)
    return Work(tuple(gemm_part(batch, *sizes, x.dtype, transposed=transposed) for wanted, sizes, transposed in sides if wanted))


def _param_grad_add(op: Op, values: Values) -> Work:
    """`fused_linear_param_grad_add`: operands x, dOut, [dW so far], [dBias so far]; it adds to dW, which is float32 with master weights."""
    x, dout, dw = values[op.operands[0]], values[op.operands[1]], values[op.results[0]]
    tokens = prod(x.shape[:-1])
    sizes = (x.shape[-1], dout.shape[-1], tokens)
    return Work((gemm_part(1, *sizes, x.dtype, transposed=(True, False), out_bytes=2 * dw.size_bytes),))


# -- attention ------------------------------------------------------------------------------------------------------


def attention_part(
    batch: int, heads: int, kv_heads: int, seq_q: int, seq_k: int, head_dim: int, causal: bool, dtype: str, grad: bool
) -> Part:
    """Attention; it has nine parameters because the kernel has as many independent sizes and kinds."""
    tensors = batch * head_dim * (2 * seq_q * heads + 2 * seq_k * kv_heads)
    dims = dims_of(batch=batch, heads=heads, kv_heads=kv_heads, seq_q=seq_q, seq_k=seq_k, head_dim=head_dim, causal=int(causal))
    kind, size = "attention_grad" if grad else "attention", tensors * DTYPE_BYTES.get(dtype, 2) * (2 if grad else 1)
    return Part(kind, "attention", dtype, dims, flops_of(kind, dict(dims)), size)


def _attention(op: Op, base: str, grad: bool, values: Values) -> Work:
    tensors = [values[v] for v in op.operands if v != ABSENT and len(values[v].shape) >= 4]
    causal = bool(op.attrs.get("causal", op.attrs.get("is_causal_masking", False)))
    if base.endswith("qkvpacked"):
        if not tensors or len(tensors[0].shape) != 5:
            return Work(unknown="expected qkv of rank 5")
        b, s, ratio, kv_heads, d = tensors[0].shape
        return Work((attention_part(b, (ratio - 2) * kv_heads, kv_heads, s, s, d, causal, tensors[0].dtype, grad),))
    if len(tensors) < 3 or any(len(t.shape) != 4 for t in tensors[:3]):
        return Work(unknown="expected q, k, v of rank 4")
    (b, seq_q, heads, d), (_, seq_k, kv_heads, _) = tensors[0].shape, tensors[1].shape
    return Work((attention_part(b, heads, kv_heads, seq_q, seq_k, d, causal, tensors[0].dtype, grad),))


# -- communication and copies ---------------------------------------------------------------------------------------


def _communication(op: Op, values: Values) -> Work:
    if is_p2p(op):
        size = sum(values[v].size_bytes for v in (op.operands if is_send(op) else op.results) if v != ABSENT)
        return Work((Part("send_recv", "p2p", "", (), 0, size),))
    known = COLLECTIVES[op.kind]
    messages = tuple(Part(known.traffic, "comm", "", (), 0, _carried_bytes(op, each, values)) for each in known.messages)
    if known.uncounted:
        return Work((_memory(op, op.kind, "unknown", values), *messages), unknown=known.uncounted)
    kernels = (_memory(op, known.kernel, memory_family(known.kernel), values),) if known.kernel else ()
    return Work((*kernels, *messages))


def _carried_bytes(op: Op, carried: Carried, values: Values) -> int:
    match carried:
        case "rows":
            return 4 * prod(values[op.operands[0]].shape[:-1])
        case "number":
            return 4
        case "first operand":
            return values[op.operands[0]].size_bytes
        case "last operand":
            return values[op.operands[-1]].size_bytes
    sent = op.results if carried == "results" else [v for k, v in enumerate(op.operands) if k not in op.no_buffer]
    return sum(values[v].size_bytes for v in sent if v != ABSENT)


def _copy(op: Op, values: Values) -> Work:
    size = sum(values[v].size_bytes for v in op.reads)  # `reads` leaves out the memory that a copy writes into
    way = copy_direction(op, values)
    if way == "d2d":
        return Work((_memory(op, "copy", "move", values),))
    return Work((Part(way, "copy", "", (), 0, size),))


def copy_direction(op: Op, values: Values) -> str:
    """`d2h`, `h2d` or `d2d`, by the memory of the values, else by Paddle's `dst_place_type` (0 host, 1 device, 2 pinned)."""
    if op.kind in ("memcpy_d2h", "memcpy_h2d"):
        return op.kind[-3:]
    source, target = ({values[v].memory for v in ids if v in values} for ids in (op.operands, op.results))
    if source == {"device"} and target != {"device"}:
        return "d2h"
    if source != {"device"} and target == {"device"}:
        return "h2d"
    return "d2h" if op.attrs.get("dst_place_type", 1) in (0, 2) else "d2d"
