"""Waits of the host for the device, so that memory is not allocated for work that the device reaches much later.

On a GPU, memory is allocated when an op is issued and freed when its last reader is issued; if that reader runs on another stream
than the allocation, it is freed when the reader has completed (docs/gpu-place.md, rules 4 and 7). A host that runs ahead
therefore keeps such blocks of all micro-batches alive at once. So the host waits from time to time for an op that it issued a little
earlier. The device still has work when the host continues, so these waits cost no time. In jobs that are too short for that, the
host waits at the end of the job for its last computation; for a short time the device then has no work.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping
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
from interlace.ir.per_ops import once_per_ops, once_per_plan_and
from interlace.ir.target import GPU, Target
from interlace.ir.waits import computing, last_of
from interlace.scheduler.host_waits.waits_at_peaks import waits_at_peaks
from interlace.scheduler.memory.live import Placed, Profile, lifetimes, order_peak, placed_on
from interlace.scheduler.simulate.arrays import Options, SimInput
from interlace.scheduler.simulate.lower import awaits, lower, wait_ns
from interlace.scheduler.simulate.simulator import Times, device_memory

LOOK_BACK = 50
"""Distance to the awaited op, in computation time, as a multiple of the host's time for one wait (about 1.7 ms on an H200): enough for the
host to issue what follows."""
SPACING = (16, 8, 4, 2, 1)
"""Spacings of waits that are tried, as multiples of that distance. The widest with which the peak is low enough is used."""
NEAR = 4
"""If no spacing is wide enough, the widest is used whose peak is at most `run_ahead_bytes / NEAR` above the lowest."""
PEAKS = 4
"""Most rounds in which waits are added at the peak; each round changes when everything after its waits is issued."""


HostSync = tuple[OpInstance, OpInstance]
"""After it has issued the first op instance, the host waits for the second; both are in the same job."""
Waits = dict[str, tuple[HostSync, ...]]
"""Waits by name of the job."""
Reason = Literal["", "no-side-work", "few-side-bytes", "run-ahead-allowed", "no-wait-helps", "not-simulated"]


@dataclass(frozen=True, slots=True)
class HostSyncs:
    """The chosen waits and their effect, simulated for this rank alone with its peers always ready.

    Attributes:
        waits: The chosen waits.
        serial_bytes: Peak if every op completed before the next one is issued.
        free_bytes, throttled_bytes: Peak on a GPU without waits of the host, and with the chosen ones. The simulated host issues in no
            time, so that it runs ahead as far as it can.
        reason: Why no waits were chosen, or why these were chosen without a simulation; empty if waits lower the peak.
        side_bytes: Bytes of all blocks that side streams use, if that is the reason for no waits.
        error: Why the rank could not be simulated.
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
    """Waits at the end of each job that computes an output of the step (a loss), for the last such computation: there Paddle fetches it."""
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
    """The program with these waits added to its own. If both have a wait after the same op instance, its own is kept."""
    jobs = tuple(
        msgspec.structs.replace(job, host_waits=tuple({**dict(waits.get(job.name, ())), **dict(job.host_waits)}.items()))
        for job in program.jobs
    )
    return msgspec.structs.replace(program, jobs=jobs)


def plan_host_syncs(program: Program, cost: Costs, run_ahead_bytes: int, memory_limit: int | None = None) -> HostSyncs:
    """Waits with the widest spacing at which run-ahead raises the peak by at most `run_ahead_bytes`.

    If no spacing achieves that, the widest is taken whose peak is near the lowest. If the peak is then above `memory_limit` (bytes), waits
    are added at the peak (`scheduler/host_waits/waits_at_peaks.py`). Last, waits at the end of the step that do not lower the peak are
    dropped. If the rank cannot be simulated, the host waits at the end of each job.

    Cost: one pass over the storages if side streams use few bytes; otherwise one simulation of the rank per spacing and round, plus
    one to about 2 log2 of the number of dropped waits.
    """
    names = jobs_with_side_work(program)
    if not names:
        return HostSyncs(reason="no-side-work")
    most = _most_side_bytes(program)
    if most <= run_ahead_bytes and (memory_limit is None or order_peak(program) + most <= memory_limit):
        return HostSyncs(reason="few-side-bytes", side_bytes=most)
    return _searched(program, (cost, frozenset(names), run_ahead_bytes, memory_limit))


@once_per_plan_and
def _searched(program: Program, asked: tuple[Costs, frozenset[str], int, int | None]) -> HostSyncs:
    cost, names, run_ahead_bytes, memory_limit = asked
    try:
        return _Search(program, cost, names).run(run_ahead_bytes, memory_limit)
    except PlanError as error:
        return HostSyncs(sync_at_job_ends(program, names), reason="not-simulated", error=str(error))


