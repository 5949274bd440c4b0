"""Simulated step times under budgets, and least feasible budgets, with and without moving optimizer state to the host.

Programs, mesh and precision are those of `budgets.py`, with AdamW. Budgets are shares of the memory of Paddle's baseline; a row has the
simulated step and peak of the plan, or the least feasible budget if no plan fits. Stored results of other models and devices are kept.

`--largest` instead finds how many layers of GPT-3 175B fit on eight GPUs with 80 GB each, with and without moving optimizer state.

    python benchmarks/optimizer_state.py DIR [--model NAME ...] [--device NAME] [--fraction F ...] [--floors | --largest] [-o FILE]
    python benchmarks/optimizer_state.py --quick [-o FILE]
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import budgets
from measuring import RESULTS, ROOT, meta, store
from simulated import parse, parser

from interlace.config import make_config
from interlace.cost_model import CostModel, load_profile
from interlace.errors import BudgetError
from interlace.garbage import rarely_collected
from interlace.ir import Program
from interlace.layout.store import Store
from interlace.local.building import Request
from interlace.planning.plan import make_plans

FRACTIONS = (0.8, 0.7, 0.6, 0.5)
LEAST = 0.01
"""A budget that no plan keeps, so that the error gives the least feasible one."""
STAYS, LEAVES = {"offload_optimizer_state": "off"}, {"offload_optimizer_state": {"min_bytes": 1 << 20}}


def within(programs: Sequence[Program], cost: CostModel, device: str, fraction: float, options: dict[str, Any]) -> dict[str, Any]:
    """A plan within a budget, or the least feasible one."""
    try:
        with rarely_collected():  # like the commands
            plans = make_plans(programs, make_config({"memory_budget": fraction, **options}), cost, device)
    except BudgetError as error:
        return {"least_bytes": error.least_bytes}
    outcome = plans[0].outcome
    assert outcome is not None
    assert outcome.before is not None
    moved = sum(
        int(each.numbers["in_bytes"]) for plan in plans for report in plan.reports for each in report.remarks if each.rule == "state-moved"
    )
    return {
        "step_ms": round(outcome.plan.step_ns / 1e6, 2),
        "peak_bytes": outcome.plan.peak_bytes,
        "state_bytes": moved,
        "stock_ms": round(outcome.before.step_ns / 1e6, 2),
        "stock_peak_bytes": outcome.before.peak_bytes,
    }


def measured(model: str, programs: Sequence[Program], device: str, fractions: Sequence[float]) -> dict[str, Any]:
    """One model on one device."""
    cost = CostModel(load_profile(device))
    floors = {
        name: within(programs, cost, device, LEAST, options)["least_bytes"] for name, options in (("stays", STAYS), ("leaves", LEAVES))
    }
    rows = []
    for fraction in fractions:
        row = {name: within(programs, cost, device, fraction, options) for name, options in (("stays", STAYS), ("leaves", LEAVES))}
        rows.append({"fraction": fraction, **row})
        print(model, device, rows[-1], flush=True)
    return {"model": model, "device": device, "floor_bytes": floors, "budgets": rows}


BUDGET = 80 * 10**9
LAYERED = "--preset gpt3-175b --pp 4 --mp 2 --micro-batches 8 --batch-size 8 --attention flash --amp O2 --master-grad"
"""A model whose number of layers must be a multiple of the four stages."""
STAGES = 4
PARAMETERS_A_LAYER, PARAMETERS_BESIDE = 12 * 12288**2 + 13 * 12288, (50304 + 2048 + 50304 + 2) * 12288
"""Parameters of a layer, and of the rest: embeddings of tokens and positions, the head, and the last norm."""


def of_layers(layers: int, folder: Path) -> list[Program]:
    """Programs of GPT-3 175B with this number of layers, one rank of each stage, from one build."""
    words = (*LAYERED.split(), "--layers", str(layers))
    kept = Store(folder, 1, print)
    requests = [Request(str(ROOT / "examples" / "gpt.py"), words, rank, 2 * STAGES) for rank in range(0, 2 * STAGES, 2)]
    for each in requests:
        (built,) = kept.build([each], has_stages=each is requests[0])
        if built.refused:
            raise SystemExit(f"{layers} layers: {built.refused}")
    return [kept.program(each) for each in requests]


def largest(options: dict[str, Any], device: str, folder: Path) -> dict[str, Any]:
    """The most layers for which a plan keeps the budget: estimated from the least memory of few layers, then checked on both sides."""
    cost, least = CostModel(load_profile(device)), dict[int, int]()

    def fits(layers: int) -> bool:
        if layers not in least:
            least[layers] = within(of_layers(layers, folder), cost, device, LEAST, options)["least_bytes"]
            print(layers, "layers hold", least[layers], options, flush=True)
        return least[layers] <= BUDGET

    fits(STAGES), fits(2 * STAGES)
    a_stage = (least[2 * STAGES] - least[STAGES]) / STAGES
    layers = max(STAGES, STAGES * int(((BUDGET - least[STAGES]) / a_stage + STAGES) // STAGES))
    while layers > STAGES and not fits(layers):
        layers -= STAGES
    while fits(layers + STAGES):
        layers += STAGES
    held = {str(each): least[each] for each in sorted(least)}
    return {"layers": layers, "parameters": layers * PARAMETERS_A_LAYER + PARAMETERS_BESIDE, "least_bytes_by_layers": held}


def main(argv: list[str] | None = None) -> None:
    """Simulate, print and store."""
    options = parser(__doc__, "one pipeline of a tiny model")
    options.add_argument("--model", action="append", choices=budgets.MODELS, help="only these")
    options.add_argument("--floors", action="store_true", help="the least feasible budgets alone")
    options.add_argument("--largest", action="store_true", help="the most layers that 80 GB hold")
    options.add_argument("--fraction", action="append", type=float, choices=FRACTIONS, help="only these budgets")
    options.add_argument("--device", default="h200", help="profile with the times")
    args = parse(options, argv)
    out: Path = args.out or RESULTS / "optimizer_state.json"
    if args.quick:
        store("optimizer_state", {**meta(), "models": [measured("tiny", budgets.small(), args.device, FRACTIONS[:1])]}, args.out)
        return
    if args.largest:
        most = {name: largest(each, args.device, args.folder) for name, each in (("stays", STAYS), ("leaves", LEAVES))}
        before: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {"models": []}
        row = {"device": args.device, "arguments": LAYERED, "budget_bytes": BUDGET, **most}
        store("optimizer_state", {**before, **meta(), "largest": row}, args.out)
        return
    for model in args.model or list(budgets.USUAL):
        fractions = () if args.floors else args.fraction or FRACTIONS
        made = measured(model, budgets.programs_of(model, "none", args.folder), args.device, fractions)
        stored: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {"models": []}
        kept = [each for each in stored["models"] if (each["model"], each["device"]) != (model, args.device)]
        found = sorted([made, *kept], key=lambda each: ([*budgets.MODELS, each["model"]].index(each["model"]), each["device"]))
        store("optimizer_state", {**stored, **meta(), "arguments": budgets.WORDS, "models": found}, args.out)


if __name__ == "__main__":
    main()
