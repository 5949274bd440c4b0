"""A rank that trains one model over and over: with its plan and with planted faults, each under delays of its own.

`launch` runs it as a script; `PLANTED_WORK` names a folder with `tasks.json`, and each rank leaves `done<r>.json` there. All tasks
run in one process: each starts from the same parameters, with an executor of its own, and with memory that holds what other data left.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import paddle

from interlace.bridge.targets.base import PINNED_PREFIX
from interlace.ir import Program
from interlace.ir.storage import with_fetches
from interlace.local import rank as rank_module
from testbed import delays, device, programs
from testbed.trace import COMM, COPIES
from tests.testbed.tasks import NUM_STEPS, VARIABLE, Done, Item, Task

CPU, DEVICE = paddle.CPUPlace(), paddle.CustomPlace(device.NAME, 0)
_LABEL = re.compile(r"micro-batch (\d+), op #(\d+)")


def main() -> None:
    work, rank = Path(os.environ[VARIABLE]), int(os.environ["PADDLE_TRAINER_ID"])
    runner = Runner(rank)
    _wait_for(work / "tasks.json")
    tasks = msgspec.json.decode((work / "tasks.json").read_bytes(), type=list[Task])
    done = [runner.run(task) for task in tasks]
    (work / f"done{rank}.json").write_bytes(msgspec.json.encode(done))


def _wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + 60.0
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{path} did not come")
        time.sleep(0.005)


def _unproved(path: Path) -> Program:
    """A program as it was written: neither its form nor its safety is looked at."""
    return msgspec.msgpack.decode(path.read_bytes(), type=Program)


def _apart(program: Program) -> tuple[Program, list[list[str]]]:
    """Pinned buffers that all micro-batches share as variables of their own, which is what can be lowered, and these by name."""
    shared = [value for value in program.values if value.memory == "pinned" and value.persistable]
    values = [msgspec.structs.replace(value, persistable=value.persistable and value not in shared) for value in program.values]
    count = program.pipeline.num_micro_batches
    return program.with_ops(program.ops, values), [[f"{PINNED_PREFIX}{value.id}@{m}" for m in range(count)] for value in shared]


@contextmanager
def _named(names: set[str], found: list[Any]) -> Iterator[None]:
    """Collect the values that a lowering gives these names."""
    name_value = paddle._C_ops.set_persistable_value

    def name_and_keep(value: Any, name: str) -> Any:
        if name in names:
            found.append(value)
        return name_value(value, name)

    paddle._C_ops.set_persistable_value = name_and_keep
    try:
        yield
    finally:
        paddle._C_ops.set_persistable_value = name_value


class Runner:
    """The model, its first state, the plan it runs now, and where that plan's work stands on the streams."""

    def __init__(self, rank: int) -> None:
        import gpt

        self.rank, self.plans = rank, ""
        self.streams: dict[int, list[tuple[str, str]]] = {}
        self.shared: list[list[str]] = []
        self.in_reach: list[Any] = []
        args = gpt.parse()
        self.model, loader = gpt.build(args)
        self.engine = self.model._engine
        self.model.train()
        *self.batches, self.other = [batch for batch, _ in zip(loader(), range(NUM_STEPS + 1), strict=False)]
        self.state = {name: np.array(tensor) for name, tensor in self._lasting()}

    def run(self, task: Task) -> Done:
        """Train from the first state, behind a step on other data: what memory holds from before is then wrong to read."""
        try:
            with device.switched(**task.switches), self._fetching(task.fetch):
                return self._train(task)
        except ValueError as error:  # of Paddle's executor, while it is made, on every rank
            return Done(task.name, error=str(error))
        finally:
            delays.off()

    def _train(self, task: Task) -> Done:
        if task.plans != self.plans:
            self._take(task)
        self._restore()
        with device.traced() as trace, self._shared_in_reach():
            self._step(self.other)
        self.streams = self.streams or self._streams(trace)
        self._share()
        self._restore()
        delays.restart()
        delays.only(self._sites(task))
        losses = tuple(self._step(batch) for batch in self.batches)
        device.synchronize()
        return Done(task.name, losses, self._digests(), tuple(each.name for each in delays.taken()))

    @contextmanager
    def _fetching(self, wanted: bool) -> Iterator[None]:
        names = self.engine._loss_names
        self.engine._loss_names = names if wanted else ["nothing"]
        try:
            yield
        finally:
            self.engine._loss_names = names

    def _step(self, batch: Any) -> str:
        loss = self.model(*batch)
        return "" if loss is None else np.asarray(loss).tobytes().hex()

    # -- what lasts

    def _lasting(self) -> list[tuple[str, Any]]:
        scope = paddle.static.global_scope()
        names = sorted({*rank_module._trainable_names(self.engine), *rank_module._lasting_names(self.engine)})
        found = [(name, scope.find_var(name)) for name in names]
        tensors = [(name, variable.get_tensor()) for name, variable in found if variable is not None]
        return [(name, tensor) for name, tensor in tensors if tensor._is_initialized()]

    def _restore(self) -> None:
        for name, tensor in self._lasting():
            tensor.set(self.state[name], CPU if tensor._place().is_cpu_place() else DEVICE)

    def _digests(self) -> dict[str, str]:
        return {name: rank_module._digest(np.array(tensor)) for name, tensor in self._lasting()}

    # -- plans

    def _take(self, task: Task) -> None:
        """From now on run these plans, unchecked, with an executor of their own."""
        from interlace.bridge.lower import lower
        from interlace.bridge.targets import choose_device

        mode = self.engine._interlace.modes["train"]
        program = _unproved(Path(task.plans) / f"rank{self.rank}") if task.plans else mode.report.plan.program
        program, self.shared = _apart(program)
        self.plans, self.streams, self.in_reach = task.plans, {}, []
        paddle.enable_static()
        with _named({name for names in self.shared for name in names}, self.in_reach):
            mode.lowered = lower(mode.captured, with_fetches(program, mode.fetches), choose_device())
        paddle.disable_static()
        self.engine._executor._executor_cache._get_cached_program_and_executor_pir_mode.cache_clear()

    @contextmanager
    def _shared_in_reach(self) -> Iterator[None]:
        """While the executor is made: what is persistable lies where we can find it."""
        for value in self.in_reach:
            value.persistable = True
        yield
        for value in self.in_reach:
            value.persistable = False

    def _share(self) -> None:
        """Let variables that share a buffer have one, now that they have some."""
        scope = paddle.static.global_scope()
        for first, *others in self.shared:
            for other in others:
                scope.find_var(other).get_tensor()._share_data_with(scope.find_var(first).get_tensor())

    # -- where work stands

    def _streams(self, trace: device.Trace) -> dict[int, list[tuple[str, str]]]:
        """Stream number -> its pieces of work in one step: what the plan calls the operation, and what the piece is."""
        known = programs.labels(self.engine._job_plan, [issue.name for issue in trace.issues])
        places = {issue.number: place for place, issue in enumerate(trace.issues)}
        streams: dict[int, list[tuple[str, str]]] = defaultdict(list)
        for piece in sorted(trace.intervals):
            streams[piece.stream].append((known.get(places.get(piece.op, -1), ""), piece.name))
        return streams

    def _sites(self, task: Task) -> list[delays.Site]:
        fronts = [delays.Site(*self._place_of(each.item), each.us) for each in task.fronts if each.rank == self.rank]
        return [*fronts, *(self._turns(*task.turns) if task.turns else ())]

    def _place_of(self, item: Item) -> tuple[int, int]:
        for stream, pieces in self.streams.items():
            for ordinal, (label, _) in enumerate(pieces):
                found = _LABEL.match(label)
                if found and (int(found[2]), int(found[1])) == item:
                    return stream, ordinal
        raise LookupError(f"no piece of work of #{item[0]}@{item[1]}")

    def _turns(self, kind: str, k: int, n: int, us: int) -> list[delays.Site]:
        every = [
            (stream, ordinal)
            for stream, pieces in sorted(self.streams.items())
            for ordinal, (_, name) in enumerate(pieces)
            if _kind_of(name) == kind
        ]
        return [delays.Site(*place, us) for place in every[k::n]]


def _kind_of(piece: str) -> str:
    return "copy" if piece in COPIES else "collective" if piece in COMM else "compute"


if __name__ == "__main__":
    main()
