"""Power in the simulator: engines agree, an unlimited device is today's, a step at its limit takes its energy over the limit."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.cost_model.base import Draw, GivenCosts, Groups
from interlace.cost_model.profile import Power, PowerSample
from interlace.cost_model.work import Values
from interlace.ir import Program
from interlace.ir.program import Op
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.lower import lower
from interlace.scheduler.simulate.power import TICK_NS, PowerTrace
from interlace.scheduler.simulate.simulator import Result, Simulation, run
from tests.scheduler.plans import Shape, shapes, world

fast = pytest.importorskip("interlace.scheduler.simulate.compiled")

POWER = Power(limit_w=700, static_w=150, waiting_w=10, highest_mhz=1980, lowest_mhz=345, step_mhz=15, response_ns=40_000_000, energy_exponent=1.2)
MS = 1_000_000
STRETCHED = {("gemm", "comm"): (1.5, 2.0), ("memory", "comm"): (1.2, 1.7), ("copy:d2h", "copy:h2d"): (1.4, 1.4), ("gemm", "wait"): (1.3, 1.0)}
DRAWS = {"gemm": Draw(850_000, 0.6), "memory": Draw(390_000, 0.05), "comm": Draw(150_000, 0.0)}


class Drawing(GivenCosts):
    """Given times, and what operations draw by the first word of their category."""

    limit: Power | None = POWER
    draws = DRAWS

    def power(self) -> Power | None:
        return self.limit

    def draw(self, op: Op, values: Values, groups: Groups) -> Draw:
        return self.draws.get(self.category(op, values, groups).partition(":")[0], Draw(0, 0.0))


def costs(limit: Power | None = POWER, **times: int) -> Drawing:
    """Operations of milliseconds, so that limiters look several times at each."""
    found = Drawing({"comm": 3 * MS, "p2p": MS, "gemm": 9 * MS, "copy": 2 * MS, "default": MS, **times}, STRETCHED, 1000, 5000)
    found.limit = limit
    return found


def simulated(programs: Sequence[Program], cost: Drawing, engine: str = "plain", power: bool = True) -> Result:
    return run(lower(programs, cost, Options(power=power, peers_ready=True)), engine=engine, with_memory=False)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(shapes(), st.integers(200, 900), st.integers(1, 200))
def test_both_engines_find_the_same_times_clocks_and_energy(shape: Shape, limit: int, response_ms: int) -> None:
    limited = msgspec.structs.replace(POWER, limit_w=limit, response_ns=response_ms * MS)
    sim = lower(world(shape), costs(limited), Options(power=True, peers_ready=True))
    plain, compiled = PowerTrace.begin(len(sim.ranks)), PowerTrace.begin(len(sim.ranks))
    for _ in range(2):
        plain, compiled = plain.again(), compiled.again()
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
