"""How much computation and collectives that run at the same time slow each other down, by which of them began first.

`python -m benchmarks.gpu.beside_collectives FOLDER [FOLDER ...] --base h100 -o FILE`.

FOLDER is the --out of `benchmarks.gpu.training`; its traced steps have the same operations beside a collective and without one. A product
that runs when a collective's data are ready makes the collective wait until the product ends; a product that begins during a collective
leaves it most of its share. The two cases are therefore distinguished:

- the factor on computation is its time beside one collective, divided by the time that this part would have taken alone;
- the factor on collectives is a fit (least squares): the times beside products, beside other kernels and alone, each at its own speed, add
  up to the collective's time alone. Of the same collective on several ranks the shortest counts, as it waited on the others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.gpu import beside_transfers
from interlace.cost_model import CostModel, Costs, load_profile
from interlace.cost_model.base import tables_of
from interlace.cost_model.work import work_of
from interlace.grouping import grouped
from interlace.ir import Program
from interlace.ir.kinds import is_comm, is_p2p
from testbed.device import Interval
from testbed.trace import RankTrace, align, stream_names

APART, BESIDE = 0.02, 0.3
"""Shares of an operation's time that overlap collectives: the most at which it counts as without, the least at which it counts as
beside."""
SHORTEST_MS = 1.0
"""Least milliseconds of overlap for a factor."""
CLASSES = ("gemm", "memory")
FIRST = " first"
"""Suffix of the class of computation that began before the collective."""


class Beside(NamedTuple):
    """An operation beside a collective: its class, and microseconds of overlap, measured and as they would have been alone."""

    kind: str
    collective: str
    together_us: float
    alone_us: float


class Ran(NamedTuple):
    """A collective: its kind, its time, its time alone, and for how long each class of computation ran beside it, in microseconds."""

    collective: str
    took_us: float
    alone_us: float
    beside_us: dict[str, float]


class Traced(NamedTuple):
    """The observations of one rank's step; collectives by label, which is the same on all ranks."""

    operations: list[Beside]
    collectives: dict[str, Ran]


def traced(program: Program, ranked: RankTrace, costs: Costs) -> Traced:
    """Operations beside one collective, and collectives, of a traced step."""
    known, ops = align(ranked.planned, ranked.trace.issues), {op.id: op for op in program.ops}
    values, groups = tables_of(program)
    names = stream_names(ranked, known)
    computing: dict[int, list[Interval]] = defaultdict(list)
    running: list[tuple[Interval, str]] = []
    for each in ranked.trace.intervals:
        op = ops.get(beside_transfers.op_of(known[each.op].label)) if each.op in known else None
        if names[each.stream] == "compute":
            computing[each.op].append(each)
        elif op is not None and is_comm(op) and not is_p2p(op):
            running.append((each, costs.category(op, values, groups).removeprefix("comm:")))
    by_size = defaultdict(list)
    spans: list[tuple[float, float, str]] = []
    for number, runs in computing.items():
        op = ops.get(beside_transfers.op_of(known[number].label)) if number in known else None
        kind = costs.category(op, values, groups).partition(":")[0] if op else "other"
        begin, end = min(run.begin_us for run in runs), max(run.end_us for run in runs)
        spans.append((begin, end, kind))
        parts = work_of(op, values).parts if op else ()
        if len(parts) == 1:
            beside = [(found, each, name) for each, name in running if (found := beside_transfers.overlap_us(begin, end, [each])) > 0]
            by_size[parts[0]].append((kind, begin, sum(run.end_us - run.begin_us for run in runs), beside))
    operations = [found for runs in by_size.values() for found in _beside(runs)]
    alone = {each.op: costs.op_time(ops[beside_transfers.op_of(known[each.op].label)], values, groups).dur_ns / 1e3 for each, _ in running}
    return Traced(operations, {known[each.op].label: _ran(each, name, spans, alone[each.op]) for each, name in running})


