"""`split-backward`: the gradient of a product with a weight becomes two operations, dX and dW."""

from __future__ import annotations

import math
from dataclasses import dataclass

from interlace.ir import Edit, Graph, Op, Program, TensorType, Value
from interlace.ir.kinds import is_comm
from interlace.passes.base import Context, Pass, check_unscheduled, register
from interlace.passes.weight_gradients import (
    ACCUMULATING,
    GEMM_GRADS,
    check_modules,
    in_modules,
    is_used,
    weight_index,
    weight_values,
)

NULL = TensorType((), "null")
LEFT_OUT = "left_out"
"""Attribute of a one-sided gradient: which result (0 is dx, 1 is dy) it leaves out."""
ONE_SIDED = frozenset({"matmul_grad", "bmm_grad"})
"""Gradients whose kernels can compute one result alone, by the same call as when they compute both."""


def _gradients(program: Program) -> list[Op]:
    """The gradients of products in backward."""
    return [op for op in program.ops if op.kind in GEMM_GRADS and op.role == "backward"]


@dataclass(frozen=True, slots=True)
class Product:
    """One `pd_op.matmul`: which two of x, y and dout it multiplies, and which of them it transposes."""

    left: str
    right: str
    transpose_left: bool
    transpose_right: bool


PRODUCTS = {
    (False, False): (Product("dout", "y", False, True), Product("x", "dout", True, False)),
    (False, True): (Product("dout", "y", False, False), Product("dout", "x", True, False)),
    (True, False): (Product("y", "dout", False, True), Product("x", "dout", False, False)),
    (True, True): (Product("y", "dout", True, True), Product("dout", "x", True, True)),
}
"""(transpose_x, transpose_y) -> products of dx and dy, operand for operand those of Paddle's kernel."""


@register
class SplitBackward(Pass, frozen=True, kw_only=True):
    """Compute dX and dW of every weight in separate operations, so that they can run at different times.

    Contract: keeps every value, bit for bit, on every device; dX takes the position of the gradient, dW comes immediately after it.
    If nothing reads one of the two results, only the other is computed. The gradient of a product of two activations is split if its
    results lead to different communication (experts: the tokens, and the weights with which their results are summed); the result that
    leads to the earlier communication is computed first.

    Before / After:
        %5, %6 = pd_op.matmul_grad(%2, %1, %4)          %5 = pd_op.matmul(%4, %1) {"transpose_y":true}
        %7 = pd_op.add_(%0, %6)                         %9:null, %6 = pd_op.matmul_grad(%2, %1, %4) {"left_out":0}
                                                        %7 = pd_op.add_(%0, %6)

    Steps:
        1. Find values that are weights: parameters, also through cast, all_gather and views.
        2. Where one `pd_op.matmul` on the same operands makes the very GEMM call of Paddle's gradient kernel, emit it: for operands of
           ranks [2,2], all four transpose settings; of [n,2], dX without transpose_x; of [n,n], equal batches and no transposes.
        3. Everything else, and `bmm_grad` (experts), becomes a *one-sided* gradient: the same kernel, with one result left out. It computes
           its result as the full kernel does, whatever the device does about folding, batches, broadcasting and transposes; it copies
           nothing.

    Why no reshape by default: `pd_op.reshape` copies in the static executor, so computing a dW of ranks [3,2] as reshape, reshape, matmul
    would read and write x and dout once more. `fold=True` asks for this form: Paddle's `fused_linear_param_grad_add_pass` matches it and
    fuses product and accumulation into one kernel. Paddle's kernel multiplies the same 2-D operands, hence the same bits.

    Source: paddle/phi/kernels/impl/matmul_grad_kernel_impl.h and matmul_kernel_impl.h of 3.3.1; checked against Paddle for
    every case by tests/passes/test_split_backward.py.

    Attributes:
        modules: Names or globs of layers, of any stage; empty means all layers. When: only some layers are to change, such as while
            looking for a fault.
        fold: Compute a dW of ranks [n,2] by two reshapes and a matmul. When: to compare bits with a program that computes dW in this form.
    """

    name = "split-backward"
    gives = frozenset({"dw-split"})
    after = ("choose-recompute", "narrow-gathers")
    is_default = True
    in_baseline = False
    modules: tuple[str, ...] = ()
    fold: bool = False

    @property
    def asks_ranks(self) -> bool:
        return bool(self.modules)

    def facts(self, program: Program, context: Context) -> tuple[str, ...]:
        """The layers with a product of a weight; needed only if `modules` chooses some of them."""
        weights = weight_values(Graph(program))
        return tuple(sorted({op.layer for op in _gradients(program) if weight_index(op, weights) is not None}))

    def run(self, program: Program, context: Context) -> Program:
        """The program with its weight gradients split. Raises PassError if it has a schedule already, or a name in `modules` matches no
        layer."""
        check_unscheduled(program)
        graph = Graph(program)
        weights = weight_values(graph)
        check_modules(self.modules, program, context)
        split = _Split(Edit(program), graph, context, self.fold)
        leads_to = first_communication(graph)
        others = 0
        for op in _gradients(program):
            if len(op.results) < 2:
                context.declined("one-gradient", op)
                continue
            index = weight_index(op, weights)
            ahead = [leads_to[value] for value in op.results[:2]]
            if index is None and (ahead[0] == ahead[1] or weights.intersection(op.operands[:2])):
                others += 1
            elif not in_modules(self.modules, op.layer):
                context.declined("other-module", op, modules=self.modules)
            else:
                split.gradient(op, int(ahead[0] < ahead[1]) if index is None else index, "dX" if index is None else "dW")
        alone = sum(op.kind == ACCUMULATING for op in program.ops)
        if others:
            context.declined("no-weight", operations=others)
        if alone:
            context.declined("split-already", operations=alone, operation=ACCUMULATING)
        return split.edit.build()


