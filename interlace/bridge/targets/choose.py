"""Choice of the device that this process runs on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle.base.framework import _current_expected_place_

from interlace.bridge.targets.base import Device
from interlace.bridge.targets.cpu import CpuDevice
from interlace.bridge.targets.custom import CustomDevice
from interlace.bridge.targets.gpu import GpuDevice
from interlace.errors import ConfigError, PlanError

_registered: dict[str, Callable[[Any], Device]] = {}


def register_device(device_type: str, make: Callable[[Any], Device]) -> None:
    """Register the device class for Paddle's custom devices of a type; `make` gets Paddle's place object."""
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


def use_place(target: str = "") -> None:
    """Make Paddle use a device: `gpu`, `cpu` or `custom`; if empty, the first available of GPU, custom device and CPU. Raises ConfigError
    if the device is not available."""
    has_gpu = paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0
    custom = paddle.device.get_all_custom_device_type()
    number = paddle.distributed.ParallelEnv().dev_id if has_gpu or custom else 0
    places = {"gpu": f"gpu:{number}" if has_gpu else "", "custom": f"{custom[0]}:{number}" if custom else "", "cpu": "cpu"}
    wanted = target or next(name for name, place in places.items() if place)
    if not places[wanted]:
        raise ConfigError(
            f"--target {wanted}: this Paddle sees no such device; it sees {', '.join(each for each in places if places[each])}"
        )
    paddle.set_device(places[wanted])


def leave_signals() -> None:
    """Disable Paddle's handler of SIGTERM, which prints a traceback, so that ours is used."""
    paddle.disable_signal_handler()
