"""`interlace plan`: decide offline, from dumps, what each rank runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlace.cli.plans import add_budgets, add_partial, budgets_of
from interlace.cli.target import DEFAULT_PROFILE
from interlace.user_passes import add_import, import_own

if TYPE_CHECKING:
    from interlace.cli.plans import PlanFile
    from interlace.config import Config
    from interlace.cost_model import CostModel
    from interlace.cost_model.base import Row
    from interlace.ir import Program
    from interlace.planning.curve import Point, Sweep
    from interlace.planning.plan import Plan

POINTS = 6


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add `plan` to the command line."""
    parser = subparsers.add_parser("plan", help="plan dumped programs offline", description="Plan the dumps of all ranks.")
    parser.add_argument("dumps", nargs="+", metavar="DUMP", help="dump files, or folders of them")
    parser.add_argument("--config", metavar="FILE", help="configuration (YAML) or preset")
    parser.add_argument(
        "--device", metavar="NAME", help=f"device profile, by name or path (default: the configuration's, else {DEFAULT_PROFILE})"
    )
    add_import(parser)
    add_partial(parser)
    parser.add_argument("-o", "--output", type=Path, default=Path("plan"), metavar="DIR", help="folder for the plans (default: plan)")
    parser.add_argument("--json", metavar="FILE", help="write what each pass did on each rank to FILE")
    add_budgets(parser)
    parser.add_argument(
        "--sweep", action="store_true", help="also plan for several budgets, and write step time against budget to sweep.json"
    )
    parser.add_argument("--points", type=int, metavar="N", help=f"number of budgets for --sweep (default {POINTS})")
    return parser


def main(args: argparse.Namespace) -> int:
    """Run the command; 0, or 2 for user errors."""
    from interlace.cli.outputs import check_file, check_folder, staged, write_json
    from interlace.cli.plans import read_files, require_world
    from interlace.cli.progress import Alive
    from interlace.cost_model import load_profile
    from interlace.garbage import keep_freed_memory
    from interlace.planning.curve import SWEEP, write_sweep
    from interlace.planning.plan import make_plans
    from interlace.planning.processes import usable_processes
    from interlace.planning.room import use_room
    from interlace.planning.rows import CONFIG, ROWS, write_rows
    from interlace.temporary import claimed
    from interlace.units import ranks_text, size

    keep_freed_memory()
    points = _points(args)
    check_folder("-o", args.output)
    check_file("--json", args.json)
    import_own(args.imports)
    config = _config(args)
    profile = args.device or config.device or DEFAULT_PROFILE
    cost = config.costs(load_profile(profile))
    if config.capture == "auto":
        print(f"interlace plan: {config.source}: capture: auto is decided in runs; these plans do not capture steps", file=sys.stderr)
        config = config.issued()
    files = read_files(args.dumps)
    require_captured(files)
    require_world(files, args.partial)
    programs = [file.program for file in files]
    _check_places(args, config, files)
    with claimed(args.output.absolute() / "captured"), staged(args.output, instead_of=(SWEEP, ROWS, CONFIG)) as folder:
        with Alive("plan", f"planning {ranks_text(sorted(rank for program in programs for rank in program.ranks))}"):
            plans = make_plans(programs, config, cost, profile, usable_processes())
            plans, room = use_room(programs, config, cost, profile, plans, usable_processes())
        curve = None
        if args.sweep:
            curve, found = _swept(args, points, programs, cost, profile, plans)
            if found[0] is not plans[0]:
                room = ""
                print(f"interlace plan: the plan for {size(found[0].memory_budget)} fits and is faster, so it is written", file=sys.stderr)
            plans = found
        for plan in plans:
            plan.dump(folder)
        has_rows = write_rows(plans, folder, args.output)
        if curve is not None:
            write_sweep(curve, folder)
    costs = [cost.table(plan.program) for plan in plans]
    write_json(args.json, {"ranks": _summaries(plans, costs)})
    _print_plans(args.output, plans, costs, has_rows, curve, room)
    return 0


def _points(args: argparse.Namespace) -> int:
    """Number of budgets of `--sweep`."""
    from interlace.errors import ConfigError
    from interlace.planning.sweep import FEWEST

    if args.points is not None and not args.sweep:
        raise ConfigError("--points: is the number of budgets for --sweep; add --sweep, or leave --points out")
    points = POINTS if args.points is None else int(args.points)
    if points < FEWEST:
        raise ConfigError(f"--points {points}: expected {FEWEST} or more")
    return points


