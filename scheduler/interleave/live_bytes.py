"""Live memory of a pair in terms of its nodes: what a list scheduler and a local search ask step by step.

`PairMemory` is exact for a finished order. Here an operation that launches nothing counts with every node that needs it, so
that what it reads lives as long as what reads its result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from interlace.scheduler.interleave.allocations import PairMemory

Placed = tuple[str, int]


class PairBytes:
    """Storages by number, and which nodes give and read them.

    Attributes:
        size: Bytes of each storage.
        gives, reads: Storages that a node gives, and that it gives or reads. `[nodes]`
        givers, readers: Nodes of each storage.
        there: Whether a storage exists before the pair.
        stays: Whether it lives on behind it.
        start: Bytes that exist before the pair.
    """

    def __init__(self, memory: PairMemory, nodes: Sequence[Iterable[Placed]], order: Iterable[Placed]) -> None:
        self.size: list[int] = []
        self.there: list[bool] = []
        self.stays: list[bool] = []
        self._number: dict[tuple[str, int], int] = {}
        self._memory = memory
        covered = {item for items in nodes for item in items}
        self.gives = [self._numbers(items, memory.gives) for items in nodes]
        self.reads = [self._numbers(items, memory.reads) for items in nodes]
        loose = self._numbers((item for item in order if item not in covered), memory.reads)
        for storage in loose:
            self.stays[storage] = True
        self.start = memory.start
        self.givers: list[list[int]] = [[] for _ in self.size]
        self.readers: list[list[int]] = [[] for _ in self.size]
        for k, storages in enumerate(self.gives):
            for storage in storages:
                self.givers[storage].append(k)
        for k, storages in enumerate(self.reads):
            for storage in storages:
                self.readers[storage].append(k)

    def _numbers(self, items: Iterable[Placed], table: dict[Placed, list[int]]) -> list[int]:
        return list(dict.fromkeys(self._storage(item[0], storage) for item in items for storage in table[item]))

    def _storage(self, side: str, storage: int) -> int:
        key = (side, storage)
        if key not in self._number:
            self._number[key] = len(self.size)
            self.size.append(self._memory.size[storage])
            self.there.append(key in self._memory.early)
            self.stays.append(key in self._memory.stays)
        return self._number[key]


class Walk:
    """Live memory while nodes run one after another.

    Attributes:
        live: Bytes held now.
        forward: Those of forward parts.
    """

    def __init__(self, table: PairBytes, forward: Sequence[bool]) -> None:
        self.table, self.is_forward = table, forward
        self.born = list(table.there)
        self.waiting = [len(readers) for readers in table.readers]
        self.live = table.start
        self.forward = 0
        self.peak = table.start

    def need(self, node: int) -> int:
        """Bytes that a node takes."""
        return sum(self.table.size[s] for s in self.table.gives[node] if not self.born[s])

    def frees(self, node: int) -> int:
        """Bytes that end with a node."""
        return sum(self.table.size[s] for s in self.table.reads[node] if self.waiting[s] == 1 and not self.table.stays[s])

    def run(self, node: int) -> None:
        """Take, then give back."""
        table = self.table
        takes = 0
        for s in table.gives[node]:
            if not self.born[s]:
                self.born[s] = True
                takes += table.size[s]
        self.peak = max(self.peak, self.live + takes)
        for s in table.reads[node]:
            self.waiting[s] -= 1
            if not self.waiting[s] and not table.stays[s]:
                takes -= table.size[s]
        self.live += takes
        if self.is_forward[node]:
            self.forward += takes
