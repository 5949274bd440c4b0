"""Errors that the cost model claims: by kind, two thirds of what was measured lie within them. Times of others, and own ones left out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import msgspec
import pytest

from interlace.cost_model import CostModel, Estimate, load_profile
from interlace.cost_model.model import sample_size
from interlace.cost_model.profile import DeviceProfile, OpSample
from interlace.cost_model.work import Part, gemm_part
from interlace.ir.operation_kinds import memory_family

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import claims_external as external  # noqa: E402

pytestmark = pytest.mark.slow
DEVICES = ("h100", "h200")
HONEST = 2 / 3
FEWEST = 8
"""Entries of a kind that say something of two thirds."""
Found = dict[str, list[tuple[float, Estimate]]]


def within(found: Found) -> dict[str, float]:
    """Share of each kind's measured times, in nanoseconds, within the claimed error."""
    return {
        kind: sum(abs(said.dur_ns / took_ns - 1) <= said.rel_error for took_ns, said in each) / len(each)
        for kind, each in found.items()
        if len(each) >= FEWEST
    }


@pytest.mark.parametrize("device", DEVICES)
def test_products_that_others_measured(device: str) -> None:
    cost, found = CostModel(load_profile(device)), Found()
    for row in external.rows("gemm_bf16", device):
        us = float(row["us"])
        label = next(label for low, high, label in external.TIMES if low <= us < high)
        found.setdefault(label, []).append((1e3 * us, cost.part_time(gemm_part(1, *(int(row[name]) for name in "mnk"), "bfloat16"))))
    assert len(found) == 4
    assert min(within(found).values()) >= HONEST, within(found)


@pytest.mark.parametrize("device", DEVICES)
def test_collectives_that_others_measured(device: str) -> None:
    """Over two GPUs against our own; over more each without itself."""
    by_kind, by_size = Found(), Found()
    for kind, gpus, size, us, said in external.predicted_collectives(device):
        by_kind.setdefault(f"{kind} over {gpus}", []).append((1e3 * us, said))
        by_size.setdefault(external.size_label(size), []).append((1e3 * us, said))
    assert (len(by_kind), len(by_size)) == (12, 3)
    assert min(within(by_kind).values()) >= HONEST, within(by_kind)
    assert min(within(by_size).values()) >= HONEST, within(by_size)


@pytest.mark.parametrize("device", DEVICES)
def test_short_collectives_take_what_others_measured(device: str) -> None:
    """Below 1 MiB over two GPUs: they once took twice as long."""
    short = [said.dur_ns / 1e3 / us for _, gpus, size, us, said in external.predicted_collectives(device) if gpus == 2 and size < 1 << 20]
    assert len(short) == 20
    assert 0.8 < median(short) < 1.2
    assert max(short) < 1.6


def test_samples_of_a_later_hour() -> None:
    """949 kernels of the H100 again, directly after training; no part of the profile."""
    cost, found = CostModel(load_profile("h100")), Found()
    for row in json.loads((ROOT / "benchmarks/results/h100/after_steps.json").read_text())["samples"]:
        kind = "gemm_batched" if row["kind"] == "gemm" and row["dims"].get("batch", 1) > 1 else row["kind"]
        if kind not in ("shortest", "gemm_no_tf32", "silu"):
            said = cost.part_time(as_part(OpSample(kind, row["dtype"], row["dims"], row["size_bytes"], 1)))
            found.setdefault(kind, []).append((1e3 * row["dur_us"], said))
    assert len(within(found)) > 15
    assert min(within(found).values()) >= HONEST, within(found)


@pytest.mark.parametrize("device", DEVICES)
def test_own_samples_from_the_others(device: str) -> None:
    """Each seventh sample of a kind, predicted from a profile without it."""
    profile, found = load_profile(device), Found()
    for left, cost in left_out(profile, 7):
        for sample in left:
            said = cost.part_time(as_part(sample))
            if said.how == "interpolated":
                found.setdefault(f"{sample.kind} {sample.dtype}", []).append((sample.dur_ns, said))
    assert len(within(found)) > 8
    assert min(within(found).values()) >= HONEST, within(found)


def left_out(profile: DeviceProfile, parts: int) -> Iterator[tuple[list[OpSample], CostModel]]:
    for part in range(parts):
        left = [sample for at, sample in enumerate(profile.ops) if at % parts == part]
        others = tuple(sample for at, sample in enumerate(profile.ops) if at % parts != part)
        yield left, CostModel(msgspec.structs.replace(profile, ops=others))


def as_part(sample: OpSample) -> Part:
    size = sample_size(sample)
    flops = size if "m" in sample.dims or "seq_q" in sample.dims else 0
    family = "gemm" if "m" in sample.dims else "attention" if flops else memory_family(sample.kind.removesuffix("_mixed")) or "elementwise"
    return Part(sample.kind, family, sample.dtype, tuple(sorted(sample.dims.items())), flops, sample.size_bytes)
