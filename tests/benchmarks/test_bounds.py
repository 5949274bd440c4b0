"""No plan passes a bound, and the one that counts more is no lower."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from interlace.config import load_config, make_config
from interlace.cost_model import GivenCosts
from interlace.planning.bounds import bound_ns, firm_bound_ns
from interlace.planning.plan import make_plans
from interlace.scheduler.memory.live import in_order
from interlace.scheduler.simulate.simulator import simulate
from tests.strategies import World, programs

COSTS = GivenCosts({"comm": 60, "gemm": 100, "default": 10}, {("gemm", "comm"): (1.4, 1.6)})


@pytest.mark.parametrize("form", ["stock", "dx-first", "mixed", "zb-h1", "auto"])
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (3, 6)])
def test_no_plan_passes_a_bound(form: str, pp: int, micro_batches: int) -> None:
    given = programs(World(pp=pp, mp=2, micro_batches=micro_batches, layers=3))
    stages = [program for program in given if program.rank % 2 == 0]
    stock = make_plans(given, load_config("baseline"), COSTS, "given")
    peaks = [in_order(plan.program).peak() for plan in stock][::2]
    config = {"schedule_1f1b": {"interleave": form, "only_gains": False, "search": False}}
    plans = stock if form == "stock" else make_plans(given, make_config(config), COSTS, "given")
    firm = firm_bound_ns(stages, COSTS, peaks)
    assert bound_ns(stages, COSTS) <= firm <= simulate([plan.program for plan in plans], COSTS).step_ns
