"""Small programs on the testbed, each run in one process that has loaded the plugin: `python scenes.py` prints JSON.

A scene is a function; what it returns is what its test looks at.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from testbed import delays, device

device.load()

import msgspec  # noqa: E402
import numpy as np  # noqa: E402
import paddle  # noqa: E402
from paddle.base import core  # noqa: E402

from testbed import programs  # noqa: E402

PLACE, N = paddle.CustomPlace(device.NAME, 0), 64
SLOW_US = 100000  # far more than the host needs to issue a program, also on a busy machine
SAFE = {
    "record": 2,
    "hold": 1,
    "poison": 1,
    "nosync": 1,
    "drop_waits": 0,
    "copy_order": 0,
    "pinned_events": 0,
    "d2h_blocks": 0,
    "pinned_slab": 0,
}
SCENES: dict[str, Callable[[], Any]] = {}


def scene(function: Callable[[], Any]) -> Callable[[], Any]:
    """Register."""
    SCENES[function.__name__] = function
    return function


class Program:
    """A program of jobs, cut by `cut`, with values handed on by name."""

    def __init__(self) -> None:
        self.jobs: list[tuple[str, Any]] = []
        self.feeds: list[str] = []
        self.scope = core.Scope()

    def job(self, build: Callable[[], None], name: str) -> None:
        made = paddle.static.Program()
        with paddle.static.program_guard(made, paddle.static.Program()):
            build()
        self.jobs.append((name, made))

    def executor(self, collected_late: Sequence[str] = ()) -> Any:
        """What is named stays, but for what the last job collects; everything else goes as soon as Paddle sees it."""
        stays = {"x", "handed", "out", "host", "after", *(f"more{k}" for k in range(4))}
        jobs = []
        for name, program in self.jobs:
            names = stays - set(collected_late) if name == self.jobs[-1][0] else stays
            programs.let_events_exist(program)
            made = core.Job(name)
            made.set_micro_batch_id(0)
            made.set_skip_gc_vars(names)
            jobs.append(made)
        place = core.Place()
        place.set_place(PLACE)
        return core.StandaloneExecutor(place, core.Plan(jobs, dict(self.jobs)), self.scope)

    def feed(self, **arrays: np.ndarray) -> None:
        for name, array in arrays.items():
            self.scope.var(name).get_tensor().set(array, PLACE)

    def value(self, name: str) -> np.ndarray:
        device.synchronize()
        return np.array(self.scope.find_var(name).get_tensor())


def on(value: Any, stream: str) -> Any:
    value.get_defining_op().set_execution_stream(stream)
    return value


def data(name: str, *shape: int, dtype: str = "float32") -> Any:
    return paddle.static.data(name, list(shape), dtype)


def keep(value: Any, name: str) -> None:
    """Give a value a name; persistable, so that it lies in the scope that we can read."""
    value.persistable = True
    paddle._C_ops.set_persistable_value(value, name)


def given(name: str, like: Any) -> Any:
    """A value of an earlier job."""
    block = paddle.static.default_main_program().global_block()
    made = block.add_kwarg(name, like)
    place = core.Place()
    place.set_place(PLACE)
    made.place_attr = place
    return made


def slow(run: Callable[[], None], name: str) -> None:
    """Delay the piece of work of this name."""
    delays.hold(run, SLOW_US, name)


def wrong(found: np.ndarray, expected: np.ndarray) -> str:
    """`right`, `nan` (poison was read) or `stale`."""
    if np.isnan(found).any():
        return "nan"
    return "right" if np.allclose(found, expected, rtol=1e-5, atol=1e-5) else "stale"


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape).astype("float32")


# -- operations ------------------------------------------------------------------------------------------------------


def _op_programs() -> dict[str, Callable[[], list[Any]]]:
    f = paddle.nn.functional

    def x(*shape: int) -> Any:
        made = data("x", *shape)
        made.stop_gradient = False
        return made

    def y(*shape: int) -> Any:
        made = data("y", *shape)
        made.stop_gradient = False
        return made

    ids = lambda: data("ids", 4, 6, dtype="int64")  # noqa: E731
    return {
        "matmul": lambda: [paddle.matmul(x(4, 6, 8), y(8, 5))],
        "matmul_transposed": lambda: [paddle.matmul(x(4, 6, 8), y(4, 5, 8), transpose_y=True)],
        "matmul_heads": lambda: [paddle.matmul(x(2, 3, 6, 8), y(2, 3, 8, 6))],
        "add_row": lambda: [x(4, 6, 8) + y(8)],
        "subtract_divide": lambda: [(x(4, 6) - y(4, 6)) * 2.0 + 1.0],
        "multiply_column": lambda: [x(4, 6, 8) * y(4, 6, 1)],
        "multiply_row": lambda: [x(4, 6, 8) * y(8)],
        "softmax": lambda: [f.softmax(x(4, 6, 8))],
        "layer_norm": lambda: [f.layer_norm(x(4, 6, 8), 8, y(8), y(8) * 0.5)],
        "gelu": lambda: [f.gelu(x(4, 8)), f.gelu(x(4, 8), approximate=True)],
        "silu": lambda: [f.silu(x(4, 8))],
        "rms_norm": lambda: [x(4, 8) * paddle.rsqrt(x(4, 8).square().mean(-1, keepdim=True) + 1e-6)],
        "transpose": lambda: [x(2, 3, 4, 5).transpose([0, 2, 1, 3])],
        "shapes": lambda: [x(4, 6, 8).reshape([4, 48]).unsqueeze(1).tile([1, 3, 1]).flatten(1, 2)],
        "chunk_concat": lambda: [paddle.concat([-part for part in x(4, 6, 8).chunk(2, axis=-1)][::-1], axis=-1)],
        "embedding": lambda: [f.embedding(ids(), x(9, 8))],
        "cross_entropy": lambda: [f.cross_entropy(x(4, 6, 9), ids().unsqueeze(-1), reduction="none").mean()],
        "sums": lambda: [x(4, 6, 8).sum(1), x(4, 6, 8).mean([0, 2]), x(4, 6, 8).sum()],
        "slices": lambda: [paddle.slice(data("z", 4, 6, 8), [0, 1, 2], [1, -4, 2], [3, 5, 6]) + x(2, 3, 4)],
        "bmm": lambda: [paddle.bmm(x(3, 4, 6), y(3, 6, 5))],
        "divide": lambda: [x(4, 6, 8) / (y(4, 6, 1) * y(4, 6, 1) + 1.0)],
        "first_choice": lambda: [f.one_hot(paddle.argmax(x(4, 6, 8), axis=-1), 8) * y(8)],
        "places": lambda: [paddle.cumsum(f.one_hot(ids(), 9), axis=1) - f.one_hot(ids(), 9) + 0.0 * x(9)],
        "at_a_place": lambda: [(f.one_hot(ids(), 9).unsqueeze(-1) == paddle.arange(3, dtype="float32")).astype("float32") * x(3)],
        "segments": lambda: [f.embedding(ids() * 2 // 5, x(4, 8)), f.embedding(ids() // (ids() * 0 + 4), x(4, 8))],
        "expand": lambda: [x(4, 1, 8).expand([4, 6, 8]), x(4, 1, 8).expand([2, 4, 6, 8])],
        "triu": lambda: [paddle.triu(x(6, 6), diagonal=1) + 0.0 * x(6, 6)],
    }


def _feeds(program: Any) -> dict[str, np.ndarray]:
    found = {}
    for op in program.global_block().ops:
        if op.name() == "pd_op.data":
            shape, name = op.result(0).shape, op.attrs()["name"]
            found[name] = np.arange(np.prod(shape)).reshape(shape) % 9 if name == "ids" else random(*shape)
    return {name: array.astype("int64" if name == "ids" else "float32") for name, array in found.items()}


def _with_gradients(build: Callable[[], list[Any]], place: Any) -> list[np.ndarray]:
    paddle.set_device(f"{device.NAME}:0" if place is PLACE else "cpu")
    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()):
        outs = build()
        total = sum(((out * out).sum() for out in outs[1:]), (outs[0] * outs[0]).sum())
        leaves = {op.attrs()["name"]: op.result(0) for op in main.global_block().ops if op.name() == "pd_op.data"}
        wanted = [leaf for name, leaf in leaves.items() if name != "ids"]
        grads = [grad for grad in paddle.static.gradients([total], wanted) if grad is not None]
    if place is PLACE:
        programs.check_kernels(main, "main")
    return [np.asarray(each) for each in paddle.static.Executor(place).run(main, feed=_feeds(main), fetch_list=[*outs, *grads])]


def _wide_programs() -> dict[str, Callable[[], list[Any]]]:
    """Rows and columns as long as those of large models."""
    f = paddle.nn.functional

    def leaf(name: str, *shape: int) -> Any:
        made = data(name, *shape)
        made.stop_gradient = False
        return made

    def norm(rows: int, cols: int) -> Any:
        return f.layer_norm(leaf("x", rows, cols), cols, leaf("y", cols), leaf("z", cols))

    labels = lambda: data("ids", 6, 1, dtype="int64")  # noqa: E731
    found: dict[str, Callable[[], list[Any]]] = {}
    for cols in (72, 512, 1048, 2048, 4096, 8192, 16384):
        found[f"softmax {cols}"] = lambda cols=cols: [f.softmax(4.0 * leaf("x", 9, cols))]
        found[f"layer_norm {cols}"] = lambda cols=cols: [norm(9, cols)]
        found[f"cross_entropy {cols}"] = lambda cols=cols: [f.cross_entropy(4.0 * leaf("x", 6, cols), labels(), reduction="none").mean()]
    found["columns"] = lambda: [leaf("x", 300, 264).sum(0), leaf("w", 300, 264) * leaf("y", 264), leaf("v", 1000, 40) + leaf("u", 40)]
    found["gelu"] = lambda: [f.gelu(4.0 * leaf("x", 64, 64), approximate=True), f.silu(4.0 * leaf("y", 64, 64))]
    return found


@scene
def wide_rows_against_cpu() -> dict[str, float]:
    return _against_cpu(_wide_programs())


@scene
def ops_against_cpu() -> dict[str, float]:
    return _against_cpu(_op_programs())


def _against_cpu(built: dict[str, Callable[[], list[Any]]]) -> dict[str, float]:
    """Largest difference of results and gradients, relative to the largest value."""
    found = {}
    for name, build in built.items():
        ours, theirs = _with_gradients(build, PLACE), _with_gradients(build, paddle.CPUPlace())
        found[name] = max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-6)) for a, b in zip(ours, theirs, strict=True))
    paddle.set_device(f"{device.NAME}:0")
    return found


def _fused_programs() -> dict[str, tuple[Callable[[], list[Any]], Callable[[], list[Any]]]]:
    """Operators that the CPU has not (but swiglu), and the same in elementary ones."""
    f = paddle.nn.functional
    from paddle.incubate.nn import functional as fused

    def leaf(name: str, *shape: int) -> Any:
        made = data(name, *shape)
        made.stop_gradient = False
        return made

    def norm(*shape: int) -> Any:
        x = leaf("x", *shape)
        return x * paddle.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * leaf("y", shape[-1])

    def turned(name: str, seq_dim: int, adjacent: bool, *shape: int) -> Any:
        x, dims = leaf(name, *shape), [1, 1, 1, shape[-1]]
        dims[seq_dim] = shape[seq_dim]
        sin, cos = data("sin", *dims), data("cos", *dims)
        if adjacent:
            halves = x.reshape([*shape[:-1], shape[-1] // 2, 2]).split(2, -1)
            other = paddle.concat([-halves[1], halves[0]], axis=-1).reshape(list(shape))
        else:
            low, high = x.chunk(2, axis=-1)
            other = paddle.concat([-high, low], axis=-1)
        return x * cos + other * sin

    def rotary(seq_dim: int, adjacent: bool, *shape: int) -> list[Any]:
        dims = [1, shape[seq_dim], 1, shape[-1]]
        q, k, _ = fused.fused_rotary_position_embedding(
            leaf("q", *shape),
            leaf("k", *shape),
            sin=data("sin", *dims),
            cos=data("cos", *dims),
            use_neox_rotary_style=adjacent,
            time_major=seq_dim == 0,
        )
        return [q, k]

    def rotaries(seq_dim: int, adjacent: bool, *shape: int) -> tuple[Callable[[], list[Any]], Callable[[], list[Any]]]:
        return (
            lambda: rotary(seq_dim, adjacent, *shape),
            lambda: [turned("q", seq_dim, adjacent, *shape), turned("k", seq_dim, adjacent, *shape)],
        )

    gate = lambda *shape: (leaf("x", *shape), leaf("y", *shape))  # noqa: E731
    halves = lambda *shape: leaf("x", *shape).chunk(2, axis=-1)  # noqa: E731
    found = {
        "fast_rms_norm": (lambda: [fused.fast_rms_norm(leaf("x", 4, 128), leaf("y", 128), 1e-6)[0]], lambda: [norm(4, 128)]),
        "fast_rms_norm, wide": (lambda: [fused.fast_rms_norm(leaf("x", 9, 4096), leaf("y", 4096), 1e-6)[0]], lambda: [norm(9, 4096)]),
        "swiglu": (lambda: [f.swiglu(*gate(4, 8))], lambda: [(lambda x, y: f.silu(x) * y)(*gate(4, 8))]),
        "swiglu of halves": (lambda: [f.swiglu(leaf("x", 4, 10))], lambda: [(lambda x, y: f.silu(x) * y)(*halves(4, 10))]),
        "rotary": rotaries(1, False, 2, 6, 3, 16),
        "rotary, wide": rotaries(1, False, 2, 6, 3, 128),
        "rotary, sequence first, size 4": rotaries(0, False, 6, 2, 3, 4),
        "rotary, adjacent": rotaries(1, True, 2, 6, 3, 8),
    }
    if hasattr(paddle._C_ops, "rms_norm"):
        found["rms_norm"] = (lambda: [f.rms_norm(leaf("x", 4, 6, 8), [8], leaf("y", 8), 1e-6)[0]], lambda: [norm(4, 6, 8)])
    return found


@scene
def fused_ops() -> dict[str, float]:
    """As `ops_against_cpu`, against elementary operations on the device."""
    found = {}
    for name, (fused, spelled) in _fused_programs().items():
        ours, theirs = _with_gradients(fused, PLACE), _with_gradients(spelled, PLACE)
        pairs = zip(ours, (b.reshape(a.shape) for a, b in zip(ours, theirs, strict=True)), strict=True)
        found[name] = max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-6)) for a, b in pairs)
    return found


@scene
def an_op_without_a_kernel() -> list[str]:
    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()):
        paddle.erf(data("x", 4))
    other = paddle.static.Program()
    with paddle.static.program_guard(other, paddle.static.Program()):
        paddle._C_ops.matmul(data("x", 4, 4, dtype="float64"), data("y", 4, 4, dtype="float64"), False, False)
    return [_error(lambda: programs.check_kernels(main, "forward")), _error(lambda: programs.check_kernels(other, "forward"))]


def _error(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# -- streams and events ----------------------------------------------------------------------------------------------


@scene
def events_inside_a_program() -> dict[str, str]:
    """A slow producer on a side stream and its reader on the compute stream."""
    made = Program()

    def build() -> None:
        x = data("x", N, N)
        keep(on(paddle.tanh(x), "side") * 2.0, "out")

    made.job(build, "job")
    x = random(N, N)
    made.feed(x=x)
    executor = made.executor()
    run = lambda: executor.run(["x"], False)  # noqa: E731
    found = {}
    for name, dropped in (("executor's events", 0), ("dropped", 1)):
        slow(run, "tanh")
        made.feed(x=-x)  # so that what the last run left is not what this one should give
        device.synchronize()
        with device.switched(drop_waits=dropped):
            run()
            found[name] = wrong(made.value("out"), 2 * np.tanh(-x))
        made.feed(x=x)
    delays.off()
    return found


def _two_jobs(event: bool) -> tuple[Program, Any, np.ndarray]:
    """The first job gives a value on a side stream, the second reads it on the compute stream."""
    made = Program()

    def first() -> None:
        out = on(paddle.tanh(data("x", N, N)), "side")
        if event:
            op = out.get_defining_op()
            op.set_bool_attr("force_record_event", True)
            op.set_str_attr("event_to_record", "made")
        kinds.append(out.type())
        keep(out, "handed")

    def second() -> None:
        read = given("handed", kinds[0]) * 2.0
        if event:
            read.get_defining_op().set_str_array_attr("events_to_wait", ["made"])
        keep(read, "out")

    kinds: list[Any] = []
    made.job(first, "first")
    made.job(second, "second")
    x = random(N, N)
    made.feed(x=x)
    return made, made.executor(), x


@scene
def events_between_jobs() -> dict[str, str]:
    found = {}
    for name, event in (("with event", True), ("without", False)):
        made, executor, x = _two_jobs(event)
        slow(lambda executor=executor: executor.run(["x"], False), "tanh")
        made.feed(x=-x)
        executor.run(["x"], False)
        found[name] = wrong(made.value("out"), 2 * np.tanh(-x))
    delays.off()
    return found


def _on_host() -> Any:
    return paddle._C_ops.full([1], 1.0, paddle.bool, paddle.CPUPlace())


def _branch(value: Any, taken: Callable[[Any], Any]) -> Any:
    """Control flow that takes its first branch."""
    return paddle.static.nn.cond(_on_host(), lambda: taken(value), lambda: value * 3.0)


def _loop(value: Any, body: Callable[[Any], Any]) -> Any:
    """Control flow that goes through its body once."""
    first, last = (paddle._C_ops.full([1], k, paddle.int64, paddle.CPUPlace()) for k in (0, 1))
    return paddle.static.nn.while_loop(lambda k, _: k < last, lambda k, v: [k + 1, body(v)], [first, value])[1]


RECORDERS: dict[str, Callable[[Any], list[Any]]] = {
    "kernel": lambda x: [out := paddle.tanh(x), out],
    "if": lambda x: [out := _branch(x, paddle.tanh), out],
    "shape": lambda x: [out := paddle.tanh(x), paddle._C_ops.shape(out)],
    "constant of the host": lambda x: [paddle.tanh(x), _on_host()],
}
"""What gives a value on the compute stream, and what records an event behind it."""
WAITERS: dict[str, Callable[[Any], list[Any]]] = {
    "kernel": lambda x: [out := x * 2.0, out],
    "if": lambda x: [out := _branch(x, lambda v: v * 2.0), out],
    "while": lambda x: [out := _loop(x, lambda v: v * 2.0), out],
    "constant of the host": lambda x: [_on_host(), x * 2.0][::-1],
}
"""What reads a value on the compute stream, and what waits for its event in front of it."""


def _handed_over(give: Callable[[Any], list[Any]], read: Callable[[Any], list[Any]], sides: tuple[str, str]) -> str:
    """One job gives a value and records an event, the next one waits for the event and reads the value: on these streams."""
    made, kinds = Program(), []

    def first() -> None:
        out, recorder = give(data("x", N, N))
        if sides[0]:
            on(out, sides[0])
        recorder.get_defining_op().set_bool_attr("force_record_event", True)
        recorder.get_defining_op().set_str_attr("event_to_record", "made")
        kinds.append(out.type())
        keep(out, "handed")

    def second() -> None:
        out, waiter = read(given("handed", kinds[0]))
        if sides[1]:
            on(out, sides[1])
        waiter.get_defining_op().set_str_array_attr("events_to_wait", ["made"])
        keep(paddle._C_ops.scale(out, 1.0, 0.0, True) if not sides[1] else out, "out")

    made.job(first, "first")
    made.job(second, "second")
    x = random(N, N)
    made.feed(x=x)
    executor = made.executor()
    try:
        slow(lambda: executor.run(["x"], False), "tanh")
    except ValueError as error:
        return "refused" if "don't have the event made" in str(error) else str(error)
    made.feed(x=-x)
    executor.run(["x"], False)
    found = wrong(made.value("out"), 2 * np.tanh(-x))
    delays.off()
    return found


@scene
def where_events_are_recorded() -> dict[str, str]:
    return {name: _sequential(lambda give=give: _handed_over(give, WAITERS["kernel"], ("", "side"))) for name, give in RECORDERS.items()}


@scene
def where_events_are_waited_for() -> dict[str, str]:
    return {name: _sequential(lambda read=read: _handed_over(RECORDERS["kernel"], read, ("side", ""))) for name, read in WAITERS.items()}


@scene
def streams_of_control_flow() -> dict[str, int]:
    """Streams of what a branch computes, and of an operation, where both are given one."""
    made = Program()

    def build() -> None:
        x = data("x", N, N)
        keep(on(_branch(x, paddle.exp), "side") * 2.0, "out")
        keep(on(paddle.tanh(x), "side"), "more0")

    made.job(build, "job")
    made.feed(x=random(N, N))
    with device.traced() as trace:
        made.executor().run(["x"], False)
        device.synchronize()
    return {each.name: each.stream for each in trace.intervals}


@scene
def a_pinned_buffer_in_the_next_step() -> dict[str, list[str]]:
    """A copy out, its event and a copy in, which is late: in which order two steps copy, in one job and in two."""

    def ran(two_jobs: bool) -> list[str]:
        made, kinds = Program(), []

        def out() -> Any:
            host = on(paddle._C_ops.memcpy_d2h(paddle.tanh(data("x", N, N)), 1), "out_stream")
            host.get_defining_op().set_bool_attr("force_record_event", True)
            host.get_defining_op().set_str_attr("event_to_record", "copied")
            kinds.append(host.type())
            paddle._C_ops.set_persistable_value(host, "host")
            return host

        def back(host: Any) -> None:
            value = on(paddle._C_ops.memcpy_h2d(host, 1), "in_stream")
            value.get_defining_op().set_str_array_attr("events_to_wait", ["copied"])
            keep(on(value * 2.0, "in_stream"), "out")

        if two_jobs:
            made.job(lambda: [out()].clear(), "out")  # a job gives nothing back
            made.job(lambda: back(given("host", kinds[0])), "back")
        else:
            made.job(lambda: back(out()), "both")
        made.feed(x=random(N, N))
        executor = made.executor()
        slow(lambda: executor.run(["x"], False), "copy_h2d")
        with device.traced() as trace:
            executor.run(["x"], False)
            executor.run(["x"], False)
            device.synchronize()
        delays.off()
        return [each.name for each in sorted(trace.intervals, key=lambda each: each.begin_us) if each.name.startswith("copy")]

    return {"one job": _sequential(lambda: ran(False)), "two jobs": _sequential(lambda: ran(True))}


@scene
def the_end_of_a_job() -> dict[str, Any]:
    """Whether the host waits: by the plugin's record, and by the clock."""
    _, executor, _ = _two_jobs(True)
    found = {}
    for name, nosync in (("waits", 0), ("goes on", 1)):
        slow(lambda: executor.run(["x"], False), "scale")
        with device.switched(nosync=nosync), device.traced() as trace:
            start = time.perf_counter()
            executor.run(["x"], False)
            took_us = (time.perf_counter() - start) * 1e6
        calls = {call.what for call in trace.calls if call.what.startswith("sync_stream")}
        found[name] = [sorted(calls), took_us > SLOW_US]
    delays.off()
    return found


