"""Step time under memory budgets, simulated: recomputation by hand, offload alone, and what Interlace chooses from both.

Programs are built by Paddle: GPT-3 6.7B and Llama 7B, mp 2, sequence 4096, bfloat16 (O2, master gradients), one rank of each stage; times
are those of the H200 profile, with its power limit. The default is 8 layers, pp 4, 8 micro-batches; `--model` selects others, such as all
32 layers with flash attention and 16 micro-batches. Programs that DIR lacks are built (minutes each): without recomputation, with that of
every layer (`full`), and with that of attention only (`attention`). Budgets are shares of the memory of Paddle's baseline without
recomputation, and its memory with `full`, on the fullest GPU, in the way that planning counts its limit. Stored results of other models
are kept.

    python benchmarks/budgets.py DIR [--model NAME ...] [-o FILE]
    python benchmarks/budgets.py --quick [-o FILE]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from measuring import RESULTS, ROOT, meta, store
from schedules import baseline_bytes, held_bytes
from simulated import built, parse, parser

from interlace.config import make_config
from interlace.cost_model import CostModel, load_profile
from interlace.errors import BudgetError, PlanError
from interlace.garbage import rarely_collected
from interlace.ir import Program
from interlace.passes.choose_recompute import choices
from interlace.planning.plan import make_plans
from interlace.planning.sweep import became_of_saved

WORDS = "--seq-len 4096 --mp 2 --amp O2 --master-grad"
PIPELINE, LONG = (
    "--layers 8 --pp 4 --micro-batches 8 --batch-size 8 --schedule 1F1B",
    "--layers 32 --pp 4 --micro-batches 16 --batch-size 16 --schedule 1F1B --attention flash",
)
CHUNKS, ALONE = (
    "--layers 8 --pp 2 --micro-batches 8 --batch-size 8 --schedule VPP --vpp 2",
    "--layers 2 --pp 1 --micro-batches 8 --batch-size 8 --schedule 1F1B",
)
MODELS = {
    "GPT-3 6.7B": ("gpt", "gpt3-6.7b", PIPELINE, 8),
    "Llama 7B": ("llama", "llama-7b", PIPELINE, 8),
    "GPT-3 6.7B, 32 layers, flash": ("gpt", "gpt3-6.7b", LONG, 8),
    "Llama 7B, 32 layers, flash": ("llama", "llama-7b", LONG, 8),
    "GPT-3 6.7B, pp 2, vpp 2": ("gpt", "gpt3-6.7b", CHUNKS, 4),
    "GPT-3 6.7B, pp 1, 2 layers": ("gpt", "gpt3-6.7b", ALONE, 2),
}
"""Name -> script, preset, further arguments, and number of ranks."""
USUAL = ("GPT-3 6.7B", "Llama 7B")
BY_HAND = ("none", "attention", "full")
"""Recomputation that the script requests."""
FRACTIONS = (1.0, 0.8, 0.6, 0.4)
FREED = (0.2, 0.4, 0.6, 0.8)
"""Shares of the memory that recomputation can free at the peak."""
OURS: dict[str, dict[str, Any]] = {"offload alone": {"choose_recompute": "off"}, "both": {}}


def programs_of(model: str, recompute: str, folder: Path) -> list[Program]:
    """Programs of a model with this recomputation, one rank of each stage."""
    script, preset, words, ranks = MODELS[model]
    where = folder / "-".join([script, *model.split(", ")[1:], recompute]).replace(" ", "-")
    return built(where, script, ranks, ["--preset", preset, *words.split(), *WORDS.split(), "--recompute", recompute])


def small() -> list[Program]:
    """Programs of two stages, small enough for a test."""
    sys.path.insert(0, str(ROOT))
    from tests.strategies import World, programs

    return programs(World(pp=2, micro_batches=4, layers=3, schedule="1F1B"))


def planned(programs: Sequence[Program], cost: CostModel, options: dict[str, Any]) -> dict[str, Any]:
    """A plan: step in ms and peak in bytes, also of Paddle's baseline, CPU seconds of planning, and what became of the saved bytes."""
    start = time.process_time()
    try:
        with rarely_collected():  # like the commands
            plans = make_plans(programs, make_config(options), cost, "h200")
    except BudgetError as error:
        return {"least_bytes": error.least_bytes, "cpu_s": round(time.process_time() - start, 1)}
    outcome = plans[0].outcome
    assert outcome is not None
    assert outcome.before is not None
    kept, recomputed, moved = (sum(part) for part in zip(*(became_of_saved(plan, cost) for plan in plans), strict=True))
    return {
        "step_ms": outcome.plan.step_ns / 1e6,
        "peak_bytes": held_bytes(plans, cost),
        "kept_bytes": kept,
        "recomputed_bytes": recomputed,
        "offloaded_bytes": moved,
        "stock_ms": outcome.before.step_ns / 1e6,
        "stock_peak_bytes": baseline_bytes(programs, cost),
        "cpu_s": round(time.process_time() - start, 1),
    }


