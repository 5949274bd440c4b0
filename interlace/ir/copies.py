"""The program as each micro-batch runs it. If no job runs a copy for a micro-batch, the copy is the identity there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, chain

import msgspec
import numpy as np

from interlace.grouping import grouped
from interlace.ir.arrays import Flags, Ints
from interlace.ir.kinds import MEMORY, is_collective, is_copy
from interlace.ir.per_ops import FEW, once_per_items, once_per_ops, once_per_ops_and
from interlace.ir.program import Op, OpInstance, Program, Value
from interlace.ir.storage import storages_of


def fills_memory(op: Op) -> bool:
    """Whether a copy or a collective writes its result into existing memory, that of its second operand, instead of new memory.

    >>> fills_memory(Op(2, "pd_op.memcpy_d2h", (1, 0), (2,), "optimize", no_buffer=(1,), inplace=((0, 1),)))
    True
    """
    return (0, 1) in op.inplace and 1 in op.no_buffer and (is_copy(op) or is_collective(op))


def only_takes_memory(op: Op) -> bool:
    """Whether an operation only takes memory, which a copy back from the host or a collective then fills."""
    return op.name == MEMORY and op.origin < 0


def may_be_omitted(op: Op) -> bool:
    """Whether jobs may leave an operation out for a micro-batch: a copy, and what takes memory, if also what fills it is left out."""
    return is_copy(op) or only_takes_memory(op)


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant of the program and the micro-batches that run it.

    Attributes:
        whole: The program with all its copies.
        absent: Ids of the copies that those micro-batches skip, and of the operations that take memory for them.
        micro_batches: In ascending order.
    """

    whole: Program
    absent: frozenset[int]
    micro_batches: list[int]

    @property
    def program(self) -> Program:
        """The program without those copies: readers of a skipped copy read its operand."""
        return without(self.whole, self.absent)


@dataclass(frozen=True, slots=True)
class Renaming:
    """Replacements for the values, variables and storages of some copies, with which tables of a program become those of the program
    without these copies and the memory taken for them (`without`). What belongs to no such copy is replaced by itself.

    Attributes:
        is_gone: Whether an operation is one of the copies, or takes memory for one. `[1 + highest operation id]`
        value: The value to read instead of each value. `[1 + highest value id]`
        variable: The executor's variable (the value that names it) instead of each one. `[1 + highest value id]`
        storage: The storage, by number (`Storages`), instead of each one. `[storages]`
    """

    is_gone: Flags
    value: Ints
    variable: Ints
    storage: Ints


def renaming(program: Program, absent: frozenset[int]) -> Renaming:
    """The replacements for these copies, each of a single tensor; O(ops + values)."""
    table, num_values = storages_of(program), 1 + max((value.id for value in program.values), default=-1)
    gone = np.zeros(1 + max((op.id for op in program.ops), default=-1), np.bool_)
    value, variable, storage = np.arange(num_values), np.arange(num_values), np.arange(len(table.storages))
    for op in program.ops if absent else ():
        if op.id not in absent:
            continue
        gone[op.id] = True
        if is_copy(op):
            source, result = int(value[op.operands[0]]), op.results[0]
            (home,), (left,) = table.parts[source], table.parts[result]
            value[result], variable[left.variable] = source, variable[home.variable]
            storage[left.storage] = storage[home.storage]
    return Renaming(gone, value, variable, storage)


@once_per_items
def omitted_copies(program: Program) -> frozenset[OpInstance]:
    """Op instances of copies that passes added and that no job runs, so that for that micro-batch the result is the operand, and of the
    operations that take memory for them; none in a program without jobs. Copies in the optimizer do not count. Cost O(op instances).
    """
    copies = {op.id for op in program.ops if op.origin < 0 and op.role != "optimize" and may_be_omitted(op)}
    if not copies or not program.jobs:
        return frozenset()
    present = {item for job in program.jobs for item in job.items if item[0] in copies}
    return frozenset((op_id, m) for op_id in copies for m in range(program.pipeline.num_micro_batches)) - present


