"""Runs small programs on a device, and times the operations in them."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import ceil, pi, prod, sin
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

import paddle
from paddle.base import core

from interlace.cost_model.work import Part
from interlace.interrupts import uninterrupted

if TYPE_CHECKING:
    from interlace.bridge.targets import Device

LEAD_S = 0.01
"""Seconds of the work that runs before a measurement: longer than the host needs to issue `MOST_OPS` operations."""
MOST_OPS = 200
"""Most operations in a row."""
LEAST_PRODUCT_S = 0.001
"""Least seconds of one matrix product of this work: far longer than the host needs to issue it."""
ROWS = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Rows, and columns, of these products; the first size that is long enough is used."""
FAST_ROWS = 1024
SCATTER = ((78.233, 12.9898), (41.417, 93.751), (27.619, 63.137))
"""Radians between neighbours in a column and in a row, for each sine in a product of sines. The product has no pattern, and its exponents
spread like those of normally distributed numbers: a kernel's power depends on how many bits change."""
LONGEST_ROW = 1 << 16
"""Longer rows are filled in several parts, as the phases of the sines would be too coarse in float32."""
MASKS = ("uint8", "bool")
"""Types of masks, such as that of dropout, whose gradient only reads what the mask keeps."""
KEPT = 0.9
"""Share of a mask's elements that are set: as with dropout of 0.1, the usual rate."""
SET = ("FLAGS_new_executor_sequential_run", "FLAGS_pir_apply_inplace_pass", "FLAGS_fast_eager_deletion_mode")
"""Flags of Paddle that running a step may set."""


class Runner(Protocol):
    """Runs programs `times` times, calls `meanwhile` while the device works, waits for the device, and returns the seconds."""

    def __call__(self, times: int = 1, meanwhile: Callable[[], object] = ...) -> float: ...


@dataclass(slots=True)
class Case:
    """An operation to measure.

    Attributes:
        part: Its kernel, as the cost model looks it up.
        inputs: Shape and dtype of each tensor that it reads.
        prepare: Gets these tensors in the program that is being built, and returns a function that adds the operation to that program.
        without: Another kernel of the operation, whose time is subtracted; None if there is none.
    """

    part: Part
    inputs: list[tuple[tuple[int, ...], str]]
    prepare: Callable[[Sequence[Any]], Callable[[], object]]
    without: Case | None = None


class Inputs:
    """Tensors in a scope, and the names by which programs read them.

    The tensors are freed with this object: Paddle keeps the scopes that Python creates, and what is in them, until the process ends.
    """

    def __init__(self, names: list[str], scope: Any = None) -> None:
        self.names, self.scope = names, core.Scope() if scope is None else scope
        weakref.finalize(self, self.scope.erase, names).atexit = False


@dataclass(slots=True)
class Bench:
    """A device to run programs on. A figure is the median of `num_runs` runs, which take about `budget_s` seconds together."""

    device: Device
    budget_s: float
    num_runs: int
    _place: Any = field(init=False)
    _lead: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self._place = self.device.place_attribute()

    def seconds(self, build: Callable[[], None], num_jobs: int = 1, num_runs: int = 0, inputs: Inputs | None = None) -> list[float]:
        """Times in seconds of `num_runs` runs (0: the bench's number) of a plan with `num_jobs` jobs, each of which is built by `build`.
        One run before them is not counted."""
        run = self.runner(build, num_jobs, inputs)
        return [run() for _ in range((num_runs or self.num_runs) + 1)][1:]

    def runner(self, build: Callable[[], None], num_jobs: int = 1, inputs: Inputs | None = None) -> Runner:
        """What runs a plan with `num_jobs` jobs, each of which is built by `build`."""
        programs = {}
        for number in range(num_jobs):
            program = paddle.static.Program()
            with uninterrupted(), paddle.static.program_guard(program, paddle.static.Program()):
                build()
            self.device.finish(program, f"job{number}")
            programs[f"job{number}"] = program
        given = inputs or Inputs([])
        jobs = [core.Job(name) for name in programs]
        for job in jobs:
            job.set_skip_gc_vars(set(given.names))
        with uninterrupted(), paddle.static.scope_guard(given.scope):
            executor = core.StandaloneExecutor(self._place, core.Plan(jobs, programs), given.scope)

        def run(times: int = 1, meanwhile: Callable[[], object] = lambda: None) -> float:
            self.device.synchronize()
            start = time.perf_counter()
            with uninterrupted():  # Paddle would turn an interrupt into an error of its own
                for _ in range(times):
                    executor.run(given.names, False)
                meanwhile()
                self.device.synchronize()
            return time.perf_counter() - start

        return run

    def inputs(self, case: Case) -> Inputs:
        """Inputs of an operation, computed once. On a fast device they are numbers without a pattern, as constants take less power and let
        matrix products run at a higher clock; they are positive except for operations with FLOPs. On other devices they are constants.
        Integers, which are rows of tables or classes, count up from 0. In masks (`MASKS`), `KEPT` of the elements are set; one
        or two are not about every 15 elements."""
        found = Inputs([f"input{k}" for k in range(len(case.inputs))])
        is_fast, signed = self.is_fast, bool(case.part.flops)

        def build() -> None:
            for name, (shape, dtype) in zip(found.names, case.inputs, strict=True):
                made = _input(shape, dtype, is_fast, signed)
                made.persistable = True  # so that it stays in the scope
                paddle._C_ops.set_persistable_value(made, name)

        self.runner(build, inputs=Inputs([], found.scope))()
        return found

    def op_ns(self, case: Case) -> tuple[float, float]:
        """Median and spread (largest minus smallest) of the time of one operation in a row of equal ones, in nanoseconds. On a serial
        device it includes dispatch; otherwise it is the device's time alone."""
        inputs = self.inputs(case)
        once = min(self.seconds(lambda: fill(case, 1), num_runs=2, inputs=inputs))
        several = min(self.seconds(lambda: fill(case, 4), num_runs=2, inputs=inputs))
        each = max((several - once) / 3, 1e-6)
        count = int(min(MOST_OPS, max(2, self.budget_s / self.num_runs / each)))
        base = median(self.seconds(lambda: fill(case, 1, self.add_lead), inputs=inputs))
        times = [(run - base) / count * 1e9 for run in self.seconds(lambda: fill(case, count + 1, self.add_lead), inputs=inputs)]
        return median(times), spread(times)

    @property
    def is_serial(self) -> bool:
        """Whether the host executes operations itself, one after the other."""
        return self.device.target.serial

    @property
    def is_fast(self) -> bool:
        """Whether a product of `FAST_ROWS` rows takes less than `LEAST_PRODUCT_S`, as on GPUs."""
        return self._products()[0] > FAST_ROWS

    def add_lead(self, seconds: float = LEAD_S) -> None:
        """Add other work to the program that is being built, which takes about this long, so that the host then is ahead of the device."""
        rows, count = self._products()
        _lead(rows, ceil(count * seconds / LEAD_S))

    def _products(self) -> tuple[int, int]:
        """Rows and number of the matrix products that run before a measurement; zeros on a serial device."""
        if self._lead is None:
            found = (0, 0.0) if self.is_serial else product_s(lambda *size: min(self.seconds(lambda: _lead(*size), num_runs=3)))
            self._lead = found[0], int(LEAD_S / found[1]) + 1 if found[0] else 0
        return self._lead


