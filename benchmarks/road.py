"""What Interlace adds to the time of building a model (capture, passes, proof and lowering), compared with Paddle's own build.

The middle stage of a Llama is built as a simulated rank of its world, without parameters, first by Paddle alone (`Engine._build` and
`_parallel_pir`), then with Interlace, both in one process. Times are CPU seconds of that process, so that other load on the machine counts
less; each share is computed from the times of one process. Planning simulates the plans of all stages together; the other stages are copies
of this one, without the communication beyond the ends of the pipeline. The configuration is the preset `overlap`, which plans for an H200.

    python benchmarks/road.py [--quick] [--runs N] [--amp] [--profile] [-o FILE]
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import json
import os
import pstats
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from measuring import ROOT, meta, middle, store

from interlace.outside import DISABLE_VARIABLE

PP, MP = 4, 2
FULL = ("--preset", "llama-7b", "--layers", "32", "--pp", str(PP), "--mp", str(MP), "--lazy")
"""Eight layers per stage, eight micro-batches."""
SMALL = ("--layers", "4", "--hidden", "32", "--heads", "4", "--pp", str(PP), "--mp", str(MP), "--lazy")
HALF = ("--amp", "O2", "--master-grad", "--attention", "flash")
PARTS = {"capture": "capture", "make_plan": "passes", "require_safe": "checks", "lower": "lowering"}
"""Function of `bridge/modes.py` -> the part of the time to which it belongs."""


class Built(BaseException):
    """Ends a build once the engine has its plan."""


class Timers:
    """CPU seconds by name, summed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, owner: Any, name: str, part: str, see: Callable[[Any], None] | None = None) -> None:
        """Time every call of `owner.name`; `see` gets its result."""
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                result = inner(*args, **kwargs)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + time.process_time() - start
            if see is not None:
                see(result)
            return result

        setattr(owner, name, timed)


class Neighbours:
    """The ranks of the other stages, which do what this rank requests, with copies of its program.

    Args:
        workers: Stage -> the worker of one of its ranks.
    """

    seconds = 0.0
    """CPU time of their work, which other processes spend in a real run."""
    helpers = ()
    """See `interlace.planning.world.Link`."""

    def __init__(self, workers: dict[int, Any]) -> None:
        self.workers = workers

    def ask(self, order: Any) -> None:
        """See `interlace.planning.world.Link`."""
        self.order = order

    def answers(self) -> dict[int, Any]:
        """See `interlace.planning.world.Link`."""
        from interlace.planning.world import answered

        start = time.process_time()
        found = {stage: answered(worker, self.order) for stage, worker in self.workers.items() if stage in self.order.asked}
        Neighbours.seconds += time.process_time() - start
        return found


