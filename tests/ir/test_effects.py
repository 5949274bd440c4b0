"""What may be repeated or run in another order, by what an operation does beside its results."""

from __future__ import annotations

from typing import Any

import pytest

from interlace.errors import PlanError
from interlace.ir import Graph, Op, Program, dependencies, parse
from interlace.ir.effects import effect_of, is_constant, is_ordered, is_random, is_repeatable
from interlace.ir.kinds import OPAQUE
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
