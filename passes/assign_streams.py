"""`assign-streams`: which stream each operation runs on, and the events between jobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from interlace.ir import ABSENT, Edit, Event, Graph, Job, Op, Program, TensorType
from interlace.ir.kinds import is_collective, is_copy, is_receive, is_send
from interlace.passes.base import Context, Pass, register
from interlace.passes.streams import COMPUTE_STREAMS, AutoParallelStreamType, mp_stream

Item = tuple[int, int]


@register
class AssignStreams(Pass, frozen=True, kw_only=True):
    """Give communication streams of its own, with priorities, and order what crosses jobs between streams.

    Contract: needs a schedule; keeps every value and the order of all items; adds names, events, and where memory would be
    handed out again under a side stream's read, one `share_data` that holds it.

    Steps: 1 tensor-parallel collectives go on one stream a ring, receives and sends on one a ring and direction; collectives
    of the optimizer part, and those that name a stream already, stay. 2 A value given in one job on one stream and read in
    another job on another gets an event, once for each reading stream: inside a job the executor orders streams itself. 3 A
    value that a side stream reads and a compute operation reads later is held until compute has waited for the side stream.

    Options:
        priority: Stream priority of communication; 0 is normal, lower runs first.

    Source: paddle-gpu rules 1 to 5 in docs/gpu-place.md.
    """

    name = "assign-streams"
    needs = frozenset({"scheduled"})
    gives = frozenset({"streams"})
    after = ("split-backward", "overlap-column-backward", "schedule-1f1b", "offload-activations")

    priority: int = -1

    def run(self, program: Program, context: Context) -> Program:
        program = self._named(program, context)
        program = _with_holds(program, context)
        events = tuple(_events(program))
        context.changed.append(f"{len(events)} events between jobs")
        return msgspec.structs.replace(program, events=events)

    def _named(self, program: Program, context: Context) -> Program:
        names = _names(program)
        count: dict[str, int] = {}
        ops = []
        for op in program.ops:
            name = names.get(op.id)
            if name:
                count[name] = count.get(name, 0) + 1
                op = msgspec.structs.replace(op, stream=name, priority=0 if is_copy(op) else self.priority)
            ops.append(op)
        context.changed += [f"stream {name}: {number} operations, priority {self.priority}" for name, number in sorted(count.items())]
        if not count:
            context.declined.append("streams: one rank alone communicates with nobody")
        return program.with_ops(ops)


def _names(program: Program) -> dict[int, str]:
    """Stream names of operations that get one."""
    inner = [op for op in program.ops if op.role != "optimize" and op.group >= 0]
    collectives = [op for op in inner if is_collective(op) and (not op.stream or op.stream.startswith(AutoParallelStreamType.MP.value))]
    rings = {op.group for op in collectives}
    names = {op.id: mp_stream(op.group, rings) for op in collectives}
    for kind, stream in ((is_send, AutoParallelStreamType.PP_SEND), (is_receive, AutoParallelStreamType.PP_RECV)):
        found = [op for op in inner if kind(op)]
        single = len({op.group for op in found}) <= 1
        names.update({op.id: stream.value if single else f"{stream.value}_{op.group}" for op in found})
    return names


def stream_of(op: Op) -> str:
    """An operation's stream; the compute stream's two names are one."""
    return "" if op.stream in COMPUTE_STREAMS else op.stream


@dataclass(slots=True)
class _Places:
    """Where each item stands, and what really gives a value for a micro-batch."""

    program: Program
    graph: Graph
    job: dict[Item, int] = field(default_factory=dict)
    order: dict[Item, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for k, job in enumerate(self.program.jobs):
            for item in job.items:
                self.job[item] = k
                self.order[item] = len(self.order)

    def giver(self, value: int, micro_batch: int) -> Item | None:
        """The item that gives a value; copies that no job runs are the identity."""
        op = self.graph.producer_op(value)
        while op is not None and is_copy(op) and (op.id, micro_batch) not in self.job:
            op = self.graph.producer_op(op.operands[0])
        if op is None:
            return None
        item = (op.id, 0 if op.role == "optimize" else micro_batch)
        return item if item in self.job else None


def _events(program: Program) -> Iterator[Event]:
    """One event for each item that another stream must wait for; each waiting stream waits once, at its first such item."""
    graph = Graph(program)
    places = _Places(program, graph)
    waits: dict[Item, dict[str, Item]] = {}
    for before, item in (*_across_jobs(places), *_in_front_of_last_readers(places)):
        first = waits.setdefault(before, {}).setdefault(stream_of(graph.ops[item[0]]), item)
        if places.order[item] < places.order[first]:
            waits[before][stream_of(graph.ops[item[0]])] = item
    for before in sorted(waits, key=places.order.__getitem__):
        yield Event(f"interlace_{before[0]}_{before[1]}", before, tuple(sorted(waits[before].values(), key=places.order.__getitem__)))


def _across_jobs(places: _Places) -> Iterator[tuple[Item, Item]]:
    """Givers and readers of a value in different jobs on different streams."""
    ops = places.graph.ops
    for item in places.order:
        op = ops[item[0]]
        for giver in _givers(op, item, places):
            if places.job[giver] != places.job[item] and stream_of(ops[giver[0]]) != stream_of(op):
                yield giver, item


def _in_front_of_last_readers(places: _Places) -> Iterator[tuple[Item, Item]]:
    """Readers that the last reader of a block must wait for.

    Memory given on one stream serves that stream again once the last reader's stream is through with it. A reader on a third
    stream is then known to nobody; where the last reader runs on a side stream it waits for that reader. (Where the last
    reader is computation, `_with_holds` keeps the block instead, so that computation waits for nothing.)
    """
    graph = places.graph
    for readers in _readers(places).values():
        last = max(readers, key=places.order.__getitem__)
        stream = stream_of(graph.ops[last[0]])
        home = readers[last]
        if stream:
            yield from ((item, last) for item in readers if stream_of(graph.ops[item[0]]) not in (stream, home))


def _readers(places: _Places) -> dict[tuple[int, int], dict[Item, str]]:
    """Block of a micro-batch -> items that read it -> stream it was given on."""
    graph = places.graph
    found: dict[tuple[int, int], dict[Item, str]] = {}
    for item in places.order:
        op = graph.ops[item[0]]
        for value in graph.reads(op):
            kept = graph.values[value]
            giver = places.giver(value, item[1])
            if giver is None or kept.persistable or kept.memory != "device":
                continue
            home = stream_of(_allocates(graph, graph.ops[giver[0]], kept.storage))
            if home or stream_of(op):
                found.setdefault((kept.storage, item[1]), {})[item] = home
    return found


def _allocates(graph: Graph, op: Op, storage: int) -> Op:
    """The operation that took a storage's memory, behind in-place results and views."""
    for result, operand in (*op.inplace, *op.views):
        giver = graph.producer_op(op.operands[operand])
        if giver is not None and graph.values[op.results[result]].storage == storage:
            return _allocates(graph, giver, storage)
    return op


