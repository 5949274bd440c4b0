"""What a plan brings: Paddle's baseline and this one as simulated whole steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from interlace.cost_model import CostModel, Costs
from interlace.cost_model.profile import Errors
from interlace.ir import Program
from interlace.scheduler.simulate.simulator import Result

NOT_COMPARED = (
    "Not compared with Paddle's baseline: the other stages' plans are not known here, or a step would never end; "
    "`interlace check` on the plans of all ranks says what stands in the way."
)


class StageStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The step of equivalent ranks of a stage; parts as `scheduler/simulate/simulator.py` defines them.

    Attributes:
        joules: Energy of each of these ranks; 0 where the profile knows no power.
        mean_mhz: Their clock, mean over the step; 0 likewise.
    """

    stage: int
    ranks: tuple[int, ...]
    compute_ns: int
    exposed_ns: int
    bubble_ns: int
    host_ns: int
    hidden_ns: int
    peak_bytes: int
    pinned_bytes: int
    joules: float = 0.0
    mean_mhz: int = 0


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A simulated step of all ranks.

    Attributes:
        exposed_ns, bubble_ns: Means over the ranks.
        peak_bytes: Device memory of the fullest rank.
        joules: Energy of all ranks; 0 where the profile knows no power.
        stages: Equivalent ranks together, by stage.
    """

    step_ns: int
    exposed_ns: int
    bubble_ns: int
    peak_bytes: int
    stages: tuple[StageStep, ...] = ()
    joules: float = 0.0

    @classmethod
    def of(cls, result: Result, representative: Mapping[int, Sequence[int]] | None = None) -> Step:
        """The figures of a simulation with memory. `representative` has for a rank the ranks that it stands for, itself among them; what is
        not named there, as its program says."""
        equivalent: dict[tuple[Any, ...], list[int]] = {}
        for at, (program, rank) in enumerate(zip(result.input.programs, result.ranks, strict=True)):
            power = (round(result.joules[at], 3), round(result.mean_mhz(at))) if result.joules else (0.0, 0)
            figures = (
                rank.compute_ns,
                rank.exposed_comm_ns,
                rank.bubble_ns,
                rank.host_ns,
                rank.hidden_comm_ns,
                rank.peak_bytes,
                rank.pinned_bytes,
                *power,
            )
            equivalent.setdefault((program.pipeline.stage, *figures), []).extend((representative or {}).get(program.rank, program.ranks))
        stages = sorted(
            (StageStep(key[0], tuple(sorted(ranks)), *key[1:]) for key, ranks in equivalent.items()),
            key=lambda each: (each.stage, each.ranks),
        )
        count = max(1, sum(len(each.ranks) for each in stages))
        exposed, bubble = (sum(getattr(each, name) * len(each.ranks) for each in stages) // count for name in ("exposed_ns", "bubble_ns"))
        joules = round(sum(each.joules * len(each.ranks) for each in stages), 3)
        return cls(result.step_ns, exposed, bubble, max((each.peak_bytes for each in stages), default=0), tuple(stages), joules)


def errors_of(costs: Costs, programs: Sequence[Program]) -> Errors | None:
    """Of the profile's predictions, as far as gains of such programs were measured, in steps that were issued."""
    found = costs.profile.accuracy if isinstance(costs, CostModel) and not costs.is_launched else None
    if found is None:
        return None
    has_stages = any(program.pipeline.num_stages > 1 for program in programs)
    if costs.power() is None:
        errors = found.stages if has_stages else found.one_stage
    else:
        errors = found.stages_limited if has_stages else found.one_stage_limited
    return errors if errors.gains else None


class OtherLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan that planning looked at and that keeps another limit: what it holds on the fullest rank, and its simulated step. The best plan
    within that limit may be faster."""

    limit_bytes: int
    peak_bytes: int
    step_ns: int


class MemoryLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a plan might hold on a GPU, however fast its host.

    Attributes:
        whose: What gave the limit: what Paddle's baseline holds, that and what was asked for beyond it, or the budget.
        limit_bytes: The limit.
        peak_bytes: What the plan holds, counted alike, on its fullest rank.
        device_bytes: Memory of the profile's device; 0 where that is not known.
        more, less: A faster plan in a tenth more, and the fastest known in a tenth less; None where none is known.
    """

    whose: Literal["baseline", "beyond", "budget"]
    limit_bytes: int
    peak_bytes: int
    device_bytes: int = 0
    more: OtherLimit | None = None
    less: OtherLimit | None = None


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two steps by the same device profile and the same rules.

    Attributes:
        before: Of the plan compared with, which `against` names; None where there is none.
        errors: How far its predictions were off measured runs with, or without, pipeline stages; None where none were held against it.
        memory: What the plan might hold; None where there was no limit.
        refusal: Why Paddle does not run the plan compared with; empty where it does.
    """

    plan: Step
    profile: str
    before: Step | None = None
    against: str = "Paddle's baseline"
    errors: Errors | None = None
    memory: MemoryLimit | None = None
    refusal: str = ""

    def change(self) -> float:
        """By how many percent the step is longer than that compared with; negative is a gain."""
        return 100 * (self.plan.step_ns / self.before.step_ns - 1) if self.before and self.before.step_ns else 0.0
