"""Recomputation in a program: the operations of backward that repeat operations of forward, and the cost of doing without them.

Paddle's recompute pass repeats a segment of forward in backward and marks originals (`fwd_recompute_id`) and copies
(`bwd_recompute_id`); collectives that are inserted later have no mark. Where a copy repeats its original exactly, backward can read the
original's results instead: they stay in memory for longer, and copies that nobody reads any more go away, with their collectives.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import msgspec

from interlace.ir import ABSENT, Edit, Op, Program
from interlace.ir.effects import is_repeatable
from interlace.ir.graph import written_operands
from interlace.ir.storage import Storages, storages_of

ORIGINAL, COPY = "fwd_recompute_id", "bwd_recompute_id"
"""Attributes that Paddle's recompute pass sets on the operations of a segment, and on their copies."""
Group = tuple[int, ...]
"""Results of copies whose originals share memory."""
IDENTITY = frozenset({"pd_op.share_data", "pd_op.share_data_"})


class Recomputation:
    """The copies of a program that repeat their originals, and what keeping originals saves.

    A *group* is a set of copies' results that share memory in forward and that operations of backward read. A group is either
    kept (backward reads the originals) or recomputed.

    Attributes:
        original: Result of a copy -> the result of its original.
        producer, maker_of: Result of a copy, of an operation of forward -> that operation.
        groups: Results of copies, in the order of the program.
    """

    def __init__(self, program: Program, op_ns: Mapping[int, int]) -> None:
        self.program, self.op_ns = program, op_ns
        self.storages = storages_of(program)
        self.copies, self.original = _match(program, self.storages)
        self.producer = {value: op for op in self.copies.values() for value in op.results}
        self.maker_of = {value: op for op in program.ops if op.role == "forward" for value in op.results} if self.copies else {}
        self.groups = self._groups()

    def needed(self, kept: Iterable[Group]) -> set[int]:
        """Ids of the copies that still run if these groups are kept."""
        held = {value for group in kept for value in group}
        found: set[int] = set()
        for op in self.program.ops:
            if op.id not in self.copies:
                self.require((v for v in op.reads if v not in held), held, found)
        return found

    def without(self, kept: Iterable[Group]) -> Program:
        """The program in which backward reads the originals of these groups, without the copies that nothing reads any more."""
        kept = list(kept)
        held, run = {value for group in kept for value in group}, self.needed(kept)
        edit = Edit(self.program)
        for op in self.program.ops:
            if op.id in self.copies and op.id not in run:
                edit.replace(op.id, [])
                continue
            operands = tuple(self._source(op, k, value, held, run) for k, value in enumerate(op.operands))
            if operands != op.operands:
                edit.replace(op.id, [msgspec.structs.replace(op, operands=operands)])
        return aliased(edit.build())

    def _source(self, op: Op, k: int, value: int, held: set[int], run: set[int]) -> int:
        """What an operand becomes: the original where it is kept, and where only its shape is read and the copy is gone."""
        made = self.producer.get(value)
        if made is None or not (value in held or (k in op.no_buffer and made.id not in run)):
            return value
        return self.original[value]

    def require(self, values: Iterable[int], held: set[int], found: set[int]) -> int:
        """Add the copies that compute these values, and the copies that these need, to `found`; returns their total time in nanoseconds."""
        took, stack = 0, [v for v in values if v in self.producer]
        while stack:
            op = self.producer[stack.pop()]
            if op.id not in found:
                found.add(op.id)
                took += self.op_ns[op.id]
                stack += [v for v in op.reads if v in self.producer and v not in held]
        return took

    def _groups(self) -> list[Group]:
        """Results of copies whose contents other operations read, by shared memory of their originals."""
        read = {v: None for op in self.program.ops if op.id not in self.copies for v in op.reads if v in self.producer}
        group_of: dict[int, list[int]] = {}
        for value in read:
            joined = [value]
            for number in self.storages.numbers(self.original[value]):
                if (other := group_of.get(number)) is not None and other is not joined:
                    other += [v for v in joined if v not in other]
                    joined = other
            for v in joined:
                group_of.update(dict.fromkeys(self.storages.numbers(self.original[v]), joined))
        return list({id(group): tuple(sorted(group)) for group in group_of.values()}.values())

    def names(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The groups as `(index of the copy, index of its result)`, which ranks that run the same operations share; ids may differ."""
        at = {op_id: k for k, op_id in enumerate(self.copies)}
        return tuple(tuple((at[self.producer[v].id], self.producer[v].results.index(v)) for v in group) for group in self.groups)

    def bytes_of(self, group: Group) -> int:
        """Bytes that a group holds from forward to backward."""
        numbers = self.storages.numbers_of(self.original[value] for value in group)
        return sum(max(0, self.storages.storages[number].size_bytes) for number in numbers)


def recomputes(program: Program) -> bool:
    """Whether Paddle's recompute pass has repeated anything in it."""
    return any(COPY in op.attrs for op in program.ops)


def _match(program: Program, table: Storages) -> tuple[dict[int, Op], dict[int, int]]:
    """Copies that repeat their original exactly, by id, and the original of each of their results.

    An operation of backward is a copy if it has the mark, or if it reads a copy's result as its original reads the original's. An operation
    is no exact repetition if its results differ each time (`is_repeatable`), if it reads memory that is written in place within forward and
    backward, or if its result is overwritten later.
    """
    if not recomputes(program):
        return {}, {}
    root = {op.results[0]: op.operands[0] for op in program.ops if op.name in IDENTITY}
    writers = [op for op in program.ops if op.name not in IDENTITY]
    written = table.numbers_of(value for op in writers for value in written_operands(op))
    changing = table.numbers_of(value for op in writers if op.role != "optimize" for value in written_operands(op))
    originals: dict[tuple[object, ...], Op] = {}
    copies: dict[int, Op] = {}
    original: dict[int, int] = {}

    def first(value: int) -> int:
        while value in original or value in root:
            value = original.get(value, root.get(value, value))
        return value

    def key(op: Op) -> tuple[object, ...]:
        attrs = {name: each for name, each in op.attrs.items() if name not in (ORIGINAL, COPY)}
        operands = tuple(v if v == ABSENT else first(v) for v in op.operands)
        return (op.name, json.dumps(attrs, sort_keys=True, default=str), operands, op.group, op.chunk)

    for op in program.ops:
        if not is_repeatable(op) or changing & table.numbers_of(op.reads) or written & table.numbers_of(op.results):
            continue
        if op.role == "forward":
            same = originals.setdefault(key(op), op)
            root.update((mine, other) for mine, other in zip(op.results, same.results, strict=True) if mine != other)
        elif (COPY in op.attrs or any(v in original for v in op.operands)) and (repeated := originals.get(key(op))) is not None:
            copies[op.id] = op
            original.update(zip(op.results, repeated.results, strict=True))
    return copies, original


def aliased(program: Program) -> Program:
    """The program with views and in-place results in the storage of their present operands."""
    storage = {value.id: value.storage for value in program.values}
    for op in program.ops:
        storage.update((op.results[result], storage[op.operands[operand]]) for result, operand in (*op.views, *op.inplace))
    values = [
        value if value.storage == storage[value.id] else msgspec.structs.replace(value, storage=storage[value.id])
        for value in program.values
    ]
    return msgspec.structs.replace(program, values=tuple(values))
