"""What an executor does beside the program, by hand; tests/training/test_memory.py holds it to Paddle itself."""

from __future__ import annotations

import msgspec
import pytest

from interlace.ir import parse
from interlace.ir.target import CPU, Target
from interlace.scheduler.memory.executor import feed_bytes
from interlace.scheduler.memory.live import in_order
from tests.scheduler.plans import Shape, world

HEAD = "program rank=0 world=2 mode=train\npipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=none\n"


def peaks(text: str, target: Target) -> tuple[int, int]:
    """The plain peak and the executor's."""
    program = parse(HEAD + text)
    return in_order(program).peak(), in_order(program, target=target).peak()


def test_writes_over_an_operand_that_nobody_needs() -> None:
    chain = """
#0 %0:float32[4] = pd_op.full() forward
#1 %1:float32[4] = pd_op.matmul(%0) forward
#2 %2:float32[4] = pd_op.scale(%1) forward
#3 %3:float32[4] = pd_op.softmax(%2) forward
#4 %4:float32[4] = pd_op.matmul(%3) backward
job all forward 0: 0-4@0
"""
    assert peaks(chain, Target("x", in_place_pass=True)) == (32, 32)
    assert peaks(chain.replace("(%0) forward", "() forward"), Target("x", in_place_pass=True)) == (32, 32)
    only = HEAD + chain.replace("job all forward 0: 0-4@0", "job all forward 0: 1-3@0").replace("(%0)", "()")
    assert (in_order(parse(only)).peak(), in_order(parse(only), target=Target("x", in_place_pass=True)).peak()) == (32, 16)


def test_leaves_an_operand_that_another_job_names() -> None:
    """Even one of which the other job needs the shape only: the pass does not see it."""
    text = """
#0 %0:float32[4] = pd_op.full() forward
#1 %1:float32[4] = pd_op.matmul() forward
#2 %2:float32[4] = pd_op.scale(%1) forward
#3 %3:float32[1] = pd_op.add_grad(%1, %2) backward no_buffer=0
job one forward 0: 1-2@0
job two backward 0: 3@0
"""
    assert peaks(text, Target("x", in_place_pass=True)) == (32, 32)
    alone = text.replace("add_grad(%1, %2) backward no_buffer=0", "add_grad(%2) backward")
    assert peaks(alone, Target("x", in_place_pass=True)) == (32, 20)


def test_kernels_and_late_results() -> None:
    text = """
#0 %0:float32[4] = pd_op.matmul() forward
#1 %1:float32[4] = pd_op.layer_norm_grad(%0) backward
job all forward 0: 0-1@0
"""
    assert peaks(text, Target("x", workspace={"layer_norm_grad": 2})) == (32, 64)
    late = """
group 0 = 0,1
#0 %0:float32[64] = pd_op.matmul() forward
#1 %1:float32[64] = pd_op.all_reduce(%0) forward group=0
#2 %2:float32[256] = pd_op.matmul() forward
#3 %3:float32[1] = pd_op.mean(%2) forward
#4 %4:float32[64] = pd_op.gelu(%1) forward
job all forward 0: 0-4@0
"""
    assert peaks(late, Target("x", late_results=True)) == (256 + 1024 + 4, 1024 + 4)


def test_a_vector_of_which_only_the_shape_is_read_keeps_its_tensors() -> None:
    text = """
#0 %0:float32[64] = pd_op.matmul() forward
#1 %1:vector<float32[64]> = builtin.combine(%0) forward
#2 %2:float32[64] = pd_op.concat(%1) forward
#3 %3:float32[256] = pd_op.matmul() backward
#4 %4:vector<float32[64]> = pd_op.concat_grad(%1, %3) backward no_buffer=0
job one forward 0: 0-2@0
job two backward 0: 3-4@0
"""
    plain, kept = peaks(text, Target("x", keeps_shapes=True))
    assert (plain, kept) == (1024 + 256, 1024 + 256 + 256)


