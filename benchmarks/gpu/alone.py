"""Single measurements on GPUs: operations, collectives, the executor's host time, and short kernels beside copies."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testbed.gpus import ROOT, find_libraries, machine, python_path

OPS_STEPS, OPS_WARM = 30, 5
TIMEOUT_S = 90.0


def time_all(out: Path, variant: str, gpus: int) -> None:
    """Run all measurements, each in a separate process that writes one file."""
    for function in ("time_ops", "time_host") if variant == "cuda" else ("time_host",):
        command = [sys.executable, "-c", f"import pathlib, benchmarks.gpu.alone as h; h.{function}(pathlib.Path({os.fspath(out)!r}))"]
        env = {**os.environ, "TESTBED_VARIANT": variant, "PYTHONPATH": python_path()}
        try:
            subprocess.run(command, env=env, cwd=ROOT, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            print(f"{function}: no end within {TIMEOUT_S:g} s", flush=True)
    time_collectives(out, variant, gpus)


def _runner(paddle: Any, device: Any, programs: dict[str, Any], feed: dict[str, Any]) -> Callable[[], object]:
    """Runs one job a program on the device, in a scope of its own that keeps what is fed."""
    core, place = paddle.base.core, paddle.CustomPlace(device.NAME, 0)
    core_place, scope = core.Place(), core.Scope()
    core_place.set_place(place)
    for name, array in feed.items():
        scope.var(name).get_tensor().set(array, place)
    jobs = [core.Job(name) for name in programs]
    for job in jobs:
        job.set_skip_gc_vars(set(feed))
    executor = core.StandaloneExecutor(core_place, core.Plan(jobs, programs), scope)
    return lambda: executor.run(list(feed), False)


# -- operations ------------------------------------------------------------------------------------------------------


def time_ops(out: Path) -> dict[str, Any]:
    """Device times of single bfloat16 operations at the sizes of a layer with hidden 4096 and sequence 2048, and host time per
    operation."""
    from testbed import device

    os.environ.update(find_libraries())
    device.load()
    import paddle

    paddle.enable_static()
    found: dict[str, Any] = {**machine(), "dtype": "bfloat16", "ops": {}}
    for name, build, flops, moved in _op_cases(paddle):
        try:
            found["ops"][name] = _time_op(paddle, device, build, flops, moved, name.split()[0])
        except Exception as error:  # one operation's failure is a result
            found["ops"][name] = {"failed": f"{type(error).__name__}: {error}"[:600]}
        print(f"op {name}: {found['ops'][name]}", flush=True)
        (out / "testbed_ops.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def _op_cases(paddle: Any) -> list[tuple[str, Any, float, float]]:
    f = paddle.nn.functional
    t, h, w = 2048, 4096, 2
    row = t * h * w

    def data(name: str, *shape: int) -> Any:
        return paddle.cast(paddle.static.data(name, list(shape), "float32"), "bfloat16")

    return [
        ("matmul 2048x4096x16384", lambda: paddle.matmul(data("x", t, h), data("y", h, 4 * h)), 2.0 * t * h * 4 * h, 0),
        ("matmul 8192x4096x16384", lambda: paddle.matmul(data("x", 4 * t, h), data("y", h, 4 * h)), 8.0 * t * h * 4 * h, 0),
        (
            "matmul heads 32x2048x128x2048",
            lambda: paddle.matmul(data("x", 32, t, 128), data("y", 32, t, 128), transpose_y=True),
            64.0 * t * t * 128,
            0,
        ),
        ("layer_norm 2048x4096", lambda: f.layer_norm(data("x", t, h), h), 0, 2 * row),
        ("softmax 32x2048x2048", lambda: f.softmax(data("x", 32, t, t)), 0, 2 * 32 * t * t * w),
        ("gelu 2048x16384", lambda: f.gelu(data("x", t, 4 * h), approximate=True), 0, 8 * row),
        ("add 2048x4096", lambda: data("x", t, h) + data("z", t, h), 0, 3 * row),
        ("add row 2048x4096", lambda: data("x", t, h) + data("b", h), 0, 2 * row),
        (
            "cross_entropy 2048x8192 float32",
            lambda: f.cross_entropy(paddle.static.data("l", [t, 8192], "float32"), _labels(paddle, t), reduction="none"),
            0,
            8 * t * 8192,
        ),
        ("silu 2048x11008", lambda: f.silu(data("x", t, 11008)), 0, 4 * t * 11008),
        ("multiply 2048x11008", lambda: data("x", t, 11008) * data("z", t, 11008), 0, 6 * t * 11008),
        ("cast 2048x16384 to float32", lambda: paddle.cast(data("x", t, 4 * h), "float32"), 0, 6 * t * 4 * h),
        *_attention_cases(paddle, data),
        ("transpose 2048x32x128", lambda: paddle.transpose(data("x", t, 32, 128), [1, 0, 2]), 0, 2 * row),
    ]


def _labels(paddle: Any, rows: int) -> Any:
    return paddle.full([rows, 1], 7, "int64")


def _attention_cases(paddle: Any, data: Any) -> list[tuple[str, Any, float, float]]:
    """Causal attention of one sequence, forward, and forward with backward; being causal, it counts half of the products' FLOPs."""
    found: list[tuple[str, Any, float, float]] = []
    for seq, heads in ((2048, 32), (2048, 16), (4096, 32)):
        shape, products = (1, seq, heads, 128), 2.0 * heads * seq * seq * 128

        def forward(shape: tuple[int, ...] = shape) -> Any:
            q, k, v = (data(name, *shape) for name in "qkv")
            return paddle._C_ops.flash_attn(q, k, v, None, None, 0.0, True, False, False, "")[0]

        def both(shape: tuple[int, ...] = shape) -> Any:
            q, k, v = (data(name, *shape) for name in "qkv")
            out, _, lse, seed = paddle._C_ops.flash_attn(q, k, v, None, None, 0.0, True, False, False, "")
            return paddle._C_ops.flash_attn_grad(q, k, v, out, lse, seed, None, data("g", *shape), 0.0, True)[0]

        found += [
            (f"attention {seq} heads {heads}", forward, products, 0),
            (f"attention_grad {seq} heads {heads}", both, 2.5 * products, 0),
        ]
    return found


