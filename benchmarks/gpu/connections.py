"""Step times, and gaps between kernels, by the number of hardware connections to a GPU that the streams of a process share.

`python -m benchmarks.gpu.connections FOLDER [FOLDER ...] --sitting "date, GPUs" -o FILE`.

FOLDER is the --out of `benchmarks.gpu.training` with CUPTI (`TESTBED_CUPTI`), which has plans and the same plans with another number of
connections (`auto-8-connections`). Rows of the same session in FILE are replaced, others are kept.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.late_kernels import gaps
from benchmarks.gpu.results import cases_of
from interlace.outside import MOST_CONNECTIONS, USUAL_CONNECTIONS
from interlace.report.accuracy import BASELINE, kind_of

WITH_NUMBER = re.compile(r"(.+)-(\d+)-connections")


def connections_of(plan: str) -> tuple[str, int]:
    """The name of a plan without the number of connections, and that number.

    >>> connections_of("auto-8-connections"), connections_of("auto"), connections_of("stock")
    (('auto', 8), ('auto', 32), ('stock', 8))
    """
    if found := WITH_NUMBER.fullmatch(plan):
        return found[1], int(found[2])
    return plan, USUAL_CONNECTIONS if kind_of(plan) == BASELINE else MOST_CONNECTIONS


def rows_of(folder: Path, sitting: str) -> Iterator[dict[str, Any]]:
    """One row for each completed run with a trace: milliseconds of its steps (median, least, most), and gaps of rank 0."""
    for case in cases_of(folder):
        for name, run in case["plans"].items():
            trace = folder / "traces" / f"{case['case']}_{name}_trace0.msgpack"
            if "failed" in run or not trace.exists():
                continue
            plan, connections = connections_of(name)
            took = run["step_ms"]
            yield {
                "sitting": sitting,
                "connections": connections,
                "case": case["case"],
                "plan": plan,
                "step_ms": [round(took[key], 1) for key in ("median", "min", "max")],
                "gap_us": gaps(trace),
            }


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.connections", description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--sitting", required=True, metavar="TEXT", help="when, and on which GPUs")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    found = [row for folder in args.folders for row in rows_of(folder, args.sitting)]
    if not found:
        parser.error(f"{', '.join(map(str, args.folders))}: no run with a trace; expected testbed_*.json and traces/*_trace0.msgpack")
    kept = json.loads(args.output.read_text())["rows"] if args.output.exists() else []
    rows = sorted([row for row in kept if row["sitting"] != args.sitting] + found, key=lambda row: (row["sitting"], row["case"]))
    args.output.write_text('{"rows": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
