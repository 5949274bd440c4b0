"""Happens-before of small plans by explicit closure: the slow, plain second opinion that generators and tests rely on.

Written without a line of the checker, quadratic on purpose. Two steps are unrolled, so that what one step leaves behind for
the next (parameters, pinned buffers) is seen. Rules: `interlace/scheduler/hazards` states them; place: GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import networkx as nx

from interlace.ir import Op, Program
from interlace.ir.kinds import BOUNDARY, COMBINE, SPLIT, is_collective, is_receive, is_send
from tests.interpreter import Item, Rank, items_of


@dataclass(slots=True)
class Access:
    """Cells that one item reads and writes, and those it makes anew."""

    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)


class Closure:
    """All orders of one rank's plan over two steps.

    `before[k]` has bit j set where node j is over when node k starts; node = step * number of items + place in host order.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.rank = Rank(program)
        self.items = items_of(program)
        self.count = len(self.items)
        self.place = {item: k for k, item in enumerate(self.items)}
        self.job = [k for k, job in enumerate(program.jobs) for _ in job.items] if program.jobs else [0] * self.count
        self.stream = [self.rank.ops[op].stream for op, _ in self.items]
        self.cells: dict[int, tuple[int, int]] = {}
        self.access = [self._access(item) for item in self.items]
        self.touching: dict[int, list[int]] = defaultdict(list)
        self.on_stream: dict[str, list[int]] = defaultdict(list)
        for place, access in enumerate(self.access):
            self.on_stream[self.stream[place]].append(place)
            for cell in access.reads | access.writes:
                self.touching[cell].append(place)
        self.waits: dict[int, list[int]] = defaultdict(list)
        for event in program.events:
            for item in event.waits:
                self.waits[self.place[item]].append(self.place[event.record])
        self.before = self._close()

    def op(self, place: int) -> Op:
        """The operation at a place in host order."""
        return self.rank.ops[self.items[place % self.count][0]]

    def _access(self, item: Item) -> Access:
        op, m = self.rank.ops[item[0]], item[1]
        if op.name in (COMBINE, SPLIT) or op.name in BOUNDARY:
            return Access()
        viewed = {op.results[r] for r, _ in op.views}
        return Access(self._ids(self.rank.content_operands(op), m), self._ids(set(op.results) - viewed, m))

    def _ids(self, values: Iterable[int], micro_batch: int) -> set[int]:
        found = set()
        for value in values:
            for cell in self.rank.cells_of(value, micro_batch):
                found.add(id(cell))
                self.cells.setdefault(id(cell), (value, micro_batch))
        return found

    def lasting(self, cell: int) -> bool:
        """Whether a storage is the same one in the next step."""
        value = self.rank.values[self.cells[cell][0]]
        return value.storage in self.rank.persistable or value.memory != "device"

    def conflicts(self, a: int, b: int) -> set[int]:
        """Storages that two nodes both touch, one of them writing."""
        x, y = self.access[a % self.count], self.access[b % self.count]
        shared = x.writes & (y.reads | y.writes) | x.reads & y.writes
        return shared if a // self.count == b // self.count else {cell for cell in shared if self.lasting(cell)}

    def _close(self) -> list[int]:
        before: list[int] = []
        last: dict[str, int] = {}
        host = 0
        for node in range(2 * self.count):
            here, step = node % self.count, node // self.count
            known = host
            for prior in [last.get(self.stream[here], -1), *(p + step * self.count for p in self.waits[here])]:
                known |= before[prior] | 1 << prior if prior >= 0 else 0
            for prior in sorted(self._partners(node)):
                if self.job[prior % self.count] == self.job[here] and not known >> prior & 1:
                    known |= before[prior] | 1 << prior
            before.append(known)
            last[self.stream[here]] = node
            if self.op(node).kind == "memcpy_d2h":
                host |= known | 1 << node
        return before

    def _partners(self, node: int) -> set[int]:
        """Earlier nodes that touch a storage of this one, one of the two writing; and those that give a view it reads."""
        step, here = divmod(node, self.count)
        found = set(self._views_read(here, step))
        for cell in self.access[here].reads | self.access[here].writes:
            for place in self.touching[cell]:
                found |= {place + step * self.count} if place < here else set()
                found |= {place} if step and self.lasting(cell) else set()
        return {prior for prior in found if prior in self._views_read(here, step) or self.conflicts(prior, node)}

    def _views_read(self, here: int, step: int) -> list[int]:
        """Nodes whose views an item reads: the executor sees a variable of its own there."""
        micro_batch, found = self.items[here][1], []
        for value in self.op(here).operands:
            producer = self.rank.producer.get(value)
            place = self.place.get((producer.id, micro_batch), -1) if producer is not None and producer.views else -1
            found += [place + step * self.count] if 0 <= place < here else []
        return found

    def ordered(self, a: int, b: int) -> bool:
        """Whether node a is over when node b starts."""
        return bool(self.before[b] >> a & 1)

    def races(self) -> list[tuple[int, int, int]]:
        """Conflicting nodes (a, b, cell) that nothing orders, a earlier in host order."""
        return [
            (a, b, min(cells))
            for b in range(2 * self.count)
            for a in sorted(self._partners(b))
            if a < self.count and not self.ordered(a, b) and (cells := self.conflicts(a, b))
        ]

    def unwritten(self) -> list[tuple[int, int]]:
        """Reads (place, cell) that see another write than the value they name has in the sequential step, or none."""
        want: dict[tuple[int, int], int] = {}
        latest: dict[tuple[int, tuple[int, int]], int] = {}
        for place in [self.place[item] for item in sequential(self.program)]:
            for name in self._held(place, writes=False):
                want[place, name[0]] = latest.get(name, -1)
            latest.update(dict.fromkeys(self._held(place, writes=True), place))
        have: dict[tuple[int, int], int] = {}
        writer: dict[int, int] = {}
        for place in range(self.count):
            have.update({(place, cell): writer.get(cell, -1) for cell in self.access[place].reads})
            writer.update(dict.fromkeys(self.access[place].writes, place))
        return [key for key, source in have.items() if want[key] != source]

    def _held(self, place: int, writes: bool) -> list[tuple[int, tuple[int, int]]]:
        """Cells that an item reads or writes, each with the value whose contents it holds there."""
        op, m = self.op(place), self.items[place][1]
        if op.name in (COMBINE, SPLIT) or op.name in BOUNDARY:
            return []
        viewed = {op.results[r] for r, _ in op.views}
        values = [v for v in op.results if v not in viewed] if writes else self.rank.content_operands(op)
        return [(id(cell), root) for value in values
                for cell, root in zip(self.rank.cells_of(value, m), self.rank.roots_of(value, m), strict=True)]  # fmt: skip

    def freed_early(self) -> list[tuple[int, int]]:
        """Uses (place, place of the last use) that a freed block's next owner may overtake."""
        kept = {id(c) for op in self.program.ops if op.name in BOUNDARY for v in (*op.operands, *op.results)
                for m in range(self.program.pipeline.num_micro_batches) for c in self.rank.cells_of(v, m)}  # fmt: skip
        users: dict[int, list[int]] = defaultdict(list)
        last_by_value: dict[int, dict[int, int]] = defaultdict(dict)
        for place in range(self.count):
            for cell in self.access[place].reads | self.access[place].writes:
                users[cell].append(place)
            for value in self._named(place):
                for c in self.rank.cells_of(value, self.items[place][1]):
                    last_by_value[id(c)][self._variable(value, self.items[place][1])] = place
        return [(use, places[-1]) for cell, places in users.items()
                if cell not in kept and not self.lasting(cell) and self._on_device(cell)
                for use in self._uncovered(places, last_by_value[cell].values())]  # fmt: skip

    def _on_device(self, cell: int) -> bool:
        return self.rank.values[self.cells[cell][0]].memory == "device"

    def _named(self, place: int) -> list[int]:
        op = self.op(place)
        if op.name in (COMBINE, SPLIT):
            return []
        return self.rank.content_operands(op) + list(op.results)

    def _variable(self, value: int, micro_batch: int) -> int:
        """The variable a value lives in: an in-place result in its operand's, a skipped copy's in its operand's."""
        producer = self.rank.producer.get(value)
        if producer is None:
            return value
        if (producer.id, micro_batch) in self.rank.skipped:
            return self._variable(producer.operands[0], micro_batch)
        for result, operand in producer.inplace:
            if producer.results[result] == value:
                return self._variable(producer.operands[operand], micro_batch)
        return value

    def _uncovered(self, places: list[int], lasts: Iterable[int]) -> list[int]:
        """Uses that are neither before what the free records nor before the next operation of the block's own stream."""
        freed, owner = places[-1], self.on_stream[self.stream[places[0]]]
        marks = {max(k for k in self.on_stream[self.stream[last]] if k <= freed) for last in lasts}
        marks.add(next((k for k in owner if k > freed), owner[0] + self.count))
        return [use for use in places if not any(use == k or self.ordered(use, k) for k in marks)]


