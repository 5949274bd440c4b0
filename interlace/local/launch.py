"""Start the ranks of a local run, watch them, and end them. No Paddle here.

Without a GPU, or a GPU build of Paddle, the ranks are processes of `interlace.local.rank` on the CPU or on a custom target. On GPUs,
Paddle's own launcher starts the same module.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from interlace.cpu.install import RUN_DIR_VARIABLE, TIMEOUT_VARIABLE, rank_environment
from interlace.errors import ConfigError, InterlaceError, LaunchError, ScriptError
from interlace.files import writing
from interlace.interrupts import as_interrupts, uninterrupted
from interlace.local import processes
from interlace.local.own_target import find_own, search_folder
from interlace.local.rank_report import CANNOT_WRITE, Failure, Progress, RankReport, output_path, progress_path, read_report
from interlace.outside import TARGET_VARIABLE
from interlace.temporary import claimed, temporary_folder

RANK_MODULE = "interlace.local.rank"
KNOWN = ("cpu", "gpu")
"""Targets on which Interlace itself can start ranks."""
_POLL_S = 0.05
ORIGIN_GRACE_S = 1.0  # after the first rank fails, how long to wait for another rank that reports the real cause
_LOG_TAIL_LINES = 15

OnProgress = Callable[[Progress], None]
OnOutput = Callable[[int, str], None]


class LaunchResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The reports of all ranks, in order; `wall_s` includes starting them."""

    reports: tuple[RankReport, ...]
    wall_s: float
    log_dir: str


@dataclass(slots=True)
class _Rank:
    """A process of the run and its log; on GPUs, rank 0 is Paddle's launcher."""

    rank: int
    child: processes.Child
    log: BinaryIO


@dataclass(slots=True)
class _Run:
    """The processes of a run.

    Attributes:
        ranks: The processes that were started.
        read_bytes: Name of a file that a rank writes -> how far it has been read.
        modes: Modes whose programs ranks reported.
    """

    world: int
    run_dir: Path
    log_dir: Path
    ranks: list[_Rank] = field(default_factory=list)
    read_bytes: dict[str, int] = field(default_factory=dict)
    modes: set[str] = field(default_factory=set)


def launch(
    script: str | os.PathLike[str],
    args: Sequence[str],
    world: int,
    env: Mapping[str, str],
    run_dir: str | os.PathLike[str] | None,
    log_dir: str | os.PathLike[str],
    timeout_s: float,
    on_progress: OnProgress | None = None,
    on_output: OnOutput | None = None,
) -> LaunchResult:
    """Run `script` on `world` ranks and return their reports.

    `env` is added to this process's environment. `run_dir` must be empty; None creates one and removes it at the end.
    `log_dir` gets `rank<r>.log`. `timeout_s` is how long a rank waits for another in one communication.
    `on_output` is called with a rank and one line that its script printed.

    Raises LaunchError, with the first failed rank's own error, or ScriptError if the script or its options are at fault; all other
    ranks are then ended at once. Whatever happens, no process, socket or shared memory is left.

    It has nine parameters because it is the only entry to a run for the command line, tests and the testbed.
    """
    start_s = time.monotonic()
    logs = Path(log_dir)
    with as_interrupts(), claimed(logs.absolute()), _run_directory(run_dir) as directory:
        run = _Run(world, directory, logs)
        try:
            _start(run, Path(script), list(args), world, dict(env), timeout_s)
            _watch(run, on_progress or (lambda _: None), on_output or (lambda rank, line: None))
            reports = _collect(run, world)
        finally:
            _end(run)
        return LaunchResult(reports, time.monotonic() - start_s, os.fspath(logs))


