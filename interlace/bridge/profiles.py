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


def costs_for(config: Config, device: Device, profile: str = "", memory_bytes: int = 0) -> tuple[CostModel, str]:
    """The cost model for plans (`Config.costs`), and the name of its profile: `profile`, else the configuration's, else the device's
    default (`default_profile`). `memory_bytes` is the memory of the device, if it is known; else the profile says it.

    On a GPU the profile must be of that kind of GPU; CPUs and custom devices may use profiles of other devices. Raises ConfigError if there
    is no such profile, or it is of another GPU and `force_device` is off.
    """
    name = profile or config.device or default_profile(device)
    loaded = load_profile(name)
    require_own_gpu(loaded, config, device, f"{'device' if profile or config.device else 'no device is chosen, so'} {name!r}")
    return config.costs(msgspec.structs.replace(loaded, memory_bytes=memory_bytes) if memory_bytes else loaded), name


def memory_for_plans(device: Device, peers: Peers | None) -> int:
    """Device bytes that plans of this run may count on, on the rank that has the least; 0 if not known.

    That is what was available when this process first asked. Later, communicators and libraries have taken some, for which the limit of
    pools leaves room in any case (`NOT_IN_POOLS`).
    """
    mine = FIRST.setdefault(str(device.place), available_bytes(device))
    return min((each for each in gather(peers, "memory for plans", mine) if each), default=0)


FIRST: dict[str, int] = {}
"""Place -> what was available there when this process first asked."""


def available_bytes(device: Device) -> int:
    """Memory of the device that is available to this process now; 0 if not known."""
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
