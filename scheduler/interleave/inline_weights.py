"""Selection of the weight gradients that are computed with their own input gradients while the others are delayed: those whose operands
take the most memory for their time.

A delayed weight gradient keeps its operands live. Per unit of time, a square product keeps twice the memory of one into a wide layer. So
a stage with memory to delay half of the time delays the wide ones, and computes the others during the collectives of their own job.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from networkx.utils import UnionFind

from interlace.cost_model import Costs
from interlace.cost_model.base import tables_of
from interlace.grouping import grouped
from interlace.ir import Graph, Op
from interlace.ir.graph import written_operands


def inline_weights(graph: Graph, weights: Sequence[Op], cost: Costs, part: float) -> frozenset[int]:
    """Ids of the weight gradients of a micro-batch that are not delayed, about `part` (0 <= part < 1) of their total time. Those that keep
    the most memory for their time come first; ties are broken by program order. `weights` are the operations of all weight gradients of a
    chunk, in program order.

    Operations stay together if one reads a result of another, if both read an activation that nothing else needs any more, or if both
    write the same buffer, as the order of its sum would change. O(ops log ops).
    """
    units = units_of(graph, weights, cost)
    left, found = part * sum(unit.dur_ns for unit in units), set[int]()
    for unit in units[:-1]:
        if unit.dur_ns / 2 < left:
            found |= {op.id for op in unit.ops}
            left -= unit.dur_ns
    return frozenset(found)


class Unit(NamedTuple):
    """Weight gradients that stay together: operations, their time in nanoseconds, and the bytes that they read but do not produce."""

    ops: Sequence[Op]
    dur_ns: int
    held_bytes: int


def units_of(graph: Graph, weights: Sequence[Op], cost: Costs) -> list[Unit]:
    """The units of a micro-batch's weight gradients, in descending order of memory kept per time."""
    tables = tables_of(graph.program)
    units = [Unit(ops, sum(cost.op_time(op, *tables).dur_ns for op in ops), _held_bytes(graph, ops)) for ops in _units(graph, weights)]
    return sorted(units, key=lambda unit: (-unit.held_bytes / max(unit.dur_ns, 1), unit.ops[0].id))


def _units(graph: Graph, weights: Sequence[Op]) -> list[list[Op]]:
    """Weight gradients that stay together, in the order of their first operation."""
    first: dict[int, int] = {}
    units = UnionFind(range(len(weights)))
    for k, op in enumerate(weights):
        for storage in _shared(graph, op):
            units.union(first.setdefault(storage, k), k)
    return list(grouped((units[k], op) for k, op in enumerate(weights)).values())


def _shared(graph: Graph, op: Op) -> set[int]:
    """Storages that tie an operation to others: those that it reads or produces for this micro-batch, and buffers that it writes."""
    table = graph.storages
    used = {n for n in table.numbers_of((*graph.reads(op), *op.results)) if not table.storages[n].persistable}
    return used | table.numbers_of(written_operands(op))


def _held_bytes(graph: Graph, unit: Sequence[Op]) -> int:
    """Bytes that the operations of a unit read but do not produce."""
    table, inside = graph.storages, {op.id for op in unit}
    held = table.numbers_of(value for op in unit for value in graph.reads(op))
    return sum(table.storages[n].size_bytes for n in held if not table.storages[n].persistable and table.storages[n].producer not in inside)
