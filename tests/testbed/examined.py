"""`interlace doctor`'s checks of the device under switches of the testbed: a script of one rank, which prints JSON.

Each argument is a set of switches in words, `as it is`, `all work is late` or `copies take memory of their own`; the values are verdicts
by rule. Without arguments: the check of collectives, on several ranks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from interlace.cost_model.profile import DeviceProfile
from interlace.report.checks import Check
from testbed import delays, device

SWITCHES: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "drop_waits=1": ("order inside a job", "order across jobs", "copies out and back"),
    "priorities=0": ("priorities of streams",),
    "nosync=0": ("the host at the end of a job",),
    "sync_waits=0": ("waits of the host",),
    "d2h_blocks=1": ("copy out",),
    "pinned_kept=0": ("pinned buffers that are kept",),
    "record=0": ("a block whose last reader is on another stream",),
    "hold=0": ("a block whose last reader is on another stream",),
    "record=2": ("a block whose last reader is on its own stream",),
    "free_at_end=1": ("a block freed while the device is behind",),
    "one_stream=1": (
        "named streams",
        "order inside a job",
        "order across jobs",
        "a block whose last reader is on another stream",
        "a block whose last reader is on its own stream",
    ),
}
"""Switches, and the rules that are looked at with them; none: all rules. Streams are made once a process, so `one_stream` needs its own."""

LATE = "all work is late"
OWN = "copies take memory of their own"
"""As a kernel would that does not look for memory in its result."""


def sure(profile: DeviceProfile) -> DeviceProfile:
    """The profile as if its times were exact."""
    return msgspec.structs.replace(profile, ops=tuple(msgspec.structs.replace(each, spread_ns=0) for each in profile.ops))


def main() -> None:
    import paddle

    paddle.set_device(f"{device.NAME}:0")
    found = switched(sys.argv[1:]) if sys.argv[1:] else together()
    print("RESULTS " + json.dumps(found), flush=True)


def together() -> dict[str, Any]:
    from interlace.bridge.doctor.behaviour import Behaviour
    from interlace.bridge.meeting import Meeting
    from interlace.bridge.probe.lab import settings
    from interlace.bridge.targets import choose_device

    with settings():
        found = _found(Behaviour(choose_device(), Meeting(0, 1, dict)).checks({"collectives"}))
    device.synchronize()
    return found


def switched(names: list[str]) -> dict[str, Any]:
    """Verdicts by rule, of each set of switches."""
    from interlace.bridge.doctor import behaviour, times
    from interlace.bridge.doctor.behaviour import HIGH, LOW, Behaviour
    from interlace.bridge.doctor.times import check_profile
    from interlace.bridge.probe import lab
    from interlace.bridge.probe.lab import settings
    from interlace.bridge.targets import choose_device
    from interlace.cost_model import load_profile

    found: dict[str, Any] = {}
    if LATE in names:
        names.remove(LATE)
        delays.draw(0, 1000, 5_000)
        times.KINDS = ("add", "softmax")
        os.getloadavg = lambda: (0.0, 0.0, 0.0)  # as on a machine that nobody else uses
        with settings():
            found[LATE] = _found(check_profile(choose_device(), None, "sure", sure(load_profile("cpu")), is_asked=True))
        delays.off()
    checked = Behaviour(choose_device())  # knows from the first switches how much work is slow, and that streams run side by side
    if OWN in names:
        names.remove(OWN)
        filling, lab.filling = lab.filling, lambda program: program
        with settings():
            found[OWN] = _found(checked.checks(("a block that was taken for a copy back",)))
        lab.filling = filling
    for words in names:
        switches = {} if words == "as it is" else device.parse_switches(words)
        behaviour.LOW, behaviour.HIGH = f"{LOW} {words}", f"{HIGH} {words}"  # a stream keeps the priority that it is made with
        with device.switched(**switches), settings():
            found[words] = _found(checked.checks(SWITCHES[words]))
    return found


def _found(checks: Sequence[Check]) -> dict[str, Any]:
    return {each.rule: [each.verdict, each.found, [feature.name for feature in each.rests]] for each in checks}


if __name__ == "__main__":
    main()
