"""Comparison of the whole step by Paddle's baseline and by our plan, for the end of `explain` and the page of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from interlace.cost_model import Costs
from interlace.errors import PlanError
from interlace.ir import Program
from interlace.ir.target import Target, as_graph, target_of, with_paddles_jobs
from interlace.passes.pipeline import PassReport
from interlace.planning.baseline import BASELINE, refusal_of
from interlace.planning.outcome import MemoryLimit, Outcome, Pools, Step, errors_of
from interlace.planning.tasks import baseline_program, finished_plan
from interlace.planning.world import World
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.simulator import Result, simulate


class Member(NamedTuple):
    """A rank's program in Paddle's baseline and in our plan, and the reports of the passes that made the plan."""

    baseline: Program
    plan: Program
    reports: tuple[PassReport, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The ranks that are simulated in place of all.

    Attributes:
        members: One rank for each class of equivalent ranks, or the only rank that is known.
        representative: Every rank of the world -> the rank of the member that represents it; empty if all other ranks are assumed to be
            always ready.
        profile: Name of the device profile.
        memory: The memory limit of the plan; None without one.
        pool_budget: See `Plan`.
    """

    members: tuple[Member, ...]
    representative: dict[int, int]
    profile: str
    memory: MemoryLimit | None = None
    pool_budget: int = 0

    def outcome(self, costs: Costs) -> Outcome | None:
        """Both simulated steps; None if one would never end (`interlace check` shows where it stalls)."""
        try:
            baseline, plan = self.results(costs)
        except PlanError:
            return None
        steps = (Step.of(each, self.equivalent_ranks()) for each in (plan, baseline))
        refusal = refusal_of(each.baseline for each in self.members)
        errors = errors_of(costs, plan.input.programs)
        pools = Pools.of(plan, baseline, self.target(costs), self.pool_budget)
        return Outcome(next(steps), self.profile, next(steps), BASELINE, errors, self.memory, refusal, pools)

    def equivalent_ranks(self) -> dict[int, list[int]]:
        """Rank of a member -> the ranks that it represents."""
        return {rank: [each for each, other in self.representative.items() if other == rank] for rank in self.representative.values()}

    def target(self, costs: Costs) -> Target:
        """The execution rules of the plan."""
        return as_graph(target_of(self.profile)) if costs.is_launched else target_of(self.profile)

    def results(self, costs: Costs) -> tuple[Result, Result]:
        """Simulated steps of the baseline, whose operations the host always issues, and of the plan, which may be launched as a graph.
        Raises PlanError if one would never end."""
        target = target_of(self.profile)
        options = Options.of(target, peers_ready=not self.representative, representative=self.representative)
        baseline = simulate([each.baseline for each in self.members], costs.issued(), options, target=with_paddles_jobs(target))
        return baseline, simulate([each.plan for each in self.members], costs, options, target=self.target(costs))


def compare(world: World, profile: str, memory: MemoryLimit | None = None, pool_budget: int = 0) -> Comparison | None:
    """Compare the finished plans of a world with Paddle's baseline; None if other stages' plans are unknown, or the plans have no jobs."""
    if not world.is_whole and world.captured.pipeline.num_stages > 1:
        return None
    baseline, finished = (world.map(each, ranks=world.firsts) for each in (baseline_program, finished_plan))
    members = [Member(baseline[rank].program, finished[rank][0].program, finished[rank][1]) for rank in world.firsts]
    if not all(each.plan.jobs for each in members):
        return None
    return Comparison(tuple(members), world.representative, profile, memory, pool_budget)
