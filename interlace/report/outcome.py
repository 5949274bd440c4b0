"""What a plan brings, in one sentence: Paddle's baseline and this one as simulated whole steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from interlace.cost_model import CostModel, Costs
from interlace.cost_model.profile import Errors
from interlace.ir import Program
from interlace.scheduler.simulate.simulator import Result
from interlace.units import ms, ms_figure, ranges, size

UNBALANCED = 0.02
"""Stages are told to be unbalanced where an even split would shorten a step by this part."""


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

    def imbalance(self) -> str:
        """Which stage has more to compute than the others, and what an even split would bring; empty where that is little.

        It is reckoned from computation alone: the fullest stage keeps its waiting and gets the mean of the stages to compute.

        >>> alike = dict(exposed_ns=0, bubble_ns=0, host_ns=0, hidden_ns=0, peak_bytes=0, pinned_bytes=0)
        >>> stages = tuple(StageStep(stage=k, ranks=(k,), compute_ns=ns, **alike) for k, ns in enumerate((191_000_000, 295_000_000)))
        >>> Step(300_000_000, 0, 0, 0, stages).imbalance()
        'Stages are unbalanced: stage 1 computes 295.000 ms of a step, stage 0 191.000 ms; with 243.000 ms on each, and the waiting of \
stage 1 as it is, a step would take 248.000 ms (-17.3 %).'
        """
        compute = {each.stage: max(other.compute_ns for other in self.stages if other.stage == each.stage) for each in self.stages}
        if len(compute) < 2:
            return ""
        fullest = max(compute, key=lambda stage: compute[stage])
        mean_ns = sum(compute.values()) // len(compute)
        saved_ns = compute[fullest] - mean_ns
        if saved_ns < UNBALANCED * self.step_ns:
            return ""
        others = [stage for stage in compute if stage != fullest]
        least, most = (ms_figure(each(compute[stage] for stage in others)) for each in (min, max))
        return (
            f"Stages are unbalanced: stage {fullest} computes {ms(compute[fullest])} of a step, stage{'s' * (len(others) > 1)} "
            f"{ranges(others)} {least if least == most else f'{least} to {most}'} ms; with {ms(mean_ns)} on each, and the waiting of "
            f"stage {fullest} as it is, a step would take {ms(self.step_ns - saved_ns)} "
            f"({-100 * saved_ns / self.step_ns:+.1f} %)."
        )

    @classmethod
    def of(cls, result: Result, representative: Mapping[int, Sequence[int]] | None = None) -> Step:
        """The figures of a simulation with memory.

        Args:
            result: The simulated step.
            representative: Rank -> the ranks that it stands for, itself among them; what is not named, as its program says.
        """
        alike: dict[tuple[int, ...], list[int]] = {}
        for program, rank in zip(result.input.programs, result.ranks, strict=True):
            figures = (
                rank.compute_ns,
                rank.exposed_comm_ns,
                rank.bubble_ns,
                rank.host_ns,
                rank.hidden_comm_ns,
                rank.peak_bytes,
                rank.pinned_bytes,
            )
            alike.setdefault((program.pipeline.stage, *figures), []).extend((representative or {}).get(program.rank, program.ranks))
        stages = sorted(
            (StageStep(key[0], tuple(sorted(ranks)), *key[1:]) for key, ranks in alike.items()), key=lambda each: (each.stage, each.ranks)
        )
        count = max(1, sum(len(each.ranks) for each in stages))
        exposed, bubble = (sum(getattr(each, name) * len(each.ranks) for each in stages) // count for name in ("exposed_ns", "bubble_ns"))
        return cls(result.step_ns, exposed, bubble, max((each.peak_bytes for each in stages), default=0), tuple(stages))


def errors_of(costs: Costs, programs: Sequence[Program]) -> Errors | None:
    """Of the profile's predictions, as far as gains of such programs were measured."""
    found = costs.profile.accuracy if isinstance(costs, CostModel) else None
    if found is None:
        return None
    errors = found.stages if any(program.pipeline.num_stages > 1 for program in programs) else found.one_stage
    return errors if errors.gains else None


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two steps by the same device profile and the same rules.

    Attributes:
        before: Of the plan compared with, which `against` names; None where there is none.
        plan: Of the plan.
        profile: The device profile that gave the times.
        errors: How far its predictions were off measured runs with, or without, pipeline stages; None where none were held against it.
    """

    plan: Step
    profile: str
    before: Step | None = None
    against: str = "Paddle's baseline"
    errors: Errors | None = None

    def sentence(self, measured: str = "", name: str = "This plan") -> str:
        """All of it in one sentence; `measured` says what a step really took, where steps have run, `name` what a plan alone is called.

        >>> one, other = Step(300_000_000, 9_000_000, 60_000_000, 3 << 30), Step(250_000_000, 2_000_000, 30_000_000, 7 << 29)
        >>> Outcome(other, "h200", one).sentence()
        "Paddle's baseline takes 300.000 ms a step, this plan 250.000 ms (-16.7 %, simulated with the profile h200): exposed communication \
9.000 -> 2.000 ms, bubble 60.000 -> 30.000 ms (means over ranks), peak memory 3.000 GiB -> 3.500 GiB (fullest rank)."
        """
        new, old = self.plan, self.before
        how = f"simulated with the profile {self.profile}" + (f"; {measured}" if measured else "")
        if old is None:
            return (
                f"{name} takes {ms_figure(new.step_ns)} ms a step ({how}): exposed communication {ms_figure(new.exposed_ns)} "
                f"ms, bubble {ms_figure(new.bubble_ns)} ms (means over ranks), peak memory {size(new.peak_bytes)} (fullest "
                "rank)."
            )
        return (
            f"{self.against[0].upper()}{self.against[1:]} takes {ms_figure(old.step_ns)} ms a step, this plan "
            f"{ms_figure(new.step_ns)} ms ({self.change():+.1f} %, {how}): exposed communication {ms_figure(old.exposed_ns)} -> "
            f"{ms_figure(new.exposed_ns)} ms, bubble {ms_figure(old.bubble_ns)} -> {ms_figure(new.bubble_ns)} ms (means over ranks), "
            f"peak memory {size(old.peak_bytes)} -> {size(new.peak_bytes)} (fullest rank).{self._caution()}"
        )

    def _caution(self) -> str:
        """How far gains, where one is predicted, and steps that were measured are from those predicted with this profile."""
        found = self.errors
        if found is None:
            return ""
        off = f"{100 * found.step_median:.1f} % off"
        if self.change() >= 0:
            return f" Predicted steps were {off} the measured ones."
        return (
            f" Predicted gains were {found.gain_ratio:.2f} times the measured ones (median of {found.gains}, {found.right_sign} with the "
            f"right sign), steps {off}."
        )

    def change(self) -> float:
        """By how many percent the step is longer than that compared with; negative is a gain."""
        return 100 * (self.plan.step_ns / self.before.step_ns - 1) if self.before and self.before.step_ns else 0.0
