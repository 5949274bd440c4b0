"""Builds one rank of `examples/gpt.py` in this process, alone, and prints its job programs as JSON.

`python build_rank.py RANK WORLD HOW ARGS...` with HOW one of `stock` (Paddle alone), `off` (enabled, everything off),
`plain` (our lowering of Paddle's own schedule, no pass) and `flags` (enabled, then Paddle's dead flags set).
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    rank, world, how, *arguments = sys.argv[1:]
    from interlace.cpu.install import rank_environment

    os.environ.update(rank_environment(int(rank), int(world)))
    if how == "flags":
        os.environ.update(FLAGS_mp_async_allreduce_in_backward="1")
    if how == "stock":
        os.environ["INTERLACE_DISABLE"] = "1"
    from interlace.cpu import dynamic
    from interlace.local.build_rank import LonelyTransport

    dynamic.patch(LonelyTransport(int(rank), int(world)))  # type: ignore[arg-type]
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    from interlace.bridge import hook

    hook.peers_of = lambda program: None  # type: ignore[assignment] - there are no others to plan with
    engine = built_engine(how, arguments)
    plan = engine._job_plan
    jobs = [[job.type(), job.micro_batch_id()] for job in plan.job_list()]
    programs = {name: plan.ir_program(name) for name in plan.job_types()}
    from paddle.distributed.passes.pass_base import PassBase

    print(json.dumps({
        "jobs": jobs,
        "records": sum("event_to_record" in op.attrs() for program in programs.values() for op in inner(program)),
        "changed": changed(engine),
        "planned_events": planned_events(engine),
        "ops": {name: [described(op) for op in inner(program)] for name, program in programs.items()},
        "text": {name: str(program) for name, program in programs.items()},
        "registered": sorted(name for name in PassBase._REGISTERED_PASSES if name.startswith("interlace_")),
    }))  # fmt: skip


def planned_events(engine: Any) -> int:
    """Events of our plan; 0 where there is none."""
    state = getattr(engine, "_interlace", None)
    return len(state.modes["train"].plan.program.events) if state else 0


def changed(engine: Any) -> dict[str, int]:
    """How many things each pass of our plan changed."""
    state = getattr(engine, "_interlace", None)
    return {report.name: len(report.changed) for report in state.modes["train"].plan.reports} if state else {}


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
    logging.basicConfig(level=logging.INFO)
    main()
