"""Which device this process runs on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle.base.framework import _current_expected_place_

from interlace.bridge.targets.base import Device
from interlace.bridge.targets.cpu import CpuDevice
from interlace.bridge.targets.custom import CustomDevice
from interlace.bridge.targets.gpu import GpuDevice
from interlace.errors import PlanError

_registered: dict[str, Callable[[Any], Device]] = {}


def register_device(device_type: str, make: Callable[[Any], Device]) -> None:
    """Build programs for Paddle's custom devices of this type with a class of one's own; it gets Paddle's place object."""
    _registered[device_type] = make


def choose_device() -> Device:
    """The device that Paddle's executor will use. Raises PlanError on a device whose rules Interlace does not know."""
    place = _current_expected_place_()
    if isinstance(place, paddle.CPUPlace):
        return CpuDevice(place)
    if isinstance(place, paddle.CUDAPlace):
        return GpuDevice(paddle.CUDAPlace(paddle.distributed.ParallelEnv().dev_id))
    if isinstance(place, paddle.CustomPlace):
        return _registered.get(place.get_device_type(), CustomDevice)(place)
    raise PlanError(f"device {place}: Interlace knows the rules of CPU, CUDA GPU and custom devices only; turn it off here")
