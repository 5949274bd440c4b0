"""`name-streams`: which stream communication runs on."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise

import msgspec

from interlace.ir import ABSENT, Graph, Op, Program
from interlace.ir.kinds import is_collective, is_receive, is_send, stream_of
from interlace.ir.per_ops import once_per_ops, remembered
from interlace.passes.base import Context, Pass, register
from interlace.passes.streams import AutoParallelStreamType, ring_stream
from interlace.passes.weight_gradients import Backward

PRIORITIES = range(-5, 1)
"""Stream priorities that CUDA distinguishes; it silently replaces any other by the nearest of these."""


@register
class NameStreams(Pass, frozen=True, kw_only=True):
    """Put communication on streams of its own, with a priority.

    Contract: keeps every value and operation and the order of all op instances; gives stream names and priorities. What crosses
    streams is ordered by the passes after it (`extend-lifetimes`, `insert-events`).

    Before / After:
        #5 %5 = pd_op.c_allreduce_sum(%4) group 12      #5 %5 = pd_op.c_allreduce_sum(%4) group 12 stream auto_parallel_mp priority -1

    Each ring gets one stream for its collectives, and one for each direction of its sends and receives. A ring that moves more bytes of
    weights and their gradients than of activations is named as one of data parallelism, any other as one of tensor parallelism. Three
    kinds of operations keep their streams: collectives of an optimizer in a job of its own that keeps program order, collectives already on
    a side stream other than `auto_parallel_mp`, and the optimizer's p2p on the compute stream. For parameters that are gathered (sharding
    stage 3), `insert-events` makes the first gather of the next step come after this step's update.

    Options:
        priority: Stream priority of communication; 0 is normal, lower runs first. When: 0 if communication takes compute units away from
            the critical path.
    """

    name = "name-streams"
    gives = frozenset({"streams"})
    after = ("offload-activations",)
    is_default = True
    in_baseline = False

    priority: int = -1

    def mistake(self, has_budget: bool = False) -> tuple[str, str] | None:
        if self.priority in PRIORITIES:
            return None
        return "priority", f"found {self.priority}, expected a stream priority from {PRIORITIES[0]} (first) to {PRIORITIES[-1]} (normal)"

    def run(self, program: Program, context: Context) -> Program:
        ordered = _ordered(program)
        key = (self.name, id(program.ops), self.priority, ordered)
        make = partial(_with_names, program, ordered, self.priority)
        named = remembered(context.memo, key, program.ops, make)
        count = Counter(new.stream for op, new in zip(program.ops, named, strict=True) if new is not op)
        for stream, number in sorted(count.items()):
            context.applied("stream-named", stream=stream, operations=number, priority=self.priority)
        if not count and program.world < 2:
            context.declined("one-rank")
        elif not count:
            context.declined("no-stream-of-its-own")
        return program.with_ops(named)


def _with_names(program: Program, ordered: frozenset[int], priority: int) -> tuple[Op, ...]:
    names = _names(program, ordered, _replicas(program))
    return tuple(msgspec.structs.replace(op, stream=names[op.id], priority=priority) if op.id in names else op for op in program.ops)


@once_per_ops
def _replicas(program: Program) -> frozenset[int]:
    """Rings of data parallelism: those whose collectives move more bytes of weights and their gradients than of activations."""
    graph, more = Graph(program), Counter[int]()
    backward = Backward(graph)
    for op in filter(is_collective, program.ops):
        values = {value for value in (*op.operands, *op.results) if value != ABSENT}
        is_weights = op.role == "optimize" or op.id in backward.sinks or bool(values & backward.weights)
        moved = max((max(0, graph.values[value].size_bytes) for value in values), default=0)
        more[op.group] += moved if is_weights else -moved
    return frozenset(ring for ring, surplus in more.items() if surplus > 0)


def _names(program: Program, ordered: frozenset[int], replicas: frozenset[int]) -> dict[int, str]:
    """Operation id -> stream, for the operations to name; the optimizer's collectives are among them only if they are in `ordered`."""
    tensor = AutoParallelStreamType.MP
    every = [op for op in program.ops if is_collective(op)]
    given = {op.group: op.stream for op in every if stream_of(op) and not op.stream.startswith(tensor.value)}
    collectives = [
        op for op in every if (op.role != "optimize" or op.id in ordered) and (not stream_of(op) or op.stream.startswith(tensor.value))
    ]
    rings = {op.group for op in collectives}
    kinds = {ring: AutoParallelStreamType.DP if ring in replicas else tensor for ring in rings}
    names = {
        op.id: given.get(op.group, ring_stream(kinds[op.group], op.group, [ring for ring in rings if kinds[ring] == kinds[op.group]]))
        for op in collectives
    }
    p2p = [op for op in program.ops if op.group >= 0 and (op.role != "optimize" or op.stream)]
    for kind, stream in ((is_send, AutoParallelStreamType.PP_SEND), (is_receive, AutoParallelStreamType.PP_RECV)):
        found = [op for op in p2p if kind(op)]
        rings_of_p2p = {op.group for op in found}
        names.update({op.id: ring_stream(stream, op.group, rings_of_p2p) for op in found})
    shared = set(names.values())  # a stream has one priority, so what Paddle already put on one of these gets ours
    return {**{op.id: op.stream for op in program.ops if op.stream in shared}, **names}


def _ordered(program: Program) -> frozenset[int]:
    """Ids of optimizer operations in jobs that also contain other roles, or in a job that does not keep program order."""
    roles, place = {op.id: op.role for op in program.ops}, {op.id: k for k, op in enumerate(program.ops)}
    found = set[int]()
    for job in program.jobs:
        mine = [op_id for op_id, _ in job.items if roles[op_id] == "optimize"]
        if len(mine) < len(job.items) or any(place[before] > place[op_id] for before, op_id in pairwise(mine)):
            found.update(mine)
    return frozenset(found)
