"""Levels of recomputation for each stage, for a search to choose from (`ChooseRecompute.level_index`)."""

from __future__ import annotations

from collections.abc import Sequence

from interlace.passes import Pipeline
from interlace.planning.tasks import higher_level, levels_of, movable_states
from interlace.planning.variants import moving_states, recomputation_of, recomputing
from interlace.planning.world import World
from interlace.scheduler.whole_step.search import Numbers

MORE_FREED = (0.0, 0.08, 0.2)
"""Shares of the budget that recomputation may free beyond what Paddle's order needs; a schedule may use any of them on each stage. Finer
steps gain nothing: GPT-3 6.7B, with the peak of full recomputation as budget, takes 380.0 ms, and 381.6 ms with 0.02, 0.04 and 0.06 as
well."""


class Levels:
    """Levels of recomputation, from the answers of all ranks.

    Attributes:
        are_open: Whether there is something to decide: the user did not set the level of the pass that recomputes.
        collectives: Whether repetitions that are added may repeat collectives.
        states: Which optimizer state may leave the device under a budget; None if no pass moves any, or there is none.
    """

    def __init__(self, world: World, asked: Pipeline) -> None:
        self.world, chooses = world, recomputation_of(asked)
        self.are_open = chooses is not None and chooses.level is None
        self.collectives = chooses is not None and chooses.repeat_collectives
        states = moving_states(asked)
        self.states = states if states is not None and any(world.known(movable_states, states)) else None

    def within(self, limit: int, beyond: Sequence[float] = MORE_FREED) -> tuple[Numbers, ...]:
        """Alternatives for the level of each stage, from nothing to most; a schedule may use a different one on each stage. Each after the
        first frees enough that no stage exceeds `limit` device bytes in Paddle's order, and this share of `limit` (`beyond`) more."""
        freed = [(1.0, int(more * limit)) for more in beyond]
        found = self.to_free(limit, [(0.0, 0), *freed])
        beside = self.to_free(limit, freed, beside_states=True) if self.states is not None else ()
        return tuple(dict.fromkeys((*found[:1], *beside, *found[1:])) if len(beyond) > 1 else dict.fromkeys(found))

    def to_free(self, limit: int, freed: Sequence[tuple[float, int]], beside_states: bool = False) -> tuple[Numbers, ...]:
        """The levels of each stage that free these bytes (see `levels_of`); the rank of a stage that needs most decides. `beside_states`:
        only what is left to free once all optimizer state that may leave the device has left it."""
        states = self.states if beside_states else None
        said = self.world.known(levels_of, limit, tuple(freed), self.collectives, states, ranks=self.world.firsts)
        return tuple(self.by_stage([each and each[k] for each in said]) for k in range(len(freed)))

    def raised(self, made: Pipeline, freed_bytes: Sequence[int]) -> Pipeline:
        """The passes with enough more recomputation that each rank holds `freed_bytes` less in Paddle's order."""
        chooses = recomputation_of(made)
        levels = chooses.level_index if chooses else None
        if not self.are_open or not isinstance(levels, tuple):
            return made
        return recomputing(made, self.higher(levels, freed_bytes))

    def higher(self, levels: Numbers, freed_bytes: Sequence[int]) -> Numbers:
        """The levels, by stage, at which each rank holds `freed_bytes` less in Paddle's order than at `levels`."""
        return self.by_stage(self.world.known(higher_level, levels, tuple(freed_bytes), self.collectives, ranks=self.world.firsts))

    def by_stage(self, of_ranks: Sequence[int | None]) -> Numbers:
        """The largest entry of the ranks of each stage; None counts as 0."""
        return tuple(
            max((each or 0 for each, facts in zip(of_ranks, self.world.facts, strict=True) if facts.stage == stage), default=0)
            for stage in range(self.world.captured.pipeline.num_stages)
        )
