"""Simulation of plans in time: every rank, stream and host, in integer nanoseconds. This module is the specification.

An *op instance* (`item` in names) is one `(operation, micro-batch)` of one rank. The host of a rank issues its op instances in
order, each at its host cost. After a blocking op instance the host waits until it has ended; where the plan requires it
(`Job.host_waits`), the host waits until an earlier one has ended. A stream runs its op instances one at a time, in issue order. An op
instance is *ready* once it is issued and the earlier ones of its stream and those that it depends on have ended. At a rendezvous (a
collective, or a send with its receive) it has *mates*, the op instances of other ranks that take part. It starts when it and all its
mates are ready. Mates run together: they take the longest of their durations, at the pace of the slowest of them, and end together.

The overlap clock. An op instance takes longer while others run on its rank: its stretch is 1 plus what each other op instance
running there adds (`SimInput.excess`), and its pace is 1 / stretch. What copies of both directions add to each other depends on how many
devices of the host copy at that moment, and in how many directions (`SimInput.both`). What computation and anything else add may depend on
which of them began first: a communication that becomes ready while a matrix product runs gets no multiprocessor until the product has
ended. A communication counts as begun START_NS after it is ready, and computation that began by then was first. While any op instance of
the rank is *blocked* (it is ready but its mates are not, and its kernel occupies the device until they are), `SimInput.blocked_excess` is
added to the stretch of each computation. Work is counted in units of 1 / ONE ns. The pace is `ONE * ONE / stretch` units per nanosecond,
rounded up. An end is rounded up to whole nanoseconds, so that an op instance that is due at some time stays due whatever else happens at
that time. Nothing else is rounded, so the result does not depend on the order of simultaneous events.

If the device's power limit is known, its clock depends on the power drawn (`simulate/power.py`), and time that depends on the clock is
stretched further.

`simulate/compiled.py` implements this clock exactly; `interleave/clock.py` simplifies it for one rank, for planners.

All ranks are simulated from a common start until the last op instance has ended and the last host could begin the next step: the *span*.
In training, steps follow each other without a common start: a rank whose first computation waits for a value of another stage can still
finish the step before during that wait. The *step* is the time from one step to the next, the span less the time by which steps overlap in
this way; all ranks have the same step.

Each moment of the span belongs to one part of the step (`split_rank`). The time by which steps overlap is not counted: it is taken from the
bubble, and what exceeds that from exposed communication.

- *compute*: a compute op runs on the rank.
- *exposed*: no compute op runs, and a communication or copy runs that the rank's next compute op waits for (through data, events,
  streams, or a host that it blocks). After the last compute op, any communication or copy is exposed.
- *host*: neither of the above; nothing that the next compute op waits for is blocked at a rendezvous, and the host is busy on the way
  to issuing that op (after the last compute op: to beginning the next step).
- *bubble*: the rest: the rank waits for other ranks.

Independently of these parts, *hidden* is the time in which a communication or copy runs beside a compute op, and *idle* the time
in which nothing runs on the rank. A communication in a bubble is neither exposed nor hidden: nothing computes and nothing waits for it.
"""

from __future__ import annotations

import dataclasses
import heapq
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from interlace.cost_model import Costs
from interlace.cost_model.interference import START_NS
from interlace.errors import PlanError
from interlace.ir import Program
from interlace.ir.arrays import Flags, Ints
from interlace.ir.kinds import is_receive, is_send
from interlace.ir.per_ops import once_per_ops
from interlace.ir.target import IDEAL, Target
from interlace.scheduler.memory import live as memory
from interlace.scheduler.simulate.arrays import ONE, TO_DEVICE, TO_HOST, BothDirections, Options, SimInput
from interlace.scheduler.simulate.circular_wait import explain_stall
from interlace.scheduler.simulate.lower import lower
from interlace.scheduler.simulate.power import TICK_NS, PowerInput, PowerTrace, at_clock, limiter, steady_mean

NEVER = 1 << 62
"""Later than any time."""
WORTH_COMPILING = 5000
"""Least number of op instances, over all steps that may be simulated, for which `auto` loads the compiled engine. Below it, the plain
engine finishes before numba is imported (0.2 s). Once the compiled engine is loaded, `auto` always uses it."""
MOST_STEPS = 4
"""Most steps that are simulated in search of a steady state: one that begins with the same power average, and the same copies still
running, as it ends with."""
CLOSE = 128
"""Power averages that differ by at most 1 / CLOSE of the limit count as equal: adjacent clock levels differ by more."""
COMPILED = "interlace.scheduler.simulate.compiled"


class Stall(PlanError):
    """Ranks wait for each other in a cycle, or for a communication that no rank issues."""


@dataclass(slots=True)
class Times:
    """When each op instance was issued, was ready, started and ended, in nanoseconds. `[num_items]` each."""

    issue: Ints
    ready: Ints
    start: Ints
    end: Ints


