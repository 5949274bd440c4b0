"""The order of operations inside a job that holds the backward of one micro-batch and the forward of another.

Two forms (docs/decisions/002): `dx-first` runs backward's chain of input gradients first, so that the gradient leaves for the
neighbour early, and keeps weight gradients as fillers for backward's and forward's collectives; `mixed` mixes both op by op.
A list scheduler gives a first order, a seeded local search improves it on a small clock that knows interference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from interlace.cost_model import Costs
from interlace.cost_model.base import tables_of
from interlace.errors import PlanError
from interlace.ir import ABSENT, Graph, Op, Program, dependencies, describe
from interlace.ir.kinds import NO_KERNEL, is_collective, is_comm, is_random, is_receive, is_send
from interlace.scheduler.pair_bytes import PairBytes
from interlace.scheduler.pair_clock import Node, duration, serial_duration
from interlace.scheduler.pair_list import TRIES, ListScheduler
from interlace.scheduler.pair_memory import PairMemory
from interlace.scheduler.pair_search import Form as Form
from interlace.scheduler.pair_search import Rules, Search
from interlace.units import ms, ms_figure, size

Placed = tuple[str, int]
SEARCH_WORK = 150_000
"""Node visits the local search may spend; about half a second of host time."""
GRADIENT_SINKS = frozenset({"cast", "add", "scale", "assign", "reshape", "share_data", "concat", "split", "split_with_num",
                            "combine", "slice", "clip", "full_int_array", "full"})  # fmt: skip
"""Kinds through which a reduced gradient goes into its buffer; a collective with only these behind it reduces gradients."""


class PairPlan(msgspec.Struct, frozen=True):
    """The order of a pair's operations and what it should gain, simulated on one rank.

    Attributes:
        order: `(side, op id)`, side `B` for the backward micro-batch and `F` for the forward one.
        serial_ns: Both in turn, communication exposed.
        planned_ns: In this order.
        comm_ns: Communication alone.
        exposed_ns: Communication that compute waits for.
        plain_peak_bytes, peak_bytes: Live memory at its highest, beyond what lives through the pair, both in turn and in this order.
        note: Why the order is plain, where it is.
    """

    order: tuple[Placed, ...]
    serial_ns: int
    planned_ns: int
    comm_ns: int
    exposed_ns: int
    plain_peak_bytes: int
    peak_bytes: int
    note: str = ""

    def text(self) -> str:
        """One line for reports."""
        if self.note:
            return self.note
        saved = (self.serial_ns - self.planned_ns) / self.comm_ns if self.comm_ns else 0.0
        return (f"{len(self.order)} ops, simulated {ms_figure(self.serial_ns)} -> {ms(self.planned_ns)} "
                f"({self.serial_ns / max(self.planned_ns, 1) - 1:+.1%}), "
                f"which saves {saved:.0%} of {ms(self.comm_ns)} of communication; "
                f"live memory {size(self.plain_peak_bytes)} -> {size(self.peak_bytes)}")  # fmt: skip


def plan_pairs(program: Program, backward: Sequence[Op], forward: Sequence[Op], cost: Costs, form: Form,
               allowance_bytes: int = 0, max_ops: int = 4000) -> PairPlan:  # fmt: skip
    """Order a backward beside a forward.

    Args:
        program: Where they come from.
        backward, forward: The operations of each, in program order.
        cost: Times and interference.
        form: `dx-first` or `mixed`.
        allowance_bytes: Live memory allowed beyond both in turn.
        max_ops: Above this many operations they stay in turn.

    Returns:
        A legal order: every dependency of each side, the order of each group's collectives within a side, receives of the
        forward in front of sends of the backward (the neighbour sends in that order too).
    """
    pair = _Pair(program, backward, forward, cost)
    plain = pair.plain()
    if len(pair.all_ops) > max_ops:
        return pair.result(plain, f"{len(pair.all_ops)} ops are more than max_ops_per_job {max_ops}: backward and forward stay two jobs")
    cap = pair.memory.peak(plain) + allowance_bytes
    order = pair.within(cap, form)
    return pair.result(order, "" if order != plain else "backward and forward stay in turn: no other order is faster within the memory")


class _Pair:
    """Both sides as nodes; free operations travel with the first operation that needs them."""

    def __init__(self, program: Program, backward: Sequence[Op], forward: Sequence[Op], cost: Costs) -> None:
        self.graph = Graph(program)
        self.cost = cost
        self.values, self.groups = tables_of(program)
        self.all_ops: list[tuple[str, Op]] = [*(("B", op) for op in backward), *(("F", op) for op in forward)]
        self.after = self._after(backward, forward)
        self.free = {(side, op.id) for side, op in self.all_ops if op.name in NO_KERNEL}
        self.nodes: list[Node] = []
        self.index: dict[Placed, int] = {}
        chain = chain_ops(self.graph, backward)
        for side, op in self.all_ops:
            if (side, op.id) not in self.free:
                self._node(side, op, side == "B" and op.id not in chain)
        self.memory = PairMemory(self.graph, backward, forward)
        self._stretches: dict[tuple[str, str], tuple[float, float]] = {}
        self.plain_order = self._spread(range(len(self.nodes)))
        self.bytes = PairBytes(self.memory, [self._with_free(node) for node in self.nodes], self.plain_order)

    def _after(self, backward: Sequence[Op], forward: Sequence[Op]) -> dict[Placed, set[Placed]]:
        after: dict[Placed, set[Placed]] = {}
        for side, ops in (("B", backward), ("F", forward)):
            for op_id, needs in dependencies(self.graph, ops).items():
                after[side, op_id] = {(side, other) for other in needs}
        for op_id, first in (*self._shared_state(backward, forward), *_draws_in_turn(backward, forward)):
            after["F", op_id].add(("B", first))
        for before, later in _p2p_order(backward, forward):
            after[later].add(before)
        return after

    def _shared_state(self, backward: Sequence[Op], forward: Sequence[Op]) -> Iterable[tuple[int, int]]:
        """Forward operations that touch persistable state which backward writes, or the reverse: they stay behind it."""
        touched: dict[int, list[tuple[int, bool]]] = {}
        for op in backward:
            for storage, writes in self._state(op).items():
                touched.setdefault(storage, []).append((op.id, writes))
        for op in forward:
            for storage, writes in self._state(op).items():
                yield from ((op.id, other) for other, wrote in touched.get(storage, ()) if writes or wrote)

    def _state(self, op: Op) -> dict[int, bool]:
        """Persistable storages whose contents an operation touches, and whether it writes them."""
        values = self.graph.values
        written = {values[op.operands[operand]].storage for _, operand in op.inplace}
        touched = {values[v].storage for v in (*self.graph.reads(op), *op.results) if values[v].persistable}
        return {storage: storage in written for storage in touched}

    def _node(self, side: str, op: Op, filler: bool) -> None:
        dur = float(self.cost.op_time(op, self.values, self.groups).dur_ns)
        stream = f"comm{op.group}" if is_comm(op) else ""
        category = self.cost.category(op, self.values, self.groups)
        deps = sorted({self.index[dep] for dep in self._real(side, op.id) if dep in self.index})
        self.index[side, op.id] = len(self.nodes)
        self.nodes.append(Node(op.id, side, dur, category, stream, deps, filler))

    def _real(self, side: str, op_id: int) -> set[Placed]:
        """What an operation comes after, with free operations replaced by what they come after."""
        found: set[Placed] = set()
        stack = [*self.after[side, op_id]]
        while stack:
            before = stack.pop()
            if before in self.free:
                stack += self.after[before]
            else:
                found.add(before)
        return found

    def stretch(self, category: str, beside: str) -> tuple[float, float]:
        """Factors on both times while they run together."""
        key = (category, beside)
        if key not in self._stretches:
            found = self.cost.stretch_between(category, beside)
            self._stretches[key] = (found.op, found.beside)
        return self._stretches[key]

    def plain(self) -> list[Placed]:
        """Backward, then forward; receives of the forward stand in front of the backward's sends, which come after them."""
        return list(self.plain_order)

    def _with_free(self, node: Node) -> list[Placed]:
        """A node and the free operations that travel with it."""
        found: list[Placed] = [(node.side, node.op)]
        stack = [*self.after[node.side, node.op]]
        while stack:
            item = stack.pop()
            if item in self.free and item not in found:
                found.append(item)
                stack += self.after[item]
        return found

    def within(self, cap_bytes: int, form: Form) -> list[Placed]:
        """The fastest order found whose live memory stays under a cap."""
        best = self.plain()
        best_time = self._time(_indices(best, self.index))
        rules = Rules(self.nodes, form)
        firm = cap_bytes
        for _ in range(3):
            placed = self._spread(self._found(rules, form, firm))
            over = self.memory.peak(placed) - cap_bytes
            if over <= 0:
                return placed if self._time(_indices(placed, self.index)) < best_time else best
            firm -= over
        return best

    def _found(self, rules: Rules, form: Form, cap_bytes: int) -> list[int]:
        """The best first order, improved by local search."""
        hides = [self._hides(node) for node in self.nodes]
        tries = [ListScheduler(self.nodes, self.stretch, form, self.bytes, cap_bytes, weights, hides).run() for weights in TRIES]
        orders = [rules.full(rules.listed(order)) for order in tries]
        search = Search(rules, self.stretch, self.bytes, cap_bytes, min(orders, key=self._time))
        return search.run(SEARCH_WORK)

    def _hides(self, node: Node) -> float:
        """Share of the communication beside a node that it hides, at its best."""
        streams = {other.category for other in self.nodes if other.stream}
        factors = [self.stretch(node.category, category) for category in sorted(streams)] if not node.stream else []
        return max((1 / other - (1 - 1 / slow) for slow, other in factors), default=0.0)

    def _time(self, order: Sequence[int]) -> float:
        return duration(self.nodes, order, self.stretch)[0]

    def _spread(self, order: Sequence[int]) -> list[Placed]:
        """Nodes in order with free operations in front of the first that needs them; those nobody needs come last."""
        placed: list[Placed] = []
        seen: set[Placed] = set()
        for node in order:
            self._emit((self.nodes[node].side, self.nodes[node].op), placed, seen)
        for side, op in self.all_ops:
            self._emit((side, op.id), placed, seen)
        return placed

    def _emit(self, item: Placed, placed: list[Placed], seen: set[Placed]) -> None:
        stack = [item]
        while stack:
            top = stack[-1]
            waiting = sorted(before for before in self.after[top] if before not in seen)
            if top in seen:
                stack.pop()
            elif waiting:
                stack += waiting
            else:
                seen.add(top)
                placed.append(top)
                stack.pop()

    def result(self, order: list[Placed], note: str) -> PairPlan:
        """The plan of an order; checks that it is legal."""
        place = {item: k for k, item in enumerate(order)}
        for item, before in self.after.items():
            for other in before:
                if place[other] > place[item]:
                    op, first = self.graph.ops[item[1]], self.graph.ops[other[1]]
                    raise PlanError(
                        f"pair order puts {describe(op)} ({item[0]}) in front of {describe(first)} ({other[0]}), which it needs"
                    )
        planned, exposed = duration(self.nodes, _indices(order, self.index), self.stretch)
        comm = sum(node.dur for node in self.nodes if node.stream)
        return PairPlan(tuple(order), round(serial_duration(self.nodes)), round(planned), round(comm), round(exposed),
                        self.memory.peak(self.plain()), self.memory.peak(order), note)  # fmt: skip


