"""Measure on GPUs: `python -m benchmarks.gpu.training --gpus N --out FOLDER`.

Times single operations, and the host's time per operation and per job, then trains GPT and Llama layers, mostly of hidden size 4096, with
Paddle's baseline and with Interlace plans. Many runs are prepared at once; each is measured while no other run uses its GPUs. A JSON file
is written for each case as soon as it has results: machine, versions, step times with their spread, peak memory, losses, a summary of the
traced step. Traces, and every rank's program and plan, are stored beside them; `benchmarks.gpu.results` collects and prints the results.
`--power` adds power, clock, temperature and energy of each GPU during the measured steps, read from NVML (nvidia-ml-py).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import alone as alone
from benchmarks.gpu import nvml
from benchmarks.gpu.results import NOT_STARTED
from interlace.bridge.nvml import gpu_uuid
from interlace.outside import CONNECTIONS_VARIABLE
from testbed import measure
from testbed.device import SWITCHES_VARIABLE
from testbed.gpus import ROOT, find_libraries, machine, python_path

STEPS = 12
BIG = (
    f"--hidden 4096 --heads 32 --vocab 8192 --steps {STEPS} --optimizer sgd --learning-rate 1e-3 "
    "--amp O2 --master-grad --attention flash --schedule 1F1B"
).split()
LAYOUTS = [
    {"pp": pp, "mp": mp, "dp": dp, "m": m, "sharding": sharding}
    for pp, mp, dp, sharding, counts in (
        (2, 1, 1, 0, (4, 8, 16, 32)),
        (1, 2, 1, 0, (4, 8, 16, 32)),
        (1, 1, 2, 0, (8,)),
        (1, 1, 2, 1, (4, 8, 16)),
        (1, 1, 2, 2, (8,)),
        (1, 1, 2, 3, (8,)),
        (4, 1, 1, 0, (8, 16)),
        (2, 2, 1, 0, (8, 16)),
        (1, 4, 1, 0, (4, 8)),
        (2, 1, 2, 1, (8, 16)),
        (1, 2, 2, 1, (4, 8)),
        (1, 1, 4, 1, (4, 8)),
    )
    for m in counts
]
"""Parameters that vary for two and for four GPUs, and their values."""
LAYOUT_MODEL = (*BIG, "--layers", "4", "--seq-len", "2048", "--batch-size", "32", "--optimizer", "adamw")
LAYOUT_WORDS = ("--pp", "{pp}", "--mp", "{mp}", "--dp", "{dp}", "--micro-batches", "{m}", "--sharding-stage", "{sharding}")
WIDE = ("--hidden", "5120", "--heads", "40")
SMALL = ("--layers", "2", "--steps", "8", "--micro-batches", "4", "--schedule", "1F1B")
DRY = ("--hidden", "64", "--heads", "4", "--vocab", "64", "--seq-len", "16")  # after BIG: the same runs, small
DRY_GROUPS = ("--kv-heads", "2", "--intermediate", "128")  # with grouped queries also these
CASE_TIMEOUT_S, PREPARED_TIMEOUT_S = 400.0, 100.0  # a run waits for the others of its wave
WARM_STEPS, LONG_RUN, WARM_OF_LONG, QUIET_STEPS, TRACED_STEPS = 2, 16, 9, 5, 3
"""Numbers of steps: the first ones of a run, which do not count; those of a long run; the first ones of a long run, which do not count
while the host's lead and clocks settle; those without growth of memory pools before the steps of a long run count; and the last ones, which
are traced and do not count."""


DEVICE = ROOT / "benchmarks" / "results" / "h200" / "testbed_profile.json"
"""Times of the testbed's kernels (`benchmarks.gpu.traced_ops`), some of which differ from those of Paddle's GPU place."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a case is run: configuration text without the device (none for Paddle's baseline), switches of the testbed, environment."""

    name: str
    config: str | None
    switches: str = ""
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """A script, its ranks and arguments, and the plans with which it is run."""

    name: str
    script: str
    world: int
    args: tuple[str, ...]
    plans: tuple[Plan, ...]
    env: tuple[tuple[str, str], ...] = ()

    @property
    def path(self) -> Path:
        return ROOT / ("benchmarks/zoo/models.py" if self.script == "zoo" else f"examples/{self.script}.py")


def _pairs(form: str, offload: float = 0.0, more: str = "") -> str:
    text = f"memory_budget: off\nschedule_1f1b: {{interleave: {form}, only_gains: off}}\n{more}"
    return text + (f"offload_activations: {{fraction: {offload}, min_bytes: 1MB}}\n" if offload else "")


