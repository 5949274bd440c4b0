"""No plan passes a bound, and the one that counts more is no lower."""

from __future__ import annotations

import functools
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from bounds import Computation, Hiding, bound_ns, firm_bound_ns, firm_bounds_ns
from prices import least_milliwatts, prices_of

from interlace.config import load_config, make_config
from interlace.cost_model import GivenCosts
from interlace.cost_model.base import Draw, tables_of
from interlace.ir import Graph, Program, parse, show
from interlace.passes.narrow_gathers import sites
from interlace.planning.floor import Floors, floors_of, occupied
from interlace.planning.plan import Plan, make_plans
from interlace.scheduler.memory.live import in_order
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.lower import lower
from interlace.scheduler.simulate.power import PowerTrace
from interlace.scheduler.simulate.simulator import Simulation, simulate
from tests.captured.stored import programs_of
from tests.drawing import MS, POWER, Drawing, again
from tests.scheduler.plans import rank
from tests.strategies import World, plan, programs, worlds

TIMES, STRETCHED = {"comm": 60, "gemm": 100, "pd_op.matmul_grad": 200, "default": 10}, {("gemm", "comm"): (1.4, 1.6)}
COSTS = GivenCosts(TIMES, STRETCHED)
LONG_TIMES = {name: MS // 25 * took for name, took in TIMES.items()}
AT_THE_LIMIT = Drawing(LONG_TIMES, STRETCHED)


class Bounds(NamedTuple):
    """Of a world: its programs, its plans by Paddle's baseline, and what no plan of it may pass."""

    programs: list[Program]
    stock: list[Plan]
    bound_ns: float
    firm_ns: float
    floors: Floors
    occupied: list[Floors]


@functools.cache
def bounds_of(pp: int, dp: int, micro_batches: int, costs: GivenCosts) -> Bounds:
    every = programs(World(pp=pp, mp=2, dp=dp, micro_batches=micro_batches, layers=3))
    stages = [program for program in every if program.rank % (2 * dp) == 0]
    stock = make_plans(every, load_config("baseline"), costs, "given")
    peaks = [in_order(plan.program).peak() for plan in stock][:: 2 * dp]
    firm_ns, own = firm_bound_ns(stages, costs, peaks), [occupied(program, costs) for program in stages]
    return Bounds(every, stock, bound_ns(stages, costs), firm_ns, floors_of(stages, costs), own)


def marks(form: str, pp: int) -> list[pytest.MarkDecorator]:
    """With three stages the search over forms runs in `make test-long`."""
    return [*[pytest.mark.slow] * (form == "auto" or pp > 2), *[pytest.mark.long] * (form == "auto" and pp > 2)]


@pytest.mark.parametrize("costs", [COSTS, AT_THE_LIMIT], ids=["full-clock", "limited"])
@pytest.mark.parametrize(
    ("form", "pp", "dp", "micro_batches"),
    [
        pytest.param(form, pp, dp, micro_batches, marks=marks(form, pp))
        for pp, dp, micro_batches in ((2, 1, 4), (2, 2, 4), (3, 1, 6))
        for form in ("stock", "dx-first", "mixed", "zb-h1", "auto")
    ],
)
def test_no_plan_passes_a_bound(form: str, pp: int, dp: int, micro_batches: int, costs: GivenCosts) -> None:
    known = bounds_of(pp, dp, micro_batches, costs)
    config = {"schedule_1f1b": {"interleave": form, "only_gains": False, "search": False}}
    plans = known.stock if form == "stock" else make_plans(known.programs, make_config(config), costs, "given")
    step_ns = simulate([plan.program for plan in plans], costs).step_ns
    assert known.bound_ns <= known.firm_ns <= step_ns
    floors = known.floors
    assert max(each.own for each in known.occupied) <= floors.own <= step_ns
    assert 1.02 * known.bound_ns < floors.own  # collectives and messages count something
    assert 0 < max(each.shared for each in known.occupied) <= floors.shared <= floors.own


def test_the_limit_of_power_raises_the_bound() -> None:
    """A stage that only computes, at once: its bound is near to its step, which takes 8 % longer than at the full clock."""
    alone = programs(World(micro_batches=8, layers=6))
    peaks = [in_order(each.program).peak() for each in make_plans(alone, load_config("baseline"), AT_THE_LIMIT, "given")]
    at_full_clock, limited = firm_bounds_ns(alone, AT_THE_LIMIT, peaks)
    plans = make_plans(alone, load_config("baseline"), AT_THE_LIMIT, "given")
    step_ns = simulate([plan.program for plan in plans], AT_THE_LIMIT).step_ns
    assert step_ns > 1.08 * at_full_clock
    assert step_ns > limited > 0.97 * step_ns


def test_collectives_of_gradients_raise_the_bound() -> None:
    """One in each micro-batch and one in the optimizer: by a part of their own time, as they may run beside computation."""
    (alone,) = programs(World(dp=2, micro_batches=4))[:1]
    before = {"backward": "#12 ", "optimize": "#14 "}
    talking = list[str]()
    for line in show(alone).splitlines():
        talking += [
            f"#{900 + k} %{900 + k}:float32[4,4] = pd_op.all_reduce(%11) {role} group=50"
            for k, (role, first) in enumerate(before.items())
            if line.startswith(first)
        ]
        talking.append(line)
    costs = Drawing(LONG_TIMES, {(kind, "comm"): (1.4, 1.6) for kind in ("gemm", "memory", "unknown")})
    found = []
    for program in (alone, parse("\n".join(talking))):
        stock = make_plans([program], load_config("baseline"), costs, "given")
        found.append(firm_bounds_ns([program], costs, [in_order(each.program).peak() for each in stock]))
        assert max(found[-1]) <= simulate([plan.program for plan in stock], costs, Options(peers_ready=True, power=True)).step_ns
    talk = next(op for op in program.ops if op.kind == "all_reduce")
    own = (4 + 1) * costs.op_time(talk, *tables_of(program)).dur_ns
    assert all(less < more < less + own for less, more in zip(*found, strict=True))


@pytest.mark.parametrize("narrow", ["on", "off"])
@pytest.mark.parametrize("form", ["off", "dx-first"])
def test_gathers_count_as_they_are_or_narrowed(form: str, narrow: str) -> None:
    """Whichever is less, and no plan of either kind passes the bound."""
    every = programs_of("pp2 mp2 sequence parallel, GQA")
    stages, costs = every[::2], GivenCosts({"pd_op.all_gather": 9000, "pd_op.all_to_all": 450, **TIMES}, STRETCHED)
    assert any(sites(Graph(program)) for program in stages)
    stock = make_plans(every, load_config("baseline"), costs, "given")
    peaks = [in_order(plan.program).peak() for plan in stock][::2]
    config = {"narrow_gathers": narrow, "schedule_1f1b": {"interleave": form, "only_gains": False, "search": False}}
    plans = make_plans(every, make_config(config), costs, "given")
    firm_ns = firm_bound_ns(stages, costs, peaks)
    assert firm_ns <= simulate([plan.program for plan in plans], costs).step_ns
    # with narrowed gathers that take longer, the bound is that of whole ones
    dear, dearer = (GivenCosts({"pd_op.all_gather": 9000, "pd_op.all_to_all": each, **TIMES}, STRETCHED) for each in (40_000, 90_000))
    assert firm_ns < firm_bound_ns(stages, dear, peaks) == firm_bound_ns(stages, dearer, peaks)


def test_each_kind_of_collectives_has_a_price_of_its_own() -> None:
    """50 ns beside which 100 ns of computation take a tenth longer, and 50 ns beside which they take twice as long. If each counted as one
    of the first kind, all would cost 9 ns; at best they cost 50 * 0.1 / 1.1 and 50 * 0.5."""
    ways = np.array([[1.1], [2.0]]), np.array([[1.0], [1.0]])
    kernel = Draw(0, 0.0)
    (prices,) = prices_of([kernel], None)
    for talk, least, most in (([50, 50], 29.0, 29.6), ([100, 0], 9.0, 9.1), ([0, 50], 25.0, 25.0)):
        assert least <= Hiding(np.array(talk), 0.0, [Computation(kernel, 100, *ways)]).cost(prices) <= most


KERNELS = {
    "pd_op.matmul": Draw(850_000, 0.6, 1860),
    "pd_op.relu": Draw(390_000, 0.05),
    "pd_op.gelu": Draw(620_000, 0.7),
    "pd_op.tanh": Draw(0, 0.0),
}


TALK = Draw(210_000, 0.0)


class Kernels(Drawing):
    """Operations that draw by their names."""

    def draw(self, op: Any, values: Any, groups: Any) -> Draw:
        return KERNELS.get(op.name, TALK)


REPEATED = 300
"""Steps after which the average of the shortest ends as it begins."""


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.tuples(st.sampled_from(sorted(KERNELS)), st.integers(1, 30)), min_size=1, max_size=8),
    took=st.lists(st.integers(MS // 2, 6 * MS), min_size=4, max_size=4),
    limit=st.integers(300, 900),
    talk=st.lists(st.tuples(st.integers(0, 200), st.booleans()), max_size=20),
    talk_ns=st.integers(MS, 30 * MS),
)
@example([("pd_op.matmul", 30), ("pd_op.matmul", 10)], [MS, 3 * MS, MS, MS], 400, [(0, True)] * 4, 39 * MS)
@example([("pd_op.matmul", 30), ("pd_op.matmul", 10)], [MS, 3 * MS, MS, MS], 300, [(0, True)] * 4, 45 * MS)
def test_no_order_of_kernels_costs_less_than_its_prices(
    parts: list[tuple[str, int]], took: list[int], limit: int, talk: list[tuple[int, bool]], talk_ns: int
) -> None:
    """Runs of kernels of each kind, hot and cold in turn, with collectives on the same stream or beside them, in a step that is repeated
    until it ends as it began, or many times."""
    names = [name for name, count in parts for _ in range(count)]
    ops = [f"#{10 + k} %{10 + k}:float32[2] = {name}(%0{', %0' * (name == 'pd_op.matmul')}) forward" for k, name in enumerate(names)]
    order = [f"{10 + k}@0" for k in range(len(names))]
    for k, (place, beside) in enumerate(talk):
        stream = ' stream="auto_parallel_mp"' * beside
        ops.append(f"#{1000 + k} %{1000 + k}:float32[2] = pd_op.all_reduce(%0) forward group=7{stream}")
        order.insert(place, f"{1000 + k}@0")
    times = dict(zip(sorted(KERNELS), took, strict=True))
    costs = Kernels({**times, "comm": talk_ns})
    costs.limit = msgspec.structs.replace(POWER, limit_w=limit)
    text = "group 7 = 0,1\n" * bool(talk) + "\n".join(ops)
    sim = lower([rank(text, f"job all forward 0: {' '.join(order)}")], costs, Options(power=True, peers_ready=True))
    trace, steps = PowerTrace.begin(1), []
    for _ in range(REPEATED):
        before, trace = trace.mean, again(trace)
        steps.append(int(Simulation(sim, trace).run()[2].max()))
        if (before == trace.mean).all():
            steps = steps[-1:]
            break
    step_ns = statistics.fmean(steps[-REPEATED // 2 :])  # of many where short steps of different clocks take turns
    computation = {KERNELS[name]: times[name] * names.count(name) for name in set(names)}
    milliwatts = least_milliwatts(TALK, costs.limit) if talk else 0.0
    ways = np.ones((1, 1)), np.ones((1, 1))  # nothing slows down beside a collective, nor collectives beside computation
    beside = [Computation(draw, each, *ways) for draw, each in computation.items()]
    hiding = Hiding(np.array([talk_ns * len(talk)]), talk_ns * len(talk) * milliwatts, beside)
    every = [*prices_of(sorted(KERNELS.values()), costs.limit, milliwatts)]
    bounds = [prices.total(computation) + hiding.cost(prices) - prices.ends for prices in every]
    assert bounds[0] == pytest.approx(max(sum(computation.values()), talk_ns * len(talk)), rel=1e-9)
    assert max(bounds) <= step_ns


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(world=worlds(), gemm=st.integers(1, 200), comm=st.integers(1, 400), stretch=st.floats(1.0, 1.9), beside=st.floats(1.0, 1.9))
def test_no_plan_of_a_random_world_passes_the_floor(world: World, gemm: int, comm: int, stretch: float, beside: float) -> None:
    """Plans that are right by construction, with streams, pairs and copies, of which no planner has thought."""
    costs = GivenCosts({"comm": comm, "gemm": gemm, "pd_op.matmul_grad": 2 * gemm, "default": 10}, {("gemm", "comm"): (stretch, beside)})
    step_ns = simulate(plan(world), costs).step_ns
    stages = [each for each in programs(world) if each.rank % (world.mp * world.dp) == 0]
    assert floors_of(stages, costs).own <= step_ns
