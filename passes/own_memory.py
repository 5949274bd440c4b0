"""Results in memory of their own, which passes may replace with other memory."""

from __future__ import annotations

from interlace.ir import Graph, Op
from interlace.ir.kinds import SHARE_VAR, is_boundary
from interlace.ir.storage import Storage


def has_own_memory(graph: Graph, value: int, storage: Storage) -> bool:
    """Whether a result has device memory of its own that does not outlive the step and is part of no fused buffer."""
    if storage.value != value or storage.persistable or storage.kept or storage.vectors or storage.memory != "device":
        return False
    return all(each.name != SHARE_VAR and not is_boundary(each) for each in users_of(graph, storage))


def users_of(graph: Graph, storage: Storage) -> list[Op]:
    """Operations that take a value of the storage as an operand."""
    return [graph.ops[each] for each in dict.fromkeys(user for value in storage.values for user in graph.users.get(value, ()))]
