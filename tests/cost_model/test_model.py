"""The cost model over the H200's profile and over made ones."""

from __future__ import annotations

import inspect
import re

import msgspec
import pytest

from interlace.cost_model import CostModel, DeviceProfile, load_profile, model, work
from interlace.cost_model.base import explain_rows, largest_unmeasured, shares_by_how, tables_of
from interlace.cost_model.profile import OpSample
from interlace.cost_model.work import work_of
from interlace.ir.text import parse
from tests.cost_model.programs import binary, collective, last_op, matmul, unary


@pytest.fixture(scope="module")
def h200() -> CostModel:
    return CostModel(load_profile("h200"))


def test_a_measured_shape_gives_its_sample(h200):
    found = h200.op_time(*matmul("2048,4096", "4096,4096", "2048,4096"))
    assert found.how == "exact"
    assert 86_000 < found.dur_ns < 92_000
    assert found.rel_error < 0.15


def test_operations_that_two_ranks_ask_for_at_the_same_moment_keep_their_own_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one process are threads: another operation is numbered between a signature and its number."""
    cost, alone = CostModel(load_profile("h200")), CostModel(load_profile("h200"))
    small, large = matmul("512,4096", "4096,4096", "512,4096"), matmul("8192,4096", "4096,4096", "8192,4096")
    between = [large]

    class Signature(tuple):  # type: ignore[type-arg]
        def __hash__(self) -> int:
            if between:
                cost.op_time(*between.pop())
            return super().__hash__()

    signature = model.signature_of
    monkeypatch.setattr(model, "signature_of", lambda *asked: Signature(signature(*asked)))
    found = [cost.op_time(*each).dur_ns for each in (small, large)]
    assert found == [alone.op_time(*each).dur_ns for each in (small, large)]


def test_a_constant_on_the_host_costs_nothing_whatever_was_asked_before() -> None:
    """Of the same shape on the device it is a kernel; what was asked first does not answer for the other."""
    text = """program rank=0 world=1 mode=train
