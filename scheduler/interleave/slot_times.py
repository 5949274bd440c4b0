"""Costs of one kind of job on a stage: its time, when it needs and sends messages, and its memory."""

from __future__ import annotations

import msgspec

from interlace.scheduler.interleave.allocations import PairOp
from interlace.scheduler.interleave.planner import Form, Pair

NO_MESSAGE = -1.0
"""Time of a message that a part does not need or send."""


class PartTimes(msgspec.Struct, frozen=True):
    """When a part needs its neighbour's message and when its own is with the neighbour, in ns from the job's start."""

    kind: str
    need_ns: float = NO_MESSAGE
    sent_ns: float = NO_MESSAGE


class SlotTimes(msgspec.Struct, frozen=True):
    """One kind of job in the order that was planned for it.

    Attributes:
        duration_ns: Time from the start of its first operation to the end of its last, if no message is late.
        parts: Times of its parts, in the order of the slot.
        rise_bytes: Peak of live memory, minus what is live before it.
        net_bytes: Live memory after it, minus what is live before it.
    """

    duration_ns: float
    parts: tuple[PartTimes, ...]
    rise_bytes: int
    net_bytes: int


class StageOrder(msgspec.Struct, frozen=True):
    """One way to order the jobs of a stage.

    Attributes:
        early: Whether sends leave early; if not, jobs are as short as possible.
        inline_share: Share of weight gradients that are computed with their own input gradients while the others are delayed.
        slots: Kind of job (`I+F+W`) -> its times.
    """

    form: Form
    early: bool
    inline_share: float
    slots: dict[str, SlotTimes]


class StageTimes(msgspec.Struct, frozen=True):
    """What all ranks must know about one stage.

    Attributes:
        orders: Ways to order its jobs, the same on every stage: each form and both values of `early` for each `inline_share`, including 0.
        peak_bytes: Peak of live device memory of Paddle's baseline.
    """

    stage: int
    orders: tuple[StageOrder, ...]
    peak_bytes: int


def changed_by(base: SlotTimes, before: SlotTimes, after: SlotTimes) -> SlotTimes:
    """The times `base` plus the difference between `after` and `before`. All three have the same parts."""
    parts = tuple(
        PartTimes(part.kind, _moved(part.need_ns, old.need_ns, new.need_ns), _moved(part.sent_ns, old.sent_ns, new.sent_ns))
        for part, old, new in zip(base.parts, before.parts, after.parts, strict=True)
    )
    rise, net = (
        each + new - old
        for each, old, new in ((base.rise_bytes, before.rise_bytes, after.rise_bytes), (base.net_bytes, before.net_bytes, after.net_bytes))
    )
    return SlotTimes(base.duration_ns + after.duration_ns - before.duration_ns, parts, rise, net)


def _moved(base: float, before: float, after: float) -> float:
    return NO_MESSAGE if NO_MESSAGE in (base, before, after) else max(0.0, base + after - before)


def slot_times(pair: Pair, order: list[PairOp]) -> SlotTimes:
    """Times of a job whose operations run in this order, by the planner's clock. O(operations)."""
    nodes = [pair.index[item] for item in order if item in pair.index]
    took, after = pair.duration_and_times(nodes)
    need: dict[str, float] = {}
    sent: dict[str, float] = {}
    for k, before, now in zip(nodes, [0.0, *after], after, strict=False):
        node = pair.nodes[k]
        if node.side not in need and any(pair.nodes[dep].receive and pair.nodes[dep].side == node.side for dep in node.deps):
            need[node.side] = before
        if node.leaves:
            sent[node.side] = max(sent.get(node.side, 0.0), now + node.send_ns)
    memory = pair.memory
    parts = tuple(PartTimes(part.kind, need.get(part.label, NO_MESSAGE), sent.get(part.label, NO_MESSAGE)) for part in pair.parts)
    return SlotTimes(took, parts, memory.peak(order) - memory.start, memory.end - memory.start)
