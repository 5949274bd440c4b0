"""Where the host waits for the device, so that memory is not taken for work that the device is far from.

On a GPU memory is taken when an op is issued and goes back when its last reader is; a block whose last reader runs on
another stream than its giver stays until that reader is over (docs/gpu-place.md, rules 4 and 7). A host that runs ahead hence
holds such blocks of all micro-batches at once. It is therefore stopped now and then until the device has come close. What it
waits for lies a little back, so that the device still has work when the host goes on, and the waits cost no time; in jobs that
are too short for that it waits for the job's last computation at its end, at the price of a gap in which nothing is issued.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from interlace.cost_model import Costs
from interlace.errors import PlanError
from interlace.ir import Graph, Op, Program
from interlace.ir.kinds import stream_of
from interlace.ir.waits import computes, last_computation
from interlace.scheduler.memory.live import in_order, lifetimes
from interlace.scheduler.simulate.arrays import Options, SimInput
from interlace.scheduler.simulate.lower import awaits, lower, wait_ns
from interlace.scheduler.simulate.simulator import run
from interlace.scheduler.target import GPU
from interlace.units import ms, ms_figure, size

LOOK_BACK = 50
"""A wait looks back this many times the host's own time for a wait (on an H200 about 1 ms): enough to issue what follows."""
SPACING = (16, 8, 4, 2, 1)
"""Waits stand apart by a multiple of what they look back; the widest spacing that keeps memory is taken."""
NEAR = 4
"""Where no spacing keeps the peak, one is as good as the best within this part of `run_ahead_bytes`."""


Wait = tuple[tuple[int, int], tuple[int, int]]
"""Behind the first item the host waits for the second; both stand in one job."""


@dataclass(frozen=True, slots=True)
class Holds:
    """A decision and its numbers, all of this rank alone, its peers always ready.

    Attributes:
        waits: Waits of each job, by name.
        serial_bytes: Peak if every op were over before the next is issued.
        free_bytes, held_bytes: Peak on a GPU where the host is nowhere held, and where it is held as decided; the host
            is taken to issue in no time, which is the most it can run ahead.
        free_ns, held_ns: Time of the step.
        reason: Why it was decided so.
    """

    waits: dict[str, tuple[Wait, ...]] = field(default_factory=dict)
    serial_bytes: int = 0
    free_bytes: int = 0
    held_bytes: int = 0
    free_ns: int = 0
    held_ns: int = 0
    reason: str = ""

    @property
    def count(self) -> int:
        """Number of waits in a step."""
        return sum(map(len, self.waits.values()))

    def text(self) -> str:
        """The numbers in one line."""
        return (f"GPU peak {size(self.free_bytes)} -> {size(self.held_bytes)} ({size(self.serial_bytes)} "
                f"without any run-ahead), step of this rank alone {ms_figure(self.free_ns)} -> {ms(self.held_ns)}")  # fmt: skip


def candidates(program: Program) -> list[str]:
    """Jobs, other than the last, with work beside computation that reads or gives memory of one micro-batch."""
    graph = Graph(program)
    beside = {op.id for op in program.ops if _holds_memory(graph, op)}
    return [job.name for job in program.jobs[:-1]
            if any(op_id in beside for op_id, _ in job.items) and last_computation(job, graph.ops, graph.values)]  # fmt: skip


def at_ends(program: Program, names: Iterable[str]) -> dict[str, tuple[Wait, ...]]:
    """Behind each of these jobs the host waits for its last computation."""
    graph, names = Graph(program), frozenset(names)
    found = {job.name: last_computation(job, graph.ops, graph.values) for job in program.jobs if job.name in names}
    ends = {job.name: job.items[-1] for job in program.jobs if job.items}
    return {name: ((ends[name], item),) for name, item in found.items() if item is not None}


def _holds_memory(graph: Graph, op: Op) -> bool:
    touched = (graph.values[v] for v in (*graph.reads(op), *op.results))
    return bool(stream_of(op)) and any(value.memory == "device" and not value.persistable for value in touched)


def held(program: Program, waits: Mapping[str, tuple[Wait, ...]]) -> Program:
    """The program with these waits and no others."""
    jobs = tuple(msgspec.structs.replace(job, host_waits=waits.get(job.name, ())) for job in program.jobs)
    return msgspec.structs.replace(program, jobs=jobs)


