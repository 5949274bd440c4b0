"""`interlace timeline`: a simulated step as a Chrome trace, and where its time goes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.cli.target import Setting, add_options

if TYPE_CHECKING:
    from interlace.cost_model import Costs
    from interlace.ir import Program
    from interlace.scheduler.simulate.simulator import Result


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add `timeline` to the command line."""
    parser = subparsers.add_parser(
        "timeline",
        help="simulate a step; write a trace for Perfetto and print where the time goes",
        description="Simulate the plans of all ranks. Dumps without jobs run in Paddle's own order.",
    )
    parser.add_argument("dumps", nargs="+", metavar="DUMP", help="plan or dump files, or folders of them")
    parser.add_argument(
        "--beside", nargs="+", metavar="DUMP", default=[], help="plans or dumps to compare with, such as plan/captured"
    )
    add_options(parser, "ideal: memory is taken while operations run, whenever they were issued")
    parser.add_argument("--p2p", choices=("rendezvous", "buffered"),
                        help="whether a send waits for its receive (default: as the target's sends do)")  # fmt: skip
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="trace.json", help="where the trace goes (default: trace.json)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the split of each rank there")
    return parser


def main(args: argparse.Namespace) -> int:
    """Run the command; 0, 1 if ranks wait for each other, 2 for the user's errors."""
    from interlace.cli.outputs import check_file, write_json
    from interlace.report.split import rows, split_text
    from interlace.report.timeline import write_trace
    from interlace.scheduler.simulate.simulator import Stall
    from interlace.scheduler.target import IDEAL

    check_file("-o", args.output)
    check_file("--json", args.json)
    setting = Setting.of(args.dumps, args, IDEAL)
    try:
        mine, other = _labels(args.dumps, args.beside)
        results = {other: _simulated(args.beside, setting, args)} if args.beside else {}
        results[mine] = _simulated(args.dumps, setting, args)
        if args.beside:
            _require_same_model(results[mine].input.programs, results[other].input.programs)
    except Stall as stall:
        print(f"interlace timeline: {stall}", file=sys.stderr)
        return 1
    write_trace(results[mine], args.output)
    write_json(args.json, {"device": setting.profile, "target": setting.target.name, "ranks": rows(results[mine])})
    print(f"trace of {len(results[mine].ranks)} rank(s) in {args.output}; open it at https://ui.perfetto.dev\n")
    print(f"{setting}, a step of each rank:")
    print(split_text(results))
    return 0


def _labels(dumps: list[str], beside: list[str]) -> tuple[str, str]:
    """What the table calls the plans and those beside them: the folders they lie in, where these tell them apart."""
    mine, other = (_folder(paths) for paths in (dumps, beside))
    return (mine or "plan", other or "beside") if mine != other else ("plan", "beside")


def _folder(paths: list[str]) -> str:
    if not paths:
        return ""
    path = Path(os.path.abspath(paths[0]))
    return path.name if path.is_dir() else path.parent.name


def _simulated(paths: list[str], setting: Setting, args: argparse.Namespace) -> Result:
    from interlace.errors import PlanError
    from interlace.ir import load
    from interlace.ir.dump import find_dumps

    programs = [_scheduled(load(path), setting.costs) for path in find_dumps(paths)]
    ranks = [program.rank for program in programs]
    if len(set(ranks)) < len(ranks):
        raise PlanError(f"{paths}: rank {next(r for r in ranks if ranks.count(r) > 1)} is there twice; give one dump a rank")
    missing = sorted(set(range(max(program.world for program in programs))) - set(ranks))
    if missing:
        print(
            f"no dump of rank(s) {', '.join(map(str, missing))}: taken to be ready whenever they are needed", file=sys.stderr
        )
    return setting.simulate(programs, args.p2p)


def _require_same_model(plan: Sequence[Program], beside: Sequence[Program]) -> None:
    """Times can be compared where the same model runs on the same world with the same micro-batches.

    Raises:
        PlanError: They differ; it says in what.
    """
    from interlace.errors import PlanError

    for name, find in (("world", _world), ("number of micro-batches", _micro_batches), ("list of forward operations", _forward)):
        mine, other = {p.rank: find(p) for p in plan}, {p.rank: find(p) for p in beside}
        rank = next((rank for rank in mine if rank in other and mine[rank] != other[rank]), None)
        if rank is not None:
            found = "" if isinstance(mine[rank], dict) else f" ({mine[rank]} and {other[rank]})"
            raise PlanError(f"--beside: rank {rank} has another {name}{found}; expected plans of the same model, layout and batch")


def _world(program: Program) -> object:
    return program.world


def _micro_batches(program: Program) -> object:
    return program.pipeline.num_micro_batches


def _forward(program: Program) -> object:
    """What no pass changes: names and shapes of the model's own forward operations, and how many of each."""
    from collections import Counter

    from interlace.ir.kinds import is_copy

    shapes = {value.id: value.shape for value in program.values}
    return Counter((op.name, tuple(shapes.get(value) for value in op.results))
                   for op in program.ops if op.role == "forward" and not is_copy(op))  # fmt: skip


def _scheduled(program: Program, cost: Costs) -> Program:
    """The program with jobs: its own, or Paddle's order."""
    from interlace.passes import Pipeline
    from interlace.passes.schedule_1f1b import Schedule1F1B

    if program.jobs:
        return program
    return Pipeline((Schedule1F1B(interleave="off"),)).run(program, cost)[0]
