"""A memory budget is held against what the place holds, and the plan says so (acceptance: O5)."""

from __future__ import annotations

import pytest

from interlace.passes import AssignStreams, OffloadActivations, Pipeline
from interlace.passes.budget import say_budget
from interlace.passes.pipeline import PassReport
from interlace.scheduler.hold import place_peak
from tests.scheduler.test_hold import BLOCK, COST, run_ahead_program

EMPTY = PassReport("offload-activations", (), (), 0, 0, 0)


@pytest.mark.parametrize("hold", ["off", "auto"])
def test_the_plan_says_whether_the_place_keeps_the_budget(hold: str) -> None:
    streams = AssignStreams(hold_host=hold, run_ahead_bytes=BLOCK)  # type: ignore[arg-type]
    planned, reports = Pipeline((streams,)).run(run_ahead_program(), COST)
    budget = 8 * BLOCK
    offload = OffloadActivations(memory_budget=budget)
    (told, _) = say_budget(planned, (offload, streams), [EMPTY, *reports], COST)
    peak = place_peak(planned, COST)
    assert (peak <= budget) is (hold == "auto")
    (line,) = told.changed if hold == "auto" else told.declined
    assert f"the plan holds {peak / 2**30:.3f} GiB at most" in line
    assert (f"over it by {peak - budget} bytes" in line) is (hold == "off")


def test_without_a_budget_nothing_is_said() -> None:
    assert say_budget(run_ahead_program(), (OffloadActivations(fraction=0.5),), [EMPTY], COST) == [EMPTY]
