"""Waiting for processes that tests start."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], bool], limit_s: float = 40.0) -> None:
    """Until something holds; an assertion fails where that takes too long."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.02)


def alive(file: Path) -> bool:
    """Whether the process lives whose id is in a file."""
    try:
        os.kill(int(file.read_text()), 0)
    except ProcessLookupError:
        return False
    return True
