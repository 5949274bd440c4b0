"""Step time as a function of the memory budget: the file `sweep.json` beside a plan.

    {"points": [{"budget_bytes": 40000000000, "feasible": true, "peak_bytes": 39810000000, "step_us": 512345.6, "exposed_us": 8123.4,
                 "kept_bytes": 21000000000, "recomputed_bytes": 9000000000, "offloaded_bytes": 4000000000, "why": ""},
                {"budget_bytes": 9000000000, "feasible": false, "peak_bytes": null, ..., "why": "the least feasible budget is ..."}],
     "baseline": {"peak_bytes": 47000000000, "step_us": 540000.0, "exposed_us": 60000.0},
     "profile": "h200"}

Budgets are device bytes per rank, `baseline` is Paddle's baseline, times are simulated.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from interlace.errors import PlanError
from interlace.files import read_file
from interlace.ir.dump import write_json

SWEEP = "sweep.json"
"""The name of the file in a folder of plans."""
MOST_BYTES = 1 << 20


class Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Paddle's baseline: peak of the fullest rank in bytes, step in microseconds, mean exposed communication of the ranks."""

    peak_bytes: int
    step_us: float
    exposed_us: float


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The plan of one budget; figures of a plan are None where the budget is not feasible.

    Attributes:
        budget_bytes: Device bytes that a rank may hold.
        peak_bytes: Peak of the fullest rank on a GPU, however fast its host.
        step_us, exposed_us: The step, and the mean exposed communication of the ranks, in microseconds.
        kept_bytes, recomputed_bytes, offloaded_bytes: Bytes of forward's values that backward reads, by where they come from, over all
            micro-batches of a step; summed over one rank of each stage.
        why: Why it is not feasible, with the least feasible budget; else empty.
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


def write_sweep(sweep: Sweep, folder: Path) -> Path:
    """Write the curve to a folder of plans; returns the file's path."""
    write_json(folder / SWEEP, sweep)
    return folder / SWEEP


def read_sweep(folder: Path) -> Sweep | None:
    """The curve in a folder of plans; None if `interlace plan --sweep` wrote none. Raises PlanError if the file cannot be read or has other
    contents."""
    path = folder / SWEEP
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(read_file(path, MOST_BYTES, "what `interlace plan --sweep` wrote", PlanError), type=Sweep)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f"{path}: not what `interlace plan --sweep` wrote ({error}); sweep again") from error
