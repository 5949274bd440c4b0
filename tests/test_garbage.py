"""Commands look for garbage less often than Python does, and leave it as they found it; planning keeps memory that it freed."""

from __future__ import annotations

import argparse
import gc
import platform
import subprocess
import sys
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


FAULTS = """
import resource
{}
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    made = [b"x" * (8 << 20) for _ in range(8)]
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    del made
print(faults)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries decide for themselves")
def test_what_is_freed_is_kept_for_what_comes_next() -> None:
    """Eight times eight megabytes, freed and taken again: the system gives no page anew, where it otherwise gives most of 16,384."""
    keep = "from interlace.garbage import keep_freed_memory; keep_freed_memory()"
    often, never = (int(subprocess.check_output([sys.executable, "-c", FAULTS.format(first)])) for first in ("", keep))
    assert often > 8000
    assert never < 100
