"""Where every tensor is stored: its storage, the executor's variable that names it, and the value whose contents it has.

The executor orders operations, and frees memory, by variable: an in-place result has its operand's variable, a view has a
variable of its own over the same memory. Races are about memory. An analysis has to choose whether it compares variables or
storages; this table has both.

>>> from interlace.ir import parse
>>> text = '''program rank=0 world=1 mode=train
... #0 %0:float32[4]"x" = pd_op.data() forward
... #1 %1:float32[2,2]~0 = pd_op.reshape(%0) forward views=0:0
... #2 %2:float32[4]~0 = pd_op.relu_(%0) forward inplace=0:0'''
>>> table = Storages(parse(text))
>>> [[(part.storage, part.variable, part.root) for part in table.parts[value]] for value in (0, 1, 2)]
[[(0, 0, 0)], [(0, 1, 0)], [(0, 0, 0)]]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from interlace.ir.effects import may_lie_in, written_positions
from interlace.ir.kinds import COMBINE, DATA, NO_KERNEL, SHADOW_OUTPUT, SPLIT, is_boundary, views_of
from interlace.ir.per_ops import once_per_ops
from interlace.ir.program import ABSENT, Op, OpInstance, Program, Value

FETCH = "interlace_fetch"
"""Attribute of an output that the user fetches by value, in addition to the program's named outputs."""


class Part(NamedTuple):
    """One tensor of a value.

    Attributes:
        storage: Number of its storage in `Storages.storages`.
        variable: The executor's variable, named by the first value of its in-place chain.
        root: The value whose contents it is: the first one, before views and in-place results.
        value: The tensor's own value id; `ABSENT` for a vector's element that no operation extracts.
    """

    storage: int
    variable: int
    root: int
    value: int


@dataclass(slots=True)
class Storage:
    """One piece of memory: one per micro-batch or, if persistable, one for all.

    Attributes:
        producer: Id of the operation that allocates it.
        value: The value whose type gives its size and memory: the one whose id is the storage's, otherwise its first one.
        size_bytes: -1 if unknown.
        persistable: Shared by all micro-batches; it exists before and after the step.
        memory: `device`, `pinned` or `host`.
        kept: Never freed within the step: it holds an input, a parameter or an output of the program.
        variables: All variables that name it.
        values: Tensors stored in it, in program order, without elements that no operation extracts from their vector.
        vectors: Vectors of which it is an element.
    """

    producer: int
    value: int
    size_bytes: int
    persistable: bool
    memory: str
    kept: bool = False
    variables: set[int] = field(default_factory=set)
    values: list[int] = field(default_factory=list)
    vectors: list[int] = field(default_factory=list)

    @property
    def lasting(self) -> bool:
        """Whether it is the same memory in the next step: true of persistable storages and of host buffers."""
        return self.persistable or self.memory != "device"


