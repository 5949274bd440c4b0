"""Step time against memory budget as a table."""

from __future__ import annotations

from math import ceil

from interlace.planning.curve import Point, Sweep

WIDTHS = (11, 10, 12, 10, 10, 16, 15)


def sweep_text(sweep: Sweep) -> str:
    """A table; budgets are rounded up, so that one typed back holds the plan of its line.

    >>> from interlace.planning.curve import Base
    >>> base, fits = Base(8 << 30, 500_000.0, 40_000.0), Point(budget_bytes=(6 << 30) + 1, feasible=True, peak_bytes=5 << 30,
    ...     step_us=510_000.0, exposed_us=2_000.0, kept_bytes=3 << 30, recomputed_bytes=1 << 30, offloaded_bytes=0)
    >>> print(sweep_text(Sweep((fits, Point(budget_bytes=1 << 30, feasible=False, why="too little")), base)))
     budget GiB   step ms  exposed ms  peak GiB  kept GiB  recomputed GiB  offloaded GiB
          6.001   510.000       2.000     5.000     3.000           1.000          0.000
          1.000  too little
       Paddle's   500.000      40.000     8.000
    """
    rows = [["budget GiB", "step ms", "exposed ms", "peak GiB", "kept GiB", "recomputed GiB", "offloaded GiB"]]
    rows += [[f"{ceil(each.budget_bytes * 1000 / 2**30) / 1000:.3f}", *_cells(each)] for each in sweep.points]
    rows.append(["Paddle's", _ms(sweep.baseline.step_us), _ms(sweep.baseline.exposed_us), _gib(sweep.baseline.peak_bytes)])
    return "\n".join("".join(f"{cell:>{width}}" for cell, width in zip(row, WIDTHS, strict=False)) for row in rows)


def _cells(each: Point) -> list[str]:
    if not each.feasible:
        return [f"  {each.why}"]
    parts = (each.peak_bytes, each.kept_bytes, each.recomputed_bytes, each.offloaded_bytes)
    return [_ms(each.step_us), _ms(each.exposed_us), *map(_gib, parts)]


def _ms(time_us: float | None) -> str:
    return "" if time_us is None else f"{time_us / 1e3:.3f}"


def _gib(size_bytes: int | None) -> str:
    return "" if size_bytes is None else f"{size_bytes / 2**30:.3f}"
