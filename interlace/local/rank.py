"""One rank of a local run: `python -m interlace.local.rank SCRIPT ARGS...`, started by `interlace.local.launch`.

Runs SCRIPT as if it had been started directly, records every loss that its engine fetches and the final parameters, and
writes a report into the run directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from interlace.cpu.install import RUN_DIR_VARIABLE, TIMEOUT_VARIABLE, install
from interlace.cpu.transport import DEFAULT_TIMEOUT_S, PeerLostError, Transport
from interlace.errors import BudgetError, ConfigError, InterlaceError, LoadError, OutputError
from interlace.files import writing
from interlace.installed import unusable_paddle
from interlace.ir.kinds import DATA, KEYWORD, PARAMETER
from interlace.local.attach import attach, run_script
from interlace.local.own_target import find_own
from interlace.local.processes import PARENT_PIPE_VARIABLE
from interlace.local.rank_report import (
    CANNOT_WRITE,
    STATE_KINDS,
    STEPS_VARIABLE,
    Failure,
    Progress,
    RankReport,
    StepLoss,
    output_path,
    progress_path,
    read_report,
    write_report,
)
from interlace.outside import TARGET_VARIABLE
from interlace.report.checks import EVERYTHING, RANKS
from interlace.temporary import join

MASTER_WEIGHT = re.compile(r"_fp32_master_\d+$")
"""End of the name that Paddle's optimizers give the float32 copy of a parameter of lower precision."""


