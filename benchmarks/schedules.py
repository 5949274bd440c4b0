"""Simulated comparison of schedules: Paddle's own, the named forms and the default, with lower bounds.

The programs are built by Paddle, in float32, one rank of each stage, sequence 2048; times and power are those of the H200 profile. Programs
that DIR lacks are built (some ten seconds each). A program of 16 micro-batches differs from one of 8 only in the number by which the loss
is divided. Memory is that of the fullest GPU, in the way that planning counts its limit; named forms have no limit.

    python benchmarks/schedules.py DIR [--case NAME ...] [--form NAME ...] [-o FILE]     (other rows and forms in FILE are kept)
    python benchmarks/schedules.py --quick [-o FILE]
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bounds import bound_ns, firm_bounds_ns
from measuring import NAMED_FORMS, RESULTS, meta, store
from msgspec.structs import replace
from simulated import built, captured, parse, parser

from interlace.config import Config, load_config, make_config
from interlace.cost_model import CostModel, load_profile
from interlace.errors import InterlaceError
from interlace.garbage import rarely_collected
from interlace.ir import Program
from interlace.ir.target import IDEAL, with_paddles_jobs
from interlace.planning.budget import baseline_peak_bytes, peak_bytes
from interlace.planning.limits import SLACK
from interlace.planning.making import BASELINE_KEPT, FORM_TAKEN
from interlace.planning.plan import Plan, make_plans
from interlace.scheduler.memory.live import in_order

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
"""Stages, chunks, layers and tensor-parallel ranks of each case: four layers per stage (the whole model with eight stages), or all 32 on
four stages."""
MICRO_BATCHES = (8, 16)
PADDLES = with_paddles_jobs(IDEAL)
"""The rules for Paddle's own jobs, which keep values that Interlace's jobs free (interlace/ir/target.py)."""
NAMED = {name: {"schedule_1f1b": {"interleave": name, "only_gains": False, "search": False}} for name in NAMED_FORMS}
"""Name of a form -> its options."""
FORMS: dict[str, dict[str, Any]] = {**NAMED, "auto": {}}


def programs_of(name: str, folder: Path) -> list[Program]:
    """Programs of a case, one rank of each stage."""
    model, _, shape = name.partition(", ")
    (script, preset), (stages, chunks, layers, mp) = MODELS[model], SHAPES[shape]
    schedule = f"--schedule VPP --vpp {chunks}" if chunks > 1 else "--schedule 1F1B"
    words = f"--preset {preset} --layers {layers} --seq-len 2048 --pp {stages} --mp {mp} --micro-batches 8 {schedule}"
    return built(folder / name.replace(" ", "-").replace(",", ""), script, stages * mp, words.split())


def with_micro_batches(programs: Sequence[Program], count: int) -> list[Program]:
    """The same programs for a step with this number of micro-batches."""
    return [replace(program, pipeline=replace(program.pipeline, num_micro_batches=count)) for program in programs]


def judged(plans: Sequence[Plan], peak: int) -> dict[str, Any]:
    """The simulated step, and its parts on the stage that computes longest; in milliseconds and bytes."""
    outcome = plans[0].outcome
    assert outcome is not None
    busiest = max(outcome.plan.stages, key=lambda stage: stage.compute_ns)
    return {
        "step_ms": round(outcome.plan.step_ns / 1e6, 1),
        "compute_ms": round(busiest.compute_ns / 1e6, 1),
        "exposed_ms": round(busiest.exposed_ns / 1e6, 1),
        "bubble_ms": round(busiest.bubble_ns / 1e6, 1),
        "peak_bytes": peak,
    }


def held_bytes(plans: Sequence[Plan], cost: CostModel) -> int:
    """Bytes on the fullest GPU: the most of its rank alone with any speed of the host, and in the step of all ranks."""
    in_step = plans[0].outcome.plan.peak_bytes if plans[0].outcome else 0
    return max(in_step, *(peak_bytes(plan.program, cost) or 0 for plan in plans))


def baseline_bytes(programs: Sequence[Program], cost: CostModel) -> int:
    """The same for Paddle's baseline, which is the limit of planning."""
    return max(baseline_peak_bytes(each, cost) or 0 for each in programs)


