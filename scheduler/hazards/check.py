"""The check of a whole world: every rank on its own, then all together."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from interlace.errors import PlanError
from interlace.garbage import rarely_collected
from interlace.ir import Program
from interlace.ir.equivalent_ranks import with_given_partners
from interlace.ir.target import GPU, Target
from interlace.scheduler.hazards.all_ranks import check_together
from interlace.scheduler.hazards.call_names import CallAnswer, CallQuery, answer_queries
from interlace.scheduler.hazards.communication import shared_streams, wrong_groups
from interlace.scheduler.hazards.finding import Finding, findings_text, merged
from interlace.scheduler.hazards.flat_plan import flatten
from interlace.scheduler.hazards.freed_memory import freed_in_use, overlapping_steps
from interlace.scheduler.hazards.graph_steps import kept_from_graph
from interlace.scheduler.hazards.happens_before import Fault, Trace, Tracer
from interlace.scheduler.hazards.random_draws import draws_out_of_order
from interlace.scheduler.hazards.rank_findings import finding_of
from interlace.scheduler.hazards.skeleton import RankComm, Skeleton, comm_of, skeleton_of


def check(programs: Sequence[Program], target: Target = GPU) -> list[Finding]:
    """Find what is unsafe in the plans of a world; an empty list proves them safe under the target's rules.

    If ranks are missing, what depends on them is not checked. O(op instances x operands) for each distinct plan, as ranks with equal
    plans are checked once. Raises PlanError for two programs of one rank, programs of different worlds, or p2p without a peer.
    """
    return prove(programs, target).findings


@dataclass(slots=True)
class Proof:
    """Findings of some plans, and the communication of each rank, which the proof with other ranks needs."""

    findings: list[Finding]
    comms: list[RankComm]


@rarely_collected()  # otherwise Python's garbage collector takes a quarter of the time, and finds nothing
def prove(programs: Sequence[Program], target: Target) -> Proof:
    """Check as `check` does; returns the communication of each rank as well."""
    _same_world(programs)
    walked: dict[bytes, tuple[Trace, list[Fault], Skeleton]] = {}
    traces: dict[int, Trace] = {}
    findings: list[Finding] = []
    comms = []
    for program in with_given_partners(programs):
        key = _content(program)
        if key not in walked:
            trace = trace_of(program, target)
            faults = [*trace.faults, *freed_in_use(trace, target), *overlapping_steps(trace, target), *draws_out_of_order(trace.plan)]
            walked[key] = (trace, faults, skeleton_of(trace, target))
        trace, faults, skeleton = walked[key]
        traces[program.rank] = trace
        comms.append(comm_of(program, skeleton))
        findings += [*_described(trace, faults, program.rank), *wrong_groups(program)]
        findings += shared_streams(program) if target.one_ring_a_stream else []
        findings += kept_from_graph(program, target)

    def ask(queries: Sequence[CallQuery]) -> list[CallAnswer]:
        return [answer_queries(traces[each.rank], each.rank, [each])[0] for each in queries]

    return Proof(findings + check_together(comms, target, ask), comms)


def trace_of(program: Program, target: Target) -> Trace:
    """Happens-before of one rank's plan."""
    return Tracer(flatten(program, target.serial), target).run()


def require_safe(programs: Sequence[Program], target: Target = GPU) -> list[RankComm]:
    """Check plans; returns the communication of each rank, for `check_together` with the other ranks. Raises PlanError with the findings if
    there are any; many are summarized by class."""
    proof = prove(programs, target)
    refuse(proof.findings, f"the plan is not safe on {target.name}")
    return proof.comms


def refuse(findings: Sequence[Finding], what: str) -> None:
    """Raise PlanError if there are findings, with their text; many are summarized by class."""
    if findings:
        texts = "\n  ".join(findings_text(findings))
        raise PlanError(f"{what}: {len(findings)} finding(s)\n  {texts}")


def _same_world(programs: Sequence[Program]) -> None:
    ranks = [program.rank for program in programs]
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise PlanError(f"rank(s) {twice} are given twice; give one program a rank")
    worlds = sorted({program.world for program in programs})
    if len(worlds) > 1:
        raise PlanError(f"programs of different worlds, of {worlds} ranks; give the ranks of one world")


def _content(program: Program) -> bytes:
    """Encoded content, equal for programs that differ only in their rank and the ranks of their groups."""
    parts = (program.ops, program.values, program.jobs, program.events, program.pipeline)
    return hashlib.sha256(msgspec.msgpack.encode(parts)).digest()


def _described(trace: Trace, faults: Sequence[Fault], rank: int) -> list[Finding]:
    distinct = {(fault.kind, fault.first, fault.second): fault for fault in faults}
    return merged([finding_of(trace, fault, rank) for fault in distinct.values()])
