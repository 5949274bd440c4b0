"""One rule for all outputs: folders are made as they are needed, and what cannot be written is refused before any work."""

from __future__ import annotations

import os
from pathlib import Path

from interlace.errors import ConfigError


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
    """Refuse a folder that is not there and could not be made, or where nothing may be written; makes none.

    Raises:
        ConfigError: With the option and the part of the path that hinders.
    """
    path = Path(folder).absolute()
    known = next(each for each in (path, *path.parents) if each.exists())
    said = target or os.fspath(folder)
    if not known.is_dir():
        raise ConfigError(f"{option} {said!r}: {known} is a file; expected a folder there")
    if not os.access(known, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {said!r}: nothing may be written in {known}; choose another folder")
