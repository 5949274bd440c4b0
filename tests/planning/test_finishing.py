"""What is compared once the search has decided: told by hand, no plan is made."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from interlace.ir.remarks import remark
from interlace.passes import OffloadActivations, OffloadOptimizerState, Pass, Pipeline, ReturnMemory, Schedule1F1B
from interlace.planning import finishing, tasks
from interlace.planning.finishing import (
    ordered_further,
    with_fewer_means,
)
from interlace.planning.levels import Levels
from interlace.planning.making import Making
from interlace.planning.search import Search
from interlace.planning.variants import schedule_of
from interlace.planning.world import Made
from tests.planning.told import FOUR, OPEN, PEAK, Told, made, search, with_micro_batches
from tests.remarks import rules_of

TOO_LARGE, TOO_LARGE_SEARCHED, IN_PADDLES_ORDER, NEVER_ENDS = 10020, 10030, 10040, 10045
"""Steps in nanoseconds of runs that hold too much, hold too much once they are searched, have no jobs to be searched, or never end."""


@pytest.mark.parametrize(
    ("steps", "held", "limit", "num_ops", "taken"),
    [
        ((100, 99), 8, 8, 9, True),
        ((100, 99), 9, 8, 9, False),  # holds too much
        ((100, 99), 9, 0, 9, True),  # without a limit
        ((100, 100), 8, 8, 9, False),
        ((100, None), 8, 8, 9, False),
        ((100, 99), 8, 8, 1501, False),  # larger programs are not searched
    ],
)
def test_jobs_are_searched_further_where_that_is_faster_within_the_limit(
    monkeypatch: pytest.MonkeyPatch, steps: tuple[int, int | None], held: int, limit: int, num_ops: int, taken: bool
) -> None:
    world = Told(
        {},
        num_ranks=2,
        step_ns=lambda run, *_: steps[run.programs[0] - 1],
        bytes_over_in_step=lambda run, limit: [max(0, (held if run.programs[0] == 2 else limit) - limit)] * 2,
    )
    for each in world.facts:
        each.num_ops = num_ops

    def make(_: Making, passes: Pipeline, memory_limits: tuple[int | None, ...]) -> Made:
        limits.append(memory_limits)
        return made(2, passes, *memory_limits)

    limits: list[tuple[int | None, ...]] = [(7, 7)]
    monkeypatch.setattr(Making, "made", make)
    decided = Pipeline((Schedule1F1B(interleave="mixed", search=False),))
    found = ordered_further(search(world), made(1, decided, 7, 7).noted(remark("decided", "form-taken")), limit)
    assert (found.programs[0], found.memory_limits) == (2 if taken else 1, (7, 7))
    assert [each.search for each in found.passes.passes if isinstance(each, Schedule1F1B)] == [taken]
    assert rules_of(found.notes) == ["form-taken", *["searched-inside-jobs"] * taken]
    free = ordered_further(search(world), made(1, decided, 0, 0), limit)
    assert (free.programs[0], free.memory_limits, limits[-1]) == (2 if taken else 1, (0, 0), (None, None) if num_ops < 1501 else (7, 7))
    plain = made(1, decided, 7, 7)
    for asked in (Schedule1F1B(search=False), Schedule1F1B(interleave="mixed")):  # switched off, or a form that the user gave
        assert ordered_further(search(world, Pipeline((asked,))), plain, limit) is plain


@pytest.mark.parametrize(
    ("others", "taken"),
    [
        ({}, 9950),
        ({10001: 9900}, 9900),
        ({10049: 9900}, 9900),
        ({10050: 9900}, 9950),  # by over 1 % longer than the fastest that was searched
        ({10001: 9930, 10010: 9900}, 9900),
        ({10010: 9800, 10001: 9850}, 9850),  # likewise, as the faster one is searched first
        ({10001: 9950}, 9950),  # no faster: what was the fastest before stays
        ({TOO_LARGE: 9900}, 9950),
        ({NEVER_ENDS: 9900}, 9950),
        ({TOO_LARGE_SEARCHED: 9900}, 9950),
        ({IN_PADDLES_ORDER: 9900}, 9950),
    ],
)
@pytest.mark.parametrize("limit", [8, 0], ids=["limit", "no limit"])
def test_runs_that_take_nearly_as_long_are_searched_further_too(
    monkeypatch: pytest.MonkeyPatch, others: dict[int, int], taken: int, limit: int
) -> None:
    """The run that takes 10000 ns takes 9950 once it is searched; `others`: step of another -> its step then."""
    steps = {10000: 9950} | others
    world = Told(
        {},
        num_ranks=1,
        step_ns=lambda run, *_: None if run.programs[0] == NEVER_ENDS else run.programs[0],
        bytes_over_in_step=lambda run, limit: [
            max(0, 9 * (run.programs[0] == TOO_LARGE or run.memory_limits == (TOO_LARGE_SEARCHED,)) - limit)
        ],
    )
    world.facts[0].num_ops = 9
    monkeypatch.setattr(Making, "made", lambda _, passes, limits: made(steps[limits[0]], passes, *limits))
    kept = {step: Pipeline((Schedule1F1B(interleave="off" if step == IN_PADDLES_ORDER else "mixed", search=False),)) for step in steps}
    searching = search(world)
    runs = [made(step, kept[step], step).noted(remark("decided", "form-taken")) for step in steps]
    searching.runs += runs
    found = ordered_further(searching, runs[0], limit)
    if not limit and others.keys() & {TOO_LARGE, TOO_LARGE_SEARCHED}:
        taken = 9900
    assert found.programs == (taken,)
    assert rules_of(found.notes) == ["form-taken", "searched-inside-jobs", *["searched-run-faster"] * (taken != 9950)]
    if taken != 9950:
        assert found.notes[-1].numbers == {"step_ns": taken, "other_ns": 9950}
    assert {run.programs for run in searching.runs} >= {(10000,), (9950,)}


@pytest.mark.parametrize("other", [99_490, 99_491])
def test_another_run_is_taken_for_more_than_nothing(monkeypatch: pytest.MonkeyPatch, other: int) -> None:
    """Its pools may be larger."""
    world = Told({}, num_ranks=1, step_ns=lambda run, *_: run.programs[0], bytes_over_in_step=lambda *_: [0])
    world.facts[0].num_ops = 9
    monkeypatch.setattr(Making, "made", lambda _, passes, limits: made(limits[0], passes, *limits))
    passes = Pipeline((Schedule1F1B(interleave="mixed", search=False),))
    searching = search(world)
    searching.runs.append(made(100_001, passes, other))
    assert ordered_further(searching, made(100_000, passes, 99_500), 8).programs == (99_490 if other == 99_490 else 99_500,)


def test_others_may_hold_what_the_fastest_run_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a budget that may be more than the limit by what allocators round by. Another may be as fast, or faster if it holds more."""
    held = {1000: 10, 999: 11, 1001: 10, 1002: 11}
    world = Told(
        {},
        num_ranks=1,
        step_ns=lambda run, *_: run.programs[0],
        bytes_over_in_step=lambda run, limit: [max(0, held.get(run.programs[0], 10) - limit)],
    )
    world.facts[0].num_ops = 9
    monkeypatch.setattr(Making, "made", lambda _, passes, limits: made(limits[0] - 5, passes, *limits))
    passes = Pipeline((Schedule1F1B(interleave="mixed", search=False),))
    searching = search(world)
    searching.runs += [made(step, passes, limit) for step, limit in ((999, 990), (1000, 997), (1001, 996), (1002, 991))]
    assert ordered_further(searching, made(1000, passes, 1000), 8).programs == (991,)


