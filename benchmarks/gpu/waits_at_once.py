"""How much products slow down beside one transfer that waits for its peer, and beside two at once.

`python -m benchmarks.gpu.waits_at_once FOLDER --cases 'PATTERN' --note TEXT -o FILE`.

FOLDER is the --out of `benchmarks.gpu.training`. Uses traced steps of Paddle's baseline, whose middle stages wait for an activation and for
a gradient at the same time. A product is identified by its place in its job; its runs without other work are compared with those that lie
completely beside waiting transfers.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.beside_transfers import APART, PRODUCT, WHOLLY, overlap_us
from testbed.trace import Planned, RankTrace, align, read_rank, stream_names

WAITS_US = 400.0
"""A transfer that takes more microseconds waits for its peer; data of these cases takes 50 to 150."""


def stretched(ranked: RankTrace) -> list[dict[str, Any]]:
    """For each product that ran alone and beside waiting transfers: number of these transfers, time alone, and median slowdown."""
    known = align(ranked.planned, ranked.trace.issues)
    names, places = stream_names(ranked, known), _places(ranked, known)
    beside_it = [each for each in ranked.trace.intervals if names[each.stream] != "compute"]
    waiting, moving = ([each for each in beside_it if (each.end_us - each.begin_us > WAITS_US) == waits] for waits in (True, False))
    apart: dict[Any, list[float]] = defaultdict(list)
    beside: dict[Any, list[float]] = defaultdict(list)
    for each in ranked.trace.intervals:
        if each.name != PRODUCT or names[each.stream] != "compute" or each.op not in places:
            continue
        took = each.end_us - each.begin_us
        if overlap_us(each.begin_us, each.end_us, moving) >= APART * took:
            continue
        shares = [overlap_us(each.begin_us, each.end_us, [other]) / took for other in waiting]
        if sum(shares) < APART:
            apart[places[each.op]].append(took)
        elif (count := sum(share > WHOLLY for share in shares)) and sum(shares) < count + APART:
            beside[places[each.op], count].append(took)
    return [
        {
            "waiting": count,
            "apart_us": round(statistics.median(apart[place]), 1),
            "stretch": round(statistics.median(times) / statistics.median(apart[place]), 3),
            "n": len(times),
        }
        for (place, count), times in sorted(beside.items())
        if apart[place]
    ]


def _places(ranked: RankTrace, known: dict[int, Planned]) -> dict[int, tuple[str, int]]:
    """Issued operation -> name of its job and place in it, which are the same for all micro-batches."""
    before, found = Counter[int](), {}
    for number in sorted(known):
        job = known[number].job
        found[number] = (ranked.jobs[job], before[job])
        before[job] += 1
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.waits_at_once", description="Products beside one and two waits.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the --out of a run of benchmarks.gpu.training")
    parser.add_argument("--cases", default="*", metavar="PATTERN", help="these cases")
    parser.add_argument("--note", default="", metavar="TEXT", help="when and on what it was measured")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    rows = []
    for path in sorted(args.folder.glob("traces/*_stock_trace*.msgpack")):
        case, ranked = path.name.partition("_stock_trace")[0], read_rank(path)
        if fnmatch.fnmatchcase(case, args.cases):
            rows += [{"case": case, "rank": ranked.rank, **row} for row in stretched(ranked)]
    if not rows:
        parser.error(f"{args.folder}: no product of a traced baseline beside a transfer that waits; expected traces/*_stock_trace*.msgpack")
    lines = ",\n".join(map(json.dumps, rows))
    args.output.write_text(f'{{"note": {json.dumps(args.note)}, "products": [\n{lines}\n]}}\n')
    return 0


if __name__ == "__main__":
    sys.exit(main())