@dataclass(frozen=True, slots=True)
class RankTime:
    """One rank's step, the time from one step to the next; `step_ns == compute_ns + exposed_comm_ns + bubble_ns + host_ns`.

    Attributes:
        slowed_ns: Simulated duration of compute ops minus their duration alone.
        peak_bytes: Peak of live device memory, persistable memory included.
        pinned_bytes: Peak of live pinned host memory.
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


@dataclass
class Result:
    """A simulated step.

    Attributes:
        memory: Memory profile of each rank; empty if it was not requested.
        host_end: When the host of each rank has issued all of its jobs and could begin the next step. `[num_ranks]`
        power: Clock and energy of each rank; meaningful only if `input.power` is known.
    """

    input: SimInput
    times: Times
    memory: list[memory.Profile]
    host_end: Ints
    power: PowerTrace
    _split: Any

    @cached_property
    def span_ns(self) -> int:
        """Time from the common start of all ranks to the end of the last one."""
        return span_of(self.input, self.times, self.host_end)

    @cached_property
    def step_ns(self) -> int:
        """Time from one step to the next, the same on every rank."""
        return step_of(self.input, self.times, self.host_end)

    @cached_property
    def spare_ns(self) -> int:
        """How much later hosts could begin the next step without a longer step: what a script may take between steps beyond the time that
        costs have for it (`Costs.between_steps_ns`)."""
        return self.step_ns - int(self.host_end.max(initial=0))

    @cached_property
    def ranks(self) -> list[RankTime]:
        """The parts of each rank's step."""
        return _rank_times(self, self._split)

    @property
    def joules(self) -> list[float]:
        """Energy of each rank per step, in joules; empty if the device's power is not known."""
        power = self.input.power
        return [(power.static_mw * self.step_ns + int(spent)) / 1e12 for spent in self.power.spent] if power else []

    def mhz(self, at: int) -> tuple[Ints, Ints]:
        """Clock of the rank with index `at`: times of its changes, in nanoseconds from the start of the step, and the new clocks, in MHz.

        Raises PlanError if the device's power is not known."""
        if self.input.power is None:
            raise PlanError("the clock of a rank was asked for, but the step was simulated without a power limit")
        when, ranks, levels = self.power.changes
        mine = (ranks == at) & (when < max(1, self.span_ns))
        return when[mine], self.input.power.clocks.mhz[levels[mine]]

    def mean_mhz(self, at: int) -> float:
        """Clock of the rank with index `at`, averaged over the span, in MHz. Raises PlanError as `mhz`."""
        when, mhz = self.mhz(at)
        spans = np.diff(when, append=self.span_ns)
        return float((spans * mhz).sum() / max(1, spans.sum()))

    @cached_property
    def compute_ns(self) -> list[int]:
        """`RankTime.compute_ns` of each rank, without the cost of the other parts."""
        return [_compute_ns(self.input, self.times, at) for at in range(len(self.input.ranks))]


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
    """Simulate the plans of all ranks.

    The engine `auto` is the compiled one for large plans, if numba is installed, else the plain one; both give the same result. `target`
    decides when memory is allocated and freed; its other rules must be passed as `options` (`Options.of`).

    Raises PlanError as `lower`, or if the engine `fast` is requested without numba; Stall if ranks wait for each other in a cycle, which
    the message prints, or for a communication that is never issued.
    """
    return run(lower(programs, cost, options), engine=engine, target=target, with_memory=with_memory)


def run(sim: SimInput, *, engine: Engine = "auto", target: Target = IDEAL, with_memory: bool = True) -> Result:
    """Simulate the arrays that `lower` returns; arguments and errors as for `simulate`."""
    compiled = _compiled(engine, sim.num_items * (MOST_STEPS if sim.power else 1))
    times, trace = _times(sim, compiled)
    split = compiled.split_rank if compiled else split_rank
    profiles = [_profile(sim, times, at, target) for at in range(len(sim.ranks))] if with_memory else []
    return Result(sim, times, profiles, host_ends(sim, times), trace, split)


def device_memory(sim: SimInput, target: Target = IDEAL, placed: memory.Placed | None = None) -> tuple[Times, memory.Profile]:
    """Times and memory of a simulation of a single rank; `placed` as in `over_time`. Raises Stall as `simulate`."""
    times, _ = _times(sim, _compiled("auto", sim.num_items))
    step = last_end(sim, times.end)
    return times, memory.over_time(sim.programs[0], times.issue, times.start, times.end, sim.stream, target, placed, step)


def last_end(sim: SimInput, end: Ints) -> int:
    """End of the last op instance that the next step waits for, in nanoseconds."""
    return int((end if sim.tail is None else end[~sim.tail]).max(initial=0))


def span_of(sim: SimInput, times: Times, hosts: Ints) -> int:
    """End of the span, in nanoseconds: `last_end`, or when the last host could begin the next step (`host_ends`) if that is later."""
    return max(last_end(sim, times.end), int(hosts.max(initial=0)))