# -- memory ----------------------------------------------------------------------------------------------------------


def _freed_under_a_side_stream(last_on_side: bool) -> tuple[Program, Any, np.ndarray]:
    """A value that a side stream reads slowly, with or without a compute reader after it; then it is freed."""
    made = Program()

    def build() -> None:
        x = data("x", N, N)
        value = x * 3.0
        side = on(paddle.tanh(value), "side")
        if not last_on_side:
            keep(value + 1.0, "after")
        for k in range(4):
            keep(x * float(10 + k), f"more{k}")
        keep(side * 1.0, "out")

    made.job(build, "job")
    x = random(N, N)
    made.feed(x=x)
    return made, made.executor(), x


@scene
def freeing() -> dict[str, str]:
    """Which switch settings hold a freed block as long as it is read."""
    paddle.set_flags({"FLAGS_new_executor_sequential_run": True, "FLAGS_pir_apply_inplace_pass": False})
    settings = {
        "last reader on the side stream, recorded": (True, {"record": 1}),
        "last reader on the side stream, nobody recorded": (True, {"record": 0}),
        "last reader on the side stream, recorded but not held": (True, {"record": 1, "hold": 0}),
        "last reader on compute (the hole)": (False, {"record": 1}),
        "last reader on compute, all readers recorded": (False, {"record": 2}),
    }
    found = {}
    for name, (last_on_side, switches) in settings.items():
        made, executor, x = _freed_under_a_side_stream(last_on_side)
        slow(lambda executor=executor: executor.run(["x"], False), "tanh")
        with device.switched(**switches):
            executor.run(["x"], False)
            found[name] = wrong(made.value("out"), np.tanh(3 * x))
    delays.off()
    paddle.set_flags({"FLAGS_new_executor_sequential_run": False, "FLAGS_pir_apply_inplace_pass": True})
    return found


