"""Measure this machine through Paddle itself: what `interlace calibrate` writes as a device profile.

Each figure comes from small static programs run by `StandaloneExecutor` with a `core.Plan`, as a training step is. An
operation's time is the difference between a program that has it many times and one that has it once. Where the host executes
operations itself, the time of an operation on almost no data is taken off: it is the host's share and is stored as such. Devices that
run behind the host get other work first, so that the host is ahead and its share does not show.

On a CUDA build the same programs run on the GPU in bfloat16 with larger sizes, attention and pinned copies. That path
has not been run on Paddle's GPU build; the way operations are measured has, on CUDA streams of the testbed.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from math import prod
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from interlace.bridge.calibrate_power import Load, power_part
from interlace.bridge.nvml import find_gpu
from interlace.cost_model.model import sample_size
from interlace.cost_model.profile import (
    SCHEMA,
    CommSample,
    CopySample,
    DeviceProfile,
    HostCosts,
    OpSample,
    Peak,
    Power,
    Provenance,
)
from interlace.cost_model.work import Part, attention_part, dims_of, gemm_part
from interlace.errors import ConfigError
from interlace.grouping import grouped
from interlace.installed import require_paddle, versions
from interlace.ir.kinds import NO_KERNEL
from interlace.ir.program import DTYPE_BYTES
from interlace.temporary import temporary_folder

if TYPE_CHECKING:
    from interlace.bridge.targets import Device

DTYPES = {"cpu": "float32", "gpu": "bfloat16"}
TINY = 4
"""Elements of an operation whose time is all dispatch."""
MEASURABLE = 1.0
"""An operation counts as measured where its time is at least this many times the host's share of it."""
LEAD_S = 0.01
"""How long the work takes that comes first: longer than the host needs to issue `MOST_OPS` operations."""
MOST_OPS = 200
LEAST_PRODUCT_S = 0.001
"""How long one matrix product of it takes at least: far longer than the host needs to issue one."""
ROWS = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Rows and columns of these products, the first that is long enough."""
TRIES = 3
"""Times that an operation is measured until it can be told from dispatch: what else the machine does may hide one that is long enough."""
GROUP = 2
"""Processes of the measured CPU collectives."""


@dataclass(slots=True)
class Case:
    """One operation to measure: its sample's key, inputs to make, and how to add it to a program."""

    part: Part
    inputs: list[tuple[tuple[int, ...], str]]
    make: Callable[..., Any]


@dataclass(slots=True)
class Bench:
    """Runs programs on one device; about `budget_s` is spent on each figure, the median of `num_runs`.

    `on` is a device that programs are built for otherwise than Paddle builds them.
    """

    device: str
    budget_s: float
    num_runs: int
    on: Device | None = None
    place: Any = field(init=False)
    _lead: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        import paddle
        from paddle.base import core

        if self.on is not None:
            self.place = self.on.place_attribute()
            return
        self.place = core.Place()
        self.place.set_place(paddle.CUDAPlace(0) if self.device == "gpu" else paddle.CPUPlace())

    def seconds(self, build: Callable[[], None], num_jobs: int = 1, num_runs: int = 0) -> list[float]:
        """Times of `num_runs` runs (0: the bench's) of a plan whose `num_jobs` jobs are each what `build` fills."""
        run = self.runner(build, num_jobs)
        return [run() for _ in range((num_runs or self.num_runs) + 1)][1:]

    def runner(self, build: Callable[[], None], num_jobs: int = 1) -> Callable[[], float]:
        """Runs such a plan, and gives the time it took."""
        import paddle
        from paddle.base import core

        programs = {}
        for number in range(num_jobs):
            program = paddle.static.Program()
            with paddle.static.program_guard(program, paddle.static.Program()):
                build()
            if self.on is not None:
                self.on.finish(program, f"job{number}")
            programs[f"job{number}"] = program
        scope = core.Scope()
        with paddle.static.scope_guard(scope):
            executor = core.StandaloneExecutor(self.place, core.Plan([core.Job(name) for name in programs], programs), scope)
        return lambda: self._run(executor)

    def _run(self, executor: Any) -> float:
        self._sync()
        start = time.perf_counter()
        executor.run([], False)
        self._sync()
        return time.perf_counter() - start

    def _sync(self) -> None:
        if self.on is not None:
            self.on.synchronize()
        elif self.device == "gpu":
            import paddle

            paddle.device.synchronize()

    def op_ns(self, case: Case) -> tuple[float, float]:
        """Median and spread (largest minus smallest) of one operation in a row of equal ones: dispatch included where the device is
        serial, else the device's time alone."""
        once = min(self.seconds(lambda: _fill(case, 1), num_runs=2))
        several = min(self.seconds(lambda: _fill(case, 4), num_runs=1))
        each = max((several - once) / 3, 1e-6)
        count = int(min(MOST_OPS, max(2, self.budget_s / self.num_runs / each)))
        lead = self._products()
        base = median(self.seconds(lambda: _fill(case, 1, lead)))
        times = [(run - base) / count * 1e9 for run in self.seconds(lambda: _fill(case, count + 1, lead))]
        return median(times), max(times) - min(times)

    @property
    def is_serial(self) -> bool:
        """Whether the host executes operations itself, one after the other."""
        return self.on.target.serial if self.on is not None else self.device == "cpu"

    def _products(self) -> tuple[int, int]:
        """Rows and number of the matrix products that come first; none on a serial device."""
        if self._lead is None:
            found = (0, 0.0) if self.is_serial else product_s(lambda *size: min(self.seconds(lambda: _lead(*size), num_runs=3)))
            self._lead = found[0], int(LEAD_S / found[1]) + 1 if found[0] else 0
        return self._lead