def plan_among_neighbours(program: Any, config: Any, cost: Any, profile: str, peers: Any = None) -> Any:
    """Like `make_plan`, for the rank that plans the world."""
    from interlace.planning import plan
    from interlace.planning.world import World

    start, own = time.process_time(), program.pipeline.stage
    programs = {stage: program if stage == own else _of_stage(program, stage) for stage in range(PP)}
    Neighbours.seconds += time.process_time() - start
    workers = {stage: plan.worker_of(each, config, cost, profile) for stage, each in programs.items()}
    mine = workers.pop(own)
    world = World({own: mine}, [rank // MP for rank in range(PP * MP)], Neighbours(workers))
    decided, compared = plan.decide_plans(world, config, profile)
    return plan.taken(mine, decided, profile, mine.finished, compared)


def _of_stage(program: Any, stage: int) -> Any:
    """The plan of another stage: ranks are moved there, and at the ends of the pipeline nothing is received from or sent beyond it."""
    import msgspec

    by = MP * (stage - program.pipeline.stage)
    ends = {("forward", "recv_v2"): 0, ("backward", "send_v2"): 0, ("backward", "recv_v2"): PP - 1, ("forward", "send_v2"): PP - 1}
    world = range(PP * MP)
    ranks = {
        group.id: tuple(rank + by for rank in group.ranks) for group in program.groups if all(rank + by in world for rank in group.ranks)
    }
    number = {-1: -1, **{old: 1 + members[0] * len(world) + members[-1] - members[0] for old, members in ranks.items()}}
    ops = []
    for op in program.ops:
        beyond = ends.get((op.role, op.kind)) == stage
        ops.append(
            msgspec.structs.replace(op, name="pd_op.full", operands=(), no_buffer=(), group=-1, stream="", attrs={})
            if beyond
            else msgspec.structs.replace(op, group=number[op.group])
        )
    return msgspec.structs.replace(
        program.with_ops(ops),
        rank=program.rank + by,
        pipeline=msgspec.structs.replace(program.pipeline, stage=stage),
        groups=tuple(
            msgspec.structs.replace(group, id=number[group.id], ranks=ranks[group.id]) for group in program.groups if group.id in ranks
        ),
    )


def build_both(options: list[str], profile: bool) -> dict[str, Any]:
    """Build a small model to warm up, then the requested one, each by Paddle alone and with Interlace."""
    hook, llama, timers, plans = _prepare()
    import paddle

    prof = cProfile.Profile()
    for argv in (list(SMALL), options) if options != list(SMALL) else (options,):
        plans.clear()
        seconds: dict[str, dict[str, float]] = {}
        for who, off in (("paddle", "1"), ("interlace", "0")):
            os.environ[DISABLE_VARIABLE] = off
            timers.seconds.clear()
            Neighbours.seconds = 0.0
            args = llama.parse(argv)
            if profile and argv is options and off == "0":
                hook._plan_pipeline = _profiled(hook._plan_pipeline, prof)
            with suppress(Built):
                llama.build(args)[0].train()
            paddle.disable_static()
            seconds[who] = dict(timers.seconds)
            for part in ("passes", "plan") if off == "0" else ():
                seconds[who][part] -= Neighbours.seconds
    if profile:
        pstats.Stats(prof).sort_stats("cumulative").print_stats(45)
        pstats.Stats(prof).sort_stats("tottime").print_stats(30)
    return _row(seconds["paddle"], seconds["interlace"], plans[-1])


def _profiled(inner: Callable[..., Any], prof: cProfile.Profile) -> Callable[..., Any]:
    return lambda *args: prof.runcall(inner, *args)


def _row(paddle: dict[str, float], ours: dict[str, float], plan: Any) -> dict[str, Any]:
    own = paddle["build"] + paddle["parallel"]
    parts = {part: ours[part] for part in PARTS.values()}
    each = {report.name: report.run_ns / 1e9 for report in plan.reports}
    return {
        "paddle_s": own,
        "interlace_s": ours["plan"],
        "share": ours["plan"] / own,
        "parts_s": parts,
        "wall_s_of_passes": each,
        "whole_build_over_paddle": (ours["build"] + ours["parallel"]) / own,
        "ops": {
            "captured": len(plan.captured.ops),
            "planned": len(plan.program.ops),
            "jobs": len(plan.jobs),
            "items": sum(len(job.items) for job in plan.jobs),
            "longest_job": max(len(job.items) for job in plan.jobs),
        },
    }


def _prepare() -> tuple[Any, Any, Timers, list[Any]]:
    """Become a rank of the middle stage, and install timers in the engine and in the hook."""
    from interlace.cpu.install import rank_environment

    os.environ.update(rank_environment(MP * (PP // 2), PP * MP))
    os.environ.pop("POD_NAME", None)
    os.environ["INTERLACE_CONFIG"] = "overlap"
    from paddle.distributed.auto_parallel.static.engine import Engine

    from interlace.bridge import hook, modes
    from interlace.cpu import dynamic, half
    from interlace.local.build_rank import LonelyTransport

    dynamic.patch(LonelyTransport(MP * (PP // 2), PP * MP))  # type: ignore[arg-type]
    half.patch(gpu_only=True)
    hook.install()
    sys.path.insert(0, str(ROOT / "examples"))
    timers, plans = Timers(), []
    modes.make_plan = plan_among_neighbours
    for name, part in PARTS.items():
        timers.wrap(modes, name, part, plans.append if name == "make_plan" else None)
    timers.wrap(hook, "_plan_pipeline", "plan")
    timers.wrap(Engine, "_build", "build")
    timers.wrap(Engine, "_parallel_pir", "parallel", _stop)
    return hook, importlib.import_module("llama"), timers, plans


def _stop(_: Any) -> None:
    raise Built


def measure(options: list[str], runs: int) -> dict[str, Any]:
    """Medians with their spread, over several processes."""
    rows = [_child(options) for _ in range(runs)]
    parts = {part: middle([row["parts_s"][part] for row in rows]) for part in rows[0]["parts_s"]}
    passes = {name: round(median(row["wall_s_of_passes"][name] for row in rows), 4) for name in rows[0]["wall_s_of_passes"]}
    return {
        "model": " ".join(options),
        **{key: middle([row[key] for row in rows]) for key in ("share", "whole_build_over_paddle")},
        "cpu_s": {"paddle": middle([row["paddle_s"] for row in rows]), "interlace": middle([row["interlace_s"] for row in rows]), **parts},
        "wall_s_of_passes": passes,
        "ops": rows[0]["ops"],
    }


def _child(options: list[str]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", json.dumps(options)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise SystemExit(f"the build failed:\n{found.stderr[-3000:]}")
    row: dict[str, Any] = json.loads(found.stdout.strip().splitlines()[-1])
    print({k: round(v, 3) for k, v in row.items() if isinstance(v, float)}, {k: round(v, 2) for k, v in row["parts_s"].items()}, flush=True)
    return row


def main(argv: list[str] | None = None) -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, once")
    parser.add_argument("--runs", type=int, default=3, help="processes of each model")
    parser.add_argument("--profile", action="store_true", help="print where Interlace's time goes; stores nothing")
    parser.add_argument("--amp", action="store_true", help="with --profile: the bfloat16 model")
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        print(json.dumps(build_both(json.loads(args.child), False)))
        return
    if args.profile:
        row = build_both([*(SMALL if args.quick else FULL), *(HALF if args.amp else ())], True)
        print(json.dumps(row, indent=1))
        return
    models = [list(SMALL)] if args.quick else [[*FULL], [*FULL, *HALF]]
    rows = [measure(options, 1 if args.quick else args.runs) for options in models]
    import importlib.metadata

    result = {
        **meta(paddle=importlib.metadata.version("paddlepaddle")),
        "stage": f"{PP // 2} of {PP}, tensor-parallel over {MP}",
        "aim": "share under 0.25",
        "rows": rows,
    }
    store("road", result, args.out)


if __name__ == "__main__":
    main()
