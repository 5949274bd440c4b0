"""The cheapest choice of what is recomputed, exactly, by OR-tools' CP-SAT (extra `solve`): how far the order of `Recomputation` is off.

Nothing is planned with it: it takes the part of the decision that has no schedule in it.
"""

from __future__ import annotations

from itertools import accumulate

import msgspec

from interlace.errors import PlanError
from interlace.scheduler.recompute import Recomputation


class Chosen(msgspec.Struct, frozen=True):
    """A choice for one micro-batch.

    Attributes:
        groups: What is recomputed.
        took_ns: Time of all repetitions that then run.
        freed_bytes: What the groups hold from forward to backward.
    """

    groups: frozenset[tuple[int, ...]]
    took_ns: int
    freed_bytes: int


def in_their_order(found: Recomputation, freed_bytes: int) -> Chosen:
    """The first groups that free so many bytes, as plans take them; all where these do not."""
    freed = [0, *accumulate(map(found.bytes_of, found.groups))]
    count = next((count for count, each in enumerate(freed) if each >= freed_bytes), len(found.groups))
    return chosen(found, frozenset(found.groups[:count]))


def chosen(found: Recomputation, groups: frozenset[tuple[int, ...]]) -> Chosen:
    """What a choice takes and frees."""
    run = found.needed(group for group in found.groups if group not in groups)
    return Chosen(groups, sum(found.op_ns[op_id] for op_id in run), sum(map(found.bytes_of, groups)))


def cheapest(found: Recomputation, freed_bytes: int, most_s: float = 20.0) -> Chosen:
    """The groups that free so many bytes in the least time.

    Args:
        found: Of a program.
        freed_bytes: A micro-batch; no more than all groups hold.
        most_s: Seconds that the solver may take.

    Raises:
        PlanError: OR-tools is not installed, or found no proved optimum in that time.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise PlanError(f"OR-tools cannot be imported ({error}); pip install 'interlace[solve]'") from error
    model = cp_model.CpModel()
    again = {group: model.new_bool_var(f"group {group[0]}") for group in found.groups}
    runs = {op_id: model.new_bool_var(f"copy {op_id}") for op_id in found.copies}
    of_value = {value: again[group] for group in found.groups for value in group}
    for op in found.program.ops:
        copies = [value for value in op.reads if value in found.producer]
        for value in copies:
            makes = runs[found.producer[value].id]
            if op.id not in found.copies:  # what backward reads is kept, or computed again
                model.add(makes >= of_value[value])
            elif value in of_value:
                model.add(makes >= runs[op.id] + of_value[value] - 1)
            else:
                model.add(makes >= runs[op.id])
    model.add(sum(found.bytes_of(group) * each for group, each in again.items()) >= freed_bytes)
    model.minimize(sum(found.op_ns[op_id] * each for op_id, each in runs.items()))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers, solver.parameters.random_seed = most_s, 1, 0
    if (status := solver.solve(model)) != cp_model.OPTIMAL:
        told = f"no proved optimum of {len(found.groups)} groups in {most_s:g} s"
        raise PlanError(f"{told} ({solver.status_name(status)}); give it more time, or ask for fewer bytes")
    return chosen(found, frozenset(group for group, each in again.items() if solver.boolean_value(each)))
