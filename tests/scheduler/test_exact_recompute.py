"""How far the order in which values are recomputed is from the cheapest choice; the solver is an extra."""

from __future__ import annotations

import sys
from itertools import chain, combinations

import pytest

from interlace.cost_model import GivenCosts
from interlace.errors import PlanError
from interlace.ir import parse
from interlace.ir.program import Program
from interlace.passes.drop_recompute import recomputation
from interlace.scheduler.exact_recompute import cheapest, chosen, in_their_order
from interlace.scheduler.recompute import Recomputation
from tests.passes.test_drop_recompute import PLAIN
from tests.strategies import World, programs

COSTS = GivenCosts({"comm": 100, "gemm": 50, "default": 10})
WORLDS = (World(pp=1, micro_batches=2, layers=6), World(pp=1, micro_batches=2, layers=6, seed=3))


def given() -> list[Program]:
    return [parse(PLAIN), *(programs(world)[0] for world in WORLDS)]


def found_in(program: Program) -> Recomputation:
    return recomputation(program, COSTS, {}, adds=True)


@pytest.mark.parametrize("program", given(), ids=["recomputing", "plain", "another"])
def test_no_choice_of_all_is_cheaper(program: Program) -> None:
    pytest.importorskip("ortools", reason="the extra [solve] is not installed")
    found = found_in(program)
    assert 1 < len(found.groups) < 13
    every = [chosen(found, frozenset(groups)) for groups in
             chain.from_iterable(combinations(found.groups, count) for count in range(len(found.groups) + 1))]  # fmt: skip
    whole = sum(map(found.bytes_of, found.groups))
    for part in (0.0, 0.3, 0.6, 1.0):
        asked = int(part * whole)
        exact, greedy = cheapest(found, asked), in_their_order(found, asked)
        assert exact.took_ns == min(each.took_ns for each in every if each.freed_bytes >= asked) <= greedy.took_ns
        assert min(exact.freed_bytes, greedy.freed_bytes) >= asked


def test_without_the_solver_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(PlanError, match=r"OR-tools cannot be imported .*; pip install 'interlace\[solve\]'"):
        cheapest(found_in(parse(PLAIN)), 1)


def test_more_bytes_than_there_are_have_no_choice() -> None:
    pytest.importorskip("ortools", reason="the extra [solve] is not installed")
    with pytest.raises(PlanError, match=r"no proved optimum .*INFEASIBLE"):
        cheapest(found_in(parse(PLAIN)), 1 << 60)
