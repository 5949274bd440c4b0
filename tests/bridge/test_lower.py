"""The lowering's own housekeeping."""

from __future__ import annotations

import threading
import traceback

import pytest

pytest.importorskip("paddle")

from interlace.bridge.lower import _short_stacks

pytestmark = pytest.mark.paddle


def names() -> list[str]:
    return [frame.name for frame in traceback.extract_stack()]


def test_stacks_are_short_in_the_lowering_thread_only() -> None:
    other: list[list[str]] = []
    with _short_stacks(), _short_stacks():
        assert names() == ["names"]
        thread = threading.Thread(target=lambda: other.append(names()))
        thread.start()
        thread.join()
    assert len(other[0]) > 1


def test_stacks_are_whole_again_after_an_error() -> None:
    whole = traceback.extract_stack
    with pytest.raises(ZeroDivisionError), _short_stacks():
        raise ZeroDivisionError
    assert traceback.extract_stack is whole