@scene
def held_blocks_count() -> dict[str, int]:
    """A held block is free for tensors, and still taken from the device."""
    paddle.set_flags({"FLAGS_new_executor_sequential_run": True})
    _, executor, _ = _freed_under_a_side_stream(True)
    executor.run(["x"], False)
    device.synchronize()
    device.reset_peaks()
    before = device.memory()
    executor.run(["x"], False)
    device.synchronize()
    after = device.memory()
    paddle.set_flags({"FLAGS_new_executor_sequential_run": False})
    return {
        "allocated": after.allocated - before.allocated,
        "peak": after.allocated_peak - before.allocated,
        "reserved_grew": after.reserved - before.reserved,
        "bytes_of_one": N * N * 4,
    }


def _offload() -> tuple[Program, Any, np.ndarray]:
    """A value goes out in the first job and comes back in the second; nothing of ours orders the two copies."""
    made, kinds = Program(), []

    def out() -> None:
        host = on(paddle._C_ops.memcpy_d2h(paddle.tanh(data("x", N, N)), 1), "out_stream")
        kinds.append(host.type())
        paddle._C_ops.set_persistable_value(host, "host")

    def back() -> None:
        keep(on(paddle._C_ops.memcpy_h2d(given("host", kinds[0]), 1), "in_stream") * 2.0, "out")

    made.job(out, "out")
    made.job(back, "back")
    x = random(N, N)
    made.feed(x=x)
    return made, made.executor(collected_late=("host",)), x


