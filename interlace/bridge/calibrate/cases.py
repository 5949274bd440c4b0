"""The operations that calibration measures: those of the training steps of small models, and single operations over a range of sizes.

All are built as Paddle programs and captured in the same way as training programs, so that each has the kernel and sizes that the cost
model looks up. To be measured, an operation is cloned into a separate program, on inputs of the same shapes and types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import paddle
import paddle.nn.functional as F
from paddle.base.libpaddle import pir

from interlace.bridge.capture import Captured, capture, operand_sources
from interlace.bridge.guard import fault_of
from interlace.bridge.lower import CLONE
from interlace.bridge.probe.bench import Case
from interlace.cost_model.base import tables_of
from interlace.cost_model.unaligned import is_unaligned
from interlace.cost_model.work import TRANSPOSES, Dims, Part, work_of
from interlace.cpu.ops import type_name
from interlace.interrupts import uninterrupted
from interlace.ir import Op
from interlace.ir.kinds import is_boundary

ops: Any = paddle._C_ops
HEAD_DIM = 128
"""Width of an attention head in most models; in `LARGE`, the heads of all devices together are as wide as the layer."""
DROPOUT = 0.1
"""The usual rate; the time hardly depends on it."""
CONSTANTS = frozenset({"pd_op.full", "pd_op.full_int_array", "builtin.combine"})
"""Operations that are cloned together with their readers: axes, shapes, and lists of operands."""
MEASURED_ELSEWHERE = ("comm", "p2p", "copy", "unknown")
"""Families of kernels that are not measured as operations of one device."""


Family = Literal["gpt", "llama", "bert"]
"""What a model is like: BERT attends to all tokens, normalizes the sums of its residual connections, and has dropout."""


class Model(NamedTuple):
    """Sizes of a model with one layer; `heads`, the width of its feed-forward part and the vocabulary are those on one device."""

    batch: int
    seq: int
    hidden: int
    heads: int
    ffn_width: int
    vocab: int
    head_dim: int = HEAD_DIM


class Sizes(NamedTuple):
    """What is measured: `products` of (m, n, k), `batched` products of (batch, m, n, k), `elements` of elementwise operations, (rows,
    columns) of row-wise operations, and training steps of `models`, which are GPTs and Llamas, and of `encoders`, which are BERTs; and
    products of (m, n, k) with their gradients whose rows of n are no multiple of 16 bytes (`unaligned`), with those that they are compared
    with."""

    products: list[tuple[int, int, int]]
    batched: list[tuple[int, int, int, int]]
    elements: list[int]
    rows: list[tuple[int, int]]
    models: list[Model]
    encoders: list[Model]
    unaligned: list[tuple[int, int, int]]


SMALL = Sizes(
    [(n, n, n) for n in (128, 256, 512, 1024)] + [(256, 2048, 512), (256, 512, 2048), (2048, 256, 512)],
    [(8, 128, 128, 64), (16, 512, 512, 64)],
    [1 << e for e in (14, 16, 18, 20, 22)],
    [(64, 256), (512, 512), (2048, 1024)],
    [Model(1, 128, 256, 2, 1024, 1024), Model(2, 256, 512, 4, 2048, 4096)],
    [Model(2, 128, 256, 4, 1024, 1024, 64)],
    [],
)
LARGE = Sizes(
    [(m, n, k) for m in (512, 2048, 4096, 8192) for n, k in ((1024, 1024), (4096, 4096), (4096, 11008), (11008, 4096))],
    [(8, 1024, 1024, 128), (32, 2048, 2048, 128), (32, 2048, 128, 2048)],
    [1 << e for e in (18, 20, 22, 24, 26)],
    [(1024, 4096), (4096, 4096), (4096, 8192)],
    [
        *(Model(batch, 2048, 4096, 32 // mp, 16384 // mp, 32768 // mp) for batch in (1, 4) for mp in (1, 2, 4)),
        Model(1, 4096, 4096, 32, 11008, 32768),
    ],
    [Model(tokens // seq, seq, 1024, 16, 4096, 8192, 64) for tokens, seq in ((8192, 512), (4096, 1024), (8192, 2048))],
    [(m, n, 2048) for m in (2048, 8192) for n in (8192, 8191, 8190, 8188)],
)


def dtype_for(fast: bool) -> str:
    """The dtype in which operations are measured on a device that is `fast` (`Bench.is_fast`) or not."""
    return "bfloat16" if fast else "float32"


def sizes_for(fast: bool, quick: bool) -> Sizes:
    """The sizes that are measured on a device that is `fast` (`Bench.is_fast`) or not; fewer when `quick`."""
    found = LARGE if fast else SMALL
    if not quick:
        return found
    return Sizes(
        found.products[:3],
        found.batched[:1],
        found.elements[1::2],
        found.rows[1:],
        found.models[:1],
        found.encoders[:1],
        found.unaligned[:4],
    )


def cases(fast: bool, quick: bool, failed: dict[str, str] | None = None) -> list[Case]:
    """Every operation of a calibration, sorted by kind, dtype and size.

    Args:
        fast: Whether the device is fast (`Bench.is_fast`); otherwise the operations are smaller, and in float32.
        quick: Whether fewer sizes are measured.
        failed: Gets the reason for each program that Paddle cannot build for the device; its operations are left out.
    """
    sizes, dtype = sizes_for(fast, quick), dtype_for(fast)
    builds: list[partial[None]] = [
        partial(_products, sizes.products, sizes.batched, dtype),
        partial(_with_gradients, sizes.unaligned, dtype),
        *(partial(_elementwise, elements, dtype) for elements in sizes.elements),
        *(partial(_row_wise, rows, cols, dtype) for rows, cols in sizes.rows),
        *(partial(_model, size, dtype, family) for size in sizes.models for family in ("gpt", "llama")),
        *(partial(_model, size, dtype, "bert") for size in sizes.encoders),
    ]
    found: dict[tuple[str, str, Dims, int], Case] = {}
    for build in builds:
        try:
            for case in _cases_of(build):
                part = case.part
                found.setdefault((part.kind, part.dtype, part.dims, part.size_bytes), case)
        except Exception as error:  # Paddle raises many classes: the device may lack a kernel for the dtype
            if failed is not None:
                failed[f"all operations of {_name_of(build)}"] = fault_of(error).text
    return [found[key] for key in sorted(found, key=lambda key: (key[0], key[1], key[3], key[2]))]


def is_usual(part: Part) -> bool:
    """Whether an operation may stand for its kind where only some of a kind are measured, as for power and interference. Products with
    unaligned rows and attention with heads of another width than `HEAD_DIM` run other kernels; on an H200 those take longer and draw less
    power."""
    dims = dict(part.dims)
    return not is_unaligned(part.dtype, dims) and dims.get("head_dim", HEAD_DIM) == HEAD_DIM


def _name_of(build: partial[None]) -> str:
    """Such as `model (Model(...), 'bfloat16', 'gpt')`."""
    return f"{build.func.__name__.lstrip('_')} {build.args}"


def _cases_of(build: Callable[[], object]) -> Iterator[Case]:
    """Cases for the operations of a program. Of an operation that runs several kernels, its matrix products become separate cases, and an
    embedding's gradient becomes one without its zeros."""
    program = paddle.static.Program()
    with uninterrupted(), paddle.static.program_guard(program, paddle.static.Program()):
        build()
    captured = capture(program)
    values, _ = tables_of(captured.program)
    for op in captured.program.ops:
        parts = () if is_boundary(op) else work_of(op, values).parts
        zeros = parts[1:] if parts and parts[0].kind == "embedding_grad" else ()
        for part in parts[: len(parts) - len(zeros)]:
            if part.family == "gemm":
                yield _product(part)
            elif len(parts) == 1 + len(zeros) and part.family not in MEASURED_ELSEWHERE:
                case = _cloned(replace(part, kind=_kind_of(op, part)), captured, op.id)
                case.without = _filled(zeros[0]) if zeros else None
                yield case


