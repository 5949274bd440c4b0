"""The device that a command runs small programs on, chosen in one way for `doctor` and `calibrate`."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from interlace.errors import ConfigError
from interlace.interrupts import postponed

if TYPE_CHECKING:
    from interlace.local.own_target import OwnTarget


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add `--target` to a command."""
    said = "gpu, cpu, custom, or a module with your own device (default: the GPU, otherwise a custom device, otherwise the CPU)"
    parser.add_argument("--target", metavar="T", default="", help=said)


@contextlib.contextmanager
def paddle_on(target: str) -> Iterator[str]:
    """Paddle, imported with the device that was asked for; gives its kind. Raises ConfigError where a device of the user's own is not
    there."""
    from interlace.installed import require_paddle
    from interlace.temporary import temporary_folder

    require_paddle()
    own = _own(target)
    if own is not None:
        if (ranks := os.environ.get("PADDLE_TRAINERS_NUM", "1")) != "1":
            raise ConfigError(f"--target {target}: {ranks} ranks were started; a device of one's own is looked at by one")
        own.require()
        with temporary_folder() as folder, contextlib.closing(own.install(0, 1, str(folder), 60.0)):
            yield "custom"
        return
    with postponed():
        from interlace.bridge.targets.choose import leave_signals

        leave_signals()
    yield target


def _own(target: str) -> OwnTarget | None:
    """A device of the user's own; None for those that Paddle has."""
    if target in ("", "gpu", "cpu", "custom"):
        return None
    from interlace.local.own_target import find_own

    return find_own(target)
