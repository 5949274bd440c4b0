"""How `doctor` and `calibrate` choose the device on which they run small programs."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.files import writing
from interlace.interrupts import postponed
from interlace.temporary import temporary_folder

if TYPE_CHECKING:
    from interlace.local.own_target import OwnTarget

START_S = 60.0
"""Seconds that ranks on a device of the user's own wait for each other at the start."""


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add `--target` to a command."""
    said = "gpu, cpu, custom, or a module with your own device (default: the GPU, otherwise a custom device, otherwise the CPU)"
    parser.add_argument("--target", metavar="T", default="", help=said)


def started_ranks() -> tuple[int, int]:
    """This rank, and the number of ranks that a launcher started; 0 and 1 without a launcher."""
    return int(os.environ.get("PADDLE_TRAINER_ID", "0")), int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))


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
        with _folder(rank, world) as folder, contextlib.closing(own.install(rank, world, str(folder), START_S)):
            yield "custom"
        return
    with postponed():
        from interlace.bridge.targets.choose import leave_signals

        leave_signals()
    yield target


@contextlib.contextmanager
def _folder(rank: int, world: int) -> Iterator[Path]:
    """A temporary folder that the ranks of one launcher share. Rank 0, which ends last, removes it."""
    if world < 2:
        with temporary_folder() as folder:
            yield folder
        return
    started = f"{os.getppid()} {os.environ.get('PADDLE_TRAINER_ENDPOINTS', '')}"
    shared = Path(tempfile.gettempdir()) / f"interlace-ranks-{hashlib.sha256(started.encode()).hexdigest()[:16]}"
    with writing(shared):
        shared.mkdir(exist_ok=True)
    try:
        yield shared
    finally:
        if rank == 0:
            shutil.rmtree(shared, ignore_errors=True)


def _own(target: str) -> OwnTarget | None:
    """A device of the user's own; None for the targets that Interlace knows."""
    if target in ("", "gpu", "cpu", "custom"):
        return None
    from interlace.local.own_target import find_own

    return find_own(target)
