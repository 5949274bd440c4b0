"""The power part of a device profile, from kernels that run for some seconds each while NVML reports energy and clock.

A kernel of high power that runs without pauses is held at the power limit, at a low clock; with pauses about as long as itself it runs at a
high clock. The two measurements give the kernel's energy, and how energy and time depend on the clock. In short rows NVML reports the
highest clock even for matrix products, which never run at it: their clock is derived from their energy. For all other kernels, the
dependence of time on the clock comes from short rows after a rest, and right after a large product, when the clock is still low.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, linear_regression, median
from typing import NamedTuple, Protocol

import msgspec

from interlace.cost_model.profile import Power, PowerSample
from interlace.grouping import grouped, numbered

WINDOW_S, PAUSED_S, SETTLE_S = 1.6, 4.8, 0.3
"""Seconds that a kernel runs while its energy is counted, without and with pauses; and before that, until the clock is steady."""
AHEAD_S, MOST_AHEAD = 0.25, 400
"""Work that the host issues before it waits for the device: these seconds, in which the wait is negligible, and at most this number of
kernels. CUDA queues about a thousand; with more the host would block, and then read the clock of an idle device."""
REST_S, BEHIND_S = 0.4, 0.15
"""Seconds for which power at rest is measured after each kernel, as it depends on the temperature; and the largest delay of the counter."""
HEAVY_S, RECOVERY_S, TIMES = 0.08, 0.02, 8
"""Seconds of a large product after which the clock is low, and of a pause after which it is high; and how often a kernel is timed after
each."""
POLL_S, BUSY, BUSY_POLL_S = 0.002, 0.7, 0.02
"""Seconds between readings of the energy counter at rest, which changes every 20 to 100 ms; the fraction of a run in which a busy device is
read, and the seconds between these readings."""
GOLDEN = 0.618034
"""The length of pauses varies with the fractional parts of multiples of this number. The driver derives energy from samples of power, on
an H100 from 25 ms of every 100 ms (arXiv:2312.02741), with which equal pauses could stay in phase."""
APART = 0.05
"""The least relative difference of two clocks from which the dependence of time and energy on the clock is computed."""
AT_LIMIT = 0.9
"""The least share of the driver's limit that a kernel held there draws; a low clock alone may have another reason, such as heat."""
RESPONSE_NS, STEP_MHZ, LOWEST = 40_000_000, 15, 6
"""Not measured here but taken from H100 and H200: the response time of the limiter, the step between clocks, and the ratio of the highest
to the lowest clock."""
EXPONENT = 1.2
"""Exponent of energy over clock if no kernel other than products reached the limit, so that the clock never fell: that of the H100."""
LEAST_EXPONENT, MOST_SHARE = 0.5, 1.2
"""Bounds for disturbed measurements: of the exponent, below which energy would hardly depend on the clock, and of the share of the time
that is inversely proportional to the clock."""
ADDED_UNKNOWN = "what communication adds beside computation is not known"
"""A note on what is not measured here."""
HEAVY = "gemm"
"""The kind whose largest kernel lowers the clock."""
MISREPORTED = (HEAVY, "gemm_batched")
"""Kinds whose clock in short rows is not the one that NVML reports."""


class Reader(Protocol):
    """Readings of a device: the energy counter, the clock and its maximum, and the driver's power limit."""

    def millijoules(self) -> int: ...
    def mhz(self) -> int: ...
    def highest_mhz(self) -> int: ...
    def limit_w(self) -> float: ...


class Run(Protocol):
    """Issues `times` rows of a kernel, calls `meanwhile` while the device works, waits for the device, and returns the seconds."""

    def __call__(self, times: int, meanwhile: Callable[[], object]) -> float: ...


@dataclass(frozen=True, slots=True)
class Load:
    """A kernel to measure.

    Attributes:
        kind, size: As in `PowerSample`.
        count: Number of kernels in a row.
        row_s: Approximate seconds of a row.
        start: Allocates the inputs and returns what runs rows.
    """

    kind: str
    size: int
    count: int
    row_s: float
    start: Callable[[], Run]


class Window(NamedTuple):
    """A measurement of a kernel: its time, its clock, its energy above that at rest, and the device's power while it runs and at rest."""

    took_s: float
    mhz: float
    joules: float
    watts: float
    rest_w: float

    def drawing(self, watts: float) -> Window:
        """The same with another power, at the same time: all kernels at the limit draw that power, but are measured 2 % apart."""
        return self._replace(watts=watts, joules=self.joules * (watts - self.rest_w) / (self.watts - self.rest_w))


class Pace(NamedTuple):
    """A kernel's time at a high clock, the share of it that is inversely proportional to the clock, and the host's time to start a run."""

    took_s: float
    clock_share: float
    start_s: float


