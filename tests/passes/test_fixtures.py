"""Program text, passes and expected text in one file each. `pytest --update-golden` rewrites what is expected.

A file starts with `//` lines that say what it shows, then `passes:` (names, each with options as JSON), `costs:` and, if
wanted, `stretch:`, `host:` (ns for an operation and for a job), `room:` (bytes that passes may use) and `beyond:` (bytes that orders of
jobs may hold more than their parts);
then the program, or those of ranks 0, 1, ... that plan together; then, behind `=== report` and `=== expected`, or `=== error`, what the
passes give, rank by rank.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from interlace.ir import show
from tests.golden import require_text
from tests.passes.fixture_files import FILES, given_of, made_of, outcome, programs_of
from tests.renumbered import renumbered

TIES = ("offload_budget", "offload_half", "offload_keep")
"""Several values are as good to move; the one whose operation has the lower number is moved."""
SLOW = ("schedule_auto_alone", "schedule_chunks", "schedule_lagged", "schedule_of_each_stage")
"""Each takes seconds; no part of `make test-fast`."""
SEARCHED = ("schedule_auto_alone",)
"""A good order of its pairs takes more of a search than the first one."""
TURNED = [path for path in FILES if path.stem not in TIES and "=== error" not in path.read_text()]


@pytest.fixture(autouse=True)
def _searched(request: pytest.FixtureRequest) -> None:
    if "path" in request.fixturenames and request.getfixturevalue("path").stem in SEARCHED:
        request.getfixturevalue("whole_search")


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in SLOW)) for path in FILES])
def test_fixture(path: Path, update_golden: bool) -> None:
    text = path.read_text()
    given = given_of(text)
    now = given + outcome(given, path.name)
    require_text(path, now, update_golden)


def test_fixtures_are_there() -> None:
    assert len(FILES) > 15


@pytest.mark.slow
@pytest.mark.parametrize("path", TURNED, ids=lambda path: path.stem)
def test_numbers_of_operations_decide_nothing(path: Path) -> None:
    """Numbered from the end, programs get the same plans: what comes first is told by the program, the jobs and the times alone."""
    text = path.read_text()
    given = given_of(text)
    programs = programs_of(given, path.name)
    numbers = [sorted(op.id for op in program.ops) for program in programs]
    turned = [dict(zip(each, reversed(each), strict=True)) for each in numbers]
    made = made_of(given, [renumbered(program, each) for program, each in zip(programs, turned, strict=True)])
    plans = [renumbered(plan, each) for (plan, _), each in zip(made, turned, strict=True)]
    expected = re.findall(r"^=== expected\n(.*?)(?=^=== report\n|\Z)", text, re.MULTILINE | re.DOTALL)
    named = re.compile(r"^event \S+", re.MULTILINE)  # an event is named after what records it
    assert [named.sub("event", show(plan)) for plan in plans] == [named.sub("event", each) for each in expected]
