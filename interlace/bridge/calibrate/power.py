"""The power part of a device profile, from kernels that run for some seconds each, without and with pauses, while NVML counts the energy.

Without pauses a kernel that draws much is held at the limit, at a low clock; with pauses as long as itself it runs at a high one. The two
give its watts, the part of its time that follows the clock, and how its energy does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, Protocol

from interlace.cost_model.profile import Power, PowerSample

WINDOW_S, SETTLE_S = 1.5, 0.5
"""How long a kernel runs at least while its energy is counted, from one change of the counter to another, which are 20 to 100 ms apart; and
before, so that the clock settles."""
POLL_S, MOST_POLLS, LATEST_S = 0.002, 100, 0.2
"""How often a device at rest is asked whether its counter has changed; after which time it is read as it is."""
APART = 0.05
"""Share by which two clocks differ at least that say how time and energy follow it."""
RESPONSE_NS, STEP_MHZ, LOWEST = 40_000_000, 15, 6
"""Not measured here: how fast the limiter reacts, the step of clocks and the lowest as a part of the highest, as on H100 and H200."""
EXPONENT = 1.2
"""Where no kernel reached the limit, so that its clock never fell: as on the H100."""


class Reader(Protocol):
    """What is read of a device."""

    def millijoules(self) -> int: ...
    def mhz(self) -> int: ...
    def highest_mhz(self) -> int: ...
    def limit_w(self) -> float: ...


Run = Callable[[], tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Load:
    """A kernel to measure: its kind and size as in `PowerSample`; `start` makes what it reads, and gives what runs some in a row and tells
    their number and seconds."""

    kind: str
    size: int
    start: Callable[[], Run]


class Window(NamedTuple):
    """A kernel's mean time, clock, and energy above what the device draws at rest; what the device drew in the mean."""

    took_s: float
    mhz: float
    joules: float
    watts: float


def power_part(
    loads: Sequence[Load], gpu: Reader, now: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
) -> Power:
    """The limit, as the device keeps it by the counter of energy, what it draws at rest, and what each kernel draws at the highest clock.

    Args:
        loads: Kernels; matrix products among them say how energy follows the clock.
        gpu: What reads the device.
        now, sleep: The clock.
    """
    meter = _Meter(gpu, now, sleep)
    full_and_paused = [(load, *meter.windows(load.start())) for load in loads]
    apart = [
        (full, paused) for _, full, paused in full_and_paused if paused.mhz > (1 + APART) * full.mhz and full.joules > 0 < paused.joules
    ]
    exponent = (
        median(math.log(full.joules / paused.joules) / math.log(full.mhz / paused.mhz) for full, paused in apart) if apart else EXPONENT
    )
    exponent = min(4.0, max(0.0, exponent))
    highest = gpu.highest_mhz()
    samples = []
    for load, full, paused in full_and_paused:
        share = 0.0
        if paused.mhz > (1 + APART) * full.mhz:
            share = min(1.5, max(0.0, (full.took_s / paused.took_s - 1) / (paused.mhz / full.mhz - 1)))
        ratio = min(1.0, paused.mhz / highest)
        share = share * ratio / (1 - share * (1 - ratio))  # of its time at the highest clock
        took_s, joules = paused.took_s / (1 + share * (1 / ratio - 1)), max(0.0, paused.joules) / ratio**exponent
        own = round(paused.mhz) if ratio < 1 - APART else 0
        samples.append(PowerSample(load.kind, load.size, round(joules / took_s, 1), round(share, 2), own))
    return Power(
        limit_w=round(max((full.watts for full, _ in apart), default=gpu.limit_w()), 1),
        static_w=round(meter.static_w, 1),
        waiting_w=0.0,
        highest_mhz=highest,
        lowest_mhz=max(STEP_MHZ, highest // LOWEST),
        step_mhz=STEP_MHZ,
        response_ns=RESPONSE_NS,
        energy_exponent=round(exponent, 2),
        samples=tuple(sorted(samples, key=lambda each: (each.kind, each.size))),
        note=f"one device; the driver's limit is {gpu.limit_w():.0f} W; response, step of clocks, lowest clock and what waits draw as on "
        "H100 and H200; what communication adds beside computation is not known"
        + ("" if apart else "; no kernel reached the limit, which is the driver's; energy follows the clock as on the H100"),
    )


class _Meter:
    """Windows of kernels on a device; what it draws at rest is read first, behind work, as a warm device draws more."""

    def __init__(self, gpu: Reader, now: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self.gpu, self.now, self.sleep = gpu, now, sleep
        self.static_w = self._at_rest()

    def _at_rest(self) -> float:
        self.sleep(SETTLE_S)
        begin_mj, begin = self._tick()
        self.sleep(WINDOW_S)
        end_mj, end = self._tick()
        return (end_mj - begin_mj) / 1e3 / (end - begin)

    def _tick(self) -> tuple[int, float]:
        """The counter of energy once it has changed, and when."""
        before = self.gpu.millijoules()
        for _ in range(MOST_POLLS):
            self.sleep(POLL_S)
            if (found := self.gpu.millijoules()) != before:
                break
        return found, self.now()

    def windows(self, run: Run) -> tuple[Window, Window]:
        """Without pauses, and with pauses as long as what runs."""
        return self.window(run, pauses=False), self.window(run, pauses=True)

    def window(self, run: Run, *, pauses: bool) -> Window:
        """Run a kernel until the clock has settled, and then while its energy is counted."""
        self._repeat(run, SETTLE_S, pauses)
        begin_mj, begin = self.gpu.millijoules(), self.now()
        count, busy_s, clocks = self._repeat(run, WINDOW_S, pauses)
        drawn, took_s = (self.gpu.millijoules() - begin_mj) / 1e3, self.now() - begin
        return Window(busy_s / count, median(clocks), (drawn - self.static_w * took_s) / count, drawn / took_s)

    def _repeat(self, run: Run, for_s: float, pauses: bool) -> tuple[int, float, list[int]]:
        """For so long, and then until the counter of energy changes."""
        end, count, busy_s, clocks = self.now() + for_s, 0, 0.0, list[int]()
        last_mj = self.gpu.millijoules()
        while True:
            number, took_s = run()
            clocks.append(self.gpu.mhz())
            count, busy_s = count + number, busy_s + took_s
            if pauses:
                self.sleep(took_s)
            now_mj = self.gpu.millijoules()
            if self.now() >= end and (now_mj != last_mj or self.now() >= end + LATEST_S):
                return count, busy_s, clocks
            last_mj = now_mj
