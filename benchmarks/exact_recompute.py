"""The exact cheapest choice of recomputation, by OR-tools' CP-SAT (extra `solve`), to judge `RecomputeLevels.within`. Planning does not use
it.
"""

from __future__ import annotations

import numpy as np

from interlace.errors import PlanError
from interlace.scheduler.recompute.choices import RecomputeLevels


def cheapest(choices: RecomputeLevels, limit_bytes: int, most_s: float = 20.0) -> frozenset[int]:
    """The groups, by index, that take least time to recompute such that no section of the step holds more than the limit.

    Args:
        choices: The choices of a program.
        limit_bytes: Live bytes, at least what is held if everything is recomputed.
        most_s: Seconds that the solver may take.

    Raises:
        PlanError: OR-tools is not installed, or did not prove an optimum in that time.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise PlanError(f"OR-tools cannot be imported ({error}); pip install 'interlace[solve]'") from error
    model, found, memory = cp_model.CpModel(), choices.found, choices.memory
    again = [model.new_bool_var(f"group {k}") for k in range(len(found.groups))]
    runs = {op_id: model.new_bool_var(f"copy {op_id}") for op_id in found.copies}
    of_value = {value: again[k] for k, group in enumerate(found.groups) for value in group}
    for op in found.program.ops:
        copies = [value for value in op.reads if value in found.producer]
        for value in copies:
            makes = runs[found.producer[value].id]
            if op.id not in found.copies:  # backward's operands are kept or recomputed
                model.add(makes >= of_value[value])
            elif value in of_value:
                model.add(makes >= runs[op.id] + of_value[value] - 1)
            else:
                model.add(makes >= runs[op.id])
    for *freed, over in np.unique(np.vstack([memory.kept, memory.curve([]) - limit_bytes]).T, axis=0).tolist():
        if over > 0:
            model.add(sum(each * chosen for each, chosen in zip(freed, again, strict=True)) >= over)
    model.minimize(sum(found.op_ns[op_id] * each for op_id, each in runs.items()))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers, solver.parameters.random_seed = most_s, 1, 0
    if (status := solver.solve(model)) != cp_model.OPTIMAL:
        told = f"no proved optimum of {len(found.groups)} groups in {most_s:g} s"
        raise PlanError(f"{told} ({solver.status_name(status)}); give it more time, or a higher limit")
    return frozenset(k for k, each in enumerate(again) if solver.boolean_value(each))
