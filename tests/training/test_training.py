"""Real training on CPU ranks: unmodified Paddle and Interlace give the same bits (losses and parameters).

Each case runs twice through `interlace run --verify`, which compares every loss of every step and the digest of every
parameter. Here run those that the testbed cannot, and a few that have every kind of parallelism between them; `tests/testbed` trains
all others, with the same assertions, on asynchronous streams.
Acceptance: S5, F2, O1, O7, O8, R1, M1, M2, U1.
"""

from __future__ import annotations

import functools
import importlib.resources
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from interlace.cli import main
from tests.remarks import done_in, sentences

pytestmark = pytest.mark.paddle
EXAMPLES = Path(__file__).parents[2] / "examples"
OFFLOAD = {"fraction": 1.0, "min_bytes": 64}
MIXED = {"interleave": "mixed", "extra_live_bytes": "1GB"}
HALF = {"fraction": 0.5, "min_bytes": 64}
AUTO = {"device": "slow", "schedule_1f1b": {"interleave": "auto", "extra_live_bytes": "1GB"}}
ROOMY = {"interleave": "dx-first", "extra_live_bytes": "1GB"}

CASES = {
    "one rank, no accumulation, offload": (1, "gpt", "--steps 2", {"schedule_1f1b": ROOMY, "offload_activations": OFFLOAD}),
    "one rank, accumulation, offload": (
        1,
        "gpt",
        "--gradient-accumulation 3 --batch-size 6",
        {"schedule_1f1b": ROOMY, "offload_activations": OFFLOAD},
    ),
    "mp2, clip, accumulation: column overlap": (2, "gpt", "--mp 2 --clip-grad 1 --gradient-accumulation 2", {"schedule_1f1b": ROOMY}),
    "mp2 without accumulation": (2, "gpt", "--mp 2 --split-qkv", {"schedule_1f1b": ROOMY}),
    "pp2, half offload, pp micro-batches": (2, "gpt", "--pp 2 --micro-batches 2", {"schedule_1f1b": ROOMY, "offload_activations": HALF}),
    "pp2, all offload, 2 pp + 1 micro-batches": (
        2,
        "gpt",
        "--pp 2 --micro-batches 5 --batch-size 10",
        {"schedule_1f1b": ROOMY, "offload_activations": OFFLOAD},
    ),
    "pp2 mixed, offload": (2, "gpt", "--pp 2 --micro-batches 6 --batch-size 6", {"schedule_1f1b": MIXED, "offload_activations": OFFLOAD}),
    "pp2 FThenB, offload": (2, "gpt", "--pp 2 --schedule FThenB", {"schedule_1f1b": ROOMY, "offload_activations": OFFLOAD}),
    "pp4 zero bubble": (4, "gpt", "--pp 4 --micro-batches 8", {"schedule_1f1b": {"interleave": "zb-h1"}, "offload_activations": OFFLOAD}),
    "pp2 recompute": (2, "gpt", "--pp 2 --recompute full", {"schedule_1f1b": ROOMY, "offload_activations": OFFLOAD}),
    "pp2 vpp2, offload": (2, "gpt", "--pp 2 --vpp 2 --micro-batches 4", {"schedule_1f1b": ROOMY, "offload_activations": OFFLOAD}),
    "pp2 vpp2 mp2 mixed": (4, "llama", "--pp 2 --vpp 2 --mp 2 --kv-heads 2 --micro-batches 4", {"schedule_1f1b": MIXED}),
    "pp2 mp2, everything on": (4, "gpt", "--pp 2 --mp 2 --micro-batches 8", {"schedule_1f1b": ROOMY, "offload_activations": OFFLOAD}),
    "pp2 mp2 sequence parallel, GQA": (
        4,
        "llama",
        "--pp 2 --mp 2 --kv-heads 2 --sequence-parallel",
        {"schedule_1f1b": MIXED, "offload_activations": OFFLOAD},
    ),
    "dp2 mp2 sharding 1, clip": (4, "llama", "--dp 2 --mp 2 --sharding-stage 1 --gradient-accumulation 2", {"schedule_1f1b": ROOMY}),
    "dp2 pp2 sharding 2": (4, "gpt", "--dp 2 --pp 2 --sharding-stage 2", {"schedule_1f1b": ROOMY, "offload_activations": OFFLOAD}),
    "dp2 sharding 1 over fused buffers": (2, "gpt", "--dp 2 --layers 2 --sharding-stage 1 --sharding-fusion", {"schedule_1f1b": ROOMY}),
    "dp2 pp2 sharding 1 over fused buffers, overlapped, bfloat16 O2": (
        4,
        "llama",
        "--dp 2 --pp 2 --layers 2 --hidden 128 --sharding-stage 1 --sharding-fusion --sharding-overlap --amp O2 --master-grad",
        {"schedule_1f1b": ROOMY, "offload_activations": OFFLOAD},
    ),
    "pp2 mp2 bfloat16 O2, master gradients": (
        4,
        "llama",
        "--pp 2 --mp 2 --amp O2 --master-grad --clip-grad 1",
        {"schedule_1f1b": ROOMY, "offload_activations": OFFLOAD},
    ),
    "pp4 mixed, offload": (4, "gpt", "--pp 4 --micro-batches 8", {"schedule_1f1b": MIXED, "offload_activations": OFFLOAD}),
}

