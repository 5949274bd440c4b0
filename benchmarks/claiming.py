"""What every claim is made with: the stored results, ranges, tables, and the list of claims by name."""

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
"""What gives the text of a block, by its name."""


def claim(producer: Producer) -> Producer:
    """Make a function the source of the blocks of its name: `step_times` of `step-times`."""
    CLAIMS[producer.__name__.replace("_", "-")] = producer
    return producer


def raw(name: str) -> Any:
    """A file of results."""
    return json.loads((RESULTS / name).read_text())


def by_case(*names: str) -> dict[str, dict[str, Row]]:
    """Case -> plan -> its run, of files of runs."""
    found: dict[str, dict[str, Row]] = {}
    for row in (row for name in names for row in raw(name)["runs"]):
        found.setdefault(row["case"], {})[row["plan"]] = row
    return dict(sorted(found.items()))


def fullest_gb(row: Row, *keys: str) -> float:
    """What the fullest rank of a run held at its peak, in GB."""
    return float(max(sum(each[key] for key in keys) for each in row["peak_bytes_by_rank"]) / 1e9)


def median_ms(row: Row) -> float:
    """The measured step of a run, in ms."""
    return float(row["step_ms"]["median"])


def span(values: Iterable[float], digits: int = 1) -> str:
    """Shares from the smallest to the largest, in percent.

    >>> span([0.012, -0.004]), span([0.5])
    ('-0.4 to +1.2 %', '+50.0 %')
    """
    found = sorted(values)
    shown = [f"{100 * value:+.{digits}f}" for value in (found[0], found[-1])]
    return f"{' to '.join(dict.fromkeys(shown))} %"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))
