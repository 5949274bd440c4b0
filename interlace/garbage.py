"""Python's garbage collection while plans are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 1_000_000
"""How many new objects are looked at together: planning makes few cycles. With Python's 700 a sixth of it goes into the search for them,
with 50,000 a twentieth."""


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Within, Python looks for garbage after `NEW_OBJECTS` new objects, or later or never if it did so before."""
    first, *older = gc.get_threshold()
    gc.set_threshold(max(first, NEW_OBJECTS) if first else 0, *older)
    try:
        yield
    finally:
        gc.set_threshold(first, *older)