def _kind_of(op: Op, part: Part) -> str:
    """The kind under which an operation is stored. An in-place sum is the accumulation of a gradient, which capture does not see here as
    nothing lives across steps; `copy` and `reduce` stand for several kinds of operations."""
    if op.kind == "add" and op.inplace:
        return "grad_accumulate"
    return {"assign": "copy", "sum": "reduce"}.get(part.kind, part.kind)


def _filled(part: Part) -> Case:
    return Case(part, [], lambda given: lambda: paddle.full([dict(part.dims)["elements"]], 0.0, part.dtype))


def _product(part: Part) -> Case:
    sizes = dict(part.dims)
    batch, m, n, k = (sizes[name] for name in ("batch", "m", "n", "k"))
    transposed = [bool(sizes.get(name)) for name in TRANSPOSES]
    shapes = ((k, m) if transposed[0] else (m, k)), ((n, k) if transposed[1] else (k, n))
    lead = (batch,) if part.kind == "gemm_batched" else ()
    return Case(part, [((*lead, *shape), part.dtype) for shape in shapes], lambda given: lambda: ops.matmul(*given, *transposed))


def _cloned(part: Part, captured: Captured, number: int) -> Case:
    source = captured.source_ops[number]
    read: dict[int, Any] = {}
    constants: list[Any] = []

    def find(value: Any) -> None:
        made_by = value.get_defining_op()
        if made_by is not None and made_by.name() in CONSTANTS:
            for each in made_by.operands_source():
                find(each)
            if all(made_by is not known for known in constants):
                constants.append(made_by)
        else:
            read.setdefault(value.id, value)

    for value in operand_sources(source):
        if not paddle.pir.is_fake_value(value):
            find(value)

    def prepare(given: Sequence[Any]) -> Callable[[], object]:
        mapping = pir.IrMapping()
        for value, tensor in zip(read.values(), given, strict=True):
            mapping.add(value, tensor)
        block = paddle.static.default_main_program().global_block()
        for constant in constants:
            paddle.pir.set_insertion_point_to_block_end(block)
            constant.clone(mapping, CLONE)

        def add() -> None:
            paddle.pir.set_insertion_point_to_block_end(block)
            captured.source_ops[number].clone(mapping, CLONE)  # keeps the program alive, too

        return add

    return Case(part, [(tuple(value.shape), type_name(value.dtype)) for value in read.values()], prepare)


