"""Every plan that a test makes is proved as it is made."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import msgspec
import pytest

from interlace.ir import Program
from interlace.ir.target import CUSTOM, GPU
from interlace.passes.pipeline import Pipeline
from interlace.planning import world
from interlace.planning.tasks import TASKS
from interlace.planning.worker import Worker
from interlace.scheduler.hazards import check

KNOWN = frozenset({"shared-stream", "deadlock"})
"""What a rank alone cannot help: rings that Paddle's baseline order puts on one stream."""
_proved = set[bytes]()
"""Digests of plans: three of five that tests make are the same as an earlier one."""


def proving(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on what runs passes, on a rank alone or in a world, fails where it gives a plan that the checker refuses. Without events a
    program is no plan yet."""
    alone: Callable[..., Any] = Pipeline.run
    in_world: Callable[..., Any] = world.run_passes

    def run_and_prove(self: Pipeline, program: Program, *args: Any, **options: Any) -> Any:
        made, reports = alone(self, program, *args, **options)
        _prove(program, made)
        return made, reports

    @wraps(in_world)
    def run_in_world_and_prove(worker: Worker, passes: Any, programs: Sequence[int], *more: Any) -> Any:
        ran = in_world(worker, passes, programs, *more)
        _prove(worker.program(programs), worker.programs[ran.program])
        return ran

    monkeypatch.setattr(Pipeline, "run", run_and_prove)
    monkeypatch.setattr(world, "run_passes", run_in_world_and_prove)
    monkeypatch.setitem(TASKS, "run_passes", run_in_world_and_prove)


def _prove(program: Program, made: Program) -> None:
    is_new = made.jobs != program.jobs or "insert-events" not in program.passes
    if made.jobs and is_new and "insert-events" in made.passes:
        key = hashlib.sha256(msgspec.msgpack.encode(made)).digest()
        for place in (GPU, CUSTOM) if key not in _proved else ():
            found = [str(finding) for finding in check([made], place) if finding.kind not in KNOWN]
            assert not found, f"rank {made.rank}: a plan of {list(made.passes)} is unsafe on {place.name}: {found[:3]}"
        _proved.add(key)