def variants(program: Program) -> list[Variant]:
    """The variants that micro-batches run, that of micro-batch 0 first; cost O(op instances + copies x micro-batches)."""
    absent: dict[int, list[int]] = {m: [] for m in range(program.pipeline.num_micro_batches)}
    for op_id, micro_batch in omitted_copies(program):
        absent[micro_batch].append(op_id)
    groups = grouped((frozenset(op_ids), micro_batch) for micro_batch, op_ids in absent.items())
    return [Variant(program, absent, members) for absent, members in groups.items()]


def without(program: Program, absent: frozenset[int]) -> Program:
    """The program without some copies: their results, and all values that share the results' memory, become their operands."""
    return program.with_ops(*_without(program, absent)) if absent else program


@once_per_ops_and
def _without(program: Program, absent: frozenset[int]) -> tuple[tuple[Op, ...], tuple[Value, ...]]:
    """Operations and values that are left; the same tuples for each call with the same arguments."""
    storage = {value.id: value.storage for value in program.values}
    renamed: dict[int, int] = {}
    moved: dict[int, int] = {}
    kept: list[Op] = []
    for op in program.ops:
        operands = tuple(renamed.get(v, v) for v in op.operands)
        if op.id in absent and not is_copy(op):
            renamed[op.results[0]] = op.results[0]  # its value is left out
        elif op.id in absent:
            renamed[op.results[0]] = operands[0]
            home = storage[operands[0]]
            moved[storage[op.results[0]]] = moved.get(home, home)
        else:
            kept.append(op if operands == op.operands else msgspec.structs.replace(op, operands=operands))
    return tuple(kept), tuple(_moved(value, moved) for value in program.values if value.id not in renamed)


def _moved(value: Value, moved: dict[int, int]) -> Value:
    if value.storage not in moved:
        return value
    return msgspec.structs.replace(value, storage=moved[value.storage])


@once_per_items
def items_of(program: Program) -> Ints:
    """The op instances of a program's jobs. `[n, 2]`; read-only."""
    last = _last_items(program)
    known = {id(job): found for job, found in last}
    found = [(job.items, known[id(job.items)] if id(job.items) in known else _array_of(job.items)) for job in program.jobs]
    last[:] = found
    return np.concatenate([each for _, each in found]) if found else np.empty((0, 2), np.int64)


def job_bounds(program: Program) -> list[int]:
    """Index in `items_of` where each job begins, and the end of the last one. `[jobs + 1]`"""
    return [*accumulate((len(job.items) for job in program.jobs), initial=0)]


def _array_of(items: tuple[OpInstance, ...]) -> Ints:
    return np.fromiter(chain.from_iterable(items), np.int64, 2 * len(items)).reshape(-1, 2)


_last_items: Callable[[Program], list[tuple[tuple[OpInstance, ...], Ints]]] = once_per_ops(lambda program: [], FEW)
"""The items of the last program's jobs, each with its array: plans that are compared one after another often differ in few jobs."""


@once_per_items
def index_of_items(program: Program) -> dict[OpInstance, int]:
    """The index of each op instance in `items_of`; read-only."""
    return {item: k for k, item in enumerate(item for job in program.jobs for item in job.items)}


def places_of(program: Program, op: Ints, micro_batch: Ints) -> Ints:
    """The indices in `items_of` of op instances, given by arrays that broadcast; -1 for those that no job runs."""
    table = _places(program)
    num_micro_batches, num_ops = table.shape
    known, there = (micro_batch >= 0) & (micro_batch < num_micro_batches), (op >= 0) & (op < num_ops)
    return np.where(known & there, table.ravel()[micro_batch * known * num_ops + op * there], -1)


@once_per_items
def _places(program: Program) -> Ints:
    """Index in `items_of` by micro-batch and operation, or -1. `[1 + highest micro-batch, 1 + highest operation id]`"""
    op, micro_batch = items_of(program).T
    table = np.full((1 + micro_batch.max(initial=0), 1 + op.max(initial=0)), -1, np.int64)
    table[micro_batch, op] = np.arange(len(op))
    return table
