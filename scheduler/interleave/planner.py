"""The order of operations inside a job with parts of several micro-batches: backward (or its input gradients), forward, and
weight gradients of earlier micro-batches.

Two forms (docs/decisions/002): `dx-first` runs backward's chain of input gradients first, so that the gradient is sent to the
neighbour early, and uses weight gradients as fillers during the collectives of backward and forward; `mixed` mixes backward and
forward op by op. A list scheduler makes a first order, a seeded local search improves it; both measure orders with the overlap
clock of `clock.py`.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise, product
from typing import Literal

import msgspec

from interlace.cost_model import Costs
from interlace.cost_model.base import tables_of
from interlace.errors import PlanError
from interlace.grouping import grouped
from interlace.ir import ABSENT, Graph, Group, Op, Program, dependencies, describe
from interlace.ir.effects import is_ordered
from interlace.ir.graph import written_operands
from interlace.ir.kinds import NO_KERNEL, is_collective, is_comm, is_p2p, is_receive, is_send
from interlace.ir.operators import names
from interlace.ir.per_ops import once_per_ops, once_per_ops_and
from interlace.ir.remarks import Place, Remark, remark
from interlace.scheduler.interleave.allocations import PairMemory, PairOp
from interlace.scheduler.interleave.allocations import PartOps as PartOps
from interlace.scheduler.interleave.clock import Factors, Node, columns_of
from interlace.scheduler.interleave.columns import Columns
from interlace.scheduler.interleave.engine import engine_for
from interlace.scheduler.interleave.gathers import LEADS, may_start_early, when_due
from interlace.scheduler.interleave.list_schedule import TRIES, USUAL, task_of
from interlace.scheduler.interleave.live_bytes import PairBytes
from interlace.scheduler.interleave.local_search import Form as Form
from interlace.scheduler.interleave.local_search import Rules, Search
from interlace.scheduler.interleave.optimizer import across_stages, updates_after

SEARCH_WORK = 150_000
"""Node visits that the local search may spend; about half a second of host time."""
LEAST_EXPOSED = 0.01
"""The local search is made if communication keeps the device from computing at full speed for more than this share of a job, as it cannot
save more than that. In jobs with less it saved 0.1 % at most (GPT at pp 2 and VPP 3: 27 jobs, half a second each)."""
EARLY = 0.5
"""Weight of the time until a send against the time of the whole job: the neighbouring stage waits for the send
(docs/decisions/002)."""
SMALL_SHARE = 1000
"""An order may exceed its memory by 1 / SMALL_SHARE, as it does not matter when a scalar is freed."""
FREE_SHARE = 100
"""`SMALL_SHARE` if there is no memory budget: the share by which a plan may exceed Paddle's own memory. The list scheduler does not
backtrack when memory is short for a gradient that it wants early: with a tenth of this share, for want of 53 MB in 9 GB, it misses an
order that is 12 % faster."""
REDUCTIONS_SHARE = 50
"""`SMALL_SHARE` of a job with the optimizer in which gradients that are reduced come first: the results are held beside what backward still
holds. The limit of the whole plan is kept elsewhere. Two plans of the zoo with gradient accumulation need it to be faster than with the
optimizer in a job of its own; 25 made one of them faster, and one slower."""
MOST_CAPS = 3
"""Number of caps that orders are made in, each lower by what the fastest order exceeded the one before."""
MOST_ORDERS = 256
"""Number of orders that are kept for equal ranks."""
GRADIENT_SINKS = names("""
    cast add scale assign reshape share_data concat split split_with_num combine slice clip full_int_array full
