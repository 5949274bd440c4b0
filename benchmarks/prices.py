"""The least cost of computation on a device at its power limit: a price for each nanosecond of it, whatever its clock.

The limiter of the simulator (`interlace/scheduler/simulate/power.py`) follows an average m of the power at the highest clock: in a tick
with power d, m becomes m + r (d - m), and the next tick has the highest clock at which m is within the limit. Let G be increasing and
concave. Over a step that ends in the state in which it began, the changes of G add up to zero, so the number of ticks is the sum of

    1 + (G(m + r (d - m)) - G(m)) / r.

d is the mean power over the tick: s for a kernel with power s at the clock of m, and 0 while nothing is computed, plus c for
communication. As G is concave, a nanosecond of a kernel, which takes t times as long at the clock of m, counts at least

    f(c) = t (1 + (G(m + r (s + c - m)) - G(m)) / r),

and one in which nothing is computed the same with s = 0 and t = 1. The minimum of f(0) over all m is its price. f is concave too, so if C
is the most power of communication, f(c) is at least this price plus c t times the price of energy: the minimum over all kernels and m of
what f(C) is above the kernel's price, divided by C t. The work of a rank and the energy of its communication at these prices are a lower
bound of its step. A kernel beside which collectives run takes t + e times its time, where e is what they add; the time e counts as one in
which nothing is computed. What is done meanwhile depends on t, so that m is chosen for both together (`Prices.beside`).

(The simulator's limiter also rests while a stage waits for its first value, in which a device would finish the step before; such a
simulated step may be shorter.) Every G gives a bound; those of `SLOPES`, `BENDS` and `CURVES` are tried.
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
"""G is linear up to a bend, and a logarithm beyond it. These are its linear slope, relative to the room below the limit; the place of the
bend, in parts of the room; and the pole of the logarithm, in parts of the bend."""
WIDE = 0.004
"""Largest part of the room that a cell of averages spans."""
MOST = 2
"""Highest average as a multiple of that of computation alone: what can run beside it, at most collectives of several groups, draws less."""
ROUNDED = 1e-4
"""Part of the price that covers the limiter's rounding to milliwatts."""


