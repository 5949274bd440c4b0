"""What a planner makes, the checker accepts: plans of random programs with masks, losses gathered over replicas, outputs that a
collective gives, and inputs that leave for the next stage."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from interlace.config import Config, make_config
from interlace.cost_model import CostModel, load_profile
from interlace.ir.target import CPU, CUSTOM, GPU
from interlace.planning.plan import make_plans
from interlace.scheduler.hazards import check
from interlace.scheduler.interleave import planner as interleave
from tests.closure import Closure
from tests.interpreter import assert_same
from tests.strategies import World, programs, worlds

OFFLOAD = {"fraction": 1.0, "min_bytes": 1, "only_gains": False}
CONFIGS: dict[str, Config] = {
    "baseline": make_config({"schedule_1f1b": {"interleave": "off"}}),
    "pairs": make_config({"schedule_1f1b": {"interleave": "dx-first", "only_gains": False}}),
    "mixed": make_config({"memory_budget": "+1GB", "schedule_1f1b": {"interleave": "mixed", "only_gains": False}}),
}


@pytest.fixture(autouse=True)
def _no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleave, "SEARCH_WORK", 0)


COST = CostModel(load_profile("h200"))


def planned_and_proved(world: World, config: Config) -> None:
    before = programs(world)
    plans = [plan.program for plan in make_plans(before, config, COST, "h200")]
    for target in (GPU, CPU, CUSTOM):
        assert [str(finding) for finding in check(plans, target)] == []
    for one in plans:
        closure = Closure(one)
        assert (closure.races(), closure.freed_early(), closure.unwritten()) == ([], [], [])
    assert_same(before, plans)


@settings(max_examples=6, deadline=None)
@given(worlds(max_pp=2, max_dp=2, max_micro_batches=4, max_layers=2, streams=False, pairs=False, offload=False, hoist=False, cut=False))
def test_plans_of_random_programs_are_safe(world: World) -> None:
    """Fails where the checker, on any target, or the closure finds something in a plan, or where its numbers are not the program's."""
    for config in CONFIGS.values():
        planned_and_proved(world, config)
