"""Choice of the values to recompute for a given peak of memory: greedy, then without values that the peak does not require.

Only memory at the peak of Paddle's own schedule counts. Backward needs the operands of its first layer at once, so recomputing these frees
nothing on the last stage, and on other stages one micro-batch less than recomputing another layer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import msgspec
import numpy as np

from interlace.ir import OpInstance, Program
from interlace.ir.arrays import Ints
from interlace.ir.copies import index_of_items
from interlace.ir.storage import storages_of
from interlace.scheduler.jobs.parts import baseline_jobs
from interlace.scheduler.memory.live import order_curve
from interlace.scheduler.recompute.copies import Recomputation

Span = tuple[int, int, int]
"""First and last index in the order of op instances, and bytes."""
LEVELS = 1000
"""Number of the last level: at level 0 nothing is recomputed, at the last everything, and at level n enough to free n / LEVELS of the
memory that recomputation can free at the peak."""

BANNED, ROUNDS = 4, 4
"""The most expensive groups of a choice that are tried to be done without, and how often. Repetitions of a micro-batch of the first stage
of GPT-3 6.7B (pp 4, sequence 4096) at four tenths of what they can free: 3.0 ms without any, 1.54 with 1 or 4; with one round up to
2.5 % more."""


class PeakMemory:
    """Live memory of Paddle's own schedule by what is kept, section by section of the step; of sections in which the same is kept there is
    only the fullest.

    Attributes:
        least: Live bytes with everything recomputed, the most in each section. `[sections]`
        kept: What each group adds where it is kept: between forward's last reader and the repetition. `[groups, sections]`
    """

    def __init__(self, found: Recomputation) -> None:
        made = found.without([])
        made = msgspec.structs.replace(made, jobs=baseline_jobs(made))
        spans, curve = _spans(found, made, index_of_items(made)), order_curve(made)
        cuts = sorted({0, *(at for mine in spans for start, stop, _ in mine for at in (start, stop) if at < len(curve))})
        section = {at: k for k, at in enumerate(cuts)}
        self.least: Ints = np.maximum.reduceat(curve, np.array(cuts, np.int64))
        self.kept: Ints = np.zeros((len(spans), len(cuts)), np.int64)
        for row, mine in zip(self.kept, spans, strict=True):
            for start, stop, size in mine:
                row[section[start] : section.get(stop, len(cuts))] += size
        apart = fullest(self.least, self.kept)
        self.least, self.kept = self.least[apart], self.kept[:, apart]

    def curve(self, recomputed: list[int]) -> Ints:
        """Live bytes with these groups recomputed. `[sections]`"""
        curve: Ints = self.least + self.kept.sum(0) - self.kept[recomputed].sum(0)
        return curve


def fullest(least: Ints, kept: Ints) -> Ints:
    """Of sections in which every group keeps as much, the first of the fullest; in ascending order."""
    first = dict[bytes, int]()
    for at, column in enumerate(np.ascontiguousarray(kept.T)):
        alike = column.tobytes()
        if alike not in first or least[at] > least[first[alike]]:
            first[alike] = at
    return np.array(sorted(first.values()), np.int64)


def _spans(found: Recomputation, made: Program, index: dict[OpInstance, int]) -> list[list[Span]]:
    """For each group, when its memory is live only because it is kept, in every micro-batch."""
    table = storages_of(made)
    users = table.users()
    spans: list[list[Span]] = []
    for group in found.groups:
        again = {table.storages[number].producer for number in table.numbers_of(group)}
        mine = []
        for number in sorted(table.numbers_of(found.original[value] for value in group)):
            for batch in range(made.pipeline.num_micro_batches):
                start = 1 + max((index[op, batch] for op in users[number] if (op, batch) in index), default=-1)
                stop = min((index[op, batch] for op in again if (op, batch) in index), default=0)
                if 0 < start < stop:
                    mine.append((start, stop, max(0, table.storages[number].size_bytes)))
        spans.append(mine)
    return spans


class RecomputeLevels:
    """What is recomputed at each level, by index of `Recomputation.groups`.

    Attributes:
        order: The greedy order: at each step the group that lowers the peak most for its time, worked out anew as neighbours are taken;
            groups that cannot lower it come last.
        peaks: Live bytes at the peak with the first none, one, two ... of them recomputed.
    """

    def __init__(self, found: Recomputation) -> None:
        self.found, self.memory = found, PeakMemory(found)
        self.held = {value for group in found.groups for value in group}
        run = found.needed(found.groups)
        self.alone = [found.require(group, self.held - set(group), set(run)) for group in found.groups]
        self.like = {took: tuple(k for k, each in enumerate(self.alone) if each == took) for took in self.alone}
        self.order, self.peaks = self._greedy(run)
        self.known: dict[int, frozenset[int]] = {0: frozenset(), LEVELS: frozenset(self.order)}

    def at(self, level: int) -> frozenset[int]:
        """The groups that are recomputed at a level, 0 to `LEVELS`."""
        if level not in self.known:
            self.known[level] = self.within(self._limit(level))
        return self.known[level]

    def _limit(self, level: int) -> int:
        """The peak that a level may have."""
        most, least = self.peaks[0], min(self.peaks)
        return most - (most - least) * level // LEVELS

    def least(self, limit: int, peak: Callable[[int], int]) -> int:
        """The least level whose peak is within a limit; the last where none is. `peak` of a level is slow, so it is asked for few of them:
        it differs from the peak that is counted here by bytes that are nearly the same for neighbouring levels."""
        below, within, stride = -1, LEVELS, 1
        more = 0
        while within - below > 1:
            at = bisect_left(range(LEVELS), True, key=lambda level: self._limit(level) <= limit + more)
            if not below < at < within:
                middle = (below + within) // 2
                at = max(within - stride, middle) if at >= within else min(below + stride, middle)
                stride *= 2
            found = peak(at)
            more = self._limit(at) - found
            below, within = (below, at) if found <= limit else (at, within)
        return within

    def took_ns(self, chosen: frozenset[int]) -> int:
        """Time of all repetitions that a choice needs, per micro-batch."""
        again = [value for k in sorted(chosen) for value in self.found.groups[k]]
        return self.found.require(again, self.held - set(again), set())

    def within(self, limit: int) -> frozenset[int]:
        """A choice whose peak is within a limit, or everything: of the greedy order, and then of that order without one of the groups it
        gave, or all like it, as long as that takes less time."""
        if self.peaks[0] <= limit:
            return frozenset()
        best, order = self._along(self.order, limit), self.order
        if best is None:
            return frozenset(order)
        for _ in range(ROUNDS):
            costly = sorted(best[1], key=lambda k: (-self.alone[k], k))[:BANNED]
            bans = dict.fromkeys(ban for k in costly for ban in ((k,), self.like[self.alone[k]]))
            tried = [(found, ban) for ban in bans if (found := self._along([k for k in order if k not in ban], limit)) is not None]
            found, ban = min(tried, default=(best, ()))
            if found >= best:
                break
            best, order = found, [k for k in order if k not in ban]
        return frozenset(best[1])

    def _along(self, order: list[int], limit: int) -> tuple[int, list[int]] | None:
        """The first groups of an order that together reach the limit, less those that it does not need, and before them the time of all."""
        peaks = self.memory.curve([]) - np.cumsum(self.memory.kept[order], axis=0)
        reached = np.flatnonzero(peaks.max(axis=1) <= limit)
        if not len(reached):
            return None
        chosen = self._cleared(order[: reached[0] + 1], limit)
        return self.took_ns(chosen), sorted(chosen)

    def _cleared(self, found: list[int], limit: int) -> frozenset[int]:
        """A choice without the groups, tried most expensive first, that can be kept within the limit."""
        chosen, curve = set(found), self.memory.curve(found)
        for k in sorted(found, key=lambda k: (-self.alone[k], k)):
            if (curve + self.memory.kept[k]).max() <= limit:
                curve = curve + self.memory.kept[k]
                chosen.remove(k)
        return frozenset(chosen)

    def _greedy(self, run: set[int]) -> tuple[list[int], list[int]]:
        found, held, took = self.found, set(self.held), list(self.alone)
        left, order, curve = dict.fromkeys(range(len(took))), list[int](), self.memory.curve([])
        peaks = [int(curve.max())]
        while left:
            at_peak = self.memory.kept[:, int(curve.argmax())]
            freed = at_peak.tolist() if any(at_peak[k] for k in left) else [found.bytes_of(group) for group in found.groups]
            open_ = [k for k in left if freed[k]] or list(left)
            best, sure = -1, set[int]()
            while best not in sure:
                sure.add(best)
                best = min(open_, key=lambda k: (took[k] / max(1, freed[k]), k))
                took[best] = found.require(found.groups[best], held - set(found.groups[best]), set(run))
            del left[best]
            held -= set(found.groups[best])
            found.require(found.groups[best], held, run)
            curve = curve - self.memory.kept[best]
            order.append(best)
            peaks.append(int(curve.max()))
        return order, peaks
