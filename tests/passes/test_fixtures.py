"""Program text, passes and expected text in one file each. `pytest --update-golden` rewrites what is expected.

A file starts with `//` lines that say what it shows, then `passes:` (names, each with options as JSON), `costs:` and, if
wanted, `stretch:`, `host:` (ns for an operation and for a job) and `room:` (bytes that passes may use);
then the program, or those of ranks 0, 1, ... that plan together; then, behind `=== report` and `=== expected`, or `=== error`, what the
passes give, rank by rank.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden import require_text
from tests.passes.fixture_files import FILES, given_of, outcome


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_fixture(path: Path, update_golden: bool) -> None:
    text = path.read_text()
    given = given_of(text)
    now = given + outcome(given, path.name)
    require_text(path, now, update_golden)


def test_fixtures_are_there() -> None:
    assert len(FILES) > 15
