"""One rank's program, built in a separate process (`interlace.local.build_rank`) without the other ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from interlace.errors import LaunchError, ScriptError
from interlace.local import processes

BUILDER = [sys.executable, "-m", "interlace.local.build_rank"]
_TAIL_LINES = 12


@dataclass(frozen=True, slots=True)
class Request:
    """What to build: the program of one rank of a script.

    Attributes:
        script, arguments: The script and its arguments.
        rank, world: The rank, and the number of ranks.
        options: Options of the builder, such as `--materialize`.
        environment: Variables that are set in addition to this process's environment.
    """

    script: str
    arguments: tuple[str, ...]
    rank: int
    world: int
    options: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class Build:
    """A process that builds a rank's program, the path for the program, and the output of the process."""

    request: Request
    path: Path
    child: processes.Child
    out: BinaryIO
    err: BinaryIO

    @classmethod
    def start(
        cls,
        request: Request,
        path: Path,
        more: Mapping[str, str] | None = None,
        *,
        has_stages: bool = False,
    ) -> Build:
        """Start the process. `more` are further environment variables, which must not affect what is built (numbers of threads). With
        `has_stages`, the first ranks of the other stages are built too (`interlace.local.stage_forks`)."""
        out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - read when the process has ended
        command = [*BUILDER, "--rank", str(request.rank), "--world", str(request.world), "--out", str(path), *request.options]
        command += ["--stages"] if has_stages else []
        environment = {**os.environ, **(more or {}), **dict(request.environment)}
        return cls(request, path, processes.start([*command, request.script, *request.arguments], environment, out, err), out, err)

    def others(self) -> list[dict[str, Any]]:
        """What the ended process printed about the other programs that it built (`--stages`)."""
        return [found for found in _documents(_text(self.out)) if found.get("rank", self.request.rank) != self.request.rank]

    def record(self, shown_as: str) -> dict[str, Any]:
        """What the ended process printed about its program. `shown_as`: name for the folder of `path` in messages. Raises ScriptError or
        LaunchError, with the end of the process's output, if it built no program."""
        code, request = self.child.process.returncode, self.request
        if code:
            tail = "\n".join(_text(self.err).strip().splitlines()[-_TAIL_LINES:]).replace(str(self.path.parent), shown_as)
            tail = tail or f"its process ended with code {code} and without a message; is there room left in {tempfile.gettempdir()}?"
            kind = ScriptError if code == 2 else LaunchError
            how = f" (ended by {signal.Signals(-code).name})" if code < 0 else ""
            raise kind(f"rank {request.rank} of {request.script} could not be built{how}:\n{tail}")
        result = next(iter(_documents(_text(self.out))), None)
        if result is None or not self.path.is_file():
            raise ScriptError(
                f"{request.script}: rank {request.rank} ended by itself before its program was built (os._exit?); expected "
                "dist.to_static(...) with a loss and an optimizer, and model.train()"
            )
        return result


def _documents(text: str) -> Iterator[dict[str, Any]]:
    """The lines that are JSON objects, decoded, the last first; the script may print other lines, also at its end."""
    for line in reversed(text.splitlines()):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                yield found


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
