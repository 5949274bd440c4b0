"""`interlace accuracy`: errors of predictions from stored runs, what is stored of them, and where it is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from interlace.cli import main
from interlace.cost_model import CostModel, load_profile, save_profile
from interlace.cost_model.profile import Accuracy, Errors
from interlace.ir import load
from interlace.planning.outcome import Outcome, Step
from interlace.report import accuracy
from interlace.report.outcome import outcome_sentence

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _plans_are_proved() -> None:
    """Plans made here are Paddle's baseline of programs that ran, for their times."""


PEAK = {"allocated": 90, "outside": 10, "workspace": 0}


def run(plan: str, measured: float, predicted: float, case: str = "gpt-s2048-mp1-pp2", sitting: str = "a") -> dict[str, Any]:
    said = {"step_ms": predicted, accuracy.PEAKS: [103]}
    step = {"median": measured, "min": measured, "max": measured}
    return {
        "case": case,
        "plan": plan,
        "sitting": sitting,
        "world": 2,
        "step_ms": step,
        "peak_bytes_by_rank": [PEAK],
        "simulated": said,
    }


def test_errors_of_steps_gains_and_order() -> None:
    runs = [run("stock", 120, 130), run("auto", 100, 100), run("mixed", 110, 99), run("zb-h1", 90, 90, sitting="b")]
    found = accuracy.errors(runs)
    assert (found.steps, found.gains, found.pairs, found.right_order, found.right_sign) == (4, 2, 3, 2, 2)  # `zb-h1` has no baseline
    assert found.gain_ratio == pytest.approx((0.3 / 0.2 + (130 / 99 - 1) / (120 / 110 - 1)) / 2, abs=1e-3)
    assert found.step_worst == pytest.approx(-0.1)
    assert accuracy.peak_error(runs[0]) == pytest.approx(0.03)
    assert accuracy.errors([run("stock", 100, 100), run("auto", 99.5, 50)]).gains == 0  # within the spread of steps
    assert accuracy.errors(runs, "now").steps == 0


