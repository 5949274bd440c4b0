"""Happens-before of small plans by explicit closure: the slow, plain second opinion that generators and tests rely on.

Two things are told apart, as in Paddle's executor. *Cells* are memory: two operations that touch one, one of them writing, must be
ordered. *Variables* are names: inside a job the executor orders those that use one, and frees memory behind the last of each.
The job that cuts the batch comes first, the one that collects the outputs last.

Written without a line of the checker, quadratic on purpose. Two steps are unrolled, so that what one step leaves behind for
the next (parameters, pinned buffers) is seen. Rules: docs/gpu-place.md, for the target that is asked for; a GPU by default.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import combinations

from interlace.ir import Op, Program
from interlace.ir.effects import effect_of, is_random
from interlace.ir.kinds import (
    BOUNDARY,
    COMBINE,
    COMPUTE_STREAMS,
    DATA,
    SHADOW_OUTPUT,
    SPLIT,
    is_collective,
    is_copy,
    is_receive,
    is_send,
)
from interlace.ir.operation_kinds import WITHOUT_GROUP
from interlace.ir.storage import FETCH
from interlace.ir.target import GPU, UNBOUNDED, Target
from tests.interpreter import Item, Rank, items_of

Name = tuple[int, int, int]
"""A variable: the first value of an in-place chain, the place in a vector, the micro-batch (-1: all)."""


MOST_CLOSURES = 64
LAUNCH_NOTHING = frozenset({COMBINE, SPLIT, "cf.stack_create", "pd_op.share_var", "pd_op.full_int_array"})
"""Operations that the host is done with when it has issued them: no stream has them, and no event is recorded or waited for there."""
OWN_INSTRUCTIONS = frozenset({"pd_op.assert", "pd_op.has_elements", "pd_op.select_input", "pd_op.select_output"})
ON_HOST = frozenset({"pd_op.shape", "pd_op.shape64"})


@dataclass(slots=True)
class Access:
    """Cells that one item reads and writes, and variables that it uses and gives."""

    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    uses: set[Name] = field(default_factory=set)
    gives: set[Name] = field(default_factory=set)


def fed(program: Program) -> list[Item]:
    """Inputs of the batch, by micro-batch, as the first job cuts them."""
    given = {value.id: value for value in program.values}
    read = {v for op in program.ops for v in op.operands}
    return [
        (op.id, m)
        for op in program.ops
        if op.name == DATA and not given[op.results[0]].persistable and op.results[0] in read
        for m in range(program.pipeline.num_micro_batches)
    ]


def collected(program: Program) -> list[Item]:
    """Outputs as the last job reads them: those that exist for each micro-batch, and what the user fetches."""
    rank = Rank(program)
    optimized = {v for op in program.ops if op.role == "optimize" for v in op.results}
    found = []
    for op in program.ops:
        if op.name == SHADOW_OUTPUT:
            kept = rank.values[variable(rank, op.operands[0], 0)]
            once = op.operands[0] in optimized or (kept.persistable and bool(kept.name))
            found += [(op.id, m) for m in range(1 if once else program.pipeline.num_micro_batches)] if FETCH in op.attrs or not once else []
    return found


def whole(program: Program) -> list[Item]:
    """All items of a step."""
    return [*fed(program), *items_of(program), *collected(program)]


def variable(rank: Rank, value: int, micro_batch: int) -> int:
    """The variable a value lives in: an in-place result in its operand's, a skipped copy's in its operand's."""
    producer = rank.producer.get(value)
    if producer is None:
        return value
    if (producer.id, micro_batch) in rank.skipped:
        return variable(rank, producer.operands[0], micro_batch)
    for result, operand in producer.inplace:
        if producer.results[result] == value:
            return variable(rank, producer.operands[operand], micro_batch)
    return value


