"""The command line. Each command is a module with `add_parser(subparsers)` and `main(args) -> exit code`.

Exit codes of all commands: 0 success, 1 the plan or the run failed, 2 user error, 130 interrupted (Ctrl-C, SIGTERM, SIGHUP), 141 the reader
of the output closed it. After 130 and 141 no process is left running, and output files are complete or absent.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from interlace.errors import InterlaceError, LaunchError
from interlace.garbage import rarely_collected
from interlace.interrupts import EXIT_CODE as INTERRUPTED
from interlace.interrupts import as_interrupts
from interlace.version import VERSION

BROKEN_PIPE = 141
"""The exit code with which a shell reports SIGPIPE."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of writing. Without a file name they concern standard output, as errors of `write_whole` have one."""
COMMANDS = ("run", "dump", "plan", "choose", "show", "check", "timeline", "report", "calibrate", "doctor", "accuracy")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; user errors are printed in one line, without a traceback."""
    command = "interlace"
    try:
        with as_interrupts(), rarely_collected():
            args = parsed(list(sys.argv[1:] if argv is None else argv))
            command = f"interlace {args.command}"
            code: int = args.main(args)
            sys.stdout.flush()
            return code
    except KeyboardInterrupt:
        _tell(f"{command}: interrupted; all processes that it started were ended")
        if argv is None:
            _leave(INTERRUPTED)
        return INTERRUPTED
    except LaunchError as error:
        _tell(f"{command}: {error}")
        return 1
    except InterlaceError as error:
        _tell(f"{command}: {error}")
        return 2
    except BrokenPipeError:
        _drop_output()
        return BROKEN_PIPE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else "standard output: " if error.errno in _FULL else ""
        _tell(f"{command}: {where}{error.strerror or error}; expected a path that can be read or written")
        return 2


def _tell(text: str) -> None:
    """Print a line to standard error, even if it is closed."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _drop_output() -> None:
    """Discard buffered output, so that the interpreter does not fail on it at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _leave(code: int) -> None:
    """End the process without waiting for its threads."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def parsed(words: list[str]) -> argparse.Namespace:
    """The arguments of a command, with those after the first `--` as `script_args`; a wrong argument ends the process with code 2."""
    cut = words.index("--") if "--" in words else len(words)
    known = parser(words[:1] if words and words[0] in COMMANDS else COMMANDS)
    args, unknown = known.parse_known_args(words[:cut])
    runs_script, script = hasattr(args, "script_args"), getattr(args, "script", None)
    if unknown:
        hint = f"; arguments of {script} follow --, as in: {_with_separator(words[:cut], unknown)}" if script else ""
        known.error(f"{args.command} does not know {' '.join(unknown)}{hint}")
    if cut < len(words):
        if not runs_script:
            known.error(f"{args.command} runs no script, so nothing may follow --")
        args.script_args = words[cut + 1 :]
    return args


def _with_separator(words: list[str], unknown: list[str]) -> str:
    """The command that the user probably meant.

    >>> _with_separator(["run", "gpt.py", "--world", "2", "--pp", "2"], ["--pp", "2"])
    'interlace run gpt.py --world 2 -- --pp 2'
    >>> _with_separator(["run", "gpt.py", "--pp", "2", "--world", "2"], ["--pp", "2"])
    'interlace run gpt.py --world 2 -- --pp 2'
    """
    own, rest = list[str](), list(unknown)
    for word in words:
        if rest and word == rest[0]:
            rest.pop(0)
        else:
            own.append(word)
    return shlex.join(["interlace", *own, "--", *unknown])


class _CommandParser(argparse.ArgumentParser):
    """Accepts only complete option names, so that a script's `--log` without `--` before it does not count as `--log-dir`; and accepts
    values that begin like negative numbers, such as `-5GB`, so that the option's own check explains what is wrong."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._negative_number_matcher = re.compile(r"-\.?\d")


def parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """The parser of all commands, or of some. It imports no heavy module."""
    made = argparse.ArgumentParser(prog="interlace", description="Overlap and offload for PaddlePaddle's static auto-parallel.")
    made.add_argument("--version", action="version", version=VERSION)
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_CommandParser)
    for name in names:
        module = importlib.import_module(f"interlace.cli.{name}")
        module.add_parser(commands).set_defaults(main=module.main)
    return made