def chosen(plan: Plan) -> str:
    """What `auto` chose, from its remarks."""
    taken = next((each for report in plan.reports for each in report.done if each.rule in (FORM_TAKEN, BASELINE_KEPT)), None)
    if taken is None:
        return ""
    levels = taken.numbers.get("recomputed", ())
    recomputed = [f"recomputed [{', '.join(f'{level:g}' for level in levels)}]"] if isinstance(levels, tuple) and levels else []
    form = "Paddle's baseline" if taken.rule == BASELINE_KEPT else taken.names.get("form", "Paddle's order of jobs with the other passes")
    return ", ".join([str(form), *recomputed, *taken.names.get("others", ())])


def rows_of(
    name: str, programs: Sequence[Program], cost: CostModel, counts: Sequence[int] = MICRO_BATCHES, forms: Sequence[str] = tuple(FORMS)
) -> Iterator[dict[str, Any]]:
    """A row for each number of micro-batches."""
    for count in counts:
        given = with_micro_batches(programs, count)
        baseline = make_plans(given, stock(), cost, "h200")
        limit = baseline_bytes(given, cost)
        row: dict[str, Any] = {"case": name, "micro_batches": count, **bounds_ms(given, baseline, limit, cost)}
        row["stock"] = judged(baseline, limit)
        for label in forms:
            begin = time.process_time()
            try:
                with rarely_collected():  # like the commands
                    plans = make_plans(given, make_config(FORMS[label]), cost, "h200")
            except InterlaceError as error:
                row[label] = {"why_not": str(error)}
                continue
            row[label] = {"cpu_s": round(time.process_time() - begin, 1), **judged(plans, held_bytes(plans, cost))}
            row[label] |= {"chosen": chosen(plans[0])} if label == "auto" else {}
        yield row


def bounds_ms(programs: Sequence[Program], baseline: Sequence[Plan], limit: int, cost: CostModel) -> dict[str, float]:
    """Lower bounds for all schedules (`bounds.py`): without collectives and memory; with both, at the full clock and with the power limit.

    Args:
        programs, baseline: The captured programs, and Paddle's baseline.
        limit: Bytes that the baseline holds on its fullest GPU.
        cost: Times, interference and power.
    """
    peaks = [in_order(plan.program, target=PADDLES).peak() for plan in baseline]
    at_full_clock, firm = firm_bounds_ns(programs, cost, peaks, int(SLACK * limit))
    found = {"bound_ms": bound_ns(programs, cost), "firm_bound_at_full_clock_ms": at_full_clock, "firm_bound_ms": firm}
    return {name: round(each / 1e6, 1) for name, each in found.items()}


def stock() -> Config:
    """The configuration of Paddle's baseline."""
    return load_config("baseline")


def _stored(out: Path | None) -> list[dict[str, Any]]:
    """The stored rows, if any."""
    path = out or RESULTS / "schedules.json"
    return json.loads(path.read_text())["rows"] if path.is_file() else []


def main(argv: list[str] | None = None) -> None:
    """Simulate, print and store."""
    options = parser(__doc__, "one pipeline of a tiny model")
    options.add_argument("--case", action="append", choices=[f"{model}, {shape}" for model in MODELS for shape in SHAPES], default=[])
    options.add_argument("--form", action="append", choices=FORMS, default=[])
    args = parse(options, argv)
    cost = CostModel(load_profile("h200"))
    order = [f"{model}, {shape}" for model in MODELS for shape in SHAPES]
    names = ["tiny, pp 2"] if args.quick else args.case or order
    counts, forms = MICRO_BATCHES[:1] if args.quick else MICRO_BATCHES, args.form or list(FORMS)
    rows = {} if args.quick else {(row["case"], row["micro_batches"]): row for row in _stored(args.out)}
    for name in names:
        given = captured("pp2, clip") if args.quick else programs_of(name, args.folder)
        for row in rows_of(name, given, cost, counts, forms):
            key = name, row["micro_batches"]
            rows[key] = {**(rows.get(key, {}) if args.form else {}), **row}
            print(rows[key], flush=True)
            listed = sorted(rows.values(), key=lambda row: (order.index(row["case"]) if row["case"] in order else 0, row["micro_batches"]))
            store("schedules", {**meta(), "profile": "h200", "rows": listed}, args.out)


if __name__ == "__main__":
    main()
