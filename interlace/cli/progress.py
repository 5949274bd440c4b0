"""Progress lines on standard error while a command prints nothing else for some seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable

TERMINAL_S = (2.0, 10.0)
"""On a terminal: seconds of silence before the first line, and between lines."""
FILE_S = (10.0, 30.0)
"""The same if standard error is a file or a pipe."""


class Alive:
    """Prints what a command is doing, and for how long, while it prints nothing else.

    Args:
        command: Name of the command.
        doing: What it does, such as "planning 4 ranks".
        write: Prints a line; on standard error by default.
        wait_s: Seconds of silence before the first line, and between lines; the default depends on whether standard error is a terminal.
    """

    def __init__(
        self, command: str, doing: str, write: Callable[[str], None] | None = None, wait_s: tuple[float, float] | None = None
    ) -> None:
        self._command, self._doing, self._write = command, doing, write or _print
        self._first_s, self._again_s = wait_s or (TERMINAL_S if sys.stderr.isatty() else FILE_S)
        self._since_s, self._lines = time.monotonic(), 0
        self._end, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="interlace-alive", daemon=True)

    def __enter__(self) -> Alive:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end.set()
        self._thread.join()

    def now(self, doing: str) -> None:
        """Set what the command does now, and restart the count of seconds."""
        with self._lock:
            self._doing, self._since_s, self._lines = doing, time.monotonic(), 0

    def _run(self) -> None:
        while not self._end.wait(min(self._first_s, 0.5)):
            with self._lock:
                silent_s = time.monotonic() - self._since_s
                due = silent_s >= self._first_s + self._lines * self._again_s
                self._lines += due
            if due:
                self._write(f"interlace {self._command}: {self._doing}, {silent_s:.0f} s so far")


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # standard error is closed
        print(line, file=sys.stderr, flush=True)
