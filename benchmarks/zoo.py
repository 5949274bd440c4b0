"""Simulated plans of programs for which no option was tuned: Paddle's baseline, the named forms and `auto`, with bounds and memory.

The programs are built by Paddle, one rank of each stage, at real size and without parameters (`zoo/models.py` and the examples), and stored
in `zoo/programs.tar.xz`; times are those of the H200 profile. Memory is the peak of a GPU for any speed of its host (`peak_gib`), and the
peak if operations run one after another (`live_gib`). A row's limit is what Paddle's baseline holds on its fullest rank.

    python benchmarks/zoo.py [--case NAME ...] [--form NAME ...] [-o FILE]     (other rows and forms in FILE are kept)
    python benchmarks/zoo.py --table [-o FILE]                                 (the stored rows as a table)
    python benchmarks/zoo.py --build [--case NAME ...]                         (with Paddle: build the programs anew)
    python benchmarks/zoo.py --quick [-o FILE]
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import os
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from bounds import least_slowed_ns
from claims_speed import MORE, zoo_table
from measuring import RESULTS, ROOT, meta, store
from schedules import NAMED, PADDLES, baseline_bytes, bounds_ms, chosen

from interlace.config import Config, load_config, make_config
from interlace.cost_model import CostModel, load_profile
from interlace.errors import InterlaceError, LaunchError
from interlace.garbage import rarely_collected
from interlace.ir import Program, load, parse, save, show
from interlace.ir.dump import SUFFIX
from interlace.ir.target import GPU
from interlace.local.stages import stages_of
from interlace.planning.budget import peak_bytes
from interlace.planning.outcome import Pools
from interlace.planning.plan import Plan, make_plans
from interlace.scheduler.memory.live import in_order
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.simulator import simulate

ARCHIVE = Path(__file__).with_name("zoo") / "programs.tar.xz"
MODELS, GPT, LLAMA, MOE = "benchmarks/zoo/models.py", "examples/gpt.py", "examples/llama.py", "examples/moe.py"
HALF, FLASH = "--amp O2 --master-grad", "--attention flash"
LAYER = "--hidden 4096 --heads 32 --kv-heads 8 --gated --no-bias --intermediate 14336 --vocab 32000"
BLOCK = "--hidden 4096 --heads 32 --vocab 32768"
Case = tuple[str, int, str]
"""Script, number of ranks, arguments."""
CASES: dict[str, Case] = {
    "experts, pp 2, dp 4": (
        MOE,
        8,
        f"--pp 2 --dp 4 --flat-mesh --layers 8 --hidden 4096 --heads 32 --kv-heads 8 --intermediate 7168 --vocab 32000 --seq-len 2048 "
        f"--experts 8 --dense-every 0 --micro-batches 8 --batch-size 32 {HALF} {FLASH}",
    ),
    "experts and a shared one, pp 2, dp 2, mp 2": (
        MOE,
        8,
        f"--pp 2 --dp 2 --mp 2 --layers 8 --hidden 4096 --heads 32 --kv-heads 8 --intermediate 7168 --vocab 32000 --seq-len 2048 "
        f"--experts 4 --shared-expert --dense-every 2 --micro-batches 8 --batch-size 16 {HALF} {FLASH}",
    ),
    "GPT-3 6.7B, pp 4, mp 2": (GPT, 8, f"--preset gpt3-6.7b --layers 16 --pp 4 --mp 2 --micro-batches 8 {HALF} {FLASH}"),
    "13B layers, pp 2": (GPT, 2, f"--preset gpt3-13b --layers 6 --pp 2 --micro-batches 8 {HALF} {FLASH}"),
    "Llama, sequence parallel, pp 2, mp 2": (
        LLAMA,
        4,
        f"--preset llama-7b --layers 8 --seq-len 2048 --pp 2 --mp 2 --sequence-parallel --micro-batches 8 {HALF} {FLASH} --fused",
    ),
    "accumulation, dp 2, mp 2, sharding 1, clip": (
        GPT,
        4,
        f"{BLOCK} --layers 4 --seq-len 2048 --dp 2 --mp 2 --sharding-stage 1 --gradient-accumulation 4 --clip-grad 1 {HALF} {FLASH}",
    ),
    "the same through parallelize": (
        MODELS,
        4,
        f"decoder {BLOCK} --layers 4 --seq-len 2048 --dp 2 --mp 2 --sharding-stage 1 --gradient-accumulation 4 --clip-grad 1 {HALF} "
        f"{FLASH} --parallelize",
    ),
    "parallelize, pp 2, mp 2": (
        MODELS,
        4,
        f"decoder {LAYER} --layers 8 --seq-len 2048 --pp 2 --mp 2 --micro-batches 8 {HALF} {FLASH} --parallelize",
    ),
    "encoder-decoder, pp 4, mp 2": (
        MODELS,
        8,
        f"encoder-decoder {BLOCK} --layers 12 --seq-len 1024 --pp 4 --mp 2 --micro-batches 8 --batch-size 16 {HALF} {FLASH}",
    ),
    "vision, pp 2, dp 2, mp 2": (
        MODELS,
        8,
        "vision --hidden 3072 --heads 24 --layers 12 --seq-len 1024 --vocab 1000 --pp 2 --dp 2 --mp 2 --micro-batches 8 --batch-size 64 "
        f"{HALF} {FLASH}",
    ),
    "diffusion, pp 2, dp 2": (
        MODELS,
        4,
        f"diffusion --hidden 2304 --heads 24 --layers 12 --seq-len 1024 --pp 2 --dp 2 --micro-batches 8 --batch-size 64 {HALF} {FLASH}",
    ),
    "BERT, dropout, pp 2": (
        MODELS,
        2,
        f"bert --hidden 1024 --heads 16 --layers 12 --vocab 30522 --seq-len 512 --dropout 0.1 --pp 2 --micro-batches 8 --batch-size 128 "
        f"{HALF} {FLASH}",
    ),
    "attention beside MLP, pp 2, mp 2": (
        MODELS,
        4,
        f"parallel --hidden 4096 --heads 16 --layers 8 --vocab 50400 --seq-len 2048 --pp 2 --mp 2 --micro-batches 8 {HALF} {FLASH}",
    ),
    "stages of 6 and 2 layers": (
        MODELS,
        2,
        f"decoder {LAYER} --layers 8 --stage-layers 6,2 --seq-len 2048 --pp 2 --micro-batches 8 {HALF} {FLASH}",
    ),
    "stages of 1, 3, 3 and 1 layers, mp 2": (
        MODELS,
        8,
        f"decoder {LAYER} --layers 8 --stage-layers 1,3,3,1 --seq-len 2048 --pp 4 --mp 2 --micro-batches 8 {HALF} {FLASH}",
    ),
    "a head of 128k words, pp 2, mp 2": (
        MODELS,
        4,
        f"decoder {LAYER} --vocab 128256 --layers 4 --seq-len 4096 --pp 2 --mp 2 --micro-batches 8 {HALF} {FLASH}",
    ),
    "sharding 3, accumulation, dp 4": (
        MODELS,
        4,
        f"decoder {LAYER} --layers 4 --seq-len 2048 --dp 4 --sharding-stage 3 --gradient-accumulation 4 --batch-size 16 --amp O2 {FLASH}",
    ),
    "sharding 1, pp 2, dp 2": (
        MODELS,
        4,
        f"decoder {LAYER} --layers 6 --seq-len 2048 --pp 2 --dp 2 --sharding-stage 1 --micro-batches 8 --batch-size 16 {HALF} {FLASH}",
    ),
    "pp 8, 8 micro-batches": (MODELS, 8, f"decoder {LAYER} --layers 16 --seq-len 2048 --pp 8 --micro-batches 8 {HALF} {FLASH}"),
    "pp 2, vpp 3": (MODELS, 2, f"decoder {LAYER} --layers 6 --seq-len 2048 --pp 2 --vpp 3 --micro-batches 8 --amp O2 {FLASH}"),
    "every other block recomputed, pp 4, mp 2": (
        MODELS,
        8,
        f"decoder {LAYER} --layers 8 --seq-len 4096 --pp 4 --mp 2 --micro-batches 8 --recompute-every 2 {HALF} {FLASH}",
    ),
    "sequences of 32k, pp 2, mp 4": (
        MODELS,
        8,
        f"decoder {LAYER} --layers 4 --seq-len 32768 --pp 2 --mp 4 --sequence-parallel --micro-batches 4 --batch-size 4 {HALF} {FLASH}",
    ),
    "pp 1, mp 2": (MODELS, 2, f"decoder {LAYER} --layers 4 --seq-len 4096 --mp 2 --schedule 1F1B --micro-batches 4 {HALF} {FLASH}"),
    "BERT, dropout, dp 2, mp 2, one pass a step": (
        MODELS,
        4,
        f"bert --hidden 2048 --heads 32 --layers 8 --vocab 30522 --seq-len 512 --dropout 0.1 --dp 2 --mp 2 --batch-size 64 {HALF} {FLASH}",
    ),
    "convolutions, pp 2": (
        MODELS,
        2,
        "convolution --hidden 256 --layers 8 --seq-len 196 --vocab 1000 --pp 2 --micro-batches 8 --batch-size 256",
    ),
}
"""Name -> how its programs are built."""
FORMS: dict[str, dict[str, Any]] = {
    "off": {"schedule_1f1b": {"interleave": "off"}},
    **NAMED,
    "auto": {},
    "auto, budget 0.9": {"memory_budget": 0.9},
    "auto, pools 1.0": {"pool_budget": 1.0},
    MORE: {"memory_budget": 1.3},
}
QUICK = ("pp 1, mp 2", ("auto",))


# The programs -------------------------------------------------------------------------------------------------


@functools.cache
def stored() -> dict[str, list[Program]]:
    """The programs of all cases, one rank of each stage."""
    found: dict[str, list[Program]] = {}
    with tarfile.open(ARCHIVE, "r:xz") as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            found.setdefault(Path(member.name).parent.name, []).append(parse(file.read().decode()))
    return found


def built(name: str, folder: Path) -> list[Program]:
    """Programs of a case, each built in a separate process."""
    script, world, words = CASES[name]
    first = _built(script, words, 0, world, folder)
    stages = stages_of(first)
    programs = [first, *(_built(script, words, ranks[0], world, folder) for ranks in stages[1:])]
    return [msgspec.structs.replace(each, equivalent_ranks=tuple(ranks[1:])) for each, ranks in zip(programs, stages, strict=True)]


def _built(script: str, words: str, rank: int, world: int, folder: Path) -> Program:
    path, child = folder / f"rank{rank}{SUFFIX}", os.fork()
    if child == 0:
        try:
            from interlace.local.build_rank import build_program

            save(build_program(str(ROOT / script), words.split(), rank, world), path)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        raise LaunchError(f"rank {rank} of {script} {words} could not be built; its error stands above")
    return load(path)


def build(names: Iterable[str]) -> None:
    """Build cases again and write the archive, whose bytes depend only on the programs."""
    import interlace.bridge.hook
    import interlace.bridge.lower  # noqa: F401

    programs = dict(stored()) if ARCHIVE.is_file() else {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                programs[name] = built(name, Path(folder))
            except LaunchError as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                continue
        print(f"{name}: {[len(each.ops) for each in programs[name]]} operations", file=sys.stderr, flush=True)
        _write({name: programs[name] for name in CASES if name in programs})


def _write(programs: Mapping[str, Sequence[Program]]) -> None:
    part = ARCHIVE.with_suffix(".part")
    with tarfile.open(part, "w:xz", preset=9) as archive:
        for name, given in programs.items():
            for each in given:
                data = show(each).encode()
                entry = tarfile.TarInfo(f"{name}/rank{each.rank}.txt")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    part.replace(ARCHIVE)


# The plans ----------------------------------------------------------------------------------------------------


def row_of(name: str, programs: Sequence[Program], forms: Sequence[str], cost: CostModel) -> dict[str, Any]:
    """The bounds of a case, Paddle's baseline, and these forms."""
    row: dict[str, Any] = {
        "case": name,
        "ranks": programs[0].world,
        "stages": len(programs),
        "ops": max(len(each.ops) for each in programs),
    }
    stock = make_plans(programs, load_config("baseline"), cost, "h200")
    limit, live = baseline_bytes(programs, cost), max(in_order(plan.program, target=PADDLES).peak() for plan in stock)
    own = {"peak_gib": gib(limit), "live_gib": gib(live), "pools_gib": pools_gib(stock, lambda pools: pools.before_bytes)}
    slowed = [round(each / 1e6, 1) for each in least_slowed_ns(programs, cost)]
    row |= {"stock": {**judged(stock, cost), **own}, **bounds_ms(programs, stock, limit, cost), "least_slowed_ms": slowed}
    return row | {form: planned(programs, make_config(FORMS[form]), cost) for form in forms}