def has_gpu_paddle() -> bool:
    """Whether this machine shows an NVIDIA GPU and the installed Paddle is a GPU build; does not import Paddle."""
    if shutil.which("nvidia-smi") is None and not Path("/dev/nvidia0").exists():
        return False
    try:
        importlib.metadata.distribution("paddlepaddle-gpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def require_target(name: str) -> None:
    """Check, before anything starts, that ranks can run on a target. Raises ConfigError, with what to do, if this machine does not have
    it."""
    if name == "gpu" and not has_gpu_paddle():
        raise ConfigError("--target gpu: no GPU, or the installed Paddle is not a GPU build; use --target cpu, or install paddlepaddle-gpu")
    if name not in KNOWN:
        find_own(name).require()


def cpu_command(script: Path, args: Sequence[str]) -> list[str]:
    """Command line of one CPU rank."""
    return [sys.executable, "-m", RANK_MODULE, os.fspath(script), *args]


def gpu_command(script: Path, args: Sequence[str], world: int, log_dir: Path) -> list[str]:
    """Command line that starts all ranks through Paddle's launcher, one GPU each."""
    bootstrap = Path(__file__).with_name("rank.py")
    launcher = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", str(world)]
    return [*launcher, "--log_dir", os.fspath(log_dir), os.fspath(bootstrap), os.fspath(script), *args]


def _cpu_environment(rank: int, world: int) -> dict[str, str]:
    """Environment of a CPU rank, with one thread per library, because there may be more ranks than cores."""
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {**rank_environment(rank, world), **dict.fromkeys(threads, "1"), "PYTHONUNBUFFERED": "1"}


def _start(run: _Run, script: Path, args: list[str], world: int, env: dict[str, str], timeout_s: float) -> None:
    common = {**os.environ, **env, RUN_DIR_VARIABLE: os.fspath(run.run_dir), TIMEOUT_VARIABLE: repr(timeout_s)}
    common.pop("POD_NAME", None)
    target = common.get(TARGET_VARIABLE, "") or ("gpu" if has_gpu_paddle() else "cpu")
    if target == "gpu":
        command = gpu_command(script, args, world, run.log_dir)
        _spawn(run, 0, command, {**common, TARGET_VARIABLE: target}, "launcher.log")
        return
    if target not in KNOWN:
        find_own(target)
        common["PYTHONPATH"] = os.pathsep.join([search_folder(target), *filter(None, [common.get("PYTHONPATH")])])
    for rank in range(world):
        _spawn(run, rank, cpu_command(script, args), {**common, **_cpu_environment(rank, world)}, f"rank{rank}.log")


def _spawn(run: _Run, rank: int, command: list[str], env: dict[str, str], log_name: str) -> None:
    with writing(run.log_dir / log_name):
        log = open(run.log_dir / log_name, "wb")  # noqa: SIM115 - open as long as the process
    with uninterrupted():
        run.ranks.append(_Rank(rank, processes.start(command, env, log), log))


def _watch(run: _Run, on_progress: OnProgress, on_output: OnOutput) -> None:
    """Wait until all ranks are done. Raises LaunchError or ScriptError when one fails."""
    while True:
        codes = [rank.child.process.poll() for rank in run.ranks]  # before reading, so that all is read that an ended rank wrote
        _read_progress(run, on_progress)
        _read_output(run, on_output)
        if any(code not in (None, 0) for code in codes):
            raise _explain(run)
        if all(code == 0 for code in codes):
            return
        time.sleep(_POLL_S)


def _read_progress(run: _Run, on_progress: OnProgress) -> None:
    for rank in range(run.world):
        for line in _new_lines(run, progress_path(run.run_dir, rank)):
            progress = msgspec.json.decode(line, type=Progress)
            run.modes.add(progress.mode)
            if progress.step:
                on_progress(progress)


def _read_output(run: _Run, on_output: OnOutput) -> None:
    for rank in range(run.world):
        for line in _new_lines(run, output_path(run.run_dir, rank)):
            on_output(rank, line.decode(errors="replace"))


def _new_lines(run: _Run, path: Path) -> list[bytes]:
    """Complete lines that were added to a file since it was last read."""
    if not path.exists():
        return []
    with open(path, "rb") as stream:
        stream.seek(run.read_bytes.get(path.name, 0))
        complete, end, _ = stream.read().rpartition(b"\n")
    run.read_bytes[path.name] = run.read_bytes.get(path.name, 0) + len(complete) + len(end)
    return complete.split(b"\n") if end else []


def _explain(run: _Run) -> InterlaceError:
    """The error of a failed run. Waits a moment for the real cause; ranks that only lost their peer come last, in one line."""
    deadline_s = time.monotonic() + ORIGIN_GRACE_S
    while time.monotonic() < deadline_s and any(rank.child.process.poll() is None for rank in run.ranks):
        time.sleep(_POLL_S)
    known = _failures(run)
    origins = {rank: failure for rank, failure in known.items() if not failure.follow_up} or known
    ordered = sorted(origins, key=lambda rank: _ended_ns(run, rank))
    first, users = ordered[0], all(failure.users for failure in origins.values())
    lines = []
    for text in dict.fromkeys(origins[rank].text for rank in ordered):
        ranks = [rank for rank in ordered if origins[rank].text == text]
        same = users and len(ranks) == len(origins)
        lines.append(text if same else f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))} failed: {text}")
    if not users or origins[first].exited:
        lines.append(f"log of rank {first}: {run.log_dir / f'rank{first}.log'}; its last lines:")
        lines.extend(f"    {line}" for line in _tail(run, first))
    others = [str(rank) for rank in range(run.world) if rank not in origins]
    if others and not users:
        lines.append(f"rank(s) {', '.join(others)} only lost their peer and were ended")
    text = "\n".join(lines)
    return ScriptError(text) if users else LaunchError(text, frozenset(run.modes))


