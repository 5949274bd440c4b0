"""Factors between computation and collectives from made-up steps."""

from __future__ import annotations

import pytest

from benchmarks.gpu.beside_collectives import Beside, Ran, Traced, summary


def test_factors_follow_from_what_each_took_by_which_began_first() -> None:
    """Beside products 0.8 of a collective's work is done in a microsecond, beside others half of it, and none beside a product that ran."""
    operations = [Beside("gemm", "all_reduce@2", 2000.0, 1000.0), Beside("gemm first", "all_reduce@2", 3000.0, 3000.0)]
    rans = [
        Ran("all_reduce@2", 1000.0, 800.0, {"gemm": 1000.0}),
        Ran("all_reduce@2", 1000.0, 600.0, {"memory": 800.0}),
        Ran("all_reduce@2", 1000.0, 400.0, {"gemm first": 600.0}),
    ]
    waited = Ran("all_reduce@2", 5000.0, 800.0, {"gemm": 5000.0})
    mine = Traced(operations, {str(k): ran for k, ran in enumerate(rans)})
    found = summary([[mine, Traced([], {"0": waited})]])["all_reduce@2"]
    assert sorted(found) == ["gemm", "gemm first"]  # of the rest too little ran beside one
    assert (found["gemm"]["op"], found["gemm"]["beside"]) == pytest.approx((2.0, 1.25))
    assert (found["gemm first"]["op"], found["gemm first"]["beside"]) == pytest.approx((1.0, 100.0))
