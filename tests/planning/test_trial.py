"""The account of a trial, and what is kept of it; without Paddle."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest

from interlace.config import make_config
from interlace.errors import ConfigError
from interlace.planning.choice import Beginning, Store, TrialOutcome
from interlace.planning.trial import COUNTED, MOST_TURNS, PADDLES, RARELY, SLOW_WINDOWS, WINDOW, Contender, Trial, Watch, told_of
from interlace.report.measured import trial_lines

OURS, FORM = Contender("ours", {}), Contender("form", {"schedule_1f1b": {"interleave": "mixed"}})


def decided(trial: Trial, took_ns: dict[str, int], ranks: int = 2) -> Trial:
    """Run a trial to its end on several ranks, of which the last is slower by one."""
    while trial.taken is None:
        name = trial.now.name
        if trial.took(took_ns[name] + trial.steps % 3):
            assert len(trial.mine()) == COUNTED
            trial.turn([[each + rank for each in trial.mine()] for rank in range(ranks)])
        assert len(trial.held) <= 2
    return trial


@pytest.mark.parametrize("fastest", ["ours", "form", PADDLES.name])
def test_the_fastest_is_taken(fastest: str) -> None:
    trial = Trial([OURS, PADDLES, FORM])
    took_ns = {each.name: 80 if each.name == fastest else 100 for each in (OURS, PADDLES, FORM)}
    found = decided(trial, took_ns)
    assert found.taken is not None
    assert found.taken.name == fastest
    results = {each.name: each for each in found.results()}
    assert 81 <= results[fastest].median_ns <= 83, "as long as on the slowest rank"


def test_where_nothing_differs_paddles_own_plan_stays() -> None:
    trial = decided(Trial([OURS, PADDLES, FORM]), {"ours": 100, "form": 100, PADDLES.name: 100})
    assert trial.taken == PADDLES
    assert len(trial.accounts["ours"].took_ns) == COUNTED * MOST_TURNS


def test_plans_that_fail_are_dropped_and_paddles_own_is_left() -> None:
    trial = Trial([OURS, PADDLES, FORM])
    trial.drop("no")
    assert trial.held == [PADDLES, FORM]
    trial.drop("neither")
    assert trial.taken == PADDLES
    assert [each.fault for each in trial.results() if each.fault] == ["no", "neither"]
    alone = Trial([OURS])
    assert alone.taken == OURS
    alone.drop("no")
    assert alone.taken == PADDLES


def windows(watch: Watch, steps_ns: list[int], ranks: int = 2) -> list[int]:
    """Windows of steps that take so long; the last rank is slower by one. Gives the numbers of those after which plans are tried again."""
    now_ns, again = 1, []
    for number, took_ns in enumerate(steps_ns):
        while not watch.starts(now_ns):
            now_ns += took_ns
        if watch.turn([watch.mine() + rank for rank in range(ranks)]):
            again.append(number)
    return again


def test_a_plan_that_became_slow_is_seen_once_it_stays_slow_and_rarely() -> None:
    assert windows(Watch(), [100] * 40) == []
    assert windows(Watch(), [100] * 20 + [130] + [100] * 20) == [], "one slow window"
    assert windows(Watch(), [130] + [100] * 40) == [], "faster than at first"
    slow = RARELY + 5
    watch = Watch()
    assert windows(watch, [100] * slow + [130] * SLOW_WINDOWS) == [slow + SLOW_WINDOWS - 1]
    assert (watch.before_ns, watch.now_ns) == (101, 131), "as long as on the slowest rank"
    watch.restart()
    assert windows(watch, [100, *[130] * (2 * RARELY)]) == [2 * RARELY], "the next time after twice as long"


def test_evaluations_between_steps_do_not_make_a_plan_slow() -> None:
    watch, now_ns, again = Watch(), 1, 0
    for number in range(WINDOW * 3 * RARELY):
        if watch.starts(now_ns):
            again += watch.turn([watch.mine()])
        now_ns += 100 if number < WINDOW or number % 3 else 5_000
    assert again == 0


def test_a_choice_is_kept_and_a_run_that_ended_without_a_word_is_known(tmp_path: Path) -> None:
    store, choice = Store(tmp_path / "cache", "key"), TrialOutcome(OURS, steps=7)
    assert store.read().choice is None
    assert store.write(choice)
    assert store.read().choice == choice
    store.begin("ours")
    assert store.read().ended == ("ours",), "a beginning of this very process is an earlier one's"
    store.end()
    assert store.read().ended == ()
    store.beginning_path.write_bytes(msgspec.json.encode([Beginning("form", socket.gethostname(), 1 << 22)]))
    assert store.read().ended == ("form",)
    store.choice_path.write_text("{")
    assert store.read().choice is None


@pytest.mark.parametrize(("then", "now", "holds"), [(0, 0, True), (100, 90, True), (100, 89, False), (90, 100, True), (0, 9, False)])
def test_a_choice_holds_in_about_as_much_memory(then: int, now: int, holds: bool) -> None:
    assert TrialOutcome(OURS, memory_bytes=then).holds_in(now) == holds


def test_the_lines_tell_what_was_measured() -> None:
    lines = trial_lines(told_of(decided(Trial([OURS, PADDLES]), {"ours": 80, PADDLES.name: 100})))
    assert lines[0].endswith("ours is taken")
    assert len(lines) == 3


def test_tune_takes_one_of_three_words() -> None:
    assert make_config({"tune": "on"}).tune == "on"
    with pytest.raises(ConfigError, match="tune"):
        make_config({"tune": "always"})
