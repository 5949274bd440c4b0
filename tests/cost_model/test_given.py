"""Cost models made by hand."""

from __future__ import annotations

import pytest

from interlace.cost_model import GivenCosts
from interlace.errors import ConfigError
from tests.cost_model.programs import binary, collective, matmul, unary

TABLE = {"comm": 100, "gemm": 5, "default": 1}


def test_times_follow_the_table():
    costs = GivenCosts(TABLE)
    assert isinstance(costs, GivenCosts)
    assert costs.op_time(*collective("pd_op.all_reduce_", "4")).dur_ns == 100
    assert costs.op_time(*matmul("4,4", "4,4", "4,4")).dur_ns == 5
    assert costs.op_time(*unary("pd_op.gelu", "4")).dur_ns == 1
    assert costs.op_time(*unary("pd_op.never_heard_of", "4")).dur_ns == 1
    assert costs.op_time(*unary("pd_op.full_int_array", "4")).dur_ns == 0
    assert costs.op_time(*matmul("4,4", "4,4", "4,4")).how == "given"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pd_op.all_reduce_", 1),
        ("all_reduce", 2),
        ("comm:all_reduce@2", 3),
        ("comm:all_reduce", 4),
        ("comm", 5),
        ("default", 6),
    ],
)
def test_the_most_specific_entry_counts(key, value):
    table = {"pd_op.all_reduce_": 1, "all_reduce": 2, "comm:all_reduce@2": 3, "comm:all_reduce": 4, "comm": 5, "default": 6}
    left = {name: dur for name, dur in table.items() if dur >= value}
    assert GivenCosts(left).op_time(*collective("pd_op.all_reduce_", "4")).dur_ns == value
    assert key in left


def test_stretch_is_given_either_way_round_and_one_by_default():
    costs = GivenCosts(TABLE, stretch={("gemm", "comm"): (1.5, 3.0)})
    gemm, (reduce, values, groups) = matmul("4,4", "4,4", "4,4")[0], collective("pd_op.all_reduce_", "4")
    assert costs.stretch(gemm, reduce, values, groups) == (1.5, 3.0)
    assert costs.stretch(reduce, gemm, values, groups) == (3.0, 1.5)
    assert costs.stretch_between("memory:gelu", "comm:all_reduce@2")[:2] == (1.0, 1.0)


def test_host_costs_are_given():
    costs = GivenCosts(TABLE, host_ns=7, job_ns=11)
    assert (costs.host_ns(binary("pd_op.add", "4")[0]), costs.job_ns()) == (7, 11)


def test_no_entry_and_a_bad_entry_are_errors():
    with pytest.raises(ConfigError, match=r"no entry for #1 pd_op.gelu: expected one of pd_op.gelu, gelu, memory:gelu, memory, default"):
        GivenCosts({"gemm": 5}).op_time(*unary("pd_op.gelu", "4"))
    with pytest.raises(ConfigError, match=r"'gemm' is -1, expected a whole number of nanoseconds >= 0"):
        GivenCosts({"gemm": -1})
