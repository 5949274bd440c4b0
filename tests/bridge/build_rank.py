"""Builds ranks of `examples/gpt.py`, each alone in a fork of this process, and writes their job programs as JSON.

`python -m tests.bridge.build_rank FOLDER BUILDS`, where BUILDS is a list of `[rank, world, how, arguments]` as JSON, and `how` one of
`baseline` (Paddle alone), `off` (enabled, everything off), `plain` (our lowering of Paddle's own schedule, no pass) and `flags` (enabled,
then Paddle's dead flags set). The k-th build leaves `k.json`, and what it logged in `k.log`.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.forked import PRELOADED, make_building_cheap


def main() -> None:
    folder, builds = Path(sys.argv[1]), json.loads(sys.argv[2])
    for name in PRELOADED:
        importlib.import_module(name)
    make_building_cheap()
    for k, (rank, world, how, arguments) in enumerate(builds):
        child = os.fork()
        if child == 0:
            os.dup2(os.open(folder / f"{k}.log", os.O_WRONLY | os.O_CREAT), 2)
            logging.basicConfig(level=logging.INFO, force=True)
            try:
                (folder / f"{k}.json").write_text(json.dumps(built(rank, world, how, arguments)))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.waitpid(child, 0)


def built(rank: int, world: int, how: str, arguments: list[str]) -> dict[str, Any]:
    """Build one rank in this process."""
    from interlace.cpu.install import rank_environment

    os.environ.update(rank_environment(rank, world))
    if how == "flags":
        os.environ.update(FLAGS_mp_async_allreduce_in_backward="1")
    if how == "baseline":
        os.environ["INTERLACE_DISABLE"] = "1"
    from interlace.cpu import dynamic
    from interlace.local.build_rank import LonelyTransport

    dynamic.patch(LonelyTransport(rank, world))  # type: ignore[arg-type]
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    from interlace.bridge import modes

    modes.peers_of = lambda program: None  # type: ignore[assignment] - there are no others to plan with
    engine = built_engine(how, arguments)
    plan = engine._job_plan
    jobs = [[job.type(), job.micro_batch_id()] for job in plan.job_list()]
    programs = {name: plan.ir_program(name) for name in plan.job_types()}
    from paddle.distributed.passes.pass_base import PassBase

    return {
        "jobs": jobs,
        "records": sum("event_to_record" in op.attrs() for program in programs.values() for op in inner(program)),
        "changed": changed(engine),
        "planned_events": planned_events(engine),
        "tokens": tokens(engine),
        "ops": {name: [described(op) for op in inner(program)] for name, program in programs.items()},
        "text": {name: str(program) for name, program in programs.items()},
        "registered": sorted(name for name in PassBase._REGISTERED_PASSES if name.startswith("interlace_")),
    }


def tokens(engine: Any) -> int:
    """Tokens of a step of our plan; 0 where there is none."""
    from interlace.bridge.tokens import tokens_of

    state = getattr(engine, "_interlace", None)
    count = state.modes["train"].report.plan.program.pipeline.num_micro_batches if state else 0
    return tokens_of(engine._pir_dist_main_progs["train"], count)


def planned_events(engine: Any) -> int:
    """Events of our plan; 0 where there is none."""
    state = getattr(engine, "_interlace", None)
    return len(state.modes["train"].report.plan.program.events) if state else 0


def changed(engine: Any) -> dict[str, int]:
    """How many things each pass of our plan changed."""
    state = getattr(engine, "_interlace", None)
    return {report.name: len(report.done) for report in state.modes["train"].report.plan.reports} if state else {}


def built_engine(how: str, arguments: list[str]) -> Any:
    """The engine after its programs are built; nothing is initialised or run."""
    import gpt
    import paddle.distributed as dist

    import interlace
    from interlace.config import make_config
    from interlace.passes.base import option_name

    ordered = {"extend_lifetimes": "on", "insert_events": "on"}
    off = {option_name(name): "off" for name in make_config({}).passes}
    options = {"off": {**off}, "plain": {**off, **ordered, "schedule_1f1b": {"interleave": "off"}}}.get(how, {})
    enable = interlace.enable

    def enable_with_flags(strategy: Any) -> None:
        enable(strategy, **options)
        if how == "flags":
            strategy._mp_optimization.allreduce_matmul_grad_overlapping = True

    interlace.enable = enable_with_flags  # type: ignore[assignment]
    prepare = dist.auto_parallel.static.engine.Engine._prepare_program
    engines = []

    def build_only(self: Any, mode: str, init_parameters: bool = True) -> None:
        self._build(mode)
        self._parallel_pir(mode)
        self._has_prepared[mode] = True
        engines.append(self)

    dist.auto_parallel.static.engine.Engine._prepare_program = build_only
    try:
        gpt.build(gpt.parse(arguments))[0].train()
    finally:
        dist.auto_parallel.static.engine.Engine._prepare_program = prepare
    return engines[-1]


EVENTS = ("event_to_record", "events_to_wait", "force_record_event")
"""A CPU has no events: ours are in the plan and not written there, Paddle's are."""
BOUNDARY = ("pd_op.data", "builtin.parameter", "builtin.shadow_output", "builtin.set_parameter")


def inner(program: Any) -> list[Any]:
    """Operations that do work, in order."""
    return [op for op in program.global_block().ops if op.name() not in BOUNDARY]


def described(op: Any) -> list[Any]:
    """Name, attributes and operands; an operand is the defining operation's name and result, or `outside`."""
    import paddle

    attrs = {key: str(value) for key, value in op.attrs().items() if key not in (*EVENTS, "op_callstack", "interlace_at")}
    operands = []
    for source in op.operands_source():
        if paddle.pir.is_fake_value(source):
            operands.append("absent")
            continue
        giver = source.get_defining_op()
        outside = giver is None or giver.name() in BOUNDARY
        operands.append(f"outside {source.type()}" if outside else f"{giver.name()}:{source.index()} {source.type()}")
    return [op.name(), attrs, operands]


if __name__ == "__main__":
    main()
