"""Plans that use some of the device memory that Paddle's baseline leaves free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec

from interlace.config import NO_LIMIT, Beyond, Config
from interlace.cost_model import CostModel
from interlace.errors import BudgetError
from interlace.ir import Program
from interlace.ir.target import GPU, target_of
from interlace.passes import Schedule1F1B
from interlace.planning.limits import room_of
from interlace.planning.outcome import Outcome
from interlace.planning.plan import Plan, make_plans
from interlace.planning.tenth import TENTH
from interlace.planning.variants import is_open
from interlace.units import size

POOLS = 2.0
"""Bytes that allocator pools may take for each byte by which a plan's peak exceeds the baseline's, before that plan's pools are simulated:
0.9 to 1.9 on two H100 (`benchmarks/results/h100/testbed_two_gpus.json`)."""


def is_room_for(more_bytes: int, held_bytes: int, most_bytes: int) -> bool:
    """Whether a device on which pools take `held_bytes`, and may take `most_bytes`, has room for a plan whose pools take `more_bytes` more.
    True if it is not known what they may take (0).

    >>> is_room_for(10, 70, 90), is_room_for(30, 70, 90), is_room_for(0, 95, 90)
    (True, False, True)
    """
    return more_bytes <= 0 or most_bytes <= 0 or held_bytes + more_bytes <= most_bytes


def more_bytes(outcome: Outcome) -> int:
    """Device bytes by which allocator pools of the plan exceed those of the plan compared with, from their simulated pools or, if these are
    not known, from their peaks; 0 without a plan to compare with."""
    if outcome.before is None:
        return 0
    if outcome.pools is not None:
        return outcome.pools.plan_bytes - outcome.pools.before_bytes
    return int(POOLS * (outcome.plan.peak_bytes - outcome.before.peak_bytes))


def roomier(config: Config, outcome: Outcome | None) -> Beyond | None:
    """The budget of a plan that may exceed the peak of Paddle's baseline by a tenth, besides what the user allows; None if the user set the
    form, a budget or no limit, or the baseline's peak is not known."""
    asked = cast("Schedule1F1B | None", config.passes.get(Schedule1F1B.name))
    given = config.memory_budget or Beyond(0)
    if config.plan or asked is None or not is_open(asked) or not isinstance(given, Beyond) or given == NO_LIMIT:
        return None
    if outcome is None or outcome.before is None:
        return None
    return Beyond(given.more_bytes + int(TENTH * outcome.before.peak_bytes))


def use_room(
    programs: Sequence[Program], config: Config, cost: CostModel, profile: str, plans: list[Plan], processes: int = 1
) -> tuple[list[Plan], str]:
    """Plans that use memory which Paddle's baseline leaves free on the profile's device, if `tune` is on and they are faster; otherwise
    `plans`, the result of `make_plans` for the same arguments. Also returns a text about this memory, empty if there is nothing to
    report."""
    outcome, total_bytes = plans[0].outcome, cost.profile.memory_bytes
    budget = roomier(config, outcome)
    is_asked = config.tune == "on" or (config.tune == "auto" and target_of(profile) is GPU)
    if budget is None or outcome is None or outcome.before is None or not total_bytes or not is_asked:
        return plans, ""
    own_bytes, tenth_bytes = outcome.taken_bytes()[1], int(TENTH * outcome.before.peak_bytes)
    most_bytes = room_of(total_bytes)
    left = f"{cost.profile.device} has {size(total_bytes)}, of which Paddle's baseline takes {size(own_bytes)}"
    if not is_room_for(int(POOLS * tenth_bytes), own_bytes, most_bytes):
        return plans, f"{left}: a plan that holds a tenth more would take more than {size(most_bytes)}"
    if config.tune == "auto":
        return plans, f"{left}; `tune: on` also plans with a tenth more, as a run on GPUs does"
    try:
        found = make_plans(programs, msgspec.structs.replace(config, memory_budget=budget), cost, profile, processes)
    except BudgetError as error:  # of pools
        return plans, f"{left}; no plan that may hold {size(tenth_bytes)} more: {error}"
    other = found[0].outcome
    if other is None or other.plan.step_ns >= outcome.plan.step_ns:
        return plans, f"{left}; a plan that may hold {size(tenth_bytes)} more is not faster"
    if (taken_bytes := other.taken_bytes()[0]) > most_bytes:
        return plans, f"{left}; a plan that may hold {size(tenth_bytes)} more takes {size(taken_bytes)}"
    gain = 1 - other.plan.step_ns / outcome.plan.step_ns
    return found, (
        f"{left}; taken is a plan with memory_budget: {budget}, which holds {size(other.plan.peak_bytes)} and is {gain:.1%} faster than "
        f"within the memory of the baseline (simulated)"
    )
