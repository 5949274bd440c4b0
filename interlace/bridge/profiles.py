"""The device profile that a plan is made with."""

from __future__ import annotations

import paddle

from interlace.bridge.places import Place
from interlace.config import Config
from interlace.cost_model import CostModel, load_profile, require_device
from interlace.errors import ConfigError

DEFAULT = "h200"


def costs_for(config: Config, place: Place, device: str = "") -> tuple[CostModel, str]:
    """The cost model to ask, and the name of its profile.

    Args:
        config: Names the profile; without one the CPU place has the profile `cpu`, all others `h200`.
        place: On a GPU the profile must be of the GPU in use. The CPU and testbeds stand for other devices: no check there.
        device: Name or path of a profile, in the place of the configuration's.

    Raises:
        ConfigError: There is no such profile, or it is of another GPU and `force_device` is off.
    """
    name = device or config.device or ("cpu" if place.name == "cpu" else DEFAULT)
    profile = load_profile(name)
    if place.name == "gpu" and not config.force_device:
        try:
            require_device(profile, _gpu_name(place))
        except ConfigError as error:
            chosen = "device" if device or config.device else "no device is chosen, so"
            raise ConfigError(f"{config.source}: {chosen} {name!r}: {error} (force_device: on)") from error
    return CostModel(profile), name


def _gpu_name(place: Place) -> str:
    """What Paddle says the GPU is. Raises ConfigError where it cannot say."""
    try:
        return str(paddle.device.cuda.get_device_name(place.device))
    except (ValueError, RuntimeError, OSError) as error:
        raise ConfigError(f"this GPU has no name that Paddle could read ({error}); force the profile to plan without the check") from error
