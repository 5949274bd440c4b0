"""The stored programs."""

from __future__ import annotations

import tarfile
from functools import cache

import msgspec

from interlace.ir import Program, parse
from tests.captured.build import ARCHIVE, MANIFEST, Case, member, ranks


@cache
def _files() -> dict[str, bytes]:
    with tarfile.open(ARCHIVE) as archive:
        files = {entry.name: archive.extractfile(entry) for entry in archive}
        return {name: file.read() for name, file in files.items() if file is not None}


def cases() -> dict[str, Case]:
    """What the archive holds the programs of."""
    return msgspec.json.decode(_files()[MANIFEST], type=dict[str, Case])


@cache
def programs_of(name: str) -> list[Program]:
    """Of one case; the others are not parsed."""
    return [parse(_files()[member(name, rank)].decode(), name) for rank in ranks(name)]
