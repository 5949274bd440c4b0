"""Ctrl-C, SIGTERM and SIGHUP all raise KeyboardInterrupt in the main thread of a command, once, and never while it moves outputs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
EXIT_CODE = 130
"""Exit code of a command that one of them ended."""


class _State:
    """State of the outermost `as_interrupts`: whether a signal came, whether it is still to be raised, and how many blocks postpone it."""

    depth = 0
    came = False
    owed = False
    postponing = 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _State.came:  # the first one is being handled: let it finish its clean-up
        return
    _State.came = True
    if _State.postponing:
        _State.owed = True
        return
    raise KeyboardInterrupt


@contextmanager
def as_interrupts() -> Iterator[None]:
    """Within, the first of the signals raises KeyboardInterrupt and later ones are ignored.

    A signal that this process was started to ignore (`nohup`, a shell's `&`) stays ignored. In other threads than the main one
    nothing changes: only that one gets signals.
    """
    if threading.current_thread() is not threading.main_thread() or _State.depth:
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN}
    _State.depth, _State.came, _State.owed = 1, False, False
    try:
        for number in before:
            signal.signal(number, _interrupt)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _State.depth = 0


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Run the block completely: a signal during it interrupts at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _State.postponing += 1
    try:
        yield
    finally:
        _State.postponing -= 1
    if _State.owed and not _State.postponing:
        _State.owed = False
        raise KeyboardInterrupt


@contextmanager
def postponed() -> Iterator[None]:
    """`uninterrupted` for the import of a library that installs its own signal handlers, as Paddle does; afterwards ours are restored.

    No threads may have been started before: such a thread could receive the signals while the library's handlers are installed.
    """
    with uninterrupted():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            yield
        finally:
            for number in SIGNALS:
                if signal.getsignal(number) is _interrupt:
                    signal.signal(number, _interrupt)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
