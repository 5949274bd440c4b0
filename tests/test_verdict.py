"""Whose fault a difference between baseline and Interlace is: baseline runs again before DIFFERENT is said."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from interlace.cli import main
from interlace.cli import run as run_command
from interlace.errors import LaunchError
from interlace.local.launch import LaunchResult
from interlace.local.rank_report import STEPS_VARIABLE, RankReport, StepLoss, read_report
from interlace.local.verdict import EVALUATED, FAULTS, PLAN_ALONE, judge

GOOD = ("train 01", "eval 02", "train 03")
DIED = LaunchError("rank 1 failed: killed by signal SIGSEGV\nlog of rank 1: ...")


def result(*steps: str, weights: str = "aa", plan: Any = None) -> LaunchResult:
    """A run of one rank: modes and bits of its losses."""
    losses: list[StepLoss] = []
    for mode, bits in (step.split() for step in steps):
        number = 1 + sum(loss.mode == mode for loss in losses)
        losses.append(StepLoss(mode, number, "float32", (), bits, (1.0,), 5))
    return LaunchResult((RankReport(0, 1, tuple(losses), {"w": weights}, plan),), 1.0, "logs")


PLANNED = result(*GOOD, plan={"rank": 0, "passes": [], "trial": [], "sentence": "Paddle's baseline takes longer."})
TRAINED = result("train 01", "train 03")
WRONG = result("train 01", "eval 02", "train 09", weights="bb")
OTHER = result("train 01", "eval 02", "train 05", weights="cc")


class Runs:
    """The baseline's other runs: what each gives, or how it fails, and in which environment it ran."""

    def __init__(self, **given: LaunchResult | LaunchError) -> None:
        self.given, self.ran = given, dict[str, dict[str, str]]()

    def __call__(self, name: str, env: Mapping[str, str]) -> LaunchResult:
        self.ran[name] = dict(env)
        if STEPS_VARIABLE in env:
            assert read_report(env[STEPS_VARIABLE], 0) == PLANNED.reports[0]
        found = self.given[name.replace("-", "_")]
        if isinstance(found, LaunchError):
            raise found
        return found


CASES: dict[str, tuple[LaunchResult | LaunchError, dict[str, Any], str, str]] = {
    "equal": (result(*GOOD), {}, "same", "baseline"),
    "evaluation spoils baseline": (WRONG, {"baseline_again": WRONG, "baseline_training_only": TRAINED}, "same", "baseline-training-only"),
    "evaluation kills baseline": (DIED, {"baseline_training_only": TRAINED}, "same", "baseline-training-only"),
    "in-place": (
        WRONG,
        {"baseline_again": WRONG, "baseline_training_only": OTHER, "baseline_no_inplace": TRAINED},
        "same",
        "baseline-no-inplace",
    ),
    "ours": (WRONG, {"baseline_again": WRONG, "baseline_training_only": OTHER, "baseline_no_inplace": OTHER}, "different", "baseline"),
    "ours, where baseline dies": (
        DIED,
        {"baseline_training_only": OTHER, "baseline_no_inplace": OTHER},
        "different",
        "baseline-training-only",
    ),
    "baseline cannot": (DIED, {"baseline_training_only": DIED, "baseline_no_inplace": DIED}, "baseline failed", "baseline"),
    "baseline repeats nothing": (
        WRONG,
        {"baseline_again": OTHER, "baseline_training_only": OTHER, "baseline_no_inplace": WRONG},
        "baseline unsteady",
        "baseline-again",
    ),
    "baseline repeats nothing in place": (
        WRONG,
        {"baseline_again": OTHER, "baseline_training_only": OTHER, "baseline_no_inplace": TRAINED},
        "same",
        "baseline-no-inplace",
    ),
    "baseline was wrong once": (WRONG, {"baseline_again": result(*GOOD)}, "same", "baseline-again"),
}


@pytest.mark.parametrize("name", CASES)
def test_who_is_to_blame(name: str) -> None:
    baseline, given, verdict, against = CASES[name]
    runs = Runs(**given)
    found = judge(baseline, PLANNED, runs)
    assert (found.verdict, found.against) == (verdict, against)
    assert list(runs.ran) == [each.replace("_", "-") for each in given]
    assert bool(found.difference) == (verdict != "same")
    assert bool(found.faults) == (verdict in ("baseline failed", "baseline unsteady") or against != "baseline")
    assert (FAULTS[0].told in found.faults) == (verdict == "same" and found.trains_only)
    if "baseline-no-inplace" in runs.ran:
        assert runs.ran["baseline-no-inplace"]["FLAGS_pir_apply_inplace_pass"] == "0"


def counting(found: LaunchResult, mean: str) -> LaunchResult:
    """The same run with running statistics."""
    reports = tuple(msgspec.structs.replace(each, state={"buffer": {"mean": mean}}) for each in found.reports)
    return LaunchResult(reports, found.wall_s, found.log_dir)


@pytest.mark.parametrize(
    ("alone", "weights", "verdict"),
    [("m1", "aa", "same"), ("m3", "aa", "different"), ("m1", "bb", "different")],
    ids=["evaluation changes them", "the plan changes them", "the plan changes weights too"],
)
def test_running_statistics_that_evaluation_changes_are_no_plans_fault(alone: str, weights: str, verdict: str) -> None:
    """Baseline dies of its evaluation: where nothing but buffers differs, Interlace trains without evaluation too, and these count."""
    planned = counting(result(*GOOD, weights=weights, plan={}), "m2")
    only = counting(result("train 01", "train 03", plan={}), alone)
    baseline = counting(TRAINED, "m1")
    runs = Runs(baseline_training_only=baseline, baseline_no_inplace=baseline, interlace_training_only=only)
    found = judge(DIED, planned, lambda name, env: runs.given[name.replace("-", "_")])  # type: ignore[arg-type, return-value]
    assert found.verdict == verdict
    assert (EVALUATED in found.faults, found.of) == ((True, PLAN_ALONE) if verdict == "same" else (False, "interlace"))
    assert bool(found.difference) == (verdict == "different")
    assert (PLAN_ALONE in found.runs) == (weights == "aa")