def _draws_in_turn(backward: Sequence[Op], forward: Sequence[Op]) -> list[tuple[int, int]]:
    """Random draws come from one generator: the forward's first draw stands behind the backward's last (recompute draws too)."""
    first, last = (next((op.id for op in ops if is_random(op)), None) for ops in (forward, reversed(backward)))
    return [(first, last)] if first is not None and last is not None else []


def chain_ops(graph: Graph, backward: Sequence[Op]) -> set[int]:
    """Backward operations that a send or a tensor-parallel collective waits for, and random draws: the chain of input gradients.

    A collective whose result only goes into gradient buffers reduces gradients and is no seed.
    """
    inside = {op.id: op for op in backward}
    seeds = [op.id for op in backward if is_send(op) or is_random(op)
             or (is_collective(op) and op.group >= 0 and not _reduces_gradient(graph, op, inside))]  # fmt: skip
    before = dependencies(graph, backward)
    chain: set[int] = set()
    stack = seeds
    while stack:
        op_id = stack.pop()
        if op_id not in chain:
            chain.add(op_id)
            stack += _data_before(graph, inside[op_id], inside, before)
    return chain


def _data_before(graph: Graph, op: Op, inside: dict[int, Op], before: dict[int, set[int]]) -> list[int]:
    """Operations it needs; the order within a communication group is no need."""
    givers = {graph.producer[v] for v in op.operands if v != ABSENT and v in graph.producer}
    writes = {other for other in before[op.id] if not is_comm(op) or not is_comm(inside[other]) or other in givers}
    return [other for other in writes if other in inside]


