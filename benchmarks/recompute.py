"""Gains and memory costs of leaving out recomputation: simulated steps at several budgets, in Paddle's own schedule.

All plans except Paddle's own are lowered by Interlace, with host waits and delayed transfers; `lowered` has only these changes.

The program is GPT-3 6.7B with 8 layers, float32, pp 2, mp 2, sequence 2048, 8 micro-batches, built with full recomputation (and without,
for comparison); times are those of the H200 profile. Programs that DIR lacks are built.

    python benchmarks/recompute.py DIR [-o FILE]
    python benchmarks/recompute.py --quick [-o FILE]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import meta, store
from simulated import built, captured, parse, parser

from interlace.config import make_config
from interlace.cost_model import CostModel, Costs, load_profile
from interlace.errors import BudgetError
from interlace.ir import Program
from interlace.planning.baseline import baseline_plan
from interlace.planning.plan import make_plans
from interlace.report.remarks import sentence
from interlace.scheduler.host_waits.throttle import gpu_peak
from interlace.scheduler.memory.live import in_order
from interlace.scheduler.simulate.simulator import simulate

WORDS = "--preset gpt3-6.7b --layers 8 --pp 2 --mp 2 --micro-batches 8 --seq-len 2048 --batch-size 8"
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Budgets: the peak of the program with recomputation, plus these shares of what the program without recomputation holds in addition."""
ALONE = dict.fromkeys(("split_backward", "overlap_column_backward", "name_streams"), "off")


def programs_of(recompute: str, folder: Path) -> list[Program]:
    """All ranks' programs with this recomputation."""
    return built(folder / recompute, "gpt", 4, [*WORDS.split(), "--recompute", recompute], stages=False)


def judged(programs: Sequence[Program], cost: Costs) -> dict[str, Any]:
    """Step in milliseconds; peaks of live memory on the fullest rank, in issue order and on a GPU, in bytes."""
    took = max(rank.step_ns for rank in simulate(programs, cost, with_memory=False).ranks)
    return {
        "step_ms": round(took / 1e6, 3),
        "peak_bytes": max(in_order(each).peak() for each in programs),
        "gpu_peak_bytes": max(gpu_peak(each, cost) for each in programs),
    }


def planned(programs: Sequence[Program], budget: int | None, cost: CostModel, **options: Any) -> dict[str, Any]:
    """Paddle's own schedule with as much recomputation as the budget requires."""
    within = {"memory_budget": budget, "offload_activations": "off"} if budget else {}
    config = make_config({"schedule_1f1b": {"interleave": "off"}, **ALONE, **within, **options})
    try:
        plans = make_plans(programs, config, cost, "h200")
    except BudgetError as error:
        return {"budget_bytes": budget, "why_not": str(error)}
    said = [sentence(report.done[0]) for report in plans[0].reports if report.name == "choose-recompute" and report.done]
    return {"budget_bytes": budget, "said": said, **judged([plan.program for plan in plans], cost)}


def main(argv: list[str] | None = None) -> None:
    """Simulate, print and store."""
    args = parse(parser(__doc__, "one pipeline of a tiny model"), argv)
    cost = CostModel(load_profile("h200"))
    given = captured("pp2 recompute") if args.quick else programs_of("full", args.folder)
    stock = judged([baseline_plan(program, cost) for program in given], cost)
    most = planned(given, 1 << 50, cost)
    between = [int(stock["gpu_peak_bytes"] + share * (most["gpu_peak_bytes"] - stock["gpu_peak_bytes"])) for share in SHARES]
    result = {
        "stock": stock,
        "lowered": planned(given, None, cost, choose_recompute="off"),
        "unread": planned(given, None, cost),
        "budgets": [planned(given, each, cost) for each in between],
    }
    if not args.quick:
        result["without"] = planned(programs_of("none", args.folder), None, cost, choose_recompute="off")
    print(result)
    store("recompute", {**meta(), "profile": "h200", "arguments": WORDS, **result}, args.out)


if __name__ == "__main__":
    main()
