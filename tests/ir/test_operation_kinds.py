"""The table of operation kinds: its names are Paddle's, each stands once, and each collective has the time of what its kernel sends."""

from __future__ import annotations

import pytest

from interlace.cost_model import CostModel, load_profile
from interlace.cost_model.comm import traffic
from interlace.cost_model.work import work_of
from interlace.ir import operation_kinds as table
from interlace.ir import operators
from interlace.ir.kinds import ring_of
from tests.cost_model.programs import last_op

FAMILIES = ["GEMMS", "ATTENTIONS", "ELEMENTWISE", "MOVES", "PICKS", "TRANSPOSES", "NORMS", "SOFTMAXES", "REDUCTIONS", "OPTIMIZERS"]
OPERATORS = operators.DRAWS | operators.ACTS | operators.CONTROLS | operators.COMPUTES
"""All of Paddle: tests/operators compares them with the wheel."""
FORMER = operators.names("""
    c_allgather c_allreduce_avg c_allreduce_max c_allreduce_min c_allreduce_prod c_broadcast c_reduce_sum c_reducescatter p_recv p_send
""")
"""Kinds of older versions."""


def test_no_kind_is_in_two_families() -> None:
    seen: dict[str, str] = {}
    for name in (*FAMILIES, "FREE", "COLLECTIVES"):
        for kind in getattr(table, name):
            assert seen.setdefault(kind, name) == name, kind


def test_kinds_are_named_as_paddle_names_them() -> None:
    assert {kind for name in (*FAMILIES, "VIEWS") for kind in getattr(table, name)} <= OPERATORS
    communicate = {*table.COLLECTIVES, *table.SENDS, *table.RECEIVES, *table.SILENT, *table.WITHOUT_GROUP}
    assert communicate - OPERATORS == FORMER


def test_a_kind_communicates_in_one_way() -> None:
    lists = (set(table.COLLECTIVES), table.SENDS, table.RECEIVES, table.SILENT)
    assert sum(map(len, lists)) == len(set().union(*lists))
    assert set(table.COLLECTIVES) >= table.ALONE_WITHOUT_RANKS


@pytest.mark.parametrize("kind", sorted(table.COLLECTIVES))
def test_every_collective_has_a_traffic_and_kernels_that_are_known_or_told(kind: str) -> None:
    known = table.COLLECTIVES[kind]
    data = [f"%{place}:float32[4,6] = pd_op.data() forward" for place in range(3)]
    op, values, groups = last_op(*data, f"%3:float32[4,6] = pd_op.{kind}(%0, %1, %2) forward group=1")
    found = [part for part in work_of(op, values).parts if part.family == "comm"]
    assert [part.kind for part in found] == [known.traffic] * len(known.messages)
    assert traffic(known.traffic, 2) > 0
    assert not known.kernel or table.memory_family(known.kernel)
    estimate = CostModel(load_profile("h200")).op_time(op, values, groups)
    assert estimate.dur_ns > 0
    assert (estimate.how == "unknown") == bool(known.uncounted)
    assert known.uncounted in estimate.detail


@pytest.mark.parametrize(
    ("call", "messages"),
    [
        ("global_scatter(%0, %1, %1)", [("all_to_all", 96)]),
        ("global_gather_grad(%1, %1, %0)", [("all_to_all", 96)]),
        ("margin_cross_entropy(%0, %1)", [("all_reduce", 4), *[("all_reduce", 16)] * 3]),
        ("margin_cross_entropy_grad(%0, %1, %0, %1)", [("all_reduce", 4)]),
        ("class_center_sample(%1)", [("all_reduce", 4)]),
        ("fused_attention(%0, %1)", [("all_reduce", 96)]),
        ("fused_feedforward_grad(%0, %1)", [("all_reduce", 96)]),
    ],
)
def test_collectives_within_kernels_send_what_paddles_do(call: str, messages: list[tuple[str, int]]) -> None:
    data = ["%0:float32[4,6] = pd_op.data() forward", "%1:int64[4] = pd_op.data() forward"]
    op, values, _ = last_op(*data, f"%3:float32[4,6] = pd_op.{call} forward group=1")
    assert [(part.kind, part.size_bytes) for part in work_of(op, values).parts if part.family == "comm"] == messages


def test_of_one_rank_alone_some_kinds_are_not_collectives() -> None:
    for kind in sorted(table.ALONE_WITHOUT_RANKS):
        op, _, _ = last_op(f'%0:float32[4] = pd_op.{kind}() forward {{"ring_id":0,"nranks":1}}')
        assert ring_of(op) == -1
