"""Live device memory over an order of one backward and one forward: what the pair itself takes and gives back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from interlace.ir import Graph, Op, Value
from interlace.ir.graph import cells
from interlace.ir.kinds import COMBINE, NO_KERNEL, SPLIT

Placed = tuple[str, int]


class PairMemory:
    """Bytes that each operation allocates, and the storages whose last reader decides when they are freed.

    Storages are counted once however many values share them. What backward reads from its forward is there at the start and
    goes with its last reader; what forward leaves for its backward stays. Persistable storages and values of unknown size do
    not count.

    Attributes:
        size: Bytes by storage.
        gives, reads: Storages that an operation gives, and that it gives or reads.
        start: Bytes held before the first operation.
        early, stays: Storages `(side, storage)` that exist before the pair, and that live on behind it.
    """

    def __init__(self, graph: Graph, backward: Sequence[Op], forward: Sequence[Op]) -> None:
        self.graph = graph
        self.cells = cells(graph)
        self.size: dict[int, int] = {}
        for value in graph.values.values():
            for place, size_bytes in self._bytes(value):
                self.size[place] = max(self.size.get(place, 0), size_bytes)
        self.gives: dict[Placed, list[int]] = {}
        self.reads: dict[Placed, list[int]] = {}
        self.stays = self._outliving(backward, forward)
        for side, ops in (("B", backward), ("F", forward)):
            for op in ops:
                self.gives[side, op.id] = self._storages(_made(op))
                self.reads[side, op.id] = self._storages([*graph.reads(op), *_made(op)])
        self.start = self._held_at_start(backward)

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

    def _outliving(self, backward: Sequence[Op], forward: Sequence[Op]) -> set[tuple[str, int]]:
        """Storages that a later part of the step reads."""
        stays: set[tuple[str, int]] = set()
        for side, ops in (("B", backward), ("F", forward)):
            inside = {op.id for op in ops}
            for op in ops:
                for value in (*op.operands, *op.results):
                    if value >= 0 and self._read_later(value, inside, side):
                        stays.update((side, place) for place in self.cells[value])
        return stays

    def _read_later(self, value: int, inside: set[int], side: str) -> bool:
        later = ("backward", "optimize") if side == "F" else ("optimize",)
        for alias in self.graph.aliases[self.graph.values[value].storage]:
            for user in self.graph.readers(alias):
                if user.id not in inside and (user.role in later or (side == "B" and user.role == "backward")):
                    return True
        return False

    def _held_at_start(self, backward: Sequence[Op]) -> int:
        given = {storage for op in backward for storage in self._storages(_made(op))}
        read = {storage for op in backward for storage in self._storages(self.graph.reads(op))}
        inside = {op.id for op in backward}
        self.early: set[tuple[str, int]] = set()
        for storage in read | given:
            first = min(self.graph.position[self.graph.producer[v]] for v in self.graph.aliases[storage] if v in self.graph.producer)
            if self.graph.program.ops[first].id not in inside:
                self.early.add(("B", storage))
        return sum(self.size[storage] for _, storage in self.early)


def _made(op: Op) -> tuple[int, ...]:
    """Results that take memory; putting tensors together or apart takes none."""
    return () if op.name in (COMBINE, SPLIT) else op.results
