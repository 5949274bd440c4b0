"""Waits of the host for the device, so that memory is not allocated for work that the device reaches much later.

On a GPU memory is allocated when an op is issued and freed when its last reader is issued; if that reader runs on another stream
than the allocation, it is freed when the reader has completed (docs/gpu-place.md, rules 4 and 7). A host that runs ahead
therefore keeps such blocks of all micro-batches alive at once. So it waits from time to time for an op that it issued a little
earlier: the device still has work when the host goes on, and the waits cost no time. In jobs that are too short for that, the
host waits at the end of the job for its last computation; then nothing is issued for a short time.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import msgspec
import numpy as np

from interlace.cost_model import Costs
from interlace.errors import PlanError
from interlace.ir import Graph, Op, OpInstance, Program
from interlace.ir.arrays import Flags, Ints
from interlace.ir.copies import items_of, job_bounds
from interlace.ir.kinds import SHADOW_OUTPUT, stream_of
from interlace.ir.per_ops import once_per_ops
from interlace.ir.target import GPU, Target
from interlace.ir.waits import computing, last_of
from interlace.scheduler.host_waits.waits_at_peaks import waits_at_peaks
from interlace.scheduler.memory.live import Placed, Profile, lifetimes, order_peak, placed_on
from interlace.scheduler.simulate.arrays import Options, SimInput
from interlace.scheduler.simulate.lower import awaits, lower, wait_ns
from interlace.scheduler.simulate.simulator import Times, device_memory

LOOK_BACK = 50
"""The awaited op lies back this many times the host's time for one wait (about 1.7 ms on an H200): enough to issue what follows."""
SPACING = (16, 8, 4, 2, 1)
"""Distances between waits that are tried, as multiples of that time; the widest under which the peak is low enough is used."""
NEAR = 4
"""If there is no such distance: the widest whose peak is at most `run_ahead_bytes / NEAR` above the lowest peak."""
PEAKS = 4
"""Times at most that waits are added at the peak: each changes when all that follows is issued."""


HostSync = tuple[OpInstance, OpInstance]
"""After the first op instance the host waits for the second; both are in one job."""
Waits = dict[str, tuple[HostSync, ...]]
"""By job."""
Reason = Literal["", "no-side-work", "few-side-bytes", "run-ahead-allowed", "no-wait-helps", "not-simulated"]


@dataclass(frozen=True, slots=True)
class HostSyncs:
    """The chosen waits and their effect, simulated for this rank alone with its peers always ready.

    Attributes:
        serial_bytes: Peak if every op completed before the next is issued.
        free_bytes, throttled_bytes: Peak on a GPU without waits of the host, and with the chosen ones; the host issues in no time,
            so that it runs ahead as far as it can.
        reason: Why these waits, or none, were chosen; empty where waits lower the peak.
        side_bytes: Of all blocks that side streams use, where these are few.
        error: Why the rank cannot be simulated.
    """

    waits: Waits = field(default_factory=dict)
    serial_bytes: int = 0
    free_bytes: int = 0
    throttled_bytes: int = 0
    reason: Reason = ""
    side_bytes: int = 0
    error: str = ""

    @property
    def count(self) -> int:
        """Number of waits in a step."""
        return sum(map(len, self.waits.values()))


def jobs_with_side_work(program: Program) -> list[str]:
    """Jobs, other than the last, with operations on side streams that read or write memory of one micro-batch."""
    beside = _beside(program)
    return [job.name for job in program.jobs[:-1] if any(op_id in beside for op_id, _ in job.items) and last_of(job, computing(program))]


def sync_at_outputs(program: Program) -> Waits:
    """Waits at the end of each job that computes an output of the step, for the last one: there Paddle fetches it (a loss)."""
    graph = Graph(program)
    outputs = computing(program) & {graph.producer.get(op.operands[0]) for op in program.ops if op.name == SHADOW_OUTPUT}
    return {job.name: ((job.items[-1], item),) for job in program.jobs if (item := last_of(job, outputs)) is not None}


def sync_at_job_ends(program: Program, names: Collection[str]) -> Waits:
    """Waits at the end of each of these jobs for its last computation."""
    found = ((job, last_of(job, computing(program))) for job in program.jobs if job.name in names)
    return {job.name: ((job.items[-1], item),) for job, item in found if item is not None}


@once_per_ops
def _beside(program: Program) -> set[int]:
    """Operations on side streams that read or write memory of one micro-batch."""
    graph = Graph(program)
    return {op.id for op in program.ops if _uses_memory_beside(graph, op)}


def _uses_memory_beside(graph: Graph, op: Op) -> bool:
    touched = (graph.values[v] for v in (*graph.reads(op), *op.results))
    return bool(stream_of(op)) and any(value.memory == "device" and not value.persistable for value in touched)


