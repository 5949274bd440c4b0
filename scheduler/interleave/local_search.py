"""Local search over the order of a pair: seeded random moves, for which only the changed part of the order is simulated.

Orders here list only computation, and communication that waits for nothing or may start at any time (`gathers.py`). Any other starts as
soon as it can, wherever it is listed, because it waits only for its data; so it simply follows the last node that it waits for. For every
index of the current order the search stores the communications in flight. A move is simulated from the first index that it changes to
the index where the same communications are in flight as before; from there on only the time differs.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from interlace.cost_model.interference import START_NS, STILL
from interlace.scheduler.interleave.clock import Node, Stretch
from interlace.scheduler.interleave.live_bytes import PairBytes

Form = Literal["dx-first", "mixed"]
Flights = list[tuple[int, float, float]]
"""For each communication in flight: its node, its remaining time, and since when it has run (`Flight.since`)."""
NEAR = 0.5
"""Tolerance in nanoseconds: communications in flight that differ by less count as equal, and a gain below it does not count."""
STEPS = (-16, -8, -4, -2, -1, 1, 2, 4, 8, 16)
UNIT_STEPS = (-96, -48, -24, -12, -6, -3, 3, 6, 12, 24, 48, 96)
UNIT_SHARE = 0.35
"""Share of moves that move a filler with the fillers that depend on it."""
INITIAL_TEMPERATURE, COOLING = 0.09, 0.8
"""Simulated annealing: at first an order may be accepted if it is slower by about the first share of a mean communication; this limit
falls to 0 over the second share of the work. Orders from plain descent are 1 % slower."""
EPS = 1e-6


class Rules:
    """Constraints on every order: dependencies, also through communication, and what each form may mix. `free` are communications that
    are listed although they wait for something: those that may start at any time."""

    def __init__(self, nodes: Sequence[Node], form: Form, free: Container[int] = ()) -> None:
        self.nodes, self.form = nodes, form
        self.follows = [bool(node.stream) and bool(node.deps) and k not in free for k, node in enumerate(nodes)]
        """Whether a node is a communication that follows what it waits for."""
        self.num_deps = [len(node.deps) for node in nodes]
        self.triggers: list[list[int]] = [[] for _ in nodes]
        self.waits: list[list[int]] = [[] for _ in nodes]
        self.pred: list[set[int]] = [set() for _ in nodes]
        self.succ: list[set[int]] = [set() for _ in nodes]
        through: list[frozenset[int]] = []
        for k, node in enumerate(nodes):
            mine: set[int] = set()
            for dep in node.deps:
                mine |= through[dep] if self.follows[dep] else {dep}
                if self.follows[k]:
                    self.triggers[dep].append(k)
                if nodes[dep].stream:
                    self.waits[k].append(dep)
            through.append(frozenset(mine))
            if not self.follows[k]:
                self.pred[k] = mine
                for dep in mine:
                    self.succ[dep].add(k)

    def listed(self, order: Iterable[int]) -> list[int]:
        """The listed nodes of an order: all except communication that starts when its data are ready."""
        return [k for k in order if not self.follows[k]]

    def full(self, listed: Sequence[int]) -> list[int]:
        """The order with all communication."""
        made: list[int] = []
        pending = self.num_deps.copy()
        triggers = self.triggers

        def append(node: int) -> None:
            made.append(node)
            for comm in triggers[node]:
                pending[comm] -= 1
            for comm in triggers[node]:
                if not pending[comm]:
                    pending[comm] = -1
                    append(comm)

        for node in listed:
            if triggers[node]:
                append(node)
            else:
                made.append(node)
        return made

    def may_pass(self, node: int, other: int) -> bool:
        """Whether two neighbours may be swapped; `node` is the one that moves."""
        mine, its = self.nodes[node], self.nodes[other]
        if mine.stream and mine.stream == its.stream:
            return False
        return self.form == "mixed" or mine.filler or its.filler or mine.side == its.side


class Search:
    """The current order, and moves of it.

    Attributes:
        order: The listed nodes.
        before: Communications in flight before each index.
        took: Time from each index to the next.
        live_bytes: Live bytes before each index.
        worth: Weight of a nanosecond at each index in the objective.
        position: Index of each node in the order.
        work: Node visits spent.
    """

    def __init__(
        self, rules: Rules, stretch: Stretch, table: PairBytes, cap_bytes: int, order: Sequence[int], seed: int = 7, early: float = 0.0
    ) -> None:
        self.rules, self.nodes, self.table, self.cap, self.early = rules, rules.nodes, table, cap_bytes, early
        self.rng = random.Random(seed)
        self.work = 0
        names = {name: k for k, name in enumerate(dict.fromkeys(node.category for node in self.nodes))}
        self.kind = [names[node.category] for node in self.nodes]
        self.factors = [[stretch(a, b) for b in names] for a in names]
        self.holds = any(holds for row in self.factors for _, _, holds in row)
        self.dur = [node.dur for node in self.nodes]
        self.mark = [0] * len(self.nodes)
        self.stamp = 0
        self.position = [0] * len(self.nodes)
        self.order: list[int] = []
        self.before: list[Flights] = []
        self.took: list[float] = []
        self.live_bytes: list[int] = []
        self.worth: list[float] = []
        self.start(rules.listed(order))

    def start(self, order: list[int]) -> None:
        """Make an order the current one."""
        self.order = order
        self.position = [0] * len(self.nodes)
        self.before, self.took = [[]] * (len(order) + 1), [0.0] * len(order)
        run = _Run(self, 0, order, [])
        for k, node in enumerate(order):
            self.before[k] = run.flights()
            self.took[k] = run.step(node)
            for other in run.started:
                self.position[other] = k
        self.before[len(order)] = run.flights()
        self.tail = run.finish()
        self.worth = self._worth(order, 1.0)
        self.time = sum(took * worth for took, worth in zip(self.took, self.worth, strict=True)) + self.tail
        self.live_bytes = self._live(0, order, self.table.start)[0]

    def run(self, work: int) -> list[int]:
        """Try moves until `work` node visits are spent; returns the best order, with its communication."""
        begin, cools, draw = self.work, COOLING * work, self.rng.random
        temperature = self._initial_temperature()
        best, best_time = list(self.order), self.time
        while self.order and self.work < begin + work:
            self.work += 1
            found = self._unit_move() if draw() < UNIT_SHARE else self._move()
            if found is None:
                continue
            # no logarithm: libraries differ in its last bit, and ranks must agree
            chance = draw()
            loss = temperature * max(0.0, 1 - (self.work - begin) / cools) * chance * chance
            if self._try(*found, NEAR - loss) and self.time < best_time - NEAR:
                best, best_time = list(self.order), self.time
        return self.rules.full(best)

    def _initial_temperature(self) -> float:
        """The initial temperature, in nanoseconds."""
        comm = [node.dur for node in self.nodes if node.stream]
        return INITIAL_TEMPERATURE * sum(comm) / len(comm) if comm else 0.0

    def _below(self, count: int) -> int:
        """A random number below `count`, the same as `Random.randrange` and `Random.choice` would draw, in a third of their time."""
        bits = count.bit_length()
        drawn = self.rng.getrandbits(bits)
        while drawn >= count:
            drawn = self.rng.getrandbits(bits)
        return drawn

    def _move(self) -> tuple[int, list[int]] | None:
        """Move one node by a few places; returns the first changed index, and the changed nodes from there on."""
        order, rules = self.order, self.rules
        start = self._below(len(order))
        target = max(0, min(len(order) - 1, start + STEPS[self._below(len(STEPS))]))
        node = order[start]
        if start == target:
            return None
        passed = order[target:start] if target < start else order[start + 1 : target + 1]
        near = rules.pred[node] if target < start else rules.succ[node]
        for other in passed:
            if other in near or not rules.may_pass(node, other):
                return None
        return (target, [node, *passed]) if target < start else (start, [*passed, node])

    def _unit_move(self) -> tuple[int, list[int]] | None:
        """Move a filler, with the fillers that depend on it (a weight gradient with its sum), by a larger distance; returns as `_move`."""
        order, rules = self.order, self.rules
        start = self._below(len(order))
        if not self.nodes[order[start]].filler:
            return None
        last = max(0, min(len(order) - 1, start + UNIT_STEPS[self._below(len(UNIT_STEPS))]))
        unit = [order[start]]
        first, end = (last, start) if last < start else (start, last)
        members = set(unit)
        reach = min(len(order), start + 12)
        for k in range(start + 1, reach):
            node = order[k]
            if self.nodes[node].filler and rules.pred[node] & members:
                members.add(node)
                unit.append(node)
                end = max(end, k)
        rest = [k for k in order[first : end + 1] if k not in members]
        if last < start:
            passed = order[first:start]
            if any(other in rules.pred[k] or not rules.may_pass(k, other) for k in unit for other in passed):
                return None
            gap = [k for k in order[start : end + 1] if k not in members]
            if any(rules.pred[k] & set(gap) for k in unit):
                return None
            return first, [*unit, *rest]
        if any(rules.succ[k] & set(rest) for k in unit) or any(not rules.may_pass(k, other) for k in unit for other in rest):
            return None
        return first, [*rest, *unit]

    def _try(self, first: int, window: list[int], least: float) -> bool:
        """Accept a changed window if it gains at least `least` nanoseconds (negative: may lose) and fits into memory."""
        order, before, took = self.order, self.before, self.took
        run = _Run(self, first, window, before[first])
        gain, at, end = 0.0, first, first + len(window)
        flights: list[Flights] = []
        times: list[float] = []
        started: list[list[int]] = []
        worth = self._worth(window, self.worth[end] if end < len(order) else 1.0)
        while at < len(order):
            if at >= end and run.same(before[at]):
                break
            flights.append(run.flights())
            times.append(run.step(window[at - first] if at < end else order[at]))
            started.append(run.started)
            gain += took[at] * self.worth[at] - times[-1] * (worth[at - first] if at < end else self.worth[at])
            at += 1
        tail = self.tail
        if at == len(order):
            tail = run.finish()
            gain += self.tail - tail
        self.work += at - first
        if gain < least:
            return False
        live_bytes, fits = self._live(first, window, self.live_bytes[first])
        if not fits:
            return False
        order[first:end] = window
        before[first:at], took[first:at] = flights, times
        self.worth[first:end] = worth
        self.live_bytes[first:end] = live_bytes[:-1]
        for index, others in enumerate(started, first):
            for other in others:
                self.position[other] = index
        self.tail = tail
        self.time -= gain
        return True

    def _worth(self, window: Sequence[int], after: float) -> list[float]:
        """Weight of a nanosecond at each index: 1, plus `early` for each send that starts from there on."""
        found = []
        for node in reversed(window):
            after += self.early * self.nodes[node].leaves
            found.append(after)
        return found[::-1]

    def _live(self, first: int, window: Sequence[int], live: int) -> tuple[list[int], bool]:
        """Live bytes before each index of a window and after it, and whether its peak is within the cap; the same as `live_bytes.Walk`
        computes for the whole order."""
        table, place = self.table, self.position
        size, live_after = table.size, table.live_after
        live_bytes, fits = [], True
        waiting: dict[int, int] = {}
        born: set[int] = set()
        seen: set[int] = set()
        whole = first == 0 and len(window) == len(self.order)
        deps, follows, triggers = self.nodes, self.rules.follows, self.rules.triggers
        for node in window:
            live_bytes.append(live)
            stack = [node]
            while stack:
                k = stack.pop()
                seen.add(k)
                for s in table.allocs[k]:
                    if s not in born and not table.live_before[s]:
                        born.add(s)
                        if whole or all(place[g] >= first for g in table.allocators[s]):
                            live += size[s]
                if live > self.cap:
                    fits = False
                for s in table.reads[k]:
                    left = waiting.get(s)
                    if left is None:
                        left = len(table.readers[s]) if whole else sum(place[r] >= first for r in table.readers[s])
                    waiting[s] = left - 1
                    if left == 1 and not live_after[s]:
                        live -= size[s]
                for comm in triggers[k]:
                    if (
                        comm not in seen
                        and follows[comm]
                        and all(dep in seen or (not whole and place[dep] < first) for dep in deps[comm].deps)
                    ):
                        stack.append(comm)
        live_bytes.append(live)
        return live_bytes, fits


NOT_YET, LONG = 1e18, -2.0 * START_NS


@dataclass(slots=True)
class Flight:
    """A communication in flight.

    Attributes:
        left: Remaining part of its duration alone, in nanoseconds.
        since: When it first ran, in nanoseconds relative to the start of the current node; NOT_YET before that, LONG if longer ago than
            matters.
    """

    node: int
    left: float
    since: float = NOT_YET


class _Run:
    """Runs nodes from an index of the current order on.

    The overlap clock for the inner loop of the search; the docstring of `clock.py` says why there are two.
    """

    def __init__(self, search: Search, first: int, window: Sequence[int], flights: Flights) -> None:
        self.search = search
        self.first = first
        self.left = [Flight(*each) for each in flights]
        search.stamp += 1
        self.stamp = search.stamp
        self.started: list[int] = []

    def flights(self) -> Flights:
        """The communications in flight, in the order of their starts."""
        return [(flight.node, flight.left, flight.since) for flight in self.left]

    def same(self, flights: Flights) -> bool:
        """Whether exactly these are in flight, with the same remaining time and the same start."""
        if len(flights) != len(self.left):
            return False
        for mine, (node, left, since) in zip(self.left, flights, strict=True):
            if mine.node != node or abs(mine.left - left) >= NEAR or abs(mine.since - since) >= NEAR:
                return False
        return True

    def step(self, node: int) -> float:
        """Run a node and start the communication that follows it; returns the time it took, in nanoseconds."""
        search = self.search
        nodes, mark, stamp = search.nodes, search.mark, self.stamp
        now = 0.0
        item = nodes[node]
        self.started = [node]
        mark[node] = stamp
        if item.stream:
            self.left.append(Flight(node, item.dur))
        else:
            if self.left:
                for dep in search.rules.waits[node]:
                    while self._flies(dep):
                        now += self._idle(now)
            left, begin = item.dur, now - START_NS
            factors = search.factors[search.kind[node]]
            while left > EPS:
                if not self.left:
                    now += left
                    break
                heads = self._heads(now)
                slow, count = 1.0, len(heads)
                paces = []
                for flight in heads:
                    op, other, holds = factors[search.kind[flight.node]]
                    if holds and begin <= flight.since:
                        other = STILL
                    elif op > slow:
                        slow = op
                    paces.append(other * count)
                step = left * slow
                for flight, pace in zip(heads, paces, strict=True):
                    step = min(step, flight.left * pace)
                left -= step / slow
                now += step
                for flight, pace in zip(heads, paces, strict=True):
                    flight.left -= step / pace
                self._land(heads)
            if search.holds:
                for flight in self.left:
                    if flight.since != NOT_YET:
                        flight.since = max(LONG, flight.since - now)
        if search.rules.triggers[node]:
            self._trigger(node)
        return now

    def _flies(self, node: int) -> bool:
        for flight in self.left:  # noqa: SIM110 - a generator takes twice the time
            if flight.node == node:
                return True
        return False

    def _trigger(self, node: int) -> None:
        """Start the communication for which this node was the last predecessor, and then that which was waiting only for it."""
        search = self.search
        place, mark, first, stamp = search.position, search.mark, self.first, self.stamp
        for comm in search.rules.triggers[node]:
            if mark[comm] == stamp:
                continue
            for dep in search.nodes[comm].deps:
                if mark[dep] != stamp and place[dep] >= first:
                    break  # not yet
            else:
                mark[comm] = stamp
                self.started.append(comm)
                self.left.append(Flight(comm, search.dur[comm]))
                self._trigger(comm)

    def _heads(self, now: float) -> list[Flight]:
        """Communications that run now: the first of each stream, if it waits for none in flight."""
        heads = self._first_of_streams()
        if self.search.holds:  # otherwise it makes no difference
            for flight in heads:
                if flight.since == NOT_YET:
                    flight.since = now
        return heads

    def _first_of_streams(self) -> list[Flight]:
        if len(self.left) == 1:
            return self.left
        search = self.search
        flying = {flight.node for flight in self.left}
        streams: set[str] = set()
        heads = []
        for flight in self.left:
            stream = search.nodes[flight.node].stream
            if stream not in streams:
                streams.add(stream)
                if not any(dep in flying for dep in search.rules.waits[flight.node]):
                    heads.append(flight)
        return heads

    def _idle(self, now: float) -> float:
        heads = self._heads(now)
        count = len(heads)
        step = min(flight.left for flight in heads) * count
        for flight in heads:
            flight.left -= step / count
        self._land(heads)
        return step

    def _land(self, heads: list[Flight]) -> None:
        for flight in heads:
            if flight.left <= EPS:
                self.left = [other for other in self.left if other.left > EPS]
                return

    def finish(self) -> float:
        """Time until nothing is in flight."""
        now = 0.0
        while self.left:
            now += self._idle(now)
        return now
