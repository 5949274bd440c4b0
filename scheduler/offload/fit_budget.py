"""Search for the fewest transfers under a budget of device memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from interlace.ir.arrays import Ints
from interlace.scheduler.offload.copy_times import OpenTransfer, Placement, Span, order_key, placed_alone

if TYPE_CHECKING:
    from interlace.scheduler.offload.planner import Planner

PATIENCE = 3
"""Placements in a row that do not lower the excess before the search for a budget gives up; most searches need two or three in all."""
FAR = 1 << 62
NEAR = 256
"""Number of op instances that are looked at first for the next one in or out of the excess."""


def spanned(spans: Iterable[Span], count: int) -> Ints:
    """Bytes that spans add at each of so many op instances. `[count]`"""
    change = np.zeros(count + 1, np.int64)
    for start, stop, size in spans:
        change[start] += size
        change[stop] -= size
    return np.cumsum(change)[:-1]


_Windows = tuple[Ints, Ints, Ints]
"""Of each transfer: first index and end of the time off the device, and the bytes freed."""
_Step = Callable[[Ints, _Windows], bool]


class Fit:
    """Search for the least to move under a budget.

    The search keeps transfers of its own, each as it was last placed, and leaves those that it was given as they are.

    Steps: 1 place the chosen transfers and find where memory exceeds the budget; 2 at each such index choose the transfer that
    removes most of the excess for its bytes; 3 where none is left, delay copies back; 4 drop transfers that turn out not to be
    needed; 5 if that fails, repeat with delays tried before more transfers; 6 as the last resort move everything, with copies
    back just before their readers.
    """

    def __init__(self, planner: Planner, transfers: Sequence[OpenTransfer]) -> None:
        self.planner = planner
        self.transfers = sorted((copy(each) for each in transfers), key=order_key(lambda t: -t.saved.freed_bytes))
        self.chosen = [False] * len(self.transfers)
        self.early, self.late = self._windows(False), self._windows(True)

    def run(self, budget: int) -> Placement | None:
        """A placement whose peak is within the budget, None if none was found."""
        if self._bound() > budget:
            return None
        found = self._search(budget, self.early, (self._cover, self._delay))
        found = found or self._search(budget, self.late, (self._delay, self._cover))
        last = found or self.most()
        return last if self.planner.peak(last) <= budget else None

    def _search(self, budget: int, windows: _Windows, steps: Sequence[_Step]) -> Placement | None:
        self._allow_back(late=False)
        self.chosen = [False] * len(self.transfers)
        least, patience = FAR, PATIENCE
        while patience:
            placed = self._place(self.chosen)
            over = self._over(placed, budget)
            excess = int(over.clip(min=0).sum())
            if not excess:
                return self._pruned(over, budget)
            least, patience = (excess, PATIENCE) if excess < least else (least, patience - 1)
            if not any(step(over, windows) for step in steps):
                break
        return None

    def _bound(self) -> int:
        """A lower bound of every placement's peak: each transfer as if it were alone, back just before its reader."""
        free = zip(self.transfers, self.late[0].tolist(), strict=True)
        spans = ((start, transfer.reader, -transfer.saved.freed_bytes) for transfer, start in free if start < transfer.reader)
        return int(self.planner.curve(spans).max(initial=0))

    def most(self) -> Placement:
        """Everything moved, with copies back just before their readers."""
        self._allow_back(late=True)
        return self._place([True] * len(self.transfers))

    def _allow_back(self, late: bool) -> None:
        """Allow copies back at any index, or not before their readers."""
        for transfer in self.transfers:
            transfer.not_before = transfer.reader if late else 0

    def _place(self, wanted: Sequence[bool]) -> Placement:
        """Place some of the transfers, and keep how each was placed."""
        placed = self.planner.place(list(compress(self.transfers, wanted)))
        made = {transfer.key: transfer for transfer in placed.tried()}
        self.transfers = [made.get(transfer.key, transfer) for transfer in self.transfers]
        return placed

    def _over(self, placed: Placement, budget: int) -> Ints:
        return self.planner.curve(placed.freed()) - budget

    def _windows(self, late: bool) -> _Windows:
        """The time off the device of each transfer if it were the only one."""
        self._allow_back(late)
        free, back, _ = placed_alone(self.planner.line, self.transfers, self.planner.measured)
        for transfer, off, on in zip(self.transfers, free.tolist(), back.tolist(), strict=True):
            transfer.free, transfer.back = off, on
        return free, back, np.array([t.saved.freed_bytes for t in self.transfers], np.int64)

    def _cover(self, over: Ints, windows: _Windows) -> bool:
        """Choose transfers that cover the excess; gives whether any was chosen."""
        free, back, size = windows
        open_, any_chosen = ~np.array(self.chosen, bool), False
        count = np.concatenate([[0], np.cumsum(over > 0)])
        excess, at = over.copy(), _next(over, 0, True)
        while at < len(excess):
            (fits,) = (open_ & (free <= at) & (at < back)).nonzero()
            if len(fits):
                useful = (count[back[fits]] - count[at]) * np.minimum(size[fits], excess[at]) / size[fits]
                best = int(fits[useful.argmax()])
                self.chosen[best], open_[best], any_chosen = True, False, True
                excess[free[best] : back[best]] -= size[best]
            at = _next(excess, at if len(fits) else _next_start(free[open_], at), True)
        return any_chosen

    def _delay(self, over: Ints, windows: _Windows) -> bool:
        """Delay copies back of chosen transfers over the excess; gives whether any was delayed."""
        early = [transfer for transfer in compress(self.transfers, self.chosen) if transfer.back < transfer.reader]
        early.sort(key=order_key(lambda t: -t.reader))
        back = np.array([max(transfer.back, transfer.not_before) for transfer in early], np.int64)
        reader = np.array([transfer.reader for transfer in early], np.int64)
        excess, at = over.copy(), _next(over, 0, True)
        delayed = False
        while early and at < len(excess):
            fits = (back <= at) & (at < reader)
            first = int(fits.argmax())
            if fits[first]:
                end = _next(excess, at, False)
                early[first].not_before = back[first] = min(end, early[first].reader)
                excess[at : back[first]] -= early[first].saved.freed_bytes
                delayed = True
            at = _next(excess, at if fits[first] else _next_start(back, at), True)
        return delayed

    def _pruned(self, over: Ints, budget: int) -> Placement:
        """The chosen transfers without those that the budget does not need."""
        fewer = list(self.chosen)
        room = -over
        for k, transfer in enumerate(self.transfers):
            if fewer[k] and transfer.free < transfer.back and room[transfer.free : transfer.back].min() >= transfer.saved.freed_bytes:
                fewer[k] = False
                room[transfer.free : transfer.back] -= transfer.saved.freed_bytes
        if fewer != self.chosen:
            smaller = self._place(fewer)
            if self._over(smaller, budget).max(initial=0) <= 0:
                return smaller
        return self._place(self.chosen)


def _next(excess: Ints, at: int, is_over: bool) -> int:
    """The first index from `at` on where the excess is above 0, or, without `is_over`, where it is not; else the length."""
    count = NEAR
    while at < len(excess):
        part = excess[at : at + count]
        found = part > 0 if is_over else part <= 0
        first = int(found.argmax())
        if found[first]:
            return at + first
        at, count = at + count, 2 * count
    return len(excess)


def _next_start(starts: Ints, at: int) -> int:
    """The least start above `at`, FAR without one."""
    return int(starts[starts > at].min(initial=FAR))
