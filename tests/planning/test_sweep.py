"""Step time against memory budget: `interlace plan --sweep`, and the budget on the command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from interlace.cli import main
from interlace.config import make_config
from interlace.cost_model import CostModel, GivenCosts
from interlace.errors import PlanError
from interlace.ir import parse, save
from interlace.ir.program import Program
from interlace.passes import ChooseRecompute, OffloadActivations, Pipeline, Schedule1F1B
from interlace.planning import sweep
from interlace.planning.budget import peak_bytes
from interlace.planning.curve import SWEEP, Point, read_sweep
from interlace.planning.plan import Plan, make_plans, read_record
from interlace.planning.sweep import became_of_saved, faster
from interlace.report.sweep import sweep_text
from tests.passes.recomputed import PLAIN
from tests.strategies import World, programs

pytestmark = pytest.mark.usefixtures("few_forms")
COSTS = GivenCosts({"comm": 100, "gemm": 50, "copy": 5, "default": 10})


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    """Of two stages."""
    for program in programs(World(pp=2, micro_batches=4, layers=2, schedule="1F1B")):
        save(program, tmp_path / "dumps" / f"rank{program.rank}.ilp")
    return tmp_path / "dumps"


@pytest.mark.slow
def test_a_sweep_leaves_the_curve_beside_the_plan(dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the most that is held to the least feasible; every plan keeps its budget."""
    plan = tmp_path / "plan"
    assert main(["plan", str(dumps), "--memory-budget", "1.0", "--sweep", "--points", "3", "-o", str(plan)]) == 0
    found = read_sweep(plan)
    assert found is not None
    budgets = [point.budget_bytes for point in found.points]
    assert len(budgets) == 3
    assert budgets == sorted(budgets, reverse=True)
    assert all(point.feasible and (point.peak_bytes or 0) <= point.budget_bytes for point in found.points)
    steps = [point.step_us or 0.0 for point in found.points]
    assert steps == sorted(steps)
    assert found.points[0].recomputed_bytes == found.points[0].offloaded_bytes == 0
    assert (found.points[-1].kept_bytes or 0) < (found.points[0].kept_bytes or 0)
    assert sweep_text(found) in capsys.readouterr().out
    record = read_record(plan / "rank0.ilp")
    assert record.memory_budget <= found.baseline.peak_bytes <= budgets[0]  # less where a plan of the curve fits and is faster


def test_a_larger_budget_is_never_slower() -> None:
    """The plan of a smaller budget fits into a larger one."""
    quick = Point(budget_bytes=10, feasible=True, peak_bytes=9, step_us=5.0)
    slow, none = Point(budget_bytes=20, feasible=True, peak_bytes=19, step_us=6.0), Point(budget_bytes=20, feasible=False, why="no")
    for point in (slow, none):
        assert faster(point, quick) == msgspec.structs.replace(quick, budget_bytes=20)
        assert faster(quick, point) == quick
    assert faster(msgspec.structs.replace(slow, step_us=5.0), quick).peak_bytes == 19


@pytest.mark.slow
@pytest.mark.parametrize("form", ["off", pytest.param("auto", marks=pytest.mark.long)])
def test_a_sweep_keeps_the_fastest_plan_that_fits_the_budget_asked_for(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan itself, which is not made again; what was asked for where nothing is faster."""
    plain = programs(World(pp=2, micro_batches=4, schedule="1F1B"))
    config = make_config({"memory_budget": 1.0, "offload_activations": {"min_bytes": 0}})
    asked = make_plans(plain, make_config({"memory_budget": 1.0, "schedule_1f1b": {"interleave": form}}), COSTS, "given")
    made: list[list[Plan]] = []

    def noted(*given: Any) -> list[Plan]:
        made.append(make_plans(*given))
        return made[-1]

    monkeypatch.setattr(sweep, "make_plans", noted)
    curve, taken = sweep.sweep(plain, config, cast(CostModel, COSTS), "given", 3, asked=asked)
    assert len(made) == 3  # one for each point
    steps = [point.step_us or 0.0 for point in curve.points if (point.peak_bytes or 0) <= asked[0].memory_budget]
    assert taken[0].outcome is not None
    assert taken[0].outcome.plan.step_ns <= 1e3 * min(steps)
    assert (taken == asked) == (form == "auto")
    assert any([plan.program for plan in taken] == [plan.program for plan in each] for each in (*made, asked))
    budget = taken[0].memory_budget
    assert budget in {asked[0].memory_budget, *(point.budget_bytes for point in curve.points)}
    assert {plan.memory_budget for plan in taken} == {budget}
    assert {plan.outcome.memory.limit_bytes for plan in taken if plan.outcome and plan.outcome.memory} == {budget}
    assert {plan.compared.memory.limit_bytes for plan in taken if plan.compared and plan.compared.memory} == {budget}


@pytest.mark.slow
def test_no_budget_that_holds_a_plan_made_without_one_is_slower_than_it() -> None:
    """Unlimited memory is another search, which may miss what the one within Paddle's memory finds."""
    plain = programs(World(pp=2, micro_batches=4, schedule="1F1B"))
    config = make_config({})
    asked = make_plans(plain, config, COSTS, "given")
    outcome = asked[0].outcome
    assert outcome is not None
    quick = [
        dataclasses.replace(plan, outcome=msgspec.structs.replace(outcome, plan=msgspec.structs.replace(outcome.plan, step_ns=1)))
        for plan in asked
    ]
    curve, taken = sweep.sweep(plain, config, cast(CostModel, COSTS), "given", 3, asked=quick)
    held = max(peak_bytes(plan.program, COSTS) or 0 for plan in asked)
    assert taken == quick
    assert [point.step_us == 1e-3 for point in curve.points] == [point.budget_bytes >= held for point in curve.points]
    assert curve.points[0].step_us == 1e-3


def test_fewer_than_two_points_are_no_curve(dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(dumps), "--sweep", "--points", "1", "-o", str(tmp_path / "plan")]) == 2
    assert "--points 1: expected 2 or more" in capsys.readouterr().err


def test_a_file_that_is_no_curve_is_an_error(tmp_path: Path) -> None:
    assert read_sweep(tmp_path) is None
    (tmp_path / SWEEP).write_text("{}")
    with pytest.raises(PlanError, match="not what `interlace plan --sweep` wrote"):
        read_sweep(tmp_path)


@pytest.mark.parametrize(
    ("recomputed", "fraction", "parts"),
    [
        (0, 0.0, (12, 0, 0)),  # exp, product, gelu and tanh of three micro-batches
        (1, 0.0, (9, 3, 0)),
        (0, 1.0, (0, 0, 12)),
    ],
)
def test_what_became_of_saved_bytes_by_hand(recomputed: int, fraction: float, parts: tuple[int, int, int]) -> None:
    program: Program = parse(PLAIN.replace("schedule=accumulate", "schedule=FThenB"))
    passes = (ChooseRecompute(level=recomputed / 1000), Schedule1F1B(interleave="off"), OffloadActivations(fraction=fraction, min_bytes=1))
    planned, _ = Pipeline(passes).run(program, COSTS)
    assert became_of_saved(Plan(program, planned), COSTS) == tuple(part << 20 for part in parts)
