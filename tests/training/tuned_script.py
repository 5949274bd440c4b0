"""A training run that tries plans, evaluates and saves in between, and on which things are played: `TUNED_PLAY` holds a table.

`slow`, `build`, `take`, `fail`: part of a plan's name, or several; it is slow, or fails when it is planned, when the executor takes it, or
at the end of its first step, when parameters are written already; on rank `on` alone where that is given. `die`: a step in which rank 1
ends.
`page`: where the page of the plan goes in the end; `dump`: where dumps go.
`memory`: bytes of the device's memory on the last rank, of which half are in use.
`form`: of the schedule; with one by name no other plans are proposed than Interlace's and Paddle's.
`later`: a step from which the plan that was taken by then is slow, on rank 1.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import gpt
import numpy as np
import paddle
import paddle.distributed as dist

import interlace
from interlace.bridge import hook, tuning
from interlace.planning import trial

PLAY = json.loads(os.environ.get("TUNED_PLAY", "{}"))
ENABLE = interlace.enable
trial.FIRST_SKIPPED, trial.SKIPPED, trial.COUNTED, trial.TURNS, trial.MOST_TURNS = 1, 0, 2, 2, 2
trial.WINDOW, trial.RARELY, trial.SLOWER = 4, 1, 4.0  # busy machines


def is_played(kind: str, name: str) -> bool:
    """Whether a plan plays its part on this rank."""
    parts = PLAY.get(kind, [])
    is_named = any(part in name for part in ([parts] if isinstance(parts, str) else parts))
    return is_named and PLAY.get("on", dist.get_rank()) == dist.get_rank()


class Played(tuning.Tuning):
    """Does to plans what is asked for."""

    def _built(self, contender: trial.Contender, is_first: bool) -> Any:
        if is_played("build", contender.name):
            raise RuntimeError("planned to fail")
        made = super()._built(contender, is_first)
        for kind in ("take", "fail"):
            if is_played(kind, contender.name):
                lowered = made.lowered  # of Paddle's baseline its own plan
                last = lowered.ir_program(lowered.job_list()[-1].type()) if contender.is_paddles else lowered.jobs[-1].program
                spoil(last, kind)
        return made

    def _why_no_room(self, plan: Any) -> str:
        if PLAY.get("memory") and dist.get_rank() == dist.get_world_size() - 1:
            kind = type(self.device)
            kind.total_bytes, kind.reserved_bytes = lambda _: PLAY["memory"], lambda _: PLAY["memory"] // 2
        return super()._why_no_room(plan)

    def run(self, step: Any) -> Any:
        def slow() -> Any:
            if is_played("slow", self.trial.now.name):
                time.sleep(0.2)
            if self.is_slow_later(self.trial.now.name):
                time.sleep(0.5)
            return step()

        return super().run(slow if PLAY.get("slow") or PLAY.get("later") else step)

    def is_slow_later(self, name: str) -> bool:
        """Whether this is the plan that was taken when it became slow."""
        self.steps_run = getattr(self, "steps_run", -1) + 1
        if self.steps_run == PLAY.get("later") and self.trial.taken is not None:
            self.slowed = name
        return dist.get_rank() == 1 and getattr(self, "slowed", "") == name


def spoil(program: Any, kind: str) -> None:
    """Put an operation at the end of a job that fails when it runs, or that no executor knows how to run."""
    with paddle.static.program_guard(program):
        paddle.pir.set_insertion_point_to_block_end(program.global_block())
        if kind == "take":
            paddle._C_ops.send_v2(paddle._C_ops.full([1], 1.0, paddle.float32, paddle.CPUPlace()), 0, 0, False, False)
            return
        from interlace.cpu import ops

        def fail() -> Any:
            raise RuntimeError("planned to fail")

        ops._python_op("planned_failure", fail, None, [1], paddle.float32)


if __name__ == "__main__":
    hook.Tuning = Played
    interlace.enable = lambda strategy: ENABLE(
        strategy,
        {
            "device": "h200",
            "tune": "on",
            "dump": PLAY.get("dump", ""),
            "schedule_1f1b": {"interleave": PLAY.get("form", "auto"), "only_gains": False},
        },
    )
    args = gpt.parse(sys.argv[1:])
    model, loader = gpt.build(args)
    model.train()
    for number, batch in enumerate(islice(loader(), args.steps)):
        if number == PLAY.get("die") and dist.get_rank() == 1:
            os._exit(3)
        model(*batch)
        if number % 7 == 3 and PLAY.get("between"):
            model.eval()
            model(*batch)
            model.train()
            state = {name: np.asarray(tensor._local_value()) for name, tensor in model.state_dict().items()}
            with paddle.base.dygraph.guard():
                model.set_state_dict(model.state_dict())
            assert state
    if os.environ.get("INTERLACE_DISABLE") != "1":
        if "page" in PLAY:
            interlace.plan_of(model).report(PLAY["page"])
        print(interlace.plan_of(model).explain().replace("\n", "\nEXPLAINED "))