def step_of(sim: SimInput, times: Times, hosts: Ints) -> int:
    """Time from one step to the next, in nanoseconds: the longest time of a rank without the wait for its first value from another stage;
    at least the time of the hosts."""
    end, longest = times.end if sim.tail is None else np.where(sim.tail, 0, times.end), int(hosts.max(initial=0))
    for at, (first, last) in enumerate(pairwise(sim.first.tolist())):
        alone = int(end[first:last].max(initial=0))
        if alone > longest:
            longest = max(longest, alone - _first_wait_ns(sim, times, at))
    return longest


def _times(sim: SimInput, compiled: Any) -> tuple[Times, PowerTrace]:
    """Times of a step that follows another, whose copies to the host (`SimInput.tail`) may still run when it begins."""
    times, trace, mean = _times_alone(sim, compiled)
    if sim.tail is None or sim.mark is None:
        return times, trace
    left = dict.fromkeys(range(len(sim.ranks)), 0)
    for _ in range(MOST_STEPS):
        before, took = left, step_of(sim, times, host_ends(sim, times))
        left = {at: _left(sim, times, at, took) for at in before}
        if left == before:
            break
        dur = sim.dur.copy()
        for at, mark in enumerate(sim.mark.tolist()):
            if mark >= 0:
                dur[mark] = sim.dur[mark] + left[at]
        times, trace, mean = _times_alone(dataclasses.replace(sim, dur=dur), compiled, mean)
    return times, trace


def _left(sim: SimInput, times: Times, at: int, step_ns: int) -> int:
    """How far into the next step the `tail` copies of a rank run, in nanoseconds."""
    assert sim.tail is not None
    mine = slice(int(sim.first[at]), int(sim.first[at + 1]))
    return max(0, int(times.end[mine][sim.tail[mine]].max(initial=0)) - step_ns)


def _times_alone(sim: SimInput, compiled: Any, mean: Ints | None = None) -> tuple[Times, PowerTrace, Ints | None]:
    """Times of one step. With a power limit, of a steady-state step, whose power averages are the same at its start and end.

    The search begins with the averages `mean` (default: `_first_mean`). The averages with which the next step would begin are returned too.
    """
    power, trace = sim.power, PowerTrace.begin(len(sim.ranks))
    following = PowerTrace.warm(power, _first_mean(sim, power) if mean is None else mean) if power else trace
    for _ in range(MOST_STEPS if power else 1):
        trace, began = following, following.mean.copy()
        start, ready, end = compiled.run_items(sim, trace) if compiled else Simulation(sim, trace).run()
        if (end < 0).any():
            raise Stall(explain_stall(sim, end))
        if power is None:
            break
        mean = steady_mean(power, began, trace.mean, last_end(sim, end))
        following = PowerTrace.warm(power, mean)
        is_full = not trace.changes[2].any() and (mean <= began).all()
        if is_full or (np.abs(mean - began) * CLOSE <= power.limit_mw).all():
            break
    return Times(issue_times(sim, end), ready, start, end), trace, mean


def _first_mean(sim: SimInput, power: PowerInput) -> Ints:
    """Average power of each rank if the step took no longer than its busiest stream; an overestimate, as streams wait. `[num_ranks]`"""
    least_ns = np.bincount(sim.stream, sim.dur, len(sim.stream_names)).max(initial=1)
    rank_of = np.repeat(np.arange(len(sim.ranks)), np.diff(sim.first))
    spent = np.bincount(rank_of, power.draw.astype(np.float64) * sim.dur, len(sim.ranks))
    found: Ints = np.round(spent / max(1, least_ns)).astype(np.int64)
    return found


def _compiled(engine: Engine, num_items: int) -> Any:
    small = num_items < WORTH_COMPILING and COMPILED not in sys.modules
    if engine == "plain" or (engine == "auto" and small):
        return None
    try:
        from interlace.scheduler.simulate import compiled
    except ImportError:
        if engine == "fast":
            raise PlanError("the compiled simulator needs numba; install it (`pip install numba`) or take engine='plain'") from None
        return None
    return compiled


def _profile(sim: SimInput, times: Times, at: int, target: Target) -> memory.Profile:
    mine = slice(int(sim.first[at]), int(sim.first[at + 1]))
    step, arrays = last_end(sim, times.end), (times.issue[mine], times.start[mine], times.end[mine], sim.stream[mine])
    return memory.over_time(sim.programs[at], *arrays, target, step=step)


def _rank_times(result: Result, split: Any) -> list[RankTime]:
    sim, times, step_ns, span_ns = result.input, result.times, result.step_ns, result.span_ns
    found = []
    for at, rank in enumerate(sim.ranks):
        mine = slice(int(sim.first[at]), int(sim.first[at + 1]))
        compute, exposed, hidden, bubble, host, idle = map(int, split(columns_of(sim, times, at), span_ns, int(result.host_end[at])))
        shared = span_ns - step_ns
        of_bubble = min(bubble, shared)
        of_exposed = min(exposed, shared - of_bubble)
        parts = exposed - of_exposed, hidden, bubble - of_bubble, host - (shared - of_bubble - of_exposed), max(0, idle - shared)
        slowed = (times.end[mine] - times.start[mine] - sim.dur[mine])[~sim.side[mine]]
        peaks = (result.memory[at].peak("device"), result.memory[at].peak("pinned")) if result.memory else (0, 0)
        found.append(RankTime(rank, step_ns, compute, *parts, int(slowed.sum()), *peaks))
    return found


