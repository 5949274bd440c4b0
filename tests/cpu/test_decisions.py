"""`interlace run --decisions`: what was planned for a large model is verified with a small one; a plan in Paddle's baseline order is
not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from interlace.cli import main
from interlace.cli import run as run_command
from interlace.config import make_config
from interlace.cost_model import CostModel, load_profile
from interlace.errors import PlanError
from interlace.ir import load, save
from interlace.planning.baseline import baseline_plan, is_paddles_order
from interlace.planning.plan import make_plan
from interlace.planning.rows import forced
from tests.remarks import done_in, rules_of
from tests.report.pages import make_plans
from tests.strategies import World, programs

TINY = Path(__file__).with_name("tiny_gpt.py")
MODEL = ("--pp", "2", "--schedule", "1F1B", "--micro-batches", "4")
LARGE = """\
device: h200
schedule_1f1b: {interleave: mixed, weight_delay: [0, 1], only_gains: off, search: off}
offload_activations: {fraction: 0.6, min_bytes: 1}
"""
COSTS = CostModel(load_profile("h200"))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plans of another model with as many stages and micro-batches: mixed pairs, weight gradients that trail, and offload."""
    return make_plans(tmp_path_factory.mktemp("large"), World(pp=2, micro_batches=4, layers=2), LARGE)


def test_decisions_hold_whether_they_gain_or_not(large: Path, tmp_path: Path) -> None:
    options = forced(large)
    assert options["schedule_1f1b"]["schedule_file"] == str(large / "schedule.rows")
    assert options["overlap_column_backward"]["only_gains"] is False
    assert options["offload_activations"] == {"fraction": 1.0, "min_bytes": 1}
    config = tmp_path / "decisions.yaml"
    config.write_text(yaml.safe_dump(options), encoding="utf-8")
    for program in programs(World(pp=2, micro_batches=4, layers=1)):
        save(program, tmp_path / "small" / f"rank{program.rank}.ilp")
    assert main(["plan", str(tmp_path / "small"), "--config", str(config), "-o", str(tmp_path / "plan")]) == 0
    for rank in range(2):
        asked, found = load(large / f"rank{rank}.ilp"), load(tmp_path / "plan" / f"rank{rank}.ilp")
        assert [job.name for job in found.jobs] == [job.name for job in asked.jobs]
        moved = [any(value.memory == "pinned" for value in program.values) for program in (asked, found)]
        assert moved[0] <= moved[1]


def test_a_folder_without_rows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PlanError, match=r"no schedule\.rows with schedule\.yaml; expected the folder of the plans of all stages"):
        forced(tmp_path)
    words = ["run", str(TINY), "--world", "2", "--decisions", str(tmp_path)]
    assert main([*words, "--config", "overlap"]) == 2
    assert "--decisions" in capsys.readouterr().err
    assert main(words) == 2


def test_decisions_for_another_number_of_stages_start_nothing(large: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(run_command, "train", lambda *args: pytest.fail("a rank was started"))
    assert main(["run", str(TINY), "--world", "3", "--decisions", str(large)]) == 2
    assert f"--decisions {large}: its plans have 2 stages, which do not divide --world 3" in capsys.readouterr().err


@pytest.mark.paddle
def test_decisions_for_another_number_of_micro_batches_are_refused_before_anything_trains(
    forked: None, large: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["run", str(TINY), "--world", "2", "--verify", "--decisions", str(large), "--log-dir", str(tmp_path / "logs")]
    assert main([*words, "--", *MODEL[:-1], "2"]) == 2
    said = capfd.readouterr()
    assert f"{large}/schedule.rows: stage 0: is of 4 micro-batch(es) a step, the model has 2; expected as many" in said.err
    assert "Traceback" not in said.err
    assert "train step" not in said.err
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["interlace"]


@pytest.mark.parametrize("world", [World(), World(pp=2, micro_batches=4), World(mp=2, micro_batches=2)])
def test_paddles_own_order_is_told_from_others(world: World) -> None:
    off = make_config({"schedule_1f1b": {"interleave": "off"}, "split_backward": "off", "overlap_column_backward": "off"})
    for program in programs(world):
        assert is_paddles_order(program, baseline_plan(program, COSTS), COSTS)
        plan = make_plan(program, off, COSTS, "h200")
        assert plan.is_paddles_order(), "streams and events alone are no other order"
        *jobs, last = plan.program.jobs
        first = next(k for k, job in enumerate(plan.program.jobs) if len(job.items) > 1)
        turned = [msgspec.structs.replace(job, items=job.items[::-1]) if k == first else job for k, job in enumerate((*jobs, last))]
        assert not is_paddles_order(program, msgspec.structs.replace(plan.program, jobs=tuple(turned)), COSTS)


@pytest.mark.paddle
def test_a_small_model_verifies_the_decisions_of_a_large_one(
    forked: None, large: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["run", str(TINY), "--world", "2", "--verify", "--log-dir", str(tmp_path / "logs"), "--json", str(tmp_path / "result.json")]
    assert main([*words, "--decisions", str(large), "--", *MODEL]) == 0
    assert "SAME: 2 losses" in capfd.readouterr().out
    ranks = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))["runs"]["interlace"]["ranks"]
    assert not any(rank["plan"]["is_paddles_order"] for rank in ranks)
    said = [each for rank in ranks for report in rank["plan"]["passes"] for each in done_in(report)]
    assert any(slot.startswith("0B+") for each in said if each.rule == "jobs-cut" for slot in each.names["slots"])
    assert "values-moved" in rules_of(said)
    plain = tmp_path / "plain.yaml"
    plain.write_text("device: h200\nschedule_1f1b: {interleave: off}\nsplit_backward: off\noverlap_column_backward: off\n")
    assert main([*words, "--config", str(plain), "--", *MODEL]) == 0
    told = capfd.readouterr().out
    assert "SAME" not in told
    assert "NOTHING OF A PLAN WAS COMPARED: on every rank the plan is Paddle's baseline order of operations" in told
