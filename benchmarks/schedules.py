"""Schedules of a step compared by simulation: Paddle's own, the named forms and `auto`, and how near each comes to the bound.

The programs are Paddle's, float32, one rank of each stage, sequence 2048; the times are those of the H200 profile. They are built where
DIR lacks them (minutes each). A program of 16 micro-batches differs from one of 8 only in the number by which the loss is divided.

    python benchmarks/schedules.py DIR [--case NAME ...] [-o FILE]     (rows of other cases in FILE stay)
    python benchmarks/schedules.py --quick [-o FILE]
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bounds import bound_ns, firm_bound_ns
from measuring import RESULTS, meta, store
from msgspec.structs import replace
from simulated import built, captured, parse, parser

from interlace.config import make_config
from interlace.cost_model import CostModel, Costs, load_profile
from interlace.errors import InterlaceError
from interlace.ir import Program
from interlace.ir.target import IDEAL, Target, with_paddles_jobs
from interlace.planning.making import BASELINE_KEPT, FORM_TAKEN
from interlace.planning.plan import Plan, make_plans
from interlace.scheduler.memory.live import in_order
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.simulator import simulate

MODELS = {"GPT-3 6.7B": ("gpt", "gpt3-6.7b"), "Llama 7B": ("llama", "llama-7b")}
SHAPES = {
    "pp 1": (1, 1, 4, 2),
    "pp 2": (2, 1, 8, 2),
    "pp 4": (4, 1, 16, 2),
    "pp 4, all layers": (4, 1, 32, 2),
    "pp 8": (8, 1, 32, 2),
    "pp 4, mp 4": (4, 1, 16, 4),
    "pp 4, mp 8": (4, 1, 16, 8),
    "pp 2, vpp 2": (2, 2, 8, 2),
    "pp 4, vpp 2": (4, 2, 16, 2),
}
"""Stages, chunks, layers and tensor-parallel ranks of each: four layers a stage, the whole model with eight stages, or all 32 on four."""
MICRO_BATCHES = (8, 16)
PADDLES = with_paddles_jobs(IDEAL)
"""Paddle's own jobs keep what ours free (interlace/ir/target.py)."""
FORMS = {"stock": "off", "dx-first": "dx-first", "mixed": "mixed", "zb-h1": "zb-h1", "auto": "auto"}


def programs_of(name: str, folder: Path) -> list[Program]:
    """Programs of a case, one rank of each stage."""
    model, _, shape = name.partition(", ")
    (script, preset), (stages, chunks, layers, mp) = MODELS[model], SHAPES[shape]
    schedule = f"--schedule VPP --vpp {chunks}" if chunks > 1 else "--schedule 1F1B"
    words = f"--preset {preset} --layers {layers} --seq-len 2048 --pp {stages} --mp {mp} --micro-batches 8 {schedule}"
    return built(folder / name.replace(" ", "-").replace(",", ""), script, stages * mp, words.split())


def with_micro_batches(programs: Sequence[Program], count: int) -> list[Program]:
    """The same programs for a step of so many micro-batches."""
    return [replace(program, pipeline=replace(program.pipeline, num_micro_batches=count)) for program in programs]


def judged(plans: Sequence[Plan], cost: Costs, target: Target = IDEAL) -> dict[str, Any]:
    """Step, and what the slowest stage's consists of; in milliseconds and bytes. `target`: who runs the jobs."""
    programs = [plan.program for plan in plans]
    representative = {rank: each.rank for each in programs for rank in each.equivalent_ranks}
    ranks = simulate(programs, cost, Options(representative=representative), with_memory=False).ranks
    busiest = max(ranks, key=lambda rank: rank.compute_ns)
    return {
        "step_ms": round(max(rank.step_ns for rank in ranks) / 1e6, 1),
        "compute_ms": round(busiest.compute_ns / 1e6, 1),
        "exposed_ms": round(busiest.exposed_comm_ns / 1e6, 1),
        "bubble_ms": round(busiest.bubble_ns / 1e6, 1),
        "peak_bytes": max(in_order(each, target=target).peak() for each in programs),
    }


