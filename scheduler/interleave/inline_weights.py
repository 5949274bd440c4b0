"""Which weight gradients are computed with their own input gradients, where the others trail: those whose operands cost most to keep.

A weight gradient that trails keeps its operands live. By the time that it takes, a square product keeps twice the memory of one into a
wide layer, so a stage that can put off half of the time in the memory that it has puts off the wide ones, and computes the others in
the collectives of their own job.
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
    """Ids of those weight gradients of a micro-batch that do not trail: about `part` of their time (0 to less than 1), those first that
    keep most memory for it, in program order where that is equal. `weights` are the operations of all weight gradients of a chunk, in
    program order.

    Operations stay together where one reads what another makes, where both read an activation that nothing else needs any more, and where
    both write one buffer, whose sum would change its order. O(operations log operations).
    """
    units = units_of(graph, weights, cost)
    left, found = part * sum(unit.dur_ns for unit in units), set[int]()
    for unit in units[:-1]:
        if unit.dur_ns / 2 < left:
            found |= {op.id for op in unit.ops}
            left -= unit.dur_ns
    return frozenset(found)


class Unit(NamedTuple):
    """Weight gradients that stay together: operations, their time, and the bytes of what they read and do not make themselves."""

    ops: Sequence[Op]
    dur_ns: int
    held_bytes: int


def units_of(graph: Graph, weights: Sequence[Op], cost: Costs) -> list[Unit]:
    """The units of a micro-batch's weight gradients, those first that keep most memory for their time."""
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
    """Storages that tie an operation to others: what it reads or makes for this micro-batch, and buffers that it writes."""
    table = graph.storages
    used = {n for n in table.numbers_of((*graph.reads(op), *op.results)) if not table.storages[n].persistable}
    return used | table.numbers_of(written_operands(op))


def _held_bytes(graph: Graph, unit: Sequence[Op]) -> int:
    """Bytes that the operations of a unit read and do not make themselves."""
    table, inside = graph.storages, {op.id for op in unit}
    held = table.numbers_of(value for op in unit for value in graph.reads(op))
    return sum(table.storages[n].size_bytes for n in held if not table.storages[n].persistable and table.storages[n].producer not in inside)
