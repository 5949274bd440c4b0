"""Energy, clock and limit of power of the GPU in use, as the driver tells them (NVML); needs `nvidia-ml-py`, and changes no setting."""

from __future__ import annotations

import importlib
import os
import time
from contextlib import suppress
from typing import Any

MODULE = "pynvml"
"""What `nvidia-ml-py` installs."""
TRIES, PAUSE_S = 5, 0.002
"""How often the clock is asked for."""


class Gpu:
    """Readings of the GPU with this number among those that CUDA shows to this process. Raises what NVML does: no driver, no such GPU, or a
    GPU that does not count its energy."""

    def __init__(self, index: int, nvml: Any) -> None:
        self.nvml = nvml
        nvml.nvmlInit()
        visible = [each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
        name = visible[index] if index < len(visible) else str(index)
        self.gpu = nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)
        self.millijoules()

    def millijoules(self) -> int:
        """Energy since the driver was loaded; the counter changes every 20 to 100 ms."""
        return int(self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.gpu))

    def mhz(self) -> int:
        """Clock of the multiprocessors. Asked again where the driver refuses: one did so now and then, and answered otherwise."""
        for _ in range(TRIES - 1):
            with suppress(self.nvml.NVMLError):
                return int(self.nvml.nvmlDeviceGetClockInfo(self.gpu, self.nvml.NVML_CLOCK_SM))
            time.sleep(PAUSE_S)
        return int(self.nvml.nvmlDeviceGetClockInfo(self.gpu, self.nvml.NVML_CLOCK_SM))

    def highest_mhz(self) -> int:
        """Highest clock of the multiprocessors."""
        return int(self.nvml.nvmlDeviceGetMaxClockInfo(self.gpu, self.nvml.NVML_CLOCK_SM))

    def limit_w(self) -> float:
        """The limit of power that the driver keeps."""
        return float(self.nvml.nvmlDeviceGetEnforcedPowerLimit(self.gpu) / 1e3)


def find_gpu(index: int) -> tuple[Gpu | None, str]:
    """The GPU with this number; None, and why, where the driver gives no power, clocks and energy."""
    try:
        nvml = importlib.import_module(MODULE)
    except ImportError:
        return None, "power and clocks are read by nvidia-ml-py, which is not installed (pip install nvidia-ml-py)"
    try:
        return Gpu(index, nvml), ""
    except Exception as error:  # NVML's own classes, which only its module knows
        return None, f"the driver gives no energy of GPU {index}: {type(error).__name__}: {error}"
