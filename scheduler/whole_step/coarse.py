"""A step of all stages run job by job: milliseconds of host time where the simulator of operations takes seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from interlace.ir.schedule import Slot, last_forward
from interlace.scheduler.whole_step.slot_times import NO_MESSAGE, SlotTimes

SLOTS = 1 << 14
"""Slots of which the kind is remembered: schedules that are compared hold the same ones."""
Message = tuple[int, str, int, int]
"""Receiving stage, `F` for an activation or `B` for a gradient, micro-batch and chunk of the receiver."""


@lru_cache(maxsize=SLOTS)
def kind_of(slot: Slot) -> str:
    """The kind of a slot: its parts without their micro-batches.

    >>> from interlace.ir.schedule import Part
    >>> kind_of(Slot((Part("I", 3), Part("F", 5, 1), Part("W", 2))))
    'I+F.1+W'
    """
    return "+".join(part.kind + (f".{part.chunk}" if part.chunk else "") for part in slot.parts)


Job = tuple[float, list[tuple[float, bool, Message]]]
"""A job's duration, and in turn the moment of each message, whether it is sent, and which."""


@dataclass(slots=True)
class _Stage:
    """A stage on its way through its jobs: where it is, and its time."""

    jobs: Sequence[Job]
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
    stages = enumerate(zip(rows, times, strict=True))
    return run_jobs([jobs_of(row, costs_of(row, each), stage, len(rows)) for stage, (row, each) in stages])


def run_jobs(rows: Sequence[Sequence[Job]]) -> float | None:
    """As `step_ns`, of the jobs of each stage."""
    stages = [_Stage(row) for row in rows]
    there: dict[Message, float] = {}
    waiting: dict[Message, _Stage] = {}
    ready = stages[::-1]
    while ready:
        _run(ready.pop(), there, waiting, ready)
    if any(stage.at < len(stage.jobs) for stage in stages):
        return None
    return max(stage.now for stage in stages)


def _run(stage: _Stage, there: dict[Message, float], waiting: dict[Message, _Stage], ready: list[_Stage]) -> None:
    """Run a stage until a message that it needs has not been sent yet; stages whose message it sends are ready then."""
    while stage.at < len(stage.jobs):
        duration, events = stage.jobs[stage.at]
        while stage.event < len(events):
            moment, sends, message = events[stage.event]
            if sends:
                there[message] = stage.now + stage.late + moment
                if message in waiting:
                    ready.append(waiting.pop(message))
            else:
                arrival = there.get(message)
                if arrival is None:
                    waiting[message] = stage
                    return
                stage.late = max(stage.late, arrival - stage.now - moment)
            stage.event += 1
        stage.now += duration + stage.late
        stage.at, stage.event, stage.late = stage.at + 1, 0, 0.0


def costs_of(row: Sequence[Slot], times: Mapping[str, SlotTimes], at_end: Mapping[str, SlotTimes] | None = None) -> list[SlotTimes]:
    """What each slot costs, by kind of slot; `at_end`: those from the last forward on, where they differ."""
    end = last_forward(row) if at_end else len(row)
    return [(at_end if at_end and k >= end else times)[kind_of(slot)] for k, slot in enumerate(row)]


def jobs_of(row: Sequence[Slot], costs: Sequence[SlotTimes], number: int, num_stages: int) -> list[Job]:
    """The jobs of a stage's slots."""
    return [_job(slot, each, number, num_stages) for slot, each in zip(row, costs, strict=True)]


def _job(slot: Slot, times: SlotTimes, number: int, num_stages: int) -> Job:
    events: list[tuple[float, bool, Message]] = []
    for part, each in zip(slot.parts, times.parts, strict=True):
        kind = "F" if part.kind == "F" else "B"
        if each.need_ns != NO_MESSAGE:
            events.append((each.need_ns, False, (number, kind, part.micro_batch, part.chunk)))
        if each.sent_ns != NO_MESSAGE:
            rounds, target = divmod(number + (1 if kind == "F" else -1), num_stages)
            events.append((each.sent_ns, True, (target, kind, part.micro_batch, part.chunk + rounds)))
    return times.duration_ns, sorted(events)


def peak_bytes(costs: Sequence[SlotTimes]) -> int:
    """Live memory of a stage at its peak, without what is there all the time, from what each of its slots costs."""
    live = peak = 0
    for each in costs:
        peak = max(peak, live + each.rise_bytes)
        live += each.net_bytes
    return peak
