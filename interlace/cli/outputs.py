"""Rules for all outputs: folders are created; a path that cannot be written is refused before any work; no command overwrites what it
reads; files are written completely or not at all, before anything is printed about them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from interlace.errors import ConfigError, OutputError
from interlace.files import not_a_file, writing
from interlace.interrupts import uninterrupted
from interlace.temporary import IN_USE, claimed, temporary_folder

Name = str | os.PathLike[str]


def check_file(option: str, target: Name | None) -> None:
    """Refuse a file that could not be written; None is accepted. Raises ConfigError, with the option, if it is a folder or a device, if it
    may not be written, or if its folder cannot be created."""
    if target is None:
        return
    path = Path(target).absolute()
    other = not_a_file(path)
    if other:
        raise ConfigError(f"{option} {os.fspath(target)!r}: is {other}; expected the name of a file")
    if path.exists() and not os.access(path, os.W_OK):
        raise ConfigError(f"{option} {os.fspath(target)!r}: may not be written; choose another name")
    check_folder(option, path.parent, os.fspath(target))


def check_folder(option: str, folder: Name, target: str = "") -> None:
    """Refuse a folder that could not be created or written, without creating it. Raises ConfigError with the option, the folder (or
    `target`, if given), and the part of the path that prevents it."""
    path = Path(folder).absolute()
    known = next(each for each in (path, *path.parents) if os.path.lexists(each))
    said = target or os.fspath(folder)
    if known.is_symlink() and not known.exists():
        raise ConfigError(
            f"{option} {said!r}: {known} is a link to {os.readlink(known)}, which does not exist; expected a folder: remove the link or "
            "create its target"
        )
    if not known.is_dir():
        raise ConfigError(f"{option} {said!r}: {known} is a file; expected a folder there")
    if not os.access(known, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {said!r}: nothing may be written in {known}; choose another folder")


def check_apart(outputs: Mapping[str, Name | Iterable[Name] | None], inputs: Iterable[Name | None]) -> None:
    """Refuse single files that could not be written (`check_file`); outputs that would overwrite what the command reads, or each other; and
    single files that would overwrite a program in a folder from which the command reads another program.

    Args:
        outputs: Option -> the file that it names, or all files that will be written into its folder.
        inputs: Files and folders that the command reads; None and names without a file are ignored.

    Raises:
        ConfigError: An output is refused; the message has the option and the file.
    """
    for option, names in outputs.items():
        if names is None or isinstance(names, (str, os.PathLike)):
            check_file(option, names)
    given = [Path(name) for name in inputs if name]
    read = {os.path.realpath(file): file for path in given for file in _files(path)}
    others = {os.path.realpath(file): file for path in given if ".ilp" in path.name and path.is_file() for file in _files(path.parent)}
    written: dict[str, str] = {}
    for option, names in outputs.items():
        for name in [] if names is None else [names] if isinstance(names, (str, os.PathLike)) else names:
            path = os.path.realpath(name)
            if path in read:
                raise ConfigError(
                    f"{option}: {os.fspath(name)} would overwrite {read[path]}, which this command reads; choose another place"
                )
            if names is name and path in others:
                raise ConfigError(
                    f"{option}: {os.fspath(name)} would overwrite {others[path]}, which belongs to the programs that this command reads; "
                    "choose another place"
                )
            if written.setdefault(path, option) != option:
                raise ConfigError(f"{option}: {os.fspath(name)} is also written by {written[path]}; choose another name")


def _files(path: Path) -> list[Path]:
    """The file, or those files of a folder that commands read."""
    if not path.is_dir():
        return [path] if path.exists() else []
    return [*path.glob("*.ilp*"), *path.glob("captured/*"), path / "sweep.json"]


def check_no_others(option: str, folder: Path, names: Iterable[str]) -> None:
    """Refuse a folder that has programs of ranks other than those to be written, as the result would be a mixture. Raises ConfigError with
    the names of the files that would remain."""
    from interlace.ir.dump import programs_in

    left = sorted({path.name for path in programs_in(folder)} - set(names))
    if left:
        shown = ", ".join(left[:4]) + (", ..." if len(left) > 4 else "")
        raise ConfigError(
            f"{option} {folder}: has {shown} of an earlier command, which this one would not replace; remove the folder, or "
            "choose another one"
        )


@contextmanager
def staged(folder: Path, name: str = "", instead_of: Sequence[str] = ()) -> Iterator[Path]:
    """Yields a temporary folder. At the end of the block all its files are moved to `folder`, which is created if it does not exist; if the
    block fails, none is moved. Files of an earlier command with names in `instead_of` are removed unless this command writes them.

    No other command may write to the folder at the same time. If only one file is written, give its `name`: then others may write other
    files there.

    Raises:
        ConfigError: Another command is writing there, or a folder has the name of one of the files.
        OutputError: Something cannot be written.
    """
    wanted = folder.absolute()
    with claimed(wanted, name), temporary_folder(".interlace-", wanted) as made:
        try:
            yield made
        except OutputError as error:
            raise OutputError(error.path.replace(str(made), str(folder)), error.reason) from error
        with uninterrupted():
            moved = _move(made, wanted)
            for left in instead_of:
                if left not in moved:
                    (wanted / left).unlink(missing_ok=True)


def _move(made: Path, folder: Path) -> set[str]:
    """Move all files of `made` to `folder`; returns their names."""
    moves = [(path, folder / path.relative_to(made)) for path in sorted(made.rglob("*")) if path.is_file() and path.name != IN_USE]
    for _, target in moves:
        if target.is_dir():
            raise ConfigError(f"{target}: is a folder; expected a file, or no such name")
    for path, target in moves:
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
    return {target.name for _, target in moves}


def write_json(target: Name | None, document: Any) -> None:
    """Write the JSON output of a command; do nothing if `target` is None."""
    if target is not None:
        from interlace.ir import dump

        dump.write_json(Path(target), document)