BASELINE, AGAIN = Plan("stock", None), Plan("stock-again", None)
COLUMN, DX, MIXED, ZB = (
    Plan(name, _pairs(form)) for name, form in (("column", "off"), ("dx-first", "dx-first"), ("mixed", "mixed"), ("zb-h1", "zb-h1"))
)
WEIGHT_DELAYS = tuple(
    Plan(name, _pairs(f"dx-first, weight_delay: {weight_delay}"))
    for name, weight_delay in (("lag-1", "1"), ("lag-1-2", "[1, 2]"), ("lag-0-1", "[0, 1]"), ("lag-2", "2"))
)
"""Weight gradients that are delayed by one micro-batch or more; on the second of two stages by more."""
AUTO = Plan("auto", "schedule_1f1b: {interleave: auto}\n"), Plan("auto-8gb", "memory_budget: +8GB\nschedule_1f1b: {interleave: auto}\n")
"""Within the memory of Paddle's baseline, and with more."""
POOLS = Plan("pools-1", f"pool_budget: 1.0\n{AUTO[0].config}")
"""Allocator pools take no more than the baseline's in simulation."""
CONNECTIONS = tuple(
    replace(plan, name=f"{plan.name}-{count}-connections", env=((CONNECTIONS_VARIABLE, count),))
    for plan, count in ((BASELINE, "32"), (AUTO[0], "8"))
)
"""The baseline and Interlace with each other's number of connections to a GPU: by default the baseline has CUDA's default, Interlace plans
have the maximum."""
TUNED = Plan("tuned", f"tune: on\n{AUTO[0].config}")
"""Plans measured on the run's own steps; a trial of the baseline and three plans takes 95 to 185 of them (`--steps 200`)."""
BUDGETS = {
    "gpt-s2048-mp1-pp2": (0.95, 0.9, 0.85),
    "llama-s2048-mp1-pp2": (0.9, 0.8, 0.7),
    "gpt-s4096-mp1-pp2": (0.9, 0.8, 0.7),
    "llama-s4096-mp1-pp2": (0.9, 0.75, 0.6),
    "gpt-s2048-mp1-pp2-vpp2": (0.9, 0.8),
    "llama-s2048-mp1-pp2-vpp2": (0.8, 0.7),
    "gpt-2-layers-s2048-mp1-b4": (0.9, 0.85, 0.8),
    "llama-2-layers-s2048-mp1-b4": (0.75, 0.65, 0.55),
    "gpt-4-layers-s2048-mp1-b4": (0.9, 0.8, 0.75),
    "llama-4-layers-s2048-mp1-b4": (0.7, 0.6, 0.5),
}
"""Budgets by case, as shares of what Paddle's baseline holds on its fullest rank; the last is close to the least feasible one."""
DELAYS = tuple(
    Plan(f"{plan.name}-{name}", f"{plan.config}delay_transfers: {option}\n")
    for plan in (AUTO[0], ZB)
    for name, option in (("undelayed", "off"), ("margin-0", "{margin_us: 0}"), ("margin-500", "{margin_us: 500}"))
)
"""Transfers that are posted as early as possible, or with different margins before their peer is expected."""
OTHER_SHAPES = {
    "gpt-h3072-s1536-pp2-m12": "--pp 2 --hidden 3072 --heads 24 --layers 6 --seq-len 1536 --batch-size 24 --micro-batches 12 --vocab 50304",
    "llama-h3584-kv4-s3072-pp2-m6": "--pp 2 --hidden 3584 --heads 28 --kv-heads 4 --intermediate 9728 --layers 6 --seq-len 3072 "
    "--batch-size 6 --micro-batches 6 --vocab 32000",
    "llama-h5120-s3072-mp2-m4": "--mp 2 --hidden 5120 --heads 40 --intermediate 13824 --layers 2 --seq-len 3072 --batch-size 8 "
    "--micro-batches 4 --vocab 32000",
    "gpt-h6144-s2048-mp2-sp-m6": "--mp 2 --sequence-parallel --hidden 6144 --heads 48 --layers 2 --seq-len 2048 --batch-size 12 "
    "--micro-batches 6 --vocab 50304",
    "gpt-h3072-s1536-dp2-adamw-m6": "--dp 2 --sharding-stage 1 --optimizer adamw --hidden 3072 --heads 24 --layers 5 --seq-len 1536 "
    "--batch-size 48 --micro-batches 6 --vocab 50304",
    "llama-h2560-s2560-mp2-m3": "--mp 2 --hidden 2560 --heads 20 --intermediate 6912 --layers 6 --seq-len 2560 --batch-size 18 "
    "--micro-batches 3 --vocab 32000",
    "gpt-h2560-s3072-pp2-recomputed-m8": "--pp 2 --recompute mlp --hidden 2560 --heads 20 --layers 10 --seq-len 3072 --batch-size 16 "
    "--micro-batches 8",
    "llama-h6144-s1024-pp2-m5": "--pp 2 --hidden 6144 --heads 48 --intermediate 16384 --layers 4 --seq-len 1024 --batch-size 10 "
    "--micro-batches 5 --vocab 32000",
}
"""Cases on two GPUs with combinations of width, depth, sequence and batch that no other case has, to test predictions."""
ZOO_WORDS = ("--amp", "O2", "--attention", "flash", "--steps", str(STEPS), "--learning-rate", "1e-3")
"""Arguments of all networks of the zoo."""
WIDE_BLOCK = "--hidden 4096 --heads 32 --kv-heads 8 --gated --no-bias --intermediate 14336 --vocab 32000"
ZOO = {
    "bert-pp2": "bert --hidden 1024 --heads 16 --layers 12 --vocab 30522 --seq-len 512 --dropout 0.1 --pp 2 --micro-batches 8 "
    "--batch-size 128",
    "bert-mp2-once": "bert --hidden 2048 --heads 32 --layers 8 --vocab 30522 --seq-len 512 --dropout 0.1 --mp 2 --batch-size 64",
    "bert-dp2-once": "bert --hidden 2048 --heads 32 --layers 8 --vocab 30522 --seq-len 512 --dropout 0.1 --dp 2 --batch-size 64",
    "encoder-decoder-pp2": "encoder-decoder --hidden 4096 --heads 32 --vocab 32768 --layers 4 --seq-len 1024 --pp 2 --micro-batches 8 "
    "--batch-size 16",
    "vision-pp2": "vision --hidden 3072 --heads 24 --layers 8 --seq-len 1024 --vocab 1000 --pp 2 --micro-batches 8 --batch-size 32",
    "diffusion-pp2": "diffusion --hidden 2304 --heads 24 --layers 12 --seq-len 1024 --pp 2 --micro-batches 8 --batch-size 32",
    "parallel-mp2": "parallel --hidden 4096 --heads 32 --layers 4 --vocab 50400 --seq-len 2048 --mp 2 --schedule 1F1B --micro-batches 8",
    "uneven-pp2": f"decoder {WIDE_BLOCK} --layers 4 --stage-layers 3,1 --seq-len 2048 --pp 2 --micro-batches 8",
    "head-128k-pp2": f"decoder {WIDE_BLOCK} --vocab 128256 --layers 4 --seq-len 4096 --pp 2 --micro-batches 8",
    "vpp3-pp2": f"decoder {WIDE_BLOCK} --layers 6 --seq-len 2048 --pp 2 --vpp 3 --micro-batches 8",
    "long-mp2": f"decoder {WIDE_BLOCK} --layers 4 --seq-len 4096 --mp 2 --schedule 1F1B --micro-batches 4",
    "recomputed-pp2": f"decoder {WIDE_BLOCK} --layers 4 --seq-len 4096 --pp 2 --micro-batches 8 --recompute-every 2",
    "sharding3-dp2": f"decoder {WIDE_BLOCK} --layers 2 --seq-len 2048 --dp 2 --sharding-stage 3 --gradient-accumulation 4 --batch-size 16",
    "sharding1-dp2": f"decoder {WIDE_BLOCK} --layers 2 --seq-len 2048 --dp 2 --sharding-stage 1 --gradient-accumulation 4 "
    "--batch-size 16 --clip-grad 1",
}
"""Networks of the zoo at sizes for two GPUs; no option of Interlace was tuned for them."""
PADDING = {
    f"bert-{vocab}": "bert --hidden 1024 --heads 16 --layers 12 --seq-len 512 --dropout 0.1 --schedule 1F1B --micro-batches 8 "
    f"--batch-size 128 --vocab {vocab}"
    for vocab in (30522, 30528)
}
"""BERT on one GPU with its vocabulary, and with a vocabulary that makes rows of multiples of 16 bytes."""
OWN_POOLS = Plan("auto-own-pools", f"allocate_on_compute: off\n{AUTO[0].config}")
"""Collectives take their results from pools of their own streams (decision 032 says what the default does)."""
OFFLOADS = tuple(Plan(f"offload-{share:g}", _pairs("dx-first", share)) for share in (0.5, 1.0))
CAPTURED = tuple(
    replace(plan, name=f"{plan.name}-captured", config=f"{plan.config}capture: on\n") for plan in (AUTO[0], MIXED, OFFLOADS[1])
)
"""Steps that are launched as a graph, and the same plans with issued operations."""
ALL = (BASELINE, COLUMN, DX, MIXED, *OFFLOADS)
SOME = (BASELINE, DX, MIXED, OFFLOADS[1])
FORMS = (BASELINE, DX, MIXED, ZB)
ORDER = "schedule_1f1b: {interleave: off}\nsplit_backward: off\noverlap_column_backward: off\n"
PEAK = (
    BASELINE,
    Plan("plain", ORDER + "offload_activations: off\n"),
    Plan("offload", ORDER + "offload_activations: {fraction: 1.0, min_bytes: 1MB}\n"),
)
UNHELD = "throttle_host: off\n"
FREE = (Plan("dx-first-free", _pairs("dx-first", 0.0, UNHELD)), Plan("offload-1-free", _pairs("dx-first", 1.0, UNHELD)))
LEVEL = tuple(replace(plan, name=f"{plan.name}-no-priorities", switches="priorities=0") for plan in (DX, MIXED, ZB))
"""Plans in which all streams have the same priority, for comparison with those that prefer communication."""
PINNED = tuple(
    replace(OFFLOADS[1], name=f"offload-1-{name}", switches=f"pinned_slab={mebibytes}")
    for name, mebibytes in (("no-slab", 0), ("one-slab", 16384))
)


