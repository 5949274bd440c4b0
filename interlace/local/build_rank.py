"""Build one rank's program of a training script and store it: `python -m interlace.local.build_rank`, started by `interlace dump`.

No other rank, no GPU and no memory for parameters is needed: the script runs as the requested rank of the requested world, under
`paddle.LazyGuard`, until its program is complete, and is then ended. With `--stages`, the programs of the first ranks of the other pipeline
stages are built too, and stored beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import resource
import site
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from interlace.cpu.install import rank_environment
from interlace.errors import ConfigError, InterlaceError, LaunchError
from interlace.installed import unusable_paddle
from interlace.ir import Program, save
from interlace.ir.dump import Script
from interlace.local.attach import run_script
from interlace.local.rank import end_with_parent, failure_of
from interlace.local.stage_forks import ForkFailed, StageForks, path_of
from interlace.report.checks import DUMPS, EVERYTHING

_WITHOUT_MEMORY = re.compile(r"memory's size is 0|[Hh]olds? no memory|[nN]ot initialized|[uU]ninitialized|not been initialized")
"""Paddle's messages if the contents of a tensor are requested that has none."""


class Built(BaseException):
    """Ends the script once its program is captured."""

    def __init__(self, program: Program) -> None:
        super().__init__("program captured")
        self.program = program


class LonelyTransport:
    """Replaces the other ranks while a program is built: every exchange returns this rank's own data."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def barrier(self, *args: Any) -> None:
        """Returns at once, as there are no other ranks."""

    def all_reduce(self, array: Any, *args: Any) -> Any:
        """The rank's own array."""
        return array

    broadcast = reduce = all_to_all = all_reduce

    def all_gather(self, array: Any, group: int, ranks: Any, *args: Any) -> list[Any]:
        """The rank's own array, once for each rank."""
        return [array] * len(ranks)

    def reduce_scatter(self, array: Any, op: str, group: int, ranks: Any, *args: Any) -> Any:
        """This rank's part of its own array."""
        return np.split(array, len(ranks))[list(ranks).index(self.rank)]

    def send(self, *args: Any) -> None:
        """Sends nothing."""

    def recv(self, shape: Any, dtype: str, *args: Any) -> Any:
        """Zeros."""
        return np.zeros(shape, "uint16" if dtype == "bfloat16" else dtype)


def main(argv: list[str]) -> int:
    """Build and store programs, and print one JSON line for each: rank, operations, seconds, highest resident memory in bytes, and sources;
    that of the requested rank is last."""
    args, process = _parser().parse_args(argv), os.getpid()
    end_with_parent()
    code = _build(args)
    if os.getpid() != process:  # in a fork, Paddle's cleanup at exit would wait for threads that do not exist there
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _build(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    try:
        script = Script.of(args.script, args.script_args)  # read before the script runs, which may change it
        program = build_program(
            args.script,
            args.script_args,
            args.rank,
            args.world,
            lazy=not args.materialize,
            force_paddle=args.force_paddle,
            has_stages=args.stages,
        )
        save(program, args.out if program.rank == args.rank else path_of(args.out, program.rank), script)
    except KeyboardInterrupt:
        raise
    except ForkFailed as failed:
        return failed.code if failed.code > 0 else 1
    except BaseException as error:
        failure = failure_of(error, args.script)
        users = failure.users or isinstance(error, InterlaceError)
        if not failure.exited:
            print(failure.text if users else failure.traceback, file=sys.stderr)
        if not args.materialize and _WITHOUT_MEMORY.search(str(error)):
            print(
                "parameters are described, not allocated; a script that needs their values must be dumped with --materialize",
                file=sys.stderr,
            )
        return 2 if users else 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    done = {
        "rank": program.rank,
        "ops": len(program.ops),
        "seconds": round(time.perf_counter() - start, 2),
        "peak_rss_bytes": peak,
        "sources": _sources(args.script),
    }
    print(msgspec.json.encode(done).decode(), flush=True)
    return 0


def _sources(script: str) -> dict[str, str]:
    """Path -> digest of the script, which is first, and of the user's own modules that were imported. Installed packages are left out."""
    folders = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    installed = {os.path.realpath(each) for each in (*folders, *site.getsitepackages(), site.getusersitepackages())}
    others = {name: module for name, module in [*sys.modules.items()] if name.partition(".")[0] != "interlace"}
    files = {os.path.realpath(each) for module in others.values() if (each := getattr(module, "__file__", None))}
    users = {each for each in files if not each.startswith(tuple(f"{folder}{os.sep}" for folder in installed)) and Path(each).is_file()}
    paths = dict.fromkeys((os.path.realpath(script), *sorted(users)))
    return {path: hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32] for path in paths}


