"""A rank's plan as flat lists: items in host order, and what each operation reads and writes, by storage.

The job that cuts the batch at the start of the step and the one that collects its outputs at the end are part of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from interlace.ir import Op, Program
from interlace.ir.copies import omitted_copies
from interlace.ir.kinds import NO_KERNEL, SHADOW_OUTPUT, is_boundary, stream_of
from interlace.ir.storage import Item, Part, Storage, Storages, collect_items, feed_items
from interlace.scheduler.schedule import SCHEDULES

SAME, PREVIOUS, LAST, ONCE, INITIAL, ANY, STOCK = range(7)
"""Whose write an access expects: of its own micro-batch, of the one before, of the last one, of an operation that runs once,
what the step starts with, none in particular (it makes new contents), or the one that Paddle's own schedule gives it."""
PIPELINES = frozenset({"1F1B", "FThenB", "VPP"})
"""Schedules that run forward of a later micro-batch before backward of an earlier one."""
HOST = -1
"""Stream of what launches nothing: it is over when it is issued."""


@dataclass(slots=True)
class Access:
    """One storage that an operation reads or writes.

    Attributes:
        base, stride: The storage's key for micro-batch m is `base + stride * m`.
        writer, rule: Position of the operation whose write it expects, and of which micro-batch.
        value: The tensor that the operation names, `ABSENT` for an element of a vector.
        variable, own: The key of the executor's variable that the operation names is `variable + own * m`.
        root: The value whose contents it is (of views and in-place results: their operand's root).
    """

    base: int
    stride: int
    writer: int
    rule: int
    value: int
    variable: int
    own: int
    root: int


