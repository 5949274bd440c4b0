"""A rank's plan as flat lists: items in host order, and what each operation reads and writes, by storage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from interlace.ir import ABSENT, Op, Program, Value
from interlace.ir.kinds import COMBINE, NO_KERNEL, SPLIT, is_boundary, is_copy, stream_of, views_of
from interlace.scheduler.schedule import SCHEDULES

SAME, PREVIOUS, LAST, ONCE, INITIAL, ANY, STOCK = range(7)
"""Whose write an access expects: of its own micro-batch, of the one before, of the last one, of an operation that runs once,
what the step starts with, none in particular (it makes new contents), or the one that Paddle's own schedule gives it."""
PIPELINES = frozenset({"1F1B", "FThenB", "VPP"})
"""Schedules that run forward of a later micro-batch before backward of an earlier one."""
HOST = -1
"""Stream of what launches nothing: it is over when it is issued."""
Item = tuple[int, int]


@dataclass(slots=True)
class Touch:
    """One storage that an operation reads or writes.

    Attributes:
        base, stride: The storage's key for micro-batch m is `base + stride * m`.
        writer, rule: Position of the operation whose write it expects, and of which micro-batch.
        value: The value through which it is touched.
        variable: The executor's variable that holds the value (in-place results live in their operand's).
        root: The value whose storage it is (of views and in-place results: their operand's root).
    """

    base: int
    stride: int
    writer: int
    rule: int
    value: int
    variable: int
    root: int


@dataclass(slots=True)
class Storage:
    """A storage: whether it lasts beyond the step, where it lies, and how many variables share it."""

    persistable: bool
    lasting: bool
    memory: str
    kept: bool
    variables: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Steps:
    """The plan of one rank, flat.

    Attributes:
        op, micro_batch, job, stream: Of each item, in host order; `op` is the position in `program.ops`, `stream` an index
            of `streams` or `HOST`.
        reads, writes: Of each operation, by position.
        through: Of each operation, views it reads: positions of the operations that give them.
        places: Every storage; the one of a key is `places[key // num_micro_batches]`.
        alias: `(value, micro-batch)` of an omitted copy's result -> the copy, and the touch of its operand.
        index: Item -> place in host order.
        stock: `(operation, key base, micro-batch)` of an access under `STOCK` -> position and micro-batch of the operation whose
            write it finds in Paddle's own schedule; without an entry, what the step starts with.
    """

    program: Program
    op: list[int] = field(default_factory=list)
    micro_batch: list[int] = field(default_factory=list)
    job: list[int] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    streams: list[str] = field(default_factory=lambda: [""])
    reads: list[list[Touch]] = field(default_factory=list)
    writes: list[list[Touch]] = field(default_factory=list)
    through: list[tuple[int, ...]] = field(default_factory=list)
    places: list[Storage] = field(default_factory=list)
    alias: dict[Item, tuple[int, Touch]] = field(default_factory=dict)
    index: dict[Item, int] = field(default_factory=dict)
    stock: dict[tuple[int, int, int], Item] = field(default_factory=dict)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.program.pipeline.num_micro_batches


def flatten(program: Program, serial: bool = False) -> Steps:
    """Lay a plan out; O(ops + operands + items). A program without jobs runs one micro-batch after the other."""
    steps = Steps(program)
    tables = _Tables(program)
    steps.places = tables.places
    for position, op in enumerate(program.ops):
        steps.reads.append(tables.touches(position, tables.read_values(op)))
        steps.writes.append(tables.touches(position, tables.written_values(op), writes=True))
        steps.through.append(tables.views_read(op))
        tables.passed(position, steps.writes[-1])
    tables.close()
    _take_stock_order(steps)
    _lay_items(steps, serial)
    _find_aliases(steps)
    return steps