@scene
def pinned_memory() -> dict[str, str]:
    """Neither Paddle nor the device orders the copies by the pinned buffer, or knows that one still uses it."""
    settings: dict[str, dict[str, int]] = {
        "nothing": {},
        "copies ordered, buffer freed at once": {"copy_order": 1, "d2h_blocks": 1},  # so that it is filled when it is freed
        "buffer kept, copies not ordered": {"pinned_events": 1},
        "both": {"copy_order": 1, "pinned_events": 1},
    }
    found = {}
    for name, switches in settings.items():
        made, executor, x = _offload()
        slow(lambda executor=executor: executor.run(["x"], False), "copy_h2d" if "freed" in name else "copy_d2h")
        made.feed(x=-x)
        with device.switched(**switches):
            executor.run(["x"], False)
            found[name] = wrong(made.value("out"), 2 * np.tanh(-x))
    delays.off()
    return found


@scene
def copies_out_block_or_not() -> dict[str, bool]:
    found = {}
    for name, blocks in (("asynchronous", 0), ("blocking", 1)):
        made = Program()

        def build() -> None:
            keep(paddle._C_ops.memcpy_d2h(paddle.tanh(data("x", N, N)), 1), "host")

        made.job(build, "job")
        made.feed(x=random(N, N))
        executor = made.executor()
        slow(lambda executor=executor: executor.run(["x"], False), "copy_d2h")
        with device.switched(d2h_blocks=blocks):
            start = time.perf_counter()
            executor.run(["x"], False)
            found[name] = (time.perf_counter() - start) * 1e6 > SLOW_US
        device.synchronize()
    delays.off()
    return found


