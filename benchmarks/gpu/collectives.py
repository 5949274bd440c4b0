"""Collectives and exchanges over all GPUs of a host, from 1 KiB to 512 MiB, by PyTorch and NCCL.

    python -m benchmarks.gpu.collectives OUT.json        (two GPUs or more; a minute; does not use Interlace)

Every figure is the largest of the ranks' medians over `REPLAYS` replays of a CUDA graph with many calls, divided by the number of calls, so
that launches by the host do not count. `size_bytes` is the full tensor of one rank: the operand of all_reduce, reduce_scatter, all_to_all
and send, the result of all_gather. `send` goes one way, `send_recv` both ways at once. A second round in opposite order gives the spread.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from benchmarks.gpu.single import meta

SIZES = tuple(1 << power for power in range(10, 30))
REPLAYS, TARGET_MS, ROUNDS = 9, 3.0, 2
ALONE = {"NCCL_GRAPH_MIXING_SUPPORT": "0"}
"""Without this, NCCL adds two dependencies to each captured call, with which short calls take twice as long (5 us)."""
Row = dict[str, Any]


def calls(size_bytes: int, rank: int, world: int) -> dict[str, Callable[[], object]]:
    """Kind -> one call on tensors of bfloat16."""
    full = torch.randn(size_bytes // 2, device="cuda").bfloat16()
    other, part = torch.empty_like(full), torch.empty(max(1, size_bytes // 2 // world), device="cuda", dtype=torch.bfloat16)
    peer = rank ^ 1
    found: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(full),
        "all_gather": lambda: dist.all_gather_into_tensor(full, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, full),
        "all_to_all": lambda: dist.all_to_all_single(other, full),
    }
    if world % 2 == 0:
        found["send"] = lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend if rank % 2 == 0 else dist.irecv, full, peer)])[-1].wait()
        both = [dist.P2POp(dist.isend, full, peer), dist.P2POp(dist.irecv, other, peer)]
        found["send_recv"] = lambda: [each.wait() for each in dist.batch_isend_irecv(both)]
    return found


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
    count = torch.tensor([max(4, min(200, int(TARGET_MS / max(1e-3, start.elapsed_time(stop) / 4))))], device="cuda")
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
    slowest = torch.tensor([median(times[1:])], device="cuda", dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def one_rank(rank: int, world: int, out: str) -> None:
    """All kinds and sizes; rank 0 stores them."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512", **ALONE}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=torch.device("cuda", rank))
    found: dict[tuple[str, int], list[float]] = {}
    for turn in range(ROUNDS):
        for size in SIZES if turn % 2 == 0 else SIZES[::-1]:
            for kind, call in calls(size, rank, world).items():
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
    """Start a process for each GPU."""
    world = torch.cuda.device_count()
    if world < 2:
        raise SystemExit(f"{world} GPU found; collectives need two or more")
    processes.spawn(one_rank, (world, sys.argv[1]), world)


if __name__ == "__main__":
    main()