@dataclass(slots=True)
class FlatPlan:
    """The plan of one rank, flat.

    Attributes:
        op, micro_batch, job, stream: Of each item, in host order; `op` is the position in `program.ops`, `stream` an index
            of `streams` or `HOST`.
        reads, writes: Of each operation, by position.
        views: Of each operation, variables it gives without writing: views of its operands.
        storages: By number.
        omitted: `(value, micro-batch)` of an omitted copy's result -> the copy, and the access of its operand.
        num_fed: How many of the items, the first ones, cut the batch.
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
    reads: list[list[Access]] = field(default_factory=list)
    writes: list[list[Access]] = field(default_factory=list)
    views: list[list[Access]] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    omitted: dict[Item, tuple[int, Access]] = field(default_factory=dict)
    index: dict[Item, int] = field(default_factory=dict)
    stock: dict[tuple[int, int, int], Item] = field(default_factory=dict)
    num_fed: int = 0

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.program.pipeline.num_micro_batches

    def storage(self, key: int) -> Storage:
        """The storage of a key."""
        return self.storages[key // self.num_micro_batches]


def flatten(program: Program, serial: bool = False) -> FlatPlan:
    """Lay a plan out; O(ops + operands + items). A program without jobs runs one micro-batch after the other."""
    plan = FlatPlan(program)
    writers = _Writers(program)
    plan.storages = writers.storages.storages
    for position, op in enumerate(program.ops):
        plan.reads.append(writers.accesses(position, writers.reads(op)))
        plan.writes.append(writers.accesses(position, writers.writes(op), writes=True))
        plan.views.append(writers.views(op))
        writers.note(position, plan.writes[-1])
    writers.close()
    _take_stock_order(plan)
    _lay_items(plan, serial, writers.storages)
    _find_omitted(plan)
    return plan


class _Writers:
    """Who wrote each storage last, while walking the program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.storages = Storages(program)
        self.values = self.storages.values
        self.body: dict[tuple[int, int], int] = {}
        self.once: dict[tuple[int, int], int] = {}
        self.last_in_body: list[tuple[Access, tuple[int, int]]] = []
        self.fed = {op_id for op_id, _ in feed_items(program)}

    def reads(self, op: Op) -> list[int]:
        """Values whose contents the operation reads; an output's, where a job collects it."""
        return [op.operands[0]] if self.storages.is_collected(op) else self.storages.reads(op)

    def writes(self, op: Op) -> list[int]:
        """Values that the operation gives; an input's, where a job cuts it."""
        return list(op.results) if op.id in self.fed else self.storages.writes(op)

    def accesses(self, position: int, values: Iterable[int], writes: bool = False) -> list[Access]:
        """Accesses of an operation, each with the write it expects."""
        op, count = self.program.ops[position], self.program.pipeline.num_micro_batches
        made = []
        for value in values:
            for part in self.storages.parts[value]:
                writer, rule = self._expected(op, part)
                if op.id in self.fed or (writes and part.root == value):
                    writer, rule = -1, ANY
                made.append(self._access(part, writer, rule, count))
                if rule in (PREVIOUS, LAST):
                    self.last_in_body.append((made[-1], (part.storage, part.root)))
        return made

    def views(self, op: Op) -> list[Access]:
        """Variables that the operation gives without writing their memory."""
        count = self.program.pipeline.num_micro_batches
        return [self._access(part, -1, ANY, count) for value in self.storages.views(op) for part in self.storages.parts[value]]

    def _access(self, part: Part, writer: int, rule: int, count: int) -> Access:
        stride = 0 if self.storages.storages[part.storage].persistable else 1
        own = 0 if self.values[part.variable].persistable else 1
        return Access(part.storage * count, stride, writer, rule, part.value, part.variable * count, own, part.root)

    def _expected(self, op: Op, part: Part) -> tuple[int, int]:
        """The last write before an operation to what one value holds; others that use the storage do not count."""
        name = (part.storage, part.root)
        if not self.storages.storages[part.storage].persistable:
            writer = self.once.get(name, self.body.get(name, -1)) if op.role == "optimize" else self.body.get(name, -1)
            if op.name == SHADOW_OUTPUT:  # of whatever part of the step gives it, for each micro-batch where there is one each
                writer = self.once.get(name, self.body.get(name, -1))
            return (writer, SAME) if writer >= 0 else (-1, INITIAL)
        if op.role == "optimize":
            return (self.once[name], ONCE) if name in self.once else (-1, LAST)
        return (self.body[name], SAME) if name in self.body else (-1, PREVIOUS)

    def note(self, position: int, writes: list[Access]) -> None:
        """Note what an operation wrote."""
        op, count = self.program.ops[position], self.program.pipeline.num_micro_batches
        for access in writes:
            (self.once if op.role == "optimize" else self.body)[access.base // count, access.root] = position

    def close(self) -> None:
        """Fill in writes that come from the micro-batch before, or from the last one, now that the whole body is known."""
        for access, name in self.last_in_body:
            access.writer = self.body.get(name, -1)
            access.rule = access.rule if access.writer >= 0 else INITIAL


def _take_stock_order(plan: FlatPlan) -> None:
    """What lasts and is written in one half of the step and used in the other, as a buffer that forward updates and backward
    reads: each access finds what it finds in Paddle's own schedule, for those are the bits to keep."""
    program, pipe = plan.program, plan.program.pipeline
    if pipe.schedule not in PIPELINES:
        return
    shared = _shared_by_halves(plan)
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
            for access in (*plan.reads[position], *plan.writes[position]):
                if access.base in shared and access.rule != ANY:
                    access.rule = STOCK
                    if access.base in writer:
                        plan.stock[position, access.base, part.micro_batch] = writer[access.base]
            writer.update((access.base, (position, part.micro_batch)) for access in plan.writes[position] if access.base in shared)


def _shared_by_halves(plan: FlatPlan) -> dict[int, list[int]]:
    """Base of a storage that lasts -> operations of forward and backward that use it, where both do and one writes it; not
    where several values use the memory in turn."""
    users: dict[int, list[int]] = defaultdict(list)
    written: set[int] = set()
    roots: dict[int, set[int]] = defaultdict(set)
    for position, op in enumerate(plan.program.ops):
        inside = op.role != "optimize" and not is_boundary(op)
        for access in (*plan.reads[position], *plan.writes[position]) if inside else ():
            storage = plan.storage(access.base)
            if storage.persistable and storage.memory == "device":
                users[access.base].append(position)
                roots[access.base].add(access.root)
        written.update(access.base for access in plan.writes[position] if inside)
    roles = {base: {plan.program.ops[position].role for position in positions} for base, positions in users.items()}
    found = {base for base in written & users.keys() if len(roles[base]) > 1 and len(roots[base]) == 1}
    return {base: users[base] for base in sorted(found)}


def _lay_items(plan: FlatPlan, serial: bool, storages: Storages) -> None:
    program = plan.program
    positions = {op.id: k for k, op in enumerate(program.ops)}
    names = {"": 0}
    number = []
    for op in program.ops:
        name = "" if serial or is_boundary(op) else stream_of(op)
        number.append(HOST if op.name in NO_KERNEL and not is_boundary(op) else names.setdefault(name, len(names)))
    plan.streams = list(names)
    lists = [feed_items(program), *item_lists(program), collect_items(program, storages)]
    plan.num_fed = len(lists[0])
    for job, items in enumerate(lists):
        here = [positions[op_id] for op_id, _ in items]
        plan.op += here
        plan.micro_batch += [micro_batch for _, micro_batch in items]
        plan.job += [job] * len(here)
        plan.stream += [number[position] for position in here]
        plan.index.update(zip(items, range(len(plan.index), len(plan.index) + len(items)), strict=True))


def item_lists(program: Program) -> list[list[Item]]:
    """Items of each job; without jobs, one list a micro-batch and one for what runs once."""
    if program.jobs:
        return [list(job.items) for job in program.jobs]
    inner = [op for op in program.ops if not is_boundary(op)]
    body = [[(op.id, m) for op in inner if op.role != "optimize"] for m in range(program.pipeline.num_micro_batches)]
    return [*body, [(op.id, 0) for op in inner if op.role == "optimize"]]


def _find_omitted(plan: FlatPlan) -> None:
    """Results of copies that the plan leaves out for a micro-batch are their operands."""
    positions = {op.id: k for k, op in enumerate(plan.program.ops)}
    for op_id, micro_batch in omitted_copies(plan.program):
        position = positions[op_id]
        for source, result in zip(plan.reads[position], plan.writes[position], strict=False):
            plan.omitted[result.root, micro_batch] = (position, source)
