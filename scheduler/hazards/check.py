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
from interlace.scheduler.hazards.finding import Finding, item_text, merged, where
from interlace.scheduler.hazards.memory import freed_in_use, overlapping_steps
from interlace.scheduler.hazards.order import NEVER, Fault, Trace, Tracer
from interlace.scheduler.hazards.place import GPU, Place
from interlace.scheduler.hazards.steps import flatten

SHOWN = 20
"""Findings that an error text holds."""


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
        PlanError: With the findings, the first 20 in full.
    """
    findings = check(programs, place)
    if findings:
        more = f"\n  ... and {len(findings) - SHOWN} more" if len(findings) > SHOWN else ""
        texts = "\n  ".join(map(str, findings[:SHOWN]))
        raise PlanError(f"the plan is not safe on {place.name}: {len(findings)} finding(s)\n  {texts}{more}")


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
    return merged([_finding(trace, fault, rank) for fault in distinct.values()])


def _finding(trace: Trace, fault: Fault, rank: int) -> Finding:
    steps = trace.steps
    shown = [item for item in dict.fromkeys((fault.first, fault.second, fault.expected)) if item != NEVER]
    items = tuple(where(rank, steps.program.ops[steps.op[item]], steps.micro_batch[item]) for item in shown)
    kind, message, remedy = _TEXTS[fault.kind](trace, fault)
    return Finding(kind, (rank,), items, f"rank {rank}: {message}", remedy)  # type: ignore[arg-type]


def _text(trace: Trace, item: int) -> str:
    if item == NEVER:
        return "an operation that no job runs"
    steps = trace.steps
    return item_text(steps.program.ops[steps.op[item]], steps.micro_batch[item])


def _memory(trace: Trace, fault: Fault) -> str:
    return trace.steps.places[fault.key // trace.steps.num_micro_batches].memory


def _name(trace: Trace, fault: Fault) -> str:
    """How messages name a storage: by one of the values in it."""
    steps = trace.steps
    touches = [
        t for k in (fault.second, fault.first) if k != NEVER for t in steps.reads[steps.op[k]] + steps.writes[steps.op[k]]
    ]
    base = fault.key // steps.num_micro_batches
    return next((f"%{t.value}" for t in touches if t.base // steps.num_micro_batches == base), "a storage")


def _order_text(trace: Trace, fault: Fault) -> str:
    """What would order two items."""
    steps = trace.steps
    if steps.job[fault.first] == steps.job[fault.second] and trace.before(fault.first, fault.second):
        return "order them"
    a, b = (f"#{steps.program.ops[steps.op[k]].id}@{steps.micro_batch[k]}" for k in (fault.first, fault.second))
    return f"record an event after {a} and wait for it before {b}"


def _race_read(trace: Trace, fault: Fault) -> tuple[str, str, str]:
    writer, reader = _text(trace, fault.first), _text(trace, fault.second)
    lost = _lost_wait(trace, fault)
    if _memory(trace, fault) != "device":
        return ("copy-read-early", f"{reader} reads {_name(trace, fault)} before the copy out {writer} is known to be over",
                lost or _order_text(trace, fault))  # fmt: skip
    return (
        "race",
        f"{reader} may read {_name(trace, fault)} before {writer} has written it",
        lost or _order_text(trace, fault),
    )


def _race_write(trace: Trace, fault: Fault) -> tuple[str, str, str]:
    user, writer = _text(trace, fault.first), _text(trace, fault.second)
    kind = "race" if _memory(trace, fault) == "device" else "buffer-reused"
    return kind, f"{writer} may overwrite {_name(trace, fault)} while {user} still uses it", _order_text(trace, fault)


def _lost_wait(trace: Trace, fault: Fault) -> str:
    """The reason where there is an event, but the waiting kind loses it."""
    steps = trace.steps
    item = (steps.program.ops[steps.op[fault.second]].id, steps.micro_batch[fault.second])
    kind = steps.program.ops[steps.op[fault.second]].kind
    if kind == "memcpy_d2h" and any(item in event.waits for event in steps.program.events):
        return "memcpy_d2h loses its waits where no operand is made in its job: use memcpy, or put a waiting op in front"
    return ""


def _early_read(trace: Trace, fault: Fault) -> tuple[str, str, str]:
    producer = _text(trace, fault.expected)
    come = "comes later in host order" if fault.expected != NEVER else "gives its contents"
    return ("read-before-write", f"{_text(trace, fault.second)} uses {_name(trace, fault)}, and {producer} {come}",
            "issue the producer first")  # fmt: skip


def _version(trace: Trace, fault: Fault) -> tuple[str, str, str]:
    expected = f"the contents of {_text(trace, fault.expected)}" if fault.expected != NEVER else "what the step starts with"
    return ("wrong-version", f"{_text(trace, fault.second)} must find {expected} in {_name(trace, fault)}, and finds those of "
            f"{_text(trace, fault.first)}", "keep reads and writes of one storage in their order")  # fmt: skip


def _freed(trace: Trace, fault: Fault) -> tuple[str, str, str]:
    use, last = _text(trace, fault.first), _text(trace, fault.second)
    mend = (
        f"{_order_text(trace, fault)}, or issue the former last"
        if fault.first != fault.second
        else "order the block's stream behind it"
    )
    return "freed-in-use", f"{_name(trace, fault)} is freed when {last} is issued, while {use} may still use it", mend


def _next_read(trace: Trace, fault: Fault) -> tuple[str, str, str]:
    return ("race", f"{_text(trace, fault.second)} of the next step may read {_name(trace, fault)} before {_text(trace, fault.first)} of "
            "this step has written it", "let something on the reader's stream wait for it within the step")  # fmt: skip


def _next_write(trace: Trace, fault: Fault) -> tuple[str, str, str]:
    kind = "race" if _memory(trace, fault) == "device" else "buffer-reused"
    return (kind, f"{_text(trace, fault.second)} of the next step may overwrite {_name(trace, fault)} while {_text(trace, fault.first)} of "
            "this step still uses it", "let something on the writer's stream wait for it within the step")  # fmt: skip


def _event(trace: Trace, fault: Fault) -> tuple[str, str, str]:
    return ("event-order", f"{_text(trace, fault.second)} waits for an event of {_text(trace, fault.first)}, which is not issued before it",
            "record the event in front of its waits")  # fmt: skip


_TEXTS = {
    "read": _race_read, "write": _race_write, "read-before-write": _early_read, "wrong-version": _version, "freed-in-use":
    _freed, "next-step-read": _next_read, "next-step-write": _next_write, "event-order": _event,
}  # fmt: skip