def _compute_ns(sim: SimInput, times: Times, at: int) -> int:
    """Time in which compute ops of a rank run, as returned by `gaps`."""
    mine = int(sim.first[at]) + np.flatnonzero(~sim.side[sim.first[at] : sim.first[at + 1]])
    start, end = times.start[mine], times.end[mine]
    order = np.argsort(start, kind="stable")
    until = np.maximum.accumulate(end[order])
    return int(np.maximum(0, end[order] - np.maximum(start[order], np.r_[0, until[:-1]])).sum()) if len(mine) else 0


def _first_wait_ns(sim: SimInput, times: Times, at: int) -> int:
    """For how long a rank waits for its first value from another stage and does nothing else; 0 if it receives nothing, or if another stage
    waits for it before, as for a send."""
    mine = np.arange(int(sim.first[at]), int(sim.first[at + 1]))
    received, sent = (is_one[sim.op[mine]] for is_one in _transfers(sim.programs[at]))
    received = received & ((sim.follow[mine] >= 0) | (np.append(sim.meet_size, 0)[sim.meet[mine]] > 1))  # not from peers that are ready
    if not received.any():
        return 0
    firsts = sim.dep_first[mine[0] : mine[-1] + 2]
    reads = received[sim.dep[firsts[0] : firsts[-1]] - mine[0]]
    readers, computes = mine.repeat(np.diff(firsts))[reads], mine[~sim.side[mine]]
    inline = mine[received & np.isin(sim.stream[mine], sim.stream[computes])]  # receives on a stream that computes
    first = int(times.start[np.r_[readers[~sim.side[readers]], inline]].min(initial=NEVER))
    if first == NEVER or int(times.start[mine[sent]].min(initial=NEVER)) < first:
        return 0
    others = mine[~received & (times.start[mine] < first)]
    stage = sim.programs[at].pipeline.stage
    for item in others[sim.meet[others] >= 0].tolist():
        if any(sim.programs[sim.rank_index(mate)].pipeline.stage != stage for mate in sim.mates_at(int(sim.meet[item]))):
            return 0
    start = times.start.copy()
    if sim.mark is not None and sim.mark[at] >= 0:  # before its own time it stands for copies of the step before
        start[sim.mark[at]] = times.end[sim.mark[at]] - sim.dur[sim.mark[at]]
    return first - int(covered(np.stack([start[others], np.minimum(times.end[others], first)], axis=1)))


@once_per_ops
def _transfers(program: Program) -> tuple[Flags, Flags]:
    """For each op id: whether the op receives from another stage, and whether it sends to one."""
    found = np.zeros((2, 1 + max((op.id for op in program.ops), default=0)), bool)
    for op in program.ops:
        found[:, op.id] = is_receive(op), is_send(op)
    return found[0], found[1]