@scene
def refused_pinned_memory() -> str:
    made = Program()

    def build() -> None:
        keep(paddle._C_ops.memcpy_d2h(paddle.tanh(data("x", 3 * N, N)), 1), "host")

    made.job(build, "job")
    made.feed(x=random(3 * N, N))
    executor = made.executor()
    with device.switched(refuse_pinned_after=0):
        return _error(lambda: executor.run(["x"], False))


def _pinned(kib: int) -> Callable[[], None]:
    """Make a pinned buffer of so many KiB, filled by a copy out; what is returned frees it."""
    made, x = Program(), random(kib, 256)

    def build() -> None:
        keep(paddle._C_ops.memcpy_d2h(paddle.tanh(data("x", kib, 256)), 1), "host")

    made.job(build, "job")
    made.feed(x=x)
    made.executor().run(["x"], False)
    assert wrong(made.value("host"), np.tanh(x)) == "right"
    return lambda: made.scope.find_var("host").get_tensor()._clear()


@scene
def pinned_slabs() -> dict[str, Any]:
    """After each step: buffers in new memory, allocations, KiB in use, KiB reserved, all since the start."""
    found: dict[str, Any] = {}
    for name, mebibytes in (("one slab", 1), ("one allocation each", 0)):
        with device.switched(pinned_slab=mebibytes):
            start = device.memory()

            def since(start: device.Memory = start) -> list[int]:
                now = device.memory()
                return [
                    now.pinned_buffers - start.pinned_buffers,
                    now.pinned_allocations - start.pinned_allocations,
                    (now.pinned - start.pinned) >> 10,
                    (now.pinned_reserved - start.pinned_reserved) >> 10,
                ]

            free = [_pinned(kib) for kib in (80, 160, 80)]
            steps: dict[str, Any] = {"three buffers": since()}
            free[0]()
            free[0] = _pinned(80)
            steps["one freed, one of its size made"] = since()
            free[0](), free[1]()
            free[:2] = [_pinned(240)]
            steps["two neighbours freed, one of their size made"] = since()
            with device.switched(refuse_pinned_after=device.memory().pinned_buffers):
                steps["refused"] = _error(lambda: _pinned(640)).rpartition("ResourceExhaustedError: ")[2]
            steps["refused, and nothing taken"] = since()
            free.append(_pinned(1280))
            steps["larger than a slab"] = since()
            for each in free:
                each()
            steps["all freed"] = since()
            found[name] = steps
    return found


