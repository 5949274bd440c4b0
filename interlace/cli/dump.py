"""`interlace dump`: the program of each rank of a training script, built on this machine alone."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlace.cli.alive import Alive


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add `dump` to the command line."""
    parser = subparsers.add_parser(
        "dump",
        help="store the program of each rank of a training script; no launch, no GPU, no parameters",
        description="Build the program of ranks of SCRIPT, a process a rank, without training. Arguments after -- go to the script.",
    )
    parser.add_argument("script", metavar="SCRIPT", help="a training script that uses paddle.distributed.to_static")
    parser.add_argument("--world", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--rank", type=int, metavar="R", help="only this rank (default: all)")
    parser.add_argument("-o", "--output", type=Path, default=Path("dumps"), metavar="PATH",
                        help="folder, or file with --rank (default: dumps)")  # fmt: skip
    parser.add_argument("--materialize", action="store_true", help="allocate parameters, for scripts that need their values")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="J", help="ranks built at once (default: all cores)")
    parser.add_argument("--json", metavar="FILE", help="write operations, seconds and memory of each rank there")
    parser.set_defaults(script_args=[])
    return parser


def main(args: argparse.Namespace) -> int:
    """Run the command; returns 0, 1 where a script fails, 2 for its user's errors."""
    from interlace.cli.alive import Alive
    from interlace.cli.outputs import check_file, check_folder
    from interlace.errors import ConfigError, LaunchError
    from interlace.ir.dump import write_whole

    if args.world < 1 or (args.rank is not None and not 0 <= args.rank < args.world):
        raise ConfigError(f"--world {args.world} --rank {args.rank}: expected a world of at least 1 and a rank inside it")
    if not Path(args.script).is_file():
        raise ConfigError(f"{args.script}: no such script")
    if args.jobs < 1:
        raise ConfigError(f"--jobs {args.jobs}: expected a number of ranks, 1 or more")
    check_file("--json", args.json)
    if _is_file(args):
        check_file("-o", args.output)
    else:
        check_folder("-o", args.output)
    try:
        with Alive("dump", f"building the program of {args.world if args.rank is None else 1} rank(s)") as alive:
            done = list(_build_all(args, alive))
    except LaunchError as error:
        print(f"interlace dump: {error}", file=sys.stderr)
        return 1
    if args.json:
        write_whole(Path(args.json), (json.dumps({"ranks": done}, indent=1) + "\n").encode())
    return 0


def _build_all(args: argparse.Namespace, alive: Alive) -> Iterator[dict[str, Any]]:
    from interlace.units import size

    ranks = range(args.world) if args.rank is None else [args.rank]
    with ThreadPoolExecutor(max(1, args.jobs)) as pool:
        for k, result in enumerate(pool.map(lambda rank: _build(args, rank), ranks), 1):
            print(f"[{k}/{len(ranks)}] rank {result['rank']}: {result['ops']} ops, {result['seconds']:.1f} s, "
                  f"{size(result['peak_rss_bytes'])} of memory, {size(result['file_bytes'])} file -> {result['path']}",
                  flush=True)  # fmt: skip
            alive.now(f"building; {k} of {len(ranks)} rank(s) are done")
            yield result


def _is_file(args: argparse.Namespace) -> bool:
    """Whether the output is one rank's file rather than a folder."""
    from interlace.ir.dump import SUFFIX

    return args.rank is not None and args.output.suffix in (SUFFIX, ".gz")


def _build(args: argparse.Namespace, rank: int) -> dict[str, Any]:
    from interlace.bridge.say import VARIABLE, heard
    from interlace.errors import LaunchError, ScriptError
    from interlace.ir.dump import SUFFIX

    path = args.output if _is_file(args) else args.output / f"rank{rank}{SUFFIX}"
    command = [sys.executable, "-m", "interlace.bridge.dump", "--rank", str(rank), "--world", str(args.world), "--out", str(path)]
    command += ["--materialize"] if args.materialize else []
    with heard() as said_fd:
        found = subprocess.run([*command, args.script, *args.script_args], capture_output=True, text=True, check=False,
                               env={**os.environ, VARIABLE: str(said_fd)}, pass_fds=[said_fd])  # fmt: skip
    if found.returncode:
        tail = "\n".join(found.stderr.strip().splitlines()[-12:])
        kind = ScriptError if found.returncode == 2 else LaunchError
        raise kind(f"rank {rank} of {args.script} could not be built:\n{tail}")
    result: dict[str, Any] = json.loads(found.stdout.strip().splitlines()[-1])
    return {**result, "file_bytes": path.stat().st_size, "path": str(path)}
