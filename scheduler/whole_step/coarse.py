"""Coarse simulation of a step of all stages, job by job: it takes milliseconds where the simulator of operations takes seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from interlace.ir.schedule import Slot, last_forward
from interlace.scheduler.interleave.engine import PLAIN, Engine
from interlace.scheduler.interleave.slot_times import NO_MESSAGE, SlotTimes

SLOTS = 1 << 14
"""Slots of which the kind is remembered: schedules that are compared hold the same ones."""
NOT_SENT = float("-inf")
"""Arrival time of a message that has not been sent yet; also the result if stages wait for each other forever."""


@lru_cache(maxsize=SLOTS)
def kind_of(slot: Slot) -> str:
    """The kind of a slot: its parts without their micro-batches.

    >>> from interlace.ir.schedule import Part
    >>> kind_of(Slot((Part("I", 3), Part("F", 5, 1), Part("W", 2))))
    'I+F.1+W'
    """
    return "+".join(part.kind + (f".{part.chunk}" if part.chunk else "") for part in slot.parts)


class Row(NamedTuple):
    """The jobs of a stage, as columns of an engine. Moments are nanoseconds from the start of a job.

    Attributes:
        durations: Duration of each job, in nanoseconds.
        ends: End of each job's messages among those of the stage.
        moments: Moment of each message, in ascending order within a job.
        messages: Number of the message if the stage waits for it; negative, `~number`, if the stage sends it.
    """

    durations: Any
    ends: Any
    moments: Any
    messages: Any


def run_jobs(rows: Sequence[Row], engine: Engine = PLAIN) -> float | None:
    """Time from one step to the next in nanoseconds (as `Result.step_ns`), from the jobs of each stage; None if stages would wait for each
    other forever. O(jobs).

    A job runs as planned; if a message that it needs is late, the rest of the job is delayed by that time. Messages of one stage do not
    wait for each other, as if on separate streams; on targets that run everything in order they do (`legal_rows.stall`).
    """
    took = engine.made(run_rows)(*_joined(rows, engine))
    return None if took == NOT_SENT else float(took)


def _joined(rows: Sequence[Row], engine: Engine) -> Iterator[Any]:
    """The arguments of `run_rows`."""
    yield engine.whole([0, *accumulate(len(row.durations) for row in rows)])
    yield engine.whole([0, *accumulate(len(row.moments) for row in rows)])
    yield from map(engine.join, zip(*rows, strict=True))


def run_rows(job_first: Any, message_first: Any, durations: Any, ends: Any, moments: Any, messages: Any) -> float:
    """The longest time of a stage's jobs, in nanoseconds, without the wait for its first message if it has sent none before; `NOT_SENT` if
    stages would wait for each other forever. Also runs compiled."""
    num_stages, most = len(job_first) - 1, 0
    for message in messages:
        most = max(most, message, ~message)
    there = [NOT_SENT] * (most + 1)
    now, late, first_wait = [0.0] * num_stages, [0.0] * num_stages, [0.0] * num_stages
    job, at = [job_first[stage] for stage in range(num_stages)], [message_first[stage] for stage in range(num_stages)]
    goes_on = True
    while goes_on:
        goes_on = False
        for stage in range(num_stages):
            while job[stage] < job_first[stage + 1]:
                end = message_first[stage] + ends[job[stage]]
                while at[stage] < end:
                    message, moment = messages[at[stage]], moments[at[stage]]
                    if message < 0:
                        there[~message] = now[stage] + late[stage] + moment
                    elif there[message] == NOT_SENT:
                        break
                    else:
                        late[stage] = max(late[stage], there[message] - now[stage] - moment)
                        if at[stage] == message_first[stage]:
                            first_wait[stage] = late[stage]
                    at[stage] += 1
                    goes_on = True
                if at[stage] < end:
                    break
                now[stage] += durations[job[stage]] + late[stage]
                late[stage] = 0.0
                job[stage] += 1
                goes_on = True
    for stage in range(num_stages):
        if job[stage] < job_first[stage + 1]:
            return NOT_SENT
    longest = 0.0
    for stage in range(num_stages):
        longest = max(longest, now[stage] - first_wait[stage])
    return longest


def costs_of(row: Sequence[Slot], times: Mapping[str, SlotTimes], at_end: Mapping[str, SlotTimes] | None = None) -> list[SlotTimes]:
    """The costs of each slot, from those of its kind; `at_end`: costs from the last forward on, if they differ."""
    return Kinds.of(row).costs(times, at_end)


class Kinds(NamedTuple):
    """The kinds of slots of a row before the last forward, and from there on."""

    before: Sequence[str]
    at_end: Sequence[str]

    @classmethod
    def of(cls, row: Sequence[Slot]) -> Kinds:
        """The kinds of slots of a stage's row."""
        kinds, end = [kind_of(slot) for slot in row], last_forward(row)
        return cls(kinds[:end], kinds[end:])

    def costs(self, times: Mapping[str, SlotTimes], at_end: Mapping[str, SlotTimes] | None = None) -> list[SlotTimes]:
        """See `costs_of`."""
        return [*map(times.__getitem__, self.before), *map((at_end or times).__getitem__, self.at_end)]


def jobs_of(row: Sequence[Slot], costs: Sequence[SlotTimes], number: int, num_stages: int, engine: Engine = PLAIN) -> Row:
    """The jobs of a stage's slots, as columns of this engine."""
    num_chunks = 1 + max((part.chunk for slot in row for part in slot.parts), default=0)
    events = [_messages(slot, each, number, num_stages, num_chunks) for slot, each in zip(row, costs, strict=True)]
    durations, ends = [each.duration_ns for each in costs], [*accumulate(map(len, events))]
    moments, messages = [moment for job in events for moment, _, _ in job], [~m if sends else m for job in events for _, sends, m in job]
    return Row(engine.times(durations), engine.whole(ends), engine.times(moments), engine.whole(messages))


def _messages(slot: Slot, times: SlotTimes, number: int, num_stages: int, num_chunks: int) -> list[tuple[float, bool, int]]:
    """The messages of a job in ascending order: the moment of each, whether it is sent, and its number, which sender and receiver share."""
    found = []
    for part, each in zip(slot.parts, times.parts, strict=True):
        forward = part.kind == "F"
        place = 1 + part.chunk * num_stages + number + part.micro_batch * (num_chunks * num_stages + 2)  # includes what is sent past an end
        if each.need_ns != NO_MESSAGE:
            found.append((each.need_ns, False, 2 * place + forward))
        if each.sent_ns != NO_MESSAGE:
            found.append((each.sent_ns, True, 2 * (place + (1 if forward else -1)) + forward))
    return sorted(found)


def peak_bytes(costs: Sequence[SlotTimes]) -> int:
    """Peak of live memory of a stage in bytes, without what is always live, from the costs of its slots."""
    live = peak = 0
    for each in costs:
        peak = max(peak, live + each.rise_bytes)
        live += each.net_bytes
    return peak
