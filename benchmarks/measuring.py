"""What the benchmarks share: medians with their spread, and stored results with machine, versions and date."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NAMED_FORMS = ("dx-first", "mixed", "zb-h1")
"""Forms of a schedule that are requested by name; rows of results have the same names."""


def middle(samples: Sequence[float], digits: int = 4) -> dict[str, Any]:
    """Median, smallest and largest of repeated measurements.

    >>> middle([3.0, 1.0, 2.0])
    {'median': 2.0, 'min': 1.0, 'max': 3.0, 'runs': 3}
    """
    low, high = min(samples), max(samples)
    return {"median": round(median(samples), digits), "min": round(low, digits), "max": round(high, digits), "runs": len(samples)}


def repeat(action: Callable[[], float], runs: int) -> list[float]:
    """Measurements of several runs."""
    return [action() for _ in range(runs)]


def meta(**versions: str) -> dict[str, Any]:
    """Where and when a result was measured."""
    from interlace.version import VERSION

    found = {"interlace": VERSION, "python": platform.python_version(), **versions}
    return {
        "machine": {"cpu": _cpu_name(), "cores": len(os.sched_getaffinity(0))},
        "versions": found,
        "date": datetime.date.today().isoformat(),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def store(name: str, result: dict[str, Any], out: Path | None = None) -> Path:
    """Write a result as JSON, by default below `benchmarks/results`."""
    path = out or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(re.sub(r"[{\[][^{}\[\]]*[}\]]", _one_line, json.dumps(result, indent=1)) + "\n")
    print(f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path} written", file=sys.stderr)
    return path


def _one_line(found: re.Match[str]) -> str:
    return re.sub(r"\s*\n\s*", " ", found.group())
