"""`interlace report`: a plan as one HTML page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.cli.plans import add_partial
from interlace.cli.target import Setting, add_options

if TYPE_CHECKING:
    from interlace.cli.plans import PlanFile
    from interlace.planning.curve import Sweep
    from interlace.report.page.build import Simulated


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add `report` to the command line."""
    parser = subparsers.add_parser(
        "report",
        help="write a page that shows a plan: the step as a picture, where time and memory go, what was done",
        description="Simulate the plans of all ranks and write one HTML file. It compares with Paddle's baseline, which is made from "
        "the captured programs in the folder of a plan.",
    )
    parser.add_argument("plans", nargs="+", metavar="PLAN", help="plan files, or folders of them")
    parser.add_argument(
        "--beside", nargs="+", metavar="PLAN", default=[], help="plans or dumps to compare with instead of Paddle's baseline"
    )
    add_options(parser)
    add_partial(parser)
    parser.add_argument("-o", "--output", metavar="FILE", default="report.html", help="file for the page (default: report.html)")
    parser.add_argument("--json", metavar="FILE", help="write the page's data to FILE")
    return parser


def main(args: argparse.Namespace) -> int:
    """Run the command; 0, 1 if ranks wait for each other forever, 2 for user errors."""
    from interlace.cli.outputs import check_apart, write_json
    from interlace.cli.plans import read_files, require_same_model, simulated
    from interlace.planning.baseline import BASELINE
    from interlace.report.page.build import OURS, Given, Simulated, build_page
    from interlace.report.page.write import write_page
    from interlace.scheduler.simulate.simulator import Stall

    check_apart({"-o": args.output, "--json": args.json}, [*args.plans, *args.beside, args.device])
    files = read_files(args.plans)
    setting = Setting.of(files, args)
    captured = _are_captured(files)
    try:
        ours = Simulated(BASELINE if captured else OURS, simulated(files, setting, partial=args.partial))
        other = _compared(files, captured, args, setting)
    except Stall as stall:
        print(f"interlace report: {stall}", file=sys.stderr)
        return 1
    if other:
        require_same_model(ours.result.input.programs, other.result.input.programs)
    records, setting = {file.program.rank: file.record for file in files if file.record}, setting.of_plans(files)
    told = [record.outcome.memory for record in records.values() if record.outcome and record.profile == setting.profile]
    page = build_page(
        ours,
        other,
        {rank: record.reports for rank, record in records.items()},
        Given(setting.profile, setting.costs, setting.target),
        next(iter(told), None),
        sweep=_sweep(files),
        pool_budget=max((record.pool_budget for record in records.values() if record.profile == setting.profile), default=0),
    )
    write_page(page, args.output)
    write_json(args.json, page)
    print(f"{page.sentence}\n{args.output}: open it in a browser")
    return 0


def _are_captured(files: Sequence[PlanFile]) -> bool:
    """Whether these are dumps, which have no jobs, and not plans."""
    return not any(file.program.jobs for file in files)


def _compared(files: Sequence[PlanFile], captured: bool, args: argparse.Namespace, setting: Setting) -> Simulated | None:
    """What the page compares with: the plans of `--beside`, else Paddle's baseline of the programs from which the plans were made; None if
    there is nothing to compare with. `captured`: the files are dumps."""
    from interlace.cli.plans import read_files, simulated
    from interlace.planning.baseline import BASELINE
    from interlace.report.page.build import Simulated

    if args.beside:
        beside = read_files(args.beside)
        return Simulated(BASELINE if _are_captured(beside) else _name(args.beside[0]), simulated(beside, setting, partial=args.partial))
    if captured:
        print("interlace report: these are dumps: the page shows Paddle's baseline, with nothing to compare with", file=sys.stderr)
        return None
    captured_files = [file.path.parent / "captured" / file.path.name for file in files]
    if all(path.is_file() for path in captured_files):
        return Simulated(BASELINE, simulated(read_files(captured_files), setting, partial=args.partial))
    print(
        "interlace report: the folder of these plans has no captured programs to compare with; name plans with --beside",
        file=sys.stderr,
    )
    return None


def _sweep(files: Sequence[PlanFile]) -> Sweep | None:
    """The curve of step time against memory that is stored with the plans; None if there is none, or if they are in several folders."""
    from interlace.planning.curve import read_sweep

    folders = {file.path.parent for file in files}
    return read_sweep(folders.pop()) if len(folders) == 1 else None


def _name(path: str) -> str:
    """The name of a plan to compare with: that of its folder."""
    where = Path(path).absolute()
    return f"the plan in {where.name if where.is_dir() else where.parent.name}/"
