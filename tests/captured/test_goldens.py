"""Plans of stored programs are those that were frozen (`python -m tests.captured.goldens` compares all of them)."""

from __future__ import annotations

import json

import pytest

from tests.captured.goldens import CONFIGS, FILE, digest

FAST = ("pp2, clip", "mp2, clip, accumulation: column overlap")
SHORT = ("baseline", "demo")
"""Of the second, the rest in `make test-long`."""
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "title"),
    [
        pytest.param(name, title, marks=[pytest.mark.long] * (name == FAST[1] and title not in SHORT))
        for name in FAST
        for title in CONFIGS
        if title != "mixed"
    ],
)
def test_a_plan_is_the_frozen_one(name: str, title: str) -> None:
    """A change that is to change plans stores them anew (`--write`) and says why."""
    assert digest(name, title) == json.loads(FILE.read_text())[name][title]