def product_s(seconds: Callable[[int, int], float]) -> tuple[int, float]:
    """Rows of a square matrix product in float32 that the device needs much longer for than the host to issue it, and its time in seconds.

    Args:
        seconds: Time of a program with so many rows, and so many products.
    """
    for rows in ROWS:
        each = (seconds(rows, 5) - seconds(rows, 1)) / 4
        if each >= LEAST_PRODUCT_S:
            break
    return rows, max(each, 1e-5)


def calibrate(device: str = "", quick: bool = False, today: str = "", command: str = "interlace calibrate") -> tuple[DeviceProfile, str]:
    """Measure a device (`cpu`, `gpu`; empty: the GPU where this build of Paddle has one); also gives why its power is not known.

    Takes about a minute on two cores, 15 s when `quick` (fewer sizes, shorter runs).

    Raises:
        ConfigError: Paddle is missing, or has no such device.
    """
    device = _device(device)
    bench = Bench(device, 0.02, 5) if quick else Bench(device, 0.3, 15)
    with paddle_settings():
        host = _host_costs(bench, quick)
        samples = _op_samples(bench, quick, host.op_ns)
        copies = _copies(bench, quick) if device == "gpu" else ()
        power, why = power_of(bench) if device == "gpu" else (None, "power is measured of GPUs")
    collectives = _cpu_collectives(quick) if device == "cpu" else ()
    profile = DeviceProfile(
        interlace_profile=SCHEMA,
        device=device_name(device),
        provenance=Provenance(
            f"{platform.system()} {platform.machine()}, {device_name('cpu')}, {os.cpu_count()} cores",
            today or date.today().isoformat(),
            command,
            versions=versions(),
            note=_note(device) + (f"; no power: {why}" if why else ""),
        ),
        ranks_per_host=8,
        memory_bytes=_memory_bytes(device),
        pinned_bytes=0,
        shortest_kernel_ns=0,
        matrix_flops=_matrix_rates(samples),
        vector_flops={},
        memory_rate=_memory_rate(samples),
        host=host,
        ops=tuple(samples),
        collectives=tuple(collectives),
        copies=tuple(copies),
        power=power,
    )
    return profile, why


LOADED_S = 0.02
"""How long kernels run in a row while their power is measured: less than the limiter averages, far more than the host needs."""
LOADS = {"gemm": 2, "attention": 1, "attention_grad": 1, "add": 1, "gelu": 1, "layer_norm": 1, "softmax": 1}
"""Kinds whose power is measured -> of how many of their largest sizes."""


