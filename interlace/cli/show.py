"""`interlace show`: a dump or a plan as text."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from interlace.ir import Program


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add `show` to the command line."""
    parser = subparsers.add_parser("show", help="print a dump, a plan, one job, or what a pass changed",
                                   description="Print a dump or plan file; FILE may be a folder with one file.")  # fmt: skip
    parser.add_argument("file", metavar="FILE", help="a dump or plan file")
    parser.add_argument("--job", metavar="J", help="only this job's operations, in issue order")
    parser.add_argument("--before-after", metavar="PASS", help="what this pass changed (of a plan), as a diff of program text")
    parser.add_argument("--why", action="store_true", help="what each pass of a plan did and declined, with the reasons")
    parser.add_argument("--costs", action="store_true", help="each operation's estimated time and how it was found")
    parser.add_argument("--device", metavar="NAME", default="", help="device profile for --costs (default: the plan's, else h200)")
    return parser


def main(args: argparse.Namespace) -> int:
    """Run the command; 0, or 2 for the user's errors."""
    from interlace.ir import load, show
    from interlace.ir.dump import find_dumps

    path = find_dumps([args.file], one=True)[0]
    if args.before_after:
        lines = _diff(path, args.before_after)
    elif args.why:
        lines = iter(_why(path))
    elif args.costs:
        lines = iter(_costs(load(path), args.device or "h200"))
    elif args.job:
        lines = _job(load(path), args.job)
    else:
        lines = iter(show(load(path)).splitlines())
    for line in lines:
        print(line)
    return 0


def _job(program: Program, name: str) -> Iterator[str]:
    from interlace.errors import PlanError
    from interlace.ir.text import show_op

    jobs = {job.name: job for job in program.jobs}
    if name not in jobs:
        raise PlanError(f"no job {name!r}; there are {list(jobs) or 'none: this is an unscheduled program'}")
    ops = {op.id: op for op in program.ops}
    values = {value.id: value for value in program.values}
    yield f"job {name} {jobs[name].kind}"
    for op_id, micro_batch in jobs[name].items:
        yield f"  mb{micro_batch} {show_op(ops[op_id], values)}"


def _diff(path: Path, name: str) -> Iterator[str]:
    from interlace.ir import show
    from interlace.plan import replay

    before, after = replay(path, name)
    texts = show(before).splitlines(), show(after).splitlines()
    yield from difflib.unified_diff(*texts, f"before {name}", f"after {name}", n=2, lineterm="")


def _why(path: Path) -> list[str]:
    from interlace.plan import read_record

    return [line for report in read_record(path).reports for line in report.text(limit=12).splitlines()]


def _costs(program: Program, device: str) -> list[str]:
    from interlace.cost_model import CostModel, load_profile

    cost = CostModel(load_profile(device))
    rows = [f"#{row.op:<6} {row.kind:28} {row.layer:32} {row.category:24} {row.dur_ns / 1e3:10.1f} us  {row.how}"
            for row in cost.table(program)]  # fmt: skip
    return [*rows, *cost.explain(program).splitlines()]