def with_host_syncs(program: Program, waits: Waits) -> Program:
    """The program with these waits, and those that it has; of two behind one op instance the one that it has."""
    jobs = tuple(
        msgspec.structs.replace(job, host_waits=tuple({**dict(waits.get(job.name, ())), **dict(job.host_waits)}.items()))
        for job in program.jobs
    )
    return msgspec.structs.replace(program, jobs=jobs)


def plan_host_syncs(program: Program, cost: Costs, run_ahead_bytes: int, memory_limit: int | None = None) -> HostSyncs:
    """The widest spacing of waits under which run-ahead raises the peak by no more than `run_ahead_bytes`.

    If none does, the widest whose peak is near the lowest. Where the peak is then above `memory_limit`, waits are added at the peak
    (`scheduler/host_waits/waits_at_peaks.py`). Last, waits behind the last that the peak needs are left out. Cost: one pass over the
    storages if these are small, otherwise a simulation of the rank for each spacing that is tried, and log2 of the waits more.
    """
    names = jobs_with_side_work(program)
    if not names:
        return HostSyncs(reason="no-side-work")
    most = _most_side_bytes(program)
    if most <= run_ahead_bytes and (memory_limit is None or order_peak(program) + most <= memory_limit):
        return HostSyncs(reason="few-side-bytes", side_bytes=most)
    try:
        return _Search(program, cost, frozenset(names)).run(run_ahead_bytes, memory_limit)
    except PlanError as error:
        return HostSyncs(sync_at_job_ends(program, names), reason="not-simulated", error=str(error))


def gpu_peak(program: Program, cost: Costs, target: Target = GPU) -> int:
    """Peak of live device bytes on a GPU whose host issues in no time; the rank's peers are always ready."""
    return device_memory(_fast_host(_alone(program, cost, target)), target)[1].peak()


def _most_side_bytes(program: Program) -> int:
    """Bytes of all blocks that any op on a side stream reads or writes."""
    table, count = lifetimes(program), max(1, program.pipeline.num_micro_batches)
    stream = {op.id: stream_of(op) for op in program.ops}
    away = np.array([stream[op_id] != "" for op_id in table.reader.tolist()], np.bool_)
    rows = np.logical_or.reduceat(away, table.reader_first[:-1]) if len(table.size) else np.empty(0, np.bool_)
    return int(count * table.size[rows & ~table.pinned].sum())


@dataclass(frozen=True, slots=True)
class _Alone:
    """One rank whose host issues in no time and whose peers are always ready.

    Attributes:
        program, sim, placed: Without further waits; where its blocks are.
        blocking: Behind which op instances the host waits for these themselves. `[num_items]`
    """

    program: Program
    sim: SimInput
    blocking: Flags
    placed: Placed

    def peak(self, waits: Waits) -> int:
        """Peak of live device bytes with these waits."""
        return self._run(waits)[1].peak("device")

    def with_waits_at_peaks(self, waits: Waits, peak: int, limit_bytes: int) -> tuple[int, Waits]:
        """The peak, and waits with others at what is above the limit, as long as they lower it."""
        can = np.isin(items_of(self.program)[:, 0], [*computing(self.program)])
        for _ in range(PEAKS):
            times, memory = self._run(waits)
            ended = self.placed.lives(times.issue, times.issue, times.end).free_at
            more = self._joined(waits, waits_at_peaks(self.program, times, memory.lives, ended, self.placed, can, limit_bytes))
            lower = self.peak(more)
            if lower >= peak:
                break
            peak, waits = lower, more
            if peak <= limit_bytes:
                break
        return peak, waits

    def without_last_waits(self, waits: Waits, peak: int) -> tuple[int, Waits]:
        """The peak, not above the one given, and the waits up to the last that it needs.

        Behind that the host runs ahead, and prepares the next step while the device ends this one. What the next step allocates meanwhile
        is not counted: a wait at a peak of it waits for the end of this one, too.
        """
        every = [(job.name, wait) for job in self.program.jobs for wait in waits.get(job.name, ())]
        kept, found, fewest, most = waits, peak, 0, len(every)
        while fewest < most:
            count = (fewest + most) // 2
            fewer: Waits = {job.name: () for job in self.program.jobs}
            for name, wait in every[:count]:
                fewer[name] = (*fewer[name], wait)
            if (lower := self.peak(fewer)) <= peak:
                kept, found, most = fewer, lower, count
            else:
                fewest = count + 1
        return found, kept

    def _run(self, waits: Waits) -> tuple[Times, Profile]:
        there = awaits(with_host_syncs(self.program, waits), self.blocking)
        return device_memory(dataclasses.replace(self.sim, awaits=there), GPU, self.placed)

    def _joined(self, waits: Waits, more: Mapping[int, int]) -> Waits:
        """Waits, and others as indices in the issue order; of two behind one op instance that for the later one."""
        found = {}
        for job, (first, end) in zip(self.program.jobs, pairwise(job_bounds(self.program)), strict=True):
            at = {item: k for k, item in enumerate(job.items)}
            mine = {at[after]: at[awaited] for after, awaited in waits.get(job.name, ())}
            for k in range(first, end):
                if k in more:
                    mine[k - first] = max(mine.get(k - first, -1), more[k] - first)
            found[job.name] = tuple((job.items[after], job.items[awaited]) for after, awaited in sorted(mine.items()))
        return found