def _time_op(paddle: Any, device: Any, build: Any, flops: float, moved: float, kernel: str) -> dict[str, float]:
    import numpy as np

    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()):
        out = build()
        paddle._C_ops.set_persistable_value(out, "kept")
    block = main.global_block()
    feed = {
        op.attrs()["name"]: np.random.default_rng(0).standard_normal(op.result(0).shape).astype("float32") * 0.02
        for op in block.ops
        if op.name() == "pd_op.data"
    }
    run = _runner(paddle, device, {"default": main}, feed)
    for _ in range(OPS_WARM):
        run()
    start = time.perf_counter()
    for _ in range(OPS_STEPS):
        run()
    host_us = (time.perf_counter() - start) / OPS_STEPS * 1e6
    with device.traced() as trace:
        for _ in range(OPS_STEPS):
            run()
    kernel = {"matmul": "gemm", "gelu": "gelu_tanh"}.get(kernel, kernel)
    times = sorted(each.end_us - each.begin_us for each in trace.intervals if each.name == kernel)
    if kernel == "cast":  # the operands' own casts come first
        times = sorted(each.end_us - each.begin_us for each in trace.intervals if each.name == kernel)[::2]
    median = statistics.median(times)
    found = {"median_us": round(median, 2), "min_us": round(times[0], 2), "host_us_a_run": round(host_us, 1)}
    if flops:
        found["tflops"] = round(flops / median / 1e6, 1)
    if moved:
        found["gb_per_s"] = round(moved / median / 1e3, 1)
    return found


# -- collectives -----------------------------------------------------------------------------------------------------

COLLECTIVE_MIB, COLLECTIVE_REPEATS, RING = (4, 16, 64, 256), 12, 91


