"""Plans that are tried on a run's own steps, on asynchronous streams under random delays: always the baseline's bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from interlace.errors import LaunchError
from interlace.planning.baseline import BASELINE
from tests.testbed.variant import need_ranks
from tests.training.tuned import FORM, MEMORY, OURS, Run

pytestmark = pytest.mark.paddle
TESTBED = {"INTERLACE_TARGET": "testbed"}
IN_USE = " are in use"
DELAYS = {**TESTBED, "TESTBED_DELAYS": "seed=7,permille=30,max_us=2000"}


@pytest.fixture(scope="module")
def baselines(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[object]]:
    """The bits of Paddle alone, by layout."""
    need_ranks(2)

    @functools.cache
    def bits(layout: str) -> list[object]:
        return Run(tmp_path_factory.mktemp("baseline"), layout, {}, INTERLACE_DISABLE="1", **TESTBED).bits()

    return bits


@pytest.mark.long
@pytest.mark.parametrize("layout", ["pp2", "mp2"])
def test_a_trial_with_evaluation_and_checkpoints_in_it_keeps_the_bits(
    layout: str, baselines: Callable[[str], list[object]], tmp_path: Path
) -> None:
    run = Run(tmp_path, layout, {"between": True}, **DELAYS)
    assert run.bits() == baselines(layout)
    head, *lines = run.trial()
    assert head.startswith(("plans measured in ", "plans are being measured, "))
    assert [line for line in lines if line.startswith(f"  {OURS}: ")], run.said
    if layout == "pp2":
        measured = [line for line in lines if " a step, half of " in line]
        assert all(any(name in line for line in measured) for name in (OURS, BASELINE, FORM, MEMORY)), lines
    assert not [line for line in lines if IN_USE in line], "a plan with more memory is tried: the device has it"


def test_what_a_first_step_wrote_is_undone_and_a_plan_without_room_is_left_out(
    baselines: Callable[[str], list[object]], tmp_path: Path
) -> None:
    """Interlace's plan fails on one rank after its last write; and a plan needs more memory, of which the device has none left. The run
    evaluates and saves in between."""
    run = Run(tmp_path, "pp2", {"fail": OURS, "on": 1, "between": True}, TESTBED_MEMORY="1000000", **DELAYS)
    assert run.bits() == baselines("pp2")
    assert [line for line in run.trial() if line.startswith(f"  {OURS}: dropped: ")], run.said
    assert [line for line in run.trial() if FORM in line and "; of 976.6 KiB of device memory " in line and IN_USE in line], run.trial()


@pytest.mark.long
def test_a_rank_that_dies_in_a_trial_ends_the_run(plugin: Path, tmp_path: Path) -> None:
    need_ranks(2)
    with pytest.raises(LaunchError, match="rank 1 failed: ended with exit code 3"):
        Run(tmp_path, "pp2", {"die": 5}, **DELAYS)
