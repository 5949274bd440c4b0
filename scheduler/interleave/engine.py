"""Choice of the engine that makes first orders and times orders: the functions of `clock.py` and `list_schedule.py`, plain or compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from interlace.scheduler.interleave import clock, list_schedule
from interlace.scheduler.interleave.columns import Columns
from interlace.scheduler.interleave.list_schedule import TRIES, Weights
from interlace.scheduler.interleave.local_search import Form

WORTH_COMPILING = 2000
"""Number of nodes, over all pairs of this process, from which on the compiled engine is used. Fewer are ordered faster than it is loaded
(half a second)."""
COMPILED = "interlace.scheduler.interleave.compiled"


class Engine(NamedTuple):
    """Functions over columns, and conversions to the types that they take.

    Attributes:
        whole, times: Convert lists to this engine's columns of integers and of times.
        find_order, run_order, run_stamped: As in `list_schedule.py` and `clock.py`.
        join: Concatenates columns.
        made: Converts another function over columns to one of this engine.
    """

    whole: Callable[[Sequence[int]], Any]
    times: Callable[[Sequence[float]], Any]
    find_order: Callable[..., None]
    run_order: Callable[..., tuple[float, float]]
    run_stamped: Callable[..., float]
    join: Callable[[Iterable[Any]], Any]
    made: Callable[[Callable[..., Any]], Callable[..., Any]]

    def pack(self, columns: Columns) -> Columns:
        """Convert columns from lists to this engine's types."""
        return Columns(self.whole(columns.whole), self.times(columns.times), columns.at)

    def orders(self, task: Columns, form: Form, cap_bytes: int, tries: Sequence[Weights] = TRIES) -> list[list[int]]:
        """The list scheduler's order of a packed task with each of these weights."""
        task, found = task._replace(at=task.at._replace(is_mixed=int(form == "mixed"))), []
        for each in tries:
            if each.early and not task.at.num_leading:
                continue
            made = task.copy()
            self.find_order(*made, cap_bytes, each.lead, each.save, each.backward, each.keep, each.early)
            found.append(made.part("order", made.at.num_nodes))
        return found

    def duration_and_sends(self, packed: Columns, order: Sequence[int]) -> tuple[float, float]:
        """Duration of an order of packed nodes, and the sum of the times at which its sends to other stages start, in nanoseconds."""
        took, sent = self.run_order(*packed.copy(), self.whole(order))
        return float(took), float(sent)

    def duration_and_times(self, packed: Columns, order: Sequence[int]) -> tuple[float, list[float]]:
        """Duration of an order of packed nodes, and the time of the compute stream after each of them, in nanoseconds."""
        after = self.times([0.0] * len(order))
        took = self.run_stamped(*packed.copy(), self.whole(order), after)
        return float(took), [float(each) for each in after]


PLAIN = Engine(
    list,
    list,
    list_schedule.find_order,
    clock.run_order,
    clock.run_stamped,
    lambda columns: list(chain.from_iterable(columns)),
    lambda function: function,
)
_met = [0]
"""Number of nodes of all pairs so far, in a list so that it can be changed."""


def engine_for(num_nodes: int) -> Engine:
    """The engine for a pair of this many nodes: the compiled one if that is worthwhile and numba is installed. Results are equal."""
    _met[0] += num_nodes
    if _met[0] < WORTH_COMPILING and COMPILED not in sys.modules:
        return PLAIN
    try:
        from interlace.scheduler.interleave.compiled import ENGINE
    except ImportError:
        return PLAIN
    return ENGINE
