"""Collectives that may start at any time, as those that gather parameters (sharding stage 3), and orders in which they start when they are
due: early enough for their first reader, and late enough not to hold memory long."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

from interlace.ir import Op
from interlace.ir.kinds import is_collective
from interlace.scheduler.interleave.clock import Node

LEADS = (2.0, 4.0)
"""How long before its first reader such a collective is due, as multiples of its time alone, tried in turn: beside computation it takes
longer."""


def may_start_early(nodes: Sequence[Node], ops: Mapping[int, Op]) -> list[bool]:
    """For each node, whether it is a collective that may start at any time: it waits only for such collectives, and for computation that
    takes less time than it does, apart from what those wait for."""
    before: list[frozenset[int]] = []
    found: list[bool] = []
    for node in nodes:
        before.append(frozenset(node.deps).union(*(before[dep] for dep in node.deps)))
        if not is_collective(ops[node.op]):
            found.append(False)
            continue
        gathers = [dep for dep in before[-1] if nodes[dep].stream]
        own = before[-1].difference(gathers, *(before[dep] for dep in gathers))
        found.append(sum(nodes[dep].dur for dep in own) < node.dur and all(found[dep] for dep in gathers))
    return found


def when_due(nodes: Sequence[Node], order: Sequence[int], gathers: Sequence[int], lead: float) -> list[int]:
    """The other nodes in this order, with `gathers`, which keep their order, each `lead` times its duration before its first reader and
    before the next one is due. All nodes follow what they need."""
    reader = [len(order)] * len(nodes)
    for position, k in enumerate(order):
        for dep in nodes[k].deps:
            reader[dep] = min(reader[dep], position)
    starts = [0.0, *accumulate(0.0 if nodes[k].stream else nodes[k].dur for k in order)]
    due: dict[str, float] = {}
    at: list[list[int]] = [[] for _ in starts]
    for k in reversed(gathers):
        stream, needed = nodes[k].stream, starts[reader[k]]
        due[stream] = min(due.get(stream, needed), needed) - lead * nodes[k].dur
        at[max(0, bisect_right(starts, due[stream]) - 1)].append(k)
    return _after_needs(nodes, [k for mine, here in zip(at, [*order, -1], strict=True) for k in (*reversed(mine), here) if k >= 0])


def _after_needs(nodes: Sequence[Node], order: Sequence[int]) -> list[int]:
    """The order, with each node preceded by what it needs."""
    made: list[int] = []
    seen: set[int] = set()
    for node in order:
        stack = [node]
        while stack:
            waiting = sorted((dep for dep in nodes[stack[-1]].deps if dep not in seen), reverse=True)
            stack += waiting
            if not waiting and (k := stack.pop()) not in seen:
                made.append(k)
                seen.add(k)
    return made
