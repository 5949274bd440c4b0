"""Caches for tables that depend only on a program's operations and values, or also on the items of its jobs, and stay valid when events and
host waits change."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from interlace.ir.program import Program

Made = TypeVar("Made")
Key = TypeVar("Key", bound=Hashable)
KEPT = 8
"""Results that one table keeps per rank: forms of a plan are compared one after another, each for all ranks."""
RANKS = 32
"""Number of ranks for which a table keeps results: those used last."""
PLANS = 128
"""Number of plans per rank for which small results are kept: a search comes back to plans that it made long before."""
FEW = 4
"""Results per rank for tables whose results are large, with an entry for each micro-batch."""


def once_per_ops(make: Callable[[Program], Made], kept: int = KEPT) -> Once[Made]:
    """`make`, called once for programs with the same tuples (by identity) of operations and values. Results are read-only; the last `kept`
    of each rank are kept.

    >>> count = once_per_ops(lambda program: [len(program.ops)])
    >>> program = Program((), ())
    >>> count(program) is count(program.with_ops(program.ops))
    True
    """
    return Once(make, lambda program: (program.ops, program.values), kept)


def once_per_items(make: Callable[[Program], Made]) -> Once[Made]:
    """As `once_per_ops`, for programs that also have the same pipeline and whose jobs have the same tuples of op instances."""
    return Once(make, lambda program: (program.ops, program.values, program.pipeline, *(job.items for job in program.jobs)), KEPT)


def once_per_ops_and(make: Callable[[Program, Key], Made], kept: int = KEPT) -> Callable[[Program, Key], Made]:
    """As `once_per_ops`, called once for each second argument."""
    return _by_key(make, once_per_ops(lambda program: dict[Key, Made](), kept))


def once_per_plan_and(make: Callable[[Program, Key], Made]) -> Callable[[Program, Key], Made]:
    """As `once_per_ops_and`, for small results, and for programs that also have the same jobs and events."""
    return _by_key(make, Once(lambda program: dict[Key, Made](), _plan_of, PLANS))


def _plan_of(program: Program) -> tuple[Any, ...]:
    return program.ops, program.values, program.groups, program.pipeline, program.jobs, program.events


def _by_key(make: Callable[[Program, Key], Made], known: Once[dict[Key, Made]]) -> Callable[[Program, Key], Made]:
    def found(program: Program, key: Key) -> Made:
        mine = known(program)
        if key not in mine:
            mine[key] = make(program, key)
        return mine[key]

    return found


def remembered(memo: dict[Any, Any], key: Hashable, of: object, make: Callable[[], Made]) -> Made:
    """The result of `make`, kept in `memo` under `key` for calls with the same object `of`. The key may contain the id of that object,
    which stays alive as long as the entry."""
    known = memo.get(key)
    if known is None or known[1] is not of:
        known = memo[key] = make(), of
    found: Made = known[0]
    return found


class Once(Generic[Made]):
    """A function of programs that is called once for the same objects in `parts_of`; see `once_per_ops`."""

    def __init__(self, make: Callable[[Program], Made], parts_of: Callable[[Program], tuple[Any, ...]], kept: int) -> None:
        self._make, self._parts_of, self._kept = make, parts_of, kept
        self._known: OrderedDict[int, OrderedDict[tuple[int, ...], tuple[Any, Made]]] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, program: Program) -> Made:
        parts = self._parts_of(program)
        key = tuple(map(id, parts))
        with self._lock:
            mine = self._of_rank(program.rank)
            if key in mine:
                mine.move_to_end(key)
                return mine[key][1]
        return self._keep(mine, key, parts, self._make(program))

    def give(self, program: Program, made: Made) -> None:
        """Store the result for a program, if it is known already."""
        parts = self._parts_of(program)
        with self._lock:
            mine = self._of_rank(program.rank)
        self._keep(mine, tuple(map(id, parts)), parts, made)

    def _of_rank(self, rank: int) -> OrderedDict[tuple[int, ...], tuple[Any, Made]]:
        mine = self._known.setdefault(rank, OrderedDict())
        self._known.move_to_end(rank)
        if len(self._known) > RANKS:
            self._known.popitem(last=False)
        return mine

    def _keep(self, mine: OrderedDict[tuple[int, ...], tuple[Any, Made]], key: tuple[int, ...], parts: Any, found: Made) -> Made:
        with self._lock:
            mine[key] = parts, found  # keeps the parts alive, so that no other objects get their ids
            if len(mine) > self._kept:
                mine.popitem(last=False)
        return found
