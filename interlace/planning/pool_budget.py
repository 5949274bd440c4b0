"""Plans whose allocator pools fit the device, free blocks included (`scheduler/memory/pools.py`).

The search limits what tensors hold, and pools take more than that. Where the device has no room for the pools of the plan that the search
has decided on, other plans are looked at: all drafts of the search, fastest first, then those of searches under smaller memory budgets. A
draft of the same search often takes much less for little time, as its collectives have fewer streams, or its host waits elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from interlace.config import NO_LIMIT, Beyond, MemoryBudget
from interlace.cost_model import CostModel
from interlace.errors import BudgetError, PlanError
from interlace.ir.target import GPU, target_of, with_paddles_jobs
from interlace.passes import Pass, Pipeline, ordered
from interlace.planning.limits import ROOM
from interlace.planning.making import said
from interlace.planning.search import Search, states_kept
from interlace.planning.tasks import MemoryLimits, Programs, baseline_program
from interlace.planning.tenth import gpu_peak
from interlace.planning.variants import is_open, schedule_of
from interlace.planning.world import Made, World
from interlace.scheduler.memory.pools import reserved_bytes
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.simulator import simulate
from interlace.units import size

MOST_ASKED = 64
"""Most drafts of one search whose pools are simulated; each takes about as long as simulating a step."""
CLOSE = 1.01
"""No more searches are made if a draft fits whose step is longer by this factor at most."""
ROUNDS = 3
"""Most searches with the same passes, each under a budget that is smaller by what the pools of the one before took too much."""


def within_pools(search: Search, made: Made, given: MemoryBudget, profile: str, limit: int, means: Sequence[Pass]) -> Made:
    """`made`, the run that `search` decided on, if its pools fit; otherwise the fastest run found whose pools do, which may be Paddle's
    baseline.

    Args:
        given: The pool budget; None for the default: `ROOM` of the memory of the profile's device, or what pools of Paddle's baseline take,
            if that is more and the device has it. The default does not apply to a form given by name.
        limit: Device bytes that tensors of a rank may hold on a GPU; 0 for no limit.
        means: As for `Search.beside_baseline`.

    Raises:
        BudgetError: No run was found that keeps a given budget.
    """
    world, form = search.world, schedule_of(search.asked)
    if not target_of(profile).has_pools or not isinstance(world.cost, CostModel) or world.cost.is_launched or given == NO_LIMIT:
        return made
    if given is None and (form is None or not is_open(form)):
        return made
    taken = world.pool_bytes(made)
    if taken is None or taken <= (most := _limit(world, given, taken)):
        return made
    fit = _Fit(search, most, limit)
    found = fit.first(made, means)
    if found is not None:
        facts = {"pools_bytes": world.pool_bytes(found) or 0, "step_ns": world.step_ns(found) or 0, "limit_bytes": most}
        return found.noted(said("decided", "pools-fit", **facts, other_bytes=taken, other_ns=world.step_ns(made) or 0))
    least_bytes, least = min([(taken, made), *fit.seen.values()], key=lambda each: each[0])
    if given is not None:
        raise BudgetError(
            f"pool_budget {size(most)} ({most} bytes) cannot be kept: parameters and allocator pools of the fullest rank take at least "
            f"{least_bytes} bytes ({size(least_bytes)}) in the plans that were found; give more, or a smaller memory_budget as well"
        )
    return least.noted(said("declined", "pools-do-not-fit", pools_bytes=least_bytes, limit_bytes=most))


def _limit(world: World, given: MemoryBudget, taken: int) -> int:
    """The bytes that pools may take. `taken` is what pools of a plan take: a default limit that it keeps is not determined further."""
    if isinstance(given, int):
        return given
    assert isinstance(world.cost, CostModel)
    total = world.cost.profile.memory_bytes
    if given is None and (not total or taken <= ROOM * total):
        return taken
    own = baseline_pools(world)
    if given is not None and not own:
        raise BudgetError(
            f"pool_budget {given} of what pools of Paddle's baseline take: that is not known, its step cannot be simulated; give bytes, "
            "such as 70GB"
        )
    if isinstance(given, float):
        return int(given * own)
    if isinstance(given, Beyond):
        return own + given.more_bytes
    return own if ROOM * total < own <= total else int(ROOM * total)


@dataclass(slots=True)
class _Fit:
    """Looks for runs whose pools fit.

    Attributes:
        seen: Programs of each run that was planned in full and keeps `limit` -> what its pools take, and the run.
    """

    search: Search
    most: int
    limit: int
    seen: dict[Programs, tuple[int, Made]] = field(default_factory=dict)

    def first(self, made: Made, means: Sequence[Pass]) -> Made | None:
        """The fastest run that fits; `made` is the one that does not. If the drafts of its search have none that takes nearly as little
        time, searches under smaller memory budgets are made, without moving optimizer state; if Paddle's baseline remains the only one,
        also with that. State comes back into a pool of its own, so that moving it seldom makes pools smaller."""
        world, found = self.search.world, self._fastest()
        took, peak = world.step_ns(made), gpu_peak(world, made)
        if took is None or peak is None or (found is not None and (world.step_ns(found) or 0) <= CLOSE * took):
            return found
        every = ordered((*self.search.asked.passes, *self.search.following(means), *(each for each in means if not each.follows_budget)))
        for passes in dict.fromkeys((states_kept(every), every)):
            budget = peak
            for _ in range(ROUNDS):
                again = Search(world, passes)
                again.make.beaten = self.search.make.beaten_by(world.step_ns(found) or 0) if found is not None else again.make.beaten
                run = again.fitting(budget)
                if run is None or self._fits(run) or (taken := world.pool_bytes(run)) is None:
                    break
                budget -= taken - self.most
                if budget <= 0:
                    break
            found = self._fastest()
            if found is not None and found.programs != self.search.baseline.programs:
                break
        return found

    def _fastest(self) -> Made | None:
        """The fastest of all that is known and fits, Paddle's baseline included."""
        world = self.search.world
        own = self.search.baseline
        known = [(step_ns, each) for _, each in self.seen.values() if (step_ns := world.step_ns(each)) is not None]
        if self._fits(own) and (step_ns := world.step_ns(own)) is not None:
            known.append((step_ns, own))
        fit = min(((step_ns, each) for step_ns, each in known if self._fits(each)), key=lambda each: each[0], default=None)
        for step_ns, whole, memory_limits in self._drafts():
            if fit is not None and step_ns >= fit[0]:
                break
            if self._fits(run := world.run(whole, memory_limits)):
                return run
        return fit[1] if fit is not None else None

    def _drafts(self) -> Iterator[tuple[int, Pipeline, MemoryLimits]]:
        """Drafts that keep the memory limit and whose pools fit, fastest first: the step, the passes of the full plan, and their limits."""
        world, known, asked = self.search.world, dict[Programs, tuple[int, Made, Pipeline]](), 0
        for made, later, whole in world.drafts:
            if whole is not None and (step_ns := world.step_ns(made, later)) is not None:
                known[made.programs] = step_ns, made, whole
        for step_ns, made, whole in sorted(known.values(), key=lambda each: each[0]):
            if asked == MOST_ASKED:
                return
            if self.limit and any(world.bytes_over(made, self.limit)):
                continue
            asked += 1
            if (taken := world.pool_bytes(made)) is not None and taken <= self.most:
                yield step_ns, whole, made.memory_limits

    def _fits(self, run: Made) -> bool:
        """Whether a full run keeps the memory limit and its pools fit."""
        world = self.search.world
        if run.programs not in self.seen:
            if self.limit and any(world.bytes_over_in_step(run, self.limit)):
                return False
            if (taken := world.pool_bytes(run)) is None:
                return False
            self.seen[run.programs] = taken, run
        return self.seen[run.programs][0] <= self.most


def baseline_pools(world: World) -> int:
    """What pools of Paddle's own plan take on its fullest rank; 0 if that cannot be simulated."""
    programs = world.map(baseline_program, ranks=world.firsts)
    with suppress(PlanError):
        options = Options.of(GPU, peers_ready=not world.representative, representative=world.representative)
        plans = [programs[rank].program for rank in world.firsts]
        return reserved_bytes(simulate(plans, world.cost.issued(), options, target=with_paddles_jobs(GPU)).memory, GPU) or 0
    return 0
