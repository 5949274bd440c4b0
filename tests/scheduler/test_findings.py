"""What the checker says about unsafe plans, word for word. `pytest --update-golden` rewrites what is expected.

A file starts with `//` lines that say what it shows, then `target:`; then the plan of each rank, behind `=== plan`; then, behind
`=== findings`, what is told of it: class, ranks, op instances, message, remedy.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from interlace.errors import PlanError
from interlace.ir import parse
from interlace.ir.target import CUSTOM, GPU, as_graph
from interlace.scheduler.hazards import check
from interlace.scheduler.hazards.finding import IN_FULL, Finding, Kind, findings_text
from tests.golden import require_text
from tests.renumbered import renumbered

FILES = sorted((Path(__file__).parent / "findings").glob("*.txt"))
TARGETS = {
    "gpu": GPU,
    "custom": CUSTOM,
    "captured": as_graph(CUSTOM),
    "careless": msgspec.structs.replace(GPU, name="careless", records_streams=False),
}


def told(given: str) -> str:
    """What is found in the plans of a file."""
    head, *plans = given.split("=== plan\n")
    target = re.search(r"^target: (\w+)$", head, re.MULTILINE)
    assert target
    try:
        found = check([parse(plan) for plan in plans], TARGETS[target[1]])
    except PlanError as error:
        return f"PlanError: {error}\n"
    return "".join(f"ranks {list(each.ranks)}: {each}\n" + "".join(f"    {item}\n" for item in each.items) for each in found)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_finding_is_told_in_full(path: Path, update_golden: bool) -> None:
    text = path.read_text()
    given = text.partition("=== findings\n")[0]
    now = f"{given}=== findings\n{told(given)}"
    require_text(path, now, update_golden)


@pytest.mark.parametrize("on_host", ["%2", "%12"])
@pytest.mark.parametrize("turned", [{}, {2: 30, 3: 20}, {1: 40, 2: 30, 3: 20}])
def test_copies_that_are_left_out_are_followed_as_they_stand_in_the_program(turned: dict[int, int], on_host: str) -> None:
    """Through the copy out and the copy in, whatever their numbers, and that of the value on the host."""
    given = (Path(__file__).parent / "findings" / "omitted_copies.txt").read_text().partition("=== findings\n")[0]
    given = given.replace("%2", on_host)
    (found,) = check([renumbered(parse(given.partition("=== plan\n")[2]), turned)], GPU)
    assert (found.kind, found.count, [(item.op, item.micro_batch) for item in found.items]) == ("race", 2, [(5, 1), (6, 1)])


def test_files_are_there_and_every_class_is_among_them() -> None:
    classes = set(re.findall(r"^ranks \[[\d, ]*\]: ([a-z0-9-]+):", "".join(path.read_text() for path in FILES), re.MULTILINE))
    assert classes == set(get_args(Kind))


def test_many_findings_are_told_by_class() -> None:
    found = [Finding("race", (rank,), (), f"message {rank}", "remedy") for rank in range(IN_FULL)]
    alone = Finding("deadlock", (0, 1), (), "circle", "other remedy", 3)
    assert findings_text(found) == [f"race: message {rank}; remedy" for rank in range(IN_FULL)]
    assert findings_text([*found, alone]) == [
        "race, 5 findings on ranks 0-4; the first: race: message 0; remedy",
        "deadlock: circle (and for 2 more micro-batches); other remedy",
    ]
    assert findings_text([*found, alone], in_full=True) == [str(each) for each in (*found, alone)]
