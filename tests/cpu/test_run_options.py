"""What `interlace run` makes of a configuration: whose it is, whose passes it names, and whether it did anything at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from interlace.cli import main
from interlace.cli import run as run_command
from interlace.local.launch import LaunchResult
from interlace.local.rank_report import RankReport, StepLoss
from tests.default_passes import NO_JOBS
from tests.remarks import done_in, sentences

WITHOUT_JOBS = "".join(f"{name}: off\n" for name in NO_JOBS)
TINY = Path(__file__).with_name("tiny_gpt.py")
SCRIPT = '''
import runpy
import interlace

@interlace.passes.register
class Noisy(interlace.passes.Pass, frozen=True, kw_only=True):
    """Says its word."""

    name = "noisy"
    word: str = "psst"

    def run(self, program, context):
        context.applied("said", word=self.word)
        return program

import paddle.distributed as dist

to_static = dist.to_static

def enabled(*args, strategy, **more):
    interlace.enable(strategy, split_backward="off", overlap_column_backward="off")
    return to_static(*args, strategy=strategy, **more)

dist.to_static = enabled
runpy.run_path({tiny!r}, run_name="__main__")
'''


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs go into the test's own folder."""
    monkeypatch.setattr(tempfile, "tempdir", os.fspath(tmp_path))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script that registers a pass of its own, and asks for other things than the configuration from outside."""
    (tmp_path / "script.py").write_text(SCRIPT.format(tiny=os.fspath(TINY)))
    return tmp_path / "script.py"


def config(tmp_path: Path, text: str) -> str:
    (tmp_path / "own.yaml").write_text(text)
    return str(tmp_path / "own.yaml")


@pytest.mark.paddle
def test_a_scripts_own_pass_may_stand_in_the_configuration(
    forked: None, script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A user's pass. The script registers it, the configuration asks for it, in the place of what the script asks for: said in a line."""
    asked, out = config(tmp_path, "noisy: {word: hush}\n"), tmp_path / "new" / "out.json"
    assert main(["run", str(script), "--world", "1", "--config", asked, "--json", str(out), "--", "--steps", "1"]) == 0
    passes = {each["name"]: sentences(done_in(each)) for each in json.loads(out.read_text())["runs"]["run"]["ranks"][0]["plan"]["passes"]}
    assert passes["noisy"] == ["said: word hush"]
    assert "schedule-1f1b" in passes
    told = f"interlace: --config {asked} decides; the script's own interlace.enable() is ignored"
    assert capfd.readouterr().err.count(told) == 1


