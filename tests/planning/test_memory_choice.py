"""Who decides how much is recomputed, and with how much less room a plan is made again: told by hand, no plan is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from interlace.config import NO_LIMIT, Beyond
from interlace.cost_model import CostModel, load_profile
from interlace.errors import BudgetError
from interlace.ir.remarks import remark
from interlace.passes import (
    ChooseRecompute,
    DelayTransfers,
    OffloadActivations,
    OffloadOptimizerState,
    Pipeline,
    ReturnMemory,
    Schedule1F1B,
)
from interlace.planning import search as search_module
from interlace.planning import tasks
from interlace.planning.levels import Levels
from interlace.planning.limits import baseline_bytes, beyond_baseline, budget_bytes
from interlace.planning.making import Making
from interlace.planning.search import Search
from interlace.planning.world import Made
from interlace.scheduler.whole_step.orders import ROUNDS, Orders
from tests.planning.told import FOUR, MOVING, OPEN, PEAK, Told, made, search, with_micro_batches
from tests.remarks import rules_of, sentences

LEVELS = ((3, 9), (5, 2), (1, 4), (8, 0))


@pytest.mark.parametrize(("firsts", "levels"), [((), ((5, 8), (9, 4))), ((0, 2), ((3, 1), (9, 4)))], ids=["each", "alike"])
def test_of_the_ranks_of_a_stage_the_one_that_needs_most_decides(firsts: Sequence[int], levels: object) -> None:
    """In each case by itself, for its own stage alone; of ranks that are alike the first is asked."""
    assert search(Told({tasks.levels_of: LEVELS}, firsts=firsts)).make.levels.within(100, (0.5,)) == levels


class Remade:
    """Plans that are made again, one after another, with the bytes that each rank is over the budget."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, asked: Pipeline, over: Sequence[Sequence[int]]) -> None:
        self.over, self.freed, self.memory_limits = over, list[list[int]](), list[tuple[int | None, ...]]()
        world = Told({}, num_ranks=2, bytes_over_in_step=self.bytes_over, order_peaks=lambda _: [PEAK, PEAK])
        monkeypatch.setattr(Levels, "raised", self.again)
        found = search(world, asked).make.with_lower_limits(self.make, made(0, asked, PEAK, PEAK), 77)
        self.found = found and found.memory_limits

    def bytes_over(self, _: Made, budget: int) -> Sequence[int]:
        assert budget == 77
        return self.over[len(self.memory_limits)]

    def again(self, passes: Pipeline, freed_bytes: Sequence[int]) -> Pipeline:
        self.freed.append(list(freed_bytes))
        return passes

    def make(self, passes: Pipeline, memory_limits: tuple[int | None, ...]) -> Made:
        self.memory_limits.append(memory_limits)
        return made(len(self.memory_limits), passes, *memory_limits)