class Closure:
    """All orders of one rank's plan over two steps.

    `before[k]` has bit j set where node j is over when node k starts; node = step * number of items + place in host order.
    """

    def __init__(self, program: Program, like: Closure | None = None, target: Target = GPU) -> None:
        """With `like`, a closure of the same plan with other events or for another target, what depends on neither is taken from it."""
        if like is None:
            self._tables(program)
            self.tables = dict(self.__dict__)
        else:
            self.tables = like.tables
            self.__dict__.update(like.tables)
        self.program, self.target = program, target
        self._take_rules()
        self.waits: dict[int, list[int]] = defaultdict(list)
        for event in program.events:
            for item in event.waits:
                if self._has_events(event.record) and self._has_events(item) and not self._loses_waits(self.place[item]):
                    self.waits[self.place[item]].append(self.place[event.record])
        self.before = self._close()

    def _tables(self, program: Program) -> None:
        self.found: dict[str, list[tuple[int, int]]] = {}
        self.rank = Rank(program)
        self.items = whole(program)
        self.num_fed = len(fed(program))
        self.count = len(self.items)
        self.place = {item: k for k, item in enumerate(self.items)}
        inner = [k for k, job in enumerate(program.jobs) for _ in job.items] if program.jobs else [0] * len(items_of(program))
        self.job = [-1] * self.num_fed + inner
        self.job += [len(program.jobs) + 1] * (self.count - len(self.job))
        self.in_job: dict[int, list[int]] = defaultdict(list)
        for place, job in enumerate(self.job):
            self.in_job[job].append(place)
        self.cells: dict[int, tuple[int, int]] = {}
        self.access = [self._access(item) for item in self.items]
        self.touching: dict[int, list[int]] = defaultdict(list)
        for place, access in enumerate(self.access):
            for cell in access.reads | access.writes:
                self.touching[cell].append(place)
        self.partners = [sorted(self._partners(node)) for node in range(2 * self.count)]
        named = [self._named_before(node) for node in range(2 * self.count)]
        self.named_before = {
            on_host: [sorted({prior for prior, device in found if device or on_host}) for found in named] for on_host in (False, True)
        }

    def _take_rules(self) -> None:
        """What the target decides: streams, and where the host waits."""
        self.stream = [self._stream(self.rank.ops[op]) for op, _ in self.items]
        self.on_stream: dict[str | None, list[int]] = defaultdict(list)
        for place, stream in enumerate(self.stream):
            self.on_stream[stream].append(place)
        self.blocking = [self._blocks(self.rank.ops[op]) for op, _ in self.items]
        waits = [pair for job in self.program.jobs for pair in job.host_waits] if self.target.host_runs_ahead else []
        self.host_waits = {self.place[after]: self.place[awaited] for after, awaited in waits}

    def _stream(self, op: Op) -> str | None:
        """The stream that runs an operation, None for what only the host does."""
        if op.name in LAUNCH_NOTHING:
            return None
        return "" if self.target.serial or op.name in BOUNDARY or op.num_blocks or op.stream in COMPUTE_STREAMS else op.stream

    def _has_events(self, item: Item) -> bool:
        """Whether the executor marks an operation's end with an event, and keeps its start behind others."""
        op = self.rank.ops[item[0]]
        if op.name in BOUNDARY:
            return True
        ignored = op.num_blocks or op.name in LAUNCH_NOTHING | OWN_INSTRUCTIONS | ON_HOST or not op.name.startswith("pd_op.")
        return not ignored and op.attrs.get("place") != "Place(cpu)"

    def never_recorded(self) -> list[Item]:
        """Recorders of which Paddle's executor says at the first step that there is no such event."""
        waited = [event.record for event in self.program.events if event.waits]
        return [] if self.target.serial else [item for item in waited if not self._has_events(item)]

    def _blocks(self, op: Op) -> bool:
        """Whether the host stands still until an operation is over."""
        captured = op.origin >= 0 and op.kind in self.target.blocking
        return is_copy(op) and (captured or any(self.rank.values[v].memory == "host" for v in op.results))

    def _loses_waits(self, place: int) -> bool:
        """Whether Paddle's executor drops an operation's waits: of such kinds where nothing that they read is computed in their job."""
        op = self.op(place)
        if op.origin < 0 or op.kind not in self.target.loses_waits:
            return False
        latest = {cell: k for k in range(place) for cell in self.access[k].writes}
        return not any(self.job[latest[cell]] == self.job[place] for cell in self.access[place].reads if cell in latest)

    def op(self, place: int) -> Op:
        """The operation at a place in host order."""
        return self.rank.ops[self.items[place % self.count][0]]

    def _access(self, item: Item) -> Access:
        op, m = self.rank.ops[item[0]], item[1]
        if op.name in (COMBINE, SPLIT):
            return Access()
        viewed = {op.results[r] for r, _ in op.views}
        read, written = self.rank.content_operands(op), {*(set(op.results) - viewed), *self._hidden(op)}
        beside = [other for value in read for other in self._beside(value)]
        written |= {*self._written_beside(op)}
        return Access(self._ids([*read, *beside], m), self._ids(written, m), self._names(read, m), self._names(op.results, m))

    def _written_beside(self, op: Op) -> list[int]:
        """Values in whose memory what it writes may be; what lasts an unknown operation writes only where it says so."""
        said = [other for r, _ in op.inplace for other in self._beside(op.results[r])]
        return said + [other for value in self._hidden(op) for other in self._beside(value) if not self._is_kept(other)]

    def _hidden(self, op: Op) -> list[int]:
        """Operands that are written though no result says so: a loop's condition, and whatever an unknown operation is given for a step."""
        if op.name == "pd_op.while":
            return [op.operands[0]]
        unknown = op.name not in BOUNDARY and effect_of(op) == "unknown"
        return [v for v in op.operands if unknown and v >= 0 and not self._is_kept(v)]

    def _is_kept(self, value: int) -> bool:
        return any(self.rank.values[root].storage in self.rank.persistable for root, _ in self.rank.roots_of(value, 0))

    def _beside(self, value: int) -> list[int]:
        """Values in whose memory a value may be, for what an unknown operation gives, also through views."""
        producer = self.rank.producer[value]
        for result, operand in (*producer.inplace, *producer.views):
            if producer.results[result] == value:
                return self._beside(producer.operands[operand])
        if producer.name in BOUNDARY:
            return []
        if producer.name in (COMBINE, SPLIT):
            return [other for part in producer.operands for other in self._beside(part)]
        given = [v for v in producer.operands if v >= 0] if effect_of(producer) == "unknown" else []
        return [other for v in given for other in (v, *self._beside(v))]

    def _ids(self, values: Iterable[int], micro_batch: int) -> set[int]:
        found = set()
        for value in values:
            for cell, root in zip(self.rank.cells_of(value, micro_batch), self.rank.roots_of(value, micro_batch), strict=True):
                found.add(id(cell))
                self.cells.setdefault(id(cell), root)
        return found

    def _names(self, values: Iterable[int], micro_batch: int) -> set[Name]:
        return {name for value in values for name in self.names(value, micro_batch)}

    def names(self, value: int, micro_batch: int) -> list[Name]:
        """Variables of a value, one for each of its cells: a vector's are those of its tensors."""
        producer = self.rank.producer.get(value)
        if producer is not None and producer.name == COMBINE:
            return [name for part in producer.operands for name in self.names(part, micro_batch)]
        if producer is not None and producer.name == SPLIT:
            return [self.names(producer.operands[0], micro_batch)[producer.results.index(value)]]
        found = variable(self.rank, value, micro_batch)
        if found != value:
            return self.names(found, micro_batch)
        own = -1 if self.rank.values[found].persistable else micro_batch
        elements = self.rank.values[value].elements if self.rank.values[value].dtype == "vector" else (None,)
        return [(found, k, own) for k in range(len(elements))]

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
        last: dict[str | None, int] = {}
        host, job = 0, None
        for node in range(2 * self.count):
            here, step = node % self.count, node // self.count
            if self.target.job_end_waits and (step, self.job[here]) != job and "" in last:
                host |= before[last[""]] | 1 << last[""]
            job = (step, self.job[here])
            stream = self.stream[here]
            if stream is None or self.target.serial:
                before.append(host)
                host |= 1 << node
            else:
                known = host
                for prior in [last.get(stream, -1), *(p + step * self.count for p in self.waits[here])]:
                    known |= before[prior] | 1 << prior if prior >= 0 else 0
                for prior in self.named_before[self.target.host_memory_edges][node]:
                    if not known >> prior & 1:
                        known |= before[prior] | 1 << prior
                before.append(known)
                last[stream] = node
                if self.blocking[here]:
                    host |= known | 1 << node
            if here in self.host_waits:
                awaited = self.host_waits[here] + step * self.count
                host |= before[awaited] | 1 << awaited
        return before

    def _partners(self, node: int) -> set[int]:
        """Earlier nodes that touch a storage of this one, one of the two writing."""
        step, here = divmod(node, self.count)
        found = set()
        for cell in self.access[here].reads | self.access[here].writes:
            for place in self.touching[cell]:
                found |= {place + step * self.count} if place < here else set()
                found |= {place} if step and self.lasting(cell) else set()
        return {prior for prior in found if self.conflicts(prior, node)}

    def _named_before(self, node: int) -> list[tuple[int, bool]]:
        """Earlier nodes of the same job, in this step or the one before, that use a variable of this one, one of the two giving it.

        Each with whether one of these variables is in device memory.
        """
        step, here = divmod(node, self.count)
        mine = self.access[here]
        # a copy gets the name of what it writes into as its result's: the executor has no operand to wait for
        gives = set() if is_copy(self.op(here)) and (0, 1) in self.op(here).inplace else mine.gives
        found = []
        for place in self.in_job[self.job[here]]:
            if place >= here and not step:
                break
            other = self.access[place]
            if shared := gives & (other.uses | other.gives) | mine.uses & other.gives:
                found += [(place + step * self.count, self._any_on_device(shared))] if place < here else []
                lasting = {name for name in shared if self._name_lasts(name)} if step else set()
                found += [(place, self._any_on_device(lasting))] if lasting else []
        return found

    def _any_on_device(self, names: set[Name]) -> bool:
        return any(self.rank.values[name[0]].memory == "device" for name in names)

    def _name_lasts(self, name: Name) -> bool:
        value = self.rank.values[name[0]]
        return value.persistable or value.memory != "device"

    def direct(self, b: int) -> list[int]:
        """Nodes before node b of the same step that no other of them has before it: through them all others are."""
        found, covered = [], 0
        for a in range(b % self.count - 1, -1, -1):
            if self.ordered(a, b) and not covered >> a & 1:
                found.append(a)
                covered |= self.before[a]
        return found

    def ordered(self, a: int, b: int) -> bool:
        """Whether node a is over when node b starts."""
        return bool(self.before[b] >> a & 1)

    @cached_property
    def is_unsafe(self) -> bool:
        """Whether the plan of this rank has a fault, whatever other ranks do."""
        faults = self.unwritten() or self.unnamed() or self.never_recorded() or self.races() or self.freed_early()
        return bool(faults) or not draws_in_turn(self.program)

    def races(self) -> list[tuple[int, int, int]]:
        """Conflicting nodes (a, b, cell) that nothing orders, a earlier in host order."""
        return [
            (a, b, min(cells))
            for b in range(2 * self.count)
            for a in self.partners[b]
            if a < self.count and not self.ordered(a, b) and (cells := self.conflicts(a, b))
        ]

    def unnamed(self) -> list[tuple[int, Name]]:
        """Uses (place, variable) of a view that a later item of the step makes, or none."""
        made: dict[Name, int] = {}
        for place in range(self.count):
            made.update((name, place) for name in self._views(self.items[place]) if name not in made)
        return [
            (place, name)
            for place in range(self.count)
            for name in self.access[place].uses
            if place < made.get(name, self.count if name in self._views((self.rank.producer[name[0]].id, max(0, name[2]))) else -1)
        ]

    def _views(self, item: Item) -> set[Name]:
        """Variables of views that an item makes."""
        op = self.rank.ops[item[0]]
        return set() if op.name in BOUNDARY else self._names((op.results[r] for r, _ in op.views), item[1])

    def unwritten(self) -> list[tuple[int, int]]:
        """Reads (place, cell) that see another write than the value they name has in the sequential step, or none."""
        if "unwritten" not in self.found:
            self.found["unwritten"] = self._unwritten()
        return self.found["unwritten"]

    def _unwritten(self) -> list[tuple[int, int]]:
        want: dict[tuple[int, int], set[int]] = defaultdict(set)
        latest: dict[tuple[int, int], int] = {}
        for item in sequential(self.program, self.rank.skipped):
            if item in self.rank.skipped:  # where it is left out, what it gives is still what it would have copied here
                copy = self.rank.ops[item[0]]
                source, result = (self._contents(value, item[1]) for value in (copy.operands[0], copy.results[0]))
                latest.update({new: latest.get(old, -1) for old, new in zip(source, result, strict=True)})
                continue
            place = self.place[item]
            for held in self._held(place, writes=False):
                want[place, held[0]].add(latest.get(held, -1))
            latest.update(dict.fromkeys(self._held(place, writes=True), place))
        have: dict[tuple[int, int], int] = {}
        writer: dict[int, int] = {}
        for place in range(self.count):
            have.update({(place, cell): writer.get(cell, -1) for cell in self.access[place].reads})
            writer.update(dict.fromkeys(self.access[place].writes, place))
        return [key for key, source in have.items() if want[key] != {source}]

    def _held(self, place: int, writes: bool) -> list[tuple[int, int]]:
        """Cells that an item reads or writes, each with the value whose contents it holds there."""
        op, m = self.op(place), self.items[place][1]
        if op.name in (COMBINE, SPLIT):
            return []
        viewed = {op.results[r] for r, _ in op.views}
        if writes:
            own = [v for v in op.results if v not in viewed] + self._hidden(op)
            return [held for value in (*own, *self._written_beside(op)) for held in self._contents(value, m)]
        read = self.rank.content_operands(op)
        values = [*read, *(other for v in read for other in self._beside(v))]
        return [held for value in values for held in self._contents(value, m)]

    def _contents(self, value: int, micro_batch: int) -> list[tuple[int, int]]:
        """Cells of a value, each with the value whose contents it holds in the program as it is written, with all copies."""
        return [(id(cell), root) for cell, root in zip(self.rank.cells_of(value, micro_batch), self._made(value), strict=True)]

    def _made(self, value: int) -> list[int]:
        producer = self.rank.producer[value]
        if producer.name == COMBINE:
            return [root for part in producer.operands for root in self._made(part)]
        if producer.name == SPLIT:
            return [self._made(producer.operands[0])[producer.results.index(value)]]
        for result, operand in (*producer.inplace, *producer.views):
            if producer.results[result] == value:
                return self._made(producer.operands[operand])
        return [value] * (len(self.rank.values[value].elements) or 1)

    def freed_early(self) -> list[tuple[int, int]]:
        """Uses (place, place of the last use) that a freed block's next owner may overtake."""
        ends = {op for op, _ in (*fed(self.program), *collected(self.program))}
        kept = {
            id(c)
            for op in self.program.ops
            if op.name in BOUNDARY and op.id not in ends
            for v in (*op.operands, *op.results)
            for m in range(self.program.pipeline.num_micro_batches)
            for c in self.rank.cells_of(v, m)
        }
        users: dict[int, list[int]] = defaultdict(list)
        last_by_name: dict[int, dict[Name, int]] = defaultdict(dict)
        for place in range(self.count):
            if self.stream[place] is None:
                continue
            for cell in self.access[place].reads | self.access[place].writes:
                users[cell].append(place)
            for value in self._named(place):
                m = self.items[place][1]
                for c, name in zip(self.rank.cells_of(value, m), self.names(value, m), strict=True):
                    last_by_name[id(c)][name] = place
                for other in self._beside(value):
                    for c in self.rank.cells_of(other, m):
                        last_by_name[id(c)][self.names(value, m)[0]] = place
        return [
            (use, places[-1])
            for cell, places in users.items()
            if cell not in kept and not self.lasting(cell) and self._on_device(cell)
            for use in self._uncovered(places, last_by_name[cell].values())
        ]

    def _on_device(self, cell: int) -> bool:
        computed = not any(cell in self.access[place].writes for place in self.on_stream[None])
        return computed and self.rank.values[self.cells[cell][0]].memory == "device"

    def _named(self, place: int) -> list[int]:
        op = self.op(place)
        if op.name in (COMBINE, SPLIT):
            return []
        return self.rank.content_operands(op) + list(op.results)

    def _uncovered(self, places: list[int], lasts: Iterable[int]) -> list[int]:
        """Uses that are neither before what the free records, the last use of each variable, nor before the next operation of the
        block's own stream."""
        freed, owner = places[-1], self.on_stream[self.stream[places[0]]]
        marks = {*lasts, next((k for k in owner if k > freed), owner[0] + self.count)}
        return [use for use in places if not any(use == k or self.ordered(use, k) for k in marks)]


