"""Time of the checker by size of the plan: eight ranks, with one thousand to 100,000 operations each.

Plans of `tests/scheduler/plans.py` (pp 4, mp 2, every kind of stream, offload of half the micro-batches), checked with the rules of GPUs.
Times are CPU seconds of one thread.

    python benchmarks/check.py [--quick] [-o FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from measuring import ROOT, meta, middle, store

from interlace.ir.target import GPU
from interlace.scheduler.hazards import check

sys.path.insert(0, str(ROOT))
from tests.scheduler.plans import Shape, world

RANKS = 8
SIZES = (1_000, 10_000, 100_000)
MICRO_BATCHES = 8


def shape(layers: int) -> Shape:
    """Eight ranks with this many layers each."""
    offloaded = frozenset(range(0, MICRO_BATCHES, 2))
    return Shape(4, 2, MICRO_BATCHES, layers, ("mp", "send", "receive", "copies"), offloaded, norm=True)


def items_of(layers: int) -> int:
    """Operations that rank 0 issues in a step."""
    return sum(len(job.items) for job in world(shape(layers))[0].jobs)


def measure(num_items: int, runs: int) -> dict[str, Any]:
    """One row, for at least this many operations per rank."""
    one, two = items_of(1), items_of(2)
    programs = world(shape(max(1, -(-(num_items - one) // (two - one)) + 1)))
    items = sum(len(job.items) for program in programs for job in program.jobs)
    seconds, findings = [], 0
    for _ in range(runs):
        start = time.thread_time()
        findings = len(check(programs, GPU))
        seconds.append(time.thread_time() - start)
    found = middle(seconds, 3)
    return {
        "ranks": len(programs),
        "ops_a_rank": len(programs[0].ops),
        "items_a_rank": items // RANKS,
        "items": items,
        "check_s": found,
        "us_an_item": round(1e6 * found["median"] / items, 2),
        "findings": findings,
    }


def main(argv: list[str] | None = None) -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small plan")
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args(argv)
    rows = []
    for size in (500,) if args.quick else SIZES:
        rows.append(measure(size, 3))
        print(rows[-1], flush=True)
    store("check", {**meta(), "aim": "100,000 operations on each of 8 ranks in seconds", "rows": rows}, args.out)


if __name__ == "__main__":
    main()
