"""Plans of one search: made in full or as drafts, and again with less room where they hold too much."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from interlace.ir.remarks import Fact, Kind, Remark, remark
from interlace.passes import Pipeline, Schedule1F1B
from interlace.planning.levels import Levels
from interlace.planning.tasks import MemoryLimits, movable_states
from interlace.planning.variants import deciding, drafted
from interlace.planning.world import Made, World
from interlace.scheduler.whole_step.search import Numbers

BASELINE_KEPT, FORM_TAKEN = "baseline-kept", "form-taken"
"""Rules of the remark that says what an open schedule became."""
CLEARLY = 1.02
"""Times the step of a run beyond which a draft leaves nothing to win: its plan in full has the same jobs, and more only of what a
simulation does not notice."""
SOONER = (2, 8, 32)
"""So many times what a plan exceeds the budget by is taken off the room with each plan that is made again: offload moves whole values, so
a little less room may change nothing, and each is a plan in full (GPT-3 6.7B, pp 4, at 43 %: one in the place of two)."""


@dataclass(frozen=True, slots=True)
class Beaten:
    """What cannot be faster than a run that there is already.

    Attributes:
        step_ns: Drafts that take longer leave nothing to win; 0 where there is no such run.
        forms: Forms by name that do, though they were drafted with nothing moved and nothing recomputed.
    """

    step_ns: int = 0
    forms: frozenset[Schedule1F1B] = frozenset()

    def also_by(self, step_ns: int | None) -> Beaten:
        """With another run that there is; None where its step is not known."""
        most = [each for each in (self.step_ns, int(CLEARLY * (step_ns or 0))) if each]
        return replace(self, step_ns=min(most, default=0))


class Making:
    """Makes plans.

    Attributes:
        is_alone: Whether the other stages are not known, so that no step can be simulated.
        draws: Whether forward and backward of any rank both draw random numbers.
        offloads: Whether a pass moves what is over the budget.
        by_name: Simulated steps of forms by name, drafted without a budget, as far as their steps end.
    """

    def __init__(self, world: World, asked: Pipeline) -> None:
        self.world, self.asked = world, asked
        self.pipe = world.captured.pipeline
        self.is_alone = not world.is_whole and self.pipe.num_stages > 1
        self.draws = any(each.draws for each in world.facts)
        self.levels = Levels(world, asked)
        self.beaten = Beaten()
        self.by_name: dict[Schedule1F1B, int] = {}
        self.offloads = deciding(asked.passes, "offload") is not None or self.levels.states is not None

    def beaten_by(self, step_ns: int) -> Beaten:
        """What a run with this simulated step leaves nothing to win for."""
        found = Beaten().also_by(step_ns)
        if any(each.recomputes for each in self.world.facts):  # forms by name may then be faster with less of it
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
        """A run of passes whose forms are decided."""
        return self.world.run(made, memory_limits)

    def drafted(self, made: Pipeline, memory_limits: MemoryLimits) -> Made:
        """The same passes, with a draft of what they make."""
        return replace(self.world.run(drafted(made), memory_limits), passes=made)

    def most(self, run: Made) -> int:
        """Device bytes of the fullest rank on a GPU."""
        return max(self.world.bytes_over(run, 0))

    def with_lower_limits(self, make: Callable[[Pipeline, MemoryLimits], Made], run: Made, budget: int) -> Made | None:
        """The run, made again with so much less room as it exceeds the budget by; None where that does not help."""
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

    def lower_limits(self, made: Made, memory_limits: MemoryLimits, over: Sequence[int]) -> MemoryLimits:
        """What passes may use after a plan that exceeds the budget by so many bytes on each rank; as much as before where it does not."""
        peaks = self.world.order_peaks(made)
        return tuple(
            max(1, min(room or 0, peak) - more) if more > 0 else room for room, peak, more in zip(memory_limits, peaks, over, strict=True)
        )


def said(kind: Kind, rule: str, /, **facts: Fact) -> Remark:
    """A remark for the report of the schedule."""
    return remark(kind, rule, **facts).of(Schedule1F1B.name)


def _with_choice_of(first: Made, again: Made, why: Remark) -> Made:
    """A run whose schedule was decided before, with the remarks that say how, and why it was made again."""
    notes = [each for each in first.notes if each.pass_name == Schedule1F1B.name]
    chosen = [each for each in notes if each.rule in (BASELINE_KEPT, FORM_TAKEN)]
    return again.noted(*chosen, why, *(each for each in notes if each.kind == "declined"))
