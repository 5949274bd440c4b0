"""What a plan brings, in one sentence: Paddle's own plan and this one as simulated whole steps."""

from __future__ import annotations

import msgspec

from interlace.scheduler.simulate.simulator import Result
from interlace.units import ms_figure, size


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A simulated step of all ranks.

    Attributes:
        exposed_ns, bubble_ns: Means over the ranks.
        peak_bytes: Device memory of the fullest rank.
    """

    step_ns: int
    exposed_ns: int
    bubble_ns: int
    peak_bytes: int

    @classmethod
    def of(cls, result: Result) -> Step:
        """The figures of a simulation with memory."""
        count = max(1, len(result.ranks))
        exposed, bubble = (sum(getattr(rank, name) for rank in result.ranks) // count for name in ("exposed_comm_ns", "bubble_ns"))
        return cls(result.step_ns, exposed, bubble, max((rank.peak_bytes for rank in result.ranks), default=0))


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two steps by the same device profile and the same rules.

    Attributes:
        before: Of the plan compared with, which `against` names; None where there is none.
        plan: Of the plan.
        profile: The device profile that gave the times.
    """

    plan: Step
    profile: str
    before: Step | None = None
    against: str = "Paddle's own plan"

    def sentence(self) -> str:
        """All of it in one sentence.

        >>> one, other = Step(300_000_000, 9_000_000, 60_000_000, 3 << 30), Step(250_000_000, 2_000_000, 30_000_000, 7 << 29)
        >>> Outcome(other, "h200", one).sentence()
        "Paddle's own plan takes 300.000 ms a step, this plan 250.000 ms (-16.7 %, simulated with the profile h200): exposed communication \
9.000 -> 2.000 ms, bubble 60.000 -> 30.000 ms (means over ranks), peak memory 3.000 GiB -> 3.500 GiB (fullest rank)."
        """
        new, old = self.plan, self.before
        how = f"simulated with the profile {self.profile}"
        if old is None:
            return (f"This plan takes {ms_figure(new.step_ns)} ms a step ({how}): exposed communication {ms_figure(new.exposed_ns)} "
                    f"ms, bubble {ms_figure(new.bubble_ns)} ms (means over ranks), peak memory {size(new.peak_bytes)} (fullest "
                    "rank).")  # fmt: skip
        return (f"{self.against[0].upper()}{self.against[1:]} takes {ms_figure(old.step_ns)} ms a step, this plan "
                f"{ms_figure(new.step_ns)} ms ({self.change():+.1f} %, {how}): exposed communication {ms_figure(old.exposed_ns)} -> "
                f"{ms_figure(new.exposed_ns)} ms, bubble {ms_figure(old.bubble_ns)} -> {ms_figure(new.bubble_ns)} ms (means over ranks), "
                f"peak memory {size(old.peak_bytes)} -> {size(new.peak_bytes)} (fullest rank).")  # fmt: skip

    def change(self) -> float:
        """By how many percent the step is longer than that compared with; negative is a gain."""
        return 100 * (self.plan.step_ns / self.before.step_ns - 1) if self.before and self.before.step_ns else 0.0
