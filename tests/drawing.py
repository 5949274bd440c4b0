"""Costs made by hand that draw power, for tests of the limiter and of what is bounded by it."""

from __future__ import annotations

import numpy as np

from interlace.cost_model.base import Draw, GivenCosts, Groups
from interlace.cost_model.profile import Power
from interlace.cost_model.work import Values
from interlace.ir.program import Op
from interlace.scheduler.simulate.power import PowerTrace

POWER = Power(
    limit_w=700,
    static_w=150,
    waiting_w=10,
    beside_w=30,
    highest_mhz=1980,
    lowest_mhz=345,
    step_mhz=15,
    response_ns=40_000_000,
    energy_exponent=1.2,
)
MS = 1_000_000
DRAWS = {"gemm": Draw(850_000, 0.6, 1860), "memory": Draw(390_000, 0.05), "comm": Draw(150_000, 0.0)}


class Drawing(GivenCosts):
    """Given times, and what operations draw by the first word of their category."""

    limit: Power | None = POWER
    draws = DRAWS

    def power(self) -> Power | None:
        return self.limit

    def draw(self, op: Op, values: Values, groups: Groups) -> Draw:
        return self.draws.get(self.category(op, values, groups).partition(":")[0], Draw(0, 0.0))


def again(trace: PowerTrace) -> PowerTrace:
    """Of the next step, which begins where this one ended."""
    return PowerTrace(trace.level.copy(), trace.mean.copy(), np.zeros_like(trace.spent))