_closures: dict[int, dict[str, Closure]] = {}


def closure_of(program: Program, target: Target = GPU) -> Closure:
    """The closure of a plan; of the plans asked for last it is worked out once, however many worlds they are part of."""
    known = _closures.pop(id(program), {})
    like = next(iter(known.values()), None)
    if like is None or like.program is not program:
        known, like = {}, None
    if target.name not in known:
        known[target.name] = Closure(program, like, target)
    _closures[id(program)] = known
    if len(_closures) > MOST_CLOSURES:
        del _closures[next(iter(_closures))]
    return known[target.name]


def sequential(program: Program, left_out: Iterable[Item] = ()) -> list[Item]:
    """The order whose results a plan must give: micro-batches in turn, then what runs once; outputs as they are where they are named.

    With items of copies that no job runs, these too, at their places.
    """
    done = {*items_of(program), *collected(program), *left_out}
    count = program.pipeline.num_micro_batches
    body = [(op.id, m) for m in range(count) for op in program.ops if op.role != "optimize"]
    once = [(op.id, m) for op in program.ops if op.role == "optimize" for m in range(count)]
    return [*fed(program), *(item for item in body + once if item in done)]


def draws_in_turn(program: Program) -> bool:
    """Whether random numbers are drawn in the order of the micro-batches; draws of a backward are looked at where micro-batches come one
    after the other in Paddle's own schedule."""
    in_turn = program.pipeline.schedule == "accumulate"
    drawing = {op.id for op in program.ops if is_random(op) and (in_turn or op.role == "forward")}
    order = [item for item in items_of(program) if item[0] in drawing]
    return order == [item for item in sequential(program) if item[0] in drawing]


