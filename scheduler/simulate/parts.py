"""The intervals in which a rank does not compute, each assigned to a part of the step; `split_rank` returns only their sums."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from interlace.ir.arrays import Ints
from interlace.scheduler.simulate.simulator import Result, columns_of, gap_spans, gaps, host_ends, waited_for, waiters


class Parts(NamedTuple):
    """Disjoint intervals `[n, 2]` of a rank's step (start and end in nanoseconds, ascending), for the parts defined in
    `scheduler/simulate/simulator.py`. The rest of the step is compute."""

    exposed: Ints
    host: Ints
    bubble: Ints


def parts_of(result: Result, at: int) -> Parts:
    """The parts of the span of the rank with index `at`. If steps do not overlap, their lengths equal those in its `RankTime`; otherwise
    together they are longer by that time. Cost O(items log items)."""
    rank = columns_of(result.input, result.times, at)
    host_end = int(host_ends(result.input, result.times)[at])
    gap_from, gap_to, gap_next, _ = gaps(rank, result.span_ns)
    begin, chain = waited_for(rank, waiters(rank), gap_from, gap_to)
    syncs = np.flatnonzero(rank.awaits >= 0)
    found: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
    for gap, (low, high) in enumerate(zip(gap_from.tolist(), gap_to.tolist(), strict=True)):
        busy = min(high, host_end if gap == len(gap_from) - 1 else int(rank.issue[gap_next[gap]]))
        n, spans = gap_spans(rank, low, high, busy, int(begin[gap]), chain, syncs, rank.issue[syncs])
        runs, before_host, whole = (union(part) for part in (spans[:n], spans[:-1], np.array([[low, high]])))
        host = without(union(spans[-1:]), before_host)
        found[0].append(runs)
        found[1].append(host)
        found[2].append(without(whole, union(np.concatenate([runs, host]))))
    return Parts(*(np.concatenate([np.empty((0, 2), np.int64), *each]) for each in found))


def union(spans: Ints) -> Ints:
    """Union of intervals, as disjoint ascending intervals; an interval that ends before it starts counts as empty.

    >>> union(np.array([[5, 9], [0, 3], [2, 4], [7, 7]])).tolist()
    [[0, 4], [5, 9]]
    """
    found: list[list[int]] = []
    for low, high in sorted(spans.tolist()):
        if high <= low:
            continue
        if found and low <= found[-1][1]:
            found[-1][1] = max(found[-1][1], high)
        else:
            found.append([low, high])
    return np.array(found, np.int64).reshape(-1, 2)


def without(spans: Ints, others: Ints) -> Ints:
    """The first intervals minus the others; both must be disjoint and ascending.

    >>> without(np.array([[0, 9]]), np.array([[0, 2], [4, 5]])).tolist()
    [[2, 4], [5, 9]]
    """
    found = []
    for low, high in spans.tolist():
        for start, end in others.tolist():
            if end <= low or start >= high:
                continue
            if start > low:
                found.append([low, start])
            low = max(low, end)
        if high > low:
            found.append([low, high])
    return np.array(found, np.int64).reshape(-1, 2)


def overlap(spans: Ints, others: Ints) -> Ints:
    """Length of each interval that lies inside the others, which must be disjoint and ascending. `[n]`; cost O((n + m) log m).

    >>> overlap(np.array([[0, 4], [3, 9]]), np.array([[1, 2], [3, 5]])).tolist()
    [2, 2]
    """
    if not len(others):
        return np.zeros(len(spans), np.int64)
    before = np.concatenate([[0], np.cumsum(others[:, 1] - others[:, 0])])

    def upto(moments: Ints) -> Ints:
        at = np.searchsorted(others[:, 0], moments, side="right")
        inside = np.minimum(moments, others[np.maximum(at - 1, 0), 1]) - others[np.maximum(at - 1, 0), 0]
        counted: Ints = np.where(at > 0, before[np.maximum(at - 1, 0)] + inside, 0)
        return counted

    return upto(spans[:, 1]) - upto(spans[:, 0])