def _beside(runs: Sequence[tuple[str, float, float, list[tuple[float, Interval, str]]]]) -> Iterator[Beside]:
    apart = [took for _, _, took, beside in runs if sum(found for found, _, _ in beside) <= APART * took]
    if not apart:
        return
    alone = statistics.median(apart)
    for kind, begin, took, beside in runs:
        if len(beside) == 1 and beside[0][0] >= BESIDE * took:
            found, each, name = beside[0]
            yield Beside(kind + FIRST * (begin <= each.begin_us), name, found, alone - (took - found))


def _ran(each: Interval, name: str, spans: Sequence[tuple[float, float, str]], alone_us: float) -> Ran:
    beside: dict[str, float] = defaultdict(float)
    for begin, end, kind in spans:
        beside[kind + FIRST * (begin <= each.begin_us)] += beside_transfers.overlap_us(begin, end, [each])
    return Ran(name, each.end_us - each.begin_us, alone_us, {kind: found for kind, found in beside.items() if found})


def summary(steps: Sequence[Sequence[Traced]]) -> dict[str, dict[str, dict[str, float]]]:
    """Collective -> class -> factors on computation (`op`) and on the collective (`beside`), lowest and highest `op` of a rank's step, and
    milliseconds of overlap. `steps` has the ranks of each step."""
    every = [rank for ranks in steps for rank in ranks]
    shortest = [
        min((rank.collectives[label] for rank in ranks if label in rank.collectives), key=lambda ran: ran.took_us)
        for ranks in steps
        for label in sorted({label for rank in ranks for label in rank.collectives})
    ]
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, rans in grouped((ran.collective, ran) for ran in shortest).items():
        paces = _paces(rans)
        for kind, pace in sorted(paces.items()):
            of_ranks = [factor for rank in every if (factor := _factor(rank, kind, name))]
            mine = [one for rank in every for one in rank.operations if (one.kind, one.collective) == (kind, name)]
            together = sum(one.together_us for one in mine) / 1e3
            if kind.removesuffix(FIRST) in CLASSES and together >= SHORTEST_MS:
                row = {"op": together * 1e3 / sum(one.alone_us for one in mine), "lowest": min(of_ranks), "highest": max(of_ranks)}
                row |= {"beside": 1 / pace if pace > 0.01 else 100.0, "ms": together}
                found.setdefault(name, {})[kind] = {key: round(value, 3) for key, value in row.items()} | {"num_traces": len(of_ranks)}
    return dict(sorted(found.items()))


def _factor(rank: Traced, kind: str, name: str) -> float:
    mine = [one for one in rank.operations if (one.kind, one.collective) == (kind, name)]
    alone = sum(one.alone_us for one in mine)
    return sum(one.together_us for one in mine) / alone if alone > 0 else 0.0


def _paces(rans: Sequence[Ran]) -> dict[str, float]:
    """Class -> speed of a collective beside it, relative to its speed alone."""
    kinds = sorted({kind for ran in rans for kind in ran.beside_us})
    beside = np.array([[ran.beside_us.get(kind, 0.0) for kind in kinds] for ran in rans])
    work = np.array([ran.alone_us - (ran.took_us - sum(ran.beside_us.values())) for ran in rans])
    return dict(zip(kinds, np.linalg.lstsq(beside, work, rcond=None)[0].tolist(), strict=True)) if kinds else {}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.beside_collectives", description="Computation beside collectives.")
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="the --out of a run of benchmarks.gpu.training")
    parser.add_argument("--base", required=True, metavar="PROFILE", help="profile that says how long collectives take alone")
    parser.add_argument("--note", default="", metavar="TEXT", help="when and on what it was measured")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    costs = CostModel(load_profile(args.base))
    runs = [((case, plan), traced(program, ranked, costs)) for case, plan, program, ranked in beside_transfers.named_runs_of(args.folders)]
    if not runs:
        parser.error(beside_transfers.NO_RUNS.format(", ".join(map(str, args.folders))))
    found = {"note": args.note, "num_traces": len(runs), "beside": summary(list(grouped(runs).values()))}
    args.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
