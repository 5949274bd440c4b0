"""`interlace dump`: the program of each rank of a training script, built on one machine."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlace.cli.progress import Alive
    from interlace.local.building import Build


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add `dump` to the command line."""
    parser = subparsers.add_parser(
        "dump",
        help="store the program of each rank of a training script, without launching it, a GPU or memory for parameters",
        description="Build the programs of the ranks of SCRIPT, each in a process, without training. Arguments after -- go to the script.",
    )
    parser.add_argument("script", metavar="SCRIPT", help="a training script that uses paddle.distributed.to_static")
    parser.add_argument("--world", type=int, required=True, metavar="N", help="number of ranks")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="R", help="only this rank (default: all)")
    which.add_argument("--stages", action="store_true", help="only one rank of each pipeline stage, to represent the others")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="with --stages: also build the last rank of each stage, which must be equivalent to the first",
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("dumps"), metavar="PATH", help="folder, or file with --rank (default: dumps)"
    )
    add_building(parser, "ranks built")
    parser.add_argument("--json", metavar="FILE", help="write operations, seconds and memory of each rank to FILE")
    parser.set_defaults(script_args=[])
    return parser


def add_building(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the options of commands that build programs; `what` is what `--jobs` counts."""
    parser.add_argument("--materialize", action="store_true", help="allocate parameters, for scripts that need their values")
    parser.add_argument("--force-paddle", action="store_true", help="try an untested Paddle that lacks names which dumps use")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="J", help=f"{what} at once (default: all cores)")


def building_options(args: argparse.Namespace) -> tuple[str, ...]:
    """Those options that are passed on to the builder of a rank's program."""
    return tuple(name for name, is_set in (("--materialize", args.materialize), ("--force-paddle", args.force_paddle)) if is_set)


def require_script(name: str) -> None:
    """Raises ConfigError if a name is not that of a training script."""
    from interlace.errors import ConfigError
    from interlace.ir.dump import is_dump

    if not Path(name).is_file():
        raise ConfigError(f"{name}: no such script; expected the path of a training script")
    if is_dump(name):
        raise ConfigError(f"{name}: is a dump or a plan of Interlace; expected a training script")


def main(args: argparse.Namespace) -> int:
    """Run the command; 0, 1 if a script fails, 2 for user errors."""
    from interlace.cli.outputs import check_apart, check_file, check_folder, check_no_others, staged, write_json
    from interlace.cli.progress import Alive
    from interlace.errors import ConfigError
    from interlace.installed import require_paddle

    if args.world < 1 or (args.rank is not None and not 0 <= args.rank < args.world):
        raise ConfigError(f"--world {args.world} --rank {args.rank}: expected a world of at least 1 and a rank inside it")
    require_script(args.script)
    if args.compare and not args.stages:
        raise ConfigError("--compare: compares ranks with those that --stages builds; add --stages")
    require_paddle()
    if args.jobs < 1:
        raise ConfigError(f"--jobs {args.jobs}: expected a number of ranks, 1 or more")
    if _is_file(args):
        check_file("-o", args.output)
    else:
        check_folder("-o", args.output)
    ranks = [0] if args.stages else list(range(args.world)) if args.rank is None else [args.rank]
    check_apart({"-o": [_folder(args) / _name(args, rank) for rank in ranks], "--json": args.json}, [args.script])
    if args.rank is None and not args.stages:
        check_no_others("-o", args.output, [_name(args, rank) for rank in ranks])
    if args.stages:
        check_no_others("-o", args.output, _representatives_before(args))
    alone = "" if args.rank is None else _name(args, args.rank)
    building = "building the program of one rank of each stage" if args.stages else f"building the program of {len(ranks)} rank(s)"
    with Alive("dump", building) as alive, staged(_folder(args), alone) as folder:
        done = list(build_ranks(args, ranks, folder, alive, total=None if args.stages else len(ranks)))
        note = _stages(args, folder, alive, done) if args.stages else ""
    done.sort(key=lambda each: int(each["rank"]))
    write_json(args.json, {"ranks": done})
    print(f"{len(done)} programs in {args.output}{note}; plan them with `interlace plan {args.output}`")
    return 0


def _folder(args: argparse.Namespace) -> Path:
    folder: Path = args.output.parent if _is_file(args) else args.output
    return folder


def _representatives_before(args: argparse.Namespace) -> list[str]:
    """Names of files that this `--stages` may write, as far as is known before a program is built: for the number of stages of the programs
    in the folder, else for any number of stages that divides the world."""
    from interlace.errors import InterlaceError
    from interlace.ir import load
    from interlace.ir.dump import programs_in

    counts = [count for count in range(1, args.world + 1) if args.world % count == 0]
    with contextlib.suppress(InterlaceError):
        counts = [load(path).pipeline.num_stages for path in programs_in(args.output)[:1]] or counts
    return [_name(args, stage * (args.world // count)) for count in counts for stage in range(count)]


def _stages(args: argparse.Namespace, folder: Path, alive: Alive, done: list[dict[str, Any]]) -> str:
    """Build the first rank of the other stages, each of which represents its stage; rank 0 is built already. Returns a text about what was
    compared.

    Raises ProgramError if the program does not show its stages, or the first and last rank of a stage are not equivalent.
    """
    import msgspec

    from interlace.cli.outputs import check_no_others
    from interlace.ir import load, save
    from interlace.ir.dump import SUFFIX, script_of
    from interlace.local.stages import require_alike, stages_of

    stages = stages_of(load(folder / f"rank0{SUFFIX}"))
    check_no_others("-o", args.output, [f"rank{ranks[0]}{SUFFIX}" for ranks in stages])
    lasts = [ranks[-1] for ranks in stages if args.compare and len(ranks) > 1]
    total = len(stages) + len(lasts)
    done += build_ranks(args, [ranks[0] for ranks in stages[1:]], folder, alive, 1, total)
    list(build_ranks(args, lasts, folder, alive, len(stages), total))
    for ranks in stages if lasts else []:
        path = folder / f"rank{ranks[-1]}{SUFFIX}"
        require_alike(load(folder / f"rank{ranks[0]}{SUFFIX}"), load(path))
        path.unlink()
    for ranks in stages:
        path = folder / f"rank{ranks[0]}{SUFFIX}"
        save(msgspec.structs.replace(load(path), equivalent_ranks=tuple(ranks[1:])), path, script_of(path))
    each = f", one for each stage of {len(stages[0])} rank{'s' * (len(stages[0]) > 1)}"
    if lasts:
        return f"{each}; the last rank of each stage is equivalent to the first (attributes of operations were not compared)"
    return each + ("" if len(stages[0]) == 1 else "; whether the ranks of a stage are equivalent was not checked (--compare does)")


def build_ranks(
    args: argparse.Namespace, ranks: Sequence[int], folder: Path, alive: Alive, before: int = 0, total: int | None = None
) -> Iterator[dict[str, Any]]:
    """Build ranks, several at once, and yield the record of each; all are ended if one fails or the caller stops. `before` is the number of
    ranks that are built already, `total` that of all ranks which the command builds, or None while it is unknown."""
    from interlace.local.processes import run_all
    from interlace.units import size

    of = "" if total is None else f"/{total}"
    ended = run_all([partial(_start, args, rank, folder) for rank in ranks], args.jobs)
    for count, (_, build) in enumerate(ended, before + 1):
        result = _result(args, build)
        print(
            f"[{count}{of}] rank {build.request.rank}: {result['ops']} ops, {result['seconds']:.1f} s, "
            f"{size(result['peak_rss_bytes'])} of memory, {size(result['file_bytes'])} file",
            flush=True,
        )
        alive.now(f"building; {count}{f' of {total}' if total else ''} rank(s) are done")
        yield result


def _is_file(args: argparse.Namespace) -> bool:
    """Whether the output is one rank's file rather than a folder."""
    from interlace.ir.dump import SUFFIX

    return args.rank is not None and args.output.suffix in (SUFFIX, ".gz")


def _name(args: argparse.Namespace, rank: int) -> str:
    """The name of a rank's file."""
    from interlace.ir.dump import SUFFIX

    return args.output.name if _is_file(args) else f"rank{rank}{SUFFIX}"


def _start(args: argparse.Namespace, rank: int, folder: Path) -> Build:
    from interlace.local.building import Build, Request

    request = Request(args.script, tuple(args.script_args), rank, args.world, building_options(args))
    return Build.start(request, folder / _name(args, rank))


def _result(args: argparse.Namespace, build: Build) -> dict[str, Any]:
    """The record that a finished process printed about its program. Raises LaunchError or ScriptError without one."""
    result = build.record(str(_folder(args)))
    result.pop("sources", None)
    path = args.output if _is_file(args) else args.output / build.path.name
    return {**result, "file_bytes": build.path.stat().st_size, "path": str(path)}