def test_without_evaluation_there_is_none_to_leave_out() -> None:
    planned = result("train 01", "train 03", plan={})
    runs = Runs(baseline_again=WRONG, baseline_no_inplace=planned)
    assert judge(WRONG, planned, runs).against == "baseline-no-inplace"
    assert STEPS_VARIABLE not in runs.ran["baseline-no-inplace"]


def test_a_failure_says_whose_it_is() -> None:
    with pytest.raises(LaunchError, match=r"^Interlace's run failed, unmodified Paddle's did not: rank 1 failed"):
        judge(result(*GOOD), DIED, Runs())
    with pytest.raises(LaunchError, match=r"^both runs failed, unmodified Paddle's too, so no plan is to blame"):
        judge(DIED, DIED, Runs())


EVALUATES = LaunchError("rank 0 failed: killed by signal SIGABRT", frozenset({"train", "eval"}))
TRAINS = LaunchError("rank 0 failed: killed by signal SIGABRT", frozenset({"train"}))
FAILURES: dict[str, tuple[LaunchResult | LaunchError, LaunchError, list[LaunchResult | LaunchError], str]] = {
    "evaluation kills ours": (result(*GOOD), EVALUATES, [TRAINED, TRAINED], "did not; .* so evaluation or prediction is to"),
    "and the plan is wrong": (result(*GOOD), EVALUATES, [TRAINED, OTHER], "did not; .* differ: rank 0, train step 2"),
    "the plan kills ours": (result(*GOOD), EVALUATES, [TRAINED, TRAINS], "did not; .* Interlace's fails and the baseline's does not"),
    "ours dies before": (result(*GOOD), TRAINS, [], "did not: rank 0 failed"),
    "evaluation kills both": (EVALUATES, EVALUATES, [TRAINED, TRAINED], "both .* so evaluation or prediction is to blame"),
    "evaluation kills baseline": (EVALUATES, TRAINS, [TRAINED, TRAINS], "both runs .* Interlace's fails and the baseline's does not"),
    "baseline fails in any case": (EVALUATES, EVALUATES, [TRAINS], "both runs .* nothing to judge a plan by"),
    "neither evaluates": (TRAINS, TRAINS, [], "both runs failed, unmodified Paddle's too, so no plan is to blame"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_plan_is_not_blamed_for_an_evaluation_and_not_acquitted_by_one(name: str) -> None:
    """Whatever the baseline's evaluation did: runs that only train decide, where a run had come to evaluation."""
    baseline, planned, alone, told = FAILURES[name]
    runs, left = list[str](), list(alone)

    def run(which: str, env: Mapping[str, str]) -> LaunchResult:
        runs.append(which)
        given = read_report(env[STEPS_VARIABLE], 0)
        assert given == (baseline.reports[0] if isinstance(baseline, LaunchResult) else None)
        found = left.pop(0)
        if isinstance(found, LaunchError):
            raise found
        return found

    with pytest.raises(LaunchError, match=told):
        judge(baseline, planned, run)
    assert runs == ["baseline-training-only", PLAN_ALONE][: len(alone)]


@pytest.mark.paddle
@pytest.mark.parametrize(
    ("name", "code", "told"),
    [
        ("evaluation kills baseline", 0, "SAME: 2 losses, 1 parameters"),
        ("ours", 1, "DIFFERENT: rank 0, train step 2: baseline 1.0"),
        ("baseline cannot", 1, "NOTHING TO COMPARE WITH: the baseline failed, even in the forms that work around known faults of Paddle; "),
        ("baseline repeats nothing", 1, "NOTHING TO COMPARE WITH: the baseline does not reproduce its own bits, and no form "),
    ],
)
def test_the_command_says_so(tmp_path: Path, monkeypatch: Any, capsys: Any, name: str, code: int, told: str) -> None:
    baseline, given, _, _ = CASES[name]
    runs = Runs(**given, baseline=baseline, interlace=PLANNED)
    monkeypatch.setattr(run_command, "train", lambda args, env, name: runs(name, env))
    (tmp_path / "script.py").write_text("")
    assert main(["run", str(tmp_path / "script.py"), "--world", "1", "--verify", "--json", os.fspath(tmp_path / "x.json")]) == code
    said = capsys.readouterr().out
    assert told in said
    assert "Paddle's baseline takes longer.\n" in said
    died = "Paddle's fault, not a plan's: unmodified Paddle's run failed: rank 1 failed: killed by signal SIGSEGV\n"
    assert (died in said) == (baseline is DIED)
    assert all(env["INTERLACE_DISABLE"] == "1" for name, env in runs.ran.items() if name != "interlace")


@pytest.mark.paddle
def test_evaluation_between_accumulated_steps(forked: None, tmp_path: Path, capsys: Any) -> None:
    """Baseline really trains wrong there, and right without it."""
    tiny = str(Path(__file__).parent / "cpu" / "tiny_gpt.py")
    words = ["run", tiny, "--world", "1", "--config", "overlap", "--verify", "--log-dir", str(tmp_path / "logs")]
    assert main([*words, "--", "--eval", "--micro-batches", "2"]) == 0
    said = capsys.readouterr().out
    assert FAULTS[0].told in said
    assert "equal bit by bit with those of the run baseline-training-only" in said
