"""Options shared by all tests."""

from __future__ import annotations

import pytest

from tests import proofs


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-golden` rewrites expected texts; review the difference before you commit it."""
    parser.addoption("--update-golden", action="store_true", help="rewrite expected texts instead of comparing with them")


@pytest.fixture(scope="session")
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether expected texts are rewritten."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(autouse=True)
def _plans_are_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan that a test makes in this process goes through the proof."""
    proofs.proving(monkeypatch)