def power_of(bench: Bench) -> tuple[Power | None, str]:
    """What the GPU's kernels draw; None, and why, where the driver does not tell it."""
    gpu, why = find_gpu(0)
    if gpu is None:
        return None, why
    ordered = sorted(cases(bench.device, quick=False), key=lambda case: case.part.flops or case.part.size_bytes)
    by_kind = grouped((case.part.kind, case) for case in ordered)
    return power_part([_load(bench, case) for kind, most in LOADS.items() for case in by_kind.get(kind, ())[-most:]], gpu), ""


def _load(bench: Bench, case: Case) -> Load:
    """Kernels on random data, as constants draw less."""
    once = bench.op_ns(case)[0]
    count = min(MOST_OPS, max(2, int(LOADED_S * 1e9 / max(once, 1.0))))
    run = bench.runner(lambda: _fill(case, count, drawn=True))
    return Load(case.part.kind, case.part.flops or case.part.size_bytes, lambda: (count, run()))


def device_name(device: str) -> str:
    """Name of the device as profiles state it: the GPU's, or the CPU model's."""
    if device == "gpu":
        import paddle

        return str(paddle.device.cuda.get_device_name(0))
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# -- what is measured -----------------------------------------------------------------------------------------------


def cases(device: str, quick: bool) -> Iterator[Case]:
    """Every operation of a run, smallest first within a kind."""
    import paddle

    ops, dtype = paddle._C_ops, DTYPES[device]
    gemms, lengths, rows = _sizes(device, quick)
    for m, n, k in gemms:
        yield Case(gemm_part(1, m, n, k, dtype), [((m, k), dtype), ((k, n), dtype)], lambda x, y: ops.matmul(x, y, False, False))
    for batch, m, n, k in ((8, 128, 128, 64), (16, 512, 512, 64))[: 1 if quick else 2]:
        shapes: list[tuple[tuple[int, ...], str]] = [((batch, m, k), dtype), ((batch, k, n), dtype)]
        yield Case(gemm_part(batch, m, n, k, dtype), shapes, lambda x, y: ops.matmul(x, y, False, False))
    for elements in lengths:
        yield from _elementwise(ops, elements, dtype)
    for shape in rows:
        yield from _rowwise(ops, shape, dtype)
    if device == "gpu":
        yield from _attention(ops, quick)


def _sizes(device: str, quick: bool) -> tuple[list[tuple[int, int, int]], list[int], list[tuple[int, int]]]:
    """(m, n, k) of matrix products, elements of elementwise operations, (rows, columns) of row-wise ones."""
    if device == "gpu":
        gemms = [(m, n, k) for m in (512, 2048, 4096) for n, k in ((1024, 1024), (4096, 4096), (4096, 11008), (11008, 4096))]
        lengths, rows = [1 << e for e in (18, 20, 22, 24, 26)], [(1024, 4096), (4096, 4096), (4096, 8192)]
    else:
        gemms = [(n, n, n) for n in (128, 256, 512, 1024)] + [(256, 2048, 512), (256, 512, 2048), (2048, 256, 512)]
        lengths, rows = [1 << e for e in (14, 16, 18, 20, 22)], [(64, 256), (512, 512), (2048, 1024)]
    return (gemms[:3], lengths[1::2], rows[1:]) if quick else (gemms, lengths, rows)


def _elementwise(ops: Any, elements: int, dtype: str) -> Iterator[Case]:
    x = ((elements,), dtype)
    wide: tuple[tuple[int, ...], str] = ((elements,), "float32")
    kinds: list[tuple[str, list[tuple[tuple[int, ...], str]], Callable[..., Any], int]] = [
        ("add", [x, x], ops.add, 3),
        ("multiply", [x, x], ops.multiply, 3),
        ("scale", [x], lambda a: ops.scale(a, 2.0, 1.0, True), 2),
        ("gelu", [x], lambda a: ops.gelu(a, True), 2),
        ("gelu_grad", [x, x], lambda a, b: ops.gelu_grad(a, b, True), 3),
        ("assign", [x], ops.assign, 2),
        ("reduce", [x], lambda a: ops.sum(a, [], None, False), 1),
    ]
    for kind, inputs, make, tensors in kinds:
        yield Case(_plain(kind, dtype, tensors * elements * DTYPE_BYTES[dtype], elements=elements), inputs, make)
    moved = elements * (4 + DTYPE_BYTES["float16"])
    yield Case(_plain("cast", "float32", moved, elements=elements), [wide], lambda a: ops.cast(a, "float16"))
    yield Case(_plain("grad_accumulate", "float32", 12 * elements, elements=elements), [wide, wide], ops.add_)