def most_that(holds: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` for which `holds`, which is false from some number on; 0 if it is false for 1. The number is mostly
    small, so those tried double first.

    >>> [most_that(lambda number: number <= most, 9) for most in range(11)]
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9]
    """
    known, tried = 0, 1
    while tried <= limit and holds(tried):
        known, tried = tried, 2 * tried
    return bisect_left(range(min(tried, limit + 1)), True, lo=known + 1, key=lambda number: not holds(number)) - 1


def gpu_peak(program: Program, cost: Costs, target: Target = GPU) -> int:
    """Peak of live device bytes on a GPU whose host issues in no time, with the rank's peers always ready. Raises PlanError if the rank
    cannot be simulated."""
    return gpu_memory(program, cost, target).peak()


def gpu_memory(program: Program, cost: Costs, target: Target = GPU) -> Profile:
    """Memory of a rank on a GPU whose host issues in no time, with the rank's peers always ready. Raises PlanError if the rank cannot be
    simulated."""
    return device_memory(_fast_host(_alone(program, cost, target)), target)[1]


def _most_side_bytes(program: Program) -> int:
    """Device bytes of all blocks that any op on a side stream reads or writes, over all micro-batches."""
    table, count = lifetimes(program), max(1, program.pipeline.num_micro_batches)
    stream = {op.id: stream_of(op) for op in program.ops}
    away = np.array([stream[op_id] != "" for op_id in table.reader.tolist()], np.bool_)
    rows = np.logical_or.reduceat(away, table.reader_first[:-1]) if len(table.size) else np.empty(0, np.bool_)
    return int(count * table.size[rows & ~table.pinned].sum())


@dataclass(frozen=True, slots=True)
class _Alone:
    """One rank whose host issues in no time and whose peers are always ready.

    Attributes:
        program, sim, placed: The rank without further waits, and the instances of its storages.
        blocking: Whether the host waits for an op instance right after issuing it. `[num_items]`
    """

    program: Program
    sim: SimInput
    blocking: Flags
    placed: Placed

    def peak(self, waits: Waits) -> int:
        """Peak of live device bytes with these waits."""
        return self._run(waits)[1].peak("device")

    def with_waits_at_peaks(self, waits: Waits, peak: int, limit_bytes: int) -> tuple[int, Waits]:
        """Add waits where memory is above the limit, as long as they lower the peak; returns the new peak and all waits."""
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
        """Drop last waits while the peak does not exceed the given one; returns the new peak and the remaining waits.

        After the last wait the host runs ahead and prepares the next step while the device finishes this one. What the next step
        allocates meanwhile is not counted, as a wait at a peak of the next step also waits for the end of this one.
        """
        every = [(job.name, wait) for job in self.program.jobs for wait in waits.get(job.name, ())]
        peaks = {0: peak}

        def without(dropped: int) -> Waits:
            fewer: Waits = {job.name: () for job in self.program.jobs}
            for name, wait in every[: len(every) - dropped]:
                fewer[name] = (*fewer[name], wait)
            return fewer

        def is_enough(dropped: int) -> bool:
            peaks[dropped] = self.peak(without(dropped))
            return peaks[dropped] <= peak

        dropped = most_that(is_enough, len(every))
        return peaks[dropped], without(dropped) if dropped else waits

    def _run(self, waits: Waits) -> tuple[Times, Profile]:
        there = awaits(with_host_syncs(self.program, waits), self.blocking)
        return device_memory(dataclasses.replace(self.sim, awaits=there), GPU, self.placed)

    def _joined(self, waits: Waits, more: Mapping[int, int]) -> Waits:
        """Merge waits with others given as indices in the issue order (after -> awaited). Of two after the same op instance, the one that
        awaits the later op instance is kept."""
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
        """Peak and waits with the widest sufficient spacing, and the reason if there are no waits."""
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
        """For each op instance, the last computation of its job that is at least `back_ns` of computation time earlier; -1 if there is
        none, or if the job is not in `names`. `[num_items]`"""
        can = np.where(np.isin(items_of(self.program)[:, 0], [*computing(self.program)]), np.arange(len(clock)), -1)
        found = np.full(len(clock), -1, np.int64)
        for job, (at, end) in zip(self.program.jobs, pairwise(job_bounds(self.program)), strict=True):
            if job.name in self.names:
                last = np.maximum.accumulate(can[at:end])
                count = np.searchsorted(clock[at:end], clock[at:end] - back_ns, side="right")
                found[at:end] = np.where(count > 0, last[count - 1], -1)
        return found

    def _waits_looking_back(self, clock: Ints, targets: Ints, apart_ns: int) -> Waits:
        """Waits for the targets, each at least `apart_ns` of computation time after the previous one."""
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
    """Simulation input of a rank whose peers are always ready, without the power limit: alone it would have other clocks than in the
    step."""
    return lower([program], cost, Options.of(target, peers_ready=True, power=False))


def _fast_host(sim: SimInput) -> SimInput:
    """The same arrays with a host that issues in no time."""
    return dataclasses.replace(sim, issue=np.zeros_like(sim.issue), host_end=np.zeros_like(sim.host_end))
