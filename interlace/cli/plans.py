"""Read the dumps and plans that a command works on, and check that they belong to one world and that two sets can be compared."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from interlace.cli.target import Setting
    from interlace.ir import Program
    from interlace.planning.plan import Record
    from interlace.scheduler.simulate.simulator import Result


class PlanFile(NamedTuple):
    """A dump or a plan. A plan in the folder to which it was written has a record of how it was made."""

    path: Path
    program: Program
    record: Record | None


def add_partial(parser: argparse.ArgumentParser) -> None:
    """Add `--partial` to a command."""
    parser.add_argument(
        "--partial",
        action="store_true",
        help="continue if ranks of the world are missing: their agreement with the others is not checked, and they count "
        "as ready whenever they are needed",
    )


def add_budgets(parser: argparse.ArgumentParser, or_else: str = "") -> None:
    """Add `--memory-budget` and `--pool-budget` to a command; `or_else` ends their help."""
    parser.add_argument(
        "--memory-budget",
        metavar="SIZE",
        help="device memory per rank, such as 70GB, a share of what Paddle's baseline holds, such as 0.8 or 80%%, an addition to it, "
        f"such as +8GB, or off; overrides that of --config{or_else}",
    )
    parser.add_argument(
        "--pool-budget",
        metavar="SIZE",
        help="what a rank's parameters and allocator pools may take, free blocks included, in the forms of --memory-budget; by default "
        f"about nine tenths of the device's memory; overrides that of --config{or_else}",
    )


def budgets_of(args: argparse.Namespace) -> dict[str, str]:
    """Options of the configuration that `add_budgets` lets a command set."""
    from interlace.config import BUDGET, POOL_BUDGET

    return {name: value for name in (BUDGET, POOL_BUDGET) if (value := getattr(args, name)) is not None}


def read_files(paths: Sequence[str | Path]) -> list[PlanFile]:
    """The programs of files and folders, in the order of the names. Raises ProgramError if a name has no program, PlanError if the record
    of a plan cannot be read."""
    from interlace.ir import load
    from interlace.ir.dump import find_dumps
    from interlace.planning.plan import has_record, read_record

    return [PlanFile(path, load(path), read_record(path) if has_record(path) else None) for path in find_dumps(paths)]


def require_world(files: Sequence[PlanFile], partial: bool, *, is_proved: bool = False) -> None:
    """Refuse programs that do not form one world.

    Args:
        files: The programs.
        partial: Whether ranks may be missing; they are then named on standard error.
        is_proved: Whether a proof follows, which itself compares the calls of ranks, judges plans that were made one by one, and names
            plans that differ from their records.

    Raises:
        ProgramError: A rank is there twice, or missing, or differs from the others.
        PlanError: Plans were not made together, or are mixed with dumps, or only some have a record, or one differs from its record.
    """
    from interlace.ir.one_world import require_one_world

    programs = [file.program for file in files]
    _require_alike(programs)
    require_one_world(programs, [file.path for file in files], with_calls=not is_proved)
    _require_records(files)
    if not is_proved:
        _require_made_together(files)
        _require_their_records(files)
    _require_all(programs, partial)


def _require_alike(programs: Sequence[Program]) -> None:
    from interlace.errors import PlanError

    bare = [str(program.rank) for program in programs if not program.jobs]
    if 0 < len(bare) < len(programs):
        planned = [str(program.rank) for program in programs if program.jobs]
        raise PlanError(f"rank(s) {', '.join(planned)} have a schedule, rank(s) {', '.join(bare)} have none; give plans or dumps, not both")


def _require_records(files: Sequence[PlanFile]) -> None:
    from interlace.errors import PlanError

    planned = [file for file in files if file.program.jobs]
    told, lacking = (next((file.path for file in planned if (file.record is not None) == known), None) for known in (True, False))
    if told and lacking:
        raise PlanError(
            f"{lacking} has no record in {lacking.parent / 'captured'}, but {told} has one; expected the plans of one "
            "`interlace plan`, with all files that it wrote"
        )


def _require_made_together(files: Sequence[PlanFile]) -> None:
    from interlace.errors import PlanError
    from interlace.planning.plan import digest_of_set

    alone = "each by itself, as `interlace plan --partial` does"
    known = [
        (path, alone if record.set_digest == digest_of_set([record.digest]) else record.set_digest)
        for path, program, record in files
        if program.jobs and record and record.set_digest
    ]
    other = next((path for path, digest in known if digest != known[0][1]), None)
    if other is not None:
        raise PlanError(
            f"{known[0][0]} and {other} were not made together; expected the plans of one `interlace plan`: plan the dumps of "
            "all ranks at once, into one folder"
        )


def _require_their_records(files: Sequence[PlanFile]) -> None:
    from interlace.planning.loaded import require_its_record

    for path, program, record in files:
        if program.jobs and record:
            require_its_record(path, program, record)


def _require_all(programs: Sequence[Program], partial: bool) -> None:
    from interlace.errors import ProgramError
    from interlace.ir.equivalent_ranks import missing_ranks, stage_of
    from interlace.units import ranks_text

    missing = missing_ranks(programs)
    if not missing:
        return
    one = programs[0]
    absent = sorted({stage_of(rank, one) for rank in missing} - {program.pipeline.stage for program in programs})
    stages = f", among them all of stage{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}" if absent else ""
    told = f"nothing is given of {ranks_text(missing)} of {one.world}{stages}"
    if not partial:
        raise ProgramError(
            f"{told}; without them, the agreement of all ranks and the step time are unknown; give all ranks, or one that "
            "represents each stage (`interlace dump --stages`), or --partial to continue with these alone"
        )
    print(f"{told}: they count as ready whenever they are needed, and their agreement with the others is not checked", file=sys.stderr)


def simulated(
    files: Sequence[PlanFile], setting: Setting, p2p: Literal["rendezvous", "buffered"] | None = None, *, partial: bool = False
) -> Result:
    """Simulate a step of these plans; programs without jobs run in Paddle's baseline order, in Paddle's own jobs. Raises the errors of
    `require_world` and of the simulator."""
    from interlace.ir.target import with_paddles_jobs
    from interlace.planning.baseline import baseline_plan

    require_world(files, partial)
    programs = sorted((file.program for file in files), key=lambda program: program.rank)
    setting = setting.of_plans(files)
    if not any(program.jobs for program in programs):
        setting = replace(setting, target=with_paddles_jobs(setting.target))
    return setting.simulate([baseline_plan(program, setting.costs) for program in programs], p2p)


def require_same_model(plan: Sequence[Program], beside: Sequence[Program]) -> None:
    """Refuse to compare times unless both sets have the same model, world and number of micro-batches. Raises PlanError with the
    difference."""
    from interlace.errors import PlanError

    finders: dict[str, Callable[[Program], object]] = {
        "world": lambda program: program.world,
        "number of micro-batches": lambda program: program.pipeline.num_micro_batches,
        "list of forward operations": _forward,
    }
    for name, find in finders.items():
        mine, other = {p.rank: find(p) for p in plan}, {p.rank: find(p) for p in beside}
        rank = next((rank for rank in mine if rank in other and mine[rank] != other[rank]), None)
        if rank is not None:
            found = "" if isinstance(mine[rank], dict) else f" ({mine[rank]} and {other[rank]})"
            raise PlanError(f"--beside: rank {rank} has a different {name}{found}; expected plans of the same model, layout and batch")


def _forward(program: Program) -> object:
    """What no pass changes: how many forward operations of the model have each kind and shapes."""
    from collections import Counter

    from interlace.ir.copies import may_be_omitted

    shapes = {value.id: value.shape for value in program.values}
    own = (op for op in program.ops if op.role == "forward" and not may_be_omitted(op) and not (op.kind == "share_data" and op.origin < 0))
    return Counter((op.kind, tuple(shapes.get(value) for value in op.results)) for op in own)
