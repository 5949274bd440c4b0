"""How much an operation and a collective, exchange or copy beside it slow each other.

`interlace calibrate` measures rows with both sides running in loops. In the shipped profiles, those beside `wait` and `p2p` are from traced
steps, and so are those that depend on which of the two began first (`Interference.holds`), except the H200's of two GPUs. A look-up takes
the row of the same operation, collective and group size, else the nearest one, and says so. Measured factors a little below 1 are noise
and count as 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, log
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

from interlace.cost_model.profile import CopySample, Interference, nearest_count
from interlace.grouping import grouped

StretchHow = Literal["measured", "nearest", "assumed", "given"]
SHARED = 2.0
"""Factor for two kernels that both fill the device and so take turns (matmul beside matmul on an H200: 172.8 ms together, 87.8 ms
alone)."""


WAIT = "wait"
"""Category of communication kernels that wait for their peers: they move nothing, but occupy multiprocessors. Measured with receives; two
that wait at once slow products little more than one does (the factor rises by 0.04 on average; `benchmarks/results/h100/README.md`). That
collectives do the same is an assumption."""
TRANSFER = "p2p"
"""Category of a send or receive that moves data."""
H2D, D2H = "copy:h2d", "copy:d2h"
COPIES = frozenset({H2D, D2H})
"""Categories of copies to the device (`H2D`) and to the host (`D2H`). A row of one beside the other tells how much they slow each other
down."""
RESULT = "elements"
"""Dim of rows of products beside `wait`: number of elements of the result. A result's tiles run in rounds over the multiprocessors, so a
product that just fills one round needs a second if some multiprocessors are occupied (1.8 times as long), while one of many rounds takes a
tenth longer."""


START_NS = 3500
"""Delay, in nanoseconds, from when the operand of a communication is ready to its start on another stream. What follows the operand's
producer on the same stream has begun by then (traced steps on H100: 3.4 to 6.5 us, including the tracing's own events)."""
STILL = 1024.0
"""Factor on the duration of a communication while an operation holds it up."""


class BothWays(NamedTuple):
    """Factors on the time of a copy to the device and on that of one to the host, while both run."""

    h2d: float
    d2h: float


class Stretch(NamedTuple):
    """Factors on the durations of two operations while both run, and where they come from; see `Interference`.

    `holds`: one of the two is a communication, and the other, if it began first, holds it up: a product that occupies all multiprocessors
    leaves none to the communication's kernel until it has ended.
    """

    op: float
    beside: float
    how: StretchHow
    detail: str
    holds: bool = False


class InterferenceTable:
    """Look-ups over measured rows; O(rows) for the first look-up of a pair, then O(1)."""

    def __init__(
        self, rows: Iterable[Interference], copies: Iterable[CopySample] = (), ctas: int = 0, copy_ranks: int | None = None
    ) -> None:
        rows = [row for row in rows if row.ctas in (0, ctas)]
        self._rows = tuple(row for row in rows if RESULT not in row.dims and row.op not in COPIES)
        self._by_result = sorted((log(row.dims[RESULT]), row.stretch_op) for row in rows if row.beside == WAIT and RESULT in row.dims)
        self._ctas = ctas
        self.both_directions = _both_directions(rows, tuple(copies), copy_ranks)
        self._copies = self.both_directions[max(self.both_directions)] if self.both_directions else None
        self._known: dict[tuple[str, str], Stretch] = {}

    def between(self, category: str, beside: str) -> Stretch:
        """Factors on an operation of `category` and on one of `beside` that runs at the same time, in this order."""
        key = (category, beside)
        if key not in self._known:
            self._known[key] = self._find(category, beside)
        return self._known[key]

    def product_beside_wait(self, elements: int) -> float | None:
        """Factor on a product beside a communication that waits, interpolated over the logarithm of the number of elements of its result;
        None if no sizes were measured."""
        if not self._by_result:
            return None
        sizes, factors = zip(*self._by_result, strict=True)
        return max(1.0, float(np.interp(log(max(1, elements)), sizes, factors)))

    def gemm_label(self, n: int, k: int) -> str:
        """Category of the measured GEMM whose weight is nearest to [k, n] in size; `gemm` if none was measured."""
        rows = [row for row in self._rows if row.op.startswith("gemm:") and row.op != "gemm:dw" and row.dims]
        near = min(rows, key=lambda row: (_distance(row.dims, n, k), row.op), default=None)
        return near.op if near else "gemm"

    def _find(self, category: str, beside: str) -> Stretch:
        if "free" in (category, beside):
            return Stretch(1.0, 1.0, "given", "one of them launches nothing")
        if _is_side(category) and _is_side(beside):
            return self._sides(category, beside)
        if _is_side(category):
            found = self._find(beside, category)
            return Stretch(found.beside, found.op, found.how, found.detail, found.holds)
        if not _is_side(beside):
            return Stretch(SHARED, SHARED, "assumed", "two kernels share the device in equal parts")
        return self._row(category, beside)

    def _sides(self, category: str, beside: str) -> Stretch:
        if {category, beside} == COPIES and self._copies is not None:
            h2d, d2h = self._copies
            return Stretch(*((h2d, d2h) if category == H2D else (d2h, h2d)), "measured", "copies in both directions at once")
        return Stretch(1.0, 1.0, "assumed", "not measured: links and copy engines counted as separate")

    def _row(self, category: str, beside: str) -> Stretch:
        side, _, ranks = beside.partition("@")
        rows, side_note = _first(self._rows, "beside", _fallbacks(side))
        rows, op_note = _first(rows, "op", _fallbacks(category))
        if not rows:
            return Stretch(1.0, 1.0, "assumed", f"nothing measured for {category} beside {side}")
        sizes = sorted({row.group_size for row in rows})
        group = int(ranks) if ranks else 0
        size = min(sizes, key=lambda n: (abs(log(n / group)), n)) if group else 0
        rows = [row for row in rows if size in (0, row.group_size)]
        limited = [row for row in rows if row.ctas == self._ctas]
        rows = limited or rows
        notes = [note for note in (op_note, side_note, f"{size} ranks for {group}" if size != group else "") if note]
        factors = (max(1.0, median(r.stretch_op for r in rows)), max(1.0, median(r.stretch_beside for r in rows)))
        holds = all(row.holds for row in rows)
        return Stretch(*factors, "nearest" if notes else "measured", "; ".join(notes) or f"{category} beside {beside}", holds)


def _is_side(category: str) -> bool:
    return category.startswith(("comm", "copy", "p2p", WAIT))


def _fallbacks(category: str) -> tuple[str, ...]:
    """Categories whose rows may be used for a category, best first: itself, its forward or backward twin, all of its class."""
    head = category.partition(":")[0]
    if head == "comm":
        return (category, "comm:all_gather" if category in ("comm:broadcast", "comm:reduce") else "comm:all_reduce")
    if head == TRANSFER:
        return (TRANSFER, "comm:all_gather")
    if head == "attention_grad":
        return (category, "attention")
    if head in ("memory", "unknown"):
        twin = category[: -len("_grad")] if category.endswith("_grad") else category + "_grad"
        return (category, twin, "memory:")
    return (category, head + ":")


def _first(rows: Sequence[Interference], field: str, names: tuple[str, ...]) -> tuple[list[Interference], str]:
    """The rows of the first name that has any (a name that ends in `:` takes all of its class), and a note if it is not the first name."""
    for name in dict.fromkeys(names):
        found = [r for r in rows if getattr(r, field) == name or (name.endswith(":") and getattr(r, field).startswith(name))]
        if found:
            return found, "" if name == names[0] else f"{name.rstrip(':')} for {names[0]}"
    return [], ""


def _distance(dims: dict[str, int], n: int, k: int) -> float:
    return abs(log(dims["n"] / n)) + abs(log(dims["k"] / k))


def _both_directions(rows: Iterable[Interference], copies: Sequence[CopySample], devices: int | None) -> dict[int, BothWays]:
    """Factors by the number of devices that copy in both directions, on times of copies while `devices` copy at once (default: the largest
    number measured); empty if nothing was measured.

    Each number has a row, or else the median over all sizes that were measured both alone and in both directions; the two factors are then
    equal. These are factors on times of copies while that many devices copy, and are converted. The more devices, the larger the factors.
    """
    times = {(c.direction, c.size_bytes, c.ranks): c.dur_ns for c in copies}
    slower = grouped(
        (ranks, dur / max(times["d2h", size, ranks], times["h2d", size, ranks]))
        for (way, size, ranks), dur in times.items()
        if way == "both" and ("d2h", size, ranks) in times and ("h2d", size, ranks) in times
    )
    measured = {ranks: BothWays(*[max(1.0, median(each))] * 2) for ranks, each in slower.items()}
    for row in rows:
        if {row.op, row.beside} == COPIES:
            factors = max(1.0, row.stretch_op), max(1.0, row.stretch_beside)
            measured[row.group_size] = BothWays(*(factors if row.op == H2D else factors[::-1]))
    if not measured:
        return {}
    most = devices or max({*measured, *(sample.ranks for sample in copies)})
    found, limit = dict[int, BothWays](), BothWays(inf, inf)
    for ranks in range(most, 0, -1):
        factors = measured[nearest_count(measured, ranks)]
        shares = (_time_alone(copies, way, ranks, most) for way in ("h2d", "d2h"))
        limit = BothWays(*(max(1.0, min(up, factor * share)) for up, factor, share in zip(limit, factors, shares, strict=True)))
        found[ranks] = limit
    return found


def _time_alone(copies: Sequence[CopySample], way: str, ranks: int, most: int) -> float:
    """Time of copies in one direction while `ranks` devices copy, as a share of that while `most` do; 1 if it was not measured."""
    counts = {sample.ranks for sample in copies if sample.direction == way}
    few, many = (
        {s.size_bytes: s.dur_ns for s in copies if counts and s.direction == way and s.ranks == nearest_count(counts, number)}
        for number in (ranks, most)
    )
    return median([few[size] / many[size] for size in few.keys() & many.keys()] or [1.0])
