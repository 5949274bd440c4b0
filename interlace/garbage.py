"""Memory while plans are made: Python's garbage collection, and what the C library does with freed memory."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

NEW_OBJECTS = 10_000_000
"""How many new objects are looked at together: planning makes few cycles. With Python's 700 a sixth of it goes into the search for them,
with 50,000 a twentieth; with 1,000,000 a twenty-fifth, and of 5 million objects it found 24,000 unused."""
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt` (malloc.h)."""
KEPT_BYTES, LARGEST_BYTES = 1 << 30, 32 << 20
"""How much freed memory a process keeps, and up to which size an array is taken from it (glibc allows no more)."""


@contextmanager
def not_collected() -> Iterator[None]:
    """Within, Python looks for no garbage: a process that is copied here begins like that, until it calls `own_objects_only`."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def own_objects_only() -> None:
    """In a copy of a process: leave alone what there was before. Objects of other libraries that are ended here may wait for threads that
    a copy does not have (Paddle's executors do, and end the process with signal 11)."""
    gc.freeze()
    gc.enable()


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Within, Python looks for garbage after `NEW_OBJECTS` new objects, or later or never if it did so before."""
    first, *older = gc.get_threshold()
    gc.set_threshold(max(first, NEW_OBJECTS) if first else 0, *older)
    try:
        yield
    finally:
        gc.set_threshold(first, *older)


def keep_freed_memory() -> None:
    """For the rest of this process, and in its copies: let freed arrays leave their memory to the next ones. glibc returns that of arrays
    of megabytes to the system each time, and the system clears it again: a quarter of the time in which waits of the host are chosen."""
    with suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(MMAP_THRESHOLD, LARGEST_BYTES)
