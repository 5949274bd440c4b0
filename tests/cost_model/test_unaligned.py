"""Products with rows that are no multiple of 16 bytes: measured, stored as a slowdown, and predicted."""

import json
from itertools import pairwise
from statistics import median

import msgspec
import pytest

from benchmarks.device_profile import RESULTS
from interlace.cost_model import CostModel, load_profile
from interlace.cost_model.base import Row, trust_text
from interlace.cost_model.model import UNALIGNED_ERROR
from interlace.cost_model.profile import OpSample, Unaligned
from interlace.cost_model.unaligned import form_of, is_unaligned, rounded, slowdowns
from interlace.cost_model.work import gemm_part, work_of
from interlace.ir.program import Op, Program, Value

H200 = load_profile("h200")
MODEL = CostModel(H200)
RAW = [json.loads(path.read_text())["samples"] for path in sorted((RESULTS / "h200").glob("unaligned_*.json"))]


def product(m, n, k, dtype="bfloat16", transposed=(False, False)):
    return gemm_part(1, m, n, k, dtype, transposed=transposed)


def ns(part, model=MODEL):
    return model.part_time(part).dur_ns


@pytest.mark.parametrize(
    ("transposed", "unaligned_sizes"),
    [((False, False), "nk"), ((False, True), "kn"), ((True, False), "mn"), ((True, True), "mkn")],
)
def test_the_rows_of_all_three_matrices_count(transposed, unaligned_sizes):
    for name in "mnk":
        sizes = {"batch": 1, "m": 64, "n": 64, "k": 64} | {name: 68}
        dims = sizes | {f"transpose_{each}": 1 for each, is_transposed in zip("xy", transposed, strict=True) if is_transposed}
        assert is_unaligned("bfloat16", dims) == (name in unaligned_sizes)
        assert not is_unaligned("float32", dims)  # 68 floats are 17 times 16 bytes


@pytest.mark.parametrize(("columns", "row_bytes"), [(30528, 16), (30524, 8), (30522, 4), (30521, 2)])
def test_the_largest_power_of_two_that_divides_all_rows(columns, row_bytes):
    dims = dict(product(64, columns, 64).dims)
    assert form_of("bfloat16", dims)[1] == row_bytes
    assert dict(rounded(product(64, columns, 64)).dims)["n"] == 30528


@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False)])
def test_unaligned_products_take_the_measured_multiple_of_rounded_ones(transposed):
    for columns, least, most in ((30522, 2.9, 3.6), (15261, 5.0, 7.0)):
        part = product(4096, 1024, columns, transposed=transposed) if transposed[1] else product(4096, columns, 1024, transposed=transposed)
        assert least <= ns(part) / ns(rounded(part)) <= most
    assert "no multiple of 8 bytes" in MODEL.part_time(product(4096, 30522, 1024)).detail


def test_both_operands_transposed_take_the_slowest_form_that_was_measured():
    part = product(4104, 30522, 1032, transposed=(True, True))
    slowest = max(each.slowdown for each in H200.unaligned if (each.dtype, each.row_bytes) == ("bfloat16", 4))
    assert ns(part) == pytest.approx(slowest * ns(rounded(part)), rel=1e-3)


def test_products_that_only_move_memory_are_not_slowed():
    narrow = product(32768, 2, 4096)
    assert ns(narrow) <= 1.05 * ns(product(32768, 8, 4096))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_predictions_of_the_measured_products(dtype):
    errors = []
    for sample in (each for raw in RAW for each in raw if each["dtype"] == dtype and is_unaligned(dtype, each["dims"])):
        dims = sample["dims"]
        part = product(dims["m"], dims["n"], dims["k"], dtype, (bool(dims.get("transpose_x")), bool(dims.get("transpose_y"))))
        errors.append(abs(ns(part) / (1000 * sample["dur_us"]) - 1))
    assert len(errors) >= 190
    assert median(errors) <= 0.06
    assert max(errors) <= 0.4  # classes of an image: 1001 columns


def test_what_memory_traffic_determines_is_slowed_less_and_without_a_jump():
    whole = [ns(product(4096, 30528, k)) for k in range(8, 1032, 8)]
    found = [ns(product(4096, 30522, k)) for k in range(8, 1032, 8)]
    ratios = [slow / fast for slow, fast in zip(found, whole, strict=True)]
    assert all(before <= after + 1e-3 for before, after in pairwise(ratios))
    assert all(after <= 1.13 * before for before, after in pairwise(found[4:]))
    assert ratios[0] < 1.3 < 2.9 < ratios[-1]