def _rowwise(ops: Any, shape: tuple[int, int], dtype: str) -> Iterator[Case]:
    rows, cols = shape
    size, x, vector = prod(shape) * DTYPE_BYTES[dtype], (shape, dtype), ((cols,), dtype)
    row: tuple[tuple[int, ...], str] = ((rows,), "float32")
    dims = {"rows": rows, "cols": cols}
    yield Case(_plain("softmax", dtype, 2 * size, **dims), [x], lambda a: ops.softmax(a, -1))
    yield Case(_plain("softmax_grad", dtype, 3 * size, **dims), [x, x], lambda a, b: ops.softmax_grad(a, b, -1))
    norm = lambda a, s, b: ops.layer_norm(a, s, b, 1e-5, 1)  # noqa: E731
    yield Case(_plain("layer_norm", dtype, 2 * size, **dims), [x, vector, vector], norm)
    back = lambda a, s, b, m, v, g: ops.layer_norm_grad(a, s, b, m, v, g, 1e-5, 1)  # noqa: E731
    yield Case(_plain("layer_norm_grad", dtype, 3 * size, **dims), [x, vector, vector, row, row, x], back)
    yield Case(_plain("transpose", dtype, 2 * size, elements=rows * cols), [x], lambda a: ops.transpose(a, [1, 0]))


def _attention(ops: Any, quick: bool) -> Iterator[Case]:
    for heads, seq in ((8, 1024), (16, 2048), (16, 4096))[: 1 if quick else 3]:
        shape = ((1, seq, heads, 128), "bfloat16")
        part = attention_part(1, heads, heads, seq, seq, 128, True, "bfloat16", False)
        make = lambda q, k, v: ops.flash_attn(q, k, v, None, None, 0.0, True, False, False, "")  # noqa: E731
        yield Case(part, [shape] * 3, make)


def _plain(kind: str, dtype: str, size_bytes: int, **dims: int) -> Part:
    return Part(kind, "", dtype, dims_of(**dims), 0, size_bytes)


def _lead(rows: int, count: int) -> None:
    """Matrix products, one after the other."""
    import paddle

    if count:
        x = one = paddle.full((rows, rows), 1 / rows, "float32")
        for _ in range(count):
            x = paddle._C_ops.matmul(x, one, False, False)


def _fill(case: Case, count: int, lead: tuple[int, int] = (0, 0), drawn: bool = False) -> None:
    """Inputs, constant or drawn at random, other work, then the operation `count` times; nothing reads the results, so each is freed at
    once."""
    import paddle

    made = (paddle.randn(shape, "float32") if drawn else paddle.full(shape, 0.5, "float32") for shape, _ in case.inputs)
    inputs = [each.astype(dtype) for each, (_, dtype) in zip(made, case.inputs, strict=True)]
    _lead(*lead)
    for _ in range(count):
        case.make(*inputs)


def _op_samples(bench: Bench, quick: bool, op_ns: float) -> list[OpSample]:
    """A sample for every case; on a serial device for those that can be told from dispatch."""
    from tqdm import tqdm

    samples, op_ns = [], op_ns if bench.is_serial else 0.0
    for case in tqdm(list(cases(bench.device, quick)), desc="operations", unit="op", leave=False):
        found = (bench.op_ns(case) for _ in range(TRIES))
        dur_ns, spread_ns = next((each for each in found if each[0] - op_ns >= max(MEASURABLE * op_ns, 1.0)), (0.0, 0.0))
        if dur_ns:
            part = case.part
            kind = "copy" if part.kind == "assign" else part.kind
            sizes = dict(part.dims)
            samples.append(OpSample(kind, part.dtype, sizes, part.size_bytes, round(dur_ns - op_ns), round(spread_ns), bench.num_runs))
    return sorted(samples, key=lambda s: (s.kind, s.dtype, s.size_bytes, sorted(s.dims.items())))


