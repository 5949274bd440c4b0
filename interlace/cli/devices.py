"""How `doctor` and `calibrate` choose the device on which they run small programs."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.interrupts import postponed
from interlace.temporary import PREFIX, shared_folder, temporary_folder

if TYPE_CHECKING:
    from interlace.local.own_target import OwnTarget

START_S = 60.0
"""Seconds that ranks on a device of the user's own wait for each other at the start."""


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add `--target` to a command."""
    said = "gpu, cpu, custom, or a module with your own device (default: the GPU, otherwise a custom device, otherwise the CPU)"
    parser.add_argument("--target", metavar="T", default="", help=said)


def started_ranks() -> tuple[int, int]:
    """This rank, and the number of ranks that a launcher started; 0 and 1 without a launcher. Raises ConfigError if the environment gives
    no such numbers."""
    from interlace.errors import ConfigError
    from interlace.outside import launched

    rank, world = launched("PADDLE_TRAINER_ID", 0), launched("PADDLE_TRAINERS_NUM", 1, least=1)
    if rank >= world:
        raise ConfigError(f"PADDLE_TRAINER_ID={rank}: expected a number below PADDLE_TRAINERS_NUM, which is {world}")
    return rank, world


@contextlib.contextmanager
def paddle_on(target: str) -> Iterator[str]:
    """Import Paddle for the requested target; yields the target, which is `custom` for a device of the user's own. Raises ConfigError if
    Paddle or such a device is missing."""
    from interlace.installed import require_paddle

    require_paddle()
    own = _own(target)
    if own is not None:
        own.require()
        rank, world = started_ranks()
        with _folder(world) as folder, contextlib.closing(own.install(rank, world, str(folder), START_S)):
            yield "custom"
        return
    with postponed():
        from interlace.bridge.targets.choose import leave_signals

        leave_signals()
    yield target


def _folder(world: int) -> contextlib.AbstractContextManager[Path]:
    """A temporary folder that the ranks of one launcher share."""
    if world < 2:
        return temporary_folder()
    name = hashlib.sha256(_launch().encode()).hexdigest()[:16]
    return shared_folder(Path(tempfile.gettempdir()) / f"{PREFIX}ranks-{name}")


def _launch() -> str:
    """What only the ranks of one launcher have in common: containers and hosts may share temporary folders, but also numbers of processes
    and endpoints."""
    launcher, began = os.getppid(), ""
    with contextlib.suppress(OSError):  # the parent may be outside of the container
        began = Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[19]
    return " ".join([platform.node(), str(launcher), began, os.environ.get("PADDLE_TRAINER_ENDPOINTS", "")])


def _own(target: str) -> OwnTarget | None:
    """A device of the user's own; None for the targets that Interlace knows."""
    if target in ("", "gpu", "cpu", "custom"):
        return None
    from interlace.local.own_target import find_own

    return find_own(target)
