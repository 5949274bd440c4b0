"""`python -m interlace.launch`: Paddle's own launcher, with Interlace in the ranks of a script that never asks for it. Acceptance: U7.

The ranks' CPU transport is installed by the script, as on GPUs none is needed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from interlace.launch import main
from interlace.local.launch import launch

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gpt.py"
SCRIPT = """
import json, os, runpy, sys

from interlace.cpu.install import RUN_DIR_VARIABLE, install

rank, world = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
transport = install(rank, world, os.environ[RUN_DIR_VARIABLE])

import interlace
from interlace.local.rank import Recorder
from paddle.distributed.auto_parallel.static.engine import Engine

interlace.enable = lambda *given, **options: None
recorder = Recorder(rank, os.environ[RUN_DIR_VARIABLE])
recorder.watch(Engine)
sys.path.insert(0, os.path.dirname({example!r}))
runpy.run_path({example!r}, run_name="__main__")
summary = sys.modules["interlace.bridge.hook"].last_plan_summary()
result = {{
    "losses": [each.raw_hex for each in recorder.losses],
    "parameters": recorder.parameter_digests(),
    "changed": [each["name"] for each in summary["passes"] if any(one["kind"] == "applied" for one in each["remarks"])],
    "words": sys.argv[1:],
    "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
}}
with open(os.environ["RESULT"] + str(rank), "w") as file:
    json.dump(result, file)
transport.close()
"""
WORDS = ["--pp", "2", "--micro-batches", "4", "--layers", "2", "--steps", "2"]


def started(folder: Path, **variables: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """What the launcher gave, and where the ranks left their results."""
    script, run, result = folder / "planned.py", folder / "run", folder / "result-"
    script.write_text(SCRIPT.format(example=str(EXAMPLE)))
    run.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("INTERLACE_", "PADDLE_"))}
    own = {"PYTHONPATH": str(ROOT), "INTERLACE_RUN_DIR": str(run), "RESULT": str(result), "OMP_NUM_THREADS": "1"}
    environment = {**kept, **own, **variables}
    words = [sys.executable, "-m", "interlace.launch", "--nproc_per_node", "2", "--log_dir", str(folder / "logs"), str(script), *WORDS]
    return subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, timeout=300), result


def results(at: Path) -> list[dict[str, Any]]:
    """Of both ranks."""
    return [json.loads(at.with_name(f"{at.name}{rank}").read_text()) for rank in range(2)]


@pytest.mark.paddle
def test_a_script_that_never_asks_trains_with_a_plan_and_the_same_bits(forked: None, tmp_path: Path) -> None:
    """Those of the example by Paddle alone."""
    baseline = launch(EXAMPLE, WORDS, 2, {"INTERLACE_DISABLE": "1"}, None, tmp_path / "baseline", 60.0)
    (tmp_path / "mixed.yaml").write_text("device: h200\nschedule_1f1b: {interleave: mixed, only_gains: off, search: off}\n")
    planned, after = started(tmp_path, INTERLACE_CONFIG=str(tmp_path / "mixed.yaml"))
    assert planned.returncode == 0, planned.stderr[-2000:]
    for report, ours in zip(baseline.reports, results(after), strict=True):
        assert "schedule-1f1b" in ours["changed"]
        assert ours["losses"] == [each.raw_hex for each in report.losses]
        assert ours["parameters"] == report.parameters
        assert ours["words"] == WORDS
        assert ours["connections"] == "32"
        assert report.parameters


@pytest.mark.parametrize(
    ("variables", "script", "said"),
    [
        ({}, "train.py", "none of INTERLACE_CONFIG, INTERLACE_PLAN, INTERLACE_MEMORY_BUDGET, INTERLACE_POOL_BUDGET is set"),
        ({"INTERLACE_CONFIG": "nowhere"}, "train.py", "nowhere: no such file, and no preset of that name"),
        ({"INTERLACE_MEMORY_BUDGET": "lots"}, "train.py", "INTERLACE_MEMORY_BUDGET: found 'lots'"),
        ({"INTERLACE_POOL_BUDGET": "lots"}, "train.py", "INTERLACE_POOL_BUDGET: found 'lots'"),
        ({"INTERLACE_PLAN": "there", "INTERLACE_CONFIG": "overlap"}, "train.py", "INTERLACE_PLAN=there beside INTERLACE_CONFIG=overlap"),
        ({"INTERLACE_CONFIG": "overlap"}, "other.py", "other.py: expected the path of a training script that ends in .py"),
        ({"INTERLACE_CONFIG": "overlap"}, "train.sh", "train.sh: expected the path of a training script that ends in .py"),
    ],
)
@pytest.mark.paddle
def test_wrong_words_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variables: dict[str, str], script: str, said: str
) -> None:
    for name in ("train.py", "train.sh"):
        (tmp_path / name).write_text("raise SystemExit('started')")
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("INTERLACE_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["launch", "--nproc_per_node", "2", script])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"interlace.launch: {said}" in capsys.readouterr().err
    assert not (tmp_path / "log").exists()