def _layers(
    script: str,
    seq: int,
    mp: int,
    pp: int = 1,
    vpp: int = 1,
    plans: tuple[Plan, ...] = ALL,
    batch: int = 1,
    micro_batches: int = 8,
    more: tuple[str, ...] = (),
) -> Case:
    """Layers of the 6.7B size: two per stage and chunk, `micro_batches` of `batch` sequences.

    The nine parameters are what a case may vary; default values are left out of the case's name.
    """
    sizes = (("pp", pp, 1), ("vpp", vpp, 1), ("b", batch, 1), ("m", micro_batches, 8))
    parts = [
        script,
        f"s{seq}",
        f"mp{mp}",
        *(f"{name}{size}" for name, size, usual in sizes if size != usual),
        *(name for option, name in (("--fused", "fused"), ("--sequence-parallel", "sp")) if option in more),
    ]
    sized = f"--layers {2 * pp * vpp} --seq-len {seq} --batch-size {micro_batches * batch} --micro-batches {micro_batches}"
    args = (*BIG, *f"{sized} --mp {mp} --pp {pp}".split(), *(("--intermediate", "11008") if script == "llama" else ()), *more)
    if vpp > 1:  # Paddle 3.3.1 cannot build VPP with master gradients
        args = (*(word for word in args if word != "--master-grad"), "--vpp", str(vpp), "--schedule", "VPP")
    return Case("-".join(parts), script, mp * pp, args, plans)


