"""A rank's plan as flat lists: op instances (`item` in names) in host order, and the storages that each operation reads and writes.

The job that splits the batch at the start of the step and the job that collects its outputs at the end are included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from interlace.ir import Op, OpInstance, Pipeline, Program
from interlace.ir.copies import omitted_copies
from interlace.ir.kinds import NO_KERNEL, SHADOW_OUTPUT, is_boundary, stream_of
from interlace.ir.per_ops import once_per_ops_and
from interlace.ir.schedule import baseline_row
from interlace.ir.storage import Part, Storage, collect_items, feed_items, storages_of


class Version(Enum):
    """Which write to a storage must be the last one before an access."""

    SAME = "of the access's own micro-batch"
    PREVIOUS = "of the micro-batch before"
    LAST = "of the last micro-batch"
    ONCE = "of an operation that runs once a step"
    INITIAL = "none: the access finds what the step starts with"
    ANY = "no matter which: the access makes new contents"
    BASELINE = "the one that precedes it in Paddle's own schedule"


PIPELINES = frozenset({"1F1B", "FThenB", "VPP"})
"""Schedules that run forward of a later micro-batch before backward of an earlier one."""
HOST = -1
"""Stream of operations that launch nothing; they are complete as soon as they are issued."""


@dataclass(slots=True)
class Access:
    """One storage that an operation reads or writes.

    Attributes:
        base, stride: The storage's key for micro-batch m is `base + stride * m`.
        writer, version: Position of the operation whose write must be the last one before the access, and the micro-batch of that write.
        value: The tensor that the operation names, `ABSENT` for an element of a vector.
        variable, own: The key of the executor's variable that the operation names is `variable + own * m` for micro-batch m.
        root: The value whose contents are accessed (for views and in-place results, the root of their operand).
    """

    base: int
    stride: int
    writer: int
    version: Version
    value: int
    variable: int
    own: int
    root: int


@dataclass(slots=True)
class FlatPlan:
    """The plan of one rank.

    Attributes:
        op, micro_batch, job, stream: Columns over op instances in host order; `op` is the position in `program.ops`, `stream` an
            index into `streams`, or `HOST`.
        reads, writes: Accesses of each operation, by position.
        views: For each operation, the variables that it defines without writing: views of its operands.
        omitted: `(value, micro-batch)` of an omitted copy's result -> the copy, the access of its operand, and the key of the result's
            variable.
        viewed: Keys of storages to which results of omitted copies add the variables of their views.
        num_fed: Number of op instances, at the start, that split the batch.
        index: Op instance -> index in host order.
        baseline: `(operation, key base, micro-batch)` of an access with `Version.BASELINE` -> position and micro-batch of the last
            operation that writes before it in Paddle's own schedule; without an entry, the access finds the contents from before the step.
        tables: Tables over operations that the walk needs; plans of the same operations share them.
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
    omitted: dict[OpInstance, tuple[int, Access, int]] = field(default_factory=dict)
    viewed: set[int] = field(default_factory=set)
    index: dict[OpInstance, int] = field(default_factory=dict)
    baseline: dict[tuple[int, int, int], OpInstance] = field(default_factory=dict)
    num_fed: int = 0
    tables: dict[Any, Any] = field(default_factory=dict)

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches per step."""
        return self.program.pipeline.num_micro_batches

    def op_of(self, index: int) -> Op:
        """The operation at an index in host order."""
        return self.program.ops[self.op[index]]

    def item(self, index: int) -> OpInstance:
        """The op instance at an index in host order."""
        return self.op_of(index).id, self.micro_batch[index]

    def storage(self, key: int) -> Storage:
        return self.storages[key // self.num_micro_batches]


def flatten(program: Program, serial: bool = False) -> FlatPlan:
    """Flatten a plan; O(ops + operands + op instances). A program without jobs runs one micro-batch after the other. With `serial`, all
    operations are on one stream."""
    same = _accesses_of(program, program.pipeline)
    shared = {name: getattr(same, name) for name in ("reads", "writes", "views", "storages", "baseline", "tables")}
    plan = FlatPlan(program, **shared)
    _add_items(plan, serial)
    _find_omitted(plan)
    return plan


def writers_of(plan: FlatPlan, item: OpInstance) -> list[OpInstance] | None:
    """Op instances whose writes an op instance reads, in the same micro-batch or once per step; None if it also reads writes of other
    micro-batches or steps."""
    ops, found = plan.program.ops, []
    for access in plan.reads[plan.op[plan.index[item]]]:
        if access.version not in (Version.SAME, Version.ONCE):
            return None
        found.append((ops[access.writer].id, item[1] if access.version == Version.SAME else 0))
    return found


def is_used_beside(plan: FlatPlan, item: OpInstance) -> bool:
    """Whether, in any micro-batch, operations on side streams use the memory that an op instance reads, apart from its writers
    (`writers_of`)."""
    bases = {access.base for access in plan.reads[plan.op[plan.index[item]]]}
    writers = {op_id for op_id, _ in writers_of(plan, item) or ()}
    return any(
        stream_of(op) and op.id not in writers and not is_boundary(op) and not bases.isdisjoint(access.base for access in (*reads, *writes))
        for op, reads, writes in zip(plan.program.ops, plan.reads, plan.writes, strict=True)
    )


@once_per_ops_and
def _accesses_of(program: Program, pipeline: Pipeline) -> FlatPlan:
    """A plan with the accesses of each operation, whose columns over op instances are empty. Computed once per pipeline: plans of the same
    operations differ only in jobs and events."""
    plan, writers = FlatPlan(program), _Writers(program)
    plan.storages = writers.storages.storages
    for position, op in enumerate(program.ops):
        plan.reads.append(writers.accesses(position, writers.reads(op)))
        plan.writes.append(writers.accesses(position, writers.writes(op), writes=True))
        plan.views.append(writers.views(op))
        writers.record(position, plan.writes[-1])
    writers.close()
    _take_baseline_order(plan)
    return plan


class _Writers:
    """The last writer of each value so far, during a walk over the program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.storages = storages_of(program)
        self.values = self.storages.values
        self.body: dict[tuple[int, int], int] = {}
        self.once: dict[tuple[int, int], int] = {}
        self.last_in_body: list[tuple[Access, tuple[int, int]]] = []
        self.fed = {op_id for op_id, _ in feed_items(program)}

    def reads(self, op: Op) -> list[int]:
        """Values whose contents the operation reads, including an output that a job collects."""
        return [op.operands[0]] if self.storages.is_collected(op) else self.storages.reads(op)

    def writes(self, op: Op) -> list[int]:
        """Values that the operation writes, including an input that a job splits off the batch."""
        return list(op.results) if op.id in self.fed else self.storages.writes(op)

    def accesses(self, position: int, values: Iterable[int], writes: bool = False) -> list[Access]:
        """Accesses of an operation, each with the write that must be the last one before it."""
        op, count = self.program.ops[position], self.program.pipeline.num_micro_batches
        made = []
        for value in values:
            for part in self.storages.written_parts(op, value) if writes else self.storages.parts[value]:
                writer, version = self._expected(op, part)
                if op.id in self.fed or (writes and part.root == value and value in op.results):
                    writer, version = -1, Version.ANY
                made.append(self._access(part, writer, version, count))
                if version in (Version.PREVIOUS, Version.LAST):
                    self.last_in_body.append((made[-1], (part.storage, part.root)))
        return made

    def views(self, op: Op) -> list[Access]:
        """Variables that the operation defines without writing their memory."""
        count = self.program.pipeline.num_micro_batches
        return [self._access(part, -1, Version.ANY, count) for value in self.storages.views(op) for part in self.storages.parts[value]]

    def _access(self, part: Part, writer: int, version: Version, count: int) -> Access:
        stride = 0 if self.storages.storages[part.storage].persistable else 1
        own = 0 if self.values[part.variable].persistable else 1
        return Access(part.storage * count, stride, writer, version, part.value, part.variable * count, own, part.root)

    def _expected(self, op: Op, part: Part) -> tuple[int, Version]:
        """The last write, before an operation, to the contents of one value; other values in the same storage do not count."""
        name = (part.storage, part.root)
        if not self.storages.storages[part.storage].persistable:
            writer = self.once.get(name, self.body.get(name, -1)) if op.role == "optimize" else self.body.get(name, -1)
            if op.name == SHADOW_OUTPUT:  # an output may be computed in any part of the step, once or per micro-batch
                writer = self.once.get(name, self.body.get(name, -1))
            return (writer, Version.SAME) if writer >= 0 else (-1, Version.INITIAL)
        if op.role == "optimize":
            return (self.once[name], Version.ONCE) if name in self.once else (-1, Version.LAST)
        return (self.body[name], Version.SAME) if name in self.body else (-1, Version.PREVIOUS)

    def record(self, position: int, writes: list[Access]) -> None:
        op, count = self.program.ops[position], self.program.pipeline.num_micro_batches
        for access in writes:
            (self.once if op.role == "optimize" else self.body)[access.base // count, access.root] = position

    def close(self) -> None:
        """Fill in the writers of the previous or the last micro-batch, now that the whole program is known."""
        for access, name in self.last_in_body:
            access.writer = self.body.get(name, -1)
            access.version = access.version if access.writer >= 0 else Version.INITIAL


def _take_baseline_order(plan: FlatPlan) -> None:
    """Derive the version of accesses to state that several parts of the step share from Paddle's own schedule.

    Such state is persistable, written in one part (forward or backward of a model chunk) and used in another, as a buffer that forward
    updates and backward reads. Paddle's order of jobs determines which write each access finds, and so the bits that a plan must preserve.
    """
    program = plan.program
    if program.pipeline.schedule not in PIPELINES:
        return
    shared = _shared_by_parts(plan)
    if not shared:
        return
    parts: dict[tuple[str, int], list[int]] = defaultdict(list)
    for position in sorted({position for positions in shared.values() for position in positions}):
        op = program.ops[position]
        parts["F" if op.role == "forward" else "B", op.chunk].append(position)
    writer: dict[int, OpInstance] = {}
    for part in (part for slot in baseline_row(program.pipeline) for part in slot.parts):
        for position in parts[part.kind, part.chunk]:
            for access in (*plan.reads[position], *plan.writes[position]):
                if access.base in shared and access.version != Version.ANY:
                    access.version = Version.BASELINE
                    if access.base in writer:
                        plan.baseline[position, access.base, part.micro_batch] = writer[access.base]
            writer.update((access.base, (position, part.micro_batch)) for access in plan.writes[position] if access.base in shared)


def _shared_by_parts(plan: FlatPlan) -> dict[int, list[int]]:
    """Base of a persistable storage -> operations of forward and backward that use it, if several parts use it and one writes it.

    Storages that several values use in turn are excluded.
    """
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
    ops = plan.program.ops
    parts = {base: {(ops[position].role, ops[position].chunk) for position in positions} for base, positions in users.items()}
    found = {base for base in written & users.keys() if len(parts[base]) > 1 and len(roots[base]) == 1}
    return {base: users[base] for base in sorted(found)}


def _add_items(plan: FlatPlan, serial: bool) -> None:
    """Fill the columns over op instances."""
    program = plan.program
    positions = {op.id: k for k, op in enumerate(program.ops)}
    names = {"": 0}
    number = []
    for op in program.ops:
        name = "" if serial or is_boundary(op) else stream_of(op)
        number.append(HOST if op.name in NO_KERNEL and not is_boundary(op) else names.setdefault(name, len(names)))
    plan.streams = list(names)
    lists = [feed_items(program), *item_lists(program), collect_items(program)]
    plan.num_fed = len(lists[0])
    for job, items in enumerate(lists):
        here = [positions[op_id] for op_id, _ in items]
        plan.op += here
        plan.micro_batch += [micro_batch for _, micro_batch in items]
        plan.job += [job] * len(here)
        plan.stream += [number[position] for position in here]
        plan.index.update(zip(items, range(len(plan.index), len(plan.index) + len(items)), strict=True))


def item_lists(program: Program) -> list[list[OpInstance]]:
    """Op instances of each job; without jobs, a list for each micro-batch and one for operations that run once per step."""
    if program.jobs:
        return [list(job.items) for job in program.jobs]
    inner = [op for op in program.ops if not is_boundary(op)]
    body = [[(op.id, m) for op in inner if op.role != "optimize"] for m in range(program.pipeline.num_micro_batches)]
    return [*body, [(op.id, 0) for op in inner if op.role == "optimize"]]


def _find_omitted(plan: FlatPlan) -> None:
    """Record the copies that the plan omits for a micro-batch; their results are replaced by their operands."""
    positions = {op.id: k for k, op in enumerate(plan.program.ops)}
    for op_id, micro_batch in sorted(omitted_copies(plan.program), key=lambda item: positions[item[0]]):
        position = positions[op_id]
        for source, result in zip(plan.reads[position], plan.writes[position], strict=False):
            plan.omitted[result.root, micro_batch] = (position, source, result.variable + result.own * micro_batch)
            seen, home = plan.storage(result.base), source
            while (earlier := plan.omitted.get((home.root, micro_batch))) is not None:
                home = earlier[1]
            if len(seen.variables) > 1:
                plan.viewed.add(home.base + home.stride * micro_batch)
