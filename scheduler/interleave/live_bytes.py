"""Live memory of a pair in terms of the nodes that planners order.

`PairMemory` is exact for a finished order. Here an operation that launches nothing belongs to every node that needs it, so its operands
stay live as long as the readers of its result need them.

`Walk` runs a complete order; `local_search.Search` computes the same for only the part of an order that a move changes, which makes
a move cheap (`test_local_search.py` compares them at every index).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from interlace.scheduler.interleave.allocations import PairMemory, PairOp
from interlace.scheduler.interleave.columns import inverted


class PairBytes:
    """Storages by number, and the nodes that allocate and read them.

    Attributes:
        size: Bytes of each storage.
        allocs, reads: Storages that a node allocates, and that it allocates or reads. `[nodes]`
        allocators, readers: Nodes of each storage.
        live_before, live_after: Whether a storage is live before the pair, and after it.
        start: Live bytes before the pair.
    """

    def __init__(self, memory: PairMemory, nodes: Sequence[Iterable[PairOp]], order: Iterable[PairOp]) -> None:
        self.size: list[int] = []
        self.live_before: list[bool] = []
        self.live_after: list[bool] = []
        self._number: dict[tuple[str, int], int] = {}
        self._memory = memory
        covered = {item for items in nodes for item in items}
        self.allocs = [self._numbers(items, memory.allocs) for items in nodes]
        self.reads = [self._numbers(items, memory.reads) for items in nodes]
        loose = self._numbers((item for item in order if item not in covered), memory.reads)
        for storage in loose:
            self.live_after[storage] = True
        self.start = memory.start
        self.allocators, self.readers = (inverted(listed, len(self.size)) for listed in (self.allocs, self.reads))

    def _numbers(self, items: Iterable[PairOp], table: dict[PairOp, list[int]]) -> list[int]:
        return list(dict.fromkeys(self._storage(item[0], storage) for item in items for storage in table[item]))

    def _storage(self, side: str, storage: int) -> int:
        key = (side, storage)
        if key not in self._number:
            self._number[key] = len(self.size)
            self.size.append(self._memory.size[storage])
            self.live_before.append(key in self._memory.live_before)
            self.live_after.append(key in self._memory.live_after)
        return self._number[key]


class Walk:
    """Live memory, now and at its peak so far, while nodes run one after another."""

    def __init__(self, table: PairBytes) -> None:
        self.table = table
        self.born = list(table.live_before)
        self.waiting = [len(readers) for readers in table.readers]
        self.live = self.peak = table.start

    def need(self, node: int) -> int:
        """Bytes that a node allocates."""
        return sum(self.table.size[s] for s in self.table.allocs[node] if not self.born[s])

    def run(self, node: int) -> None:
        """Allocate, then free."""
        table = self.table
        change = 0
        for s in table.allocs[node]:
            if not self.born[s]:
                self.born[s] = True
                change += table.size[s]
        self.peak = max(self.peak, self.live + change)
        for s in table.reads[node]:
            self.waiting[s] -= 1
            if not self.waiting[s] and not table.live_after[s]:
                change -= table.size[s]
        self.live += change
