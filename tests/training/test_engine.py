"""Evaluation between training steps, fetches of the user's, state, and failures; on CPU ranks."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import msgspec
import pytest

from interlace.bridge.targets.cpu import cpu_model
from interlace.cli import main
from interlace.cost_model import load_profile
from interlace.cost_model.profile import save_profile
from interlace.report.measured import COUNTED, WARM_UP
from interlace.units import ms, ms_figure

pytestmark = [pytest.mark.paddle, pytest.mark.usefixtures("few_forms")]
SCRIPT = Path(__file__).with_name("engine_script.py")


@pytest.mark.parametrize(
    ("world", "arguments"),
    [
        (1, "--gradient-accumulation 2 --layers 1"),
        (2, "--pp 2 --micro-batches 4 --layers 2"),
        (2, "--mp 2 --layers 1"),
        pytest.param(2, "--pp 2 --vpp 2 --micro-batches 4", marks=pytest.mark.long),
    ],
)
def test_everything_the_engine_offers_keeps_working(world: int, arguments: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Evaluation - evaluation neither uses nor spoils the training plan. Unmodified Paddle fails at three of these four."""
    command = ["run", str(SCRIPT), "--world", str(world), "--log-dir", str(tmp_path), "--", "--steps", "8", *arguments.split()]
    assert main(command) == 0
    heard = [line for line in capfd.readouterr().err.splitlines() if line.startswith("interlace: Paddle's baseline takes ")]
    assert len(heard) == 1, "rank 0 says once what the plan brings"
    logs = [path.read_text() for path in sorted(tmp_path.rglob("*.log"))]
    assert sum("ENGINE OK" in log for log in logs) == world


def test_ranks_that_plan_differently_are_stopped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Equal plans - a mismatch stops every rank with the first difference, before the first step."""
    script = tmp_path / "uneven.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(SCRIPT.parents[2] / 'examples')!r})\n"
        "import gpt, interlace, paddle.distributed as dist\n"
        "enable = interlace.enable\n"
        "interlace.enable = lambda s: enable(s, schedule_1f1b={'max_ops_per_job': 100 + dist.get_rank()})\n"
        "model, loader = gpt.build(gpt.parse(['--mp', '2', '--gradient-accumulation', '2', '--layers', '1']))\n"
        "model.train()\n"
        "model(*next(iter(loader())))\n"
    )
    assert main(["run", str(script), "--world", "2", "--log-dir", str(tmp_path / "logs")]) == 1
    assert "planned with different options" in capfd.readouterr().err


def test_a_script_that_explains_its_plan_runs_with_interlace_off_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = Path(__file__).with_name("off_script.py")
    assert main(["run", str(script), "--world", "1", "--verify", "--log-dir", str(tmp_path)]) == 0
    assert "SAME" in capfd.readouterr().out


@pytest.mark.parametrize("device", [pytest.param("h200", marks=pytest.mark.long), "own"])
def test_the_log_says_what_a_step_took_beside_what_was_predicted(device: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """After the first steps, once; with a hint only where the profile is of the device in use."""
    profile, result = device, tmp_path / "result.json"
    if device == "own":
        profile = str(tmp_path / "mine.json")
        mine = msgspec.structs.replace(load_profile("h200"), device=cpu_model())
        save_profile(mine, profile)
    config = tmp_path / "config.yaml"
    config.write_text(f"device: {profile}\n")
    command = [
        "run",
        str(SCRIPT.parents[2] / "examples" / "gpt.py"),
        "--world",
        "2",
        "--config",
        str(config),
        "--json",
        str(result),
        "--",
        "--pp",
        "2",
        "--layers",
        "2",
        "--steps",
        str(WARM_UP + COUNTED + 2),
    ]
    assert main(command) == 0
    said = capfd.readouterr()
    lines = [line for line in said.err.splitlines() if line.startswith("interlace: measured ")]
    assert len(lines) == 1
    report = json.loads(result.read_text())["runs"]["run"]["ranks"][0]
    took = [loss["dur_ns"] for loss in report["losses"]][WARM_UP : WARM_UP + COUNTED]
    assert report["plan"]["measured_step_ns"] == pytest.approx(statistics.median(took), rel=0.5)  # two medians of a busy machine
    assert lines[0].startswith(f"interlace: measured {ms(report['plan']['measured_step_ns'])} a step")
    predicted = ms_figure(report["plan"]["outcome"]["plan"]["step_ns"])
    if device == "own":
        assert f"predicted {predicted} ms (profile {profile})" in lines[0]
        assert "interlace calibrate -o" in lines[0]
    else:
        assert f"the {predicted} ms predicted are for another device, NVIDIA H200 (profile h200)" in lines[0]
        assert "calibrate" not in lines[0]
    assert said.out.splitlines()[-1] == report["plan"]["sentence"]
    assert f"; measured {ms(report['plan']['measured_step_ns'])}" in report["plan"]["sentence"]
