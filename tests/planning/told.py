"""A world whose ranks answer as told, for tests of the search that make no plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec

from interlace.ir import Program
from interlace.passes import ChooseRecompute, OffloadActivations, Pipeline, Schedule1F1B
from interlace.planning.search import Search
from interlace.planning.world import Made
from tests.strategies import World, programs

FOUR = programs(World(pp=2, mp=2, micro_batches=2))
"""Two ranks of each of two stages."""
OPEN = Pipeline((ChooseRecompute(), Schedule1F1B()))
MOVING = Pipeline((Schedule1F1B(interleave="off"), OffloadActivations(fraction=1.0)))
PEAK = 1000


class Told:
    """A world whose ranks answer as told."""

    def __init__(self, answers: dict[Callable[..., Any], Sequence[Any]], num_ranks: int = 4, firsts: Sequence[int] = (), **told: Any):
        self.captured, self.is_whole, self.start = FOUR[0], True, replace(made(0), programs=(0,) * num_ranks)
        self.facts = [
            SimpleNamespace(stage=each.pipeline.stage, draws=False, recomputes=False, memory_budget=None) for each in FOUR[:num_ranks]
        ]
        self.firsts, self.answers = tuple(firsts) or tuple(range(num_ranks)), answers
        for name, value in told.items():
            setattr(self, name, value)

    def known(self, task: Callable[..., Any], *_: object, ranks: Sequence[int] | None = None) -> list[Any]:
        asked = range(len(self.facts)) if ranks is None else ranks
        return [answer if rank in asked else None for rank, answer in enumerate(self.answers[task])]

    map = known

    def memory_limits(self, memory_limit: int) -> tuple[int, ...]:
        return (memory_limit,) * len(self.facts)

    def run(self, *_: object, **__: object) -> Made:
        return self.start


def made(number: int, passes: Pipeline = OPEN, *memory_limits: int | None) -> Made:
    """A plan that is told apart by its number."""
    return Made(passes, (number,), ((),), memory_limits)


def with_micro_batches(program: Program, number: int) -> Program:
    return msgspec.structs.replace(program, pipeline=msgspec.structs.replace(program.pipeline, num_micro_batches=number))


def search(world: Told, asked: Pipeline = OPEN) -> Search:
    return Search(world, asked)  # type: ignore[arg-type]
