"""Every benchmark runs in its tiny size and leaves valid JSON with machine, versions and date."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def quick(script: str, out: Path) -> dict[str, Any]:
    found = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), "--quick", "-o", str(out)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr[-2000:]
    result: dict[str, Any] = json.loads(out.read_text())
    assert {"machine", "versions", "date"} <= result.keys()
    return result


def test_dumps(tmp_path: Path) -> None:
    result = quick("dumps", tmp_path / "dumps.json")
    assert all(row["ops"] >= 200 and row["decode_s"]["median"] > 0 for row in result["rows"])


def test_check(tmp_path: Path) -> None:
    result = quick("check", tmp_path / "check.json")
    assert all(row["findings"] == 0 and row["items_a_rank"] >= 500 for row in result["rows"])


@pytest.mark.paddle
@pytest.mark.slow
@pytest.mark.long
def test_layouts(tmp_path: Path) -> None:
    """Every layout is counted once, and no bound is above a step, as in the searches of `tests/layout`."""
    (row,) = quick("layouts", tmp_path / "layouts.json")["cases"].values()
    counts = row["counts"]
    assert counts["layouts"] == sum(counts[state] for state in ("excluded", "refused", "drafted", "planned", "waiting"))
    assert counts["drafted"] + counts["planned"] == len(row["layouts"]) == 2
    assert all(each["least_ns"] <= min(each["paddles_step_ns"], each.get("ours_step_ns", 1 << 60)) for each in row["layouts"])


@pytest.mark.slow
def test_simulator(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    assert all(row["fast_s"] > 0 for row in quick("simulator", tmp_path / "simulator.json")["rows"])


@pytest.mark.slow
def test_oracle(tmp_path: Path) -> None:
    """Predictions of measured orders stay within 10 % but for one (no communication, from other files), their order is kept, and
    our orders are no worse than the best known ones by more than 2 %."""
    result = quick("oracle", tmp_path / "oracle.json")
    for found in result["configurations"].values():
        assert found["judged"]["simulator"]["median_abs"] < 0.05
        assert found["judged"]["simulator"]["order"] > 0.9
        assert all(row["over_best_known"] < 0.02 for row in found["planner"])
        assert all(row["peak_over_plain"] <= 1 for row in found["planner"] if row["memory"] != "free")


@pytest.mark.slow
@pytest.mark.long
def test_splitting(tmp_path: Path) -> None:
    """docs/decisions/007: parts of products gain less than they cost."""
    rows = [row for found in quick("splitting", tmp_path / "splitting.json")["configurations"].values() for row in found]
    assert all(row["gain"] < (0.01 if row["overhead"] == 0 else 0.0) for row in rows)


@pytest.mark.slow
@pytest.mark.long
def test_schedules(tmp_path: Path) -> None:
    """`auto` is no slower than Paddle's baseline, and nothing is faster than the bound (`test_bounds.py` asks that of more schedules)."""
    for row in quick("schedules", tmp_path / "schedules.json")["rows"]:
        assert row["auto"]["step_ms"] <= row["stock"]["step_ms"]
        assert row["bound_ms"] <= min(row[form]["step_ms"] for form in ("stock", "dx-first", "mixed", "zb-h1", "auto"))


@pytest.mark.slow
@pytest.mark.long
def test_collectives(tmp_path: Path) -> None:
    """`auto` is no slower than Paddle's baseline, and what is exposed of each kind is no more than there is in all."""
    for row in quick("collectives", tmp_path / "collectives.json")["rows"]:
        assert row["auto"]["step_ms"] <= row["paddle"]["step_ms"]
        for plan in (row["paddle"], row["auto"]):
            assert max(plan["exposed_by_kind_ms"].values()) <= plan["exposed_ms"] + plan["hidden_ms"]


@pytest.mark.slow
@pytest.mark.long
def test_recompute(tmp_path: Path) -> None:
    """The more memory, the less is recomputed; and what nothing reads costs none."""
    found = quick("recompute", tmp_path / "recompute.json")
    assert found["unread"]["step_ms"] <= found["lowered"]["step_ms"]
    assert found["unread"]["peak_bytes"] <= found["lowered"]["peak_bytes"] <= found["stock"]["peak_bytes"]
    kept = [each for each in found["budgets"] if "why_not" not in each]
    assert kept
    assert all(each["gpu_peak_bytes"] <= each["budget_bytes"] for each in kept)


@pytest.mark.slow
@pytest.mark.long
def test_budgets(tmp_path: Path) -> None:
    """What is planned keeps its share of what Paddle's baseline holds; the rest says what the least is."""
    (model,) = quick("budgets", tmp_path / "budgets.json")["models"]
    for row in model["budgets"]:
        for name in ("offload alone", "both"):
            assert row[name].get("least_bytes") or row[name]["peak_bytes"] <= row["fraction"] * row[name]["stock_peak_bytes"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.paddle
def test_executor(tmp_path: Path) -> None:
    pytest.importorskip("paddle")
    result = quick("executor", tmp_path / "executor.json")
    rows = result["jobs"]["rows"]  # the slope between them says nothing of sizes this small on a busy machine
    assert [row["jobs"] for row in rows] == [1, 4]
    assert all(row[name]["min"] > 0 for row in rows for name in ("us_per_step", "us_per_step_traced"))
    slope = (rows[1]["us_per_step"]["median"] - rows[0]["us_per_step"]["median"]) / 3
    assert result["jobs"]["us_per_job"] == pytest.approx(slope, abs=0.01)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.paddle
def test_road(tmp_path: Path) -> None:
    """What it times, capture, planning, proof and lowering, has tests of its own."""
    pytest.importorskip("paddle")
    (row,) = quick("road", tmp_path / "road.json")["rows"]
    assert row["share"]["median"] > 0  # of a model this small it says nothing: the search for an order takes the same time for all
    assert set(row["cpu_s"]) == {"paddle", "interlace", "capture", "passes", "checks", "lowering"}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.paddle
def test_stages(tmp_path: Path) -> None:
    """The commands that it times run in `tests/training/test_guides_run.py` too."""
    pytest.importorskip("paddle")
    (row,) = quick("stages", tmp_path / "stages.json")["rows"]
    assert (row["world"], row["programs"], row["safe"]) == (8, 2, True)
    assert all(row[name]["cpu_s"] > 0 for name in ("dump", "plan", "check", "timeline", "report"))
