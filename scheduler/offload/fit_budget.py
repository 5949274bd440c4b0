"""The least to move under a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from interlace.scheduler.offload.copy_times import OpenTrip, Placement, Span, order_key

if TYPE_CHECKING:
    from interlace.scheduler.offload.planner import Planner

Ints = npt.NDArray[np.int64]
PATIENCE = 3
"""Placements for one budget that bring the excess no lower before the search gives up; two or three in all are the rule."""
SEARCH_ROUNDS = 8
"""Budgets tried on the way to the least feasible one: to a 256th of the range between a refused and a feasible one."""
FAR = 1 << 62


def curve(change: Ints, extra: Iterable[Span]) -> Ints:
    """Sums from left to right of changes and spans, `[num_items]`."""
    change = change.copy()
    for start, stop, size in extra:
        change[start] += size
        change[stop] -= size
    return np.cumsum(change)[:-1]


_Windows = tuple[Ints, Ints, Ints]
_Step = Callable[[Ints, _Windows, list[bool]], bool]


class Fit:
    """Search for the least to move under a budget.

    Steps: 1 place what is taken and look where memory is over the budget; 2 at each such moment take the trip that covers
    most of the excess for its bytes; 3 where none is left, let returns come later; 4 drop trips that are not needed after
    all; 5 if that fails, the same with later returns tried before more trips; 6 the last resort is everything out and back
    just in time.
    """

    def __init__(self, planner: Planner, trips: Sequence[OpenTrip]) -> None:
        self.planner = planner
        self.trips = sorted(trips, key=order_key(lambda t: -t.saved.freed_bytes))
        self.early, self.late = self._windows(False), self._windows(True)

    def run(self, budget: int) -> Placement | None:
        """A placement that holds the budget, None without one."""
        if self._bound() > budget:
            return None
        found = self._search(budget, self.early, (self._cover, self._delay))
        found = found or self._search(budget, self.late, (self._delay, self._cover))
        last = found or self._last_resort()
        return last if self.planner.peak(last) <= budget else None

    def _search(self, budget: int, windows: _Windows, steps: Sequence[_Step]) -> Placement | None:
        self._hold(False)
        taken = [False] * len(self.trips)
        least, patience = FAR, PATIENCE
        while patience:
            placed = self._place(taken)
            over = self._over(placed, budget)
            excess = int(over.clip(min=0).sum())
            if not excess:
                return self._pruned(taken, placed, over, budget)
            least, patience = (excess, PATIENCE) if excess < least else (least, patience - 1)
            if not any(step(over, windows, taken) for step in steps):
                break
        return None

    def least(self, refused: int) -> int:
        """The least budget found to hold; `refused` does not."""
        low, high = max(refused, self._bound() - 1), self.planner.peak(self._last_resort())
        for _ in range(SEARCH_ROUNDS):
            if high - low <= 1:
                break
            middle = (low + high) // 2
            found = self.run(middle)
            low, high = (low, self.planner.peak(found)) if found is not None else (middle, high)
        return high

    def _bound(self) -> int:
        """A peak that no placement is below: everything out as if alone, back just in time."""
        free = zip(self.trips, self.late[0].tolist(), strict=True)
        spans = ((start, trip.reader, -trip.saved.freed_bytes) for trip, start in free if start < trip.reader)
        return int(self.planner.curve(spans).max(initial=0))

    def _last_resort(self) -> Placement:
        self._hold(True)
        return self.planner.place(self.trips)

    def _hold(self, late: bool) -> None:
        for trip in self.trips:
            trip.not_before = trip.reader if late else 0

    def _place(self, taken: Sequence[bool]) -> Placement:
        return self.planner.place([trip for trip, wanted in zip(self.trips, taken, strict=True) if wanted])

    def _over(self, placed: Placement, budget: int) -> Ints:
        return self.planner.curve(placed.freed()) - budget

    # What each trip would free if it were the only one: first place, end, bytes.
    def _windows(self, late: bool) -> _Windows:
        self._hold(late)
        for trip in self.trips:
            self.planner.place([trip])
        return (np.array([t.free for t in self.trips], np.int64), np.array([t.back for t in self.trips], np.int64),
                np.array([t.saved.freed_bytes for t in self.trips], np.int64))  # fmt: skip

    def _cover(self, over: Ints, windows: _Windows, taken: list[bool]) -> bool:
        free, back, size = windows
        open_, any_taken = ~np.array(taken, bool), False
        count = np.concatenate([[0], np.cumsum(over > 0)])
        excess, at = over.copy(), _next_over(over, 0)
        while at < len(excess):
            fits = np.flatnonzero(open_ & (free <= at) & (at < back))
            if len(fits):
                useful = (count[back[fits]] - count[at]) * np.minimum(size[fits], excess[at]) / size[fits]
                best = int(fits[int(np.argmax(useful))])
                taken[best], open_[best], any_taken = True, False, True
                excess[free[best] : back[best]] -= size[best]
            at = _next_over(excess, at if len(fits) else _next_start(free[open_], at))
        return any_taken

    def _delay(self, over: Ints, windows: _Windows, taken: list[bool]) -> bool:
        early = [trip for trip, wanted in zip(self.trips, taken, strict=True) if wanted and trip.back < trip.reader]
        early.sort(key=order_key(lambda t: -t.reader))
        back = np.array([max(trip.back, trip.not_before) for trip in early], np.int64)
        reader = np.array([trip.reader for trip in early], np.int64)
        excess, at = over.copy(), _next_over(over, 0)
        delayed = False
        while at < len(excess):
            fits = np.flatnonzero((back <= at) & (at < reader))
            if len(fits):
                first, end = int(fits[0]), at + int(np.argmax(np.append(excess[at:] <= 0, True)))
                early[first].not_before = back[first] = min(end, early[first].reader)
                excess[at : back[first]] -= early[first].saved.freed_bytes
                delayed = True
            at = _next_over(excess, at if len(fits) else _next_start(back, at))
        return delayed

    def _pruned(self, taken: list[bool], placed: Placement, over: Ints, budget: int) -> Placement:
        fewer = list(taken)
        room = -over
        for k, trip in enumerate(self.trips):
            if fewer[k] and trip.free < trip.back and room[trip.free : trip.back].min() >= trip.saved.freed_bytes:
                fewer[k] = False
                room[trip.free : trip.back] -= trip.saved.freed_bytes
        if fewer != taken:
            smaller = self._place(fewer)
            if self._over(smaller, budget).max(initial=0) <= 0:
                return smaller
        return self._place(taken)


def _next_over(excess: Ints, at: int) -> int:
    """The first place from `at` on that is above 0, else the end."""
    at = min(at, len(excess))
    return at + int(np.argmax(np.append(excess[at:] > 0, True)))


def _next_start(starts: Ints, at: int) -> int:
    """The least start behind `at`; far away where there is none."""
    return int(starts[starts > at].min(initial=FAR))
