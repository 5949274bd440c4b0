"""The stored programs."""

from __future__ import annotations

import tarfile
from functools import cache

import msgspec

from interlace.ir import Program, parse
from tests.captured.build import ARCHIVE, MANIFEST, Case, member, ranks


@cache
def stored() -> tuple[dict[str, Case], dict[str, Program]]:
    """What the archive holds: its cases, and programs by their names in it."""
    with tarfile.open(ARCHIVE) as archive:
        files = {entry.name: archive.extractfile(entry) for entry in archive}
        data = {name: file.read() for name, file in files.items() if file is not None}
    cases = msgspec.json.decode(data.pop(MANIFEST), type=dict[str, Case])
    return cases, {name: parse(each.decode(), name) for name, each in data.items()}


def programs_of(name: str) -> list[Program]:
    """Of one case, without reading the others."""
    with tarfile.open(ARCHIVE) as archive:
        files = [archive.extractfile(member(name, rank)) for rank in ranks(name)]
        return [parse(file.read().decode(), name) for file in files if file is not None]