RECEIVED = """
#0 %0:float32[64] = pd_op.recv_v2() forward group=0
#1 %1:float32[64]~0 = pd_op.share_data_(%0) forward inplace=0:0
#2 %2:float32[64] = pd_op.gelu(%1) forward
#3 %3:float32[64] = pd_op.add(%0, %2) forward
#4 %4:float32[64], %5:float32[64] = pd_op.add_grad(%0, %2, %3) backward{}
job one recv_forward 0: 0@0
job two forward 0: {}@0
job three backward 0: {}@0
"""


EARLIER = "".join(f"\n#{k} %{k}:float32[4] = pd_op.full() forward" for k in (6, 7, 8))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (RECEIVED.format(" no_buffer=0,1", "1-3", 4), True),
        (RECEIVED.format(" no_buffer=1", "1-3", 4), False),
        (EARLIER + RECEIVED.format(" no_buffer=0,1", "1-3", 4).replace("0: 0@0", "0: 6-8@0 0@0"), True),
        (RECEIVED.format(" no_buffer=0,1", "1-2", "3-4"), False),
        (RECEIVED.format(" no_buffer=0,1", "1-3", 4).replace("0: 0@0", "0: 0-3@0").replace("job two forward 0: 1-3@0\n", ""), False),
    ],
)
def test_what_one_job_receives_stays_where_the_next_reads_it_and_a_later_one_its_shape(text: str, kept: bool) -> None:
    """Contents read by the later job too, by it alone, or in the job that received it: collected."""
    always = in_order(parse(HEAD + "group 0 = 0,1" + text), target=Target("x", keeps_shapes=True)).base["device"]
    assert always == (256 if kept else 0)


def test_nothing_else_changes_on_random_worlds() -> None:
    """An executor that only reuses never holds more, and all kinds together hold what both pools hold."""
    for program in world(Shape(1, 2, 2, 4, width=16)):
        plain, reused = in_order(program), in_order(program, target=Target("x", in_place_pass=True))
        assert reused.peak() <= plain.peak()
        assert in_order(program, target=CPU).peak("all") >= in_order(program, target=CPU).peak()


def test_what_is_written_over_has_the_type_of_the_result() -> None:
    """As many bytes of another type do not do."""
    text = """
#0 %0:float32[4] = pd_op.matmul() forward
#1 %1:int32[4] = pd_op.cast(%0) forward
job all forward 0: 0-1@0
"""
    assert peaks(text, Target("x", in_place_pass=True)) == (32, 32)
    assert peaks(text.replace("int32", "float32"), Target("x", in_place_pass=True)) == (32, 16)


OVER_FIRST = """scale softmax add subtract multiply divide cast relu exp log sqrt rsqrt square cos sin tanh sigmoid silu clip pow triu tril
reshape squeeze unsqueeze flatten cross_entropy_with_softmax logical_and logical_not logical_or"""
OVER_SECOND = """reshape_grad squeeze_grad unsqueeze_grad flatten_grad cross_entropy_with_softmax_grad relu_grad exp_grad log_grad sqrt_grad
rsqrt_grad square_grad cos_grad sin_grad tanh_grad sigmoid_grad"""
OVER = {kind: at for at, kinds in enumerate((OVER_FIRST, OVER_SECOND, "silu_grad")) for kind in kinds.split()}


@pytest.mark.parametrize("kind", [*OVER, "transpose", "add_grad", "subtract_grad", "matmul"])
def test_each_kind_writes_over_the_one_operand_that_paddle_says(kind: str) -> None:
    """Where that one has the result's size and nobody needs it; whether Paddle says so, tests/operators/test_operators.py holds."""
    for at in range(3):
        made = "".join(f"#{k} %{k}:float32[{4 if k == at else 8}] = pd_op.full_like() forward\n" for k in range(3))
        text = f"{made}#3 %3:float32[4] = pd_op.{kind}(%0, %1, %2) forward\njob all forward 0: 0-3@0\n"
        assert peaks(text, Target("x", in_place_pass=True)) == (96, 80 if OVER.get(kind) == at else 96)


