"""Gradients of single products, whole and split, in Paddle."""

from __future__ import annotations

from typing import Any

from interlace.cost_model import GivenCosts
from interlace.ir import Op, Program, verify
from interlace.passes.base import Context
from interlace.passes.split_backward import LEFT_OUT, SplitBackward
from tests.passes.programs import one_gradient, shapes_of

CASES = [
    ((24, 40), (40, 56)),
    ((3, 24, 40), (40, 56)),
    ((1, 1, 40), (40, 56)),
    ((2, 3, 24, 40), (40, 56)),
    ((128, 512), (512, 384)),
    ((4, 128, 256), (256, 192)),
    ((5, 24, 40), (5, 40, 56)),
    ((1, 24, 40), (1, 40, 56)),
    ((2, 3, 24, 40), (2, 3, 40, 56)),
    ((5, 24, 40), (1, 40, 56)),
    ((24, 40), (5, 40, 56)),
    ((3, 24, 40), (40, 1)),
    ((24, 1), (1, 56)),
]
"""Shapes of x and y without transposes: [2,2], [n,2], batched, broadcast, rows and columns of one."""
SETTINGS = [(tx, ty) for tx in (False, True) for ty in (False, True)]


def split(program: Program, **options: Any) -> tuple[Program, Context]:
    """The program behind the pass, verified, and what the pass said."""
    context = Context(GivenCosts({"default": 1}))
    result = SplitBackward(**options).run(program, context)
    verify(result)
    return result, context


def turned(shape: tuple[int, ...], transpose: bool) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2]) if transpose else shape


def case(x: tuple[int, ...], y: tuple[int, ...], tx: bool, ty: bool, dtype: str = "float32", weight: int = 1) -> Program:
    x, y = turned(x, tx), turned(y, ty)
    return one_gradient(x, y, shapes_of(x, y, tx, ty), tx, ty, dtype, weight)


def build_one_sided(paddle: Any, op: Op, x: Any, y: Any, dout: Any) -> list[Any]:
    """A result is null where its operand wants no gradient, so derive the gradient of a product, which goes again."""
    out = paddle._C_ops.matmul(x, y, op.attrs["transpose_x"], op.attrs["transpose_y"])
    product = out.get_defining_op()
    left = op.attrs[LEFT_OUT]
    grads = paddle.base.core.call_vjp(product, [[x], [y]], [[out]], [[dout]], [[left == 0], [left == 1]])
    made = grads[1 - left][0].get_defining_op()
    product.get_parent_block().remove_op(product)
    return list(made.results())


def build(paddle: Any, op: Op, operands: list[Any]) -> list[Any]:
    """One operation in Paddle's program."""
    calls = paddle._C_ops
    transposes = (op.attrs.get("transpose_x"), op.attrs.get("transpose_y"))
    if op.name == "pd_op.full_int_array":
        return [calls.full_int_array(op.attrs["value"], paddle.int64, paddle.CPUPlace())]
    if op.name == "pd_op.reshape":
        return [calls.reshape(*operands)]
    if op.name == "pd_op.matmul":
        return [calls.matmul(*operands, *transposes)]
    if LEFT_OUT in op.attrs:
        return build_one_sided(paddle, op, *operands)
    return list(calls.matmul_grad(*operands, *transposes))


def outputs_of(paddle: Any, program: Program, inputs: dict[str, Any]) -> list[Any]:
    """Build one program's operations on given inputs; gives what it names as outputs."""
    kinds = {value.id: value for value in program.values}
    values = {value.id: inputs[value.name] for value in program.values if value.name}
    outputs = []
    for op in program.ops:
        if op.name == "builtin.shadow_output":
            outputs.append(values[op.operands[0]])
        elif not kinds[op.results[0]].name:
            values.update(zip(op.results, build(paddle, op, [values[v] for v in op.operands]), strict=True))
    return outputs