@pytest.mark.parametrize(("lighter_ns", "held", "taken"), [(99, 8, True), (100, 8, False), (None, 8, False), (99, 9, False)])
@pytest.mark.parametrize("asked", [OPEN, Pipeline((*OPEN.passes, OffloadActivations(fraction=0.5)))], ids=["open", "the user moves"])
def test_what_searched_jobs_hold_too_much_may_be_moved(
    monkeypatch: pytest.MonkeyPatch, lighter_ns: int | None, held: int, taken: bool, asked: Pipeline
) -> None:
    """By passes that follow a budget, unless the user says what moves; the step must still be shorter than without the local search."""
    world = Told(
        {tasks.movable_states: [1]},
        num_ranks=1,
        step_ns=lambda run, *_: {1: 100, 2: 98, 3: lighter_ns}[run.programs[0]],
        bytes_over_in_step=lambda run, limit: [max(0, {1: 8, 2: 9, 3: held}[run.programs[0]] - limit)],
        order_peaks=lambda _: [PEAK],
    )
    world.facts[0].num_ops = 9

    def make(_: Making, passes: Pipeline, memory_limits: tuple[int | None, ...]) -> Made:
        moves = any(each.name == "offload-optimizer-state" for each in passes.passes)
        assert schedule_of(passes) == Schedule1F1B(interleave="mixed")
        return made(3 if moves else 2, passes, *memory_limits)

    monkeypatch.setattr(Making, "made", make)
    monkeypatch.setattr(Levels, "raised", lambda _, passes, over: passes)
    decided = made(1, Pipeline((Schedule1F1B(interleave="mixed", search=False),)), 0)
    found = ordered_further(search(world, asked), decided, 8, (OffloadOptimizerState(), ReturnMemory()))
    taken = taken and asked is OPEN
    assert (found.programs[0], found.memory_limits) == ((3, (8,)) if taken else (1, (0,)))
    assert ordered_further(search(world, asked), decided, 8) is decided  # by nothing


