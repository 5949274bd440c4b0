"""The program as each micro-batch runs it: a copy that no job contains for a micro-batch is the identity there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt

from interlace.ir import Op, OpInstance, Program, Value
from interlace.ir.kinds import is_copy
from interlace.ir.per_ops import once_per_items, once_per_ops
from interlace.ir.storage import storages_of


@dataclass(frozen=True, slots=True)
class Variant:
    """One form of the program and the micro-batches that run it.

    Attributes:
        whole: The program with all its copies.
        absent: Ids of the copies that those micro-batches skip.
        micro_batches: In ascending order.
    """

    whole: Program
    absent: frozenset[int]
    micro_batches: list[int]

    @property
    def program(self) -> Program:
        """Without those copies, every reader of a skipped copy reading its operand."""
        return without(self.whole, self.absent)


@dataclass(frozen=True, slots=True)
class Renaming:
    """What takes the place of what goes with some copies: tables of a program turn into those of `without` it.

    Attributes:
        is_gone: Whether an operation is one of the copies. `[1 + highest operation id]`
        value: The value that is read in the place of one. `[1 + highest value id]`
        variable: The executor's variable (the value that names it) in the place of one. `[1 + highest value id]`
        storage: The storage, by number (`Storages`), in the place of one. `[storages]`
    """

    is_gone: npt.NDArray[np.bool_]
    value: npt.NDArray[np.int64]
    variable: npt.NDArray[np.int64]
    storage: npt.NDArray[np.int64]


def renaming(program: Program, absent: frozenset[int]) -> Renaming:
    """What takes the place of what goes with these copies, each of one tensor; O(ops + values)."""
    table, num_values = storages_of(program), 1 + max((value.id for value in program.values), default=-1)
    gone = np.zeros(1 + max((op.id for op in program.ops), default=-1), np.bool_)
    value, variable, storage = np.arange(num_values), np.arange(num_values), np.arange(len(table.storages))
    for op in program.ops:
        if op.id in absent:
            source, result = int(value[op.operands[0]]), op.results[0]
            (home,), (left,) = table.parts[source], table.parts[result]
            gone[op.id], value[result], variable[result] = True, source, variable[home.variable]
            storage[left.storage] = storage[home.storage]
    return Renaming(gone, value, variable, storage)


@once_per_items
def omitted_copies(program: Program) -> frozenset[OpInstance]:
    """Op instances of copies that passes added and that no job runs: for that micro-batch the result is the operand.

    A program without jobs has none. Cost O(op instances).
    """
    copies = {op.id for op in program.ops if is_copy(op) and op.role != "optimize" and op.origin < 0}
    if not copies or not program.jobs:
        return frozenset()
    present = {item for job in program.jobs for item in job.items if item[0] in copies}
    return frozenset((op_id, m) for op_id in copies for m in range(program.pipeline.num_micro_batches)) - present


def variants(program: Program) -> list[Variant]:
    """The forms in which micro-batches run, the one of micro-batch 0 first; cost O(op instances + ops x forms)."""
    absent: dict[int, list[int]] = {m: [] for m in range(program.pipeline.num_micro_batches)}
    for op_id, micro_batch in omitted_copies(program):
        absent[micro_batch].append(op_id)
    groups: dict[frozenset[int], list[int]] = {}
    for micro_batch, op_ids in absent.items():
        groups.setdefault(frozenset(op_ids), []).append(micro_batch)
    return [Variant(program, absent, members) for absent, members in groups.items()]


def without(program: Program, absent: frozenset[int]) -> Program:
    """The program without some copies: their results, and all values that share the results' memory, become their operands."""
    if not absent:
        return program
    known = _known(program)
    if absent not in known:
        known[absent] = _without(program, absent)
    return program.with_ops(*known[absent])


_known: Callable[[Program], dict[frozenset[int], tuple[tuple[Op, ...], tuple[Value, ...]]]] = once_per_ops(lambda program: {})
"""By copies that are left out: operations and values of what is left, the same tuples each time."""


def _without(program: Program, absent: frozenset[int]) -> tuple[tuple[Op, ...], tuple[Value, ...]]:
    storage = {value.id: value.storage for value in program.values}
    renamed: dict[int, int] = {}
    moved: dict[int, int] = {}
    kept: list[Op] = []
    for op in program.ops:
        operands = tuple(renamed.get(v, v) for v in op.operands)
        if op.id in absent:
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
def items_of(program: Program) -> npt.NDArray[np.int64]:
    """The op instances of a program's jobs. `[n, 2]`; nobody may change it."""
    items = chain.from_iterable(job.items for job in program.jobs)
    return np.fromiter(chain.from_iterable(items), np.int64).reshape(-1, 2)


@once_per_items
def index_of_items(program: Program) -> dict[OpInstance, int]:
    """The place of each op instance in `items_of`; nobody may change it."""
    return {item: k for k, item in enumerate(item for job in program.jobs for item in job.items)}


def indices_by_op(items: npt.NDArray[np.int64], num_ids: int) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """For each micro-batch a table `[num_ids]`: op id -> index of its op instance in `items`, -1 if there is none.

    The same array is yielded each time, with other contents. Cost O(n log n) in all.

    Args:
        items: Op instances. `[n, 2]` of op id, micro-batch
        num_ids: Above all op ids.
    """
    order = np.argsort(items[:, 1], kind="stable")
    found, begin = np.unique(items[order, 1], return_index=True)
    index = np.full(num_ids, -1, np.int64)
    for micro_batch, mine in zip(found.tolist(), np.split(order, begin[1:]), strict=False):
        index[items[mine, 0]] = mine
        yield micro_batch, index
        index[items[mine, 0]] = -1
