"""Messages to the user from a process whose output goes into a file or a pipe."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "INTERLACE_SAY_FD"
SAID: set[str] = set()


def say(text: str) -> None:
    """Print a line where the user sees it: on the standard error of the command that started this process, or our own."""
    line = f"interlace: {text}\n".encode()
    try:
        os.write(int(os.environ.get(VARIABLE, "2")), line)
    except OSError:  # a launcher in between closed it
        os.write(2, line)


def say_once(text: str) -> None:
    """The same, once a process and only of rank 0."""
    if text not in SAID and os.environ.get("PADDLE_TRAINER_ID", "0") == "0":
        say(text)
    SAID.add(text)


@contextmanager
def heard() -> Iterator[int]:
    """A descriptor for a child to inherit, as `VARIABLE` in its environment."""
    descriptor = os.dup(2)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
