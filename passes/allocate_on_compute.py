"""`allocate-on-compute`: collectives on streams of their own write into memory of the compute stream's pool."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable
from typing import Annotated, NamedTuple

import msgspec

from interlace.errors import PlanError
from interlace.ir import Edit, Graph, Op, OpInstance, Program
from interlace.ir.arrays import Ints
from interlace.ir.edit import with_items
from interlace.ir.kinds import is_collective, stream_of
from interlace.ir.stream_waits import waited_for
from interlace.ir.target import GPU
from interlace.passes.base import Context, Pass, register
from interlace.passes.own_memory import has_own_memory, users_of
from interlace.scheduler.memory.live import in_order
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.lower import lower
from interlace.scheduler.simulate.simulator import Times, device_memory

KINDS = frozenset({"all_gather", "reduce_scatter", "all_to_all"})
"""Kinds of collectives whose kernel allocates its only result and writes all of it. Sums are left to `reduce-in-place`."""


@register
class AllocateOnCompute(Pass, frozen=True, kw_only=True):
    """Let collectives on streams of their own write their results into memory that the compute stream has taken from its own pool.

    On a GPU each stream has a pool of its own. A result from the pool of a collective's stream leaves free memory of the compute stream
    unused. As computation reads it last, the block is not reused before the host sees that this reader has completed. A block of the
    compute stream is reused in the order of that stream, whatever the host has seen.

    Contract: needs a schedule; keeps every value, bit for bit, and the order of all op instances; adds `empty` operations, which launch
    nothing. As far as the rank's simulated times hold, with peers that are always ready, no collective starts later; the peak of memory of
    operations that run one after the other does not rise. Each rank decides for itself; peers see the same collective.

    Before / After, where the collective runs on a stream of its own:
        #5 %5 = pd_op.matmul(%0, %1)                    #5 %5 = pd_op.matmul(%0, %1)
        #6 %6 = pd_op.reduce_scatter(%5) stream mp      #9 %9 = pd_op.empty()
                                                        #6 %6~9 = pd_op.reduce_scatter(%5, %9) stream mp no_buffer=1 inplace=0:1

    Steps: 1 find all_gathers, reduce_scatters and all_to_alls with a result in memory of its own that computation reads; 2 in each
    micro-batch, find the latest computation that has ended when the collective starts, which then need not wait for the memory; 3 take the
    memory behind it, for one collective after the other as long as the peak does not rise, and first where that is soonest before it.

    Options:
        min_bytes: Smaller results stay in the pool of their stream. When: 1 MiB suits GPUs; small models on a CPU need less.

    Source: rules 6 and 7 in docs/gpu-place.md, docs/decisions/032. PaddlePaddle's kernels of these collectives (phi/kernels/gpu) allocate
    by `Alloc`, and DenseTensor::AllocateFrom keeps memory that is large enough.
    """

    name = "allocate-on-compute"
    needs = frozenset({"scheduled"})
    after = ("name-streams",)
    is_default = True
    in_baseline = False

    min_bytes: Annotated[int, msgspec.Meta(ge=0)] = 1 << 20

    def run(self, program: Program, context: Context) -> Program:
        graph = Graph(program)
        wanted = {op.id: op for op in program.ops if self._is_eligible(graph, op)}
        if not wanted:
            return program
        try:
            times, _ = device_memory(lower([program], context.cost, Options.of(GPU, peers_ready=True)))
        except PlanError as error:
            context.declined("starts-not-simulated", collectives=len(wanted), error=str(error))
            return program
        every, edit = _places(program, wanted, times), Edit(program)
        known = {op_id: [place for place in mine.values() if place is not None] for op_id, mine in every.items()}
        live = in_order(program).lives.pool("device").along(len(times.start))
        most, filled, longer, early = int(live.max(initial=0)), list[int](), list[int](), list[int]()
        before, after = dict[OpInstance, list[OpInstance]](), dict[OpInstance, list[OpInstance]]()
        for op_id in sorted(known, key=lambda op_id: max((place.last - place.first for place in known[op_id]), default=0)):
            op, result = wanted[op_id], graph.values[wanted[op_id].results[0]]
            if len(known[op_id]) < len(every[op_id]):
                early.append(result.size_bytes)
            elif _hold(live, most, result.size_bytes, known[op_id]):
                taken = edit.fill(op, result)
                for place in known[op_id]:
                    (before if place.before else after).setdefault(place.at, []).append((taken.id, place.micro_batch))
                filled.append(result.size_bytes)
            else:
                longer.append(result.size_bytes)
        if early:
            context.declined("starts-during-computation", collectives=len(early), size_bytes=sum(early))
        if longer:
            context.declined("would-hold-more", collectives=len(longer), size_bytes=sum(longer))
        if not filled:
            return program
        context.applied("allocated-on-compute", collectives=len(filled), size_bytes=sum(filled))
        return msgspec.structs.replace(edit.build(), jobs=with_items(program.jobs, before, after))

    def _is_eligible(self, graph: Graph, op: Op) -> bool:
        if op.kind not in KINDS or not is_collective(op) or not stream_of(op) or (len(op.operands), len(op.results)) != (1, 1):
            return False
        value, (storage, *others) = graph.values[op.results[0]], graph.storages.of(op.results[0])
        if op.no_buffer or op.inplace or op.views or others or not has_own_memory(graph, value.id, storage):
            return False
        is_large = min(value.shape, default=0) >= 0 and storage.size_bytes >= self.min_bytes
        return is_large and any(not stream_of(user) for user in users_of(graph, storage))


class _Place(NamedTuple):
    """Where memory is taken, for one micro-batch of a collective.

    Attributes:
        at: The op instance at which it is taken, right behind it or, with `before`, before it.
        first, last: Indices of the first op instance that finds it taken, and of the collective.
    """

    micro_batch: int
    at: OpInstance
    before: bool
    first: int
    last: int


def _places(program: Program, wanted: Container[int], times: Times) -> dict[int, dict[int, _Place | None]]:
    """For each collective and micro-batch, the latest place in its job at which the compute stream has ended all that was issued before
    when the collective starts; None if there is none."""
    streams = {op.id: stream_of(op) for op in program.ops}
    start, end, waited = times.start.tolist(), times.end.tolist(), waited_for(program)
    found = dict[int, dict[int, _Place | None]]()
    at, ended = 0, sys.maxsize  # the first job follows the computation of another step
    for job in program.jobs:
        computed, first = list[int](), at
        for op_id, m in job.items:
            if op_id in wanted:
                known = waited[at].get("", -1)
                behind = next((k for k in reversed(computed) if k <= known or end[k] <= start[at]), None)
                place = _Place(m, job.items[0], True, first, at) if ended <= start[at] else None
                if behind is not None:
                    place = _Place(m, job.items[behind - first], False, behind + 1, at)
                found.setdefault(op_id, {})[m] = place
            elif not streams[op_id]:
                computed.append(at)
            at += 1
        ended = max((end[k] for k in computed), default=ended)
    return found


def _hold(live: Ints, most: int, size: int, places: Iterable[_Place]) -> bool:
    """Add memory that is taken at these places to the live bytes behind each op instance; False, and unchanged, if that would exceed the
    given most."""
    spans = [live[place.first : place.last] for place in places]
    for each in spans:
        each += size
    if any(int(each.max(initial=0)) > most for each in spans):
        for each in spans:
            each -= size
        return False
    return True