def _failures(run: _Run) -> dict[int, Failure]:
    """Why ranks ended, from their reports or, if they left none, from the exit codes of their processes."""
    reports = {rank: read_report(run.run_dir, rank) for rank in range(run.world)}
    found = {rank: report.failure for rank, report in reports.items() if report is not None and report.failure is not None}
    for rank in run.ranks:
        code = rank.child.process.poll()
        if code and (reports[rank.rank] is None or not found):
            found.setdefault(rank.rank, Failure(_exit_text(code, run.run_dir)))
    return found


def _exit_text(code: int, run_dir: Path) -> str:
    if code < 0:
        return f"killed by signal {signal.Signals(-code).name}"
    if code == CANNOT_WRITE:
        return f"{run_dir}: nothing could be written there; is its disk full? TMPDIR names another place"
    return f"ended with exit code {code} and without a report"


def _ended_ns(run: _Run, rank: int) -> int:
    """When a rank reported its failure; a rank that could not report counts as first."""
    path = run.run_dir / f"rank{rank}.json"
    return path.stat().st_mtime_ns if path.exists() else 0


def _tail(run: _Run, rank: int) -> list[str]:
    path = run.log_dir / f"rank{rank}.log"
    text = path.read_text(errors="replace") if path.exists() else ""
    return text.splitlines()[-_LOG_TAIL_LINES:]


def _collect(run: _Run, world: int) -> tuple[RankReport, ...]:
    reports = [read_report(run.run_dir, rank) for rank in range(world)]
    missing = [str(rank) for rank, report in enumerate(reports) if report is None]
    if missing:
        raise LaunchError(
            f"rank(s) {', '.join(missing)} ended without a report; expected one of each of {world} ranks. Look into {run.log_dir}"
        )
    return tuple(report for report in reports if report is not None)


def _end(run: _Run) -> None:
    """End all processes of the run with all they started."""
    processes.end(rank.child for rank in run.ranks)
    for rank in run.ranks:
        rank.log.close()


@contextlib.contextmanager
def _run_directory(given: str | os.PathLike[str] | None) -> Iterator[Path]:
    """The directory that the ranks share: a fresh one that is removed at the end, even if this process is killed, or the caller's, which
    must be empty."""
    if given is None:
        with temporary_folder() as made:
            yield made
        return
    path = Path(given)
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise LaunchError(f"run directory {path} is not empty: expected a fresh one for each run")
    yield path
    for socket_file in path.glob("*.sock"):
        socket_file.unlink()