def plan_holds(program: Program, cost: Costs, run_ahead_bytes: int) -> Holds:
    """The widest spacing of waits under which run-ahead raises the peak by no more than `run_ahead_bytes`.

    Where none does, the widest that comes near the lowest peak. Cost: one pass over the storages where these are small, else a
    simulation of the rank for each spacing tried.
    """
    names = candidates(program)
    if not names:
        return Holds(reason="no job has work beside computation that holds memory")
    if (most := _most_held(program)) <= run_ahead_bytes:
        return Holds(reason=f"side streams hold {size(most)} at most, run_ahead_bytes allows {size(run_ahead_bytes)}")
    try:
        return _Search(program, cost, frozenset(names)).run(run_ahead_bytes)
    except PlanError as error:
        why = f"at the end of every job with work on side streams: the rank cannot be simulated ({error})"
        return Holds(at_ends(program, names), reason=why)


def gpu_peak(program: Program, cost: Costs) -> int:
    """Most device bytes that the plan holds on a GPU, however fast its host is; its peers are always ready."""
    return _peak(_fast_host(lower([program], cost, Options.of(GPU, peers_ready=True))))


def _most_held(program: Program) -> int:
    """Bytes of all blocks that a side stream reads or gives, whenever."""
    table, count = lifetimes(program), max(1, program.pipeline.num_micro_batches)
    stream = {op.id: stream_of(op) for op in program.ops}
    away = np.array([stream[op_id] != "" for op_id in table.reader.tolist()], np.bool_)
    rows = np.logical_or.reduceat(away, table.reader_first[:-1]) if len(table.size) else np.empty(0, np.bool_)
    return int(count * table.size[rows & ~table.pinned].sum())


@dataclass(slots=True)
class _Search:
    program: Program
    cost: Costs
    names: frozenset[str]

    def run(self, run_ahead_bytes: int) -> Holds:
        free_sim = self._lowered({})
        fast = _fast_host(free_sim)
        serial, free = in_order(self.program).peak(), _peak(fast)
        free_ns = run(free_sim, with_memory=False).step_ns
        if free <= serial + run_ahead_bytes:
            return Holds({}, serial, free, free, free_ns, free_ns, f"run_ahead_bytes allows {size(run_ahead_bytes)}")
        tried: list[tuple[int, dict[str, tuple[Wait, ...]]]] = [(free, {})]
        for form in self._forms(free_sim):
            waits = awaits(held(self.program, form), free_sim.awaits >= 0)
            tried.append((_peak(dataclasses.replace(fast, awaits=waits)), form))
            if tried[-1][0] <= serial + run_ahead_bytes:
                break
        least = min(peak for peak, _ in tried)
        best, found = next((peak, form) for peak, form in tried if peak <= max(least + run_ahead_bytes // NEAR, serial))
        held_ns = run(self._lowered(found), with_memory=False).step_ns if found else free_ns
        return Holds(found, serial, free, best, free_ns, held_ns, "" if found else "no wait lowers the peak")

    def _forms(self, sim: SimInput) -> Iterator[dict[str, tuple[Wait, ...]]]:
        back_ns = LOOK_BACK * max(1, wait_ns(self.program, self.cost))
        for spacing in SPACING:
            yield self._looking_back(sim, back_ns, spacing * back_ns)
        yield at_ends(self.program, self.names)

    def _looking_back(self, sim: SimInput, back_ns: int, apart_ns: int) -> dict[str, tuple[Wait, ...]]:
        """Waits for what was computed `back_ns` before in the same job, by the time that computation takes alone."""
        graph = Graph(self.program)
        can = {op.id for op in self.program.ops if computes(op, graph.values)}
        clock = np.cumsum(np.where(sim.side, 0, sim.dur)).tolist()
        found: dict[str, tuple[Wait, ...]] = {}
        at, last_ns = 0, 0
        for job in self.program.jobs:
            waits: list[Wait] = []
            first, target = at, -1
            for k, item in enumerate(job.items if job.name in self.names else (), at):
                while first <= k and clock[first] <= clock[k] - back_ns:
                    target = first if job.items[first - at][0] in can else target
                    first += 1
                if target >= 0 and clock[k] - last_ns >= apart_ns:
                    waits.append((item, job.items[target - at]))
                    last_ns = clock[k]
            found[job.name] = tuple(waits)
            at += len(job.items)
        return found

    def _lowered(self, waits: Mapping[str, tuple[Wait, ...]]) -> SimInput:
        return lower([held(self.program, waits)], self.cost, Options.of(GPU, peers_ready=True))


def _fast_host(sim: SimInput) -> SimInput:
    """The same with a host that issues in no time."""
    return dataclasses.replace(sim, issue=np.zeros_like(sim.issue), host_end=np.zeros_like(sim.host_end))


def _peak(sim: SimInput) -> int:
    return run(sim, target=GPU).ranks[0].peak_bytes
