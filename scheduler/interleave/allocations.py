"""Live device memory over an order of the parts of one job: what the job itself allocates and frees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from interlace.ir import Graph, Op, Value
from interlace.ir.graph import cells
from interlace.ir.kinds import COMBINE, NO_KERNEL, SPLIT

Placed = tuple[str, int]
"""Label of a part, operation id."""


@dataclass(frozen=True, slots=True)
class PartOps:
    """One part of a job: its label (unique in the job), its kind (`F`, `B`, `I` or `W`) and its operations in program order."""

    label: str
    kind: str
    ops: Sequence[Op]


class PairMemory:
    """Bytes that each operation allocates, and the storages whose last reader decides when they are freed.

    Storages are counted once however many values share them. What backward reads from its forward is there at the start and
    goes with its last reader; what forward leaves for its backward stays. Persistable storages and values of unknown size do
    not count.

    Attributes:
        size: Bytes by storage.
        gives, reads: Storages that an operation gives, and that it gives or reads.
        start: Bytes held before the first operation.
        early, stays: Storages `(label, storage)` that exist before the job, and that live on after it.
    """

    def __init__(self, graph: Graph, parts: Sequence[PartOps]) -> None:
        self.graph = graph
        self.cells = cells(graph)
        self.size: dict[int, int] = {}
        for value in graph.values.values():
            for place, size_bytes in self._bytes(value):
                self.size[place] = max(self.size.get(place, 0), size_bytes)
        self.gives: dict[Placed, list[int]] = {}
        self.reads: dict[Placed, list[int]] = {}
        self.stays: set[tuple[str, int]] = set()
        self.early: set[tuple[str, int]] = set()
        for part in parts:
            for op in part.ops:
                self.gives[part.label, op.id] = self._storages(_made(op))
                self.reads[part.label, op.id] = self._storages([*graph.reads(op), *_made(op)])
            self.stays |= self._outliving(part)
            self.early |= self._there_before(part) if part.kind != "F" else set()
        self.start = sum(self.size[storage] for _, storage in self.early)

    def peak(self, order: Sequence[Placed]) -> int:
        """Highest number of live bytes over the order, of what the pair allocates or frees. O(operands)."""
        last: dict[tuple[str, int], int] = {}
        for k, item in enumerate(order):
            for storage in self.reads[item]:
                last[item[0], storage] = k
        frees: dict[int, int] = {}
        for (side, storage), k in last.items():
            if (side, storage) not in self.stays:
                frees[k] = frees.get(k, 0) + self.size[storage]
        live = peak = self.start
        born: set[tuple[str, int]] = set()
        for k, item in enumerate(order):
            for storage in self.gives[item]:
                if (item[0], storage) not in born and (item[0], storage) not in self.early:
                    born.add((item[0], storage))
                    live += self.size[storage]
            peak = max(peak, live)
            live -= frees.get(k, 0)
        return peak

    def _bytes(self, value: Value) -> Iterable[tuple[int, int]]:
        """Bytes by storage: of a vector that a kernel gives, those of its tensors."""
        giver = self.graph.producer_op(value.id)
        if value.persistable or value.memory != "device" or (giver is not None and giver.name in NO_KERNEL):
            return [(place, 0) for place in self.cells[value.id]]
        places = self.cells[value.id]
        if value.dtype == "vector" and len(places) == len(value.elements):
            return [(place, max(part.size_bytes, 0)) for place, part in zip(places, value.elements, strict=True)]
        return [(place, max(value.size_bytes, 0)) for place in places]

    def _storages(self, values: Sequence[int]) -> list[int]:
        found = dict.fromkeys(place for value in values for place in self.cells[value])
        return [place for place in found if self.size[place]]

    def _outliving(self, part: PartOps) -> set[tuple[str, int]]:
        """Storages that a later part of the step reads."""
        inside = {op.id for op in part.ops}
        values = {value for op in part.ops for value in (*op.operands, *op.results) if value >= 0}
        return {(part.label, place) for value in values if self._read_later(value, inside, part.kind) for place in self.cells[value]}

    def _read_later(self, value: int, inside: set[int], kind: str) -> bool:
        later = {"F": ("backward", "optimize"), "W": ("optimize",)}.get(kind, ("backward", "optimize"))
        for alias in self.graph.aliases[self.graph.values[value].storage]:
            if any(user.id not in inside and user.role in later for user in self.graph.readers(alias)):
                return True
        return False

    def _there_before(self, part: PartOps) -> set[tuple[str, int]]:
        """Storages that a backward reads or writes and that its forward, or an earlier part of its backward, made."""
        made = {storage for op in part.ops for storage in self._storages(_made(op))}
        read = {storage for op in part.ops for storage in self._storages(self.graph.reads(op))}
        inside = {op.id for op in part.ops}
        found = set()
        for storage in read | made:
            first = min(self.graph.position[self.graph.producer[v]] for v in self.graph.aliases[storage] if v in self.graph.producer)
            if self.graph.program.ops[first].id not in inside:
                found.add((part.label, storage))
        return found


def _made(op: Op) -> tuple[int, ...]:
    """Results that take memory; putting tensors together or apart takes none."""
    return () if op.name in (COMBINE, SPLIT) else op.results
