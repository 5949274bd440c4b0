"""The command line. Each command is a module with `add_parser(subparsers)` and `main(args) -> exit code`.

Exit codes everywhere: 0 done, 1 the plan or the run fails, 2 the user's error, 130 interrupted.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import shlex
import sys
from collections.abc import Sequence

from interlace.errors import InterlaceError
from interlace.version import VERSION

COMMANDS = ("run", "dump", "plan", "show", "check", "timeline", "calibrate")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors of the user's are printed in one line, without a traceback."""
    args = _parse(list(sys.argv[1:] if argv is None else argv))
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


def _parse(words: list[str]) -> argparse.Namespace:
    """The arguments of a command, those of its script behind the first `--`; a wrong one ends the program with code 2."""
    cut = words.index("--") if "--" in words else len(words)
    known = parser()
    args, unknown = known.parse_known_args(words[:cut])
    runs_script = hasattr(args, "script_args")
    if unknown:
        hint = f"; arguments of {args.script} stand behind --, as in: {_with_separator(words[:cut], unknown)}" if runs_script else ""
        known.error(f"{args.command} does not know {' '.join(unknown)}{hint}")
    if cut < len(words):
        if not runs_script:
            known.error(f"{args.command} starts no script, so nothing may stand behind --")
        args.script_args = words[cut + 1 :]
    return args


def _with_separator(words: list[str], unknown: list[str]) -> str:
    """The command as it was probably meant.

    >>> _with_separator(["run", "gpt.py", "--world", "2", "--pp", "2"], ["--pp", "2"])
    'interlace run gpt.py --world 2 -- --pp 2'
    """
    own, rest = list(words), list(unknown)
    for word in reversed(rest):
        at = len(own) - 1 - own[::-1].index(word)
        del own[at]
    return shlex.join(["interlace", *own, "--", *rest])


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; no heavy module is imported for it."""
    made = argparse.ArgumentParser(prog="interlace", description="Overlap and offload for PaddlePaddle's static auto-parallel.")
    made.add_argument("--version", action="version", version=VERSION)
    exact = functools.partial(argparse.ArgumentParser, allow_abbrev=False)  # a script's --step is none of our options
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=exact)
    for name in COMMANDS:
        module = importlib.import_module(f"interlace.cli.{name}")
        module.add_parser(commands).set_defaults(main=module.main)
    return made
