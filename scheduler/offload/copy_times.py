"""Where copies stand: a queue for each direction beside the time line of the compute stream."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from interlace.ir import Program
from interlace.ir.kinds import stream_of
from interlace.scheduler.offload.decision import Item
from interlace.scheduler.offload.saved_values import Reason, Saved

Span = tuple[int, int, int]
"""First item, first item behind, bytes."""


@dataclass(slots=True)
class Timeline:
    """The schedule by host order: place and job of each item, compute time before it (one entry more than items)."""

    items: list[Item]
    place: dict[Item, int]
    job: list[int]
    job_start: list[int]
    at_ns: list[int]

    @classmethod
    def of(cls, program: Program, op_ns: Mapping[int, int]) -> Timeline:
        """From a scheduled program and the duration of its operations."""
        beside = {op.id for op in program.ops if stream_of(op)}
        items = [item for job in program.jobs for item in job.items]
        job = [k for k, each in enumerate(program.jobs) for _ in each.items]
        starts = [0, *accumulate(len(each.items) for each in program.jobs)]
        at_ns = [0, *accumulate(0 if op_id in beside else op_ns.get(op_id, 0) for op_id, _ in items)]
        return cls(items, {item: k for k, item in enumerate(items)}, job, starts, at_ns)

    def first_from(self, time_ns: int) -> int:
        """The first item that starts at or after a time."""
        return bisect_left(self.at_ns, time_ns)

    def returns(self, out: int, done_ns: int, trip: OpenTrip) -> bool:
        """Whether what went out behind an item, by a time, can be back in a later job before its reader."""
        if out >= trip.reader or self.job[out] == self.job[trip.reader]:
            return False
        boundary = self.job_start[self.job[out] + 1]
        return max(done_ns, self.at_ns[boundary]) + trip.back_ns <= self.at_ns[trip.reader]


@dataclass(slots=True, eq=False)
class OpenTrip:
    """A trip while it is placed: out goes behind item `out`, memory is free from item `free` on, back goes before `back`.

    The copy out is over at `done_ns`, the copy back is to begin at `start_ns`; its reader waits `late_ns` for it.
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


@dataclass(slots=True)
class Placement:
    trips: list[OpenTrip] = field(default_factory=list)
    refused: list[tuple[OpenTrip, Reason]] = field(default_factory=list)
    stall_ns: int = 0

    def freed(self, timed: bool = True) -> list[Span]:
        """Where each trip has left the device, with minus its bytes."""
        spans = ((t.free if timed else t.out + 1, t.back, -t.saved.freed_bytes) for t in self.trips)
        return [span for span in spans if span[0] < span[1]]


def place_trips(line: Timeline, trips: Sequence[OpenTrip], cap: int | None, measured: bool) -> Placement:
    """Give trips their items: out as soon as forward has read the value, back as late as hides the copy.

    Steps: 1 copies out queue in the order of their sources; 2 going back in time, each copy back ends before its reader and
    before the next one starts; a trip that finds no time in either queue is refused; 3 the queue of copies back is run, and
    what comes late, because memory held it back, is noted.
    """
    placed = Placement()
    _copy_out(line, sorted(trips, key=order_key(lambda t: t.source)), cap, placed)
    _copy_back(line, sorted(placed.trips, key=order_key(lambda t: t.reader), reverse=True), cap, measured, placed)
    _run_back(line, sorted(placed.trips, key=order_key(lambda t: t.back, lambda t: t.reader)), cap, placed)
    placed.trips.sort(key=order_key(lambda t: t.source))
    return placed


def earlier(line: Timeline, placed: Placement, slack: float) -> Placement:
    """The same trips, each copy back issued by that share of its time earlier, as far as all copies in front of it leave time.

    Nothing is refused for it, and no copy comes later than it did.
    """
    trips = [replace(trip) for trip in placed.trips]
    queue = sorted(trips, key=order_key(lambda t: t.start_ns))
    first, end = [], 0
    for trip in queue:  # what each could begin at if all in front of it began as early as they can
        first.append(min(max(trip.done_ns, line.at_ns[min(_earliest(line, trip), trip.back)], end), trip.start_ns))
        end = first[-1] + trip.back_ns
    by = line.at_ns[-1]
    for trip, earliest in zip(reversed(queue), reversed(first), strict=True):
        by = min(by, line.at_ns[trip.reader])
        trip.start_ns = min(max(by - int((1 + slack) * trip.back_ns), earliest), trip.start_ns)
        trip.back = min(max(bisect_right(line.at_ns, trip.start_ns) - 1, _earliest(line, trip), trip.free + 1), trip.back)
        by = trip.start_ns
    moved = Placement(trips, list(placed.refused))
    _run_back(line, sorted(trips, key=order_key(lambda t: t.back, lambda t: t.reader)), None, moved)
    return moved


def order_key(*first: Callable[[OpenTrip], int]) -> Callable[[OpenTrip], tuple[int, ...]]:
    return lambda trip: (*(get(trip) for get in first), trip.saved.producer, trip.saved.value, trip.micro_batch)


def _copy_out(line: Timeline, trips: Iterable[OpenTrip], cap: int | None, placed: Placement) -> None:
    ends: list[int] = []
    for trip in trips:
        ready = line.at_ns[trip.source + 1]
        issue = max(ready, ends[-cap]) if cap and len(ends) >= cap else ready
        out = trip.source if issue == ready else max(trip.source, line.first_from(issue) - 1)
        done = max(issue, ends[-1] if ends else 0) + trip.out_ns
        if not line.returns(out, done, trip):
            placed.refused.append((trip, "capped" if issue > ready else "congested"))
            continue
        trip.out, trip.done_ns = out, done
        trip.free = max(out + 1, line.first_from(done)) if trip.out_ns else out + 1
        ends.append(done)
        placed.trips.append(trip)


def _copy_back(line: Timeline, trips: Iterable[OpenTrip], cap: int | None, measured: bool, placed: Placement) -> None:
    starts, issues = [line.at_ns[-1]], [line.at_ns[-1]] * (cap or 0)
    kept: list[OpenTrip] = []
    for trip in trips:
        start = min(line.at_ns[trip.reader], starts[-1], *issues[-cap:][:1] if cap else ()) - trip.back_ns
        wanted = bisect_right(line.at_ns, start) - 1 if measured else trip.reader
        trip.back = min(max(wanted, _earliest(line, trip)), trip.reader)
        if (start < trip.done_ns and not trip.not_before) or trip.back <= trip.free:
            placed.refused.append((trip, "congested"))
            continue
        trip.start_ns = start
        kept.append(trip)
        starts.append(start)
        issues.append(line.at_ns[trip.back])
    placed.trips = kept


def _earliest(line: Timeline, trip: OpenTrip) -> int:
    """The first item in front of which a copy back may stand: in a later job than the copy out, which is over by then."""
    return max(line.job_start[line.job[trip.out] + 1], trip.free, trip.not_before)


def _run_back(line: Timeline, trips: Iterable[OpenTrip], cap: int | None, placed: Placement) -> None:
    ends: list[int] = []
    for trip in trips:
        slip = placed.stall_ns
        if cap and len(ends) >= cap and ends[-cap] > line.at_ns[trip.back] + slip:
            trip.back = min(trip.reader, line.first_from(ends[-cap] - slip))
        start = max(line.at_ns[trip.back] + slip, trip.done_ns, ends[-1] if ends else 0)
        ends.append(start + trip.back_ns)
        trip.late_ns = max(0, ends[-1] - line.at_ns[trip.reader] - slip)
        placed.stall_ns += trip.late_ns