def _host_costs(bench: Bench, quick: bool) -> HostCosts:
    """Of an operation, of a job beyond its operations, and of a run beyond its jobs: one program against the same cut into 16.

    Where the host executes operations itself, of one on almost nothing. Where it runs ahead, of those of training steps on almost nothing:
    such an operation has several operands, keeps results for backward and gives memory back, which costs the host more.
    """
    from paddle import _C_ops

    tiny = Case(
        _plain("scale", "float32", 8 * TINY, elements=TINY),
        [((TINY,), "float32")],
        lambda a: _C_ops.scale(a, 2.0, 1.0, True),
    )
    num_jobs, each, runs = 16, 8, 20 if quick else 60
    short = median(bench.seconds(lambda: _fill(tiny, each), num_runs=runs))
    long = median(bench.seconds(lambda: _fill(tiny, each * num_jobs), num_runs=runs))
    cut = median(bench.seconds(lambda: _fill(tiny, each), num_jobs, runs))
    op_s = max(0.0, (long - short) / (each * (num_jobs - 1)))
    job_s = max(0.0, (cut - short) / (num_jobs - 1) - each * op_s)
    run_s = max(0.0, short - each * op_s - job_s)
    note = f"an operation on {TINY} elements"
    if not bench.is_serial:
        few, many = (_training_step(layers, bench, runs) for layers in TRAINED_LAYERS)
        op_s = max(0.0, (many[1] - few[1]) / (many[0] - few[0]))
        note = f"an operation of training steps on {TINY} x {TINY} elements, {many[0]} of them against {few[0]}"
    note = f"{note}; a job beyond its operations; between steps what the executor spends on a run beyond its jobs, and no script"
    return HostCosts(round(op_s * 1e9), round(job_s * 1e9), "measured", note, round(run_s * 1e9))


TRAINED_LAYERS = (2, 12)
"""Layers of training steps whose difference gives the host's cost of an operation."""


