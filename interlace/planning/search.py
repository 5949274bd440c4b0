"""The search for a world's plan: it decides the passes with all their options, for the shortest simulated step or for the least memory.

Rank 0 runs this as ordinary sequential code, and asks the ranks for what concerns each of them (`World.map`). With a budget, every rank
keeps it on a GPU, or BudgetError gives the least feasible one (`Search.within`, `least_memory.py`). Without one, if the form of the
schedule is open, the limit is the peak of Paddle's baseline on its fullest rank, plus what may be held beyond it
(`Search.beside_baseline`).

- An open schedule (`interleave: auto`) is searched together with what each stage recomputes (`fastest.py`): Paddle's baseline, the named
  forms and schedules of the coarse model (`coarse.py`), and these with less memory, less or more recomputation, or other waits of the
  host, in the order of `proposals.PROPOSALS`. Each is drafted and judged by its simulated step and its peak (`drafts.py`).
- If a given form is slower than the plainest one, milder forms are tried (`Search.judged`).

With everything kept, a stage exceeds its budget by some bytes. Recomputation frees part of them, cheapest byte first (`levels.py`);
offload, which is planned on the schedule, frees the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from interlace.ir.remarks import Fact, Remark, remark
from interlace.passes import Pass, Pipeline, ordered
from interlace.passes.base import is_built_in
from interlace.planning.drafts import Drafts
from interlace.planning.fastest import best_level, fastest
from interlace.planning.least_memory import least_memory, refuse
from interlace.planning.limits import ROUNDED, Limit, baseline_bytes, beyond_baseline, bytes_beyond, is_unlimited
from interlace.planning.making import BASELINE_KEPT, Making, said
from interlace.planning.proposals import Tried
from interlace.planning.tasks import MemoryLimits, baseline_peak, is_long, least_bytes, moves_states, same_jobs
from interlace.planning.variants import (
    alternatives,
    at_plain_depth,
    drafted,
    fallbacks,
    in_paddles_order,
    is_open,
    label,
    paddles_own,
    recomputing,
    schedule_of,
    waiting,
    with_schedule,
)
from interlace.planning.world import Made, World

EXCESS_PARTS = (1.0, 0.9, 0.75, 0.5, 0.25, 0.0)
"""Shares of the bytes over the budget that recomputation may free with a given form; offload frees the rest."""

HELD = 1.005
"""If waits of the host lengthen the step by more than this factor, plans that need fewer waits are searched."""

MOVING_PAYS = 1.01
"""If the step is longer by more than this factor where all optimizer state stays on the device, no other search that moves none is made. In
the baseline's memory that would be one without `return-memory`, whose step was shorter by 0.4 % at most (15 programs of the zoo); under a
budget of 0.9 one with it: by 1.8 % at most (five programs), where moving state made the step 1.2 to 10 % shorter."""


class Search:
    """The search for a world.

    Attributes:
        unlimited_tried: What was proposed for an open schedule without a budget; None if nothing was.
        staying_ns: Simulated step of the run that keeps all optimizer state on the device, where it was compared with one that may move
            some; else 0.
        runs: Complete runs found, also by searches that this one began, each once with the most reasons for it; none of a long step
            without a budget.
    """

    def __init__(self, world: World, asked: Pipeline) -> None:
        self.world, self.asked, self.make = world, asked, Making(world, asked)
        self.runs: list[Made] = []
        self.unlimited_tried: Tried | None = None
        self.staying_ns = 0

    def beside_baseline(self, means: Sequence[Pass] = (), limit: int | None = None) -> Made:
        """Run the passes without a budget. If the form of the schedule is open, this gives the fastest run found that holds no more on a
        GPU than `limit` bytes, by default what Paddle's baseline holds (`beyond_baseline`); otherwise the form that was asked for, whatever
        it holds.

        These runs are compared: (1) the one that holds no more when operations run one after the other; (2) if on a GPU it holds more, or
        its host waits at a cost in time to hold no more, the same with memory returned (`return-memory`, at ends of streams too if it needs
        that) and with waits of the host at its peaks; (3) the run with the limit as a budget; if that moves optimizer state or gains
        nothing, the one that does not move any; and, unless moving state gains clearly (`MOVING_PAYS`), the one that neither moves any nor
        returns memory; (4) Paddle's baseline.

        Of a long step, (3) is made first, and taken if it gains anything over (4); otherwise all are made and compared.

        `means` are passes that were not asked for and may be used to hold less: all in (3), in the case of (2) those that do not follow a
        budget. Raises PassError as `Pipeline.run`.
        """
        limit, world = self.limit_of_baseline if limit is None else limit, self.world
        following = self.following(means)
        if limit and following and is_long(world.captured) and (run := self._of_long_step(following, limit)) is not None:
            return run
        found = self.unlimited()
        if not limit or (took := world.step_ns(found)) is None:
            return found
        over = max(world.bytes_over_in_step(found, limit))
        over = 0 if over <= ROUNDED else over
        runs, others, again = [] if over else [found], tuple(each for each in means if not each.follows_budget), None
        if over or (others and self._is_held(found, took)):
            again = self.make.holding_less(ordered((*found.passes.passes, *others)), world.memory_limits(limit), limit).noted(*found.notes)
            runs += [again] if not any(world.bytes_over_in_step(again, limit)) else []
        for more in () if self.is_set else dict.fromkeys((others, ())):
            every = ordered((*self.asked.passes, *following, *more))
            search = self.subsearch(every if more == others else states_kept(every))
            if steps := [step_ns for run in runs if (step_ns := world.step_ns(run)) is not None]:
                search.make.beaten = self.make.beaten_by(min(steps))
            within = search.fitting_beside(self.baseline, limit)
            runs += [within] if within is not None and not any(world.bytes_over_in_step(within, limit)) else []
            if within is not None and search.staying_ns > MOVING_PAYS * (world.step_ns(within) or 0):
                break  # without memory returned it would not be faster either

        def noted(run: Made, step_ns: int) -> Made:
            """A run with the reason why it is taken instead of `found`."""
            facts = self._within_limit(limit, step_ns) | {"other_ns": took} | ({"over_bytes": over} if over else {})
            if run is self.baseline:
                kept = said("decided", BASELINE_KEPT, baseline_step_ns=step_ns, baseline_peak_bytes=baseline_bytes(world))
                return run.noted(kept, said("declined", "more-than-the-baseline", **facts))
            if over:
                return run.noted(said("decided", "baseline-memory-kept", **facts))
            if run is found or step_ns >= took:
                return run
            return run.noted(_memory_returned(step_ns, took) if run is again else said("decided", "within-baseline-faster", **facts))

        judged = [(step_ns, run) for run in (*runs, self.baseline) if (step_ns := world.step_ns(run)) is not None]
        judged = [(step_ns, noted(run, step_ns)) for step_ns, run in judged]
        for run in (run for _, run in judged if run.programs != self.baseline.programs):
            self.recorded(run)
        return min(judged, key=lambda each: each[0], default=(0, found))[1]

    def _of_long_step(self, following: tuple[Pass, ...], limit: int) -> Made | None:
        """The run with the limit as a budget, if it is faster than Paddle's baseline; None otherwise. Optimizer state moves only if nothing
        faster is found without. As a long step is spared the other searches, and levels of recomputation by stage, one of these may have
        found a faster plan: GPT-3 6.7B, pp 8, mp 4, 64 micro-batches, takes 0.01 % longer (simulated), and planning 77 instead of 93 s of
        CPU."""
        usual = self.world.step_ns(self.baseline)
        if usual is None:
            return None
        every = ordered((*self.asked.passes, *following))
        staying = states_kept(every)
        for passes in [staying] if staying == every else [staying, every]:
            search = Search(self.world, passes)
            search.make.by_stage = False
            run = search.fitting(limit)
            took = self.world.step_ns(run) if run is not None else None
            if run is not None and took is not None and took < usual:
                return run.noted(said("decided", "long-step-within-baseline", **self._within_limit(limit, took)))
        return None

    @cached_property
    def baseline(self) -> Made:
        """Paddle's own plan."""
        return self.world.run(paddles_own(self.asked, False), self.world.memory_limits(None))

    def _within_limit(self, limit: int, step_ns: int) -> dict[str, Fact]:
        """Facts for remarks about a step within the baseline's memory."""
        facts: dict[str, Fact] = {"limit_bytes": limit, "step_ns": step_ns}
        return facts | {"beyond_bytes": beyond} if (beyond := bytes_beyond(self.world)) else facts

    @property
    def limit_of_baseline(self) -> int:
        """Device bytes that a rank may hold on a GPU without a budget. 0 means no limit: the user wants none or gave the form, or other
        stages or the baseline's peak are not known."""
        asked = schedule_of(self.asked)
        if asked is None or not is_open(asked) or self.make.is_alone or is_unlimited(self.world):
            return 0
        held = baseline_bytes(self.world)
        return beyond_baseline(self.world, held) if held else 0

    def unlimited(self) -> Made:
        """Run the passes without a budget. If the form of the schedule is open, so is recomputation, and no stage holds more than the
        fullest stage of Paddle's baseline, counted with operations that run one after the other. Raises PassError as `Pipeline.run`."""
        return self.chosen(self.asked, None)

    def within(self, budget: int, means: Sequence[Pass] = ()) -> Made:
        """Run the passes within a memory budget, in device bytes that no rank may exceed on a GPU. If the run without a budget keeps it and
        is faster, that run is taken, with `memory_limits` of 0. `means` are passes that were not asked for and may be used (`or_with`).

        Of a long step, the first run found is compared with fewer others: not with one that uses `means`, and only if it moves optimizer
        state with one that moves none. Within 40 and 46 %, Llama with 32 layers, pp 8, mp 4 and 64 micro-batches takes the same time as
        with all of them (0.00 %, simulated), and planning takes 255 and 221 s of CPU instead of 665.

        Raises BudgetError, with the least feasible budget, if no plan keeps this one; PassError as `Pipeline.run`.
        """
        found = self.fitting(budget)
        if found is None or not is_long(self.world.captured):
            found = self.or_with(means, self.or_with_states_kept(found, budget), budget)
        elif any(self.world.map(moves_states, found.programs)):
            found = self.or_with_states_kept(found, budget)
        found = self.or_without_budget(found, budget) if found else least_memory(self.make)
        if any(self.world.bytes_over(found, budget)):
            refuse(self.make, found, budget)
        return found

    def subsearch(self, asked: Pipeline) -> Search:
        """A search for these passes, whose runs are this one's too."""
        search = Search(self.world, asked)
        search.runs = self.runs
        return search

    def recorded(self, run: Made) -> Made:
        """A complete run, which is also kept in `runs`."""
        at = next((k for k, each in enumerate(self.runs) if key_of(each) == key_of(run)), None)
        if at is None:
            self.runs.append(run)
        elif len(run.notes) > len(self.runs[at].notes):
            self.runs[at] = run
        return run

    def following(self, means: Sequence[Pass]) -> tuple[Pass, ...]:
        """The passes among `means` that follow a budget; none if the user says what is moved."""
        return () if self.is_set else tuple(each for each in means if each.follows_budget)

    @property
    def is_set(self) -> bool:
        """Whether the user says what is moved."""
        return any(each.follows_budget and not each.is_default for each in self.asked.passes)

    # ------------------------------------------------------------------------------------------------------- the fastest step

    def chosen(self, pipeline: Pipeline, limit: Limit | None) -> Made:
        """Run the passes. If the schedule's form is open, or has milder variants, the simulated whole step decides."""
        pipeline.check(self.world.captured)
        asked = schedule_of(pipeline)
        if asked is not None and asked.changes_depth(self.make.pipe) and self.make.draws:
            return self.chosen(with_schedule(pipeline, at_plain_depth(asked)), limit).noted(said("declined", "random-draws"))
        if asked is not None and is_open(asked) and not self.make.is_alone:
            found, tried = fastest(Drafts(self.make, pipeline, asked, limit))
            self.unlimited_tried = self.unlimited_tried if limit else tried
            return found
        if limit is None or not limit.levels:
            return self.judged(pipeline, self.world.memory_limits(limit.budget if limit else None), limit.budget if limit else 0)
        recomputed, memory_limits = limit.levels[0], self.world.memory_limits(limit.budget)
        if asked is not None and not self.make.is_alone and len(set(limit.levels)) > 1:
            best = best_level(Drafts(self.make, pipeline, asked, limit))
            recomputed, memory_limits = best.recomputed or recomputed, best.memory_limits
        return self.judged(recomputing(pipeline, recomputed), memory_limits, limit.budget)

    def judged(self, pipeline: Pipeline, memory_limits: MemoryLimits, budget: int = 0) -> Made:
        """Run the passes, and choose among variants of a pass by the simulated step.

        If a pass has fallbacks, its first form is kept whose step is no slower than with the last fallback, the simplest. If a pass has
        alternatives (where the host waits), the form that exceeds the budget least is kept, of those that keep it the fastest, of equally
        fast ones that of least energy. A rank that plans without the other stages keeps the form that was asked for.
        """
        passes = pipeline.passes
        at = next((k for k, each in enumerate(passes) if fallbacks(each)), None)
        if at is None:
            return self._with_alternatives(replace(self.world.start, memory_limits=memory_limits), passes, budget)
        first, judged, later = self._then(replace(self.world.start, memory_limits=memory_limits), passes[:at]), passes[at], passes[at + 1 :]

        def run(form: Pass) -> Made:
            return self._with_alternatives(first, (form, *later), budget)

        if self.make.is_alone:
            return run(judged).noted(remark("declined", "stages-not-known").of(judged.name))
        *simpler, simplest = fallbacks(judged)
        asked, plain = run(judged), self._then(first, (simplest, *drafted(Pipeline(later)).passes))
        if all(self.world.map(same_jobs, plain.programs, asked.programs)):
            return asked
        limit_ns, declined = self.world.step_ns(plain, passes), list[Remark]()
        for form in (judged, *simpler):
            found = asked if form is judged else run(form)
            took_ns = self.world.step_ns(found)
            if took_ns is None or limit_ns is None:
                return asked.noted(remark("declined", "step-would-stall").of(judged.name))
            facts: dict[str, Fact] = {"form": label(form), "step_ns": took_ns, "other": label(simplest), "other_ns": limit_ns}
            if took_ns <= limit_ns:
                return found.noted(remark("decided", "form-faster", **facts).of(judged.name), *declined)
            declined.append(remark("declined", "form-slower", **facts).of(judged.name))
        return run(simplest).noted(*declined)

    def _with_alternatives(self, first: Made, passes: tuple[Pass, ...], budget: int) -> Made:
        """Run `passes` after `first`, with the best form of a pass that has alternatives; see `judged`."""
        cut = next((k for k, each in enumerate(passes) if alternatives(each)), len(passes)) if not self.make.is_alone else len(passes)
        if cut == len(passes):
            return self._then(first, passes)
        common = next((k for k, each in enumerate(passes[:cut]) if each.decides == "transfers"), cut)  # depends on later passes
        asked, rest = passes[cut], passes[cut + 1 :]
        found = self._then(first, passes[:common])
        forms = {label(form): self._then(found, (*passes[common:cut], form, *rest)) for form in (asked, *alternatives(asked))}
        took = {name: self.world.step_ns(form) for name, form in forms.items()}
        over = {name: max(self.world.bytes_over(form, budget)) if budget else 0 for name, form in forms.items()}
        ends = [name for name, each in took.items() if each is not None]
        best = min(ends, key=lambda name: (over[name], took[name] or 0, self.world.joules(forms[name])), default=label(asked))
        remarks = []
        for name in (each for each in ends if each != best):
            facts: dict[str, Fact] = {"form": best, "step_ns": took[best] or 0, "other": name, "other_ns": took[name] or 0}
            facts |= {"over_bytes": over[name]} if over[name] else {}
            remarks.append(remark("decided", "form-faster", **facts).of(asked.name))
        return forms[best].noted(*remarks)

    def _then(self, before: Made, passes: tuple[Pass, ...]) -> Made:
        """Run these passes on the result of an earlier run."""
        return self.world.run(Pipeline(passes), before.memory_limits, before)

    # ------------------------------------------------------------------------------------------------------- within a budget

    def fitting(self, budget: int) -> Made | None:
        """The fastest run found within a budget; None if none was found.

        A run that exceeds the budget on a GPU is made again with lower limits in the same schedule, and with other waits of the host. If
        that does not help, the same is tried in Paddle's baseline order.
        """
        for form in () if self._is_hopeless(budget) else (self.asked, in_paddles_order(self.asked)):
            for each in self._with_other_waits(self.chosen(form, self.limit(budget, form))):
                if (found := self.make.with_lower_limits(self.make.made, each, budget)) is not None:
                    return self.recorded(found)
        return None

    def fitting_beside(self, baseline: Made, budget: int) -> Made | None:
        """As `fitting`; if that moves optimizer state, gains nothing over Paddle's baseline, or finds nothing, also without moving
        state."""
        found = self.fitting(budget)
        if found is None or self.make.levels.states is None:
            return self.or_with_states_kept(found, budget)
        took, usual = (self.world.step_ns(run) for run in (found, baseline))
        gains = took is not None and usual is not None and took < usual
        return found if gains and not any(self.world.map(moves_states, found.programs)) else self.or_with_states_kept(found, budget)

    def or_with_states_kept(self, leaving: Made | None, budget: int) -> Made | None:
        """`leaving`, a run that may move optimizer state, or a run that keeps all of it on the device, if that keeps the budget and is as
        fast."""
        if self.make.levels.states is None:
            return leaving
        search = self.subsearch(states_kept(self.asked))
        took = self.world.step_ns(leaving) if leaving is not None else None
        search.make.beaten = self.make.beaten.also_by(took)
        staying = search.fitting(budget)
        if staying is None or leaving is None:
            return leaving or staying
        other = self.world.step_ns(staying)
        self.staying_ns = other or 0
        if took is None or (other is not None and other <= took):
            return self.recorded(staying.noted(said("decided", "states-stay", step_ns=other or 0, leaving_ns=took or 0)))
        return self.recorded(leaving.noted(said("decided", "states-leave", step_ns=took, staying_ns=other or 0)))

    def or_with(self, means: Sequence[Pass], without: Made | None, budget: int) -> Made | None:
        """`without`, a run within the budget, or one with the passes `means` to hold less, if that keeps the budget and is faster."""
        took = self.world.step_ns(without) if without is not None else None
        if not means or without is None or took is None:
            return without
        search = self.subsearch(ordered((*self.asked.passes, *means)))
        search.make.beaten = self.make.beaten_by(took)
        found = search.fitting(budget)
        if found is None or self.staying_ns <= MOVING_PAYS * took:
            found = search.or_with_states_kept(found, budget)
        other = self.world.step_ns(found) if found is not None else None
        if found is None or other is None or other >= took:
            return without
        return self.recorded(found.noted(_memory_returned(other, took)))

    def _is_held(self, run: Made, took: int) -> bool:
        """Whether waits of the host make a run slower (`HELD`); `took` is its simulated step in nanoseconds."""
        unheld = self.world.step_ns_unheld(run)
        return unheld is not None and took > HELD * unheld

    def or_without_budget(self, within: Made, budget: int) -> Made:
        """`within`, a run within the budget, or the run without one, if that keeps the budget and is faster.

        The two searches have different memory limits, so either may find the faster schedule. The run without a budget is made only if the
        form is open, as the two hardly differ otherwise, and if Paddle's own plan keeps the budget, as this run is then likely to.
        """
        open_ = schedule_of(self.asked)
        if max(each or budget + 1 for each in self.world.known(baseline_peak)) > budget or open_ is None or not is_open(open_):
            return within
        search = Search(self.world, self.without_budget)
        without, self.unlimited_tried = search.unlimited(), search.unlimited_tried
        took, other = (self.world.step_ns(run) for run in (within, without))
        if took is None or other is None:
            return within
        without = replace(without, memory_limits=self.world.memory_limits(0))
        if other >= took:
            self.recorded(without)
            return self.recorded(within.noted(said("declined", "without-budget-slower", step_ns=other, within_ns=took)))
        if over := max(self.world.bytes_over_in_step(without, budget)):
            return self.recorded(within.noted(said("declined", "without-budget-too-large", step_ns=other, over_bytes=over)))
        return self.recorded(without.noted(said("decided", "without-budget-faster", step_ns=other, within_ns=took)))

    @property
    def without_budget(self) -> Pipeline:
        """The passes as they can be asked for without a budget, which offload needs."""
        return Pipeline(tuple(each for each in self.asked.passes if not each.mistake()))

    def _is_hopeless(self, budget: int) -> bool:
        """Whether some rank cannot run within the budget, in whatever order and whatever is moved."""
        at = next((k for k, each in enumerate(self.asked.passes) if each.decides == "schedule"), len(self.asked.passes))
        if not all(is_built_in(type(each)) for each in self.asked.passes[at:]):
            return any(each > budget for each in self.world.map(least_bytes, self.world.start.programs, True, self.make.levels.states))
        before = Pipeline(self.asked.passes[:at])
        keeping = recomputing(before, 0) if self.make.levels.are_open else before
        nothing = self.world.run(keeping, self.world.memory_limits(budget))
        return any(each > budget for each in self.world.map(least_bytes, nothing.programs, False, self.make.levels.states))

    def _with_other_waits(self, run: Made) -> Iterator[Made]:
        """The run, and then, if it holds less, a run of the same passes with a host that waits elsewhere."""
        yield run
        passes = waiting(run.passes)
        if passes != run.passes and self.make.most(other := self.make.made(passes, run.memory_limits)) < self.make.most(run):
            yield other

    def limit(self, budget: int, made: Pipeline) -> Limit:
        """The budget, with the levels of recomputation to choose from for these passes."""
        if not self.make.levels.are_open:
            return Limit(budget)
        asked = schedule_of(made)
        parts = EXCESS_PARTS if self.make.offloads and not (asked and is_open(asked)) else EXCESS_PARTS[:1]
        freed = [(part, 0) for part in parts]
        beside = self.make.levels.to_free(budget, freed, beside_states=True) if self.make.levels.states is not None else ()
        return Limit(budget, (*beside, *self.make.levels.to_free(budget, freed)))


def key_of(run: Made) -> object:
    """What tells runs apart: with other limits, the same programs may hold something else once their jobs are searched further."""
    return run.programs, run.memory_limits


def states_kept(pipeline: Pipeline) -> Pipeline:
    """The passes without those that move optimizer state."""
    return Pipeline(tuple(each for each in pipeline.passes if each.decides != "states"))


def _memory_returned(step_ns: int, without_ns: int) -> Remark:
    return said("decided", "memory-returned-faster", step_ns=step_ns, without_ns=without_ns)
