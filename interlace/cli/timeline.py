"""`interlace timeline`: a simulated step as a Chrome trace, and the parts of its time."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from interlace.cli.plans import add_partial
from interlace.cli.target import Setting, add_options


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add `timeline` to the command line."""
    parser = subparsers.add_parser(
        "timeline",
        help="simulate a step; write a trace for Perfetto and print where the time goes",
        description="Simulate the plans of all ranks. Dumps without jobs run in Paddle's baseline order.",
    )
    parser.add_argument("dumps", nargs="+", metavar="DUMP", help="plan or dump files, or folders of them")
    parser.add_argument("--beside", nargs="+", metavar="DUMP", default=[], help="plans or dumps to compare with, such as plan/captured")
    add_options(parser, "ideal: memory is allocated when operations run, not when they are issued")
    add_partial(parser)
    parser.add_argument(
        "--p2p", choices=("rendezvous", "buffered"), help="whether a send waits for its receive (default: the rule of the target)"
    )
    parser.add_argument("-o", "--output", metavar="FILE", default="trace.json", help="file for the trace (default: trace.json)")
    parser.add_argument("--json", metavar="FILE", help="write the parts of each rank's step time to FILE")
    return parser


def main(args: argparse.Namespace) -> int:
    """Run the command; 0, 1 if ranks wait for each other forever, 2 for user errors."""
    from interlace.cli.outputs import check_apart, write_json
    from interlace.cli.plans import read_files, require_same_model, simulated
    from interlace.ir.target import IDEAL
    from interlace.report.split import rows, split_text
    from interlace.report.timeline import write_trace
    from interlace.scheduler.simulate.simulator import Stall

    check_apart({"-o": args.output, "--json": args.json}, [*args.dumps, *args.beside, args.device])
    files = read_files(args.dumps)
    setting = Setting.of(files, args, IDEAL)
    try:
        mine, other = _labels(args.dumps, args.beside)
        results = {other: simulated(read_files(args.beside), setting, args.p2p, partial=args.partial)} if args.beside else {}
        results[mine] = simulated(files, setting, args.p2p, partial=args.partial)
        if args.beside:
            require_same_model(results[mine].input.programs, results[other].input.programs)
    except Stall as stall:
        print(f"interlace timeline: {stall}", file=sys.stderr)
        return 1
    setting = setting.of_plans(files)
    write_trace(results[mine], args.output, {other: results[other]} if args.beside else None)
    write_json(args.json, {"device": setting.profile, "target": setting.target.name, "ranks": rows(results[mine])})
    print(f"trace of {len(results[mine].ranks)} rank(s) in {args.output}; open it at https://ui.perfetto.dev\n")
    print(f"{setting}, a step of each rank:")
    print(split_text(results))
    return 0


def _labels(dumps: list[str], beside: list[str]) -> tuple[str, str]:
    """Names of the plans and of those to compare with: the names of their folders if these differ, else `plan` and `beside`."""
    mine, other = (_folder(paths) for paths in (dumps, beside))
    return (mine or "plan", other or "beside") if mine != other else ("plan", "beside")


def _folder(paths: list[str]) -> str:
    if not paths:
        return ""
    path = Path(os.path.abspath(paths[0]))
    return path.name if path.is_dir() else path.parent.name