def time_collectives(out: Path, variant: str, gpus: int) -> None:
    """Device time and bus bandwidth of every collective alone on 2, 4, ... GPUs, in bfloat16, with a process for each rank."""
    found: dict[str, Any] = {**machine(), "dtype": "bfloat16", "worlds": {}}
    for world in (each for each in (2, 4, 8) if each <= gpus):
        with tempfile.TemporaryDirectory() as folder:
            command = "import sys, benchmarks.gpu.alone as h; h.collective_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"
            ranks = []
            for rank in range(world):
                env = {
                    "NCCL_NVLS_ENABLE": "0",
                    **os.environ,
                    **find_libraries(),
                    "TESTBED_VARIANT": variant,
                    "PYTHONPATH": python_path(),
                    "CUDA_VISIBLE_DEVICES": ",".join(map(str, [rank, *(k for k in range(world) if k != rank)])),
                }
                ranks.append(subprocess.Popen([sys.executable, "-c", command, str(rank), str(world), folder], env=env, cwd=ROOT))
            deadline = time.monotonic() + TIMEOUT_S
            try:
                for each in ranks:
                    each.wait(max(deadline - time.monotonic(), 1.0))
            except subprocess.TimeoutExpired:
                print(f"collectives of {world}: no end within {TIMEOUT_S:g} s", flush=True)
            for each in ranks:
                each.kill()
            path = Path(folder) / "found.json"
            found["worlds"][str(world)] = json.loads(path.read_text()) if path.exists() else {"failed": "a rank gave nothing"}
        (out / "testbed_collectives.json").write_text(json.dumps(found, indent=1) + "\n")
        print(f"collectives of {world}: {found['worlds'][str(world)]}", flush=True)


def collective_rank(rank: int, world: int, folder: str) -> None:
    """One rank of `time_collectives`; the first rank writes its results."""
    from testbed import device
    from testbed.world import make_ring

    device.load()
    import paddle

    paddle.enable_static()
    make_ring(RING, rank, world, Path(folder) / "ring")
    calls = paddle._C_ops
    kinds: dict[str, tuple[Any, float]] = {  # how to make it, and bus bytes a byte of the whole buffer
        "all_reduce": (lambda x: calls.all_reduce(x, RING, 0), 2 * (world - 1) / world),
        "all_gather": (lambda x: calls.all_gather(x, RING, world), (world - 1) / world),
        "reduce_scatter": (lambda x: calls.reduce_scatter(x, RING, world), (world - 1) / world),
        "all_to_all": (lambda x: calls.all_to_all(x, RING), (world - 1) / world),
        "broadcast": (lambda x: calls.broadcast(x, RING, 0), 1.0),
        "reduce": (lambda x: calls.reduce(x, RING, 0, 0), 1.0),
    }
    found: dict[str, Any] = {}
    for size in COLLECTIVE_MIB if device.variant() == "cuda" else (1,):
        for name, (make, share) in kinds.items():
            elements = size * 2**20 // 2 // (world if name == "all_gather" else 1)
            times = _collective_us(paddle, device, name, make, elements)
            median = statistics.median(times)
            found[f"{name} {size} MiB"] = {
                "median_us": round(median, 2),
                "min_us": round(times[0], 2),
                "max_us": round(times[-1], 2),
                "bus_gb_per_s": round(size * 2**20 * share / median / 1e3, 1),
            }
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))


def _collective_us(paddle: Any, device: Any, name: str, make: Any, elements: int) -> list[float]:
    """Sorted device times of one collective that follows itself on a stream; the first, which waits for the other ranks, left out."""
    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()):
        x = paddle.full([elements], 1.0, "bfloat16")
        for _ in range(COLLECTIVE_REPEATS):
            make(x).get_defining_op().set_execution_stream("alone")
    run = _runner(paddle, device, {"default": main}, {})
    for _ in range(2):
        run()
    with device.traced() as trace:
        run()
    times = [each.end_us - each.begin_us for each in sorted(trace.intervals) if each.name == name]
    return sorted(times[1:])


