"""The power part of a device profile, from `power_kinds.json` of `benchmarks/gpu/power.py`.

The power of a device on which nothing computes (*static*) rises with its temperature; a line through idle readings gives it for any
temperature. A kernel's energy above static, divided by its time, is its power at the clock of its window. Windows with gaps give the
exponent with which the energy of products depends on the clock; kernels timed after a load of products give the share of their time that is
inversely proportional to the clock. With both, power at a lower clock is converted to that at the highest clock.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from interlace.cost_model.profile import Power, PowerSample

TRAINING_CELSIUS = 60
HIGHEST_MHZ, LOWEST_MHZ, STEP_MHZ = 1980, 345, 15
RESPONSE_NS = 40_000_000
"""From idle, the clock falls 25 to 80 ms after the start of products above the power limit, and begins to rise 19 to 63 ms after their end
(benchmarks/results/power.md). A periodic load with a period of 20 ms is averaged, one of 200 ms is not."""
HELD = 0.85
"""Share of the highest clock below which a device is at its power limit: products without gaps run at 1500 to 1620 MHz."""
BYTES_AN_ELEMENT = {
    "add": 6,
    "gelu": 4,
    "gelu_grad": 6,
    "copy": 4,
    "cast": 6,
    "adamw": 28,
    "layer_norm": 4,
    "layer_norm_grad": 6,
    "softmax": 4,
}
KERNEL_OF_NOTHING = ("shortest", 256)
RUNS_BELOW, AVERAGED_MS = "gemm 2048x4096x4096", 20
"""A product that never runs at the highest clock, whatever the mean power, and the periods of periodic loads that the limiter averages. The
other products of the profile behave the same: with pauses between them, they take as long as at this clock (3 to 5 % longer than at the
highest). Only the cube of 8192 runs at 1980 MHz in both."""
COLLECTIVES = {
    "all_reduce 128M": ("all_reduce", 128 << 20),
    "all_reduce 16M": ("all_reduce", 16 << 20),
    "all_gather 128M": ("all_gather", 128 << 20),
    "reduce_scatter 128M": ("reduce_scatter", 128 << 20),
    "send/recv 32M": ("send", 32 << 20),
}
Row = dict[str, Any]


def power_part(raw: Row, beside_w: float, waiting_w: float, note: str = "") -> Power:
    """The power part from the raw file of one kind of device, and the watts that communication adds in training, beside computation and
    while it waits. `note` is appended to the note of the part."""
    static = static_of(raw)
    windows = [
        row | {"millijoules_above": above_static(row, static) * row["every_ms"] / row["count"]}
        for gpu in raw["gpus"]
        for row in gpu["windows"]
        if row["watts"]
    ]
    exponent, shares = _exponent(windows), _shares(raw)
    waves = [row for gpu in raw["gpus"] for row in gpu["waves"] if row["period_ms"] <= AVERAGED_MS and row["kind"] == RUNS_BELOW]
    own_mhz = round(median(row["mhz_last"] for row in waves))
    return Power(
        limit_w=round(_limit(windows), 1),
        static_w=round(static.watts, 1),
        waiting_w=round(waiting_w, 1),
        highest_mhz=HIGHEST_MHZ,
        lowest_mhz=LOWEST_MHZ,
        step_mhz=STEP_MHZ,
        response_ns=RESPONSE_NS,
        energy_exponent=round(exponent, 2),
        beside_w=round(beside_w, 1),
        samples=(*_kernels(windows, shares, exponent, own_mhz), *_moves(raw, static)),
        note=f"{len(raw['gpus'])} GPUs, {raw['date']}, at {TRAINING_CELSIUS} C; static draw rises by {static.a_degree:.1f} W a degree; "
        f"the driver's limit is {raw['gpus'][0]['limits']['limit_w']:.0f} W{note}",
    )


MOST_PRODUCTS = 2
"""Most chunks of products per chunk of a kernel: with more, the kernel's share of the energy is too small."""


