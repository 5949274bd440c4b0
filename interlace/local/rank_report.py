"""What a rank reports to its launcher, during a run and at its end. No Paddle here: both sides import it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from interlace.ir.dump import write_whole


class StepLoss(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The loss of one step of one mode on one rank, with its exact bits; `raw_hex` is empty if none was fetched."""

    mode: str
    step: int
    dtype: str = ""
    shape: tuple[int, ...] = ()
    raw_hex: str = ""
    values: tuple[float, ...] = ()
    dur_ns: int = 0


STEPS_VARIABLE = "INTERLACE_STEPS_OF"
"""Environment variable with a folder of reports. If it is set, steps of modes other than training do not run, but return what they returned
in the reported runs."""
CANNOT_WRITE = 74
"""Exit code of a rank that cannot write into the run directory (EX_IOERR)."""
STATE_KINDS = ("buffer", "optimizer state", "master weight", "gradient buffer")
"""Kinds of state, besides trainable parameters, that last from step to step."""


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a rank ended early. A `follow_up` is the consequence of another rank's end, not a cause.

    Attributes:
        users: The script, its options or its configuration are at fault, and `text` alone explains how.
        exited: The script ended itself, so its own output explains why.
    """

    text: str
    traceback: str = ""
    follow_up: bool = False
    users: bool = False
    exited: bool = False


class RankReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that a rank reports at its end.

    Attributes:
        parameters: Name of a trainable parameter -> sha256 of its dtype, shape and bits.
        plan: Summary of Interlace's plan; None without one.
        state: The same as `parameters` for other state that lasts from step to step, by kind (`STATE_KINDS`).
    """

    rank: int
    world: int
    losses: tuple[StepLoss, ...] = ()
    parameters: dict[str, str] = {}
    plan: dict[str, Any] | None = None
    failure: Failure | None = None
    state: dict[str, dict[str, str]] = {}

    def digests(self) -> dict[tuple[str, str], str]:
        """Parameters and then all other state: `(kind, name)` -> sha256."""
        kinds = {"parameter": self.parameters, **self.state}
        return {(kind, name): digest for kind, names in kinds.items() for name, digest in sorted(names.items())}


class Progress(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One line of a rank's progress: a completed step or, with step 0, a mode whose program is about to be built."""

    rank: int
    mode: str
    step: int
    dur_ns: int
    loss: float | None = None


def first_state_difference(one: RankReport, other: RankReport) -> str | None:
    """The first parameter or other state whose bits differ between two runs of a rank; None if all are the same."""
    mine, theirs = one.digests(), other.digests()
    for kind, name in dict.fromkeys([*mine, *theirs]):
        left, right = mine.get((kind, name), "absent"), theirs.get((kind, name), "absent")
        if left != right:
            return f"rank {one.rank}, {kind} {name}: sha256 baseline {left[:16]}, interlace {right[:16]}"
    return None


def counted(reports: Sequence[RankReport]) -> str:
    """How many parameters and other states the ranks reported, by kind.

    >>> counted([RankReport(0, 1, parameters={"w": "1"}, state={"buffer": {"mean": "2", "var": "3"}})])
    '1 parameters, 2 buffers, 0 optimizer states, 0 master weights, 0 gradient buffers'
    """
    found = Counter(kind for report in reports for kind, _ in report.digests())
    return ", ".join(f"{found[kind]} {kind}s" for kind in ("parameter", *STATE_KINDS))


def report_path(run_dir: str | os.PathLike[str], rank: int) -> Path:
    return Path(run_dir) / f"rank{rank}.json"


def progress_path(run_dir: str | os.PathLike[str], rank: int) -> Path:
    """Where rank `rank` appends its progress, one JSON object per line."""
    return Path(run_dir) / f"rank{rank}.progress"


def output_path(run_dir: str | os.PathLike[str], rank: int) -> Path:
    """Where rank `rank` writes a copy of what the script prints."""
    return Path(run_dir) / f"rank{rank}.printed"


def write_report(run_dir: str | os.PathLike[str], report: RankReport) -> None:
    """Write a report so that a reader sees all of it or nothing. Raises OutputError if it cannot be written."""
    write_whole(report_path(run_dir, report.rank), msgspec.json.encode(report))


def read_report(run_dir: str | os.PathLike[str], rank: int) -> RankReport | None:
    path = report_path(run_dir, rank)
    return msgspec.json.decode(path.read_bytes(), type=RankReport) if path.exists() else None
