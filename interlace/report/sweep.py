"""Step time against memory budget: the file `sweep.json` beside a plan, and its table.

    {"points": [{"budget_bytes": 40000000000, "feasible": true, "peak_bytes": 39810000000, "step_us": 512345.6, "exposed_us": 8123.4,
                 "kept_bytes": 21000000000, "recomputed_bytes": 9000000000, "offloaded_bytes": 4000000000, "why": ""},
                {"budget_bytes": 9000000000, "feasible": false, "peak_bytes": null, ..., "why": "the least feasible budget is ..."}],
     "baseline": {"peak_bytes": 47000000000, "step_us": 540000.0, "exposed_us": 60000.0},
     "profile": "h200"}

Budgets are device bytes of a rank, `baseline` is Paddle's baseline, times are simulated.
"""

from __future__ import annotations

from math import ceil
from pathlib import Path

import msgspec

from interlace.errors import PlanError
from interlace.files import read_file
from interlace.ir.dump import write_whole
from interlace.units import Unit

SWEEP = "sweep.json"
"""The name of the file in a folder of plans."""
MOST_BYTES = 1 << 20
WIDTHS = (11, 10, 12, 10, 10, 16, 15)


class Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Paddle's baseline: peak of the fullest rank in bytes, step in microseconds, mean exposed communication of the ranks."""

    peak_bytes: int
    step_us: float
    exposed_us: float


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The plan of one budget; figures of a plan are None where the budget is not feasible.

    Attributes:
        budget_bytes: Device bytes that a rank may hold.
        feasible: Whether there is a plan within it.
        peak_bytes: What the fullest rank holds on a GPU, however fast its host.
        step_us, exposed_us: The step, and the mean exposed communication of the ranks, in microseconds.
        kept_bytes, recomputed_bytes, offloaded_bytes: What backward reads of forward's values, by where it comes from, over all
            micro-batches of a step; the sum of one rank of each stage.
        why: What stands in the way where it is not feasible, with the least feasible budget; else empty.
    """

    budget_bytes: int
    feasible: bool
    peak_bytes: int | None = None
    step_us: float | None = None
    exposed_us: float | None = None
    kept_bytes: int | None = None
    recomputed_bytes: int | None = None
    offloaded_bytes: int | None = None
    why: str = ""


class Sweep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The curve, largest budget first."""

    points: tuple[Point, ...]
    baseline: Base
    profile: str = ""

    def text(self) -> str:
        """A table; budgets are rounded up, so that one typed back holds the plan of its line.

        >>> base, fits = Base(8 << 30, 500_000.0, 40_000.0), Point(budget_bytes=(6 << 30) + 1, feasible=True, peak_bytes=5 << 30,
        ...     step_us=510_000.0, exposed_us=2_000.0, kept_bytes=3 << 30, recomputed_bytes=1 << 30, offloaded_bytes=0)
        >>> print(Sweep((fits, Point(budget_bytes=1 << 30, feasible=False, why="too little")), base).text())
         budget GiB   step ms  exposed ms  peak GiB  kept GiB  recomputed GiB  offloaded GiB
              6.001   510.000       2.000     5.000     3.000           1.000          0.000
              1.000  too little
           Paddle's   500.000      40.000     8.000
        """
        sizes = [self.baseline.peak_bytes, *(each.budget_bytes for each in self.points), *(each.peak_bytes or 0 for each in self.points)]
        unit = Unit.of(sizes)
        heads = ("budget", "step ms", "exposed ms", "peak", "kept", "recomputed", "offloaded")
        rows = [[head if head.endswith("ms") else f"{head} {unit.name}" for head in heads]]
        rows += [[_rounded_up(each.budget_bytes, unit), *_cells(each, unit)] for each in self.points]
        rows.append(["Paddle's", _ms(self.baseline.step_us), _ms(self.baseline.exposed_us), unit.figure(self.baseline.peak_bytes)])
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


def write_sweep(sweep: Sweep, folder: Path) -> Path:
    """Leave the curve in a folder of plans; gives the file's path."""
    write_whole(folder / SWEEP, msgspec.json.format(msgspec.json.encode(sweep)) + b"\n")
    return folder / SWEEP


def read_sweep(folder: Path) -> Sweep | None:
    """The curve of a folder of plans; None where `interlace plan --sweep` left none.

    Raises:
        PlanError: The file cannot be read, or holds something else.
    """
    path = folder / SWEEP
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(read_file(path, MOST_BYTES, "what `interlace plan --sweep` wrote", PlanError), type=Sweep)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f"{path}: not what `interlace plan --sweep` wrote ({error}); sweep again") from error
