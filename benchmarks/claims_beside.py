"""Claims about how operations and what runs beside them slow each other down, from readings of `interlace calibrate`."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence

from claiming import ROOT, claim, raw, table

sys.path.insert(0, str(ROOT))

from interlace.bridge.calibrate.factors import Factors, Round, Times, factors
from interlace.cost_model.profile import load_profile
from interlace.grouping import grouped

OPERATIONS: dict[str, Callable[[str], bool]] = {
    "products": lambda kind: kind.startswith("gemm"),
    "attention": lambda kind: kind == "attention",
    "its gradient": lambda kind: kind == "attention_grad",
    "memory-bound": lambda kind: not kind.startswith(("gemm", "attention")),
}
SHORTEST = ("scale", {"elements": 1})
BESIDE = ("comm:all_reduce", "comm:all_gather", "comm:reduce_scatter", "comm:all_to_all", "copy:d2h", "copy:h2d")


def beside_readings(device: str = "h200") -> dict[tuple[str, str], list[tuple[Factors, int]]]:
    """(Kind, what runs beside it) -> factors, with the number of elements of a product's result. In the version of the H200's readings,
    steps without a message also left out the time of making its tensor, so there an operation's time alone is the slope of the ends of its
    rows over their numbers of operations. Without reductions and the shortest kernel, of which the profiles have no rows."""
    every = raw(f"{device}/beside_readings.json")["rows"]
    rows = [row for row in every if "blocked" not in row and row["kind"] != "reduce" and (row["kind"], row["dims"]) != SHORTEST]
    found: dict[tuple[str, str], list[tuple[Factors, int]]] = {}
    for _, loads in grouped(((row["kind"], *sorted(row["dims"].items())), row) for row in rows).items():
        if "alone_us" not in loads[0]:
            if len({row["count"] for row in loads}) < 2:
                continue
            each_us = statistics.linear_regression([row["count"] for row in loads], [row["alone_end_us"] for row in loads]).slope
            loads = [{**row, "alone_us": row["count"] * each_us} for row in loads]
        for row in loads:
            first = {"first": Times(0.0, row["first_left_us"] / 1e6)} if "first_left_us" in row else {}
            took_s, alone_s, message = row["took_us"] / 1e6, row["alone_us"] / 1e6, Times(0.0, row["message_us"] / 1e6)
            both = Times(took_s, took_s + row["left_us"] / 1e6)
            waits = row["beside"] == "wait"
            if measured := factors([Round(message, Times(alone_s, alone_s), both, **first)], alone_s / row["count"], waits=waits):
                elements = math.prod(row["dims"].get(dim, 1) for dim in ("batch", "m", "n"))
                found.setdefault((row["kind"], row["beside"]), []).append((measured, elements))
    return found


@claim
def h200_beside() -> str:
    """Factors by group of operations and by what runs beside them."""
    return _beside("h200", BESIDE)


@claim
def h100_beside() -> str:
    """The same on H100s, also beside transfers and receives that wait."""
    return _beside("h100", (*BESIDE, "p2p", "wait"))


def _beside(device: str, sides: Sequence[str]) -> str:
    found = beside_readings(device)
    rows = []
    for name, is_one in OPERATIONS.items():
        cells = []
        for side in sides:
            each = [one for (kind, beside), several in found.items() if beside == side and is_one(kind) for one, _ in several]
            factors = _range(one.op for one in each)
            cells.append(factors if side == "wait" else f"{factors}, {_range(one.beside for one in each)}")
        rows.append([name, *cells])
    return table(["operation, message", *sides], rows)


@claim
def waits_by_result() -> str:
    """Factors on products beside a receive that waits, by size of the result: of single products and of traced steps."""
    traced = {row.dims["elements"]: row.stretch_op for row in load_profile("h100").interference if row.beside == "wait" and row.dims}
    alone: dict[int, list[float]] = {}
    for (kind, side), several in beside_readings("h100").items():
        if kind == "gemm" and side == "wait":
            for one, elements in several:
                alone.setdefault(elements, []).append(one.op)
    cells = [
        [f"{elements / 1e6:.1f}", f"{statistics.median(alone[elements]):.2f}", f"{found:.2f}"]
        for elements, found in sorted(traced.items())
        if elements in alone
    ]
    return table(
        ["million elements of the result", *(row[0] for row in cells)],
        [["single", *(row[1] for row in cells)], ["in traced steps", *(row[2] for row in cells)]],
    )


@claim
def blocked_streams() -> str:
    """How much later kernels begin while streams wait for an event, by the number of these streams."""
    rows = [row for row in raw("h100/blocked_streams.json")["rows"] if row["connections"] == 32]
    later = {(row["kernel"], row["others"]): statistics.median(row["later_us"]) for row in rows}
    counts = [1, 2, 3, 4, 6, 8, 12]
    kernels = {"tiny": "one element", "gelu": "8.8 us", "gemm": "48 us"}
    rows_of = ([f"kernels of {took}", *(_rounded(later[kernel, f"{count} p0"]) for count in counts)] for kernel, took in kernels.items())
    return table(["streams that wait", *map(str, counts)], list(rows_of))


def _rounded(later_us: float) -> str:
    return f"{round(later_us, 1) + 0.0:.1f} us"  # without the sign of a negative zero


def _range(values: Iterable[float]) -> str:
    found = sorted(values)
    return f"{found[0]:.2f} to {found[-1]:.2f} ({statistics.median(found):.2f})" if len(found) > 1 else f"{found[0]:.2f}"