def energy_ratios(mixes: Sequence[Row], static: Static) -> dict[str, list[tuple[float, float]]]:
    """Kind -> (clock in MHz, energy of a kernel relative to that at its highest clock), from one GPU's rows of `power_mixes.json`.

    The kernel alternates with products, whose energy is subtracted; products with gaps give it for any clock (a curve of second order
    through the logarithms).
    """
    energy = {id(row): above_static(row, static) * float(row["every_ms"]) for row in mixes}
    cubes = [row for row in mixes if row["kind"] == "gemm 8192x8192x8192"]
    curve = np.polyfit(
        *(np.log([each(row) for row in cubes]) for each in (lambda row: row["mhz"], lambda row: energy[id(row)] / row["count"])), 2
    )

    def millijoules(row: Row) -> float:
        clock = np.log(min(row["mhz"], HIGHEST_MHZ))
        return float((energy[id(row)] - row["product_count"] * np.exp(np.polyval(curve, clock))) / row["count"])

    found: dict[str, list[tuple[float, float]]] = {}
    for kind in dict.fromkeys(row["kind"] for row in mixes):
        rows = [row for row in mixes if row["kind"] == kind and row["products"] <= MOST_PRODUCTS]
        highest, *others = sorted(rows, key=lambda row: (row["products"], row["busy"]))
        found[kind] = [(row["mhz"], millijoules(row) / millijoules(highest)) for row in others]
    return found


class Beside(NamedTuple):
    """Rows of `power_beside.json` for one GPU: chunks of kernels, of all_reduces, and of both at the same time."""

    kind: str
    all_reduce_mib: int
    kernels: Row
    all_reduces: Row
    both: Row

    def more_millijoules(self, static: Static) -> tuple[float, float]:
        """Energy above static of both at once minus that of each alone, and the latter."""
        rows = (self.kernels, self.all_reduces, self.both)
        kernels, all_reduces, both = (above_static(row, static) * float(row["every_ms"]) for row in rows)
        return both - kernels - all_reduces, kernels + all_reduces


def beside_of(raw: Row) -> list[Beside]:
    """The contents of `power_beside.json`, for each GPU."""
    found = []
    for rank in raw["beside"]:
        rows = {(row["kind"], row["all_reduce_mib"]): row for row in rank}
        found += [Beside(kind, mib, rows[kind, 0], rows["", mib], row) for (kind, mib), row in rows.items() if kind and mib]
    return found


def beside_watts(raw: Row, static: Static) -> float:
    """Additional watts of a device while all_reduces run beside computation: the median over kernels, sizes and GPUs."""
    return median(each.more_millijoules(static)[0] / float(each.both["kernels_ms"]) for each in beside_of(raw))


class Static(NamedTuple):
    """Power of a device on which nothing computes, at `TRAINING_CELSIUS`, and its increase per degree."""

    watts: float
    a_degree: float


def above_static(row: Row, static: Static) -> float:
    """Power in a window above the static power at its temperature, in watts."""
    return float(row["watts"]) - static.watts - static.a_degree * (row["celsius"] - TRAINING_CELSIUS)


def static_of(raw: Row) -> Static:
    """Static power, from an idle device and from kernels that compute nothing."""
    points = [(row["celsius"], row["watts"]) for gpu in raw["gpus"] for row in gpu["idle"] if row["kind"] in ("idle", "wait 1 thread")]
    points += [(row["celsius"], row["watts"]) for gpu in raw["gpus"] for row in gpu["windows"] if row["kind"] in ("shortest", "h2d 64M")]
    slope, at = np.polyfit([celsius - TRAINING_CELSIUS for celsius, _ in points], [watts for _, watts in points], 1)
    return Static(float(at), float(slope))


def _limit(windows: list[Row]) -> float:
    """The power limit as measured by the energy counter: the median over products without gaps whose clock is lowered."""
    held = [row["watts"] for row in windows if row["kind"].startswith("gemm") and row["busy"] == 1.0 and row["mhz"] < HELD * HIGHEST_MHZ]
    return float(median(held))


