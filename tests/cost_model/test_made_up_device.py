"""A cost model over a device made up of round figures: a byte a nanosecond, a thousand FLOP a nanosecond."""

from __future__ import annotations

import msgspec
import pytest

from interlace.cost_model import CostModel, DeviceProfile
from interlace.cost_model.base import largest_unmeasured, shares_by_how
from interlace.cost_model.profile import CommSample, HostCosts, OpSample, Peak, Provenance
from interlace.cost_model.work import attention_part, matmul_sizes
from interlace.ir.text import parse
from tests.cost_model.programs import Parts, binary, last_op, matmul, unary

BARE = DeviceProfile(
    1,
    "made up",
    Provenance("none", "2026-01-01", "by hand"),
    ranks_per_host=8,
    memory_bytes=0,
    pinned_bytes=0,
    shortest_kernel_ns=100,
    matrix_flops={"float32": Peak(1e12, "derived")},
    vector_flops={},
    memory_rate=Peak(1e9, "derived"),
    host=HostCosts(3, 13, "derived"),
    p2p=(CommSample("send_recv", 2, 1000, 70),),
)


def model(*ops: OpSample) -> CostModel:
    return CostModel(msgspec.structs.replace(BARE, ops=ops))


def gelu(elements: int, dur_ns: int) -> OpSample:
    return OpSample("gelu", "float32", {"elements": elements}, 8 * elements, dur_ns)


def test_an_unmeasured_kind_is_as_slow_as_the_measured_ones_and_no_shorter_than_any_kernel() -> None:
    """The measured kind takes twice its traffic."""
    costs = model(gelu(1000, 16_000))
    found = costs.op_time(*unary("pd_op.silu", "500", "float32"))
    assert (found.dur_ns, found.how) == (8000, "roofline")
    assert costs.op_time(*unary("pd_op.silu", "1", "float32")).dur_ns == 100


