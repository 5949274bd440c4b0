"""The memory limit of a plan, and what a tenth more or less memory would bring, judged by plans that the search looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from interlace.cost_model import CostModel
from interlace.planning.outcome import MemoryLimit, OtherLimit
from interlace.planning.proposals import Tried
from interlace.planning.variants import drafted
from interlace.planning.world import Draft, Made, World, only_if_possible

TENTH = 0.1
"""Share of a memory limit, or of what Paddle's baseline holds; more would gain little, and may not be available."""
MOST_ASKED = 4
"""Number of drafts, fastest first, whose peak on a GPU is determined; each costs one simulation per rank."""
WORTH = 0.001
"""A step counts as faster if it is shorter by at least this share."""


def memory_limit(
    world: World,
    made: Made,
    limit_bytes: int,
    whose: Literal["baseline", "beyond", "budget"],
    tried: Tried | None = None,
    pool_budget: int = 0,
) -> MemoryLimit | None:
    """The limit of the plan that was decided on, with what other limits would bring; None if the plan's peak or step is not known. To be
    called after all decisions, as it makes drafts. `tried` is what the search without a budget proposed, if there was one. Plans whose
    pools exceed `pool_budget` (0 for no limit) are left out.

    If no known draft fits, more are made: the schedule that the coarse model finds best with a tenth more, and, if the plan's passes had
    limits, the same passes with limits a tenth higher or lower.
    """
    held, took = gpu_peak(world, made), world.step_ns(made)
    if held is None or took is None:
        return None
    device_bytes = world.cost.profile.memory_bytes if isinstance(world.cost, CostModel) else 0
    others = Others(world, made, limit_bytes, held, took, tried, pool_budget)
    return MemoryLimit(whose, limit_bytes, held, device_bytes, others.more(), others.less())


def gpu_peak(world: World, made: Made) -> int | None:
    """Peak device bytes of the fullest rank on a GPU, among those with a program; None if one of these is not known."""
    peaks = [peak for peak, number in zip(world.gpu_peaks(made), made.programs, strict=True) if number >= 0]
    known = [peak for peak in peaks if peak is not None]
    return max(known) if known and len(known) == len(peaks) else None


class Others:
    """What other limits would bring, compared with a plan that holds `held` bytes on its fullest rank and whose step takes `took`
    nanoseconds. `tried` and `pool_budget` as in `memory_limit`."""

    def __init__(self, world: World, made: Made, limit_bytes: int, held: int, took: int, tried: Tried | None, pool_budget: int) -> None:
        self.world, self.made, self.limit_bytes, self.held, self.took, self.tried = world, made, limit_bytes, held, took, tried
        self.tenth, self.pool_budget = int(TENTH * limit_bytes), pool_budget
        self.has_limits = any(made.memory_limits)

    def more(self) -> OtherLimit | None:
        """The fastest plan that exceeds the limit by at most a tenth; None if none is known to be faster than this plan."""
        most = self.limit_bytes + self.tenth

        def is_more(peak: int, step_ns: int) -> bool:
            return self.limit_bytes < peak <= most and step_ns <= (1 - WORTH) * self.took

        found = self._fastest(self.world.drafts, most, is_more)
        if found is None and self.tried is not None:
            known = len(self.world.drafts)
            with only_if_possible():
                self.tried.draft_in(most)
            found = self._fastest(self.world.drafts[known:], most, is_more)
        if found is None and self.has_limits:
            found = self._fastest(self._with_room(self.tenth), most, is_more)
        return found

    def less(self) -> OtherLimit | None:
        """The fastest known plan within a tenth less; this plan itself if it needs no more."""
        least = self.limit_bytes - self.tenth
        if self.held <= least:
            return OtherLimit(least, self.held, self.took)

        def is_less(peak: int, step_ns: int) -> bool:
            return peak <= least and step_ns >= self.took

        found = self._fastest(self.world.drafts, least, is_less)
        return self._fastest(self._with_room(-self.tenth), least, is_less) if found is None and self.has_limits else found

    def _fastest(self, drafts: Iterable[Draft], limit_bytes: int, fits: Callable[[int, int], bool]) -> OtherLimit | None:
        """The fastest of the drafts whose peak and step satisfy `fits`, among `MOST_ASKED` candidates."""
        world, asked = self.world, 0
        steps = {draft.made.programs: (world.step_ns(draft.made, draft.later), draft.made) for draft in drafts}
        for step_ns, made in sorted(((step_ns, made) for step_ns, made in steps.values() if step_ns is not None), key=lambda each: each[0]):
            if asked == MOST_ASKED:
                break
            if not fits(limit_bytes, step_ns) or max(world.order_peaks(made)) > limit_bytes:
                continue
            asked += 1
            if self.pool_budget and (world.pool_bytes(made) or 0) > self.pool_budget:
                continue
            if (peak := gpu_peak(world, made)) is not None and fits(peak, step_ns):
                return OtherLimit(limit_bytes, peak, step_ns)
        return None

    def _with_room(self, more_bytes: int) -> list[Draft]:
        """A draft of the plan's own passes with limits changed by `more_bytes`; empty if it cannot be made."""
        limits = tuple(max(1, room + more_bytes) if room else None for room in self.made.memory_limits)
        with only_if_possible():  # offload raises if the limit is too low
            return [Draft(self.world.run(drafted(self.made.passes), limits), self.made.passes.passes)]
        return []