def channels(program: Program) -> dict[tuple[object, ...], list[int]]:
    """Places of communication in host order: per group, and per group and direction for p2p."""
    groups = {g.id: g for g in program.groups}
    found: dict[tuple[object, ...], list[int]] = defaultdict(list)
    ops = {op.id: op for op in program.ops}
    for place, (op_id, _) in enumerate(whole(program)):
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
    op_id, micro_batch = whole(program)[place]
    op = ops[op_id]
    value = values[op.operands[0] if op.operands else op.results[0]]
    size = -1 if op.kind.startswith(("global_", "margin_", "class_center_")) else value.size_bytes
    return ("p2p" if is_send(op) or is_receive(op) else op.kind, size, value.dtype, op.role, micro_batch, captured_before(program, op))


def captured_before(program: Program, op: Op) -> tuple[str, int]:
    """The role of the call that a call repeats, if any, and how many calls of its role and partners were captured before that one."""

    def way(other: Op) -> tuple[object, ...]:
        return (other.group, other.role, is_send(other), is_receive(other), other.attrs.get("peer"))

    calls = [other for other in program.ops if other.group >= 0 or other.kind in WITHOUT_GROUP]
    age = {call.id: (call.id if call.origin == -1 else call.origin, call.id) for call in calls}
    repeated = {call.id: next((other for other in calls if other.id == call.origin), call) for call in calls}
    original = repeated[op.id]
    earlier = [call for call in calls if repeated[call.id] is call and way(call) == way(original) and age[call.id] < age[original.id]]
    return "" if original is op else original.role, len(earlier)


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
    return any(meet_elsewhere(one, two) for one, two in combinations(programs, 2))


