"""Look-ups in the interference table: what answers, and that it is said."""

from __future__ import annotations

import msgspec
import pytest

from interlace.cost_model import CostModel, GivenCosts, load_profile
from tests.cost_model.programs import collective, last_op, matmul, unary

H200 = CostModel(load_profile("h200"))
ON_TIME = CostModel(msgspec.structs.replace(H200.profile, late_beside_wait_ns=0))


@pytest.mark.parametrize(
    ("op", "beside", "how", "detail"),
    [
        ("gemm:proj", "comm:all_reduce@2", "nearest", "gemm for gemm:proj"),
        ("memory:gelu", "comm:all_gather@4", "measured", "memory:gelu beside comm:all_gather@4"),
        ("memory:softmax_grad", "comm:all_reduce@2", "measured", "memory:softmax_grad beside comm:all_reduce@2"),
        ("memory:softmax_grad", "comm:all_reduce@4", "nearest", "2 ranks for 4"),
        ("memory:layer_norm_grad", "copy:d2h", "measured", "memory:layer_norm_grad beside copy:d2h"),
        ("memory:softmax_grad", "copy:d2h", "nearest", "memory:softmax for memory:softmax_grad"),
        ("memory:silu", "copy:d2h", "nearest", "memory for memory:silu"),
        ("unknown", "comm:all_reduce@4", "nearest", "memory for unknown"),
        ("gemm", "comm:broadcast@2", "nearest", "gemm for gemm; comm:all_gather for comm:broadcast"),
        ("attention", "comm:all_reduce@8", "nearest", "4 ranks for 8"),
        ("copy:d2h", "copy:h2d", "measured", "copies in both directions at once"),
        ("copy:d2h", "comm:all_reduce@2", "assumed", "not measured: links and copy engines counted as separate"),
        ("gemm:fc1", "memory:gelu", "assumed", "two kernels share the device in equal parts"),
    ],
)
def test_the_row_that_answers_is_named(op, beside, how, detail):
    found = H200.stretch_between(op, beside)
    assert (found.how, found.detail) == (how, detail)


def test_operations_find_their_rows():
    reduce, values, groups = collective("pd_op.all_reduce_", "2048,4096")
    gelu, more, _ = unary("pd_op.gelu", "2048,4096")
    op, beside = H200.stretch(gelu, reduce, values | more, groups)
    assert 1.1 < op < 1.3
    assert 1.1 < beside < 1.3


def test_copies_disturb_nothing_and_a_gemm_suffers_most_beside_a_collective_or_holds_it_up():
    for op in ("gemm:fc1", "memory:add", "attention"):
        assert max(H200.stretch_between(op, "copy:d2h")[:2]) < 1.2
    gemm, gelu, attention = (H200.stretch_between(op, "comm:all_reduce@2") for op in ("gemm:fc1", "memory:gelu", "attention"))
    assert gemm.op > 1.4 > max(gelu.op, attention.op)
    assert max(gemm.beside, attention.beside) < gelu.beside
    assert (gemm.holds, gelu.holds, attention.holds) == (True, False, False)
    assert H200.stretch_between("comm:all_reduce@2", "gemm:fc1") == (gemm.beside, gemm.op, *gemm[2:])


def test_a_product_is_named_after_the_measured_one_nearest_to_its_weight():
    assert H200.category(*matmul("999,4096", "4096,8192", "999,8192")) == "gemm:fc1"
    assert H200.category(*matmul("999,8192", "8192,4096", "999,4096")) == "gemm:fc2"
    assert H200.category(*matmul("999,512", "512,5120", "999,5120")) == "gemm:proj"


def test_a_product_beside_a_communication_that_waits_is_stretched_by_the_size_of_its_result():
    small = matmul("2048,16384", "16384,4096", "2048,4096")
    large = matmul("4096,4096", "4096,16384", "4096,16384")
    between = matmul("3072,16384", "16384,4096", "3072,4096")
    assert H200.category(*small) == H200.category(*between)
    found = [ON_TIME.stretch_beside_wait(*each) for each in (small, between, large)]
    assert 1.7 < found[0] < 1.9
    assert found[0] > found[1] > found[2]
    assert 1.1 < found[2] < 1.2
    tiny, huge = matmul("8,8", "8,8", "8,8"), matmul("65536,8", "8,65536", "65536,65536")
    assert [ON_TIME.stretch_beside_wait(*each) for each in (tiny, huge)] == pytest.approx([found[0], found[2]])


def test_two_products_of_one_operation_beside_a_wait_count_by_their_times():
    """The input's gradient, of 2048 x 4096, is stretched more than the weight's, of 4096 x 16384, and takes as long."""
    both = last_op(
        *(f"%{k}:bfloat16[{shape}] = pd_op.data() forward" for k, shape in enumerate(("2048,4096", "4096,16384", "2048,16384"))),
        "%3:bfloat16[2048,4096], %4:bfloat16[4096,16384] = pd_op.matmul_grad(%0, %1, %2) backward {}",
    )
    first = ON_TIME.stretch_beside_wait(*matmul("2048,16384", "16384,4096", "2048,4096"))
    second = ON_TIME.stretch_beside_wait(*matmul("4096,2048", "2048,16384", "4096,16384"))
    assert ON_TIME.stretch_beside_wait(*both) == pytest.approx((first + second) / 2, rel=0.05)


def test_where_no_sizes_were_measured_the_category_answers():
    costs = GivenCosts({"default": 1}, {("gemm", "wait"): (1.5, 1.0)})
    assert costs.stretch_beside_wait(*matmul("8,8", "8,8", "8,8")) == 1.5
    gelu = unary("pd_op.gelu", "2048,4096")
    assert ON_TIME.stretch_beside_wait(*gelu) == ON_TIME.stretch_between("memory:gelu", "wait").op


def test_each_kernel_begins_later_beside_a_communication_that_waits():
    """By as much for each kernel: a gradient of a product has two."""
    late = CostModel(msgspec.structs.replace(H200.profile, late_beside_wait_ns=1000))
    gradients = last_op(
        *(f"%{k}:bfloat16[{shape}] = pd_op.data() forward" for k, shape in enumerate(("2048,4096", "4096,16384", "2048,16384"))),
        "%3:bfloat16[2048,4096], %4:bfloat16[4096,16384] = pd_op.matmul_grad(%0, %1, %2) backward {}",
    )
    for op, kernels in ((unary("pd_op.gelu", "2048,4096"), 1), (gradients, 2)):
        stretch, dur_ns = late.stretch_beside_wait(*op), late.op_time(*op).dur_ns
        assert (stretch - ON_TIME.stretch_beside_wait(*op)) * dur_ns == pytest.approx(1000 * kernels)
    assert 1000 <= H200.profile.late_beside_wait_ns <= 1500