class _Tables:
    """Storages, and who wrote them last, while walking the program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.values = {value.id: value for value in program.values}
        self.producer = {value: k for k, op in enumerate(program.ops) for value in op.results}
        self.places: list[Storage] = []
        self.of_storage: dict[int, int] = {}
        self.of_value: dict[int, list[int]] = {}
        self.variable: dict[int, int] = {}
        self.root: dict[int, int] = {}
        self.roots: dict[int, list[int]] = {}
        self.body: dict[tuple[int, int], int] = {}
        self.once: dict[tuple[int, int], int] = {}
        self.last_in_body: list[tuple[Touch, tuple[int, int]]] = []
        self.persistable = {value.storage for value in program.values if value.persistable}
        for op in program.ops:
            self._add(op)
        for op in program.ops:
            for value in (*op.operands, *op.results) if is_boundary(op) else ():
                for place in self.of_value.get(value, ()):
                    self.places[place].kept = True

    def _add(self, op: Op) -> None:
        inplace, shared = dict(op.inplace), dict((*op.inplace, *op.views))
        for k, value_id in enumerate(op.results):
            value = self.values[value_id]
            self.variable[value_id] = self.variable[op.operands[inplace[k]]] if k in inplace else value_id
            self.root[value_id] = self.root[op.operands[shared[k]]] if k in shared else value_id
            self.of_value[value_id], self.roots[value_id] = self._places_of(op, k, value)
            for place in self.of_value[value_id] if op.name not in (COMBINE, SPLIT) else ():
                self.places[place].variables.add(self.variable[value_id])

    def _places_of(self, op: Op, k: int, value: Value) -> tuple[list[int], list[int]]:
        """Storages of a result, and for each the value whose contents it holds."""
        if op.name == COMBINE:
            parts = [part for part in op.operands if part != ABSENT]
            return [p for part in parts for p in self.of_value[part]], [r for part in parts for r in self.roots[part]]
        if op.name == SPLIT and len(self.of_value.get(op.operands[0], ())) == len(op.results):
            return [self.of_value[op.operands[0]][k]], [self.roots[op.operands[0]][k]]
        root = self.root[value.id]
        if value.dtype == "vector":
            return [self._new(value) for _ in value.elements], [root] * len(value.elements)
        if value.storage not in self.of_storage:
            self.of_storage[value.storage] = self._new(value)
        return [self.of_storage[value.storage]], [root]

    def _new(self, value: Value) -> int:
        persistable = value.storage in self.persistable
        self.places.append(Storage(persistable, persistable or value.memory != "device", value.memory, False))
        return len(self.places) - 1

    def read_values(self, op: Op) -> Iterable[int]:
        """Values whose contents the operation reads; none where it launches nothing."""
        if op.name in NO_KERNEL or is_boundary(op):
            return ()
        return dict.fromkeys(v for k, v in enumerate(op.operands) if v != ABSENT and k not in op.no_buffer)

    def written_values(self, op: Op) -> Iterable[int]:
        """Results that are more than a view; none for inputs of the step."""
        if is_boundary(op) or op.name in (COMBINE, SPLIT):
            return ()
        viewed = {result for result, _ in views_of(op)}
        return [value for k, value in enumerate(op.results) if k not in viewed and self.values[value].dtype != "null"]

    def views_read(self, op: Op) -> tuple[int, ...]:
        """Operations that give the views this one reads."""
        made = {self.producer[v] for v in op.operands if v in self.producer}
        return tuple(sorted(k for k in made if views_of(self.program.ops[k]))) if made else ()

    def touches(self, position: int, values: Iterable[int], writes: bool = False) -> list[Touch]:
        """Touches of an operation, each with the write it expects."""
        op, count = self.program.ops[position], self.program.pipeline.num_micro_batches
        made = []
        for value in values:
            for place, root in zip(self.of_value[value], self.roots[value], strict=True):
                writer, rule = self._expected(op, place, root)
                if writes and root == value:
                    writer, rule = -1, ANY
                stride = 0 if self.places[place].persistable else 1
                made.append(Touch(place * count, stride, writer, rule, value, self.variable[value], root))
                if rule in (PREVIOUS, LAST):
                    self.last_in_body.append((made[-1], (place, root)))
        return made

    def _expected(self, op: Op, place: int, root: int) -> tuple[int, int]:
        """The last write before an operation to what one value holds; others that use the storage do not count."""
        name = (place, root)
        if not self.places[place].persistable:
            writer = self.once.get(name, self.body.get(name, -1)) if op.role == "optimize" else self.body.get(name, -1)
            return (writer, SAME) if writer >= 0 else (-1, INITIAL)
        if op.role == "optimize":
            return (self.once[name], ONCE) if name in self.once else (-1, LAST)
        return (self.body[name], SAME) if name in self.body else (-1, PREVIOUS)

    def passed(self, position: int, writes: list[Touch]) -> None:
        """Note what an operation wrote."""
        op, count = self.program.ops[position], self.program.pipeline.num_micro_batches
        for touch in writes:
            (self.once if op.role == "optimize" else self.body)[touch.base // count, touch.root] = position

    def close(self) -> None:
        """Fill in writes that come from the micro-batch before, or from the last one, now that the whole body is known."""
        for touch, name in self.last_in_body:
            touch.writer = self.body.get(name, -1)
            touch.rule = touch.rule if touch.writer >= 0 else INITIAL


def _take_stock_order(steps: Steps) -> None:
    """What lasts and is written in one half of the step and touched in the other, as a buffer that forward updates and backward
    reads: each access finds what it finds in Paddle's own schedule, for those are the bits to keep."""
    program, pipe = steps.program, steps.program.pipeline
    if pipe.schedule not in PIPELINES:
        return
    shared = _shared_by_halves(steps)
    if not shared:
        return
    parts: dict[tuple[str, int], list[int]] = defaultdict(list)
    for position in sorted({position for positions in shared.values() for position in positions}):
        op = program.ops[position]
        parts["F" if op.role == "forward" else "B", op.chunk].append(position)
    writer: dict[int, Item] = {}
    row = SCHEDULES[pipe.schedule](pipe.stage, pipe.num_stages, pipe.num_micro_batches, pipe.num_chunks)
    for part in (part for slot in row for part in slot.parts):
        for position in parts[part.kind, part.chunk]:
            for touch in (*steps.reads[position], *steps.writes[position]):
                if touch.base in shared and touch.rule != ANY:
                    touch.rule = STOCK
                    if touch.base in writer:
                        steps.stock[position, touch.base, part.micro_batch] = writer[touch.base]
            writer.update((touch.base, (position, part.micro_batch)) for touch in steps.writes[position] if touch.base in shared)


