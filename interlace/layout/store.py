"""Built programs and results about them, stored by content, so that nothing is done twice, in this run or a later one."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from interlace.errors import LaunchError, ScriptError
from interlace.installed import versions
from interlace.ir import Program, load
from interlace.ir.dump import SUFFIX, write_json
from interlace.local.building import Build, Request
from interlace.local.processes import run_all
from interlace.local.stage_forks import path_of

PROGRAMS, FOUND = "programs", "found"
"""Subfolders of a store."""
FAULTS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Signals that a process causes itself; Paddle fails with these on some layouts."""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class Built(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of building a program.

    Attributes:
        refused: The error of the script or of Paddle, if there is no program; else empty.
        digest: Digest of the program's file.
        sources: Path of each module of the user that was read -> its digest.
    """

    refused: str = ""
    digest: str = ""
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    sources: dict[str, str] = {}


@dataclass(slots=True)
class Store:
    """A folder of programs and results.

    Attributes:
        folder: The folder; created if it is missing.
        at_once: Number of processes that run at the same time.
        built: Number of programs that this run built itself.
        may_fork: Whether one build may give the programs of all stages.
    """

    folder: Path
    at_once: int
    say: Callable[[str], None]
    built: int = 0
    may_fork: bool = True
    _keys: dict[Request, str] = field(default_factory=dict)
    """Keys as computed before anything was built, because a script may write a file that its arguments name."""

    def path(self, request: Request) -> Path:
        """The file of a request's program, once it is built."""
        return self.folder / PROGRAMS / f"{self._key(request)}{SUFFIX}.gz"

    def program(self, request: Request) -> Program:
        """The program of a request, which must have been built."""
        return load(self.path(request))

    def found(self, request: Request) -> Built | None:
        """The result of building it earlier; None if it was not built, or one of its sources has changed."""
        path = self._record(request)
        with suppress(OSError, msgspec.MsgspecError):
            record = msgspec.json.decode(path.read_bytes(), type=Built)
            same = all(_digest(Path(source)) == digest for source, digest in record.sources.items())
            if same and (record.refused or _digest(self.path(request)) == record.digest):
                return record
        return None

    def build(self, requests: Sequence[Request], *, has_stages: bool = False) -> list[Built]:
        """Build what was not built before; with `has_stages`, each build also gives the first ranks of the other stages.

        Refusals are stored too, as the script would refuse again.
        """
        known = {each: self.found(each) for each in requests}
        missing = [each for each, built in known.items() if built is None]
        (self.folder / PROGRAMS).mkdir(parents=True, exist_ok=True)
        forked = has_stages and self.may_fork
        for number, build in run_all([self._starting(each, has_stages=forked) for each in missing], self.at_once):
            made = known[missing[number]] = self._ended(build)
            if not made.refused:
                self._keep_others(build)
            self._keep(build.request, made)
        return [built for each in requests if (built := known[each]) is not None]

    def _starting(self, request: Request, *, has_stages: bool) -> Callable[[], Build]:
        return lambda: Build.start(request, self.path(request), more=_ONE_THREAD, has_stages=has_stages)

    def _ended(self, build: Build) -> Built:
        rank, said = build.request.rank, " ".join(build.request.arguments)
        try:
            record = build.record(str(self.folder / PROGRAMS))
        except (ScriptError, LaunchError) as error:
            code, text = build.child.process.returncode, str(error)
            if code < 0 and -code not in FAULTS:  # killed from outside: says nothing about the program
                raise
            self.say(f"refused: rank {rank} of {said}")
            script = Path(build.request.script)
            return Built(
                refused=text.splitlines()[0].rstrip(":") if code < 0 else _reason(text), sources={os.path.realpath(script): _digest(script)}
            )
        self.say(f"built: rank {rank} of {said}, {record['seconds']:.0f} s")
        return _built(build.path, record)

    def _keep(self, request: Request, made: Built) -> None:
        write_json(self._record(request), made)
        self.built += not made.refused

    def _keep_others(self, build: Build) -> None:
        """Store the programs of other stages that a build gave, if forks build the same as separate processes do; for each script, one
        program is compared to find out."""
        for record in build.others():
            request, path = replace(build.request, rank=record["rank"]), path_of(build.path, record["rank"])
            if self.may_fork and self._is_as_built(request, path, record):
                os.replace(path, self.path(request))
                self._keep(request, _built(self.path(request), record))
            else:
                self.may_fork = False
                path.unlink(missing_ok=True)

    def _is_as_built(self, request: Request, path: Path, record: dict[str, Any]) -> bool:
        compared = self.finding_path("fork", [record["sources"], request.options])
        if not compared.is_file():
            self._compare(request, path, compared)
        return bool(msgspec.json.decode(compared.read_bytes())["same"])

    def _compare(self, request: Request, path: Path, compared: Path) -> None:
        apart = path.with_name(f"apart-{path.name}")
        ((_, build),) = run_all([lambda: Build.start(request, apart, more=_ONE_THREAD)], 1)
        made = self._ended(build)
        same = not made.refused and made.digest == _digest(path)
        apart.unlink(missing_ok=True)
        if not same:
            self.say("one build for all stages gives other programs than one for each: from here on each is built by itself")
        write_json(compared, {"same": same})

    def _key(self, request: Request) -> str:
        if request not in self._keys:
            self._keys[request] = _key(request)
        return self._keys[request]

    def _record(self, request: Request) -> Path:
        return self.folder / PROGRAMS / f"{self._key(request)}.json"

    # ------------------------------------------------------------------------------------------------------------ findings

    def finding_path(self, name: str, about: Any) -> Path:
        return self.folder / FOUND / f"{name}-{_digest_of([versions(), about])}.json"


def _built(path: Path, record: dict[str, Any]) -> Built:
    return Built("", _digest(path), record["seconds"], record["peak_rss_bytes"], record["sources"])


def _key(request: Request) -> str:
    """A digest of everything that determines a program, except the modules it reads, which are known only afterwards (`Built.sources`)."""
    files = [_digest(Path(each)) for each in request.arguments if Path(each).is_file()]
    set_outside = {name: value for name, value in os.environ.items() if name.startswith(("INTERLACE_", "FLAGS_"))}
    return _digest_of([versions(), os.path.realpath(request.script), msgspec.to_builtins(request), files, set_outside])


def _digest_of(document: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(document, order="deterministic")).hexdigest()[:24]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _reason(text: str) -> str:
    """The last meaningful line of a script's output, as the reason why it ended."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "ended without a word"
