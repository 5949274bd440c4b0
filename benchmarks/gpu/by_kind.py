"""Errors of a profile by kind of operation: times in a traced step, compared with the profile's times of the same operations.

`python -m benchmarks.gpu.by_kind FOLDER [FOLDER ...] --device h100 -o FILE [--plans auto]`.

FOLDER is the --out of `benchmarks.gpu.training`. Times are those of the compute stream. The profile's times are those of each operation
alone and, if the run recorded clocks (`--power`), also at its mean clock. Without CUPTI, the two timed events around a kernel add some
microseconds. Kernels that do not belong to an operation of the plan are `other`.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import beside_transfers
from benchmarks.gpu.results import cases_of
from interlace.cost_model import CostModel, Costs, load_profile
from interlace.cost_model.base import Draw, tables_of
from interlace.cost_model.work import Part, Values, work_of
from interlace.ir import Op, Program
from testbed.trace import RankTrace, align, stream_names

OTHER = "other"


@dataclass(slots=True)
class Took:
    """Number and microseconds of operations of a kind in a step. `fastest_us`: if each took as long as the fastest of its size;
    `at_clock_us`: predicted for the clock of the run, if that was recorded."""

    n: int = 0
    measured_us: float = 0.0
    fastest_us: float = 0.0
    predicted_us: float = 0.0
    at_clock_us: float = 0.0


def by_kind(program: Program, ranked: RankTrace, costs: Costs, mhz: float = 0.0) -> dict[str, Took]:
    """Kind and dtype, such as `gemm bfloat16` -> measured and predicted times of its operations, longest first. `mhz` is the clock of the
    run, 0 if unknown."""
    known, ops = align(ranked.planned, ranked.trace.issues), {op.id: op for op in program.ops}
    names, (values, groups) = stream_names(ranked, known), tables_of(program)
    runs: dict[int, float] = defaultdict(float)
    found: dict[str, Took] = defaultdict(Took)
    for each in ranked.trace.intervals:
        if names[each.stream] == "compute":
            if each.op in known:
                runs[each.op] += each.end_us - each.begin_us  # an operation may be several kernels
            else:
                found[OTHER].measured_us += each.end_us - each.begin_us
    by_size: dict[tuple[str, tuple[Part, ...]], list[float]] = defaultdict(list)
    for number, took_us in runs.items():
        op = ops.get(beside_transfers.op_of(known[number].label))
        kind = kind_of(op, values) if op else OTHER
        by_size[kind, work_of(op, values).parts if op else ()].append(took_us)
        if op:
            alone_us = costs.op_time(op, values, groups).dur_ns / 1e3
            found[kind].predicted_us += alone_us
            found[kind].at_clock_us += alone_us * _longer(costs, costs.draw(op, values, groups), mhz) if mhz else 0.0
    for (kind, _), times in by_size.items():
        found[kind].n += len(times)
        found[kind].measured_us += sum(times)
        found[kind].fastest_us += min(times) * len(times)
    return dict(sorted(found.items(), key=lambda item: -item[1].measured_us))


def kind_of(op: Op, values: Values) -> str:
    """Kind and dtype of the cost model if the operation is a single kernel, else the operation's own name."""
    parts = work_of(op, values).parts
    return f"{parts[0].kind} {parts[0].dtype}" if len(parts) == 1 else op.kind


def _longer(costs: Costs, draw: Draw, mhz: float) -> float:
    """The factor by which an operation takes longer at this clock than at that of the profile's times of its kind."""
    if (power := costs.power()) is None:
        return 1.0
    ran, own = (1 + draw.clock_share * (power.highest_mhz / each - 1) for each in (mhz, draw.own_mhz or power.highest_mhz))
    return ran / own


def clocks_of(folder: Path) -> dict[tuple[str, str], list[float]]:
    """Mean clock of each rank's GPU in the counted steps of each run, by case and plan, if it was recorded."""
    return {
        (case["case"], plan): [each.get("mhz", 0.0) for each in run["power"]]
        for case in cases_of(folder)
        for plan, run in case["plans"].items()
        if "power" in run
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.by_kind", description="Traced steps against a profile, by kind.")
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="the --out of a run of benchmarks.gpu.training")
    parser.add_argument("--device", required=True, metavar="PROFILE", help="the profile to compare with, by name or path")
    parser.add_argument("--plans", default="*", metavar="PATTERN", help="these plans")
    parser.add_argument("--note", default="", metavar="TEXT", help="when and on what it was measured")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    costs, steps = CostModel(load_profile(args.device)), []
    for folder in args.folders:
        clocks = clocks_of(folder)
        for case, plan, program, ranked in beside_transfers.named_runs_of([folder]):
            if fnmatch.fnmatchcase(plan, args.plans):
                mhz = clocks[case, plan][ranked.rank] if (case, plan) in clocks else 0.0
                kinds = {kind: _row(took) for kind, took in by_kind(program, ranked, costs, mhz).items()}
                steps.append({"case": case, "plan": plan, "rank": ranked.rank, "mhz": round(mhz), "kinds": kinds})
    if not steps:
        parser.error(beside_transfers.NO_RUNS.format(", ".join(map(str, args.folders))))
    lines = ",\n".join(json.dumps(step) for step in steps)
    args.output.write_text(f'{{"note": {json.dumps(args.note)}, "device": {json.dumps(args.device)}, "steps": [\n{lines}\n]}}\n')
    return 0


def _row(took: Took) -> dict[str, Any]:
    names = ("measured_us", "fastest_us", "predicted_us", *(("at_clock_us",) if took.at_clock_us else ()))
    return {"n": took.n, **{name: round(getattr(took, name), 1) for name in names}}


if __name__ == "__main__":
    sys.exit(main())
