"""The whole step by Paddle's own plan and by ours: what `explain` ends with, and what the page of a plan shows."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from interlace.cost_model import CostModel, Costs
from interlace.errors import PlanError
from interlace.ir import Program
from interlace.passes.peers import Peers, gather, stand_ins
from interlace.passes.pipeline import PassReport
from interlace.planning.stock import STOCK, stock_plan
from interlace.report.outcome import Outcome, Step
from interlace.report.sweep import Sweep
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.simulator import Result, simulate
from interlace.scheduler.target import target_of, with_paddles_jobs


class Member(msgspec.Struct, frozen=True, weakref=True):
    """A rank by Paddle's own plan and by ours, and what the passes said of ours."""

    stock: Program
    plan: Program
    reports: tuple[PassReport, ...]


_of_this_process: WeakValueDictionary[bytes, Member] = WeakValueDictionary()
"""What ranks of this process give, for as long as they hold it: tables that follow from it are made once."""


class _Said(msgspec.Struct, frozen=True):
    """What rank 0 tells."""

    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The ranks that stand for all.

    Attributes:
        members: One rank of each stage, or the only rank that is known.
        stands_for: Every rank of the world -> the member's rank; empty where all other ranks are assumed to be always ready.
        profile: The device profile's name.
        memory_budget: Device bytes that the plan was to stay under; 0 without a budget.
    """

    members: tuple[Member, ...]
    stands_for: dict[int, int]
    profile: str
    memory_budget: int = 0

    def outcome(self, costs: Costs) -> Outcome | None:
        """Both steps; None where one would never end (`interlace check` shows where)."""
        try:
            stock, plan = self._results(costs)
        except PlanError:
            return None
        return Outcome(Step.of(plan, self._alike()), self.profile, Step.of(stock, self._alike()), STOCK)

    def page(self, costs: CostModel, measured: str = "", sweep: Sweep | None = None) -> Any:
        """The data of the plan's page; `measured` says what a step really took. Raises PlanError where a step would never end."""
        from interlace.report.page.build import OURS, Given, Simulated, build_page

        alike = self._alike()
        stock, plan = (Simulated(name, result, alike) for name, result in zip((STOCK, OURS), self._results(costs), strict=True))
        reports = {member.plan.rank: member.reports for member in self.members}
        return build_page(plan, stock, reports, Given(self.profile, costs, target_of(self.profile).name), self.memory_budget,
                          measured, sweep)  # fmt: skip

    def _alike(self) -> dict[int, list[int]]:
        """Member's rank -> the ranks that it stands for."""
        return {rank: [each for each, other in self.stands_for.items() if other == rank] for rank in self.stands_for.values()}

    def _results(self, costs: Costs) -> tuple[Result, Result]:
        target = target_of(self.profile)
        options = Options.of(target, peers_ready=not self.stands_for, stands_for=self.stands_for)
        stock = simulate([each.stock for each in self.members], costs, options, target=with_paddles_jobs(target))
        return stock, simulate([each.plan for each in self.members], costs, options, target=target)


def compare(captured: Program, planned: Program, reports: Sequence[PassReport], costs: Costs, profile: str, memory_budget: int = 0,
            peers: Peers | None = None) -> tuple[Comparison | None, Outcome | None]:  # fmt: skip
    """Paddle's own plan beside a rank's plan, by the whole step; rank 0 simulates it and tells the others.

    Returns:
        What was compared, on rank 0 alone, and what came out, on every rank; None where the other stages' plans are not known here.
    """
    if not planned.jobs or (peers is None and planned.pipeline.num_stages > 1):
        return None, None
    stands_for = stand_ins(captured, peers)
    if stands_for.get(captured.rank, captured.rank) != captured.rank:
        gather(peers, "plans to compare", b"")
        return None, gather(peers, "what came out", _Said())[0].outcome
    member = Member(stock_plan(captured, costs), planned, tuple(reports))
    if peers is None:
        alone = Comparison((member,), {}, profile, memory_budget)
        return alone, alone.outcome(costs)
    packed = zlib.compress(msgspec.msgpack.encode(member), 1)
    _of_this_process[packed] = member
    shown = gather(peers, "plans to compare", packed)
    whole, said = None, _Said()
    if captured.rank == 0:
        members = tuple(_of_this_process.get(shown[rank]) or msgspec.msgpack.decode(zlib.decompress(shown[rank]), type=Member)
                        for rank in sorted(set(stands_for.values())))  # fmt: skip
        whole = Comparison(members, stands_for, profile, memory_budget)
        said = _Said(whole.outcome(costs))
    return whole, gather(peers, "what came out", said)[0].outcome
