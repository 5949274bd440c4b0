"""Live device memory over an order of the operations of one job: what the job allocates and frees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from interlace.ir import Graph, Op, Program
from interlace.ir.arrays import Ints
from interlace.ir.kinds import COMBINE, NO_KERNEL, SPLIT
from interlace.ir.per_ops import once_per_ops
from interlace.ir.storage import Storage

PairOp = tuple[str, int]
"""An operation of a pair: label of its part, operation id."""


@dataclass(frozen=True, slots=True)
class PartOps:
    """One part of a job: its label (unique in the job), its kind (`F`, `B`, `I` or `W`), its operations in program order, and ids of weight
    gradients beside input gradients (`fillers`, see `inline_share`)."""

    label: str
    kind: str
    ops: Sequence[Op]
    fillers: frozenset[int] = frozenset()


class PairMemory:
    """Bytes that each operation allocates, and the storages whose last reader decides when they are freed.

    A storage counts once, however many values share it. What backward reads from its forward is live at the start and freed after
    its last reader; what forward saves for its backward is live at the end. Persistable storages and values of unknown size do not
    count.

    Attributes:
        size: Bytes by number of storage.
        allocs, reads: Storages that an operation allocates, and that it allocates or reads.
        start, end: Live bytes before the first operation, and after the last.
        live_before, live_after: Storages `(label, storage)` that are live before the job, and after it.
    """

    def __init__(self, graph: Graph, parts: Sequence[PartOps]) -> None:
        self.graph = graph
        self._peaks: dict[tuple[PairOp, ...], int] = {}
        self._table: _Table | None = None
        self.storages = graph.storages
        self.size = _sizes(graph.program)
        self.later_readers = _later_readers(graph.program)
        self.allocs: dict[PairOp, list[int]] = {}
        self.reads: dict[PairOp, list[int]] = {}
        self.live_after: set[tuple[str, int]] = set()
        self.live_before: set[tuple[str, int]] = set()
        accesses = _accesses(graph.program)
        for part in parts:
            counted = self._temporary(part) if part.kind == "O" else None
            for op in part.ops:
                allocs, reads = accesses[op.id]
                self.allocs[part.label, op.id] = allocs if counted is None else [n for n in allocs if n in counted]
                self.reads[part.label, op.id] = reads if counted is None else [n for n in reads if n in counted]
            self.live_after |= self._live_later(part)
            self.live_before |= self._live_earlier(part) if part.kind not in "FO" else set()
        self.start = sum(self.size[storage] for _, storage in self.live_before)
        there = self.live_before | {(label, storage) for (label, _), made in self.allocs.items() for storage in made}
        self.end = sum(self.size[storage] for label, storage in there if (label, storage) in self.live_after)

    def peak(self, order: Sequence[PairOp]) -> int:
        """Peak of live bytes over the order, counting what the job allocates or frees. O(operands), and found once for the same order."""
        key = tuple(order)
        if key not in self._peaks:
            self._peaks[key] = self._peak(key)
        return self._peaks[key]

    def _peak(self, order: Sequence[PairOp]) -> int:
        table = self._table = self._table or _Table(self)
        place = np.full(len(table.number), -1)
        place[[table.number[item] for item in order]] = np.arange(len(order))
        last, first = np.full(len(table.size), -1), np.full(len(table.size), len(order))
        np.maximum.at(last, table.reads[1], place[table.reads[0]])
        issued = place[table.allocs[0]]
        np.minimum.at(first, table.allocs[1], np.where(issued < 0, len(order), issued))
        born, freed = (first < len(order)) & ~table.live_before, (last >= 0) & ~table.live_after
        comes, goes = np.zeros(len(order) + 1, np.int64), np.zeros(len(order) + 1, np.int64)
        np.add.at(comes, first[born], table.size[born])
        np.add.at(goes, last[freed] + 1, table.size[freed])
        return self.start + int(np.cumsum(comes - goes)[: len(order)].max(initial=0))

    def _temporary(self, part: PartOps) -> set[int]:
        """Storages that the optimizer allocates and frees, apart from parameters and states, which it writes."""
        inside = {op.id for op in part.ops}
        return {n for n, storage in enumerate(self.storages.storages) if storage.producer in inside and not storage.persistable}

    def _live_later(self, part: PartOps) -> set[tuple[str, int]]:
        """Storages that a later part of the step reads."""
        inside = {op.id for op in part.ops}
        accessed = self.storages.numbers_of(value for op in part.ops for value in (*op.operands, *op.results))
        return {(part.label, n) for n in accessed if self._read_later(n, inside, part.kind)}

    def _read_later(self, storage: int, inside: set[int], kind: str) -> bool:
        return any(reader not in inside and (kind != "W" or role == "optimize") for reader, role in self.later_readers[storage])

    def _live_earlier(self, part: PartOps) -> set[tuple[str, int]]:
        """Storages that a backward reads or writes and that its forward, or an earlier part of its backward, allocated."""
        accessed = {n for op in part.ops for n in self.reads[part.label, op.id]}
        inside = {op.id for op in part.ops}
        return {(part.label, n) for n in accessed if self.storages.storages[n].producer not in inside}


class _Table:
    """The storages that the operations of a pair allocate and read, as arrays.

    Attributes:
        number: Operation -> its number.
        size, live_before, live_after: Properties of each storage, once per part. `[parts * storages]`
        allocs, reads: Operations and storages of accesses. `[accesses]` each
    """

    def __init__(self, memory: PairMemory) -> None:
        labels = {label: k * len(memory.size) for k, label in enumerate(dict.fromkeys(label for label, _ in memory.reads))}
        self.number = {item: k for k, item in enumerate(memory.reads)}
        self.size = np.tile(np.array(memory.size, np.int64), len(labels))
        base = np.array([labels[label] for label, _ in memory.reads], np.int64)
        self.allocs, self.reads = _flat(memory.allocs, base), _flat(memory.reads, base)
        self.live_before, self.live_after = (np.zeros(len(self.size), np.bool_) for _ in range(2))
        for flags, live in ((self.live_before, memory.live_before), (self.live_after, memory.live_after)):
            flags[[labels[label] + storage for label, storage in live if label in labels]] = True


def _flat(accesses: Mapping[PairOp, Sequence[int]], base: Ints) -> tuple[Ints, Ints]:
    """Accesses as numbers of operations and of storages; `base` is the number of the first storage of each operation's part."""
    ops = np.repeat(np.arange(len(base)), np.array([len(each) for each in accesses.values()], np.int64))
    return ops, base[ops] + np.fromiter(chain.from_iterable(accesses.values()), np.int64)


