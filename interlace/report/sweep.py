"""Step time against memory budget as a table."""

from __future__ import annotations

from math import ceil

from interlace.planning.curve import Point, Sweep
from interlace.units import Unit

WIDTHS = (11, 10, 12, 10, 10, 16, 15)


def sweep_text(sweep: Sweep) -> str:
    """A table; budgets are rounded up, so that a budget taken from it is large enough for the plan of its line.

    >>> from interlace.planning.curve import Base
    >>> base, fits = Base(8 << 30, 500_000.0, 40_000.0), Point(budget_bytes=(6 << 30) + 1, feasible=True, peak_bytes=5 << 30,
    ...     step_us=510_000.0, exposed_us=2_000.0, kept_bytes=3 << 30, recomputed_bytes=1 << 30, offloaded_bytes=0)
    >>> print(sweep_text(Sweep((fits, Point(budget_bytes=1 << 30, feasible=False, why="too little")), base)))
     budget GiB   step ms  exposed ms  peak GiB  kept GiB  recomputed GiB  offloaded GiB
          6.001   510.000       2.000     5.000     3.000           1.000          0.000
          1.000  too little
       Paddle's   500.000      40.000     8.000
    """
    sizes = [sweep.baseline.peak_bytes, *(each.budget_bytes for each in sweep.points), *(each.peak_bytes or 0 for each in sweep.points)]
    unit = Unit.of(sizes)
    heads = ("budget", "step ms", "exposed ms", "peak", "kept", "recomputed", "offloaded")
    rows = [[head if head.endswith("ms") else f"{head} {unit.name}" for head in heads]]
    rows += [[_rounded_up(each.budget_bytes, unit), *_cells(each, unit)] for each in sweep.points]
    rows.append(["Paddle's", _ms(sweep.baseline.step_us), _ms(sweep.baseline.exposed_us), unit.figure(sweep.baseline.peak_bytes)])
    return "\n".join("".join(f"{cell:>{width}}" for cell, width in zip(row, WIDTHS, strict=False)) for row in rows)


def _cells(each: Point, unit: Unit) -> list[str]:
    if not each.feasible:
        return [f"  {each.why}"]
    parts = (each.peak_bytes, each.kept_bytes, each.recomputed_bytes, each.offloaded_bytes)
    return [_ms(each.step_us), _ms(each.exposed_us), *("" if part is None else unit.figure(part) for part in parts)]


def _rounded_up(size_bytes: int, unit: Unit) -> str:
    scale = 10**unit.decimals
    return unit.figure(ceil(size_bytes * scale / unit.bytes) / scale * unit.bytes)


def _ms(time_us: float | None) -> str:
    return "" if time_us is None else f"{time_us / 1e3:.3f}"