#0 %0:float32[1] = pd_op.full() optimize {"place":"Place(cpu)","shape":[1]}
#1 %1:float32[1] = pd_op.full() optimize {"place":"Place(undefined:0)","shape":[1]}
"""
    program = parse(text)
    values, groups = tables_of(program)
    for order in (program.ops, program.ops[::-1]):
        cost = CostModel(load_profile("h200"))
        found = {op.id: cost.op_time(op, values, groups).dur_ns for op in order}
        assert found[0] == 0 < found[1]


def test_operations_that_differ_in_an_attribute_that_their_work_reads_are_told_apart() -> None:
    read = set(re.findall(r'attrs\.get\(\s*"(\w+)"', inspect.getsource(work)))
    assert {"place", "transpose_x", "causal"} <= read <= set(model._ATTRS)


def test_between_samples_is_interpolated_and_says_from_how_many(h200):
    found = h200.op_time(*matmul("3000,4096", "4096,4096", "3000,4096"))
    assert (found.how, "size(s) of gemm in bfloat16" in found.detail) == ("interpolated", True)
    assert 2 * 3000 * 4096 * 4096 / 800e12 * 1e9 * 0.95 < found.dur_ns < 180_000


def test_beyond_the_samples_is_extrapolated(h200):
    found = h200.op_time(*matmul("65536,16384", "16384,16384", "65536,16384"))
    assert (found.how, found.detail.endswith("beyond the measured sizes")) == ("extrapolated", True)


def test_float16_is_answered_by_bfloat16_and_trusted_less(h200):
    half = h200.op_time(*matmul("2048,4096", "4096,4096", "2048,4096", dtype="float16"))
    assert (half.how, half.rel_error >= 0.4) == ("proxy", True)


def test_a_dtype_without_samples_takes_the_roofline(h200):
    found = h200.op_time(*matmul("4096,4096", "4096,4096", "4096,4096", dtype="float64"))
    assert (found.how, found.rel_error) == ("roofline", 2.5)
    assert found.dur_ns == pytest.approx(2 * 4096**3 / 67e12 * 1e9, rel=0.01)


def test_a_thin_product_takes_at_least_its_traffic(h200):
    found = h200.op_time(*matmul("1,4096", "4096,50304", "1,50304"))
    assert found.dur_ns >= 2 * 4096 * 50304 / 4.33e12 * 1e9


def test_an_unmeasured_kind_of_a_family_is_answered_by_another(h200):
    found = h200.op_time(*unary("pd_op.silu", "2048,4096"))
    assert (found.how, "for silu" in found.detail, found.rel_error >= 0.4) == ("proxy", True, True)


def test_an_unknown_kind_is_a_marked_lower_bound_and_listed(h200):
    found = h200.op_time(*unary("pd_op.fft_c2c", "1024,1024", "float32"))
    assert (found.how, found.detail.startswith("lower bound")) == ("unknown", True)
    text = "program rank=0 world=1 mode=train\npipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=none\n"
    program = parse(text + "#0 %0:float32[4] = pd_op.data() forward\n#1 %1:float32[4] = pd_op.fft_c2c(%0) forward\n")
    assert "fft_c2c (1)" in explain_rows(h200.table(program))


def test_matmul_grad_is_the_sum_of_its_two_products(h200):
    whole = h200.op_time(
        *last_op(
            "%0:bfloat16[2048,4096] = pd_op.data() forward",
            "%1:bfloat16[4096,4096] = pd_op.data() forward",
            "%2:bfloat16[2048,4096] = pd_op.data() forward",
            "%3:bfloat16[2048,4096], %4:bfloat16[4096,4096] = pd_op.matmul_grad(%0, %1, %2) backward",
        )
    )
    dx = h200.op_time(*matmul("2048,4096", "4096,4096", "2048,4096", attrs='{"transpose_y":true}'))
    dw = h200.op_time(*matmul("2048,4096", "2048,4096", "4096,4096", attrs='{"transpose_x":true}', role="backward"))
    assert whole.dur_ns == dx.dur_ns + dw.dur_ns


@pytest.mark.parametrize("name", ["pd_op.all_reduce_", "pd_op.mp_allreduce_sum_", "pd_op.c_allreduce_sum_"])
def test_a_measured_collective(h200, name):
    found = h200.op_time(*collective(name, "1,2048,4096"))
    assert found.how == "exact"
    assert 73_000 < found.dur_ns < 77_000


def test_collectives_beyond_what_was_measured_say_so(h200):
    four = h200.op_time(*collective("pd_op.all_reduce_", "1,2048,4096", ranks="0,1,2,3"))
    eight = h200.op_time(*collective("pd_op.all_reduce_", "1,2048,4096", ranks="0,1,2,3,4,5,6,7"))
    three = h200.op_time(*collective("pd_op.all_reduce_", "1,2048,4096", ranks="0,1,2"))
    assert (four.how, eight.how, eight.detail.endswith("published")) == ("exact", "exact", True)
    assert (three.how, "scaled by ring traffic to 3" in three.detail) == ("proxy", True)
    assert three.dur_ns == pytest.approx(four.dur_ns * (4 / 3) / 1.5, rel=1e-3)
    apart = h200.op_time(*collective("pd_op.all_reduce_", "1,2048,4096", ranks="0,8"))
    assert (apart.how, "across hosts" in apart.detail) == ("unknown", True)
    alone = h200.op_time(*collective("pd_op.all_reduce_", "1,2048,4096", ranks="0"))
    assert (alone.how, alone.dur_ns) == ("free", 0)
    lost = h200.op_time(*collective("pd_op.all_reduce_", "1,2048,4096", group=99))
    assert (lost.how, lost.detail) == ("unknown", "group 99 is not in the program")


def test_gathered_and_scattered_sizes_are_those_of_the_whole_tensor(h200):
    gather = h200.op_time(*collective("pd_op.all_gather", "1024,4096", "2048,4096"))
    scatter = h200.op_time(*collective("pd_op.reduce_scatter", "2048,4096", "1024,4096"))
    assert (gather.how, scatter.how) == ("exact", "exact")
    assert (gather.dur_ns, scatter.dur_ns) == (53_696, 50_672)


@pytest.mark.parametrize(
    ("name", "shape", "result"), [("reduce_scatter", "2048,4096", "1024,4096"), ("all_gather", "1024,4096", "2048,4096")]
)
def test_memory_that_a_collective_fills_is_not_sent(h200, name, shape, result):
    op, values, groups = collective(f"pd_op.{name}", shape, result)
    memory = msgspec.structs.replace(values[op.results[0]], id=99)
    filled = msgspec.structs.replace(op, operands=(*op.operands, 99), no_buffer=(1,), inplace=((0, 1),))
    assert h200.op_time(filled, {**values, 99: memory}, groups) == h200.op_time(op, values, groups)


def test_a_limit_on_ctas_slows_collectives(h200):
    op, values, groups = collective("pd_op.all_reduce_", "1,2048,4096")
    limited = CostModel(h200.profile, comm_ctas=8)
    assert limited.op_time(op, values, groups).dur_ns == 119_130
    more = CostModel(h200.profile, comm_ctas=16)
    assert limited.stretch_between("gemm:fc1", "comm:all_reduce@2").beside < more.stretch_between("gemm:fc1", "comm:all_reduce@2").beside


def test_copies_know_their_direction_and_how_many_devices_copy(h200):
    down = last_op("%0:bfloat16[32,1048576] = pd_op.data() forward", "%1:bfloat16[32,1048576]^pinned = pd_op.memcpy(%0) forward")
    back = last_op("%0:bfloat16[32,1048576]^pinned = pd_op.data() forward", "%1:bfloat16[32,1048576] = pd_op.memcpy_h2d(%0) forward")
    assert h200.category(*down) == "copy:d2h"
    assert h200.category(*back) == "copy:h2d"
    assert 1_650_000 < h200.op_time(*down).dur_ns < 1_750_000
    alone, two, four = (h200.for_world(world) for world in (1, 2, 4))
    assert alone.op_time(*down).dur_ns == pytest.approx(1_212_000, rel=0.01)
    assert two.op_time(*down).dur_ns < four.op_time(*down).dur_ns == h200.op_time(*down).dur_ns
    assert (h200.for_world(64), h200.for_world(1)) == (h200.for_world(8), alone)
    both = [costs.stretch_between("copy:d2h", "copy:h2d").op for costs in (alone, two, four)]
    assert both == pytest.approx([1.09, 1.50, 1.50], abs=0.02)


@pytest.mark.parametrize("name", ["h100", "h200"])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_more_devices_that_copy_never_make_a_copy_faster(name: str, world: int) -> None:
    """Factors are on times of copies while all devices of the host copy; with a device less, a copy takes at most as long as alone among
    fewer, slowed by as many. Ranks of the next host do not count."""
    costs = CostModel(load_profile(name)).for_world(world)
    found = costs.both_directions()
    assert list(found) == list(range(world, 0, -1))
    for ranks in range(1, world):
        assert found[ranks].h2d <= found[ranks + 1].h2d
        assert found[ranks].d2h <= found[ranks + 1].d2h
    assert tuple(found[world]) == costs.stretch_between("copy:h2d", "copy:d2h")[:2]
    down = last_op("%0:bfloat16[32,1048576] = pd_op.data() forward", "%1:bfloat16[32,1048576]^pinned = pd_op.memcpy(%0) forward")
    fewer = CostModel(load_profile(name)).for_world(1)
    both_ns = costs.op_time(*down).dur_ns * found[1].d2h
    alone_ns = fewer.op_time(*down).dur_ns
    assert both_ns == pytest.approx(max(costs.op_time(*down).dur_ns, alone_ns * fewer.both_directions()[1].d2h), rel=0.02)
    assert [costs.host_of(rank) for rank in (0, 7, 8)] == [0, 0, 1]


def test_categories(h200):
    assert h200.category(*matmul("2048,1024", "1024,4096", "2048,4096")) == "gemm:proj"
    assert h200.category(*matmul("64,32", "64,48", "32,48", attrs='{"transpose_x":true}', role="backward")) == "gemm:dw"
    one_sided = matmul("64,32", "32,48", "64,32", attrs='{"left_out":0}', role="backward")
    assert h200.category(*one_sided) == "gemm:dw"
    assert h200.category(*unary("pd_op.gelu", "4")) == "memory:gelu"
    assert h200.category(*collective("pd_op.all_gather", "4", "8", "0,1,2,3")) == "comm:all_gather@4"
    assert h200.category(*unary("pd_op.fft_c2c", "4")) == "unknown"
    assert h200.category(*unary("pd_op.full_int_array", "4")) == "free"
    sends = last_op("%0:float32[4] = pd_op.data() forward", "pd_op.send_v2(%0) forward group=1")
    assert h200.category(*sends) == "p2p"


def test_host_costs_are_for_what_is_launched(h200):
    assert h200.host_ns(binary("pd_op.add", "4")[0]) == 11808
    assert h200.host_ns(unary("builtin.combine", "4")[0]) == 0
    assert h200.job_ns() == 8432


def test_a_profile_without_samples_still_says_what_it_does():
    bare = msgspec.structs.replace(load_profile("h200"), ops=(), collectives=(), p2p=(), copies=(), interference=())
    model = CostModel(bare)
    assert model.op_time(*unary("pd_op.gelu", "2048,4096")).how == "roofline"
    assert model.op_time(*matmul("64,64", "64,64", "64,64")).how == "roofline"
    assert model.op_time(*collective("pd_op.all_reduce_", "2048,4096")).how == "unknown"
    assert model.stretch_between("gemm", "comm:all_reduce@2").how == "assumed"
    assert model.category(*matmul("64,64", "64,64", "64,64")) == "gemm"
    assert isinstance(model.profile, DeviceProfile)


def test_the_table_adds_up(h200):
    text = "program rank=0 world=1 mode=train\npipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=none\n"
    lines = [
        "%0:bfloat16[2048,4096] = pd_op.data() forward",
        '%1:bfloat16[2048,4096] = pd_op.gelu(%0) forward layer="mlp.act"',
    ]
    rows = h200.table(parse(text + "\n".join(f"#{k} {line}" for k, line in enumerate(lines))))
    assert [(row.op, row.kind, row.layer, row.how) for row in rows] == [
        (0, "data", "", "free"),
        (1, "gelu", "mlp.act", rows[1].how),
    ]
    assert "2 operations" in explain_rows(h200.table(parse(text + "\n".join(f"#{k} {line}" for k, line in enumerate(lines)))))


STEP = """
program rank=0 world=1 mode=train
pipeline stage=0 of 1 micro_batches=4 chunks=1 schedule=none
#0 %0:bfloat16[8192,4096] = pd_op.data() forward
#1 %1:bfloat16[8192,4096] = pd_op.add(%0, %0) forward
#2 %2:bfloat16[8192,4096] = pd_op.silu(%1) forward
#3 %3:bfloat16[8192,4096] = pd_op.add(%1, %2) optimize
"""


def test_a_step_says_how_its_times_are_known(h200):
    """Operations count as often as a step issues them; what no measurement stands behind is named, largest first."""
    rows = h200.table(parse(STEP))
    assert [row.runs for row in rows] == [4, 4, 4, 1]
    adds, silu = 4 * rows[1].dur_ns + rows[3].dur_ns, rows[2].dur_ns
    shares = shares_by_how(rows)
    assert list(shares) == ["interpolated", "proxy"]
    assert shares["proxy"] == pytest.approx(4 * silu / (adds + 4 * silu))
    assert largest_unmeasured(rows) == [("silu", "proxy", shares["proxy"])]
    assert explain_rows(rows).splitlines()[2] == f"  largest without a measurement of their own: silu {shares['proxy']:.1%} (proxy)"
    jobs = parse(STEP.lstrip() + "job a forward 0: 1-2@0\n")
    assert [row.runs for row in h200.table(jobs)] == [0, 1, 1, 0]


def test_of_two_samples_within_the_tolerance_the_nearer_answers(h200):
    """Two kernels of equal dims whose traffic differs by 1 % may take twice as long as each other."""
    add = binary("pd_op.add", "2048,4096")
    part = work_of(*add[:2]).parts[0]
    near, far = (
        OpSample(part.kind, part.dtype, dict(part.dims), round(part.size_bytes * share), dur) for share, dur in ((1.0, 7), (1.009, 9))
    )
    for samples in ((near, far), (far, near)):
        profile = msgspec.structs.replace(h200.profile, ops=samples)
        assert CostModel(profile).op_time(*add).dur_ns == 7


def test_samples_as_short_as_a_launch_say_nothing_about_larger_sizes(h200):
    """A fill of one element takes a launch; one of 64 MiB no million times as long, but that and its traffic."""
    shortest = h200.profile.shortest_kernel_ns
    others = (sample for sample in h200.profile.ops if sample.kind != "full")
    profile = msgspec.structs.replace(h200.profile, ops=(*others, OpSample("full", "float32", {"elements": 1}, 4, shortest)))
    found = CostModel(profile).op_time(*last_op("%0:float32[4096,4096] = pd_op.full() forward"))
    traffic = 4096 * 4096 * 4 * 1e9 / h200.profile.memory_rate.per_s
    assert found.how == "extrapolated"
    assert traffic < found.dur_ns < 4 * traffic
