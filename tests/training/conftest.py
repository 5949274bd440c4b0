"""Ranks are forked: these tests are about what they train, not about how they start."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _forked(forked_ranks: None) -> None:
    """Ranks of every test here."""
