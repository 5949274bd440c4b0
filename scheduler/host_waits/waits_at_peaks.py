"""Waits of the host in front of what takes memory while side streams still hold blocks that nothing issued later needs.

Where waits stand at a distance, the peak of memory may lie between two of them: on the last stage of GPT-3 6.7B the head's gathered
result (0.6 GiB) was still held when all of the loss had been issued. A wait there, for the first computation that ends after such blocks
are given back, lowers the peak to what operations hold one after the other.
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
    """Waits in front of allocations that pass a limit, as far as blocks are held that computation of the same job outlasts.

    Args:
        program: Of one rank.
        times: When its op instances were issued and ended, with the waits that there are.
        lives: When its blocks were taken and given back then.
        ended: When nothing used them any more.
        placed: The same blocks in the issue order.
        can: Which op instances can be waited for. `[num_items]`
        limit_bytes: Live device bytes.

    Returns:
        Indices in the issue order: behind the first the host waits for the second, of the same job.
    """
    bounds = job_bounds(program)
    job_first = np.repeat(bounds[:-1], np.diff(bounds))
    held = np.flatnonzero(~lives.pinned & (placed.last_read >= 0))
    held = held[ended[held] > times.issue[placed.last_read[held]]]
    held = held[np.argsort(ended[held])]
    read, free = placed.last_read[held], ended[held]
    ends = np.maximum.accumulate(np.where(can, times.end, -1))
    found: dict[int, int] = {}
    waited = 0
    for at in _above(lives, placed, limit_bytes).tolist():
        first = int(job_first[at])
        if at == first:
            continue
        start, stop = np.searchsorted(free, (max(waited, int(times.issue[at])), ends[at - 1]), side="right")
        given_back = start + np.flatnonzero(read[start:stop] < at)
        if not len(given_back):
            continue
        until = int(free[given_back[-1]])
        mine = first + np.flatnonzero(can[first:at] & (times.end[first:at] >= until))
        if len(mine):
            found[at - 1], waited = int(mine[0]), until
    return found


def _above(lives: Lives, placed: Placed, limit_bytes: int) -> Ints:
    """Op instances that take device memory above a limit, ascending."""
    taken, mine = placed.first[~lives.pinned], lives.pool("device")
    order = in_time(mine)
    live = placed.base["device"] + np.cumsum(np.r_[mine.size, -mine.size][order])
    return np.unique(taken[order[(live > limit_bytes) & (order < len(taken))]])
