"""Plans that are tried on a run's own steps, and failures of plans, on CPU ranks: always the baseline's bits."""

from __future__ import annotations

import functools
import shutil
import socket
from pathlib import Path

import msgspec
import pytest

from interlace.errors import LaunchError
from interlace.planning.baseline import BASELINE
from interlace.planning.choice import Beginning, TrialOutcome
from interlace.planning.outcome import Outcome
from interlace.planning.plan import read_record
from tests.report.pages import data_in
from tests.training.tuned import FORM, MEMORY, MESHES, OURS, STEPS, Run

pytestmark = pytest.mark.paddle
SLOW_MS = 200.0
"""What a plan that is played slow sleeps in every step."""
NOTHING_PROPOSED = {"form": "mixed"}
"""Where it does not matter which plans there are beside Interlace's and Paddle's."""


@functools.cache
def baseline(layout: str, folder: Path, words: str = STEPS) -> list[object]:
    """The bits of Paddle alone."""
    return Run(folder, layout, {}, words, INTERLACE_DISABLE="1").bits()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("baseline")


@functools.cache
def decided(layout: str, folder: Path) -> Run:
    """A run that leaves what it decided in the folder's cache; it evaluates and saves in between."""
    return Run(folder, layout, {"between": True, "slow": BASELINE})


SMALL = "mp2, one micro-batch"


def test_what_a_run_with_other_memory_measured_is_measured_again(tmp_path: Path, folder: Path) -> None:
    decided(SMALL, folder / SMALL)
    shutil.copytree(folder / SMALL / "cache", tmp_path / "cache")
    (kept,) = (tmp_path / "cache").glob("tuned-*.json")
    choice = msgspec.json.decode(kept.read_bytes(), type=TrialOutcome)
    kept.write_bytes(msgspec.json.encode(msgspec.structs.replace(choice, memory_bytes=1 << 30)))
    again = Run(tmp_path, SMALL, {})
    assert again.bits() == baseline(SMALL, folder)
    assert again.trial()[0].startswith(("plans measured in ", "plans are being measured, ")), again.trial()


@pytest.mark.parametrize("layout", [SMALL, *(pytest.param(layout, marks=pytest.mark.long) for layout in ("pp2", "mp2"))])
def test_a_trial_with_evaluation_and_checkpoints_in_it_keeps_the_bits(layout: str, folder: Path) -> None:
    """The next run takes what was decided, and tries nothing. (`tests/testbed/test_tuning.py` has the bits of two stages.)"""
    run = decided(layout, folder / layout)
    assert run.bits() == baseline(layout, folder)
    head, *lines = run.trial()
    assert head.startswith(("plans measured in ", "plans are being measured, "))  # a noisy machine decides later
    assert BASELINE not in head, "a slow plan loses"
    took = next(line for line in lines if line.startswith(f"  {BASELINE}: ")).split()[2]
    assert float(took) >= SLOW_MS, lines
    again = Run(folder / layout, layout, {})
    assert again.bits() == baseline(layout, folder)
    assert again.trial()[0].startswith("plans measured: ")


@pytest.mark.long
@pytest.mark.parametrize("layout", MESHES)
def test_a_trial_keeps_the_bits_on_every_mesh(layout: str, tmp_path: Path, folder: Path) -> None:
    run = Run(tmp_path, layout, {"between": True})
    assert run.bits() == baseline(layout, folder)
    assert [line for line in run.trial() if line.startswith(f"  {OURS}: ")], run.said


@pytest.fixture(scope="module")
def tried(forked_ranks: None, folder: Path) -> Run:
    """A run whose form by name is the fastest; it leaves its choice with its dumps, and its page."""
    return Run(folder, "pp2", {"slow": ["'s ", MEMORY], "dump": str(folder / "dumps"), "page": str(folder / "page.html")})


def test_all_plans_that_differ_in_kind_are_tried(tried: Run, folder: Path) -> None:
    assert tried.bits() == baseline("pp2", folder)
    assert [line.split(":")[0].strip() for line in tried.trial()[1:3]] == [OURS, BASELINE]
    assert [line for line in tried.trial() if FORM in line]
    assert [line for line in tried.trial() if MEMORY in line]
    shown = data_in(folder / "page.html")["trial"]
    assert [each["name"] for each in shown["results"]] == [line.strip().split(":")[0] for line in tried.trial()[1:]]
    assert shown["taken"] in tried.trial()[0]


