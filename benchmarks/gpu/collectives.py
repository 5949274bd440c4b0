"""Collectives and exchanges over all GPUs of a host, from 1 KiB to 512 MiB, by NCCL, in tensors of PyTorch.

    python -m benchmarks.gpu.collectives OUT.json        (two GPUs or more; a minute; nothing of Interlace)

Every figure is the median of `REPLAYS` replays of a CUDA graph that holds the call many times, divided by their number, so that the host's
launches do not count; of the ranks' medians the largest. `size_bytes` is the full tensor of one rank: operand of all_reduce,
reduce_scatter, all_to_all and send, result of all_gather; `send` goes one way, `send_recv` both at once. A second round, in the opposite
order, tells the spread.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from benchmarks.gpu.single import meta

SIZES = tuple(1 << power for power in range(10, 30))
REPLAYS, TARGET_MS, ROUNDS = 9, 3.0, 2
BFLOAT16, SUM = 9, 0
"""As NCCL counts types and operations."""
Row = dict[str, Any]


class _Id(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_byte * 128),)


class Nccl:
    """NCCL itself, on the stream that it is given: torch.distributed adds two waits between streams to every call, 3 to 6 us of it."""

    def __init__(self, rank: int, world: int) -> None:
        self._library, self.comm = ctypes.CDLL("libnccl.so.2"), ctypes.c_void_p()  # PyTorch has loaded it
        unique = _Id()
        if rank == 0:
            self.call("ncclGetUniqueId", ctypes.byref(unique))
        shared = torch.tensor(list(bytes(unique)), dtype=torch.uint8)
        dist.broadcast(shared, 0)
        ctypes.memmove(ctypes.byref(unique), bytes(shared.tolist()), 128)
        self.call("ncclCommInitRank", ctypes.byref(self.comm), world, unique, rank)

    def call(self, name: str, *args: Any) -> None:
        if status := getattr(self._library, name)(*args):
            raise SystemExit(f"{name} failed with {status}; NCCL_DEBUG=INFO says why")


def calls(nccl: Nccl, size_bytes: int, rank: int, world: int) -> dict[str, Callable[[], object]]:
    """Kind -> one call on tensors of bfloat16, on the current stream."""
    count, share = size_bytes // 2, max(1, size_bytes // 2 // world)
    full = torch.randn(count, device="cuda").bfloat16()
    other, part = torch.empty_like(full), torch.empty(share, device="cuda", dtype=torch.bfloat16)

    def one(name: str, source: Any, into: Any, number: int, *op: int) -> None:
        pointers = [ctypes.c_void_p(each.data_ptr()) for each in (source, into)]
        nccl.call(name, *pointers, ctypes.c_size_t(number), BFLOAT16, *op, nccl.comm, _stream())

    def move(pieces: Sequence[tuple[str, Any, int, int]]) -> None:
        nccl.call("ncclGroupStart")
        for name, tensor, number, peer in pieces:
            nccl.call(name, ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(number), BFLOAT16, peer, nccl.comm, _stream())
        nccl.call("ncclGroupEnd")

    def parts(name: str, whole: Any) -> list[tuple[str, Any, int, int]]:
        return [(name, whole[peer * share :], share, peer) for peer in range(world)]

    found: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: one("ncclAllReduce", full, full, count, SUM),
        "all_gather": lambda: one("ncclAllGather", part, full, share),
        "reduce_scatter": lambda: one("ncclReduceScatter", full, part, share, SUM),
        "all_to_all": lambda: move([*parts("ncclSend", full), *parts("ncclRecv", other)]),
    }
    if world % 2 == 0:
        peer = rank ^ 1
        found["send"] = lambda: move([("ncclSend" if rank % 2 == 0 else "ncclRecv", full, count, peer)])
        found["send_recv"] = lambda: move([("ncclSend", full, count, peer), ("ncclRecv", other, count, peer)])
    return found


def _stream() -> Any:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def timed(call: Callable[[], object]) -> float:
    """Microseconds of one call: the slowest rank's median."""
    side = torch.cuda.Stream()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(side):
        call()
        start.record()
        for _ in range(4):
            call()
        stop.record()
    torch.cuda.synchronize()
    count = torch.tensor([max(4, min(500, int(TARGET_MS / max(1e-3, start.elapsed_time(stop) / 4))))])
    dist.broadcast(count, 0)
    repeats = int(count)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(repeats):
            call()
    times = []
    for _ in range(REPLAYS + 1):
        dist.barrier()
        torch.cuda.synchronize()
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / repeats * 1e3)
    slowest = torch.tensor([median(times[1:])], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def one_rank(rank: int, world: int, out: str) -> None:
    """All kinds and sizes; rank 0 stores them."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    nccl = Nccl(rank, world)
    found: dict[tuple[str, int], list[float]] = {}
    for turn in range(ROUNDS):
        for size in SIZES if turn % 2 == 0 else SIZES[::-1]:
            for kind, call in calls(nccl, size, rank, world).items():
                found.setdefault((kind, size), []).append(timed(call))
            torch.cuda.empty_cache()
    rows: list[Row] = [
        {
            "kind": kind,
            "group_size": world,
            "size_bytes": size,
            "dur_us": round(median(times), 3),
            "spread_us": round(max(times) - min(times), 3),
        }
        for (kind, size), times in sorted(found.items())
    ]
    if rank == 0:
        lines = ",\n".join(json.dumps(row) for row in rows)
        told = json.dumps(
            meta() | {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "date": time.strftime("%Y-%m-%d %H:%M"), "gpus": world}
        )
        Path(out).write_text(f'{{"meta": {told},\n"samples": [\n{lines}\n]}}\n')
        print(lines)
    dist.destroy_process_group()


def main() -> None:
    """One process a GPU."""
    world = torch.cuda.device_count()
    if world < 2:
        raise SystemExit(f"{world} GPU found; collectives need two or more")
    processes.spawn(one_rank, (world, sys.argv[1]), world)


if __name__ == "__main__":
    main()
