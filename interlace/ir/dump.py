"""Programs as files: one JSON document with schema and versions, gzip-compressed if the name ends in `.gz`."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from interlace.errors import OutputError, ProgramError
from interlace.files import GZIP_MAGIC, not_a_file, read_file, writing
from interlace.ir.program import Program
from interlace.ir.verify import require_bounds, verify

SCHEMA = 3
"""Version of the fields of `Program`; raised with every change of them. 2 added `Job.host_waits`, 3 `Program.equivalent_ranks`."""
READABLE = (1, 2, SCHEMA)
"""Schemas that can be read; fields that a schema lacks get their defaults."""
SUFFIX = ".ilp"
MOST_BYTES = 256 << 20
"""Limit of an uncompressed dump's size, a hundred times that of one rank of a large model."""


class Header(msgspec.Struct, frozen=True):
    """First fields of a dump, decoded alone to give a clear error for an unknown schema."""

    interlace_schema: int
    interlace: str = ""


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The training script that a program was built from.

    Attributes:
        name: Name of its file.
        digest: Digest of its text.
        arguments: Its command-line arguments.
    """

    name: str
    digest: str
    arguments: tuple[str, ...] = ()

    @classmethod
    def of(cls, path: str | Path, arguments: Sequence[str]) -> Script:
        """The record of a script file and its arguments."""
        return cls(Path(path).name, hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16], tuple(arguments))

    def __str__(self) -> str:
        return shlex.join([self.name, *(["--", *self.arguments] if self.arguments else [])])


class _Made(msgspec.Struct, frozen=True):
    """The script of a dump, decoded alone."""

    script: Script | None = None


class Dump(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A dump file. `script` is set by `interlace dump`."""

    interlace_schema: int
    interlace: str
    program: Program
    script: Script | None = None


def encode(program: Program, script: Script | None = None) -> bytes:
    """The dump as bytes; equal programs and scripts give equal bytes."""
    from interlace.version import VERSION

    return msgspec.json.encode(Dump(SCHEMA, VERSION, program, script), order="deterministic")


def decode(data: bytes, where: str = "dump") -> Program:
    """The program of a dump. Raises ProgramError, which names `where`, if the data is truncated, no dump, or of an unknown schema."""
    try:
        header = msgspec.json.decode(data, type=Header)
        if header.interlace_schema not in READABLE:
            raise ProgramError(
                f"{where}: dump schema {header.interlace_schema} (Interlace {header.interlace or 'unknown'}), this "
                f"version reads schemas {', '.join(map(str, READABLE[:-1]))} and {SCHEMA}; make the dump again with this version"
            )
        return msgspec.json.decode(data, type=Dump).program
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if data and b'"interlace_schema"' not in data:
            raise ProgramError(f"{where}: {_what_it_is(where)}") from error
        raise ProgramError(f"{where}: not a whole Interlace dump ({error}); make the dump again") from error


def _what_it_is(where: str) -> str:
    """What to say about a file that is no dump."""
    if where.endswith(".py"):
        return (
            f"is a script, not a dump or a plan; `interlace dump {where} --world N` makes dumps of it, and `interlace plan` plans of these"
        )
    return "is no dump and no plan of Interlace; expected a file, or a folder of files, that `interlace dump` or `interlace plan` wrote"


def save(program: Program, path: str | Path, script: Script | None = None) -> Path:
    """Write a dump, completely or not at all; returns its path. Raises OutputError if it cannot be written."""
    path = Path(path)
    data = encode(program, script)
    write_whole(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def load(path: str | Path) -> Program:
    """Read a dump and check its program. Raises ProgramError if there is no such file, it is not a complete dump of a readable schema, or
    the program breaks a rule of the IR."""
    path = Path(path)
    program = decode(read_file(path, MOST_BYTES, "a dump that `interlace dump` wrote", ProgramError), str(path))
    try:
        require_bounds(program)
        verify(program)
    except ProgramError as error:
        raise ProgramError(f"{path}: no sound program; make the dump again: {error}") from error
    return program


def is_dump(path: str | Path) -> bool:
    """Whether a file is a dump or a plan, complete or not, judged by its first bytes."""
    with open(path, "rb") as file:
        start = file.read(64)
    return start.startswith(b'{"interlace_schema"') or (start.startswith(GZIP_MAGIC) and Path(path).name.endswith(f"{SUFFIX}.gz"))


def script_of(path: str | Path) -> Script | None:
    """The script that the program of a dump file was built from; None if not known. Raises ProgramError if the file cannot be read."""
    data = read_file(path, MOST_BYTES, "a dump that `interlace dump` wrote", ProgramError)
    try:
        return msgspec.json.decode(data, type=_Made).script
    except msgspec.MsgspecError as error:
        raise ProgramError(f"{path}: not a whole Interlace dump ({error}); make the dump again") from error


def find_dumps(paths: Sequence[str | Path], *, one: bool = False) -> list[Path]:
    """The dump files at paths of files and folders, those of a folder in the order of the numbers in their names. Raises ProgramError if
    there is no dump at a path, or, with `one`, more than one in all."""
    found: list[Path] = []
    for path in map(Path, paths):
        inside = [path] if path.is_file() else programs_in(path)
        if not inside:
            raise ProgramError(
                f"{path}: {_what_is_there(path)}; expected a file, or a folder of files, that `interlace dump` or `interlace plan` wrote"
            )
        found += inside
    if one and len(found) != 1:
        raise ProgramError(f"{paths[0]}: has {len(found)} dumps, expected one; choose one of {', '.join(p.name for p in found)}")
    return found


def _what_is_there(path: Path) -> str:
    """What is at a path that has no dump."""
    if path.is_dir():
        return f"a folder without *{SUFFIX} files"
    return not_a_file(path) or ("a link that leads to no file" if path.is_symlink() else "no such file or folder")


def programs_in(folder: Path) -> list[Path]:
    """The dump files of a folder, without hidden ones, which a killed command left unfinished."""
    return sorted((p for p in folder.glob(f"*{SUFFIX}*") if p.is_file() and not p.name.startswith(".")), key=_number)


def _number(path: Path) -> tuple[int, str]:
    digits = re.findall(r"\d+", path.name)
    return (int(digits[0]) if digits else -1, path.name)


def write_json(path: Path, document: Any) -> None:
    """Write a document as JSON with line breaks. Raises OutputError."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(document)) + b"\n")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file through a temporary one beside it, so that an interruption leaves no incomplete file. Raises OutputError if it cannot be
    written; an existing file then stays as it was."""
    other = not_a_file(path)
    if other:
        raise OutputError(str(path), f"is {other}, which no file may replace")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
