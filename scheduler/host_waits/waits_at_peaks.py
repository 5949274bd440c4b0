"""Waits of the host before allocations that are made while side streams still hold blocks that nothing issued later needs.

With regularly spaced waits, the peak of memory may lie between two of them: on the last stage of GPT-3 6.7B, the gathered result of the
head (0.6 GiB) was still held when the whole loss had been issued. A wait there, for the first computation that ends after enough of such
blocks are freed, lowers the peak to the limit, or to that of running the operations one after the other.
"""

from __future__ import annotations

import numpy as np

from interlace.ir import Program
from interlace.ir.arrays import Flags, Ints
from interlace.ir.copies import job_bounds
from interlace.scheduler.memory.live import Lives, Placed, in_time
from interlace.scheduler.simulate.simulator import Times


def waits_at_peaks(
    program: Program, times: Times, lives: Lives, ended: Ints, placed: Placed, can: Flags, limit_bytes: int
) -> dict[int, int]:
    """Waits before allocations that exceed a limit, if blocks are held there that are freed before some earlier computation of the job
    ends. Each wait is for no more blocks than must be free for the allocation, so that the host stays as far ahead as the limit allows.
    What one wait frees counts as free for all allocations after it, so that waits are few; another round sees what they leave.

    Args:
        program: Program of one rank.
        times: Times of its op instances with the present waits.
        lives: Lifetimes of its blocks at these times.
        ended: When each block was last used, in nanoseconds. `[instances]`
        placed: The same blocks in the issue order.
        can: Whether the host can wait for an op instance. `[num_items]`
        limit_bytes: Limit of live device bytes.

    Returns:
        Indices in the issue order: after the first, the host waits for the second, which is in the same job.
    """
    bounds = job_bounds(program)
    job_first = np.repeat(bounds[:-1], np.diff(bounds))
    held = np.flatnonzero(~lives.pinned & (placed.last_read >= 0))
    held = held[ended[held] > times.issue[placed.last_read[held]]]
    held = held[np.argsort(ended[held])]
    read, free, size = placed.last_read[held], ended[held], lives.size[held]
    ends = np.maximum.accumulate(np.where(can, times.end, -1))
    found: dict[int, int] = {}
    waited = freed = 0
    for at, over_bytes in _above(lives, placed, limit_bytes):
        first = int(job_first[at])
        if at == first or over_bytes <= freed:
            continue
        start, stop = np.searchsorted(free, (max(waited, int(times.issue[at])), ends[at - 1]), side="right")
        given_back = start + np.flatnonzero(read[start:stop] < at)
        if not len(given_back):
            continue
        more = np.cumsum(size[given_back])
        enough = min(int(np.searchsorted(more, over_bytes - freed)), len(more) - 1)
        until = int(free[given_back[enough]])
        mine = first + np.flatnonzero(can[first:at] & (times.end[first:at] >= until))
        if len(mine):
            found[at - 1], waited = int(mine[0]), until
            freed += int(more[enough])
    return found


def _above(lives: Lives, placed: Placed, limit_bytes: int) -> list[tuple[int, int]]:
    """Op instances whose allocations exceed a limit of live device bytes, ascending, and by how much."""
    taken, mine = placed.first[~lives.pinned], lives.pool("device")
    order = in_time(mine)
    over = placed.base["device"] + np.cumsum(np.r_[mine.size, -mine.size][order]) - limit_bytes
    allocates = order < len(taken)
    most = np.zeros(1 + int(taken.max(initial=-1)), np.int64)
    np.maximum.at(most, taken[order[allocates]], over[allocates])
    return [(at, int(most[at])) for at in np.flatnonzero(most).tolist()]
