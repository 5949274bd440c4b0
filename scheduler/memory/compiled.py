"""`pools.best_fit`, which is the specification, compiled by numba: the same results from the same arrays.

Blocks are rows of a table, linked to their neighbours in their chunk; each pool lists its free blocks in no order.
"""

from __future__ import annotations

import numpy as np

from interlace.compiling import compiled
from interlace.ir.arrays import Ints

NONE = -1
"""No block."""


def _best_fit(order: Ints, size: Ints, pool: Ints, num_pools: int, num_steps: int) -> Ints:
    count = len(size)
    most = max(1, count * num_steps)  # an allocation makes at most one block
    table = np.full((5, most), NONE, np.int64)
    at, wide, before, after, place = table[0], table[1], table[2], table[3], table[4]
    spare, num_spare, num_blocks = np.empty(most, np.int64), 0, 0
    free, num_free = np.empty((num_pools, most), np.int64), np.zeros(num_pools, np.int64)
    held, taken, chunks = np.full(count, NONE, np.int64), np.zeros(num_pools, np.int64), np.zeros(num_pools, np.int64)
    for _ in range(num_steps):
        for event in order:
            block = event % count
            mine, wanted = pool[block], size[block]
            if event < count:
                best = NONE
                for k in range(num_free[mine]):
                    row = free[mine, k]
                    if wide[row] >= wanted and (best == NONE or (wide[row], at[row]) < (wide[best], at[best])):
                        best = row
                if best != NONE and wide[best] > wanted:  # it keeps its beginning
                    wide[best] -= wanted
                elif best != NONE:  # the whole block
                    last = free[mine, num_free[mine] - 1]
                    free[mine, place[best]], place[last], place[best] = last, place[best], NONE
                    num_free[mine] -= 1
                    held[block] = best
                    continue
                if num_spare:
                    num_spare -= 1
                    row = spare[num_spare]
                else:
                    row = num_blocks
                    num_blocks += 1
                wide[row], place[row], before[row], after[row] = wanted, NONE, best, NONE
                if best == NONE:
                    at[row] = taken[mine] + chunks[mine]
                    taken[mine] += wanted
                    chunks[mine] += 1
                else:
                    at[row] = at[best] + wide[best]
                    after[row] = after[best]
                    after[best] = row
                    if after[row] != NONE:
                        before[after[row]] = row
                held[block] = row
            elif held[block] != NONE:
                row = held[block]
                held[block] = NONE
                for side in range(2):
                    near = before[row] if side == 0 else after[row]
                    if near == NONE or place[near] == NONE:
                        continue
                    last = free[mine, num_free[mine] - 1]
                    free[mine, place[near]], place[last], place[near] = last, place[near], NONE
                    num_free[mine] -= 1
                    left, right = (near, row) if side == 0 else (row, near)
                    wide[left] += wide[right]
                    after[left] = after[right]
                    if after[left] != NONE:
                        before[after[left]] = left
                    spare[num_spare] = right
                    num_spare += 1
                    row = left
                free[mine, num_free[mine]], place[row] = row, num_free[mine]
                num_free[mine] += 1
    return taken


best_fit = compiled(_best_fit, sources=())
"""See `pools.best_fit`."""
