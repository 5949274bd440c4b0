"""Loading of plans made earlier. Each rank reads its own plan from a folder, or that of an equivalent rank, and runs it only if it was made
for this very program, together with the other ranks' plans.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import msgspec

from interlace.config import Beyond
from interlace.errors import InterlaceError, LoadError, PlanError
from interlace.ir import Program, load
from interlace.ir.difference import first_difference, first_unlike
from interlace.ir.dump import SUFFIX
from interlace.ir.equivalent_ranks import equivalence_key
from interlace.passes import Pipeline
from interlace.planning.baseline import baseline_plan
from interlace.planning.compare import Comparison, Member
from interlace.planning.peers import Peers, first_other, gather
from interlace.planning.plan import RECORDED, Plan, Record, digest_of_set, read_record
from interlace.planning.tasks import Programs
from interlace.planning.worker import Worker, digest_of
from interlace.planning.world import decide
from interlace.units import ranks_text

_NAME = re.compile(rf"rank(\d+){re.escape(SUFFIX)}")


class Said(msgspec.Struct, frozen=True):
    """What a rank tells the others about the plan that it read: digests of the plan and of the set it belongs to, or why there is none."""

    digest: str = ""
    set_digest: str = ""
    fault: str = ""


def load_plan(folder: str | Path, captured: Program, peers: Peers | None = None) -> Plan:
    """Load this rank's plan from a folder that `interlace plan`, or the `dump` of a run, wrote. `captured` is the program that Paddle built
    in this run; `peers` are the ranks that load theirs at the same time.

    If the folder has plans of only one rank of each stage (`dump --stages`), every rank plans again: the recorded passes run over its own
    captured program, and must give the jobs of its stage.

    Raises LoadError on all ranks if the plan of any rank is missing, cannot be read, or was made for another program, if the plans were not
    made together, or if a rank that plans again gets another plan than its stage's.
    """
    plan, said = Plan.off("no plan was read"), Said()
    try:
        plan = read_plan(Path(folder), captured.rank)
        said = Said(digest_of(plan.program), plan.set_digest, _why_not(plan, captured, folder))
    except InterlaceError as error:
        said = Said(fault=str(error))
    _require_one_set(gather(peers, "loaded plans", said), folder)
    stands = any(gather(peers, "plans of stages", bool(plan.program.equivalent_ranks)))
    return _made_again(plan, captured, peers) if stands else plan


def _made_again(plan: Plan, captured: Program, peers: Peers | None) -> Plan:
    """The plan of a rank's stage, made again for the rank itself: with its own groups, slices and partners, and the same jobs."""
    worker = Worker(captured, plan.costs(), plan.passes, plan.fingerprint(), Beyond(plan.extra_bytes), peers is not None)
    memory_limits = tuple(gather(peers, "memory_limits", plan.memory_limit or None))
    numbers = decide(worker, peers, lambda world: world.run(Pipeline(plan.passes), memory_limits).programs, Programs)
    made = worker.programs[numbers[worker.seat]]
    difference = _first_unlike_plan(made, plan.program)
    fault = difference and (
        f"the plan of rank {plan.program.rank} in {plan.loaded_from}, which stands for this one, comes out otherwise "
        f"here: {difference}; plan the dumps of all ranks, without --stages"
    )
    _require_no_fault(gather(peers, "plans made again", fault))
    digests = gather(peers, "finished plans", digest_of(made))
    return dataclasses.replace(plan, captured=captured, program=made, set_digest=digest_of_set(digests))


def _first_unlike_plan(found: Program, expected: Program) -> str:
    """The first difference between the plans of two equivalent ranks, as text; empty if there is none. Stream names contain group ids, so
    streams are compared by which operations share one."""
    for k, (job, other) in enumerate(zip_longest(found.jobs, expected.jobs)):
        if job != other:
            mine, theirs = (f"{each.name} of {len(each.items)} operations" if each else "no job" for each in (job, other))
            return f"job {k}: found {mine}, expected {theirs}" + (" in another order" if mine == theirs else "")
    if found.events != expected.events:
        return f"events: found {len(found.events)}, expected {len(expected.events)}, or others"
    return "streams are shared by other operations" if _streams(found) != _streams(expected) else first_unlike(found, expected)


def _streams(program: Program) -> list[int]:
    """For each operation the number of its stream; streams are numbered in order of first use."""
    known: dict[str, int] = {}
    return [known.setdefault(op.stream, len(known)) for op in program.ops]


