"""Files that keep what a trial of plans decided, for later runs of the same programs on the same devices with the same versions, and which
plan was in its first step when a run ended. No Paddle here."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from interlace.errors import OutputError
from interlace.ir.dump import write_json
from interlace.planning.trial import Contender, Result

ALIKE = 0.1
"""By how large a share the device memory of two runs may differ for one to rely on what the other measured."""


class TrialOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The plan that a trial chose, the results of all plans that it tried, the number of steps that it took, and the device memory that
    plans could count on (0: not known)."""

    taken: Contender
    results: tuple[Result, ...] = ()
    steps: int = 0
    memory_bytes: int = 0

    def holds_in(self, memory_bytes: int) -> bool:
        """Whether a run has as much device memory for plans, up to `ALIKE`; with another amount they may be others."""
        return abs(self.memory_bytes - memory_bytes) <= ALIKE * max(self.memory_bytes, memory_bytes)


class Beginning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan that is in its first step, and the process of rank 0 that runs it."""

    name: str
    host: str
    process: int


class Kept(msgspec.Struct, frozen=True):
    """What is known from earlier runs: the choice and its file (empty path if there is none), and in `ended` the names of plans in whose
    first step a run died."""

    choice: TrialOutcome | None = None
    path: str = ""
    ended: tuple[str, ...] = ()


class Store:
    """The files of one key (see `key_of`), in a folder that only rank 0 reads and writes. Writing creates the folder if it is missing."""

    def __init__(self, folder: Path, key: str) -> None:
        self.choice_path, self.beginning_path = folder / f"tuned-{key}.json", folder / f"tuned-{key}.first-step.json"

    def read(self) -> Kept:
        """What is known; unreadable files count as missing."""
        kept = Kept()
        with suppress(OSError, msgspec.DecodeError):
            choice = msgspec.json.decode(self.choice_path.read_bytes(), type=TrialOutcome)
            kept = Kept(choice, os.fspath(self.choice_path))
        return msgspec.structs.replace(kept, ended=tuple(each.name for each in self._begun() if not _is_alive(each)))

    def write(self, choice: TrialOutcome) -> bool:
        """Store a choice; returns whether it could be written."""
        return _write(self.choice_path, choice)

    def begin(self, name: str) -> None:
        """Note that a plan is about to run its first step."""
        _write(self.beginning_path, [*self._others(), Beginning(name, socket.gethostname(), os.getpid())])

    def end(self) -> None:
        """Note that this process completed the first step, or reported an error."""
        others = self._others()
        if others:
            _write(self.beginning_path, others)
        else:
            with suppress(OSError):
                self.beginning_path.unlink()

    def _others(self) -> list[Beginning]:
        return [each for each in self._begun() if (each.host, each.process) != (socket.gethostname(), os.getpid())]

    def _begun(self) -> list[Beginning]:
        with suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(self.beginning_path.read_bytes(), type=list[Beginning])
        return []


def _write(path: Path, content: object) -> bool:
    try:
        write_json(path, content)
    except OutputError:
        return False
    return True


def _is_alive(each: Beginning) -> bool:
    """Whether the process that noted it may still be in that step. On another host that cannot be known, so it counts as ended."""
    if each.host != socket.gethostname():
        return False
    try:
        os.kill(each.process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return each.process != os.getpid()


def key_of(texts: Sequence[str]) -> str:
    """A digest of everything that determines which plan is the fastest."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