def chosen(plan: Plan) -> str:
    """What `auto` says that it took."""
    taken = next((each for report in plan.reports for each in report.done if each.rule in (FORM_TAKEN, BASELINE_KEPT)), None)
    if taken is None:
        return ""
    levels = taken.numbers.get("recomputed", ())
    recomputed = [f"recomputed [{', '.join(f'{level:g}' for level in levels)}]"] if isinstance(levels, tuple) and levels else []
    form = "Paddle's baseline" if taken.rule == BASELINE_KEPT else taken.names.get("form", "Paddle's order of jobs with the other passes")
    return ", ".join([str(form), *recomputed, *taken.names.get("others", ())])


def rows_of(name: str, programs: Sequence[Program], cost: CostModel, counts: Sequence[int] = MICRO_BATCHES) -> Iterator[dict[str, Any]]:
    """A row for each number of micro-batches."""
    for count in counts:
        given = with_micro_batches(programs, count)
        row: dict[str, Any] = {"case": name, "micro_batches": count, **bounds_ms(given, cost)}
        for label, form in FORMS.items():
            config = make_config({"schedule_1f1b": {"interleave": form, "only_gains": False, "search": False}})
            begin = time.process_time()
            try:
                plans = make_plans(given, stock() if label == "stock" else config, cost, "h200")
            except InterlaceError as error:
                row[label] = {"why_not": str(error)}
                continue
            row[label] = {"cpu_s": round(time.process_time() - begin, 1), **judged(plans, cost, PADDLES if label == "stock" else IDEAL)}
            row[label] |= {"chosen": chosen(plans[0])} if label == "auto" else {}
        yield row


def bounds_ms(programs: Sequence[Program], cost: CostModel) -> dict[str, float]:
    """What no schedule can pass, with and without collectives and memory (`bounds.py`)."""
    peaks = [in_order(plan.program, target=PADDLES).peak() for plan in make_plans(programs, stock(), cost, "h200")]
    found = {"bound_ms": bound_ns(programs, cost), "firm_bound_ms": firm_bound_ns(programs, cost, peaks)}
    return {name: round(each / 1e6, 1) for name, each in found.items()}


def stock() -> Any:
    """The configuration of Paddle's baseline."""
    from interlace.config import load_config

    return load_config("baseline")


def _others(names: Sequence[str], out: Path | None) -> list[dict[str, Any]]:
    """Stored rows of other cases: those that are asked for by name take the place of their own rows alone."""
    path = out or RESULTS / "schedules.json"
    rows = json.loads(path.read_text())["rows"] if path.is_file() else []
    return [row for row in rows if row["case"] not in names]


def main(argv: list[str] | None = None) -> None:
    """Simulate, print and store."""
    options = parser(__doc__, "one pipeline of a tiny model")
    options.add_argument("--case", action="append", choices=[f"{model}, {shape}" for model in MODELS for shape in SHAPES], default=[])
    args = parse(options, argv)
    cost = CostModel(load_profile("h200"))
    order = [f"{model}, {shape}" for model in MODELS for shape in SHAPES]
    names = ["tiny, pp 2"] if args.quick else args.case or order
    rows = _others(names, args.out) if args.case else []
    for name in names:
        given = captured("pp2, clip") if args.quick else programs_of(name, args.folder)
        for row in rows_of(name, given, cost, MICRO_BATCHES[:1] if args.quick else MICRO_BATCHES):
            rows.append(row)
            rows.sort(key=lambda row: (order.index(row["case"]) if row["case"] in order else 0, row["micro_batches"]))
            print(row, flush=True)
            store("schedules", {**meta(), "profile": "h200", "rows": rows}, args.out)


if __name__ == "__main__":
    main()