@once_per_ops
def _accesses(program: Program) -> dict[int, tuple[list[int], list[int]]]:
    """Op id -> storages of nonzero size that it allocates, and that it allocates or reads. The lists are shared: do not modify them."""
    graph, size = Graph(program), _sizes(program)

    def storages(values: Sequence[int]) -> list[int]:
        return [n for n in dict.fromkeys(n for value in values for n in graph.storages.numbers(value)) if size[n]]

    return {op.id: (storages(_made(op)), storages([*graph.reads(op), *_made(op)])) for op in program.ops}


@once_per_ops
def _sizes(program: Program) -> list[int]:
    """Bytes of each storage that a job allocates and frees."""
    graph = Graph(program)
    return [_live_bytes(graph, storage) for storage in graph.storages.storages]


@once_per_ops
def _later_readers(program: Program) -> list[list[tuple[int, str]]]:
    """The operations after forward that read each storage, with their part of the step."""
    graph = Graph(program)
    return [
        [
            (user.id, user.role)
            for value in (*storage.values, *storage.vectors)
            for user in graph.readers(value)
            if user.role in ("backward", "optimize")
        ]
        for storage in graph.storages.storages
    ]


def _live_bytes(graph: Graph, storage: Storage) -> int:
    """Bytes of a storage that a job allocates and frees: those of the largest result in it.

    Results that are marked as persistable do not count. Paddle marks a buffer, but not results that are written into it, so these
    count.
    """
    computed = [graph.values[value] for value in storage.values if graph.ops[graph.producer[value]].name not in NO_KERNEL]
    sizes = [value.size_bytes for value in computed if not value.persistable and value.memory == "device"]
    sizes += [storage.size_bytes for vector in storage.vectors if graph.producer[vector] == storage.producer]
    return max([0, *sizes])


def _made(op: Op) -> tuple[int, ...]:
    """Results that take memory; vectors and the tensors extracted from them take none."""
    return () if op.name in (COMBINE, SPLIT) else op.results
