"""Power, clock and energy of kernels on one GPU, and of collectives on several, with PyTorch, CuPy and NVML; no GPU setting is changed.

    python -m benchmarks.gpu.power OUT.json        (all GPUs at the same time; about four minutes; needs no Paddle)

Clocks are measured on the device: a thread counts its cycles during 20 us of the global timer. Energy is NVML's counter, read when it
changes, so that a window's mean power is exact. Gaps are made by a thread that sleeps on the device (`wait`), and have exact lengths. Data
are random, as products of zeros take less power.

Parts: `windows` (each kind repeated for a second, without gaps, and with gaps that keep the GPU below its power limit), `follow` (times of
kernels at the clock that earlier load leaves), `mixes` (energy at lower clocks: products with different gaps, and each kind alternating
with a growing number of products), `steps` (clock and power after load begins and ends), `waves` (periodic load, by period), `ranks`
(collectives, and collectives and receives that wait for a peer), `beside` (kernels and collectives at the same time). If parts are named
after OUT.json, only these are measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import cupy
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch.nn.functional as F

from benchmarks.gpu.nvml import Sampler
from benchmarks.gpu.single import A, Step, adamw, attention_back, drawn, empty, meta, sets
from interlace.bridge.nvml import gpu_uuid

WINDOW_S, SETTLE_S = 1.4, 0.4
CHUNK_MS = 2.0
DEPTH = 4
"""Number of chunks by which the host is ahead of the device."""
BUSY = (1.0, 0.75, 0.5)
SOURCE = r"""
extern "C" __global__ void clock_rate(float* out) {
    unsigned long long t0, t1, tick; long long c0, c1;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(tick));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t0)); } while (t0 == tick);
    c0 = clock64();
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(tick)); } while (tick - t0 < 20000);
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t1)); } while (t1 == tick);
    c1 = clock64();
    *out = 1e3f * (float)(c1 - c0) / (float)(t1 - t0);
}
extern "C" __global__ void sleep_ns(unsigned long long ns) {
    unsigned long long t0, t1;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t0));
    do { __nanosleep(1000); asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t1)); } while (t1 - t0 < ns);
}
extern "C" __global__ void spin_ns(unsigned long long ns, volatile int* flag) {
    unsigned long long t0, t1;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t0));
    do { if (*flag) break; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t1)); } while (t1 - t0 < ns);
}
"""


class Bench:
    """One GPU with its sampler, probes and chunks."""

    def __init__(self, index: int) -> None:
        torch.cuda.set_device(index)
        cupy.cuda.Device(index).use()
        self.sampler = Sampler(gpu_uuid(index))
        module = cupy.RawModule(code=SOURCE)
        self._rate, self._sleep, self._spin = (module.get_function(name) for name in ("clock_rate", "sleep_ns", "spin_ns"))
        self.flag = cupy.zeros(1, dtype=cupy.int32)
        self.stream = torch.cuda.Stream()
        self.outer = cupy.cuda.ExternalStream(self.stream.cuda_stream)
        self.clocks = cupy.zeros(1 << 16, dtype=cupy.float32)
        self.used = 0

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        with torch.cuda.stream(self.stream), self.outer:
            yield

    def probe(self) -> int:
        """Queue a reading of the clock; returns its index in `clocks`."""
        at = self.used % len(self.clocks)
        self.used += 1
        self._rate((1,), (1,), (self.clocks[at : at + 1],))
        return at

    def sleep(self, ns: int) -> None:
        self._sleep((1,), (1,), (np.uint64(ns),))

    def spin(self, ns: int, blocks: int) -> None:
        self._spin((blocks,), (512,), (np.uint64(ns), self.flag))

    def read(self, at: Sequence[int]) -> list[float]:
        values = self.clocks.get()
        return [float(values[each]) for each in at]

    def chunk(self, steps: Sequence[Step], ms: float = CHUNK_MS) -> tuple[Callable[[], None], int, float]:
        """A CUDA graph that repeats the steps for about `ms`: its replay, its number of steps, and the microseconds of one step."""

        def each() -> None:
            for step in steps:
                step()

        with torch.cuda.stream(self.stream):
            each()
            each()
            start, stop = timed(each)
        torch.cuda.synchronize()
        one = max(1e-3, start.elapsed_time(stop) / len(steps))
        count = max(1, min(2000, round(ms / one)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for k in range(count):
                steps[k % len(steps)]()

        def replay() -> None:
            assert steps, "the graph's buffers live as long as its replay"
            with torch.cuda.stream(self.stream):
                graph.replay()

        replay()
        torch.cuda.synchronize()
        return replay, count, one * 1e3

    def repeat(self, run: Callable[[], list[Any]], turns: Iterable[object], gap_ns: int = 0) -> tuple[list[list[Any]], list[int]]:
        """Run chunks, each followed by a reading of the clock and a gap; returns the events of each, and the index of its reading."""
        marks: list[list[Any]] = []
        probes: list[int] = []
        with self.on_stream():
            for _ in turns:
                if len(marks) >= DEPTH:
                    marks[-DEPTH][-1].synchronize()
                marks.append(run())
                probes.append(self.probe())
                if gap_ns:
                    self.sleep(gap_ns)
        torch.cuda.synchronize()
        return marks, probes

    def window(self, run: Callable[[], None], gap_ns: int = 0) -> dict[str, Any]:
        """Repeat chunks with gaps; returns durations of chunks in ms, clocks and power after the GPU has settled."""
        begin = time.perf_counter()
        since, settled = begin + SETTLE_S, 0

        def turns() -> Iterator[None]:
            nonlocal settled
            while (now := time.perf_counter()) - begin < WINDOW_S:
                settled += now < since
                yield

        marks, probes = self.repeat(partial(timed, run), turns(), gap_ns)
        end, marks = time.perf_counter(), marks[settled:]
        return {
            **_spread("chunk_ms", (start.elapsed_time(stop) for start, stop in marks)),
            "every_ms": _every(marks),
            **_spread("mhz", self.read(probes[settled:])),
            "chunks": len(marks),
            **self.sampler.between(since, end),
        }


def timed(run: Callable[[], object]) -> list[Any]:
    """Events around what `run` queues on the current stream."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    return [start, stop]


