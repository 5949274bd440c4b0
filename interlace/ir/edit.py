"""An editor for rewriters: collects changes to a program and builds a new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from interlace.errors import ProgramError
from interlace.ir.kinds import MEMORY
from interlace.ir.program import Job, Memory, Op, OpInstance, Program, Role, TensorType, Value

INTO_SECOND: dict[str, Any] = {"no_buffer": (1,), "inplace": ((0, 1),)}
"""Fields of an operation that writes its result into the memory of its second operand."""
Added = Mapping[OpInstance, Sequence[OpInstance]]


class Edit:
    """Changes to a program.

    >>> program = Program((Op(0, "pd_op.relu", (), (0,), "forward"),), (Value(0, (2,), "float32", 0),))
    >>> edit = Edit(program)
    >>> extra = edit.op("pd_op.exp", (0,), [TensorType((2,), "float32")], like=program.ops[0])
    >>> edit.after(0, [extra])
    >>> [op.name for op in edit.build().ops]
    ['pd_op.relu', 'pd_op.exp']
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._values = list(program.values)
        self._next_op = 1 + max((op.id for op in program.ops), default=-1)
        self._next_value = 1 + max((value.id for value in program.values), default=-1)
        self._before: dict[int, list[Op]] = {}
        self._after: dict[int, list[Op]] = {}
        self._replaced: dict[int, list[Op]] = {}
        self._renamed: dict[int, int] = {}
        self._moved: dict[int, int] = {}

    def value(
        self,
        kind: TensorType,
        *,
        storage: int | None = None,
        memory: Memory = "device",
        elements: tuple[TensorType, ...] = (),
    ) -> Value:
        """A new value, in memory of its own unless a `storage` is given."""
        home = self._next_value if storage is None else storage
        made = Value(self._next_value, kind.shape, kind.dtype, home, memory=memory, elements=elements)
        self._next_value += 1
        self._values.append(made)
        return made

    def op(
        self,
        name: str,
        operands: Sequence[int],
        results: Sequence[TensorType] | Sequence[Value],
        *,
        like: Op,
        attrs: dict[str, Any] | None = None,
        role: Role | None = None,
        **fields: Any,
    ) -> Op:
        """A new operation with the chunk and layer of `like`, and its role unless another is given; a result that is given as a type
        becomes a new value. It must be inserted with `before`, `after` or `replace`."""
        result_ids = tuple((r if isinstance(r, Value) else self.value(r)).id for r in results)
        made = Op(self._next_op, name, tuple(operands), result_ids, role or like.role, like.chunk, attrs or {}, like.layer)
        self._next_op += 1
        return msgspec.structs.replace(made, **fields) if fields else made

    def copy_into(self, name: str, source: int, target: int, result: Value, *, like: Op, **fields: Any) -> Op:
        """A new copy of `source` into the memory of `target`, of which `result` is the new value (`interlace.ir.copies.fills_memory`)."""
        return self.op(name, (source, target), [result], like=like, **INTO_SECOND, **fields)

    def take(self, kind: TensorType, *, like: Op, **fields: Any) -> tuple[Op, Value]:
        """A new operation that takes memory for a tensor without writing it, and that memory."""
        memory = self.value(kind)
        return self.op(MEMORY, [], [memory], like=like, attrs={"shape": list(kind.shape), "dtype": kind.dtype}, **fields), memory

    def fill(self, op: Op, result: Value) -> Op:
        """Let an operation with one operand and one result write that result into memory that a new operation takes right before it.
        Returns the new operation (`interlace.ir.copies.only_takes_memory`). Raises ProgramError if the operation has more of them, or
        shares memory already."""
        if (len(op.operands), len(op.results)) != (1, 1) or op.no_buffer or op.inplace or op.views:
            raise ProgramError(f"edit: #{op.id} {op.name} cannot be given memory; expected one operand, one result, and no shared memory")
        taken, memory = self.take(result.type, like=op)
        self.before(op.id, [taken])
        self.replace(op.id, [msgspec.structs.replace(op, operands=(*op.operands, memory.id), **INTO_SECOND)])
        self._moved[result.storage] = memory.storage
        return taken

    def reader(self, value: int, kind: TensorType, storage: int, *, like: Op, **fields: Any) -> Op:
        """A new last reader of a value, which keeps its memory from being freed and copies nothing."""
        return self.op("pd_op.share_data", (value,), [self.value(kind, storage=storage)], like=like, views=((0, 0),), **fields)

    def before(self, op_id: int, ops: Sequence[Op]) -> None:
        """Insert operations right before operation `op_id`."""
        self._before.setdefault(op_id, []).extend(ops)

    def after(self, op_id: int, ops: Sequence[Op]) -> None:
        """Insert operations right after operation `op_id`."""
        self._after.setdefault(op_id, []).extend(ops)

    def replace(self, op_id: int, ops: Sequence[Op]) -> None:
        """Replace an operation with others; an empty list removes it."""
        self._replaced[op_id] = list(ops)

    def rename(self, old: int, new: int) -> None:
        """Let every reader of value `old` read `new`."""
        self._renamed[old] = new

    def build(self) -> Program:
        """The new program. Raises ProgramError if a change is at an operation that the program does not have."""
        lost = sorted({*self._before, *self._after, *self._replaced} - {op.id for op in self.program.ops})
        if lost:
            raise ProgramError(f"edit: changes at {lost}, which the program does not have; name operations of the given program")
        ops: list[Op] = []
        for op in self.program.ops:
            ops += self._before.get(op.id, ())
            ops += self._replaced.get(op.id, [op])
            ops += self._after.get(op.id, ())
        if self._renamed:
            ops = [self._with_renamed(op) for op in ops]
        live = {value for op in ops for value in op.results}
        return self.program.with_ops(ops, [self._with_moved(value) for value in self._values if value.id in live])

    def _with_moved(self, value: Value) -> Value:
        return msgspec.structs.replace(value, storage=self._moved[value.storage]) if value.storage in self._moved else value

    def _with_renamed(self, op: Op) -> Op:
        if not any(value in self._renamed for value in op.operands):
            return op
        return msgspec.structs.replace(op, operands=tuple(self._renamed.get(v, v) for v in op.operands))


def with_items(jobs: Sequence[Job], before: Added, after: Added) -> tuple[Job, ...]:
    """The jobs with op instances inserted right before and after others."""
    every = ((job, (each for item in job.items for each in (*before.get(item, ()), item, *after.get(item, ())))) for job in jobs)
    return tuple(msgspec.structs.replace(job, items=tuple(items)) for job, items in every)