class Simulation:
    """The plain engine: a queue of the times at which an op instance is issued or ends."""

    def __init__(self, sim: SimInput, trace: PowerTrace | None = None) -> None:
        self.sim = sim
        count = sim.num_items
        self.now = 0
        self.stream, self.issue, self.dur, self.kind = (a.tolist() for a in (sim.stream, sim.issue, sim.dur, sim.kind))
        self.awaits, self.meet, self.follow = sim.awaits.tolist(), sim.meet.tolist(), sim.follow.tolist()
        self.awaited = {item for item in self.awaits if item >= 0}
        self.excess, self.side = sim.excess.tolist(), sim.side.tolist()
        self.start, self.ready, self.end = [-1] * count, [-1] * count, [-1] * count
        self.queue: list[tuple[int, int, int]] = []
        self.fifo: list[list[int]] = [[] for _ in sim.stream_names]
        for item in range(count):
            self.fifo[self.stream[item]].append(item)
        self.head = [0] * len(self.fifo)
        self.waits = np.diff(sim.dep_first).tolist()
        self.unblocks: list[list[int]] = [[] for _ in range(count)]
        for item in range(count):
            for before in sim.needs(item):
                self.unblocks[before].append(item)
        self.followers = {int(sim.follow[item]): item for item in np.flatnonzero(sim.follow >= 0).tolist()}
        self.running: list[list[int]] = [[] for _ in sim.ranks]
        self.blocked: list[set[int]] = [set() for _ in sim.ranks]
        self.blocked_excess = sim.blocked_excess.tolist()
        self.rank = np.repeat(np.arange(len(sim.ranks)), np.diff(sim.first)).tolist()
        self.stretch = [0] * count
        self.left, self.pace, self.since, self.due = ([0] * count for _ in range(4))
        self.host_late = [0] * len(sim.ranks)
        if sim.both is not None:
            self.way, self.both_excess = sim.both.way.tolist(), sim.both.excess.tolist()
            self.directions, self.num_copying = [0] * len(sim.ranks), Counter[int]()
        self.host_at = [self._next_wait(at, int(sim.first[at])) for at in range(len(sim.ranks))]
        self.changed: set[int] = set()
        self.power, self.trace = sim.power, trace or PowerTrace.begin(len(sim.ranks))
        if sim.power is not None:
            clocks = sim.power.clocks
            self.draw, self.share, self.own = (column.tolist() for column in (sim.power.draw, sim.power.share, sim.power.own))
            self.slower, self.energy, self.load = (column.tolist() for column in (clocks.slower, clocks.energy, clocks.load))
            self.level, self.mean = (column.tolist() for column in (self.trace.level, self.trace.mean))
            self.work, self.charged, self.charge, self.spent = [0] * count, [0] * count, [0] * len(sim.ranks), [0] * len(sim.ranks)
            self.moves = sim.power.moves.tolist()
            self.both_since, self.both_ns = [NEVER] * len(sim.ranks), [0] * len(sim.ranks)
            self.changes = [(0, at, level) for at, level in enumerate(self.level)]
            self.next_tick = TICK_NS
            self.tail = sim.tail.tolist() if sim.tail is not None else [False] * count
            self.left_in_step = count - sum(self.tail)

    def run(self) -> tuple[Ints, Ints, Ints]:
        """Start, ready and end of every op instance; -1 for those that never end because ranks wait for each other."""
        for stream in range(len(self.fifo)):
            self._look(stream, 0)
        while True:
            self._settle()
            if self.power is not None:
                self._drop_stale()
            if not self.queue:
                self._store_trace()
                return tuple(np.array(column, np.int64) for column in (self.start, self.ready, self.end))  # type: ignore[return-value]
            if self.power is not None and self.left_in_step and self.next_tick <= self.queue[0][0]:
                self._tick()
                continue
            now, item, due = heapq.heappop(self.queue)
            self.now = now
            if due < 0:
                self._look(self.stream[item], now)
            elif self.end[item] < 0 and self.due[item] == due:
                self._finish(self._mates(item), now)

    def _mates(self, item: int) -> list[int]:
        """All op instances that run together with this one."""
        meet = self.meet[item]
        return [item] if meet < 0 else self.sim.mates_at(meet)

    def _look(self, stream: int, now: int) -> None:
        """Start the next op instance of a stream if it can start."""
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
        """Start a ready op instance together with its mates if all are ready; otherwise it is blocked."""
        mates = self._mates(item)
        meet, follow = self.meet[item], self.follow[item]
        is_short = meet >= 0 and (len(mates) < self.sim.meet_size[meet] or any(self.ready[mate] < 0 for mate in mates))
        if is_short or (follow >= 0 and self.start[follow] < 0):
            self.blocked[self.rank[item]].add(item)
            self.changed.add(self.rank[item])
            return
        for mate in mates:
            self.blocked[self.rank[mate]].discard(mate)
            self.start[mate] = self.since[mate] = now
            self.left[mate] = max(self.dur[k] for k in mates) * ONE
            self.running[self.rank[mate]].append(mate)
            self.changed.add(self.rank[mate])
        follower = self.followers.get(item, -1)
        if follow >= 0:
            self.left[item] = 0 if self.end[follow] >= 0 else NEVER
        elif self.power is not None:
            for mate in mates:
                self.work[mate] = self.left[mate]
        if follower >= 0 and self.ready[follower] >= 0:
            self._meet(follower, now)

    def _finish(self, mates: Sequence[int], now: int) -> None:
        for item in mates:
            if self.power is not None:
                self._charge(item, self.work[item])
                self.left_in_step -= not self.tail[item]
            self.end[item] = now
            self.running[self.rank[item]].remove(item)
            self.changed.add(self.rank[item])
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
        """Let the host of a rank go on after waits that are over."""
        end = int(self.sim.first[at + 1])
        while self.host_at[at] < end and self.end[self.awaits[self.host_at[at]]] >= 0:
            item = self.host_at[at]
            self.host_late[at] = max(self.host_late[at], self.end[self.awaits[item]] - self.issue[item])
            self.host_at[at] = self._next_wait(at, item + 1)

    def _next_wait(self, at: int, item: int) -> int:
        """The first op instance, from `item` on, after which the host waits; the index after the rank's last one if there is none."""
        end = int(self.sim.first[at + 1])
        return next((k for k in range(item, end) if self.awaits[k] >= 0), end)

    def _settle(self) -> None:
        """Set the pace of everything that runs on changed ranks, and of its mates."""
        changed: dict[int, list[int]] = {}
        if self.sim.both is not None:
            self._count_copying(self.sim.both)
        for at in sorted(self.changed):
            if self.power is not None:
                self._count_both(at)
            for item in self.running[at]:
                kind = self.kind[item]
                beside = sum(self._excess(item, other) for other in self.running[at] if other != item)
                self.stretch[item] = ONE + beside + (self.blocked_excess[kind] if self.blocked[at] else 0)
                if self.power is not None:
                    own, level = self.own[item], max(self.own[item], self.level[at])
                    self.stretch[item] += (self.share[item] * (self.slower[level] - self.slower[own])) >> 20
                mates = self._mates(item)
                changed[mates[0]] = mates
        self.changed.clear()
        for leader, mates in changed.items():
            if self.left[leader] == NEVER:
                continue
            self._repace(leader, -(-ONE * ONE // max(self.stretch[mate] for mate in mates)))

    def _count_copying(self, both: BothDirections) -> None:
        """Count the directions in which devices of each host copy. If a number changes, so does the pace of copies of both directions."""
        for at in sorted(self.changed):
            directions = len({self.way[self.kind[item]] for item in self.running[at]} & {TO_DEVICE, TO_HOST})
            if directions != self.directions[at]:
                host = both.host[at]
                self.num_copying[host] += int(both.devices[at]) * (directions - self.directions[at])
                self.directions[at] = directions
                self.changed |= {k for k, other in enumerate(both.host) if other == host and self.directions[k] == 2}

    def _excess(self, item: int, other: int) -> int:
        """By how much an op instance is stretched beside another."""
        computes_first = 0
        if self.side[item] != self.side[other]:
            computation, side = (other, item) if self.side[item] else (item, other)
            computes_first = int(self.start[computation] <= self.ready[side] + START_NS)
        kind, its = self.kind[item], self.kind[other]
        found: int = self.excess[computes_first][kind][its]
        if self.sim.both is not None and self.way[kind] + self.way[its] == TO_DEVICE + TO_HOST:
            found += self.both_excess[self.num_copying[self.sim.both.host[self.rank[item]]]][self.way[kind] - 1]
        return found

    def _repace(self, leader: int, pace: int) -> None:
        """Subtract the work done at the old pace, and compute the end at the new one."""
        if pace == self.pace[leader]:
            return
        self.left[leader] -= self.pace[leader] * (self.now - self.since[leader])
        self.since[leader], self.pace[leader] = self.now, pace
        self.due[leader] = self.now + max(0, -(-self.left[leader] // pace))
        heapq.heappush(self.queue, (self.due[leader], leader, self.due[leader]))

    # -- power ------------------------------------------------------------------------------------------------------

    def _drop_stale(self) -> None:
        """Remove obsolete events from the front of the queue."""
        while self.queue:
            _, item, due = self.queue[0]
            happens = self.ready[item] < 0 if due < 0 else self.end[item] < 0 and self.due[item] == due
            if happens:
                return
            heapq.heappop(self.queue)

    def _charge(self, item: int, done: int) -> None:
        """Add the energy of the work done since the last count, at the clock during that time; `done` is all work done so far."""
        at = self.rank[item]
        highest = (((done - self.charged[item]) >> 10) * self.draw[item]) >> 10
        self.charge[at] += at_clock(highest, self.energy[max(self.own[item], self.level[at])])
        self.charged[item] = done

    def _count_both(self, at: int) -> None:
        """Add the time for which a communication has run beside computation since the last count; restart the count if one still does."""
        if self.both_since[at] != NEVER:
            self.both_ns[at] += self.now - self.both_since[at]
        runs_both = any(self.moves[item] for item in self.running[at]) and not all(self.side[item] for item in self.running[at])
        self.both_since[at] = self.now if runs_both else NEVER

    def _charge_both(self, at: int) -> None:
        """Add the energy of the time counted by `_count_both`, at the clock during that time."""
        assert self.power is not None
        self._count_both(at)
        self.charge[at] += at_clock(self.power.beside_mw * self.both_ns[at], self.energy[self.level[at]])
        self.both_ns[at] = 0

    def _spend(self, at: int) -> int:
        """Return, and reset, the energy above static that a rank has spent since the last tick."""
        spent = self.charge[at]
        self.charge[at] = 0
        self.spent[at] += spent
        return spent

    def _tick(self) -> None:
        """Run the limiter of each rank on the energy spent since the last tick."""
        assert self.power is not None
        self.now = self.next_tick
        self.next_tick += TICK_NS
        for at in range(len(self.sim.ranks)):
            for item in self.running[at]:
                leader = self._mates(item)[0]
                if self.left[leader] != NEVER:
                    left = self.left[leader] - self.pace[leader] * (self.now - self.since[leader])
                    self._charge(item, self.work[item] - min(self.work[item], max(0, left)))
            self._charge_both(at)
            waited = self.power.waiting_mw * len(self.blocked[at]) * TICK_NS
            self.charge[at] += at_clock(waited, self.energy[self.level[at]])
            room = self.power.limit_mw - self.power.static_mw
            self.mean[at], level = limiter(self.mean[at], self.level[at], self._spend(at), self.power.response, room, self.load)
            if level != self.level[at]:
                self.level[at] = level
                self.changes.append((self.now, at, level))
                self.changed.add(at)

    def _store_trace(self) -> None:
        """Write the state of the limiters to the trace."""
        if self.power is None:
            return
        for at in range(len(self.sim.ranks)):
            self._charge_both(at)
            self._spend(at)
        for column, found in ((self.trace.level, self.level), (self.trace.mean, self.mean), (self.trace.spent, self.spent)):
            column[:] = found
        self.trace.changes = np.array(self.changes, np.int64).T


def issue_times(sim: SimInput, end: Ints) -> Ints:
    """When each op instance was issued: the host's own time, plus its delay after each of its waits."""
    issue = sim.issue.copy()
    for at in range(len(sim.ranks)):
        waits = _waits(sim, at)
        late = np.maximum.accumulate(np.maximum(0, end[sim.awaits[waits]] - sim.issue[waits]))
        first = np.r_[waits + 1, sim.first[at + 1]]
        issue[first[0] : first[-1]] += np.repeat(late, np.diff(first))
    return issue


def _waits(sim: SimInput, at: int) -> Ints:
    """Op instances of a rank after which its host waits."""
    found: Ints = int(sim.first[at]) + np.flatnonzero(sim.awaits[sim.first[at] : sim.first[at + 1]] >= 0)
    return found


def host_ends(sim: SimInput, times: Times) -> Ints:
    """When the host of each rank has issued all of its jobs and could begin the next step. `[num_ranks]`"""
    ends = sim.host_end.copy()
    for at in range(len(sim.ranks)):
        waits = _waits(sim, at)
        ends[at] += max(0, int((times.end[sim.awaits[waits]] - sim.issue[waits]).max(initial=0)))
    return ends


class RankColumns(NamedTuple):
    """Op instances of one rank in issue order, numbered from 0: columns of `SimInput` and `Times`.

    `split_rank` and its helpers take it and use the subset of Python that numba compiles, so that both engines share one definition.
    """

    stream: Ints
    side: Any
    awaits: Ints
    dep_first: Ints
    dep: Ints
    issue: Ints
    ready: Ints
    start: Ints
    end: Ints


def columns_of(sim: SimInput, times: Times, at: int) -> RankColumns:
    """The columns of the rank with index `at`."""
    mine = slice(int(sim.first[at]), int(sim.first[at + 1]))
    deps = slice(int(sim.dep_first[mine.start]), int(sim.dep_first[mine.stop]))
    span_ns = NEVER if sim.tail is None else span_of(sim, times, host_ends(sim, times))
    return RankColumns(
        sim.stream[mine] - sim.first_stream[at],
        sim.side[mine],
        np.where(sim.awaits[mine] >= 0, sim.awaits[mine] - mine.start, -1),
        sim.dep_first[mine.start : mine.stop + 1] - deps.start,
        sim.dep[deps] - mine.start,
        times.issue[mine],
        np.minimum(times.ready[mine], span_ns),
        np.minimum(times.start[mine], span_ns),
        np.minimum(times.end[mine], span_ns),
    )


def split_rank(rank: RankColumns, span_ns: int, host_end: int) -> tuple[int, int, int, int, int, int]:
    """Compute, exposed, hidden, bubble, host and idle time of one rank, as defined in this module's docstring.

    Cost O(items log items).
    """
    gap_from, gap_to, gap_next, compute = gaps(rank, span_ns)
    begin, chain = waited_for(rank, waiters(rank), gap_from, gap_to)
    syncs = np.flatnonzero(rank.awaits >= 0)
    synced_at = rank.issue[syncs]
    exposed, host, last = 0, 0, len(gap_from) - 1
    for gap in range(last + 1):
        low, high = gap_from[gap], gap_to[gap]
        busy = min(high, host_end if gap == last else rank.issue[gap_next[gap]])
        if begin[gap] >= 0 or busy > low:
            parts = _split_gap(rank, low, high, busy, begin[gap], chain, syncs, synced_at)
            exposed += parts[0]
            host += parts[1]
    spans = np.empty((len(rank.start), 2), np.int64)
    for item in range(len(rank.start)):  # numba needs 2 s to compile the assignment of whole columns
        spans[item, 0], spans[item, 1] = rank.start[item], rank.end[item]
    running = covered(spans)
    hidden = compute + covered(spans[rank.side]) - running
    return compute, exposed, hidden, span_ns - compute - exposed - host, host, span_ns - running


def waiters(rank: RankColumns) -> Ints:
    """Start of the earliest compute op that waits for each op instance; NEVER if there is none."""
    stream, side, awaits, start = rank.stream, rank.side, rank.awaits, rank.start
    dep_first, dep = rank.dep_first, rank.dep
    count, later = len(start), NEVER
    waiter = np.full(count, NEVER, np.int64)
    after = np.full(int(stream.max()) + 1 if count else 1, NEVER, np.int64)
    for item in range(count - 1, -1, -1):
        if awaits[item] >= 0:
            waiter[awaits[item]] = min(waiter[awaits[item]], later)
        mine = min(waiter[item], after[stream[item]])
        waiter[item] = mine
        seen = mine if side[item] else start[item]
        after[stream[item]] = seen
        later = min(later, seen)
        for k in range(dep_first[item], dep_first[item + 1]):
            waiter[dep[k]] = min(waiter[dep[k]], seen)
    return waiter


def gaps(rank: RankColumns, span_ns: int) -> tuple[Ints, Ints, Ints, int]:
    """Gaps between compute ops (start, end, and the op that ends the gap, or -1 for the gap at the end of the span); and the compute
    time."""
    side, start, end = rank.side, rank.start, rank.end
    gap_from, gap_to, gap_next = np.empty((3, len(start) + 1), np.int64)
    num_gaps, free, compute = 0, 0, 0
    for item in np.argsort(start, kind="mergesort"):
        if side[item]:
            continue
        if start[item] > free:
            gap_from[num_gaps], gap_to[num_gaps], gap_next[num_gaps] = free, start[item], item
            num_gaps += 1
        compute += max(0, end[item] - max(free, start[item]))
        free = max(free, end[item])
    gap_from[num_gaps], gap_to[num_gaps], gap_next[num_gaps] = free, span_ns, -1
    num_gaps += 1
    return gap_from[:num_gaps], gap_to[:num_gaps], gap_next[:num_gaps], compute


def waited_for(rank: RankColumns, waiter: Ints, gap_from: Ints, gap_to: Ints) -> tuple[Ints, Ints]:
    """Communications and copies that the op after each gap waits for; the last gap has all that run after the last compute op.

    Returned as linked lists: the first link of each gap, and the next link of each link. The op instance of a link is `link // 2`.
    """
    side, end, last = rank.side, rank.end, len(gap_from) - 1
    begin = np.full(last + 1, -1, np.int64)
    chain = np.full(2 * len(end), -1, np.int64)
    for item in range(len(end)):
        if not side[item]:
            continue
        gap = np.searchsorted(gap_to[:last], waiter[item])
        if gap < last and gap_to[gap] == waiter[item] and end[item] > gap_from[gap]:
            chain[2 * item] = begin[gap]
            begin[gap] = 2 * item
        if end[item] > gap_from[last]:
            chain[2 * item + 1] = begin[last]
            begin[last] = 2 * item + 1
    return begin, chain


def _split_gap(rank: RankColumns, low: int, high: int, busy: int, link: int, chain: Ints, syncs: Ints, synced_at: Ints) -> tuple[int, int]:
    """Exposed and host time of a gap; for the arguments see `gap_spans`."""
    n, spans = gap_spans(rank, low, high, busy, link, chain, syncs, synced_at)
    return covered(spans[:n]), covered(spans) - covered(spans[:-1])


def gap_spans(rank: RankColumns, low: int, high: int, busy: int, link: int, chain: Ints, syncs: Ints, synced_at: Ints) -> tuple[int, Any]:
    """What happens in the gap of a rank from `low` to `high`, as a number `n` and intervals `[2 n + host waits + 1, 2]`.

    The first n intervals are the runs of what the op after the gap waits for, the next n its waits at a rendezvous; then follow the waits
    of the host, and last the time in which the host is busy on the way to issuing that op, which lasts until `busy`.

    `link` and `chain` are the linked list of what that op waits for, as returned by `waited_for`; `syncs` are the op instances after which
    the host waits, and `synced_at` the times at which these are issued.
    """
    n, at = 0, link
    while at >= 0:
        n, at = n + 1, chain[at]
    first_sync: Any = 0
    last_sync: Any = 0
    if busy > low:
        first_sync = max(0, np.searchsorted(synced_at, low) - 1)
        last_sync = max(first_sync, np.searchsorted(synced_at, busy))
    # Rows: n runs, n waits at a rendezvous, the waits of the host, the time for which the host is busy.
    spans = np.empty((2 * n + last_sync - first_sync + 1, 2), np.int64)
    k, at = 0, link
    while at >= 0:
        item = at // 2
        spans[k, 0], spans[k, 1] = max(low, rank.start[item]), min(high, rank.end[item])
        spans[n + k, 0], spans[n + k, 1] = max(low, rank.ready[item]), min(high, rank.start[item])
        k, at = k + 1, chain[at]
    for k in range(last_sync - first_sync):
        item = syncs[first_sync + k]
        spans[2 * n + k, 0], spans[2 * n + k, 1] = max(low, rank.issue[item]), min(busy, rank.end[rank.awaits[item]])
    spans[-1, 0], spans[-1, 1] = low, busy
    return n, spans


def covered(spans: Any) -> int:
    """Length of the union of intervals `[n, 2]`; an interval that ends before it starts counts as empty."""
    total, upto = 0, -1
    for k in np.argsort(spans[:, 0].copy(), kind="mergesort"):  # of the layout that `gaps` sorts: numba compiles one sort
        low, high = max(spans[k, 0], upto), spans[k, 1]
        if high > low:
            total += high - low
            upto = high
    return total


SPLIT_HELPERS = (covered, waiters, gaps, waited_for, gap_spans, _split_gap)
"""The functions that `split_rank` calls; the compiled engine registers them with numba."""