""")
"""Kinds between a reduced gradient and its buffer; a collective that only these follow reduces gradients."""


class PairPlan(msgspec.Struct, frozen=True):
    """The order of a pair's operations and its gain, simulated on one rank.

    Attributes:
        order: `(label of the part, op id)` of each operation.
        serial_ns: Time of all parts one after another, with communication exposed.
        planned_ns: Time of this order.
        plain_peak_bytes, peak_bytes: Peak of live memory, without what is live throughout the job, with parts one after another and in
            this order.
        why_plain: Why the order is plain; empty if it is not.
        most_ops: The limit that `too-large` refers to.
    """

    order: tuple[PairOp, ...]
    serial_ns: int
    planned_ns: int
    plain_peak_bytes: int
    peak_bytes: int
    why_plain: Literal["", "too-large", "nothing-faster-fits"] = ""
    most_ops: int = 0

    def remark(self, job: str, **when: str) -> Remark:
        """The result for this kind of job, as a remark."""
        at = Place(job=job)
        if self.why_plain == "too-large":
            return remark("declined", "job-too-large", at, operations=len(self.order), most_operations=self.most_ops, **when)
        if self.why_plain:
            return remark("declined", "job-in-plain-order", at, **when)
        return remark(
            "applied",
            "job-ordered",
            at,
            operations=len(self.order),
            serial_ns=self.serial_ns,
            planned_ns=self.planned_ns,
            change=self.planned_ns / max(self.serial_ns, 1) - 1,
            plain_peak_bytes=self.plain_peak_bytes,
            peak_bytes=self.peak_bytes,
            **when,
        )


def plan_pair(pair: Pair, form: Form, extra_bytes: int = 0, max_ops: int = 4000, small_share: int = SMALL_SHARE) -> PairPlan:
    """Find an order for the operations of one job. Its parts are independent of each other, and given in the order in which they would run
    one after another; with more than `max_ops` operations they keep that order. Live bytes may exceed the peak of that order by
    `extra_bytes` and by 1 / `small_share` of it.

    The order is legal: it keeps every dependency of each part, the order of each group's collectives within a part, the order of writes to
    persistable state by micro-batch, and receives of forward before sends of backward (the neighbour sends in that order too).
    """
    plain = pair.plain()
    if len(plain) > max_ops:
        return msgspec.structs.replace(pair.result(plain), why_plain="too-large", most_ops=max_ops)
    plain_peak = pair.memory.peak(plain)
    cap = plain_peak + plain_peak // small_share + extra_bytes
    order = _order_of(pair, form, cap)
    found = pair.result(order)
    return found if order != plain else msgspec.structs.replace(found, why_plain="nothing-faster-fits")


_orders: dict[bytes, list[PairOp]] = {}
"""Orders by `Pair.key`: equal ranks that plan in one process search for each order once."""
_ordering = threading.Lock()


def _order_of(pair: Pair, form: Form, cap_bytes: int) -> list[PairOp]:
    key = pair.key(form, cap_bytes)
    with _ordering:
        if key not in _orders:
            _orders[key] = pair.within(cap_bytes, form)
            if len(_orders) > MOST_ORDERS:
                del _orders[next(iter(_orders))]
        return list(_orders[key])


@dataclass
class _Known:
    """Results about a pair that do not depend on the weight of sends."""

    stretches: dict[tuple[str, str], Factors] = field(default_factory=dict)
    listed: dict[tuple[Form, int], tuple[list[list[int]], list[list[int]]]] = field(default_factory=dict)
    took: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=dict)
    rules: dict[tuple[Form, bool], Rules] = field(default_factory=dict)
    node_bytes: PairBytes | None = None
    task: Columns | None = None
    at_any_time: list[bool] | None = None
    due: dict[tuple[int, ...], list[list[int]]] = field(default_factory=dict)
    parts_key: bytes | None = None


class Pair:
    """The parts of a job as nodes; operations that cost nothing belong to the first node that needs them.

    Attributes:
        early: Weight of the time until a send against the time of the whole job.
        work: Node visits that the local search may spend; 0 keeps the first order.
        reduced_first: Whether orders are tried in which fillers that communication waits for come first.
    """

    def __init__(
        self,
        program: Program,
        parts: Sequence[PartOps],
        cost: Costs,
        early: float = EARLY,
        work: int = 0,
        reduced_first: bool = False,
    ) -> None:
        self.graph = _graph(program)
        self.parts, self.early, self.work, self.reduced_first = parts, early, work, reduced_first
        self.cost = cost
        self._durations = _durations(program, (cost, program.groups))
        self.all_ops: list[tuple[str, Op]] = [(part.label, op) for part in parts for op in part.ops]
        self.after = self._after(parts)
        self.free = {(label, op.id) for label, op in self.all_ops if op.name in NO_KERNEL}
        ops = {(label, op.id): op for label, op in self.all_ops}
        kinds = {part.label: part.kind for part in parts}
        fillers = {(part.label, op_id) for part in parts for op_id in part.fillers}
        chains = {part.label: chain_ops(self.graph, part.ops) if part.kind == "B" else set() for part in parts}
        self.nodes: list[Node] = []
        self.index: dict[PairOp, int] = {}
        for label, op_id in self.spread([]):
            if (label, op_id) not in self.free:
                filler = kinds[label] in "WO" or (kinds[label] == "B" and op_id not in chains[label]) or (label, op_id) in fillers
                self._node(label, ops[label, op_id], filler, kinds[label] == "F")
        self.plain_order = self.spread(range(len(self.nodes)))
        self.memory = PairMemory(self.graph, parts)
        self._known = _Known()
        self.engine, self.columns = engine_for(len(self.nodes)), columns_of(self.nodes, self.stretch)
        self._packed = self.engine.pack(self.columns)

    @property
    def node_bytes(self) -> PairBytes:
        """The pair's live memory in terms of nodes."""
        if self._known.node_bytes is None:
            self._known.node_bytes = PairBytes(self.memory, [self._with_free(node) for node in self.nodes], self.plain_order)
        return self._known.node_bytes

    def _after(self, parts: Sequence[PartOps]) -> dict[PairOp, set[PairOp]]:
        after: dict[PairOp, set[PairOp]] = {}
        for part in parts:
            for op_id, needs in _needs(self.graph, part.ops).items():
                after[part.label, op_id] = {(part.label, other) for other in needs}
        for first, second in combinations(_by_age(parts), 2):
            for later, before in (*self._shared_state(first.ops, second.ops), *_ordered_in_turn(first.ops, second.ops)):
                after[second.label, later].add((first.label, before))
        for part in parts:
            for send, required in _sent_together(part, after):
                after[send] |= required
        for earlier, listed in _p2p_order(parts):
            after[listed].add(earlier)
        for part in parts:
            for label, later, before in self._updates(parts) if part.kind == "O" else ():
                after[part.label, later].add((label, before))
        for part in parts:
            for item, others in _just_in_time(part, after) if part.kind == "O" else ():
                after[item] |= others
        return after

    def _updates(self, parts: Sequence[PartOps]) -> Iterable[tuple[str, int, int]]:
        """`(label, later, before)`: an operation of the optimizer, and one of another part that it must come after.

        Neighbours rely on the order of messages: what the optimizer sends to other stages comes after the messages of backward.
        """
        *others, optimizer = _by_age(parts)
        across = across_stages(self.graph, optimizer.ops)
        yield from ((optimizer.label, later, earlier) for earlier, later in pairwise(across))
        for part in others:
            yield from ((part.label, later, before) for later, before in updates_after(self.graph, part.ops, optimizer.ops))
            yield from ((part.label, later, op.id) for op in part.ops if is_p2p(op) for later in across)

    def _shared_state(self, first: Sequence[Op], second: Sequence[Op]) -> Iterable[tuple[int, int]]:
        """Pairs (later, before): operations of both parts that access the same persistable state, where at least one writes it."""
        states = _states(self.graph.program)
        touched = grouped((storage, (op.id, writes)) for op in first for storage, writes in states[op.id].items())
        for op in second:
            for storage, writes in states[op.id].items():
                yield from ((op.id, other) for other, wrote in touched.get(storage, ()) if writes or wrote)

    def _node(self, side: str, op: Op, filler: bool, forward: bool) -> None:
        dur, category = self._durations[op.id]
        stream = f"comm{op.group}" if is_comm(op) else ""
        deps = sorted({self.index[dep] for dep in self._real(side, op.id) if dep in self.index})
        own = [dep for dep in deps if self.nodes[dep].side == side]
        if is_send(op) and own:  # it also comes after a receive of the other part, but does not depend on it
            self.nodes[own[-1]].leaves += 1
            self.nodes[own[-1]].send_ns = max(self.nodes[own[-1]].send_ns, dur)
        self.index[side, op.id] = len(self.nodes)
        self.nodes.append(Node(op.id, side, dur, category, stream, deps, filler, forward, receive=is_receive(op)))

    def _real(self, side: str, op_id: int) -> set[PairOp]:
        """The operations that must precede this one; operations that cost nothing are replaced by their own predecessors."""
        found: set[PairOp] = set()
        stack = [*self.after[side, op_id]]
        while stack:
            before = stack.pop()
            if before in self.free:
                stack += self.after[before]
            else:
                found.add(before)
        return found

    def stretch(self, category: str, beside: str) -> Factors:
        """Factors on both times while they run together, and whether the first holds up the second."""
        key = (category, beside)
        if key not in self._known.stretches:
            found = self.cost.stretch_between(category, beside)
            self._known.stretches[key] = (found.op, found.beside, found.holds)
        return self._known.stretches[key]

    def plain(self) -> list[PairOp]:
        """The parts one after another; receives of forward come before sends of backward that must follow them."""
        return list(self.plain_order)

    def _with_free(self, node: Node) -> list[PairOp]:
        """A node and the free operations that go with it."""
        found: list[PairOp] = [(node.side, node.op)]
        stack = [*self.after[node.side, node.op]]
        while stack:
            item = stack.pop()
            if item in self.free and item not in found:
                found.append(item)
                stack += self.after[item]
        return found

    def key(self, form: Form, cap_bytes: int) -> bytes:
        """A digest of everything that determines the order: equal for pairs that get the same order. O(operations)."""
        if self._known.parts_key is None:
            self._known.parts_key = self._key_of_parts()
        what = [form, cap_bytes, self.early, self.work, self.reduced_first, self._known.parts_key]
        return hashlib.blake2b(msgspec.msgpack.encode(what), digest_size=16).digest()

    def _key_of_parts(self) -> bytes:
        streams = {stream: k for k, stream in enumerate(dict.fromkeys(node.stream for node in self.nodes))}
        nodes = [(n.op, n.side, n.dur, n.category, streams[n.stream], n.deps, n.filler, n.forward, n.leaves) for n in self.nodes]
        categories = list(dict.fromkeys(node.category for node in self.nodes))
        stretches = [self.stretch(a, b) for a in categories for b in categories]
        after = [(label, op.id, sorted(self.after[label, op.id])) for label, op in self.all_ops]
        table = self.node_bytes
        memory = [table.size, table.allocs, table.reads, table.live_before, table.live_after]
        what = [nodes, self._at_any_time(), self._at_will, stretches, after, *memory]
        return hashlib.blake2b(msgspec.msgpack.encode(what), digest_size=16).digest()

    def within(self, cap_bytes: int, form: Form) -> list[PairOp]:
        """The fastest order found whose live memory is within a cap.

        The list scheduler counts memory by nodes, and so may exceed its cap a little. If the fastest order does, orders within a lower cap
        are compared too.
        """
        best = self.plain()
        best_time = self.time(_indices(best, self.index))
        plain, firm = _indices(best, self.index), cap_bytes
        for _ in range(MOST_CAPS):
            listed, others = self._listed(form, firm)
            others = [*others, *self._when_due(min(listed, key=self.time)), *self._when_due(plain)]
            over = list[int]()
            for order in sorted((*listed, *others), key=self.time):
                if self.time(order) >= best_time:
                    break
                spread = self.spread(order)
                excess = self.memory.peak(spread) - cap_bytes
                if excess <= 0:
                    best, best_time = spread, self.time(order)
                    break
                over += [excess] if order in listed else []
            if not over:
                break
            firm -= over[0]
        return best

    def _listed(self, form: Form, cap_bytes: int) -> tuple[list[list[int]], list[list[int]]]:
        """Orders of the list scheduler within the cap, and the one that the local search finds; and orders whose memory no cap limits: the
        same with collectives that may start at any time as soon as they can."""
        found, eager = self._firsts(form, cap_bytes)
        if self.work:
            first = min((*found, *eager), key=lambda order: (bool(eager) and self._excess(order, cap_bytes) > 0, self.time(order)))
            if self._may_be_better(first) or self._excess(first, cap_bytes) > 0:
                rules = self._rules(form, True)
                found = [*found, Search(rules, self.stretch, self.node_bytes, cap_bytes, first, early=self.early).run(self.work)]
        return found, eager

    def _may_be_better(self, order: Sequence[int]) -> bool:
        """Whether the local search is worth its time: sends may start earlier, or more communication be hidden (`LEAST_EXPOSED`)."""
        if self.early and any(node.leaves for node in self.nodes):
            return True
        took, computes = self._duration_and_sends(order)[0], sum(node.dur for node in self.nodes if not node.stream)
        return took - computes > LEAST_EXPOSED * took

    def _excess(self, order: Sequence[int], cap_bytes: int) -> int:
        """By how many bytes an order exceeds a cap."""
        return self.memory.peak(self.spread(order)) - cap_bytes

    def _when_due(self, order: Sequence[int]) -> list[list[int]]:
        """The order with collectives that may start at any time issued when they are due; none if there are none."""
        early, key = self._at_any_time(), tuple(order)
        if key not in self._known.due:
            gathers, others = [k for k in order if early[k]], [k for k in order if not early[k]]
            self._known.due[key] = [when_due(self.nodes, others, gathers, lead) for lead in LEADS] if gathers else []
        return self._known.due[key]

    def _at_any_time(self) -> list[bool]:
        """For each node, whether it is a collective that may start at any time."""
        if self._known.at_any_time is None:
            self._known.at_any_time = may_start_early(self.nodes, self.graph.ops)
        return self._known.at_any_time

    def _firsts(self, form: Form, cap_bytes: int) -> tuple[list[list[int]], list[list[int]]]:
        """Orders of the list scheduler, which do not depend on the weight of sends; and the same with collectives that may start at any
        time as soon as they can, where that differs."""
        if (form, cap_bytes) not in self._known.listed:
            orders = self.engine.orders(self._task(), form, cap_bytes, TRIES if self.reduced_first else USUAL)
            at_will, eager = (
                dict.fromkeys(tuple(rules.full(rules.listed(order))) for order in orders)
                for rules in (self._rules(form, True), self._rules(form, False))
            )
            self._known.listed[form, cap_bytes] = [list(order) for order in at_will], [list(each) for each in eager if each not in at_will]
        return self._known.listed[form, cap_bytes]

    def _rules(self, form: Form, at_will: bool) -> Rules:
        """The rules of a form; with `at_will`, collectives that may start at any time are listed if they take memory."""
        if (form, at_will) not in self._known.rules:
            self._known.rules[form, at_will] = Rules(self.nodes, form, frozenset(self._at_will if at_will else ()))
        return self._known.rules[form, at_will]

    @property
    def _at_will(self) -> list[int]:
        """Collectives that may start at any time and whose results are larger than their operands, as those of gathers."""
        return [k for k, early in enumerate(self._at_any_time()) if early and self._grows(self.graph.ops[self.nodes[k].op])]

    def _grows(self, op: Op) -> bool:
        made, read = (sum(self.graph.values[each].size_bytes for each in values if each != ABSENT) for values in (op.results, op.operands))
        return made > read

    def _task(self) -> Columns:
        """The list scheduler's input, packed for the engine."""
        if self._known.task is None:
            beside = sorted({node.category for node in self.nodes if node.stream})
            by_category = {category: self._hides(category, beside) for category in {node.category for node in self.nodes}}
            hides = [0.0 if node.stream else by_category[node.category] for node in self.nodes]
            self._known.task = self.engine.pack(task_of(self.columns, [node.side for node in self.nodes], self.node_bytes, hides))
        return self._known.task

    def _hides(self, category: str, beside: Sequence[str]) -> float:
        """The largest share of a communication that computation of a category hides, over communication of the categories `beside`."""
        factors = [self.stretch(category, other) for other in beside]
        return max((1 / other - (1 - 1 / slow) for slow, other, _ in factors), default=0.0)

    def time(self, order: Sequence[int]) -> float:
        """Objective of an order of nodes: its duration, plus the start time of each send times its weight, in nanoseconds."""
        took, sent = self._duration_and_sends(order)
        return took + self.early * sent

    def _duration_and_sends(self, order: Sequence[int]) -> tuple[float, float]:
        key = tuple(order)
        if key not in self._known.took:
            self._known.took[key] = self.engine.duration_and_sends(self._packed, order)
        return self._known.took[key]

    def duration_and_times(self, order: Sequence[int]) -> tuple[float, list[float]]:
        """Duration of nodes in this order, and the time of the compute stream after each, in nanoseconds."""
        return self.engine.duration_and_times(self._packed, order)

    def with_early(self, early: float) -> Pair:
        """The same parts with another weight of sends; first orders are shared by all weights."""
        if early == self.early:
            return self
        other = copy.copy(self)
        other.early = early
        return other

    def spread(self, order: Sequence[int]) -> list[PairOp]:
        """Nodes in order, each after the free operations that it needs; those that no node needs come last."""
        listed: list[PairOp] = []
        seen: set[PairOp] = set()
        named = [(self.nodes[node].side, self.nodes[node].op) for node in order]
        for item in (*named, *((side, op.id) for side, op in self.all_ops)):
            if item in seen:
                continue
            stack = [item]
            while stack:
                waiting = sorted(self.after[stack[-1]] - seen)
                stack += waiting
                if not waiting and (top := stack.pop()) not in seen:
                    seen.add(top)
                    listed.append(top)
        return listed

    def result(self, order: list[PairOp]) -> PairPlan:
        """The plan of an order; checks that it is legal."""
        place = {item: k for k, item in enumerate(order)}
        for item, before in self.after.items():
            for other in before:
                if place[other] > place[item]:
                    op, first = self.graph.ops[item[1]], self.graph.ops[other[1]]
                    raise PlanError(f"pair order puts {describe(op)} ({item[0]}) before {describe(first)} ({other[0]}), which it needs")
        planned, _ = self._duration_and_sends(_indices(order, self.index))
        serial, peaks = round(sum(node.dur for node in self.nodes)), (self.memory.peak(self.plain()), self.memory.peak(order))
        return PairPlan(tuple(order), serial, round(planned), *peaks)


