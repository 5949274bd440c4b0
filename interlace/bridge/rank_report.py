"""What a rank tells its launcher, while it runs and at the end. No Paddle here: both sides import it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec


class StepLoss(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The loss of one step of one mode on one rank, with its exact bits; `raw_hex` is empty where none was fetched."""

    mode: str
    step: int
    dtype: str = ""
    shape: tuple[int, ...] = ()
    raw_hex: str = ""
    values: tuple[float, ...] = ()
    dur_ns: int = 0


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a rank ended early. A `follow_up` is the consequence of another rank's end, not a cause."""

    text: str
    traceback: str = ""
    follow_up: bool = False


class RankReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All a rank has to say at its end. `parameters` maps a trainable parameter's name to its sha256."""

    rank: int
    world: int
    losses: tuple[StepLoss, ...] = ()
    parameters: dict[str, str] = {}
    plan: dict[str, Any] | None = None
    failure: Failure | None = None


class Progress(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One line of a rank's progress: a step that is done."""

    rank: int
    mode: str
    step: int
    dur_ns: int
    loss: float | None = None


def report_path(run_dir: str | os.PathLike[str], rank: int) -> Path:
    """Where rank `rank` leaves its report."""
    return Path(run_dir) / f"rank{rank}.json"


def progress_path(run_dir: str | os.PathLike[str], rank: int) -> Path:
    """Where rank `rank` appends its progress, one JSON object a line."""
    return Path(run_dir) / f"rank{rank}.progress"


def write_report(run_dir: str | os.PathLike[str], report: RankReport) -> None:
    """Write a report so that a reader sees all of it or nothing."""
    path = report_path(run_dir, report.rank)
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(report))
    partial.replace(path)


def read_report(run_dir: str | os.PathLike[str], rank: int) -> RankReport | None:
    """The report of a rank, or None where it left none."""
    path = report_path(run_dir, rank)
    return msgspec.json.decode(path.read_bytes(), type=RankReport) if path.exists() else None
