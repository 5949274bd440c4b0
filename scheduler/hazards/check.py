"""The check of a whole world: every rank by itself, then all together."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from interlace.errors import PlanError
from interlace.ir import Program
from interlace.scheduler.hazards.comm import calls_of, disagreements, shared_streams
from interlace.scheduler.hazards.deadlock import circles
from interlace.scheduler.hazards.finding import Finding, findings_text, merged
from interlace.scheduler.hazards.memory import freed_in_use, overlapping_steps
from interlace.scheduler.hazards.order import Fault, Trace, Tracer
from interlace.scheduler.hazards.place import GPU, Place
from interlace.scheduler.hazards.steps import flatten
from interlace.scheduler.hazards.texts import finding_of


def check(programs: Sequence[Program], place: Place = GPU) -> list[Finding]:
    """Find what is unsafe in the plans of a world; an empty list is a proof under the place's rules.

    Ranks may be missing: what they would have to agree to is then not checked. O(items x operands) for each different plan;
    ranks whose plans are equal are walked once.

    Raises:
        PlanError: Two programs of one rank, programs of different worlds, or p2p without a peer.
    """
    _same_world(programs)
    with _without_collector():
        return _check(programs, place)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Python's cycle collector off: a quarter of the time, and nothing here makes cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _check(programs: Sequence[Program], place: Place) -> list[Finding]:
    walked: dict[bytes, tuple[Trace, list[Fault]]] = {}
    findings: list[Finding] = []
    traces = []
    all_calls = [calls_of(program) for program in programs]
    for calls in all_calls:
        key = _content(calls.program)
        if key not in walked:
            trace = Tracer(flatten(calls.program, place.serial), place).run()
            walked[key] = (trace, [*trace.faults, *freed_in_use(trace, place), *overlapping_steps(trace, place)])
        trace, faults = walked[key]
        traces.append(trace)
        findings += _described(trace, faults, calls.program.rank)
        findings += shared_streams(calls) if place.one_ring_a_stream else []
    unequal = disagreements(all_calls)
    return findings + unequal + ([] if unequal else circles(all_calls, traces, place))


def require_safe(programs: Sequence[Program], place: Place = GPU) -> None:
    """Refuse an unsafe plan.

    Raises:
        PlanError: With the findings, summed up by class where they are many.
    """
    findings = check(programs, place)
    if findings:
        texts = "\n  ".join(findings_text(findings))
        raise PlanError(f"the plan is not safe on {place.name}: {len(findings)} finding(s)\n  {texts}")


def _same_world(programs: Sequence[Program]) -> None:
    ranks = [program.rank for program in programs]
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise PlanError(f"rank(s) {twice} are given twice; give one program a rank")
    worlds = sorted({program.world for program in programs})
    if len(worlds) > 1:
        raise PlanError(f"programs of different worlds, of {worlds} ranks; give the ranks of one world")


def _content(program: Program) -> bytes:
    """Equal for programs that differ in rank and in the ranks of their groups only."""
    parts = (program.ops, program.values, program.jobs, program.events, program.pipeline)
    return hashlib.sha256(msgspec.msgpack.encode(parts)).digest()


def _described(trace: Trace, faults: Sequence[Fault], rank: int) -> list[Finding]:
    distinct = {(fault.kind, fault.first, fault.second): fault for fault in faults}
    return merged([finding_of(trace, fault, rank) for fault in distinct.values()])
