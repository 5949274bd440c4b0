"""Energy, clock and power limit of the GPU in use, from the driver (NVML). Needs `nvidia-ml-py`, and changes no setting."""

from __future__ import annotations

import ctypes
import importlib
import time
import uuid
from contextlib import suppress
from typing import Any

MODULE = "pynvml"
"""The module that `nvidia-ml-py` installs."""
CUDA = "libcuda.so.1"
"""The library of CUDA's driver, which a process that uses a GPU has already loaded."""
TRIES, PAUSE_S = 5, 0.002
"""Most attempts to read the clock, and seconds between two of them."""


class Gpu:
    """Readings of the GPU with a UUID, as `gpu_uuid` returns it. Raises NVML's errors if there is no driver or no such GPU, as for a part
    of a GPU (MIG), or if the GPU does not count its energy."""

    def __init__(self, name: str, nvml: Any) -> None:
        self.nvml = nvml
        nvml.nvmlInit()
        self.gpu = nvml.nvmlDeviceGetHandleByUUID(name)
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


def gpu_uuid(index: int) -> str:
    """The UUID of a GPU from its number among those that CUDA shows to this process. NVML numbers GPUs differently: it ignores
    CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER. Raises OSError if the driver does not tell."""
    driver, device, found = ctypes.CDLL(CUDA), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    for name, *given in (
        ("cuInit", 0),
        ("cuDeviceGet", ctypes.byref(device), index),
        ("cuDeviceGetUuid_v2", ctypes.byref(found), device),
    ):
        if error := getattr(driver, name)(*given):
            raise OSError(f"{name} returns {error}")
    return f"GPU-{uuid.UUID(bytes=bytes(found))}"


def find_gpu(index: int) -> tuple[Gpu | None, str]:
    """The GPU with this number among those that CUDA shows to this process, and an empty text; None and the reason if the driver does not
    report power, clocks and energy."""
    try:
        nvml = importlib.import_module(MODULE)
    except ImportError:
        return None, "power and clocks are read by nvidia-ml-py, which is not installed (pip install nvidia-ml-py)"
    name = f"GPU {index}"
    try:
        name = gpu_uuid(index)
        return Gpu(name, nvml), ""
    except Exception as error:  # NVML's error classes are only known to its module
        return None, f"the driver gives no energy of {name}: {type(error).__name__}: {error}"
