"""Commands look for garbage less often than Python does, and leave it as they found it."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from interlace.cli import main, show
from interlace.garbage import NEW_OBJECTS, rarely_collected


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize(("before", "within"), [(700, NEW_OBJECTS), (NEW_OBJECTS + 1, NEW_OBJECTS + 1), (0, 0)])
def test_thresholds_come_back(before: int, within: int) -> None:
    gc.set_threshold(before, 7, 8)
    with pytest.raises(KeyError), rarely_collected():  # noqa: PT012
        assert gc.get_threshold() == (within, 7, 8)
        raise KeyError
    assert gc.get_threshold() == (before, 7, 8)


def test_commands_collect_rarely(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[int] = []

    def look(args: argparse.Namespace) -> int:
        seen.append(gc.get_threshold()[0])
        return 0

    monkeypatch.setattr(show, "main", look)
    gc.set_threshold(700)
    assert main(["show", str(tmp_path / "rank0.ilp")]) == 0
    assert seen == [NEW_OBJECTS]
    assert gc.get_threshold()[0] == 700
