"""Choice of the device profile for a plan."""

from __future__ import annotations

import contextlib

import msgspec

from interlace.bridge.targets import Device
from interlace.config import Config
from interlace.cost_model import CostModel, DeviceProfile, load_profile, profile_of, require_device
from interlace.errors import ConfigError
from interlace.ir.target import CPU, GPU
from interlace.planning.peers import Peers, gather

DEFAULT = "h200"
UNREADABLE = (ValueError, RuntimeError, OSError)
"""What Paddle raises if it cannot tell a GPU's name or memory."""


def costs_for(config: Config, device: Device, profile: str = "", peers: Peers | None = None) -> tuple[CostModel, str]:
    """The cost model for plans (`Config.costs`), and the name of its profile: `profile`, else the configuration's, else the device's
    default (`default_profile`).

    On a GPU the profile must be of that kind of GPU; CPUs and custom devices may use profiles of other devices. Its device has the memory
    that is available to this process or, if that is less, to another rank of the run (`peers`). Raises ConfigError if there is no such
    profile, or it is of another GPU and `force_device` is off.
    """
    name = profile or config.device or default_profile(device)
    loaded = load_profile(name)
    require_own_gpu(loaded, config, device, f"{'device' if profile or config.device else 'no device is chosen, so'} {name!r}")
    if known := [each for each in gather(peers, "device memory", _available_bytes(device)) if each]:
        loaded = msgspec.structs.replace(loaded, memory_bytes=min(known))
    return config.costs(loaded), name


def _available_bytes(device: Device) -> int:
    """Memory of the device for this process; 0 if it cannot be determined."""
    with contextlib.suppress(*UNREADABLE):
        return device.available_bytes()
    return 0


def default_profile(device: Device) -> str:
    """Name of the profile for a device unless the user names another: `cpu` on a CPU, on a GPU that of its name, else `h200`."""
    if device.target is CPU:
        return "cpu"
    return (profile_of(known_name(device)) if device.target is GPU else "") or DEFAULT


def require_own_gpu(profile: DeviceProfile, config: Config, device: Device, what: str) -> None:
    """Raise ConfigError if a profile is not of the GPU in use and `force_device` is off. `what` names the profile in the error, such as
    "device 'h200'"."""
    if device.target is GPU and not config.force_device:
        try:
            require_device(profile, _gpu_name(device))
        except ConfigError as error:
            raise ConfigError(f"{config.source}: {what}: {error} (force_device: on)") from error


def known_name(device: Device) -> str:
    """Name of the device in use, in the form of `DeviceProfile.device`; empty if it cannot be determined."""
    with contextlib.suppress(*UNREADABLE):
        return device.name()
    return ""


def _gpu_name(device: Device) -> str:
    """Name of the GPU according to Paddle. Raises ConfigError if Paddle cannot tell."""
    try:
        return device.name()
    except UNREADABLE as error:
        raise ConfigError(f"this GPU has no name that Paddle could read ({error}); force the profile to plan without the check") from error
