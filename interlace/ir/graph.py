"""Look-ups over a program: which operation produces a value, which ones read it, and which order must hold between operations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from interlace.ir.effects import is_ordered, written_positions
from interlace.ir.kinds import COMBINE, SHARE_VAR, is_comm
from interlace.ir.operation_kinds import WITHOUT_GROUP
from interlace.ir.per_ops import once_per_ops
from interlace.ir.program import ABSENT, Op, Program, Value
from interlace.ir.storage import Storages, storages_of


@dataclass(slots=True)
class Graph:
    """Read-only look-ups over a program, computed once for the same operations and values in O(ops + operands).

    Attributes:
        ops: Operation by id.
        values: Value by id.
        position: Operation id -> index in program order.
        producer: Value id -> id of the operation that computes it.
        users: Value id -> ids of the operations that read it, in program order, each once.
    """

    program: Program
    ops: Mapping[int, Op] = field(init=False)
    values: Mapping[int, Value] = field(init=False)
    position: Mapping[int, int] = field(init=False)
    producer: Mapping[int, int] = field(init=False)
    users: Mapping[int, Sequence[int]] = field(init=False)
    _storages: Storages | None = None

    @property
    def storages(self) -> Storages:
        """The storage of every value; computed at the first use."""
        if self._storages is None:
            self._storages = storages_of(self.program)
        return self._storages

    def __post_init__(self) -> None:
        self.ops, self.values, self.position, self.producer, self.users = _look_ups(self.program)

    def user_ops(self, value_id: int) -> list[Op]:
        """The operations that read a value, in program order."""
        return [self.ops[op_id] for op_id in self.users.get(value_id, ())]

    def producer_op(self, value_id: int) -> Op | None:
        """The operation that computes a value; None for an absent operand."""
        op_id = self.producer.get(value_id)
        return None if op_id is None else self.ops[op_id]

    def reads(self, op: Op) -> list[int]:
        """Value ids whose contents the operation reads, without operands of which it reads only the shape.

        An operation that combines tensors into a vector counts as reading them only if an operation reads the vector's contents.
        """
        if op.name == COMBINE and not self.readers(op.results[0]):
            return []
        return op.reads

    def readers(self, value_id: int) -> list[Op]:
        """The operations that read a value's contents, in program order; for a tensor in a vector also those that read the vector."""
        found: dict[int, Op] = {}
        for op in self.user_ops(value_id):
            if op.name == COMBINE:
                found.update((reader.id, reader) for reader in self.readers(op.results[0]))
            elif value_id in self.reads(op):
                found[op.id] = op
        return sorted(found.values(), key=lambda op: self.position[op.id])


@once_per_ops
def _look_ups(program: Program) -> tuple[dict[int, Op], dict[int, Value], dict[int, int], dict[int, int], dict[int, list[int]]]:
    """`Graph.ops`, `values`, `position`, `producer` and `users`."""
    users: dict[int, list[int]] = {}
    for op in program.ops:
        for value_id in dict.fromkeys(op.operands):
            if value_id != ABSENT:
                users.setdefault(value_id, []).append(op.id)
    return (
        {op.id: op for op in program.ops},
        {value.id: value for value in program.values},
        {op.id: position for position, op in enumerate(program.ops)},
        {value_id: op.id for op in program.ops for value_id in op.results},
        users,
    )


def written_operands(op: Op) -> set[int]:
    """Ids of the values that the operation overwrites, or may overwrite."""
    return {op.operands[operand] for operand in written_positions(op)}


def dependencies(graph: Graph, ops: Sequence[Op]) -> dict[int, set[int]]:
    """The order that must hold between `ops`, a sub-sequence of the program in program order: op id -> ids it comes after.

    Includes read after write, write after read and write after write, by storage (so through views, in-place writes and vectors, which
    refer to their tensors); the order of pushes and pops of each stack; the order of communication within each group, and of all
    communication relative to calls whose ranks no attribute names; and the order of random draws and side effects (`effects.is_ordered`).
    An operand of which only the shape is read gives a dependency on the operation that defines the value, and on earlier writes to its
    storage, but later writes need not wait for that read.
    Cost: O(ops + operands + write conflicts).

    >>> dependencies(Graph(Program((), ())), [])
    {}
    """
    after: dict[int, set[int]] = {op.id: set() for op in ops}
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    last_comm: dict[int, int] = {}
    last_of_any: int | None = None
    last_ordered: int | None = None
    lies_in, over = graph.storages.numbers, overwritten(graph.program)
    for op in ops:
        mine = after[op.id]
        for value_id in op.operands:
            if value_id == ABSENT:
                continue
            made_by = graph.producer.get(value_id)
            if made_by in after:
                mine.add(made_by)
            for storage in lies_in(value_id):
                if storage in writer:
                    mine.add(writer[storage])
        for storage in over.get(op.id, ()):
            mine.update(readers.pop(storage, ()))
            mine.update({writer[storage]} if storage in writer else ())
            writer[storage] = op.id
        for value_id in graph.reads(op):
            for storage in lies_in(value_id):
                readers.setdefault(storage, []).append(op.id)
        if op.kind in WITHOUT_GROUP:
            mine.update(last_comm.values())
            last_comm, last_of_any = {}, op.id
        elif is_comm(op):
            before = last_comm.get(op.group, last_of_any)
            mine.update(() if before is None else (before,))
            last_comm[op.group] = op.id
        if is_ordered(op):
            mine.update(() if last_ordered is None else (last_ordered,))
            last_ordered = op.id
        mine.discard(op.id)
    return after


@once_per_ops
def overwritten(program: Program) -> dict[int, set[int]]:
    """Operation id -> numbers of the storages whose contents it changes, without those that it allocates: what it writes in place, stacks,
    storages of other operations into which it computes results, and those of the operands of `share_var`."""
    table = storages_of(program)
    on_stack = {value.id for value in program.values if value.dtype == "stack"}
    found: dict[int, set[int]] = {}
    for op in program.ops:
        over = op.operands if op.name == SHARE_VAR else written_operands(op) | on_stack.intersection(op.operands)
        mine = table.numbers_of(over)
        if op.name != SHARE_VAR:
            made = {part.storage for value in table.writes(op) for part in table.written_parts(op, value)}
            mine |= {storage for storage in made if table.storages[storage].producer != op.id}
        if mine:
            found[op.id] = mine
    return found


def is_topological(order: Iterable[int], after: dict[int, set[int]]) -> bool:
    """Whether every id in `order` comes after all ids in `after[id]`; ids that are not in `order` are ignored."""
    index = {op_id: k for k, op_id in enumerate(order)}
    return all(index.get(before, -1) < k for op_id, k in index.items() for before in after.get(op_id, ()))
