"""Temporary folders that are removed even where their processes are killed, and folders into which one command at a time writes.

They rest on locks of the system, which end with the process that holds them, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from interlace.errors import ConfigError
from interlace.files import writing
from interlace.interrupts import uninterrupted

IN_USE = ".in-use"
"""A file in a temporary folder; who uses the folder holds a shared lock on it. A folder without this file is never removed by others."""
CLAIM = ".interlace-lock"
"""A file in a folder that a command writes into."""
PREFIX = "interlace-"
POLL_S = 0.01


@dataclass(slots=True)
class Held:
    """A temporary folder of this process."""

    path: Path
    lock: int

    def keep(self) -> None:
        """Leave the folder to the user."""
        with suppress(OSError):
            (self.path / IN_USE).unlink()
        os.close(self.lock)

    def remove(self) -> None:
        """Remove the folder; last the file that lets another process remove the rest."""
        with suppress(FileNotFoundError):
            for inside in self.path.iterdir():
                if inside.is_dir() and not inside.is_symlink():
                    shutil.rmtree(inside, ignore_errors=True)
                elif inside.name != IN_USE:
                    inside.unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def hold(prefix: str = PREFIX, within: Path | None = None) -> Held:
    """Make a temporary folder, and remove those of this prefix whose processes have ended. Raises OutputError where it cannot be made."""
    base = within or Path(tempfile.gettempdir())
    _remove_left(base, prefix)
    with uninterrupted(), writing(base):
        made = Path(tempfile.mkdtemp(prefix=f".new-{prefix}", dir=base))
        try:
            lock = os.open(made / IN_USE, os.O_RDWR | os.O_CREAT, 0o600)
            _lock(lock, fcntl.LOCK_SH)
            path = made.with_name(made.name.removeprefix(".new-"))
            made.rename(path)  # nobody looks at it before it is locked
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
            raise
    return Held(path, lock)


@contextmanager
def temporary_folder(prefix: str = PREFIX, within: Path | None = None) -> Iterator[Path]:
    """A temporary folder that goes at the end of the block, or, where this process is killed, when the next one is made."""
    held = hold(prefix, within)
    try:
        yield held.path
    finally:
        with uninterrupted():
            held.remove()


@contextmanager
def shared_folder(path: Path) -> Iterator[Path]:
    """A temporary folder of all processes that use this path at the same time; the last one that ends removes it. Raises OutputError where
    it cannot be made."""
    with uninterrupted(), writing(path):
        while (lock := _joined(path)) is None:
            time.sleep(POLL_S)
    try:
        yield path
    finally:
        with uninterrupted():
            if _lock(lock, fcntl.LOCK_EX):
                Held(path, lock).remove()
            else:
                os.close(lock)


def _joined(path: Path) -> int | None:
    """A shared lock on a folder, which is made where it is missing; None while another process removes it."""
    path.mkdir(mode=0o700, exist_ok=True)
    try:
        lock = os.open(path / IN_USE, os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return None
    if _lock(lock, fcntl.LOCK_SH) is not False and _is(lock, path / IN_USE):
        return lock
    os.close(lock)
    return None


def join(folder: str | os.PathLike[str]) -> None:
    """Use a temporary folder of another process, until this one ends; nothing where the folder is none."""
    with suppress(FileNotFoundError):
        _lock(os.open(os.path.join(folder, IN_USE), os.O_RDWR), fcntl.LOCK_SH)


def _remove_left(base: Path, prefix: str) -> None:
    """Remove folders whose lock nobody holds. Those of other users are left alone."""
    for path in base.glob(f"{prefix}*"):
        try:
            lock = os.open(path / IN_USE, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if os.fstat(lock).st_uid == os.getuid() and _lock(lock, fcntl.LOCK_EX) and _is(lock, path / IN_USE):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


@contextmanager
def claimed(folder: Path, name: str = "") -> Iterator[None]:
    """Make a folder (an absolute path), and keep other commands from writing there until the block ends; if it fails, folders that were
    made go again. Where `name` is that of the only file that is to be written, others may write other files there at the same time.

    Raises ConfigError where another command writes there, OutputError where the folder cannot be made.
    """
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    locks: list[tuple[int, Path]] = []
    done = False
    try:
        with uninterrupted(), writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            locks.append(_claim(folder / CLAIM, fcntl.LOCK_SH if name else fcntl.LOCK_EX))
            if name:
                locks.append(_claim(folder / f"{CLAIM}-{name.partition('.')[0]}", fcntl.LOCK_EX))
        yield
        done = True
    finally:
        with uninterrupted():
            for lock, path in reversed(locks):
                _give_back(lock, path)
            for each in () if done else new:
                with suppress(OSError):
                    each.rmdir()


def _claim(path: Path, kind: int) -> tuple[int, Path]:
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if _lock(lock, kind) is False:
            os.close(lock)
            raise ConfigError(f"{path.parent}: another command of Interlace is writing there; wait for its end, or choose another place")
        if _is(lock, path):
            return lock, path
        os.close(lock)  # the one before removed it in between


def _give_back(lock: int, path: Path) -> None:
    if _lock(lock, fcntl.LOCK_EX) is not False:  # nobody shares it
        path.unlink(missing_ok=True)
    os.close(lock)


def _lock(lock: int, kind: int) -> bool | None:
    """Take a lock if nobody holds another one; False where somebody does, None on a file system without locks."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is(lock: int, path: Path) -> bool:
    """Whether the file of that name is still the one that is open."""
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False
