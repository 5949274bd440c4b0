"""What pacing of copies brings: a row of products and memory-bound operations beside copies to pinned memory, released in several ways.

Every figure is the median of REPEATS rows; all GPUs do the same at once, with copies on all of them or on the first alone. Copies read one
slab of device memory and write one pinned slab. Usage: python probe_pacing.py OUT.json (PyTorch with CUDA, 1 or more GPUs).
"""

import json
import statistics
import subprocess
import sys

import torch
import torch.multiprocessing as mp

A, BF = torch.ops.aten, torch.bfloat16
ROWS, HIDDEN, WIDE, LAYERS, REPEATS, WARM = 2048, 4096, 16384, 8, 15, 3
CHUNK_BYTES = 8 << 20  # takes 155 us at 54 GB/s: less than half of a wide product
SHARE = 0.4  # of the row's time that the copies would take alone
GB_PER_S = 54e9
PACES = ("none", "at once", "evenly", "beside products", "beside memory-bound")


class Row:
    """Eight layers' products, GELU, norms and additions; `steps` are (kind, function)."""

    def __init__(self, device):
        def full(*size):
            return torch.randn(*size, device=device, dtype=BF)

        x, wide, up, down, square = full(ROWS, HIDDEN), full(ROWS, WIDE), full(HIDDEN, WIDE), full(WIDE, HIDDEN), full(HIDDEN, HIDDEN)
        out, more, gain, bias = torch.empty_like(x), torch.empty_like(wide), full(HIDDEN), full(HIDDEN)
        layer = [
            ("memory", lambda: torch.nn.functional.layer_norm(x, (HIDDEN,), gain, bias)),
            ("product", lambda: torch.mm(x, square, out=out)),
            ("memory", lambda: torch.add(x, out, out=out)),
            ("product", lambda: torch.mm(x, up, out=wide)),
            ("memory", lambda: A.gelu.out(wide, out=more)),
            ("memory", lambda: torch.mul(more, wide, out=more)),
            ("product", lambda: torch.mm(more, down, out=out)),
            ("memory", lambda: torch.add(x, out, out=out)),
        ]
        self.steps = layer * LAYERS

    def run(self, before=None):
        """Enqueue the row; `before(k, kind)` is called in front of each step."""
        for k, (kind, step) in enumerate(self.steps):
            if before:
                before(k, kind)
            step()


def released(pace, steps, chunks):
    """Step -> how many chunks may start when it does."""
    if pace == "none":
        return {}
    if pace == "at once":
        return {0: chunks}
    where = {
        "evenly": range(len(steps)),
        "beside products": [k for k, (kind, _) in enumerate(steps) if kind == "product"],
        "beside memory-bound": [k for k, (kind, _) in enumerate(steps) if kind == "memory"],
    }[pace]
    where, found = list(where), {}
    for chunk in range(chunks):
        at = where[chunk * len(where) // chunks]
        found[at] = found.get(at, 0) + 1
    return found


def measure(row, pace, copies, slab, pinned, chunks, barrier):
    """Milliseconds of the row, and until the last copy is done, from the row's start."""
    side = torch.cuda.Stream()
    plan = released(pace, row.steps, chunks) if copies else {}
    rows, ends = [], []
    for _ in range(WARM + REPEATS):
        start, stop, done = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        torch.cuda.synchronize()
        barrier.wait()
        torch.cuda._sleep(3_000_000)  # the host gets ahead of the device
        start.record()
        sent = 0

        def before(k, kind):
            nonlocal sent
            if k in plan:
                ready = torch.cuda.Event()
                ready.record()
                side.wait_event(ready)
                with torch.cuda.stream(side):
                    for _ in range(plan[k]):
                        part = slice(sent * CHUNK_BYTES, (sent + 1) * CHUNK_BYTES)
                        pinned[part].copy_(slab[part], non_blocking=True)
                        sent += 1

        row.run(before)
        stop.record()
        done.record(side)
        torch.cuda.synchronize()
        rows.append(start.elapsed_time(stop))
        ends.append(start.elapsed_time(done) if plan else 0.0)
    return rows[WARM:], ends[WARM:]


def work(rank, world, barrier, queue):
    """One GPU's part; every process measures the same cases in the same order."""
    torch.cuda.set_device(rank)
    row = Row(f"cuda:{rank}")
    alone, _ = measure(row, "none", False, None, None, 0, barrier)
    chunks = int(SHARE * 1e-3 * 14.0 * GB_PER_S / CHUNK_BYTES)  # the row takes about 14 ms
    slab = torch.empty(chunks * CHUNK_BYTES, dtype=torch.uint8, device=f"cuda:{rank}")
    pinned = torch.empty(chunks * CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
    found = []
    for copying in sorted({1, world}):
        for pace in PACES:
            rows, ends = measure(row, pace, rank < copying, slab, pinned, chunks, barrier)
            if rank < copying:
                found.append(
                    {
                        "gpus_copying": copying,
                        "pace": pace,
                        "row_ms": statistics.median(rows),
                        "row_ms_min": min(rows),
                        "row_ms_max": max(rows),
                        "last_copy_ms": statistics.median(ends),
                    }
                )
    queue.put((rank, chunks, statistics.median(alone), found))


def main():
    world = min(2, torch.cuda.device_count())
    context = mp.get_context("spawn")
    barrier, queue = context.Barrier(world), context.Queue()
    ranks = [context.Process(target=work, args=(rank, world, barrier, queue)) for rank in range(world)]
    for each in ranks:
        each.start()
    said = sorted(queue.get(timeout=200) for _ in ranks)
    for each in ranks:
        each.join()
    driver = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True)
    out = {
        "meta": {
            "gpu": driver.stdout.splitlines()[0],
            "torch": torch.__version__,
            "gpus": world,
            "chunk_bytes": CHUNK_BYTES,
            "repeats": REPEATS,
            "layers": LAYERS,
            "rows": ROWS,
            "hidden": HIDDEN,
        },
        "ranks": [{"rank": rank, "chunks": chunks, "alone_ms": alone, "cases": found} for rank, chunks, alone, found in said],
    }
    with open(sys.argv[1], "w") as file:
        json.dump(out, file, indent=1)
    for rank in out["ranks"]:
        for case in rank["cases"]:
            print(rank["rank"], case)


if __name__ == "__main__":
    main()
