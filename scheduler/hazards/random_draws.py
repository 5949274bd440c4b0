"""Random draws: a device has one generator, so the order of draws determines the numbers. Operations with other side effects keep their
order too."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from interlace.errors import PlanError
from interlace.ir import OpInstance, Program, describe
from interlace.ir.effects import is_ordered, why_ordered
from interlace.ir.schedule import baseline_row
from interlace.scheduler.hazards.flat_plan import FlatPlan
from interlace.scheduler.hazards.happens_before import Fault


def draws_out_of_order(plan: FlatPlan) -> list[Fault]:
    """The first draw of a step that has another position in Paddle's own schedule, if there is one. Raises PlanError if the plan does not
    make each draw of Paddle's own schedule exactly once."""
    drawing = {position for position, op in enumerate(plan.program.ops) if is_ordered(op)}
    if not drawing:
        return []
    found = [item for item, position in enumerate(plan.op) if position in drawing]
    baseline = baseline_draws(plan.program)
    _require_all(plan, found, baseline)
    wanted = [plan.index[item] for item in baseline]
    return next(([Fault("draw-order", other, item, -1)] for item, other in zip(found, wanted, strict=True) if item != other), [])


def _require_all(plan: FlatPlan, found: Sequence[int], baseline: Sequence[OpInstance]) -> None:
    """Raise PlanError for a plan that omits a draw, or makes one that is not in Paddle's own schedule."""
    program = plan.program
    made = Counter(map(plan.item, found))
    expected = Counter(baseline)
    wrong = sorted(item for item in {*made, *expected} if made[item] != expected[item])
    if wrong:
        op_id, micro_batch = wrong[0]
        op = next(op for op in program.ops if op.id == op_id)
        raise PlanError(
            f"rank {program.rank}: the plan runs {describe(op)} of micro-batch {micro_batch} {made[wrong[0]]} time(s), "
            f"expected {expected[wrong[0]]} as in Paddle's own schedule {program.pipeline.schedule} ({len(wrong)} such differ): "
            f"it {why_ordered(op)}; put each of the step into one job, and plan again with the pass that made the jobs"
        )


def baseline_draws(program: Program) -> list[OpInstance]:
    """All draws of a step in the order of Paddle's own schedule."""
    parts: dict[tuple[str, int], list[int]] = defaultdict(list)
    for op in program.ops:
        if is_ordered(op):
            kind = "O" if op.role == "optimize" else "F" if op.role == "forward" else "B"
            parts[kind, 0 if kind == "O" else op.chunk].append(op.id)
    return [
        (op_id, part.micro_batch)
        for slot in baseline_row(program.pipeline)
        for part in slot.parts
        for op_id in parts[part.kind, part.chunk]
    ]