def test_dtypes_of_a_profile_are_judged_by_themselves():
    halves = CostModel(msgspec.structs.replace(H200, unaligned=tuple(row for row in H200.unaligned if row.dtype == "bfloat16")))
    part = product(4096, 30522, 1024, "float32")
    assert halves.part_time(part).unaligned_ns == 0
    missing = CostModel(msgspec.structs.replace(H200, unaligned=tuple(row for row in H200.unaligned if row.row_bytes == 2)))
    found = missing.part_time(product(4096, 30522, 1024))
    assert found.rel_error >= UNALIGNED_ERROR
    assert found.unaligned_ns == 0


def test_a_sample_of_the_very_size_says_what_padding_would_save_too():
    part = product(4096, 30522, 1024)
    sample = OpSample("gemm", "bfloat16", dict(part.dims), part.size_bytes, 5 * ns(rounded(part)))
    found = CostModel(msgspec.structs.replace(H200, ops=(*H200.ops, sample))).part_time(part)
    assert (found.how, found.dur_ns, found.unaligned_ns) == ("exact", 5 * ns(rounded(part)), 4 * ns(rounded(part)))


def test_a_profile_that_does_not_know_says_so():
    unknown = CostModel(msgspec.structs.replace(H200, unaligned=()))
    part = product(4096, 30522, 1024)
    found = unknown.part_time(part)
    assert found.rel_error >= UNALIGNED_ERROR
    assert "were not measured" in found.detail
    assert ns(part, unknown) == ns(rounded(part), unknown)
    assert unknown.part_time(product(4096, 30522, 1024, "float32")).rel_error < UNALIGNED_ERROR


def test_a_summary_says_what_padding_would_save():
    whole, head = 1_000_000, Row(1, "matmul", "head", "gemm", 300_000, "interpolated", 0.1, "", 2, 200_000)
    rows = [Row(0, "matmul", "blocks.0", "gemm", whole, "exact", 0.1, ""), head]
    assert "padded sizes, such as that of a vocabulary, would save 25.0% of the device time (head 0.400 ms)" in trust_text(rows)
    assert "(head 0.400 ms of all ranks)" in trust_text(rows, " of all ranks")
    assert "padded" not in trust_text([*rows[:1], head._replace(unaligned_ns=2_000)])


def test_operations_with_several_products_lose_the_sum():
    x, y, dy = (Value(v, shape, "bfloat16", -1) for v, shape in enumerate(((4096, 1024), (1024, 30522), (4096, 30522))))
    results = Value(3, (4096, 1024), "bfloat16", 0), Value(4, (1024, 30522), "bfloat16", 0)
    op = Op(0, "pd_op.matmul_grad", (0, 1, 2), (3, 4), "backward")
    values = {value.id: value for value in (x, y, dy, *results)}
    found, parts = MODEL.op_time(op, values, {}), work_of(op, values).parts
    assert len(parts) == 2
    assert found.unaligned_ns == sum(ns(part) - ns(rounded(part)) for part in parts) > 0
    assert [row.unaligned_ns for row in MODEL.table(Program((op,), tuple(values.values())))] == [found.unaligned_ns]


def test_float16_is_slowed_like_bfloat16():
    part, other = (product(4096, 30522, 1024, dtype) for dtype in ("bfloat16", "float16"))
    assert ns(other) / ns(rounded(other)) == pytest.approx(ns(part) / ns(rounded(part)), rel=1e-3)


def test_samples_of_unaligned_products_do_not_slow_others():
    part = product(5000, 6000, 1000)
    slow = OpSample("gemm", "bfloat16", dict(product(5000, 5999, 1000).dims), 1, 100 * ns(part))
    assert ns(part, CostModel(msgspec.structs.replace(H200, ops=(*H200.ops, slow)))) == ns(part)


def test_slowdowns_compare_products_with_those_of_rounded_sizes():
    def sample(n, dur_ns, **more):
        return OpSample("gemm", "bfloat16", {"batch": 1, "m": 64, "n": n, "k": 64, **more}, 1, dur_ns)

    samples = [
        sample(64, 100),
        sample(63, 500),
        sample(61, 700),
        sample(128, 200),
        sample(124, 600),
        sample(1001, 9),
        sample(63, 7, transpose_y=1),
    ]
    assert slowdowns(samples) == (
        Unaligned("bfloat16", 2, 6.0, 5.0, 7.0, num_products=2),
        Unaligned("bfloat16", 8, 3.0, 3.0, 3.0),
    )
