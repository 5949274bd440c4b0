"""Prepare one rank's process so that Paddle's static auto-parallel trains on CPU processes.

`install` is called once, before the user's script and before Paddle is imported. From then on, every program that Paddle's
engine is about to run (jobs of a plan, or the dense program of a mode; the start-up program) has its communication
rewritten, as the very last step before it runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from interlace.cpu.transport import DEFAULT_TIMEOUT_S, Transport

RUN_DIR_VARIABLE = "INTERLACE_RUN_DIR"
TIMEOUT_VARIABLE = "INTERLACE_TIMEOUT_S"
_FIRST_PORT = 61000  # endpoints are only names for Paddle here; nothing listens on them
_PREPARED = "interlace_prepared"


def rank_environment(rank: int, world: int) -> dict[str, str]:
    """The environment variables from which Paddle reads its rank and world."""
    endpoints = [f"127.0.0.1:{_FIRST_PORT + each}" for each in range(world)]
    return {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(world),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_RANK_IN_NODE": str(rank),
        "PADDLE_LOCAL_DEVICE_IDS": "0",
        "FLAGS_selected_cpus": "0",
        "PADDLE_DISTRI_BACKEND": "gloo",  # lets init_parallel_env pass on a CPU build; no gloo is started
    }


def install(rank: int, world: int, run_dir: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> Transport:
    """Connect this rank to the others and patch Paddle; returns the transport, which the caller closes at the end. Raises TransportError as
    `Transport`."""
    os.environ.update(rank_environment(rank, world))
    os.environ.pop("POD_NAME", None)  # it would make dist.to_static start fleet, which needs a GPU
    transport = Transport(rank, world, run_dir, timeout_s)
    import paddle

    from interlace.cpu import dynamic, half, ops

    ops.set_transport(transport)
    # Operations run in program order, so that all ranks issue the communication of a group in the same order.
    paddle.set_flags({"FLAGS_new_executor_sequential_run": True})
    dynamic.patch(transport)
    half.patch()
    patch_engine(ops.rewrite_program)
    return transport


def patch_engine(prepare: Callable[[Any, str], Any]) -> None:
    """Let `prepare` rewrite each program before Paddle's engine runs it; it is called with the program and its name."""
    from paddle.distributed.auto_parallel.static import engine as engine_module

    engine_class = engine_module.Engine
    initialize = engine_class._initialize
    clean_up = engine_module.remove_unuseful_comm_op_pass
    starting = False

    def initialize_prepared(self: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
        nonlocal starting
        _prepare_mode(self, mode, prepare)
        starting = True
        try:
            return initialize(self, mode, *args, **kwargs)
        finally:
            starting = False

    def clean_up_and_prepare(program: Any) -> None:
        """Paddle's clean-up, which is the last pass on a start-up program before it runs; that program is then prepared."""
        clean_up(program)
        if starting:
            prepare(program, "startup")

    engine_class._initialize = initialize_prepared
    engine_module.remove_unuseful_comm_op_pass = clean_up_and_prepare


def _prepare_mode(engine: Any, mode: str, prepare: Callable[[Any, str], Any]) -> None:
    """Rewrite what the engine is about to run in `mode`; `prepare` is called with each program and its name.

    The engine keeps one plan for all modes; a mode that did not make a plan itself has a dense program instead.
    """
    plan = engine._job_plan
    if plan is None or plan is getattr(engine, "_interlace_last_plan", None):
        prepare(engine._pir_dense_main_progs[mode], mode)
        return
    engine._interlace_last_plan = plan
    if getattr(plan, _PREPARED, False):
        return
    for job in plan.job_types():
        prepare(plan.ir_program(job), job)
