"""One rank's program, built in a process of its own (`interlace.local.build_rank`) with nothing of the other ranks."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from interlace.errors import LaunchError, ScriptError
from interlace.local import processes

BUILDER = [sys.executable, "-m", "interlace.local.build_rank"]
_TAIL_LINES = 12


@dataclass(frozen=True, slots=True)
class Request:
    """A rank's program of a script.

    Attributes:
        script, arguments: What runs.
        rank, world: As which rank it is run, and of how many.
        options: Of the builder, such as `--materialize`.
        environment: What is set for it besides this process's own.
    """

    script: str
    arguments: tuple[str, ...]
    rank: int
    world: int
    options: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class Build:
    """A process that builds a rank's program: the path of the program, and the output of the process."""

    request: Request
    path: Path
    child: processes.Child
    out: BinaryIO
    err: BinaryIO

    @classmethod
    def start(cls, request: Request, path: Path, builder: Sequence[str] = BUILDER, more: Mapping[str, str] | None = None) -> Build:
        """Start it; `more` is set for the process too, and says nothing of what is built (numbers of threads)."""
        out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - read when the process has ended
        command = [*builder, "--rank", str(request.rank), "--world", str(request.world), "--out", str(path), *request.options]
        environment = {**os.environ, **(more or {}), **dict(request.environment)}
        return cls(request, path, processes.start([*command, request.script, *request.arguments], environment, out, err), out, err)

    def record(self, shown_as: str) -> dict[str, Any]:
        """What the ended process printed about its program; `shown_as`: what messages call the folder of its path.

        Raises:
            ScriptError, LaunchError: It built none; with the end of what it said.
        """
        code, request = self.child.process.returncode, self.request
        if code:
            tail = "\n".join(_text(self.err).strip().splitlines()[-_TAIL_LINES:]).replace(str(self.path.parent), shown_as)
            tail = tail or f"its process ended with code {code} and without a word; is there room left in {tempfile.gettempdir()}?"
            kind = ScriptError if code == 2 else LaunchError
            raise kind(f"rank {request.rank} of {request.script} could not be built:\n{tail}")
        result = _last_document(_text(self.out))
        if result is None or not self.path.is_file():
            raise ScriptError(
                f"{request.script}: rank {request.rank} ended by itself before its program was built (os._exit?); expected "
                "dist.to_static(...) with a loss and an optimizer, and model.train()"
            )
        return result


def _last_document(text: str) -> dict[str, Any] | None:
    """The last line that is a JSON object, decoded; the script may print more lines when it ends."""
    for line in reversed(text.splitlines()):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return None


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
