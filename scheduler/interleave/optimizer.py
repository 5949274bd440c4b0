"""The optimizer in an order of ours: whether it has one, the operations of the last gradients that it must wait for in one job with them,
and the order in which it reduces gradients there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import networkx as nx

from interlace.ir import Graph, Op, Program, dependencies
from interlace.ir.equivalent_ranks import groups_within_stage
from interlace.ir.kinds import is_collective, is_comm


def optimizer_communicates(program: Program) -> bool:
    """Whether a rank's optimizer has collectives, of gradients, parameters or norms."""
    return any(op.role == "optimize" and is_collective(op) for op in program.ops)


def updates_after(graph: Graph, before: Sequence[Op], optimizer: Sequence[Op]) -> Iterable[tuple[int, int]]:
    """Pairs (operation of the optimizer, operation of `before` that it must come after).

    Collectives of one group keep their order only where a rank of the group is in another stage: ranks of a stage list them alike.
    Cost: as `dependencies`.
    """
    early = {op.id for op in before}
    inside = groups_within_stage(graph.program)
    for op_id, needs in dependencies(graph, [*before, *optimizer]).items():
        op = graph.ops[op_id]
        for other in needs & early if op_id not in early else ():
            if not _only_in_turn(graph, graph.ops[other], op) or op.group not in inside:
                yield op_id, other


def across_stages(graph: Graph, optimizer: Sequence[Op]) -> list[int]:
    """Ids of communication with other stages, such as that of a global norm. It keeps its order, across all groups."""
    inside = groups_within_stage(graph.program)
    return [op.id for op in optimizer if is_comm(op) and op.group not in inside]


def in_completion_order(graph: Graph, before: Sequence[Op], optimizer: Sequence[Op]) -> list[Op]:
    """The optimizer's operations in the order in which `before` completes the gradients that they need. Collectives that reduce gradients,
    and so need no other collective of the optimizer, come first.

    Collectives of a group with ranks of another stage keep their order; all ranks of a stage get the same result. Every dependency
    holds. O(ops log ops).
    """
    ops = {op.id: op for op in optimizer}
    inside = groups_within_stage(graph.program)
    after = {
        op_id: {other for other in needs if not _only_in_turn(graph, ops[other], ops[op_id])}
        for op_id, needs in dependencies(graph, optimizer).items()
    }
    for earlier, later in pairwise(across_stages(graph, optimizer)):
        after[later].add(earlier)
    rank = _ranks(optimizer, after, _completed(graph, before, optimizer), inside)
    return [ops[op_id] for op_id in _sorted(after, rank)]


def _completed(graph: Graph, before: Sequence[Op], optimizer: Sequence[Op]) -> dict[int, int]:
    """Operation of the optimizer -> index in `before` of the last operation that it needs itself."""
    position = {op.id: k for k, op in enumerate(before)}
    found: dict[int, int] = {}
    for op_id, other in updates_after(graph, before, optimizer):
        found[op_id] = max(found.get(op_id, -1), position[other])
    return found


def _ranks(
    optimizer: Sequence[Op], after: dict[int, set[int]], complete: dict[int, int], inside: set[int]
) -> dict[int, tuple[int, int, int]]:
    """Sort key of each operation: 0 for reductions and what they need, else 1; the index at which the gradients that it needs are complete;
    its own index.

    An operation that needs no gradient gets the key of the first operation that needs it.
    """
    ready: dict[int, int] = {}
    communicated: set[int] = set()
    place: dict[int, tuple[int, int]] = {}
    for op in optimizer:
        ready[op.id] = max([complete.get(op.id, -1), *(ready[other] for other in after[op.id])])
        reduces = is_collective(op) and op.group in inside and not after[op.id] & communicated
        place[op.id] = (0 if reduces else 1, ready[op.id])
        if is_comm(op) or after[op.id] & communicated:
            communicated.add(op.id)
    needed: dict[int, tuple[int, int]] = {}
    for op in reversed(optimizer):
        first = needed.get(op.id, place[op.id])
        place[op.id] = first if ready[op.id] < 0 else min(first, place[op.id])
        needed.update({other: min(needed.get(other, place[op.id]), place[op.id]) for other in after[op.id]})
    return {op.id: (*place[op.id], k) for k, op in enumerate(optimizer)}


def _sorted(after: dict[int, set[int]], rank: dict[int, tuple[int, int, int]]) -> list[int]:
    """Ids sorted by rank, as far as the dependencies `after` allow."""
    order: nx.DiGraph[int] = nx.DiGraph()
    order.add_nodes_from(after)
    order.add_edges_from((other, op_id) for op_id, needs in after.items() for other in needs)
    return list(nx.lexicographical_topological_sort(order, key=rank.__getitem__))


def _only_in_turn(graph: Graph, before: Op, op: Op) -> bool:
    """Whether two collectives are ordered only because they share a group: neither reads or overwrites data of the other."""
    if not (is_collective(before) and is_collective(op) and before.group == op.group):
        return False
    touched, touches = (graph.storages.numbers_of((*each.operands, *each.results)) for each in (before, op))
    return not touched & touches
