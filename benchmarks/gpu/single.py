"""Kernels of one GPU with PyTorch: products, attention and memory-bound kernels of GPT and Llama, the shortest kernel, and copies.

    python benchmarks/gpu/single.py OUT.json        (PyTorch with CUDA, one GPU, a minute; does not use Interlace)

Every figure is the median of seven replays of a CUDA graph that has the kernel many times, with pauses between replays. Memory-bound
kernels use in turn several sets of buffers, which together exceed the L2 cache. `benchmarks/device_profile.py` makes a device profile of
the file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

A = torch.ops.aten
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
L2_BYTES = 50 << 20
TARGET_MS = 2.0
"""Milliseconds of one replay."""
REPLAYS = 7
PAUSE_S = 0.002
"""Seconds before each replay. On an H200, 41 products of bfloat16 took 4 to 11 % longer without pauses than in measured training steps, and
2 % less with pauses (medians of runs; results/h100/pauses.json). Presumably the device reaches its power limit."""
HIDDEN, HEAD_DIM, SEQUENCES, MP = 4096, 128, (1024, 2048, 4096, 8192), (1, 2, 4, 8)
WIDTHS = {"GPT-3 6.7B": (16384, 50304), "Llama 7B": (11008, 32000)}
"""Model -> width of its feed-forward layer, size of its vocabulary."""
ELEMENTS = tuple(1 << power for power in range(18, 28, 2))

Step = Callable[[], object]
Sizes = dict[str, int]
samples: list[dict[str, Any]] = []


def measure(steps: Sequence[Step]) -> tuple[float, float]:
    """Median and spread in microseconds of one step. The steps are one kernel on different buffers, and run in turn."""
    side = torch.cuda.Stream()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(side):
        for step in steps:
            step()
        start.record()
        steps[0]()
        stop.record()
    torch.cuda.synchronize()
    count = max(len(steps), min(400, int(TARGET_MS / max(1e-3, start.elapsed_time(stop)))) // len(steps) * len(steps))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for k in range(count):
            steps[k % len(steps)]()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        time.sleep(PAUSE_S)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / count * 1e3)
    times.sort()
    return times[len(times) // 2], times[-1] - times[0]


def note(kind: str, dtype: str, dims: Sizes, size_bytes: int, steps: Sequence[Step]) -> None:
    """Measure a kernel and store the result under the kind and sizes with which the cost model looks it up."""
    dur, spread = measure(steps)
    samples.append(
        {"kind": kind, "dtype": dtype, "dims": dims, "size_bytes": size_bytes, "dur_us": round(dur, 3), "spread_us": round(spread, 3)}
    )


def drawn(*shape: int, dtype: str = "bfloat16") -> torch.Tensor:
    """Random data, as products of zeros run faster."""
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(DTYPES[dtype])


def empty(*shape: int, dtype: str = "bfloat16") -> torch.Tensor:
    """Memory for a result."""
    return torch.empty(*shape, device="cuda", dtype=DTYPES[dtype])


def sets(size_bytes: int) -> range:
    """Indices of as many sets of buffers as together exceed the L2 cache."""
    return range(max(1, min(8, -(-3 * L2_BYTES // size_bytes))))


def product(kind: str, dtype: str, batch: int, m: int, n: int, k: int, transposed: str = "") -> None:
    """`batch` products of [m, k] by [k, n]. `transposed`: operands, of `xy`, that are transposed in memory."""
    lead = (batch,) if batch > 1 else ()
    x = drawn(*lead, k, m, dtype=dtype).mT if "x" in transposed else drawn(*lead, m, k, dtype=dtype)
    y = drawn(*lead, n, k, dtype=dtype).mT if "y" in transposed else drawn(*lead, k, n, dtype=dtype)
    out = empty(*lead, m, n, dtype=dtype)
    run = torch.bmm if batch > 1 else torch.mm
    size = DTYPES[dtype].itemsize * batch * (m * k + k * n + m * n)
    dims = {"batch": batch, "m": m, "n": n, "k": k, **{f"transpose_{operand}": 1 for operand in transposed}}
    note(kind, dtype, dims, size, [partial(run, x, y, out=out)])


def model_products() -> Iterator[tuple[int, int, int, str]]:
    """m, n, k and transposed operands of all products of the models' layers and heads on one of `MP` ranks, as called by Paddle: forward,
    gradient of the input (the weight is transposed), and gradient of the weight (the input is)."""
    for mp in MP:
        weights = {(HIDDEN, 3 * HIDDEN // mp), (HIDDEN // mp, HIDDEN), (HIDDEN, HIDDEN // mp)}
        for ffn, words in WIDTHS.values():
            weights |= {(HIDDEN, ffn // mp), (ffn // mp, HIDDEN), (HIDDEN, words // mp)}
        for k, n in sorted(weights):
            for tokens in SEQUENCES[1:]:
                yield from ((tokens, n, k, ""), (tokens, k, n, "y"), (k, n, tokens, "x"))


def products() -> None:
    """Measure cubes and small products, those of models, and batched products of attention."""
    plain = [
        (4096, 4096, 4096),
        (8192, 8192, 8192),
        (16384, 8192, 8192),
        (2048, 1024, 1024),
        (2048, 2048, 2048),
        (2048, 512, 4096),
        (2048, 4096, 512),
        (512, 4096, 4096),
        (128, 4096, 4096),
        (8192, 5120, 5120),
        (256, 256, 256),
        (1024, 1024, 1024),
    ]
    shapes = dict.fromkeys([*((m, n, k, "") for m, n, k in plain), *model_products()])
    torch.backends.cuda.matmul.allow_tf32 = True
    for dtype in DTYPES:
        for m, n, k, transposed in shapes:
            product("gemm", dtype, 1, m, n, k, transposed)
        for mp in MP:
            for tokens in SEQUENCES[:3]:
                batch = HIDDEN // HEAD_DIM // mp
                product("gemm_batched", dtype, batch, tokens, tokens, HEAD_DIM, "y")
                product("gemm_batched", dtype, batch, tokens, HEAD_DIM, tokens)
                product("gemm_batched", dtype, batch, tokens, HEAD_DIM, tokens, "x")
    torch.backends.cuda.matmul.allow_tf32 = False
    for m, n, k in ((4096, 4096, 4096), (2048, 4096, 4096), (1024, 1024, 1024)):
        product("gemm_no_tf32", "float32", 1, m, n, k)


def attentions() -> None:
    """FlashAttention 2, causal."""
    sizes = [(1, HIDDEN // HEAD_DIM // mp, tokens, HEAD_DIM) for mp in MP for tokens in SEQUENCES]
    for b, h, s, d in (*sizes, (4, 16, 1024, 64), (4, 16, 2048, HEAD_DIM)):
        q, k, v = drawn(b, h, s, d), drawn(b, h, s, d), drawn(b, h, s, d)
        dims = {"batch": b, "heads": h, "kv_heads": h, "seq_q": s, "seq_k": s, "head_dim": d, "causal": 1}
        note("attention", "bfloat16", dims, 8 * b * h * s * d, [partial(A._scaled_dot_product_flash_attention, q, k, v, 0.0, True)])
        note("attention_grad", "bfloat16", dims, 16 * b * h * s * d, [attention_back(q, k, v)])


def attention_back(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Step:
    """The backward of causal FlashAttention, of `[batch, heads, tokens, head_dim]`."""
    fa = A._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    return partial(A._scaled_dot_product_flash_attention_backward, q, q, k, v, *fa[:6], 0.0, True, *fa[6:8])


def elementwise(dtype: str) -> None:
    """Measure memory-bound kernels over sizes."""
    width = DTYPES[dtype].itemsize
    for n in ELEMENTS:
        bufs = [(drawn(n, dtype=dtype), drawn(n, dtype=dtype), empty(n, dtype=dtype)) for _ in sets(3 * width * n)]
        kernels: dict[str, tuple[int, Callable[..., object]]] = {
            "add": (3, lambda x, y, o: torch.add(x, y, out=o)),
            "multiply": (3, lambda x, y, o: torch.mul(x, y, out=o)),
            "subtract": (3, lambda x, y, o: torch.sub(x, y, out=o)),
            "grad_accumulate": (3, lambda x, y, o: x.add_(y)),
            "copy": (2, lambda x, y, o: o.copy_(x)),
            "scale": (2, lambda x, y, o: torch.mul(x, 0.5, out=o)),
            "square": (2, lambda x, y, o: torch.mul(x, x, out=o)),
            "gelu": (2, lambda x, y, o: F.gelu(x, approximate="tanh")),
            "silu": (2, lambda x, y, o: F.silu(x)),
            "gelu_grad": (3, lambda x, y, o: A.gelu_backward(x, y, approximate="tanh")),
            "silu_grad": (3, lambda x, y, o: A.silu_backward(x, y)),
            "full": (1, lambda x, y, o: o.fill_(0.0)),
            "reduce": (1, lambda x, y, o: torch.sum(x)),
        }
        for kind, (tensors, kernel) in kernels.items():
            note(kind, dtype, {"elements": n}, tensors * width * n, [partial(kernel, *each) for each in bufs])


def mixed() -> None:
    """Measure casts between the two dtypes, and the optimizer."""
    for n in ELEMENTS:
        bufs = [(drawn(n, dtype="float32"), drawn(n)) for _ in sets(6 * n)]
        dims = {"elements": n}
        note("cast", "bfloat16", dims, 6 * n, [partial(wide.copy_, half) for wide, half in bufs])
        note("cast", "float32", dims, 6 * n, [partial(half.copy_, wide) for wide, half in bufs])
        note("grad_accumulate_mixed", "float32", dims, 10 * n, [partial(wide.add_, half) for wide, half in bufs])
    for n in (1 << 20, 1 << 22, 1 << 24, 1 << 26):
        note("adamw", "float32", {"elements": n}, 28 * n, [adamw(n)])


def adamw(n: int) -> Step:
    """The optimizer on `n` parameters in float32."""
    p, g, m, v = ([torch.rand(n, device="cuda")] for _ in range(4))
    step, options = [torch.ones((), device="cuda")], {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
    return partial(torch._fused_adamw_, p, g, m, v, [], step, **options, amsgrad=False, maximize=False)


def rows_of(dtype: str) -> None:
    """Norms, softmax and transposes over rows of activations."""
    width = DTYPES[dtype].itemsize
    for rows, cols in ((1024, 4096), (2048, 4096), (4096, 4096), (8192, 4096), (4096, 8192)):
        n, dims = rows * cols, {"rows": rows, "cols": cols}
        g, w = drawn(cols, dtype=dtype), drawn(cols, dtype=dtype)
        bufs = [(drawn(rows, cols, dtype=dtype), drawn(rows, cols, dtype=dtype)) for _ in sets(3 * width * n)]
        stats = [A.native_layer_norm(x, [cols], g, w, 1e-5)[1:] for x, _ in bufs]
        note("layer_norm", dtype, dims, 2 * width * n, [partial(A.native_layer_norm, x, [cols], g, w, 1e-5) for x, _ in bufs])
        note(
            "layer_norm_grad",
            dtype,
            dims,
            3 * width * n,
            [
                partial(A.native_layer_norm_backward, y, x, [cols], *stat, g, w, [True] * 3)
                for (x, y), stat in zip(bufs, stats, strict=True)
            ],
        )
        heads = [x.view(rows, cols // HEAD_DIM, HEAD_DIM).transpose(0, 1) for x, _ in bufs]
        note("transpose", dtype, {"elements": n}, 2 * width * n, [each.contiguous for each in heads])
    attention = [(HIDDEN // HEAD_DIM // mp * tokens, tokens) for mp in MP for tokens in SEQUENCES[:3]]
    for rows, cols in (*attention, (1024, 8000), (2048, 12576), (2048, 25152), (2048, 50304), (4096, 32000)):
        x = drawn(rows, cols, dtype=dtype)
        p, n, dims = torch.softmax(x, -1), rows * cols, {"rows": rows, "cols": cols}
        note("softmax", dtype, dims, 2 * width * n, [partial(torch.softmax, x, -1)])
        note("softmax_grad", dtype, dims, 3 * width * n, [partial(A._softmax_backward_data, x, p, -1, DTYPES[dtype])])


def picks(dtype: str) -> None:
    """Rows of a table by number, and their gradients added into one."""
    width, words = DTYPES[dtype].itemsize, 32000
    table = drawn(words, HIDDEN, dtype=dtype)
    for tokens in SEQUENCES:
        ids, grads, n = torch.randint(words, (tokens,), device="cuda"), drawn(tokens, HIDDEN, dtype=dtype), tokens * HIDDEN
        note("embedding", dtype, {"elements": tokens}, 2 * width * n + 8 * tokens, [partial(F.embedding, ids, table)])
        note(
            "embedding_grad",
            dtype,
            {"elements": tokens},
            width * (n + words * HIDDEN) + 8 * tokens,
            [partial(A.embedding_dense_backward, grads, ids, words, -1, False)],
        )


def shortest() -> None:
    """Measure the least time of any kernel."""
    x = torch.zeros(32, device="cuda")
    note("shortest", "float32", {"elements": 32}, 256, [lambda: x.add_(1.0)])


def memory() -> None:
    """Measure everything except products."""
    for dtype in DTYPES:
        elementwise(dtype)
        rows_of(dtype)
        picks(dtype)
    mixed()
    shortest()


def copies() -> list[dict[str, Any]]:
    """Copies to and from pinned memory, in one direction and in both at once."""
    found = []
    for size in (1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28):
        empty_bytes = partial(torch.empty, size, dtype=torch.uint8)
        pairs = [(empty_bytes(device="cuda"), empty_bytes(pin_memory=True)) for _ in range(2)]
        for name in ("d2h", "h2d", "both"):
            times = sorted(_copied(pairs, name, max(4, (1 << 29) // size)) for _ in range(REPLAYS))
            found.append(
                {
                    "direction": name,
                    "size_bytes": size,
                    "ranks": 1,
                    "dur_us": round(times[REPLAYS // 2], 3),
                    "spread_us": round(times[-1] - times[0], 3),
                }
            )
    return found


def _copied(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], name: str, count: int) -> float:
    """Microseconds of a copy out of `count` in a row; each direction has its own stream and buffers."""
    torch.cuda.synchronize()
    start, ends = torch.cuda.Event(enable_timing=True), []
    start.record()
    for way, (device, pinned) in zip(("d2h", "h2d"), pairs, strict=True):
        if name in (way, "both"):
            stream, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
            stream.wait_event(start)
            with torch.cuda.stream(stream):
                for _ in range(count):
                    (pinned.copy_(device, non_blocking=True) if way == "d2h" else device.copy_(pinned, non_blocking=True))
            end.record(stream)
            ends.append(end)
    torch.cuda.synchronize()
    return max(start.elapsed_time(end) for end in ends) / count * 1e3


def meta() -> dict[str, Any]:
    """The machine, and versions."""
    asked = ["nvidia-smi", "--query-gpu=driver_version,memory.total,clocks.max.sm", "--format=csv,noheader"]
    driver = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    props = torch.cuda.get_device_properties(0)
    return {
        "gpu": props.name,
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": time.strftime("%Y-%m-%d"),
        "memory_bytes": props.total_memory,
        "sms": props.multi_processor_count,
    }


def main() -> None:
    """Measure and store."""
    began = time.time()
    torch.manual_seed(0)
    for part in (products, attentions, memory):
        part()
        torch.cuda.empty_cache()
        print(part.__name__, f"{len(samples)} samples, {time.time() - began:.0f} s", flush=True)
    lines = ",\n".join(json.dumps(each) for each in samples)
    moved = ",\n".join(json.dumps(each) for each in copies())
    Path(sys.argv[1]).write_text(f'{{"meta": {json.dumps(meta())},\n"samples": [\n{lines}\n],\n"copies": [\n{moved}\n]}}\n')


if __name__ == "__main__":
    main()
