"""One rank of a local run: `python -m interlace.bridge.rank SCRIPT ARGS...`, started by `interlace.launch`.

Runs SCRIPT as if it had been started directly, records every loss its engine fetches and the final parameters, and
leaves a report in the run directory.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
import traceback
import types
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from interlace.bridge.cpu.install import RUN_DIR_VARIABLE, TIMEOUT_VARIABLE, install
from interlace.bridge.cpu.transport import DEFAULT_TIMEOUT_S, PeerLostError, Transport
from interlace.bridge.rank_report import Failure, Progress, RankReport, StepLoss, progress_path, write_report

PLACE_VARIABLE = "INTERLACE_PLACE"
PARENT_PIPE_VARIABLE = "INTERLACE_PARENT_FD"


class Recorder:
    """Losses, times and parameters of every engine this process runs."""

    def __init__(self, rank: int, run_dir: str) -> None:
        self.losses: list[StepLoss] = []
        self._rank = rank
        self._engines: list[Any] = []
        self._steps: dict[str, int] = {}
        self._progress = open(progress_path(run_dir, rank), "ab", buffering=0)  # noqa: SIM115 - open until the end

    def watch(self, engine_class: Any) -> None:
        """Wrap `Engine.run`; the arguments and the result stay the same."""
        run = engine_class.run

        def run_recorded(engine: Any, *args: Any, **kwargs: Any) -> Any:
            start_ns = time.perf_counter_ns()
            logs = run(engine, *args, **kwargs)
            self._record(engine, logs.get("loss"), time.perf_counter_ns() - start_ns)
            return logs

        engine_class.run = run_recorded

    def parameter_digests(self) -> dict[str, str]:
        """sha256 of dtype, shape and bits of every trainable parameter this rank holds, by name."""
        import paddle

        scope = paddle.static.global_scope()
        names = {name for engine in self._engines for name in _trainable_names(engine)}
        digests = {}
        for name in sorted(names):
            variable = scope.find_var(name)
            if variable is not None and variable.get_tensor()._is_initialized():
                digests[name] = _digest(np.asarray(variable.get_tensor()))
        return digests

    def _record(self, engine: Any, loss: Any, dur_ns: int) -> None:
        if engine not in self._engines:
            self._engines.append(engine)
        mode = engine._mode
        step = self._steps[mode] = self._steps.get(mode, 0) + 1
        entry = StepLoss(mode, step, dur_ns=dur_ns) if loss is None else _step_loss(mode, step, loss, dur_ns)
        self.losses.append(entry)
        mean = sum(entry.values) / len(entry.values) if entry.values else None
        line = Progress(self._rank, mode, step, dur_ns, mean)
        self._progress.write(msgspec.json.encode(line) + b"\n")


def main(arguments: list[str]) -> int:
    """Run one rank; returns the exit code of its process."""
    script, *rest = arguments
    rank = int(os.environ["PADDLE_TRAINER_ID"])
    world = int(os.environ["PADDLE_TRAINERS_NUM"])
    run_dir = os.environ[RUN_DIR_VARIABLE]
    if os.environ.get(PLACE_VARIABLE) != "gpu":  # there, Paddle's launcher stands between and keeps the pipe
        _end_with_parent()
    transport, recorder, failure = None, None, None
    try:
        transport = _start(rank, world, run_dir)
        _use_configuration()
        recorder = _recorder(rank, run_dir)
        run_script(script, rest)
    except BaseException as error:  # reported to the launcher, and printed to this rank's log
        failure = _failure_of(error)
    if failure is not None:
        sys.stderr.write(f"{failure.traceback}\n{failure.text}\n")
    losses = tuple(recorder.losses) if recorder else ()
    digests = recorder.parameter_digests() if recorder and failure is None else {}
    write_report(run_dir, RankReport(rank, world, losses, digests, _plan_summary(), failure))
    if failure is None and transport is not None:
        transport.close()
    return 0 if failure is None else 1


def _start(rank: int, world: int, run_dir: str) -> Transport | None:
    place, timeout_s = os.environ.get(PLACE_VARIABLE), float(os.environ.get(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_S))
    if place == "gpu":
        return None
    if place == "testbed":
        from testbed import world as testbed_world

        started: Transport = testbed_world.install(rank, world, run_dir, timeout_s)
        return started
    return install(rank, world, run_dir, timeout_s)


def _use_configuration() -> None:
    """With a configuration from outside, Interlace stands in the engine even if the script does not ask for it."""
    if os.environ.get("INTERLACE_CONFIG") and os.environ.get("INTERLACE_DISABLE") != "1":
        from interlace.bridge import hook

        hook.install()


def _recorder(rank: int, run_dir: str) -> Recorder:
    from paddle.distributed.auto_parallel.static.engine import Engine

    recorder = Recorder(rank, run_dir)
    recorder.watch(Engine)
    return recorder


def run_script(script: str, arguments: list[str]) -> None:
    """Execute `script` as `__main__`, with its folder first on the path and its own arguments."""
    path = Path(script).resolve()
    sys.argv = [script, *arguments]
    sys.path[0] = os.fspath(path.parent)
    module = types.ModuleType("__main__")
    module.__file__ = os.fspath(path)
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    try:
        exec(compile(path.read_bytes(), os.fspath(path), "exec"), module.__dict__)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


def _failure_of(error: BaseException) -> Failure:
    """The cause of a failure: Paddle's executor hides what a communication op raised behind a SystemError."""
    cause = _hidden_cause() or error
    text = "".join(traceback.format_exception_only(cause)).strip()
    if isinstance(error, SystemExit):
        text = f"the script ended with exit code {error.code}"
    lines = "".join(traceback.format_exception(error))
    return Failure(text, lines, isinstance(cause, PeerLostError))


def _hidden_cause() -> BaseException | None:
    ops = sys.modules.get("interlace.bridge.cpu.ops")
    return ops.first_failure() if ops is not None else None


def _plan_summary() -> dict[str, Any] | None:
    """What Interlace planned in this process; None where the script never switched it on."""
    hook = sys.modules.get("interlace.bridge.hook")
    summary = None if hook is None else hook.last_plan_summary()
    return None if summary is None else dict(summary)


def _trainable_names(engine: Any) -> list[str]:
    parameters = engine._model.parameters() if engine._model is not None else []
    return [parameter.name for parameter in parameters if parameter.trainable]


def _digest(array: np.ndarray[Any, Any]) -> str:
    head = f"{array.dtype}{array.shape}".encode()
    return hashlib.sha256(head + array.tobytes()).hexdigest()


def _step_loss(mode: str, step: int, loss: Any, dur_ns: int) -> StepLoss:
    array = np.asarray(loss)
    values = tuple(map(float, array.ravel())) if np.isfinite(array).all() else ()  # JSON has no NaN; the bits keep it
    return StepLoss(mode, step, str(array.dtype), array.shape, array.tobytes().hex(), values, dur_ns)


def _end_with_parent() -> None:
    """End this process and its children when the launcher disappears: its end of the pipe closes even if it is killed."""
    descriptor = os.environ.pop(PARENT_PIPE_VARIABLE, "")
    if not descriptor:
        return

    def wait() -> None:
        os.read(int(descriptor), 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, name="interlace-parent", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
