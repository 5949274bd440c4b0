"""What is decided for a world: its passes with all their options, as fast as the simulated step says or with as little memory.

Rank 0 runs this as ordinary sequential code; what concerns one rank it asks for (`World.map`).

- `Search.unlimited` and `Search.within` are the two entries: without a budget no stage holds more than Paddle's baseline on its worst
  one; within a budget every rank keeps it on a GPU, or BudgetError says what the least feasible one is (`Search.least_memory`).
- `Schedules` looks for the form of an open schedule (`interleave: auto`) together with what each stage recomputes: Paddle's baseline, the
  named forms, schedules of the coarse model, and these with less memory, less recomputation or other waits of the host are proposed; each
  proposal is drafted and judged by its simulated step and its peak (`Schedules.draft`).
- `Search.judged` is for a form that is given: milder ones where it is slower than the plainest.

Each stage holds more than its budget by some bytes when everything is kept. Recomputation gives part of them back, cheapest byte first;
offload, which is planned on the schedule, the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from interlace.errors import BudgetError, PlanError
from interlace.ir.remarks import Fact, Kind, Remark, remark
from interlace.passes.base import Pass, is_built_in
from interlace.passes.choose_recompute import ChooseRecompute
from interlace.passes.offload_activations import OffloadActivations
from interlace.passes.pipeline import Pipeline
from interlace.passes.schedule_1f1b import Schedule1F1B, mixed_depth
from interlace.planning.tasks import (
    MemoryLimits,
    StageWork,
    baseline_peak,
    could_repeat,
    higher_level,
    holders,
    job_orders,
    least_bytes,
    levels_of,
    same_jobs,
    stage_work,
)
from interlace.planning.worker import spec_of
from interlace.planning.world import Made, World
from interlace.scheduler.recompute_choices import LEVELS
from interlace.scheduler.schedule import in_flight
from interlace.scheduler.whole_step.search import Numbers, Ranked, find_schedules
from interlace.scheduler.whole_step.slot_times import StageOrder, StageTimes
from interlace.units import size

COARSE_SCHEDULES = 3
"""Schedules of the coarse model that are planned in full, as drafts."""
SLACK = 1.01
"""A peak counts as Paddle's own up to this factor: allocators round by more."""
ROUNDS = 4
"""Plans of one form that are made at most; each keeps free the bytes by which the one before exceeded the budget on a GPU."""
FINALISTS = 1
"""Forms, the fastest first, whose later passes are tried in their alternatives too, under a budget (waits at the peak hold less than those
at the ends of jobs) and where transfers are delayed: where the host waits then changes a step by 1 % at most. Else all that fit."""
SHRINKS = 0.75
"""A form is given up where a plan with less room exceeds the budget by more than this part of what the one before did."""
OVER_BUDGET = (1.1, 1.3)
"""Schedules are also looked for in so many times the budget, one of each: offload then moves the rest."""
PAYS = 0.005
"""Without a budget, recomputation is looked at only where steps that hold as much as they like are shorter by this part."""
ANY = 1 << 60
"""More bytes than any device has."""
TIGHTER = (0.95, 0.85)
"""Parts of the budget: forms that exceed it are drafted again as these would have them."""
MOST_TIGHTER = 3
"""Forms, the fastest first, of which that is done."""
CLOSER, NEARLY = 2, 1.05
"""Without a budget: times that schedules are looked for in less memory, and so many times what they may hold is nearly that."""
LESS = (0.03, 0.015)
"""Parts of the budget that recomputation leaves to offload, on one stage after the other: the first that it can give back. With 0.06 tried
besides three of nine plans are faster, by 0.1 % at most, and planning takes a fifth longer."""
FAR = 0.25
"""What exceeds the budget by more than this part of it is not drafted again with less room."""
SOONER = (2, 8, 32)
"""So many times what a plan exceeds the budget by is taken off the room with each plan that is made again: offload moves whole values, so
a little less room may change nothing, and each is a plan in full (GPT-3 6.7B, pp 4, at 43 %: one in the place of two)."""
EXCESS_PARTS = (1.0, 0.9, 0.75, 0.5, 0.25, 0.0)
"""Parts of the bytes over the budget that recomputation gives back beside a form by name; offload gives the rest."""
DESCENTS = 4
"""Times that what holds least is made again to hold less, each time with less room than it held; it ends before where nothing is gained."""
GAINS = 0.001
"""What holds less by no more than this part is not worth another plan."""
TIGHT = (0, LEVELS // 4, LEVELS // 2, 3 * LEVELS // 4, LEVELS)
"""Levels of recomputation of which each stage takes the one with which it holds least: with all recomputed nothing can be moved
(two stages: 720 bytes, 640 with the level chosen by stage), and each level more is a plan more for a refusal."""
MORE_FREED = (0.0, 0.08, 0.2)
"""Parts of the budget by which recomputation may give back more than Paddle's order needs; a schedule may ask for any on each stage. GPT-3
6.7B at the peak of full recomputation by hand: 380.0 ms, with 0.02, 0.04 and 0.06 besides 381.6."""


@dataclass(frozen=True, slots=True)
class Run:
    """Passes that were decided on, what they made, and what they might hold."""

    passes: Pipeline
    made: Made
    memory_limits: MemoryLimits

    def noted(self, *remarks: Remark) -> Run:
        """The same with remarks for the reports of passes."""
        return replace(self, made=self.made.noted(*remarks))


@dataclass(frozen=True, slots=True)
class Limit:
    """Under a memory budget.

    Attributes:
        budget: Device bytes that every rank must keep on a GPU.
        levels: How much each stage recomputes (`ChooseRecompute.level_index`) with which Paddle's baseline order keeps the budget, for
            forms by name; then what leaves more and more of the excess to offload. Empty where the passes say it.
    """

    budget: int
    levels: tuple[Numbers, ...] = ()


@dataclass(frozen=True, slots=True)
class Judged:
    """A form and the passes after it, as drafted.

    Attributes:
        recomputed: How much each stage recomputes; None where the passes say it.
        memory_limits: What passes might use on each rank.
        step_ns: Simulated step; None if it never ends.
        peak_bytes: Peak on the worst stage.
    """

    form: Schedule1F1B
    later: tuple[Pass, ...]
    recomputed: Numbers | None
    memory_limits: MemoryLimits
    step_ns: int | None
    peak_bytes: int

    def facts(self, asked: tuple[Pass, ...]) -> dict[str, Fact]:
        """What remarks tell of it: its form, how much it recomputes, and what differs from the later passes as they were asked for."""
        found: dict[str, Fact] = {"jobs": "off"} if self.form.interleave == "off" else {"form": self.form.label()}
        if self.recomputed:
            found["recomputed"] = [level / LEVELS for level in self.recomputed]
        if others := [each.label() for each in self.later if each not in asked]:
            found["others"] = others
        return found


class Found(msgspec.Struct, frozen=True):
    """What the coarse model gave, and whether schedules that hold more would be faster by as much as `PAYS`."""

    schedules: tuple[Ranked, ...] = ()
    memory_pays: bool = False


def budget_bytes(world: World) -> int:
    """The memory budget in bytes, for all ranks the least of those that are configured; 0 without one.

    Raises:
        BudgetError: A fraction is asked for, and what Paddle's baseline holds is not known.
        PlanError: Ranks have budgets of different sorts.
    """
    asked = [each.memory_budget or 0 for each in world.facts]
    if all(isinstance(each, int) for each in asked) and all(asked):
        return int(min(asked))
    other = next((rank for rank, each in enumerate(asked) if each != asked[0]), None)
    if other is not None:
        raise PlanError(
            f"ranks 0 and {other} planned with different options: memory_budget {asked[0]:g} and {asked[other]:g}; "
            "give every rank the same configuration"
        )
    if not asked[0]:
        return 0
    held = max(each or 0 for each in world.known(baseline_peak))
    if not held:
        raise BudgetError(
            f"memory_budget {asked[0]:g} of what Paddle's baseline holds: that is not known, its step cannot be simulated; "
            "give bytes, such as 70GB"
        )
    return max(1, int(asked[0] * held))  # less than a byte is a budget too, and refused as one


class Search:
    """The decision for a world.

    Args:
        world: Its ranks.
        asked: The passes as configured.
        memo: Number of what passes find out during this search. Orders of jobs are looked for from those that were found first, so what
            is found depends on what was looked for before; a search does not start from what another one found.
    """

    def __init__(self, world: World, asked: Pipeline, memo: int = 0) -> None:
        self.world, self.asked, self.memo = world, asked, memo
        self.pipe = world.captured.pipeline
        self.is_alone = not world.is_whole and self.pipe.num_stages > 1
        """Whether the other stages are not known, so that no step can be simulated."""
        self.draws = any(each.draws for each in world.facts)
        self.is_open = any(isinstance(each, ChooseRecompute) and each.level is None for each in asked.passes)
        """Whether there is something to decide: a pass that recomputes, and whose user did not say how much."""
        self.collectives = any(isinstance(each, ChooseRecompute) and each.repeat_collectives for each in asked.passes)
        """Whether repetitions that are added may repeat collectives."""
        self.offloads = any(isinstance(each, OffloadActivations) for each in asked.passes)
        """Whether a pass moves what is over the budget."""

    def unlimited(self) -> Run:
        """Run the passes without a budget: where the form of the schedule is open no stage holds more than Paddle's baseline on its worst
        one, and what is recomputed for it is open too.

        Raises:
            PassError: As `Pipeline.run`.
        """
        return self.chosen(self.asked, None)

    def within(self, budget: int) -> Run:
        """Run the passes within a memory budget. Where the run without one keeps it and is faster it is taken, with memory_limits of 0.

        Raises:
            BudgetError: No plan keeps the budget; with the least feasible one, and what holds it.
            PassError: As `Pipeline.run`.
        """
        found = self.fitting(budget)
        found = self.or_without_budget(found, budget) if found else self.least_memory()
        if any(self.world.bytes_over(found.made, budget)):
            self.refuse(found, budget)
        return found

    # ------------------------------------------------------------------------------------------------------- the fastest step

    def chosen(self, pipeline: Pipeline, limit: Limit | None) -> Run:
        """Run the passes; where the form of one is open, or has milder ones, the whole step decides."""
        pipeline.check(self.world.captured)
        asked = schedule_of(pipeline)
        if asked is not None and asked.changes_depth(self.world.captured) and self.draws:
            plain = Pipeline(tuple(asked.at_plain_depth() if each is asked else each for each in pipeline.passes))
            return self.chosen(plain, limit).noted(said("declined", "random-draws"))
        if asked is not None and asked.is_open() and not self.is_alone:
            return Schedules(self, pipeline, asked, limit).fastest()
        if limit is None or not limit.levels:
            return self.judged(pipeline, self.world.memory_limits(limit.budget if limit else None), limit.budget if limit else 0)
        recomputed, memory_limits = limit.levels[0], self.world.memory_limits(limit.budget)
        if asked is not None and not self.is_alone and len(set(limit.levels)) > 1:
            best = Schedules(self, pipeline, asked, limit).best_level()
            recomputed, memory_limits = best.recomputed or recomputed, best.memory_limits
        return self.judged(recomputing(pipeline, recomputed), memory_limits, limit.budget)

    def judged(self, pipeline: Pipeline, memory_limits: MemoryLimits, budget: int = 0) -> Run:
        """Run the passes; if one has fallbacks, keep its first form whose step is no slower than with the last fallback, the simplest.
        Of a pass with alternatives (where the host waits) the form with the fastest step is kept, under a budget of those that keep it;
        where none does, the one that exceeds it least. A rank that plans without the other stages keeps the form that was asked for."""
        passes = pipeline.passes
        at = next((k for k, each in enumerate(passes) if each.fallbacks()), None)
        if at is None:
            return self._with_alternatives(Run(Pipeline(()), self.world.start, memory_limits), passes, budget)
        first, judged, later = self._then(Run(Pipeline(()), self.world.start, memory_limits), passes[:at]), passes[at], passes[at + 1 :]

        def run(form: Pass) -> Run:
            return self._with_alternatives(first, (form, *later), budget)

        if self.is_alone:
            return run(judged).noted(remark("declined", "stages-not-known").of(judged.name))
        *simpler, simplest = judged.fallbacks()
        asked, plain = run(judged), self._then(first, (simplest, *Pipeline(later).draft().passes))
        if all(self.world.map(same_jobs, plain.made.programs, asked.made.programs)):
            return asked
        limit_ns, declined = self.world.step_ns(plain.made, passes), list[Remark]()
        for form in (judged, *simpler):
            found = asked if form is judged else run(form)
            took_ns = self.world.step_ns(found.made)
            if took_ns is None or limit_ns is None:
                return asked.noted(remark("declined", "step-would-stall").of(judged.name))
            facts: dict[str, Fact] = {"form": form.label(), "step_ns": took_ns, "other": simplest.label(), "other_ns": limit_ns}
            if took_ns <= limit_ns:
                return found.noted(remark("decided", "form-faster", **facts).of(judged.name), *declined)
            declined.append(remark("declined", "form-slower", **facts).of(judged.name))
        return run(simplest).noted(*declined)

    def _with_alternatives(self, first: Run, passes: tuple[Pass, ...], budget: int) -> Run:
        """The passes from here on; of a pass that has alternatives, the form with which the simulated step is fastest."""
        cut = next((k for k, each in enumerate(passes) if each.alternatives()), len(passes)) if not self.is_alone else len(passes)
        if cut == len(passes):
            return self._then(first, passes)
        common = next((k for k, each in enumerate(passes[:cut]) if each.decides_for_all), cut)  # which looks at what comes after it
        asked, rest = passes[cut], passes[cut + 1 :]
        found = self._then(first, passes[:common])
        forms = {form.label(): self._then(found, (*passes[common:cut], form, *rest)) for form in (asked, *asked.alternatives())}
        took = {label: self.world.step_ns(form.made) for label, form in forms.items()}
        over = {label: max(self.world.bytes_over(form.made, budget)) if budget else 0 for label, form in forms.items()}
        ends = [label for label, each in took.items() if each is not None]
        best = min(ends, key=lambda label: (over[label], took[label] or 0), default=asked.label())
        remarks = []
        for label in (each for each in ends if each != best):
            facts: dict[str, Fact] = {"form": best, "step_ns": took[best] or 0, "other": label, "other_ns": took[label] or 0}
            facts |= {"over_bytes": over[label]} if over[label] else {}
            remarks.append(remark("decided", "form-faster", **facts).of(asked.name))
        return forms[best].noted(*remarks)

    def _then(self, before: Run, passes: tuple[Pass, ...]) -> Run:
        """These passes after those that ran before, with a memo of their own."""
        made = self.world.run(Pipeline(passes), before.memory_limits, before.made, memo=self.world.own_memo())
        return Run(Pipeline((*before.passes.passes, *passes)), made, before.memory_limits)

    # ------------------------------------------------------------------------------------------------------- within a budget

    def fitting(self, budget: int) -> Run | None:
        """A run within a budget, as fast as found; None where none was found.

        What holds more on a GPU than its operations in their order is made again with so much less room, in the same schedule; then in
        Paddle's baseline order with recomputation alone before anything is moved.
        """
        for form in () if self._is_hopeless(budget) else (self.asked, in_paddles_order(self.asked)):
            for each in self._with_other_waits(self.chosen(form, self.limit(budget, form))):
                if (found := self.with_lower_limits(self.made, each, budget)) is not None:
                    return found
        return None

    def or_without_budget(self, within: Run, budget: int) -> Run:
        """A run within a budget, or the run without one where that keeps the budget and is faster.

        They look for schedules in different memory, so either may find the faster one. The run without a budget is made where Paddle's own
        plan keeps the budget, which is then likely to be kept, and the form is open, as they are much the same otherwise.
        """
        open_ = schedule_of(self.asked)
        if max(each or budget + 1 for each in self.world.known(baseline_peak)) > budget or open_ is None or not open_.is_open():
            return within
        passes = Pipeline(tuple(each for each in self.asked.passes if not each.mistake()))  # offload without a budget has nothing to move
        without = Search(self.world, passes, self.memo + 1).unlimited()
        took, other = (self.world.step_ns(run.made) for run in (within, without))
        if took is None or other is None:
            return within
        if other >= took:
            return within.noted(said("declined", "without-budget-slower", step_ns=other, within_ns=took))
        if over := max(self.world.bytes_over_in_step(without.made, budget)):
            return within.noted(said("declined", "without-budget-too-large", step_ns=other, over_bytes=over))
        without = without.noted(said("decided", "without-budget-faster", step_ns=other, within_ns=took))
        return replace(without, memory_limits=self.world.memory_limits(0))

    def _is_hopeless(self, budget: int) -> bool:
        """Whether the operations of some rank cannot run in the budget, however they are ordered and whatever is moved."""
        at = next((k for k, each in enumerate(self.asked.passes) if isinstance(each, Schedule1F1B)), len(self.asked.passes))
        if not all(is_built_in(type(each)) for each in self.asked.passes[at:]):
            return any(each > budget for each in self.world.map(least_bytes, self.world.start.programs, True))
        before = Pipeline(self.asked.passes[:at])
        nothing = self.world.run(recomputing(before, 0) if self.is_open else before, self.world.memory_limits(budget), memo=self.memo)
        return any(each > budget for each in self.world.map(least_bytes, nothing.programs, False))

    def _with_other_waits(self, run: Run) -> Iterator[Run]:
        """The run, and then, where that holds less, the same passes with a host that waits elsewhere."""
        yield run
        passes = waiting(run.passes)
        if passes != run.passes and self._most(other := self.made(passes, run.memory_limits)) < self._most(run):
            yield other

    def with_lower_limits(self, make: Callable[[Pipeline, MemoryLimits], Run], run: Run, budget: int) -> Run | None:
        """The run, made again with so much less room as it exceeds the budget by; None where that does not help."""
        first = run
        for number in range(1 + len(SOONER)):
            over = self.world.bytes_over_in_step(run.made, budget)
            if not any(over):
                return run
            if number < len(SOONER):
                memory_limits = self.lower_limits(run.made, run.memory_limits, [each * SOONER[number] for each in over])
                run = make(self.again(run.passes, over if number or not self.offloads else [0] * len(over)), memory_limits)
                run = _with_choice_of(first, run, said("decided", "made-again", over_bytes=max(over)))
        return None

    def lower_limits(self, made: Made, memory_limits: MemoryLimits, over: Sequence[int]) -> MemoryLimits:
        """What passes may use after a plan that exceeds the budget by so many bytes on each rank; as much as before where it does not."""
        peaks = self.world.order_peaks(made)
        return tuple(
            max(1, min(room or 0, peak) - more) if more > 0 else room for room, peak, more in zip(memory_limits, peaks, over, strict=True)
        )

    def limit(self, budget: int, made: Pipeline) -> Limit:
        """What these passes may hold, and the recomputation that they may choose from; a schedule that is open chooses from `levels`."""
        if not self.is_open:
            return Limit(budget)
        asked = schedule_of(made)
        parts = EXCESS_PARTS if self.offloads and not (asked and asked.is_open()) else EXCESS_PARTS[:1]
        return Limit(budget, self._levels(budget, [(part, 0) for part in parts]))

    def levels(self, limit: int, beyond: Sequence[float] = MORE_FREED) -> tuple[Numbers, ...]:
        """How much each stage may recompute, by stage, from nothing to most: a schedule may have any of them on each stage.

        Args:
            limit: Device bytes that no stage may pass in Paddle's order.
            beyond: Parts of the limit by which recomputation may give back more than it takes for that, one for each level after the first.
        """
        return tuple(dict.fromkeys(self._levels(limit, [(0.0, 0), *((1.0, int(more * limit)) for more in beyond)])))

    def _levels(self, limit: int, freed: Sequence[tuple[float, int]]) -> tuple[Numbers, ...]:
        """See `levels_of`; of several ranks of a stage the one that needs most decides."""
        said = self.world.known(levels_of, limit, tuple(freed), self.collectives, ranks=self.world.firsts)
        return tuple(self._by_stage([each and each[k] for each in said]) for k in range(len(freed)))

    def again(self, made: Pipeline, freed_bytes: Sequence[int]) -> Pipeline:
        """Passes that were decided, with so much more recomputed that each rank holds so many bytes less in Paddle's order."""
        levels = next((each.level_index for each in made.passes if isinstance(each, ChooseRecompute)), None)
        if not self.is_open or not isinstance(levels, tuple):
            return made
        said = self.world.known(higher_level, levels, tuple(freed_bytes), self.collectives, ranks=self.world.firsts)
        return recomputing(made, self._by_stage(said))

    def _by_stage(self, of_ranks: Sequence[int | None]) -> Numbers:
        """The most of each stage; 0 where that is not known."""
        return tuple(
            max((each or 0 for each, facts in zip(of_ranks, self.world.facts, strict=True) if facts.stage == stage), default=0)
            for stage in range(self.pipe.num_stages)
        )

    # ------------------------------------------------------------------------------------------------------------ least memory

    def least_memory(self) -> Run:
        """What holds least by itself: all moved that can be, and each stage at the level of recomputation with which it then holds least
        (what is recomputed cannot be moved, so that need not be the last). Tried are Paddle's baseline order and, where the form is open,
        those by name, each with a host that waits at the ends of jobs (the alternative of `throttle-host`) or where it must, and Paddle's
        own jobs and streams with and without recomputation. Drafts are compared."""
        made, plain = (self._at_least_held(each) for each in (in_paddles_order(self.asked), paddles_streams(self.asked)))
        asked = schedule_of(self.asked)
        named = asked.named(self.world.captured, self.draws) if asked and asked.is_open() else []
        forms = list(dict.fromkeys((waiting(made), made, plain)))
        forms += [with_schedule(made, each) for each in named]
        forms += [paddles_own(self.asked)] * bool(named)
        least = min((self._drafted(each, self.world.memory_limits(1)) for each in forms), key=self._most)
        less = self._held_less(least)
        tried = [self.made(run.passes, run.memory_limits) for run in ((less, least) if less is not least else (least,))]
        return min(tried, key=self._most)

    def _most(self, run: Run) -> int:
        """Device bytes of the fullest rank on a GPU."""
        return max(self.world.bytes_over(run.made, 0))

    def _at_least_held(self, made: Pipeline) -> Pipeline:
        """The passes with each stage at the level of recomputation with which it holds least, all moved that can be."""
        if not self.is_open:
            return made
        held = {
            level: self._by_stage(self.world.gpu_peaks(self._drafted(recomputing(made, level), self.world.memory_limits(1)).made))
            for level in TIGHT
        }
        return recomputing(made, tuple(min(held, key=lambda level: (held[level][stage], level)) for stage in range(self.pipe.num_stages)))

    def _held_less(self, draft: Run) -> Run:
        """The draft, or one that moves less and holds less all the same: copies back take room too."""
        found = draft
        for _ in range(DESCENTS):
            below = self._most(found) - 1
            if below <= 0 or not self.offloads:
                break
            closer = self.with_lower_limits(self._drafted, self._drafted(draft.passes, self.world.memory_limits(below)), below)
            if closer is None or self._most(closer) > (1 - GAINS) * below:
                break
            found = closer
        return found

    def made(self, made: Pipeline, memory_limits: MemoryLimits) -> Run:
        """A run of passes whose forms are decided."""
        return Run(made, self.world.run(made, memory_limits, memo=self.memo), memory_limits)

    def _drafted(self, made: Pipeline, memory_limits: MemoryLimits) -> Run:
        """The same passes, with a draft of what they make."""
        return Run(made, self.world.run(made.draft(), memory_limits, memo=self.memo), memory_limits)

    def refuse(self, run: Run, budget: int) -> None:
        """Raises BudgetError with what the fullest rank holds by what holds least."""
        peaks = self.world.bytes_over(run.made, 0)
        rank = peaks.index(max(peaks))
        (what,) = filter(None, self.world.map(holders, run.made.programs, ranks=[rank]))
        repeats = self.is_open and not self.collectives and any(self.world.map(could_repeat))
        where = f"rank {rank if self.world.is_whole else self.world.captured.rank}, stage {self.world.facts[rank].stage}"
        more = "; choose_recompute: {repeat_collectives: on} may hold less" if repeats else ""
        raise BudgetError(
            f"memory_budget {size(budget)} ({budget} bytes) cannot be kept; the least feasible one is {peaks[rank]} bytes "
            f"({size(peaks[rank])}), which {where} holds with all recomputed and moved to the host that lowers it: "
            f"{what}{more}",
            peaks[rank],
        )


class Schedules:
    """Forms of the schedule that are proposed, drafted and judged by the whole step, with what each stage recomputes for them.

    Args:
        search: For what else is decided.
        pipeline: The passes as asked for.
        asked: The schedule among them.
        limit: Under a memory budget.
    """

    def __init__(self, search: Search, pipeline: Pipeline, asked: Schedule1F1B, limit: Limit | None) -> None:
        self.search, self.world, self.pipeline, self.asked, self.given = search, search.world, pipeline, asked, limit
        self.pipe, self.draws = search.pipe, search.draws
        at = pipeline.passes.index(asked)
        self.earlier, self.later = Pipeline(pipeline.passes[:at]), pipeline.passes[at + 1 :]
        self.memory_limits = self.world.memory_limits(limit.budget if limit else None)
        self.chooses = search.is_open and asked.is_open()
        """Whether a schedule may choose how much is recomputed; else the passes say it."""
        self.needed = limit.levels[0] if limit and limit.levels else None
        self.recomputes = any(each.recomputes for each in self.world.facts)
        self.own = paddles_own(pipeline, limit is not None)
        """Paddle's own jobs and streams."""
        self.offloads = limit is not None and any(isinstance(each, OffloadActivations) for each in self.later)
        """Whether under a budget offload moves what a plan holds too much."""
        asks = any(each.asks_ranks for each in (*self.later, *self.own.passes))
        self.ranks = tuple(self.world.all) if asks else self.world.firsts
        """Which ranks make drafts: one of each stage, and all where a pass asks them."""
        self.expected: dict[tuple[Numbers | None, Schedule1F1B], int] = {}
        """Schedules that the coarse model found, and the bytes that it gives their fullest stage."""
        self.fastest_ns: int | None = None
        """Simulated step of the fastest draft so far that keeps the memory."""
        self.looked_at: tuple[Sequence[Numbers | None], list[StageTimes]] = ((), [])
        """What may be recomputed, and what the stages say of their jobs with it: what schedules were looked for in."""

    def fastest(self) -> Run:
        """Run the passes with the form that is simulated fastest within the memory, with as much recomputation as the schedule pays for.

        Every form is drafted, without local search inside its jobs, and simulated; the fastest is then planned in full. Where Paddle's own
        plan is the fastest it is kept as it is.

        Raises:
            PassError: As `Pipeline.run`.
        """
        made = self.world.run(self.own.draft(), self.memory_limits, ranks=self.ranks)
        peaks = self._peaks(made)
        own = Judged(self.asked.baseline(), (), None, self.memory_limits, self.world.step_ns(made), max(self._peaks(made, by_paddle=True)))
        limit = self.given.budget if self.given else int(own.peak_bytes * SLACK) + self.asked.extra_live_bytes
        named = self.asked.named(self.world.captured, self.draws)
        forms = [(self.needed, form) for form in (self.asked.baseline(), *named)]
        if named:
            forms += self._lagging(peaks, limit)
        elif self.chooses and not self.given:
            forms += [(level, self.asked.baseline()) for level in self._recomputation(limit)[:2]]
        drafts = dict.fromkeys((recomputed, form.draft()) for recomputed, form in forms)
        judged = [self.draft(recomputed, form, self.later, limit) for recomputed, form in drafts]
        if self.given:
            judged += self.tighter(judged, limit)
            judged += self.less_recomputed(judged, limit)
        elif named:
            judged += self.with_less(judged, limit)
            judged += self.in_paddles_order(limit)
        fitting = _fitting(judged, limit)
        few = self.given or any(each.decides_for_all for each in self.later)
        others = fitting or (_nearest(judged) if self.given else [])
        judged += [other for each in others[: FINALISTS if few else None] for other in self.alternatives(each, limit)]
        best = next(iter(_fitting(judged, limit)), None)
        if best is None and self.given:  # what is nearest to the budget is made again with less room
            best = next(iter(_nearest(judged)), None)
        if best is None and own.step_ns is None and forms:
            run = replace(self._whole(judged[0]), memory_limits=self.memory_limits)
            return run.noted(said("declined", "no-form-judged"), *self._lost(judged, limit))
        if best is None or (max(peaks) <= limit and own.step_ns is not None and (best.step_ns or 0) >= own.step_ns):
            kept = said("decided", BASELINE_KEPT, **self._baseline_facts(own))
            others = [each for each in judged if each.form.interleave != "off" or each.step_ns != own.step_ns]
            return Run(self.own, self.world.run(self.own, self.memory_limits), self.memory_limits).noted(kept, *self._lost(others, limit))
        run = self._whole(best)
        facts = best.facts(self.later) | self._baseline_facts(own)
        taken = said("decided", FORM_TAKEN, step_ns=self.world.step_ns(run.made) or 0, limit_bytes=limit, **facts)
        return run.noted(taken, *self._lost([each for each in judged if each is not best], limit))

    def best_level(self) -> Judged:
        """How much of what is over the budget recomputation gives back with a form that is given: the fastest draft that fits, or else
        what exceeds the budget least."""
        assert self.given is not None
        limit, form = self.given.budget, self.asked.draft()
        judged = [self.draft(each, form, self.later, limit) for each in dict.fromkeys(self.given.levels)]
        return min(judged, key=lambda each: (max(0, each.peak_bytes - limit), each.step_ns is None, each.step_ns or 0))

    # ---------------------------------------------------------------------------------------------------------------- judging

    def draft(self, recomputed: Numbers | None, form: Schedule1F1B, later: tuple[Pass, ...], limit: int, part: float = 1.0) -> Judged:
        """A draft; under a budget with so much less room as what it exceeds the budget by, where passes can give it back, and where it is
        not slower already than what keeps the budget. It starts from a part of the room."""
        before, last = self.before(recomputed), 0
        memory_limits = tuple(int(part * room) if room else None for room in self.memory_limits)
        for _ in range(ROUNDS):
            made = self.world.run(Pipeline((form, *later)).draft(), memory_limits, before, self.ranks, self.search.memo)
            peaks = self._peaks(made)
            over, took = max(peaks) - limit, None
            if over <= 0 or over > FAR * limit or not self.offloads or (last and over > last * SHRINKS):
                break
            if self.fastest_ns is not None:
                took = self.world.step_ns(made, later)
                if took is None or took >= self.fastest_ns:
                    break
            last, memory_limits = over, self.search.lower_limits(made, memory_limits, [peak - limit for peak in peaks])
        took = took or self.world.step_ns(made, later)
        if took is not None and max(peaks) <= limit:
            self.fastest_ns = min(took, self.fastest_ns or took)
        return Judged(form, later, recomputed, memory_limits, took, max(peaks))

    def before(self, recomputed: Numbers | None) -> Made:
        """The programs up to the schedule with so much recomputed."""
        passes = self.earlier if recomputed is None else recomputing(self.earlier, recomputed)
        return self.world.run(passes, self.memory_limits, memo=self.search.memo)

    def _peaks(self, made: Made, by_paddle: bool = False) -> list[int]:
        """Device bytes of the plan at its peak, by rank, under a budget those on a GPU; a rank without jobs holds nothing.

        `by_paddle`: where Paddle's own jobs run, and not those of our lowering.
        """
        peaks = self.world.order_peaks(made, by_paddle)
        if not self.given:
            return peaks
        return [max(peak, on_gpu or 0) for peak, on_gpu in zip(peaks, self.world.gpu_peaks(made, by_paddle), strict=True)]

    def _whole(self, judged: Judged) -> Run:
        before, passes = self.before(judged.recomputed), (judged.form, *judged.later)
        made = self.world.run(Pipeline(passes), judged.memory_limits, before, memo=self.search.memo)
        return Run(Pipeline((*before.passes, *passes)), made, judged.memory_limits)

    # -------------------------------------------------------------------------------------------------------------- proposals

    def tighter(self, judged: Sequence[Judged], limit: int) -> list[Judged]:
        """What exceeds the budget and would be faster than all that keeps it, as tighter budgets would have it."""
        best = next((each.step_ns or 0 for each in _fitting(judged, limit)), None)
        over = [each for each in judged if each.step_ns is not None and each.peak_bytes > limit and (best is None or each.step_ns < best)]
        over.sort(key=lambda each: each.step_ns or 0)
        found: dict[tuple[Numbers | None, Schedule1F1B, float], None] = {}
        for part in TIGHTER if over else ():
            needed = self.search.levels(int(part * limit), (0.0,))[-1] if self.chooses else None
            for each in over[:MOST_TIGHTER]:
                more = tuple(map(max, each.recomputed, needed)) if each.recomputed and needed else needed or each.recomputed
                found |= {(level, each.form, part): None for level in (each.recomputed, more)}
        return [self.draft(more, form, self.later, limit, part) for more, form, part in found]

    def less_recomputed(self, judged: Sequence[Judged], limit: int) -> list[Judged]:
        """The fastest that keeps the budget with less recomputed on one stage after the other, as long as that makes it faster: offload
        gives back what a stage then holds too much, and what that costs only a simulation of the whole step says."""
        best, found = next(iter(_fitting(judged, limit)), None), list[Judged]()
        if best is None or best.recomputed is None or not self.chooses or not self.offloads:
            return found
        fewer = [self.search.levels(limit, (-part,))[-1] for part in LESS]
        for stage in reversed(range(len(best.recomputed))):
            for levels in fewer:
                if levels[stage] < best.recomputed[stage]:
                    recomputed = (*best.recomputed[:stage], levels[stage], *best.recomputed[stage + 1 :])
                    found.append(self.draft(recomputed, best.form, best.later, limit))
                    if found[-1].peak_bytes <= limit:
                        break
            best = _fitting((best, *found), limit)[0]
        return found

    def with_less(self, judged: Sequence[Judged], limit: int) -> list[Judged]:
        """Schedules that are looked for in less memory: where what the coarse model found holds more than it says, and more than it may,
        though it would be faster than all that fits. They leave free by how much it holds more than expected."""
        newest, more, levels = judged, list[Judged](), self.looked_at[0]
        for _ in range(CLOSER):
            best = next((each.step_ns or 0 for each in _fitting((*judged, *more), limit)), None)
            ranked = [each for each in newest if (each.recomputed, each.form) in self.expected]
            over = [
                each
                for each in ranked
                if each.step_ns is not None
                and limit < each.peak_bytes <= NEARLY * limit
                and (best is None or each.step_ns < (1 - PAYS) * best)
            ]
            if not over:
                break
            within = limit - max(each.peak_bytes - self.expected[each.recomputed, each.form] for each in over)
            found = self._as_forms(self._find(within, COARSE_SCHEDULES), levels)
            newest = [self.draft(*each, self.later, limit) for each in dict.fromkeys((level, form.draft()) for level, form in found)]
            more += newest
        return more

    def in_paddles_order(self, limit: int) -> list[Judged]:
        """Without a budget, Paddle's order of a program that recomputes with what that order needs; where it holds more than it should by
        what is recomputed, with more of it. Other orders may hold too much on a stage on which all is recomputed already."""
        judged, within = list[Judged](), limit
        for _ in range(ROUNDS if self.recomputes and self.chooses else 0):
            judged.append(self.draft(self.search.levels(within, (0.0,))[-1], self.asked.baseline(), self.later, limit))
            if judged[-1].peak_bytes <= limit:
                break
            within -= 2 * (judged[-1].peak_bytes - limit)
        return judged

    def alternatives(self, judged: Judged, limit: int) -> list[Judged]:
        """A form with the alternatives of each pass after it."""
        return [
            self.draft(judged.recomputed, judged.form, (*self.later[:k], other, *self.later[k + 1 :]), limit)
            for k, each in enumerate(self.later)
            for other in each.alternatives()
        ]

    # ------------------------------------------------------------------------------------------------------- the coarse model

    def _lagging(self, baseline_peaks: Sequence[int], limit: int) -> list[tuple[Numbers | None, Schedule1F1B]]:
        """The schedules that the coarse model finds best, with how much each stage recomputes."""
        levels = self._recomputation(limit) if self.given and self.chooses else (self.needed,)
        found = self._schedules(levels, baseline_peaks, limit)
        if self.chooses and not self.given and (found.memory_pays or self.recomputes):
            levels = self._recomputation(limit)
            found = self._schedules(levels, baseline_peaks, limit)
        return self._as_forms(found.schedules, levels)

    def _as_forms(self, found: Sequence[Ranked], levels: Sequence[Numbers | None]) -> list[tuple[Numbers | None, Schedule1F1B]]:
        """Schedules as forms, with how much each stage recomputes."""
        forms = {(_recomputed(each, levels), self._lagged(each)): each.peak_bytes for each in found}
        self.expected |= {(recomputed, form.draft()): peak for (recomputed, form), peak in forms.items()}
        return list(forms)

    def _lagged(self, found: Ranked) -> Schedule1F1B:
        pipe, each, weight = self.pipe, found.schedule, self.asked.send_weight()
        plain = tuple(
            (mixed_depth if form == "mixed" else in_flight)(s, pipe.num_stages, pipe.num_micro_batches) for s, form in enumerate(each.form)
        )
        weight_delay_at_end = tuple(
            weight_delay + more for weight_delay, more in zip(each.weight_delay, each.more_weight_delay_at_end, strict=True)
        )
        early, at_end = (weight if all(which) else tuple(weight * one for one in which) for which in (each.early, each.early_at_end))
        return msgspec.structs.replace(
            self.asked,
            interleave=each.form[0] if len({*each.form}) == 1 else each.form,
            weight_delay=each.weight_delay if any(each.weight_delay) else 0,
            weight_delay_at_end=None if weight_delay_at_end == each.weight_delay else weight_delay_at_end,
            depth=() if pipe.num_chunks > 1 or (each.depth == plain and not self.draws) else each.depth,
            send_latency_weight=early,
            send_latency_weight_at_end=None if at_end == early else at_end,
            inline_share=each.inline_share if any(each.inline_share) else 0.0,
        )

    def _recomputation(self, limit: int) -> tuple[Numbers | None, ...]:
        """What a schedule may recompute; None without a budget where neither it nor the program recomputes anything."""
        return tuple(level if any(level) or self.given or self.recomputes else None for level in self.search.levels(limit))

    def _schedules(self, levels: Sequence[Numbers | None], baseline_peaks: Sequence[int], limit: int) -> Found:
        """What is found from what the first rank of each stage says of its jobs."""
        made = [self.before(level) for level in levels]
        speaker = {facts.stage: rank for rank, facts in reversed([*enumerate(self.world.facts)])}
        programs = tuple(each.programs for each in made)
        said = self.world.map(stage_work, programs, tuple(baseline_peaks), ranks=sorted(speaker.values()))
        stages: dict[int, StageWork] = {stage: said[rank] for stage, rank in sorted(speaker.items())}
        orders = self._all_orders(stages, {stage: [each.programs[rank] for each in made] for stage, rank in speaker.items()}, speaker)
        times = [
            tuple(StageTimes(stage, orders[work], peak) for work, peak in zip(each.work, each.peak_bytes, strict=True))
            for stage, each in stages.items()
        ]
        self.looked_at = levels, [each for stage in times for each in self._without_moved(stage, limit)]
        limits = [(limit, COARSE_SCHEDULES), *((int(limit * more), 1) for more in OVER_BUDGET if self.offloads)]
        best = [each for most, count in limits for each in self._find(most, count)]
        free = [] if self.given or len(levels) > 1 else self._find(ANY, 1)
        return Found(tuple(best), bool(free) and (not best or free[0].step_ns < (1 - PAYS) * best[0].step_ns))

    def _find(self, limit: int, count: int) -> list[Ranked]:
        return find_schedules(self.looked_at[1], self.pipe.num_micro_batches, limit, count, self.draws, self.pipe.num_chunks)

    def _all_orders(
        self, stages: Mapping[int, StageWork], programs: Mapping[int, Sequence[int]], speaker: Mapping[int, int]
    ) -> dict[str, tuple[StageOrder, ...]]:
        """The orders of the jobs of all stages: of each kind of work found on the first stage that does it, first with nothing more
        recomputed, which the others are like.

        Args:
            stages: What they do.
            programs: Numbers of the programs that do it.
            speaker: The rank that speaks for a stage.
        """
        owner = {work: stage for stage in sorted(stages, reverse=True) for work in stages[stage].work}
        found: dict[str, tuple[StageOrder, ...]] = {}
        for are_bases in (True, False):
            new: dict[int, dict[str, int]] = {}
            for stage, each in stages.items():
                mine = {
                    work: number
                    for work, number in zip(each.work, programs[stage], strict=True)
                    if owner[work] == stage and (work == each.work[0]) == are_bases
                }
                new |= {speaker[stage]: mine} if mine else {}
            if not new:
                continue
            like = [() if are_bases else found.get(stages[facts.stage].work[0], ()) for facts in self.world.facts]
            numbers = tuple(tuple(new.get(rank, {}).values()) for rank in self.world.all)
            told = tuple(each if rank in new else () for rank, each in enumerate(like))
            given = spec_of(self.asked), numbers, told, self.memory_limits, self.search.memo
            answers = self.world.map(job_orders, *given, ranks=sorted(new))
            found |= {work: orders for rank, works in new.items() for work, orders in zip(works, answers[rank], strict=True)}
        return found

    def _without_moved(self, levels: tuple[StageTimes, ...], limit: int) -> tuple[StageTimes, ...]:
        """The levels of a stage without what it holds above the limit at each of them, which only offload can give back."""
        over = min(each.peak_bytes for each in levels) - limit
        if over <= 0 or not self.offloads:
            return levels
        return tuple(msgspec.structs.replace(each, peak_bytes=each.peak_bytes - over) for each in levels)

    # ---------------------------------------------------------------------------------------------------------------- reports

    def _baseline_facts(self, own: Judged) -> dict[str, Fact]:
        """What remarks tell of Paddle's own jobs and streams: the passes that a user asked for beside them, their step and their peak; and
        how the bytes of the choice are counted, where they are not a GPU's."""
        found: dict[str, Fact] = {"baseline_peak_bytes": own.peak_bytes}
        if own.step_ns is not None:
            found["baseline_step_ns"] = own.step_ns
        if passes := [each.name for each in self.own.passes if not each.is_default]:
            found["baseline_passes"] = passes
        return found if self.given else {**found, "counted": "operations in turn"}

    def _lost(self, judged: list[Judged], limit: int) -> list[Remark]:
        """A remark for each form that was not taken, with the reason."""
        found = []
        for each in judged:
            facts = each.facts(self.later) | {"peak_bytes": each.peak_bytes}
            facts |= {"over_bytes": each.peak_bytes - limit} if each.peak_bytes > limit else {}
            if each.step_ns is None:
                found.append(said("declined", "form-would-stall", **facts))
            else:
                found.append(said("declined", "form-not-taken", step_ns=each.step_ns, **facts))
        return found


BASELINE_KEPT, FORM_TAKEN = "baseline-kept", "form-taken"
"""Rules of the remark that says what an open schedule became."""


def said(kind: Kind, rule: str, **facts: Fact) -> Remark:
    """A remark for the report of the schedule."""
    return remark(kind, rule, **facts).of(Schedule1F1B.name)


def _fitting(judged: Sequence[Judged], limit: int) -> list[Judged]:
    """Forms whose step ends and that hold no more than they may, the fastest first; of equally fast ones the order stays."""
    return sorted((each for each in judged if each.step_ns is not None and each.peak_bytes <= limit), key=lambda each: each.step_ns or 0)


def _nearest(judged: Sequence[Judged]) -> list[Judged]:
    """Of forms that exceed the budget, those first that do so least."""
    return sorted((each for each in judged if each.step_ns is not None), key=lambda each: each.peak_bytes)


def _recomputed(found: Ranked, levels: Sequence[Numbers | None]) -> Numbers | None:
    """How much each stage recomputes at the levels of a schedule; None for what the program has."""
    at = found.schedule.level
    if not any(at):
        return levels[0]
    return tuple((levels[level] or (0,) * len(at))[stage] for stage, level in enumerate(at))


def _with_choice_of(first: Run, again: Run, why: Remark) -> Run:
    """A run whose schedule was decided before, with the remarks that say how, and why it was made again."""
    notes = [each for each in first.made.notes if each.pass_name == Schedule1F1B.name]
    chosen = [each for each in notes if each.rule in (BASELINE_KEPT, FORM_TAKEN)]
    return again.noted(*chosen, why, *(each for each in notes if each.kind == "declined"))


# -------------------------------------------------------------------------------------------------------------- forms of passes


def schedule_of(made: Pipeline) -> Schedule1F1B | None:
    """The schedule among some passes."""
    return next((each for each in made.passes if isinstance(each, Schedule1F1B)), None)


def with_schedule(made: Pipeline, form: Schedule1F1B) -> Pipeline:
    """The passes with this schedule."""
    return Pipeline(tuple(form if isinstance(each, Schedule1F1B) else each for each in made.passes))


def recomputing(made: Pipeline, level: int | Numbers) -> Pipeline:
    """The passes with so much recomputed, on every stage or by stage."""
    return Pipeline(tuple(each.with_level(level) if isinstance(each, ChooseRecompute) else each for each in made.passes))


def waiting(made: Pipeline) -> Pipeline:
    """The passes in their alternatives: with a host that waits more often."""
    return Pipeline(tuple(next(iter(each.alternatives()), each) for each in made.passes))


def in_paddles_order(made: Pipeline) -> Pipeline:
    """The passes with Paddle's own jobs where the form was open."""
    return Pipeline(tuple(each.baseline() if isinstance(each, Schedule1F1B) and each.is_open() else each for each in made.passes))


def paddles_own(asked: Pipeline, within_budget: bool = True) -> Pipeline:
    """Paddle's own jobs and streams; a user's other passes run all the same, but none that only follows the budget."""
    mine = [each for each in asked.passes if not within_budget or not each.follows_budget]
    return Pipeline(tuple(kept for each in mine if (kept := each.baseline()) is not None))


def paddles_streams(asked: Pipeline) -> Pipeline:
    """Paddle's own jobs and streams, with the passes that follow the budget."""
    forms = (each if each.follows_budget else each.baseline() for each in asked.passes)
    return Pipeline(tuple(each for each in forms if each is not None))