def sequential(program: Program) -> list[Item]:
    """The order whose results a plan must give: micro-batches in turn, then what runs once."""
    done = set(items_of(program))
    count = program.pipeline.num_micro_batches
    body = [(op.id, m) for m in range(count) for op in program.ops if op.role != "optimize"]
    once = [(op.id, m) for op in program.ops if op.role == "optimize" for m in range(count)]
    return [item for item in body + once if item in done]


def channels(program: Program) -> dict[tuple[object, ...], list[int]]:
    """Places of communication in host order: per group, and per group and direction for p2p."""
    groups = {g.id: g for g in program.groups}
    found: dict[tuple[object, ...], list[int]] = defaultdict(list)
    ops = {op.id: op for op in program.ops}
    for place, (op_id, _) in enumerate(items_of(program)):
        op = ops[op_id]
        if op.group not in groups:
            continue
        ranks = groups[op.group].ranks
        if is_collective(op):
            found[(op.group, *ranks)].append(place)
        elif is_send(op):
            found[(op.group, *ranks, "p2p", program.rank, ranks[op.attrs["peer"]])].append(place)
        elif is_receive(op):
            found[(op.group, *ranks, "p2p", ranks[op.attrs["peer"]], program.rank)].append(place)
    return found


def signature(program: Program, place: int) -> tuple[object, ...]:
    """What partners must agree on."""
    ops = {op.id: op for op in program.ops}
    values = {value.id: value for value in program.values}
    op_id, micro_batch = items_of(program)[place]
    op = ops[op_id]
    value = values[op.operands[0] if op.operands else op.results[0]]
    return ("p2p" if is_send(op) or is_receive(op) else op.kind, value.size_bytes, value.dtype, op.role, micro_batch)


