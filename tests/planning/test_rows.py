"""What was decided is small text: stored, edited, and given back."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from interlace.cli import main
from interlace.config import load_config, make_config
from interlace.cost_model import GivenCosts
from interlace.ir import Program, save
from interlace.ir.schedule import parse_rows
from interlace.planning.plan import Plan, make_plans
from interlace.planning.rows import CONFIG, ROWS, rows_of, rows_text, write_rows
from tests.planning.costs import FairCosts
from tests.strategies import World, programs

COSTS = FairCosts({"comm": 30, "gemm": 100, "default": 10})
WORLD = World(pp=2, mp=2, micro_batches=6, layers=2)


def planned(given: list[Program], costs: GivenCosts, **options: Any) -> list[Plan]:
    return make_plans(given, make_config({"schedule_1f1b": options}), costs, "h200")


def again(plans: list[Plan], given: list[Program], folder: Path) -> list[Plan]:
    """Planned with what a folder of plans holds."""
    assert write_rows(plans, folder, folder)
    return make_plans(given, load_config(folder / CONFIG), COSTS, "h200")


@pytest.mark.parametrize(
    ("options", "row"),
    [
        pytest.param({"interleave": "auto", "search": False}, "", marks=pytest.mark.slow),
        (
            {
                "interleave": "dx-first",
                "weight_delay": (0, 2),
                "depth": (3, 2),
                "only_gains": False,
                "send_latency_weight": (0.0, 1.0),
                "search": False,
                "inline_share": (0.0, 0.5),
            },
            "1 | 0F 1F 0I+2F 1I+3F 2I+4F+0W 3I+5F+1W 4I+2W 5I+3W 4W 5W+O",
        ),
        (
            {
                "interleave": ("dx-first", "mixed"),
                "weight_delay": (0, 1),
                "weight_delay_at_end": (0, 2),
                "depth": (3, 1),
                "send_latency_weight_at_end": (0.5, 0.0),
                "only_gains": False,
                "search": False,
            },
            "1 | 0F 0I+1F 1I+2F+0W 2I+3F+1W 3I+4F+2W 4I+5F 5I+3W 4W 5W+O",
        ),
        ({"interleave": "mixed", "only_gains": False, "search": False}, "0 | 0F 1F 2F 0B+3F"),
        ({"interleave": "zb-h1"}, "0 | 0F 1F 0I"),
        ({"interleave": "off"}, "1 | 0R 0F 0B"),
    ],
)
def test_rows_plan_the_same_jobs_again(options: dict[str, Any], row: str, tmp_path: Path) -> None:
    given = programs(WORLD)
    plans = planned(given, COSTS, **options)
    found = again(plans, given, tmp_path)
    assert [plan.jobs for plan in found] == [plan.jobs for plan in plans]
    assert [plan.program.events for plan in found] == [plan.program.events for plan in plans]
    assert row in (tmp_path / ROWS).read_text()


@pytest.mark.parametrize("budget", ["+1KB", "4KB", 1.5])
def test_a_memory_budget_is_written_as_it_can_be_read(budget: str | float, tmp_path: Path) -> None:
    given = programs(WORLD)
    plans = make_plans(given, make_config({"memory_budget": budget, "schedule_1f1b": {"interleave": "dx-first"}}), COSTS, "h200")
    found = again(plans, given, tmp_path)
    assert (found[0].memory_budget, found[0].extra_bytes) == (plans[0].memory_budget, plans[0].extra_bytes) != (0, 0)
    assert [plan.jobs for plan in found] == [plan.jobs for plan in plans]


def test_rows_with_chunks_and_of_accumulation(tmp_path: Path) -> None:
    for world in (World(pp=2, micro_batches=4, layers=2, schedule="VPP", chunks=2), World(mp=2, micro_batches=3, schedule="accumulate")):
        given = programs(world)
        plans = planned(given, COSTS, interleave="dx-first", only_gains=False, search=False)
        assert parse_rows(rows_text(rows_of([plan.program for plan in plans]))) == rows_of([plan.program for plan in plans])
        assert [plan.jobs for plan in again(plans, given, tmp_path / world.schedule)] == [plan.jobs for plan in plans]


def test_plans_of_some_stages_leave_no_rows(tmp_path: Path) -> None:
    plans = planned(programs(WORLD)[:1], COSTS, interleave="off")
    assert not write_rows(plans, tmp_path, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_schedule_is_printed_edited_and_planned_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for program in programs(WORLD):
        save(program, tmp_path / "dumps" / f"rank{program.rank}.ilp")
    assert main(["plan", "dumps", "-o", "plan"]) == 0
    told = "schedule, a row for each stage: plan/schedule.rows; to plan an edited one, use --config plan/schedule.yaml"
    assert told in capsys.readouterr().out
    assert main(["show", "plan", "--rows"]) == 0
    rows = capsys.readouterr().out
    assert rows == Path("plan/schedule.rows").read_text()
    edited = re.sub(r"^1 \|.*", "1 | 0F 0B 1F 1B 2F 2B 3F 3B 4F 4B 5F 5B O", rows, flags=re.M)
    shutil.copytree("plan", "copied/plan")
    Path("copied/plan/schedule.rows").write_text(edited)
    assert main(["plan", "dumps", "--config", "copied/plan/schedule.yaml", "-o", "mine"]) == 0
    capsys.readouterr()
    assert main(["show", "mine", "--rows"]) == 0
    assert "1 | 0F 0B 1F 1B 2F 2B 3F 3B 4F 4B 5F 5B O" in capsys.readouterr().out
    assert main(["check", "mine"]) == 0
    assert main(["timeline", "mine", "--beside", "plan", "-o", "trace.json"]) == 0
    assert main(["show", "dumps", "--rows"]) == 2
    assert "rank 0: no jobs, so no rows; expected a plan, as `interlace plan` makes it" in capsys.readouterr().err
