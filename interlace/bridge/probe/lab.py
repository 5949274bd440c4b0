"""Small programs that show how a device and Paddle's executor behave. They are captured, cut into jobs and lowered like training steps.

Only Paddle is used. When something ran is inferred from how long the host was busy, from when bytes arrive in pinned buffers, which a
thread watches, and from whether values are right.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import paddle
from paddle.base import core

from interlace.bridge.capture import Captured, capture
from interlace.bridge.lower import Lowered, lower
from interlace.bridge.probe.bench import ROWS, SET, flag, paddle_settings, product_s
from interlace.bridge.targets import Device
from interlace.bridge.targets.base import PINNED_PREFIX
from interlace.ir import Edit, Event, Job, OpInstance, Pipeline, Program
from interlace.ir.edit import with_items
from interlace.ir.kinds import SHADOW_OUTPUT, is_boundary
from interlace.passes.insert_events import events_of

SLOW_S = 0.04
"""Least seconds of slow work: far longer than the host needs to issue a program."""
MOST_PRODUCTS = 4000
"""Most matrix products in slow work, however short they are."""
SMALL = 64
POLL_S = 0.0002
MOST_S = 2.0
"""Most seconds to wait for bytes in pinned buffers."""
OUT, BACK = "pd_op.memcpy_d2h", "pd_op.memcpy_h2d"
STREAMS = ("interlace_check_a", "interlace_check_b", "interlace_check_c", "interlace_check_d")
"""Names of streams. They are few, as each holds resources until the process ends."""


def on(value: Any, stream: str) -> Any:
    """Put the operation that computes a value on a stream, and return the value; the empty name is the compute stream."""
    if stream:
        value.get_defining_op().set_execution_stream(stream)
    return value


def keep(value: Any, name: str) -> Any:
    """Make a value an output of the step, and return it."""
    paddle._C_ops.set_persistable_value(value, name)
    return value


@dataclass(slots=True)
class Seen:
    """What was observed of one step. Times are seconds after its start.

    Attributes:
        issued_s: When the host had issued everything.
        done_s: When the device had completed everything.
        came_s: When the last element of a pinned buffer changed, by the buffer's number in program order.
        outputs: Outputs by name.
    """

    issued_s: float
    done_s: float
    came_s: dict[int, float]
    outputs: dict[str, np.ndarray]


@dataclass(slots=True)
class Slow:
    """Work that takes long and returns its input: `count` products with the identity matrix of `size` rows."""

    size: int = ROWS[0]
    count: int = 1

    def __call__(self, x: Any, one: Any, stream: str = "") -> Any:
        """Add the work to a program; `one` is the identity matrix."""
        for _ in range(self.count):
            x = on(paddle._C_ops.matmul(x, one, False, False), stream)
        return x


@dataclass(slots=True)
class Lab:
    """A device for experiments, and the slow work that fits it."""

    device: Device
    slow: Slow = field(default_factory=Slow)
    slow_s: float = 0.0

    def prepare(self) -> None:
        """Find out how much work takes at least `SLOW_S` on this device."""
        size, each_s = product_s(lambda size, count: self._slow_s(Slow(size, count)))
        self.slow = Slow(size, max(12, round(SLOW_S / each_s)))
        self.slow_s = self._slow_s(self.slow)
        while self.slow_s < SLOW_S and self.slow.count < MOST_PRODUCTS:  # the time of one product was overestimated
            self.slow = Slow(size, min(MOST_PRODUCTS, math.ceil(1.2 * self.slow.count * SLOW_S / self.slow_s)))
            self.slow_s = self._slow_s(self.slow)

    def _slow_s(self, slow: Slow) -> float:
        def build(x: Any, one: Any) -> None:
            slow(x, one)

        step = self.step([build], size=slow.size)
        return min(step.run().done_s for _ in range(3))

    def step(
        self,
        jobs: Sequence[Callable[[Any, Any], object]],
        size: int = 0,
        events: bool = True,
        waits: Sequence[tuple[str, str]] = (),
        watched: bool = True,
        filled: bool = False,
    ) -> Step:
        """A step of these jobs.

        Args:
            jobs: One function for each job, which adds its operations to the program. It gets the fed matrix, whose elements are all equal,
                and the identity matrix.
            size: Rows, and columns, of both matrices; 0 for those of the slow work.
            events: Whether events order the jobs as in a plan; otherwise only the executor orders them.
            waits: Pairs of operation names: after the host has issued the last operation of the first name, it waits for the last one of
                the second.
            watched: Whether a thread records when bytes arrive in pinned buffers.
            filled: Whether copies back write into memory that an operation before them has taken, as in a plan.
        """
        size = size or self.slow.size
        captured, program = _planned(jobs, size)
        program = filling(program) if filled else program
        program = msgspec.structs.replace(program, events=events_of(program))
        if not events:
            program = msgspec.structs.replace(program, events=_at_the_ends(program))
        if waits:
            last = {op.name: (op.id, 0) for op in program.ops if op.name in {name for pair in waits for name in pair}}
            pairs = tuple((last[first], last[second]) for first, second in waits)
            job = msgspec.structs.replace(program.jobs[-1], host_waits=pairs)
            program = msgspec.structs.replace(program, jobs=(*program.jobs[:-1], job))
        return Step(self.device, captured, program, size, watched)


def _planned(jobs: Sequence[Callable[[Any, Any], object]], size: int) -> tuple[Captured, Program]:
    """The captured program, and the same cut into jobs; its copies look like those that passes add."""
    main, ends = paddle.static.Program(), []
    with paddle.static.program_guard(main, paddle.static.Program()):
        x, one = (paddle.static.data(name, [size, size], "float32") for name in ("x", "one"))
        for build in jobs:
            build(x, one)
            ends.append(len(main.global_block().ops))
        if unread := [op.result(0) for op in main.global_block().ops if op.name() == OUT and op.result(0).use_empty()]:
            for host in unread:  # a buffer only has a name if another job reads it
                on(paddle._C_ops.memcpy_h2d(host, 1), STREAMS[-1])
            ends.append(len(main.global_block().ops))
    for op in main.global_block().ops:
        op.op_role = 0
    captured = capture(main, Pipeline())
    ops = [msgspec.structs.replace(op, origin=-1, attrs={}) if op.name in (OUT, BACK) else op for op in captured.program.ops]
    pinned = {op.results[0] for op in ops if op.name == OUT}
    values = [msgspec.structs.replace(value, memory="pinned") if value.id in pinned else value for value in captured.program.values]
    items: list[list[OpInstance]] = [[] for _ in ends]
    for k, op in enumerate(ops):
        if not is_boundary(op):
            items[next(number for number, end in enumerate(ends) if k < end)].append((op.id, 0))
    made = tuple(Job(f"check{number}", "forward", 0, tuple(part)) for number, part in enumerate(items))
    return captured, msgspec.structs.replace(captured.program, ops=tuple(ops), values=tuple(values), jobs=made)


def filling(program: Program) -> Program:
    """The program with copies back into memory that is taken right before."""
    edit, values = Edit(program), {value.id: value for value in program.values}
    before = {(op.id, 0): [(edit.fill(op, values[op.results[0]]).id, 0)] for op in program.ops if op.name == BACK}
    return msgspec.structs.replace(edit.build(), jobs=with_items(program.jobs, before, {}))


def _at_the_ends(program: Program) -> tuple[Event, ...]:
    """Only the events that involve the jobs which split the batch and collect outputs; none between the jobs of the experiment."""
    inner = {item for job in program.jobs for item in job.items}
    waits = [tuple(item for item in event.waits if event.record not in inner or item not in inner) for event in program.events]
    return tuple(msgspec.structs.replace(event, waits=rest) for event, rest in zip(program.events, waits, strict=True) if rest)


class Step:
    """A lowered step, which can run many times."""

    def __init__(self, device: Device, captured: Captured, program: Program, size: int, watched: bool = True) -> None:
        self.device, self.size = device, size
        device.prepare()
        self.lowered: Lowered = lower(captured, program, device)
        names = {name for job in self.lowered.jobs for name in job.names if name.startswith(PINNED_PREFIX)}
        self.pinned = sorted(names, key=_number) if watched else []
        for job in self.lowered.jobs:
            for op in job.program.global_block().ops:
                if op.name() == SHADOW_OUTPUT and op.str_attr("output_name") in {*self.lowered.outputs, *names}:
                    op.operand_source(0).persistable = True  # so that it is stored in the scope that is read below
        self.scope = core.Scope()
        self.executor = core.StandaloneExecutor(device.place_attribute(), self.lowered.plan, self.scope)
        self.fill = 1.0
        self._feed("one", np.eye(size, dtype="float32"))
        self.run()  # the first run also allocates and compiles

    def _feed(self, name: str, array: np.ndarray) -> None:
        if name in self.lowered.fed:
            self.scope.var(name).get_tensor().set(array, self.device.place)

    def run(self, then: Mapping[int, Callable[[np.ndarray], None]] | None = None) -> Seen:
        """Run the step on a matrix filled with the next value of `fill`. `then` maps the number of a pinned buffer to a function that gets
        the buffer as soon as bytes arrive in it."""
        self.device.synchronize()
        self.fill = self.fill % 3.0 + 1.0  # three values: a memory block may still hold the value of the last step but one
        self._feed("x", np.full((self.size, self.size), self.fill, "float32"))
        self.device.synchronize()
        fed: list[str] = [name for name in ("x", "one") if name in self.lowered.fed]
        watched = self.buffers()
        with _watching(watched, then or {}) as came_s:
            start = time.perf_counter()
            self.executor.run(fed, False)
            issued = time.perf_counter()
            while len(came_s) < len(watched) and time.perf_counter() < issued + MOST_S:
                time.sleep(POLL_S)  # Paddle's own wait would hold the interpreter lock, which the watching thread needs
            self.device.synchronize()
            done = time.perf_counter()
        outputs = {name: np.array(self.scope.find_var(name).get_tensor()) for name in self.lowered.outputs}
        return Seen(issued - start, done - start, {k: at - start for k, at in came_s.items()}, outputs)

    def buffers(self) -> list[np.ndarray]:
        """Views of the pinned buffers, in program order; empty before the first run."""
        found = []
        for name in self.pinned:
            variable = self.scope.find_var(name)
            tensor = variable.get_tensor() if variable is not None else None
            if tensor is None or not tensor._is_initialized():
                return []
            address = ctypes.cast(tensor._ptr(), ctypes.POINTER(ctypes.c_float))
            found.append(np.ctypeslib.as_array(address, shape=(int(tensor._numel()),)))
        return found

    def addresses(self) -> list[int]:
        """Addresses of the pinned buffers, in program order."""
        return [int(self.scope.find_var(name).get_tensor()._ptr()) for name in self.pinned]


def _number(name: str) -> tuple[int, str]:
    digits = name.removeprefix(PINNED_PREFIX).partition("@")[0]
    return int(digits), name


@contextlib.contextmanager
def _watching(buffers: Sequence[np.ndarray], then: Mapping[int, Callable[[np.ndarray], None]]) -> Iterator[dict[int, float]]:
    """The times at which the last element of each buffer changed, by its number; filled while the block runs."""
    came: dict[int, float] = {}
    before, over = [float(each[-1]) for each in buffers], threading.Event()

    def look() -> None:
        for k, each in enumerate(buffers):
            if k not in came and float(each[-1]) != before[k]:
                came[k] = time.perf_counter()
                if k in then:
                    then[k](each)

    def watch() -> None:
        while not over.is_set():
            look()
            time.sleep(POLL_S)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield came
    finally:
        over.set()
        thread.join()
        look()


def settings() -> contextlib.AbstractContextManager[None]:
    """The context in which steps run; the flags that they set are restored afterwards."""
    return paddle_settings([name for name in SET if flag(name) is not None])