Floats = npt.NDArray[np.float64]
Levels = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of a nanosecond.

    Attributes:
        counts, stretch: What a nanosecond of computation counts at least at each clock, by its power, and by which factor it takes longer
            then. `[num_clocks]`
        idle: Price while nothing is computed.
        energy: Price of a milliwatt of communication for a nanosecond.
        both: Price of a nanosecond for what is drawn beyond computation and communication while both run.
        at_once: Nanoseconds of a long time without computation that may not count, once, as the average falls to zero.
        ends: Nanoseconds of a step that may not count, because of the power after the last tick, and of an average that ends elsewhere
            within the same clock.
    """

    counts: Mapping[Draw, Floats]
    stretch: Mapping[Draw, Floats]
    idle: float = 1.0
    energy: float = 0.0
    both: float = 0.0
    at_once: float = 0.0
    ends: float = 0.0

    def of(self, draw: Draw) -> float:
        """Price of a nanosecond of computation."""
        return float(self.counts[draw].min())

    def beside(self, draw: Draw, slower: Floats, done: Floats, price: Floats) -> Floats:
        """Least price of a nanosecond of computation beside which collectives run, less the price of what is done of these.

        Args:
            slower: Factor by which the computation takes longer beside them, for several ways. `[num_ways]`
            done: How much of the collectives' own time is done in a nanosecond. `[num_ways]`
            price: Prices of a nanosecond of collectives. `[num_prices]`

        Returns: `[num_prices, num_ways]`
        """
        each = self.both - price[:, None] * done
        found: Floats = (self.counts[draw] + each[..., None] * self.stretch[draw]).min(axis=-1) + (slower - 1) * (self.idle + each)
        return found

    def total(self, computation: Mapping[Draw, int]) -> float:
        """The price of some computation, in nanoseconds."""
        return sum(took * self.of(draw) for draw, took in computation.items())

    def waited(self, ns: float) -> float:
        """The price of a time during which nothing is computed, in nanoseconds."""
        return max(self.idle * ns, ns - self.at_once)


def prices_of(draws: Sequence[Draw], power: Power | None, comm_mw: float = 0.0) -> Iterator[Prices]:
    """First the prices at the full clock, at which everything counts as long as it takes; then, if the limit is known, those of each G.
    `comm_mw` is the most power that communication draws at a time (`least_milliwatts`)."""
    yield Prices(dict.fromkeys(draws, np.ones(1)), dict.fromkeys(draws, np.ones(1)))
    if power is not None:
        limited = _Limited(draws, power, comm_mw)
        for slope in SLOPES:
            for bend in BENDS:
                for curve in CURVES:
                    yield limited.prices(slope / limited.room, bend * limited.room, curve * bend * limited.room)


def least_milliwatts(draw: Draw, power: Power | None) -> float:
    """Power of a communication as the limiter averages it, at the clock at which that is least; 0 if the limit is not known."""
    if power is None:
        return 0.0
    given = PowerInput.of(power, *_columns([draw]), np.zeros(1, np.bool_))
    levels = np.arange(len(given.clocks.mhz))
    return float(given.draw[0] * (given.clocks.energy[np.maximum(given.own[0], levels)] / given.clocks.load).min())


def _columns(draws: Sequence[Draw]) -> list[Levels]:
    return [np.array([round(scale * each[k]) for each in draws], np.int64) for k, scale in enumerate((1, ONE, 1))]


class _Limited:
    """Kernels at each possible average of the limiter, in cells of one clock each. Arrays of kernels are `[num_draws, num_cells]`.

    Attributes:
        stretch: Factor by which each kernel takes longer at that clock.
        drawn: Its power at that clock.
        low, high: The ends of each cell.
        starts: The first cell of each clock.
        edges: The highest average of each clock.
        top: The highest of all.
        comm_mw: The most power of communication, what is drawn beside computation included.
    """

    def __init__(self, draws: Sequence[Draw], power: Power, comm_mw: float) -> None:
        given = PowerInput.of(power, *_columns(draws), np.zeros(len(draws), np.bool_))
        self.beside_mw, self.comm_mw = given.beside_mw, comm_mw + given.beside_mw
        self.draws, self.rate, self.room = draws, given.response / ONE, float(given.limit_mw - given.static_mw)
        load, slower, levels = given.clocks.load / ONE, given.clocks.slower, np.arange(len(given.clocks.mhz))

        def at(level: Levels) -> tuple[Floats, Floats]:
            clock = np.maximum(given.own[:, None], level[None])
            stretch = 1 + given.share[:, None] * (slower[clock] - slower[given.own][:, None]) / ONE**2
            return stretch, given.draw[:, None] * (given.clocks.energy[clock] / ONE) / load[level] / stretch

        hottest = at(levels)[1].max(axis=0)
        rises = hottest > self.room / load  # the clock is then lowered further, down to the lowest
        self.top = MOST * float(np.maximum(hottest, self.room / load)[-1 if rises.all() else int(np.argmin(rises))])
        self.edges = np.minimum(np.r_[self.room / load[:-1], self.top], self.top)
        ends = zip(np.r_[0.0, self.edges[:-1]], self.edges, strict=True)
        spans = [np.linspace(low, high, 2 + int((high - low) / (WIDE * self.room))) for low, high in ends if low < high]
        self.low, self.high = (np.concatenate([span[part] for span in spans]) for part in (slice(-1), slice(1, None)))
        cells = [len(span) - 1 for span in spans]
        self.stretch, self.drawn = at(np.repeat(levels[: len(spans)], cells))
        self.starts = np.r_[0, np.cumsum(cells[:-1])].astype(np.int64)

    def prices(self, slope: float, bend: float, pole: float) -> Prices:
        """The prices for the G with this slope up to `bend`, and a logarithm beyond."""

        def potential(mean: Floats) -> Floats:
            far = np.maximum(mean - pole, bend - pole)
            found: Floats = slope * (np.minimum(mean, bend) + (bend - pole) * np.log(far / (bend - pole)))
            return found

        def rises(mean: Floats) -> Floats:
            return slope * (bend - pole) / np.maximum(mean - pole, bend - pole)

        def least(drawn: Floats) -> Floats:
            """The least count of a nanosecond in each cell: at one of its ends, unless it may fall and rise within."""
            after_low, after_high = (mean + self.rate * (drawn - mean) for mean in (self.low, self.high))
            ends = np.minimum(potential(after_low) - potential(self.low), potential(after_high) - potential(self.high))
            falls = rises(self.low) - (1 - self.rate) * rises(after_high)
            grows = (1 - self.rate) * rises(after_low) - rises(self.high)
            within = np.maximum(0, np.minimum(falls, grows)) * (self.high - self.low)
            found: Floats = 1 + (ends - within) / self.rate
            return found

        counts = self.stretch * least(self.drawn) * (1 - ROUNDED)
        of = counts.min(axis=1)
        idle = min(1.0, float(least(np.zeros(1)).min())) * (1 - ROUNDED)
        above = least(self.drawn + self.comm_mw) - of[:, None] / self.stretch
        energy = max(0.0, min(float(above.min()), float(least(np.full(1, self.comm_mw)).min()) - idle)) / max(1.0, self.comm_mw)
        ticks = 1 + float(potential(np.array(self.top))) / self.rate
        ends = max(0.0, float(of.max()) - 1) + energy * self.comm_mw + float(np.diff(potential(self.edges)).max()) / self.rate
        of_draw = dict(zip(self.draws, np.minimum.reduceat(counts, self.starts, axis=1), strict=True))
        stretch = dict(zip(self.draws, self.stretch[:, self.starts], strict=True))
        return Prices(of_draw, stretch, idle, energy, energy * self.beside_mw, ticks * TICK_NS, ends * TICK_NS)