@pytest.mark.parametrize(
    ("limit", "steps", "held", "micro_batches", "taken"),
    [
        (102, (100, 99), 102, 2, True),
        (101, (100, 99), 101, 2, False),  # all that the default may hold
        (102, (100, 100), 102, 2, False),
        (102, (100, None), 102, 2, False),
        (102, (100, 99), 103, 2, False),  # holds too much, as the default may by little
        (102, (100, 99), 102, 10**6, False),  # a long step
    ],
)
def test_a_plan_that_may_hold_more_than_the_default_is_no_slower(
    monkeypatch: pytest.MonkeyPatch, limit: int, steps: tuple[int, int | None], held: int, micro_batches: int, taken: bool
) -> None:
    """Of the same passes, without those that need a budget, which may then be used like others that were not asked for. What is compared is
    the finished plan of the default."""
    asked = list[tuple[list[str], list[str], int | None]]()

    def beside_baseline(search: Search, means: Sequence[Pass], limit: int | None) -> Made:
        asked.append(([each.name for each in search.asked.passes], [each.name for each in means], limit))
        search.recorded(made(2, OPEN, None))
        return made(3, OPEN, None)

    def finished(search: Search, run: Made, limit: int, means: Sequence[Pass]) -> Made:
        assert run.programs == (3,)
        assert (asked[-1], limit) == (([each.name for each in search.asked.passes], [each.name for each in means], limit), 101)
        return made(1, OPEN, None)

    world = Told(
        {tasks.baseline_peak: [100]},
        num_ranks=1,
        step_ns=lambda run, *_: steps[run.programs[0]],
        bytes_over_in_step=lambda run, limit: [max(0, held - limit)],
    )
    world.captured = with_micro_batches(FOUR[0], micro_batches)
    monkeypatch.setattr(Search, "beside_baseline", beside_baseline)
    monkeypatch.setattr(finishing, "finished", finished)
    within = made(0, OPEN, 102)
    searching = search(world, Pipeline((*OPEN.passes, OffloadActivations())))
    found = finishing.or_by_default(searching, within, limit, (ReturnMemory(),))
    assert (found.programs[0], found.memory_limits) == ((1, (0,)) if taken else (0, (102,)))
    assert rules_of(found.notes) == ["default-faster"] * taken
    assert [run.programs[0] for run in searching.runs] == [2, 1, 0][: 3 * len(asked)]
    assert asked == [(["choose-recompute", "schedule-1f1b"], ["offload-activations", "return-memory"], 101)] * (
        limit > 101 and micro_batches < 10**6
    )
    named = search(world, Pipeline((Schedule1F1B(interleave="mixed"),)))
    assert finishing.or_by_default(named, within, 102, ()) is within


RETURNS = ReturnMemory(at_end="on")
"""What a search adds where a plan holds too much; its reports call it `return_memory: {at_end: on}`."""


@pytest.mark.parametrize(
    ("asked", "limits", "without_ns", "over", "number"),
    [
        (OPEN, 7, 69, 0, 2),
        (OPEN, 7, 70, 0, 1),  # no faster
        (OPEN, 7, None, 0, 1),  # never ends
        (OPEN, 7, 69, 1, 1),  # holds too much
        (OPEN, None, 69, 0, 1),  # offload follows no limit
        (Pipeline((*OPEN.passes, ReturnMemory())), 7, 69, 0, 1),  # the user wants it
    ],
)
def test_memory_is_returned_only_where_the_step_is_longer_without(
    monkeypatch: pytest.MonkeyPatch, asked: Pipeline, limits: int | None, without_ns: int | None, over: int, number: int
) -> None:
    world = Told({}, num_ranks=1, step_ns=lambda run: 70 if run.programs[0] == 1 else without_ns, bytes_over_in_step=lambda *_: [over])
    monkeypatch.setattr(Making, "made", lambda _, passes, memory_limits: made(2, passes, *memory_limits))
    others = ("return_memory: {at_end: on}", "throttle_host: {syncs: job-ends}")
    lost = [remark("decided", rule) for rule in ("memory-returned-faster", "made-again")]
    notes = (remark("decided", "form-taken", form="mixed", others=others), *lost)
    given = made(1, Pipeline((*OPEN.passes, RETURNS)), limits).noted(*notes)
    searching = search(world, asked)
    found = with_fewer_means(searching, given, 100)
    assert searching.runs == ([given, found] if found is not given else [])
    assert found.programs[0] == number
    if number == 2:
        assert (found.passes, found.memory_limits) == (OPEN, (limits,))
        assert rules_of(found.notes) == ["form-taken", "memory-not-returned-faster"]
        assert found.notes[0].names == {"form": "mixed", "others": others[1:]}
    else:
        assert found is given