UNCAPTURED = {
    "mp2 sequence parallel, recompute that is left out": (
        2,
        "llama",
        "--mp 2 --kv-heads 2 --sequence-parallel --recompute full --gradient-accumulation 2",
        {"schedule_1f1b": ROOMY, "choose_recompute": {"level": 0}},
    ),
    "mp2 sequence parallel, full recompute": (
        2,
        "llama",
        "--mp 2 --kv-heads 2 --sequence-parallel --recompute full --gradient-accumulation 2",
        {"schedule_1f1b": ROOMY},
    ),
    "pp2, recompute of which some is left out, some is added, and offload": (
        2,
        "gpt",
        "--pp 2 --recompute mlp --seq-len 128",
        {"schedule_1f1b": ROOMY, "choose_recompute": {"level": [0.009, 0.021]}, "offload_activations": OFFLOAD},
    ),
    "pp2, a budget": (2, "gpt", "--pp 2 --seq-len 128", {"memory_budget": 0.9, "offload_activations": {"min_bytes": 64}}),
    "auto, mp2, accumulation": (2, "gpt", "--mp 2 --gradient-accumulation 3 --batch-size 6", AUTO),
    "auto, pp2 mp2, recompute": (4, "gpt", "--pp 2 --mp 2 --micro-batches 6 --batch-size 6 --recompute full", AUTO),
    "auto, pp2 mp2, sequence parallel, bfloat16 O2, master gradients": (
        4,
        "llama",
        "--pp 2 --mp 2 --kv-heads 2 --sequence-parallel --micro-batches 6 --batch-size 6 --amp O2 --master-grad",
        AUTO,
    ),
    "auto, pp4": (4, "gpt", "--pp 4 --micro-batches 8", AUTO),
    "pp4, forms, weight_delays and orders by stage, some recomputed": (
        4,
        "gpt",
        "--pp 4 --micro-batches 8",
        {
            "schedule_1f1b": {
                **ROOMY,
                "interleave": ["mixed", "dx-first", "mixed", "mixed"],
                "weight_delay": [0, 1, 2, 3],
                "weight_delay_at_end": [0, 1, 3, 5],
                "send_latency_weight_at_end": [0.5, 0, 0.5, 0.5],
                "depth": [6, 4, 3, 1],
                "inline_share": [0, 0.3, 0, 0.5],
                "send_latency_weight": [0, 0.5, 0, 0.5],
            },
            "choose_recompute": {"level": [0.4, 0.2, 0.1, 0]},
        },
    ),
    "pp2 vpp2, weight gradients trail": (
        2,
        "gpt",
        "--pp 2 --vpp 2 --micro-batches 4",
        {"schedule_1f1b": {**ROOMY, "weight_delay": [1, 3], "inline_share": 0.4}},
    ),
    "auto, pp2 vpp2": (2, "gpt", "--pp 2 --vpp 2 --micro-batches 4", AUTO),
    "auto, dp2 pp2, offload": (4, "gpt", "--dp 2 --pp 2", {**AUTO, "offload_activations": HALF}),
    "dp2 mp2 sharding 3, clip": (
        4,
        "llama",
        "--dp 2 --mp 2 --sharding-stage 3 --clip-grad 1 --schedule 1F1B --micro-batches 2",
        {"schedule_1f1b": MIXED},
    ),
    "dp2, experts, shared expert, clip, recompute and offload by module": (
        2,
        "moe",
        "--dp 2 --flat-mesh --shared-expert --recompute mlp --clip-grad 1 --schedule 1F1B --micro-batches 2",
        {"schedule_1f1b": MIXED, "offload_activations": {"modules": ["attention"], "min_bytes": 64}},
    ),
    "dp2 pp2, experts, pp + 1 micro-batches": (4, "moe", "--dp 2 --pp 2 --micro-batches 3 --batch-size 6", {"schedule_1f1b": ROOMY}),
}
"""Their programs are not among the stored ones of `tests/captured`."""

