"""Who decides how much is recomputed, and with how much less room a plan is made again: told by hand, no plan is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from interlace.cost_model import GivenCosts
from interlace.errors import BudgetError
from interlace.ir import Program
from interlace.passes import ChooseRecompute, OffloadActivations, Pipeline, Schedule1F1B
from interlace.passes.peers import Peers
from interlace.passes.pipeline import PassReport
from interlace.planning import memory
from interlace.planning.judge import Run
from interlace.planning.memory import MemoryChoice
from interlace.planning.together import plan_together
from interlace.scheduler.memory.live import order_peak
from tests.scheduler.test_throttle import run_ahead_program
from tests.strategies import World, programs

COSTS = GivenCosts({"default": 10})
FOUR = programs(World(pp=2, mp=2, micro_batches=2))
"""Two ranks of each of two stages."""
LEVELS = [[3, 9], [5, 2], [1, 4], [8, 0]]
OPEN = Pipeline((ChooseRecompute(), Schedule1F1B()))
MOVING = Pipeline((Schedule1F1B(interleave="off"), OffloadActivations(fraction=1.0)))


def chosen(alike: bool) -> list[tuple[tuple[int, ...], ...]]:
    """The levels of each stage in two cases, as each of the ranks finds them."""

    def by_stage(program: Program, peers: Peers) -> tuple[tuple[int, ...], ...]:
        choice = MemoryChoice(OPEN, program, COSTS, peers)
        choice.stands_for = choice.stands_for if alike else {rank: rank for rank in range(4)}
        return choice._by_stage(LEVELS[program.rank])

    return plan_together(by_stage, FOUR)


def test_of_the_ranks_of_a_stage_the_one_that_needs_most_decides() -> None:
    """In each case by itself, for its own stage alone, and for all ranks alike."""
    assert chosen(alike=False) == [((5, 8), (9, 4))] * 4


def test_of_ranks_that_are_alike_the_first_is_asked() -> None:
    """The others may not have worked it out."""
    assert chosen(alike=True) == [((3, 1), (9, 4))] * 4


def test_a_rank_that_plans_alone_decides_for_its_stage() -> None:
    assert MemoryChoice(OPEN, FOUR[2], COSTS, None)._by_stage([3, 9]) == ((0, 3), (0, 9))


class Made:
    """Plans that are made again, one after another, with the bytes that each rank is over the budget."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, over: list[list[int]], budget: int) -> None:
        self.over, self.budget = over, budget
        self.rooms: dict[int, list[int]] = {}
        self.freed: dict[int, list[int]] = {}
        monkeypatch.setattr(memory, "bytes_over_in_step", self.bytes_over)
        monkeypatch.setattr(MemoryChoice, "again", lambda choice, made, freed_bytes: self.again(choice, made, freed_bytes))

    def bytes_over(self, program: Program, budget: int, *_: object) -> list[int]:
        assert budget == self.budget
        return self.over[len(self.rooms.get(program.rank, ()))]

    def again(self, choice: MemoryChoice, made: Pipeline, freed_bytes: int) -> Pipeline:
        self.freed.setdefault(choice.program.rank, []).append(freed_bytes)
        return made

    def make(self, choice: MemoryChoice) -> Callable[[Pipeline, int], Run]:
        def make(passes: Pipeline, room: int) -> Run:
            self.rooms.setdefault(choice.program.rank, []).append(room)
            return passes, choice.program, []

        return make


def made_again(monkeypatch: pytest.MonkeyPatch, asked: Pipeline, over: list[list[int]]) -> tuple[Made, list[int | None], int]:
    """What becomes of a run on two ranks: the rooms it ends with, or None."""
    plain = run_ahead_program()
    made, first = Made(monkeypatch, over, 77), order_peak(plain)

    def one(rank: int, peers: Peers) -> int | None:
        choice = MemoryChoice(asked, msgspec.structs.replace(plain, rank=rank), COSTS, peers)
        found = choice._with_less_room(made.make(choice), (asked, choice.program, []), first, 77)
        return None if found is None else found[1]

    return made, plan_together(one, [0, 1]), first


