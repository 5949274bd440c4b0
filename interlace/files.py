"""Reading of files that may be anything: the size is bounded, and a file that cannot be read, or written, is an error of one sentence."""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from interlace.errors import InterlaceError, OutputError

MIB = 1 << 20
GZIP_MAGIC = b"\x1f\x8b"
CACHE_VARIABLE = "INTERLACE_CACHE"


def read_file(path: str | os.PathLike[str], most_bytes: int, what: str, error: type[InterlaceError]) -> bytes:
    """The bytes of a regular file, unpacked where it is compressed by gzip. Raises `error` where it is no regular file, larger than
    `most_bytes` (also unpacked), may not be read, or is cut short; `what` says what was expected, such as "a dump that `interlace dump`
    wrote"."""
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise error(f"{path}: cannot be read, it is {_kind(mode)}; expected {what}")
        with open(path, "rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as failed:
        raise error(f"{path}: cannot be read ({failed.strerror or failed}); expected {what}") from failed
    if len(data) > most_bytes:
        raise error(f"{path}: more than {most_bytes // MIB} MiB; expected {what}")
    return _unpacked(data, path, most_bytes, what, error) if data[:2] == GZIP_MAGIC else data


def read_text(path: str | os.PathLike[str], most_bytes: int, what: str, error: type[InterlaceError]) -> str:
    """The same as UTF-8 text."""
    try:
        return read_file(path, most_bytes, what, error).decode()
    except UnicodeDecodeError as failed:
        raise error(f"{path}: cannot be read: not UTF-8 text (byte {failed.start}); expected {what}") from failed


def not_a_file(path: str | os.PathLike[str]) -> str:
    """What a path is that no file may take the place of, such as "a device"; empty for a file, a link to one, and where nothing is.

    `/dev/stdout` is none either where it is redirected to a file: it leads there through `/proc`.
    """
    if os.path.islink(path) and os.readlink(path).startswith("/proc/"):
        return "an open file of a process"
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return ""
    return "" if stat.S_ISREG(mode) else _kind(mode)


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn a failure of the block, which writes this file or makes this folder, into an OutputError that names it: every OSError."""
    try:
        yield
    except OSError as failed:
        raise OutputError(os.fspath(path), failed.strerror or str(failed)) from failed


def _unpacked(data: bytes, path: str | os.PathLike[str], most_bytes: int, what: str, error: type[InterlaceError]) -> bytes:
    parts, left = [], most_bytes + 1
    try:
        while data:
            member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
            part = member.decompress(data, left)
            parts.append(part)
            left -= len(part)
            if left <= 0:
                raise error(f"{path}: more than {most_bytes // MIB} MiB when unpacked; expected {what}")
            if not member.eof:
                raise error(f"{path}: cannot be read: its compressed data end early; expected {what}")
            data = member.unused_data
    except zlib.error as failed:
        raise error(f"{path}: cannot be read ({failed}); expected {what}") from failed
    return b"".join(parts)


def _kind(mode: int) -> str:
    for is_kind, name in ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket")):
        if is_kind(mode):
            return name
    return "a device"


def cache_folder() -> Path:
    """Where what a run found out or compiled is kept for later ones: what `INTERLACE_CACHE` names, else the user's cache folder."""
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "interlace"
