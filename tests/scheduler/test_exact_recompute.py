"""How far the choice of what is recomputed is from the cheapest one; the solver is an extra."""

from __future__ import annotations

import sys
from itertools import chain, combinations

import pytest

from benchmarks.exact_recompute import cheapest
from interlace.cost_model import GivenCosts
from interlace.errors import PlanError
from interlace.ir import parse
from interlace.ir.program import Program
from interlace.passes.choose_recompute import choices
from interlace.scheduler.recompute.choices import RecomputeLevels
from tests.passes.recomputed import PLAIN
from tests.strategies import World, programs

COSTS = GivenCosts({"comm": 100, "gemm": 50, "default": 10})
WORLDS = (World(pp=1, micro_batches=2, layers=6), World(pp=1, micro_batches=2, layers=6, seed=3))


def given() -> list[Program]:
    return [parse(PLAIN), *(programs(world)[0] for world in WORLDS)]


def choices_of(program: Program) -> RecomputeLevels:
    return choices(program, COSTS, {})


def peak(made: RecomputeLevels, chosen: frozenset[int]) -> int:
    return int(made.memory.curve(sorted(chosen)).max())


@pytest.mark.parametrize("program", given(), ids=["recomputing", "plain", "another"])
def test_no_choice_of_all_is_cheaper(program: Program) -> None:
    pytest.importorskip("ortools", reason="the extra [solve] is not installed")
    made = choices_of(program)
    groups = range(len(made.found.groups))
    assert 1 < len(groups) < 13
    every = [frozenset(each) for each in chain.from_iterable(combinations(groups, count) for count in range(len(groups) + 1))]
    most, least = made.peaks[0], min(made.peaks)
    for part in (0.0, 0.3, 0.6, 1.0):
        limit = int(most - part * (most - least))
        exact, greedy = cheapest(made, limit), made.within(limit)
        assert made.took_ns(exact) == min(made.took_ns(each) for each in every if peak(made, each) <= limit) <= made.took_ns(greedy)
        assert max(peak(made, exact), peak(made, greedy)) <= limit


def test_without_the_solver_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(PlanError, match=r"OR-tools cannot be imported .*; pip install 'interlace\[solve\]'"):
        cheapest(choices_of(parse(PLAIN)), 1)


def test_below_what_everything_recomputed_holds_there_is_no_choice() -> None:
    pytest.importorskip("ortools", reason="the extra [solve] is not installed")
    with pytest.raises(PlanError, match=r"no proved optimum .*INFEASIBLE"):
        cheapest(choices_of(parse(PLAIN)), 0)
