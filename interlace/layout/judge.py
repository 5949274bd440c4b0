"""Judges the programs of a layout, in a process of its own: by Paddle's own plan and bounds (a draft), or by planning it in full."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import msgspec

from interlace.config import load_config, make_config
from interlace.cost_model import CostModel, load_profile
from interlace.cost_model.base import Row
from interlace.errors import BudgetError, InterlaceError, LaunchError
from interlace.garbage import keep_freed_memory, rarely_collected
from interlace.ir import Program, load
from interlace.ir.dump import write_json
from interlace.ir.equivalent_ranks import representatives
from interlace.ir.kinds import DATA
from interlace.ir.target import target_of, with_paddles_jobs
from interlace.local import processes
from interlace.local.rank import end_with_parent
from interlace.local.stages import stages_of
from interlace.passes.choose_recompute import recomputation
from interlace.planning.baseline import baseline_plan, refusal_of
from interlace.planning.budget import peak_bytes
from interlace.planning.floor import floors_of
from interlace.planning.outcome import Step, errors_of
from interlace.planning.plan import make_plans
from interlace.planning.rows import write_rows
from interlace.scheduler.hazards import check, findings_text
from interlace.scheduler.memory.live import needed_at_once
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.simulator import simulate

ACROSS = "estimated: "
"""Start of a cost model's `Estimate.detail` for times across hosts."""


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request to a process.

    Attributes:
        programs: Files of the programs, one rank of each stage in the order of stages.
        profile: The device profile, by name or path.
        memory_budget: Device bytes that a plan may hold; 0 asks for a draft.
        config: Configuration file of the plan; empty for the defaults.
        folder: Folder for the plans.
        processes: Number of processes that plan at the same time.
    """

    programs: tuple[str, ...]
    profile: str
    memory_budget: int = 0
    config: str = ""
    folder: str = ""
    processes: int = 1


class Draft(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A layout judged by Paddle's own plan.

    Attributes:
        step: The simulated step; None, with the reason in `why`, if it would never end or cannot be simulated.
        refusal: Why Paddle cannot run this plan, so that its figures only indicate what another plan may take; empty if it can.
        peak_bytes: Peak of the fullest rank on a GPU, however fast its host.
        bound_ns: Lower bound of the step for any schedule of these programs, without recomputation.
        shared_ns: The same for all layouts that differ only in sharding, or by more recomputation.
        least_bytes: The least memory with which every rank can run its operations in some order.
        rel_error: Expected relative error of the step, from the errors that the cost model claims.
        across_hosts: Share of the device time that is only estimated because it crosses hosts.
        tokens: Tokens that a replica reads in a step; 0 if it reads no integers.
        seconds: Time that the draft took.
    """

    step: Step | None
    why: str = ""
    peak_bytes: int = 0
    bound_ns: int = 0
    shared_ns: int = 0
    least_bytes: int = 0
    rel_error: float = 0.0
    across_hosts: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    refusal: str = ""


class Planned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A layout judged by a plan of Interlace.

    Attributes:
        step: The simulated step; None, with the reason in `why`, if there is no plan.
        least_bytes: The least feasible budget, if the given one is not feasible; 0 if not known.
        seconds: Time that planning took.
    """

    step: Step | None
    why: str = ""
    peak_bytes: int = 0
    least_bytes: int = 0
    rel_error: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class Judging:
    """A running process that judges a layout, the file for its result, and its stderr."""

    child: processes.Child
    path: Path
    err: BinaryIO

    @classmethod
    def start(cls, asked: Asked, path: Path) -> Judging:
        err = tempfile.TemporaryFile()  # noqa: SIM115 - read when the process has ended
        command = [sys.executable, "-m", "interlace.layout.judge", msgspec.json.encode(asked).decode(), os.fspath(path)]
        return cls(processes.start(command, os.environ, err, err), path, err)

    def require_done(self) -> None:
        """Raise LaunchError if it ended without a result."""
        if self.child.process.returncode:
            self.err.seek(0)
            tail = self.err.read().decode(errors="replace").strip().splitlines()[-12:]
            raise LaunchError("\n".join(["a layout could not be judged:", *tail]))


def programs_of(paths: Sequence[str | Path]) -> list[Program]:
    """The programs of one rank of each stage, each representing all ranks of its stage."""
    found = [load(path) for path in paths]
    stages = stages_of(found[0])
    return [msgspec.structs.replace(program, equivalent_ranks=tuple(ranks[1:])) for program, ranks in zip(found, stages, strict=True)]


def without_recomputation(program: Program, costs: CostModel) -> Program:
    """The program without recomputation, as the fastest conceivable plan may run it."""
    found = recomputation(program, costs, {}, adds=False)
    return found.without(found.groups) if found.copies else program


def draft(programs: Sequence[Program], costs: CostModel, profile: str) -> Draft:
    """Judge a layout by Paddle's own plan, and find bounds for all of its plans."""
    start, bare = time.perf_counter(), [without_recomputation(program, costs) for program in programs]
    target = target_of(profile)
    baseline = [baseline_plan(program, costs) for program in programs]
    peaks = [peak_bytes(program, costs, with_paddles_jobs(target)) or 0 for program in baseline]
    step, why = None, ""
    try:
        options = Options.of(target, peers_ready=False, representative=representatives(programs))
        result = simulate(baseline, costs, options, target=with_paddles_jobs(target))
        step = Step.of(result)
    except InterlaceError as error:
        why = str(error)
    slowest = _slowest(programs, costs)
    across = _device_ns(row for row in slowest if row.detail.startswith(ACROSS))
    return Draft(
        step,
        why,
        max(peaks),
        *floors_of(bare, costs),
        max(needed_at_once(program) for program in bare),
        round(step_error(slowest, costs, programs), 4),
        round(across / max(1, _device_ns(slowest)), 4),
        tokens_of(programs[0]),
        round(time.perf_counter() - start, 2),
        refusal_of(programs),
    )


