"""The order of operations inside one part: collectives start as early as they can, and operations that do not need them run meanwhile.

Program order follows the source text of the layers. A layer may compute values (such as the weights of its sum over experts) before it
sends tokens to their experts, and read them only after the tokens are back; this computation is best done while the tokens are under
way. The same holds for the backward of the gate. A parameter that is gathered for one product (sharding stage 3) can be gathered during
the previous one.
"""

from __future__ import annotations

from collections.abc import Sequence

from interlace.cost_model import Costs
from interlace.ir import Op, Program
from interlace.ir.kinds import is_collective
from interlace.scheduler.interleave.allocations import PartOps
from interlace.scheduler.interleave.clock import Clock
from interlace.scheduler.interleave.gathers import LEADS, may_start_early, when_due
from interlace.scheduler.interleave.planner import SMALL_SHARE, Pair

WINDOWS = (1 << 30, 96, 32)
"""Numbers of operations by which one may be issued ahead of program order, tried in turn: smaller numbers keep less in memory."""


class EarlyCollectives:
    """Orders of the operations of one part in which collectives start early; computed once for all weights of sends. O(ops x tries)."""

    def __init__(self, program: Program, part: PartOps, cost: Costs, extra_bytes: int = 0) -> None:
        self.part = part
        self.pair: Pair | None = None
        self.orders: list[tuple[list[int], list[Op]]] = []
        if part.kind not in "FBI" or not any(is_collective(op) for op in part.ops):
            return
        pair = self.pair = Pair(program, [part], cost)
        plain_bytes = pair.memory.peak(pair.plain())
        most_bytes = plain_bytes + plain_bytes // SMALL_SHARE + extra_bytes
        ops = {op.id: op for op in part.ops}
        alone = may_start_early(pair.nodes, pair.graph.ops)
        for lead in LEADS if any(alone) else LEADS[:1]:
            turns = _turns(pair, alone, lead)
            for window in WINDOWS:
                found = _with_fillers(pair, _issued(pair, alone, turns, window))
                listed = pair.spread(found)
                if pair.memory.peak(listed) > most_bytes:
                    continue
                self.orders.append((found, [ops[op_id] for _, op_id in listed]))
                break

    def fastest(self, early: float) -> list[Op]:
        """The fastest order by the planner's clock, with `early` as the weight of sends (`send_latency_weight`); program order if none is
        faster.

        It keeps every dependency of the part and the order of each group's communication, and its live memory exceeds that of program
        order by at most `extra_bytes`. Weight gradients of a whole backward keep their places.
        """
        best = list(self.part.ops)
        if self.pair is None:
            return best
        pair = self.pair.with_early(early)
        best_ns = pair.time(list(range(len(pair.nodes))))
        for nodes, ops in self.orders:
            if (took := pair.time(nodes)) < best_ns:
                best, best_ns = ops, took
        return list(best)


def _turns(pair: Pair, alone: Sequence[bool], lead: float) -> list[int]:
    """Nodes in the order in which they are due: first those that the first collective needs, then those that the second needs, and so on;
    collectives that may start at any time as in `when_due`."""
    never = len(pair.nodes)
    first = [never] * never
    firm = [k for k, node in enumerate(pair.nodes) if not node.filler]
    for k in reversed(firm):
        if pair.nodes[k].stream and not alone[k]:
            first[k] = k
        for dep in pair.nodes[k].deps:
            first[dep] = first[dep] if alone[k] else min(first[dep], first[k])
    order = sorted((k for k in firm if not alone[k]), key=lambda k: (first[k], k))
    return when_due(pair.nodes, order, [k for k in firm if alone[k]], lead)


def _issued(pair: Pair, alone: Sequence[bool], turns: Sequence[int], window: int) -> list[int]:
    """Nodes in issue order: each collective as soon as it can start, otherwise the node due first among those that wait for no collective
    in flight."""
    nodes, clock = pair.nodes, Clock(pair.columns)
    turn = {k: position for position, k in enumerate(turns)}
    pending = {k: len(nodes[k].deps) for k in turns}
    users: dict[int, list[int]] = {k: [] for k in turns}
    for k in turns:
        for dep in nodes[k].deps:
            users[dep].append(k)
    ready = {k for k, count in pending.items() if not count}
    made: list[int] = []
    head, in_program_order, oldest = 0, sorted(turns), 0
    left = set(turns)
    while left:
        while turns[head] not in left:
            head += 1
        while in_program_order[oldest] not in left:
            oldest += 1
        last = in_program_order[oldest] + window
        starting = [k for k in ready if nodes[k].stream and (not alone[k] or k == turns[head])]
        choices = starting or [k for k in ready if not nodes[k].stream and k <= last] or [turns[head]]
        k = min(choices, key=lambda k: (not nodes[k].stream and clock.blocked(k), turn[k]))
        clock.run(k)
        made.append(k)
        ready.remove(k)
        left.remove(k)
        for user in users[k]:
            pending[user] -= 1
            if not pending[user]:
                ready.add(user)
    return made


def _with_fillers(pair: Pair, firm: Sequence[int]) -> list[int]:
    """The order with all weight gradients inserted, each after what it needs and after its predecessor in program order."""
    fillers = [k for k, node in enumerate(pair.nodes) if node.filler]
    made: list[int] = []
    seen: set[int] = set()
    reached = at = 0
    for k in (*firm, len(pair.nodes)):
        reached = max(reached, k)
        while at < len(fillers) and fillers[at] < reached and seen.issuperset(pair.nodes[fillers[at]].deps):
            made.append(fillers[at])
            seen.add(fillers[at])
            at += 1
        if k < len(pair.nodes):
            made.append(k)
            seen.add(k)
    return made
