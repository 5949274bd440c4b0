"""Tables that follow from a program's operations and values alone, or from the items of its jobs besides: made once, however often
events and waits of the host change."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from interlace.ir.program import Program

Made = TypeVar("Made")
KEPT = 8
"""Results that one table keeps of each rank: forms of a plan are compared one after another, rank by rank in each of them."""
RANKS = 32
"""Ranks of which a table keeps results: those that were asked for last."""
FEW = 4
"""Results that a large table keeps of each rank, one whose every result holds an entry for each micro-batch."""


def once_per_ops(make: Callable[[Program], Made], kept: int = KEPT) -> Callable[[Program], Made]:
    """`make`, called once for programs that hold the same tuples of operations and values; nobody may change what it gives. The last `kept`
    results of each rank are kept.

    >>> count = once_per_ops(lambda program: [len(program.ops)])
    >>> program = Program((), ())
    >>> count(program) is count(program.with_ops(program.ops))
    True
    """
    return _once(make, lambda program: (program.ops, program.values), kept)


def once_per_items(make: Callable[[Program], Made]) -> Callable[[Program], Made]:
    """As `once_per_ops`, for programs whose jobs hold the same tuples of op instances besides."""
    return _once(make, lambda program: (program.ops, program.values, program.pipeline, *(job.items for job in program.jobs)), KEPT)


def _once(make: Callable[[Program], Made], parts_of: Callable[[Program], tuple[Any, ...]], kept: int) -> Callable[[Program], Made]:
    known: OrderedDict[int, OrderedDict[tuple[int, ...], tuple[Any, Made]]] = OrderedDict()
    lock = threading.Lock()

    def made(program: Program) -> Made:
        parts = parts_of(program)
        key = tuple(map(id, parts))
        with lock:
            mine = known.setdefault(program.rank, OrderedDict())
            known.move_to_end(program.rank)
            if len(known) > RANKS:
                known.popitem(last=False)
            if key in mine:
                mine.move_to_end(key)
                return mine[key][1]
        found = make(program)
        with lock:
            mine[key] = parts, found  # keeps the parts alive, so that no others get their ids
            if len(mine) > kept:
                mine.popitem(last=False)
        return found

    return made