def _exponent(windows: list[Row]) -> float:
    """Exponent of the energy of products as a function of the clock: the median over products that ran at different clocks with and without
    gaps."""
    found = []
    for full in windows:
        for row in windows:
            same = row["kind"] == full["kind"] and full["kind"].startswith("gemm") and (full["busy"], row["busy"]) == (1.0, 0.5)
            if same and row["mhz"] > full["mhz"] + 100:
                found.append(np.log(full["millijoules_above"] / row["millijoules_above"]) / np.log(full["mhz"] / row["mhz"]))
    return float(median(found))


def _shares(raw: Row) -> dict[str, float]:
    """Share of each kind's time that is inversely proportional to the clock, from its times at the two lowest clocks and at the highest."""
    found: dict[str, list[float]] = {}
    for gpu in raw["gpus"]:
        fastest = {row["kind"]: row for row in gpu["follow"] if row["load"] == 3}
        for row in gpu["follow"]:
            base = fastest[row["kind"]]
            if row["load"] >= 7:
                found.setdefault(row["kind"], []).append((row["us"] / base["us"] - 1) / (base["mhz"] / row["mhz"] - 1))
    return {kind: max(0.0, median(each)) for kind, each in found.items()}


def _kernels(windows: list[Row], shares: dict[str, float], exponent: float, product_mhz: int) -> Iterator[PowerSample]:
    """Kernels in the windows with their highest clock, converted to the device's highest clock; one sample for each kind and size."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for name in dict.fromkeys(row["kind"] for row in windows if "float32" not in row["kind"]):
        kind, size = sized(name)
        share = min(1.0, shares.get(name, _nearest(shares, kind)))
        rows = [row for row in windows if row["kind"] == name]
        highest = max(row["mhz"] for row in rows)
        for row in rows:
            if row["mhz"] > highest - 2 * STEP_MHZ:
                ratio = min(1.0, row["mhz"] / HIGHEST_MHZ)
                energy, took_us = row["millijoules_above"] / ratio**exponent, row["us"] / (1 + share * (1 / ratio - 1))
                found.setdefault((kind, size), []).append((max(0.0, 1e3 * energy / took_us), share))
    for (kind, size), each in sorted(found.items()):
        watts, share = (median(column) for column in zip(*each, strict=True))
        yield PowerSample(kind, size, round(watts, 1), round(share, 2), product_mhz if kind == "gemm" else 0, num_runs=len(each))


def _nearest(shares: dict[str, float], kind: str) -> float:
    """The median share of a kind's other sizes, or of its forward kernel."""
    for prefix in (kind, kind.removesuffix("_grad")):
        found = [share for name, share in shares.items() if name.split()[0] == prefix and "float32" not in name]
        if found:
            return median(found)
    return 0.0


def _moves(raw: Row, static: Static) -> Iterator[PowerSample]:
    """Collectives and exchanges of two GPUs, from both of them."""
    for name, (kind, size) in COLLECTIVES.items():
        watts = [above_static(row, static) for rank in raw["ranks"] for row in rank if row["kind"] == name]
        yield PowerSample(kind, size, round(max(0.0, median(watts)), 1), num_runs=len(watts))


def sized(name: str) -> tuple[str, int]:
    """Kind and size from a window's name; the size is the FLOPs of a product or of causal attention, else bytes.

    >>> sized("gemm 8x8x64"), sized("add 67M"), sized("d2h 64M")
    (('gemm', 8192), ('add', 402653184), ('d2h', 67108864))
    """
    if name == KERNEL_OF_NOTHING[0]:
        return KERNEL_OF_NOTHING
    kind, numbers = name.split()
    sizes = [int(each) for each in re.findall(r"\d+", numbers)]
    if kind == "gemm":
        return kind, 2 * sizes[0] * sizes[1] * sizes[2]
    if kind.startswith("attention"):
        heads, tokens, dim = sizes
        return kind, (10 if kind.endswith("_grad") else 4) * heads * tokens * tokens // 2 * dim
    if kind in ("d2h", "h2d"):
        return kind, sizes[0] << 20
    elements = (1 << 26 if sizes[0] == 67 else 1 << 23) if numbers.endswith("M") else sizes[0] * sizes[1]
    return kind, BYTES_AN_ELEMENT[kind] * elements
