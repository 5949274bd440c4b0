"""What an executor does beside the program, by hand; tests/road/test_memory.py holds it to Paddle itself."""

from __future__ import annotations

from interlace.ir import parse
from interlace.scheduler.executor_memory import CPU, Executor
from interlace.scheduler.memory import in_order
from tests.scheduler.plans import Shape, world

HEAD = "program rank=0 world=2 mode=train\npipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=none\n"


def peaks(text: str, executor: Executor) -> tuple[int, int]:
    """The plain peak and the executor's."""
    program = parse(HEAD + text)
    return in_order(program).peak(), in_order(program, executor=executor).peak()


def test_writes_over_an_operand_that_nobody_needs() -> None:
    chain = """
#0 %0:float32[4] = pd_op.full() forward
#1 %1:float32[4] = pd_op.matmul(%0) forward
#2 %2:float32[4] = pd_op.scale(%1) forward
#3 %3:float32[4] = pd_op.softmax(%2) forward
#4 %4:float32[4] = pd_op.matmul(%3) backward
job all forward 0: 0-4@0
"""
    assert peaks(chain, Executor(reuses=True)) == (32, 32)
    assert peaks(chain.replace("(%0) forward", "() forward"), Executor(reuses=True)) == (32, 32)
    only = HEAD + chain.replace("job all forward 0: 0-4@0", "job all forward 0: 1-3@0").replace("(%0)", "()")
    assert (in_order(parse(only)).peak(), in_order(parse(only), executor=Executor(reuses=True)).peak()) == (32, 16)


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
    assert peaks(text, Executor(reuses=True)) == (32, 32)
    alone = text.replace("add_grad(%1, %2) backward no_buffer=0", "add_grad(%2) backward")
    assert peaks(alone, Executor(reuses=True)) == (32, 20)


def test_kernels_and_late_results() -> None:
    text = """
#0 %0:float32[4] = pd_op.matmul() forward
#1 %1:float32[4] = pd_op.layer_norm_grad(%0) backward
job all forward 0: 0-1@0
"""
    assert peaks(text, Executor(workspace={"layer_norm_grad": 2})) == (32, 64)
    late = """
group 0 = 0,1
#0 %0:float32[64] = pd_op.matmul() forward
#1 %1:float32[64] = pd_op.all_reduce(%0) forward group=0
#2 %2:float32[256] = pd_op.matmul() forward
#3 %3:float32[1] = pd_op.mean(%2) forward
#4 %4:float32[64] = pd_op.gelu(%1) forward
job all forward 0: 0-4@0
"""
    assert peaks(late, Executor(late_results=True)) == (256 + 1024 + 4, 1024 + 4)


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
    plain, kept = peaks(text, Executor(keeps_shape_vectors=True))
    assert (plain, kept) == (1024 + 256, 1024 + 256 + 256)


def test_nothing_else_changes_on_random_worlds() -> None:
    """An executor that only reuses never holds more, and all kinds together hold what both pools hold."""
    for program in world(Shape(1, 2, 2, 4, width=16)):
        plain, reused = in_order(program), in_order(program, executor=Executor(reuses=True))
        assert reused.peak() <= plain.peak()
        assert in_order(program, executor=CPU).peak("all") >= in_order(program, executor=CPU).peak()