def build_program(
    script: str, arguments: list[str], rank: int, world: int, *, lazy: bool = True, force_paddle: bool = False, has_stages: bool = False
) -> Program:
    """The training program that a script builds as one rank of a world. With `has_stages`, this also returns in forks, with the program of
    the first rank of another stage.

    Raises LaunchError if the script ends without building a training program; ConfigError if this version of Paddle is untested and lacks
    what dumps need, unless it is forced.
    """
    unusable = "" if force_paddle else unusable_paddle(EVERYTHING, DUMPS)
    if unusable:
        raise ConfigError(f"{unusable}; --force-paddle tries all the same")
    os.environ.update(rank_environment(rank, world))
    os.environ.pop("POD_NAME", None)
    from interlace.bridge import hook, mesh
    from interlace.cpu import dynamic, half
    from interlace.local import process_groups, quick_builds

    transport = LonelyTransport(rank, world)
    dynamic.patch(transport)  # type: ignore[arg-type]
    half.patch(gpu_only=True)
    process_groups.patch()
    quick_builds.patch()
    hook.install()
    mesh.install()
    hook.capture_only(_stop)
    if has_stages:
        StageForks(rank, lambda other: rank_environment(other, world), transport).install()
    if lazy:
        _allocate_nothing()
    try:
        run_script(script, arguments)
    except Built as built:
        return built.program
    raise LaunchError(
        f"{script}: ended without building a training program; expected dist.to_static(...) with a loss and an optimizer, and model.train()"
    )


def _allocate_nothing() -> None:
    """Do what `paddle.LazyGuard` does, until the engine builds its programs, for which it must be off."""
    from paddle.distributed.auto_parallel.static.engine import Engine
    from paddle.nn.initializer.lazy_init import lazy_init_helper

    build = Engine._build
    lazy_init_helper().enable()
    _shard_without_memory()

    def build_allocated(self: Any, mode: str) -> None:
        lazy_init_helper().disable()
        build(self, mode)

    Engine._build = build_allocated


def _shard_without_memory() -> None:
    """Let sharding stage 3 place parameters that have no memory; Paddle's own code would share memory that does not exist."""
    import paddle
    from paddle.distributed.auto_parallel import api

    shard = api.ShardingStage3._shard_parameter

    def shard_described(self: Any, parameter: Any) -> None:
        if parameter._is_initialized() or not parameter.is_dist():
            shard(self, parameter)
            return
        like = paddle.nn.Layer().create_parameter(list(parameter.shape), dtype=parameter.dtype)
        placements = api.get_placement_with_sharding(parameter, self._sharding_axis)
        placed = paddle.distributed.shard_tensor(like, parameter.process_mesh, placements)
        parameter.get_tensor()._share_data_nocheck_with(placed.get_tensor())

    api.ShardingStage3._shard_parameter = shard_described


def _stop(program: Program) -> None:
    raise Built(program)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="interlace.local.build_rank")
    made.add_argument("--rank", type=int, required=True)
    made.add_argument("--world", type=int, required=True)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--stages", action="store_true")
    made.add_argument("--materialize", action="store_true")
    made.add_argument("--force-paddle", action="store_true")
    made.add_argument("script")
    made.add_argument("script_args", nargs=argparse.REMAINDER)
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