class Storages:
    """Storages and variables of a program; O(ops + operands).

    Attributes:
        storages: All storages, in the order of the program.
        parts: Value id -> its tensors (one, or those of a vector), followed by others in whose memory they may lie.
        values: Value by id.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.values = {value.id: value for value in program.values}
        self.storages: list[Storage] = []
        self.parts: dict[int, tuple[Part, ...]] = {}
        self._number: dict[int, int] = {}
        self._numbers: dict[int, tuple[int, ...]] = {}
        self._first: dict[int, int] = {}
        self._persistable = {value.storage for value in program.values if value.persistable}
        self._once = {value for op in program.ops if op.role == "optimize" for value in op.results}
        self._taken_out = _taken_out(program)
        for op in program.ops:
            for k, value in enumerate(op.results):
                self.parts[value] = self._parts(op, k, self.values[value])
                self._register(op, self.values[value])
            for value in self._hidden_writes(op):
                for storage in self.of(value):
                    storage.variables.update(op.results[:1])
        self._buffers = self._overwritten_buffers(program)
        for op in program.ops:
            if is_boundary(op) and not (is_fed(op, self.values) or self.is_collected(op)):
                for value in (*op.operands, *op.results):
                    for storage in self.of(value):
                        storage.kept = True

    def of(self, value: int) -> list[Storage]:
        """The storages of a value: one, or those of a vector's tensors; none for an absent operand."""
        return [self.storages[part.storage] for part in self.parts.get(value, ())]

    def numbers(self, value: int) -> tuple[int, ...]:
        """The numbers of a value's storages."""
        found = self._numbers.get(value)
        if found is None:
            found = self._numbers[value] = tuple(part.storage for part in self.parts.get(value, ()))
        return found

    def numbers_of(self, values: Iterable[int]) -> set[int]:
        """The numbers of the storages of several values."""
        return {n for value in values for n in self.numbers(value)}

    def variable(self, value: int) -> int:
        """The executor's variable of a value; a vector has one of its own, besides those of its tensors."""
        return value if self.values[value].dtype == "vector" else self.parts[value][0].variable

    def is_persistable(self, value: int) -> bool:
        """Whether a value is stored in memory that outlives the step, such as a result written into a persistable buffer."""
        return any(storage.persistable for storage in self.of(value))

    def _register(self, op: Op, value: Value) -> None:
        for part in self.parts[value.id]:
            storage = self.storages[part.storage]
            if value.dtype == "vector":
                storage.vectors.append(value.id)
            else:
                storage.values.append(value.id)
            if op.name not in (COMBINE, SPLIT):
                storage.variables.add(part.variable)

    def _parts(self, op: Op, k: int, value: Value) -> tuple[Part, ...]:
        if op.name == COMBINE:
            given = [self.parts[v] for v in op.operands if v != ABSENT]
            return (*(parts[0] for parts in given if parts), *(part for parts in given for part in parts[1:]))
        if op.name == SPLIT and len(self.parts[op.operands[0]]) >= len(op.results):
            parts = self.parts[op.operands[0]]
            self._number.setdefault(value.storage, parts[k].storage)
            return tuple(part._replace(value=value.id) for part in (parts[k], *parts[len(op.results) :]))
        said = () if op.num_blocks else (*op.inplace, *op.views)
        shared = next((op.operands[o] for r, o in said if r == k), ABSENT) if said else ABSENT
        own = self._own(op, value) if shared == ABSENT else self._of_operand(value, shared, k not in dict(op.inplace))
        others = () if value.dtype in ("null", "stack") else may_lie_in(op, k)
        if not others:
            return own
        places = dict.fromkeys((part.storage, part.root) for o in others for part in self.parts[op.operands[o]])
        known = {part.storage for part in own}
        variable = own[0].variable if shared != ABSENT and own else value.id
        return (*own, *(Part(storage, variable, root, value.id) for storage, root in places if storage not in known))

    def _of_operand(self, value: Value, shared: int, is_view: bool) -> tuple[Part, ...]:
        """A result in an operand's memory; if it is a view, the executor has a separate variable for it."""
        tensor = value.dtype != "vector"
        return tuple(
            Part(part.storage, value.id if is_view else part.variable, part.root, value.id if tensor else part.value)
            for part in self.parts[shared]
        )

    def _own(self, op: Op, value: Value) -> tuple[Part, ...]:
        if value.dtype == "vector":
            return self._elements(op, value)
        if value.storage not in self._number:
            self._number[value.storage] = self._new(op, self.values.get(value.storage, value))
        # the parts of a persistable fused buffer are written one by one, and together are its contents
        root = self._first.setdefault(value.storage, value.id) if value.storage in self._persistable else value.id
        return (Part(self._number[value.storage], value.id, root, value.id),)

    def _elements(self, op: Op, vector: Value) -> tuple[Part, ...]:
        """Tensors of a vector that a kernel returns; the variable of each is named after the value that is extracted from the vector."""
        taken_out = self._taken_out.get(vector.id, ())
        tensors = [self.values[v] for v in taken_out] if len(taken_out) == len(vector.elements) else [vector] * len(vector.elements)
        return tuple(
            Part(self._new(op, tensor, element.size_bytes), tensor.id, vector.id, ABSENT)
            for tensor, element in zip(tensors, vector.elements, strict=True)
        )

    def _new(self, op: Op, value: Value, size_bytes: int | None = None) -> int:
        size_bytes = value.size_bytes if size_bytes is None else size_bytes
        self.storages.append(Storage(op.id, value.id, size_bytes, value.storage in self._persistable, value.memory))
        return len(self.storages) - 1

    def reads(self, op: Op) -> list[int]:
        """Values whose contents an operation reads, each once; none if it launches nothing."""
        return [] if op.name in NO_KERNEL else op.reads

    def writes(self, op: Op) -> list[int]:
        """Values that the operation writes: its results, except views and results that are left out; fused buffers (`coalesce_tensor`)
        in which it overwrites a tensor; and operands that control flow overwrites, or that an unknown operation may overwrite. An unknown
        operation is taken to write persistable operands only if it declares that it does."""
        if is_boundary(op) or op.name in (COMBINE, SPLIT):
            return []
        viewed = {result for result, _ in views_of(op)}
        own = [value for k, value in enumerate(op.results) if k not in viewed and self.values[value].dtype != "null"]
        return [*own, *self._buffers.get(op.id, ()), *self._hidden_writes(op)]

    def _hidden_writes(self, op: Op) -> list[int]:
        """Operands that the operation overwrites, or may overwrite, without a result in their variable."""
        positions = written_positions(op)
        if not positions:
            return []
        written = dict.fromkeys(op.operands[operand] for operand in positions)
        if op.num_blocks:
            return list(written)
        said = {op.operands[operand] for _, operand in (*op.inplace, *op.views)}
        return [value for value in written if value not in said and not all(storage.persistable for storage in self.of(value))]

    def written_parts(self, op: Op, value: int) -> tuple[Part, ...]:
        """The tensors of `value`, one of an operation's `writes`, that it writes; if a result may lie in the memory of other values, only
        its own tensors.

        If an operand is written without a result in its variable, the write has the variable of the first result: the executor does not
        know of it, and does not order it after readers of the operand's variable.
        """
        if op.results and value in self._hidden_writes(op):
            mine = (part for part in self.parts[value] if op.num_blocks or not self.storages[part.storage].persistable)
            return tuple(part._replace(variable=op.results[0]) for part in mine)
        unsure = value in op.results and may_lie_in(op, op.results.index(value))
        num_own = len(self.values[value].elements) if self.values[value].dtype == "vector" else 1
        return self.parts[value][:num_own] if unsure else self.parts[value]

    def cleared_buffers(self) -> set[int]:
        """Numbers of the storages of fused buffers in which an operation overwrites a tensor."""
        return self.numbers_of(value for buffers in self._buffers.values() for value in buffers)

    def _overwritten_buffers(self, program: Program) -> dict[int, list[int]]:
        """Operation id -> fused buffers in which it overwrites a tensor; tensors lie in a buffer from its `coalesce_tensor` on."""
        buffer_of: dict[int, int] = {}
        found: dict[int, list[int]] = {}
        for op in program.ops:
            written = op.inplace if buffer_of else ()
            buffers = {buffer_of[n] for _, operand in written for n in self.numbers(op.operands[operand]) if n in buffer_of}
            if op.kind == "coalesce_tensor":
                buffer_of.update((n, op.results[-1]) for value in op.results[:-1] for n in self.numbers(value))
            elif buffers:
                found[op.id] = sorted(buffers)
        return found

    def views(self, op: Op) -> list[int]:
        """Results that share their operand's memory: nothing is written, but from this operation on the executor knows the variable."""
        return [op.results[result] for result, _ in views_of(op)] if op.name not in NO_KERNEL else []

    def users(self) -> list[set[int]]:
        """For each storage, the ids of the operations that write or read it."""
        found: list[set[int]] = [set() for _ in self.storages]
        for op_id, storage, _ in self.uses():
            found[storage].add(op_id)
        return found

    def uses(self) -> list[tuple[int, int, int]]:
        """`(operation id, storage number, variable)` for each storage that an operation writes or reads, in program order."""
        found: list[tuple[int, int, int]] = []
        for op in self.program.ops:
            given = () if op.name in (COMBINE, SPLIT) else op.results
            found += [(op.id, part.storage, part.variable) for value in (*self.reads(op), *given) for part in self.parts[value]]
        return found

    def is_once(self, value: int) -> bool:
        """Whether a value exists once per step: a persistable value with a name, or a result of the optimizer part.

        Paddle also marks results without a name as persistable, to keep them from being freed; each micro-batch has its own.
        """
        variables = [self.values[part.variable] for part in self.parts[value]]
        return value in self._once or any(each.persistable and each.name for each in variables)

    def is_collected(self, op: Op) -> bool:
        """Whether this operation names an output that a separate job collects; the proof takes this job as the last of the step."""
        return op.name == SHADOW_OUTPUT and (FETCH in op.attrs or not self.is_once(op.operands[0]))