LONG = {
    "dp2 mp2 pp2, experts": (
        8,
        "moe",
        "--dp 2 --mp 2 --pp 2 --micro-batches 3 --batch-size 6 --dense-every 0 --recompute mlp --hidden 32 --vocab 64",
        {"schedule_1f1b": ROOMY},
    ),
    "dp2 mp2 sharding 2": (
        4,
        "llama",
        "--dp 2 --mp 2 --sharding-stage 2 --schedule 1F1B --micro-batches 3 --batch-size 6",
        {"schedule_1f1b": MIXED},
    ),
    "dp2 mp2 sharding 1 over fused buffers": (
        4,
        "llama",
        "--dp 2 --mp 2 --hidden 128 --sharding-stage 1 --sharding-fusion --schedule 1F1B --micro-batches 2",
        {"schedule_1f1b": ROOMY},
    ),
}
"""On the testbed and on CPU ranks, with `make test-long` only. (Paddle fuses buffers in sharding stage 1 only.)"""

ON_THE_TESTBED = {**CASES, **UNCAPTURED, **LONG}
LONG_ON_THE_TESTBED = (
    *LONG,
    "mp2, clip, accumulation: column overlap",
    "pp2 mixed, offload",
    "pp2 mp2 bfloat16 O2, master gradients",
    "pp2 mp2, everything on",
)
"""Beside `LONG`: any two parts of these cases (parallelism, form, offload, recomputation, number type) meet in another case too, there or
on CPU ranks."""
STATE = {"fraction": 1.0, "min_bytes": 64}
ON_CPU_RANKS = {
    "dp2 sharding 2, clip, optimizer state on the host": (
        2,
        "gpt",
        "--dp 2 --layers 2 --sharding-stage 2 --clip-grad 1 --gradient-accumulation 2 --lr-scheduler cosine",
        {"schedule_1f1b": ROOMY, "offload_optimizer_state": STATE},
    ),
    "pp2 bfloat16 O2, master weights and activations on the host": (
        2,
        "llama",
        "--pp 2 --layers 2 --micro-batches 4 --amp O2 --master-grad --clip-grad 1",
        {"schedule_1f1b": ROOMY, "offload_activations": HALF, "offload_optimizer_state": STATE},
    ),
    "pp2 mp2, blocks that another stream reads last are returned": (
        4,
        "gpt",
        "--pp 2 --mp 2 --micro-batches 4",
        {"schedule_1f1b": ROOMY, "return_memory": {"min_bytes": 64}},
    ),
    "dp2 sharding 1 over fused buffers, clip": (
        2,
        "llama",
        "--dp 2 --hidden 128 --sharding-stage 1 --sharding-fusion --clip-grad 1 --schedule 1F1B --micro-batches 2",
        {"schedule_1f1b": ROOMY},
    ),
    "mp2, sequence parallel, all recomputed, collectives too": (
        2,
        "llama",
        "--mp 2 --kv-heads 2 --sequence-parallel --gradient-accumulation 2",
        {"schedule_1f1b": ROOMY, "choose_recompute": {"level": 1, "repeat_collectives": True}},
    ),
}
"""The executor's in-place pass, which runs on CPU ranks, puts clipped gradients into the fused buffer, and does less where blocks have a
reader more; collectives that are added."""
ALSO_ON_CPU_RANKS = ("one rank, accumulation, offload", "mp2, clip, accumulation: column overlap")
LONG_ON_CPU_RANKS = (
    *LONG,
    "dp2, experts, shared expert, clip, recompute and offload by module",
    "dp2 pp2, experts, pp + 1 micro-batches",
    "dp2 mp2 sharding 1, clip",
    "dp2 mp2 sharding 3, clip",
    "mp2 sequence parallel, full recompute",
    "pp2 vpp2 mp2 mixed",
    "pp2, all offload, 2 pp + 1 micro-batches",
)
"""Collectives of every kind: experts, sharding, sequence parallelism; chunks, which `test_zoo.py` trains on CPU ranks too."""

ROWS = """
0 | 0F 1F 0B+2F 1B+3F 2B 3B O
1 | 0F 0I 1F 1I 0W 2F 2I 1W 3F 3I 2W 3W O
"""
"""A schedule of one's own: stage 0 in pairs, stage 1 with backward in parts."""