@scene
def stream_priorities() -> dict[str, Any]:
    """Communication with a priority of its own; the switch that ignores it; two priorities under one name."""

    def named(stream: str, *priorities: int) -> Any:
        main = paddle.static.Program()
        with paddle.static.program_guard(main, paddle.static.Program()):
            for priority in priorities:
                on(data("x", N) * 2.0, stream).get_defining_op().set_int_attr("stream_priority", priority)
        return main

    found: dict[str, Any] = {}
    for name, obeyed, asked in (("asked for -1", 1, -1), ("asked for none", 1, 0), ("asked for -1, ignored", 0, -1)):
        with device.switched(priorities=obeyed):
            program, before = named(f"of {name}", asked, asked), device.stream_priorities()
            made = [programs.make_streams(program, "forward"), programs.make_streams(program, "forward")]
        found[name] = {"streams": made, "priorities": device.stream_priorities()[len(before) :]}
    made_here = Program()
    made_here.jobs.append(("job", named("of asked for -1", -1)))
    made_here.feed(x=random(N))
    before = device.stream_priorities()
    with device.traced() as trace:
        made_here.executor().run(["x"], False)
    found["the executor's stream"] = {
        "new": len(device.stream_priorities()) - len(before),
        "priority": [device.stream_priorities()[each.stream] for each in trace.intervals],
    }
    found["two under one name"] = _error(lambda: programs.make_streams(named("twice", -1, 0), "forward"))
    return found