@dataclass(frozen=True, slots=True)
class _Split:
    edit: Edit
    graph: Graph
    context: Context
    fold: bool

    def gradient(self, op: Op, last: int, name: str) -> None:
        """Split one gradient, or report why not; result number `last`, called `name` in remarks, is computed last."""
        used = [k for k in (0, 1) if is_used(self.graph, op, k)]
        if op.kind not in ONE_SIDED:
            self.context.declined("no-one-sided-form", op)
        elif any(self.graph.values[value].dtype == "null" for value in op.results):
            self.context.declined("one-result", op)
        elif not used:
            self.context.declined("results-not-read", op)
        else:
            self._replace(op, last, name, sorted(used, key=lambda k: k == last))

    def _replace(self, op: Op, last: int, name: str, used: list[int]) -> None:
        made: list[Op] = []
        halves: dict[str, list[Op]] = {}
        for which in used:
            made += self._result(op, which)
            gradient = (name if which == last else "dX").lower()
            halves.setdefault(f"{gradient}_alone" if LEFT_OUT in made[-1].attrs else gradient, []).append(made[-1])
        self.edit.replace(op.id, made)
        self.context.applied("gradient-split", op, **halves)

    def _result(self, op: Op, which: int) -> list[Op]:
        tensors = {name: self.graph.values[value] for name, value in zip(("x", "y", "dout"), op.operands, strict=False)}
        if op.kind != "matmul_grad":
            return [self._one_sided(op, which)]
        if is_one_gemm(which, _transposes(op), tensors["x"].shape, tensors["y"].shape):
            return [self._matmul(op, which, tensors)]
        if self.fold and which == 1 and is_folded(_transposes(op), tensors["x"].shape, tensors["y"].shape):
            flat = {name: self.edit.value(_flat(tensors[name])) for name in ("x", "dout")}
            reshapes = [made for name in flat for made in self._reshape(op, tensors[name], flat[name])]
            return [*reshapes, self._matmul(op, which, flat)]
        return [self._one_sided(op, which)]

    def _matmul(self, op: Op, which: int, tensors: dict[str, Value]) -> Op:
        product = PRODUCTS[_transposes(op)][which]
        attrs = {"transpose_x": product.transpose_left, "transpose_y": product.transpose_right}
        reads = (tensors[product.left].id, tensors[product.right].id)
        return self.edit.op("pd_op.matmul", reads, [self.graph.values[op.results[which]]], like=op, attrs=attrs)

    def _one_sided(self, op: Op, which: int) -> Op:
        kept, null = self.graph.values[op.results[which]], self.edit.value(NULL)
        results = [null, kept] if which else [kept, null]
        return self.edit.op(op.name, op.operands, results, like=op, attrs={**op.attrs, LEFT_OUT: 1 - which})

    def _reshape(self, op: Op, source: Value, flat: Value) -> list[Op]:
        attrs = {"value": list(flat.shape), "dtype": "int64", "place": "cpu"}
        sizes = self.edit.op("pd_op.full_int_array", (), [TensorType((len(flat.shape),), "int64")], like=op, attrs=attrs)
        return [sizes, self.edit.op("pd_op.reshape", (source.id, sizes.results[0]), [flat], like=op)]


def first_communication(graph: Graph) -> dict[int, int]:
    """Value id -> position of the first communication in backward that depends on it; the number of operations if none does. O(V+E)."""
    never = len(graph.program.ops)
    found = dict.fromkeys(graph.values, never)
    for position, op in reversed([*enumerate(graph.program.ops)]):
        if op.role == "backward":
            needed = min([position if is_comm(op) else never, *(found[value] for value in op.results)])
            found.update((value, min(needed, found[value])) for value in op.operands if value in found)
    return found


def is_one_gemm(which: int, transposes: tuple[bool, bool], x: tuple[int, ...], y: tuple[int, ...]) -> bool:
    """Whether Paddle's kernel computes result `which` with the GEMM call that `pd_op.matmul` makes on the same operands.

    >>> is_one_gemm(0, (False, False), (2, 3, 4), (4, 5)), is_one_gemm(1, (False, False), (2, 3, 4), (4, 5))
    (True, False)
    """
    if len(x) == 2 and len(y) == 2:
        return True
    if len(x) > 2 and len(y) == 2:
        return which == 0 and not transposes[0]
    batches = x[:-2]
    known = len(x) > 2 and len(x) == len(y) and batches == y[:-2] and min(batches) > 0
    return known and math.prod(batches) > 1 and transposes == (False, False)


def is_folded(transposes: tuple[bool, bool], x: tuple[int, ...], y: tuple[int, ...]) -> bool:
    """Whether Paddle's kernel computes dy from x and dout folded to rank 2, which moves no data."""
    return len(x) > 2 and len(y) == 2 and not transposes[0]


def _flat(value: Value) -> TensorType:
    rows = value.shape[:-1]
    return TensorType((math.prod(rows) if min(rows) >= 0 else -1, value.shape[-1]), value.dtype)


def _transposes(op: Op) -> tuple[bool, bool]:
    return bool(op.attrs.get("transpose_x", False)), bool(op.attrs.get("transpose_y", False))
