"""Memory inside a captured step: a block that another stream reads last is reused once its own stream is ordered after that reader.

No host can observe there that a reader has completed, so only the order of the graph frees memory. A block whose own stream never waits
for the reader is held until the end of the step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

from interlace.grouping import grouped
from interlace.ir import Program
from interlace.ir.copies import items_of
from interlace.ir.target import GPU
from interlace.scheduler.hazards.check import trace_of
from interlace.scheduler.hazards.happens_before import Trace
from interlace.scheduler.memory.live import END, Lives, OrderMemory, Profile


def graph_memory(program: Program) -> Profile:
    """Memory of a scheduled program's captured step; moments are indices in the order of its jobs."""
    trace = trace_of(program, GPU)
    items = items_of(program)
    place = np.array([trace.plan.index[op_id, m] for op_id, m in items.tolist()], np.int64)
    planner = OrderMemory(program)
    count = np.arange(len(items), dtype=np.int64)
    placed = planner.placed(items, np.array(trace.plan.stream, np.int64)[place])
    lives = placed.lives(count, count + 1)
    if placed.away is not None:
        _hold(lives, placed.first, placed.away_row.tolist(), placed.away.tolist(), trace, place.tolist())
    return Profile(program, lives, placed.base, placed.unknown)


def _hold(lives: Lives, first: np.ndarray, rows: list[int], readers: list[int], trace: Trace, place: list[int]) -> None:
    stream = trace.plan.stream
    mine = grouped((stream[item], index) for index, item in enumerate(place))
    known: dict[tuple[int, int], int] = {}
    for row, reader in zip(rows, readers, strict=True):
        own = stream[place[int(first[row])]]
        if (own, reader) not in known:
            known[own, reader] = _behind(trace, place, mine[own], reader)
        lives.free_at[row] = max(lives.free_at[row], known[own, reader])


def _behind(trace: Trace, place: list[int], mine: list[int], reader: int) -> int:
    """The first op instance in `mine`, those of one stream, that is ordered after the reader; `END` if there is none.

    All later op instances of the stream are then after the reader too, so the first is found by bisection.
    """
    first = bisect_left(mine, True, bisect_right(mine, reader), key=lambda index: trace.before(place[reader], place[index]))
    return mine[first] if first < len(mine) else END
