"""Orders between streams that the executor does not keep by itself: events of a scheduled program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from interlace.ir import ABSENT, Event, Graph, Op, Program
from interlace.ir.kinds import COMBINE, SPLIT, is_copy, stream_of, views_of

Item = tuple[int, int]


@dataclass(slots=True)
class _Places:
    """Where each item stands, and what really gives a value for a micro-batch."""

    program: Program
    graph: Graph
    job: dict[Item, int] = field(default_factory=dict)
    order: dict[Item, int] = field(default_factory=dict)
    lasting: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.lasting = frozenset(value.storage for value in self.program.values if value.persistable)
        for k, job in enumerate(self.program.jobs):
            for item in job.items:
                self.job[item] = k
                self.order[item] = len(self.order)

    def givers(self, value: int, micro_batch: int) -> list[Item]:
        """The items that give a value: of a vector those of its tensors; copies that no job runs are the identity."""
        op = self.graph.producer_op(value)
        while op is not None and (op.name == SPLIT or (is_copy(op) and (op.id, micro_batch) not in self.job)):
            op = self.graph.producer_op(op.operands[0])
        if op is None:
            return []
        if op.name == COMBINE:
            return [item for part in op.operands if part != ABSENT for item in self.givers(part, micro_batch)]
        item = (op.id, 0 if op.role == "optimize" else micro_batch)
        return [item] if item in self.job else []

    def tensors(self, value: int) -> list[int]:
        """The value itself, or a combined vector's tensors."""
        op = self.graph.producer_op(value)
        if op is None or op.name != COMBINE:
            return [value]
        return [tensor for part in op.operands if part != ABSENT for tensor in self.tensors(part)]

    def launched(self) -> Iterator[tuple[Item, Op]]:
        """Items that launch something and can wait, in issue order; what only puts vectors together or apart cannot."""
        for item in self.order:
            op = self.graph.ops[item[0]]
            if op.name not in (COMBINE, SPLIT):
                yield item, op


def events_of(program: Program) -> Iterator[Event]:
    """One event for each item that another stream must wait for; each waiting stream waits once, at its first such item."""
    graph = Graph(program)
    places = _Places(program, graph)
    waits: dict[Item, dict[str, Item]] = {}
    for before, item in (*_across_jobs(places), *_in_front_of_last_readers(places), *_in_front_of_overwrites(places)):
        first = waits.setdefault(before, {}).setdefault(stream_of(graph.ops[item[0]]), item)
        if places.order[item] < places.order[first]:
            waits[before][stream_of(graph.ops[item[0]])] = item
    for before in sorted(waits, key=places.order.__getitem__):
        yield Event(f"interlace_{before[0]}_{before[1]}", before, tuple(sorted(waits[before].values(), key=places.order.__getitem__)))


def _across_jobs(places: _Places) -> Iterator[tuple[Item, Item]]:
    """Givers and readers of a value in different jobs on different streams."""
    ops = places.graph.ops
    for item, op in places.launched():
        for giver in _givers(op, item, places):
            if places.job[giver] != places.job[item] and stream_of(ops[giver[0]]) != stream_of(op):
                yield giver, item


def _in_front_of_last_readers(places: _Places) -> Iterator[tuple[Item, Item]]:
    """Readers that the last reader of a block must wait for.

    Memory given on one stream serves that stream again once the last reader's stream is through with it. A reader on a third
    stream is then known to nobody; where the last reader runs on a side stream it waits for that reader. Where the last
    reader is computation, that has waited for a result of the reader, or `_with_holds` keeps the block so that it need not; it
    waits for a send of an earlier job.
    """
    graph = places.graph
    for readers in _readers(places).values():
        last = max(readers, key=places.order.__getitem__)
        stream = stream_of(graph.ops[last[0]])
        for item in readers:
            op = graph.ops[item[0]]
            sent = not op.results and places.job[item] != places.job[last]
            if (stream or sent) and stream_of(op) not in (stream, readers[last]):
                yield item, last


def _in_front_of_overwrites(places: _Places) -> Iterator[tuple[Item, Item]]:
    """The last read of a lasting value on each side stream, and the item of a later job that overwrites it."""
    graph = places.graph
    reads: dict[int, dict[str, Item]] = {}
    for item, op in places.launched():
        stream = stream_of(op)
        written = [op.operands[operand] for result, operand in op.inplace if (result, operand) not in views_of(op)]
        for storage in {storage for value in written for storage in _lasting(value, places)}:
            before = reads.pop(storage, {})
            yield from ((read, item) for side, read in before.items() if side != stream and places.job[read] != places.job[item])
        for storage in {storage for value in graph.reads(op) for storage in _lasting(value, places)} if stream else ():
            reads.setdefault(storage, {})[stream] = item


def _lasting(value: int, places: _Places) -> list[int]:
    """Storages of a value, or of a vector's tensors, that live across steps."""
    kept = (places.graph.values[tensor] for tensor in places.tensors(value))
    return [tensor.storage for tensor in kept if tensor.storage in places.lasting]


def _readers(places: _Places) -> dict[tuple[int, int], dict[Item, str]]:
    """Block of a micro-batch -> items that read it -> stream it was given on."""
    graph = places.graph
    sent = {graph.values[v].storage for op in graph.program.ops if stream_of(op) and not op.results for v in graph.reads(op)}
    found: dict[tuple[int, int], dict[Item, str]] = {}
    for item, op in places.launched():
        for value in (tensor for given in graph.reads(op) for tensor in places.tensors(given)):
            kept = graph.values[value]
            givers = places.givers(value, item[1])
            if not givers or kept.persistable or kept.memory != "device":
                continue
            home = stream_of(_allocates(graph, graph.ops[givers[0][0]], kept.storage))
            if home or stream_of(op) or kept.storage in sent:
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
    found = [giver for value in places.graph.reads(op) for giver in places.givers(value, item[1])]
    return found + _last_writers(op, places) if op.role == "optimize" else found


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