@pytest.mark.long
@pytest.mark.parametrize(("memory", "is_dropped"), [(300_000, True), (300_000_000, False)])
def test_a_plan_with_more_memory_is_tried_where_every_device_has_it(memory: int, is_dropped: bool, tmp_path: Path, folder: Path) -> None:
    run = Run(tmp_path, "pp2", {"slow": BASELINE, "memory": memory})
    assert run.bits() == baseline("pp2", folder)
    dropped = [line for line in run.trial() if "more than those of the plans that ran; of" in line]
    assert bool(dropped) == is_dropped, run.trial()
    assert all(FORM in line or MEMORY in line for line in dropped), dropped


def test_a_plan_that_becomes_slow_is_tried_against_the_others_again(tmp_path: Path, folder: Path) -> None:
    """On one rank alone; a run that knows the choice of an earlier one. The bits stay, and what was kept for later runs."""
    words, first = "--steps 55", decided(SMALL, folder / SMALL)
    shutil.copytree(folder / SMALL / "cache", tmp_path / "cache")
    kept = [path.read_bytes() for path in (tmp_path / "cache").glob("tuned-*.json")]
    run = Run(tmp_path, SMALL, {"later": 10}, words)
    assert kept
    assert run.bits() == baseline(SMALL, folder, words)
    head, *lines = run.trial()
    assert head.startswith(("plans measured in ", "plans are being measured, ")), head  # a noisy machine decides later
    taken = first.trial()[0].partition("steps of this run: ")[2].removesuffix(" is taken")
    assert taken in "".join(lines)
    assert taken not in head, "it stays slow"
    assert [path.read_bytes() for path in (tmp_path / "cache").glob("tuned-*.json")] == kept


@pytest.mark.parametrize(
    ("kind", "on"),
    [
        ("build", 1),
        ("take", None),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("build", None), ("take", 1), ("fail", None), ("fail", 1))),
    ],
)
def test_a_plan_that_fails_is_dropped_and_training_goes_on(kind: str, on: int | None, tmp_path: Path, folder: Path) -> None:
    """Its first step fails at its very end: parameters are written, and go back to what they were (`tests/testbed/test_tuning.py` trains
    that on one rank each time)."""
    play = {kind: OURS, **({} if on is None else {"on": on})}
    run = Run(tmp_path, "pp2", {**play, **NOTHING_PROPOSED})
    assert run.bits() == baseline("pp2", folder)
    said = "\n".join(run.said)
    assert [line for line in run.trial() if line.startswith(f"  {OURS}: dropped: ")] or kind == "build", said
    reports = list((tmp_path / "cache").glob("fault-rank*.txt"))
    assert len(reports) == 2
    assert any("Traceback" in path.read_text() for path in reports)


@pytest.mark.parametrize("kind", ["fail", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("build", "take"))])
def test_a_baseline_that_fails_beside_a_plan_that_runs_ends_nothing(kind: str, tmp_path: Path, folder: Path) -> None:
    """As where the model only fits with what Interlace moves."""
    run = Run(tmp_path, "pp2", {kind: BASELINE, **NOTHING_PROPOSED})
    assert run.bits() == baseline("pp2", folder)
    assert [line for line in run.trial() if line.startswith(f"  {BASELINE}: dropped: ")], run.trial()
    assert BASELINE not in run.trial()[0]


def test_a_plan_in_whose_first_step_a_run_ended_is_not_tried_again(tried: Run, tmp_path: Path, folder: Path) -> None:
    (kept,) = (folder / "dumps").glob("tuned-*.json")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / f"{kept.stem}.first-step.json").write_bytes(msgspec.json.encode([Beginning(FORM, socket.gethostname(), 1 << 22)]))
    again = Run(tmp_path, "pp2", {})
    assert again.bits() == baseline("pp2", folder)
    assert not [line for line in again.trial() if FORM in line], again.trial()
    assert [line for line in again.trial() if MEMORY in line]


def test_dumps_and_reports_hold_the_plan_that_was_taken(tried: Run, folder: Path) -> None:
    """It is neither the first that was made nor the last."""
    assert tried.trial()[0].endswith(f"steps of this run: {FORM} is taken"), tried.trial()
    for rank, report in enumerate(tried.result.reports):
        record = read_record(folder / "dumps" / f"rank{rank}.ilp")
        assert record.options["schedule-1f1b"]["interleave"] == "mixed"
        assert report.plan is not None
        assert msgspec.convert(report.plan["outcome"], Outcome) == record.outcome
        assert report.plan["trial"] == tried.trial()


def test_a_rank_that_dies_in_a_trial_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="rank 1 failed: ended with exit code 3"):
        Run(tmp_path, "pp2", {"die": 5, **NOTHING_PROPOSED})