def test_a_stored_plan_is_predicted_now_and_the_others_as_they_were(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the repository: the plans of one case of two H100s."""
    source, folder = ROOT / "benchmarks/results/h100", tmp_path / "h100"
    folder.mkdir()
    (folder / "plans.json").write_text((source / "plans.json").read_text())
    (folder / "plans_2026-11-25.tar.xz").write_bytes((source / "plans_2026-11-25.tar.xz").read_bytes())
    held = json.loads((source / "testbed_held.json").read_text())
    rows = [row for row in held["runs"] if row["case"] == "h-gpt-s2048-dp2"]
    unknown = run("auto", 100, 90, "gpt-without-plan-pp2", held["runs"][0]["sitting"])
    (folder / "testbed_held.json").write_text(json.dumps({**held, "runs": [*rows, unknown]}))
    assert main(["accuracy", str(tmp_path), "--json", str(tmp_path / "said.json"), "--each"]) == 0
    said = json.loads((tmp_path / "said.json").read_text())["devices"]["h100"]
    by_plan = {row["plan"]: row for row in said["runs"] if row["case"] == "h-gpt-s2048-dp2"}
    assert set(by_plan) == {"stock", "auto"}
    for row in by_plan.values():
        assert abs(accuracy.step_error(row, "now")) < 0.1
        assert row["limited"]["step_ms"] >= row["now"]["step_ms"] > 0
    assert not any("now" in row for row in said["runs"] if row["case"] == "gpt-without-plan-pp2")
    assert {(group["mesh"], group["kind"]) for group in said["groups"]} >= {("dp 2", "all"), ("dp 2", "auto"), ("pp 2", "all")}
    assert "3 measured runs; the plans of 2 are stored" in capsys.readouterr().out


def test_runs_of_a_device_are_held_against_a_profile_by_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the shipped profile of the same device, whatever the file is called; of a device without one, those of the file's name."""
    folder = tmp_path / "runs" / "h100"
    folder.mkdir(parents=True)
    (folder / "testbed_a.json").write_text(json.dumps({"sittings": {}, "runs": [run("stock", 120, 130)]}))
    profile = load_profile("h100")
    mine = save_profile(profile, tmp_path / "mine.json")
    assert main(["accuracy", str(tmp_path / "runs"), "--device", str(mine)]) == 0
    assert f"{mine} ({profile.device}): 1 measured runs" in capsys.readouterr().out
    other = save_profile(msgspec.structs.replace(profile, device="Another"), tmp_path / "another.json")
    assert main(["accuracy", str(tmp_path / "runs"), "--device", str(other)]) == 2
    assert f"{tmp_path / 'runs' / 'another'}: no measured run; expected testbed_*.json with runs of Another" in capsys.readouterr().err


def test_plans_that_had_few_connections_are_predicted_with_later_kernels() -> None:
    """Of the repository: pipelines of two H100s that ran with 8 connections and with 32."""
    rows = accuracy.stored_runs(ROOT / "benchmarks/results", "h100", "2026-11-27 18:00")
    chosen = {row["plan"]: row for row in rows if row["case"] == "gpt-s2048-mp1-pp2" and "18:19" in row["sitting"]}
    costs = CostModel(load_profile("h100"))
    with accuracy.stored_plans(ROOT / "benchmarks/results", "h100") as plans:
        programs = {name: [load(file) for file in plans(row)] for name, row in chosen.items()}

    def steps(plan: str, sitting: str = "2026-11-27 18:19") -> float:
        row = accuracy.predict({**chosen[plan], "sitting": sitting}, programs[plan], costs)
        return float(row["now"]["step_ms"])

    few, many = steps("auto-8-connections"), steps("auto")
    assert 1.005 < few / many < 1.03  # measured: 119.1 and 117.9 ms
    assert steps("auto", "2026-11-27 13:59") == few
    assert steps("stock", "2026-11-27 13:59") == steps("stock")


def test_later_runs_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "h100").mkdir()
    runs = [run("auto", 100, 90, sitting=f"2026-11-{day} 14:09, 1 H100") for day in (26, 27)]
    (tmp_path / "h100/testbed_x.json").write_text(json.dumps({"sittings": {}, "runs": runs}))
    for since, count in (("2026-11-26", 2), ("2026-11-27", 1), ("2026-11-27 14:09", 1)):
        assert main(["accuracy", str(tmp_path), "--since", since]) == 0
        assert f"{count} measured runs; the plans of 0 are stored" in capsys.readouterr().out
    for words, said in (
        (["2026-11-28"], "h200 since 2026-11-28; expected DEVICE/testbed_*.json in it"),
        (["2026-11-28", "--device", "h100"], "no measured run since 2026-11-28"),
        (["yesterday"], "--since yesterday: expected a day, as 2026-11-27"),
        (["2026-11-26", "--write"], "--since with --write: profiles store the errors of all runs"),
    ):
        assert main(["accuracy", str(tmp_path), "--since", *words]) == 2
        assert said in capsys.readouterr().err


def test_errors_of_other_networks_are_not_stored_as_those_of_gpt_and_llama(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "h100").mkdir()
    runs = [{**run("auto", 100, 90), "case": case} for case in ("bert-pp2", "layout-gpt-pp2", "llama-s2048-mp2")]
    (tmp_path / "h100/testbed_x.json").write_text(json.dumps({"sittings": {}, "runs": runs}))
    save_profile(load_profile("h100"), tmp_path / "mine.json")
    assert main(["accuracy", str(tmp_path), "--device", str(tmp_path / "mine.json"), "--write"]) == 2
    assert "has runs of bert-pp2, and profiles store errors of GPT and Llama only" in capsys.readouterr().err


def test_folders_without_runs_and_broken_files_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accuracy", str(tmp_path / "none")]) == 2
    assert "no folder of measured runs; the installed package holds none" in capsys.readouterr().err
    assert main(["accuracy", str(tmp_path)]) == 2
    assert "expected DEVICE/testbed_*.json" in capsys.readouterr().err
    (tmp_path / "h100").mkdir()
    (tmp_path / "h100/testbed_x.json").write_text('{"sittings": {}, "runs": [{"step_ms": {}}]}')
    assert main(["accuracy", str(tmp_path)]) == 2
    assert "testbed_x.json: KeyError('median'); expected a file of" in capsys.readouterr().err


