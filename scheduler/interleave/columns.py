"""A pair's nodes, and the state of an order of them, in two flat columns: one of integers, one of times and factors.

The clock (`clock.py`) and the list scheduler (`list_schedule.py`) run over them, as plain Python on lists or compiled on arrays. Compiled
code counts references to every array argument, so two arrays are several times as fast as one per kind of entry.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence, Sequence
from typing import Any, NamedTuple

Whole = MutableSequence[int]
Times = MutableSequence[float]
"""The columns, lists or arrays."""


class Places(NamedTuple):
    """Offsets of the parts of the columns, and a few scalars. In the columns, flags are 0 or 1, and -1 means none.

    Attributes:
        num_nodes, num_categories, num_lines, num_storages, num_leading: Counts. A line is the sequence of a part's nodes other than
            fillers. The last is the number of fillers that communication waits for.
        start_bytes, largest_bytes: Live bytes before the pair, and the most that a filler allocates.
        is_mixed: Whether parts are mixed; if not, a part waits for the end of those before it.
        dur, left, distance, hides, ranks: Duration of each node alone; remaining time of communication; compute time to the next
            communication of its part; the largest share of a communication beside it that it hides; rank of a choice. `[nodes]`
        slow, other, holds: Factors on computation of one category, and on communication of another beside it; whether the computation
            delays the communication, 1.0 or 0.0. `[categories * categories]`
        began: Time at which each communication first ran, negative before. `[nodes]`
        now, rates: Time of the compute stream, `[1]`, and the speed of each head, `[streams]`.
        leaves, forward, filler, stream, category: As in `Node`, by number; the stream of computation is -1. `[nodes]`
        leads: The first communication that waits for a filler or for fillers that need it; `num_nodes` if there is none. `[nodes]`
        dep_first, dep, user_first, user: Distinct predecessors and successors of each node. `[nodes + 1]`, `[dependencies]`
        flies, behind: Whether it is in flight, and the next node in flight on its stream. `[nodes]`
        front, back, used, heads: First and last node in flight on each stream; streams in the order of their first use; communications
            that run now. `[streams]`
        num_flying, num_used: Number of communications in flight, and of streams used so far. `[1]`
        line_first, line, line_at, is_backward: Nodes of each line, its current position, and whether it belongs to a backward; backward
            lines come before forward lines.
        size, num_readers, live_before, live_after, born, waiting: As in `PairBytes`; number of nodes that read a storage; whether it is
            allocated, and how many nodes have yet to read it. `[storages]`
        alloc_first, alloc, read_first, read: Storages that a node allocates, and that it allocates or reads.
        backward_peak: For each node of backward, and after the last, the peak of live memory from it on in program order. `[nodes + 1]`
        live, live_forward: Live bytes now, and those of forward. `[1]`
        pending, issued: Number of a node's predecessors that are not yet issued, and whether it is issued itself. `[nodes]`
        fillers, nexts, choices, order: Fillers that could be issued, next nodes of the lines, nodes to choose from, nodes issued; each a
            list at the front of `[nodes]`, with its length in `num_...`, `[1]`.
    """

    num_nodes: int = 0
    num_categories: int = 0
    num_lines: int = 0
    num_storages: int = 0
    num_leading: int = 0
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
    leads: int = 0
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
    """The two columns, as lists or arrays, and their layout. All functions over them use these names."""

    whole: Any
    times: Any
    at: Places

    def copy(self) -> Columns:
        """A copy whose entries may be modified."""
        return Columns(self.whole.copy(), self.times.copy(), self.at)

    def part(self, name: str, count: int) -> list[Any]:
        """The first `count` entries of a part of the integer column."""
        first = getattr(self.at, name)
        entries = self.whole[first : first + count]
        return entries if isinstance(entries, list) else entries.tolist()

    def with_parts(self, whole: Mapping[str, Sequence[int]], times: Mapping[str, Sequence[float]], **numbers: int) -> Columns:
        """Lists with these parts appended, and with these scalars set in `at`."""
        places = dict(numbers)
        columns: tuple[list[Any], list[Any]] = (list(self.whole), list(self.times))
        for column, parts in zip(columns, (whole, times), strict=True):
            for name, entries in parts.items():
                places[name] = len(column)
                column.extend(entries)
        return Columns(*columns, self.at._replace(**places))


def rows(listed: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """A ragged table as offsets and concatenated entries. `[rows + 1]`, `[entries]`"""
    first = [0]
    for row in listed:
        first.append(first[-1] + len(row))
    return first, [entry for row in listed for entry in row]


def inverted(listed: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """For each entry below `count`, the rows that contain it."""
    found: list[list[int]] = [[] for _ in range(count)]
    for k, row in enumerate(listed):
        for entry in row:
            found[entry].append(k)
    return found