def _by_age(parts: Sequence[PartOps]) -> list[PartOps]:
    """Parts in the order of Paddle's schedule: weight gradients of earlier micro-batches, backward, forward."""
    rank = {"W": 0, "B": 1, "I": 1, "F": 2, "O": 3}
    return sorted(parts, key=lambda part: rank[part.kind])


def _ordered_in_turn(first: Sequence[Op], second: Sequence[Op]) -> list[tuple[int, int]]:
    """Random draws and other ordered operations (`is_ordered`): the first of the second part comes after the last of the first part, those
    of recomputation included."""
    later, before = (next((op.id for op in ops if is_ordered(op)), None) for ops in (second, reversed(first)))
    return [(later, before)] if later is not None and before is not None else []


def _needs(graph: Graph, ops: Sequence[Op]) -> dict[int, set[int]]:
    """`dependencies`, computed once for the same part of a program. The result is shared: do not modify it."""
    return _needs_of_part(graph.program, tuple(op.id for op in ops))


@once_per_ops_and
def _needs_of_part(program: Program, part: tuple[int, ...]) -> dict[int, set[int]]:
    graph = _graph(program)
    return dependencies(graph, [graph.ops[op_id] for op_id in part])


class _Durations(dict[int, tuple[float, str]]):
    """Duration (ns) and interference category of each operation, computed on first use. A receive takes no time, as it is not known here
    whether its sender is late."""

    def __init__(self, program: Program, cost: Costs) -> None:
        super().__init__()
        self.ops, self.tables, self.cost = _graph(program).ops, tables_of(program), cost

    def __missing__(self, op_id: int) -> tuple[float, str]:
        op = self.ops[op_id]
        dur = 0.0 if is_receive(op) else float(self.cost.op_time(op, *self.tables).dur_ns)
        self[op_id] = dur, self.cost.category(op, *self.tables)
        return self[op_id]