def product_s(seconds: Callable[[int, int], float]) -> tuple[int, float]:
    """Rows of a square float32 matrix product that takes the device much longer than the host needs to issue it, and its time in seconds.

    Args:
        seconds: Time of a program, given the rows and the number of its products.
    """
    for rows in ROWS:
        each = (seconds(rows, 5) - seconds(rows, 1)) / 4
        if each >= LEAST_PRODUCT_S:
            break
    return rows, max(each, 1e-5)


def _lead(rows: int, count: int) -> None:
    """Add dependent matrix products to the program."""
    if count:
        x = one = paddle.full((rows, rows), 1 / rows, "float32")
        for _ in range(count):
            x = paddle._C_ops.matmul(x, one, False, False)


def fill(case: Case, count: int, before: Callable[[], None] = lambda: None) -> None:
    """Add what `before` adds, then the operation `count` times. Nothing reads the results, so each is freed at once."""
    given = [paddle.static.data(f"input{k}", list(shape), dtype) for k, (shape, dtype) in enumerate(case.inputs)]
    before()
    add = case.prepare(given)
    for _ in range(count):
        add()


def _input(shape: tuple[int, ...], dtype: str, scattered: bool, signed: bool) -> Any:
    if dtype.startswith("int"):
        return paddle.arange(prod(shape), dtype=dtype).reshape(shape)
    if dtype in MASKS:
        return paddle.less_than(_sines(shape, *SCATTER[0]), paddle.full([1], sin(pi * (KEPT - 0.5)), "float32")).astype(dtype)
    if scattered:
        made = reduce(paddle.multiply, (_sines(shape, *each) for each in SCATTER))
        made = made if signed else paddle.square(made)
    else:
        made = paddle.full(shape, 0.5, "float32")
    return made if dtype == "float32" else made.astype(dtype)


def _sines(shape: tuple[int, ...], down: float, along: float) -> Any:
    """Sines of this shape, whose phases differ by `along` radians between neighbours in a row and by `down` from row to row."""
    size = prod(shape)
    cols = shape[-1] if shape and shape[-1] <= LONGEST_ROW else min(LONGEST_ROW, size & -size)
    places = (paddle.scale(paddle.arange(size, dtype="float32"), step) for size, step in ((size // cols, down), (cols, along)))
    first, second = places
    return paddle.sin(paddle.add(first.reshape([size // cols, 1]), second.reshape([1, cols]))).reshape(shape)


def spread(found: Sequence[float]) -> float:
    """Largest minus smallest."""
    return max(found) - min(found)


def bench_of(device: Device, quick: bool) -> Bench:
    """A bench for a device, with shorter and fewer runs when `quick`."""
    return Bench(device, 0.02, 5) if quick else Bench(device, 0.3, 15) if device.target.serial else Bench(device, 0.1, 9)


def flag(name: str) -> Any:
    """The value of a flag of Paddle; None if this build does not have it."""
    try:
        return paddle.get_flags([name])[name]
    except ValueError:
        return None


@contextlib.contextmanager
def paddle_settings(others: Sequence[str] = ()) -> Iterator[None]:
    """Static mode, and issue in program order, as the auto-parallel engine sets them. Both are restored afterwards, and so are the flags in
    `others`."""
    name = "FLAGS_new_executor_sequential_run"
    before, dynamic = paddle.get_flags([name, *others]), paddle.in_dynamic_mode()
    paddle.set_flags({name: True})
    paddle.enable_static()
    try:
        yield
    finally:
        paddle.set_flags(before)
        if dynamic:
            paddle.disable_static()