def gaps(program: Program) -> list[dict[str, float]]:
    """Recomputation time of the first stage as planning chooses it, and of the cheapest choice within the same peak; without `exact_ms` if
    the solver did not prove that in time."""
    from benchmarks.exact_recompute import cheapest

    found = choices(program, CostModel(load_profile("h200")), {})
    most, least, rows = found.peaks[0], min(found.peaks), []
    for part in FREED:
        start, limit = time.process_time(), int(most - part * (most - least))
        greedy = found.within(limit)
        row = {"part": part, "groups": len(found.found.groups), "greedy_ms": found.took_ns(greedy) / 1e6}
        try:
            row["exact_ms"] = found.took_ns(cheapest(found, limit)) / 1e6
        except PlanError as error:  # too many groups for the solver's time
            print(f"{part:.0%} freed: {error}", flush=True)
        rows.append({**row, "cpu_s": round(time.process_time() - start, 2)})
    return rows


def by_hand(programs: dict[str, list[Program]]) -> dict[str, Any]:
    """Recomputation that the script requests, with Paddle's baseline and with Interlace."""
    cost = CostModel(load_profile("h200"))
    return {name: planned(each, cost, {}) for name, each in programs.items()}


def within(programs: Sequence[Program], options: dict[str, Any], fractions: Sequence[float]) -> list[dict[str, Any]]:
    """A plan for each fraction, largest first; none below a budget that is known to be the least feasible one."""
    cost, found = CostModel(load_profile("h200")), []
    full = planned(programs, cost, {"memory_budget": fractions[0], **options})
    for fraction in fractions:
        least = max((each["least_bytes"] for each in found if "least_bytes" in each), default=0)
        tight = least and fraction * full["stock_peak_bytes"] < least
        wanted = {"memory_budget": fraction, **options}
        found.append(full if fraction == fractions[0] else {"least_bytes": least} if tight else planned(programs, cost, wanted))
        print(fraction, options, found[-1], flush=True)
    return found


def fractions_of(hand: dict[str, Any]) -> list[float]:
    """Budgets, largest first; one of them is the peak of full recomputation by hand."""
    most = hand["none"]["stock_peak_bytes"]
    return sorted({*FRACTIONS, *(hand[name]["stock_peak_bytes"] / most for name in hand if name == "full")}, reverse=True)


def measured(models: dict[str, dict[str, list[Program]]]) -> list[dict[str, Any]]:
    """Every model with recomputation by hand, and with every budget; several at a time."""
    with ProcessPoolExecutor() as pool:
        asked = {model: pool.submit(by_hand, programs) for model, programs in models.items()}
        hand = {model: each.result() for model, each in asked.items()}
        ours = {
            (model, name): pool.submit(within, programs["none"], options, fractions_of(hand[model]))
            for model, programs in models.items()
            for name, options in OURS.items()
        }
        return [
            {
                "model": model,
                "by_hand": hand[model],
                "exact": gaps(models[model]["none"][0]) if find_spec("ortools") else [],
                "budgets": [
                    {"fraction": fraction, **{name: ours[model, name].result()[k] for name in OURS}}
                    for k, fraction in enumerate(fractions_of(hand[model]))
                ],
            }
            for model in models
        ]


def others(out: Path, models: Sequence[str]) -> list[dict[str, Any]]:
    """Stored results of other models."""
    stored: list[dict[str, Any]] = json.loads(out.read_text())["models"] if out.is_file() else []
    return [each for each in stored if each["model"] not in models]


def main(argv: list[str] | None = None) -> None:
    """Simulate, print and store."""
    options = parser(__doc__, "one pipeline of a tiny model")
    options.add_argument("--model", action="append", choices=MODELS, help="only these")
    args = parse(options, argv)
    names, out = args.model or list(USUAL), args.out or RESULTS / "budgets.json"
    if not args.quick and find_spec("ortools") is None:
        options.error('what is cheapest at least is found by OR-tools, which are not installed: pip install ".[solve]"')
    models = (
        {"tiny": {"none": small()}}
        if args.quick
        else {model: {name: programs_of(model, name, args.folder) for name in BY_HAND} for model in names}
    )
    kept = [] if args.quick else others(out, names)
    found = sorted([*measured(models), *kept], key=lambda each: [*MODELS, each["model"]].index(each["model"]))
    store("budgets", {**meta(), "profile": "h200", "arguments": WORDS, "models": found}, args.out)


if __name__ == "__main__":
    main()