def test_stored_errors_stand_beside_each_predicted_gain(tmp_path: Path) -> None:
    off = Errors(9, 0.01, 0.021, 0.05, 4, 1.31, 0.3, 0.02, 3, 5, 5)
    path = tmp_path / "mine.json"
    save_profile(load_profile("h200"), path)
    accuracy.write_into(str(path), Accuracy("2026-11-25", off, off, off, off))
    assert load_profile(path).accuracy == Accuracy("2026-11-25", off, off, off, off)
    outcome = Outcome(Step(90, 0, 0, 1), "mine", Step(100, 0, 0, 1), errors=off)
    assert outcome_sentence(outcome).endswith(
        "Predicted gains of GPT and Llama were 1.31 times the measured ones (median of 4, 3 with the right sign), steps 2.1 % off."
    )
    slower = msgspec.structs.replace(outcome, plan=Step(101, 0, 0, 1))
    assert outcome_sentence(slower).endswith(". Predicted steps of GPT and Llama were 2.1 % off the measured ones."), (
        "no gain, so none is qualified"
    )
    assert "Predicted" not in outcome_sentence(msgspec.structs.replace(outcome, errors=None))


@pytest.mark.parametrize("device", ["h100", "h200"])
def test_shipped_profiles_have_their_errors(device: str) -> None:
    found = load_profile(device).accuracy
    assert found is not None
    for errors in (found.one_stage, found.stages):
        assert errors.steps > 10
        assert errors.gains > 5
        assert errors.gain_ratio > 0.5


SOME = "2026-11-27 04:30"
STEPS_MS = {
    ("gpt-s2048-mp2-b4", "stock"): (212.31, 219.71),
    ("gpt-s2048-mp2-b4", "auto"): (199.62, 213.05),
    ("gpt-s2048-mp2-b4-sp", "stock"): (215.85, 221.52),
    ("gpt-s2048-mp2-b4-sp", "auto"): (200.02, 213.95),
    ("llama-s2048-mp2-b4", "auto"): (236.53, 246.26),
    ("llama-s2048-mp2-b4", "stock"): (245.84, 250.72),
    ("llama-s2048-mp2-b4-sp", "stock"): (236.49, 240.48),
    ("llama-s2048-mp2-b4-sp", "auto"): (221.8, 233.41),
}
"""Predictions of a sitting's runs without stages, without the power limit and with it, when errors were stored last."""


@pytest.mark.slow
def test_some_runs_are_predicted_as_when_errors_were_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others come out, profiles need the errors of today (`interlace accuracy --write`), which `make test-long` compares."""
    every = accuracy.stored_runs
    monkeypatch.setattr(
        accuracy,
        "stored_runs",
        lambda *given: [row for row in every(*given) if row["sitting"].startswith(SOME) and "pp" not in accuracy.place_of(row["case"])],
    )
    runs = accuracy.predicted_runs(accuracy.results_folder(), "h200", load_profile("h200"))
    assert {(row["case"], row["plan"]): (row["now"]["step_ms"], row["limited"]["step_ms"]) for row in runs} == STEPS_MS


@pytest.mark.long
@pytest.mark.parametrize("device", ["h200", "h100"])
@pytest.mark.parametrize("has_stages", [False, True])
def test_stored_errors_are_those_of_today(device: str, has_stages: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of runs without stages, or of those that have some, on either device."""
    profile, every = load_profile(device), accuracy.stored_runs
    assert profile.accuracy is not None
    monkeypatch.setattr(
        accuracy, "stored_runs", lambda *given: [row for row in every(*given) if ("pp" in accuracy.place_of(row["case"])) == has_stages]
    )
    runs = accuracy.predicted_runs(accuracy.results_folder(), device, profile)
    found = accuracy.accuracy_of(runs, profile.accuracy.date)
    for field in ("stages", "stages_limited") if has_stages else ("one_stage", "one_stage_limited"):
        assert getattr(found, field) == getattr(profile.accuracy, field)
