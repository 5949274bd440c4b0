"""Builds configs/devices/h200.json and h100.json from the raw measurements in benchmarks/results/h200 and h100.

    python benchmarks/device_profile.py [--check]

Every entry is the median over the runs that measured it; its spread is the largest minus the smallest. `--check` compares with the stored
files and writes nothing. On H100s, kernels of one GPU, collectives of two and copies of four were measured; everything else is the
H200's, marked `derived`. Collectives of four and more GPUs over sizes are published ones (results/external), marked `published`.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

import msgspec

from benchmarks.gpu.beside_collectives import CLASSES, FIRST
from benchmarks.gpu.beside_transfers import PRODUCT
from benchmarks.power_profile import power_part
from interlace.cost_model.curves import Curve
from interlace.cost_model.interference import RESULT
from interlace.cost_model.profile import (
    SCHEMA,
    CommSample,
    CopySample,
    DeviceProfile,
    HostCosts,
    Interference,
    OpSample,
    Peak,
    Power,
    Provenance,
    decode_profile,
    encode_profile,
    load_profile,
)
from interlace.cost_model.unaligned import slowdowns
from interlace.cost_model.work import Part, attention_part, gemm_part
from interlace.report.accuracy import BASELINE, kind_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DEVICES = ROOT / "configs" / "devices"
HIDDEN, HEADS, FFN, VOCAB, BF16 = 4096, 32, 16384, 32000, "bfloat16"
"""GPT-3 6.7B as in the measurements, with a softmax over 32000 words."""

FEW_SIZES = 2
"""Number of sizes of a kind and group up to which they do not allow conclusions about other sizes."""
LAUNCHED = 0.75
"""The host bounds a step that takes less than this share of its time when it is launched as a graph."""
PUBLISHED = {"alltoall": "all_to_all"}
"""Name of a kind in published tables -> name in the cost model."""
Row = TypeVar("Row", CommSample, CopySample, Interference)
Timed = tuple[str, str, dict[str, int], int, float, float]
"""kind, dtype, dims, bytes, microseconds, spread in microseconds."""
CATEGORIES = {
    "gemm_fc1": "gemm:fc1",
    "gemm_fc2": "gemm:fc2",
    "gemm_qkv": "gemm:qkv",
    "gemm_proj": "gemm:proj",
    "gemm_fc1_dw": "gemm:dw",
    "gelu": "memory:gelu",
    "gelu_grad": "memory:gelu_grad",
    "add": "memory:add",
    "layer_norm": "memory:layer_norm",
    "layer_norm_grad": "memory:layer_norm_grad",
    "grad_accumulate": "memory:grad_accumulate",
    "softmax_fp32": "memory:softmax",
    "attention": "attention",
    "attention_grad": "attention_grad",
}
"""Operations of the pairs files -> categories of the cost model."""
TRACED = {
    "gemm": "gemm:any",
    "gelu_tanh": "memory:gelu",
    "gelu_tanh_grad": "memory:gelu_grad",
    **{name: name for name in ("attention", "attention_grad")},
    **{
        name: f"memory:{name}"
        for name in (
            "add",
            "cast",
            "multiply",
            "silu",
            "silu_grad",
            "square",
            "square_grad",
            "transpose",
            "embedding",
            "embedding_grad",
            "layer_norm",
            "layer_norm_grad",
        )
    },
}
"""Kernels of beside_transfers.json -> categories; the others are parts of operations."""
FEWEST = 5
"""Least number of operations for a row of beside_transfers.json to count."""
RATES = ("gemm_no_tf32", "shortest")
"""Kinds of single*.json that are not operations."""
OTHER_KERNELS = ("embedding_grad", "silu")
"""Kinds with different kernels in Paddle or in measured steps: for an embedding's gradient PyTorch sorts the words, Paddle adds atomically;
PyTorch's silu of bfloat16 reaches 1.8 TB/s, that of the testbed 3.4 to 3.9 TB/s, like the addition that is used in its place."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def weights(mp: int) -> dict[str, tuple[int, int]]:
    """(k, n) of each weight on one of `mp` ranks."""
    return {
        "fc1": (HIDDEN, FFN // mp),
        "fc2": (FFN // mp, HIDDEN),
        "qkv": (HIDDEN, 3 * HIDDEN // mp),
        "proj": (HIDDEN // mp, HIDDEN),
    }


def timed(part: Part, dur_us: float, size_bytes: int = 0) -> Timed:
    """A measurement of a part; `size_bytes` if it moved a different number of bytes than the part says."""
    return part.kind, part.dtype, dict(part.dims), size_bytes or part.size_bytes, dur_us, 0.0


def pair_ops(raw: dict[str, Any]) -> Iterator[Timed]:
    """Operations measured alone in a pairs file.

    There `add`, `gelu_grad` and `layer_norm_grad` got the same tensor as two operands, which is read once.
    """
    mp, seq, alone = raw["world"], raw["seq"], raw["alone_us"]
    for name, (k, n) in weights(mp).items():
        yield timed(gemm_part(1, seq, n, k, BF16), alone[f"gemm_{name}"])
    yield timed(gemm_part(1, HIDDEN, FFN // mp, seq, BF16, transposed=(True, False)), alone["gemm_fc1_dw"])
    for name, grad in (("attention", False), ("attention_grad", True)):
        yield timed(attention(seq, mp, grad), alone[name])
    act, wide, grads = seq * HIDDEN, seq * FFN // mp, HIDDEN * FFN // mp
    rows = {"rows": seq, "cols": HIDDEN}
    yield "gelu", BF16, {"elements": wide}, 4 * wide, alone["gelu"], 0.0
    yield "gelu_grad", BF16, {"elements": wide}, 4 * wide, alone["gelu_grad"], 0.0
    yield "add", BF16, {"elements": act}, 4 * act, alone["add"], 0.0
    yield "layer_norm", BF16, rows, 4 * act, alone["layer_norm"], 0.0
    yield "layer_norm_grad", BF16, rows, 4 * act, alone["layer_norm_grad"], 0.0
    yield "grad_accumulate_mixed", "float32", {"elements": grads}, 10 * grads, alone["grad_accumulate"], 0.0
    yield "softmax", "float32", {"rows": seq, "cols": VOCAB // mp}, 8 * seq * VOCAB // mp, alone["softmax_fp32"], 0.0


def attention(seq: int, mp: int, grad: bool) -> Part:
    """The measured causal attention on one of `mp` ranks."""
    return attention_part(1, HEADS // mp, HEADS // mp, seq, seq, HIDDEN // HEADS, True, BF16, grad)


def oracle_ops(raw: dict[str, Any]) -> Iterator[tuple[str, Timed]]:
    """Operations measured alone in an oracle file, with their names there.

    `attn_b` is left out, as it also includes a stack and a permuting copy.
    """
    mp, seq = raw["mp"], raw["seq"]
    act, wide = seq * HIDDEN, seq * FFN // mp
    rows = {"rows": seq, "cols": HIDDEN}
    for name, dur_us in (raw.get("alone_us") or raw["alone_us_layer0"]).items():
        word, _, what = name.partition(".")[2].partition("_")
        if word in weights(mp) and what != "acc":
            k, n = weights(mp)[word]
            sizes = {"": (seq, n, k), "dx": (seq, k, n), "dw": (k, n, seq)}[what]
            yield name, timed(gemm_part(1, *sizes, BF16, transposed=(what == "dw", what == "dx")), dur_us)
        elif what == "acc":
            elements = weights(mp)[word][0] * weights(mp)[word][1]
            yield name, ("grad_accumulate_mixed", "float32", {"elements": elements}, 10 * elements, dur_us, 0.0)
        elif word == "gelu":
            kind, width = ("gelu_grad", 6) if what else ("gelu", 4)
            yield name, (kind, BF16, {"elements": wide}, width * wide, dur_us, 0.0)
        elif word in ("ln1", "ln2"):
            kind, width = ("layer_norm_grad", 6) if what else ("layer_norm", 4)
            yield name, (kind, BF16, rows, width * act, dur_us, 0.0)
        elif word in ("add1", "add2"):
            yield name, ("add", BF16, {"elements": act}, 6 * act, dur_us, 0.0)
        elif (word, what) == ("attn", ""):
            yield name, timed(attention(seq, mp, False), dur_us)


def oracle_all_reduces(raw: dict[str, Any]) -> list[float]:
    """Microseconds of the all-reduces over [seq, hidden] in an oracle file."""
    return [dur for name, dur in (raw.get("alone_us") or raw["alone_us_layer0"]).items() if name.partition(".")[2].startswith("ar")]


def single_ops(singles: Sequence[dict[str, Any]]) -> Iterator[Timed]:
    """Operations of single*.json, unchanged."""
    for row in (row for raw in singles for row in raw["samples"]):
        if row["kind"] not in (*RATES, *OTHER_KERNELS):
            kind = "gemm_batched" if row["dims"].get("batch", 1) > 1 and row["kind"] == "gemm" else row["kind"]
            yield kind, row["dtype"], row["dims"], row["size_bytes"], row["dur_us"], row["spread_us"]


def merge_ops(found: Iterable[Timed]) -> tuple[OpSample, ...]:
    """One sample for each kind, dtype, dims and traffic."""
    groups: dict[Any, list[tuple[float, float]]] = {}
    for kind, dtype, dims, size_bytes, dur_us, spread_us in found:
        groups.setdefault((kind, dtype, tuple(sorted(dims.items())), size_bytes), []).append((dur_us, spread_us))
    return tuple(
        OpSample(kind, dtype, dict(dims), size_bytes, *middle(runs), num_runs=len(runs))
        for (kind, dtype, dims, size_bytes), runs in sorted(groups.items())
    )


def middle(runs: list[tuple[float, float]]) -> tuple[int, int]:
    """Median and spread in nanoseconds of runs given as (median, spread) in microseconds."""
    times = [dur for dur, _ in runs]
    spread = max(max(times) - min(times), max(spread for _, spread in runs))
    return round(1000 * median(times)), round(1000 * spread)


def comm_samples(
    pairs: list[dict[str, Any]], oracles: list[dict[str, Any]], alone: Sequence[dict[str, Any]] = ()
) -> tuple[tuple[CommSample, ...], tuple[CommSample, ...]]:
    """Collectives, and exchanges between two neighbours (`send_recv`, both ways at once); `alone` has them over sizes."""
    groups: dict[tuple[str, int, int, int], list[tuple[float, float]]] = {}
    for raw in pairs:
        for name, dur_us in raw["alone_us"].items():
            kind, ctas = split_ctas(name)
            if kind in (*COLLECTIVES, "send_recv"):
                ranks = 2 if kind == "send_recv" else raw["world"]
                groups.setdefault((kind, ranks, raw["bytes_side"], ctas), []).append((dur_us, 0.0))
    for raw in oracles:
        key = ("all_reduce", raw["mp"], 2 * raw["seq"] * HIDDEN, 0)
        groups.setdefault(key, []).extend((dur_us, 0.0) for dur_us in oracle_all_reduces(raw))
    for row in (row for raw in alone for row in raw["samples"]):
        if row["kind"] in (*COLLECTIVES, "send_recv"):
            groups.setdefault((row["kind"], row["group_size"], row["size_bytes"], 0), []).append((row["dur_us"], row["spread_us"]))
    samples = [
        CommSample(kind, ranks, size, *middle(runs), ctas=ctas, num_runs=len(runs))
        for (kind, ranks, size, ctas), runs in sorted(groups.items())
    ]
    return tuple(s for s in samples if s.kind != "send_recv"), tuple(s for s in samples if s.kind == "send_recv")


def with_published(measured: Sequence[CommSample], device: str) -> tuple[CommSample, ...]:
    """The measured samples, and published ones for groups of which only few sizes were measured here."""
    many = Counter((each.kind, each.group_size) for each in measured if not each.ctas)
    known = {(each.kind, each.group_size, each.size_bytes) for each in measured}
    with (RESULTS / "external" / f"nccl_{device}.csv").open() as file:
        found = [
            CommSample(PUBLISHED.get(row["operation"], row["operation"]), int(row["gpus"]), int(row["bytes"]), ns, source="published")
            for row in csv.DictReader(file)
            for ns in [round(1000 * float(row["us"]))]
        ]
    more = [
        each
        for each in found
        if many[each.kind, each.group_size] <= FEW_SIZES and (each.kind, each.group_size, each.size_bytes) not in known
    ]
    return tuple(sorted((*measured, *more), key=lambda each: (each.kind, each.group_size, each.size_bytes, each.ctas)))


def never_falling(samples: Iterable[CommSample]) -> tuple[CommSample, ...]:
    """Samples whose times do not fall with size: if a larger size takes less, both get the mean. Short calls differ by more within a
    session than by size."""
    samples, groups = tuple(samples), dict[tuple[str, int, int], list[tuple[float, float]]]()
    for each in samples:
        groups.setdefault((each.kind, each.group_size, each.ctas), []).append((each.size_bytes, each.dur_ns))
    curves = {key: Curve(points) for key, points in groups.items()}
    return tuple(
        msgspec.structs.replace(each, dur_ns=round(curves[each.kind, each.group_size, each.ctas].at(each.size_bytes))) for each in samples
    )


def split_ctas(name: str) -> tuple[str, int]:
    """Split a name such as `all_reduce_8cta`, an all_reduce with a limit of 8 CTAs."""
    head, _, tail = name.rpartition("_")
    return (head, int(tail[:-3])) if tail.endswith("cta") else (name, 0)


def copy_samples(pairs: list[dict[str, Any]], singles: Sequence[dict[str, Any]]) -> tuple[CopySample, ...]:
    """Copies: one device alone over sizes, and all devices of the host at once."""
    groups: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for row in (row for single in singles for row in single["copies"]):
        groups.setdefault((row["direction"], row["ranks"], row["size_bytes"]), []).append((row["dur_us"], row["spread_us"]))
    for raw in pairs:
        for way in ("d2h", "h2d"):
            groups.setdefault((way, raw["world"], raw["bytes_copy"]), []).append((raw["alone_us"][way], 0.0))
    return tuple(
        CopySample(way, size, dur_ns, ranks, spread_ns, len(runs))  # type: ignore[arg-type]
        for (way, ranks, size), runs in sorted(groups.items())
        for dur_ns, spread_ns in [middle(runs)]
    )


def interference(pairs: list[dict[str, Any]]) -> tuple[Interference, ...]:
    """Medians and ranges by operation, collective and group size."""
    groups: dict[tuple[str, str, int, int], list[tuple[float, float]]] = {}
    for raw in pairs:
        for row in raw["pairs"]:
            kind, ctas = split_ctas(row["side"])
            beside = {"send_recv": "p2p", "d2h": "copy:d2h", "h2d": "copy:h2d"}.get(kind, f"comm:{kind}")
            groups.setdefault((row["op"], beside, raw["world"], ctas), []).append((row["stretch_op"], row["stretch_side"]))
    found = []
    for (op, beside, world, ctas), runs in groups.items():
        ops, sides = [a for a, _ in runs], [b for _, b in runs]
        k, n = weights(world).get(op.removeprefix("gemm_"), (0, 0))
        found.append(
            Interference(
                op=CATEGORIES[op],
                beside=beside,
                group_size=world,
                stretch_op=round(median(ops), 4),
                stretch_beside=round(median(sides), 4),
                range_op=(min(ops), max(ops)),
                range_beside=(min(sides), max(sides)),
                ctas=ctas,
                num_files=len(runs),
                dims={"k": k, "n": n} if k else {},
            )
        )
    return tuple(sorted(found, key=lambda row: (row.beside, row.ctas, row.op, row.group_size)))


def with_traced(looped: Iterable[Interference], raw: dict[str, Any]) -> tuple[Interference, ...]:
    """Interference of computation with sends and receives from traced steps; for products beside a waiting transfer also by the size of
    their result.

    These rows replace those measured with both sides in loops, where a transfer occupies its multiprocessors before a product starts; in a
    step it mostly starts during a product. The slowdown of the transfer is the median of the replaced rows.
    """
    looped, found = tuple(looped), []
    for beside, kernels in raw["beside"].items():
        for kernel, row in kernels.items():
            name, _, elements = kernel.partition(" of ")
            if name in TRACED and row["n"] >= FEWEST:
                replaced = [each for each in looped if each.beside == beside and _same(each.op, TRACED[name])]
                dims = {RESULT: int(elements)} if elements else {}
                found.append(
                    Interference(
                        TRACED[name],
                        beside,
                        2,
                        row["stretch"],
                        median([r.stretch_beside for r in replaced] or [1.0]),
                        (row["lowest"], row["highest"]),
                        (1.0, 1.0),
                        num_files=row["num_traces"],
                        dims=dims,
                    )
                )
    kept = (each for each in looped if not any(each.beside == row.beside and _same(each.op, row.op) for row in found))
    return (*kept, *found)


def _same(op: str, other: str) -> bool:
    """Whether two categories are equivalent: all products are."""
    return op == other or (op.startswith("gemm:") and other.startswith("gemm:"))


def read(prefix: str, device: str = "h200") -> list[dict[str, Any]]:
    """Raw files of one kind, by name."""
    return [json.loads(path.read_text()) for path in sorted((RESULTS / device).glob(f"{prefix}*.json"))]


def product_rate(singles: Sequence[dict[str, Any]], kind: str, dtype: str, how: str) -> Peak:
    """FLOP/s of the largest cubic product in single*.json, the median over runs."""
    cubes: dict[int, list[float]] = {}
    for row in _rows(singles, kind, dtype):
        if len({row["dims"][key] for key in "mnk"}) == 1:
            cubes.setdefault(row["dims"]["m"], []).append(row["dur_us"])
    side = max(cubes)
    return Peak(1e9 * round(2e-3 * float(side) ** 3 / median(cubes[side])), "measured", f"{side} x {side} x {side} {how}")


def memory_rate(singles: Sequence[dict[str, Any]]) -> Peak:
    """Bytes/s of the largest additions in single*.json, the median over runs."""
    rows = _rows(singles, "add", BF16)
    most = max(row["size_bytes"] for row in rows)
    took = median(row["dur_us"] for row in rows if row["size_bytes"] == most)
    return Peak(1e6 * round(most / took), "measured", "read plus written, add of 67 M bfloat16")


def _rows(singles: Sequence[dict[str, Any]], kind: str, dtype: str) -> list[dict[str, Any]]:
    return [row for raw in singles for row in raw["samples"] if (row["kind"], row["dtype"]) == (kind, dtype)]


def rates(singles: Sequence[dict[str, Any]]) -> tuple[dict[str, Peak], dict[str, Peak]]:
    """FLOP/s of products with and without tensor cores."""
    half = product_rate(singles, "gemm", BF16, "on random data; zeros run faster")
    matrix = {
        BF16: half,
        "float16": Peak(half.per_s, "derived", "as bfloat16: the same tensor-core rate"),
        "float32": product_rate(singles, "gemm", "float32", "with TF32, taken for Paddle's way; without it see vector_flops"),
        "float8_e4m3fn": Peak(1979e12, "datasheet", "dense"),
        "float64": Peak(67e12, "datasheet", "tensor cores"),
    }
    vector = {
        "float32": product_rate(singles, "gemm_no_tf32", "float32", "without TF32"),
        "float64": Peak(34e12, "datasheet"),
    }
    return matrix, vector


def shortest_ns(singles: Sequence[dict[str, Any]]) -> int:
    """The time of the shortest kernel, in nanoseconds."""
    return round(1000 * median(row["dur_us"] for raw in singles for row in raw["samples"] if row["kind"] == "shortest"))


def host_costs(raw: dict[str, Any], issued_us: Sequence[float], between_us: Sequence[float]) -> HostCosts:
    """Host times of Paddle's executor with the engine's settings: for an operation in training steps that the host bounds, for a job in
    addition to its operations, and between two training steps.

    In `raw`, `an_op_us` is the slope from 50 to 550 tiny operations on one stream, and `a_job_us` what 20 more jobs cost in addition to
    their operations.
    """
    found = raw["fast"]
    return HostCosts(
        op_ns=round(1000 * median(issued_us)),
        job_ns=round(1000 * found["a_job_us"]),
        source="measured",
        note="through Paddle's executor on the testbed's CUDA streams, not on the GPU place; an operation is the median of "
        f"{len(issued_us)} training steps that the host bounds ({min(issued_us):.1f} to {max(issued_us):.1f} us); "
        f"on an H200's host a tiny one alone takes {found['an_op_us']:.1f} us, "
        f"{found['an_op_us_two_streams']:.1f} us where two streams alternate, {raw['event']['an_op_us_two_streams']:.1f} us there "
        "where memory is collected by events; between steps, engine included, the median of "
        f"{len(between_us)} times in training on H100 ({min(between_us) / 1e3:.1f} to {max(between_us) / 1e3:.1f} ms)",
        between_steps_ns=round(1000 * median(between_us)),
    )


def between_us(runs: Sequence[dict[str, Any]]) -> list[float]:
    """Microseconds from a traced step's last issue to its return plus those from the next step's call to its first issue. The last traced
    step is left out, as it waits for the device."""
    around = (row.get("traced_step", {}).get("host_around_us") or [] for row in runs)
    return [behind + before for steps in around for (_, behind), (before, _) in pairwise(steps)]


def issued_us(runs: Sequence[dict[str, Any]], between_us: float) -> list[float]:
    """Microseconds of a step per issued operation, with time between operations and jobs but without time between steps, for plans that
    take less than `LAUNCHED` of that time as a launched graph."""
    steps = {(row["case"], row["plan"], row["sitting"]): row for row in runs if "step_ms" in row}
    found = []
    for (case, plan, sitting), row in steps.items():
        launched = steps.get((case, f"{plan}-captured", sitting))
        if launched and launched["step_ms"]["median"] < LAUNCHED * row["step_ms"]["median"]:
            found.append((1e3 * row["step_ms"]["median"] - between_us) / row["traced_step"]["ops_issued"])
    if not found:
        raise SystemExit("testbed_captured.json: no step that the host bounds; expected plans that run as they are issued and as a graph")
    return found


def with_collectives(
    looped: Iterable[Interference], raw: dict[str, Any], classes: Collection[str], source: Literal["measured", "derived"]
) -> tuple[Interference, ...]:
    """Interference of classes of computation with collectives from traced steps (`benchmarks.gpu.beside_collectives`).

    With both sides in loops, a collective beside products spends most of its time waiting for a product that began before it. These rows
    replace those of the same class and collective for all group sizes: a product delays a collective that begins after it, and slows down
    one that it begins during by the traced share.
    """
    found, replaced = [], set[tuple[str, str]]()
    for name, kinds in raw["beside"].items():
        collective, _, ranks = name.partition("@")
        for kind in classes:
            rows = [kinds[each] for each in ((kind,) if kind == PRODUCT else (kind, kind + FIRST)) if each in kinds]
            if rows and kind in kinds:
                together = sum(row["ms"] for row in rows)
                op, beside = (together / sum(row["ms"] / row[factor] for row in rows) for factor in ("op", "beside"))
                replaced.add((kind, f"comm:{collective}"))
                found.append(
                    Interference(
                        f"{kind}:any",
                        f"comm:{collective}",
                        int(ranks),
                        round(op, 3),
                        round(beside, 3),
                        (min(row["lowest"] for row in rows), max(row["highest"] for row in rows)),
                        (min(row["beside"] for row in rows), max(row["beside"] for row in rows)),
                        num_files=max(row["num_traces"] for row in rows),
                        holds=kind == PRODUCT,
                        source=source,
                    )
                )
    kept = (row for row in looped if row.ctas or (row.op.partition(":")[0], row.beside) not in replaced)
    return (*kept, *found)


def build(
    pairs: list[dict[str, Any]],
    oracles: list[dict[str, Any]],
    singles: Sequence[dict[str, Any]],
    host: HostCosts,
    traced: dict[str, Any] | None = None,
    alone: Sequence[dict[str, Any]] = (),
    together: Sequence[dict[str, Any]] = (),
) -> DeviceProfile:
    """The profile of the H200 from raw results."""
    collectives, p2p = comm_samples(pairs, oracles, alone)
    ops = [row for raw in pairs for row in pair_ops(raw)]
    ops += [row for raw in oracles for _, row in oracle_ops(raw)]
    meta, (matrix, vector) = singles[0]["meta"], rates(singles)
    return DeviceProfile(
        interlace_profile=SCHEMA,
        device=meta["gpu"],
        provenance=Provenance(
            machine="1, 2 and 4 NVIDIA H200 (HGX, NVLink) of one host, Intel Xeon",
            date="2026-11-21",
            command="python benchmarks/device_profile.py",
            driver=meta["driver"].partition(",")[0],
            versions={"torch": meta["torch"], "cuda": meta["cuda"], "nccl": pairs[0]["nccl"]},
            note="measured through PyTorch, whose kernels are not all Paddle's (attention: FlashAttention 2 in both); "
            "NVLink multicast (NVLS) off; GPT-3 6.7B shapes, one GPU alone also Llama 7B's on 2026-11-23; beside `wait` and `p2p`: "
            "through Paddle's executor on the testbed; beside collectives of two GPUs: `interlace calibrate`, likewise, 2026-11-28; "
            "products beside collectives of four: the H100's; products with unaligned rows on one GPU, two runs on 2026-11-30; "
            "collectives of four and eight GPUs where few sizes were measured: published ones "
            "(benchmarks/results/external); raw files in benchmarks/results/h200",
        ),
        ranks_per_host=8,
        memory_bytes=meta["memory_bytes"],
        pinned_bytes=0,
        shortest_kernel_ns=shortest_ns(singles),
        matrix_flops=matrix,
        vector_flops=vector,
        memory_rate=memory_rate(singles),
        host=host,
        ops=merge_ops([*ops, *single_ops(singles)]),
        unaligned=slowdowns(merge_ops(single_ops(read("unaligned")))),
        collectives=collectives,
        p2p=p2p,
        copies=copy_samples(pairs, [*singles, *together]),
        interference=with_traced(interference(pairs), traced) if traced else interference(pairs),
    )


def h100(
    h200: DeviceProfile,
    singles: Sequence[dict[str, Any]],
    host: HostCosts,
    alone: Sequence[dict[str, Any]],
    together: Sequence[dict[str, Any]],
    beside: dict[str, Any],
) -> DeviceProfile:
    """The profile of the H100. Operations, rates and copies of one GPU, collectives of two GPUs, copies of four, and interference of
    computation with collectives are measured; everything else is the H200's."""

    def derived(rows: Iterable[Row]) -> tuple[Row, ...]:
        return tuple(msgspec.structs.replace(row, source="derived") for row in rows)

    collectives, p2p = comm_samples([], [], alone)
    measured = {(each.kind, each.group_size, each.ctas) for each in (*collectives, *p2p)}
    others = [each for each in (*h200.collectives, *h200.p2p) if (each.kind, each.group_size, each.ctas) not in measured]

    meta, (matrix, vector) = singles[0]["meta"], rates(singles)
    copies = copy_samples([], [*singles, *together])
    own = {(each.direction, each.ranks) for each in copies}
    other_copies = (each for each in h200.copies if (each.direction, each.ranks) not in own)
    return msgspec.structs.replace(
        h200,
        device=meta["gpu"],
        provenance=Provenance(
            machine="1 NVIDIA H100 80GB HBM3 (HGX), for collectives 2, Intel Xeon",
            date=meta["date"],
            command="python benchmarks/device_profile.py",
            driver=meta["driver"].partition(",")[0],
            versions={"torch": meta["torch"], "cuda": meta["cuda"]},
            note="operations and copies of one GPU measured through PyTorch, whose kernels are not all Paddle's (attention: "
            "FlashAttention 2 in both); collectives and exchanges of two GPUs by NCCL, two sittings; "
            "copies of four GPUs at once, and computation beside collectives, in training steps; those of two and all other interference "
            "are the H200's, with which "
            "it shares the chip, NVLink and PCIe: sources `derived`; "
            "collectives of four and eight GPUs are published ones (benchmarks/results/external); raw files in benchmarks/results/h100",
        ),
        memory_bytes=meta["memory_bytes"],
        shortest_kernel_ns=shortest_ns(singles),
        matrix_flops=matrix,
        vector_flops=vector,
        memory_rate=memory_rate(singles),
        host=host,
        ops=merge_ops(single_ops(singles)),
        unaligned=derived(h200.unaligned),
        collectives=(*collectives, *derived(each for each in others if each.kind != "send_recv")),
        p2p=(*p2p, *derived(each for each in others if each.kind == "send_recv")),
        copies=(*copies, *derived(other_copies)),
        interference=with_collectives(derived(h200.interference), beside, CLASSES, "measured"),
    )


def with_calibrated(rows: Iterable[Interference]) -> tuple[Interference, ...]:
    """Interference of the H200 with collectives of two GPUs as `interlace calibrate` measured it, in place of loops and of the H100's."""
    own = [row for row in load_profile(str(RESULTS / "h200" / "calibrated.json")).interference if _of_two(row)]
    return (*(row for row in rows if not _of_two(row)), *own)


def _of_two(row: Interference) -> bool:
    return row.beside.startswith("comm:") and row.group_size == 2 and not row.ctas


def profiles() -> dict[str, DeviceProfile]:
    """All profiles of GPUs, by name."""
    between, beside = between_us(read("testbed_between_steps", "h100")[0]["runs"]), read("beside_collectives", "h100")[0]
    h200 = build(
        read("pairs_"),
        read("oracle_"),
        read("single"),
        host_costs(*read("testbed_host"), issued_us(read("testbed_captured")[0]["runs"], median(between)), between),
        *read("beside_transfers"),
        alone=read("collectives"),
        together=read("copies"),
    )
    host = host_costs(*read("testbed_host"), issued_us(read("testbed_captured", "h100")[0]["runs"], median(between)), between)
    host = msgspec.structs.replace(host, note=f"{host.note}; a job as on an H200's host")
    own = h100(h200, read("single", "h100"), host, read("collectives", "h100"), read("copies", "h100"), beside)
    h200 = msgspec.structs.replace(h200, interference=with_calibrated(with_collectives(h200.interference, beside, (PRODUCT,), "derived")))
    alone = {"h200": h200, "h100": own}
    found = {
        name: msgspec.structs.replace(each, collectives=never_falling(with_published(each.collectives, name)), p2p=never_falling(each.p2p))
        for name, each in alone.items()
    }
    late = {name: late_beside_wait_ns(read("connections", name)[0]["rows"]) for name in found}
    powered = {name: msgspec.structs.replace(each, power=power_of(name), late_beside_wait_ns=late[name]) for name, each in found.items()}
    return {name: with_stored_accuracy(name, each) for name, each in powered.items()}


def power_of(name: str) -> Power:
    """The power part of a profile. The power that communication adds is derived from training steps; beside computation, from those of
    H100s only."""
    (kinds,), (beside,), (waiting,) = read("power_kinds", name), read("beside_energy", "h100"), read("waiting_energy", name)
    note = "" if name == "h100" else "; what a communication beside computation adds is that of H100s"
    return power_part(kinds, float(beside["watts"]), float(waiting["watts"]), note)


def late_beside_wait_ns(rows: Iterable[dict[str, Any]]) -> int:
    """By how much the gap between two kernels grows during communication, in traced steps of the baseline with a pipeline, whose transfers
    wait for most of the step: the median over runs of the difference of medians, rounded to 0.1 us."""
    gaps = [row["gap_us"] for row in rows if kind_of(row["plan"]) == BASELINE and "beside communication" in row["gap_us"]]
    return 100 * round(10 * median(each["beside communication"]["median_us"] - each["with nothing beside"]["median_us"] for each in gaps))


def with_stored_accuracy(name: str, profile: DeviceProfile) -> DeviceProfile:
    """The profile with the accuracy that `interlace accuracy --write` stored, if its times are the same; otherwise without any."""
    path = DEVICES / f"{name}.json"
    stored = decode_profile(path.read_bytes(), str(path)) if path.exists() else profile
    same = msgspec.structs.replace(stored, accuracy=None) == profile
    return msgspec.structs.replace(profile, accuracy=stored.accuracy) if same else profile


def main(argv: list[str] | None = None) -> int:
    """Write or check the stored profiles."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the stored files, write nothing")
    args = parser.parse_args(argv)
    wrong = 0
    for name, profile in profiles().items():
        path, data = DEVICES / f"{name}.json", encode_profile(profile)
        if args.check:
            same = path.exists() and path.read_bytes() == data
            wrong += not same
            print(f"{path.relative_to(ROOT)} {'is' if same else 'is not'} what the raw files give")
        else:
            path.write_bytes(data)
            print(f"{path.relative_to(ROOT)}: {len(data)} bytes" + ("" if profile.accuracy else "; now `interlace accuracy --write`"))
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
