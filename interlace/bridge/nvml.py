"""Energy, clock and power limit of the GPU in use, from the driver (NVML). Needs `nvidia-ml-py`, and changes no setting."""

from __future__ import annotations

import importlib
import os
import time
from contextlib import suppress
from typing import Any

MODULE = "pynvml"
"""The module that `nvidia-ml-py` installs."""
TRIES, PAUSE_S = 5, 0.002
"""Most attempts to read the clock, and seconds between two of them."""


class Gpu:
    """Readings of a GPU; `index` is its number among those that CUDA shows to this process. Raises NVML's errors if there is no driver or
    no such GPU, or the GPU does not count its energy."""

    def __init__(self, index: int, nvml: Any) -> None:
        self.nvml = nvml
        nvml.nvmlInit()
        visible = [each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
        name = visible[index] if index < len(visible) else str(index)
        self.gpu = nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)
        self.millijoules()

    def millijoules(self) -> int:
        """Energy in millijoules since the driver was loaded; the counter changes every 20 to 100 ms."""
        return int(self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.gpu))

    def mhz(self) -> int:
        """Clock of the multiprocessors. Tried again if the driver refuses, as one driver did occasionally."""
        for _ in range(TRIES - 1):
            with suppress(self.nvml.NVMLError):
                return self._mhz()
            time.sleep(PAUSE_S)
        return self._mhz()

    def _mhz(self) -> int:
        return int(self.nvml.nvmlDeviceGetClockInfo(self.gpu, self.nvml.NVML_CLOCK_SM))

    def highest_mhz(self) -> int:
        """Highest clock of the multiprocessors."""
        return int(self.nvml.nvmlDeviceGetMaxClockInfo(self.gpu, self.nvml.NVML_CLOCK_SM))

    def limit_w(self) -> float:
        """The power limit that the driver enforces, in watts."""
        return float(self.nvml.nvmlDeviceGetEnforcedPowerLimit(self.gpu) / 1e3)


def find_gpu(index: int) -> tuple[Gpu | None, str]:
    """The GPU with this number and an empty text; None and the reason if the driver does not report power, clocks and energy."""
    try:
        nvml = importlib.import_module(MODULE)
    except ImportError:
        return None, "power and clocks are read by nvidia-ml-py, which is not installed (pip install nvidia-ml-py)"
    try:
        return Gpu(index, nvml), ""
    except Exception as error:  # NVML's error classes are only known to its module
        return None, f"the driver gives no energy of GPU {index}: {type(error).__name__}: {error}"
