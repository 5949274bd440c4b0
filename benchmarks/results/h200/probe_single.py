# ruff: noqa: B023 (the closures are called within their turn of the loop)
"""One GPU alone: GEMM, attention and memory-bound kernels over sizes, the shortest kernel, copies one way and both ways.

Every figure is the median of 7 replays of a CUDA graph that holds the kernel many times; memory-bound kernels go round
sets of buffers that together exceed the L2 cache. Usage: python probe_single.py OUT.json (PyTorch with CUDA, 1 GPU).
"""

import json
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

A, BF, F32, L2_BYTES = torch.ops.aten, torch.bfloat16, torch.float32, 50 << 20
samples, copies = [], []


def measure(steps, target_ms=2.0):
    """Median and spread in us of one step; `steps` are functions over different buffers, run in turn."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for step in steps:
            step()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        steps[0]()
        stop.record()
    torch.cuda.synchronize()
    reps = max(len(steps), min(400, int(target_ms / max(1e-3, start.elapsed_time(stop)))) // len(steps) * len(steps))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for k in range(reps):
            steps[k % len(steps)]()
    graph.replay()
    times = []
    for _ in range(7):
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / reps * 1e3)
    times.sort()
    return times[3], times[-1] - times[0]


def note(kind, dtype, dims, size_bytes, steps):
    dur, spread = measure(steps)
    samples.append(
        {
            "kind": kind,
            "dtype": dtype,
            "dims": dims,
            "size_bytes": size_bytes,
            "dur_us": round(dur, 3),
            "spread_us": round(spread, 3),
        }
    )


def sets(size_bytes):
    return max(1, min(8, -(-3 * L2_BYTES // size_bytes)))


def r(*shape, dtype=BF):
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def gemms():
    shapes = (
        *((4096, 4096, 4096), (8192, 8192, 8192), (16384, 8192, 8192), (2048, 1024, 1024), (2048, 2048, 2048)),
        *((2048, 512, 4096), (2048, 4096, 512), (512, 4096, 4096), (128, 4096, 4096), (1024, 4096, 11008)),
        *((4096, 11008, 4096), (4096, 4096, 11008), (8192, 5120, 5120), (4096, 16000, 4096), (256, 256, 256)),
    )
    for m, n, k in shapes:
        x, y, out = r(m, k), r(k, n), torch.empty(m, n, device="cuda", dtype=BF)
        note(
            "gemm",
            "bfloat16",
            {"batch": 1, "m": m, "n": n, "k": k},
            2 * (m * k + k * n + m * n),
            [lambda: torch.mm(x, y, out=out)],
        )
    for b, m, n, k in ((32, 2048, 2048, 128), (32, 2048, 128, 2048), (8, 4096, 4096, 128), (8, 1024, 4096, 1024)):
        x, y, out = r(b, m, k), r(b, k, n), torch.empty(b, m, n, device="cuda", dtype=BF)
        note(
            "gemm",
            "bfloat16",
            {"batch": b, "m": m, "n": n, "k": k},
            2 * b * (m * k + k * n + m * n),
            [lambda: torch.bmm(x, y, out=out)],
        )
    for tf32, name in ((True, "gemm"), (False, "gemm_no_tf32")):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        for m, n, k in ((4096, 4096, 4096), (2048, 4096, 4096), (1024, 1024, 1024)):
            x, y, out = r(m, k, dtype=F32), r(k, n, dtype=F32), torch.empty(m, n, device="cuda")
            note(
                name,
                "float32",
                {"batch": 1, "m": m, "n": n, "k": k},
                4 * (m * k + k * n + m * n),
                [lambda: torch.mm(x, y, out=out)],
            )


def attentions():
    for b, h, s, d in (
        (1, 4, 2048, 128),
        (1, 8, 1024, 128),
        (1, 32, 2048, 128),
        (1, 8, 8192, 128),
        (1, 16, 8192, 128),
        (4, 16, 1024, 64),
    ):
        q, k, v = r(b, h, s, d), r(b, h, s, d), r(b, h, s, d)
        fa = A._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
        dims = {"batch": b, "heads": h, "kv_heads": h, "seq_q": s, "seq_k": s, "head_dim": d, "causal": 1}
        note(
            "attention",
            "bfloat16",
            dims,
            8 * b * h * s * d,
            [lambda: A._scaled_dot_product_flash_attention(q, k, v, 0.0, True)],
        )
        note("attention_grad", "bfloat16", dims, 16 * b * h * s * d, [lambda: A._scaled_dot_product_flash_attention_backward(
            q, q, k, v, fa[0], fa[1], fa[2], fa[3], fa[4], fa[5], 0.0, True, fa[6], fa[7])])  # fmt: skip


def memory():
    for n in (1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26):
        bufs = [{"x": r(n), "y": r(n), "o": torch.empty(n, device="cuda", dtype=BF)} for _ in range(sets(6 * n))]
        wide = [
            {"x": r(n, dtype=F32), "y": r(n, dtype=F32), "h": r(n), "o": torch.empty(n, device="cuda")}
            for _ in range(sets(12 * n))
        ]
        e = {"elements": n}
        note("add", "bfloat16", e, 6 * n, [lambda b=b: torch.add(b["x"], b["y"], out=b["o"]) for b in bufs])
        note("multiply", "bfloat16", e, 6 * n, [lambda b=b: torch.mul(b["x"], b["y"], out=b["o"]) for b in bufs])
        note("copy", "bfloat16", e, 4 * n, [lambda b=b: b["o"].copy_(b["x"]) for b in bufs])
        note("gelu", "bfloat16", e, 4 * n, [lambda b=b: F.gelu(b["x"], approximate="tanh") for b in bufs])
        note(
            "gelu_grad",
            "bfloat16",
            e,
            6 * n,
            [lambda b=b: A.gelu_backward(b["x"], b["y"], approximate="tanh") for b in bufs],
        )
        note("add", "float32", e, 12 * n, [lambda b=b: torch.add(b["x"], b["y"], out=b["o"]) for b in wide])
        note("grad_accumulate", "float32", e, 12 * n, [lambda b=b: b["x"].add_(b["y"]) for b in wide])
        note("cast", "bfloat16", e, 6 * n, [lambda b=b: b["o"].copy_(b["h"]) for b in wide])
        note("cast", "float32", e, 6 * n, [lambda b=b: b["h"].copy_(b["x"]) for b in wide])
        note("scale", "float32", e, 8 * n, [lambda b=b: torch.mul(b["x"], 0.5, out=b["o"]) for b in wide])
        note("reduce", "float32", e, 4 * n, [lambda b=b: torch.sum(b["x"]) for b in wide])
        del bufs, wide
    for rows, cols in ((1024, 4096), (2048, 4096), (8192, 4096), (4096, 8192)):
        n = rows * cols
        g, w = r(cols), r(cols)
        bufs = [{"x": r(rows, cols), "y": r(rows, cols)} for _ in range(sets(6 * n))]
        for b in bufs:
            _, b["m"], b["r"] = A.native_layer_norm(b["x"], [cols], g, w, 1e-5)
        dims = {"rows": rows, "cols": cols}
        note(
            "layer_norm",
            "bfloat16",
            dims,
            4 * n,
            [lambda b=b: A.native_layer_norm(b["x"], [cols], g, w, 1e-5) for b in bufs],
        )
        note("layer_norm_grad", "bfloat16", dims, 6 * n, [lambda b=b: A.native_layer_norm_backward(
            b["y"], b["x"], [cols], b["m"], b["r"], g, w, [True] * 3) for b in bufs])  # fmt: skip
        note("softmax", "bfloat16", dims, 4 * n, [lambda b=b: torch.softmax(b["x"], -1) for b in bufs])
        heads = [b["x"].view(rows, cols // 128, 128) for b in bufs]
        note("transpose", "bfloat16", {"elements": n}, 4 * n, [lambda h=h: h.transpose(0, 1).contiguous() for h in heads])
        del bufs
    for rows, cols in ((1024, 8000), (2048, 50304), (4096, 32000)):
        x = r(rows, cols, dtype=F32)
        p = torch.softmax(x, -1)
        note("softmax", "float32", {"rows": rows, "cols": cols}, 8 * rows * cols, [lambda: torch.softmax(x, -1)])
        note(
            "softmax_grad",
            "float32",
            {"rows": rows, "cols": cols},
            12 * rows * cols,
            [lambda: A._softmax_backward_data(x, p, -1, F32)],
        )
    for n in (1 << 22, 1 << 26):
        p, g, m, v = ([torch.rand(n, device="cuda")] for _ in range(4))
        step = [torch.ones((), device="cuda")]
        note("adamw", "float32", {"elements": n}, 28 * n, [lambda: torch._fused_adamw_(
            p, g, m, v, [], step, lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False,
            maximize=False)])  # fmt: skip
    x = torch.zeros(32, device="cuda")
    note("shortest", "float32", {"elements": 32}, 256, [lambda: x.add_(1.0)])


def run_copies():
    down, up = torch.cuda.Stream(), torch.cuda.Stream()
    for size in (1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28):
        d, d2 = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
        h, h2 = (torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2))
        reps = max(4, (1 << 29) // size)

        def go(out, back):
            torch.cuda.synchronize()
            ev = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            ev[0].record()
            down.wait_event(ev[0])
            up.wait_event(ev[0])
            for _ in range(reps):
                if out:
                    with torch.cuda.stream(down):
                        h.copy_(d, non_blocking=True)
                if back:
                    with torch.cuda.stream(up):
                        d2.copy_(h2, non_blocking=True)
            ev[1].record(down)
            ev[2].record(up)
            torch.cuda.synchronize()
            return [ev[0].elapsed_time(e) / reps * 1e3 for e in ev[1:]]

        for name, flags, which in (("d2h", (1, 0), 0), ("h2d", (0, 1), 1), ("both", (1, 1), None)):
            t = sorted(max(x) if which is None else x[which] for x in (go(*flags) for _ in range(7)))
            copies.append(
                {
                    "direction": name,
                    "size_bytes": size,
                    "ranks": 1,
                    "dur_us": round(t[3], 3),
                    "spread_us": round(t[-1] - t[0], 3),
                }
            )


began = time.time()
torch.manual_seed(0)
for part in (gemms, attentions, memory, run_copies):
    part()
    torch.cuda.empty_cache()
    print(part.__name__, f"{time.time() - began:.0f} s", flush=True)
driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version,memory.total,clocks.max.sm", "--format=csv,noheader"],
                        capture_output=True, text=True, check=False).stdout.strip()  # fmt: skip
props = torch.cuda.get_device_properties(0)
meta = {
    "gpu": props.name,
    "driver": driver,
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "date": time.strftime("%Y-%m-%d"),
    "memory_bytes": props.total_memory,
    "sms": props.multi_processor_count,
}
with open(sys.argv[1], "w") as file:
    json.dump({"meta": meta, "samples": samples, "copies": copies}, file, indent=0)
print(meta, len(samples), len(copies))
