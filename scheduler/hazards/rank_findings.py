"""Findings from the faults of one rank: the operations, what is wrong, and what would correct it."""

from __future__ import annotations

from dataclasses import dataclass

from interlace.ir import ABSENT, Program, describe
from interlace.ir.effects import why_ordered
from interlace.ir.kinds import takes_events
from interlace.scheduler.hazards.finding import Finding, Kind, item_text, where
from interlace.scheduler.hazards.happens_before import NO_ITEM, Fault, Trace

Text = tuple[Kind, str, str]


@dataclass(slots=True)
class Words:
    """The parts of a fault as text for messages."""

    trace: Trace
    fault: Fault

    def item(self, item: int) -> str:
        """An op instance by operation, layer, micro-batch and stream."""
        if item == NO_ITEM:
            return "an operation that no job runs"
        return item_text(self.trace.plan.op_of(item), self.trace.plan.micro_batch[item])

    @property
    def first(self) -> str:
        """The other access."""
        return self.item(self.fault.first)

    @property
    def second(self) -> str:
        """The access that is out of order."""
        return self.item(self.fault.second)

    @property
    def on_device(self) -> bool:
        """Whether the storage is device memory."""
        return self.trace.plan.storage(self.fault.key).memory == "device"

    @property
    def storage(self) -> str:
        """One of the values in the storage, by its name or by the operation that produces it."""
        plan, count = self.trace.plan, self.trace.plan.num_micro_batches
        ops = [plan.op[k] for k in (self.fault.second, self.fault.first) if k != NO_ITEM]
        accesses = [access for op in ops for access in (*plan.reads[op], *plan.writes[op])]
        named = (t.root if t.value == ABSENT else t.value for t in accesses)  # an element that no operation extracts: its vector
        value = next((v for t, v in zip(accesses, named, strict=True) if t.base // count == self.fault.key // count), None)
        return "a storage" if value is None else _value_text(plan.program, value)

    @property
    def mend(self) -> str:
        """The event that would order the second after the first."""
        first, second = (self.trace.plan.op_of(each) for each in (self.fault.first, self.fault.second))
        a, b = (f"#{op.id}@{self.trace.plan.micro_batch[k]}" for op, k in ((first, self.fault.first), (second, self.fault.second)))
        after = f"after {a}" if takes_events(first) else f"after a kernel that follows {a} on its stream ({a} records none)"
        before = f"before {b}" if takes_events(second) else f"before a kernel that precedes {b} on its stream ({b} waits for none)"
        return f"record an event {after} and wait for it {before}"


def _value_text(program: Program, value: int) -> str:
    name = next(each.name for each in program.values if each.id == value)
    producer = next((op for op in program.ops if value in op.results), None)
    if name or producer is None:
        return f"%{value} {name!r}" if name else f"%{value}"
    return f"%{value} of {describe(producer)}"


def finding_of(trace: Trace, fault: Fault, rank: int) -> Finding:
    plan = trace.plan
    shown = [item for item in dict.fromkeys((fault.first, fault.second, fault.expected)) if item != NO_ITEM]
    items = tuple(where(rank, plan.op_of(item), plan.micro_batch[item]) for item in shown)
    kind, message, remedy = _TEXTS[fault.kind](Words(trace, fault))
    return Finding(kind, (rank,), items, f"rank {rank}: {message}", remedy)


def _race_read(w: Words) -> Text:
    mend = _lost_wait(w) or w.mend
    if w.on_device:
        return "race", f"{w.second} may read {w.storage} before {w.first} has written it", mend
    return "copy-read-early", f"{w.second} reads {w.storage} before the copy out {w.first} is known to have completed", mend


def _race_write(w: Words) -> Text:
    kind: Kind = "race" if w.on_device else "buffer-reused"
    return kind, f"{w.second} may overwrite {w.storage} while {w.first} still uses it", w.mend


def _lost_wait(w: Words) -> str:
    """The remedy if there is an event, but operations of the waiting kind ignore it."""
    plan, second = w.trace.plan, w.fault.second
    if plan.op_of(second).kind == "memcpy_d2h" and any(plan.item(second) in event.waits for event in plan.program.events):
        return "memcpy_d2h loses its waits if no operand is computed in its job: use memcpy, or put an operation that waits before it"
    return ""


def _early_read(w: Words) -> Text:
    come = "comes later in host order" if w.fault.expected != NO_ITEM else "gives its contents"
    return (
        "read-before-write",
        f"{w.second} uses {w.storage}, and {w.item(w.fault.expected)} {come}",
        "issue the producer first",
    )


def _version(w: Words) -> Text:
    expected = f"the contents of {w.item(w.fault.expected)}" if w.fault.expected != NO_ITEM else "what the step starts with"
    message = f"{w.second} must find {expected} in {w.storage}, and finds those of {w.first}"
    mend = "keep reads and writes of one storage in the order of Paddle's own schedule, as schedule_1f1b: {interleave: off} does"
    return "wrong-version", message, mend


def _freed(w: Words) -> Text:
    itself = w.fault.first == w.fault.second
    mend = "order the next operation on the block's stream after it" if itself else f"{w.mend}, or issue the former last"
    return "freed-in-use", f"{w.storage} is freed when {w.second} is issued, while {w.first} may still use it", mend


def _next_read(w: Words) -> Text:
    message = f"{w.second} of the next step may read {w.storage} before {w.first} of this step has written it"
    return "race", message, "let something on the reader's stream wait for it within the step"


def _next_write(w: Words) -> Text:
    message = f"{w.second} of the next step may overwrite {w.storage} while {w.first} of this step still uses it"
    return (
        "race" if w.on_device else "buffer-reused",
        message,
        "let something on the writer's stream wait for it within the step",
    )


def _event(w: Words) -> Text:
    message = f"{w.second} waits for an event of {w.first}, which is not issued before it"
    return "event-order", message, "record the event before its waits"


def _no_event(w: Words) -> Text:
    message = f"{w.second} waits for an event of {w.first}, after which Paddle's executor records none"
    return "event-order", message, "record the event after a kernel that follows on its stream"


def _draw(w: Words) -> Text:
    message = f"{w.second} runs at the position of {w.first} in Paddle's own schedule; it {why_ordered(w.trace.plan.op_of(w.fault.second))}"
    return "draw-order", message, "keep such operations in the order of Paddle's own schedule: one generator gives the numbers of all"


_TEXTS = {
    "draw-order": _draw,
    "read": _race_read,
    "write": _race_write,
    "read-before-write": _early_read,
    "wrong-version": _version,
    "freed-in-use": _freed,
    "next-step-read": _next_read,
    "next-step-write": _next_write,
    "event-order": _event,
    "no-event": _no_event,
}
