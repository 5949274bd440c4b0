"""Plans whose allocator pools fit the device, free blocks included (`scheduler/memory/pools.py`).

The search limits what tensors hold, and pools take more than that. Where the device has no room for the pools of the plan that the search
has decided on, other plans are looked at: all complete runs of the search and its drafts, then searches under smaller memory budgets. A
draft of the same search often takes much less for little time, as its collectives have fewer streams, or its host waits elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, cast

from interlace.config import NO_LIMIT, MemoryBudget
from interlace.cost_model import CostModel
from interlace.errors import BudgetError, PlanError
from interlace.ir.remarks import Fact, Remark
from interlace.ir.target import GPU, target_of, with_paddles_jobs
from interlace.passes import ChooseRecompute, Pass, Pipeline, ordered
from interlace.planning.least_memory import least_memory
from interlace.planning.limits import baseline_bytes, default_pool_budget
from interlace.planning.making import BASELINE_KEPT, FORM_TAKEN, said
from interlace.planning.search import Search, states_kept
from interlace.planning.tasks import Programs, baseline_program
from interlace.planning.tenth import gpu_peak
from interlace.planning.variants import is_open, label, schedule_label, schedule_of
from interlace.planning.world import Made, only_if_possible
from interlace.scheduler.memory.pools import reserved_bytes
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.simulator import simulate
from interlace.units import size

MOST_ASKED = 64
"""Most drafts of one search whose pools are simulated; each takes about as long as simulating a step."""
CLOSE = 1.01
"""No more searches are made if a draft fits whose step is longer by this factor at most."""
ROUNDS = 3
"""Most searches with the same passes, each under a budget that is smaller by what the pools of the one before took too much, or, once a run
has fitted, lies between the last budget that was too large and that run's (`_between`)."""


class Fit(NamedTuple):
    """A run, and the pool budget in bytes that decided or was given; 0 if neither."""

    run: Made
    budget: int = 0


def within_pools(search: Search, made: Made, given: MemoryBudget, profile: str, limit: int, means: Sequence[Pass]) -> Fit:
    """`made`, the run that `search` decided on, if its pools fit; otherwise the fastest run found whose pools do, which may be Paddle's
    baseline.

    Args:
        given: The pool budget; None for the default (`default_pool_budget`), which does not apply to a form given by name.
        limit: Device bytes that tensors of a rank may hold on a GPU; 0 for no limit.
        means: As for `Search.beside_baseline`.

    Raises:
        BudgetError: A given budget is kept by no run that was found, or cannot be checked.
    """
    world, form = search.world, schedule_of(search.asked)
    if not target_of(profile).has_pools or not isinstance(world.cost, CostModel) or world.cost.is_launched or given == NO_LIMIT:
        return Fit(made)
    if given is None and (form is None or not is_open(form)):
        return Fit(made)
    taken = world.pool_bytes(made)
    if taken is None and given is not None:
        raise BudgetError(f"pool_budget {given}: what pools take is not known, the step cannot be simulated; `interlace check` says why")
    if taken is None or (given is None and taken <= default_pool_budget(world.cost.profile.memory_bytes, 0)):
        return Fit(made)
    most = _budget(search, given)
    if taken <= most:
        return Fit(made, most if given is not None else 0)
    found = _Looking(search, most, limit)
    best = found.best(made, means)
    if best is not None:
        facts: dict[str, Fact] = {"pools_bytes": world.pool_bytes(best) or 0, "limit_bytes": most, "step_ns": world.step_ns(best) or 0}
        why = said("decided", "pools-fit", **facts, other_bytes=taken, other_ns=world.step_ns(made) or 0)
        return Fit(best.noted(*found.choice(best), why), most)
    least_bytes, least = min([(taken, made), *found.seen.values()], key=lambda each: each[0])
    if given is not None:
        raise BudgetError(
            f"pool_budget {size(most)} ({most} bytes) cannot be kept: parameters and allocator pools of the fullest rank take at least "
            f"{least_bytes} bytes ({size(least_bytes)}) in the plans that were found, the one that needs the least memory among them; give "
            "more"
        )
    return Fit(least.noted(said("declined", "pools-do-not-fit", pools_bytes=least_bytes, limit_bytes=most)))