def meet_elsewhere(one: Program, two: Program) -> bool:
    """Whether two ranks that have the same calls without a group issue one of them in another place among the collectives they share."""

    def calls(program: Program, group: tuple[object, ...] | None) -> list[tuple[object, ...]]:
        places = [] if group is None else channels(program)[group]
        nameless = [place for place, (op_id, _) in enumerate(whole(program)) if kind[program.rank][op_id] in WITHOUT_GROUP]
        return [(kind[program.rank][whole(program)[k][0]], *signature(program, k)) for k in sorted(places + nameless)]

    kind = {program.rank: {op.id: op.kind for op in program.ops} for program in (one, two)}
    if Counter(calls(one, None)) != Counter(calls(two, None)):
        return False
    shared = [group for group in channels(one).keys() & channels(two).keys() if "p2p" not in group]
    return any(calls(one, group) != calls(two, group) for group in shared)


def circular(programs: Sequence[Program], target: Target = GPU) -> bool:
    """Whether some rank waits for ever: a cycle among items, where the partners of one communication are one node."""
    buffered = target.p2p_buffer_bytes == UNBOUNDED
    before: dict[Hashable, set[Hashable]] = defaultdict(set)
    meet: dict[tuple[int, int], Hashable] = {}
    closures = [closure_of(program, target) for program in programs]
    for k, program in enumerate(programs):
        for channel, places in channels(program).items():
            for number, place in enumerate(places):
                if not (buffered and "p2p" in channel):
                    meet[k, place] = (*channel, number)
                elif is_receive(closures[k].op(place)):
                    before[k, place].add((*channel, number))
                else:
                    before[(*channel, number)].add((k, place))
    for k, closure in enumerate(closures):
        last_of_group: dict[int, int] = {}
        for b in range(closure.count):
            edges = closure.direct(b)
            group = closure.op(b).group
            if group >= 0:
                edges += [last_of_group[group]] if group in last_of_group else []
                last_of_group[group] = b
            before[meet.get((k, b), (k, b))].update(meet.get((k, a), (k, a)) for a in edges)
    try:
        TopologicalSorter(before).prepare()
    except CycleError:
        return True
    return False


def is_unsafe(programs: Sequence[Program], target: Target = GPU) -> bool:
    """The verdict on the plans of a whole world."""
    return any(closure_of(program, target).is_unsafe for program in programs) or mismatched(programs) or circular(programs, target)