def test_each_rank_gets_so_much_less_room_as_it_exceeds_the_budget_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until none does: one that is within keeps its room, but plans again with the others."""
    again = Remade(monkeypatch, MOVING, [[0, 5], [7, 0], [0, 0]])
    assert again.memory_limits == [(PEAK, PEAK - 2 * 5), (PEAK - 8 * 7, PEAK - 2 * 5)]
    assert again.found == (PEAK - 8 * 7, PEAK - 2 * 5)


def test_recomputation_frees_more_where_nothing_moves_or_moving_did_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Remade(monkeypatch, MOVING, [[5, 6], [3, 4], [0, 0]]).freed == [[0, 0], [3, 4]]
    assert Remade(monkeypatch, OPEN, [[5, 6], [3, 4], [0, 0]]).freed == [[5, 6], [3, 4]]


def test_a_plan_within_its_budget_is_not_made_again_and_one_that_never_is_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Remade(monkeypatch, MOVING, [[0, 0]])
    assert (kept.memory_limits, kept.found) == ([], (PEAK, PEAK))
    never = Remade(monkeypatch, MOVING, [[0, 1]] * 4)
    assert ([memory_limits[1] for memory_limits in never.memory_limits], never.found) == ([PEAK - 2, PEAK - 10, PEAK - 42], None)
    assert Remade(monkeypatch, MOVING, [[1, 1]] * 3 + [[0, 0]]).found == (PEAK - 42,) * 2


@pytest.mark.parametrize(
    ("budget", "paddles", "held", "steps", "taken", "told"),
    [
        (100, 100, 100, (100, 90), True, "without-budget-faster"),
        (100, 101, 100, (100, 90), False, ""),  # Paddle's baseline does not keep it
        (100, 100, 101, (100, 90), False, "without-budget-too-large"),
        (100, 100, 100, (100, 100), False, "without-budget-slower"),  # no faster
        (100, None, 100, (100, 90), False, ""),  # what Paddle's baseline holds is not known
        (100, 100, 100, (None, 90), False, ""),
    ],
)
def test_the_plan_without_a_budget_keeps_it_and_is_faster(
    monkeypatch: pytest.MonkeyPatch, budget: int, paddles: int | None, held: int, steps: tuple[int | None, int], taken: bool, told: str
) -> None:
    within, without = made(1, OPEN, 42), made(2, MOVING, None)
    world = Told(
        {tasks.baseline_peak: [paddles]},
        num_ranks=1,
        step_ns=lambda made, *_: steps[made.programs == (2,)],
        bytes_over_in_step=lambda made, limit: [max(0, held - limit) if made.programs == (2,) else 0],
    )
    monkeypatch.setattr(Search, "unlimited", lambda _: without)
    found = search(world).or_without_budget(within, budget)
    assert (found.passes is MOVING, found.memory_limits) == ((True, (0,)) if taken else (False, (42,)))
    assert rules_of(found.notes) == [told] * bool(told)


GB = 1 << 30
UNLIMITED, LIGHTER, WITHIN, BASELINE, STAYING = 1, 2, 3, 4, 5
"""Numbers of plans that the default compares."""


class Beside:
    """The default: plans with the simulated step of each, None where it never ends, and what each holds beyond ten GiB."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        steps: dict[int, int | None],
        more: dict[int, int],
        held: int = 10 * GB,
        asked: Pipeline = OPEN,
        budget: Beyond | None = None,
        unheld: dict[int, int | None] | None = None,
    ) -> None:
        self.limits, self.means = list[object](), list[list[str]]()
        world = Told(
            {tasks.baseline_peak: [held]},
            num_ranks=1,
            step_ns=lambda made, *_: steps[made.programs[0]],
            step_ns_unheld=lambda made: (unheld or steps)[made.programs[0]],
            bytes_over_in_step=lambda run, limit: [max(0, 10 * GB + more.get(run.programs[0], 0) - limit)],
            run=lambda *_: made(BASELINE, MOVING, None),
            facts=[SimpleNamespace(stage=0, draws=False, recomputes=False, memory_budget=budget)],
        )
        chosen = made(UNLIMITED, asked, None).noted(remark("decided", "form-taken"))
        monkeypatch.setattr(Search, "unlimited", lambda _: chosen)
        monkeypatch.setattr(Search, "fitting", lambda search, limit: self.fitting(search, limit))
        monkeypatch.setattr(Making, "made", self.made)
        self.steps = steps
        searching = search(world, asked)
        self.found = searching.beside_baseline((OffloadActivations(), ReturnMemory()))
        self.taken, self.told = self.found.programs[0], rules_of(self.found.notes)
        self.recorded = {run.programs[0]: rules_of(run.notes) for run in searching.runs}

    def fitting(self, search: Search, limit: int) -> Made | None:
        self.limits.append(limit)
        self.means.append([each.name for each in search.asked.passes if each not in OPEN.passes])
        search.recorded(made(STAYING, MOVING, 7))
        return made(WITHIN, MOVING, 7) if WITHIN in self.steps else None

    def made(self, passes: Pipeline, limits: tuple[int | None, ...]) -> Made:
        self.limits += limits
        return made(LIGHTER, passes, *limits)


