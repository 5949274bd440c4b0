"""Cases that train: layouts, arguments of the examples and options."""

from __future__ import annotations

from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
OFFLOAD = {"fraction": 1.0, "min_bytes": 64}
ALL = {"allocate_on_compute": {"min_bytes": 0}}
MIXED = {**ALL, "memory_budget": "off", "schedule_1f1b": {"interleave": "mixed"}}
HALF = {"fraction": 0.5, "min_bytes": 64}
AUTO = {**ALL, "device": "slow", "memory_budget": "off", "schedule_1f1b": {"interleave": "auto"}}
ROOMY = {**ALL, "memory_budget": "off", "schedule_1f1b": {"interleave": "dx-first"}}
CASES = {
    "one rank, no accumulation, offload": (1, "gpt", "--steps 2", {**ROOMY, "offload_activations": OFFLOAD}),
    "one rank, accumulation, offload": (
        1,
        "gpt",
        "--gradient-accumulation 3 --batch-size 6",
        {**ROOMY, "offload_activations": OFFLOAD},
    ),
    "mp2, clip, accumulation: column overlap": (2, "gpt", "--mp 2 --clip-grad 1 --gradient-accumulation 2", {**ROOMY}),
    "mp2 without accumulation": (2, "gpt", "--mp 2 --split-qkv", {**ROOMY}),
    "pp2, half offload, pp micro-batches": (2, "gpt", "--pp 2 --micro-batches 2", {**ROOMY, "offload_activations": HALF}),
    "pp2, all offload, 2 pp + 1 micro-batches": (
        2,
        "gpt",
        "--pp 2 --micro-batches 5 --batch-size 10",
        {**ROOMY, "offload_activations": OFFLOAD},
    ),
    "pp2 mixed, offload": (2, "gpt", "--pp 2 --micro-batches 6 --batch-size 6", {**MIXED, "offload_activations": OFFLOAD}),
    "pp2 FThenB, offload": (2, "gpt", "--pp 2 --schedule FThenB", {**ROOMY, "offload_activations": OFFLOAD}),
    "pp4 zero bubble": (4, "gpt", "--pp 4 --micro-batches 8", {"schedule_1f1b": {"interleave": "zb-h1"}, "offload_activations": OFFLOAD}),
    "pp2 recompute": (2, "gpt", "--pp 2 --recompute full", {**ROOMY, "offload_activations": OFFLOAD}),
    "pp2 vpp2, offload": (2, "gpt", "--pp 2 --vpp 2 --micro-batches 4", {**ROOMY, "offload_activations": OFFLOAD}),
    "pp2 vpp2 mp2 mixed": (4, "llama", "--pp 2 --vpp 2 --mp 2 --kv-heads 2 --micro-batches 4", {**MIXED}),
    "pp2 mp2, everything on": (4, "gpt", "--pp 2 --mp 2 --micro-batches 8", {**ROOMY, "offload_activations": OFFLOAD}),
    "pp2 mp2 sequence parallel, GQA": (
        4,
        "llama",
        "--pp 2 --mp 2 --kv-heads 2 --sequence-parallel",
        {**MIXED, "offload_activations": OFFLOAD},
    ),
    "dp2 mp2 sharding 1, clip": (4, "llama", "--dp 2 --mp 2 --sharding-stage 1 --gradient-accumulation 2", {**ROOMY}),
    "dp2 pp2 sharding 2": (4, "gpt", "--dp 2 --pp 2 --sharding-stage 2", {**ROOMY, "offload_activations": OFFLOAD}),
    "dp2 sharding 1 over fused buffers": (2, "gpt", "--dp 2 --layers 2 --sharding-stage 1 --sharding-fusion", {**ROOMY}),
    "dp2 pp2 sharding 1 over fused buffers, overlapped, bfloat16 O2": (
        4,
        "llama",
        "--dp 2 --pp 2 --layers 2 --hidden 128 --sharding-stage 1 --sharding-fusion --sharding-overlap --amp O2 --master-grad",
        {**ROOMY, "offload_activations": OFFLOAD},
    ),
    "pp2 mp2 bfloat16 O2, master gradients": (
        4,
        "llama",
        "--pp 2 --mp 2 --amp O2 --master-grad --clip-grad 1",
        {**ROOMY, "offload_activations": OFFLOAD},
    ),
    "pp4 mixed, offload": (4, "gpt", "--pp 4 --micro-batches 8", {**MIXED, "offload_activations": OFFLOAD}),
}
UNCAPTURED = {
    "mp2 sequence parallel, recompute that is left out": (
        2,
        "llama",
        "--mp 2 --kv-heads 2 --sequence-parallel --recompute full --gradient-accumulation 2",
        {**ROOMY, "choose_recompute": {"level": 0}},
    ),
    "mp2 sequence parallel, full recompute": (
        2,
        "llama",
        "--mp 2 --kv-heads 2 --sequence-parallel --recompute full --gradient-accumulation 2",
        {**ROOMY},
    ),
    "pp2, recompute of which some is left out, some is added, and offload": (
        2,
        "gpt",
        "--pp 2 --recompute mlp --seq-len 128",
        {**ROOMY, "choose_recompute": {"level": [0.009, 0.021]}, "offload_activations": OFFLOAD},
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
            "memory_budget": "off",
            "schedule_1f1b": {
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
    "pp2, forms, weight_delays and orders by stage, some recomputed": (
        2,
        "gpt",
        "--pp 2 --micro-batches 8",
        {
            "memory_budget": "off",
            "schedule_1f1b": {
                "interleave": ["mixed", "dx-first"],
                "weight_delay": [0, 2],
                "weight_delay_at_end": [0, 3],
                "send_latency_weight_at_end": [0.5, 0],
                "depth": [4, 1],
                "inline_share": [0.3, 0],
                "send_latency_weight": [0, 0.5],
            },
            "choose_recompute": {"level": [0.4, 0.2]},
        },
    ),
    "pp2 zero bubble": (
        2,
        "gpt",
        "--pp 2 --micro-batches 8",
        {"schedule_1f1b": {"interleave": "zb-h1"}, "offload_activations": OFFLOAD},
    ),
    "pp2 vpp2, weight gradients trail": (
        2,
        "gpt",
        "--pp 2 --vpp 2 --micro-batches 4",
        {**ROOMY, "schedule_1f1b": {"interleave": "dx-first", "weight_delay": [1, 3], "inline_share": 0.4}},
    ),
    "auto, pp2 vpp2": (2, "gpt", "--pp 2 --vpp 2 --micro-batches 4", AUTO),
    "auto, dp2 pp2, offload": (4, "gpt", "--dp 2 --pp 2", {**AUTO, "offload_activations": HALF}),
    "dp2 mp2 sharding 3, clip": (
        4,
        "llama",
        "--dp 2 --mp 2 --sharding-stage 3 --clip-grad 1 --schedule 1F1B --micro-batches 2",
        {**MIXED},
    ),
    "dp2, experts, shared expert, clip, recompute and offload by module": (
        2,
        "moe",
        "--dp 2 --flat-mesh --shared-expert --recompute mlp --clip-grad 1 --schedule 1F1B --micro-batches 2",
        {**MIXED, "offload_activations": {"modules": ["attention"], "min_bytes": 64}},
    ),
    "pp3 vpp2, shared embedding, optimizer state on the host": (
        3,
        "gpt",
        "--pp 3 --vpp 2 --micro-batches 3 --batch-size 6 --tie-embeddings",
        {**ROOMY, "offload_optimizer_state": OFFLOAD},
    ),
    "dp2 pp2, experts, pp + 1 micro-batches": (4, "moe", "--dp 2 --pp 2 --micro-batches 3 --batch-size 6", {**ROOMY}),
}
"""Their programs are not among the stored ones of `tests/captured`."""
LONG = {
    "dp2 mp2 pp2, experts": (
        8,
        "moe",
        "--dp 2 --mp 2 --pp 2 --micro-batches 3 --batch-size 6 --dense-every 0 --recompute mlp --hidden 32 --vocab 64",
        {**ROOMY},
    ),
    "dp2 mp2 sharding 2": (
        4,
        "llama",
        "--dp 2 --mp 2 --sharding-stage 2 --schedule 1F1B --micro-batches 3 --batch-size 6",
        {**MIXED},
    ),
    "dp2 mp2 sharding 1 over fused buffers": (
        4,
        "llama",
        "--dp 2 --mp 2 --hidden 128 --sharding-stage 1 --sharding-fusion --schedule 1F1B --micro-batches 2",
        {**ROOMY},
    ),
}
"""On the testbed and on CPU ranks, with `make test-long` only. (Paddle fuses buffers in sharding stage 1 only.)"""
ON_THE_TESTBED = {**CASES, **UNCAPTURED, **LONG}
LONG_ON_THE_TESTBED = (
    *LONG,
    "one rank, no accumulation, offload",
    "pp2, half offload, pp micro-batches",
    "pp2 recompute",
    "pp2 vpp2, offload",
    "dp2 sharding 1 over fused buffers",
    "pp2 vpp2, weight gradients trail",
    "dp2 mp2 sharding 1, clip",
    "auto, pp2 mp2, sequence parallel, bfloat16 O2, master gradients",
    "auto, dp2 pp2, offload",
    "auto, pp2 vpp2",
    "auto, mp2, accumulation",
    "mp2 without accumulation",
    "mp2, clip, accumulation: column overlap",
    "pp2 mixed, offload",
    "pp2 mp2 bfloat16 O2, master gradients",
    "pp2 mp2, everything on",
    "pp2, all offload, 2 pp + 1 micro-batches",
    "pp2 vpp2 mp2 mixed",
    "dp2 pp2 sharding 2",
    "mp2 sequence parallel, full recompute",
    "auto, pp2 mp2, recompute",
    "pp3 vpp2, shared embedding, optimizer state on the host",
    "one rank, accumulation, offload",
    "pp4 mixed, offload",
    "pp2, a budget",
    "pp4, forms, weight_delays and orders by stage, some recomputed",
    "pp4 zero bubble",
    "pp2, recompute of which some is left out, some is added, and offload",
    "dp2, experts, shared expert, clip, recompute and offload by module",
    "dp2 pp2 sharding 1 over fused buffers, overlapped, bfloat16 O2",
    "pp2 mp2 sequence parallel, GQA",
)
"""Beside `LONG`: any two parts of these cases (parallelism, form, offload, recomputation, number type) meet in another case too, there or
on CPU ranks; sharding stage 1 and chunks beside mp, sharding and fused buffers beside pp, and bfloat16 and grouped queries beside sequence
parallelism, in plans that `tests/captured` proves, `auto` beside accumulation and chunks in those of `tests/planning/test_whole_step.py`.
`tests/testbed/test_peak.py` runs a plan within a budget, `tests/scheduler/test_offload.py` moves what modules keep."""