def time_host(out: Path) -> dict[str, Any]:
    """The executor's host time per operation and per job, from the time to issue programs of tiny operations."""
    from testbed import device

    os.environ.update(find_libraries())
    device.load()
    import paddle

    paddle.enable_static()
    paddle.set_flags({"FLAGS_new_executor_sequential_run": True, "FLAGS_pir_apply_inplace_pass": False})
    found: dict[str, Any] = {**machine(), "runs": {}}
    for collector in ("fast", "event", "fast in one thread"):
        paddle.set_flags(
            {
                "FLAGS_fast_eager_deletion_mode": collector != "event",
                "FLAGS_enable_pir_in_executor_trace_run": collector.endswith("one thread"),
            }
        )
        for num_jobs, num_ops, streams in ((1, 50, 1), (1, 550, 1), (1, 550, 2), (21, 50, 1), (1, 1050, 1)):
            times = _issue_us(paddle, device, num_jobs, num_ops, streams)
            key = f"{collector} collection, {num_jobs} jobs of {num_ops} operations on {streams} streams"
            found["runs"][key] = {"median_us": statistics.median(times), "min_us": min(times), "max_us": max(times)}
        start = f"{collector} collection, "
        runs = {name.removeprefix(start): each["median_us"] for name, each in found["runs"].items() if name.startswith(start)}
        one, many = runs["1 jobs of 50 operations on 1 streams"], runs["1 jobs of 550 operations on 1 streams"]
        an_op, jobs = (many - one) / 500, runs["21 jobs of 50 operations on 1 streams"]
        found[collector] = {
            "an_op_us": an_op,
            "a_job_us": (jobs - one - 1000 * an_op) / 20,
            "an_op_us_two_streams": (runs["1 jobs of 550 operations on 2 streams"] - one) / 500,
        }
        print(f"host, {collector} collection: {found[collector]}", flush=True)
    found["a_kernel_us_beside_copies"] = _kernel_us_beside_copies(paddle, device)
    print(f"a kernel beside copies: {found['a_kernel_us_beside_copies']}", flush=True)
    (out / "testbed_host.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def _issue_us(paddle: Any, device: Any, num_jobs: int, num_ops: int, streams: int) -> list[float]:
    programs = {}
    for number in range(num_jobs):
        main = paddle.static.Program()
        with paddle.static.program_guard(main, paddle.static.Program()):
            x = paddle.static.data("x", [16], "float32")
            for k in range(num_ops):
                x = paddle.tanh(x)
                if streams > 1 and k % 2:
                    x.get_defining_op().set_execution_stream("side")
            paddle._C_ops.set_persistable_value(x, f"kept{number}")
        programs[f"job{number}"] = main
    import numpy as np

    run = _runner(paddle, device, programs, {"x": np.ones(16, "float32")})
    times = []
    for _ in range(15):
        device.synchronize()
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    device.synchronize()
    return times[5:]


def _kernel_us_beside_copies(paddle: Any, device: Any) -> dict[str, dict[str, float]]:
    """Device time of a short kernel in a row of them, all issued before the first one starts, beside copies in each direction.

    Traced kernels have an event before and after each, as in a measured trace.
    """
    few, many, rounds, hold_us = (100, 1100, 9, 40000) if device.variant() == "cuda" else (2, 12, 3, 1000)
    found = {}
    for name, ways in (("none", ""), ("out", "o"), ("in", "i"), ("both", "oi")):
        runs = [_row_of_kernels(paddle, device, count, ways, 1 << (24 if hold_us > 1000 else 12)) for count in (few, many)]
        for how, around in (("", contextlib.nullcontext), (", traced", device.traced)):
            times = []
            for _ in range(rounds):
                short, long = (_held_run_us(run, device, hold_us, around) for run in runs)
                times.append((long - short) / (many - few))
            spread = {"median_us": statistics.median(times), "min_us": min(times), "max_us": max(times)}
            found[name + how] = {key: round(value, 3) for key, value in spread.items()}
    return found


def _held_run_us(run: Any, device: Any, hold_us: int, around: Any) -> float:
    """Host time of a run that ends with computation, while the first piece of work is delayed."""
    from testbed import delays

    delays.hold(run, hold_us)
    with around():
        start = time.perf_counter()
        run()
        end = time.perf_counter()
    device.synchronize()
    delays.off()
    return (end - start) * 1e6


def _row_of_kernels(paddle: Any, device: Any, count: int, ways: str, elements: int) -> Any:
    """Runs `count` kernels and waits for them; ten copies of `elements` float32 a direction are under way beside them."""
    import numpy as np

    calls = paddle._C_ops
    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()):
        big = paddle.scale(paddle.static.data("big", [elements], "float32"), 2.0)
        x = calls.slice(big, [0], [0], [elements // 16], [1], [])
        pinned = calls.memcpy_d2h(big, 1)
        pinned.get_defining_op().set_execution_stream("out")
        for way in ways * 10:
            copy = calls.memcpy_d2h(big, 1) if way == "o" else calls.memcpy_h2d(pinned, 1)
            copy.get_defining_op().set_execution_stream("out" if way == "o" else "in")
        for _ in range(count):
            x = paddle.tanh(x)
        calls.sync_calc_stream_(x)
        calls.set_persistable_value(x, "kept")
    return _runner(paddle, device, {"default": main}, {"big": np.ones(elements, "float32")})
