"""How much computation is stretched beside a communication kernel that waits for its peer.

`python -m benchmarks.gpu.waiting_receive FOLDER -o FILE`.

A receive that is posted early occupies multiprocessors until the other rank sends. Traced steps of pipelines (the --out of
`benchmarks.gpu.training`) hold the same operation of other micro-batches beside such a receive and apart from it; their times are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from testbed.device import Interval
from testbed.trace import RankTrace, align, read_rank, stream_names

SHORTEST_US = 20.0  # events around a kernel add several microseconds, so that shorter ones say little
BESIDE, APART = 0.95, 0.02  # share of an operation's time beside a receive
Ratio = tuple[float, float]
"""How many times as long it takes beside a receive, and its median time apart in microseconds."""


def ratios(ranked: RankTrace) -> dict[str, list[Ratio]]:
    """Kernel -> one ratio for each operation that ran at least twice beside a receive and twice apart."""
    known = align(ranked.planned, ranked.trace.issues)
    names = stream_names(ranked, known)
    receives = [each for each in ranked.trace.intervals if each.name == "broadcast" and "recv" in names[each.stream]]
    times: dict[tuple[str, str], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for each in ranked.trace.intervals:
        label = known[each.op].label.partition(", ")[2] if each.op in known else ""
        if names[each.stream] != "compute" or not label:  # Paddle's own plan labels nothing: operations of one name differ in shape
            continue
        took = max(each.end_us - each.begin_us, 1e-3)
        share = overlap_us(each.begin_us, each.end_us, receives) / took
        if share > BESIDE or share < APART:
            times[each.name, label][share < APART].append(took)
    found: dict[str, list[Ratio]] = defaultdict(list)
    for (kernel, _), (beside, apart) in times.items():
        if min(len(beside), len(apart)) >= 2 and statistics.median(apart) > SHORTEST_US:
            found[kernel].append((statistics.median(beside) / statistics.median(apart), statistics.median(apart)))
    return found


def overlap_us(begin_us: float, end_us: float, others: Iterable[Interval]) -> float:
    """How long others run in a span, summed over them."""
    return sum(max(0.0, min(end_us, each.end_us) - max(begin_us, each.begin_us)) for each in others)


def summary(traces: Iterable[RankTrace]) -> dict[str, dict[str, float]]:
    """Kernel -> mean ratio weighted by time, the lowest and highest mean of a trace, operations compared, traces that have some."""
    each = [ratios(trace) for trace in traces]
    found = {}
    for kernel in sorted({name for one in each for name in one}):
        rows = [one[kernel] for one in each if kernel in one]
        means = [_mean(row) for row in rows]
        every = [ratio for row in rows for ratio in row]
        figures = {"stretch": _mean(every), "lowest": min(means), "highest": max(means)}
        found[kernel] = {**{key: round(value, 3) for key, value in figures.items()}, "n": len(every), "num_traces": len(rows)}
    return found


def _mean(found: Sequence[Ratio]) -> float:
    return sum(ratio * us for ratio, us in found) / sum(us for _, us in found)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.waiting_receive",
                                     description="Stretch of computation beside a waiting receive.")
    parser.add_argument("folder", type=Path, help="the --out of a run of benchmarks.gpu.training")
    parser.add_argument("--note", default="", metavar="TEXT", help="when and on what it was measured")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    paths = sorted(args.folder.glob("traces/*-pp2*_trace*.msgpack"))
    if not paths:
        parser.error(f"{args.folder}/traces: no traced step of a case with pp 2")
    found = {"note": args.note, "traces": [path.stem for path in paths],
             "kernels": summary(read_rank(path) for path in paths)}  # fmt: skip
    args.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
