"""`reduce-in-place`: a sum is written over what nothing else reads, and over nothing else."""

from __future__ import annotations

import pytest

from interlace.cost_model import GivenCosts
from interlace.ir import Program, parse, verify
from interlace.ir.storage import storages_of
from interlace.passes import Pipeline, ReduceInPlace
from interlace.scheduler.memory.live import in_order
from tests.remarks import rules_of

HEAD = """program rank=0 world=2 mode=train
group 7 = 0,1
"""
MADE = """#0 %0:float32[4]"x" = pd_op.data() forward
#1 %1:float32[4] = pd_op.relu(%0) forward
"""
SUMMED = """#2 %2:float32[4] = pd_op.all_reduce(%1) forward group=7 {"reduce_type":0,"ring_id":7}
#3 %3:float32[4] = pd_op.relu(%2) forward
"""
ALONE = MADE + SUMMED
MERGED = """#0 %0:float32[4]!"w@GRAD@MERGE" = builtin.kwarg() forward
#1 %1:float32[4]"x" = pd_op.data() forward
#2 %2:float32[4]~0 = pd_op.add_(%0, %1) backward inplace=0:0
#3 %3:float32[4] = pd_op.all_reduce(%0) optimize group=7 {"reduce_type":0,"ring_id":7}
#4 %4:float32[4]~3 = pd_op.scale_(%3) optimize inplace=0:0
#5 %5:float32[1] = pd_op.squared_l2_norm(%4) optimize
#6 %6:float32[1] = pd_op.full() optimize {"value":0.0}
#7 %7:int64[1] = pd_op.full_int_array() optimize {"value":[0]}
#8 %8:float32[4]~0 = pd_op.set_value_with_tensor_(%0, %6, %7, %7, %7) optimize inplace=0:0 {"axes":[],"decrease_axes":[],"none_axes":[]}
"""


def reduced(text: str) -> tuple[Program, list[str]]:
    """What the pass makes of a program, and the rules of its remarks."""
    program, (report,) = Pipeline((ReduceInPlace(),)).run(parse(HEAD + text), GivenCosts({"default": 1}))
    verify(program)
    return program, rules_of(report.remarks)


def summed(program: Program) -> list[str]:
    """Names of its sums."""
    return [op.name for op in program.ops if op.kind == "all_reduce"]


def test_what_nothing_else_reads_is_overwritten() -> None:
    program, rules = reduced(ALONE)
    assert summed(program) == ["pd_op.all_reduce_"]
    assert rules == ["reduced-in-place"]
    (sum_op,) = (op for op in program.ops if op.kind == "all_reduce")
    assert (sum_op.operands, sum_op.results, sum_op.inplace, sum_op.origin) == ((1,), (2,), ((0, 0),), -1)
    assert sum_op.attrs == {"reduce_type": 0, "ring_id": 7}
    table = storages_of(program)
    assert table.numbers(2) == table.numbers(1)
    assert [op.id for op in program.ops] == [0, 1, 2, 3]


def test_one_block_less_is_held() -> None:
    """What is summed and the sum, 16 bytes each, are one."""
    text = ALONE.replace("%0:float32[4]", "%0:float32[1]").replace("%3:float32[4] = pd_op.relu", "%3:float32[1] = pd_op.mean")
    before, after = (in_order(program, [(op.id, 0) for op in program.ops]).peak() for program in (parse(HEAD + text), reduced(text)[0]))
    assert (before, after) == (16 + 16, 16 + 4)


def test_sums_of_sums_are_in_one_block() -> None:
    more = '#4 %4:float32[4] = pd_op.all_reduce(%2) forward group=7 {"reduce_type":0,"ring_id":7}\n'
    program, _ = reduced(ALONE.replace("pd_op.relu(%2) forward\n", "pd_op.relu(%4) forward\n").replace("#3 ", more + "#3 "))
    assert summed(program) == ["pd_op.all_reduce_"] * 2
    table = storages_of(program)
    assert table.numbers(4) == table.numbers(1)