@once_per_ops_and
def _durations(program: Program, by: tuple[Costs, tuple[Group, ...]]) -> _Durations:
    """Durations, shared for the same operations, cost model and groups."""
    return _Durations(program, by[0])


_graph = once_per_ops(Graph)
"""The graph of a program, which does not depend on its jobs."""


@once_per_ops
def _states(program: Program) -> dict[int, dict[int, bool]]:
    """Op id -> the persistable storages whose contents it accesses, and whether it writes them."""
    graph, found = _graph(program), dict[int, dict[int, bool]]()
    table = graph.storages
    for op in program.ops:
        written = table.numbers_of(written_operands(op))
        used = table.numbers_of((*graph.reads(op), *op.results))
        found[op.id] = {n: n in written for n in used if table.storages[n].persistable}
    return found


def chain_ops(graph: Graph, backward: Sequence[Op]) -> set[int]:
    """Ids of the chain of input gradients: backward operations that a send or a tensor-parallel collective waits for, and those that keep
    their order, as random draws.

    If chunks receive through the same group, receives belong to it too, as the neighbour decides which comes first. A collective whose
    result only goes into gradient buffers reduces gradients, and the chain does not start from it.
    """
    inside = {op.id: op for op in backward}
    receives = Counter(op.group for op in backward if is_receive(op))
    seeds = [
        op.id
        for op in backward
        if is_send(op)
        or is_ordered(op)
        or (is_receive(op) and receives[op.group] > 1)
        or (is_collective(op) and not _reduces_gradient(graph, op, inside))
    ]
    before = _needs(graph, backward)
    chain: set[int] = set()
    stack = seeds
    while stack:
        op_id = stack.pop()
        if op_id not in chain:
            chain.add(op_id)
            stack += _data_before(graph, inside[op_id], inside, before)
    return chain


