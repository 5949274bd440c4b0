"""How much device memory plans may hold."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from interlace.config import NO_LIMIT, Beyond
from interlace.errors import BudgetError, PlanError
from interlace.planning.peers import first_other
from interlace.planning.tasks import baseline_peak
from interlace.planning.world import World
from interlace.scheduler.whole_step.search import Numbers

SLACK, ROUNDED = 1.01, 32 << 20
"""A peak counts as no higher than that of Paddle's baseline up to this factor, and an excess of up to these bytes is ignored: allocators
round by more."""

ROOM = 0.9
"""Share of a device's memory that pools of plans may take: contexts, libraries and workspaces of kernels need some."""
NOT_IN_POOLS = 2_500_000_000
"""Device bytes that are kept free for these on a small device, of which at most half: contexts, communicators and libraries took 2.5 GB on
two H200s."""


def room_of(total_bytes: int) -> int:
    """Device bytes that pools of plans may take on a device with this much memory.

    >>> [room_of(total * 10**9) // 10**8 for total in (80, 10, 4)]
    [720, 75, 20]
    """
    return min(int(ROOM * total_bytes), max(total_bytes - NOT_IN_POOLS, total_bytes // 2))


def default_pool_budget(total_bytes: int, own_bytes: int) -> int:
    """Device bytes that pools may take unless a pool budget is given: `room_of` the device, or what those of Paddle's baseline take, if
    that is more, by up to half of what would stay free. Without limit if the device's memory is not known (0).

    >>> [default_pool_budget(80 * 10**9, own * 10**9) // 10**9 for own in (60, 75, 79)]
    [72, 75, 72]
    >>> default_pool_budget(0, 800) == sys.maxsize
    True
    """
    room = room_of(total_bytes) if total_bytes else sys.maxsize
    return own_bytes if room < own_bytes <= (room + total_bytes) // 2 else room


@dataclass(frozen=True, slots=True)
class Limit:
    """A memory budget.

    Attributes:
        budget: Device bytes that no rank may exceed on a GPU.
        levels: Alternatives for how much each stage recomputes (`ChooseRecompute.level_index`), from as much as keeps the budget in
            Paddle's baseline order to less and less, which leaves the rest of the excess to offload. Empty if the passes fix it.
    """

    budget: int
    levels: tuple[Numbers, ...] = ()


def budget_bytes(world: World) -> int:
    """The memory budget in bytes, the smallest of all ranks; 0 without one. Raises BudgetError if it is a fraction of what Paddle's
    baseline holds and that is not known, PlanError if the ranks' budgets differ other than in bytes."""
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
    return max(1, int(first * held))  # 0 would mean no budget


def baseline_bytes(world: World) -> int:
    """Peak device bytes of Paddle's baseline on its fullest rank, on a GPU; 0 if not known."""
    return max((each or 0 for each in world.known(baseline_peak)), default=0)


def beyond_baseline(world: World, peak_bytes: int) -> int:
    """Device bytes that a rank may hold without a memory budget: `peak_bytes`, the peak of Paddle's baseline on its fullest rank, times
    `SLACK`, plus `bytes_beyond`. Does not apply if `is_unlimited`."""
    return int(SLACK * peak_bytes) + bytes_beyond(world)


def bytes_beyond(world: World) -> int:
    """Device bytes that a rank may hold beyond the peak of Paddle's baseline; 0 unless the configuration allows some."""
    given = world.facts[0].memory_budget
    return given.more_bytes if isinstance(given, Beyond) else 0


def is_unlimited(world: World) -> bool:
    """Whether the configuration sets no limit on memory."""
    return world.facts[0].memory_budget == NO_LIMIT