def _slowest(programs: Sequence[Program], costs: CostModel) -> Sequence[Row]:
    """The cost table of the program with the most device time."""
    return max((costs.table(program) for program in programs), key=_device_ns)


def _device_ns(rows: Iterable[Row]) -> int:
    return sum(row.runs * row.dur_ns for row in rows)


def step_error(rows: Sequence[Row], costs: CostModel, programs: Sequence[Program]) -> float:
    """Expected relative error of a step. Claimed errors within a kind of operation, and of everything across hosts, have one cause and so
    are added; the sums are independent and added in quadrature, together with the step error of measured runs."""
    off: dict[str, float] = {}
    for row in rows:
        key = ACROSS if row.detail.startswith(ACROSS) else row.kind
        off[key] = off.get(key, 0.0) + row.runs * row.dur_ns * row.rel_error
    total = _device_ns(rows)
    measured = errors_of(costs, programs)
    mine = sum(each**2 for each in off.values()) ** 0.5 / total if total else 0.0
    return float((mine**2 + (measured.step_median if measured else 0.0) ** 2) ** 0.5)


def tokens_of(program: Program) -> int:
    """Tokens of a step on one rank: the number of integers in the largest input over all micro-batches."""
    values = {value.id: value for value in program.values}
    inputs = [values[each] for op in program.ops if op.name == DATA for each in op.results if not values[each].persistable]
    sizes = [prod(max(0, size) for size in each.shape) for each in inputs if each.dtype in ("int64", "int32") and len(each.shape) > 1]
    return max(sizes, default=0) * program.pipeline.num_micro_batches


def plan(programs: Sequence[Program], costs: CostModel, asked: Asked) -> Planned:
    """Plan a layout in full within a memory budget, prove the plans safe, and write them to the folder."""
    start, budget = time.perf_counter(), {"memory_budget": asked.memory_budget}
    config = load_config(asked.config, budget) if asked.config else make_config(budget)
    try:
        plans = make_plans(programs, config, costs, asked.profile, asked.processes)
    except BudgetError as error:
        return Planned(None, str(error), least_bytes=error.least_bytes, seconds=round(time.perf_counter() - start, 2))
    planned = [each.program for each in plans]
    if findings := check(planned, target_of(asked.profile)):
        return Planned(None, f"not safe: {' '.join(findings_text(findings))}", seconds=round(time.perf_counter() - start, 2))
    for each in plans:
        each.dump(asked.folder)
    write_rows(plans, Path(asked.folder), Path(asked.folder))
    step = plans[0].outcome.plan if plans[0].outcome else None
    return Planned(
        step,
        "" if step else "its step cannot be simulated",
        max(peak_bytes(program, costs) or 0 for program in planned),
        0,
        round(step_error(_slowest(planned, costs), costs, planned), 4),
        round(time.perf_counter() - start, 2),
    )


def main(argv: Sequence[str]) -> int:
    """Judge as requested (`Asked` as JSON, then the result file), and write the result."""
    end_with_parent()
    keep_freed_memory()
    asked, path = msgspec.json.decode(argv[0], type=Asked), Path(argv[1])
    with rarely_collected():
        costs = CostModel(load_profile(asked.profile))
        programs = programs_of(asked.programs)
        found: Draft | Planned
        try:
            found = plan(programs, costs, asked) if asked.memory_budget else draft(programs, costs, asked.profile)
        except InterlaceError as error:
            found = Planned(None, str(error)) if asked.memory_budget else Draft(None, str(error))
    write_json(path, found)
    return 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
