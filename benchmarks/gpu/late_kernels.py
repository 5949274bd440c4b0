"""Gaps between kernels of computation, beside copies and otherwise: `python -m benchmarks.gpu.late_kernels TRACES`.

TRACES has `trace<rank>.msgpack` files of traced steps, as written by `testbed.measure`. A gap longer than `MOST_US` is a wait for other
work and is left out. Prints JSON with, for each file, gaps beside copies and other gaps, and separately those beside communication on
another stream and those without it: number, median and 90th percentile in microseconds, and sum in milliseconds.
"""

from __future__ import annotations

import argparse
import bisect
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from testbed.device import Interval
from testbed.trace import COPIES, read_rank

MOST_US = 200.0


def gaps(path: Path) -> dict[str, dict[str, float]]:
    """The gaps in one rank's step."""
    work = sorted(read_rank(path).trace.intervals)
    (stream, _), *_ = Counter(each.stream for each in work if each.name == "gemm").most_common(1)
    copies, others = (
        _Busy(each for each in work if each.stream != stream and (each.name in COPIES) == is_copy) for is_copy in (True, False)
    )
    found: dict[str, list[float]] = {name: [] for name in ("beside copies", "else", "beside communication", "with nothing beside")}
    for one, then in pairwise(each for each in work if each.stream == stream):
        gap_us = then.begin_us - one.end_us
        if gap_us > MOST_US:
            continue
        if copies.at(then.begin_us):
            found["beside copies"].append(gap_us)
        else:
            found["else"].append(gap_us)
            found["beside communication" if others.at(then.begin_us) else "with nothing beside"].append(gap_us)
    return {name: _figures(each) for name, each in found.items() if each}


class _Busy:
    """The times at which any of some intervals runs."""

    def __init__(self, found: Iterable[Interval]) -> None:
        ordered, latest = sorted(found), 0.0
        self._begins = [each.begin_us for each in ordered]
        self._ends = [latest := max(latest, each.end_us) for each in ordered]

    def at(self, when_us: float) -> bool:
        """Whether an interval runs at this time."""
        at = bisect.bisect_right(self._begins, when_us)
        return at > 0 and self._ends[at - 1] >= when_us


def _figures(found: Sequence[float]) -> dict[str, float]:
    tenths = statistics.quantiles(found, n=10) if len(found) > 1 else [found[0]] * 9
    return {
        "kernels": len(found),
        "median_us": round(statistics.median(found), 2),
        "p90_us": round(tenths[-1], 2),
        "sum_ms": round(sum(found) / 1e3, 2),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.late_kernels", description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path, metavar="TRACES")
    files: list[Path] = sorted(parser.parse_args(argv).traces.glob("*.msgpack"))
    found: dict[str, Any] = {path.stem: gaps(path) for path in files}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