# -- programs --------------------------------------------------------------------------------------------------------


def _tensor(shape: Sequence[int], dtype: str) -> Any:
    """An input of the program; it needs a gradient unless its dtype is an integer."""
    block = paddle.static.default_main_program().global_block()
    made = paddle.static.data(f"input{len(block.ops)}", list(shape), dtype)
    made.stop_gradient = dtype.startswith("int")
    return made


def _products(sizes: Sequence[tuple[int, int, int]], batched: Sequence[tuple[int, int, int, int]], dtype: str) -> None:
    for *batch, m, n, k in (*sizes, *batched):
        ops.matmul(_tensor((*batch, m, k), dtype), _tensor((*batch, k, n), dtype), False, False)


def _with_gradients(sizes: Sequence[tuple[int, int, int]], dtype: str) -> None:
    for m, n, k in sizes:
        x, y, given = (_tensor(shape, dtype) for shape in ((m, k), (k, n), (m, n)))
        paddle.static.gradients([ops.matmul(x, y, False, False)], [x, y], [given])


def _elementwise(elements: int, dtype: str) -> None:
    x, other, wide = (_tensor((elements,), each) for each in (dtype, dtype, "float32"))
    total = ops.add(ops.multiply(x, other), ops.scale(x, 2.0, 1.0, True))
    for made in (ops.gelu(x, True), ops.silu(x), ops.square(x), ops.subtract(x, other), ops.swiglu(x, other)):
        total = ops.add(total, made)
    paddle.static.gradients([ops.sum(total, [], None, False)], [x, other])
    ops.assign(x)
    narrow = "float16" if dtype == "float32" else dtype
    ops.cast(wide, narrow)
    ops.cast(_tensor((elements,), narrow), "float32")
    ops.add_(_tensor((elements,), "float32"), _tensor((elements,), "float32"))
    _updates((elements,), dtype)