def _spread(name: str, found: Iterable[float]) -> dict[str, Any]:
    """Median, and 10th and 90th percentile."""
    ordered = sorted(found)
    ends = [round(ordered[len(ordered) * tenths // 10], 4) for tenths in (1, 9)]
    return {name: round(median(ordered), 4), f"{name}_p10_p90": ends}


def _every(marks: Sequence[Sequence[Any]]) -> float:
    """Mean milliseconds from the begin of a chunk to that of the next."""
    return round(marks[0][0].elapsed_time(marks[-1][0]) / max(1, len(marks) - 1), 4)


# -- kinds ------------------------------------------------------------------------------------------------------------


def _product(m: int, n: int, k: int, dtype: str = "bfloat16") -> list[Step]:
    return [partial(torch.mm, drawn(m, k, dtype=dtype), drawn(k, n, dtype=dtype), out=empty(m, n, dtype=dtype)) for _ in range(2)]


def _attention(tokens: int, heads: int, back: bool) -> list[Step]:
    q, k, v = (drawn(1, heads, tokens, 128) for _ in range(3))
    return [attention_back(q, k, v) if back else partial(A._scaled_dot_product_flash_attention, q, k, v, 0.0, True)]


def _by_element(n: int, kernel: Callable[..., object]) -> list[Step]:
    bufs = [(drawn(n), drawn(n), empty(n)) for _ in sets(6 * n)]
    return [partial(kernel, *each) for each in bufs]


def _cast(n: int) -> list[Step]:
    return [partial(empty(n, dtype="float32").copy_, drawn(n)) for _ in sets(6 * n)]


def _norm(rows: int, cols: int, back: bool) -> list[Step]:
    g, w = drawn(cols), drawn(cols)
    steps: list[Step] = []
    for _ in sets(6 * rows * cols):
        x, y = drawn(rows, cols), drawn(rows, cols)
        _, mean, rstd = A.native_layer_norm(x, [cols], g, w, 1e-5)
        steps.append(
            partial(A.native_layer_norm_backward, y, x, [cols], mean, rstd, g, w, [True] * 3)
            if back
            else partial(A.native_layer_norm, x, [cols], g, w, 1e-5)
        )
    return steps


def _copy(size: int, way: str) -> list[Step]:
    device, host = torch.empty(size, dtype=torch.uint8, device="cuda"), torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return [partial(host.copy_, device, non_blocking=True) if way == "d2h" else partial(device.copy_, host, non_blocking=True)]


def kinds() -> dict[str, Callable[[], list[Step]]]:
    """Kind and sizes -> its steps."""
    found: dict[str, Callable[[], list[Step]]] = {
        f"gemm {m}x{n}x{k}": partial(_product, m, n, k)
        for m, n, k in (
            (8192, 8192, 8192),
            (8192, 16384, 4096),
            (4096, 4096, 4096),
            (2048, 12288, 4096),
            (2048, 4096, 4096),
            (4096, 4096, 8192),
            (2048, 2048, 4096),
            (2048, 1024, 1024),
            (512, 4096, 4096),
        )
    }
    found["gemm float32 4096x4096x4096"] = partial(_product, 4096, 4096, 4096, "float32")
    for tokens in (2048, 4096):
        found[f"attention 32x{tokens}x128"] = partial(_attention, tokens, 32, False)
        found[f"attention_grad 32x{tokens}x128"] = partial(_attention, tokens, 32, True)
    n = 1 << 26
    found |= {
        "add 67M": partial(_by_element, n, lambda x, y, o: torch.add(x, y, out=o)),
        "add 8M": partial(_by_element, 1 << 23, lambda x, y, o: torch.add(x, y, out=o)),
        "gelu 67M": partial(_by_element, n, lambda x, y, o: F.gelu(x, approximate="tanh")),
        "gelu_grad 67M": partial(_by_element, n, lambda x, y, o: A.gelu_backward(x, y, approximate="tanh")),
        "copy 67M": partial(_by_element, n, lambda x, y, o: o.copy_(x)),
        "cast 67M": partial(_cast, n),
        "layer_norm 8192x4096": partial(_norm, 8192, 4096, False),
        "layer_norm_grad 8192x4096": partial(_norm, 8192, 4096, True),
        "softmax 16384x4096": lambda: [partial(torch.softmax, drawn(16384, 4096), -1)],
        "adamw 67M": lambda: [adamw(n)],
        "shortest": lambda: [partial(torch.zeros(32, device="cuda").add_, 1.0)],
        "d2h 64M": partial(_copy, 1 << 26, "d2h"),
        "h2d 64M": partial(_copy, 1 << 26, "h2d"),
    }
    return found


FOLLOWED = (
    "gemm 8192x8192x8192",
    "gemm 4096x4096x4096",
    "gemm 2048x4096x4096",
    "gemm 2048x1024x1024",
    "gemm float32 4096x4096x4096",
    "attention 32x2048x128",
    "attention_grad 32x2048x128",
    "attention 32x4096x128",
    "attention_grad 32x4096x128",
    "add 67M",
    "add 8M",
    "gelu 67M",
    "cast 67M",
    "layer_norm 8192x4096",
    "layer_norm_grad 8192x4096",
    "softmax 16384x4096",
    "shortest",
    "d2h 64M",
)
"""Kinds whose time is also measured at other clocks."""
GAPPED = (
    "gemm 8192x8192x8192",
    "gemm 4096x4096x4096",
    "gemm 2048x4096x4096",
    "attention 32x4096x128",
    "attention_grad 32x4096x128",
    "add 67M",
)
"""Kinds that are also repeated with gaps."""


MIXED = (
    "attention 32x4096x128",
    "attention_grad 32x4096x128",
    "add 67M",
    "cast 67M",
    "gelu_grad 67M",
    "layer_norm_grad 8192x4096",
    "softmax 16384x4096",
    "adamw 67M",
)
"""Kinds that are repeated alternating with products."""
MIXES = (0, 1, 2, 4)
"""Number of chunks of products, of half the length, per chunk of the kind."""
PRODUCT, PRODUCTS = "gemm 8192x8192x8192", ("gemm 8192x8192x8192", "gemm 4096x4096x4096", "gemm 2048x4096x4096")
PRODUCTS_BUSY = (1.0, 0.92, 0.85, 0.78, 0.7, 0.6)


# -- one GPU ------------------------------------------------------------------------------------------------------------


def idle_windows(bench: Bench) -> list[dict[str, Any]]:
    """Windows with nothing queued, with a sleeping thread, and with blocks that wait for a flag, as collectives wait for their peers."""
    begin = time.perf_counter()
    time.sleep(WINDOW_S)
    found: list[dict[str, Any]] = [{"kind": "idle", "busy": 0.0, **bench.sampler.between(begin + SETTLE_S, time.perf_counter())}]
    found.append({"kind": "wait 1 thread", "busy": 1.0, **bench.window(lambda: bench.sleep(2_000_000))})
    for blocks in (16, 32, 132):
        found.append({"kind": f"spin {blocks} blocks", "busy": 1.0, **bench.window(lambda blocks=blocks: bench.spin(2_000_000, blocks))})
    return found


def windows(bench: Bench) -> list[dict[str, Any]]:
    """Windows of each kind, without gaps and, for some kinds, with gaps."""
    found = []
    for kind, make in kinds().items():
        steps = make()
        run, count, one = bench.chunk(steps)
        for busy in BUSY if kind in GAPPED else BUSY[:1]:
            gap = 0 if busy == 1.0 else round(CHUNK_MS * 1e6 * (1 - busy) / busy)
            row = bench.window(run, gap)
            row |= {"us": round(row["chunk_ms"] / count * 1e3, 3), "first_us": round(one, 3)}
            if row["watts"]:
                row["millijoules"] = round(row["watts"] * row["every_ms"] / count, 4)
            found.append({"kind": kind, "busy": busy, "count": count, **row})
            print(found[-1], flush=True)
        del run, steps
        torch.cuda.empty_cache()
    return found


def follow(bench: Bench) -> list[dict[str, Any]]:
    """Median time of each kind at the clock that earlier products leave, by the share of 10 ms that the products take."""
    heavy, _, _ = bench.chunk(_product(8192, 8192, 8192), 1.0)
    found = []
    for kind, make in kinds().items():
        if kind not in FOLLOWED:
            continue
        steps = make()
        run, count, _ = bench.chunk(steps, 0.4)
        for load in (0, 3, 5, 7, 9):
            marks = []
            with bench.on_stream():
                for turn in range(70):
                    for _ in range(load):
                        heavy()
                    bench.sleep(max(20_000, (9 - load) * 1_500_000))
                    marks.append((bench.probe(), *timed(run), bench.probe()))
                    if turn >= DEPTH:
                        marks[-DEPTH][2].synchronize()
            torch.cuda.synchronize()
            marks = marks[30:]
            clocks = [
                sum(pair) / 2 for pair in zip(bench.read([each[0] for each in marks]), bench.read([each[3] for each in marks]), strict=True)
            ]
            times = _spread("us", (each[1].elapsed_time(each[2]) / count * 1e3 for each in marks))
            found.append({"kind": kind, "load": load, "mhz": round(median(clocks), 1), **times})
        print(found[-5:], flush=True)
        del run, steps
        torch.cuda.empty_cache()
    return found


def mixes(bench: Bench) -> list[dict[str, Any]]:
    """Energy at clocks below the highest: products with growing gaps, and chunks of each kind alternating with a growing number of
    products.

    A row has the time between two chunks and the mean power; the products' share of a mix is known from their own rows.
    """
    found = []
    for kind in PRODUCTS:
        run, count, _ = bench.chunk(kinds()[kind]())
        for busy in PRODUCTS_BUSY:
            row = bench.window(run, round(CHUNK_MS * 1e6 * (1 - busy) / busy))
            found.append({"kind": kind, "count": count, "products": 0, "product_count": 0, "busy": busy, **row})
            print(found[-1], flush=True)
    heavy, each, _ = bench.chunk(kinds()[PRODUCT](), CHUNK_MS / 2)
    for kind in MIXED:
        steps = kinds()[kind]()
        run, count, _ = bench.chunk(steps)
        for products in MIXES:

            def both(run: Step = run, products: int = products) -> None:
                run()
                for _ in range(products):
                    heavy()

            row = bench.window(both)
            found.append({"kind": kind, "count": count, "products": products, "product_count": each * products, "busy": 1.0, **row})
            print(found[-1], flush=True)
        del run, steps, both
        torch.cuda.empty_cache()
    return found


def steps_of_load(bench: Bench) -> list[dict[str, Any]]:
    """Clock after load begins, from idle, and after it ends: milliseconds, MHz, and microseconds of each product."""
    found = []
    for kind in ("gemm 8192x8192x8192", "gemm 2048x4096x4096", "attention_grad 32x4096x128"):
        run, count, _ = bench.chunk(kinds()[kind](), 1.0)
        time.sleep(1.5)
        marks = []
        zero = torch.cuda.Event(enable_timing=True)
        begin = time.perf_counter()
        with bench.on_stream():
            zero.record()
            while time.perf_counter() - begin < 2.0:
                marks.append((*timed(run), bench.probe()))
                if len(marks) > DEPTH:
                    marks[-DEPTH][1].synchronize()
            ends = torch.cuda.Event(enable_timing=True)
            ends.record()
            after = []
            for _ in range(800):
                bench.sleep(1_000_000)
                at = torch.cuda.Event(enable_timing=True)
                at.record()
                after.append((at, bench.probe()))
        torch.cuda.synchronize()
        end = time.perf_counter()
        up = [
            [round(zero.elapsed_time(start), 2), round(mhz), round(start.elapsed_time(stop) / count * 1e3, 2)]
            for (start, stop, _), mhz in zip(marks, bench.read([each[2] for each in marks]), strict=True)
        ]
        down = [
            [round(ends.elapsed_time(at), 2), round(mhz)]
            for (at, _), mhz in zip(after, bench.read([each[1] for each in after]), strict=True)
        ]
        power = [[round(at - begin, 3), watts] for at, watts, *_ in bench.sampler.rows if begin - 0.2 <= at <= end]
        energy = [[round(at - begin, 4), mj - bench.sampler.energy[0][1]] for at, mj in bench.sampler.energy if begin - 0.2 <= at <= end]
        found.append({"kind": kind, "up": _thinned(up), "down": _thinned(down), "nvml_watts": power[::3], "millijoules": energy})
        print(kind, up[:3], up[-1], down[:2], down[-1], flush=True)
    return found


def _thinned(rows: list[list[float]]) -> list[list[float]]:
    """About three hundred rows: the first fifty, then fewer and fewer."""
    kept, at = rows[:50], 50.0
    while at < len(rows):
        kept.append(rows[int(at)])
        at *= 1.012
        at = max(at, int(at) + 1) if at < 90 else at
    return kept


def waves(bench: Bench) -> list[dict[str, Any]]:
    """Products for half of each period: the clock at the begin and end of the load, and mean power."""
    found = []
    for kind in ("gemm 8192x8192x8192", "gemm 2048x4096x4096"):
        run, _, one = bench.chunk(kinds()[kind](), 0.5)
        for period_ms in (2, 6, 20, 60, 200, 600):
            times = max(1, round(period_ms / 2 / max(0.5, one / 1e3)))
            first, last, begin = [], [], time.perf_counter()
            seconds = max(1.2, 5 * period_ms / 1e3)
            stops: list[Any] = []
            with bench.on_stream():
                while time.perf_counter() - begin < seconds:
                    first.append(bench.probe())
                    for _ in range(times):
                        run()
                    last.append(bench.probe())
                    bench.sleep(period_ms * 500_000)
                    stops.append(torch.cuda.Event())
                    stops[-1].record()
                    if len(stops) > 2:
                        stops[-3].synchronize()
            torch.cuda.synchronize()
            end = time.perf_counter()
            skip = len(first) // 3
            found.append(
                {
                    "kind": kind,
                    "period_ms": period_ms,
                    "mhz_first": round(median(bench.read(first[skip:])), 1),
                    "mhz_last": round(median(bench.read(last[skip:])), 1),
                    **bench.sampler.between(begin + SETTLE_S, end),
                }
            )
            print(found[-1], flush=True)
    return found


# -- all GPUs -----------------------------------------------------------------------------------------------------------


def collectives(bench: Bench, rank: int, world: int) -> list[dict[str, Any]]:
    """Repeated collectives of all GPUs, alone and beside products, and calls that wait a second for their peer."""
    found = []
    big = torch.ones(1 << 26, device="cuda", dtype=torch.bfloat16)
    part = torch.ones((1 << 26) // world, device="cuda", dtype=torch.bfloat16)
    product = _product(8192, 8192, 8192)[0]

    def exchange() -> None:
        ops = [dist.P2POp(dist.isend if rank % 2 == 0 else dist.irecv, big[: 1 << 24], rank ^ 1)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    calls: dict[str, Callable[[], object]] = {
        "all_reduce 128M": lambda: dist.all_reduce(big),
        "all_reduce 16M": lambda: dist.all_reduce(big[: 1 << 23]),
        "all_gather 128M": lambda: dist.all_gather_into_tensor(big, part),
        "reduce_scatter 128M": lambda: dist.reduce_scatter_tensor(part, big),
        "send/recv 32M": exchange,
        "products on all GPUs": product,
    }
    for name, call in calls.items():
        with torch.cuda.stream(bench.stream):
            for _ in range(4):
                call()
        torch.cuda.synchronize()
        count = 40 if "16M" in name or "32M" in name else 8

        def chunk(call: Step = call, count: int = count) -> None:
            for _ in range(count):
                call()

        dist.barrier()
        torch.cuda.synchronize()
        row = _fixed(bench, chunk, 250 if "128M" in name else 400 if "6M" in name else 150, count)
        found.append({"kind": name, "rank": rank, **row})
    for name in ("all_reduce waits", "recv waits", "all_reduce waits beside products"):
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        if rank == 0:
            with torch.cuda.stream(bench.stream):
                work = dist.irecv(big, 1) if name == "recv waits" else dist.all_reduce(big, async_op=True)
            side = torch.cuda.Stream()
            while time.perf_counter() - begin < 1.5:
                if "beside" in name:
                    with torch.cuda.stream(side):
                        product()
                    side.synchronize()
                else:
                    time.sleep(0.01)
            reading = bench.sampler.between(begin + SETTLE_S, time.perf_counter())
            work.wait()
        else:
            time.sleep(1.7)
            reading = bench.sampler.between(begin + SETTLE_S, time.perf_counter())
            if rank == 1 or name != "recv waits":
                (dist.send(big, 0) if name == "recv waits" else dist.all_reduce(big))
        torch.cuda.synchronize()
        found.append({"kind": name, "rank": rank, **reading})
    return found


BESIDE = {
    "gemm 4096x4096x4096": 1.6,
    "gemm 2048x12288x4096": 1.6,
    "attention_grad 32x4096x128": 1.0,
    "add 67M": 1.0,
    "add 8M": 1.0,
    "cast 67M": 1.0,
    "gelu_grad 67M": 1.2,
    "layer_norm_grad 8192x4096": 1.0,
}
"""Kind measured beside collectives -> the gap after a chunk relative to its time, which keeps the GPU below its power limit."""
BESIDE_MIB = (16, 64)


def beside(bench: Bench, rank: int, world: int) -> list[dict[str, Any]]:
    """Chunks of kernels, of all_reduces, and of both at the same time on separate streams, with gaps; on all GPUs at once.

    A row has the time of a chunk on each stream, the time between chunks, and mean power, so that the energy of both at once can be
    compared with that of each alone.
    """
    big, side, found = torch.ones(1 << 26, device="cuda", dtype=torch.bfloat16), torch.cuda.Stream(), []
    counts = {}
    for mib in BESIDE_MIB:
        part = big[: mib << 19]
        for _ in range(3):
            dist.all_reduce(part)
        dist.barrier()
        start, stop = timed(lambda part=part: [dist.all_reduce(part) for _ in range(20)])
        torch.cuda.synchronize()
        one = torch.tensor([start.elapsed_time(stop) / 20], device="cuda")
        dist.all_reduce(one, op=dist.ReduceOp.MAX)
        counts[mib] = max(1, round(CHUNK_MS / float(one)))
    for name, gap in {"": 1.0, **BESIDE}.items():
        steps = kinds()[name]() if name else []
        run, count, _ = bench.chunk(steps) if name else (None, 0, 0.0)
        for mib in (0, *BESIDE_MIB) if name else BESIDE_MIB:
            torch.cuda.synchronize()
            dist.barrier()
            row = _both(bench, side, run, big[: mib << 19], counts.get(mib, 0), round(gap * CHUNK_MS * 1e6))
            found.append({"kind": name, "count": count, "all_reduce_mib": mib, "all_reduces": counts.get(mib, 0), "rank": rank, **row})
            if rank == 0:
                print(found[-1], flush=True)
        del run, steps
        torch.cuda.empty_cache()
    return found


def _both(bench: Bench, side: Any, run: Step | None, part: Any, count: int, gap_ns: int) -> dict[str, Any]:
    """Chunks of `run` and of `count` all_reduces of `part` that begin together, with a gap after the one that ends last."""

    def both() -> list[Any]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        events[0].record()
        side.wait_stream(bench.stream)
        if run:
            run()
        events[1].record()
        with torch.cuda.stream(side):
            for _ in range(count):
                dist.all_reduce(part)
            events[2].record()
        bench.stream.wait_stream(side)
        return events

    marks, clocks, power = _later(bench, both, round(WINDOW_S / (gap_ns * 1e-9 + 1.4e-3 * CHUNK_MS)), gap_ns)
    return {
        **_spread("kernels_ms", (each[0].elapsed_time(each[1]) for each in marks)),
        **_spread("all_reduces_ms", (each[0].elapsed_time(each[2]) for each in marks)),
        "every_ms": _every(marks),
        **_spread("mhz", clocks),
        **power,
    }


def _fixed(bench: Bench, run: Callable[[], None], chunks: int, count: int) -> dict[str, Any]:
    """Like `Bench.window`, with the same number of chunks on all ranks."""
    marks, clocks, power = _later(bench, partial(timed, run), chunks)
    return {
        **_spread("us", (start.elapsed_time(stop) / count * 1e3 for start, stop in marks)),
        "mhz": round(median(clocks), 1),
        **power,
    }


def _later(bench: Bench, run: Callable[[], list[Any]], chunks: int, gap_ns: int = 0) -> tuple[list[list[Any]], list[float], dict[str, Any]]:
    """Repeat `chunks` chunks; returns events, clocks and power of the last two thirds."""
    begin = time.perf_counter()
    marks, probes = bench.repeat(run, range(chunks), gap_ns)
    end, skip = time.perf_counter(), chunks // 3
    return marks[skip:], bench.read(probes[skip:]), bench.sampler.between(begin + (end - begin) / 3, end)


def _is_asked(part: str) -> bool:
    """Whether a part is to be measured: all are if none is named."""
    return len(sys.argv) < 3 or part in sys.argv[2:]


ALONE: dict[str, Callable[[Bench], Any]] = {
    "idle": idle_windows,
    "windows": windows,
    "steps": steps_of_load,
    "waves": waves,
    "follow": follow,
    "mixes": mixes,
}
TOGETHER: dict[str, Callable[[Bench, int, int], Any]] = {"ranks": collectives, "beside": beside}
"""Parts of each GPU, and of all GPUs together."""


def one_gpu(index: int, out: str) -> None:
    """Measure all parts on one GPU; each is stored when it ends, with its error if it fails."""
    bench = Bench(index)
    torch.manual_seed(index)
    found: dict[str, Any] = {"gpu": index, "meta": meta() | {"gpu": torch.cuda.get_device_name(index)}, "limits": bench.sampler.limits()}
    for name, part in ALONE.items():
        if not _is_asked(name):
            continue
        began = time.time()
        try:
            found[name] = part(bench)
        except Exception as error:
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:800]}
            print(name, found[name], flush=True)
        print(f"GPU {index}: {name}, {time.time() - began:.0f} s", flush=True)
        Path(out).write_text(json.dumps(found))


def one_rank(rank: int, world: int, part: str, out: str) -> None:
    """One rank of a part that uses all GPUs together."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    bench = Bench(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=torch.device("cuda", rank))
    Path(out).write_text(json.dumps(TOGETHER[part](bench, rank, world)))
    dist.destroy_process_group()


def main() -> None:
    """Measure all GPUs, first independently, then together, and write one file."""
    target, count = Path(sys.argv[1]), torch.cuda.device_count()
    context = processes.get_context("spawn")
    found: dict[str, Any] = {"date": time.strftime("%Y-%m-%d %H:%M")}
    for name in ("gpus", *TOGETHER):
        if not (any(map(_is_asked, ALONE)) if name == "gpus" else count > 1 and _is_asked(name)):
            continue
        outs = [f"{target}.{name}.{k}" for k in range(count)]
        started = [
            context.Process(target=one_gpu, args=(k, out))
            if name == "gpus"
            else context.Process(target=one_rank, args=(k, count, name, out))
            for k, out in enumerate(outs)
        ]
        for each in started:
            each.start()
        for each in started:
            each.join(timeout=330 if name == "gpus" else 120)
            if each.is_alive():
                each.kill()
        found[name] = [json.loads(Path(out).read_text()) if Path(out).exists() else {"failed": "no result"} for out in outs]
        target.write_text(json.dumps(found) + "\n")
        for out in outs:
            Path(out).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
