"""`interlace plan`: decide offline, from dumps, what each rank would run."""

from __future__ import annotations

import argparse
from pathlib import Path

from interlace.cli.target import DEFAULT_PROFILE
from interlace.user_passes import add_import, import_own


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add `plan` to the command line."""
    parser = subparsers.add_parser("plan", help="plan dumped programs offline", description="Run the passes over dumps of ranks.")
    parser.add_argument("dumps", nargs="+", metavar="DUMP", help="dump files, or folders of them")
    parser.add_argument("--config", metavar="FILE", help="configuration (YAML) or preset")
    parser.add_argument("--device", metavar="NAME",
                        help=f"device profile, by name or path (default: the configuration's, else {DEFAULT_PROFILE})")  # fmt: skip
    add_import(parser)
    parser.add_argument("-o", "--output", type=Path, default=Path("plan"), metavar="DIR", help="where the plans go (default: plan)")
    parser.add_argument("--json", metavar="FILE", help="write what each pass did on each rank there")
    return parser


def main(args: argparse.Namespace) -> int:
    """Run the command; 0, or 2 for the user's errors."""
    from interlace.cli.outputs import check_file, check_folder, staged, write_json
    from interlace.cli.progress import Alive
    from interlace.config import Config, load_config, make_config, require_jobs
    from interlace.cost_model import CostModel, load_profile
    from interlace.cost_model.base import largest_unmeasured, shares_by_how, trust_text
    from interlace.errors import ConfigError, ProgramError
    from interlace.ir import load
    from interlace.ir.dump import find_dumps
    from interlace.planning.plan import make_plans, summary_text
    from interlace.planning.rows import CONFIG, ROWS, write_rows
    from interlace.units import ranks_text

    check_folder("-o", args.output)
    check_file("--json", args.json)
    import_own(args.imports)
    config: Config = load_config(args.config) if args.config else make_config({})
    if not config.active:
        raise ConfigError(f"{config.source}: enable is off, or every pass: Paddle's plan stays as it is and there is nothing to plan; "
                          "for Paddle's own order as a plan of ours there is the preset stock")  # fmt: skip
    if config.plan:
        raise ConfigError(f"{config.source}: plan: {config.plan} is for runs, which load what this command makes; leave it out")
    require_jobs(config)
    profile = args.device or config.device or DEFAULT_PROFILE
    cost = CostModel(load_profile(profile))
    programs = [load(path) for path in find_dumps(args.dumps)]
    ranks = [program.rank for program in programs]
    twice = next((rank for rank in ranks if ranks.count(rank) > 1), None)
    if twice is not None:
        raise ProgramError(f"rank {twice} is given twice; give one dump a rank, and one world at a time")
    with Alive("plan", f"planning {ranks_text(sorted(rank for program in programs for rank in program.ranks))}"):
        plans = make_plans(programs, config, cost, profile)
    with staged(args.output) as folder:
        for plan in plans:
            plan.dump(folder)
        has_rows = write_rows(plans, folder, args.output)
    costs = [cost.table(plan.program) for plan in plans]
    summaries = [{**plan.summary(), "time_by_how": shares_by_how(rows), "largest_unmeasured": largest_unmeasured(rows)}
                 for plan, rows in zip(plans, costs, strict=True)]  # fmt: skip
    write_json(args.json, {"ranks": summaries})
    print(summary_text(plans, trust_text([row for rows in costs for row in rows], " of all ranks")), end="\n\n")
    one = args.output / f"rank{min(ranks)}.ilp"
    print(f"{len(plans)} plans in {args.output}; reasons in full: `interlace show {one} --why`; "
          f"proof and times: `interlace check {args.output}`; to look at: `interlace report {args.output}`")  # fmt: skip
    if has_rows:
        print(f"schedule, a row for each stage: {args.output / ROWS}; edited, it is planned with --config {args.output / CONFIG}")
    print(plans[0].sentence())
    return 0
