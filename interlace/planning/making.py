"""Makes the plans of one search: in full or as drafts, and again with less room if they hold too much."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from interlace.ir.remarks import Fact, Kind, Remark, remark
from interlace.passes import Pipeline, Schedule1F1B
from interlace.planning.levels import Levels
from interlace.planning.tasks import MemoryLimits, movable_states
from interlace.planning.variants import deciding, drafted, holding_less
from interlace.planning.world import Made, World
from interlace.scheduler.whole_step.search import Numbers

BASELINE_KEPT, FORM_TAKEN = "baseline-kept", "form-taken"
"""Rules of the remarks that report what an open schedule became."""
CLEARLY = 1.02
"""A draft whose step is longer than that of a known run by this factor is not worth planning in full: the full plan has the same jobs, and
differs only in what hardly changes the simulated step."""
SOONER = (2, 8, 32)
"""When a plan exceeds the budget, its memory limit is lowered by this multiple of the excess, at the first, second and third attempt.
Offload moves whole values, so a slightly lower limit may change nothing, and each attempt is a full plan (GPT-3 6.7B, pp 4, at 43 %: one
attempt instead of two)."""


@dataclass(frozen=True, slots=True)
class Beaten:
    """What need not be tried because a known run is faster.

    Attributes:
        step_ns: Step of the fastest known run; 0 if there is none.
        forms: Forms by name that take longer than that run even when drafted with nothing moved and nothing recomputed.
    """

    step_ns: int = 0
    forms: frozenset[Schedule1F1B] = frozenset()

    def also_by(self, step_ns: int | None) -> Beaten:
        """The same with one more known run; `step_ns` is None if its step is not known."""
        most = [each for each in (self.step_ns, int(CLEARLY * (step_ns or 0))) if each]
        return replace(self, step_ns=min(most, default=0))


class Making:
    """Makes the plans of one search.

    Attributes:
        is_alone: Whether the other stages are unknown, so that no step can be simulated.
        draws: Whether on any rank both forward and backward draw random numbers.
        offloads: Whether a pass moves activations or optimizer state under a budget.
        by_stage: Whether levels of recomputation are also tried on one stage after the other.
        by_name: Form by name -> simulated step in nanoseconds, drafted without a budget; without forms whose step would never end.
    """

    def __init__(self, world: World, asked: Pipeline) -> None:
        self.world, self.asked = world, asked
        self.pipe = world.captured.pipeline
        self.is_alone = not world.is_whole and self.pipe.num_stages > 1
        self.draws = any(each.draws for each in world.facts)
        self.levels = Levels(world, asked)
        self.beaten = Beaten()
        self.by_name: dict[Schedule1F1B, int] = {}
        self.by_stage = True
        self.offloads = deciding(asked.passes, "offload") is not None or self.levels.states is not None

    def beaten_by(self, step_ns: int) -> Beaten:
        """What need not be tried once a run with this simulated step is known."""
        found = Beaten().also_by(step_ns)
        if any(each.recomputes for each in self.world.facts):  # forms by name may be faster with less recomputation
            return found
        return replace(found, forms=frozenset(form for form, took in self.by_name.items() if took > found.step_ns))

    @property
    def movable_states(self) -> Numbers:
        """Bytes of optimizer state that may leave the device, by stage."""
        states = self.levels.states
        if states is None:
            return (0,) * self.pipe.num_stages
        said = self.world.known(movable_states, states, ranks=self.world.firsts)
        least = {facts.stage: each for each, facts in zip(said, self.world.facts, strict=True) if each is not None}
        return tuple(least.get(stage, 0) for stage in range(self.pipe.num_stages))

    def made(self, made: Pipeline, memory_limits: MemoryLimits) -> Made:
        """The full plan of passes whose forms are decided."""
        return self.world.run(made, memory_limits)

    def drafted(self, made: Pipeline, memory_limits: MemoryLimits) -> Made:
        """A draft of the plan of these passes, under which the passes are still the full ones."""
        return replace(self.world.run(drafted(made), memory_limits), passes=made)

    def most(self, run: Made) -> int:
        """Peak device bytes of the fullest rank on a GPU."""
        return max(self.world.bytes_over(run, 0))

    def with_lower_limits(self, make: Callable[[Pipeline, MemoryLimits], Made], run: Made, budget: int) -> Made | None:
        """The run, made again with lower limits until it keeps the budget; None if `SOONER` attempts are not enough."""
        first = run
        for number in range(1 + len(SOONER)):
            over = self.world.bytes_over_in_step(run, budget)
            if not any(over):
                return run
            if number < len(SOONER):
                memory_limits = self.lower_limits(run, run.memory_limits, [each * SOONER[number] for each in over])
                run = make(self.levels.raised(run.passes, over if number or not self.offloads else [0] * len(over)), memory_limits)
                run = _with_choice_of(first, run, said("decided", "made-again", over_bytes=max(over)))
        return None

    def holding_less(self, passes: Pipeline, memory_limits: MemoryLimits, limit: int) -> Made:
        """The plan of passes whose forms are decided; if it exceeds a limit in device bytes (0 for none), the one whose streams wait at
        their ends too (`return-memory`)."""
        found, less = self.made(passes, memory_limits), Pipeline(holding_less(passes.passes))
        if not limit or less == passes or not any(self.world.bytes_over_in_step(found, limit)):
            return found
        return self.made(less, memory_limits)

    def within(self, passes: Pipeline, limit: int) -> Made | None:
        """The plan of these passes, with limits lowered until it keeps a limit in device bytes; None if it does not."""
        return self.with_lower_limits(self.made, self.made(passes, self.world.memory_limits(limit)), limit)

    def lower_limits(self, made: Made, memory_limits: MemoryLimits, over: Sequence[int]) -> MemoryLimits:
        """Memory limits for another attempt, lowered on each rank by its entry of `over`, in bytes; unchanged where that is not
        positive."""
        peaks = self.world.order_peaks(made)
        return tuple(
            max(1, min(room or 0, peak) - more) if more > 0 else room for room, peak, more in zip(memory_limits, peaks, over, strict=True)
        )


def said(kind: Kind, rule: str, /, **facts: Fact) -> Remark:
    """A remark for the report of the schedule."""
    return remark(kind, rule, **facts).of(Schedule1F1B.name)


def _with_choice_of(first: Made, again: Made, why: Remark) -> Made:
    """The run `again` with the remarks of `first` about the choice of its schedule, and the reason why it was made again."""
    notes = [each for each in first.notes if each.pass_name == Schedule1F1B.name]
    chosen = [each for each in notes if each.rule in (BASELINE_KEPT, FORM_TAKEN)]
    return again.noted(*chosen, why, *(each for each in notes if each.kind == "declined"))
