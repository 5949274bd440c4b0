"""Step time as a function of the memory budget: a plan for each of several budgets, from keeping everything to the least feasible one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import msgspec

from interlace.config import MOST_SIZE, Config
from interlace.cost_model import CostModel, Costs
from interlace.errors import BudgetError, ConfigError, PlanError
from interlace.ir import Program
from interlace.ir.copies import omitted_copies
from interlace.ir.kinds import is_copy
from interlace.passes.choose_recompute import recomputation
from interlace.planning.budget import baseline_peak_bytes, peak_bytes
from interlace.planning.curve import Base, Point, Sweep
from interlace.planning.outcome import NOT_COMPARED, Outcome
from interlace.planning.plan import Plan, make_plans
from interlace.scheduler.memory.live import saved_bytes

FEWEST = 2
"""Least number of points of a curve."""


def sweep(
    programs: Sequence[Program],
    config: Config,
    cost: CostModel,
    profile: str,
    points: int,
    each: Callable[[Point], None] = lambda _: None,
    asked: Sequence[Plan] = (),
    processes: int = 1,
) -> tuple[Sweep, list[Plan]]:
    """The curve over `points` evenly spaced budgets, largest first, and the fastest plans of it within the budget of `asked`. These are the
    plans of `asked` themselves if none is faster, or if they have no budget.

    The largest budget is the highest peak among the plan that keeps everything, Paddle's baseline, and `asked` if made without a budget;
    the smallest is the least feasible one. A larger budget is never slower: if its own plan would be, it gets that of a smaller budget.
    Budgets are planned from the smallest to the largest, and `each` is called with every point as soon as it is known.

    `asked` are plans of all ranks, made with or without a budget of their own; no point at or above that budget, or else their peak, is
    slower than they are. At most `processes` plan at the same time. Raises ConfigError for fewer than two points, PlanError if the step
    cannot be simulated.
    """
    if points < FEWEST:
        raise ConfigError(f"--points {points}: expected {FEWEST} or more")

    def plans(budget: int) -> list[Plan]:
        return make_plans(programs, msgspec.structs.replace(config, memory_budget=budget), cost, profile, processes)

    everything = plans(MOST_SIZE)
    before = _outcome(everything).before
    if before is None:
        raise PlanError("Paddle's baseline is not known here, so there is no curve; give the dumps of all ranks")
    base = Base(max(baseline_peak_bytes(program, cost) or 0 for program in programs), before.step_ns / 1e3, before.exposed_ns / 1e3)
    held = 0 if not asked or asked[0].asked_budget else _peak([plan.program for plan in asked], cost)
    most = max(base.peak_bytes, _peak([plan.program for plan in everything], cost), held)
    everything = [_under(most, plan) for plan in everything]
    found: list[Point] = []
    given = _point(held or asked[0].memory_budget, list(asked), cost) if asked else None
    taken, best = list(asked), None if held else given
    least = _least(plans)
    for budget in (least + (most - least) * k // (points - 1) for k in range(points)):
        point, made = (_point(budget, everything, cost), everything) if budget >= most else _planned(budget, plans, cost)
        if best is not None and _fits_and_is_faster(point, best, given):
            taken, best = made, point
        for smaller in found[-1:] + [each for each in (given,) if each and each.budget_bytes <= budget]:
            point = faster(point, smaller)
        found.append(point)
        each(found[-1])
    return Sweep(tuple(reversed(found)), base, profile), taken


def _under(budget: int, plan: Plan) -> Plan:
    """A plan that keeps a budget, recorded as if it had been made for it."""
    if plan.outcome is None or plan.outcome.memory is None:
        return dataclasses.replace(plan, memory_budget=budget)
    memory = msgspec.structs.replace(plan.outcome.memory, limit_bytes=budget, more=None, less=None)
    compared = dataclasses.replace(plan.compared, memory=memory) if plan.compared else None
    outcome = msgspec.structs.replace(plan.outcome, memory=memory)
    return dataclasses.replace(plan, memory_budget=budget, compared=compared, outcome=outcome)


def _fits_and_is_faster(point: Point, best: Point, given: Point | None) -> bool:
    """Whether the plan of a point fits into the budget of `given` and its step is shorter than that of `best`."""
    budget, held = given.budget_bytes if given else 0, point.peak_bytes
    return point.step_us is not None and held is not None and held <= budget and point.step_us < (best.step_us or 0.0)


def faster(point: Point, smaller: Point) -> Point:
    """A point, with the plan of a smaller budget if that plan's step is shorter, or the point has no plan."""
    if smaller.step_us is None or (point.step_us is not None and point.step_us <= smaller.step_us):
        return point
    return msgspec.structs.replace(smaller, budget_bytes=point.budget_bytes)


def _peak(programs: Sequence[Program], cost: Costs) -> int:
    """Peak device bytes of the fullest rank on a GPU, however fast its host."""
    return max(peak_bytes(program, cost) or 0 for program in programs)


def _least(plans: Callable[[int], list[Plan]]) -> int:
    try:
        plans(1)
    except BudgetError as error:
        return error.least_bytes
    raise PlanError("what the plan holds on a GPU is not known, its step cannot be simulated; `interlace check` says where it stands")


def _planned(budget: int, plans: Callable[[int], list[Plan]], cost: CostModel) -> tuple[Point, list[Plan]]:
    """The point of a budget, and its plans; no plans if the budget cannot be kept."""
    try:
        made = plans(budget)
    except BudgetError as error:
        return Point(budget_bytes=budget, feasible=False, why=str(error)), []
    return _point(budget, made, cost), made


def _point(budget: int, made: Sequence[Plan], cost: CostModel) -> Point:
    step = _outcome(made).plan
    firsts = {plan.program.pipeline.stage: plan for plan in reversed(made)}.values()
    kept, recomputed, offloaded = (sum(part) for part in zip(*(became_of_saved(plan, cost) for plan in firsts), strict=True))
    return Point(
        budget_bytes=budget,
        feasible=True,
        peak_bytes=_peak([plan.program for plan in made], cost),
        step_us=step.step_ns / 1e3,
        exposed_us=step.exposed_ns / 1e3,
        kept_bytes=kept,
        recomputed_bytes=recomputed,
        offloaded_bytes=offloaded,
    )


def _outcome(plans: Sequence[Plan]) -> Outcome:
    if plans[0].outcome is None:
        raise PlanError(NOT_COMPARED)
    return plans[0].outcome


def became_of_saved(plan: Plan, cost: Costs) -> tuple[int, int, int]:
    """Bytes of forward's values that backward reads, over all micro-batches: kept on the device, recomputed, and moved to the host and
    back."""
    program, count = plan.program, plan.program.pipeline.num_micro_batches
    found = recomputation(plan.captured, cost, {}, adds=False)
    whole = count * saved_bytes(found.without(found.groups) if found.copies else plan.captured)
    sizes = {value.id: max(0, value.size_bytes) for value in program.values}
    out = {op.id: sizes[op.operands[0]] for op in program.ops if is_copy(op) and op.origin < 0 and op.role == "forward"}
    stays = sum(out.get(op_id, 0) for op_id, _ in omitted_copies(program))
    kept, moved = count * saved_bytes(program) + stays, count * sum(out.values()) - stays
    return kept, max(0, whole - kept - moved), moved
