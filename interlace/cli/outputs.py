"""Rules for all outputs: folders are created, a path that cannot be written is refused before any work, no command overwrites what it
reads, and files are written completely or not at all, before anything is printed about them."""

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
    """Refuse a file that could not be written; None is no file. Raises ConfigError, with the option, where it is a folder or a device, may
    not be written, or its folder cannot be made."""
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
    """Refuse a folder that could not be created or written; creates none. Raises ConfigError, with the option, and the part of the path
    that prevents it."""
    path = Path(folder).absolute()
    known = next(each for each in (path, *path.parents) if os.path.lexists(each))
    said = target or os.fspath(folder)
    if known.is_symlink() and not known.exists():
        raise ConfigError(
            f"{option} {said!r}: {known} is a link to {os.readlink(known)}, which is not there; expected a folder, remove the link or make "
            "what it leads to"
        )
    if not known.is_dir():
        raise ConfigError(f"{option} {said!r}: {known} is a file; expected a folder there")
    if not os.access(known, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {said!r}: nothing may be written in {known}; choose another folder")


def check_apart(outputs: Mapping[str, Name | Iterable[Name] | None], inputs: Iterable[Name | None]) -> None:
    """Refuse single files that could not be written (`check_file`); outputs that would overwrite what the command reads, or each other; and
    single files that would overwrite other programs of a folder of which it reads some. Raises ConfigError with the option and the file.

    `outputs` has for each option the file that it names, or all files that will be written into its folder. Of `inputs`, None and names
    that lead to no file are none.
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
                    f"{option}: {os.fspath(name)} would overwrite {others[path]}, which belongs to what this command reads; "
                    "choose another place"
                )
            if written.setdefault(path, option) != option:
                raise ConfigError(f"{option}: {os.fspath(name)} is what {written[path]} writes; choose another name")


def _files(path: Path) -> list[Path]:
    """A file; of a folder what commands read of it."""
    if not path.is_dir():
        return [path] if path.exists() else []
    return [*path.glob("*.ilp*"), *path.glob("captured/*"), path / "sweep.json"]


def check_no_others(option: str, folder: Path, names: Iterable[str]) -> None:
    """Refuse a folder that has programs of ranks besides those that are to be written there: with them it would hold a mixture. Raises
    ConfigError with the names of the files that would be left."""
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
    """A temporary folder. At the end of the block all its files are moved to `folder`, which is made if it is not there; none if the block
    fails. Files of an earlier command (`instead_of`) go, where this one does not write them.

    No other command may write to the folder meanwhile; where `name` is that of the only file, others may write other files there. Raises
    ConfigError where another command writes there, or there is a folder with the name of one of the files; OutputError where something
    cannot be written.
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
    """Move all files; gives their names."""
    moves = [(path, folder / path.relative_to(made)) for path in sorted(made.rglob("*")) if path.is_file() and path.name != IN_USE]
    for _, target in moves:
        if target.is_dir():
            raise ConfigError(f"{target}: is a folder; expected a file there, or nothing")
    for path, target in moves:
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
    return {target.name for _, target in moves}


def write_json(target: Name | None, document: Any) -> None:
    """Write the JSON output of a command; nothing if `target` is None."""
    if target is not None:
        from interlace.ir import dump

        dump.write_json(Path(target), document)