@pytest.mark.paddle
def test_a_memory_budget_alone_goes_on_top_of_the_scripts_own(
    forked: None, script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The script turns two passes off; they stay off."""
    out = tmp_path / "out.json"
    assert main(["run", str(script), "--world", "1", "--memory-budget", "4GB", "--json", str(out), "--", "--steps", "1"]) == 0
    passes = [each["name"] for each in json.loads(out.read_text())["runs"]["run"]["ranks"][0]["plan"]["passes"]]
    assert "schedule-1f1b" in passes
    assert not {"split-backward", "overlap-column-backward"}.intersection(passes)
    assert "is ignored" not in capfd.readouterr().err


@pytest.mark.paddle
def test_a_pass_that_nobody_registers_is_found_by_the_rank(
    forked: None, script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Wrong options. Where the name resembles none of ours the launcher waits for the script; file, line and column all the same."""
    asked = config(tmp_path, "zzz: on\n")
    assert main(["run", str(script), "--world", "1", "--config", asked, "--", "--steps", "1"]) == 2
    assert f"{asked}:1:1: unknown option 'zzz'" in capfd.readouterr().err


@pytest.mark.paddle
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("split_backwards: on", "own.yaml:1:1: unknown option 'split_backwards'; did you mean 'split_backward'?"),
        (WITHOUT_JOBS, "own.yaml: schedule_1f1b is off and "),
        ("device: abacus", "own.yaml:1:9: no device profile 'abacus'"),
        ("schedule_1f1b: {schedule_file: nowhere}", "own.yaml:1:32: schedule file /"),
    ],
)
def test_wrong_configurations_start_nothing(tmp_path: Path, monkeypatch: Any, capsys: Any, text: str, told: str) -> None:
    """Wrong options. Exit code 2 before any rank."""
    monkeypatch.setattr(run_command, "train", lambda *args: pytest.fail("a rank was started"))
    assert main(["run", str(TINY), "--world", "1", "--config", config(tmp_path, text)]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.paddle
def test_plans_beside_a_preset_are_refused_in_the_words_of_the_command(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """And not by a line of a file that comes with Interlace."""
    monkeypatch.setattr(run_command, "train", lambda *args: pytest.fail("a rank was started"))
    assert main(["run", str(TINY), "--world", "1", "--plan", str(tmp_path), "--config", "overlap"]) == 2
    said = capsys.readouterr().err
    assert f"--plan {tmp_path} beside --config overlap: the plans there have their profile and the options of their passes" in said
    assert "presets" not in said


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The environment of each run that the command starts, in place of the run."""
    seen: list[dict[str, str]] = []

    def train(args: Any, env: dict[str, str], name: str) -> LaunchResult:
        seen.append(env)
        return result(None)

    monkeypatch.setattr(run_command, "train", train)
    return seen


@pytest.mark.paddle
def test_imports_reach_the_ranks(tmp_path: Path, monkeypatch: Any, started: list[dict[str, str]]) -> None:
    """A user's pass. Files by their whole path; what the modules register is known to the launcher too."""
    (tmp_path / "own_words.py").write_text("import sys; sys.own_words = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    assert main(["run", str(TINY), "--world", "1", "--import", "own_words.py", "--import", "json"]) == 0
    assert started[0]["INTERLACE_IMPORT"] == f"{tmp_path / 'own_words.py'}{os.pathsep}json"


@pytest.mark.paddle
@pytest.mark.parametrize(
    ("variables", "asked"),
    [({}, {"interlace": "32", "baseline": None}), ({"CUDA_DEVICE_MAX_CONNECTIONS": "16"}, {}), ({"INTERLACE_DISABLE": "1"}, {})],
    ids=["plans have all, the baseline what Paddle has", "the user says how many", "Paddle alone"],
)
def test_connections_to_a_gpu(
    monkeypatch: pytest.MonkeyPatch, started: list[dict[str, str]], variables: dict[str, str], asked: dict[str, str | None]
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    main(["run", str(TINY), "--world", "1", "--verify"])
    found = {"baseline" if env.get("INTERLACE_DISABLE") else "interlace": env.get("CUDA_DEVICE_MAX_CONNECTIONS") for env in started}
    assert found == (asked or {"interlace": None, "baseline": None})


def result(plan: dict[str, Any] | None, bits: str = "00") -> LaunchResult:
    """A run of one rank with one step."""
    report = RankReport(0, 1, (StepLoss("train", 1, "float32", (), bits, (1.0,), 5),), {"w": "aa"}, plan)
    return LaunchResult((report,), 1.0, "logs")


PLAN = {"rank": 0, "passes": [], "trial": [], "sentence": "no comparison"}


@pytest.mark.paddle
@pytest.mark.parametrize(
    ("plan", "bits", "words", "code", "verdict", "told"),
    [
        (PLAN, "00", (), 0, "same", "SAME: 1 losses"),
        ({**PLAN, "is_paddles_order": True}, "00", (), 0, "same", "NOTHING OF A PLAN WAS COMPARED: on every rank"),
        (PLAN, "01", (), 1, "different", "DIFFERENT: rank 0, train step 1"),
        (None, "01", (), 1, "different", "DIFFERENT: rank 0, train step 1"),
        (
            None,
            "00",
            (),
            2,
            "no plan",
            "nothing was verified: Interlace made no plan on any rank, so unmodified Paddle ran twice; no model",
        ),
        (None, "00", ("--config",), 2, "no plan", "own.yaml turns everything off, or the script does not train through dist.to_static"),
    ],
)
def test_baseline_against_baseline_verifies_nothing(
    tmp_path: Path, monkeypatch: Any, capsys: Any, plan: Any, bits: str, words: tuple[str, ...], code: int, verdict: str, told: str
) -> None:
    """A check that cannot fail is none: without a plan the verdict is the user's error."""
    more = [*words, config(tmp_path, "enable: off")] if words else []
    out = tmp_path / "out.json"
    monkeypatch.setattr(run_command, "train", lambda args, env, name: result(None) if name.startswith("baseline") else result(plan, bits))
    assert main(["run", str(TINY), "--world", "1", "--verify", "--json", str(out), *more]) == code
    said = capsys.readouterr()
    assert told in said.out + said.err
    assert ("SAME" in said.out) == told.startswith("SAME")
    assert json.loads(out.read_text())["verdict"] == verdict


@pytest.mark.paddle
def test_a_run_whose_ranks_would_wait_in_a_circle_is_refused(forked: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No deadlock, equal plans. Before the first step, with the circle, on both; each rank alone is safe, and partners agree."""
    own, asked = Path(__file__).with_name("receive_first.py"), config(tmp_path, "device: cpu\nreceive_first: on\n")
    words = ["--world", "2", "--config", asked, "--import", str(own), "--log-dir", str(tmp_path / "logs")]
    assert main(["run", str(TINY), *words, "--", "--pp", "2", "--schedule", "1F1B", "--micro-batches", "2"]) == 1
    told = capfd.readouterr().err
    assert "ranks 0, 1 failed: PlanError: the plans of all ranks together are not safe on cpu: 1 finding(s)" in told
    assert "deadlock: ranks wait in a circle:" in told
    assert "which waits for what its partner sends" in told
    logs = [path.read_text().partition("PlanError: ")[2] for path in sorted(tmp_path.rglob("rank*.log"))]
    assert logs[0]
    assert logs[0] == logs[1]
    assert "step 1" not in told