def _shared_by_halves(steps: Steps) -> dict[int, list[int]]:
    """Base of a storage that lasts -> operations of forward and backward that touch it, where both do and one writes it; not
    where several values use the memory in turn."""
    touched: dict[int, list[int]] = defaultdict(list)
    written: set[int] = set()
    roots: dict[int, set[int]] = defaultdict(set)
    for position, op in enumerate(steps.program.ops):
        for touch in (*steps.reads[position], *steps.writes[position]) if op.role != "optimize" else ():
            place = steps.places[touch.base // steps.num_micro_batches]
            if place.persistable and place.memory == "device":
                touched[touch.base].append(position)
                roots[touch.base].add(touch.root)
        written.update(touch.base for touch in steps.writes[position] if op.role != "optimize")
    roles = {base: {steps.program.ops[position].role for position in positions} for base, positions in touched.items()}
    found = {base for base in written & touched.keys() if len(roles[base]) > 1 and len(roots[base]) == 1}
    return {base: touched[base] for base in sorted(found)}


def _lay_items(steps: Steps, serial: bool) -> None:
    program = steps.program
    positions = {op.id: k for k, op in enumerate(program.ops)}
    names = {"": 0}
    number = []
    for op in program.ops:
        name = "" if serial else stream_of(op)
        number.append(HOST if op.name in NO_KERNEL else names.setdefault(name, len(names)))
    steps.streams = list(names)
    for job, items in enumerate(item_lists(program)):
        here = [positions[op_id] for op_id, _ in items]
        steps.op += here
        steps.micro_batch += [micro_batch for _, micro_batch in items]
        steps.job += [job] * len(here)
        steps.stream += [number[position] for position in here]
        steps.index.update(zip(items, range(len(steps.index), len(steps.index) + len(items)), strict=True))


def item_lists(program: Program) -> list[list[Item]]:
    """Items of each job; without jobs, one list a micro-batch and one for what runs once."""
    if program.jobs:
        return [list(job.items) for job in program.jobs]
    inner = [op for op in program.ops if not is_boundary(op)]
    body = [[(op.id, m) for op in inner if op.role != "optimize"] for m in range(program.pipeline.num_micro_batches)]
    return [*body, [(op.id, 0) for op in inner if op.role == "optimize"]]


def _find_aliases(steps: Steps) -> None:
    """Results of copies that the plan leaves out for a micro-batch are their operands."""
    ran: dict[int, set[int]] = defaultdict(set)
    for position, micro_batch in zip(steps.op, steps.micro_batch, strict=True):
        ran[position].add(micro_batch)
    for position, op in enumerate(steps.program.ops):
        if not is_copy(op) or op.role == "optimize" or not steps.reads[position] or not steps.writes[position]:
            continue
        source, result = steps.reads[position][0], steps.writes[position][0]
        for m in range(steps.num_micro_batches):
            if m not in ran[position]:
                steps.alias[result.root, m] = (position, source)