def test_a_variable_that_is_still_read_under_an_earlier_name_is_not_written_over() -> None:
    """%2 is %1 with something added in place; who reads %1 later reads the same variable."""
    text = """
#0 %0:float32[4] = pd_op.full() forward
#1 %1:float32[4] = pd_op.matmul(%0) forward
#2 %2:float32[4]~1 = pd_op.add_(%1, %0) forward inplace=0:0
#3 %3:float32[4] = pd_op.scale(%2) forward
#4 %4:float32[4] = pd_op.matmul(%3{}) forward
job all forward 0: 0-4@0
"""
    assert peaks(text.format(", %1"), Target("x", in_place_pass=True)) == (48, 48)
    assert peaks(text.format(""), Target("x", in_place_pass=True)) == (32, 32)


def test_an_output_is_not_written_over() -> None:
    text = """
#0 %0:float32[4] = pd_op.matmul() forward
#1 %1:float32[4] = pd_op.scale(%0) forward
#2 builtin.shadow_output(%0) forward
job all forward 0: 0-1@0
"""
    assert peaks(text, Target("x", in_place_pass=True)) == (32, 32)


def test_a_batch_is_there_as_often_as_the_loader_and_the_feed_hold_it() -> None:
    """Of one micro-batch the batch is its own part."""
    text = """program rank=0 world=1 mode=train
pipeline stage=0 of 1 micro_batches={} chunks=1 schedule=accumulate
#0 %0:float32[4] = pd_op.data() forward
#1 %1:float32[4] = pd_op.gelu(%0) forward
"""
    for count, expected in ((1, 16), (2, 2 * 2 * 16), (3, 2 * 3 * 16)):
        program = parse(text.format(count))
        assert feed_bytes(program, CPU) == expected
        fed, plain = (in_order(program, target=each) for each in (CPU, msgspec.structs.replace(CPU, name="x", feed_copies=0)))
        assert fed.base["device"] - plain.base["device"] == fed.peak() - plain.peak() == expected


COMM = """
group 0 = 0,1
#0 %0:float32[64] = pd_op.matmul() forward
#1 %1:float32[64]{over} = pd_op.all_reduce{over_}(%0) forward group=0{inplace}
#2 %2:float32[256] = pd_op.matmul() forward
#3 %3:float32[1] = pd_op.mean(%2) forward
#4 %4:float32[64] = pd_op.gelu(%1) forward
"""


def test_an_answer_that_is_written_in_place_comes_in_a_buffer_of_its_own() -> None:
    text = COMM.format(over="~0", over_="_", inplace=" inplace=0:0").partition("#2")[0] + "job all forward 0: 0-1@0\n"
    assert peaks(text, Target("x", late_results=True)) == (256, 512)


def test_an_answer_that_leaves_its_job_is_there_from_its_operation_on() -> None:
    text = COMM.format(over="", over_="", inplace="") + "job one forward 0: 0-3@0\njob two forward 0: 4@0\n"
    assert peaks(text, Target("x", late_results=True)) == (256 + 1024 + 4, 256 + 1024 + 4)


VECTOR = """program rank=0 world=2 mode=train
pipeline stage=0 of 1 micro_batches=2 chunks=1 schedule=accumulate
#0 %0:float32[64] = pd_op.matmul() forward
#1 %1:vector<float32[64]> = builtin.combine(%0) forward
#2 %2:float32[64] = pd_op.concat(%1) forward
#3 %3:float32[256] = pd_op.matmul() backward
#4 %4:vector<float32[64]> = pd_op.concat_grad(%1, %3) backward{}
job one forward 0: 0-2@0
job two backward 0: 3-4@0
job three forward 1: 0-2@1
job four backward 1: 3-4@1
"""


def test_tensors_of_a_vector_stay_for_each_micro_batch_where_only_their_shape_is_read_last() -> None:
    keeps = Target("x", keeps_shapes=True)
    assert in_order(parse(VECTOR.format(" no_buffer=0")), target=keeps).base["device"] == 2 * 256
    assert in_order(parse(VECTOR.format("")), target=keeps).base["device"] == 0