class Recorder:
    """Losses, times and parameters of every engine that this process runs."""

    def __init__(self, rank: int, run_dir: str) -> None:
        self.losses: list[StepLoss] = []
        self._rank = rank
        self._engines: list[Any] = []
        self._steps: dict[str, int] = {}
        self._progress_path = progress_path(run_dir, rank)
        self._progress = open(self._progress_path, "ab", buffering=0)  # noqa: SIM115 - open until the end

    def watch(self, engine_class: Any) -> None:
        """Wrap `Engine.run`, and `_prepare_program`, which builds the program of a mode; arguments and results stay the same."""
        run, prepare = engine_class.run, engine_class._prepare_program

        def prepare_told(engine: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
            self._tell(Progress(self._rank, mode, 0, 0))
            return prepare(engine, mode, *args, **kwargs)

        def run_recorded(engine: Any, *args: Any, **kwargs: Any) -> Any:
            start_ns = time.perf_counter_ns()
            logs = run(engine, *args, **kwargs)
            self._record(engine, logs.get("loss"), time.perf_counter_ns() - start_ns)
            return logs

        engine_class.run, engine_class._prepare_program = run_recorded, prepare_told

    def parameter_digests(self) -> dict[str, str]:
        """sha256 of dtype, shape and bits of every trainable parameter that this rank holds, by name."""
        return _digests({name for engine in self._engines for name in _trainable_names(engine)})

    def state_digests(self) -> dict[str, dict[str, str]]:
        """The same for other state that lasts from step to step, by kind and name."""
        kinds = {name: kind for engine in self._engines for name, kind in _lasting_names(engine).items()}
        return {kind: _digests({name for name, its in kinds.items() if its == kind}) for kind in STATE_KINDS}

    def _record(self, engine: Any, loss: Any, dur_ns: int) -> None:
        if engine not in self._engines:
            self._engines.append(engine)
        mode = engine._mode
        step = self._steps[mode] = self._steps.get(mode, 0) + 1
        entry = StepLoss(mode, step, dur_ns=dur_ns) if loss is None else _step_loss(mode, step, loss, dur_ns)
        self.losses.append(entry)
        mean = sum(entry.values) / len(entry.values) if entry.values else None
        self._tell(Progress(self._rank, mode, step, dur_ns, mean))

    def _tell(self, line: Progress) -> None:
        with writing(self._progress_path):
            self._progress.write(msgspec.json.encode(line) + b"\n")


def main(arguments: list[str]) -> int:
    """Run one rank; returns the exit code of its process."""
    script, *rest = arguments
    rank = int(os.environ["PADDLE_TRAINER_ID"])
    world = int(os.environ["PADDLE_TRAINERS_NUM"])
    run_dir = os.environ[RUN_DIR_VARIABLE]
    if os.environ.get(TARGET_VARIABLE) != "gpu":  # on GPUs Paddle's launcher is the parent and keeps the pipe
        end_with_parent()
    transport, recorder, failure = None, None, None
    join(run_dir)
    try:
        sys.stdout = _Copied(sys.stdout, output_path(run_dir, rank))
        transport = _start(rank, world, run_dir)
        attach()
        recorder = _recorder(rank, run_dir)
        run_script(script, rest)
    except BaseException as error:  # reported to the launcher, and printed to this rank's log
        failure = failure_of(error, script)
    if failure is not None:
        with contextlib.suppress(OSError):  # the log's disk may be full; the report has the error too
            sys.stderr.write(failure.traceback)
    losses = tuple(recorder.losses) if recorder else ()
    digests, state = (recorder.parameter_digests(), recorder.state_digests()) if recorder and failure is None else ({}, {})
    try:
        write_report(run_dir, RankReport(rank, world, losses, digests, _plan_summary(), failure, state))
    except OutputError:
        return CANNOT_WRITE
    if failure is None and transport is not None:
        transport.close()
    return 0 if failure is None else 1


class _Copied:
    """The script's standard output, with a copy in a file that the launcher shows."""

    def __init__(self, stream: Any, path: Path) -> None:
        self._stream, self._path = stream, path
        self._copy = open(path, "a", encoding="utf-8", errors="replace", buffering=1)  # noqa: SIM115 - open until the end

    def write(self, text: str) -> int:
        """Write to both."""
        with writing(self._path):
            self._copy.write(text)
        written: int = self._stream.write(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _start(rank: int, world: int, run_dir: str) -> Transport | None:
    target, timeout_s = os.environ.get(TARGET_VARIABLE, ""), float(os.environ.get(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_S))
    if target == "gpu":
        return None
    if unusable := unusable_paddle(RANKS):
        raise ConfigError(unusable)
    if target not in ("", "cpu"):
        return find_own(target).install(rank, world, run_dir, timeout_s)
    return install(rank, world, run_dir, timeout_s)


def _recorder(rank: int, run_dir: str) -> Recorder:
    from paddle.distributed.auto_parallel.static.engine import Engine

    from interlace.bridge import mesh

    mesh.install()
    if not unusable_paddle(EVERYTHING):
        from interlace.bridge import hook

        hook.install()  # before the recorder, so that a step counts once if its plan fails and another one repeats it
    recorder = Recorder(rank, run_dir)
    recorder.watch(Engine)
    given = os.environ.get(STEPS_VARIABLE)
    if given:
        _train_only(Engine, read_report(given, rank))
    return recorder


def _train_only(engine_class: Any, report: RankReport | None) -> None:
    """Neither build nor run modes other than training; their steps return what they returned in an earlier run, so that the script
    continues."""
    from paddle.distributed.auto_parallel.api import DistModel

    steps = {mode: iter([x for x in (report.losses if report else ()) if x.mode == mode]) for mode in ("eval", "predict")}
    prepare, call = engine_class._prepare_program, DistModel.__call__

    def prepare_training(engine: Any, mode: str, *args: Any, **kwargs: Any) -> None:
        if mode == "train":
            prepare(engine, mode, *args, **kwargs)

    def call_training(model: Any, *args: Any) -> Any:
        if model._mode == "train":
            return call(model, *args)
        step = next(steps[model._mode], None)
        if step is None or not step.raw_hex:
            return None
        return np.frombuffer(bytes.fromhex(step.raw_hex), step.dtype).reshape(step.shape).copy()

    engine_class._prepare_program, DistModel.__call__ = prepare_training, call_training


def failure_of(error: BaseException, script: str) -> Failure:
    """The failure to report for an error. If a communication operation raised it, that cause is reported, not the SystemError by which
    Paddle's executor replaces it."""
    if isinstance(error, SystemExit):
        return _exit_of(error)
    cause = _hidden_cause() or error
    lines = "".join(traceback.format_exception(error))
    if isinstance(cause, (ConfigError, BudgetError, LoadError, OutputError)):
        return Failure(str(cause), lines, users=True)
    users = isinstance(cause, SyntaxError) and cause.filename == os.fspath(Path(script).resolve())
    text = "".join(traceback.format_exception_only(cause)).strip()
    if isinstance(cause, InterlaceError):
        text = f"{type(cause).__name__}: {cause}"
    return Failure(text, lines, isinstance(cause, PeerLostError), users)


def _exit_of(error: SystemExit) -> Failure:
    """The failure of a script that ended itself. A message, or exit code 2 as from argparse, means that its user is at fault."""
    if isinstance(error.code, int):
        return Failure(f"the script ended with exit code {error.code}", users=error.code == 2, exited=True)
    return Failure(f"the script ended: {error.code}", f"{error.code}\n", users=True)


def _hidden_cause() -> BaseException | None:
    ops = sys.modules.get("interlace.cpu.ops")
    return ops.first_failure() if ops is not None else None


def _plan_summary() -> dict[str, Any] | None:
    """Summary of what Interlace planned in this process; None if the script never turned it on."""
    hook = sys.modules.get("interlace.bridge.hook")
    summary = None if hook is None else hook.last_plan_summary()
    return None if summary is None else dict(summary)


def _trainable_names(engine: Any) -> list[str]:
    parameters = engine._model.parameters() if engine._model is not None else []
    return [parameter.name for parameter in parameters if parameter.trainable]


def _lasting_names(engine: Any) -> dict[str, str]:
    """Name -> kind of all persistable values in the engine's programs, except trainable parameters."""
    trainable = set(_trainable_names(engine))
    model = engine._model
    buffers = {each.name for each in (*model.parameters(), *model.buffers())} - trainable if model is not None else set()
    found = {}
    for program in engine._pir_dense_main_progs.values():
        block = program.global_block()
        given = [(op.name(), value) for op in block.ops if op.name() in (DATA, PARAMETER) for value in op.results() if value.persistable]
        for maker, value in (*given, *((KEYWORD, value) for value in block.kwargs().values())):
            if value.name not in trainable:
                found[value.name] = _kind_of(value.name, maker, buffers)
    return found


def _kind_of(name: str, maker: str, buffers: set[str]) -> str:
    if name in buffers:
        return "buffer"
    if maker == KEYWORD:
        return "gradient buffer"
    return "master weight" if MASTER_WEIGHT.search(name) else "optimizer state"


def _digests(names: set[str]) -> dict[str, str]:
    """sha256 by name, for those names that have contents in this process."""
    import paddle

    scope = paddle.static.global_scope()
    digests = {}
    for name in sorted(names):
        variable = scope.find_var(name)
        if variable is not None and variable.get_tensor()._is_initialized():
            digests[name] = _digest(np.asarray(variable.get_tensor()))
    return digests


def _digest(array: np.ndarray[Any, Any]) -> str:
    head = f"{array.dtype}{array.shape}".encode()
    return hashlib.sha256(head + array.tobytes()).hexdigest()


def _step_loss(mode: str, step: int, loss: Any, dur_ns: int) -> StepLoss:
    array = np.asarray(loss)
    values = tuple(map(float, array.ravel())) if np.isfinite(array).all() else ()  # JSON has no NaN; the bits keep it
    return StepLoss(mode, step, str(array.dtype), array.shape, array.tobytes().hex(), values, dur_ns)


def end_with_parent() -> None:
    """End this process and its children when the launcher disappears, whose end of the pipe closes even if it is killed."""
    descriptor = os.environ.pop(PARENT_PIPE_VARIABLE, "")
    if not descriptor:
        return

    def wait() -> None:
        os.read(int(descriptor), 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, name="interlace-parent", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