storages_of = once_per_ops(Storages)
"""The storages of a program."""


def _taken_out(program: Program) -> dict[int, tuple[int, ...]]:
    """Vector that a kernel returns -> the tensors that are extracted from it, also through a vector that shares its memory."""
    source: dict[int, int] = {}
    found: dict[int, tuple[int, ...]] = {}
    for op in program.ops:
        for result, operand in (*op.inplace, *op.views):
            source[op.results[result]] = source.get(op.operands[operand], op.operands[operand])
        if op.name == SPLIT:
            found.setdefault(source.get(op.operands[0], op.operands[0]), op.results)
    return found


def is_fed(op: Op, values: dict[int, Value]) -> bool:
    """Whether an operation names an input from the batch, which the first job of the step cuts into micro-batches."""
    return op.name == DATA and not values[op.results[0]].persistable


def feed_items(program: Program) -> list[OpInstance]:
    """Op instances of the job at the start of the step, which cuts the batch: one per input and micro-batch, in the job's order."""
    values = {value.id: value for value in program.values}
    read = {value for op in program.ops for value in op.operands}
    fed = [op.id for op in program.ops if is_fed(op, values) and op.results[0] in read]
    return [(op_id, m) for op_id in fed for m in range(program.pipeline.num_micro_batches)]


def collect_items(program: Program) -> list[OpInstance]:
    """Op instances of the job that collects the outputs: one per output and micro-batch, or one for an output that exists once per step.
    The proof takes this job as the last of the step."""
    if not any(op.name == SHADOW_OUTPUT for op in program.ops):
        return []
    table = storages_of(program)
    return [
        (op.id, m)
        for op in program.ops
        if table.is_collected(op)
        for m in range(1 if table.is_once(op.operands[0]) else program.pipeline.num_micro_batches)
    ]


def with_fetches(program: Program, values: Sequence[int]) -> Program:
    """The program with an output for each value that the user fetches."""
    first = 1 + max((op.id for op in program.ops), default=-1)
    fetched = enumerate(dict.fromkeys(values), first)
    return program.with_ops([*program.ops, *(Op(k, SHADOW_OUTPUT, (v,), (), "optimize", attrs={FETCH: v}) for k, v in fetched)])
