"""`interlace plan`: decide offline, from dumps, what each rank would run."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add `plan` to the command line."""
    parser = subparsers.add_parser("plan", help="plan dumped programs offline", description="Run the passes over dumps of ranks.")
    parser.add_argument("dumps", nargs="+", metavar="DUMP", help="dump files, or folders of them")
    parser.add_argument("--config", metavar="FILE", help="configuration (YAML) or preset")
    parser.add_argument("--device", metavar="NAME", help="device profile, by name or path; on top of the configuration's")
    parser.add_argument("-o", "--output", type=Path, default=Path("plan"), metavar="DIR", help="where the plans go (default: plan)")
    parser.add_argument("--json", metavar="FILE", help="write what each pass did on each rank there")
    return parser


def main(args: argparse.Namespace) -> int:
    """Run the command; 0, or 2 for the user's errors."""
    import msgspec

    from interlace.config import Config, load_config, make_config
    from interlace.cost_model import CostModel, load_profile
    from interlace.ir import load
    from interlace.ir.dump import find_dumps, write_whole
    from interlace.plan import make_plans

    config: Config = load_config(args.config) if args.config else make_config({})
    profile = args.device or config.device or "h200"
    cost = CostModel(load_profile(profile))
    summaries = []
    for plan in make_plans([load(path) for path in find_dumps(args.dumps)], config, cost, profile):
        plan.dump(args.output)
        print(plan.explain(4), end="\n\n")
        summaries.append(plan.summary())
    print(f"{len(summaries)} plans in {args.output}; look at them with `interlace show`, prove them with `interlace check {args.output}`")
    if args.json:
        write_whole(Path(args.json), msgspec.json.format(msgspec.json.encode({"ranks": summaries})) + b"\n")
    return 0
