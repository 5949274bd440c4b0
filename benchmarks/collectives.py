"""How much communication is exposed, by kind, with Paddle's baseline and with Interlace: simulated steps with the H200 profile.

Cases: Llama 7B with sequence parallelism, with and without recomputation; with data parallelism and sharding; a mixture of 8 experts in a
pipeline. Programs of one rank of each stage that DIR lacks are built (needs PaddlePaddle).

    python benchmarks/collectives.py DIR [-o FILE]
    python benchmarks/collectives.py --quick [-o FILE]
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measuring import meta, store
from simulated import built, captured, parse, parser

from interlace.config import make_config
from interlace.cost_model import CostModel, load_profile
from interlace.ir import Program
from interlace.ir.equivalent_ranks import representatives
from interlace.ir.kinds import is_collective
from interlace.ir.target import GPU
from interlace.planning.baseline import baseline_plan
from interlace.planning.plan import make_plans
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.parts import overlap, parts_of, union
from interlace.scheduler.simulate.simulator import Result, simulate

LLAMA = "--preset llama-7b --layers 4 --seq-len 2048 --schedule 1F1B --micro-batches 4 --attention flash"
REPLICAS = "--dp 2 --mp 4 --batch-size 8"
CASES = {
    "Llama 7B, mp 4, sequence parallel": (4, "llama", f"{LLAMA} --mp 4 --sequence-parallel --batch-size 4 --amp O2"),
    "the same, full recomputation": (4, "llama", f"{LLAMA} --mp 4 --sequence-parallel --batch-size 4 --amp O2 --recompute full"),
    "Llama 7B, dp 2, mp 4": (8, "llama", f"{LLAMA} {REPLICAS} --amp O2"),
    "the same, sharding 1, clip": (8, "llama", f"{LLAMA} {REPLICAS} --amp O2 --sharding-stage 1 --clip-grad 1"),
    "the same, sharding 1, fused buffers": (8, "llama", f"{LLAMA} {REPLICAS} --amp O2 --sharding-stage 1 --sharding-fusion"),
    "the same, sharding 2, float32": (8, "llama", f"{LLAMA} {REPLICAS} --sharding-stage 2"),
    "8 x 7B experts, ep 8, pp 2": (
        16,
        "moe",
        "--preset 8x7b --layers 4 --dp 8 --pp 2 --flat-mesh --micro-batches 8 --batch-size 64 --attention flash --amp O2",
    ),
    "Llama 7B, dp 2, mp 4, sharding 3, float32": (8, "llama", f"{LLAMA} {REPLICAS} --sharding-stage 3"),
    "8 x 7B experts, ep 8, pp 2, mesh of dp and mp": (
        16,
        "moe",
        "--preset 8x7b --layers 4 --dp 8 --pp 2 --micro-batches 8 --batch-size 64 --attention flash --amp O2",
    ),
}
"""Name -> ranks, example, arguments."""
QUICK = "dp2 mp2 sharding 1, clip"


def programs_of(name: str, folder: Path) -> list[Program]:
    """Programs of a case, one rank of each stage."""
    world, model, words = CASES[name]
    return built(folder / str(list(CASES).index(name)), model, world, words.split())


def judged(plans: Sequence[Program], cost: CostModel) -> dict[str, Any]:
    """The step, and communication in total, exposed, and by kind of collective; in ms, means over the given ranks."""
    result = simulate(plans, cost, Options.of(GPU, representative=representatives(plans)), target=GPU)
    ranks = range(len(plans))
    kinds = sorted({op.kind for plan in plans for op in plan.ops if is_collective(op)})
    by_kind = {kind: round(sum(exposed_ns(result, at, kind) for at in ranks) / len(plans) / 1e6, 3) for kind in kinds}
    exposed = sum(rank.exposed_comm_ns for rank in result.ranks) / len(plans) / 1e6
    hidden = sum(rank.hidden_comm_ns for rank in result.ranks) / len(plans) / 1e6
    return {
        "step_ms": round(result.step_ns / 1e6, 3),
        "exposed_ms": round(exposed, 3),
        "hidden_ms": round(hidden, 3),
        "exposed_by_kind_ms": by_kind,
        "peak_bytes": max(rank.peak_bytes for rank in result.ranks),
    }


def exposed_ns(result: Result, at: int, kind: str) -> int:
    """Time during which a kind of collective runs on a rank and is exposed."""
    sim, times = result.input, result.times
    kinds = {op.id: op.kind for op in sim.programs[at].ops if is_collective(op)}
    mine = [k for k in range(int(sim.first[at]), int(sim.first[at + 1])) if kinds.get(int(sim.op[k])) == kind]
    spans = np.array([[times.start[k], times.end[k]] for k in mine], dtype=np.int64).reshape(-1, 2)
    return int(overlap(union(spans), union(parts_of(result, at)[0])).sum())


def main(argv: list[str] | None = None) -> None:
    """Simulate, print and store."""
    args = parse(parser(__doc__, "one tiny model"), argv)
    cost = CostModel(load_profile("h200"))
    rows = []
    for name in [QUICK] if args.quick else CASES:
        programs = captured(QUICK) if args.quick else programs_of(name, args.folder)
        plans = [plan.program for plan in make_plans(programs, make_config({}), cost, "h200")]
        rows.append({"case": name, "paddle": judged([baseline_plan(each, cost) for each in programs], cost), "auto": judged(plans, cost)})
        print(json.dumps(rows[-1]), flush=True)
    store("collectives", {**meta(), "profile": "h200", "rows": rows}, args.out)


if __name__ == "__main__":
    main()
