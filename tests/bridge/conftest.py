"""Programs built here belong to the first rank of a world of two, as the groups in them say."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def world_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
