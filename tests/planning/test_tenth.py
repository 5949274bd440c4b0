"""What a tenth more or less memory brings: told by hand, and of plans that are made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from interlace.config import make_config
from interlace.cost_model import CostModel, load_profile
from interlace.errors import PlanError
from interlace.passes import Pipeline, Schedule1F1B
from interlace.planning.limits import ROUNDED
from interlace.planning.outcome import MemoryLimit, OtherLimit
from interlace.planning.plan import Plan, make_plans
from interlace.planning.tenth import MOST_ASKED, memory_limit
from interlace.planning.world import Draft, Made
from interlace.report.outcome import outcome_sentence
from tests.strategies import World, programs

COSTS = CostModel(load_profile("h200"))
TWO = programs(World(pp=2, micro_batches=4, layers=2))
PLAN = 0


def made(number: int, limit: int | None = None) -> Made:
    return Made(Pipeline((Schedule1F1B(interleave="mixed"),)), (number,), ((),), (limit,))


class Told:
    """A world with one rank, and drafts of which each has a step and what a GPU, and operations in turn, hold; the first is the plan."""

    def __init__(self, *drafts: tuple[int | None, int | None, int], again: tuple[int, int, int] | None = None) -> None:
        self.figures, self.asked = dict(enumerate(drafts)), list[int]()
        self.cost, self.again = SimpleNamespace(), again
        self.drafts = [Draft(made(number)) for number in self.figures if number != PLAN]
        self.rooms = list[tuple[int | None, ...]]()

    def step_ns(self, run: Made, *_: object) -> int | None:
        return self.figures[run.programs[0]][0]

    def gpu_peaks(self, run: Made) -> list[int | None]:
        self.asked.append(run.programs[0])
        return [self.figures[run.programs[0]][1]]

    def order_peaks(self, run: Made) -> list[int]:
        return [self.figures[run.programs[0]][2]]

    def run(self, _: Pipeline, limits: tuple[int | None, ...]) -> Made:
        self.rooms.append(limits)
        if self.again is None:
            raise PlanError("offload cannot")
        self.figures[99] = self.again
        return made(99)


def told(world: Any, limit: int | None = None, tried: Any = None) -> tuple[OtherLimit | None, OtherLimit | None]:
    found = memory_limit(world, made(PLAN, limit), 1000, "budget", tried)
    assert found is not None
    assert (found.whose, found.limit_bytes, found.peak_bytes, found.device_bytes) == ("budget", 1000, world.figures[PLAN][1], 0)
    return found.more, found.less


def test_the_fastest_draft_of_those_that_fit_is_told() -> None:
    """Not one that the limit allows already, nor one that a GPU holds too much of, nor one that never ends."""
    more = (940, 1090, 1000), (930, 1000, 950), (920, 1101, 1000), (900, 1050, 1101), (None, 1050, 1000), (950, 1050, 900)
    less = (1200, 900, 880), (1150, 890, 900), (1100, 901, 890), (1050, 850, 901), (1160, 800, 800)
    assert told(Told((1000, 990, 950), *more, *less)) == (OtherLimit(1100, 1090, 940), OtherLimit(900, 890, 1150))


def test_nothing_is_told_that_is_not_known() -> None:
    assert told(Told((1000, 990, 950))) == (None, None)
    assert told(Told((1000, 990, 950), (1000, 1050, 1000), (999.5, 1050, 1000))) == (None, None)  # type: ignore[arg-type]
    assert told(Told((1000, 990, 950), (900, None, 1000), (1200, None, 800))) == (None, None)
    assert memory_limit(Told((1000, None, 950)), made(PLAN), 1000, "budget") is None  # type: ignore[arg-type]
    assert memory_limit(Told((None, 990, 950)), made(PLAN), 1000, "budget") is None  # type: ignore[arg-type]


def test_a_plan_that_needs_less_is_its_own_other_limit() -> None:
    assert told(Told((1000, 900, 880), (1100, 800, 700))) == (None, OtherLimit(900, 900, 1000))


def test_few_drafts_are_asked_what_a_gpu_holds() -> None:
    world = Told((1000, 990, 950), *((900 + k, 5000, 1000) for k in range(20)))
    assert told(world) == (None, None)
    assert world.asked == [PLAN, *range(1, 1 + MOST_ASKED)]


def test_one_more_draft_is_made_where_none_says_it() -> None:
    """The coarse model's in a tenth more; and with a limit the plan's own passes with a tenth more, or less, room."""
    world = Told((1000, 990, 950), again=(960, 1100, 1000))
    rooms = list[int]()

    def draft_in(most: int) -> None:
        rooms.append(most)
        world.figures[50] = (970, 1080, 1000)
        world.drafts.append(Draft(made(50)))

    assert told(world, 980, SimpleNamespace(draft_in=draft_in)) == (OtherLimit(1100, 1080, 970), None)
    assert (rooms, world.rooms) == ([1100], [(880,)])
    assert told(Told((1000, 990, 950), again=(960, 1100, 1000)), limit=980)[0] == OtherLimit(1100, 1100, 960)
    assert told(Told((1000, 990, 950), again=(1040, 870, 860)), limit=980)[1] == OtherLimit(900, 870, 1040)
    assert told(Told((1000, 990, 950)), limit=980) == (None, None)  # offload cannot


@pytest.mark.parametrize(
    ("options", "whose"),
    [
        ({}, "baseline"),
        pytest.param({"memory_budget": "+1KB"}, "beyond", marks=pytest.mark.slow),
        pytest.param({"memory_budget": 0.9}, "budget", marks=pytest.mark.slow),
        pytest.param({"memory_budget": "1GB"}, "budget", marks=pytest.mark.slow),
        ({"memory_budget": "off"}, None),
        pytest.param({"schedule_1f1b": {"interleave": "mixed"}}, None, marks=pytest.mark.slow),
        ({"capture": "on"}, None),
    ],
)
def test_which_limit_held_is_told(options: dict[str, Any], whose: str | None) -> None:
    plans = make_plans(
        TWO, make_config({"offload_activations": {"min_bytes": 1}, **options} if whose == "budget" else options), COSTS, "h200"
    )
    memory = _memory(plans)
    assert (memory.whose if memory else None) == whose
    if memory is None:
        assert "memory limit" not in _sentence(plans)
        return
    assert (memory.device_bytes, memory.limit_bytes) == (COSTS.profile.memory_bytes, plans[0].memory_budget or memory.limit_bytes)
    assert memory.peak_bytes <= memory.limit_bytes + (0 if whose == "budget" else ROUNDED)
    assert plans[0].compared is not None
    assert plans[0].compared.memory == memory
    assert "Its memory limit is " in _sentence(plans)


@pytest.mark.slow
def test_what_a_tenth_brings_holds_for_a_plan_that_is_asked_for_that_much() -> None:
    """The plan of a budget is no slower than the draft that was told for it."""
    seen, config = list[str](), {"offload_activations": {"min_bytes": 1}}
    plain = programs(World(pp=2, micro_batches=4, layers=3))
    for share in (0.85, 1.1):
        memory = _memory(make_plans(plain, make_config({"memory_budget": share, **config}), COSTS, "h200"))
        assert memory is not None
        for name, other in (("more", memory.more), ("less", memory.less)):
            if other is None:
                continue
            again = make_plans(plain, make_config({"memory_budget": f"{other.limit_bytes}B", **config}), COSTS, "h200")
            assert again[0].outcome is not None
            assert again[0].outcome.plan.step_ns <= 1.002 * other.step_ns
            seen.append(name)
    assert set(seen) == {"more", "less"}


def _memory(plans: list[Plan]) -> MemoryLimit | None:
    assert plans[0].outcome is not None
    return plans[0].outcome.memory


def _sentence(plans: list[Plan]) -> str:
    assert plans[0].outcome is not None
    return outcome_sentence(plans[0].outcome)
