"""What a plan brings, in one sentence: Paddle's own plan and this one as simulated whole steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from interlace.scheduler.simulate.simulator import Result
from interlace.units import ms_figure, size


class StageStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The step of ranks of a stage that are alike; parts as `scheduler/simulate/simulator.py` defines them."""

    stage: int
    ranks: tuple[int, ...]
    compute_ns: int
    exposed_ns: int
    bubble_ns: int
    host_ns: int
    hidden_ns: int
    peak_bytes: int
    pinned_bytes: int


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A simulated step of all ranks.

    Attributes:
        exposed_ns, bubble_ns: Means over the ranks.
        peak_bytes: Device memory of the fullest rank.
        stages: Alike ranks together, by stage.
    """

    step_ns: int
    exposed_ns: int
    bubble_ns: int
    peak_bytes: int
    stages: tuple[StageStep, ...] = ()

    @classmethod
    def of(cls, result: Result, stands_for: Mapping[int, Sequence[int]] | None = None) -> Step:
        """The figures of a simulation with memory.

        Args:
            result: The simulated step.
            stands_for: Rank -> the ranks that it stands for, itself among them; what is not named, as its program says.
        """
        alike: dict[tuple[int, ...], list[int]] = {}
        for program, rank in zip(result.input.programs, result.ranks, strict=True):
            figures = (rank.compute_ns, rank.exposed_comm_ns, rank.bubble_ns, rank.host_ns, rank.hidden_comm_ns, rank.peak_bytes,
                       rank.pinned_bytes)  # fmt: skip
            alike.setdefault((program.pipeline.stage, *figures), []).extend((stands_for or {}).get(program.rank, program.ranks))
        stages = sorted((StageStep(key[0], tuple(sorted(ranks)), *key[1:]) for key, ranks in alike.items()),
                        key=lambda each: (each.stage, each.ranks))  # fmt: skip
        count = max(1, sum(len(each.ranks) for each in stages))
        exposed, bubble = (sum(getattr(each, name) * len(each.ranks) for each in stages) // count for name in ("exposed_ns", "bubble_ns"))
        return cls(result.step_ns, exposed, bubble, max((each.peak_bytes for each in stages), default=0), tuple(stages))


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

    def sentence(self, measured: str = "", name: str = "This plan") -> str:
        """All of it in one sentence; `measured` says what a step really took, where steps have run, `name` what a plan alone is called.

        >>> one, other = Step(300_000_000, 9_000_000, 60_000_000, 3 << 30), Step(250_000_000, 2_000_000, 30_000_000, 7 << 29)
        >>> Outcome(other, "h200", one).sentence()
        "Paddle's own plan takes 300.000 ms a step, this plan 250.000 ms (-16.7 %, simulated with the profile h200): exposed communication \
9.000 -> 2.000 ms, bubble 60.000 -> 30.000 ms (means over ranks), peak memory 3.000 GiB -> 3.500 GiB (fullest rank)."
        """
        new, old = self.plan, self.before
        how = f"simulated with the profile {self.profile}" + (f"; {measured}" if measured else "")
        if old is None:
            return (f"{name} takes {ms_figure(new.step_ns)} ms a step ({how}): exposed communication {ms_figure(new.exposed_ns)} "
                    f"ms, bubble {ms_figure(new.bubble_ns)} ms (means over ranks), peak memory {size(new.peak_bytes)} (fullest "
                    "rank).")  # fmt: skip
        return (f"{self.against[0].upper()}{self.against[1:]} takes {ms_figure(old.step_ns)} ms a step, this plan "
                f"{ms_figure(new.step_ns)} ms ({self.change():+.1f} %, {how}): exposed communication {ms_figure(old.exposed_ns)} -> "
                f"{ms_figure(new.exposed_ns)} ms, bubble {ms_figure(old.bubble_ns)} -> {ms_figure(new.bubble_ns)} ms (means over ranks), "
                f"peak memory {size(old.peak_bytes)} -> {size(new.peak_bytes)} (fullest rank).")  # fmt: skip

    def change(self) -> float:
        """By how many percent the step is longer than that compared with; negative is a gain."""
        return 100 * (self.plan.step_ns / self.before.step_ns - 1) if self.before and self.before.step_ns else 0.0
