"""How much computation slows down beside a send or receive that waits for its peer, and beside one that moves data.

`python -m benchmarks.gpu.beside_transfers FOLDER [FOLDER ...] -o FILE`.

A receive that is posted early occupies multiprocessors until the other rank sends. Traced steps of pipelines (the --out of
`benchmarks.gpu.training`) have the same operation for different micro-batches beside such a receive, beside a transfer of data, and
without either; their times are compared. Products are also distinguished by the elements of their result (`gemm of 8388608`).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from interlace.cost_model import CostModel, Costs, load_profile
from interlace.cost_model.base import tables_of
from interlace.cost_model.interference import TRANSFER, WAIT
from interlace.cost_model.work import work_of
from interlace.ir import Program, load
from interlace.ir.kinds import is_p2p
from testbed.device import Interval
from testbed.trace import RankTrace, align, read_rank, stream_names

SHORTEST_US = 20.0  # events around a kernel add several microseconds, so that shorter ones say little
WHOLLY, APART, PARTLY = 0.95, 0.02, 0.3  # share of an operation's time beside a send or receive
MOVES = 4.0
"""A send or receive that takes at most this multiple of its time alone counts as moving data, a longer one as waiting."""
PRODUCT = "gemm"
NO_RUNS = "{}: no traced step beside a plan of ours; expected traces/ and plans/"


class Ratio(NamedTuple):
    """The factor by which an operation takes longer beside a transfer, and its median time without in microseconds."""

    stretch: float
    apart_us: float


Ratios = dict[str, dict[str, list[Ratio]]]
"""`wait` or `p2p` -> kernel -> one ratio for each operation."""


def ratios(program: Program, ranked: RankTrace, costs: Costs) -> Ratios:
    """Ratios beside waiting transfers and beside transfers of data, of each operation that ran at least twice without any.

    A transfer of data is often shorter than the operation; then only the overlapping part of the operation is compared with the time that
    this part would take alone.
    """
    known = align(ranked.planned, ranked.trace.issues)
    names = stream_names(ranked, known)
    waiting, moving = _transfers(program, ranked, costs)
    apart: dict[tuple[str, str], list[float]] = defaultdict(list)
    beside: dict[tuple[str, str], list[tuple[str, float, float]]] = defaultdict(list)
    for each in ranked.trace.intervals:
        label = known[each.op].label.partition(", ")[2] if each.op in known else ""
        if names[each.stream] != "compute" or not label:  # Paddle's baseline labels nothing: operations of one name differ in shape
            continue
        took = max(each.end_us - each.begin_us, 1e-3)
        waits, moves = (overlap_us(each.begin_us, each.end_us, others) / took for others in (waiting, moving))
        if waits + moves < APART:
            apart[each.name, label].append(took)
        elif waits > WHOLLY:
            beside[each.name, label].append((WAIT, took, 1.0))
        elif moves > PARTLY and waits < APART:
            beside[each.name, label].append((TRANSFER, took, min(1.0, moves)))
    found: Ratios = {WAIT: defaultdict(list), TRANSFER: defaultdict(list)}
    sizes = results_of_products(program)
    for (kernel, label), runs in beside.items():
        alone = statistics.median(apart[kernel, label]) if len(apart[kernel, label]) > 1 else 0.0
        if alone < SHORTEST_US:
            continue
        elements = sizes.get(op_of(label)) if kernel == PRODUCT else None
        for what in (WAIT, TRANSFER):
            each_run = [part for kind, took, share in runs if kind == what and (part := _stretch(took, share, alone))]
            if each_run and (what == TRANSFER or len(each_run) > 1):
                ratio = Ratio(statistics.median(each_run), alone)
                found[what][kernel].append(ratio)
                if elements and what == WAIT:
                    found[what][f"{PRODUCT} of {elements}"].append(ratio)
    return found


def _stretch(took: float, share: float, alone: float) -> float:
    """The factor for the overlapping part of an operation; 0 if the remaining time is nearly that of the whole operation alone."""
    inside = alone - took * (1.0 - share)
    return took * share / inside if inside > PARTLY * alone / 2 else 0.0


def _transfers(program: Program, ranked: RankTrace, costs: Costs) -> tuple[list[Interval], list[Interval]]:
    """Sends and receives that wait for their peer, and those that move data nearly all the time that they run."""
    known, (values, groups) = align(ranked.planned, ranked.trace.issues), tables_of(program)
    alone = {op.id: costs.op_time(op, values, groups).dur_ns / 1e3 for op in program.ops if is_p2p(op)}
    waiting, moving = [], []
    for each in ranked.trace.intervals:
        op = op_of(known[each.op].label) if each.op in known else -1
        if op in alone:
            (moving if each.end_us - each.begin_us <= MOVES * alone[op] else waiting).append(each)
    return waiting, moving


def results_of_products(program: Program) -> dict[int, int]:
    """Operation -> elements of its result, for operations that are a single product."""
    values, _ = tables_of(program)
    parts = {op.id: work_of(op, values).parts for op in program.ops}
    return {op: found[0].result_elements for op, found in parts.items() if len(found) == 1 and found[0].family == "gemm"}


def op_of(label: str) -> int:
    """Number of the operation in its label, or -1 without one.

    >>> op_of("micro-batch 0, op #66 pd_op.matmul (blocks.0.attention.qkv)"), op_of("")
    (66, -1)
    """
    hit = re.search(r"op #(\d+)", label)
    return int(hit[1]) if hit else -1


def runs_of(folders: Iterable[Path]) -> Iterator[tuple[Program, RankTrace]]:
    """Each rank of each Interlace plan, with its traced step."""
    return ((program, ranked) for _, _, program, ranked in named_runs_of(folders))


def named_runs_of(folders: Iterable[Path]) -> Iterator[tuple[str, str, Program, RankTrace]]:
    """Case, plan, and each rank of each Interlace plan with its traced step."""
    for path in sorted(path for folder in folders for path in folder.glob("traces/*_trace*.msgpack")):
        run, _, rank = path.stem.rpartition("_trace")
        case, _, plan = run.rpartition("_")
        planned = path.parent.parent / "plans" / case / plan / f"rank{rank}.ilp"
        if planned.is_file() and plan != "stock":  # Paddle's own operations carry no label
            yield case, plan, load(planned), read_rank(path)


def overlap_us(begin_us: float, end_us: float, others: Iterable[Interval]) -> float:
    """Time during which other intervals run in a span, summed over them."""
    return sum(max(0.0, min(end_us, each.end_us) - max(begin_us, each.begin_us)) for each in others)


def summary(runs: Iterable[tuple[Program, RankTrace]], costs: Costs) -> dict[str, dict[str, dict[str, float]]]:
    """`wait` or `p2p` -> kernel -> mean ratio weighted by time, lowest and highest mean of a trace, numbers of operations and of traces."""
    each = [ratios(program, ranked, costs) for program, ranked in runs]
    return {
        what: {
            kernel: _figures([one[what][kernel] for one in each if kernel in one[what]])
            for kernel in sorted({name for one in each for name in one[what]})
        }
        for what in (WAIT, TRANSFER)
    }


def _figures(rows: Sequence[Sequence[Ratio]]) -> dict[str, float]:
    means, every = [_mean(row) for row in rows], [ratio for row in rows for ratio in row]
    figures = {"stretch": _mean(every), "lowest": min(means), "highest": max(means)}
    return {**{key: round(value, 3) for key, value in figures.items()}, "n": len(every), "num_traces": len(rows)}


def _mean(found: Sequence[Ratio]) -> float:
    return sum(each.stretch * each.apart_us for each in found) / sum(each.apart_us for each in found)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.beside_transfers", description="Stretch of computation beside sends and receives."
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="the --out of a run of benchmarks.gpu.training")
    parser.add_argument("--base", default="h200", help="profile that says how long transfers take alone")
    parser.add_argument("--note", default="", metavar="TEXT", help="when and on what it was measured")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    runs = list(runs_of(args.folders))
    if not runs:
        parser.error(NO_RUNS.format(", ".join(map(str, args.folders))))
    found = {"note": args.note, "num_traces": len(runs), "beside": summary(runs, CostModel(load_profile(args.base)))}
    args.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
