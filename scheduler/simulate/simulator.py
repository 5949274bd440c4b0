"""What a plan does in time: every rank, stream and host, by the nanosecond. This file is the specification.

The host of a rank issues its items in order, each at its host cost; an item it must wait for holds it until that item
is done, and where the plan says so (`Job.host_waits`) it waits until an earlier one is. A stream runs its items one at a
time, in issue order. An item is *ready* once it is issued, its stream's earlier items are done, and what it waits for
is done. It starts when it is ready and, for a rendezvous (a collective, a send with its receive), when all its mates are.
Mates run as one: for the longest of their times, at the pace of the slowest of them, and end together.

Beside others on its rank an item slows: its stretch is 1 plus what each item running there adds (`SimInput.excess`),
its pace 1 / stretch. An item that *stands* (it is ready and its mates are not: its kernel occupies the device until they
are) adds `SimInput.standing` to each computation.
Work is counted in 1 / ONE ns. The pace is `ONE * ONE / stretch` units a nanosecond, rounded up;
an end is rounded up to whole nanoseconds, so that an item due at a moment stays due whatever else happens at it;
nothing else is rounded. Hence the result depends on no order among simultaneous events.

The step of every rank lasts until the last item and the last host is done. Each moment of it belongs to one part
(`split_rank`):

- *compute*: a compute op runs on the rank.
- *exposed*: none runs, and a communication or copy runs that the rank's next compute op waits for (through data,
  events, streams, or a host it blocks); behind the last compute op, any.
- *host*: neither, nothing that the next compute op waits for stands at a rendezvous, and the host is busy on the way to
  issuing that op (behind the last one: to the end of its jobs).
- *bubble*: all the rest: the rank waits for other ranks.

Beside that, whatever the part: *hidden* is the time in which a communication or copy runs beside a compute op, *idle* the time in
which nothing runs on the rank. What runs in a bubble is neither exposed nor hidden: nothing computes and nothing waits for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from interlace.cost_model import Costs
from interlace.errors import PlanError
from interlace.ir import Program
from interlace.scheduler.memory import live as memory
from interlace.scheduler.simulate.arrays import ONE, Ints, Options, SimInput
from interlace.scheduler.simulate.circular_wait import explain_stall
from interlace.scheduler.simulate.lower import lower
from interlace.scheduler.target import IDEAL, Target

NEVER = 1 << 62
"""Later than any time."""
WORTH_COMPILING = 5000
"""Items from which on `auto` takes the twin; below, the plain simulator is done before numba is imported (0.2 s)."""


class Stall(PlanError):
    """Ranks of a plan wait for each other, or for something that no rank does."""


@dataclass(slots=True)
class Times:
    """Per item, in nanoseconds: when issued, ready, started, ended. `[num_items]` each."""

    issue: Ints
    ready: Ints
    start: Ints
    end: Ints


@dataclass(frozen=True, slots=True)
class RankTime:
    """One rank's step; `step_ns == compute_ns + exposed_comm_ns + bubble_ns + host_ns`.

    Attributes:
        slowed_ns: The part of compute that is stretch: time its ops took beside others, less their time alone.
        peak_bytes: Most device memory held at one moment, persistable memory included.
        pinned_bytes: Most host memory held by offloaded values.
    """

    rank: int
    step_ns: int
    compute_ns: int
    exposed_comm_ns: int
    hidden_comm_ns: int
    bubble_ns: int
    host_ns: int
    idle_ns: int
    slowed_ns: int
    peak_bytes: int = 0
    pinned_bytes: int = 0


@dataclass(slots=True)
class Result:
    """A simulated step."""

    input: SimInput
    times: Times
    ranks: list[RankTime]
    memory: list[memory.Profile] = field(default_factory=list)

    @property
    def step_ns(self) -> int:
        """Time of the step, the same on every rank."""
        return max((rank.step_ns for rank in self.ranks), default=0)


Engine = Literal["auto", "plain", "fast"]


def simulate(
    programs: Sequence[Program],
    cost: Costs,
    options: Options | None = None,
    *,
    engine: Engine = "auto",
    target: Target = IDEAL,
    with_memory: bool = True,
) -> Result:
    """Run the plans of all ranks; `auto` takes the compiled twin for large plans where numba is there; results are equal.

    `target` says when memory is allocated and freed; the rest of its rules is in `options` (`Options.of`).

    Raises:
        PlanError: What `lower` refuses.
        Stall: Ranks wait in a circle, which the message prints, or for what never comes.
    """
    return run(lower(programs, cost, options), engine=engine, target=target, with_memory=with_memory)


def run(sim: SimInput, *, engine: Engine = "auto", target: Target = IDEAL, with_memory: bool = True) -> Result:
    """The same from arrays."""
    compiled = _compiled(engine, sim.num_items)
    start, ready, end = compiled.run_items(sim) if compiled else Simulation(sim).run()
    if (end < 0).any():
        raise Stall(explain_stall(sim, end))
    times = Times(issue_times(sim, end), ready, start, end)
    split = compiled.split_rank if compiled else split_rank
    profiles = [_profile(sim, times, at, target) for at in range(len(sim.ranks))] if with_memory else []
    return Result(sim, times, _rank_times(sim, times, split, profiles), profiles)


def _compiled(engine: Engine, num_items: int) -> Any:
    if engine == "plain" or (engine == "auto" and num_items < WORTH_COMPILING):
        return None
    try:
        from interlace.scheduler.simulate import compiled as simulator_fast
    except ImportError:
        if engine == "fast":
            raise PlanError(
                "the compiled simulator needs numba; install it (`pip install numba`) or take engine='plain'"
            ) from None
        return None
    return simulator_fast


def _profile(sim: SimInput, times: Times, at: int, target: Target) -> memory.Profile:
    mine = slice(int(sim.first[at]), int(sim.first[at + 1]))
    return memory.over_time(sim.programs[at], times.issue[mine], times.start[mine], times.end[mine], sim.stream[mine], target)


def _rank_times(sim: SimInput, times: Times, split: Any, profiles: Sequence[memory.Profile]) -> list[RankTime]:
    host_end = host_ends(sim, times)
    step = max(int(times.end.max(initial=0)), int(host_end.max(initial=0)))
    found = []
    for at, rank in enumerate(sim.ranks):
        mine = slice(int(sim.first[at]), int(sim.first[at + 1]))
        deps = slice(int(sim.dep_first[mine.start]), int(sim.dep_first[mine.stop]))
        compute, exposed, hidden, bubble, host, idle = split(
            sim.stream[mine] - sim.first_stream[at], sim.side[mine],
            np.where(sim.awaits[mine] >= 0, sim.awaits[mine] - mine.start, -1),
            sim.dep_first[mine.start : mine.stop + 1] - deps.start, sim.dep[deps] - mine.start, times.issue[mine],
            times.ready[mine], times.start[mine], times.end[mine], step, int(host_end[at]),
        )  # fmt: skip
        took = (times.end[mine] - times.start[mine] - sim.dur[mine])[~sim.side[mine]]
        peaks = (profiles[at].peak("device"), profiles[at].peak("pinned")) if profiles else (0, 0)
        found.append(
            RankTime(rank, step, int(compute), int(exposed), int(hidden), int(bubble), int(host), int(idle), int(took.sum()), *peaks)
        )
    return found


class Simulation:
    """The plain engine: a queue of moments at which something is issued or ends."""

    def __init__(self, sim: SimInput) -> None:
        self.sim = sim
        count = sim.num_items
        self.now = 0
        self.stream, self.issue, self.dur, self.kind = (a.tolist() for a in (sim.stream, sim.issue, sim.dur, sim.kind))
        self.awaits, self.meet, self.follow = sim.awaits.tolist(), sim.meet.tolist(), sim.follow.tolist()
        self.awaited = {item for item in self.awaits if item >= 0}
        self.excess = sim.excess.tolist()
        self.start, self.ready, self.end = [-1] * count, [-1] * count, [-1] * count
        self.queue: list[tuple[int, int, int]] = []
        self.fifo: list[list[int]] = [[] for _ in sim.stream_names]
        for item in range(count):
            self.fifo[self.stream[item]].append(item)
        self.head = [0] * len(self.fifo)
        self.waits = np.diff(sim.dep_first).tolist()
        self.unblocks: list[list[int]] = [[] for _ in range(count)]
        for item in range(count):
            for before in sim.dep[sim.dep_first[item] : sim.dep_first[item + 1]]:
                self.unblocks[before].append(item)
        self.followers = {int(sim.follow[item]): item for item in np.flatnonzero(sim.follow >= 0).tolist()}
        self.running: list[list[int]] = [[] for _ in sim.ranks]
        self.stands: list[set[int]] = [set() for _ in sim.ranks]
        self.standing = sim.standing.tolist()
        self.rank = np.repeat(np.arange(len(sim.ranks)), np.diff(sim.first)).tolist()
        self.stretch = [0] * count
        self.left, self.pace, self.since, self.due = ([0] * count for _ in range(4))
        self.host_late = [0] * len(sim.ranks)
        self.host_at = [self._next_wait(at, int(sim.first[at])) for at in range(len(sim.ranks))]
        self.touched: set[int] = set()

    def run(self) -> tuple[Ints, Ints, Ints]:
        """Start, ready and end of every item; -1 for those that never end because ranks wait for each other."""
        for stream in range(len(self.fifo)):
            self._look(stream, 0)
        while True:
            self._settle()
            if not self.queue:
                return tuple(np.array(column, np.int64) for column in (self.start, self.ready, self.end))  # type: ignore[return-value]
            now, item, due = heapq.heappop(self.queue)
            self.now = now
            if due < 0:
                self._look(self.stream[item], now)
            elif self.end[item] < 0 and self.due[item] == due:
                self._finish(self._mates(item), now)

    def _mates(self, item: int) -> list[int]:
        """All items that run as one with this one."""
        meet = self.meet[item]
        if meet < 0:
            return [item]
        return [int(k) for k in self.sim.mates[self.sim.meet_first[meet] : self.sim.meet_first[meet + 1]]]

    def _look(self, stream: int, now: int) -> None:
        """Start the stream's next item if it can start."""
        if self.head[stream] == len(self.fifo[stream]):
            return
        item = self.fifo[stream][self.head[stream]]
        at = self.rank[item]
        if self.start[item] >= 0 or self.ready[item] >= 0 or item > self.host_at[at]:
            return
        issued = self.issue[item] + self.host_late[at]
        if issued > now:
            heapq.heappush(self.queue, (issued, item, -1))
        elif self.waits[item] == 0:
            self.ready[item] = now
            self._meet(item, now)

    def _meet(self, item: int, now: int) -> None:
        """Start a ready item together with its mates, if all are ready; else it stands."""
        mates = self._mates(item)
        meet, follow = self.meet[item], self.follow[item]
        is_short = meet >= 0 and (len(mates) < self.sim.meet_size[meet] or any(self.ready[mate] < 0 for mate in mates))
        if is_short or (follow >= 0 and self.start[follow] < 0):
            self.stands[self.rank[item]].add(item)
            self.touched.add(self.rank[item])
            return
        for mate in mates:
            self.stands[self.rank[mate]].discard(mate)
            self.start[mate] = self.since[mate] = now
            self.left[mate] = max(self.dur[k] for k in mates) * ONE
            self.running[self.rank[mate]].append(mate)
            self.touched.add(self.rank[mate])
        follower = self.followers.get(item, -1)
        if follow >= 0:
            self.left[item] = 0 if self.end[follow] >= 0 else NEVER
        if follower >= 0 and self.ready[follower] >= 0:
            self._meet(follower, now)

    def _finish(self, mates: Sequence[int], now: int) -> None:
        for item in mates:
            self.end[item] = now
            self.running[self.rank[item]].remove(item)
            self.touched.add(self.rank[item])
            self.head[self.stream[item]] += 1
        for item in mates:
            at = self.rank[item]
            if item in self.awaited:
                self._release(at)
                for stream in range(int(self.sim.first_stream[at]), int(self.sim.first_stream[at + 1])):
                    self._look(stream, now)
            for later in self.unblocks[item]:
                self.waits[later] -= 1
                self._look(self.stream[later], now)
            self._look(self.stream[item], now)
            follower = self.followers.get(item, -1)
            if follower >= 0 and self.start[follower] >= 0:
                self._finish([follower], now)

    def _release(self, at: int) -> None:
        """Let the host of a rank go on behind items whose wait is over."""
        end = int(self.sim.first[at + 1])
        while self.host_at[at] < end and self.end[self.awaits[self.host_at[at]]] >= 0:
            item = self.host_at[at]
            self.host_late[at] = max(self.host_late[at], self.end[self.awaits[item]] - self.issue[item])
            self.host_at[at] = self._next_wait(at, item + 1)

    def _next_wait(self, at: int, item: int) -> int:
        """The next item behind which the host waits, from `item` on; the rank's last item if there is none."""
        end = int(self.sim.first[at + 1])
        return next((k for k in range(item, end) if self.awaits[k] >= 0), end)

    def _settle(self) -> None:
        """Give every running item of the touched ranks, and their mates, the pace that the present company allows."""
        changed: dict[int, list[int]] = {}
        for at in sorted(self.touched):
            for item in self.running[at]:
                kind = self.kind[item]
                beside = sum(self.excess[kind][self.kind[other]] for other in self.running[at] if other != item)
                self.stretch[item] = ONE + beside + self.standing[kind] * len(self.stands[at])
                mates = self._mates(item)
                changed[mates[0]] = mates
        self.touched.clear()
        for leader, mates in changed.items():
            if self.left[leader] == NEVER:
                continue
            self._repace(leader, -(-ONE * ONE // max(self.stretch[mate] for mate in mates)))

    def _repace(self, leader: int, pace: int) -> None:
        """Book what was done at the old pace and say when the item ends at the new one."""
        if pace == self.pace[leader]:
            return
        self.left[leader] -= self.pace[leader] * (self.now - self.since[leader])
        self.since[leader], self.pace[leader] = self.now, pace
        self.due[leader] = self.now + max(0, -(-self.left[leader] // pace))
        heapq.heappush(self.queue, (self.due[leader], leader, self.due[leader]))


def issue_times(sim: SimInput, end: Ints) -> Ints:
    """When each item was issued: the host's own time, and behind each of its waits, how late that left it."""
    issue = sim.issue.copy()
    for at in range(len(sim.ranks)):
        late = 0
        waits = _waits(sim, at)
        for item, upto in zip(waits, [*(waits[1:] + 1), int(sim.first[at + 1])], strict=False):
            late = max(late, int(end[sim.awaits[item]] - sim.issue[item]))
            issue[item + 1 : upto] += late
    return issue


def _waits(sim: SimInput, at: int) -> Ints:
    """Items of a rank behind which its host waits."""
    found: Ints = int(sim.first[at]) + np.flatnonzero(sim.awaits[sim.first[at] : sim.first[at + 1]] >= 0)
    return found


def host_ends(sim: SimInput, times: Times) -> Ints:
    """When each rank's host is through with its jobs. `[num_ranks]`"""
    ends = sim.host_end.copy()
    for at in range(len(sim.ranks)):
        waits = _waits(sim, at)
        ends[at] += max(0, int((times.end[sim.awaits[waits]] - sim.issue[waits]).max(initial=0)))
    return ends


def split_rank(stream: Ints, side: Any, awaits: Ints, dep_first: Ints, dep: Ints, issue: Ints, ready: Ints, start: Ints,
               end: Ints, step: int, host_end: int) -> tuple[int, int, int, int, int, int]:  # fmt: skip
    """Compute, exposed, hidden, bubble, host and idle time of one rank, as the head of this file defines them.

    Items are numbered from 0 in issue order, streams from 0. Written in the subset of Python that numba compiles, so that
    there is one definition. Cost O(items log items).
    """
    count = len(start)
    # Start of the earliest compute op that waits for each item.
    waiter = np.full(count, NEVER, np.int64)
    behind = np.full(int(stream.max()) + 1 if count else 1, NEVER, np.int64)
    later = NEVER
    for item in range(count - 1, -1, -1):
        if awaits[item] >= 0:
            waiter[awaits[item]] = min(waiter[awaits[item]], later)
        mine = min(waiter[item], behind[stream[item]])
        waiter[item] = mine
        seen = mine if side[item] else start[item]
        behind[stream[item]] = seen
        later = min(later, seen)
        for k in range(dep_first[item], dep_first[item + 1]):
            waiter[dep[k]] = min(waiter[dep[k]], seen)
    # The gaps between compute ops, each with the op that ends it.
    order = np.argsort(start, kind="mergesort")
    gap_from = np.empty(count + 1, np.int64)
    gap_to = np.empty(count + 1, np.int64)
    gap_next = np.empty(count + 1, np.int64)
    num_gaps, free, compute = 0, 0, 0
    for item in order:
        if side[item]:
            continue
        if start[item] > free:
            gap_from[num_gaps], gap_to[num_gaps], gap_next[num_gaps] = free, start[item], item
            num_gaps += 1
        compute += max(0, end[item] - max(free, start[item]))
        free = max(free, end[item])
    last = num_gaps
    gap_from[last], gap_to[last], gap_next[last] = free, step, -1
    num_gaps += 1
    # What each gap's next op waits for; behind the last compute op, everything.
    begin = np.full(num_gaps + 1, -1, np.int64)
    chain = np.full(2 * count, -1, np.int64)
    for item in range(count):
        if not side[item]:
            continue
        gap = np.searchsorted(gap_to[:last], waiter[item])
        if gap < last and gap_to[gap] == waiter[item] and end[item] > gap_from[gap]:
            chain[2 * item] = begin[gap]
            begin[gap] = 2 * item
        if end[item] > free:
            chain[2 * item + 1] = begin[last]
            begin[last] = 2 * item + 1
    exposed, host = 0, 0
    blocked = np.flatnonzero(awaits >= 0)
    blocked_at = issue[blocked]
    for gap in range(num_gaps):
        low, high = gap_from[gap], gap_to[gap]
        busy = min(high, host_end if gap == last else issue[gap_next[gap]])
        if begin[gap] < 0 and busy <= low:
            continue
        n, link = 0, begin[gap]
        while link >= 0:
            n, link = n + 1, chain[link]
        first_wait, last_wait = 0, 0
        if busy > low:
            first_wait = max(0, np.searchsorted(blocked_at, low) - 1)
            last_wait = max(first_wait, np.searchsorted(blocked_at, busy))
        # Rows: n runs, n stands at a rendezvous, the host's waits, the time in which the host is busy.
        spans = np.empty((2 * n + last_wait - first_wait + 1, 2), np.int64)
        k, link = 0, begin[gap]
        while link >= 0:
            item = link // 2
            spans[k, 0], spans[k, 1] = max(low, start[item]), min(high, end[item])
            spans[n + k, 0], spans[n + k, 1] = max(low, ready[item]), min(high, start[item])
            k, link = k + 1, chain[link]
        for k in range(last_wait - first_wait):
            item = blocked[first_wait + k]
            spans[2 * n + k, 0], spans[2 * n + k, 1] = max(low, issue[item]), min(busy, end[awaits[item]])
        spans[-1, 0], spans[-1, 1] = low, busy
        exposed += covered(spans[:n])
        host += covered(spans) - covered(spans[:-1])
    spans = np.empty((count, 2), np.int64)
    spans[:, 0], spans[:, 1] = start, end
    busy = covered(spans)
    hidden = compute + covered(spans[side]) - busy
    return compute, exposed, hidden, step - compute - exposed - host, host, step - busy


def covered(spans: Any) -> int:
    """Length of the union of intervals `[n, 2]`; an interval that ends before it starts is empty."""
    total, upto = 0, -1
    for k in np.argsort(spans[:, 0], kind="mergesort"):
        low, high = max(spans[k, 0], upto), spans[k, 1]
        if high > low:
            total += high - low
            upto = high
    return total
