"""What a plan might hold, and what a tenth more or less memory brings, by plans that the search looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

from interlace.cost_model import CostModel
from interlace.errors import InterlaceError
from interlace.planning.outcome import MemoryLimit, OtherLimit
from interlace.planning.proposals import Tried
from interlace.planning.variants import drafted
from interlace.planning.world import Draft, LinkError, Made, World

TENTH = 0.1
"""Part of a limit of memory, or of what Paddle's baseline holds: more gains little, and may not be there."""
MOST_ASKED = 4
"""Drafts, the fastest first, of which is asked what a GPU holds with them: that is a simulation of a rank each."""
WORTH = 0.001
"""A step counts as faster from this part on."""


def memory_limit(
    world: World, made: Made, limit_bytes: int, whose: Literal["baseline", "beyond", "budget"], tried: Tried | None = None
) -> MemoryLimit | None:
    """The limit of the plan that was decided on, with what others bring; asked once nothing more is decided, as it makes drafts. None where
    what the plan holds, or its step, is not known. `tried` is what the search without a budget proposed, if there was one.

    Where no draft says it, one more is made, or two: the schedule that the coarse model finds best in a tenth more, and the plan's own
    passes with a tenth more, or less, room where they had a limit.
    """
    held, took = gpu_peak(world, made), world.step_ns(made)
    if held is None or took is None:
        return None
    device_bytes = world.cost.profile.memory_bytes if isinstance(world.cost, CostModel) else 0
    others = Others(world, made, limit_bytes, held, took, tried)
    return MemoryLimit(whose, limit_bytes, held, device_bytes, others.more(), others.less())


def gpu_peak(world: World, made: Made) -> int | None:
    """Device bytes of the fullest rank on a GPU, of those that have a program; None where that is not known of one."""
    peaks = [peak for peak, number in zip(world.gpu_peaks(made), made.programs, strict=True) if number >= 0]
    known = [peak for peak in peaks if peak is not None]
    return max(known) if known and len(known) == len(peaks) else None


class Others:
    """What other limits bring than that of a plan which holds `held` on its fullest rank and takes `took` nanoseconds. `tried` as in
    `memory_limit`."""

    def __init__(self, world: World, made: Made, limit_bytes: int, held: int, took: int, tried: Tried | None) -> None:
        self.world, self.made, self.limit_bytes, self.held, self.took, self.tried = world, made, limit_bytes, held, took, tried
        self.tenth = int(TENTH * limit_bytes)
        self.has_limits = any(made.memory_limits)

    def more(self) -> OtherLimit | None:
        """The fastest that needs more than the limit, and a tenth more at most; None where none is known to be faster than the plan."""
        most = self.limit_bytes + self.tenth

        def is_more(peak: int, step_ns: int) -> bool:
            return self.limit_bytes < peak <= most and step_ns <= (1 - WORTH) * self.took

        found = self._fastest(self.world.drafts, most, is_more)
        if found is None and self.tried is not None:
            known = len(self.world.drafts)
            with _only_told():
                self.tried.draft_in(most)
            found = self._fastest(self.world.drafts[known:], most, is_more)
        if found is None and self.has_limits:
            found = self._fastest(self._with_room(self.tenth), most, is_more)
        return found

    def less(self) -> OtherLimit | None:
        """The fastest in a tenth less; the plan itself where it needs no more."""
        least = self.limit_bytes - self.tenth
        if self.held <= least:
            return OtherLimit(least, self.held, self.took)

        def is_less(peak: int, step_ns: int) -> bool:
            return peak <= least and step_ns >= self.took

        found = self._fastest(self.world.drafts, least, is_less)
        return self._fastest(self._with_room(-self.tenth), least, is_less) if found is None and self.has_limits else found

    def _fastest(self, drafts: Iterable[Draft], limit_bytes: int, fits: Callable[[int, int], bool]) -> OtherLimit | None:
        """The fastest of some drafts that fits, asked of a few."""
        world, asked = self.world, 0
        steps = {draft.made.programs: (world.step_ns(*draft), draft.made) for draft in drafts}
        for step_ns, made in sorted(((step_ns, made) for step_ns, made in steps.values() if step_ns is not None), key=lambda each: each[0]):
            if asked == MOST_ASKED:
                break
            if not fits(limit_bytes, step_ns) or max(world.order_peaks(made)) > limit_bytes:
                continue
            asked += 1
            if (peak := gpu_peak(world, made)) is not None and fits(peak, step_ns):
                return OtherLimit(limit_bytes, peak, step_ns)
        return None

    def _with_room(self, more_bytes: int) -> list[Draft]:
        """A draft of the plan's own passes with so much more room; none where they cannot do with it."""
        limits = tuple(max(1, room + more_bytes) if room else None for room in self.made.memory_limits)
        with _only_told():  # offload refuses what it cannot do
            return [Draft(self.world.run(drafted(self.made.passes), limits), self.made.passes.passes)]
        return []


@contextmanager
def _only_told() -> Iterator[None]:
    """Go on without a draft that cannot be made: the plan is decided on, and this is said beside it."""
    try:
        yield
    except LinkError:
        raise
    except InterlaceError:
        return