def cases(gpus: int) -> list[Case]:
    """The cases for this number of GPUs, most important first."""
    models, widths = ("gpt", "llama"), [mp for mp in (2, 4) if mp <= gpus]
    found = [
        _layers(
            model,
            2048,
            mp,
            batch=4,
            plans=(*ALL, WEIGHT_DELAYS[0], WEIGHT_DELAYS[3], *AUTO, *CONNECTIONS, TUNED, *FREE, AGAIN, *LEVEL[:2], *PINNED),
        )
        for mp in widths
        for model in models
    ]
    found += [_layers("llama", 2048, mp, batch=4, plans=SOME, more=("--fused",)) for mp in widths]
    found += [
        _layers(
            model,
            2048,
            mp,
            batch=4,
            plans=(*FORMS[:3], WEIGHT_DELAYS[0], WEIGHT_DELAYS[3], *AUTO, OWN_POOLS, *CONNECTIONS),
            more=("--sequence-parallel",),
        )
        for mp in widths
        for model in models
    ]
    found += [_layers(model, 4096, mp, batch=2, plans=(*ALL, *LEVEL[:2], *PINNED)) for mp in widths for model in models]
    found += [_layers(model, 2048, mp) for mp in widths for model in models]
    if gpus > 1:
        found += [
            _layers(
                model,
                2048,
                1,
                2,
                plans=(
                    *(BASELINE, ZB, DX, MIXED, *WEIGHT_DELAYS[:3], *AUTO, POOLS, *CONNECTIONS, TUNED, *DELAYS, *LEVEL, COLUMN),
                    *(*OFFLOADS, AGAIN),
                ),
            )
            for model in models
        ]
        found += [
            _layers(model, seq, 1, 2, plans=(*FORMS, *WEIGHT_DELAYS[:3], *AUTO, POOLS), micro_batches=count)
            for seq, count in ((4096, 8), (2048, 4), (4096, 4))
            for model in models
        ]
        found += [_layers(model, 2048, 1, 2, 2, plans=(*SOME, AUTO[0], POOLS, DELAYS[0])) for model in models]
        found += [*_wide(), *_data_parallel(), *_peaks(), *_experts(), *_states(), *_layouts(gpus)]
        found += [
            Case(name, name.partition("-")[0], 2, (*BIG, *told.split()), (BASELINE, AUTO[0], POOLS)) for name, told in OTHER_SHAPES.items()
        ]
        found += _zoo()
    if gpus > 3:
        found += [_layers(model, 2048, 2, 2, plans=(*SOME, AUTO[0]), batch=2) for model in models]
        found += [_layers(model, 4096, 2, 2, 2, plans=SOME) for model in models]
    found += [_layers(model, 2048, 1, plans=(BASELINE, DX, *OFFLOADS)) for model in models]
    found += [*_accumulation(), *_recomputed(), *_padding(), *_captured(gpus)]
    found += [_layers(model, 4096, mp, plans=(BASELINE, DX, MIXED)) for mp in (1, *widths) for model in models]
    return [_with_budgets(case) for case in (*found, *_small(gpus), *_puzzle(gpus))]


def _with_budgets(case: Case) -> Case:
    """The case with plans for budgets, in addition to its other plans."""
    more = (Plan(f"budget-{share:g}", f"memory_budget: {share}\n") for share in BUDGETS.get(case.name, ()))
    return replace(case, plans=(*case.plans, *more))


def _accumulation() -> list[Case]:
    """One GPU with gradient accumulation, two and four layers."""
    return [
        replace(
            _layers(model, 2048, 1, batch=4, plans=(BASELINE, AUTO[0], AGAIN), more=("--layers", str(layers))),
            name=f"{model}-{layers}-layers-s2048-mp1-b4",
        )
        for layers in (2, 4)
        for model in ("gpt", "llama")
    ]


def _recomputed() -> list[Case]:
    """One GPU, four layers of which the script recomputes a part: the baseline does that; Interlace decides it within the same memory."""
    return [
        replace(
            _layers(model, 2048, 1, batch=4, plans=(BASELINE, AUTO[0]), more=("--layers", "4", "--recompute", part)),
            name=f"{model}-4-layers-s2048-mp1-b4-recomputed-{part}",
        )
        for part in ("full", "attention", "mlp")
        for model in ("gpt", "llama")
    ]


