"""split-backward: dX and dW are what the whole gradient gave, in Paddle and in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.ir import Program, parse
from interlace.passes.split_backward import LEFT_OUT, is_one_gemm
from tests.interpreter import assert_same
from tests.passes.programs import backward_programs, one_gradient, recipes
from tests.passes.splits import CASES, SETTINGS, case, outputs_of, split
from tests.remarks import rules_of

# ------------------------------------------------------------------------------------------------------------------ Paddle


@pytest.fixture(scope="module")
def paddle() -> Iterator[Any]:
    paddle = pytest.importorskip("paddle")
    paddle.enable_static()
    yield paddle
    paddle.disable_static()


def in_paddle(paddle: Any, programs: list[Program], feed: dict[str, Any]) -> list[list[Any]]:
    """dx and dy of every program, all in one run of Paddle's executor."""
    main = paddle.static.Program()
    inputs: dict[str, Any] = {}
    fetched: list[Any] = []
    with paddle.static.program_guard(main):
        for name, array in feed.items():
            inputs[name] = paddle.static.data(name, list(array.shape), str(array.dtype))
        for program in programs:
            fetched += outputs_of(paddle, program, inputs)
    flat = paddle.static.Executor(paddle.CPUPlace()).run(main, feed=feed, fetch_list=fetched)
    return [list(flat[k : k + 2]) for k in range(0, len(flat), 2)]


def feed_of(program: Program) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    return {v.name: rng.standard_normal(v.shape).astype(v.dtype) for v in program.values if v.name}


@pytest.mark.paddle
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("x", "y"), CASES)
@pytest.mark.parametrize(("tx", "ty"), SETTINGS)
def test_same_bits_as_paddle(paddle: Any, x: tuple[int, ...], y: tuple[int, ...], tx: bool, ty: bool, dtype: str) -> None:
    program = case(x, y, tx, ty, dtype)
    splits = [split(program, fold=fold)[0] for fold in (False, True)]
    whole, *parts = in_paddle(paddle, [program, *splits], feed_of(program))
    for fold, made in zip((False, True), parts, strict=True):
        for name, a, b in zip(("dx", "dy"), whole, made, strict=True):
            assert a.tobytes() == b.tobytes(), f"{name} (fold={fold}) differs by {np.abs(a - b).max()}"


# ------------------------------------------------------------------------------------------------------------- interpreter


@given(st.sampled_from(CASES), st.sampled_from(SETTINGS), st.booleans(), st.integers(0, 1))
@settings(max_examples=60, deadline=None)
def test_same_integers(shapes: Any, setting: tuple[bool, bool], fold: bool, weight: int) -> None:
    small = tuple(tuple(min(dim, 6) for dim in shape) for shape in shapes)
    program = case(small[0], small[1], *setting, weight=weight)
    assert_same(program, split(program, fold=fold)[0])


