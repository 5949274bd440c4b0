"""First contact: what is assumed of a machine and its build of Paddle, held against what happens."""

from __future__ import annotations

from interlace.bridge.doctor.behaviour import Behaviour
from interlace.bridge.doctor.internals import check_internals
from interlace.bridge.doctor.lab import settings
from interlace.bridge.doctor.times import check_profile
from interlace.bridge.doctor.versions import check_flags, check_versions, installed_versions
from interlace.bridge.profiles import default_profile, known_name
from interlace.bridge.targets import Device, choose_device
from interlace.cost_model import load_profile
from interlace.report.checks import OVERLAP, Check, Examination

__all__ = ["examine"]


def examine(profile: str = "", device: Device | None = None) -> Examination:
    """All checks of the device that Paddle's executor uses in this process.

    Args:
        profile: Name or path of a device profile; empty for the one that plans would be made with.
        device: Another device than the one that Paddle chose.

    Raises:
        ConfigError: There is no such profile.
        PlanError: A device whose rules Interlace does not know.
    """
    device = device or choose_device()
    name = profile or default_profile(device)
    loaded = load_profile(name)
    checks = [*check_versions(device, loaded), *check_internals(), *check_flags(device)]
    with settings():
        behaviour = Behaviour(device)
        checks += behaviour.checks()
        checks.append(_collectives())
        lab = None if device.target.serial else behaviour.lab
        checks += check_profile(device, lab, name, loaded, bool(profile))
    return Examination(known_name(device) or str(device.place), device.target.name, installed_versions(), tuple(checks))


def _collectives() -> Check:
    return Check(
        "collectives",
        "run beside computation",
        "there is one rank: nothing to communicate with",
        "not checked",
        (OVERLAP,),
        "the device and the executor",
    )