@pytest.mark.parametrize(
    ("within_ns", "moves", "taken"), [(70, True, STAYING), (70, False, WITHIN), (100, False, STAYING), (None, False, STAYING)]
)
def test_where_moving_state_gains_nothing_the_run_that_keeps_it_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, within_ns: int | None, moves: bool, taken: int
) -> None:
    """And where state moves, as keeping it may be faster; else the second search is saved."""
    world = Told(
        {tasks.baseline_peak: [10 * GB], tasks.moves_states: [moves], tasks.movable_states: [1]},
        num_ranks=1,
        step_ns=lambda made, *_: {BASELINE: 100, UNLIMITED: 50, WITHIN: within_ns, STAYING: 60}[made.programs[0]],
        bytes_over_in_step=lambda run, limit: [GB if run.programs[0] in (UNLIMITED, LIGHTER) else 0],
        run=lambda *_: made(BASELINE, MOVING, None),
    )
    monkeypatch.setattr(Search, "unlimited", lambda _: made(UNLIMITED, OPEN, None))
    monkeypatch.setattr(Search, "fitting", lambda *_: made(WITHIN, MOVING, 7) if within_ns else None)
    kept = made(STAYING, MOVING, 7)
    monkeypatch.setattr(Search, "or_with_states_kept", lambda self, run, _: run if self.make.levels.states is None else kept)
    monkeypatch.setattr(Making, "made", lambda *_: made(LIGHTER, MOVING, None))
    means = (OffloadActivations(), OffloadOptimizerState(), ReturnMemory())
    assert search(world, OPEN).beside_baseline(means).programs[0] == taken


@pytest.mark.parametrize(("staying_ns", "searches"), [(70, 3), (71, 2), (None, 3)])
def test_where_keeping_all_state_is_clearly_slower_it_is_not_tried_without_memory_returned(
    monkeypatch: pytest.MonkeyPatch, staying_ns: int | None, searches: int
) -> None:
    asked = list[list[str]]()

    def fitting(search: Search, _: int) -> Made | None:
        asked.append([each.name for each in search.asked.passes if each not in OPEN.passes])
        if "offload-optimizer-state" in asked[-1]:
            return made(WITHIN, MOVING, 7)
        return made(STAYING, MOVING, 7) if staying_ns else None

    world = Told(
        {tasks.baseline_peak: [10 * GB], tasks.moves_states: [True], tasks.movable_states: [1]},
        num_ranks=1,
        step_ns=lambda made, *_: {BASELINE: 100, UNLIMITED: 90, WITHIN: 70, STAYING: staying_ns}[made.programs[0]],
        step_ns_unheld=lambda made: 90,
        bytes_over_in_step=lambda run, limit: [0],
        run=lambda *_: made(BASELINE, MOVING, None),
    )
    monkeypatch.setattr(Search, "unlimited", lambda _: made(UNLIMITED, OPEN, None))
    monkeypatch.setattr(Search, "fitting", fitting)
    search(world, OPEN).beside_baseline((OffloadOptimizerState(), ReturnMemory()))
    assert asked == [["offload-optimizer-state", "return-memory"], ["return-memory"], []][:searches]


def test_runs_of_searches_that_a_search_began_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those within its budget and the one without, which keeps no limits then; the last of equal ones with all the reasons for it."""
    world = Told(
        {tasks.baseline_peak: [8], tasks.movable_states: [1], tasks.least_bytes: [8]},
        num_ranks=1,
        step_ns=lambda run, *_: run.programs[0],
        bytes_over=lambda *_: [0],
        bytes_over_in_step=lambda *_: [0],
    )
    monkeypatch.setattr(Search, "chosen", lambda self, form, limit: made(len(self.asked.passes) + 10 * (limit is None), form, 7))
    monkeypatch.setattr(Search, "limit", lambda *_: 8)
    monkeypatch.setattr(Making, "with_lower_limits", lambda _, make, run, budget: run)
    searching = search(world, Pipeline((*OPEN.passes, OffloadOptimizerState())))
    searching.within(8, (ReturnMemory(),))
    assert {run.programs[0]: (run.memory_limits, rules_of(run.notes)) for run in searching.runs} == {
        2: ((7,), ["states-stay", "without-budget-slower"]),
        3: ((7,), ["states-stay"]),
        4: ((7,), []),
        12: ((0,), []),
    }


@pytest.mark.parametrize(("held", "limit", "number"), [((8, 0), 8, 2), ((9, 8), 8, 3), ((9, 9), 8, 3), ((9, 8), 0, 2)])
def test_what_holds_too_much_is_made_again_with_streams_that_wait_at_their_ends(
    monkeypatch: pytest.MonkeyPatch, held: tuple[int, int], limit: int, number: int
) -> None:
    world = Told({}, num_ranks=1, bytes_over_in_step=lambda run, limit: [max(0, held[run.programs[0] - 2] - limit)])

    def make(_: Making, passes: Pipeline, memory_limits: tuple[int | None, ...]) -> Made:
        return made(3 if ReturnMemory(at_end="on") in passes.passes else 2, passes, *memory_limits)

    monkeypatch.setattr(Making, "made", make)
    assert search(world).make.holding_less(Pipeline((*OPEN.passes, ReturnMemory())), (7,), limit).programs[0] == number
    assert search(world).make.holding_less(OPEN, (7,), limit).programs[0] == 2  # nothing returns memory


LIMIT = int(1.01 * 10 * GB)
EVERY = {UNLIMITED: 50, LIGHTER: 60, WITHIN: 70, BASELINE: 100}
SEARCHES = [["offload-activations", "return-memory"], ["offload-activations"]]
"""The passes that searches within the baseline's memory add."""
BOTH = "offload-activations and offload-optimizer-state"


