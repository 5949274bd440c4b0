"""Tools for claims: the stored results, ranges, tables, and the list of claims by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]
Producer = Callable[[], str]
CLAIMS: dict[str, Producer] = {}
"""Name of a block -> the function that returns its text."""


def claim(producer: Producer) -> Producer:
    """Register a function for the blocks of its name: `step_times` for `step-times`."""
    CLAIMS[producer.__name__.replace("_", "-")] = producer
    return producer


def raw(name: str) -> Any:
    """The contents of a results file."""
    return json.loads((RESULTS / name).read_text())


def by_case(*names: str) -> dict[str, dict[str, Row]]:
    """Case -> plan -> its run, from files of runs."""
    found: dict[str, dict[str, Row]] = {}
    for row in (row for name in names for row in raw(name)["runs"]):
        found.setdefault(row["case"], {})[row["plan"]] = row
    return dict(sorted(found.items()))


def fullest_gb(row: Row, *keys: str) -> float:
    """What the fullest rank of a run held at its peak (the sum of `keys`), in GB."""
    return float(max(sum(each[key] for key in keys) for each in row["peak_bytes_by_rank"]) / 1e9)


def median_ms(row: Row) -> float:
    """Median measured step of a run, in ms."""
    return float(row["step_ms"]["median"])


def ms_and_range(row: Row) -> str:
    """The median of a run's steps, the fastest and the slowest, in milliseconds."""
    return f"{median_ms(row):.1f} ({row['step_ms']['min']:.1f} to {row['step_ms']['max']:.1f})"


def span(values: Iterable[float], digits: int = 1) -> str:
    """The range of some shares, in percent.

    >>> span([0.012, -0.004]), span([0.5])
    ('-0.4 to +1.2 %', '+50.0 %')
    """
    found = sorted(values)
    shown = [f"{100 * value:+.{digits}f}" for value in (found[0], found[-1])]
    return f"{' to '.join(dict.fromkeys(shown))} %"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))