def planned(programs: Sequence[Program], config: Config, cost: CostModel) -> dict[str, Any]:
    """A plan: its step, memory and planning time; or the reason why there is none."""
    begin, wall = time.process_time(), time.monotonic()
    try:
        with rarely_collected():
            plans = make_plans(programs, config, cost, "h200")
    except InterlaceError as error:
        return {"why_not": str(error), "cpu_s": round(time.process_time() - begin, 1)}
    took = {"cpu_s": round(time.process_time() - begin, 1), "wall_s": round(time.monotonic() - wall, 1)}
    return {**judged(plans, cost), **took, "chosen": chosen(plans[0]), "busiest": busiest([plan.program for plan in plans], cost)}


def busiest(programs: Sequence[Program], cost: CostModel) -> dict[str, float]:
    """Where the time of a plan's step goes on the stage that computes longest, in ms: its computation alone, what the operations beside it
    and what the lower clock add to that, and the time in which it computes nothing."""
    programs = sorted(programs, key=lambda program: program.rank)
    options = Options.of(GPU, representative={rank: each.rank for each in programs for rank in each.equivalent_ranks})
    limited, full = (simulate(programs, cost, replace(options, power=power)).ranks for power in (True, False))
    at = max(range(len(limited)), key=lambda k: limited[k].compute_ns)
    mine, slowed_ns = limited[at], full[at].slowed_ns
    parts = {
        "alone_ms": mine.compute_ns - mine.slowed_ns,
        "beside_ms": slowed_ns,
        "clock_ms": mine.slowed_ns - slowed_ns,
        "waits_ms": mine.step_ns - mine.compute_ns,
    }
    return {"stage": programs[at].pipeline.stage, **{name: round(ns / 1e6, 1) for name, ns in parts.items()}}


