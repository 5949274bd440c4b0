"""Look-ups over a few made-up measurements, each number worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.errors import Case, order_share, summarize
from interlace.cost_model.comm import BEYOND_ERROR, CALL_ERROR, GROUP_ERROR, PROXY_ERROR, CommTimes, CopyTimes
from interlace.cost_model.curves import FEW_POINTS_ERROR, Curve, Surface, check_error, line
from interlace.cost_model.interference import InterferenceTable
from interlace.cost_model.profile import CommSample, CopySample, Interference

REDUCES = [CommSample("all_reduce", 2, 1000, 100), CommSample("all_reduce", 2, 2000, 120)]
"""20 ns for each 1000 bytes more, so 80 ns of latency."""


# ------------------------------------------------------------------------------------------------------------------- curves


@pytest.mark.parametrize(("size", "dur_ns"), [(800, 80), (50, 6), (0, 2), (200, 20)])
def test_a_curve_grows_in_proportion_above_and_falls_to_its_floor_below(size: int, dur_ns: float) -> None:
    curve = Curve([(100, 10), (400, 40)], floor_ns=2)
    assert curve.at(size) == pytest.approx(dur_ns)
    assert curve.inside(size) == (100 <= size <= 400)


def test_neighbours_that_fall_are_pooled_by_their_number() -> None:
    """Three points of 100, 10 and 10 ns: all of them take their geometric mean."""
    curve = Curve([(1, 100), (2, 10), (3, 10)])
    assert [curve.at(size) for size in (1, 2, 3)] == pytest.approx([10_000 ** (1 / 3)] * 3)


def test_points_of_one_size_are_averaged() -> None:
    assert Curve([(10, 4), (10, 16), (20, 40)]).at(10) == pytest.approx(8)


def test_between_two_depths_time_is_interpolated_at_the_same_number_of_results() -> None:
    """20 results take 10 ns at depth 10 and 40 at depth 40; at depth 20, halfway by the logarithm, twice ten."""
    surface = Surface([(10, 200, 10), (40, 800, 40)], floor_ns=1)
    assert [surface.at(depth, 20 * depth) for depth in (10, 20, 40, 80, 5)] == pytest.approx([10, 20, 40, 80, 1 + 9 / 2])
    assert (surface.inside(10, 200), surface.inside(5, 200), surface.inside(80, 800)) == (True, False, False)


def test_beyond_its_own_points_a_depth_runs_as_all_points_do() -> None:
    """Depth 10 was measured at a size of 100 alone, where a launch decides; from there to 1600 all grow tenfold, not sixteen times."""
    surface = Surface([(10, 100, 6), (40, 100, 6), (40, 1600, 60)])
    assert surface.at(10, 1600) == pytest.approx(60)


def test_no_depth_takes_less_than_a_smaller_one() -> None:
    """Ten results: 8 ns at depth 10, 4 at depth 20."""
    surface = Surface([(10, 100, 8), (20, 200, 4), (10, 200, 16), (20, 400, 8)])
    assert surface.at(20, 200) >= surface.at(10, 100) > 0


def test_the_error_of_a_curve_is_the_upper_quartile_of_what_each_point_is_off() -> None:
    """Left out in turn, the points at 8 and 16 are off by sqrt(4 x 32) / 8 - 1 and a half, the others by nothing."""
    points = ((1, 1, 1), (1, 2, 2), (1, 4, 4), (1, 8, 8), (1, 16, 32))
    assert check_error(points) == pytest.approx(2**0.5 - 1)
    assert check_error(points[:2]) == FEW_POINTS_ERROR
    assert check_error(points[:3]) == pytest.approx(0)


def test_latency_and_slope_are_medians() -> None:
    """Slopes 0.05, 0.1, 0.15; intercepts 5, 0, 5."""
    assert line([(100, 15), (200, 20), (300, 35)]) == pytest.approx((5.0, 0.1))
    assert line([(100, 10), (200, 5)]) == pytest.approx((0.0, 0.0625))


# --------------------------------------------------------------------------------------------------------------- collectives


@pytest.mark.parametrize(
    ("size", "dur_ns", "error", "how"),
    [
        (500, 90, BEYOND_ERROR, "extrapolated"),
        (1000, 100, CALL_ERROR, "exact"),
        (1414, 109.54, CALL_ERROR, "interpolated"),
        (4000, 160, BEYOND_ERROR, "extrapolated"),
    ],
)
def test_a_collective_at_other_sizes(size: int, dur_ns: float, error: float, how: str) -> None:
    """Below the smallest between latency and its time, between by the curve, above by bandwidth."""
    found = CommTimes(REDUCES).time("all_reduce", 2, size)
    assert found is not None
    assert found.dur_ns == pytest.approx(dur_ns, rel=1e-4)
    assert (found.how, found.rel_error) == (how, error)


def test_a_small_collective_takes_no_less_than_any_kernel() -> None:
    found = CommTimes(REDUCES, floor_ns=90).time("all_reduce", 2, 500)
    assert found is not None
    assert found.dur_ns == pytest.approx(95)


@pytest.mark.parametrize(("size", "dur_ns"), [(500, 80 + 70 / 2), (1000, 150), (2000, 150 + 70)])
def test_a_group_of_one_known_size_has_the_latency_of_the_others(size: int, dur_ns: float) -> None:
    """Groups of two take 80 ns to start, so that of 150 ns over four 70 are for the bytes."""
    found = CommTimes([*REDUCES, CommSample("all_reduce", 4, 1000, 150)]).time("all_reduce", 4, size)
    assert found is not None
    assert found.dur_ns == pytest.approx(dur_ns)


@pytest.mark.parametrize(("size", "dur_ns"), [(10, 60), (1000, 60), (2000, 60 + 0.02 * 1.5 * 1000)])
def test_a_size_that_takes_no_longer_than_the_latency_says_nothing_of_bytes(size: int, dur_ns: float) -> None:
    """Groups of two take 80 ns to start and 0.02 a byte, of which a ring of four moves half as many again."""
    found = CommTimes([*REDUCES, CommSample("all_reduce", 4, 1000, 60)]).time("all_reduce", 4, size)
    assert found is not None
    assert found.dur_ns == pytest.approx(dur_ns)


def test_another_group_and_another_kind_are_scaled_by_ring_traffic_and_trusted_less() -> None:
    times = CommTimes(REDUCES)
    wider, barrier = times.time("all_reduce", 4, 1000), times.time("barrier", 2, 1000)
    assert wider is not None
    assert (wider.dur_ns, wider.how, wider.rel_error) == (pytest.approx(150), "proxy", GROUP_ERROR)
    assert barrier is not None
    assert (barrier.dur_ns, barrier.how, barrier.rel_error) == (pytest.approx(100), "proxy", PROXY_ERROR)
    assert times.time("all_to_all", 2, 1000) is None


def test_under_a_limit_on_ctas_a_kind_without_its_own_samples_keeps_the_others_and_says_so() -> None:
    samples = [*REDUCES, CommSample("all_reduce", 2, 1000, 170, ctas=8), CommSample("all_gather", 2, 1000, 60)]
    times = CommTimes(samples, ctas=8)
    reduce, gather = times.time("all_reduce", 2, 1000), times.time("all_gather", 2, 1000)
    assert reduce is not None
    assert (reduce.dur_ns, reduce.how) == (170, "exact")
    assert gather is not None
    assert (gather.dur_ns, gather.how, gather.detail) == (60, "proxy", "measured without the limit on CTAs only")


@pytest.mark.parametrize(("ranks", "dur_ns"), [(None, 200), (1, 100), (2, 200), (8, 200)])
def test_copies_of_more_devices_than_measured_take_what_the_most_measured_take(ranks: int | None, dur_ns: int) -> None:
    samples = [CopySample("d2h", 1000, 100, 1), CopySample("d2h", 1000, 200, 2), CopySample("both", 1000, 300, 2)]
    found = CopyTimes(samples, ranks).time("d2h", 1000)
    assert found is not None
    assert found.dur_ns == dur_ns
    assert CopyTimes(samples, ranks).time("h2d", 1000) is None


# -------------------------------------------------------------------------------------------------------------- interference


def row(op: str, beside: str, stretch: tuple[float, float], ranks: int = 2, ctas: int = 0, **dims: int) -> Interference:
    return Interference(op, beside, ranks, *stretch, (1, 9), (1, 9), ctas=ctas, dims=dims)


TABLE = [
    row("gemm:proj", "comm:all_reduce", (1.5, 3.0), n=64, k=64),
    row("gemm:proj", "comm:all_reduce", (1.2, 5.0), ctas=8, n=64, k=64),
    row("gemm:proj", "comm:all_reduce", (1.1, 7.0), ctas=16, n=64, k=64),
    row("gemm:dw", "comm:all_reduce", (1.6, 2.6), n=8, k=8),
    row("attention", "comm:all_gather", (1.25, 1.75)),
    row("memory:gelu", "comm:all_gather", (0.9, 1.4)),
]


@pytest.mark.parametrize(("ctas", "factors"), [(0, (1.5, 3.0)), (8, (1.2, 5.0)), (4, (1.5, 3.0))])
def test_rows_under_the_limit_on_ctas_count_alone_and_those_under_others_never(ctas: int, factors: tuple[float, float]) -> None:
    assert InterferenceTable(TABLE, (), ctas).between("gemm:proj", "comm:all_reduce@2")[:2] == factors


@pytest.mark.parametrize(
    ("category", "beside", "factors"),
    [
        ("comm:all_reduce@2", "gemm:proj", (3.0, 1.5)),
        ("p2p", "attention", (1.75, 1.25)),
        ("attention_grad", "comm:all_gather@2", (1.25, 1.75)),
        ("attention", "p2p", (1.25, 1.75)),
        ("memory:gelu", "comm:all_gather@2", (1.0, 1.4)),
        ("memory:gelu_grad", "comm:all_gather@2", (1.0, 1.4)),
        ("gemm:proj", "attention", (2.0, 2.0)),
        ("free", "comm:all_reduce@2", (1.0, 1.0)),
        ("gemm:proj", "free", (1.0, 1.0)),
        ("copy:d2h", "copy:h2d", (1.5, 1.5)),
        ("copy:d2h", "comm:all_reduce@2", (1.0, 1.0)),
    ],
)
def test_who_stretches_whom(category: str, beside: str, factors: tuple[float, float]) -> None:
    """Factors follow the order asked for; stand-ins answer for their class; both ways take 180 ns for 100 and 120 alone."""
    copies = [CopySample("d2h", 1000, 100), CopySample("h2d", 1000, 120), CopySample("both", 1000, 180)]
    assert InterferenceTable(TABLE, copies).between(category, beside)[:2] == factors


@pytest.mark.parametrize(("ranks", "factors"), [(1, (1.5, 1.5)), (2, (1.4, 1.0)), (None, (1.4, 1.0)), (8, (1.4, 1.0))])
def test_copies_of_both_directions_have_factors_of_their_own(ranks: int | None, factors: tuple[float, float]) -> None:
    """Factors on the copy in and on the one out; a row tells them for two devices, the time of one each way for one."""
    copies = [CopySample("d2h", 1000, 100), CopySample("h2d", 1000, 120), CopySample("both", 1000, 180)]
    for both in (row("copy:h2d", "copy:d2h", (1.4, 0.98)), row("copy:d2h", "copy:h2d", (0.98, 1.4))):
        table = InterferenceTable([*TABLE, both], copies, copy_ranks=ranks)
        assert table.between("copy:h2d", "copy:d2h")[:2] == factors
        beside = InterferenceTable([row("gemm:any", "copy:h2d", (1.2, 1.1)), both]).between("gemm:any", "copy:d2h")
        assert beside[:2] == (1.2, 1.1)  # copies of the other direction stand in, as no operation was measured beside these
        assert table.between("copy:d2h", "copy:h2d")[:2] == factors[::-1]


def test_no_product_is_named_after_a_weight_gradient() -> None:
    assert InterferenceTable(TABLE).gemm_label(8, 8) == "gemm:proj"
    assert InterferenceTable(TABLE[3:]).gemm_label(8, 8) == "gemm"


# ----------------------------------------------------------------------------------------------------------------- accuracy


def test_errors_are_summed_up_with_their_sign_and_their_tail() -> None:
    """Nine predictions 10 % low, one 40 % high."""
    cases = [Case(f"c{k}", 90, 100) for k in range(9)] + [Case("high", 140, 100)]
    found = summarize(cases)
    assert (found.median_abs, found.p90_abs, found.bias) == pytest.approx((0.1, 0.4, -0.1))
    assert found.worst is not None
    assert found.worst.name == "high"


def test_pairs_that_were_measured_alike_have_no_order() -> None:
    cases = [Case("a", 2, 100), Case("b", 1, 101), Case("c", 3, 200)]
    assert order_share(cases) == pytest.approx(2 / 3)
    assert order_share(cases, same=0.02) == 1
