"""All checks of a machine. The bridge is imported only after the check of Paddle's internals, as its import may fail without one of
these."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlace.bridge.doctor.internals import check_internals
from interlace.installed import versions
from interlace.report.checks import Check, Examination, nothing_runs

if TYPE_CHECKING:
    from interlace.bridge.meeting import Meeting


def examine(profile: str = "", times: bool = True, target: str | None = None) -> Examination:
    """Run all checks of the device that Paddle's executor uses in this process. With several ranks, one that fails tells the others, which
    would otherwise wait for it.

    `profile` is the name or path of a device profile, empty for the one that plans would use; with `times` its times are also compared with
    measured ones; `target` is as in `targets.choose.use_place`, None for the device in use. Raises ConfigError if there is no such profile
    or device, PlanError on a device whose rules Interlace does not know.
    """
    internals = check_internals()
    try:
        from interlace.bridge.meeting import meeting_of_run

        meeting = meeting_of_run()
        try:
            if target is not None:
                from interlace.bridge.targets.choose import use_place

                use_place(target)
            return _examine(profile, internals, times, meeting)
        except Exception as error:
            meeting.come(str(error))
            raise
    except (ImportError, AttributeError) as error:
        if all(each.verdict == "holds" for each in internals):
            raise
        return Examination("a device", "unknown", versions(), (*internals, nothing_runs(str(error))))


def _examine(profile: str, internals: list[Check], times: bool, meeting: Meeting) -> Examination:
    from interlace.bridge.doctor.behaviour import Behaviour
    from interlace.bridge.doctor.times import check_profile
    from interlace.bridge.doctor.versions import check_flags, check_versions, installed_versions
    from interlace.bridge.probe.lab import settings
    from interlace.bridge.profiles import available_bytes, default_profile, known_name
    from interlace.bridge.targets import choose_device
    from interlace.cost_model import load_profile

    device = choose_device()
    memory_bytes = available_bytes(device)
    name = profile or default_profile(device)
    loaded = load_profile(name)
    checks = [*check_versions(device, loaded), *internals, *check_flags(device)]
    with settings():
        behaviour = Behaviour(device, meeting)
        checks += behaviour.checks()
        lab = None if device.target.serial or not behaviour.runs else behaviour.lab
        checks += check_profile(device, lab, name, loaded, bool(profile), times)
    called = known_name(device) or str(device.place)
    return Examination(called, device.target.name, installed_versions(), tuple(checks), name, memory_bytes)