@dataclass(slots=True)
class _Search:
    """Tries the spacings of waits, widest first."""

    program: Program
    cost: Costs
    names: frozenset[str]

    def run(self, run_ahead_bytes: int, memory_limit: int | None) -> HostSyncs:
        free_sim = _alone(self.program, self.cost, GPU)
        blocking = free_sim.awaits == np.arange(len(free_sim.awaits))
        alone = _Alone(self.program, _fast_host(free_sim), blocking, placed_on(self.program, free_sim.stream, GPU))
        serial, free = order_peak(self.program), alone.peak({})
        best, found, reason = self._spaced(alone, free_sim, serial, free, run_ahead_bytes)
        if memory_limit is not None and best > max(serial, memory_limit):
            best, found = alone.with_waits_at_peaks(found, best, max(serial, memory_limit))
        best, found = alone.without_last_waits(found, best)
        return HostSyncs(found, serial, free, best, "" if found else reason)

    def _spaced(self, alone: _Alone, free_sim: SimInput, serial: int, free: int, run_ahead_bytes: int) -> tuple[int, Waits, Reason]:
        """The peak with the widest spacing that will do, its waits, and why there are none."""
        if free <= serial + run_ahead_bytes:
            return free, {}, "run-ahead-allowed"
        tried: list[tuple[int, Waits]] = [(free, {})]
        for waits in self._waits_to_try(free_sim):
            tried.append((alone.peak(waits), waits))
            if tried[-1][0] <= serial + run_ahead_bytes:
                break
        least = min(peak for peak, _ in tried)
        best, found = next((peak, waits) for peak, waits in tried if peak <= max(least + run_ahead_bytes // NEAR, serial))
        return best, found, "no-wait-helps"

    def _waits_to_try(self, sim: SimInput) -> Iterator[Waits]:
        back_ns = LOOK_BACK * max(1, wait_ns(self.program, self.cost))
        clock = np.cumsum(np.where(sim.side, 0, sim.dur))
        targets = self._targets(clock, back_ns)
        for spacing in SPACING:
            yield self._waits_looking_back(clock, targets, spacing * back_ns)
        yield sync_at_job_ends(self.program, self.names)

    def _targets(self, clock: Ints, back_ns: int) -> Ints:
        """For each op instance of the jobs, the last computation of its job that lies `back_ns` of computation time back; -1 for none."""
        can = np.where(np.isin(items_of(self.program)[:, 0], [*computing(self.program)]), np.arange(len(clock)), -1)
        found = np.full(len(clock), -1, np.int64)
        for job, (at, end) in zip(self.program.jobs, pairwise(job_bounds(self.program)), strict=True):
            if job.name in self.names:
                last = np.maximum.accumulate(can[at:end])
                count = np.searchsorted(clock[at:end], clock[at:end] - back_ns, side="right")
                found[at:end] = np.where(count > 0, last[count - 1], -1)
        return found

    def _waits_looking_back(self, clock: Ints, targets: Ints, apart_ns: int) -> Waits:
        """Waits for the targets, each at least `apart_ns` of computation time after the last."""
        can = np.flatnonzero(targets >= 0)
        when, chosen, at = clock[can], [], int(np.searchsorted(clock[can], apart_ns))
        while at < len(can):
            chosen.append(int(can[at]))
            at = max(at + 1, int(np.searchsorted(when, when[at] + apart_ns)))
        found: Waits = {}
        for job, (first, end) in zip(self.program.jobs, pairwise(job_bounds(self.program)), strict=True):
            mine = chosen[bisect_left(chosen, first) : bisect_left(chosen, end)]
            found[job.name] = tuple((job.items[k - first], job.items[int(targets[k]) - first]) for k in mine)
        return found


def _alone(program: Program, cost: Costs, target: Target) -> SimInput:
    """A rank whose peers are always ready; without the limit of power, as it does not have the clocks of the whole step then."""
    return lower([program], cost, Options.of(target, peers_ready=True, power=False))


def _fast_host(sim: SimInput) -> SimInput:
    """The same arrays with a host that issues in no time."""
    return dataclasses.replace(sim, issue=np.zeros_like(sim.issue), host_end=np.zeros_like(sim.host_end))
