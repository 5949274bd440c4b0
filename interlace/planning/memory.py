"""One memory budget over recomputation, offload and schedule: who gives how much memory back.

Each stage holds more than its budget by some bytes when everything is kept. Recomputation gives part of them back, cheapest byte first;
offload, which is planned on the schedule, the rest. How much each stage recomputes is chosen together with the schedule, by the simulated
step of the whole pipeline (`interlace/planning/whole_step.py`): a schedule that keeps more weight gradients waiting may be worth more
recomputation than Paddle's order would need. Here is what it chooses from, and what becomes of plans that exceed the budget all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from interlace.cost_model import Costs
from interlace.errors import BudgetError
from interlace.ir import Program
from interlace.passes.base import is_built_in
from interlace.passes.choose_recompute import ChooseRecompute, choices, recomputation
from interlace.passes.offload_activations import OffloadActivations
from interlace.passes.peers import Peers, gather, stand_ins
from interlace.passes.pipeline import PassReport, Pipeline
from interlace.passes.schedule_1f1b import Schedule1F1B, draws_twice
from interlace.planning.budget import bytes_over, bytes_over_in_step, peak_bytes, say_budget, stock_peak_bytes
from interlace.planning.judge import Run, noted, step_ns
from interlace.planning.whole_step import Room, less_room, paddles_own, paddles_streams, recomputing, run_passes
from interlace.scheduler.jobs import stock_jobs
from interlace.scheduler.memory.live import in_order, lifetimes, needed_at_once
from interlace.scheduler.recompute import Recomputation
from interlace.scheduler.recompute_choices import LEVELS
from interlace.scheduler.whole_step.search import Numbers
from interlace.units import ms, size

SOONER = (2, 8, 32)
"""So many times what a plan exceeds the budget by is taken off the room with each plan that is made again: offload moves whole values, so
a little less room may change nothing, and each is a plan in full (GPT-3 6.7B, pp 4, at 43 %: one in the place of two)."""
MOST_HOLDERS = 4
"""Kinds of memory that a refusal names."""
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


def run_in_paddles_memory(asked: Pipeline, program: Program, cost: Costs, peers: Peers | None = None) -> Run:
    """Run the passes without a budget: where the form of the schedule is open no stage holds more than Paddle's own plan on its worst
    one, and what is recomputed for it is open too.

    Raises:
        PassError: As `Pipeline.run`.
    """
    choice = MemoryChoice(asked, program, cost, peers)
    return run_passes(asked, program, cost, peers, levels=choice.levels if choice.is_open else None, memo=choice.memo)[0]


def run_within(budget: int, asked: Pipeline, program: Program, cost: Costs, peers: Peers | None = None) -> tuple[Run, int]:
    """Run the passes within a memory budget.

    Returns:
        The run, and the bytes that its passes might use for the order of operations; 0 where they were to use as much as without a budget.

    Raises:
        BudgetError: No plan keeps the budget; with the least feasible one, and what holds it.
        PassError: As `Pipeline.run`.
    """
    choice = MemoryChoice(asked, program, cost, peers)
    found = choice.fitting(budget)
    found = choice.or_without_budget(found, budget) if found else choice.tightest()
    if any(choice.bytes_over(found[0], budget)):
        choice.refuse(found[0], budget)
    return choice.told_in(found[0], budget), found[1]


def waiting(made: Pipeline) -> Pipeline:
    """The passes in their alternatives: with a host that waits more often."""
    return Pipeline(tuple(next(iter(each.alternatives()), each) for each in made.passes))


class Holds(msgspec.Struct, frozen=True):
    """What a rank holds on a GPU by what holds least, None where that is not known, and of what most of it is."""

    stage: int
    peak_bytes: int | None
    what: str = ""


class Said(msgspec.Struct, frozen=True):
    """What a rank says: how much its stage recomputes at least, as a level, in each of several cases."""

    stage: int
    levels: Numbers


def _with_choice_of(first: Run, again: Run, why: str) -> Run:
    """A run whose schedule was decided before, with the lines that say how, and why it was made again."""
    said, now = (next((each for each in run[2] if each.name == Schedule1F1B.name), None) for run in (first, again))
    if said is None or now is None:
        return again
    chosen = [line for line in said.changed if line.startswith("auto: ")]
    return noted(again, Schedule1F1B.name, [*chosen, why], [line for line in said.declined if line not in now.declined])


@dataclass(slots=True)
class MemoryChoice:
    """What can be chosen for one rank; the decision is taken alike on all.

    Attributes:
        asked: The passes as configured.
        program: As captured.
        cost, peers: As `make_plan`.
        stands_for: Rank -> the rank that is simulated in its place.
        memo: What was found out about the program.
    """

    asked: Pipeline
    program: Program
    cost: Costs
    peers: Peers | None
    stands_for: dict[int, int] = field(default_factory=dict)
    memo: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stands_for = stand_ins(self.program, self.peers)

    def fitting(self, budget: int) -> tuple[Run, int] | None:
        """A run within a budget, as fast as found, and the bytes that its passes might use; None where none was found.

        What holds more on a GPU than its operations in their order is made again with so much less room, in the same schedule; then in
        Paddle's own order with recomputation alone before anything is moved.
        """
        hopeless = any(gather(self.peers, "what is needed at once", self._needed_at_once(budget) > budget))
        for form in () if hopeless else (self.asked, self.in_paddles_order(self.asked)):
            room = self.room(budget, form)
            run, used = run_passes(form, self.program, self.cost, self.peers, room, self.levels if self.is_open else None, self.memo)
            for each in self._with_other_waits(run, budget if used is None else used):
                if (found := self._with_less_room(self.made, each, budget if used is None else used, budget)) is not None:
                    return found
        return None

    def or_without_budget(self, within: tuple[Run, int], budget: int) -> tuple[Run, int]:
        """A run within a budget, or the run without one where that keeps the budget and is faster.

        They look for schedules in different memory, so either may find the faster one. The run without a budget is made where Paddle's own
        plan keeps the budget, which is then likely to be kept, and the form is open, as they are much the same otherwise.
        """
        paddles = max(gather(self.peers, "what Paddle's own plan holds", stock_peak_bytes(self.program, self.cost) or budget + 1))
        if paddles > budget or not any(isinstance(each, Schedule1F1B) and each.is_open() for each in self.asked.passes):
            return within
        passes = Pipeline(tuple(each for each in self.asked.passes if not each.mistake()))  # offload without a budget has nothing to move
        without = run_in_paddles_memory(passes, self.program, self.cost, self.peers)
        took, other = (step_ns(run[1], self.cost, self.peers, self.stands_for) for run in (within[0], without))
        if took is None or other is None:
            return within
        says = f"planned as without a budget: whole step simulated {ms(other)}"
        if other >= took:
            return noted(within[0], Schedule1F1B.name, [], [says]), within[1]
        if any(bytes_over_in_step(without[1], budget, self.cost, self.peers, self.stands_for)):
            return noted(within[0], Schedule1F1B.name, [], [f"{says}, more memory than the budget"]), within[1]
        return noted(without, Schedule1F1B.name, [f"{says}, which keeps it; planned within it {ms(took)}"], []), 0

    def _needed_at_once(self, budget: int) -> int:
        """Device bytes without which the operations of this rank cannot run, however they are ordered and whatever is moved."""
        at = next((k for k, each in enumerate(self.asked.passes) if isinstance(each, Schedule1F1B)), len(self.asked.passes))
        if not all(is_built_in(type(each)) for each in self.asked.passes[at:]):
            return lifetimes(self.program).base["device"]
        before = Pipeline(self.asked.passes[:at])
        nothing = recomputing(before, 0) if self.is_open else before
        return needed_at_once(nothing.run(self.program, self.cost, self.peers, budget, self.memo)[0])

    def _with_other_waits(self, run: Run, room: int) -> Iterator[Run]:
        """The run, and then, where that holds less, the same passes with a host that waits elsewhere."""
        yield run
        passes = waiting(run[0])
        if passes != run[0] and max(self.bytes_over(other := self.made(passes, room), 0)) < max(self.bytes_over(run, 0)):
            yield other

    def _with_less_room(self, make: Callable[[Pipeline, int], Run], run: Run, room: int, budget: int) -> tuple[Run, int] | None:
        """The run, made again with so much less room as it exceeds the budget by; None where that does not help."""
        first = run
        for number in range(1 + len(SOONER)):
            over = bytes_over_in_step(run[1], budget, self.cost, self.peers, self.stands_for)
            if not any(over):
                return run, room
            if number < len(SOONER):
                mine = over[self.program.rank if self.peers else 0]
                room = less_room(run[1], room, mine * SOONER[number])
                run = make(self.again(run[0], mine if number or not self.offloads else 0), room)
                run = _with_choice_of(first, run, f"made again with less room: the plan held {size(max(over))} more than the budget")
        return None

    @property
    def is_open(self) -> bool:
        """Whether there is something to decide: a pass that recomputes, and whose user did not say how much."""
        return any(isinstance(each, ChooseRecompute) and each.level is None for each in self.asked.passes)

    @property
    def offloads(self) -> bool:
        """Whether a pass moves what is over the budget."""
        return any(isinstance(each, OffloadActivations) for each in self.asked.passes)

    def room(self, budget: int, made: Pipeline) -> Room:
        """What these passes may use, and the recomputation that they may choose from; a schedule that is open chooses from `levels`."""
        if not self.is_open:
            return Room(budget, budget)
        open_ = any(isinstance(each, Schedule1F1B) and each.is_open() for each in made.passes)
        parts = EXCESS_PARTS if self.offloads and not open_ else EXCESS_PARTS[:1]
        return Room(budget, budget, self._by_stage([self._level(self._excess(budget, part)) for part in parts]))

    def levels(self, limit: int, beyond: Sequence[float] = MORE_FREED) -> tuple[Numbers, ...]:
        """Recomputation that a schedule may choose from on each stage: nothing, what Paddle's own order needs to hold no more than so many
        bytes, and more."""
        freed = (0, *(self._excess(limit) + int(more * limit) for more in beyond))
        return tuple(dict.fromkeys(self._by_stage([self._level(each) for each in freed])))

    def _excess(self, budget: int, part: float = 1.0) -> int:
        """A part of the bytes that this stage holds over the budget in Paddle's order with nothing recomputed."""
        return int(part * max(0, self._peak(0) - budget))

    def again(self, made: Pipeline, freed_bytes: int) -> Pipeline:
        """Passes that were decided, with so much more recomputed that this rank's stage holds so many bytes less in Paddle's order."""
        levels = next((each.level_index for each in made.passes if isinstance(each, ChooseRecompute)), None)
        if not self.is_open or not isinstance(levels, tuple):
            return made
        mine = levels[self.program.pipeline.stage]
        freed = self._peak(0) - self._peak(mine) + freed_bytes
        (more,) = self._by_stage([max(mine, self._level(freed)) if freed_bytes else mine])
        return recomputing(made, more)

    def tightest(self) -> tuple[Run, int]:
        """What holds least by itself: all moved that can be, and each stage at the level of recomputation with which it then holds least
        (what is recomputed cannot be moved, so that need not be the last). Tried are Paddle's own order and, where the form is open, those
        by name, each with a host that waits at the ends of jobs (the alternative of `throttle-host`) or where it must, and Paddle's own
        jobs and streams with and without recomputation. Drafts are compared."""
        made, plain = (self._at_least_held(each) for each in (self.in_paddles_order(self.asked), paddles_streams(self.asked)))
        forms = list(dict.fromkeys((waiting(made), made, plain)))
        forms += [self._with_schedule(made, each) for each in self._named()]
        forms += [paddles_own(self.asked)] * bool(self._named())
        drafts = [(self._drafted(each, 1), 1) for each in forms]
        least = min(drafts, key=lambda draft: max(self.bytes_over(draft[0], 0)))
        less = self._held_less(least)
        tried = [(self.made(run[0], room), room) for run, room in ((less, least) if less is not least else (least,))]
        return min(tried, key=lambda each: max(self.bytes_over(each[0], 0)))

    def _at_least_held(self, made: Pipeline) -> Pipeline:
        """The passes with each stage at the level of recomputation with which it holds least, all moved that can be."""
        if not self.is_open:
            return made
        held = {level: self._held_by_stage(self._drafted(recomputing(made, level), 1)) for level in TIGHT}
        stages = range(self.program.pipeline.num_stages)
        return recomputing(made, tuple(min(held, key=lambda level: (held[level][stage], level)) for stage in stages))

    def _held_less(self, draft: tuple[Run, int]) -> tuple[Run, int]:
        """The draft, or one that moves less and holds less all the same: copies back take room too."""
        found = draft
        for _ in range(DESCENTS):
            below = max(self.bytes_over(found[0], 0)) - 1
            if below <= 0 or not self.offloads:
                break
            closer = self._with_less_room(self._drafted, self._drafted(draft[0][0], below), below, below)
            if closer is None or max(self.bytes_over(closer[0], 0)) > (1 - GAINS) * below:
                break
            found = closer
        return found

    def _named(self) -> list[Schedule1F1B]:
        """The forms by name of an open schedule."""
        open_ = next((each for each in self.asked.passes if isinstance(each, Schedule1F1B) and each.is_open()), None)
        return open_.named(self.program, any(gather(self.peers, "draws", draws_twice(self.program)))) if open_ else []

    @staticmethod
    def _with_schedule(made: Pipeline, form: Schedule1F1B) -> Pipeline:
        return Pipeline(tuple(form if isinstance(each, Schedule1F1B) else each for each in made.passes))

    def _held_by_stage(self, run: Run) -> list[int]:
        """Device bytes of the fullest rank of each stage on a GPU; 0 where that is not known."""
        mine = Holds(self.program.pipeline.stage, peak_bytes(run[1], self.cost) if run[1].jobs else None)
        said = gather(self.peers, "what stages hold", mine)
        return [max((each.peak_bytes or 0 for each in said if each.stage == stage), default=0)
                for stage in range(self.program.pipeline.num_stages)]  # fmt: skip

    @staticmethod
    def in_paddles_order(made: Pipeline) -> Pipeline:
        """The passes with Paddle's own jobs where the form was open."""
        return Pipeline(tuple(each.stock() if isinstance(each, Schedule1F1B) and each.is_open() else each for each in made.passes))

    def made(self, made: Pipeline, room_bytes: int) -> Run:
        """A run of passes whose forms are decided."""
        return (made, *self._run(made, room_bytes))

    def _drafted(self, made: Pipeline, room_bytes: int) -> Run:
        """The same passes, with a draft of what they make."""
        return (made, *self._run(made.draft(), room_bytes))

    def _run(self, made: Pipeline, room_bytes: int) -> tuple[Program, list[PassReport]]:
        """What passes make of the program, as far as it is not known yet."""
        return made.run(self.program, self.cost, self.peers, room_bytes, self.memo, tuple(gather(self.peers, "rooms", room_bytes)))

    def bytes_over(self, run: Run, budget: int) -> list[int]:
        """By how much each rank exceeds the budget on a GPU; 0 where it is not known to."""
        return bytes_over(run[1], budget, self.cost, self.peers)

    def refuse(self, run: Run, budget: int) -> None:
        """Raises BudgetError, on all ranks alike, with what the fullest rank holds by what holds least."""
        live = in_order(run[1]).at_peak()[:MOST_HOLDERS] if run[1].jobs else []
        what = ", ".join(f"{' '.join(filter(None, (each.layer, each.kind)))} {size(each.size_bytes)}" for each in live)
        said = gather(self.peers, "what holds least", Holds(self.program.pipeline.stage, peak_bytes(run[1], self.cost), what))
        rank, most = max(enumerate(said), key=lambda item: item[1].peak_bytes or 0)
        where, least = f"rank {rank if self.peers else self.program.rank}, stage {most.stage}", most.peak_bytes or 0
        more = "; choose_recompute: {repeat_collectives: on} may hold less" if any(gather(self.peers, "more", self._could_repeat())) else ""
        raise BudgetError(f"memory_budget {size(budget)} ({budget} bytes) cannot be kept; the least feasible one is {least} bytes "
                          f"({size(least)}), which {where} holds with all recomputed and moved to the host that lowers it: {most.what}"
                          f"{more}", least)  # fmt: skip

    def _could_repeat(self) -> bool:
        """Whether repetitions could be added that are left out because they communicate."""
        if not self.is_open or self._collectives:
            return False
        found = recomputation(self.program, self.cost, self.memo, adds=True, collectives=True)
        return len(found.copies) > len(self._recomputation().copies)

    def told_in(self, run: Run, budget: int) -> Run:
        """The run with the budget in its reports."""
        pipeline, program, reports = run
        return pipeline, program, say_budget(program, pipeline.passes, reports, budget, peak_bytes(program, self.cost))

    def _by_stage(self, levels: list[int]) -> tuple[Numbers, ...]:
        """The level of each stage in each of several cases: of several ranks of a stage the one that needs most decides."""
        stands = self.stands_for.get(self.program.rank, self.program.rank) != self.program.rank
        said = gather(self.peers, "recomputed", Said(self.program.pipeline.stage, tuple(0 if stands else each for each in levels)))
        stages = range(self.program.pipeline.num_stages)
        return tuple(tuple(max((each.levels[k] for each in said if each.stage == stage), default=0) for stage in stages)
                     for k in range(len(levels)))  # fmt: skip

    def _level(self, freed_bytes: int) -> int:
        """The least level that gives so many bytes back by the peak of Paddle's own schedule; the last where none does."""
        if freed_bytes <= 0 or not self._recomputation().groups:
            return 0
        return choices(self.program, self.cost, self.memo, self._collectives).least(self._peak(0) - freed_bytes, self._peak)

    @property
    def _collectives(self) -> bool:
        """Whether repetitions that are added may repeat collectives."""
        return any(isinstance(each, ChooseRecompute) and each.repeat_collectives for each in self.asked.passes)

    def _recomputation(self) -> Recomputation:
        return recomputation(self.program, self.cost, self.memo, adds=True, collectives=self._collectives)

    def _peak(self, level: int) -> int:
        """Live device bytes at the peak of Paddle's own schedule with so much recomputed."""
        found = self._recomputation()
        chosen = choices(self.program, self.cost, self.memo, self._collectives).at(level) if found.groups else frozenset()
        if ("peak", chosen) not in self.memo:
            made = found.without(group for k, group in enumerate(found.groups) if k not in chosen)
            self.memo["peak", chosen] = in_order(msgspec.structs.replace(made, jobs=stock_jobs(made))).peak()
        peak: int = self.memo["peak", chosen]
        return peak