class Found(NamedTuple):
    """The measurements of a load, without pauses and with; `paused` is None if the load did not reach the limit."""

    load: Load
    full: Window
    paused: Window | None
    pace: Pace


def power_part(
    loads: Sequence[Load], gpu: Reader, now: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
) -> Power:
    """The power limit as observed by the energy counter, the power at rest, and the power of each kernel at the highest clock.

    Args:
        loads: Kernels; the largest matrix product among them serves to lower the clock.
        gpu: Readings of the device.
        now, sleep: The time, in seconds; tests replace it.
    """
    meter = _Meter(gpu, now, sleep)
    heavy = max((load for load in loads if load.kind == HEAVY), key=lambda load: load.size, default=None)
    lower = _rows(heavy, HEAVY_S) if heavy else None
    measured = [meter.found(load, lower) for load in loads]
    held = [each.full for each in measured if each.paused]
    limit_w = median([full.watts for full in held] or [gpu.limit_w()])
    measured = [each._replace(full=each.full.drawing(limit_w)) if each.paused else each for each in measured]
    ratios = [
        (math.log(full.mhz / paused.mhz), math.log(full.joules / paused.joules))
        for load, full, paused, _ in measured
        if load.kind not in MISREPORTED and paused and paused.mhz > (1 + APART) * full.mhz and full.joules > 0 < paused.joules
    ]
    slope = sum(clock * energy for clock, energy in ratios) / sum(clock * clock for clock, _ in ratios) if ratios else EXPONENT
    exponent = min(4.0, max(0.0, slope))
    highest = gpu.highest_mhz()
    samples = [_sample(each, exponent, highest) for each in measured]
    return Power(
        limit_w=round(limit_w, 1),
        static_w=round(median([full.rest_w for full in held] or [each.full.rest_w for each in measured]), 1),
        waiting_w=0.0,
        highest_mhz=highest,
        lowest_mhz=max(STEP_MHZ, highest // LOWEST),
        step_mhz=STEP_MHZ,
        response_ns=RESPONSE_NS,
        energy_exponent=round(exponent, 2),
        samples=tuple(sorted(samples, key=lambda each: (each.kind, each.size))),
        note=f"the driver's limit is {gpu.limit_w():.0f} W; response, step of clocks, lowest clock and what waits draw as on "
        f"H100 and H200; {ADDED_UNKNOWN}"
        + ("" if held else "; no kernel reached the limit, which is the driver's")
        + ("" if ratios else "; energy follows the clock as on the H100"),
    )


def of_devices(found: Sequence[Power]) -> Power:
    """The mean of what equal devices draw, such as those of a host; the note tells their number and the range of their limits. A kernel
    that not all of them measured counts with those that did."""
    highest, limits = min(each.highest_mhz for each in found), [each.limit_w for each in found]
    count = f"{len(found)} devices, limits of {min(limits):.0f} to {max(limits):.0f} W" if len(found) > 1 else "one device"
    samples = grouped(pair for each in found for pair in numbered(each.samples, lambda sample: (sample.kind, sample.size)).items())
    return msgspec.structs.replace(
        found[0],
        limit_w=round(fmean(limits), 1),
        static_w=round(fmean(each.static_w for each in found), 1),
        highest_mhz=highest,
        energy_exponent=round(fmean(each.energy_exponent for each in found), 2),
        samples=tuple(_mean_sample(each, highest) for _, each in sorted(samples.items())),
        note="; ".join([count, *dict.fromkeys(each.note for each in found)]),
    )


def _mean_sample(found: Sequence[PowerSample], highest_mhz: int) -> PowerSample:
    own_mhz = fmean(each.own_mhz or highest_mhz for each in found)
    return msgspec.structs.replace(
        found[0],
        watts=round(fmean(each.watts for each in found), 1),
        clock_share=round(fmean(each.clock_share for each in found), 2),
        own_mhz=round(own_mhz) if own_mhz < (1 - APART) * highest_mhz else 0,
        num_runs=sum(each.num_runs for each in found),
    )


def _sample(found: Found, exponent: float, highest_mhz: int) -> PowerSample:
    """The power of a load, and the share of its time that depends on the clock, at the highest clock."""
    load, full, paused, pace = found
    at, mhz, share = paused or full, (paused or full).mhz, pace.clock_share
    if paused and 0 < full.joules < paused.joules:
        own = min(float(highest_mhz), full.mhz * (paused.joules / full.joules) ** (1 / max(exponent, LEAST_EXPONENT)))
        if own > (1 + APART) * full.mhz:
            mhz, share = own, min(MOST_SHARE, max(0.0, (full.took_s / pace.took_s - 1) / (own / full.mhz - 1)))
    ratio = min(1.0, mhz / highest_mhz)
    share = share * ratio / (1 - share * (1 - ratio))  # as a share of the time at the highest clock
    took_s, joules = pace.took_s / (1 + share * (1 / ratio - 1)), max(0.0, at.joules) / ratio**exponent
    return PowerSample(load.kind, load.size, round(joules / took_s, 1), round(min(1.5, share), 2), round(mhz) if ratio < 1 - APART else 0)


def _watts(readings: Sequence[tuple[float, int]]) -> float:
    """Mean power: the slope of (seconds, millijoules), over the readings at which the counter had changed."""
    changes = [later for earlier, later in pairwise(readings) if later[1] != earlier[1]]
    return linear_regression(*zip(*(changes if len(changes) > 1 else readings), strict=True)).slope / 1e3


def _rows(load: Load, seconds: float) -> Callable[[], float]:
    """What runs a load for about `seconds`."""
    run, times = load.start(), max(1, round(seconds / load.row_s))
    return lambda: run(times, lambda: None)


class _Meter:
    """Measures loads on a device."""

    def __init__(self, gpu: Reader, now: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self.gpu, self.now, self.sleep = gpu, now, sleep

    def found(self, load: Load, lower: Callable[[], float] | None) -> Found:
        """Measure energy and time of a kernel. `lower` runs something that lowers the clock."""
        run, rows = load.start(), max(1, min(round(AHEAD_S / load.row_s), MOST_AHEAD // load.count))
        full = self._window(run, load, rows, pauses=False)
        is_held = full.mhz < (1 - APART) * self.gpu.highest_mhz() and full.watts > AT_LIMIT * self.gpu.limit_w()
        paused = self._window(run, load, 1, pauses=True) if is_held else None
        pace = self._pace(run, load, lower)
        return Found(load, full._replace(took_s=max(pace.took_s, full.took_s - pace.start_s / (rows * load.count))), paused, pace)

    def _window(self, run: Run, load: Load, rows: int, *, pauses: bool) -> Window:
        """Run `rows` rows repeatedly, with or without pauses of about the same length, while the counter is read; then measure power at
        rest."""
        clocks, took_s, readings = list[int](), list[float](), list[tuple[float, int]]()

        def poll() -> None:
            until = self.now() + BUSY * rows * load.row_s
            while self.now() < until:
                self.sleep(BUSY_POLL_S)
                clocks.append(self.gpu.mhz())
                readings.append(self._reading())

        def without_pause() -> None:
            took_s.append(run(rows, poll))

        def with_pause() -> None:
            took_s.append(run(rows, lambda: clocks.append(self._mhz_amid(load))))
            self.sleep(took_s[-1] * (0.5 + GOLDEN * len(took_s) % 1))
            readings.append(self._reading())

        cycle, for_s = (with_pause, PAUSED_S) if pauses else (without_pause, WINDOW_S)
        self._while(SETTLE_S, cycle)
        for each in (clocks, took_s, readings):
            each.clear()
        begin = self.now()
        self._while(for_s, cycle)
        seconds = self.now() - begin
        kernels, watts, rest_w = len(took_s) * rows * load.count, _watts(readings), self._rest()
        return Window(sum(took_s) / kernels, median(clocks), (watts - rest_w) * seconds / kernels, watts, rest_w)

    def _rest(self) -> float:
        """The device's power at rest, in watts."""
        self.sleep(BEHIND_S)
        readings = list[tuple[float, int]]()

        def poll() -> None:
            self.sleep(POLL_S)
            readings.append(self._reading())

        self._while(REST_S, poll)
        return _watts(readings)

    def _reading(self) -> tuple[float, int]:
        return self.now(), self.gpu.millijoules()

    def _while(self, for_s: float, work: Callable[[], object]) -> None:
        end = self.now() + for_s
        while self.now() < end:
            work()

    def _mhz_amid(self, load: Load) -> int:
        """The clock while the device works, as it rises right after a row."""
        self.sleep(load.row_s / 3)
        return self.gpu.mhz()

    def _pace(self, run: Run, load: Load, lower: Callable[[], float] | None) -> Pace:
        """Time one and two rows; the difference is the time of a row without the host's start."""

        def timed(rows: int, before: Callable[[], object]) -> tuple[float, float]:
            took_s, clocks = list[float](), list[int]()
            for _ in range(TIMES):
                before()
                took_s.append(run(rows, lambda: clocks.append(self._mhz_amid(load))))
            return sorted(took_s)[TIMES // 4], median(clocks)  # disturbances of the host only make runs longer

        def rest() -> None:
            self.sleep(RECOVERY_S)

        (one_s, mhz), (two_s, _) = timed(1, rest), timed(2, rest)
        row_s = max(two_s - one_s, one_s / 10)
        share = 0.0
        if lower is not None:
            after_s, low_mhz = timed(1, lower)
            if mhz > (1 + APART) * low_mhz:
                share = min(1.0, max(0.0, (after_s - one_s) / row_s / (mhz / low_mhz - 1)))
        return Pace(row_s / load.count, share, one_s - row_s)