def _reduces_gradient(graph: Graph, op: Op, inside: dict[int, Op]) -> bool:
    stack, found = list(op.results), False
    while stack:
        for user in graph.user_ops(stack.pop()):
            found = True
            if user.id in inside and user.kind not in GRADIENT_SINKS and not is_comm(user):
                return False
            writes = any(graph.values[user.operands[operand]].persistable for _, operand in user.inplace)
            stack += [] if writes or user.id not in inside else user.results
    return found


def _p2p_order(backward: Sequence[Op], forward: Sequence[Op]) -> Iterable[tuple[Placed, Placed]]:
    """What the neighbours count on: backward's receives, forward's receives, backward's sends, forward's sends.

    Forward's receives stand in front of backward's sends, since with sends that wait for their receiver the neighbour sends
    first; and where one group carries both directions of the pipeline (two stages with chunks), its messages keep that order.
    """
    sides = [("B", op) for op in backward], [("F", op) for op in forward]
    plain = [(side, op) for kind in (is_receive, is_send) for ops in sides for side, op in ops if kind(op)]
    last: dict[int, Placed] = {}
    for side, op in plain:
        if op.group in last:
            yield last[op.group], (side, op.id)
        last[op.group] = (side, op.id)
    for op in backward:
        if is_send(op):
            yield from ((("F", other.id), ("B", op.id)) for other in forward if is_receive(other))


def _indices(order: Sequence[Placed], index: dict[Placed, int]) -> list[int]:
    return [index[item] for item in order if item in index]
