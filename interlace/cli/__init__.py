"""The command line. Each command is a module with `add_parser(subparsers)` and `main(args) -> exit code`.

Exit codes everywhere: 0 done, 1 the plan or the run fails, 2 the user's error, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from interlace.errors import InterlaceError
from interlace.version import VERSION

COMMANDS = ("run", "dump", "plan", "show", "check", "timeline", "calibrate")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors of the user's are printed in one line, without a traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    args = parser().parse_args(words[:cut])
    if cut < len(words):
        if not hasattr(args, "script_args"):
            parser().error(f"{args.command} starts no script, so nothing may stand behind --")
        args.script_args = words[cut + 1 :]
    try:
        code: int = args.main(args)
    except InterlaceError as error:
        print(f"interlace {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"interlace {args.command}: {where}{error.strerror or error}; expected a path that can be read or written", file=sys.stderr)
        return 2
    return code


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; no heavy module is imported for it."""
    made = argparse.ArgumentParser(prog="interlace", description="Overlap and offload for PaddlePaddle's static auto-parallel.")
    made.add_argument("--version", action="version", version=VERSION)
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"interlace.cli.{name}")
        module.add_parser(commands).set_defaults(main=module.main)
    return made