def _budget(search: Search, given: MemoryBudget) -> int:
    """The pool budget in bytes."""
    if isinstance(given, int):
        return given
    world, own = search.world, baseline_pools(search)
    assert isinstance(world.cost, CostModel)
    if given is None:
        return default_pool_budget(world.cost.profile.memory_bytes, own)
    if not own:
        raise BudgetError(
            f"pool_budget {given} of what pools of Paddle's baseline take: that is not known, its step cannot be simulated; give bytes, "
            "such as 70GB"
        )
    return int(given * own) if isinstance(given, float) else own + given.more_bytes


def baseline_pools(search: Search) -> int:
    """What pools of Paddle's own plan take on its fullest rank, as Paddle or as Interlace lowers it, whichever is more; 0 if that cannot be
    simulated."""
    world = search.world
    programs = world.map(baseline_program, ranks=world.firsts)
    with suppress(PlanError):
        options = Options.of(GPU, peers_ready=not world.representative, representative=world.representative)
        plans = [programs[rank].program for rank in world.firsts]
        found = simulate(plans, world.cost.issued(), options, target=with_paddles_jobs(GPU))
        return max(reserved_bytes(found.memory, GPU) or 0, world.pool_bytes(search.baseline) or 0)
    return 0


def _between(fitting: tuple[int, int], too_large: tuple[int, int], most: int) -> int:
    """The memory budget at which pools would take `most` bytes, if what they take grew evenly between two budgets."""
    (low, low_taken), (high, high_taken) = fitting, too_large
    return low + (high - low) * (most - low_taken) // (high_taken - low_taken)


