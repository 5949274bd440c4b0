"""Floors of memory, and step times under budgets, with and without optimizer state that leaves the device, simulated.

Programs, mesh and precision are those of `budgets.py`, with AdamW. Budgets are fractions of what Paddle's baseline holds; a row says
the simulated step and peak of the plan that is taken, or the least feasible budget where it cannot be kept. What is stored of other
models and devices stays.

    python benchmarks/optimizer_state.py DIR [--model NAME ...] [--device NAME] [--fraction F ...] [--floors] [-o FILE]
    python benchmarks/optimizer_state.py --quick [-o FILE]
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import budgets
from measuring import RESULTS, meta, store
from simulated import parse, parser

from interlace.config import make_config
from interlace.cost_model import CostModel, load_profile
from interlace.errors import BudgetError
from interlace.garbage import rarely_collected
from interlace.ir import Program
from interlace.planning.plan import make_plans

FRACTIONS = (0.8, 0.7, 0.6, 0.5)
LEAST = 0.01
"""A budget that no plan keeps, so that the refusal says the floor."""
STAYS, LEAVES = {"offload_optimizer_state": "off"}, {"offload_optimizer_state": {"min_bytes": 1 << 20}}


def within(programs: Sequence[Program], cost: CostModel, device: str, fraction: float, options: dict[str, Any]) -> dict[str, Any]:
    """A plan within a budget, or the least feasible one."""
    try:
        with rarely_collected():  # as the commands
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


def main(argv: list[str] | None = None) -> None:
    """Simulate, print and store."""
    options = parser(__doc__, "one pipeline of a tiny model")
    options.add_argument("--model", action="append", choices=budgets.MODELS, help="only these")
    options.add_argument("--floors", action="store_true", help="the least feasible budgets alone")
    options.add_argument("--fraction", action="append", type=float, choices=FRACTIONS, help="only these budgets")
    options.add_argument("--device", default="h200", help="profile with the times")
    args = parse(options, argv)
    out: Path = args.out or RESULTS / "optimizer_state.json"
    if args.quick:
        store("optimizer_state", {**meta(), "models": [measured("tiny", budgets.small(), args.device, FRACTIONS[:1])]}, args.out)
        return
    for model in args.model or list(budgets.USUAL):
        fractions = () if args.floors else args.fraction or FRACTIONS
        made = measured(model, budgets.programs_of(model, "none", args.folder), args.device, fractions)
        stored: list[dict[str, Any]] = json.loads(out.read_text())["models"] if out.is_file() else []
        kept = [each for each in stored if (each["model"], each["device"]) != (model, args.device)]
        found = sorted([made, *kept], key=lambda each: ([*budgets.MODELS, each["model"]].index(each["model"]), each["device"]))
        store("optimizer_state", {**meta(), "arguments": budgets.WORDS, "models": found}, args.out)


if __name__ == "__main__":
    main()
