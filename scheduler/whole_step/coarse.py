"""A step of all stages run job by job: milliseconds of host time where the simulator of operations takes seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from interlace.scheduler.schedule import Part, Slot
from interlace.scheduler.whole_step.slot_times import NEVER, SlotTimes

Message = tuple[int, str, int, int]
"""Receiving stage, `F` for an activation or `B` for a gradient, micro-batch and chunk of the receiver."""


def kind_of(slot: Slot) -> str:
    """The kind of a slot: its parts without their micro-batches.

    >>> kind_of(Slot((Part("I", 3), Part("F", 5, 1), Part("W", 2))))
    'I+F.1+W'
    """
    return "+".join(part.kind + (f".{part.chunk}" if part.chunk else "") for part in slot.parts)


@dataclass(slots=True)
class _Stage:
    """A stage on its way through its slots: where it is, and its time."""

    slots: Sequence[Slot]
    times: Mapping[str, SlotTimes]
    at: int = 0
    event: int = 0
    now: float = 0.0
    late: float = 0.0


def step_ns(rows: Sequence[Sequence[Slot]], times: Sequence[Mapping[str, SlotTimes]]) -> float | None:
    """Time of a step, or None where stages would wait for each other for ever. O(slots).

    A job runs at its planned pace; where a message that it needs is late, what is left of it moves back by as much. Messages of one
    stage do not wait for each other, as on streams of their own; where ranks run in turn they do (`legal_rows.stall`).

    Args:
        rows: Slots of each stage, without receives and sends of their own.
        times: Of each stage, by kind of slot.
    """
    stages = [_Stage(row, each) for row, each in zip(rows, times, strict=True)]
    there: dict[Message, float] = {}
    moved = True
    while moved:
        moved = False
        for number, stage in enumerate(stages):
            moved |= _run(stage, number, len(rows), there)
    if any(stage.at < len(stage.slots) for stage in stages):
        return None
    return max(stage.now for stage in stages)


def _run(stage: _Stage, number: int, num_stages: int, there: dict[Message, float]) -> bool:
    """Run a stage until a message that it needs has not been sent yet; says whether it got on."""
    moved = False
    while stage.at < len(stage.slots):
        slot = stage.slots[stage.at]
        times = stage.times[kind_of(slot)]
        events = _events(slot, times)
        while stage.event < len(events):
            moment, sends, part = events[stage.event]
            kind = "F" if part.kind == "F" else "B"
            if sends:
                rounds, target = divmod(number + (1 if kind == "F" else -1), num_stages)
                there[target, kind, part.micro_batch, part.chunk + rounds] = stage.now + stage.late + moment
            else:
                arrival = there.get((number, kind, part.micro_batch, part.chunk))
                if arrival is None:
                    return moved
                stage.late = max(stage.late, arrival - stage.now - moment)
            stage.event += 1
            moved = True
        stage.now += times.duration_ns + stage.late
        stage.at, stage.event, stage.late, moved = stage.at + 1, 0, 0.0, True
    return moved


def _events(slot: Slot, times: SlotTimes) -> list[tuple[float, bool, Part]]:
    """`(moment, whether it sends, part)` of a slot's messages in turn."""
    found = []
    for part, each in zip(slot.parts, times.parts, strict=True):
        found += [(each.need_ns, False, part)] if each.need_ns != NEVER else []
        found += [(each.sent_ns, True, part)] if each.sent_ns != NEVER else []
    return sorted(found)


def peak_bytes(row: Sequence[Slot], times: Mapping[str, SlotTimes]) -> int:
    """Live memory of a stage at its peak, without what is there all the time. O(slots)."""
    live = peak = 0
    for slot in row:
        each = times[kind_of(slot)]
        peak = max(peak, live + each.rise_bytes)
        live += each.net_bytes
    return peak