@dataclass(slots=True)
class _Looking:
    """Looks for runs whose pools fit.

    Attributes:
        most, limit: Bytes that pools may take, and that tensors may hold (0 for no limit).
        seen: Programs of each run that was planned in full and keeps `limit` -> what its pools take, and the run.
        drafted: Programs of those that were drafts.
    """

    search: Search
    most: int
    limit: int
    seen: dict[Programs, tuple[int, Made]] = field(default_factory=dict)
    drafted: set[Programs] = field(default_factory=set)

    def best(self, made: Made, means: Sequence[Pass]) -> Made | None:
        """The fastest run that fits; `made` is the one that does not. If the drafts of its search have none that takes nearly as little
        time, searches under smaller memory budgets are made: without offload, as buffers that come back often make pools larger, and with
        it, but without moving optimizer state; if nothing faster than Paddle's baseline fits, also with that: state comes back into a pool
        of its own, so that moving it seldom makes pools smaller. If nothing fits at all, the plan that needs the least memory is tried."""
        world, found = self.search.world, self._fastest()
        took, peak = world.step_ns(made), gpu_peak(world, made)
        if took is None or peak is None or self._is_close(found, took):
            return found
        searched = self._searched(means)
        for k, passes in enumerate(searched):
            if k and found is not None and self._is_faster(found, self.search.baseline) and passes != states_kept(passes):
                break
            self._search_below(min(peak, self.limit or peak), passes, found, took)
            found = self._fastest()
            if self._is_close(found, took):
                break
        if found is None:
            with only_if_possible():
                self._fits(least_memory(Search(world, searched[-1]).make))
            found = self._fastest()
        return found

    def _is_faster(self, run: Made, other: Made) -> bool:
        return (self.search.world.step_ns(run) or 0) < (self.search.world.step_ns(other) or 0)

    def _is_close(self, found: Made | None, took: int) -> bool:
        """Whether the step of a run is not much longer than `took` nanoseconds."""
        return found is not None and (self.search.world.step_ns(found) or 0) <= CLOSE * took

    def _search_below(self, budget: int, passes: Pipeline, found: Made | None, took: int) -> None:
        """Search with these passes under a memory budget, and under smaller ones until a run fits; then under larger ones again, unless its
        step is close to `took`. `found` is a run that fits already."""
        world = self.search.world
        fitting: tuple[int, int] | None = None
        too_large: tuple[int, int] | None = None
        for _ in range(ROUNDS):
            run = self._searched_in(passes, budget, found)
            taken = world.pool_bytes(run) if run is not None else None
            if run is None or taken is None:
                return
            if self._fits(run):
                if too_large is None or self._is_close(run, took):
                    return
                fitting = budget, taken
                if found is None or self._is_faster(run, found):
                    found = run
            elif taken <= self.most:  # tensors hold too much
                return
            else:
                too_large = budget, taken
            before, budget = budget, _between(fitting, too_large, self.most) if fitting else budget - (taken - self.most)
            if budget <= 0 or budget == before:
                return

    def _searched(self, means: Sequence[Pass]) -> list[Pipeline]:
        """Passes of further searches, the last with everything that may be used: what is moved stays as the user says."""
        asked = self.search.asked
        if self.search.is_set:
            return [asked]
        following = self.search.following(means)
        others = [each for each in means if not each.follows_budget]
        every = ordered((*asked.passes, *following, *others))
        kept = ordered((*asked.passes, *others))
        return [*dict.fromkeys((kept, states_kept(every), every))]

    def _searched_in(self, passes: Pipeline, budget: int, found: Made | None) -> Made | None:
        """The run of a search under a memory budget, which need not look at what is slower than `found`; None without one."""
        search = Search(self.search.world, passes)
        if found is not None:
            search.make.beaten = self.search.make.beaten_by(self.search.world.step_ns(found) or 0)
        with only_if_possible():
            return search.fitting(budget)
        return None

    def _fastest(self) -> Made | None:
        """The fastest of all that is known and fits, Paddle's baseline included."""
        world, best, best_ns = self.search.world, None, sys.maxsize
        for run in (self.search.baseline, *self.search.runs):
            self._fits(run)
        for taken, run in self.seen.values():
            if taken <= self.most and (took := world.step_ns(run)) is not None and took < best_ns:
                best, best_ns = run, took
        for draft_ns, made, draft in self._drafts():
            if draft_ns >= best_ns:
                break
            if (taken_by_draft := world.pool_bytes(made)) is None or taken_by_draft > self.most:
                continue
            with only_if_possible():
                run = world.run(draft, made.memory_limits)
                if self._fits(run) and (took := world.step_ns(run)) is not None and took < best_ns:
                    best, best_ns = run, took
                    self.drafted.add(run.programs)
        return best

    def _drafts(self) -> list[tuple[int, Made, Pipeline]]:
        """The fastest drafts that keep the memory limit: the step, the draft, and the passes of the full plan."""
        world, known = self.search.world, dict[Programs, tuple[int, Made, Pipeline]]()
        for made, later, whole in world.drafts:
            if whole is not None and (step_ns := world.step_ns(made, later)) is not None:
                known[made.programs] = step_ns, made, whole
        fastest = sorted(known.values(), key=lambda each: each[0])
        kept = (each for each in fastest if not self.limit or not any(world.bytes_over(each[1], self.limit)))
        return [*islice(kept, MOST_ASKED)]

    def choice(self, run: Made) -> list[Remark]:
        """A remark for the report of the schedule on what was taken, if that is Paddle's baseline or a draft's form; other searches have
        said so themselves."""
        world, baseline, whole = self.search.world, self.search.baseline, run.passes
        facts: dict[str, Fact] = {"baseline_peak_bytes": baseline_bytes(world), "baseline_step_ns": world.step_ns(baseline) or 0}
        form = schedule_of(whole)
        if run.programs == baseline.programs:
            return [said("decided", BASELINE_KEPT, **facts)]
        if run.programs not in self.drafted or form is None:
            return []
        facts |= {"jobs": "off"} if form.interleave == "off" else {"form": schedule_label(form)}
        levels = next((cast("ChooseRecompute", each).level for each in whole.passes if each.decides == "recomputation"), None)
        facts |= {"recomputed": [*levels]} if isinstance(levels, tuple) else {}
        later = whole.passes[whole.passes.index(form) + 1 :]
        if others := [label(each) for each in later if each not in self.search.asked.passes]:
            facts["others"] = others
        return [said("decided", FORM_TAKEN, step_ns=world.step_ns(run) or 0, **facts)]

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
