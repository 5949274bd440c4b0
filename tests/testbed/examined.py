"""`interlace doctor`'s checks of the device under switches of the testbed: `python examined.py NAME...` prints JSON.
`python examined.py RANK WORLD FOLDER` looks at collectives with other ranks that meet in the folder.

Each name is a set of switches in words, or `as it is`; the values are verdicts by rule.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from typing import Any

import msgspec
import numpy as np

from interlace.cost_model.profile import DeviceProfile
from testbed import delays, device
from testbed.target import TARGET

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


def sure(profile: DeviceProfile) -> DeviceProfile:
    """The profile as if its times were exact."""
    return msgspec.structs.replace(profile, ops=tuple(msgspec.structs.replace(each, spread_ns=0) for each in profile.ops))


def together(rank: int, world: int, folder: str) -> None:
    with contextlib.closing(TARGET.install(rank, world, folder, 60.0)) as transport:
        import paddle

        paddle.set_device(f"{device.NAME}:0")
        from interlace.bridge.doctor.behaviour import Behaviour
        from interlace.bridge.doctor.lab import settings
        from interlace.bridge.doctor.meeting import Meeting
        from interlace.bridge.targets import choose_device

        with settings():
            (check,) = Behaviour(choose_device(), Meeting(0, 1, dict)).checks({"collectives"})
        device.synchronize()
        transport.all_reduce(np.ones(1, np.float32), "sum", 0, range(world))  # all leave together
    print("RESULTS " + json.dumps([check.verdict, check.found]), flush=True)


def main() -> None:
    if len(sys.argv) == 4 and sys.argv[1].isdigit():
        together(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
        return
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(TARGET.install(0, 1, folder, 60.0)):
        import paddle

        paddle.set_device(f"{device.NAME}:0")
        from interlace.bridge.doctor import behaviour, times
        from interlace.bridge.doctor.behaviour import HIGH, LOW, Behaviour
        from interlace.bridge.doctor.lab import settings
        from interlace.bridge.doctor.times import check_profile
        from interlace.bridge.targets import choose_device
        from interlace.cost_model import load_profile

        names = sys.argv[1:]
        if LATE in names:
            names.remove(LATE)
            delays.draw(0, 1000, 5_000)
            times.KINDS = ("add", "softmax")
            os.getloadavg = lambda: (0.0, 0.0, 0.0)  # as on a machine that nobody else uses
            with settings():
                rows = check_profile(choose_device(), None, "sure", sure(load_profile("cpu")), is_asked=True)
            delays.off()
            found[LATE] = {each.rule: [each.verdict, each.found, [feature.name for feature in each.rests]] for each in rows}
        checked = Behaviour(choose_device())  # knows from the first switches how much work is slow, and that streams run side by side
        for words in names:
            switches = {} if words == "as it is" else device.parse_switches(words)
            behaviour.LOW, behaviour.HIGH = f"{LOW} {words}", f"{HIGH} {words}"  # a stream keeps the priority that it is made with
            with device.switched(**switches), settings():
                checks = checked.checks(SWITCHES[words])
            found[words] = {each.rule: [each.verdict, each.found, [feature.name for feature in each.rests]] for each in checks}
    print("RESULTS " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
