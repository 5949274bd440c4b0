"""Python's garbage collection while plans are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 10_000_000
"""How many new objects are looked at together: planning makes few cycles. With Python's 700 a sixth of it goes into the search for them,
with 50,000 a twentieth; with 1,000,000 a twenty-fifth, and of 5 million objects it found 24,000 unused."""


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
