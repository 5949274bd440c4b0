"""Files of expected text."""

from __future__ import annotations

from pathlib import Path


def require_text(path: Path, now: str, update: bool) -> None:
    """That a file holds this text; `update` writes it there."""
    if update:
        path.write_text(now)
    assert now == path.read_text(), f"{path.name} differs; run `pytest --update-golden` and review the difference"
