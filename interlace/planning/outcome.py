"""The outcome of a plan: the simulated whole steps of Paddle's baseline and of the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from interlace.cost_model import CostModel, Costs
from interlace.cost_model.profile import Errors
from interlace.ir import Program
from interlace.ir.target import Target
from interlace.scheduler.memory.pools import reserved_bytes
from interlace.scheduler.simulate.simulator import Result

NOT_COMPARED = (
    "Not compared with Paddle's baseline: the other stages' plans are not known here, or a step would never end; "
    "`interlace check` on the plans of all ranks says what stands in the way."
)


class StageStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The step of ranks of a stage with equal figures; the parts of the step are defined in `scheduler/simulate/simulator.py`.

    Attributes:
        joules: Energy of each of these ranks; 0 if the profile has no power.
        mean_mhz: Their mean clock over the step; 0 if the profile has no power.
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
        exposed_ns, bubble_ns: Means over all ranks.
        peak_bytes: Peak device memory of the fullest rank.
        joules: Energy of all ranks; 0 if the profile has no power.
        stages: Ranks of one stage with equal figures together, sorted by stage.
        spare_ns: What a script may take between steps beyond the profile's time for it without a longer step; None if that is not known.
    """

    step_ns: int
    exposed_ns: int
    bubble_ns: int
    peak_bytes: int
    stages: tuple[StageStep, ...] = ()
    joules: float = 0.0
    spare_ns: int | None = None

    @classmethod
    def of(cls, result: Result, representative: Mapping[int, Sequence[int]] | None = None) -> Step:
        """The figures of a simulation with memory. `representative`: simulated rank -> the ranks that it represents, including itself; for
        ranks that are not in it, `Program.ranks`."""
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
        peak = max((each.peak_bytes for each in stages), default=0)
        return cls(result.step_ns, exposed, bubble, peak, tuple(stages), joules, result.spare_ns)


def errors_of(costs: Costs, programs: Sequence[Program]) -> Errors | None:
    """The errors of the profile's predictions for such programs (with or without pipeline stages); None if no gains of such were measured.
    Only for steps whose operations the host issues."""
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
    """A plan within another limit that planning looked at: its peak on the fullest rank, and its simulated step. The best plan within that
    limit may be faster."""

    limit_bytes: int
    peak_bytes: int
    step_ns: int


class MemoryLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limit on what a plan may hold on a GPU, however fast its host.

    Attributes:
        whose: Origin of the limit: the peak of Paddle's baseline, that plus what was asked for beyond it, or the budget.
        limit_bytes: The limit.
        peak_bytes: Peak of the plan on its fullest rank, counted in the same way.
        device_bytes: Memory of the device that plans count on (in a run what was free before the first plan); 0 if not known.
        more, less: A faster plan within a tenth more, and the fastest known within a tenth less; None if none is known.
    """

    whose: Literal["baseline", "beyond", "budget"]
    limit_bytes: int
    peak_bytes: int
    device_bytes: int = 0
    more: OtherLimit | None = None
    less: OtherLimit | None = None


class Pools(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Device bytes that parameters and allocator pools take on the fullest rank, free blocks included
    (`interlace/scheduler/memory/pools.py`): of the plan, and of the one compared with; 0 if there is none. With the profile's times of the
    host; a faster one may take more. `limit_bytes`: `Plan.pool_budget`."""

    plan_bytes: int
    before_bytes: int
    limit_bytes: int = 0

    @classmethod
    def of(cls, plan: Result, before: Result | None, target: Target, limit_bytes: int = 0) -> Pools | None:
        """Those of two simulations by these rules; None if the target's pools are not simulated."""
        taken = reserved_bytes(plan.memory, target)
        return None if taken is None else cls(taken, reserved_bytes(before.memory, target) or 0 if before else 0, limit_bytes)


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The simulated steps of a plan and of one that it is compared with, by the same device profile and the same rules.

    Attributes:
        plan: The step of the plan.
        profile: Name of the device profile.
        before: The step of the plan compared with, whose name is `against`; None if there is none.
        errors: How far the profile's predictions were from measured runs of the same kind (with or without pipeline stages); None if it was
            not compared with any.
        memory: The memory limit of the plan; None without one.
        refusal: Why Paddle cannot run the plan compared with; empty if it can.
        pools: What allocator pools take in both steps; see `Pools.of`.
    """

    plan: Step
    profile: str
    before: Step | None = None
    against: str = "Paddle's baseline"
    errors: Errors | None = None
    memory: MemoryLimit | None = None
    refusal: str = ""
    pools: Pools | None = None

    def taken_bytes(self) -> tuple[int, int]:
        """Device bytes of the plan and of the one compared with: what their pools take, or their peaks if that is not known."""
        if self.pools is not None:
            return self.pools.plan_bytes, self.pools.before_bytes
        return self.plan.peak_bytes, self.before.peak_bytes if self.before else 0

    def change(self) -> float:
        """Percentage by which the step is longer than the one compared with; negative for a gain, 0 if there is none to compare with."""
        return 100 * (self.plan.step_ns / self.before.step_ns - 1) if self.before and self.before.step_ns else 0.0