def _data_before(graph: Graph, op: Op, inside: dict[int, Op], before: dict[int, set[int]]) -> list[int]:
    """Operations that it depends on through data; the order within a communication group is not included."""
    allocators = {graph.producer[v] for v in op.operands if v != ABSENT and v in graph.producer}
    writes = {other for other in before[op.id] if not is_comm(op) or not is_comm(inside[other]) or other in allocators}
    return [other for other in writes if other in inside]


def _reduces_gradient(graph: Graph, op: Op, inside: dict[int, Op]) -> bool:
    stack, found = list(op.results), False
    while stack:
        for user in graph.user_ops(stack.pop()):
            found = True
            if user.id in inside and user.kind not in GRADIENT_SINKS and not is_comm(user):
                return False
            writes = any(graph.values[value].persistable for value in written_operands(user))
            stack += [] if writes or user.id not in inside else user.results
    return found


def _sent_together(part: PartOps, after: dict[PairOp, set[PairOp]]) -> list[tuple[PairOp, set[PairOp]]]:
    """Constraints by which a part's messages to one neighbour leave together: each message before the last one, and the operations that it
    must come after.

    The neighbour's part begins only when it has all of them, while a message that leaves early makes the receives of forward, which it
    must come after, wait longer.
    """
    sends = grouped((op.group, (part.label, op.id)) for op in part.ops if is_send(op))
    return [(send, after[last] - set(earlier)) for *earlier, last in sends.values() for send in earlier]


