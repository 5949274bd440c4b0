"""Positions of copies in the plan: one queue for each copy direction beside the time line of the compute stream."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np

from interlace.ir import OpInstance, Program
from interlace.ir.arrays import Flags, Ints
from interlace.ir.copies import items_of, job_bounds
from interlace.ir.kinds import stream_of
from interlace.scheduler.offload.saved_values import Reason, Saved

Span = tuple[int, int, int]
"""Index of the first op instance, index after the last one, bytes."""


@dataclass(slots=True)
class Timeline:
    """The plan in the host's issue order.

    Attributes:
        job: Index of the job of each op instance.
        job_start: Index of the first op instance of each job, and the number of op instances.
        at_ns: Computation time before each op instance, and the total, in nanoseconds. `[num_items + 1]`
    """

    items: list[OpInstance]
    job: list[int]
    job_start: list[int]
    at_ns: list[int]

    @classmethod
    def of(cls, program: Program, op_ns: Mapping[int, int]) -> Timeline:
        """The time line of a scheduled program; `op_ns` is operation id -> duration."""
        on_compute = [op.id for op in program.ops if not stream_of(op)]
        dur = np.zeros(1 + max((op.id for op in program.ops), default=-1), np.int64)
        dur[on_compute] = [op_ns.get(op_id, 0) for op_id in on_compute]
        items = [item for job in program.jobs for item in job.items]
        job = [k for k, each in enumerate(program.jobs) for _ in each.items]
        return cls(items, job, job_bounds(program), [0, *np.cumsum(dur[items_of(program)[:, 0]]).tolist()])

    def first_from(self, time_ns: int) -> int:
        """Index of the first op instance that starts at or after a time."""
        return bisect_left(self.at_ns, time_ns)

    def returns(self, out: int, done_ns: int, transfer: OpenTransfer) -> bool:
        """Whether a value copied out after index `out`, by time `done_ns`, can be back before its reader, from a later job on."""
        if out >= transfer.reader or self.job[out] == self.job[transfer.reader]:
            return False
        boundary = self.job_start[self.job[out] + 1]
        return max(done_ns, self.at_ns[boundary]) + transfer.back_ns <= self.at_ns[transfer.reader]


class OpenTransfer(msgspec.Struct, eq=False, gc=False):
    """A transfer during planning; indices count op instances in issue order.

    Attributes:
        saved, micro_batch: What is copied.
        source: Index of the last forward access; the copy out is issued after it or later.
        reader: Index of the first backward access.
        out_ns, back_ns: Durations of the two copies.
        not_before: The copy back is not issued before this index.
        out: The copy out is issued after this index.
        free: The device memory is free from this index on.
        back: The copy back is issued before this index.
        start_ns, done_ns: When the copy back starts, when the copy out ends.
        late_ns: Time for which the reader waits for the copy back.
    """

    saved: Saved
    micro_batch: int
    source: int
    reader: int
    out_ns: int
    back_ns: int
    not_before: int = 0
    out: int = 0
    free: int = 0
    back: int = 0
    start_ns: int = 0
    done_ns: int = 0
    late_ns: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """Which transfer it is: value and micro-batch."""
        return self.saved.value, self.micro_batch

    def copied_out(self, line: Timeline, out: int, done_ns: int) -> None:
        """Set the copy out to be issued after index `out` and to end at `done_ns`."""
        self.out, self.done_ns = out, done_ns
        self.free = max(out + 1, line.first_from(done_ns)) if self.out_ns else out + 1

    def copies_back(self, line: Timeline, start_ns: int, measured: bool) -> bool:
        """Issue the copy back so that it starts at `start_ns`, or as soon as it may; whether that is after the copy out."""
        wanted = bisect_right(line.at_ns, start_ns) - 1 if measured else self.reader
        self.back = min(max(wanted, _earliest(line, self)), self.reader)
        return (start_ns >= self.done_ns or bool(self.not_before)) and self.back > self.free


class Alone(NamedTuple):
    """Where transfers are if each is the only one. `[transfers]` each

    Attributes:
        free, back: As in `OpenTransfer`.
        fits: Whether it finds time.
    """

    free: Ints
    back: Ints
    fits: Flags


def placed_alone(line: Timeline, transfers: Sequence[OpenTransfer], measured: bool) -> Alone:
    """Place each transfer as `place_transfers` would if it were the only one."""
    names = ("source", "reader", "out_ns", "back_ns", "not_before")
    columns = (map(attrgetter(name), transfers) for name in names)
    source, reader, out_ns, back_ns, not_before = (np.fromiter(column, np.int64, len(transfers)) for column in columns)
    at_ns, job, start = (np.array(column, np.int64) for column in (line.at_ns, line.job, line.job_start))
    done_ns, boundary, start_ns = at_ns[source + 1] + out_ns, start[job[source] + 1], at_ns[reader] - back_ns
    returns = (source < reader) & (job[source] != job[reader]) & (np.maximum(done_ns, at_ns[boundary]) <= start_ns)
    free = np.where(out_ns > 0, np.maximum(source + 1, np.searchsorted(at_ns, done_ns)), source + 1)
    wanted = np.searchsorted(at_ns, start_ns, side="right") - 1 if measured else reader
    back = np.minimum(np.maximum.reduce([wanted, boundary, free, not_before]), reader)
    return Alone(free, back, returns & ((start_ns >= done_ns) | (not_before > 0)) & (back > free))


@dataclass(slots=True)
class Placement:
    """The result of placing transfers.

    Attributes:
        transfers: Transfers that fit into both queues, in the order of their sources.
        refused: Transfers that did not, with the reason.
        stall_ns: Time for which readers wait for copies back.
    """

    transfers: list[OpenTransfer] = field(default_factory=list)
    refused: list[tuple[OpenTransfer, Reason]] = field(default_factory=list)
    stall_ns: int = 0

    def tried(self) -> list[OpenTransfer]:
        """All transfers, those that were refused last."""
        return [*self.transfers, *(transfer for transfer, _ in self.refused)]

    def freed(self) -> list[Span]:
        """Where each transferred value is not on the device, with its bytes as a negative number."""
        return [(t.free, t.back, -t.saved.freed_bytes) for t in self.transfers if t.free < t.back]


def place_transfers(line: Timeline, transfers: Sequence[OpenTransfer], cap: int | None, measured: bool) -> Placement:
    """Choose positions: copy out as soon as forward has read the value, copy back as late as is hidden. At most `cap` copies are in flight
    at once in each direction. Where copy times are not known (`measured`), copies back are issued just before their readers. The given
    transfers are not changed: the result holds copies of them.

    Steps: 1 copies out run in the order of their sources; 2 from the end of the step backwards, each copy back ends before its reader and
    before the next copy back starts; a transfer that finds no time in one of the queues is refused; 3 the queue of copies back is run
    forwards, and the delay of copies that `not_before` makes late is computed.
    """
    placed, transfers = Placement(), [copy(transfer) for transfer in transfers]
    _copy_out(line, sorted(transfers, key=order_key(attrgetter("source"))), cap, placed)
    _copy_back(line, sorted(placed.transfers, key=order_key(attrgetter("reader")), reverse=True), cap, measured, placed)
    _run_back(line, sorted(placed.transfers, key=_back_first), cap, placed)
    placed.transfers.sort(key=order_key(attrgetter("source")))
    return placed


def earlier(line: Timeline, placed: Placement, slack: float) -> Placement:
    """The same transfers with each copy back issued earlier by a share of its duration, where the copies before it leave time.

    No transfer is refused for this, and no copy is later than before.
    """
    transfers = [copy(transfer) for transfer in placed.transfers]
    queue = sorted(transfers, key=order_key(attrgetter("start_ns")))
    first, end = [], 0
    for transfer in queue:  # the earliest start of each if all copies before it start as early as they can
        first.append(min(max(transfer.done_ns, line.at_ns[min(_earliest(line, transfer), transfer.back)], end), transfer.start_ns))
        end = first[-1] + transfer.back_ns
    by = line.at_ns[-1]
    for transfer, earliest in zip(reversed(queue), reversed(first), strict=True):
        by = min(by, line.at_ns[transfer.reader])
        transfer.start_ns = min(max(by - int((1 + slack) * transfer.back_ns), earliest), transfer.start_ns)
        wanted = bisect_right(line.at_ns, transfer.start_ns) - 1
        transfer.back = min(max(wanted, _earliest(line, transfer), transfer.free + 1), transfer.back)
        by = transfer.start_ns
    moved = Placement(transfers, list(placed.refused))
    _run_back(line, sorted(transfers, key=_back_first), None, moved)
    return moved


def order_key(first: Callable[[OpenTransfer], int]) -> Callable[[OpenTransfer], tuple[int, int, int, int]]:
    """A sort key: the given function, then what identifies a transfer, so that equal inputs give equal plans."""

    def key(transfer: OpenTransfer) -> tuple[int, int, int, int]:
        saved = transfer.saved
        return first(transfer), saved.producer, saved.value, transfer.micro_batch

    return key


def _back_first(transfer: OpenTransfer) -> tuple[int, ...]:
    """A sort key: copies back as they are issued, those of one place as their readers are."""
    saved = transfer.saved
    return transfer.back, transfer.reader, saved.producer, saved.value, transfer.micro_batch


def _copy_out(line: Timeline, transfers: Iterable[OpenTransfer], cap: int | None, placed: Placement) -> None:
    ends: list[int] = []
    for transfer in transfers:
        ready = line.at_ns[transfer.source + 1]
        issue = max(ready, ends[-cap]) if cap and len(ends) >= cap else ready
        out = transfer.source if issue == ready else max(transfer.source, line.first_from(issue) - 1)
        done = max(issue, ends[-1] if ends else 0) + transfer.out_ns
        if not line.returns(out, done, transfer):
            placed.refused.append((transfer, "capped" if issue > ready else "congested"))
            continue
        transfer.copied_out(line, out, done)
        ends.append(done)
        placed.transfers.append(transfer)


def _copy_back(line: Timeline, transfers: Iterable[OpenTransfer], cap: int | None, measured: bool, placed: Placement) -> None:
    starts, issues = [line.at_ns[-1]], [line.at_ns[-1]] * (cap or 0)
    kept: list[OpenTransfer] = []
    for transfer in transfers:
        start = min(line.at_ns[transfer.reader], starts[-1], *issues[-cap:][:1] if cap else ()) - transfer.back_ns
        if not transfer.copies_back(line, start, measured):
            placed.refused.append((transfer, "congested"))
            continue
        transfer.start_ns = start
        kept.append(transfer)
        starts.append(start)
        issues.append(line.at_ns[transfer.back])
    placed.transfers = kept


def _earliest(line: Timeline, transfer: OpenTransfer) -> int:
    """The first index before which a copy back may be issued: in a later job than the copy out, which has ended by then."""
    return max(line.job_start[line.job[transfer.out] + 1], transfer.free, transfer.not_before)


def _run_back(line: Timeline, transfers: Iterable[OpenTransfer], cap: int | None, placed: Placement) -> None:
    ends: list[int] = []
    for transfer in transfers:
        slip = placed.stall_ns
        if cap and len(ends) >= cap and ends[-cap] > line.at_ns[transfer.back] + slip:
            transfer.back = min(transfer.reader, line.first_from(ends[-cap] - slip))
        start = max(line.at_ns[transfer.back] + slip, transfer.done_ns, ends[-1] if ends else 0)
        ends.append(start + transfer.back_ns)
        transfer.late_ns = max(0, ends[-1] - line.at_ns[transfer.reader] - slip)
        placed.stall_ns += transfer.late_ns
