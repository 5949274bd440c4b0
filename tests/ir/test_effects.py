"""What may be repeated or run in another order, by what an operation does beside its results."""

from __future__ import annotations

from typing import Any

import pytest

from interlace.errors import PlanError
from interlace.ir import Graph, Op, Program, dependencies, parse, show, verify
from interlace.ir.effects import effect_of, is_constant, is_ordered, is_random, is_repeatable
from interlace.ir.graph import overwritten, written_operands
from interlace.ir.kinds import OPAQUE
from interlace.ir.storage import storages_of
from interlace.scheduler.hazards import check

DRAWING = (
    "fractional_max_pool2d",
    "memory_efficient_attention",
    "fused_attention",
    "rnn",
    "uniform_random_batch_size_like",
    "gaussian_inplace_",
    "shuffle_batch",
    "flash_attn_varlen_qkvpacked",
    "dropout",
    "dpsgd",
    "nce",
    "nce_grad",
    "random_",
    "graph_sample_neighbors",
    "weighted_sample_neighbors",
    "tdm_sampler",
    "pyramid_hash",
    "fused_gate_attention",
    "fused_feedforward",
    "cudnn_lstm",
    "exponential_",
    "truncated_gaussian_random",
)
ACTING = ("print", "assert", "check_numerics", "read_file", "save_combine", "sync_batch_norm_", "tensorrt_engine", "accuracy_check")
UNKNOWN = ("custom_op.gelu", "py_op.mine", "pd_op.of_a_later_version", "builtin.py_func")


def op(name: str, **fields: Any) -> Op:
    return Op(1, name, (0,), (1,), "forward", **fields)


@pytest.mark.parametrize("kind", DRAWING)
def test_what_draws_is_not_repeated_and_keeps_its_place(kind: str) -> None:
    drawing = op(f"pd_op.{kind}")
    assert is_random(drawing)
    assert is_ordered(drawing)
    assert not is_repeatable(drawing)


@pytest.mark.parametrize("kind", ACTING)
def test_what_acts_is_not_repeated_and_keeps_its_place(kind: str) -> None:
    acting = op(f"pd_op.{kind}")
    assert not is_random(acting)
    assert is_ordered(acting)
    assert not is_repeatable(acting)


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_operator_counts_as_one_that_does_both(name: str) -> None:
    unknown = op(name)
    assert is_random(unknown)
    assert is_ordered(unknown)
    assert not is_repeatable(unknown)


@pytest.mark.parametrize(
    ("name", "attrs", "draws"),
    [
        ("flash_attn", {"dropout": 0.0}, False),
        ("flash_attn", {"dropout": 0.1}, True),
        ("flash_attn", {"dropout": OPAQUE}, True),
        ("flash_attn", {}, True),
        ("rnn_", {"dropout_prob": 0.0}, False),
        ("rnn", {"dropout_prob": 0.5}, True),
        ("fractional_max_pool2d", {"random_u": 0.3}, False),
        ("fractional_max_pool3d", {"random_u": 0.0}, True),
    ],
)
def test_an_attribute_may_keep_it_from_drawing(name: str, attrs: dict[str, Any], draws: bool) -> None:
    assert is_random(op(f"pd_op.{name}", attrs=attrs)) == draws


def test_what_computes_is_repeated_unless_it_writes_in_place_or_holds_what_is_not_known() -> None:
    assert is_repeatable(op("pd_op.gelu"))
    assert is_repeatable(op("pd_op.all_reduce", group=3))
    assert not is_repeatable(op("pd_op.batch_norm_", inplace=((0, 0),)))
    assert not is_repeatable(op("pd_op.gelu", attrs={"x": OPAQUE}))
    assert not is_repeatable(op("pd_op.if", num_blocks=2))
    assert not is_repeatable(op("pd_op.recv_v2", group=3))
    assert not is_repeatable(op("builtin.parameter"))
    assert is_constant(Op(1, "pd_op.full", (), (1,), "forward"))
    for name in ("pd_op.seed", "pd_op.read_file", "pd_op.data", "custom_op.table", "cf.stack_create"):
        assert not is_constant(Op(1, name, (), (1,), "forward"))


def test_boundaries_and_control_flow_have_an_order_of_their_own() -> None:
    for name in ("builtin.kwarg", "builtin.parameter", "pd_op.data", "pd_op.if", "cf.stack_create", "cf.tuple_push"):
        assert not is_ordered(op(name))
    assert effect_of(op("pd_op.if")) == "controls"


TEXT = """program rank=0 world=1 mode=train
pipeline stage=0 of 1 micro_batches=2 chunks=1 schedule=accumulate
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = NAME(%0) forward
#2 %2:float32[2] = pd_op.dropout(%0) forward
"""


@pytest.mark.parametrize("name", [*(f"pd_op.{kind}" for kind in (*DRAWING, *ACTING)), *UNKNOWN])
def test_draws_acts_and_unknown_operators_are_of_one_order(name: str) -> None:
    """Within a program, and of the jobs of a step."""
    program = parse(TEXT.replace("NAME", name))
    assert dependencies(Graph(program), program.ops)[2] == {0, 1}
    assert found(program, "1@0 2@0", "1@1 2@1") == []
    may_write = name in UNKNOWN
    assert found(program, "2@0 1@0", "1@1 2@1") == ["wrong-version"] * may_write + ["draw-order"]
    with pytest.raises(PlanError, match=r"#1 .* of micro-batch 1 0 time\(s\), expected 1"):
        found(program, "1@0 2@0", "2@1")


