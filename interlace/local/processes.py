"""Processes that a command starts: each leads a session of its own, and ends with all it started when the command ends in any way."""

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
"""Names the end of a pipe in a child; the pipe closes when the parent ends, killed or not (`interlace.local.rank.end_with_parent`)."""
_TERMINATE_GRACE_S = 2.0
_POLL_S = 0.02


@dataclass(slots=True)
class Child:
    """A started process, and the parent's end of the pipe that says that the parent lives."""

    process: subprocess.Popen[bytes]
    alive_fd: int


def start(command: Sequence[str], env: Mapping[str, str], stdout: IO[bytes], stderr: IO[bytes] | int = subprocess.STDOUT) -> Child:
    """Start a process that may `say` things on our standard error. `env` is all of its environment."""
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
    """Run processes, several at once; gives each with its number when it has ended, and ends the others if the caller stops."""
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
    """End processes with all they started: SIGTERM, and SIGKILL to what is left of them two seconds later."""
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
