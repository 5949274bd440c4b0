"""How late kernels of computation start behind the one before, beside copies and else: `python -m benchmarks.gpu.late_kernels TRACES`.

TRACES holds `trace<rank>.msgpack` files of traced steps, as `testbed.measure` writes them. A gap longer than `MOST_US` is a wait for other
work, and is left out. Prints JSON: by file, for both kinds of gaps their number, median and 90th percentile in microseconds, and their sum
in milliseconds.
"""

from __future__ import annotations

import argparse
import bisect
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from testbed.trace import COPIES, read_rank

MOST_US = 200.0


def gaps(path: Path) -> dict[str, dict[str, float]]:
    """Of one rank's step."""
    work = sorted(read_rank(path).trace.intervals)
    (stream, _), *_ = Counter(each.stream for each in work if each.name == "gemm").most_common(1)
    to_and_from = [each for each in work if each.name in COPIES]
    begins, latest = [each.begin_us for each in to_and_from], 0.0
    ends = [latest := max(latest, each.end_us) for each in to_and_from]
    found: dict[str, list[float]] = {"beside copies": [], "else": []}
    for one, then in pairwise(each for each in work if each.stream == stream):
        at = bisect.bisect_right(begins, then.begin_us)
        is_beside = at > 0 and ends[at - 1] >= then.begin_us
        if then.begin_us - one.end_us <= MOST_US:
            found["beside copies" if is_beside else "else"].append(then.begin_us - one.end_us)
    return {name: _figures(each) for name, each in found.items() if each}


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