def test_what_computes_has_no_such_order() -> None:
    program = parse(TEXT.replace("NAME", "pd_op.gelu"))
    assert dependencies(Graph(program), program.ops)[2] == {0}
    assert found(program, "2@0 1@0", "1@1 2@1") == []


def found(program: Program, *jobs: str) -> list[str]:
    text = TEXT.replace("NAME", program.ops[1].name) + "".join(f"job j{k} forward {k}: {job}\n" for k, job in enumerate(jobs))
    return [finding.kind for finding in check([parse(text)])]


SUM = """program rank=0 world=1 mode=train
pipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=accumulate
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2]!"buffer" = builtin.parameter() forward
#2 %2:float32[2]~1 = pd_op.fused_linear_param_grad_add(%0, %0, %1, _) forward views=0:2
#3 %3:float32[2] = pd_op.exp(%1) forward
#4 %4:float32[2] = pd_op.exp(%2) forward
"""


def test_a_sum_into_a_buffer_that_nothing_declares_is_a_write() -> None:
    """Who reads the buffer, by whichever name, keeps its place; the sum is not repeated."""
    program = parse(SUM)
    verify(program)
    fused = program.ops[2]
    assert written_operands(fused) == {1}
    assert not is_repeatable(fused)
    table = storages_of(program)
    assert table.writes(fused) == [2]
    assert table.variable(2) != table.variable(1)
    assert overwritten(program)[2] == set(table.numbers(1))
    after = dependencies(Graph(program), program.ops)
    assert {2} <= after[3] & after[4]
    assert [each.kind for each in check([parse(SUM + "job j forward 0: 2@0 3@0 4@0\n")])] == []
    assert [each.kind for each in check([parse(SUM + "job j forward 0: 3@0 2@0 4@0\n")])] == ["read-before-write"]


BRANCH = """program rank=0 world=1 mode=train
pipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=accumulate
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = pd_op.exp(%0) forward
#2 %2:float32[2] = pd_op.tanh(%0) forward
#3 %3:float32[2] = pd_op.NAME(%0, %1, %2) forward PAIRS num_blocks=1
#4 %4:float32[2] = pd_op.gelu(%3) forward
#5 %5:float32[2]~2 = pd_op.relu_(%2) forward inplace=0:0
"""


def test_the_result_of_a_branch_may_be_in_the_memory_of_what_it_hands_on() -> None:
    """What is written over later is read before, through the result too; the branch itself writes nothing of it."""
    program = parse(BRANCH.replace("NAME", "if").replace("PAIRS", "views=0:1,0:2"))
    verify(program)
    assert parse(show(program)) == program
    table = storages_of(program)
    assert set(table.numbers(3)) > {*table.numbers(1), *table.numbers(2)}
    assert len(table.numbers(3)) == 3
    assert written_operands(program.ops[3]) == set()
    assert 3 not in overwritten(program)
    assert 4 in dependencies(Graph(program), program.ops)[5]
    text = show(program)
    assert check([parse(text + "job j forward 0: 1@0 2@0 3@0 4@0 5@0\n")]) == []
    assert "wrong-version" in [each.kind for each in check([parse(text + "job j forward 0: 1@0 2@0 3@0 5@0 4@0\n")])]


def test_a_loop_writes_over_its_condition_and_what_its_block_writes() -> None:
    program = parse(BRANCH.replace("NAME", "while").replace("PAIRS", "inplace=0:1"))
    verify(program)
    assert written_operands(program.ops[3]) == {0, 1}
    assert overwritten(program)[3] == {n for v in (0, 1) for n in storages_of(program).numbers(v)}


def test_what_acts_in_a_block_acts_outside() -> None:
    printing = op("pd_op.if", attrs={"interlace_inside": ["pd_op.print"]}, num_blocks=2)
    assert effect_of(printing) == "acts"
    assert is_ordered(printing)
    assert not is_random(printing)


def test_an_unknown_operator_may_write_and_hand_on_what_it_is_given() -> None:
    """What lasts it writes only where it says so: its order among those that read a parameter holds within the program."""
    text = (
        SUM.replace("pd_op.fused_linear_param_grad_add(%0, %0, %1, _)", "custom_op.mine(%0, %1)")
        .replace(" views=0:2", "")
        .replace("~1", "")
    )
    program = parse(text)
    assert written_operands(program.ops[2]) == {0, 1}
    assert storages_of(program).writes(program.ops[2]) == [2, 0]
    assert set(storages_of(program).numbers(2)) > {*storages_of(program).numbers(0), *storages_of(program).numbers(1)}
    assert 2 in dependencies(Graph(program), program.ops)[3]


HIDDEN = """program rank=0 world=1 mode=train
pipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=accumulate
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = pd_op.exp(%0) forward
#2 %2:float32[2] = pd_op.tanh(%1) forward stream="a"
#3 %3:float32[2] = NAME(%1) forward
job j forward 0: 1@0 2@0 3@0
"""


@pytest.mark.parametrize("name", ["custom_op.mine", "pd_op.dgc", "pd_op.exp"])
def test_what_the_executor_does_not_know_to_be_written_it_does_not_keep_behind_readers(name: str) -> None:
    """On another stream, in the same job: the executor orders by variables, and sees a second reader of one."""
    kinds = {finding.kind for finding in check([parse(HIDDEN.replace("NAME", name))])}
    assert ("race" in kinds) == (name != "pd_op.exp")
