"""Claims about times that others published: how far the shipped profiles and Interlace's own measurements are from them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

import msgspec
from claiming import RESULTS, Row, claim, raw, table

from interlace.cost_model import CostModel, load_profile
from interlace.cost_model.base import Estimate
from interlace.cost_model.work import Part, gemm_part

DEVICES = {"h100": "H100", "h200": "H200"}
TIMES = ((0.0, 20.0, "below 20 us"), (20.0, 100.0, "20 to 100 us"), (100.0, 1000.0, "0.1 to 1 ms"), (1000.0, 1e9, "above 1 ms"))
SIZES = ((0, 1 << 20, "below 1 MiB"), (1 << 20, 16 << 20, "1 to below 16 MiB"), (16 << 20, 1 << 40, "16 MiB and more"))
KINDS = {"alltoall": "all_to_all"}
"""Name of a kind in published tables -> its name here."""
Pair = tuple[float, Estimate]
"""Published microseconds, and the cost model's estimate."""


def rows(kind: str, device: str) -> list[dict[str, str]]:
    """A published table."""
    with (RESULTS / "external" / f"{kind}_{device}.csv").open() as file:
        return list(csv.DictReader(file))


def distance(pairs: Sequence[Pair]) -> str:
    """Median error, median absolute error, and the share of errors within the claimed error."""
    errors = [(said.dur_ns / 1e3 / us - 1, said.rel_error) for us, said in pairs]
    covered = sum(abs(error) <= claimed for error, claimed in errors) / len(errors)
    return (
        f"{100 * median(error for error, _ in errors):+.0f} %, {100 * median(abs(error) for error, _ in errors):.0f} %, "
        f"{covered:.0%} of {len(errors)}"
    )


@claim
def external_products() -> str:
    """Errors for products, by published time."""
    found: dict[str, list[Pair]] = {}
    for device in DEVICES:
        cost = CostModel(load_profile(device))
        for row in rows("gemm_bf16", device):
            us, sizes = float(row["us"]), [int(row[name]) for name in "mnk"]
            label = next(label for low, high, label in TIMES if low <= us < high)
            found.setdefault(f"{label}/{device}", []).append((us, cost.part_time(gemm_part(1, *sizes, "bfloat16"))))
    head = ["products of bfloat16", *DEVICES.values()]
    return table(head, ([label, *(distance(found[f"{label}/{device}"]) for device in DEVICES)] for _, _, label in TIMES))


def published(device: str) -> Iterator[tuple[str, int, int, float]]:
    """Published collectives: kind, GPUs, bytes, microseconds."""
    for row in rows("nccl", device):
        yield KINDS.get(row["operation"], row["operation"]), int(row["gpus"]), int(row["bytes"]), float(row["us"])


def size_label(size: int) -> str:
    """The size class of a message."""
    return next(label for low, high, label in SIZES if low <= size < high)


def predicted_collectives(device: str) -> Iterator[tuple[str, int, int, float, Estimate]]:
    """Published collectives with the cost model's estimate; a published time that is also in the profile is left out there."""
    profile = load_profile(device)
    cost = CostModel(profile)
    for kind, gpus, size, us in published(device):
        same = [
            each
            for each in profile.collectives
            if (each.kind, each.group_size, each.size_bytes, each.source) == (kind, gpus, size, "published")
        ]
        others = tuple(each for each in profile.collectives if each not in same)
        model = CostModel(msgspec.structs.replace(profile, collectives=others)) if same else cost
        yield kind, gpus, size, us, model.part_time(Part(kind, "comm", "float16", (), 0, size), gpus)


@claim
def external_collectives() -> str:
    """Errors for collectives by number of GPUs and size, all kinds together."""
    found: dict[tuple[int, str, str], list[Pair]] = {}
    for device in DEVICES:
        for _, gpus, size, us, said in predicted_collectives(device):
            found.setdefault((gpus, size_label(size), device), []).append((us, said))
    keys = dict.fromkeys((gpus, label) for gpus, label, _ in sorted(found, key=lambda key: key[0]))
    return table(
        ["GPUs", "message", *DEVICES.values()],
        ([str(gpus), label, *(distance(found[gpus, label, device]) for device in DEVICES)] for gpus, label in keys),
    )


@claim
def external_measured() -> str:
    """Times on two GPUs measured here over published ones, by kind and size: smallest to largest."""
    found: dict[tuple[str, str], list[float]] = {}
    for device in DEVICES:
        ours: dict[tuple[str, int], Row] = {(row["kind"], row["size_bytes"]): row for row in raw(f"{device}/collectives.json")["samples"]}
        for kind, gpus, size, us in published(device):
            if gpus == 2 and (kind, size) in ours:
                found.setdefault((kind, size_label(size)), []).append(ours[kind, size]["dur_us"] / us)
    labels = [label for _, _, label in SIZES]
    return table(
        ["both GPUs", *labels],
        ([kind, *(_ratios(found[kind, label]) for label in labels)] for kind in dict.fromkeys(kind for kind, _ in found)),
    )


def _ratios(values: Iterable[float]) -> str:
    found = sorted(values)
    return f"{found[0]:.2f} to {found[-1]:.2f}"
