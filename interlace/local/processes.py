"""Processes that a command starts. Each leads its own session, and ends with all processes that it started, however the command ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Protocol, TypeVar

from interlace.interrupts import uninterrupted
from interlace.notice import VARIABLE as SAY_VARIABLE
from interlace.notice import heard

PARENT_PIPE_VARIABLE = "INTERLACE_PARENT_FD"
"""Environment variable with a child's end of a pipe, which closes when the parent ends, killed or not
(`interlace.local.rank.end_with_parent`)."""
_TERMINATE_GRACE_S = 2.0
_POLL_S = 0.02


@dataclass(slots=True)
class Child:
    """A started process, and the parent's end of the pipe that is open as long as the parent lives."""

    process: subprocess.Popen[bytes]
    alive_fd: int


def start(command: Sequence[str], env: Mapping[str, str], stdout: IO[bytes], stderr: IO[bytes] | int = subprocess.STDOUT) -> Child:
    """Start a process that can print on our standard error with `say`. `env` is its whole environment."""
    child_fd, alive_fd = os.pipe()
    try:
        with heard() as said_fd:
            process = subprocess.Popen(
                command,
                env={**env, PARENT_PIPE_VARIABLE: str(child_fd), SAY_VARIABLE: str(said_fd)},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                pass_fds=[child_fd, said_fd],
            )
    except BaseException:
        os.close(alive_fd)
        raise
    finally:
        os.close(child_fd)
    return Child(process, alive_fd)


class Task(Protocol):
    """Work that a process does."""

    child: Child


T = TypeVar("T", bound=Task)


def run_all(starts: Sequence[Callable[[], T]], at_once: int) -> Iterator[tuple[int, T]]:
    """Run processes, up to `at_once` at the same time; yields each, with its index, when it has ended, and ends the others if the caller
    stops."""
    waiting, running = list(enumerate(starts)), list[tuple[int, T]]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                number, start = waiting.pop(0)
                with uninterrupted():
                    running.append((number, start()))
            done = [each for each in running if each[1].child.process.poll() is not None]
            for each in done:
                yield each
                running.remove(each)
                end([each[1].child])
            if not done:
                time.sleep(_POLL_S)
    finally:
        end(task.child for _, task in running)


def end(children: Iterable[Child]) -> None:
    """End processes and all that they started: SIGTERM, and SIGKILL to what is left two seconds later."""
    ending = list(children)
    for child in ending:
        if child.process.poll() is None:
            _signal_group(child.process, signal.SIGTERM)
    deadline_s = time.monotonic() + _TERMINATE_GRACE_S
    for child in ending:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline_s - time.monotonic()))
        _signal_group(child.process, signal.SIGKILL)
        child.process.wait()
        os.close(child.alive_fd)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
