"""Tables that follow from a program's operations and values alone: made once, however often its jobs and events change."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from interlace.ir.program import Program

Made = TypeVar("Made")
KEPT = 32
"""Results that one table keeps: forms of a plan are compared one after another, on at most so many ranks of one process."""


def once_per_ops(make: Callable[[Program], Made]) -> Callable[[Program], Made]:
    """`make`, called once for programs that hold the same tuples of operations and values; nobody may change what it gives.

    >>> count = once_per_ops(lambda program: [len(program.ops)])
    >>> program = Program((), ())
    >>> count(program) is count(program.with_ops(program.ops))
    True
    """
    known: OrderedDict[tuple[int, int], tuple[Any, Made]] = OrderedDict()
    lock = threading.Lock()

    def made(program: Program) -> Made:
        key = id(program.ops), id(program.values)
        with lock:
            if key in known:
                known.move_to_end(key)
                return known[key][1]
        found = make(program)
        with lock:
            known[key] = (program.ops, program.values), found  # keeps the tuples alive, so that no other gets their ids
            if len(known) > KEPT:
                known.popitem(last=False)
        return found

    return made
