"""A pair's nodes, and the state of an order of them, in two flat columns: one of whole numbers, one of times and factors.

The clock (`clock.py`) and the list scheduler (`list_schedule.py`) run over them as they are, on lists, or compiled, on arrays. Compiled
code counts references of every array that a function is given, so two of them are several times as fast as one for each kind of entry.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence, Sequence
from typing import Any, NamedTuple

Whole = MutableSequence[int]
Times = MutableSequence[float]
"""The columns, lists or arrays."""


class Places(NamedTuple):
    """Where each part of the columns begins, and how long some are; flags are 0 or 1, and -1 stands for nothing.

    Attributes:
        num_nodes, num_categories, num_lines, num_storages: How many there are; lines are parts' nodes other than fillers.
        start_bytes, largest_bytes: Live bytes before the pair, and the most that a filler allocates.
        is_mixed: Whether parts are mixed; else a part waits for the end of those before it.
        dur, left, distance, hides, ranks: Times: of each node alone, of communication what is left of it, of computation to the next
            communication of its part; the largest share of a communication beside it that it hides; by what choices are ranked. `[nodes]`
        slow, other, holds: Factors on computation of one category, and on communication of another beside it; whether it holds that up,
            1.0 or 0.0. `[categories * categories]`
        began: Times: when each communication first ran, below 0 before. `[nodes]`
        now, rates: The time of the compute stream, `[1]`, and how fast each head runs, `[streams]`.
        leaves, forward, filler, stream, category: As in `Node`, by number; computation has no stream. `[nodes]`
        dep_first, dep, user_first, user: What each node comes after, each once, and what comes after it. `[nodes + 1]`, `[dependencies]`
        flies, behind: Whether it is in flight, and the next one of its stream. `[nodes]`
        front, back, used, heads: First and last in flight of each stream; streams in the order in which they were first used; what runs
            now. `[streams]`
        num_flying, num_used: How many communications are in flight, and how many streams had any. `[1]`
        line_first, line, line_at, is_backward: Nodes of each line, where it is, and whether it is a backward's; backward before forward.
        size, num_readers, live_before, live_after, born, waiting: As in `PairBytes`; how many nodes read a storage; whether it is there,
            and how many nodes still read it. `[storages]`
        alloc_first, alloc, read_first, read: Storages that a node allocates, and that it allocates or reads.
        backward_peak: For each node of backward, and after the last, the peak of live memory from it on in program order. `[nodes + 1]`
        live, live_forward: Live bytes now, and those of forward. `[1]`
        pending, issued: On how many nodes that are not issued each depends; whether it is issued itself. `[nodes]`
        fillers, nexts, choices, order: Fillers that could be issued, next nodes of the lines, nodes to choose from, nodes issued; all at
            the front of `[nodes]`, the number of each in `num_...`, `[1]`.
    """

    num_nodes: int = 0
    num_categories: int = 0
    num_lines: int = 0
    num_storages: int = 0
    start_bytes: int = 0
    largest_bytes: int = 0
    is_mixed: int = 0
    dur: int = 0
    left: int = 0
    distance: int = 0
    hides: int = 0
    ranks: int = 0
    slow: int = 0
    other: int = 0
    holds: int = 0
    began: int = 0
    now: int = 0
    rates: int = 0
    leaves: int = 0
    forward: int = 0
    filler: int = 0
    stream: int = 0
    category: int = 0
    dep_first: int = 0
    dep: int = 0
    user_first: int = 0
    user: int = 0
    flies: int = 0
    behind: int = 0
    front: int = 0
    back: int = 0
    used: int = 0
    heads: int = 0
    num_flying: int = 0
    num_used: int = 0
    line_first: int = 0
    line: int = 0
    line_at: int = 0
    is_backward: int = 0
    size: int = 0
    num_readers: int = 0
    live_before: int = 0
    live_after: int = 0
    born: int = 0
    waiting: int = 0
    alloc_first: int = 0
    alloc: int = 0
    read_first: int = 0
    read: int = 0
    backward_peak: int = 0
    live: int = 0
    live_forward: int = 0
    pending: int = 0
    issued: int = 0
    fillers: int = 0
    nexts: int = 0
    choices: int = 0
    order: int = 0
    num_fillers: int = 0
    num_nexts: int = 0
    num_choices: int = 0
    num_issued: int = 0


class Columns(NamedTuple):
    """The two columns, lists or arrays, and what lies where; the same names are used in all functions over them."""

    whole: Any
    times: Any
    at: Places

    def copy(self) -> Columns:
        """The same entries, to be changed."""
        return Columns(self.whole.copy(), self.times.copy(), self.at)

    def part(self, name: str, count: int) -> list[Any]:
        """The first entries of a part of whole numbers."""
        first = getattr(self.at, name)
        entries = self.whole[first : first + count]
        return entries if isinstance(entries, list) else entries.tolist()

    def with_parts(self, whole: Mapping[str, Sequence[int]], times: Mapping[str, Sequence[float]], **numbers: int) -> Columns:
        """Lists with more parts behind, and with numbers that are no parts."""
        places = dict(numbers)
        columns: tuple[list[Any], list[Any]] = (list(self.whole), list(self.times))
        for column, parts in zip(columns, (whole, times), strict=True):
            for name, entries in parts.items():
                places[name] = len(column)
                column.extend(entries)
        return Columns(*columns, self.at._replace(**places))


def rows(listed: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Rows of a table one after another: where each begins, and the entries. `[rows + 1]`, `[entries]`"""
    first = [0]
    for row in listed:
        first.append(first[-1] + len(row))
    return first, [entry for row in listed for entry in row]


def inverted(listed: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """For each of so many entries the rows that hold it."""
    found: list[list[int]] = [[] for _ in range(count)]
    for k, row in enumerate(listed):
        for entry in row:
            found[entry].append(k)
    return found