def _givers(op: Op, item: Item, places: _Places) -> list[Item]:
    found = [places.giver(value, item[1]) for value in op.operands if value != ABSENT]
    if op.role == "optimize":
        return [giver for giver in found if giver is not None] + _last_writers(op, places)
    return [giver for giver in found if giver is not None]


def _last_writers(op: Op, places: _Places) -> list[Item]:
    """Items on side streams that wrote a persistable operand for the last micro-batch."""
    graph, last = places.graph, places.program.pipeline.num_micro_batches - 1
    found = []
    for value in op.operands:
        if value != ABSENT and graph.values[value].persistable:
            for alias in graph.aliases[graph.values[value].storage]:
                writer = graph.producer_op(alias)
                if writer is not None and writer.role != "optimize" and stream_of(writer) and (writer.id, last) in places.job:
                    found.append((writer.id, last))
    return found


def _with_holds(program: Program, context: Context) -> Program:
    """Add a last reader on compute for values that a side stream reads in front of their last compute reader.

    Collection at issue time records only last readers, so such a block would be handed out while the side stream reads it.
    """
    graph = Graph(program)
    edit = Edit(program)
    holds: dict[int, list[Op]] = {}
    for op in program.ops:
        if stream_of(op) and op.results:
            for value in dict.fromkeys(graph.reads(op)):
                waiter = _needs_hold(graph, op, value)
                if waiter is not None:
                    result = edit.value(_type_of(graph, value), storage=graph.values[value].storage)
                    held = edit.op("pd_op.share_data", (value,), [result], like=waiter, views=((0, 0),))
                    holds.setdefault(waiter.id, []).append(held)
                    context.change(op, f"%{value} is held until {waiter.kind} #{waiter.id} has waited for it")
    if not holds:
        return program
    for waiter_id, held in holds.items():
        edit.after(waiter_id, held)
    jobs = tuple(_job_with_holds(job, holds) for job in program.jobs)
    return msgspec.structs.replace(edit.build(), jobs=jobs)


def _needs_hold(graph: Graph, side: Op, value: int) -> Op | None:
    """The first compute reader of the side operation's result, where the value's last reader stands in front of it."""
    kept = graph.values[value]
    if kept.persistable or kept.memory != "device" or kept.dtype in ("vector", "null"):
        return None
    readers = [user for alias in graph.aliases[kept.storage] for user in graph.user_ops(alias)
               if user.id != side.id and not stream_of(user) and user.role == side.role and alias in graph.reads(user)]  # fmt: skip
    later = [user for user in readers if graph.position[user.id] > graph.position[side.id]]
    waiters = [user for result in side.results for user in graph.user_ops(result) if not stream_of(user) and user.role == side.role]
    first = min(waiters, key=lambda user: graph.position[user.id], default=None)
    if first is None or not later:
        return None
    last = max(later, key=lambda user: graph.position[user.id])
    return first if graph.position[last.id] < graph.position[first.id] else None


def _type_of(graph: Graph, value: int) -> TensorType:
    return TensorType(graph.values[value].shape, graph.values[value].dtype)


def _job_with_holds(job: Job, holds: dict[int, list[Op]]) -> Job:
    items = [new for item in job.items for new in (item, *((held.id, item[1]) for held in holds.get(item[0], ())))]
    return msgspec.structs.replace(job, items=tuple(items))
