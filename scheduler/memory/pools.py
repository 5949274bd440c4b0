"""Device memory that Paddle's allocator takes for steps that follow one another, free blocks included.

On a GPU each stream has a pool of its own (`FLAGS_allocator_strategy=auto_growth`). A request gets the end of the smallest free block that
is large enough; the rest of that block stays free, and free neighbours are merged. Without such a block the pool takes a chunk of exactly
the size of the request from the device, and never gives it back unless memory runs out. So a pool may hold more than its tensors did
at their peak, and pools together more than all tensors did at theirs: what one stream frees is of no use to another.

Source: paddle/phi/core/memory/allocation/auto_growth_best_fit_allocator.cc (3.3). `best_fit` is the specification and its compiled twin,
`compiled.best_fit`, gives the same results; a test compares both with the allocator of the installed Paddle.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

import numpy as np

from interlace.ir.arrays import Ints
from interlace.ir.target import Target
from interlace.scheduler.memory.live import END, Profile, in_time

ALIGNMENT = 256
"""Bytes of which every block is a multiple."""
STEPS = 4
"""Steps that are simulated, each in the memory that the one before it left. Most plans take nothing more from the second or third on."""


def reserved_bytes(profiles: Sequence[Profile], target: Target) -> int | None:
    """Device bytes that parameters and the pools of all streams take on the fullest of these ranks, for steps like theirs; None if there is
    no profile, or the target's memory is not simulated by pools, as on custom devices and in captured steps."""
    if not target.has_pools:
        return None
    return max((each.persistable_bytes() + sum(pool_bytes(each).values()) for each in profiles), default=None)


def pool_bytes(profile: Profile) -> dict[int, int]:
    """Bytes that the pool of each stream has taken from the device after `STEPS` steps, by number of the stream. Tensors without bytes take
    none; what lives into the next step is freed in it, or at its end."""
    lives = profile.lives.rows(~profile.lives.pinned & (profile.lives.size > 0))
    if profile.step is not None:  # what lives into the next step is freed there
        lives.free_at = np.where((lives.free_at > profile.step) & (lives.free_at < END), lives.free_at - profile.step, lives.free_at)
    streams, pool = np.unique(lives.stream, return_inverse=True)
    size = (lives.size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    taken = _best_fit()(in_time(lives), size, pool.astype(np.int64), len(streams), STEPS)
    return dict(zip(streams.tolist(), taken.tolist(), strict=True))


def best_fit(order: Ints, size: Ints, pool: Ints, num_pools: int, num_steps: int) -> Ints:
    """Bytes that each pool has taken from the device. `[num_pools]`

    Args:
        order: Allocations (numbers below `n`, for n blocks) and frees (from `n` on) of one step, in the order in which they happen. A free
            that comes before its allocation frees the block of the step before. `[2 n]`
        size, pool: Bytes of each block, and the number of its pool. `[n]`
    """
    pools, sizes, of = [_Pool() for _ in range(num_pools)], size.tolist(), pool.tolist()
    count, held = len(sizes), dict[int, int]()
    for _ in range(num_steps):
        for event in order.tolist():
            block = event % count
            if event < count:
                held[block] = pools[of[block]].take(sizes[block])
            elif block in held:
                pools[of[block]].give(held.pop(block), sizes[block])
    return np.array([each.taken for each in pools], np.int64)


class _Pool:
    """One stream's pool. Chunks are placed one after another with a gap between them, so that blocks of different chunks never merge."""

    def __init__(self) -> None:
        self.taken = self.chunks = 0
        self.free: list[tuple[int, int]] = []
        """Size and address of each free block, sorted."""
        self.size_at: dict[int, int] = {}
        """Address of a free block -> its size."""
        self.ends: dict[int, int] = {}
        """Where a free block ends -> its address."""

    def take(self, size: int) -> int:
        """The address of a block."""
        found = bisect_left(self.free, (size, -1))
        if found == len(self.free):
            address = self.taken + self.chunks
            self.taken, self.chunks = self.taken + size, self.chunks + 1
            return address
        whole, address = self.free[found]
        self._remove(address)
        if whole > size:
            self._add(address, whole - size)
        return address + whole - size

    def give(self, address: int, size: int) -> None:
        """Free a block."""
        if (before := self.ends.get(address)) is not None:
            size += self._remove(before)
            address = before
        if address + size in self.size_at:
            size += self._remove(address + size)
        self._add(address, size)

    def _add(self, address: int, size: int) -> None:
        insort(self.free, (size, address))
        self.size_at[address], self.ends[address + size] = size, address

    def _remove(self, address: int) -> int:
        """Take a block out of the free ones; returns its size."""
        size = self.size_at.pop(address)
        del self.ends[address + size], self.free[bisect_left(self.free, (size, address))]
        return size


def _best_fit() -> Callable[[Ints, Ints, Ints, int, int], Ints]:
    """The compiled twin if the compiled simulator is loaded, as for large plans."""
    if "interlace.scheduler.simulate.compiled" in sys.modules:
        from interlace.scheduler.memory import compiled

        twin: Callable[[Ints, Ints, Ints, int, int], Ints] = compiled.best_fit
        return twin
    return best_fit