def test_each_rank_gets_so_much_less_room_as_it_exceeds_the_budget_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until none does: one that is within keeps its room, but plans again with the others."""
    made, rooms, first = made_again(monkeypatch, MOVING, [[0, 5], [7, 0], [0, 0]])
    assert made.rooms == {0: [first, first - 8 * 7], 1: [first - 2 * 5, first - 2 * 5]}
    assert rooms == [first - 8 * 7, first - 2 * 5]


def test_recomputation_frees_more_where_nothing_moves_or_moving_did_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, _ = made_again(monkeypatch, MOVING, [[5, 6], [3, 4], [0, 0]])
    assert made.freed == {0: [0, 3], 1: [0, 4]}
    made, _, _ = made_again(monkeypatch, OPEN, [[5, 6], [3, 4], [0, 0]])
    assert made.freed == {0: [5, 3], 1: [6, 4]}


def test_a_plan_within_its_budget_is_not_made_again_and_one_that_never_is_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made, rooms, first = made_again(monkeypatch, MOVING, [[0, 0]])
    assert (made.rooms, rooms) == ({}, [first, first])
    made, rooms, first = made_again(monkeypatch, MOVING, [[0, 1]] * 4)
    assert (made.rooms[1], rooms) == ([first - 2, first - 10, first - 42], [None, None])
    assert made_again(monkeypatch, MOVING, [[1, 1]] * 3 + [[0, 0]])[1] == [first - 42] * 2


@pytest.mark.parametrize(
    ("budget", "paddles", "held", "steps", "taken", "told"),
    [
        (100, 100, 100, (100, 90), True, "which keeps it; planned within it"),
        (100, 101, 100, (100, 90), False, ""),  # Paddle's own plan does not keep it
        (100, 100, 101, (100, 90), False, "more memory than the budget"),
        (100, 100, 100, (100, 100), False, "planned as without a budget"),  # no faster
        (100, None, 100, (100, 90), False, ""),  # what Paddle's own plan holds is not known
        (100, 100, 100, (None, 90), False, ""),
    ],
)
def test_the_plan_without_a_budget_keeps_it_and_is_faster(monkeypatch: pytest.MonkeyPatch, budget: int, paddles: int | None, held: int,
                                                          steps: tuple[int | None, int], taken: bool, told: str) -> None:  # fmt: skip
    program = FOUR[0]
    choice = MemoryChoice(OPEN, program, COSTS, None)
    report = PassReport(Schedule1F1B.name, (), (), 0, 0, 0)
    within, without = (OPEN, program, [report]), (MOVING, FOUR[1], [report])
    monkeypatch.setattr(memory, "stock_peak_bytes", lambda *_: paddles)
    monkeypatch.setattr(memory, "run_in_paddles_memory", lambda *_: without)
    monkeypatch.setattr(memory, "step_ns", lambda made, *_: steps[made is without[1]])
    monkeypatch.setattr(memory, "bytes_over_in_step", lambda made, limit, *_: [max(0, held - limit) if made is without[1] else 0])
    (passes, _, reports), room = choice.or_without_budget((within, 42), budget)
    assert (passes is MOVING, room) == ((True, 0) if taken else (False, 42))
    assert told in " ".join((*reports[0].changed, *reports[0].declined))
    assert bool(reports[0].changed) == taken


@pytest.mark.parametrize(("budget", "hopeless"), [(50, False), (49, True)])
def test_what_is_needed_at_once_is_refused_before_any_plan(monkeypatch: pytest.MonkeyPatch, budget: int, hopeless: bool) -> None:
    runs: list[int] = []

    def run_passes(form: Pipeline, program: Program, *_: object) -> tuple[Any, int]:
        runs.append(1)
        return (form, program, []), 7

    monkeypatch.setattr(memory, "run_passes", run_passes)
    monkeypatch.setattr(MemoryChoice, "_needed_at_once", lambda self, _: 50)
    monkeypatch.setattr(MemoryChoice, "_with_less_room", lambda self, make, run, room, limit: (run, room))
    monkeypatch.setattr(MemoryChoice, "room", lambda *_: None)
    found = MemoryChoice(OPEN, FOUR[0], COSTS, None).fitting(budget)
    assert (found is None, runs) == ((True, []) if hopeless else (False, [1]))
    assert found is None or found[1] == 7


@pytest.mark.parametrize(("held", "kept"), [(100, True), (101, False)])
def test_what_holds_least_is_kept_within_the_budget_and_refused_above(monkeypatch: pytest.MonkeyPatch, held: int, kept: bool) -> None:
    run = (OPEN, run_ahead_program(), [])
    monkeypatch.setattr(MemoryChoice, "fitting", lambda *_: None)
    monkeypatch.setattr(MemoryChoice, "tightest", lambda _: (run, 5))
    monkeypatch.setattr(MemoryChoice, "told_in", lambda self, run, budget: run)
    monkeypatch.setattr(memory, "bytes_over", lambda program, limit, *_: [0, max(0, held - limit)])
    if kept:
        assert memory.run_within(100, OPEN, run[1], COSTS) == (run, 5)
    else:
        with pytest.raises(BudgetError, match="memory_budget 100 B"):
            memory.run_within(100, OPEN, run[1], COSTS)
