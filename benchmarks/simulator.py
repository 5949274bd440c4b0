"""Speed of the compiled and of the plain simulator, on plans of eight ranks. Results: `results/simulator.json`.

An *event* is the start or the end of an operation. Times are CPU seconds of one thread, the best of several runs, so that other
load on the machine counts less.

    python benchmarks/simulator.py [--quick] [--micro-batches N] [-o FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "scheduler"))

from measuring import meta, store  # noqa: E402
from plans import Shape, world  # noqa: E402

from interlace.cost_model import GivenCosts  # noqa: E402
from interlace.scheduler.simulate import compiled as simulator_fast  # noqa: E402
from interlace.scheduler.simulate.lower import lower  # noqa: E402
from interlace.scheduler.simulate.simulator import Simulation, run  # noqa: E402

COST = GivenCosts(
    {"comm": 9_400, "p2p": 9_500, "gemm": 9_000, "copy": 30_000, "default": 1_500},
    {("gemm", "comm"): (1.5, 1.7), ("memory", "comm"): (1.3, 1.5)},
    200,
    1_300,
)


def best(action: Callable[[], Any], runs: int) -> float:
    """CPU seconds of the fastest of some runs."""
    found = []
    for _ in range(runs):
        begin = time.thread_time()
        action()
        found.append(time.thread_time() - begin)
    return min(found)


def measure(name: str, shape: Shape, runs: int, plain: bool) -> dict[str, Any]:
    """One row: sizes, seconds of each stage of the simulation, events per second."""
    begin = time.thread_time()
    programs = world(shape)
    built = time.thread_time()
    sim = lower(programs, COST)
    lowered = time.thread_time() - built
    row: dict[str, Any] = {
        "plan": name,
        "ranks": len(programs),
        "items": sim.num_items,
        "events": 2 * sim.num_items,
        "side_share": round(float(sim.side.mean()), 3),
        "build_s": round(built - begin, 3),
        "lower_s": round(lowered, 3),
    }
    row["fast_s"] = round(best(lambda: simulator_fast.run_items(sim), runs), 4)
    row["fast_split_s"] = round(best(lambda: run(sim, engine="fast", with_memory=False), 2), 4)
    row["fast_split_memory_s"] = round(best(lambda: run(sim, engine="fast"), 2), 4)
    row["fast_5m_events_s"] = round(row["fast_s"] * 5e6 / row["events"], 3)
    if plain:
        row["plain_s"] = round(best(lambda: Simulation(sim).run(), 1), 3)
        row["plain_over_fast"] = round(row["plain_s"] / row["fast_s"], 1)
    return row


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--micro-batches", type=int, default=1024, help="of the large plans")
    parser.add_argument("--quick", action="store_true", help="32 micro-batches, one run, compiled twin only")
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args()
    many, runs = (32, 1) if args.quick else (args.micro_batches, 5)
    own, stock = ("mp", "send", "receive", "copies"), ("", "send", "receive", "")
    measure("warm-up", Shape(2, 2, 2, 2, own), 1, True)
    rows = [
        measure("own streams, offload", Shape(4, 2, 16, 24, own, frozenset(range(0, 16, 2))), runs, not args.quick),
        measure("own streams, offload", Shape(4, 2, many, 24, own, frozenset(range(0, many, 2))), runs, False),
        measure("one stream", Shape(4, 2, 16, 24, stock), runs, not args.quick),
        measure("one stream", Shape(4, 2, many, 24, stock), runs, False),
    ]
    import numba

    for row in rows:
        print(row)
    store("simulator", {**meta(numba=numba.__version__), "rows": rows}, args.out)


if __name__ == "__main__":
    main()
