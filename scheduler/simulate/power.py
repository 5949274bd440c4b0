"""Power and clock of simulated devices: what both engines know of a limit of power, and the limiter that they share.

Every kernel has an energy above the device's static draw. It is spent in proportion to the kernel's work, and scales with a power of the
clock. While a communication runs beside computation, the device draws `beside_mw` more. A limiter looks at what was drawn every `TICK_NS`,
averages it with the device's time constant, and takes the highest clock at which the average would stay within the limit. It looks no more
once all is done that the next step waits for: copies to the host that go on then run beside that step. A kernel runs at no higher clock
than its own, at which its time was taken; below that, the part of its time that follows the clock is stretched. All quantities are whole
numbers, so that engines agree exactly: milliwatts, nanoseconds, their products, and factors in units of 1 / ONE.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp
from typing import Any

import numpy as np

from interlace.cost_model.profile import Power
from interlace.ir.arrays import Flags, Ints
from interlace.scheduler.simulate.arrays import ONE

TICK_NS = 2_000_000
"""Between two looks of the limiter. H100 and H200 were seen to change clocks every 20 to 40 ms; the average decides, not the tick."""
FOLLOWS = 0.6
"""Part of the time of what draws most that follows the clock: products of 8192 to 2048 rows, 0.5 to 0.7 on H100 and H200. Only how fast the
limiter finds its clock depends on it."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """The clocks that a device chooses from, highest first, and what holds at each. `[num_levels]` each.

    Attributes:
        slower: By how much time that follows the clock is stretched, over 1.
        energy: A kernel's energy, as a part of that at the highest clock.
        load: Power of what draws most, as a part of that at the highest clock.
    """

    mhz: Ints
    slower: Ints
    energy: Ints
    load: Ints

    @classmethod
    def of(cls, power: Power) -> Clocks:
        """From the highest down to the lowest clock."""
        mhz = np.arange(power.highest_mhz, power.lowest_mhz - 1, -power.step_mhz, dtype=np.int64)
        ratio = mhz / power.highest_mhz
        energy = ratio**power.energy_exponent
        load = energy / (1 + FOLLOWS * (1 / ratio - 1))
        return cls(mhz, *(np.round(ONE * each).astype(np.int64) for each in (1 / ratio - 1, energy, load)))


@dataclass(frozen=True, slots=True)
class PowerInput:
    """The power part of `SimInput`.

    Attributes:
        draw: Of each op instance, its energy at the highest clock over its duration, in milliwatts above static. `[num_items]`
        share: Part of its duration that follows the clock, in units of 1 / ONE. `[num_items]`
        own: Index of its own clock, that of its duration; of the next higher one that there is. `[num_items]`
        moves: Whether it is a communication between devices. `[num_items]`
        static_mw, limit_mw, waiting_mw, beside_mw: As in `Power`.
        response: Part of the difference by which the average moves in a tick, in units of 1 / ONE.
    """

    draw: Ints
    share: Ints
    own: Ints
    moves: Flags
    clocks: Clocks
    static_mw: int
    limit_mw: int
    waiting_mw: int
    beside_mw: int
    response: int

    @classmethod
    def of(cls, power: Power, draw: Ints, share: Ints, own_mhz: Ints, moves: Flags) -> PowerInput:
        """Whole numbers from a profile's power part; `draw`, `share` and `own_mhz` as in `Draw`. `[num_items]` each."""
        clocks = Clocks.of(power)
        own = np.clip(-(np.where(own_mhz, own_mhz, power.highest_mhz) - power.highest_mhz) // power.step_mhz, 0, len(clocks.mhz) - 1)
        longer = 1 + share * clocks.slower[own] / ONE**2
        draw, share = (np.round(each / longer).astype(np.int64) for each in (draw, share))
        response = round(ONE * (1 - exp(-TICK_NS / power.response_ns)))
        static, limit, waiting, beside = (round(1000 * each) for each in (power.static_w, power.limit_w, power.waiting_w, power.beside_w))
        return cls(draw, share, own, moves, clocks, static, limit, waiting, beside, response)


@dataclass(slots=True)
class PowerTrace:
    """What the limiter of each rank did in a step.

    Attributes:
        level: Index into `Clocks`; before a simulation that with which the step begins, after it that with which it ends. `[num_ranks]`
        mean: Average of what was drawn above static, as if at the highest clock, in milliwatts; before and after, as `level`.
        spent: Energy above static, in milliwatts times nanoseconds. `[num_ranks]`
        changes: Times, ranks and levels of changes of the clock, the first ones at time 0. `[3, num_changes]`
    """

    level: Ints
    mean: Ints
    spent: Ints
    changes: Ints = field(default_factory=lambda: np.zeros((3, 0), np.int64))

    @classmethod
    def begin(cls, num_ranks: int) -> PowerTrace:
        """Before anything was drawn."""
        return cls(*(np.zeros(num_ranks, np.int64) for _ in range(3)))

    @classmethod
    def warm(cls, power: PowerInput, mean: Ints) -> PowerTrace:
        """Before a step that begins with these averages. `[num_ranks]`"""
        levels = [level_at(each, power.limit_mw - power.static_mw, power.clocks.load) for each in mean.tolist()]
        return cls(np.array(levels, np.int64), mean.copy(), np.zeros_like(mean))


def steady_mean(power: PowerInput, began: Ints, ended: Ints, took_ns: int) -> Ints:
    """The averages with which a step begins that ends with them, as far as one tells that began and ended with these: what is left of the
    first by the end of a step falls with its ticks, and what comes anew is taken to be the same. `[num_ranks]`"""
    kept = (1 - power.response / ONE) ** (took_ns // TICK_NS)
    return np.maximum(0, np.round(began + (ended - began) / (1 - kept))).astype(np.int64) if kept < 1 else began


def at_clock(highest: int, factor: int) -> int:
    """Energy at a clock of what spends so much at the highest; `factor` as in `Clocks.energy`. Runs in both engines."""
    return ((highest >> 4) * factor) >> 16


def level_at(mean: Any, room_mw: int, load: Any) -> int:
    """The highest clock at which an average stays within the limit; `room_mw` is the limit less static. Runs in both engines."""
    level = 0
    while level < len(load) - 1 and (mean * load[level]) >> 20 > room_mw:
        level += 1
    return level


def limiter(mean: Any, level: int, spent: int, response: int, room_mw: int, load: Any) -> tuple[int, int]:
    """The average and the level after a tick in which so much was spent above static at this level's clock. Runs in both engines."""
    drawn = (spent // TICK_NS) * ONE // load[level]
    mean += ((drawn - mean) * response) >> 20
    return mean, level_at(mean, room_mw, load)
