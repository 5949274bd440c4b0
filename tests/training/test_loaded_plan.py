"""A plan that was made offline trains with the baseline's bits, and is refused where the program is another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from interlace.cli import main

pytestmark = pytest.mark.paddle
TINY = Path(__file__).parents[1] / "cpu" / "tiny_gpt.py"
MODEL = ["--schedule", "1F1B", "--pp", "2", "--micro-batches", "4"]
ASKS = """\
import runpy, sys
import paddle.distributed as dist
import interlace

to_static = dist.to_static

def enabled(*args, **more):
    interlace.enable(more["strategy"], plan={folder!r})
    return to_static(*args, **more)

dist.to_static = enabled
runpy.run_path({tiny!r}, run_name="__main__")
"""


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory, forked_ranks: None) -> Path:
    """Plans of two ranks: each backward shares a job with a forward, mixed op by op, and some activations go to the host."""
    folder = tmp_path_factory.mktemp("offline")
    config = folder / "asked.yaml"
    config.write_text(
        "schedule_1f1b: {interleave: mixed, search: off, only_gains: off}\noffload_activations: {fraction: 0.5, min_bytes: 1}\n"
    )
    assert main(["dump", str(TINY), "--world", "2", "-o", str(folder / "dumps"), "--", *MODEL]) == 0
    assert main(["plan", str(folder / "dumps"), "--config", str(config), "-o", str(folder / "plan")]) == 0
    return folder / "plan"


def test_a_loaded_plan_trains_with_stocks_bits(plans: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The script asks for it; evaluation, of which there is no plan, stands between the steps."""
    script = tmp_path / "asks.py"
    script.write_text(ASKS.format(folder=str(plans), tiny=str(TINY)))
    assert main(["run", str(script), "--world", "2", "--verify", "--log-dir", str(tmp_path), "--", *MODEL, "--eval"]) == 0
    told = capfd.readouterr().out
    assert "SAME: " in told


def test_plans_of_stages_train_every_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One plan for two ranks: the last rank of a tensor-parallel group makes its first one's again."""
    config, words = tmp_path / "asked.yaml", ["--schedule", "1F1B", "--micro-batches", "4", "--mp", "2"]
    config.write_text("schedule_1f1b: {interleave: dx-first, weight_delay: 1, search: off, only_gains: off}\n")
    assert main(["dump", str(TINY), "--world", "2", "--stages", "-o", str(tmp_path / "dumps"), "--", *words]) == 0
    assert main(["plan", str(tmp_path / "dumps"), "--config", str(config), "-o", str(tmp_path / "plan")]) == 0
    run = ["run", str(TINY), "--world", "2", "--plan", str(tmp_path / "plan"), "--verify", "--log-dir", str(tmp_path)]
    assert main([*run, "--", *words]) == 0
    assert "SAME: " in capfd.readouterr().out


def test_another_program_is_refused_before_the_first_step(plans: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["run", str(TINY), "--world", "2", "--plan", str(plans), "--log-dir", str(tmp_path), "--", *MODEL, "--micro-batches", "8"]
    assert main(words) == 2
    told = capfd.readouterr().err
    assert told.count("made for another program: pipeline, num micro batches: found 8, expected 4") == 1
    assert "Traceback" not in told
