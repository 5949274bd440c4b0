"""Behind which jobs the host waits for the device, so that memory is not taken for work that the device is far from.

On the GPU place memory is taken when an op is issued and goes back when its last reader is; a block whose last reader runs on
another stream than its giver stays until that reader is over (docs/gpu-place.md, rules 4 and 7). A host that runs ahead hence
holds such blocks of all micro-batches at once. Behind a held job it waits for the job's last computation, and one job's blocks
are there at most; the price is the gap between two jobs in which nothing is issued.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from interlace.cost_model import Costs
from interlace.errors import PlanError
from interlace.ir import Graph, Op, Program
from interlace.ir.waits import COMPUTE_STREAMS, awaited
from interlace.scheduler.lower_to_sim import lower
from interlace.scheduler.memory import GPU, in_order, storages
from interlace.scheduler.sim_input import Options, SimInput
from interlace.scheduler.simulator import run

PATTERNS = (4, 2, 1)
"""The host is held behind every n-th job that asks for it; the sparsest pattern that keeps memory is taken."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Holds:
    """A decision and its numbers, all of this rank alone, its peers always ready.

    Attributes:
        jobs: Names of jobs behind which the host waits.
        serial_bytes: Peak if every op were over before the next is issued.
        free_bytes, held_bytes: Peak on the GPU place where the host is nowhere held, and where it is held as decided; the host
            is taken to issue in no time, which is the most it can run ahead.
        free_ns, held_ns: Time of the step.
        reason: Why it was decided so.
    """

    jobs: frozenset[str] = frozenset()
    serial_bytes: int = 0
    free_bytes: int = 0
    held_bytes: int = 0
    free_ns: int = 0
    held_ns: int = 0
    reason: str = ""

    def text(self) -> str:
        """The numbers in one line."""
        return (f"GPU-place peak {self.free_bytes / GIB:.3f} -> {self.held_bytes / GIB:.3f} GiB ({self.serial_bytes / GIB:.3f} "
                f"without any run-ahead), step of this rank alone {self.free_ns / 1e6:.3f} -> {self.held_ns / 1e6:.3f} ms")  # fmt: skip


def candidates(program: Program) -> list[str]:
    """Jobs, other than the last, with work beside computation that reads or gives memory of one micro-batch."""
    graph = Graph(program)
    beside = {op.id for op in program.ops if _holds_memory(graph, op)}
    return [job.name for job in program.jobs[:-1]
            if any(op_id in beside for op_id, _ in job.items) and awaited(job, graph.ops, graph.values) >= 0]  # fmt: skip


def _holds_memory(graph: Graph, op: Op) -> bool:
    touched = (graph.values[v] for v in (*graph.reads(op), *op.results))
    return op.stream not in COMPUTE_STREAMS and any(value.memory == "device" and not value.persistable for value in touched)


def held(program: Program, names: Iterable[str]) -> Program:
    """The program with the host held behind these jobs and no others."""
    names = frozenset(names)
    jobs = tuple(job if job.host_waits == (job.name in names) else msgspec.structs.replace(job, host_waits=job.name in names)
                 for job in program.jobs)  # fmt: skip
    return msgspec.structs.replace(program, jobs=jobs)


def plan_holds(program: Program, cost: Costs, run_ahead_bytes: int) -> Holds:
    """The sparsest pattern of held jobs under which run-ahead raises the peak by no more than `run_ahead_bytes`.

    Where none does, the one with the lowest peak. Cost: one pass over the storages where these are small, else a simulation of
    the rank for each pattern tried.
    """
    names = candidates(program)
    if not names:
        return Holds(reason="no job has work beside computation that holds memory")
    if (most := _most_held(program)) <= run_ahead_bytes:
        return Holds(reason=f"side streams hold {most / GIB:.3f} GiB at most, run_ahead_bytes allows {run_ahead_bytes / GIB:.3f}")
    try:
        return _Search(program, cost, names).run(run_ahead_bytes)
    except PlanError as error:
        return Holds(frozenset(names), reason=f"held behind every job that asks for it: the rank cannot be simulated ({error})")


def place_peak(program: Program, cost: Costs) -> int:
    """Most device bytes that the plan holds on the GPU place, however fast its host is; its peers are always ready."""
    return _peak(_fast_host(lower([program], cost, Options(peers_ready=True))))


def _most_held(program: Program) -> int:
    """Bytes of all blocks that a side stream reads or gives, whenever."""
    table, count = storages(program), max(1, program.pipeline.num_micro_batches)
    stream = {op.id: "" if op.stream in COMPUTE_STREAMS else op.stream for op in program.ops}
    away = np.array([stream[op_id] != "" for op_id in table.reader.tolist()], np.bool_)
    rows = np.logical_or.reduceat(away, table.reader_first[:-1]) if len(table.size) else np.empty(0, np.bool_)
    return int(count * table.size[rows & ~table.pinned].sum())


@dataclass(slots=True)
class _Search:
    program: Program
    cost: Costs
    names: Sequence[str]
    free: SimInput = field(init=False)
    all: SimInput = field(init=False)

    def run(self, run_ahead_bytes: int) -> Holds:
        self.free = self._lowered([])
        serial, free = in_order(self.program).peak(), _peak(_fast_host(self.free))
        free_ns = run(self.free, with_memory=False).step_ns
        if free <= serial + run_ahead_bytes:
            return Holds(frozenset(), serial, free, free, free_ns, free_ns, f"run_ahead_bytes allows {run_ahead_bytes / GIB:.3f} GiB")
        self.all = self._lowered(self.names)
        best = (free, frozenset[str]())
        for every in PATTERNS:
            chosen = frozenset(self.names[every - 1 :: every])
            peak = _peak(self._with(chosen))
            if peak < best[0]:
                best = (peak, chosen)
            if peak <= serial + run_ahead_bytes:
                break
        peak, chosen = best
        held_ns = run(self._lowered(chosen), with_memory=False).step_ns if chosen else free_ns
        reason = "" if chosen else "no wait lowers the peak"
        return Holds(chosen, serial, free, peak, free_ns, held_ns, reason)

    def _lowered(self, names: Iterable[str]) -> SimInput:
        return lower([held(self.program, names)], self.cost, Options(peers_ready=True))

    def _with(self, chosen: frozenset[str]) -> SimInput:
        """Held behind the chosen jobs, the host being fast."""
        starts = self.all.job_first[0]
        stops = [*(first for _, first in starts[1:]), self.all.num_items]
        awaits = self.free.awaits.copy()
        for (name, first), stop in zip(starts, stops, strict=True):
            if name in chosen:
                awaits[first:stop] = self.all.awaits[first:stop]
        return dataclasses.replace(_fast_host(self.all), awaits=awaits)


def _fast_host(sim: SimInput) -> SimInput:
    """The same with a host that issues in no time."""
    return dataclasses.replace(sim, issue=np.zeros_like(sim.issue), host_end=np.zeros_like(sim.host_end))


def _peak(sim: SimInput) -> int:
    return run(sim, place=GPU).ranks[0].peak_bytes