# -- plans of ours -----------------------------------------------------------------------------------------------------


def _planned(build: Callable[[], None], count: int = 1, jobs: Sequence[Sequence[str]] = ((),)) -> Any:
    """A program captured and cut into jobs, each of which runs the operations of these kinds (none: of all), for every micro-batch in
    turn; and the events that such a plan gets."""
    from interlace.bridge.capture import capture
    from interlace.bridge.roles import give_roles
    from interlace.ir import Job, Pipeline
    from interlace.ir.kinds import is_boundary
    from interlace.passes.insert_events import events_of

    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()):
        build()
    give_roles(main)
    captured = capture(main, Pipeline(num_micro_batches=count, schedule="accumulate" if count > 1 else "none"))
    inner = [op for op in captured.program.ops if not is_boundary(op)]
    lists = [(k, m, [op.id for op in inner if not kinds or op.kind in kinds]) for k, kinds in enumerate(jobs) for m in range(count)]
    made = tuple(Job(f"job{k}_{m}", "forward", m, tuple((op_id, m) for op_id in ids)) for k, m, ids in lists)
    program = msgspec.structs.replace(captured.program, jobs=made)
    return captured, msgspec.structs.replace(program, events=events_of(program))


def _run_planned(captured: Any, program: Any, feeds: dict[str, np.ndarray], late: str) -> dict[str, np.ndarray]:
    """What the plan's outputs are with one piece of work delayed, behind a step on other data."""
    from interlace.bridge.lower import lower
    from interlace.bridge.targets import choose_device
    from testbed.lowering import register

    register()
    lowered = lower(captured, program, choose_device())
    for op in lowered.jobs[-1].program.global_block().ops:
        if op.name() == "builtin.shadow_output":
            op.operand_source(0).persistable = True  # so that it lies in the scope that we can read
    place, scope = core.Place(), core.Scope()
    place.set_place(PLACE)
    executor = core.StandaloneExecutor(place, lowered.plan, scope)

    def fed(sign: float) -> None:
        device.synchronize()
        for name, array in feeds.items():
            scope.var(name).get_tensor().set(sign * array, PLACE)

    fed(-1.0)
    with device.switched(record=1):  # as on the GPU place: of last readers alone
        slow(lambda: executor.run(list(feeds), False), late)
        fed(1.0)
        executor.run(list(feeds), False)
        device.synchronize()
    delays.off()
    return {name: np.array(scope.find_var(name).get_tensor()) for name in lowered.outputs}


def _with_and_without_events(
    made: Any, feeds: dict[str, np.ndarray], late: str, expected: dict[str, np.ndarray], at_the_ends: bool = True
) -> dict[str, Any]:
    """What comes out, and what the checker says, of a plan and of the same without events; those at the ends of the step may stay."""
    from interlace.scheduler.hazards import check
    from testbed.target import RULES

    captured, program = made
    found: dict[str, Any] = {}
    inner = {item for job in program.jobs for item in job.items}
    waits = [[item for item in event.waits if event.record not in inner or item not in inner] for event in program.events]
    kept = [msgspec.structs.replace(event, waits=tuple(rest)) for event, rest in zip(program.events, waits, strict=True) if rest]
    stay = () if at_the_ends else tuple(kept)
    for name, each in (("planned", program), ("no events", msgspec.structs.replace(program, events=stay))):
        outputs = _run_planned(captured, each, feeds, late)
        results = {wrong(outputs[key], expected[key]) for key in expected}
        found[name] = ["right" if results == {"right"} else "wrong", sorted({finding.kind for finding in check([each], RULES)})]
    return found


def _sequential(scene_: Callable[[], Any]) -> Any:
    """As Paddle's engine sets the executor for its plans."""
    paddle.set_flags({"FLAGS_new_executor_sequential_run": True, "FLAGS_pir_apply_inplace_pass": False})
    try:
        return scene_()
    finally:
        paddle.set_flags({"FLAGS_new_executor_sequential_run": False, "FLAGS_pir_apply_inplace_pass": True})


@scene
def the_batch_is_cut_late() -> dict[str, Any]:
    """A side stream reads an input, first thing; the job that cuts the batch is late on compute."""
    x = random(2 * N, N)

    def build() -> None:
        paddle._C_ops.set_persistable_value(on(paddle.tanh(data("x", N, N)), "side") * 2.0, "out")

    expected = {"out": 2 * np.tanh(x).reshape(2, N, N)}
    return _sequential(lambda: _with_and_without_events(_planned(build, 2, [("full", "tanh"), ("scale",)]), {"x": x}, "", expected))