def _updates(shape: tuple[int, ...], dtype: str) -> None:
    """Updates of SGD and AdamW with float32 gradients; a dtype other than float32 gets float32 master weights."""
    rate = paddle.full([1], 0.01, "float32")
    has_master = dtype != "float32"

    def weights() -> tuple[Any, Any]:
        return _tensor(shape, dtype), _tensor(shape, "float32") if has_master else None

    parameter, master = weights()
    ops.sgd_(parameter, rate, _tensor(shape, "float32"), master, has_master)
    parameter, master = weights()
    moments, powers = [_tensor(shape, "float32") for _ in range(2)], [_tensor((1,), "float32") for _ in range(2)]
    given = parameter, _tensor(shape, "float32"), rate, *moments, None, *powers, master, None
    ops.adamw_(*given, 0.9, 0.999, 1e-8, 1.0, 0.01, True, False, 1000, has_master, False, False)


def _row_wise(rows: int, cols: int, dtype: str) -> None:
    x, scale, shift = _tensor((rows, cols), dtype), _tensor((cols,), dtype), _tensor((cols,), dtype)
    made = ops.softmax(ops.layer_norm(x, scale, shift, 1e-5, 1), -1)
    paddle.static.gradients([ops.sum(made, [], None, False)], [x, scale, shift])
    ops.transpose(ops.reshape(x, [1, rows, cols // HEAD_DIM, HEAD_DIM] if cols > HEAD_DIM else [1, rows, 1, cols]), [0, 2, 1, 3])
    table = _tensor((rows, cols), "float32")
    paddle.static.gradients([F.embedding(_tensor((rows,), "int64"), table)], [table])


def _model(size: Model, dtype: str, family: Family) -> None:
    """Forward and backward of the embedding, one layer and the loss of a model."""
    batch, seq, hidden, heads, ffn_width, vocab, head_dim = size
    is_llama, is_bert = family == "llama", family == "bert"
    weights: list[Any] = []

    def weight(*shape: int) -> Any:
        weights.append(_tensor(shape, dtype))
        return weights[-1]

    def linear(x: Any, width: int) -> Any:
        return F.linear(x, weight(x.shape[-1], width), None if is_llama else weight(width))

    def norm(x: Any) -> Any:
        if not is_llama:
            return F.layer_norm(x, hidden, weight(hidden), weight(hidden))
        exact = x.astype("float32")
        exact = exact * paddle.rsqrt(paddle.mean(paddle.square(exact), -1, keepdim=True) + 1e-5)
        return exact.astype(dtype) * weight(hidden)

    def attended(x: Any) -> Any:
        q, k, v = paddle.split(linear(x, 3 * width).reshape([batch, seq, heads, 3 * head_dim]), 3, -1)
        return linear(_attended(q, k, v, is_causal=not is_bert).reshape([batch, seq, width]), hidden)

    def mixed(x: Any) -> Any:
        if not is_llama:
            return linear(F.gelu(linear(x, ffn_width), approximate=True), hidden)
        return linear(F.silu(linear(x, ffn_width)) * linear(x, ffn_width), hidden)

    ids, width = _tensor((batch, seq), "int64"), heads * head_dim
    x = F.embedding(ids, weight(vocab, hidden))
    for part in (attended, mixed):
        x = norm(x + F.dropout(part(x), DROPOUT)) if is_bert else x + part(norm(x))
    scores = paddle.matmul(x if is_bert else norm(x), weight(hidden, vocab)).astype("float32").reshape([-1, vocab])
    paddle.static.gradients([F.cross_entropy(scores, ids.reshape([-1]))], weights)


def _attended(q: Any, k: Any, v: Any, is_causal: bool) -> Any:
    """Attention over `[batch, sequence, heads, head_dim]`: flash attention if Paddle has a kernel for the dtype, else products and a
    softmax."""
    try:
        return ops.flash_attn(q, k, v, None, None, 0.0, is_causal, False, False, "")[0]
    except TypeError:  # no kernel for this type
        q, k, v = (each.transpose([0, 2, 1, 3]) for each in (q, k, v))
        return paddle.matmul(F.softmax(paddle.matmul(q, k, transpose_y=True)), v).transpose([0, 2, 1, 3])