def mismatched(programs: Sequence[Program]) -> bool:
    """Whether partners of a group disagree about an operation, or about how many there are."""
    by_channel: dict[tuple[object, ...], list[list[tuple[object, ...]]]] = defaultdict(list)
    for program in programs:
        for channel, places in channels(program).items():
            by_channel[channel].append([signature(program, place) for place in places])
    for channel, lists in by_channel.items():
        members = 2 if "p2p" in channel else len(channel) - 1
        if len(lists) != members or any(one != lists[0] for one in lists):
            return True
    return False


def circular(programs: Sequence[Program], buffered: bool = False) -> bool:
    """Whether some rank waits for ever: a cycle among items, where the partners of one communication are one node."""
    graph: nx.DiGraph = nx.DiGraph()
    meet: dict[tuple[int, int], object] = {}
    closures = [Closure(program) for program in programs]
    for k, program in enumerate(programs):
        for channel, places in channels(program).items():
            for number, place in enumerate(places):
                if not (buffered and "p2p" in channel):
                    meet[k, place] = (*channel, number)
                elif is_receive(closures[k].op(place)):
                    graph.add_edge((*channel, number), (k, place))
                else:
                    graph.add_edge((k, place), (*channel, number))
    for k, closure in enumerate(closures):
        last_of_group: dict[int, int] = {}
        for b in range(closure.count):
            edges = [a for a in range(b) if closure.ordered(a, b)]
            group = closure.op(b).group
            if group >= 0:
                edges += [last_of_group[group]] if group in last_of_group else []
                last_of_group[group] = b
            graph.add_edges_from((meet.get((k, a), (k, a)), meet.get((k, b), (k, b))) for a in edges)
    return not nx.is_directed_acyclic_graph(graph)