@functools.cache
def slow_device() -> str:
    """A profile of a device on which a model this small takes longer than its host: an H200 with a fraction of its rates."""
    profile = msgspec.json.decode(Path(str(importlib.resources.files("interlace.configs") / "devices" / "h200.json")).read_bytes())
    for table in (profile["matrix_flops"], profile["vector_flops"]):
        for rate in table.values():
            rate["per_s"] *= 1e-6
    profile["memory_rate"]["per_s"] *= 1e-5
    path = Path(tempfile.mkdtemp()) / "slow.json"
    path.write_bytes(msgspec.json.encode({**profile, "device": "a slow H200", "ops": []}))
    return str(path)


def configured(options: dict[str, Any]) -> str:
    """A configuration as YAML that takes the schedule as it is asked for: models this small gain nothing on an H200."""
    kept = {"schedule_1f1b": {**options.get("schedule_1f1b", {}), "only_gains": False}}
    device = slow_device() if options.get("device") == "slow" else "h200"
    return yaml.safe_dump({**options, **kept, "device": device})


def verified(tmp_path: Path, world: int, model: str, arguments: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train with unmodified Paddle and with these options; the result file of a run whose bits are the same."""
    config, result = tmp_path / "config.yaml", tmp_path / "result.json"
    config.write_text(configured(options))
    command = [
        "run",
        str(EXAMPLES / f"{model}.py"),
        "--world",
        str(world),
        "--config",
        str(config),
        "--verify",
        "--json",
        str(result),
        "--log-dir",
        str(tmp_path / "logs"),
        "--",
        *arguments.split(),
    ]
    assert main(command) == 0
    report: dict[str, Any] = msgspec.json.decode(result.read_bytes())
    assert report["verdict"] == "same"
    return report


def few_layers(words: str) -> str:
    """Arguments of a case with as few layers as it takes; more of them are more of the same."""
    layers = 4 if "--vpp" in words or "--pp 4" in words else 2
    return f"{words} --layers {layers}"


def passes_of(report: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """What each pass did, by rank."""
    return [rank["plan"]["passes"] for rank in report["runs"]["interlace"]["ranks"]]


def lines_of(passes: list[list[dict[str, Any]]], name: str) -> list[str]:
    """Lines of what a pass changed, over all ranks."""
    return [line for mine in passes for each in mine if each["name"] == name for line in sentences(done_in(each))]


def require_asked(passes: list[list[dict[str, Any]]], options: dict[str, Any]) -> None:
    """The plans of all ranks did what the case is about."""
    assert lines_of(passes, "split-backward")
    if "memory_budget" in options:
        assert any("computed again in backward: frees" in line for line in lines_of(passes, "choose-recompute"))
        assert any("on a GPU the plan holds" in line for line in lines_of(passes, "offload-activations"))
    elif "return_memory" in options:
        assert all(
            any("given back in the order of their own stream" in line for line in lines_of([mine], "return-memory")) for mine in passes
        )
    elif options.get("choose_recompute", {}).get("repeat_collectives"):
        again = [line for line in lines_of(passes, "choose-recompute") if "computed again in backward: frees" in line]
        assert any("all_gather" in line or "reduce_scatter" in line for line in again)
    elif "offload_optimizer_state" in options:
        assert all(
            any("of optimizer state in host memory" in line for line in lines_of([mine], "offload-optimizer-state")) for mine in passes
        )
    elif "offload_activations" in options:
        assert any("moves" in line for line in lines_of(passes, "offload-activations"))


ON_CPU = (*ALSO_ON_CPU_RANKS, *ON_CPU_RANKS, *(pytest.param(name, marks=pytest.mark.long) for name in LONG_ON_CPU_RANKS))


@pytest.mark.parametrize("name", ON_CPU)
def test_same_bits_as_baseline(name: str, tmp_path: Path) -> None:
    world, model, words, options = {**ON_THE_TESTBED, **ON_CPU_RANKS}[name]
    require_asked(passes_of(verified(tmp_path, world, model, few_layers(words), options)), options)


def test_a_schedule_from_a_file(tmp_path: Path) -> None:
    """Pairing, streams and offload work on any schedule that is written as rows of slots."""
    rows = tmp_path / "rows.txt"
    rows.write_text(ROWS)
    options = {"schedule_1f1b": {"schedule_file": str(rows), "extra_live_bytes": "1GB"}, "offload_activations": OFFLOAD}
    passes = passes_of(verified(tmp_path, 2, "gpt", "--pp 2 --micro-batches 4 --layers 2", options))
    assert any("0B+2F" in line for line in lines_of(passes, "schedule-1f1b"))
    assert any("0I 1F 1I" in line for line in lines_of(passes, "schedule-1f1b"))
