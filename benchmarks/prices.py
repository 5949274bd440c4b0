"""What computation costs at least on a device at its limit of power: a price for each nanosecond of it, at whatever clock it runs.

The limiter of the simulator (`interlace/scheduler/simulate/power.py`) follows an average m of what is drawn, as if at the highest clock: in
a tick in which d is drawn m becomes m + r (d - m), and the next tick has the highest clock at which m keeps the limit. Let G be rising and
concave. Over a step that begins as it ends the changes of G add up to nothing, so as many ticks pass as the sum of

    1 + (G(m + r (d - m)) - G(m)) / r.

d is the mean, by time, of what runs in the tick: s for a kernel that draws s at the clock of m, and 0 while nothing is computed; what
collectives draw only adds. As G is concave, a nanosecond of a kernel, which the clock of m stretches t times, counts no less than

    t (1 + (G(m + r (s - m)) - G(m)) / r),

and one in which nothing is computed the same with s = 0 and t = 1. The least over all m is its price, and what a rank must do, at these
prices, is no more than its step. Every G gives such a bound; those of `SLOPES`, `BENDS` and `CURVES` are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from interlace.cost_model.base import Draw
from interlace.cost_model.profile import Power
from interlace.scheduler.simulate.arrays import ONE
from interlace.scheduler.simulate.power import TICK_NS, PowerInput

SLOPES, BENDS, CURVES = (0.2, 0.3, 0.4, 0.5, 0.6), (1.1, 1.2, 1.3, 1.4, 1.5), (0.0, 0.4, 0.7, 0.9)
"""G is a line, up to a bend, and a logarithm beyond: its slope there over the room below the limit, where it bends, in parts of the room,
and where its logarithm is infinite, in parts of the bend."""
WIDE = 0.004
"""Part of the room that a cell of averages spans, at most."""
MOST = 2
"""Times the average that computation alone can bring about: what runs beside it, collectives of several groups at most, draws less."""
ROUNDED = 1e-4
"""Part of the price for what the limiter rounds to whole milliwatts."""


Floats = npt.NDArray[np.float64]
Levels = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prices:
    """What counts for a nanosecond.

    Attributes:
        of: Of computation, by what it draws.
        idle: Of one in which nothing is computed.
        at_once: Nanoseconds that may not count, once, of a time in which nothing is computed for long, and the average falls to nothing.
        ends: Nanoseconds that may not count in a step: what is drawn after the last tick, and an average that ends elsewhere within the
            same clock.
    """

    of: Mapping[Draw, float]
    idle: float = 1.0
    at_once: float = 0.0
    ends: float = 0.0

    def total(self, computation: Mapping[Draw, int]) -> float:
        """What some computation counts."""
        return sum(took * self.of[draw] for draw, took in computation.items())

    def waited(self, ns: float) -> float:
        """What a time counts in which nothing is computed."""
        return max(self.idle * ns, ns - self.at_once)


def prices_of(draws: Sequence[Draw], power: Power | None) -> Iterator[Prices]:
    """The full clock, at which everything counts what it takes; then, where the limit is known, those of each G."""
    yield Prices(dict.fromkeys(draws, 1.0))
    if power is not None:
        limited = _Limited(draws, power)
        for slope in SLOPES:
            for bend in BENDS:
                for curve in CURVES:
                    yield limited.prices(slope / limited.room, bend * limited.room, curve * bend * limited.room)


class _Limited:
    """Kernels at each average that the limiter may have, in cells of one clock. `[num_draws, num_cells]` each.

    Attributes:
        stretch: How much longer each takes at that clock.
        drawn: What it then draws.
        low, high: The ends of each cell.
        edges: The highest average of each clock.
        top: The highest of all.
    """

    def __init__(self, draws: Sequence[Draw], power: Power) -> None:
        columns = [np.array([round(scale * each[k]) for each in draws], np.int64) for k, scale in enumerate((1, ONE, 1))]
        given = PowerInput.of(power, *columns, np.zeros(len(draws), np.bool_))
        self.draws, self.rate, self.room = draws, given.response / ONE, float(given.limit_mw - given.static_mw)
        load, slower, levels = given.clocks.load / ONE, given.clocks.slower, np.arange(len(given.clocks.mhz))

        def at(level: Levels) -> tuple[Floats, Floats]:
            clock = np.maximum(given.own[:, None], level[None])
            stretch = 1 + given.share[:, None] * (slower[clock] - slower[given.own][:, None]) / ONE**2
            return stretch, given.draw[:, None] * (given.clocks.energy[clock] / ONE) / load[level] / stretch

        hottest = at(levels)[1].max(axis=0)
        rises = hottest > self.room / load  # and lowers the clock further, down to the lowest
        self.top = MOST * float(np.maximum(hottest, self.room / load)[-1 if rises.all() else int(np.argmin(rises))])
        self.edges = np.minimum(np.r_[self.room / load[:-1], self.top], self.top)
        ends = zip(np.r_[0.0, self.edges[:-1]], self.edges, strict=True)
        spans = [np.linspace(low, high, 2 + int((high - low) / (WIDE * self.room))) for low, high in ends if low < high]
        self.low, self.high = (np.concatenate([span[part] for span in spans]) for part in (slice(-1), slice(1, None)))
        self.stretch, self.drawn = at(np.repeat(levels[: len(spans)], [len(span) - 1 for span in spans]))

    def prices(self, slope: float, bend: float, pole: float) -> Prices:
        """With the G that rises by `slope` up to `bend`, and as a logarithm beyond."""

        def potential(mean: Floats) -> Floats:
            far = np.maximum(mean - pole, bend - pole)
            found: Floats = slope * (np.minimum(mean, bend) + (bend - pole) * np.log(far / (bend - pole)))
            return found

        def rises(mean: Floats) -> Floats:
            return slope * (bend - pole) / np.maximum(mean - pole, bend - pole)

        def least(drawn: Floats) -> Floats:
            """The least of what a nanosecond counts in each cell: at one of its ends, but where it may fall and rise within."""
            after_low, after_high = (mean + self.rate * (drawn - mean) for mean in (self.low, self.high))
            ends = np.minimum(potential(after_low) - potential(self.low), potential(after_high) - potential(self.high))
            falls = rises(self.low) - (1 - self.rate) * rises(after_high)
            grows = (1 - self.rate) * rises(after_low) - rises(self.high)
            within = np.maximum(0, np.minimum(falls, grows)) * (self.high - self.low)
            found: Floats = 1 + (ends - within) / self.rate
            return found

        of = (self.stretch * least(self.drawn)).min(axis=1) * (1 - ROUNDED)
        idle = min(1.0, float(least(np.zeros(1)).min())) * (1 - ROUNDED)
        ticks = 1 + float(potential(np.array(self.top))) / self.rate
        ends = max(0.0, float(of.max()) - 1) + float(np.diff(potential(self.edges)).max()) / self.rate
        return Prices(dict(zip(self.draws, of.tolist(), strict=True)), idle, ticks * TICK_NS, ends * TICK_NS)