def test_without_a_budget_what_keeps_the_baselines_memory_and_is_fastest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Beside(monkeypatch, EVERY, {UNLIMITED: LIMIT - 10 * GB})
    assert (plain.taken, plain.told) == (UNLIMITED, ["form-taken"])
    assert (plain.limits, plain.means) == ([LIMIT] * 2, SEARCHES)
    assert plain.recorded == {UNLIMITED: ["form-taken"], WITHIN: [], STAYING: []}
    better = Beside(monkeypatch, EVERY | {WITHIN: 49}, {})
    assert (better.taken, better.told) == (WITHIN, ["within-baseline-faster"])
    assert better.recorded == {UNLIMITED: ["form-taken"], WITHIN: ["within-baseline-faster"], STAYING: []}
    assert Beside(monkeypatch, EVERY | {WITHIN: 50}, {}).taken == UNLIMITED  # of equal ones what needs nothing more
    assert Beside(monkeypatch, EVERY | {UNLIMITED: 101, WITHIN: 102}, {}).taken == BASELINE


def test_where_waits_of_the_host_cost_time_memory_is_given_back_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a budget: what waits for longer than a two-hundredth of the step is made again so. Searches try it in any case."""
    held = Beside(monkeypatch, EVERY | {UNLIMITED: 1010, LIGHTER: 1006, WITHIN: 1007, BASELINE: 2000}, {}, unheld={UNLIMITED: 1004})
    assert (held.taken, held.told) == (LIGHTER, ["form-taken", "memory-returned-faster"])
    assert held.recorded == {UNLIMITED: ["form-taken"], LIGHTER: held.told, WITHIN: ["within-baseline-faster"], STAYING: []}
    assert held.means == SEARCHES
    little = Beside(monkeypatch, EVERY | {UNLIMITED: 1010, LIGHTER: 1006}, {}, unheld={UNLIMITED: 1005})
    assert (little.taken, little.means) == (WITHIN, SEARCHES)
    never = Beside(monkeypatch, EVERY | {UNLIMITED: 60}, {}, unheld={UNLIMITED: None})
    assert (never.taken, never.means) == (UNLIMITED, SEARCHES)


@pytest.mark.parametrize(
    ("steps", "taken", "asked"),
    [
        ((1006, 900), True, 2),
        ((1006, 1006), False, 2),  # no faster
        ((1006, None), False, 2),
        ((None, 900), False, 1),
    ],
)
@pytest.mark.parametrize(("staying_ns", "again"), [(0, True), (1016, True), (1017, False)])
def test_within_a_budget_memory_is_given_back_in_order_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, steps: tuple[int | None, int | None], taken: bool, asked: int, staying_ns: int, again: bool
) -> None:
    """A run that keeps optimizer state on the device is looked for again unless one without memory returned took over 1 % longer."""
    searches, staying = list[Search](), list[Search]()

    def fitting(search: Search, _: int) -> Made:
        searches.append(search)
        return made(len(searches), search.asked, 7)

    def or_with_states_kept(search: Search, run: Made, _: int) -> Made:
        staying.append(search)
        search.staying_ns = staying_ns
        return run

    world = Told(
        {tasks.baseline_peak: [101]},
        num_ranks=1,
        step_ns=lambda run, *_: steps[run.programs[0] - 1],
        bytes_over=lambda *_: [0],
    )
    monkeypatch.setattr(Search, "fitting", fitting)
    monkeypatch.setattr(Search, "or_with_states_kept", or_with_states_kept)
    found = search(world).within(100, (ReturnMemory(),))
    assert (len(searches), found.programs[0]) == (asked, 2 if taken else 1)
    assert len(staying) == (asked if again else 1)
    assert rules_of(found.notes) == ["memory-returned-faster"] * taken
    assert [each.name for each in found.passes.passes if each not in OPEN.passes] == ["return-memory"] * taken


@pytest.mark.parametrize(
    ("micro_batches", "moves", "finds", "searches"),
    [
        (128, False, True, ["", "staying", "return-memory", "staying"]),
        (129, False, True, [""]),
        (129, True, True, ["", "staying"]),
        (129, False, False, ["", "staying", "return-memory", "staying"]),
    ],
)
def test_a_long_step_within_a_budget_is_searched_less_often(
    monkeypatch: pytest.MonkeyPatch, micro_batches: int, moves: bool, finds: bool, searches: list[str]
) -> None:
    """With the passes that were asked for, as long as these keep the budget; and without moving optimizer state only if that moves some."""
    asked = list[str]()

    def fitting(search: Search, _: int) -> Made | None:
        names = [each.name for each in search.asked.passes if each not in OPEN.passes]
        asked.append(" ".join(names))
        return made(len(asked), search.asked, 7) if finds or names else None

    def or_with_states_kept(_: Search, run: Made | None, budget: int) -> Made:
        asked.append("staying")
        return run or made(5, OPEN, budget)

    world = Told(
        {tasks.baseline_peak: [101], tasks.moves_states: [moves]},
        num_ranks=1,
        step_ns=lambda *_: 70,
        bytes_over=lambda *_: [0],
    )
    world.captured = with_micro_batches(world.captured, micro_batches)
    monkeypatch.setattr(Search, "fitting", fitting)
    monkeypatch.setattr(Search, "or_with_states_kept", or_with_states_kept)
    assert search(world).within(100, (ReturnMemory(),)).programs[0] == (1 if finds else 5)
    assert asked == searches


def test_without_a_budget_what_holds_more_than_the_baseline_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    over = {UNLIMITED: GB}
    again = Beside(monkeypatch, EVERY, over)
    assert (again.taken, again.told) == (LIGHTER, ["form-taken", "baseline-memory-kept"])
    assert again.recorded == {LIGHTER: again.told, WITHIN: ["baseline-memory-kept"], STAYING: []}
    assert (again.limits, again.means) == ([LIMIT] * 3, SEARCHES)
    assert [each.name for each in again.found.passes.passes if each not in OPEN.passes] == ["return-memory"]
    assert Beside(monkeypatch, EVERY, over | {LIGHTER: GB}).taken == WITHIN
    baseline = Beside(monkeypatch, EVERY, over | {LIGHTER: GB, WITHIN: GB})
    assert (baseline.taken, baseline.told) == (BASELINE, ["baseline-kept", "more-than-the-baseline"])
    stalls = Beside(monkeypatch, EVERY | {LIGHTER: None, WITHIN: None, BASELINE: None}, over)
    assert (stalls.taken, stalls.told) == (UNLIMITED, ["form-taken"])  # nothing else comes to its end
    assert Beside(monkeypatch, EVERY | {LIGHTER: None}, over).taken == WITHIN
    del (alone := dict(EVERY))[WITHIN]
    assert Beside(monkeypatch, alone, over | {LIGHTER: GB}).taken == BASELINE


def test_the_default_takes_what_allocators_round_by_and_more_where_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = LIMIT - 10 * GB + (32 << 20)
    small = Beside(monkeypatch, EVERY, {UNLIMITED: rounded})
    assert (small.taken, small.limits, small.means) == (UNLIMITED, [LIMIT] * 2, SEARCHES)
    assert Beside(monkeypatch, EVERY, {UNLIMITED: rounded + 1}).taken == LIGHTER
    assert Beside(monkeypatch, EVERY | {WITHIN: 49}, {WITHIN: LIMIT - 10 * GB + 1}).taken == UNLIMITED
    told: Any = Told({tasks.baseline_peak: [None, 100]}, num_ranks=2)
    assert beyond_baseline(told, baseline_bytes(told)) == 101
    asked = Beyond(GB)
    assert Beside(monkeypatch, EVERY, {UNLIMITED: rounded + GB}, budget=asked).taken == UNLIMITED
    more = Beside(monkeypatch, EVERY, {UNLIMITED: rounded + GB + 1}, budget=asked)
    assert (more.taken, more.limits) == (LIGHTER, [LIMIT + GB] * 3)
    assert ", the peak of Paddle's baseline on a GPU plus 1 % and 1.000 GiB; " in sentences(more.found.notes)[-1]
    free = Beside(monkeypatch, EVERY, {UNLIMITED: 1000 * GB}, budget=NO_LIMIT)
    assert (free.taken, free.limits) == (UNLIMITED, [])
    by_hand = Pipeline((ChooseRecompute(), Schedule1F1B(), OffloadActivations(fraction=1.0)))
    moved = Beside(monkeypatch, EVERY | {WITHIN: 1}, {}, asked=by_hand)
    assert (moved.taken, moved.limits) == (UNLIMITED, [])  # what is moved was said


@pytest.mark.parametrize(
    ("micro_batches", "staying", "moving", "baseline", "taken", "told", "searches"),
    [
        (129, 70, 60, 100, STAYING, "long-step-within-baseline", ["offload-activations"]),
        (129, 100, 60, 100, WITHIN, "long-step-within-baseline", ["offload-activations", BOTH]),
        (129, 100, None, 100, UNLIMITED, "form-taken", ["offload-activations", BOTH, "in full", BOTH]),
        (129, 70, 60, None, UNLIMITED, "form-taken", ["in full", BOTH]),  # the baseline's step is not known
        (128, 70, 60, 100, UNLIMITED, "form-taken", ["in full", BOTH]),
    ],
)
def test_a_long_step_is_planned_within_the_baselines_memory_at_once(
    monkeypatch: pytest.MonkeyPatch,
    micro_batches: int,
    staying: int,
    moving: int | None,
    baseline: int | None,
    taken: int,
    told: str,
    searches: list[str],
) -> None:
    """Optimizer state moves only if that alone is faster than the baseline; if nothing is, all searches are made."""
    asked, steps = list[str](), {STAYING: staying, WITHIN: moving, BASELINE: baseline, UNLIMITED: 50}
    world = Told(
        {tasks.baseline_peak: [10 * GB], tasks.movable_states: [1], tasks.moves_states: [False]},
        num_ranks=1,
        step_ns=lambda made, *_: steps[made.programs[0]],
        step_ns_unheld=lambda made: steps[made.programs[0]],
        bytes_over_in_step=lambda *_: [0],
        run=lambda *_: made(BASELINE, MOVING, None),
    )
    world.captured = with_micro_batches(world.captured, micro_batches)

    def fitting(search: Search, limit: int) -> Made | None:
        assert limit == LIMIT
        names = [each.name for each in search.asked.passes if each not in OPEN.passes]
        asked.append(" and ".join(sorted(names)))
        number = STAYING if names == ["offload-activations"] else WITHIN
        return made(number, MOVING, 7) if steps[number] else None

    def unlimited(_: Search) -> Made:
        asked.append("in full")
        return made(UNLIMITED, OPEN, None).noted(remark("decided", "form-taken"))

    monkeypatch.setattr(Search, "fitting", fitting)
    monkeypatch.setattr(Search, "unlimited", unlimited)
    monkeypatch.setattr(Search, "or_with_states_kept", lambda *_: None)
    found = search(world, OPEN).beside_baseline((OffloadActivations(), OffloadOptimizerState()))
    assert (found.programs[0], rules_of(found.notes)) == (taken, [told])
    assert asked == searches


def test_a_long_step_may_hold_what_is_allowed_beyond_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = list[int]()
    world = Told(
        {tasks.baseline_peak: [10 * GB]},
        num_ranks=1,
        step_ns=lambda made, *_: {WITHIN: 70, BASELINE: 100}[made.programs[0]],
        run=lambda *_: made(BASELINE, MOVING, None),
        facts=[SimpleNamespace(stage=0, draws=False, recomputes=False, memory_budget=Beyond(GB))],
    )
    world.captured = with_micro_batches(world.captured, 129)
    monkeypatch.setattr(Search, "fitting", lambda _, limit: limits.append(limit) or made(WITHIN, MOVING, 7))
    found = search(world, OPEN).beside_baseline((OffloadActivations(),))
    assert limits == [LIMIT + GB]
    assert ", the peak of Paddle's baseline on a GPU plus 1 % and 1.000 GiB, as a budget; " in sentences(found.notes)[-1]


def test_a_draft_of_a_long_step_has_the_transfers_of_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = list[int]()

    def decided(each: object, plans: object, run: object, most: int) -> Orders:
        rounds.append(most)
        return Orders(((), ()), 7, 7)

    monkeypatch.setattr(tasks, "decided_for_all", decided)
    for micro_batches in (128, 129):
        plans = [with_micro_batches(each, micro_batches) for each in FOUR[::2]]
        assert tasks.simulated_step(plans, [DelayTransfers()], CostModel(load_profile("h200")), {}) == (7, 0.0)
    assert rounds == [ROUNDS, 1]


@pytest.mark.parametrize(
    ("steps", "held", "asked"),
    [
        (EVERY, 0, OPEN),  # what Paddle's baseline holds is not known
        (EVERY | {UNLIMITED: None}, 10 * GB, OPEN),
        (EVERY, 10 * GB, Pipeline((Schedule1F1B(interleave="mixed"),))),  # a form that is asked for may hold more
        (EVERY, 10 * GB, Pipeline((ChooseRecompute(),))),
    ],
)
def test_what_is_not_known_or_was_asked_for_stays(
    monkeypatch: pytest.MonkeyPatch, steps: dict[int, int | None], held: int, asked: Pipeline
) -> None:
    kept = Beside(monkeypatch, steps, {UNLIMITED: 20 * GB}, held, asked)
    assert (kept.taken, kept.limits) == (UNLIMITED, [])


@pytest.mark.parametrize(("budget", "hopeless"), [(50, False), (49, True)])
def test_what_is_needed_at_once_is_refused_before_any_plan(monkeypatch: pytest.MonkeyPatch, budget: int, hopeless: bool) -> None:
    runs: list[int] = []

    def chosen(_: Search, passes: Pipeline, limit: object) -> Made:
        runs.append(1)
        return made(1, passes, 7)

    monkeypatch.setattr(Search, "chosen", chosen)
    monkeypatch.setattr(Search, "limit", lambda *_: None)
    monkeypatch.setattr(Making, "with_lower_limits", lambda self, make, run, budget: run)
    found = search(Told({tasks.least_bytes: [50]}, num_ranks=1)).fitting(budget)
    assert (found is None, runs) == ((True, []) if hopeless else (False, [1]))
    assert found is None or found.memory_limits == (7,)


@pytest.mark.parametrize(("held", "kept"), [(100, True), (101, False)])
def test_what_holds_least_is_kept_within_the_budget_and_refused_above(monkeypatch: pytest.MonkeyPatch, held: int, kept: bool) -> None:
    least = made(1, OPEN, 5)

    def refuse(_: Making, run: Made, budget: int) -> None:
        raise BudgetError(f"{budget} is too little", 101)

    monkeypatch.setattr(Search, "fitting", lambda *_: None)
    monkeypatch.setattr(search_module, "least_memory", lambda _: least)
    monkeypatch.setattr(search_module, "refuse", refuse)
    asked = search(Told({}, num_ranks=2, bytes_over=lambda _, limit: [0, max(0, held - limit)]))
    if kept:
        assert asked.within(100) == replace(least)
    else:
        with pytest.raises(BudgetError, match="100 is too little"):
            asked.within(100)


@pytest.mark.parametrize(("part", "budget"), [(0.5, 208), (0.0001, 1)])
def test_a_part_of_what_is_held_is_a_budget_however_small(part: float, budget: int) -> None:
    world = Told({tasks.baseline_peak: [416, None]}, num_ranks=2, facts=[SimpleNamespace(memory_budget=part)] * 2)
    assert budget_bytes(world) == budget  # type: ignore[arg-type]
