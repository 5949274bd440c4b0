"""Live device memory over an order of the operations of one job: what the job allocates and frees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.ir import Graph, Op, Program
from interlace.ir.kinds import COMBINE, NO_KERNEL, SPLIT
from interlace.ir.per_ops import once_per_ops
from interlace.ir.storage import Storage

PairOp = tuple[str, int]
"""An operation of a pair: label of its part, operation id."""


@dataclass(frozen=True, slots=True)
class PartOps:
    """One part of a job: its label (unique in the job), its kind (`F`, `B`, `I` or `W`) and its operations in program order.

    Attributes:
        fillers: Weight gradients beside input gradients (`at_once`), by id.
    """

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
        last: dict[tuple[str, int], int] = {}
        for k, item in enumerate(order):
            for storage in self.reads[item]:
                last[item[0], storage] = k
        frees: dict[int, int] = {}
        for (side, storage), k in last.items():
            if (side, storage) not in self.live_after:
                frees[k] = frees.get(k, 0) + self.size[storage]
        live = peak = self.start
        born: set[tuple[str, int]] = set()
        for k, item in enumerate(order):
            for storage in self.allocs[item]:
                if (item[0], storage) not in born and (item[0], storage) not in self.live_before:
                    born.add((item[0], storage))
                    live += self.size[storage]
            peak = max(peak, live)
            live -= frees.get(k, 0)
        return peak

    def _temporary(self, part: PartOps) -> set[int]:
        """Storages that the optimizer allocates and frees; it writes parameters and states into others."""
        inside = {op.id for op in part.ops}
        return {n for n, storage in enumerate(self.storages.storages) if storage.producer in inside and not storage.persistable}

    def _live_later(self, part: PartOps) -> set[tuple[str, int]]:
        """Storages that a later part of the step reads."""
        inside = {op.id for op in part.ops}
        accessed = {n for op in part.ops for value in (*op.operands, *op.results) for n in self.storages.numbers(value)}
        return {(part.label, n) for n in accessed if self._read_later(n, inside, part.kind)}

    def _read_later(self, storage: int, inside: set[int], kind: str) -> bool:
        return any(reader not in inside and (kind != "W" or role == "optimize") for reader, role in self.later_readers[storage])

    def _live_earlier(self, part: PartOps) -> set[tuple[str, int]]:
        """Storages that a backward reads or writes and that its forward, or an earlier part of its backward, allocated."""
        accessed = {n for op in part.ops for n in self.reads[part.label, op.id]}
        inside = {op.id for op in part.ops}
        return {(part.label, n) for n in accessed if self.storages.storages[n].producer not in inside}


@once_per_ops
def _accesses(program: Program) -> dict[int, tuple[list[int], list[int]]]:
    """By operation the storages with bytes that it allocates, and that it allocates or reads; nobody may change the lists."""
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
    return [[(user.id, user.role) for value in (*storage.values, *storage.vectors) for user in graph.readers(value)
             if user.role in ("backward", "optimize")] for storage in graph.storages.storages]  # fmt: skip


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
