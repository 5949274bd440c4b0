"""Power in the simulator: engines agree, an unlimited device is today's, a step at its limit takes its energy over the limit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.cost_model.base import Draw
from interlace.cost_model.power import PowerSamples
from interlace.cost_model.profile import Power, PowerSample, load_profile
from interlace.cost_model.work import Part
from interlace.errors import PlanError
from interlace.ir import Program
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.lower import lower
from interlace.scheduler.simulate.power import TICK_NS, PowerTrace
from interlace.scheduler.simulate.simulator import Engine, Result, Simulation, run
from tests.drawing import DRAWS, MS, POWER, Drawing, again
from tests.scheduler.plans import Shape, rank, shapes, world

fast = pytest.importorskip("interlace.scheduler.simulate.compiled")

ROOT = Path(__file__).resolve().parents[2]
STRETCHED = {
    ("gemm", "comm"): (1.5, 2.0),
    ("memory", "comm"): (1.2, 1.7),
    ("copy:d2h", "copy:h2d"): (1.4, 1.4),
    ("gemm", "wait"): (1.3, 1.0),
}
PRODUCT = Draw(850_000, 0.6)
"""One that runs at the highest clock where there is room for it."""


def costs(limit: Power | None = POWER, **times: int) -> Drawing:
    """Operations of milliseconds, so that limiters look several times at each."""
    found = Drawing({"comm": 3 * MS, "p2p": MS, "gemm": 9 * MS, "copy": 2 * MS, "default": MS, **times}, STRETCHED, 1000, 5000)
    found.limit = limit
    return found


def simulated(programs: Sequence[Program], cost: Drawing, engine: str = "plain", power: bool = True) -> Result:
    return run(lower(programs, cost, Options(power=power, peers_ready=True)), engine=engine, with_memory=False)  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(shapes(), st.integers(200, 900), st.integers(1, 200), st.sampled_from([0.0, 0.1, 0.9]))
def test_both_engines_find_the_same_times_clocks_and_energy(shape: Shape, limit: int, response_ms: int, left: float) -> None:
    limited = msgspec.structs.replace(POWER, limit_w=limit, response_ns=response_ms * MS)
    sim = lower(world(shape), costs(limited), Options(power=True, peers_ready=True))
    sim.tail = np.random.default_rng(response_ms).random(sim.num_items) < left if left else None
    plain, compiled = PowerTrace.begin(len(sim.ranks)), PowerTrace.begin(len(sim.ranks))
    for _ in range(2):
        plain, compiled = again(plain), again(compiled)
        for mine, other in zip(Simulation(sim, plain).run(), fast.run_items(sim, compiled), strict=True):
            assert (mine == other).all()
        for name in ("level", "mean", "spent"):
            assert (getattr(plain, name) == getattr(compiled, name)).all(), name
        assert sorted(plain.changes.T.tolist()) == sorted(compiled.changes.T.tolist())


@settings(max_examples=30, deadline=None)
@given(shapes())
def test_with_an_unlimited_device_times_are_those_without_power(shape: Shape) -> None:
    programs = world(shape)
    free = msgspec.structs.replace(POWER, limit_w=1e9)
    for engine in ("plain", "fast"):
        with_power, without = simulated(programs, costs(free), engine), simulated(programs, costs(free), engine, power=False)
        for name in ("issue", "ready", "start", "end"):
            assert (getattr(with_power.times, name) == getattr(without.times, name)).all()
        assert len(with_power.joules) == len(programs)
        assert without.joules == []


def products(count: int, cost_ns: int, gap_ns: int = 0) -> tuple[list[Program], Drawing]:
    """One rank that computes products one after another; behind each, something that draws nothing for `gap_ns`."""
    ops, items = [], []
    for k in range(count):
        at = 10 + 3 * k
        ops += [f"#{at} %{at}:float32[2] = pd_op.matmul(%0, %0) forward", f"#{at + 1} %{at + 1}:float32[2] = pd_op.relu(%{at}) forward"]
        items += [f"{at}@0"] + ([f"{at + 1}@0"] if gap_ns else [])
    program = rank("\n".join(ops), f"job all forward 0: {' '.join(items)}")
    found = costs(matmul=cost_ns, relu=gap_ns)
    found.draws = {"gemm": PRODUCT}
    return [program], found


def test_a_step_at_the_limit_takes_its_energy_over_the_limit() -> None:
    found = simulated(*products(400, 5 * MS), "fast")
    assert found.joules[0] / (found.step_ns / 1e9) == pytest.approx(700, rel=0.01)
    assert found.step_ns > 400 * 5 * MS * 1.1
    assert 1300 < found.mean_mhz(0) < 1800
    when, mhz = found.mhz(0)
    assert when[0] == 0
    assert (np.diff(when) > 0).all()
    assert when[-1] < found.step_ns
    assert set(mhz.tolist()) <= set(range(345, 1981, 15))
    spans = np.diff([*when.tolist(), found.step_ns])
    assert found.mean_mhz(0) == pytest.approx(float((spans * mhz).sum()) / found.step_ns)


def test_below_the_limit_the_clock_stays_and_energy_is_what_was_drawn() -> None:
    programs, cost = products(200, MS, gap_ns=MS)
    found = simulated(programs, cost, "fast")
    assert found.mean_mhz(0) == 1980
    assert found.step_ns < 200 * 2 * MS * 1.01
    assert found.joules[0] == pytest.approx(0.2 * 850 + 150 * found.step_ns / 1e9, rel=0.001)


def test_a_product_with_a_clock_of_its_own_is_stretched_only_below_it() -> None:
    """Its time is of that clock: with room below the limit it takes that time, and draws what it draws there."""
    programs, cost = products(200, MS, gap_ns=MS)
    cost.draws = {"gemm": DRAWS["gemm"]}
    found = simulated(programs, cost, "fast")
    slower, cooler = 1 + 0.6 * (1980 / 1860 - 1), (1860 / 1980) ** 1.2
    assert found.step_ns < 200 * 2 * MS * 1.001
    assert found.joules[0] == pytest.approx(0.2 * 850 / slower * cooler + 150 * found.step_ns / 1e9, rel=0.001)


def test_below_its_own_clock_a_product_takes_what_one_takes_that_was_timed_at_the_highest() -> None:
    """The same kernel, held at the limit: timed at 1860 MHz, and timed at 1980 MHz."""
    slower = 1 + 0.6 * (1980 / 1860 - 1)
    highest, own = products(400, 5 * MS), products(400, round(slower * 5 * MS))
    own[1].draws = {"gemm": DRAWS["gemm"]}
    one, other = (simulated(*each, "fast") for each in (highest, own))
    assert other.step_ns == pytest.approx(one.step_ns, rel=0.002)
    assert other.joules[0] == pytest.approx(one.joules[0], rel=0.002)


def test_hiding_waits_at_the_limit_saves_time_as_it_saves_energy_and_less_than_the_waits() -> None:
    """The same products with waits between them that draw nothing, and without."""
    waiting, dense = (simulated(*products(400, 5 * MS, gap), "fast") for gap in (MS, 0))
    assert dense.step_ns / waiting.step_ns == pytest.approx(dense.joules[0] / waiting.joules[0], rel=0.01)
    assert 0 < waiting.step_ns - dense.step_ns < 0.8 * 400 * MS


def test_time_that_does_not_follow_the_clock_is_not_stretched() -> None:
    programs, cost = products(400, 5 * MS)
    cost.draws = {"gemm": Draw(850_000, 0.0)}
    assert simulated(programs, cost, "fast").step_ns < 400 * 5 * MS * 1.001


def test_the_clock_falls_within_some_time_constants_and_the_next_step_begins_with_it() -> None:
    found = simulated(*products(100, 5 * MS), "fast")
    when, _, levels = found.power.changes
    assert levels[0] > 0, "the step before left the device at its limit"
    sim = lower(products(100, 5 * MS)[0], products(100, 5 * MS)[1], Options(power=True))
    cold = PowerTrace.begin(1)
    fast.run_items(sim, cold)
    fell = cold.changes[0][1]
    assert TICK_NS <= fell <= 2 * POWER.response_ns
    assert when[0] == 0


@pytest.mark.parametrize("engine", ["plain", "fast"])
def test_the_next_step_begins_with_the_clock_of_its_start_not_of_when_copies_to_the_host_are_done(engine: Engine) -> None:
    sim = lower(*products(100, 5 * MS, 1000), Options(power=True))
    copied = sim.dur.copy()
    copied[-1] = 400 * MS
    expected = run(sim, engine=engine, with_memory=False)
    found = run(replace(sim, dur=copied, tail=np.arange(sim.num_items) == sim.num_items - 1), engine=engine, with_memory=False)
    assert found.step_ns < found.times.end[-1] - 300 * MS
    assert found.power.changes.tolist() == expected.power.changes.tolist()
    assert found.times.start.tolist() == expected.times.start.tolist()


def in_the_long_run(programs: Sequence[Program], cost: Drawing, num_steps: int = 120) -> tuple[float, float]:
    """Step after step, each beginning as the one before ended: the mean of the last third, and by how much of it they differ."""
    sim, took = lower(programs, cost, Options(power=True, peers_ready=True)), list[int]()
    trace = PowerTrace.begin(len(sim.ranks))
    for _ in range(num_steps):
        trace = again(trace)
        took.append(int(fast.run_items(sim, trace)[2].max()))
    last = took[-num_steps // 3 :]
    return sum(last) / len(last), (max(last) - min(last)) / min(last)


@pytest.mark.parametrize(("count", "gap_ns"), [(1, 0), (4, 0), (16, 0), (2, MS), (4, MS), (8, 2 * MS), (30, 2 * MS)])
def test_a_short_step_is_as_warm_as_the_steps_before_it_made_the_device(count: int, gap_ns: int) -> None:
    """Steps of less than the time constant begin at the limit, too; where the clock changes from step to step (4 and 8 products with
    gaps), one of these steps stands for all."""
    given = products(count, 5 * MS, gap_ns)
    mean_ns, differ = in_the_long_run(*given)
    assert differ < 0.008
    assert mean_ns > count * (5 * MS + gap_ns) * 1.02
    for engine in ("plain", "fast"):
        assert simulated(*given, engine).step_ns == pytest.approx(mean_ns, rel=0.007)


@settings(max_examples=25, deadline=None)
@given(shapes(), st.integers(250, 900), st.integers(2, 120))
def test_any_step_takes_what_it_takes_in_the_long_run(shape: Shape, limit: int, response_ms: int) -> None:
    cost = costs(msgspec.structs.replace(POWER, limit_w=limit, response_ns=response_ms * MS))
    mean_ns, differ = in_the_long_run(world(shape), cost)
    plain, compiled = (simulated(world(shape), cost, engine) for engine in ("plain", "fast"))
    assert plain.step_ns == compiled.step_ns == pytest.approx(mean_ns, rel=0.01 + differ)
    assert plain.joules == compiled.joules


def test_a_rank_that_waits_for_another_draws_what_waiting_draws() -> None:
    """Two ranks, one collective, one rank late: the other draws its waiting power meanwhile."""
    groups = "group 0=0,1\n"
    late = rank(
        "#1 %1:float32[2] = pd_op.matmul(%0, %0) forward\n#2 %2:float32[2] = pd_op.all_reduce(%1) forward group=0",
        "job all forward 0: 1@0 2@0",
        0,
        2,
        groups,
    )
    early = rank("#2 %2:float32[2] = pd_op.all_reduce(%0) forward group=0", "job all forward 0: 2@0", 1, 2, groups)
    cost = costs(matmul=100 * MS, all_reduce=10 * MS)
    found = simulated([late, early], cost)
    static, waited = 150 * found.step_ns / 1e9, 10 * 0.1
    assert found.joules[1] == pytest.approx(static + waited + 150 * 0.01, rel=0.01)


@pytest.mark.parametrize("engine", ["plain", "fast"])
def test_a_communication_beside_computation_draws_more_than_both_alone(engine: Engine) -> None:
    """30 ms of an addition, stretched 1.2 times beside a longer all_reduce, below the limit: so long each device draws `beside_w` more."""
    text = '#1 %1:float32[2] = pd_op.add(%0, %0) forward\n#2 %2:float32[2] = pd_op.all_reduce(%0) forward group=0 stream="mp"'
    programs = [rank(text, "job all forward 0: 2@0 1@0", at, 2, "group 0=0,1\n") for at in range(2)]
    found = []
    for watts in (0.0, 30.0):
        cost = costs(msgspec.structs.replace(POWER, beside_w=watts), add=30 * MS, all_reduce=60 * MS)
        cost.draws = {"add": Draw(390_000, 0.05), "comm": Draw(150_000, 0.0)}
        found.append(simulated(programs, cost, engine))
    assert [result.mean_mhz(0) for result in found] == [1980, 1980]
    without, with_it = (result.joules[0] for result in found)
    assert with_it - without == pytest.approx(30 * 1.2 * 0.03, rel=0.001)


def test_a_clock_that_is_not_known_is_not_made_up() -> None:
    found = simulated(*products(2, MS), power=False)
    with pytest.raises(PlanError, match="without a power limit"):
        found.mean_mhz(0)


@pytest.mark.parametrize("device", ["h100", "h200"])
@pytest.mark.parametrize("busy", [1.0, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.75, 0.5))])
def test_measured_products_come_back_with_their_clock_and_energy(device: str, busy: float) -> None:
    """`power_kinds.json`: products repeated without and with gaps, on two GPUs each."""
    raw = json.loads((ROOT / "benchmarks" / "results" / device / "power_kinds.json").read_text())
    power = load_profile(device).power
    assert power is not None
    for kind, flops in (("gemm 8192x8192x8192", 2 * 8192**3), ("gemm 4096x4096x4096", 2 * 4096**3)):
        rows = [row for gpu in raw["gpus"] for row in gpu["windows"] if (row["kind"], row["busy"]) == (kind, busy)]
        fastest = min(row["us"] for gpu in raw["gpus"] for row in gpu["windows"] if row["kind"] == kind)
        part = Part("gemm", "gemm", "bfloat16", (), flops, 0)
        chunk_ns = round(1000 * fastest * rows[0]["count"])
        gap_ns = round(1e6 * median(row["every_ms"] - row["chunk_ms"] for row in rows))
        programs, cost = products(600, chunk_ns, gap_ns)
        drawn = PowerSamples(power).of(part)._replace(own_mhz=0)  # these are times at the highest clock
        cost.limit, cost.draws = power, {"gemm": drawn}
        found = simulated(programs, cost, "fast")
        measured = {name: median(row[name] for row in rows) for name in ("every_ms", "mhz")}
        watts = median(row["nvml_watts"] for row in rows)
        assert found.step_ns / 600 / 1e6 == pytest.approx(measured["every_ms"], rel=0.06), kind
        assert found.mean_mhz(0) == pytest.approx(measured["mhz"], rel=0.09), kind
        assert found.joules[0] / (found.step_ns / 1e9) == pytest.approx(watts, rel=0.08), kind


def test_what_is_drawn_is_found_by_kind_and_size() -> None:
    samples = (
        PowerSample("gemm", 1 << 40, 850, 0.6),
        PowerSample("gemm", 1 << 30, 600, 0.7),
        PowerSample("add", 1 << 28, 390),
        PowerSample("shortest", 256, 10, 0.3),
        PowerSample("all_reduce", 1 << 27, 150),
    )
    drawn = PowerSamples(msgspec.structs.replace(POWER, samples=samples))
    assert drawn.of(Part("gemm", "gemm", "bfloat16", (), 1 << 40, 1)) == Draw(850_000, 0.6, 1980)
    assert 600_000 < drawn.of(Part("gemm", "gemm", "bfloat16", (), 1 << 35, 1)).milliwatts < 850_000
    assert drawn.of(Part("gemm", "gemm", "bfloat16", (), 1 << 50, 1)).milliwatts == 850_000, "beyond the samples, as the nearest"
    assert drawn.of(Part("tanh", "elementwise", "bfloat16", (), 0, 1 << 28)).milliwatts == 390_000, "no sample: as an addition"
    assert 10_000 < drawn.of(Part("tanh", "elementwise", "bfloat16", (), 0, 1 << 16)).milliwatts < 390_000
    assert drawn.of(Part("broadcast", "comm", "bfloat16", (), 0, 1 << 27)) == Draw(150_000, 0.0, 1980)
    assert drawn.of(Part("gemm_batched", "gemm", "bfloat16", (), 1 << 40, 1)).milliwatts == 850_000
