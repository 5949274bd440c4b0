"""What is found about the programs of a layout: Paddle's own step and its bound (a draft), or a plan. Runs as a process of its own."""

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
from interlace.garbage import rarely_collected
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
"""How a cost model begins to tell of times across hosts."""


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a process is to find.

    Attributes:
        programs: Files, one rank of each stage in the order of the stages.
        memory_budget: Device bytes of a plan; 0 asks for a draft.
        folder: Where the plans go.
        processes: That plan at once.
    """

    programs: tuple[str, ...]
    profile: str
    memory_budget: int = 0
    config: str = ""
    folder: str = ""
    processes: int = 1


class Draft(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A layout by Paddle's own plan.

    Attributes:
        step: Simulated; None where it would never end or cannot be simulated, and `why` says so.
        refusal: Why Paddle does not run it, so that the figures only tell what another plan may take; empty where it does.
        peak_bytes: Of the fullest rank on a GPU, however fast its host.
        bound_ns: No schedule of these programs takes less, whatever of their recomputation is left out.
        shared_ns: The same of any layout that differs in sharding and in what it computes more again.
        least_bytes: Without which some rank cannot run its operations in any order.
        rel_error: Expected of the step, from what the cost model claims.
        across_hosts: Share of the device time that is estimated as it crosses hosts.
        tokens: Integers that a replica reads in a step; 0 where none are read.
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
    """A layout by a plan of Interlace.

    Attributes:
        step: Simulated; None where there is no plan, and `why` says so.
        least_bytes: The least feasible budget, where the one that was asked for is not; 0 where it is not known.
    """

    step: Step | None
    why: str = ""
    peak_bytes: int = 0
    least_bytes: int = 0
    rel_error: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class Judging:
    """A process that finds something, and where it writes it."""

    child: processes.Child
    path: Path
    err: BinaryIO

    @classmethod
    def start(cls, asked: Asked, path: Path) -> Judging:
        err = tempfile.TemporaryFile()  # noqa: SIM115 - read when the process has ended
        command = [sys.executable, "-m", "interlace.layout.judge", msgspec.json.encode(asked).decode(), os.fspath(path)]
        return cls(processes.start(command, os.environ, err, err), path, err)

    def require_done(self) -> None:
        """Raise LaunchError where it ended without a result."""
        if self.child.process.returncode:
            self.err.seek(0)
            tail = self.err.read().decode(errors="replace").strip().splitlines()[-12:]
            raise LaunchError("\n".join(["a layout could not be judged:", *tail]))


def programs_of(paths: Sequence[str | Path]) -> list[Program]:
    """Programs of one rank of each stage, each to stand for its stage."""
    found = [load(path) for path in paths]
    stages = stages_of(found[0])
    return [msgspec.structs.replace(program, equivalent_ranks=tuple(ranks[1:])) for program, ranks in zip(found, stages, strict=True)]


def without_recomputation(program: Program, costs: CostModel) -> Program:
    """A program that computes nothing twice: what the fastest plan could make of it."""
    found = recomputation(program, costs, {}, adds=False)
    return found.without(found.groups) if found.copies else program


def draft(programs: Sequence[Program], costs: CostModel, profile: str) -> Draft:
    """Paddle's own plan of a layout, and what no plan of it can pass."""
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
    """The table of the rank with the most device time."""
    return max((costs.table(program) for program in programs), key=_device_ns)


def _device_ns(rows: Iterable[Row]) -> int:
    return sum(row.runs * row.dur_ns for row in rows)


def step_error(rows: Sequence[Row], costs: CostModel, programs: Sequence[Program]) -> float:
    """Expected relative error of a step: claimed errors add up within a kind of operation, and over all that is estimated from one network,
    as they have one cause, and in squares over kinds; with the error that steps of measured runs had."""
    off: dict[str, float] = {}
    for row in rows:
        key = ACROSS if row.detail.startswith(ACROSS) else row.kind
        off[key] = off.get(key, 0.0) + row.runs * row.dur_ns * row.rel_error
    total = _device_ns(rows)
    measured = errors_of(costs, programs)
    mine = sum(each**2 for each in off.values()) ** 0.5 / total if total else 0.0
    return float((mine**2 + (measured.step_median if measured else 0.0) ** 2) ** 0.5)


def tokens_of(program: Program) -> int:
    """Integers of the largest input of a step on one rank."""
    values = {value.id: value for value in program.values}
    inputs = [values[each] for op in program.ops if op.name == DATA for each in op.results if not values[each].persistable]
    sizes = [prod(max(0, size) for size in each.shape) for each in inputs if each.dtype in ("int64", "int32") and len(each.shape) > 1]
    return max(sizes, default=0) * program.pipeline.num_micro_batches


def plan(programs: Sequence[Program], costs: CostModel, asked: Asked) -> Planned:
    """A plan in full of a layout within a memory budget, proved; its files go to the folder."""
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
    """Find what is asked for and write it."""
    end_with_parent()
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
