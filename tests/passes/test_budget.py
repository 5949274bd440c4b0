"""A memory budget is held against what the place holds, and the plan says so."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.config import make_config
from interlace.cost_model import GivenCosts
from interlace.errors import PlanError
from interlace.passes import OffloadActivations, Pass, Pipeline, Schedule1F1B, ThrottleHost
from interlace.passes.pipeline import PassReport
from interlace.planning.budget import bytes_over, say_budget
from interlace.planning.plan import make_plans
from interlace.scheduler.interleave import planner as interleave
from interlace.scheduler.memory.live import in_order
from interlace.scheduler.memory.throttle import gpu_peak
from interlace.units import size
from tests.default_passes import STREAMS
from tests.scheduler.test_throttle import BLOCK, COST, run_ahead_program
from tests.strategies import World, programs, worlds

COPIES = GivenCosts({"comm": 100, "gemm": 50, "copy": 5, "default": 10}, {("gemm", "comm"): (1.1, 1.2)})
EMPTY = PassReport("offload-activations", (), (), 0, 0, 0)


@pytest.mark.parametrize("hold", ["off", "auto"])
def test_the_plan_says_that_the_place_keeps_the_budget_or_is_refused(hold: str) -> None:
    streams: tuple[Pass, ...] = (*STREAMS, *([ThrottleHost(run_ahead_bytes=BLOCK)] if hold == "auto" else []))
    planned, reports = Pipeline(streams).run(run_ahead_program(), COST)
    passes, peak = (OffloadActivations(memory_budget=8 * BLOCK), *streams), gpu_peak(planned, COST)
    assert bytes_over(planned, passes, COST) == max(0, peak - 8 * BLOCK)
    if hold == "off":
        held = f"holds {size(peak)}, of which side streams hold {size(peak - 8 * BLOCK)}"
        with pytest.raises(PlanError, match=f"{held}.*ask for {peak} bytes"):
            say_budget(planned, passes, [EMPTY, *reports], COST)
    else:
        (told, *_) = say_budget(planned, passes, [EMPTY, *reports], COST)
        assert f"the plan holds {size(peak)} at most" in told.changed[0]


def test_a_byte_over_the_budget_is_refused() -> None:
    planned, reports = Pipeline(STREAMS).run(run_ahead_program(), COST)
    peak = gpu_peak(planned, COST)
    with pytest.raises(PlanError, match=rf"\({peak - 1} bytes\).*of which side streams hold 1 B.*ask for {peak} bytes"):
        say_budget(planned, (OffloadActivations(memory_budget=peak - 1), *STREAMS), [EMPTY, *reports], COST)
    assert say_budget(planned, (OffloadActivations(memory_budget=peak), *STREAMS), [EMPTY, *reports], COST)[0].changed


def test_without_a_budget_nothing_is_said() -> None:
    assert say_budget(run_ahead_program(), (OffloadActivations(fraction=0.5),), [EMPTY], COST) == [EMPTY]


@pytest.mark.slow
def test_a_plan_keeps_its_budget_on_the_place_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory budget. What side streams hold is kept free by moving more, on all ranks together."""
    kept: list[bool] = []
    refusals: list[bool] = []

    @settings(max_examples=20, deadline=None, database=None)
    @given(worlds(max_pp=2, max_micro_batches=4, max_layers=2, schedule="1F1B"), st.sampled_from([0.7, 0.85, 1.0, 1.5, 2.0]))
    def holds(world: World, share: float) -> None:
        keeps_or_refuses(world, share, kept, refusals)

    monkeypatch.setattr(interleave, "SEARCH_WORK", 0)  # a pair's first order keeps a budget, or does not, as its best one
    holds()
    assert kept
    assert refusals
    assert all(refusals)


def keeps_or_refuses(world: World, share: float, kept: list[bool], refusals: list[bool]) -> None:
    plain = programs(world)
    budget = int(share * max(in_order(Pipeline((Schedule1F1B(interleave="off"),)).run(each, COPIES)[0]).peak() for each in plain))
    options = {"offload_activations": {"memory_budget": budget, "min_bytes": 0}, "throttle_host": {"run_ahead_bytes": 0}}
    try:
        plans = make_plans(plain, make_config(options), COPIES, "h200")
    except PlanError as error:
        plans, why = [], str(error)
        refusals.append("least feasible" in why or "side streams hold" in why)
    for plan in plans:
        kept.append(True)
        assert gpu_peak(plan.program, COPIES) <= budget
        told = [line for report in plan.reports for line in report.changed]
        assert any(f"memory_budget {size(budget)}: on a GPU" in line for line in told)