@given(recipes(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_whole_backwards_keep_their_numbers(recipe: Any, fold: bool) -> None:
    before = backward_programs(recipe)
    after = [split(program, fold=fold)[0] for program in before]
    assert_same(before, after)
    for program in after:
        whole = [op for op in program.ops if op.kind == "matmul_grad" and LEFT_OUT not in op.attrs]
        assert all(op.layer.endswith("attention") for op in whole)


# ------------------------------------------------------------------------------------------------------------------- forms


@pytest.mark.parametrize(
    ("x", "y", "setting", "dx", "dy"),
    [
        ((2, 4), (4, 6), (False, False), True, True),
        ((2, 4), (4, 6), (True, True), True, True),
        ((3, 2, 4), (4, 6), (False, False), True, False),
        ((3, 2, 4), (6, 4), (False, True), True, False),
        ((3, 4, 2), (4, 6), (True, False), False, False),
        ((3, 2, 4), (3, 4, 6), (False, False), True, True),
        ((3, 2, 4), (3, 6, 4), (False, True), False, False),
        ((-1, 2, 4), (-1, 4, 6), (False, False), False, False),
        ((-1, -1, 3, 2, 4), (-1, -1, 3, 4, 6), (False, False), False, False),
        ((1, 2, 4), (1, 4, 6), (False, False), False, False),
        ((3, 2, 4), (1, 4, 6), (False, False), False, False),
        ((4,), (4, 6), (False, False), False, False),
        ((-1, 2, 4), (4, 6), (False, False), True, False),
    ],
)
def test_one_gemm_only_where_the_kernel_makes_that_call(x: Any, y: Any, setting: Any, dx: bool, dy: bool) -> None:
    assert (is_one_gemm(0, setting, x, y), is_one_gemm(1, setting, x, y)) == (dx, dy)


def test_rows_of_unknown_number_are_folded_to_a_dim_of_unknown_size() -> None:
    result, _ = split(one_gradient((-1, 4, 8), (8, 6), (-1, 4, 6), False, False), fold=True)
    shapes = {value.id: value.shape for value in result.values}
    assert [shapes[op.results[0]] for op in result.ops if op.kind == "reshape"] == [(-1, 8), (-1, 6)]


def test_ids_of_the_results_stay() -> None:
    program = case((3, 2, 4), (4, 6), False, False)
    result, _ = split(program)
    old = next(op for op in program.ops if op.kind == "matmul_grad")
    made = [op for op in result.ops if op.role == "backward" and op.results]
    assert [op.name for op in made] == ["pd_op.matmul", "pd_op.matmul_grad"]
    assert made[0].results[0] == old.results[0]
    assert made[1].results[1] == old.results[1]
    assert all(op.origin == -1 and op.id not in {each.id for each in program.ops} for op in made)
    assert old in program.ops


@pytest.mark.paddle
@pytest.mark.parametrize("batch", [1, 3])
def test_experts_products_have_one_sided_gradients_of_the_same_bits(paddle: Any, batch: int) -> None:
    from interlace.bridge import newops
    from interlace.bridge.targets import Device

    before = one_gradient((batch, 24, 40), (batch, 40, 56), (batch, 24, 56), False, False)
    before = before.with_ops(
        tuple(
            msgspec.structs.replace(op, name=op.name.replace("matmul_grad", "bmm_grad"), attrs=op.attrs if op.kind != "matmul_grad" else {})
            for op in before.ops
        )
    )
    after = split(before)[0]
    assert [op.attrs.get(LEFT_OUT) for op in after.ops if op.kind == "bmm_grad"] == [1, 0]
    feed = feed_of(before)
    main = paddle.static.Program()
    with paddle.static.program_guard(main):
        inputs = {name: paddle.static.data(name, list(array.shape), str(array.dtype)) for name, array in feed.items()}
        whole = list(paddle._C_ops.bmm_grad(*inputs.values()))
        build_one = partial(newops.BUILDERS["pd_op.bmm_grad"], operands=list(inputs.values()), device=Device(paddle.CPUPlace()))
        apart = [build_one(op)[1 - op.attrs[LEFT_OUT]] for op in after.ops if op.kind == "bmm_grad"]
    made = paddle.static.Executor(paddle.CPUPlace()).run(main, feed=feed, fetch_list=[*whole, *apart])
    assert [each.tobytes() for each in made[:2]] == [each.tobytes() for each in made[2:]]


GATE = """program rank=0 world=2 mode=train
group 7 = 0,1
#0 %0:float32[2,4,6] = pd_op.relu() forward
#1 %1:float32[2,6,8] = pd_op.relu() forward
#2 %2:float32[2,4,8] = pd_op.relu() backward
#3 %3:float32[2,4,6], %4:float32[2,6,8] = pd_op.matmul_grad(%0, %1, %2) backward {"transpose_x":false,"transpose_y":false}
#4 %5:float32[2,6,8] = pd_op.all_to_all(%4) backward group=7
#5 %6:float32[2,4,6] = pd_op.relu_grad(%3, %5) backward
#6 %7:float32[2,4,6] = pd_op.all_to_all(%6) backward group=7
"""


def test_a_product_of_activations_is_split_where_its_gradients_lead_to_different_communication() -> None:
    """What is sent first is computed first; where both lead to the same, as in attention, one operation stays."""
    after, context = split(parse(GATE))
    assert [op.results for op in after.ops if op.role == "backward"][1:3] == [(4,), (3,)]
    assert any(each.ops and all(name.startswith("dx") for name in each.ops) for each in context.remarks)
    same = parse(GATE.replace("pd_op.all_to_all(%4) backward group=7", "pd_op.relu(%4) backward"))
    assert split(same)[0].ops == same.ops


@pytest.mark.parametrize("weight", [0, 1])
def test_dx_stands_in_front_of_dw_whichever_operand_the_weight_is(weight: int) -> None:
    program = case((2, 4), (4, 6), False, False, weight=weight)
    whole = next(op for op in program.ops if op.kind == "matmul_grad")
    first, second = (op for op in split(program)[0].ops if op.role == "backward" and op.results)
    assert (first.results[0], second.results[0]) == (whole.results[1 - weight], whole.results[weight])


def test_a_gradient_operation_that_gives_one_gradient_stays_as_it_is() -> None:
    whole = case((24, 40), (40, 56), False, False)
    grad = next(op for op in whole.ops if op.name == "pd_op.matmul_grad")
    one = whole.with_ops(
        tuple(
            msgspec.structs.replace(op, results=op.results[:1]) if op is grad else op
            for op in whole.ops
            if not set(op.operands) & set(grad.results[1:])
        ),
        tuple(value for value in whole.values if value.id not in grad.results[1:]),
    )
    made, context = split(one)
    assert made == one
    assert "one-gradient" in rules_of(context.remarks)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_products_of_activations_are_counted(count: int) -> None:
    """They have no weight, and no communication needs one of their results first."""
    text = """program rank=0 world=1 mode=train
#0 %0:float32[4,8]"x" = pd_op.data() forward
#1 %1:float32[8,16]"y" = pd_op.data() forward
#2 %2:float32[4,16]"dout" = pd_op.data() forward
"""
    for k in range(10, 10 + 3 * count, 3):
        text += f"#{k} %{k}:float32[4,8], %{k + 1}:float32[8,16] = pd_op.matmul_grad(%0, %1, %2) backward "
        text += '{"transpose_x":false,"transpose_y":false}\n'
    program = parse(text)
    made, context = split(program)
    assert made.ops == program.ops
    assert [(each.rule, each.numbers) for each in context.remarks] == [("no-weight", {"operations": count})] * bool(count)
