"""A word to the user from a process whose output goes into a file or a pipe."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "INTERLACE_SAY_FD"


def say(text: str) -> None:
    """Print a line where the user sees it: on the standard error of the command that started this process, or our own."""
    line = f"interlace: {text}\n".encode()
    try:
        os.write(int(os.environ.get(VARIABLE, "2")), line)
    except OSError:  # a launcher in between closed it
        os.write(2, line)


@contextmanager
def heard() -> Iterator[int]:
    """A descriptor for a child to inherit, as `VARIABLE` in its environment."""
    descriptor = os.dup(2)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