def _config(args: argparse.Namespace) -> Config:
    """The configuration that the options request. Raises ConfigError if nothing can be planned with it."""
    from interlace.config import command_marks, load_config, make_config, require_jobs
    from interlace.errors import ConfigError

    budgets = budgets_of(args)
    config: Config = load_config(args.config, budgets) if args.config else make_config(budgets, "defaults", command_marks(budgets))
    if not config.active:
        raise ConfigError(
            f"{config.source}: enable is off, or every pass is, so Paddle's plan stays and there is nothing to plan; "
            "the preset baseline makes a plan in Paddle's baseline order"
        )
    if config.plan:
        raise ConfigError(f"{config.source}: plan: {config.plan} is for runs, which load what this command writes; leave it out")
    require_jobs(config)
    if config.dump:
        print(f"interlace plan: {config.source}: dump: {config.dump} is for runs; -o says where these plans go", file=sys.stderr)
    return config


def _summaries(plans: Sequence[Plan], costs: Sequence[list[Row]]) -> list[dict[str, Any]]:
    """What `--json` writes for each rank; `costs` has the rows of its operations."""
    from interlace.cost_model.base import largest_unmeasured, shares_by_how
    from interlace.report.plan import PlanReport

    return [
        {**PlanReport(plan).summary(), "time_by_how": shares_by_how(rows), "largest_unmeasured": largest_unmeasured(rows)}
        for plan, rows in zip(plans, costs, strict=True)
    ]


def _print_plans(output: Path, plans: Sequence[Plan], costs: Sequence[list[Row]], has_rows: bool, curve: Sweep | None, room: str) -> None:
    """Print what was planned, where it was written, and which commands give details."""
    from interlace.cost_model.base import trust_text
    from interlace.planning.curve import SWEEP
    from interlace.planning.rows import CONFIG, ROWS
    from interlace.report.plan import PlanReport, summary_text
    from interlace.report.sweep import sweep_text

    print(summary_text(plans, trust_text([row for rows in costs for row in rows], " of all ranks")), end="\n\n")
    one = output / f"rank{min(plan.program.rank for plan in plans)}.ilp"
    print(
        f"{len(plans)} plans in {output}; all reasons: `interlace show {one} --why`; "
        f"proof and times: `interlace check {output}`; as a page: `interlace report {output}`"
    )
    if has_rows:
        print(f"schedule, a row for each stage: {output / ROWS}; to plan an edited one, use --config {output / CONFIG}")
    if curve is not None:
        print(f"step time against memory budget, also in {output / SWEEP}:\n{sweep_text(curve)}")
    if room:
        print(room)
    print(PlanReport(plans[0]).sentence())


def _check_places(args: argparse.Namespace, config: Config, files: Sequence[PlanFile]) -> None:
    """Refuse an output folder in which plans would overwrite the programs that they are made from, or would be mixed with other programs.
    Raises ConfigError."""
    import msgspec

    from interlace.cli.outputs import check_apart, check_no_others
    from interlace.ir.dump import SUFFIX
    from interlace.planning.curve import SWEEP
    from interlace.planning.rows import CONFIG, ROWS

    out: Path = args.output
    names = [f"rank{file.program.rank}{SUFFIX}" for file in files]
    captured = {os.path.realpath(out / "captured" / name): program.rank for name, (_, program, _) in zip(names, files, strict=True)}
    # a captured program that is written over itself stays the same
    others = [path for path, program, _ in files if captured.get(os.path.realpath(path)) != program.rank]
    tables = [value for each in config.passes.values() for name, value in msgspec.structs.asdict(each).items() if name.endswith("_file")]
    written = [out / name for name in (*names, SWEEP, ROWS, CONFIG)] + [Path(path) for path in captured]
    check_apart({"-o": written, "--json": args.json}, [*others, args.config, args.device, *args.imports, *tables])
    check_no_others("-o", out, names)


def require_captured(files: Sequence[PlanFile]) -> None:
    """Refuse plans, as only captured programs can be planned. Raises ProgramError with the folder of the dumps of a plan."""
    from interlace.errors import ProgramError

    made = next((file.path for file in files if file.program.jobs), None)
    if made is not None:
        source = made.parent / "captured"
        instead = f"the dumps that it was made from are in {source}" if source.is_dir() else "`interlace dump` makes them"
        raise ProgramError(f"{made}: is a plan already; `interlace plan` takes dumps, and {instead}")


def _swept(
    args: argparse.Namespace, points: int, programs: Sequence[Program], cost: CostModel, profile: str, asked: Sequence[Plan]
) -> tuple[Sweep, list[Plan]]:
    """The curve of `--sweep`, and the plans to write: the requested ones, or faster ones of the curve. Prints each point once known."""
    from interlace.config import BUDGET, load_config, make_config
    from interlace.planning.processes import usable_processes
    from interlace.planning.sweep import sweep
    from interlace.units import size

    any_budget = {**budgets_of(args), BUDGET: 1.0}
    config = load_config(args.config, any_budget) if args.config else make_config(any_budget)

    def say(point: Point) -> None:
        took = f"{(point.step_us or 0) / 1e3:.3f} ms" if point.feasible else "not feasible"
        print(f"interlace plan: budget {size(point.budget_bytes)}: {took}", file=sys.stderr)

    return sweep(programs, config, cost, profile, points, say, asked, usable_processes())
