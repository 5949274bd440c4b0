"""Power and clock of simulated devices: the model of a power limit, and the limiter, for both engines.

Every kernel has an energy above the device's static draw. It is spent in proportion to the kernel's work, and scales with a power of the
clock. While a communication runs beside computation, the device draws `beside_mw` more. Every `TICK_NS` a limiter reads the energy spent,
averages it with the device's time constant, and chooses the highest clock at which the average would stay within the limit. It stops once
everything is done that the next step waits for, as copies to the host that still run then belong beside that step. A kernel never runs at
a higher clock than its own, at which its time was measured; at a lower clock, the part of its time that depends on the clock is stretched.
All quantities are integers, so that both engines agree exactly: milliwatts, nanoseconds, their products, and factors in units of 1 / ONE.
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
"""Interval of the limiter. H100 and H200 were observed to change clocks every 20 to 40 ms; the result depends on the time constant of the
average, not on this interval."""
FOLLOWS = 0.6
"""Share of the time of the kernels with the highest power that depends on the clock; 0.5 to 0.7 for matrix products of 2048 to 8192 rows on
H100 and H200. It only affects how fast the limiter finds its clock."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """The clocks that a device chooses from, highest first, and their effects. `[num_levels]` each; factors in units of 1 / ONE.

    Attributes:
        mhz: The clock, in MHz.
        slower: Stretch of time that depends on the clock, over 1.
        energy: A kernel's energy, as a share of that at the highest clock.
        load: Power of the kernels with the highest power, as a share of that at the highest clock.
    """

    mhz: Ints
    slower: Ints
    energy: Ints
    load: Ints

    @classmethod
    def of(cls, power: Power) -> Clocks:
        """The clocks of a device profile's power model."""
        mhz = np.arange(power.highest_mhz, power.lowest_mhz - 1, -power.step_mhz, dtype=np.int64)
        ratio = mhz / power.highest_mhz
        energy = ratio**power.energy_exponent
        load = energy / (1 + FOLLOWS * (1 / ratio - 1))
        return cls(mhz, *(np.round(ONE * each).astype(np.int64) for each in (1 / ratio - 1, energy, load)))


@dataclass(frozen=True, slots=True)
class PowerInput:
    """The power part of `SimInput`.

    Attributes:
        draw: Energy of an op instance at the highest clock divided by its duration, in milliwatts above static. `[num_items]`
        share: Share of its duration that depends on the clock, in units of 1 / ONE. `[num_items]`
        own: Index into `clocks` of its own clock, at which its duration was measured, or of the next higher one. `[num_items]`
        moves: Whether it is a communication between devices. `[num_items]`
        static_mw, limit_mw, waiting_mw, beside_mw: As the fields of `Power` in watts, in milliwatts.
        response: Share of the difference by which the average changes per tick, in units of 1 / ONE.
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
        """The power model of a profile in integers; `draw` (milliwatts), `share` (in units of 1 / ONE) and `own_mhz` (0 for the highest
        clock) as in `Draw`. `[num_items]` each."""
        clocks = Clocks.of(power)
        own = np.clip(-(np.where(own_mhz, own_mhz, power.highest_mhz) - power.highest_mhz) // power.step_mhz, 0, len(clocks.mhz) - 1)
        longer = 1 + share * clocks.slower[own] / ONE**2
        draw, share = (np.round(each / longer).astype(np.int64) for each in (draw, share))
        response = round(ONE * (1 - exp(-TICK_NS / power.response_ns)))
        static, limit, waiting, beside = (round(1000 * each) for each in (power.static_w, power.limit_w, power.waiting_w, power.beside_w))
        return cls(draw, share, own, moves, clocks, static, limit, waiting, beside, response)


@dataclass(slots=True)
class PowerTrace:
    """State and history of each rank's limiter.

    Attributes:
        level: Index into `Clocks`: at the start of the step before a simulation, at its end afterwards. `[num_ranks]`
        mean: Average power above static, converted to the highest clock, in milliwatts; at the start or end, as `level`. `[num_ranks]`
        spent: Energy above static, in milliwatts times nanoseconds. `[num_ranks]`
        changes: Times, ranks and levels of clock changes, with the initial levels at time 0. `[3, num_changes]`
    """

    level: Ints
    mean: Ints
    spent: Ints
    changes: Ints = field(default_factory=lambda: np.zeros((3, 0), np.int64))

    @classmethod
    def begin(cls, num_ranks: int) -> PowerTrace:
        """The state of an idle device."""
        return cls(*(np.zeros(num_ranks, np.int64) for _ in range(3)))

    @classmethod
    def warm(cls, power: PowerInput, mean: Ints) -> PowerTrace:
        """The state before a step that begins with these averages. `[num_ranks]`"""
        levels = [level_at(each, power.limit_mw - power.static_mw, power.clocks.load) for each in mean.tolist()]
        return cls(np.array(levels, np.int64), mean.copy(), np.zeros_like(mean))


def steady_mean(power: PowerInput, began: Ints, ended: Ints, took_ns: int) -> Ints:
    """Estimate of the averages of a steady-state step, in milliwatts, from a step that began with `began` and ended with `ended`.
    `[num_ranks]`

    The share of `began` that remains at the end of a step decays with its ticks; what the step adds is assumed not to change.
    """
    kept = (1 - power.response / ONE) ** (took_ns // TICK_NS)
    return np.maximum(0, np.round(began + (ended - began) / (1 - kept))).astype(np.int64) if kept < 1 else began


def at_clock(highest: int, factor: int) -> int:
    """Energy at a clock, from that at the highest clock; `factor` as in `Clocks.energy`. Used by both engines."""
    return ((highest >> 4) * factor) >> 16


def level_at(mean: Any, room_mw: int, load: Any) -> int:
    """Level of the highest clock at which an average stays within the limit; `room_mw` is the limit minus static. Used by both engines."""
    level = 0
    while level < len(load) - 1 and (mean * load[level]) >> 20 > room_mw:
        level += 1
    return level


def limiter(mean: Any, level: int, spent: int, response: int, room_mw: int, load: Any) -> tuple[int, int]:
    """Average and level after a tick in which `spent` (milliwatts times nanoseconds above static) was spent at the clock of `level`. Used
    by both engines."""
    drawn = (spent // TICK_NS) * ONE // load[level]
    mean += ((drawn - mean) * response) >> 20
    return mean, level_at(mean, room_mw, load)
