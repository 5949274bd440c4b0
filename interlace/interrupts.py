"""Ctrl-C, SIGTERM and SIGHUP end a command in one way: KeyboardInterrupt in its main thread, once, never while it puts outputs in place."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
EXIT_CODE = 130
"""Of a command that one of them ended."""


class _State:
    """Of the outermost `as_interrupts`: whether a signal came, whether it is still to be raised, and who holds it back."""

    depth = 0
    came = False
    owed = False
    holds = 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _State.came:  # the first one is being obeyed: what it began to clean up is cleaned up
        return
    _State.came = True
    if _State.holds:
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
    """What is done within is done whole: a signal that comes meanwhile interrupts behind it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _State.holds += 1
    try:
        yield
    finally:
        _State.holds -= 1
    if _State.owed and not _State.holds:
        _State.owed = False
        raise KeyboardInterrupt


@contextmanager
def postponed() -> Iterator[None]:
    """`uninterrupted` for the import of a library that takes the signals for itself, as Paddle does; behind it they are ours again.

    It must be the first that starts threads: a thread from before would get the signals, and answer as the library does.
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
