"""The device profile that a plan is made with."""

from __future__ import annotations

import contextlib

from interlace.bridge.targets import Device
from interlace.config import Config
from interlace.cost_model import CostModel, DeviceProfile, load_profile, profile_of, require_device
from interlace.errors import ConfigError
from interlace.ir.target import CPU, GPU

DEFAULT = "h200"
UNREADABLE = (ValueError, RuntimeError, OSError)
"""What Paddle raises where a GPU has no name."""


def costs_for(config: Config, device: Device, profile: str = "") -> tuple[CostModel, str]:
    """The cost model to ask (`Config.costs`), and the name of its profile: `profile`, else that of the configuration, else `cpu` on a CPU,
    on a GPU the one of its name, and `h200` on all others.

    On a GPU the profile must be of the GPU in use; the CPU and custom devices may stand for others. Raises ConfigError where there is no
    such profile, or it is of another GPU and `force_device` is off.
    """
    name = profile or config.device or default_profile(device)
    loaded = load_profile(name)
    require_own_gpu(loaded, config, device, f"{'device' if profile or config.device else 'no device is chosen, so'} {name!r}")
    return config.costs(loaded), name


def default_profile(device: Device) -> str:
    """Name of the profile that plans for a device are made with unless the user names another."""
    if device.target is CPU:
        return "cpu"
    return (profile_of(known_name(device)) if device.target is GPU else "") or DEFAULT


def require_own_gpu(profile: DeviceProfile, config: Config, device: Device, what: str) -> None:
    """Refuse a profile of another GPU than the one in use, where `force_device` is off. The ConfigError names the profile by
    `what`, such as "device 'h200'"."""
    if device.target is GPU and not config.force_device:
        try:
            require_device(profile, _gpu_name(device))
        except ConfigError as error:
            raise ConfigError(f"{config.source}: {what}: {error} (force_device: on)") from error


def known_name(device: Device) -> str:
    """What the device in use is, as profiles call theirs; empty where that cannot be known."""
    with contextlib.suppress(*UNREADABLE):
        return device.name()
    return ""


def _gpu_name(device: Device) -> str:
    """What Paddle says the GPU is. Raises ConfigError where it cannot say."""
    try:
        return device.name()
    except UNREADABLE as error:
        raise ConfigError(f"this GPU has no name that Paddle could read ({error}); force the profile to plan without the check") from error