def test_a_buffer_of_merged_gradients_is_overwritten_before_it_is_cleared() -> None:
    program, _ = reduced(MERGED)
    assert summed(program) == ["pd_op.all_reduce_"]
    table = storages_of(program)
    assert table.numbers(3) == table.numbers(4) == table.numbers(0)


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        pytest.param(ALONE, "#3 %3", "#4 %4:float32[4] = pd_op.exp(%1) backward\n#3 %3", id="another reader"),
        pytest.param(ALONE, "#2 %2", "#4 %4:float32[4] = pd_op.exp(%1) backward\n#2 %2", id="another reader before it"),
        pytest.param(ALONE, "#3 %3", "#4 builtin.shadow_output(%1) forward\n#3 %3", id="an output of the step"),
        pytest.param(ALONE, "%1:float32[4] = pd_op.relu(%0)", "%1:float32[4] = builtin.constant()", id="a constant"),
        pytest.param(ALONE, "pd_op.relu(%0)", "pd_op.c_identity(%0)", id="what CPU ranks leave out"),
        pytest.param(ALONE, "#3 %3", "#4 builtin.shadow_output(%2) forward\n#3 %3", id="a sum that is an output of the step"),
        pytest.param(
            ALONE, "#3 %3:float32[4] = pd_op.relu(%2)", "#3 %3:float32[4] = pd_op.share_var(%2, %0)", id="a sum in a fused buffer"
        ),
        pytest.param(MERGED, "optimize group", "backward group", id="once a micro-batch"),
        pytest.param(ALONE, MADE, '#1 %1:float32[4]!"w" = builtin.parameter() forward\n', id="a parameter"),
        pytest.param(
            ALONE, MADE, '#1 %1:float32[4]"x" = pd_op.data() forward\n', id="an input, of which Paddle may feed a part without a copy"
        ),
        pytest.param(ALONE, "%1:float32[4] = pd_op.relu(%0) forward", "%1:float32[4]~0 = pd_op.reshape(%0) forward views=0:0", id="a view"),
        pytest.param(ALONE, "pd_op.all_reduce(", "pd_op.all_gather(", id="no sum"),
        pytest.param(MERGED, "#8 ", "#9 %9:float32[4] = pd_op.exp(%0) optimize\n#8 ", id="read before it is cleared"),
        pytest.param(MERGED, "#3 ", "#9 %9:float32[4] = pd_op.exp(%2) optimize\n#3 ", id="read before it is summed"),
        pytest.param(MERGED, '"axes":[]', '"axes":[0]', id="cleared in part"),
        pytest.param(MERGED, "(%0, %6, %7, %7, %7)", "(%0, %2, %7, %7, %7)", id="overwritten by what it holds"),
        pytest.param(MERGED, "pd_op.set_value_with_tensor_(%0, %6, %7, %7, %7)", "pd_op.add_(%0, %1)", id="added to next"),
    ],
)
def test_all_else_keeps_a_block_of_its_own(text: str, old: str, new: str) -> None:
    """Bad input. Whatever may still be read, or outlives the step."""
    assert old in text
    program, rules = reduced(text.replace(old, new))
    assert [name for name in summed(program) if name.endswith("_")] == []
    assert rules == []


@pytest.mark.parametrize("reader", ["#9 %9:float32[4] = pd_op.exp(%4) optimize\n", "#9 builtin.shadow_output(%3) optimize\n"])
def test_a_sum_that_is_read_after_the_buffer_is_cleared_has_a_block_of_its_own(reader: str) -> None:
    program, _ = reduced(MERGED + reader)
    assert summed(program) == ["pd_op.all_reduce"]


def test_a_buffer_that_is_never_cleared_keeps_its_contents() -> None:
    program, _ = reduced("\n".join(line for line in MERGED.splitlines() if not line.startswith("#8 ")) + "\n")
    assert summed(program) == ["pd_op.all_reduce"]


def test_a_part_of_a_fused_buffer_stays() -> None:
    """What is cleared through a fused buffer is more than the tensor."""
    program, _ = reduced(
        """#0 %0:float32[4]"x" = pd_op.data() forward
#1 %1:vector<float32[4];float32[4]> = builtin.combine(%0, %0) forward
#2 %2:vector<float32[4];float32[4]>, %3:float32[8] = pd_op.coalesce_tensor(%1) forward
#3 %4:float32[4], %5:float32[4] = builtin.split(%2) forward
#4 %6:float32[4] = pd_op.all_reduce(%4) forward group=7 {"reduce_type":0,"ring_id":7}
#5 %7:float32[4] = pd_op.relu(%6) forward
"""
    )
    assert summed(program) == ["pd_op.all_reduce"]