def read_plan(folder: Path, rank: int) -> Plan:
    """Read a rank's plan as `Plan.dump` wrote it, or that of an equivalent rank. Raises InterlaceError if the folder has neither, the
    plan's record is missing, or the plan was changed after it was made."""
    path = folder / f"rank{rank}{SUFFIX}"
    if not path.is_file():
        path = _files(folder).get(rank, path)
    if not path.is_file():
        raise LoadError(f"{folder}: no plan of rank {rank}{_those_there(folder)}")
    record, program = read_record(path), load(path)
    require_its_record(path, program, record)
    captured = load(folder / "captured" / path.name)
    try:
        passes = record.passes(record.order)
    except PlanError as error:
        raise LoadError(f"{path}: {error}") from error
    recorded = {name: getattr(record, name) for name in RECORDED}
    return Plan(captured, program, passes=passes, loaded_from=os.fspath(folder), **recorded)


def why_not_its_record(path: Path, program: Program, record: Record) -> str:
    """Why the program in a plan's file does not match the record beside it; empty if it does."""
    if record.digest == digest_of(program):
        return ""
    return (
        f"{path}: not the plan that its record in {path.parent / 'captured'} tells of: one of the two was changed or replaced, "
        "or comes from an older version; plan again"
    )


def require_its_record(path: Path, program: Program, record: Record) -> None:
    """Raise LoadError if a plan's program does not match its record."""
    if fault := why_not_its_record(path, program, record):
        raise LoadError(fault)


def compared_in(folder: Path) -> Comparison:
    """Compare the plans of a folder with Paddle's baseline. Raises InterlaceError as `read_plan`."""
    plans = [read_plan(folder, rank) for rank in sorted(_ranks_in(folder))]
    stages = [equivalence_key(plan.captured) for plan in plans]
    costs = plans[0].costs().issued()
    members = tuple(
        Member(baseline_plan(plan.captured, costs), plan.program, plan.reports)
        for at, plan in enumerate(plans)
        if stages.index(stages[at]) == at
    )
    representative = {
        rank: plans[stages.index(stage)].program.rank for plan, stage in zip(plans, stages, strict=True) for rank in plan.program.ranks
    }
    memory = plans[0].outcome.memory if plans[0].outcome else None
    return Comparison(members, representative, plans[0].profile, memory, plans[0].pool_budget)


def require_ranks(folder: str | Path, world: int) -> None:
    """Check, before anything starts, that a folder has a plan for each of `world` ranks. Raises LoadError if some are missing."""
    missing = sorted(set(range(world)) - set(_files(Path(folder))))
    if missing:
        raise LoadError(f"{folder}: no plan of {ranks_text(missing)}{_those_there(Path(folder))}")


def _ranks_in(folder: Path) -> set[int]:
    return {int(found[1]) for path in folder.glob(f"rank*{SUFFIX}") if (found := _NAME.fullmatch(path.name))}


def _files(folder: Path) -> dict[int, Path]:
    """Rank -> the file of its own plan, or of an equivalent rank's."""
    paths = {rank: folder / f"rank{rank}{SUFFIX}" for rank in sorted(_ranks_in(folder))}
    return {rank: path for path in paths.values() for rank in load(path).equivalent_ranks} | paths


def _those_there(folder: Path) -> str:
    there = sorted(_files(folder))
    return (
        f" (there: {ranks_text(there) if there else 'none'}); expected a plan of every rank of the run: plan the dumps of all ranks "
        "at once, or of one rank of each stage"
    )


def _why_not(plan: Plan, captured: Program, folder: str | Path) -> str:
    """Why a plan was not made for this program; empty if it was."""
    stands = captured.rank in plan.captured.equivalent_ranks
    difference = first_unlike(captured, plan.captured) if stands else first_difference(captured, plan.captured)
    return difference and (
        f"the plan in {folder} was made for another program: {difference}; dump and plan the script again with the same arguments"
    )


def _require_one_set(said: Sequence[Said], folder: str | Path) -> None:
    """Raise LoadError if a rank has no plan, or the plans were not all made together."""
    _require_no_fault([each.fault for each in said])
    other = first_other([each.set_digest for each in said])
    if other is not None:
        raise LoadError(f"{folder}: the plans of ranks 0 and {other} were not made together; expected those of one `interlace plan`")
    if said[0].set_digest != digest_of_set([each.digest for each in said]):
        raise LoadError(
            f"{folder}: these plans were made together with plans of other ranks than {ranks_text(range(len(said)))}; expected "
            "those of one `interlace plan` over the dumps of all ranks"
        )


def _require_no_fault(faults: Sequence[str]) -> None:
    """Raise LoadError with the first rank's fault that is not empty."""
    rank = next((rank for rank, fault in enumerate(faults) if fault), None)
    if rank is not None:
        raise LoadError(f"rank {rank}: {faults[rank]}" if len(faults) > 1 else faults[rank])
