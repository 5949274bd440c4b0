"""Laws that hold for every size: never negative, never falling, the same twice, and a sample's own time where measured."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from interlace.cost_model import CostModel, GivenCosts, load_profile
from interlace.cost_model.comm import CommTimes, CopyTimes
from interlace.cost_model.curves import Curve, Surface, check_error
from interlace.cost_model.profile import CommSample
from tests.cost_model.programs import collective, matmul, unary
from tests.cost_model.together import pair_time

H200 = CostModel(load_profile("h200"))
CPU = CostModel(load_profile("cpu"))
MODELS = st.sampled_from([H200, CPU])
SIZES = st.integers(1, 1 << 34)
POINTS = st.lists(st.tuples(st.integers(1, 1 << 30), st.integers(1, 1 << 30)), min_size=1, max_size=12)
KINDS = st.sampled_from(["gelu", "gelu_grad", "silu", "add_n", "layer_norm", "softmax", "transpose", "slice", "sum", "adamw", "cast"])


@example([(1, 7), (3, 1)], 1, 2, 0)
@given(POINTS, SIZES, SIZES, st.integers(0, 5000))
def test_a_curve_never_falls_and_stays_positive(points, a, b, floor_ns):
    curve = Curve(points, floor_ns)
    small, large = sorted((a, b))
    assert 0 < curve.at(small) <= curve.at(large) * (1 + 1e-9)


@given(st.lists(st.integers(1, 1 << 30), min_size=1, max_size=12, unique=True), st.data())
def test_a_curve_through_rising_points_goes_through_them(sizes, data):
    durs = sorted(data.draw(st.lists(st.integers(1, 1 << 30), min_size=len(sizes), max_size=len(sizes))))
    points = list(zip(sorted(sizes), durs, strict=True))
    curve = Curve(points)
    assert all(abs(curve.at(size) / dur - 1) < 1e-6 for size, dur in points)


DEEP = st.lists(st.tuples(st.sampled_from([1, 64, 100, 4096]), st.integers(1, 1 << 30), st.integers(1, 1 << 30)), min_size=1, max_size=12)


@given(DEEP, st.integers(1, 1 << 13), st.integers(1, 1 << 13), SIZES, SIZES, st.integers(0, 5000))
def test_time_never_falls_with_more_results_nor_with_more_depth(points, depth, more, results, grown, floor_ns):
    surface = Surface(points, floor_ns)
    took = surface.at(depth, depth * results)
    assert 0 < took <= surface.at(depth, depth * (results + grown)) * (1 + 1e-9)
    assert took <= surface.at(depth + more, (depth + more) * results) * (1 + 1e-9)


@given(POINTS, st.integers(0, 5000))
def test_a_surface_of_one_depth_is_its_curve(points, floor_ns):
    surface, curve = Surface([(7, size, dur) for size, dur in points], floor_ns), Curve(points, floor_ns)
    assert all(abs(surface.at(7, size) / curve.at(size) - 1) < 1e-9 for size in (1, 1000, 1 << 20, 1 << 33))


@given(DEEP)
def test_the_error_of_a_surface_is_the_same_in_other_units_of_time(points):
    slower = tuple((depth, size, 3 * dur_ns) for depth, size, dur_ns in points)
    assert check_error(slower) == pytest.approx(check_error(tuple(points)), rel=1e-6, abs=1e-6)


@given(MODELS, KINDS, st.integers(1, 1 << 14), st.integers(1, 1 << 14), st.sampled_from(["float32", "bfloat16", "float16"]))
def test_memory_bound_operations_never_take_less_when_larger(model, kind, rows, more, dtype):
    small = model.op_time(*unary(f"pd_op.{kind}", f"{rows},1024", dtype))
    large = model.op_time(*unary(f"pd_op.{kind}", f"{rows + more},1024", dtype))
    assert small.dur_ns >= 0
    assert "exact" in (small.how, large.how) or small.dur_ns <= large.dur_ns


@given(
    MODELS,
    st.sampled_from(["softmax", "softmax_grad", "layer_norm"]),
    st.integers(1, 1 << 14),
    st.integers(1, 1 << 14),
    st.integers(1, 1 << 14),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_longer_rows_never_take_less(model, kind, rows, cols, more, dtype):
    small, large = (model.op_time(*unary(f"pd_op.{kind}", f"{rows},{length}", dtype)) for length in (cols, cols + more))
    assert "exact" in (small.how, large.how) or small.dur_ns <= large.dur_ns


TRANSPOSES = st.sampled_from([(False, False), (False, True), (True, False), (True, True)])


def product(m, n, k, dtype, transposed=(False, False)):
    """A product of [m, k] by [k, n]; `transposed` says which operands are transposed in memory."""
    x, y = (f"{k},{m}" if transposed[0] else f"{m},{k}"), (f"{n},{k}" if transposed[1] else f"{k},{n}")
    attrs = json.dumps({"transpose_x": transposed[0], "transpose_y": transposed[1]})
    return matmul(x, y, f"{m},{n}", dtype, attrs)


ALIGNED = st.integers(1, 512).map(lambda size: 8 * size)
"""Rows of multiples of 16 bytes; others take longer than larger ones (test_unaligned.py)."""


@settings(deadline=None)  # the first answer of a kind checks all its samples against each other
@given(
    MODELS,
    st.tuples(*[ALIGNED] * 3),
    st.integers(0, 2),
    ALIGNED,
    TRANSPOSES,
    st.sampled_from(["float32", "bfloat16"]),
)
def test_matrix_products_never_take_less_when_larger(model, sizes, grown, more, transposed, dtype):
    bigger = [size + more * (place == grown) for place, size in enumerate(sizes)]
    small, large = (model.op_time(*product(m, n, k, dtype, transposed)) for m, n, k in (sizes, bigger))
    assert small.dur_ns > 0
    assert "exact" in (small.how, large.how) or small.dur_ns <= large.dur_ns


@given(
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"]), SIZES, SIZES, st.integers(2, 8)
)
def test_collectives_never_take_less_when_larger(kind, a, b, ranks):
    times = CommTimes(H200.profile.collectives)
    small, large = (times.time(kind, ranks, size) for size in sorted((a, b)))
    assert small is not None
    assert large is not None
    assert 0 < small.dur_ns <= large.dur_ns * (1 + 1e-9)


@given(SIZES, SIZES, st.sampled_from(["d2h", "h2d"]), st.sampled_from([None, 1, 2, 3, 4, 8]))
def test_copies_never_take_less_when_larger(a, b, way, ranks):
    times = CopyTimes(H200.profile.copies, ranks)
    small, large = (times.time(way, size) for size in sorted((a, b)))
    assert small is not None
    assert large is not None
    assert 0 < small.dur_ns <= large.dur_ns * (1 + 1e-9)


@given(st.integers(2, 64), st.integers(2, 64))
def test_an_all_reduce_over_more_ranks_of_equal_size_takes_no_less(a, b):
    times = CommTimes([CommSample("all_reduce", 4, 1 << 24, 94_000)])
    few, many = (times.time("all_reduce", ranks, 1 << 24) for ranks in sorted((a, b)))
    assert few is not None
    assert many is not None
    assert few.dur_ns <= many.dur_ns


def test_every_sample_of_a_profile_is_answered_by_itself():
    for model in (H200, CPU):
        for sample in model.profile.ops:
            if "m" in sample.dims and sample.dims["batch"] == 1:
                m, n, k = (sample.dims[name] for name in "mnk")
                transposed = tuple(bool(sample.dims.get(name)) for name in ("transpose_x", "transpose_y"))
                found = model.op_time(*product(m, n, k, sample.dtype, transposed))
                assert (found.how, found.dur_ns) == ("exact", sample.dur_ns), sample
        for sample in model.profile.collectives:
            if sample.ctas == 0 and sample.kind == "all_reduce":
                ranks = ",".join(map(str, range(sample.group_size)))
                found = model.op_time(*collective("pd_op.all_reduce_", str(sample.size_bytes // 2), ranks=ranks))
                assert (found.how, found.dur_ns) == ("exact", sample.dur_ns), sample


@given(MODELS, KINDS, st.integers(1, 1 << 20))
def test_a_model_made_again_answers_the_same(model, kind, elements):
    found = unary(f"pd_op.{kind}", str(elements))
    assert CostModel(model.profile).op_time(*found) == model.op_time(*found) == model.op_time(*found)


@given(st.floats(1, 1e9), st.floats(1, 1e9), st.floats(1, 12), st.floats(1, 12))
def test_a_pair_takes_no_less_than_its_longer_one_and_no_more_than_both_stretched(a, b, stretch_a, stretch_b):
    together = pair_time(a, b, stretch_a, stretch_b)
    assert max(a, b) * (1 - 1e-9) <= together <= max(a * stretch_a, b * stretch_b) * (1 + 1e-9)


OPS = sorted({row.op for row in H200.profile.interference} | {"memory:silu", "unknown", "gemm"})
SIDES = sorted({row.beside for row in H200.profile.interference} | {"comm:broadcast@16", "comm:all_reduce@8"})


@given(st.sampled_from(OPS), st.sampled_from(SIDES))
def test_stretch_is_symmetric_and_never_a_speed_up(op, beside):
    there, back = H200.stretch_between(op, beside), H200.stretch_between(beside, op)
    assert (there.op, there.beside) == (back.beside, back.op)
    assert min(there.op, there.beside) >= 1
    assert GivenCosts({"default": 1}).stretch_between(op, beside).op == 1