def judged(plans: Sequence[Plan], cost: CostModel) -> dict[str, Any]:
    """Simulated step in ms, and memory of the fullest rank: alone with the fastest host, in the step of all ranks, with operations one
    after another, and with free blocks of allocator pools."""
    programs, outcome = [plan.program for plan in plans], plans[0].outcome
    found = {
        "peak_gib": gib(max(peak_bytes(each, cost) or 0 for each in programs)),
        "live_gib": gib(max(in_order(each).peak() for each in programs)),
        "pools_gib": pools_gib(plans, lambda pools: pools.plan_bytes),
    }
    step = (
        {"step_ms": round(outcome.plan.step_ns / 1e6, 2), "step_peak_gib": gib(outcome.plan.peak_bytes)} if outcome else {"step_ms": None}
    )
    return {**step, **found}


def pools_gib(plans: Sequence[Plan], whose: Callable[[Pools], int]) -> float | None:
    """What allocator pools take on the fullest rank in the step of all, free blocks included; None if that is not known."""
    outcome = plans[0].outcome
    return gib(whose(outcome.pools)) if outcome and outcome.pools else None


def gib(count: int) -> float:
    """Bytes in GiB."""
    return round(count / 2**30, 3)


# The table ----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Plan, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, default=[])
    parser.add_argument("--form", action="append", choices=FORMS, default=[])
    parser.add_argument("--table", action="store_true", help="show the stored rows")
    parser.add_argument("--build", action="store_true", help="build the programs anew")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK[0]} alone")
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args(argv)
    path = args.out or RESULTS / "zoo.json"
    rows: dict[str, dict[str, Any]] = {}
    if path.is_file() and not args.quick:
        rows = {row["case"]: row for row in json.loads(path.read_text())["rows"]}
    if args.table:
        print(zoo_table(list(rows.values())))
        return
    if args.build:
        build(args.case or CASES)
        return
    names, forms = ([QUICK[0]], QUICK[1]) if args.quick else (args.case or list(stored()), args.form or list(FORMS))
    cost = CostModel(load_profile("h200"))
    for name in names:
        rows[name] = rows.get(name, {}) | row_of(name, stored()[name], forms, cost)
        print(zoo_table([rows[name]]).splitlines()[-1], flush=True)
        store("zoo", {**meta(), "profile": "h200", "rows": [rows[each] for each in CASES if each in rows]}, args.out)


if __name__ == "__main__":
    main()