def _training_step(layers: int, bench: Bench, runs: int) -> tuple[int, float]:
    """Operations that are launched in forward, backward and update of so many layers on almost nothing, and median seconds of a step."""
    import paddle

    ops, count = paddle._C_ops, 0

    def build() -> None:
        nonlocal count
        x = paddle.full([TINY, TINY], 1.0, "float32")
        weights: list[Any] = []
        for _ in range(layers):
            made = [paddle.full([TINY, TINY], 0.5, "float32"), *(paddle.full([TINY], value, "float32") for value in (0.1, 1.0, 0.0))]
            w, b, scale, shift = made
            for each in made:
                each.stop_gradient = False
            y = ops.gelu(ops.add(ops.matmul(x, w, False, False), b), True)
            x = ops.add(x, ops.layer_norm(y, scale, shift, 1e-5, 1)[0])
            weights += made
        gradients = paddle.static.gradients([ops.mean(x, [], False)], weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            ops.subtract(weight, ops.scale(gradient, 0.1, 0.0, True))
        launched = paddle.static.default_main_program().global_block().ops
        count = sum(op.name() not in NO_KERNEL for op in launched)

    seconds = median(bench.seconds(build, num_runs=runs))
    return count, seconds


def _copies(bench: Bench, quick: bool) -> list[CopySample]:
    """Pinned copies of the GPU, one device alone; the CPU place has no second memory to copy to."""
    import paddle

    samples = []
    for size in (1 << 22, 1 << 26)[: 1 if quick else 2]:
        on_device = paddle.zeros([size], "uint8")
        pinned = on_device.pin_memory()
        for way, copy in (("d2h", on_device.pin_memory), ("h2d", pinned.cuda)):
            times = []
            for _ in range(7):
                bench._sync()
                start = time.perf_counter()
                copy()
                bench._sync()
                times.append(time.perf_counter() - start)
            dur, spread = round(median(times) * 1e9), round((max(times) - min(times)) * 1e9)
            samples.append(CopySample(way, size, dur, 1, spread, 7))  # type: ignore[arg-type]
    return samples


# -- collectives of CPU ranks ---------------------------------------------------------------------------------------


def _cpu_collectives(quick: bool) -> list[CommSample]:
    """All-reduce between processes through the CPU transport, float32; no Paddle in them.

    Raises:
        ConfigError: A process failed or took more than a minute; the message has the last line of its output.
    """
    sizes = [1 << 16, 1 << 20] if quick else [1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with temporary_folder() as made, contextlib.ExitStack() as stack:
        folder = str(made)
        ranks = []
        for rank in range(GROUP):
            code = f"from interlace.bridge.calibrate import all_reduce_rank; all_reduce_rank({rank}, {folder!r}, {sizes})"
            process = subprocess.Popen(
                [sys.executable, "-c", code], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            ranks.append(process)
        said = [_last_words(process) for process in ranks]
    return [CommSample("all_reduce", GROUP, size, dur, spread, num_runs=15) for size, dur, spread in json.loads(said[0])]


def _last_words(process: subprocess.Popen[str]) -> str:
    try:
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired as error:
        raise ConfigError("CPU collectives: a measuring process gave no answer in 60 s") from error
    if process.returncode:
        raise ConfigError(f"CPU collectives: a measuring process failed: {err.strip().rpartition(chr(10))[2]}")
    return out


def all_reduce_rank(rank: int, folder: str, sizes: list[int]) -> None:
    """One process of the measured collectives; prints `[[bytes, median ns, spread ns], ...]` as JSON."""
    from interlace.cpu.transport import Transport

    found = []
    with Transport(rank, GROUP, folder, timeout_s=30) as transport:
        for size in sizes:
            array, times = np.ones(size // 4, np.float32), []
            for _ in range(17):
                start = time.perf_counter_ns()
                transport.all_reduce(array, "sum", 0, range(GROUP))
                times.append(time.perf_counter_ns() - start)
            times = times[2:]
            found.append((size, round(median(times)), max(times) - min(times)))
        transport.all_reduce(np.ones(1, np.float32), "sum", 0, range(GROUP))  # all leave together
    print(json.dumps(found))


# -- the machine ----------------------------------------------------------------------------------------------------


def import_paddle() -> None:
    """Import Paddle and leave SIGTERM to us: its answer is a traceback of its own. Raises ConfigError where Paddle is missing."""
    _device("")
    import paddle

    paddle.disable_signal_handler()


def _device(device: str) -> str:
    require_paddle()
    import paddle

    has_gpu = paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0
    device = device or ("gpu" if has_gpu else "cpu")
    if device not in DTYPES:
        raise ConfigError(f"--device {device!r}: expected one of {', '.join(DTYPES)}")
    if device == "gpu" and not has_gpu:
        raise ConfigError("--device gpu: this build of Paddle sees no GPU; use --device cpu, or install paddlepaddle-gpu")
    return device


@contextlib.contextmanager
def paddle_settings(others: Sequence[str] = ()) -> Iterator[None]:
    """Static mode and issue in program order, as the auto-parallel engine sets it; put back afterwards, `others` (flags) too."""
    import paddle

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


def _matrix_rates(samples: list[OpSample]) -> dict[str, Peak]:
    """Rate of the largest product of each dtype: the best of all would be the one that noise favours most."""
    largest: dict[str, OpSample] = {}
    for sample in sorted((s for s in samples if s.kind == "gemm"), key=sample_size):
        largest[sample.dtype] = sample
    return {
        dtype: Peak(float(f"{sample_size(sample) * 1e9 / sample.dur_ns:.4g}"), "measured", "the largest gemm sample")
        for dtype, sample in largest.items()
    }


def _memory_rate(samples: list[OpSample]) -> Peak:
    """Rate of the largest elementwise sample that moves most bytes a second, so that caches do not count."""
    plain = [s for s in samples if s.kind in ("add", "copy", "scale", "multiply")]
    if not plain:
        raise ConfigError(
            f"calibrate: no elementwise operation could be told from dispatch in {TRIES} tries; is the machine busy? "
            "Measure again when less runs beside it"
        )
    largest = max(s.dims["elements"] for s in plain)
    best = max(s.size_bytes * 1e9 / s.dur_ns for s in plain if s.dims["elements"] == largest)
    return Peak(float(f"{best:.4g}"), "measured", f"read plus written, {largest} elements")


def _memory_bytes(device: str) -> int:
    if device == "gpu":
        import paddle

        return int(paddle.device.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _note(device: str) -> str:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    busy = f"; others used this machine meanwhile (load {load:.1f} on {cores} cores)" if load > cores + 1 else ""
    if device == "gpu":
        return "one device: no collectives, no interference" + busy
    return f"operations less the host's share; collectives between {GROUP} CPU processes; no copies: one memory{busy}"
