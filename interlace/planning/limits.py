"""How much device memory plans may hold."""

from __future__ import annotations

from dataclasses import dataclass

from interlace.config import NO_LIMIT, Beyond
from interlace.errors import BudgetError, PlanError
from interlace.planning.peers import first_other
from interlace.planning.tasks import baseline_peak
from interlace.planning.world import World
from interlace.scheduler.whole_step.search import Numbers

SLACK, ROUNDED = 1.01, 32 << 20
"""A peak counts as that of Paddle's baseline up to this factor, and nothing is done about these bytes more: allocators round by more."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Under a memory budget.

    Attributes:
        budget: Device bytes that every rank must keep on a GPU.
        levels: How much each stage recomputes (`ChooseRecompute.level_index`) with which Paddle's baseline order keeps the budget, for
            forms by name; then what leaves more and more of the excess to offload. Empty where the passes say it.
    """

    budget: int
    levels: tuple[Numbers, ...] = ()


def budget_bytes(world: World) -> int:
    """The memory budget in bytes, for all ranks the least of those that are configured; 0 without one. Raises BudgetError where a fraction
    is asked for and what Paddle's baseline holds is not known, PlanError where ranks have budgets of different sorts."""
    asked = [each.memory_budget for each in world.facts]
    sizes = [each for each in asked if isinstance(each, int)]
    if len(sizes) == len(asked):
        return min(sizes)
    first, other = asked[0], first_other(asked)
    if other is not None:
        raise PlanError(
            f"ranks 0 and {other} planned with different options: memory_budget {first} and {asked[other]}; "
            "give every rank the same configuration"
        )
    if not isinstance(first, float):
        return 0
    held = baseline_bytes(world)
    if not held:
        raise BudgetError(
            f"memory_budget {first:g} of what Paddle's baseline holds: that is not known, its step cannot be simulated; "
            "give bytes, such as 70GB"
        )
    return max(1, int(first * held))  # less than a byte is a budget too, and refused as one


def baseline_bytes(world: World) -> int:
    """Device bytes that Paddle's baseline holds on its fullest rank on a GPU; 0 where that is not known."""
    return max((each or 0 for each in world.known(baseline_peak)), default=0)


def beyond_baseline(world: World, peak_bytes: int) -> int:
    """Device bytes that a rank may hold without a memory budget, where Paddle's baseline holds so many on its fullest one: as many, as
    `SLACK` counts, and those that may be held beyond. `is_unlimited` says where it is no limit."""
    return int(SLACK * peak_bytes) + bytes_beyond(world)


def bytes_beyond(world: World) -> int:
    """Device bytes that a rank may hold beyond what Paddle's baseline does."""
    given = world.facts[0].memory_budget
    return given.more_bytes if isinstance(given, Beyond) else 0


def is_unlimited(world: World) -> bool:
    """Whether plans may hold as much as they like."""
    return world.facts[0].memory_budget == NO_LIMIT