def _captured(gpus: int) -> list[Case]:
    """Issued and launched steps, with short kernels, where the host bounds the step, and with the usual size."""
    plans = (BASELINE, AUTO[0], CAPTURED[0], MIXED, CAPTURED[1], OFFLOADS[1], CAPTURED[2], AGAIN)
    found = []
    for mp, pp in ((1, 1), (2, 1), (1, 2), (4, 1)):
        if mp * pp > gpus:
            continue
        for model in ("gpt", "llama"):
            for hidden in (1024, 2048, 4096):
                seq, count = (2048, 8) if hidden == 4096 else (1024, 32)
                more = (
                    "--hidden",
                    str(hidden),
                    "--heads",
                    str(hidden // 128),
                    *(("--intermediate", str(hidden * 43 // 16)) * (model == "llama")),
                )
                case = _layers(model, seq, mp, pp, plans=plans, micro_batches=count, more=more)
                found.append(replace(case, name=f"captured-{model}-h{hidden}-s{seq}-mp{mp}-pp{pp}-m{count}"))
    return found


def _wide() -> list[Case]:
    """Layers of the 13B size on two stages, with the vocabularies of GPT and Llama."""
    sizes = {"gpt": ("--vocab", "50304"), "llama": ("--vocab", "32000", "--intermediate", "13824", "--fused")}
    plans = (BASELINE, AUTO[0], TUNED, ZB, MIXED, OFFLOADS[1], AUTO[1], POOLS)
    return [
        replace(_layers(model, 2048, 1, 2, plans=plans, more=(*WIDE, *more)), name=f"{model}-13b-s2048-mp1-pp2")
        for model, more in sizes.items()
    ]


def _data_parallel() -> list[Case]:
    """Two replicas whose optimizer state is sharded, with accumulation."""
    plans, over = (BASELINE, AUTO[0], *CONNECTIONS, TUNED, MIXED, OFFLOADS[1]), ("--dp", "2", "--sharding-stage", "1")
    return [
        replace(
            _layers(model, 2048, 1, plans=plans, micro_batches=4, batch=4, more=(*over, *more)),
            name=f"{model}-s2048-dp2-sharding1-m4",
            world=2,
        )
        for model, more in (("gpt", ()), ("llama", ("--fused",)))
    ]


def _experts() -> list[Case]:
    """Eight experts over two ranks, dense and expert layers in turn, with accumulation; float32, as Paddle's CPU wheel has no other bmm."""
    args = (
        "--hidden 2048 --heads 16 --intermediate 8192 --vocab 8192 --layers 4 --seq-len 1024 "
        f"--steps {STEPS} --optimizer sgd --learning-rate 1e-3 --schedule 1F1B --dp 2 --experts 8 --batch-size 8 --micro-batches 4"
    )
    return [Case("moe-s1024-dp2-m4", "moe", 2, tuple(args.split()), (BASELINE, AUTO[0]))]


def _states() -> list[Case]:
    """Two stages with AdamW, whose state is moved to the host: as far as budgets require, and completely."""
    every = Plan("state-1", "offload_optimizer_state: {fraction: 1.0}\n")
    plans = (BASELINE, AUTO[0], POOLS, every, *(Plan(f"budget-{share:g}", f"memory_budget: {share}\n") for share in (0.9, 0.8, 0.7, 0.6)))
    more = ("--optimizer", "adamw")
    return [replace(_layers(model, 2048, 1, 2, plans=plans, more=more), name=f"{model}-adamw-s2048-pp2") for model in ("gpt", "llama")]


def _layouts(gpus: int) -> list[Case]:
    """One model and batch in every layout of `LAYOUTS` for this number of GPUs, which `interlace choose` ranks (benchmarks/layouts.py)."""
    found = []
    for layout in LAYOUTS:
        world = layout["pp"] * layout["mp"] * layout["dp"]
        if world > gpus:
            continue
        words = tuple(word.format(**layout) for word in LAYOUT_WORDS)
        name = "-".join(f"{key}{layout[key]}" for key in ("pp", "mp", "dp", "m", "sharding") if layout[key] != 1 or key == "sharding")
        found.append(Case(f"layout-gpt-{name}", "gpt", world, (*LAYOUT_MODEL, *words), (BASELINE, AUTO[0], *CONNECTIONS)))
    return found


def _zoo() -> list[Case]:
    """Networks of the zoo on two GPUs; Paddle 3.3.1 builds neither VPP nor sharding 3 with master gradients."""
    found = []
    for name, told in ZOO.items():
        half = () if "--vpp" in told or "--sharding-stage 3" in told else ("--master-grad",)
        found.append(Case(f"zoo-{name}", "zoo", 2, (*told.split(), *ZOO_WORDS, *half), (BASELINE, AUTO[0], OWN_POOLS, AGAIN)))
    return found


def _padding() -> list[Case]:
    """What a padded vocabulary saves."""
    return [
        Case(name, "zoo", 1, (*told.split(), *ZOO_WORDS, "--master-grad"), (BASELINE, AUTO[0], AGAIN)) for name, told in PADDING.items()
    ]


def _peaks() -> list[Case]:
    """Cases whose peak is what forward keeps for backward: few parameters, a small vocabulary, two micro-batches in flight."""
    found = []
    for hidden, seq in ((4096, 4096), (2048, 8192)):
        more = ("--hidden", str(hidden), "--heads", str(hidden // 128), "--vocab", "512")
        found.append(replace(_layers("gpt", seq, 1, 2, plans=PEAK, more=more), name=f"peak-gpt-h{hidden}-s{seq}-pp2"))
    return found


def _small(gpus: int) -> list[Case]:
    """The examples in their own sizes and float32, whose losses are compared with those on the CPU."""
    tiny = Plan("offload-1", _pairs("dx-first", 1.0).replace("1MB", "1KB"))
    found = [Case("small-gpt-fp32", "gpt", 1, SMALL, (BASELINE, DX, tiny))]
    if gpus > 1:
        found += [
            Case("small-gpt-fp32-pp2", "gpt", 2, (*SMALL, "--pp", "2"), (BASELINE, DX, tiny)),
            Case("small-llama-fp32-mp2", "llama", 2, (*SMALL, "--mp", "2", "--sequence-parallel"), (BASELINE, DX)),
        ]
    if gpus > 3:
        vpp = (*SMALL, "--pp", "2", "--mp", "2", "--vpp", "2", "--layers", "4", "--schedule", "VPP")
        found.append(Case("small-gpt-fp32-pp2-mp2-vpp2", "gpt", 4, vpp, (BASELINE, DX, tiny)))
    return found


def _puzzle(gpus: int) -> list[Case]:
    """Two cases of faults that are explained in testbed/README.md: losses that changed with Paddle's in-place pass, and slow steps on two
    GPUs."""
    told = (
        "--hidden 4096 --heads 32 --vocab 8192 --layers 2 --steps 6 --optimizer sgd --learning-rate 1e-3 "
        "--seq-len 2048 --batch-size 8 --micro-batches 8 --schedule 1F1B --amp O2 --master-grad"
    )
    args = tuple(told.split())
    found = [
        Case(f"inplace-{name}", "gpt", 1, args, (BASELINE, DX), (("TESTBED_INPLACE", value),))
        for name, value in (("off", "0"), ("on", "1"))
    ]
    if gpus > 1:
        wide = (*({"O2": "O1", "--master-grad": "--mp"}.get(word, word) for word in args), "2")
        found += [
            Case(f"gpt-mp2-O1-{name}", "gpt", 2, wide, (BASELINE, DX), (("TESTBED_TRACE_RUN", value),))
            for name, value in (("threads", "0"), ("one-thread", "1"))
        ]
    return found


# -- runs ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Bench:
    """Prepares many runs at once; results are added to files, which may have results of the same case, machine and versions."""

    out: Path
    variant: str
    device: str
    gpus: int
    ranks_at_once: int
    until: float
    samplers: dict[int, nvml.Sampler] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    gate: Path = field(init=False)

    def __post_init__(self) -> None:
        (self.out / "traces").mkdir(parents=True, exist_ok=True)

    def run(self, wanted: Sequence[Case]) -> None:
        """Run in waves: the runs of a wave are prepared together, and measured once the machine is idle again."""
        jobs = [(case, plan) for case in wanted for plan in case.plans]
        while jobs:
            wave: list[tuple[Case, Plan]] = []
            while jobs and sum(case.world for case, _ in wave) + jobs[0][0].world <= self.ranks_at_once:
                wave.append(jobs.pop(0))
            if time.monotonic() > self.until:
                for case, plan in wave:
                    self._keep(case, plan, {"failed": f"{NOT_STARTED}: no time was left"})
                continue
            self._wave(wave)

    def _wave(self, wave: list[tuple[Case, Plan]]) -> None:
        self.gate = Path(tempfile.mkdtemp(prefix="gate"))
        turns = dict.fromkeys((1, 2, 4), 0)
        with ThreadPoolExecutor(len(wave)) as pool:
            done = []
            for case, plan in wave:
                first = turns[case.world] * case.world % self.gpus // case.world * case.world
                turns[case.world] += 1
                done.append(pool.submit(self._one, case, plan, list(range(first, first + case.world))))
            ranks = sum(case.world for case, _ in wave)
            deadline = time.monotonic() + PREPARED_TIMEOUT_S
            while len(list(self.gate.glob("*.ready"))) < ranks and time.monotonic() < deadline:
                ranks = sum(case.world for (case, _), each in zip(wave, done, strict=True) if not each.done())
                time.sleep(0.05)
            time.sleep(1.0)
            (self.gate / "open").touch()
        shutil.rmtree(self.gate, ignore_errors=True)

    def _one(self, case: Case, plan: Plan, gpus: list[int]) -> None:
        try:
            found = self._run_plan(case, plan, gpus)
        except Exception as error:  # one run's failure is a result
            found = {"failed": f"{type(error).__name__}: {error}"}
        self._keep(case, plan, found)

    def _keep(self, case: Case, plan: Plan, found: dict[str, Any]) -> None:
        with self.lock:
            head = {"case": case.name, "world": case.world, "args": list(case.args), "variant": self.variant, **machine()}
            path = self.out / f"testbed_{case.name}.json"
            before = json.loads(path.read_text()) if path.exists() else {}
            same = {key: before.get(key) for key in head if key != "gpus"} == {key: head[key] for key in head if key != "gpus"}
            plans = {**(before["plans"] if same else {}), plan.name: found}
            print(f"{case.name} {plan.name}: {_headline(found)}{_bits(found, plans.get(BASELINE.name, {}))}", flush=True)
            path.write_text(json.dumps({**head, "plans": plans}, indent=1) + "\n")

    def _run_plan(self, case: Case, plan: Plan, gpus: list[int]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            room = Path(folder)
            words = [
                sys.executable,
                "-m",
                "interlace",
                "run",
                str(case.path),
                "--target",
                "testbed",
                "--world",
                str(case.world),
                "--json",
                str(room / "run.json"),
                "--log-dir",
                str(room / "log"),
                "--timeout",
                f"{CASE_TIMEOUT_S:g}",
            ]
            env = {
                "NCCL_NVLS_ENABLE": "0",
                **os.environ,
                **find_libraries(),
                "TESTBED_VARIANT": self.variant,
                **dict((*case.env, *plan.env)),
                "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
                "PYTHONPATH": python_path(),
                measure.FOLDER_VARIABLE: folder,
                measure.STEPS_VARIABLE: case.args[case.args.index("--steps") + 1],
                measure.TRACE_VARIABLE: str(TRACED_STEPS),
                measure.GATE_VARIABLE: f"{self.gate}:{','.join(map(str, gpus))}",
            }
            if plan.switches:
                env[SWITCHES_VARIABLE] = ",".join(filter(None, (env.get(SWITCHES_VARIABLE), plan.switches)))
            if plan.config is None:
                env["INTERLACE_DISABLE"] = "1"
            else:
                (room / "plan.yaml").write_text(f"device: {self.device}\n{plan.config}dump: {self.out / 'plans' / case.name / plan.name}\n")
                words += ["--config", str(room / "plan.yaml")]
            start = time.monotonic()
            try:
                done = subprocess.run(
                    [*words, "--", *case.args], env=env, capture_output=True, text=True, timeout=CASE_TIMEOUT_S, check=False
                )
            except subprocess.TimeoutExpired as error:
                done = subprocess.CompletedProcess(words, 124, "", f"no end within {CASE_TIMEOUT_S:g} s: {error.stderr!r}")
            if done.returncode:
                (self.out / f"{case.name}_{plan.name}.log").write_text(done.stdout[-20000:] + done.stderr[-20000:] + _logs(room))
                return {"failed": done.stderr[-1500:]}
            for path in sorted(room.glob("trace*.msgpack")):
                shutil.copy(path, self.out / "traces" / f"{case.name}_{plan.name}_{path.name}")
            return {
                "wall_s": round(time.monotonic() - start, 1),
                "gpus": gpus,
                **_found(room, [self.samplers[gpu] for gpu in gpus if gpu in self.samplers]),
                **_trial(self.out / "plans" / case.name / plan.name),
            }


def _logs(room: Path) -> str:
    return "".join(f"\n== {path.name}\n{path.read_text(errors='replace')[-4000:]}" for path in sorted(room.rglob("rank*.log")))


def _found(room: Path, samplers: Sequence[nvml.Sampler] = ()) -> dict[str, Any]:
    ranks = json.loads((room / "run.json").read_text())["runs"]["run"]["ranks"]
    measured = [json.loads((room / f"rank{rank}.json").read_text()) for rank in range(len(ranks))]
    spans = _spans([each["steps"] for each in measured])
    steps = [1e3 * (end - begin) for begin, end in spans]
    traced = sum(step["traced"] for step in measured[0]["steps"]) or 1  # the last one ends with the device idle
    is_long = len(steps) >= LONG_RUN
    usual = WARM_OF_LONG if is_long else WARM_STEPS
    reserved = [[step["memory"]["reserved"] for step in each["steps"][:-traced]] for each in measured]
    settled = max(usual, *map(_settled, reserved)) if is_long else usual
    kept = next(part for part in (slice(settled, -traced), slice(usual, -traced), slice(-1), slice(None)) if steps[part])
    warm = steps[kept]
    with_loss = [rank for rank in ranks if rank["losses"] and rank["losses"][0]["raw_hex"]]
    peaks = [
        {name: max(step["memory"][name] for step in each["steps"][1:-1] or each["steps"]) for name in each["steps"][0]["memory"]}
        for each in measured
    ]
    return {
        "step_ms": {"median": statistics.median(warm), "min": min(warm), "max": max(warm), "all": [round(each, 3) for each in steps]},
        "memory": peaks,
        "pinned_buffers_by_step": [[step["memory"]["pinned_buffers"] for step in each["steps"]] for each in measured],
        "pinned_after_step": [[step["memory"]["pinned"] for step in each["steps"]] for each in measured],
        "first_step": kept.start or 0,
        "losses": [statistics.fmean(loss["values"]) for loss in with_loss[-1]["losses"]],
        "loss_bits": [loss["raw_hex"] for loss in with_loss[-1]["losses"]],
        "parameters": _digest([rank["parameters"] for rank in ranks]),
        "traced_step": [each["trace"] for each in measured],
        **({"power": [nvml.of_steps(each, spans[kept]) for each in samplers]} if samplers else {}),
    }


def _settled(reserved: Sequence[int]) -> int:
    """The first step before which allocators took no memory from the device for `QUIET_STEPS` steps, or the number of steps if there is
    none. The device waits for such allocations, and the host then needs some steps to run ahead again. `reserved`: bytes after each step.

    >>> _settled([7, 9, 9, 10, 10, 10, 10, 10, 10, 11])
    9
    """
    grew = [at for at in range(1, len(reserved)) if reserved[at] > reserved[at - 1]]
    return next((at for at in range(QUIET_STEPS, len(reserved)) if not any(at - QUIET_STEPS <= each < at for each in grew)), len(reserved))


def _spans(ranks: Sequence[Sequence[dict[str, Any]]]) -> list[tuple[float, float]]:
    """Begin and end of each step in seconds, for all ranks together: a step begins when the last rank has returned from the previous one.

    The first step and the first traced one begin with the device idle, when the first rank begins.
    """
    begins, ends = (
        [pick(step[key] for step in same) for same in zip(*ranks, strict=True)] for pick, key in ((min, "begin_s"), (max, "end_s"))
    )
    apart = [not k or (step["traced"] and not ranks[0][k - 1]["traced"]) for k, step in enumerate(ranks[0])]
    return [(begins[k] if apart[k] else ends[k - 1], ends[k]) for k in range(len(ends))]


def _trial(planned: Path) -> dict[str, Any]:
    """The results for each plan of a run that measured plans; empty if it measured none, or did not finish."""
    kept = [path for path in planned.glob("tuned-*.json") if not path.name.endswith(".first-step.json")]
    return {"trial": json.loads(kept[0].read_text())} if kept else {}


def _digest(parameters: list[dict[str, str]]) -> str:
    import hashlib

    return hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()


def _headline(found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"FAILED: {found['failed'][-500:]}"
    peaks = [
        f"{each['allocated_peak'] / 1e9:.2f}/{each['reserved_peak'] / 1e9:.2f}+{each['outside_peak'] / 1e9:.2f}"
        for each in found["memory"][:1]
    ]
    step, traced = found["step_ms"], found["traced_step"][0]
    where = {name: round(value / 1e3, 1) for name, value in traced.get("busy_us", {}).items()}
    return (
        f"{step['median']:.2f} ms ({step['min']:.2f}-{step['max']:.2f}), GB {peaks}, loss {found['losses'][-1]:.6f}, "
        f"device {traced.get('device_us', 0) / 1e3:.1f} busy {where} host {traced.get('host_us')}, {found['wall_s']} s{_drawn(found)}"
    )


def _drawn(found: dict[str, Any]) -> str:
    told = ("no reading" if "failed" in each else f"{each['watts']:.0f} W {each['mhz']:.0f} MHz" for each in found.get("power", ()))
    return "".join(f", {each}" for each in told)


def _bits(found: dict[str, Any], stock: dict[str, Any]) -> str:
    """Whether a run has the baseline's losses and parameters; empty if one of the two did not finish, or the baseline has not run yet."""
    if found is stock or "failed" in found or "loss_bits" not in stock:
        return ""
    return ", the baseline's bits" if all(found[key] == stock[key] for key in ("loss_bits", "parameters")) else ", OTHER BITS THAN STOCK'S"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.training", description="Measure Paddle's plan and Interlace's on GPUs.")
    parser.add_argument("--gpus", type=int, default=1, metavar="N")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "h200", metavar="FOLDER")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="these cases, comma-separated, with * and ? as in a shell; NAME:PLAN+PLAN: these plans"
    )
    parser.add_argument(
        "--device",
        default=os.fspath(DEVICE),
        metavar="PROFILE",
        help="plan with this profile, by name or path (default: the H200's with the times of the testbed's own kernels)",
    )
    parser.add_argument("--no-ops", action="store_true", help="leave out single operations and collectives, and the host's costs")
    parser.add_argument("--ranks-at-once", type=int, default=0, metavar="N", help="ranks alive at once; 0: two thirds of the cores")
    parser.add_argument("--budget", type=float, default=3600.0, metavar="S", help="start no run after so many seconds")
    parser.add_argument("--steps", type=int, metavar="N", help=f"steps of a run (default: the case's own, {STEPS} of most)")
    parser.add_argument("--power", action="store_true", help="also read power, clock and energy during the measured steps (NVML)")
    parser.add_argument("--threads", action="store_true", help="host threads for streams and small sizes: a dry run")
    args = parser.parse_args(argv)
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    variant = "threads" if args.threads else "cuda"
    if not args.no_ops:
        alone.time_all(args.out, variant, args.gpus)
    wanted = chosen_cases(args.gpus, args.only, args.threads, args.steps)
    ranks = max(args.ranks_at_once or (os.cpu_count() or 1) * 2 // 3, args.gpus)
    samplers = {gpu: nvml.Sampler(gpu_uuid(gpu)) for gpu in range(args.gpus)} if args.power else {}
    Bench(args.out, variant, args.device, args.gpus, ranks, time.monotonic() + args.budget, samplers).run(wanted)
    return 0


def chosen_cases(gpus: int, only: str, threads: bool = False, steps: int | None = None) -> list[Case]:
    """The cases that the options of the command line request, with sizes for host threads and the number of steps if requested."""
    wanted = _chosen(cases(gpus), only)
    if threads:
        wanted = [replace(case, args=(*case.args, *DRY, *(DRY_GROUPS if "--kv-heads" in case.args else ()))) for case in wanted]
    return [replace(case, args=_with_steps(case.args, steps)) for case in wanted] if steps else wanted


def _with_steps(words: tuple[str, ...], steps: int) -> tuple[str, ...]:
    at = words.index("--steps") + 1
    return (*words[:at], str(steps), *words[at + 1 :])


def _chosen(found: Sequence[Case], only: str) -> list[Case]:
    """The cases that `--only` names, in its order, or all if it is empty. Raises SystemExit for an unknown case or plan."""
    if not only:
        return list(found)
    chosen: list[Case] = []
    for word in only.split(","):
        name, _, plans = word.partition(":")
        named = [case for case in found if fnmatch.fnmatchcase(case.name, name)]
        if not named:
            raise SystemExit(f"no case {name!r}; there are {[case.name for case in found]}")
        there = [each.name for case in named for each in case.plans]
        for plan in plans.split("+") if plans else ():
            if not fnmatch.filter(there, plan):
                raise SystemExit(f"no plan {plan!r} in {[case.name for case in named]}; there are {[*dict.fromkeys(there)]}")
        for case in named:
            kept = tuple(each for each in case.plans if not plans or any(fnmatch.fnmatchcase(each.name, one) for one in plans.split("+")))
            chosen += [replace(case, plans=kept)] if kept else []
    return chosen


if __name__ == "__main__":
    sys.exit(main())
