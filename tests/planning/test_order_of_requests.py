"""What a rank makes does not depend on what it was asked before: rank 0 tries many drafts, ranks like it run only what is taken."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.config import Config, make_config
from interlace.cost_model import CostModel, load_profile
from interlace.errors import InterlaceError
from interlace.ir import Program
from interlace.passes import Pipeline
from interlace.planning.plan import decide_plans, worker_of
from interlace.planning.tasks import MemoryLimits
from interlace.planning.worker import Worker, digest_of
from interlace.planning.world import Made, World
from interlace.scheduler.interleave import planner as interleave
from tests.captured.stored import programs_of
from tests.strategies import World as Shape
from tests.strategies import programs, worlds

COST = CostModel(load_profile("h200"))
MOVING = {"offload_activations": {"min_bytes": 1}, "offload_optimizer_state": {"min_bytes": 1}}
CONFIGS: dict[str, dict[str, Any]] = {
    "nothing said": {},
    "no limit": {"memory_budget": "off"},
    "baseline's memory and more": {"memory_budget": "+1GB"},
    "all of the peak": {"memory_budget": 1.0, **MOVING},
    "nine tenths": {"memory_budget": 0.9, **MOVING, "choose_recompute": {"repeat_collectives": True}},
    "three quarters": {"memory_budget": 0.75, **MOVING, "choose_recompute": {"repeat_collectives": True}},
    "half moved": {"memory_budget": "+1GB", "offload_activations": {"fraction": 0.5, "min_bytes": 1}},
    "mixed": {"memory_budget": 0.9, "schedule_1f1b": {"interleave": "mixed"}, **MOVING},
    "dx-first": {"schedule_1f1b": {"interleave": "dx-first"}},
}
CAPTURED = ("mp2, clip, accumulation: column overlap", "pp2, clip", "pp2 recompute", "pp2 vpp2, offload", "pp2 mp2 sequence parallel, GQA")


class Asked(NamedTuple):
    """A run that a search asked for, and what it gave."""

    pipeline: Pipeline
    memory_limits: MemoryLimits
    after: Made | None
    ranks: Sequence[int] | None
    made: Made


class Noting(World):
    """Keeps what it was asked to run."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.asked: list[Asked] = []
        super().__init__(dict(enumerate(workers)), range(len(workers)))

    def run(self, pipeline: Pipeline, memory_limits: MemoryLimits, after: Made | None = None, ranks: Sequence[int] | None = None) -> Made:
        made = super().run(pipeline, memory_limits, after, ranks)
        self.asked.append(Asked(pipeline, memory_limits, after, ranks, made))
        return made


def world_of(given: Sequence[Program], config: Config) -> Noting:
    """Of ranks that were asked nothing yet."""
    interleave._orders.clear()
    return Noting([worker_of(program, config, COST, "h200") for program in given])


def found(world: World, made: Made) -> list[tuple[str, list[Any]]]:
    """What each rank made, and its reports without the time that they took."""
    reports = {
        rank: [(report.name, report.remarks) for report in (world.workers[rank].steps[step].report for step in steps)]
        for rank, steps in enumerate(made.steps)
    }
    return [
        (digest_of(world.workers[rank].programs[number]) if number >= 0 else "", reports[rank]) for rank, number in enumerate(made.programs)
    ]


def assert_same_in_any_order(given: Sequence[Program], config: Config, order: Sequence[int] | None = None) -> int:
    """All that a search asks for, asked of fresh ranks in another order, that the search ended with first; gives how much that is."""
    world = world_of(given, config)
    with suppress(InterlaceError):  # what was asked until then is compared
        decide_plans(world, config, "h200")
    first: dict[tuple[int, ...], Asked] = {}
    for each in world.asked:
        first.setdefault(each.made.programs, each)
    fresh = world_of([program.with_ops(tuple(program.ops)) for program in given], config)

    def again(each: Asked) -> Made:
        after = first.get(each.after.programs) if each.after is not None else None
        return fresh.run(each.pipeline, each.memory_limits, again(after) if after else None, each.ranks)

    for at in order if order is not None else range(len(world.asked))[::-1]:
        each = world.asked[at % len(world.asked)]
        own = len(each.pipeline.passes)
        expected, got = (found(known, made) for known, made in ((world, each.made), (fresh, again(each))))
        names = [one.name for one in each.pipeline.passes]
        for rank, (mine, other) in enumerate(zip(expected, got, strict=True)):
            assert mine[0] == other[0], f"rank {rank}: another program with {names} within {each.memory_limits[rank]}"
            assert mine[1][-own:] == other[1][-own:], f"rank {rank}: other reports with {names} within {each.memory_limits[rank]}"
    return len(world.asked)


@pytest.fixture(autouse=True)
def _no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair's first order is as good for this as its best one."""
    monkeypatch.setattr(interleave, "SEARCH_WORK", 0)


@pytest.mark.parametrize(
    ("shape", "title"),
    [
        pytest.param(Shape(pp=2, mp=2, micro_batches=3), "nothing said", marks=pytest.mark.slow),
        pytest.param(Shape(mp=2, micro_batches=2, layers=2, gather=True), "three quarters", marks=pytest.mark.slow),
        (Shape(pp=2, micro_batches=3, layers=2), "half moved"),
        (Shape(pp=2, dp=2, micro_batches=2), "no limit"),
    ],
    ids=str,
)
def test_ranks_make_the_same_in_any_order(shape: Shape, title: str) -> None:
    assert assert_same_in_any_order(programs(shape), make_config(CONFIGS[title])) > 5


@pytest.mark.long
@given(worlds(max_pp=2, max_mp=2, max_dp=2, max_layers=2), st.sampled_from(list(CONFIGS)), st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_ranks_of_any_world_make_the_same_in_any_order(shape: Shape, title: str, rng: random.Random) -> None:
    order = rng.sample(range(200), 20)
    assert_same_in_any_order(programs(shape), make_config(CONFIGS[title]), [-1, *order])


@pytest.mark.long
@pytest.mark.parametrize("title", CONFIGS)
@pytest.mark.parametrize("name", CAPTURED)
def test_ranks_of_captured_programs_make_the_same_in_any_order(name: str, title: str) -> None:
    assert_same_in_any_order(programs_of(name), make_config(CONFIGS[title]))