def test_a_product_at_the_roofline_takes_its_traffic_where_that_is_longer() -> None:
    thin = model().op_time(*matmul("1,1000", "1000,1000", "1,1000", "float32"))
    thick = model().op_time(*matmul("4000,4000", "4000,4000", "4000,4000", "float32"))
    assert thin.dur_ns == 4 * (1000 + 1000 * 1000 + 1000)
    assert thick.dur_ns == max(3 * 4 * 4000**2, 2 * 4000**3 // 1000)


def test_several_kernels_are_as_sure_as_the_least_sure_and_their_errors_weigh_by_time() -> None:
    """dX is a sample itself (2 us); dW, of a third of its depth, lies beyond that one point (100 %), a third of the way to the floor."""
    costs = model(OpSample("gemm", "float32", {"batch": 1, "m": 10, "n": 20, "k": 30}, 4400, 10_000))
    found = costs.op_time(
        *last_op(
            "%0:float32[10,20] = pd_op.data() forward",
            "%1:float32[20,30] = pd_op.data() forward",
            "%2:float32[10,30] = pd_op.data() forward",
            "%3:float32[10,20], %4:float32[20,30] = pd_op.matmul_grad(%0, %1, %2) backward",
        )
    )
    third = 100 + (30_000 - 100) / 3  # dW has three times the results
    assert (found.dur_ns, found.how) == (10_000 + round(third), "extrapolated")
    assert found.rel_error == pytest.approx((0.2 * 10_000 + third) / (10_000 + third), rel=1e-4)


def sample(dur_ns: int, scale: int = 1, **transposes: int) -> OpSample:
    """A product of [10, 10] by [10 x scale, 10]."""
    sizes = {"batch": 1, "m": 10, "n": 10 * scale, "k": 10}
    return OpSample("gemm", "float32", {**sizes, **transposes}, 4 * (100 + 200 * scale), dur_ns)


def product(costs: CostModel, scale: int, transposed: bool) -> tuple[int, str]:
    attrs = '{"transpose_x":true}' if transposed else "{}"
    found = costs.op_time(*matmul("10,10", f"10,{10 * scale}", f"10,{10 * scale}", "float32", attrs))
    return found.dur_ns, found.how


def test_products_with_an_operand_transposed_are_answered_by_such_samples_where_there_are_three() -> None:
    plain = [sample(10_000 * scale, scale) for scale in (1, 2, 4)]
    transposed = [sample(16_000 * scale, scale, transpose_x=1) for scale in (1, 2, 4)]
    knows = model(*plain, *transposed)
    assert product(knows, 2, False) == (20_000, "exact")
    assert product(knows, 2, True) == (32_000, "exact")
    assert product(knows, 3, True) == (48_000, "interpolated")
    assert product(knows, 3, False) == (30_000, "interpolated")


def test_where_too_few_samples_have_the_same_operands_transposed_all_answer() -> None:
    """Of two samples of equal sizes the one with the same operands transposed answers."""
    plain = [sample(10_000 * scale, scale) for scale in (1, 2, 4)]
    assert product(model(*plain), 2, True) == (20_000, "exact")
    for samples in ((*plain, sample(32_000, 2, transpose_x=1)), (sample(32_000, 2, transpose_x=1), *plain)):
        assert product(model(*samples), 2, True) == (32_000, "exact")


def heads(width: int, dur_ns: int, batch: int = 1) -> OpSample:
    """Attention over 64 positions with one head of this width."""
    part = attention_part(batch, 1, 1, 64, 64, width, False, "float32", False)
    return OpSample(part.kind, part.dtype, dict(part.dims), part.size_bytes, dur_ns)


def test_heads_of_a_width_are_answered_by_such_samples_where_there_are_three() -> None:
    """A kernel of twice the width and half the batch has as many FLOPs, but may not take as long."""
    wide = [heads(32, 100_000 * batch, batch) for batch in (1, 2, 4)]
    narrow = [heads(16, 150_000 * batch, batch) for batch in (2, 4, 8)]
    other = attention_part(3, 1, 1, 64, 64, 32, False, "float32", False), attention_part(6, 1, 1, 64, 64, 16, False, "float32", False)
    assert [model(*wide, *narrow).part_time(each).dur_ns for each in other] == [300_000, 900_000]
    assert [model(*wide).part_time(each).dur_ns for each in other] == [300_000, 300_000]


def test_a_variant_of_few_samples_serves_the_others_too() -> None:
    wide = [heads(32, 100_000 * batch, batch) for batch in (1, 2, 4)]
    costs = model(*wide, heads(16, 900_000, 16))
    assert costs.part_time(attention_part(8, 1, 1, 64, 64, 32, False, "float32", False)).dur_ns == 900_000
    assert costs.part_time(attention_part(16, 1, 1, 64, 64, 16, False, "float32", False)).how == "exact"


def test_beyond_the_measured_sizes_the_error_doubles() -> None:
    costs = model(gelu(1000, 16_000))
    assert costs.op_time(*unary("pd_op.gelu", "1000", "float32")).rel_error == 0.05
    beyond = costs.op_time(*unary("pd_op.gelu", "2000", "float32"))
    assert (beyond.dur_ns, beyond.how, beyond.rel_error) == (32_000, "extrapolated", 1.0)


def test_equal_dims_with_other_traffic_are_no_sample() -> None:
    """Half the result's bytes: three quarters of the traffic."""
    costs = model(gelu(1000, 16_000))
    half = last_op("%0:float32[1000] = pd_op.data() forward", "%1:bfloat16[1000] = pd_op.gelu(%0) forward")
    assert costs.op_time(*half).how == "extrapolated"
    assert costs.op_time(*half).dur_ns == 100 + (16_000 - 100) * 6000 // 8000


def test_a_message_is_between_two_whatever_its_group() -> None:
    sent = last_op("%0:float32[250] = pd_op.data() forward", "pd_op.send_v2(%0) forward group=7", groups="group 7 = 0,1,2,3\n")
    found = model().op_time(*sent)
    assert (found.dur_ns, found.how) == (70, "exact")


def attention(name: str, length: int, attrs: str = "{}") -> Parts:
    data = [f"%{k}:float32[1,{length},1,4] = pd_op.data() forward" for k in range(3)]
    results = ", ".join(f"%{k}:float32[1,{length},1,4]" for k in (3, 4, 5))
    return last_op(*data, f"{results} = pd_op.{name}(%0, %1, %2) backward {attrs}")


def test_the_gradient_of_attention_is_looked_up_by_its_own_work() -> None:
    """Twice the length is four times the pairs."""
    dims = {"batch": 1, "heads": 1, "kv_heads": 1, "seq_q": 8, "seq_k": 8, "head_dim": 4, "causal": 0}
    costs = model(OpSample("attention_grad", "float32", dims, 1024, 100_000))
    assert costs.op_time(*attention("flash_attn_grad", 16)).dur_ns == 400_000


ADD = ["%0:float32[1000]{} = pd_op.data() forward", "%1:float32[1000] = pd_op.data() forward"]
SUM = "%2:float32[1000]~0{} = pd_op.add_(%0, %1) backward inplace=0:0"


@pytest.mark.parametrize(
    ("one", "other", "times"),
    [
        (attention("flash_attn", 16_384), attention("flash_attn", 16_384, '{"causal":true}'), (4_294_967, 2_147_484)),
        (
            last_op(*ADD[1:], "%2:float32[1000] = pd_op.multiply(%1, %1) forward"),
            binary("pd_op.multiply", "1000", "float32"),
            (16_000, 24_000),
        ),
        (last_op(ADD[0].format(""), ADD[1], SUM.format("")), last_op(ADD[0].format("!"), ADD[1], SUM.format("!")), (7000, 9000)),
    ],
    ids=["attribute", "same operand", "lives across steps"],
)
def test_a_model_tells_apart_what_differs_in_one_respect(one: Parts, other: Parts, times: tuple[int, int]) -> None:
    """Asked one after the other, so that what is remembered of the first must not answer for the second."""
    costs = model(
        gelu(1000, 16_000),
        OpSample("add", "float32", {"elements": 1000}, 12_000, 7000),
        OpSample("grad_accumulate", "float32", {"elements": 1000}, 12_000, 9000),
    )
    costs = costs if "add" in one[0].name else model(gelu(1000, 16_000))
    assert (costs.op_time(*one).dur_ns, costs.op_time(*other).dur_ns) == times


def test_a_product_in_backward_is_no_product_in_forward() -> None:
    costs = model()
    transposed = [matmul("16,16", "16,16", "16,16", attrs='{"transpose_x":true}', role=role) for role in ("forward", "backward")]
    assert [costs.category(*each) for each in transposed] == ["gemm", "gemm:dw"]


@pytest.mark.parametrize(
    ("x", "y", "transposed", "sizes"),
    [
        ((2, 8, 32), (8, 48), True, (2, 32, 48, 8)),
        ((8, 32), (5, 32, 48), False, (5, 8, 48, 32)),
        ((2, 8, 32), (32, 48), False, (1, 16, 48, 32)),
    ],
)
def test_batches_of_products(x: tuple[int, ...], y: tuple[int, ...], transposed: bool, sizes: tuple[int, ...]) -> None:
    """A transposed batch does not fold into rows; a batch on the right counts too."""
    assert matmul_sizes(x, y, transposed, False) == sizes


def test_shares_of_a_step_count_every_run() -> None:
    """Two micro-batches: `gelu` between its sizes (twice 16), `silu` at the roofline (twice 16), the optimizer's `sgd` once."""
    text = """program rank=0 world=1 mode=train
pipeline stage=0 of 1 micro_batches=2 chunks=1 schedule=accumulate
#0 %0:float32[1000] = pd_op.data() forward
#1 %1:float32[1000] = pd_op.gelu(%0) forward
#2 %2:float32[1000] = pd_op.tanh_grad(%1) backward
#3 %3:float32[1000] = pd_op.sgd(%2) optimize
"""
    jobs = "job a forward 0: 1@0\njob b backward 0: 2@0\njob c forward 1: 1@1\njob d backward 1: 2@1\njob e optimizer 0: 3@0\n"
    costs = model(gelu(500, 8000), gelu(2000, 32_000))
    for program in (parse(text), parse(text + jobs)):
        rows = costs.table(program)
        assert [row.runs for row in rows if row.dur_ns] == [2, 2, 1]
        assert [row.how for row in rows if row.dur_ns] == ["interpolated", "roofline", "roofline"]
        assert {how: round(share, 6) for how, share in shares_by_how(rows).items()} == {"interpolated": 0.4, "roofline": 0.6}
        assert [(kind, how, round(share, 6)) for kind, how, share in largest_unmeasured(rows)] == [
            ("tanh_grad", "roofline", 0.4),
            ("sgd", "roofline", 0.2),
        ]
