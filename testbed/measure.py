"""Measure the steps of a training run on each rank: times, memory, and a trace of the last ones.

Steps follow each other as in training: the device is idle only before the first step, before the first traced step and after the last. So a
host that does not wait for its device runs ahead of it, and copies at the end of a step run during the next step's forward.

`TESTBED_MEASURE=FOLDER` turns it on and writes `rank<r>.json` to the folder. With `TESTBED_TRACE=N` the last N steps are traced together:
`trace<r>.msgpack` contains the last one, and `rank<r>.json` its summary and how long computation idled between traced steps. With
`TESTBED_GATE=FOLDER:0,1` a run waits before it first uses its GPUs until no other run uses them, so that many runs can be
prepared at once and measured one after the other.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from testbed import device
from testbed.trace import Planned, RankTrace, between_steps, host_around, since, summary, write_rank

FOLDER_VARIABLE, GATE_VARIABLE, STEPS_VARIABLE, TRACE_VARIABLE = "TESTBED_MEASURE", "TESTBED_GATE", "TESTBED_STEPS", "TESTBED_TRACE"
_POLL_S = 0.005
STEP_LIMIT_S = 60.0
"""A step that takes longer is taken to hang: its process prints its stack and exits, so that the next run gets the GPUs."""


@dataclass(slots=True)
class Gate:
    """Exclusive use of a run's GPUs: once `folder` contains the file `open`, the first rank locks each GPU and then writes the file `word`,
    for which the other ranks wait."""

    rank: int
    folder: Path
    gpus: list[int]
    word: Path
    locks: list[IO[str]] = field(default_factory=list)

    def enter(self) -> None:
        """Report that this rank is prepared, wait until the gate opens, then for the GPUs."""
        (self.folder / f"{self.word.parent.name}.{self.rank}.ready").touch()
        while not (self.folder / "open").exists():
            time.sleep(10 * _POLL_S)
        if self.rank == 0:
            for gpu in self.gpus:  # in the same order in every run, so that no two runs wait for each other
                lock = open(self.folder / f"gpu{gpu}.lock", "w")  # noqa: SIM115 - held until the end
                fcntl.flock(lock, fcntl.LOCK_EX)
                self.locks.append(lock)
            self.word.write_text("go")
        while not self.word.exists():
            time.sleep(_POLL_S)

    def leave(self) -> None:
        """Release the GPUs for other runs."""
        for lock in self.locks:
            lock.close()
        self.locks.clear()


@contextmanager
def _ended_in_time() -> Iterator[None]:
    """Context that ends the process if its body takes longer than `STEP_LIMIT_S`."""
    faulthandler.dump_traceback_later(STEP_LIMIT_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@dataclass(slots=True)
class Measurer:
    """Wraps `Engine.run`. Times of calls and returns are those of `time.perf_counter`, which all ranks of a machine share."""

    rank: int
    folder: Path
    num_steps: int
    num_traced: int
    gate: Gate | None
    steps: list[dict[str, Any]] = field(default_factory=list)
    trace: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def step(self, engine: Any) -> Iterator[None]:
        """Context that measures one step, and traces it if it is one of the last `num_traced`."""
        left = self.num_steps - len(self.steps)
        last, is_traced = left == 1, left <= self.num_traced
        before = device.memory()
        if left == self.num_traced:
            device.start_trace()  # after all that was issued
        elif not self.steps:
            device.synchronize()
        device.reset_peaks()
        start = time.perf_counter()
        with _ended_in_time():
            yield
            if last:
                device.synchronize()
        end = time.perf_counter()
        step = {"begin_s": start, "end_s": end, "traced": is_traced}
        self.steps.append({**step, "memory": asdict(device.memory())})
        if last and is_traced:
            self._keep(engine, before)
        if last:
            if self.gate:
                self.gate.leave()
            self.write()

    def write(self) -> None:
        """Write what was measured to the folder, one file for each rank."""
        found = {"rank": self.rank, "steps": self.steps, "trace": self.trace}
        (self.folder / f"rank{self.rank}.json").write_text(json.dumps(found) + "\n")

    def _keep(self, engine: Any, before: device.Memory) -> None:
        from testbed.programs import planned_ops

        found = device.Trace([], [], [])
        device.end_trace(found)
        steps_us = [(1e6 * step["begin_s"], 1e6 * step["end_s"]) for step in self.steps if step["traced"]]
        begins_us = [begin_us for begin_us, _ in steps_us]
        jobs, rows = planned_ops(engine._job_plan) if engine._job_plan is not None else ([], [])
        last = since(found, begins_us[-1])
        kept = RankTrace(self.rank, last, jobs, [Planned(*row) for row in rows], before.allocated, before.pinned)
        between = {"still_between_us": between_steps(found, begins_us[1:]), "host_around_us": host_around(found, steps_us)}
        self.trace = {**summary(kept), **between}
        write_rank(self.folder / f"trace{self.rank}.msgpack", kept)


def install(rank: int, run_dir: Path) -> None:
    """Measure every step of this process if `TESTBED_MEASURE` is set."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return
    from paddle.distributed.auto_parallel.static.engine import Engine

    where, _, gpus = os.environ.get(GATE_VARIABLE, "").partition(":")
    gate = Gate(rank, Path(where), [int(gpu) for gpu in gpus.split(",")], run_dir / "go") if where else None
    measurer = Measurer(rank, Path(folder), int(os.environ[STEPS_VARIABLE]), int(os.environ.get(TRACE_VARIABLE) or 0), gate)
    run, initialize = Engine.run, Engine._initialize

    def initialize_alone(engine: Any, *args: Any, **kwargs: Any) -> Any:
        if measurer.gate and not measurer.steps:
            measurer.gate.enter()
        return initialize(engine, *args, **kwargs)

    Engine._initialize = initialize_alone

    def run_measured(engine: Any, *args: Any, **kwargs: Any) -> Any:
        with measurer.step(engine):
            return run(engine, *args, **kwargs)

    Engine.run = run_measured
