"""`interlace doctor`: check what plans assume about this machine and its Paddle."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from interlace.cli.devices import add_target, paddle_on, started_ranks

if TYPE_CHECKING:
    from interlace.ir import Program
    from interlace.report.checks import Examination


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add `doctor` to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="check this machine and its Paddle, and what the plan of a script needs from them",
        usage="interlace doctor [-h] [options] [SCRIPT --world N [-- arguments of SCRIPT]]",
        description="Check what plans rely on: versions, internals and flags of Paddle, streams, events, memory, copies and times. With "
        "SCRIPT, also build and plan its programs, and compare what the plan needs with what was found.",
        epilog="Exit code 1 if a rule does not hold, or the plan of SCRIPT does not fit into the device. What was not checked is listed "
        "with the reason, and does not affect the exit code.",
    )
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="a training script that uses paddle.distributed.to_static")
    parser.add_argument("--world", type=int, metavar="N", help="number of ranks of SCRIPT")
    parser.add_argument(
        "--config", metavar="FILE", help="configuration (YAML) or preset for SCRIPT (default: that of INTERLACE_CONFIG, if set)"
    )
    add_target(parser)
    parser.add_argument("--device", metavar="NAME", default="", help="device profile, by name or path (default: that of the device in use)")
    parser.add_argument("--no-times", action="store_true", help="do not compare times with the profile")
    parser.add_argument(
        "--json", metavar="FILE", help="write the results to FILE; with several ranks, all except the first append .rank and their number"
    )
    parser.set_defaults(script_args=[])
    return parser


def main(args: argparse.Namespace) -> int:
    """Run the command: check, and print the table; 0, 1 if a rule does not hold or the plan does not fit, 2 for user errors."""
    os.environ.setdefault("GLOG_minloglevel", "2")  # else Paddle's executor logs to stderr
    from interlace.cli.outputs import check_apart, write_json
    from interlace.cli.progress import Alive
    from interlace.report.checks import table

    rank, world = started_ranks()
    if args.json and rank:
        args.json = f"{args.json}.rank{rank}"
    check_apart({"--json": args.json}, [args.script, args.config, args.device])
    asked = _asked(args)
    with paddle_on(args.target) as target, Alive("doctor", "running small programs through Paddle"):
        from interlace.bridge.doctor.examine import examine

        found = examine(args.device or asked.device, not args.no_times, target)
    write_json(args.json, found)
    print(*([f"rank {rank} of {world}"] if world > 1 else []), table(found), sep="\n")
    if args.script and not rank:
        found, text = _with_plan(args, asked, found)
        write_json(args.json, found)
        print("", text, sep="\n")
    return 0 if found.is_sound else 1


class _Asked(NamedTuple):
    """The request for a script's plan: options as in a configuration, their source, the marks of their places in it, and the profile."""

    options: dict[str, Any]
    source: str
    marks: dict[str, str]
    device: str


def _asked(args: argparse.Namespace) -> _Asked:
    """What the command and the environment request. Raises ConfigError if the script, the number of its ranks or the configuration is
    missing or wrong."""
    from interlace.cli.dump import require_script
    from interlace.config import make_config
    from interlace.errors import ConfigError
    from interlace.outside import CONFIG_VARIABLE, VARIABLES, asked_outside

    if not args.script:
        given = next((name for name in ("world", "config") if getattr(args, name) is not None), "")
        if given or args.script_args:
            raise ConfigError(f"{f'--{given}' if given else 'arguments after --'}: needs SCRIPT, which is missing")
        return _Asked({}, "defaults", {}, "")
    require_script(args.script)
    if args.world is None:
        raise ConfigError(f"{args.script}: the number of ranks is missing; add --world N")
    if args.world < 1:
        raise ConfigError(f"--world {args.world}: expected at least one rank")
    outside = asked_outside({CONFIG_VARIABLE: args.config}) if args.config else asked_outside(typed=VARIABLES)
    options, source, marks = outside[:3] if outside else ({}, "defaults", {})
    config = make_config(options, source, marks)
    if not config.active or config.plan:
        raise ConfigError(f"{source}: it plans nothing (enable: off, every pass off, or plan: FOLDER), so there is no plan to check")
    return _Asked(dict(options), source, dict(marks), config.device)


def _with_plan(args: argparse.Namespace, asked: _Asked, found: Examination) -> tuple[Examination, str]:
    """The examination with the needs of the script's plan added, and these needs as text."""
    import msgspec

    from interlace.cli.progress import Alive
    from interlace.config import make_config
    from interlace.cost_model import CostModel, load_profile
    from interlace.planning.plan import make_plans
    from interlace.planning.processes import usable_processes
    from interlace.report.checks import EVERYTHING, PROFILE, needs_table
    from interlace.report.needs import needs_of

    programs = _programs(args)
    config = make_config(asked.options, asked.source, asked.marks)
    with Alive("doctor", f"planning {len(programs)} stage(s)"):
        profile = load_profile(found.profile)
        profile = msgspec.structs.replace(profile, memory_bytes=found.memory_bytes or profile.memory_bytes)
        plans = make_plans(programs, config, CostModel(profile), found.profile, usable_processes())
    found = msgspec.structs.replace(found, needs=tuple(needs_of(plans, config, found)))
    failing = dict.fromkeys(feature for each in found.failed if each.group != PROFILE for feature in each.rests)
    if EVERYTHING in failing:
        in_force = EVERYTHING.off
    elif failing:
        from interlace.bridge.first_contact import changes_text, without

        in_force = changes_text(asked.options, without(asked.options, failing))
    else:
        in_force = "nothing"
    return found, needs_table(found, args.script, in_force)


def _programs(args: argparse.Namespace) -> list[Program]:
    """One program for each stage of the script, built as `interlace dump --stages` does."""
    from interlace.cli import dump, parsed
    from interlace.cli.plans import read_files
    from interlace.temporary import temporary_folder

    with temporary_folder() as folder, contextlib.redirect_stdout(io.StringIO()):  # dump prints the name of a folder that is removed
        words = ["dump", args.script, "--world", str(args.world), "--stages", "-o", str(folder), "--", *args.script_args]
        dump.main(parsed(words))
        return [file.program for file in read_files([folder])]
