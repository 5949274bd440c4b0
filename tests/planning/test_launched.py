"""Plans whose steps are launched as a graph: the record says so, and whatever simulates one leaves out the host's time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from interlace.cli import main
from interlace.config import make_config
from interlace.cost_model import CostModel, load_profile
from interlace.ir.dump import find_dumps
from interlace.planning.loaded import load_plan
from interlace.planning.plan import Plan, costs_of, make_plans, read_record
from interlace.report.accuracy import predict
from interlace.report.plan import PlanReport
from tests.strategies import World, programs
from tests.together import in_threads

GIVEN = programs(World(pp=2, mp=2, micro_batches=4))
FORM = {"schedule_1f1b": {"interleave": "dx-first", "only_gains": False, "search": False}}


def written(folder: Path, capture: str) -> list[Plan]:
    """The same schedule for steps that are issued or launched; the host takes most of the time of steps this small."""
    config = make_config({**FORM, "capture": capture})
    plans = make_plans(GIVEN, config, config.costs(load_profile("h200")), "h200")
    for plan in plans:
        plan.dump(folder)
    return plans


def loaded(folder: Path) -> list[Plan]:
    return in_threads(lambda program, peers: load_plan(folder, program, peers), GIVEN)


def steps(folder: Path, into: Path) -> dict[str, list[int]]:
    """The step by each command, of the plan and (a page) of the baseline; and by the page of a loaded plan."""
    found: dict[str, Any] = {}
    for command in ("check", "timeline", "report"):
        out = [] if command == "check" else ["-o", str(into / f"{command}.out")]
        assert main([command, str(folder), *out, "--json", str(into / "found.json")]) == 0
        found[command] = json.loads((into / "found.json").read_text())
    outcome = found["report"]["outcome"]
    return {
        "check": sorted({rank["step_ns"] for rank in found["check"]["ranks"]}),
        "timeline": sorted({rank["step_ns"] for rank in found["timeline"]["ranks"]}),
        "report": [outcome["plan"]["step_ns"]],
        "baseline": [outcome["before"]["step_ns"]],
    }


@pytest.mark.parametrize("capture", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_all_simulate_the_step_that_was_decided_on(capture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (plan, *_) = written(tmp_path / "plan", capture)
    assert plan.outcome is not None
    assert plan.outcome.before is not None
    own, issued = plan.outcome.plan, written(tmp_path / "issued", "off")[0].outcome
    found = steps(tmp_path / "plan", tmp_path)
    assert found.pop("baseline") == [plan.outcome.before.step_ns]
    assert set(map(tuple, found.values())) == {(own.step_ns,)}
    assert issued is not None
    assert plan.outcome.before == issued.before
    assert (own.step_ns < issued.plan.step_ns / 2) == (capture == "on")
    assert all(stage.host_ns == 0 for stage in own.stages) == (capture == "on")
    assert ("rules of the gpu-graph target" in capsys.readouterr().out) == (capture == "on")
    (again, *_) = loaded(tmp_path / "plan")
    assert again.is_launched == plan.is_launched == (capture == "on")
    assert (", steps launched as a graph" in PlanReport(again).explain()) == (capture == "on")
    PlanReport(again).report(tmp_path / "page.html")
    assert f'"step_ns":{own.step_ns},' in (tmp_path / "page.html").read_text()


def test_two_plans_beside_each_other_have_their_own_host(tmp_path: Path) -> None:
    launched, issued = (written(tmp_path / name, capture)[0].outcome for name, capture in (("launched", "on"), ("issued", "off")))
    assert (
        main(
            [
                "report",
                str(tmp_path / "launched"),
                "--beside",
                str(tmp_path / "issued"),
                "-o",
                str(tmp_path / "r"),
                "--json",
                str(tmp_path / "j"),
            ]
        )
        == 0
    )
    outcome = json.loads((tmp_path / "j").read_text())["outcome"]
    assert launched is not None
    assert issued is not None
    assert [outcome[name]["step_ns"] for name in ("plan", "before")] == [launched.plan.step_ns, issued.plan.step_ns]


def test_a_record_from_before_is_of_steps_that_are_issued(tmp_path: Path) -> None:
    (issued, *_) = written(tmp_path, "off")
    for path in (tmp_path / "captured").glob("*.json"):
        record = json.loads(path.read_text())
        assert record.pop("is_launched") is False
        assert record["outcome"].pop("refusal") == ""
        path.write_text(json.dumps({**record, "version": 3}))
    assert not read_record(tmp_path / "rank0.ilp").is_launched
    assert issued.outcome is not None
    (again, *_) = loaded(tmp_path)
    assert (again.outcome, again.is_launched) == (issued.outcome, False)
    assert len(find_dumps([tmp_path])) == len(GIVEN)
    assert main(["check", str(tmp_path)]) == 0


def test_measured_runs_are_predicted_as_they_ran(tmp_path: Path) -> None:
    plans = [plan.program for plan in written(tmp_path, "on")]
    costs, row = CostModel(load_profile("h200")), {"case": "a", "sitting": "2026-11-28", "world": len(plans)}
    launched, issued = (predict({**row, "plan": name}, plans, costs)["limited"]["step_ms"] for name in ("auto-captured", "auto"))
    assert launched < issued / 2


def test_the_host_alone_is_left_out() -> None:
    issued, launched = (costs_of("h200", is_launched) for is_launched in (False, True))
    op = next(op for op in GIVEN[0].ops if op.kind == "matmul")
    values = {value.id: value for value in GIVEN[0].values}
    for costs in (launched, launched.for_world(4)):
        assert (costs.host_ns(op), costs.job_ns(), costs.between_steps_ns()) == (0, 0, 0)
        assert (costs.issued().host_ns(op), costs.issued().between_steps_ns()) == (issued.host_ns(op), issued.profile.host.between_steps_ns)
        assert costs.op_time(op, values, {}) == issued.for_world(4).op_time(op, values, {})
    assert issued.host_ns(op) > 0 < issued.job_ns()
    assert issued.between_steps_ns() > 0
    assert issued.issued() is issued
