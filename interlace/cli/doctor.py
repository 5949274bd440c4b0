"""`interlace doctor`: hold what plans assume of this machine and its Paddle against what happens."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from interlace.interrupts import postponed

if TYPE_CHECKING:
    from interlace.local.own_target import OwnTarget


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="check this machine and its Paddle",
        description="Check what plans rely on: versions, internals and flags of Paddle, streams, events, memory, copies, times.",
        epilog="Exit code 1 if a rule does not hold. What was not checked is listed with the reason, and counts neither way.",
    )
    parser.add_argument(
        "--target", metavar="T", default="", help="gpu, cpu, custom, or a module with your own device (default: the GPU if Paddle has one)"
    )
    parser.add_argument("--device", metavar="NAME", default="", help="device profile, by name or path (default: that of the device found)")
    parser.add_argument("--no-times", action="store_true", help="leave out the profile and its times")
    parser.add_argument("--json", metavar="FILE", help="write what was found to FILE; of several ranks each but the first adds its number")
    return parser


def main(args: argparse.Namespace) -> int:
    """Check, and print the table."""
    os.environ.setdefault("GLOG_minloglevel", "2")  # Paddle's executor tells of itself on stderr
    from interlace.cli.outputs import check_file, write_json
    from interlace.cli.progress import Alive
    from interlace.report.checks import table

    rank, world = (int(os.environ.get(name, default)) for name, default in (("PADDLE_TRAINER_ID", "0"), ("PADDLE_TRAINERS_NUM", "1")))
    if args.json and rank:
        args.json = f"{args.json}.rank{rank}"
    check_file("--json", args.json)
    with _prepared(args.target) as target, Alive("doctor", "running small programs through Paddle"):
        from interlace.bridge.doctor.examine import examine

        found = examine(args.device, not args.no_times, target)
    write_json(args.json, found)
    print(*([f"rank {rank} of {world}"] if world > 1 else []), table(found), sep="\n")
    return 1 if found.failed else 0


@contextlib.contextmanager
def _prepared(target: str) -> Iterator[str]:
    """Paddle, imported with the device that was asked for; gives its kind.

    Raises:
        ConfigError: A device of the user's own is not there.
    """
    from interlace.installed import require_paddle
    from interlace.temporary import temporary_folder

    require_paddle()
    own = _own(target)
    if own is not None:
        own.require()
        with temporary_folder() as folder, contextlib.closing(own.install(0, 1, str(folder), 60.0)):
            yield "custom"
        return
    with postponed():
        from interlace.bridge.calibrate import import_paddle

        import_paddle()
    yield target


def _own(target: str) -> OwnTarget | None:
    """A device of the user's own; None for those that Paddle has."""
    if target in ("", "gpu", "cpu", "custom"):
        return None
    from interlace.local.own_target import find_own

    return find_own(target)