@scene
def an_output_comes_late() -> dict[str, Any]:
    """An output is made and read on a side stream; the job that collects the outputs runs on compute."""
    x = random(2 * N, N)

    def build() -> None:
        made = on(paddle.tanh(data("x", N, N) * 2.0), "side")
        on(paddle.nn.functional.silu(made), "side")
        paddle._C_ops.set_persistable_value(made, "out")

    expected = {"out": np.tanh(2 * x).reshape(2, N, N)}
    return _sequential(lambda: _with_and_without_events(_planned(build, 2), {"x": x}, "tanh", expected))


@scene
def a_base_is_overwritten_under_its_view() -> dict[str, Any]:
    """Inside one job: a side stream reads a view, compute writes over its base."""
    x = random(N, N)

    def build() -> None:
        base = paddle.exp(data("x", N, N))
        view = paddle._C_ops.share_data(base)
        paddle._C_ops.set_persistable_value(on(paddle.tanh(view), "side"), "read")
        paddle._C_ops.set_persistable_value(paddle._C_ops.relu_(base), "over")

    expected = {"read": np.tanh(np.exp(x))}
    return _sequential(lambda: _with_and_without_events(_planned(build), {"x": x}, "tanh", expected, at_the_ends=False))


@scene
def memory_of_two_variables_is_freed() -> dict[str, Any]:
    """A side stream is the last to read a view, early, which is when the collector notes it; later it reads the base, and compute does."""
    x = random(N, N)

    def build() -> None:
        given = data("x", N, N)
        base = paddle.exp(given)
        on(paddle.nn.functional.silu(paddle._C_ops.share_data(base)), "side")
        late = on(paddle.tanh(base), "side")
        paddle._C_ops.set_persistable_value(base + base, "last")
        for k in range(4):
            paddle._C_ops.set_persistable_value(given + given, f"more{k}")
        paddle._C_ops.set_persistable_value(late, "out")

    expected = {"out": np.tanh(np.exp(x))}
    return _sequential(lambda: _with_and_without_events(_planned(build), {"x": x}, "tanh", expected, at_the_ends=False))


# -- rings, delays, switches -----------------------------------------------------------------------------------------


def _rings(*rings: int) -> Any:
    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()):
        for ring in rings:
            on(paddle._C_ops.all_reduce(data(f"x{ring}", 4), ring, 0), "shared")
    return main


@scene
def two_rings_one_stream() -> dict[str, Any]:
    programs._ring_of_stream.clear()
    refused = _error(lambda: programs.check_streams(_rings(31, 32), "forward"))
    programs._ring_of_stream.clear()
    os.environ[programs.SHARED_STREAM_VARIABLE] = "first"
    main = _rings(31, 32)
    programs.check_streams(main, "forward")
    del os.environ[programs.SHARED_STREAM_VARIABLE]
    programs._ring_of_stream.clear()
    rings = [op.int_attr("ring_id") for op in main.global_block().ops if op.has_attr("ring_id")]
    return {"refused": refused, "as the GPU place": rings}


@scene
def delays_repeat() -> dict[str, Any]:
    made, executor, x = _two_jobs(True)
    runs = []
    for seed in (5, 5, 6):
        delays.restart()
        delays.draw(seed, 500, 300)
        for _ in range(4):
            executor.run(["x"], False)
        device.synchronize()
        runs.append([list(each.site) for each in delays.taken()])
    found = {
        "same": runs[0] == runs[1],
        "other": runs[0] != runs[2],
        "some": len(runs[0]) > 0,
        "right": wrong(made.value("out"), 2 * np.tanh(x)),
    }
    delays.off()
    return found


@scene
def a_missing_event_shrinks_to_one_delay() -> list[str]:
    """Random delays make a program without its event fail; which one does?"""
    made, executor, x = _two_jobs(False)
    signs = [1.0]

    def fails(sites: Sequence[delays.Site]) -> bool:
        delays.restart()
        delays.only(sites)
        signs[0] = -signs[0]
        made.feed(x=signs[0] * x)
        delays.restart()
        executor.run(["x"], False)
        return wrong(made.value("out"), 2 * np.tanh(signs[0] * x)) != "right"

    delays.restart()
    delays.draw(0, 1000, 1)
    executor.run(["x"], False)
    device.synchronize()
    names = {each.site[:2]: each.name for each in delays.taken()}
    lengths = {"tanh": SLOW_US}
    sites = [delays.Site(each.site.stream, each.site.ordinal, lengths.get(each.name, SLOW_US // 10)) for each in delays.taken()]
    kept = delays.shrink(sites, fails)
    delays.off()
    return [names[site[:2]] for site in kept]


@scene
def switches_are_named() -> dict[str, Any]:
    return {"names": sorted(device.switch_meanings()), "unknown": _error(lambda: device.set_switches({"nosink": 1}))}


def main() -> None:
    paddle.enable_static()
    paddle.set_device(f"{device.NAME}:0")
    wanted = sys.argv[1:] or list(SCENES)
    results: dict[str, Any] = {}
    for name in wanted:
        device.set_switches(SAFE)
        delays.off()
        try:
            results[name] = SCENES[name]()
        except Exception:
            results[name] = {"error": traceback.format_exc()}
    print("RESULTS " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
