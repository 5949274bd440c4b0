"""No plan passes a bound, and the one that counts more is no lower."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from bounds import bound_ns, firm_bound_ns

from interlace.config import load_config, make_config
from interlace.cost_model import GivenCosts
from interlace.planning.floor import floors_of, occupied
from interlace.planning.plan import make_plans
from interlace.scheduler.memory.live import in_order
from interlace.scheduler.simulate.simulator import simulate
from tests.strategies import World, plan, programs, worlds

COSTS = GivenCosts({"comm": 60, "gemm": 100, "pd_op.matmul_grad": 200, "default": 10}, {("gemm", "comm"): (1.4, 1.6)})


@pytest.mark.parametrize("form", ["stock", "dx-first", "mixed", "zb-h1", "auto"])
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (3, 6)])
def test_no_plan_passes_a_bound(form: str, pp: int, micro_batches: int) -> None:
    every = programs(World(pp=pp, mp=2, micro_batches=micro_batches, layers=3))
    stages = [program for program in every if program.rank % 2 == 0]
    stock = make_plans(every, load_config("baseline"), COSTS, "given")
    peaks = [in_order(plan.program).peak() for plan in stock][::2]
    config = {"schedule_1f1b": {"interleave": form, "only_gains": False, "search": False}}
    plans = stock if form == "stock" else make_plans(every, make_config(config), COSTS, "given")
    firm = firm_bound_ns(stages, COSTS, peaks)
    step_ns = simulate([plan.program for plan in plans], COSTS).step_ns
    assert bound_ns(stages, COSTS) <= firm <= step_ns
    floors = floors_of(stages, COSTS)
    assert max(occupied(program, COSTS).own for program in stages) <= floors.own <= step_ns
    assert 1.02 * bound_ns(stages, COSTS) < floors.own  # collectives and messages count something
    assert 0 < max(occupied(program, COSTS).shared for program in stages) <= floors.shared <= floors.own


@settings(max_examples=60, deadline=None)
@given(world=worlds(), gemm=st.integers(1, 200), comm=st.integers(1, 400), stretch=st.floats(1.0, 1.9), beside=st.floats(1.0, 1.9))
def test_no_plan_of_a_random_world_passes_the_floor(world: World, gemm: int, comm: int, stretch: float, beside: float) -> None:
    """Plans that are right by construction, with streams, pairs and copies, of which no planner has thought."""
    costs = GivenCosts({"comm": comm, "gemm": gemm, "pd_op.matmul_grad": 2 * gemm, "default": 10}, {("gemm", "comm"): (stretch, beside)})
    step_ns = simulate(plan(world), costs).step_ns
    stages = [each for each in programs(world) if each.rank % (world.mp * world.dp) == 0]
    assert floors_of(stages, costs).own <= step_ns