def _just_in_time(part: PartOps, after: Mapping[PairOp, set[PairOp]]) -> Iterable[tuple[PairOp, set[PairOp]]]:
    """Constraints on operations that need only parameters, states and constants, such as a rank's slice of a parameter: each comes after
    everything else that its first reader needs, other such operations aside. Earlier its result would only take memory."""
    items = [(part.label, op.id) for op in part.ops]
    early: set[PairOp] = set()
    for item, op in zip(items, part.ops, strict=True):
        if not is_comm(op) and not is_ordered(op) and not written_operands(op) and after[item] <= early:
            early.add(item)
    reader: dict[PairOp, int] = {}
    for place, item in reversed([*enumerate(items)]):
        if item in early and item not in reader:
            continue
        for before in after[item] & early:
            reader[before] = min(reader.get(before, place), reader.get(item, place))
    at = {item: place for place, item in enumerate(items)}
    for item, place in reader.items():
        yield item, {other for other in after[items[place]] - early if at.get(other, -1) < place}


def _p2p_order(parts: Sequence[PartOps]) -> Iterable[tuple[PairOp, PairOp]]:
    """The order of messages that neighbours rely on: backward's receives, forward's receives, backward's sends, forward's sends.

    Forward's receives come before backward's sends because the neighbour sends first if sends wait for their receivers. If one group
    carries both directions of the pipeline (two stages with chunks), its messages keep that order.
    """
    transfers = [(part, op) for part in _by_age(parts) if part.kind != "O" for op in part.ops if is_p2p(op)]
    last: dict[int, PairOp] = {}
    for part, op in sorted(transfers, key=lambda each: is_send(each[1])):
        if op.group in last:
            yield last[op.group], (part.label, op.id)
        last[op.group] = (part.label, op.id)
    received = [(part.label, op.id) for part, op in transfers if part.kind == "F" and is_receive(op)]
    sent = [(part.label, op.id) for part, op in transfers if part.kind != "F" and is_send(op)]
    yield from product(received, sent)


def _indices(order: Sequence[PairOp], index: dict[PairOp, int]) -> list[int]:
    return [index[item] for item in order if item in index]
