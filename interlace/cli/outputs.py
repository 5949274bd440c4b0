"""Rules for all outputs: folders are created, a path that cannot be written is refused before any work, and files are written
completely or not at all, before anything is printed about them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from interlace.errors import ConfigError
from interlace.interrupts import uninterrupted


def check_file(option: str, target: str | os.PathLike[str] | None) -> None:
    """Refuse a file that could not be written; None is no file.

    Raises:
        ConfigError: It is a folder, may not be written, or its folder cannot be made; with the option.
    """
    if target is None:
        return
    path = Path(target).absolute()
    if path.is_dir():
        raise ConfigError(f"{option} {os.fspath(target)!r}: is a folder; expected the name of a file")
    if path.exists() and not os.access(path, os.W_OK):
        raise ConfigError(f"{option} {os.fspath(target)!r}: may not be written; choose another name")
    check_folder(option, path.parent, os.fspath(target))


def check_folder(option: str, folder: str | os.PathLike[str], target: str = "") -> None:
    """Refuse a folder that could not be created or written; creates none.

    Raises:
        ConfigError: With the option, and the part of the path that prevents it.
    """
    path = Path(folder).absolute()
    known = next(each for each in (path, *path.parents) if each.exists())
    said = target or os.fspath(folder)
    if not known.is_dir():
        raise ConfigError(f"{option} {said!r}: {known} is a file; expected a folder there")
    if not os.access(known, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {said!r}: nothing may be written in {known}; choose another folder")


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A temporary folder. At the end of the block all its files are moved to `folder`; none if the block fails.

    Raises:
        ConfigError: There is a folder with the name of one of the files.
    """
    wanted = folder.absolute()
    known = next(each for each in (wanted, *wanted.parents) if each.is_dir())
    with tempfile.TemporaryDirectory(prefix=".interlace-", dir=known) as made:
        yield Path(made)
        with uninterrupted():
            _move(Path(made), wanted)


def _move(made: Path, folder: Path) -> None:
    moves = [(path, folder / path.relative_to(made)) for path in sorted(made.rglob("*")) if path.is_file()]
    for _, target in moves:
        if target.is_dir():
            raise ConfigError(f"{target}: is a folder; expected a file there, or nothing")
    for path, target in moves:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)


def write_json(target: str | os.PathLike[str] | None, document: Any) -> None:
    """Write the JSON output of a command; nothing if `target` is None."""
    if target is not None:
        import msgspec

        from interlace.ir.dump import write_whole

        write_whole(Path(target), msgspec.json.format(msgspec.json.encode(document)) + b"\n")
