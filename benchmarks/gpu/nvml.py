"""Power, clock, temperature and energy of GPUs, read from NVML by a thread; no setting of a GPU is changed."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from statistics import fmean, median
from typing import Any

POWER_INSTANT = 186
"""NVML's field for momentary power; `nvmlDeviceGetPowerUsage` is an average over a second."""
POWER_CAPPED = 4
"""Bit of the reasons for a lowered clock: the software power cap."""


class Sampler:
    """Reads one GPU in a thread: energy when it changes, and power, clock, temperature and throttle reasons every 20 ms.

    Times are `time.perf_counter`'s, which on Linux all processes of a machine share. `nvml` is the module that reads, by default `pynvml`.
    """

    def __init__(self, uuid: str, nvml: Any = None) -> None:
        self.nvml = nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
        self.gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self.energy: list[tuple[float, int]] = []
        self.rows: list[tuple[float, float, int, int, int]] = []
        self.asked, self.going = 0.0, True
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while self.going:
            with suppress(self.nvml.NVMLError):  # a driver may refuse a reading now and then
                self._read()
            time.sleep(0.002)

    def _read(self) -> None:
        nvml, now = self.nvml, time.perf_counter()
        millijoules = nvml.nvmlDeviceGetTotalEnergyConsumption(self.gpu)
        if not self.energy or millijoules != self.energy[-1][1]:
            self.energy.append((now, millijoules))
        if now - self.asked > 0.02:
            self.asked = now
            watts = nvml.nvmlDeviceGetFieldValues(self.gpu, [POWER_INSTANT])[0].value.uiVal / 1e3
            self.rows.append(
                (
                    now,
                    watts,
                    nvml.nvmlDeviceGetClockInfo(self.gpu, nvml.NVML_CLOCK_SM),
                    nvml.nvmlDeviceGetTemperature(self.gpu, nvml.NVML_TEMPERATURE_GPU),
                    nvml.nvmlDeviceGetCurrentClocksEventReasons(self.gpu),
                )
            )

    def stop(self) -> None:
        """Stop reading; the readings are kept."""
        self.going = False
        self.thread.join()

    def between(self, begin: float, end: float) -> dict[str, Any]:
        """Mean power and medians of the readings between two times; the power is None if the energy counter changed less than twice."""
        at = [each for each in self.energy if begin <= each[0] <= end]
        rows = [each for each in self.rows if begin <= each[0] <= end]
        watts = (at[-1][1] - at[0][1]) / 1e3 / (at[-1][0] - at[0][0]) if len(at) > 1 else None
        return {
            "watts": watts and round(watts, 1),
            "energy_s": round(at[-1][0] - at[0][0], 3) if len(at) > 1 else 0.0,
            "nvml_watts": rows and round(median(each[1] for each in rows), 1),
            "nvml_mhz": rows and median(each[2] for each in rows),
            "celsius": rows and median(each[3] for each in rows),
            "capped": rows and round(sum(bool(each[4] & POWER_CAPPED) for each in rows) / len(rows), 3),
        }

    def limits(self) -> dict[str, Any]:
        """Power limit, default and enforced, and highest clocks."""
        nvml = self.nvml
        return {
            "limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(self.gpu) / 1e3,
            "default_limit_w": nvml.nvmlDeviceGetPowerManagementDefaultLimit(self.gpu) / 1e3,
            "max_sm_mhz": nvml.nvmlDeviceGetMaxClockInfo(self.gpu, nvml.NVML_CLOCK_SM),
            "max_mem_mhz": nvml.nvmlDeviceGetMaxClockInfo(self.gpu, nvml.NVML_CLOCK_MEM),
        }


def of_steps(sampler: Sampler, spans: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Mean power, clock, temperature, and joules per step, of consecutive steps given by the begin and end of each.

    Power comes from the energy counter, between its first and last change within the steps. If it changed less than twice, power is the
    mean of the readings, and `energy_s` is 0.
    """
    begin, end = spans[0][0], spans[-1][1]
    found = sampler.between(begin, end)
    rows = [each for each in sampler.rows if begin <= each[0] <= end]
    if not rows:
        return {"failed": f"no reading of NVML in {end - begin:.3f} s of {len(spans)} steps; expected one every 20 ms"}
    watts = found["watts"] or round(fmean(each[1] for each in rows), 1)
    return {
        "watts": watts,
        "energy_s": found["energy_s"],
        "joules_a_step": round(watts * (end - begin) / len(spans), 2),
        "mhz": round(fmean(each[2] for each in rows), 1),
        "mhz_min": min(each[2] for each in rows),
        "celsius": found["celsius"],
        "capped": found["capped"],
        "steps": len(spans),
    }
