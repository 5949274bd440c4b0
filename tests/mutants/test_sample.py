"""Random faults: what is planted is what is said, and each file that they are planted in has tests beside it."""

from __future__ import annotations

import random

import pytest

from tests.mutants.faults import faults
from tests.mutants.mutant import ROOT
from tests.mutants.sample import BESIDE, beside, draw, files, mutant

TEXT = '''"""A docstring with 1 and x < y."""

from x import y

LIMIT = 3


def first(items: list[int], limit: int) -> int:
    """More of it."""
    if not items:
        raise ValueError(f"{limit + 1} of {items[0]}")
    found = [item for item in items if item < limit]
    for item in found:
        if item == 0:
            continue
        items.append(min(item, limit))
    found.sort(key=lambda item: -item)
    items.insert(0, limit)
    return max(found[-1], -1) if found and limit in items else items[0] + 2
'''


def planted(kind: str) -> set[str]:
    """The lines that faults of a kind give."""
    was = TEXT.splitlines()
    found = set()
    for fault in faults(TEXT, random.Random(0)):
        if fault.kind == kind:
            now = fault.planted_in(TEXT).splitlines()
            assert len(now) <= len(was)
            found |= {line.strip() for line in set(now) - set(was)}
    return found


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("constant", {"LIMIT = 4", "LIMIT = 2", "if item == 1:"}),
        ("comparison", {"found = [item for item in items if (item <= limit)]", "if (item != 0):"}),
        ("condition dropped", {"found = [item for item in items]", "return max(found[-1], -1) if (limit in items) else items[0] + 2"}),
        ("first / last", {"return max((found[0]), -1) if found and limit in items else items[0] + 2"}),
        ("swapped function", {"items.append(max(item, limit))"}),
        ("early end", {"break"}),
        ("statement dropped", {"pass"}),
        ("early return", {"return None"}),
        ("and / or", {"return max(found[-1], -1) if (found or limit in items) else items[0] + 2"}),
        ("arithmetic", {"return max(found[-1], -1) if found and limit in items else (items[0] - 2)"}),
        ("arguments swapped", {"(items.insert(limit, 0))"}),
        ("key dropped", {"(found.sort())"}),
        ("negation", {"return max(found[-1], (1)) if found and limit in items else items[0] + 2", "if (items):"}),
    ],
)
def test_a_fault_changes_one_line(kind: str, lines: set[str]) -> None:
    assert lines <= planted(kind)


def test_messages_annotations_and_docstrings_stay() -> None:
    was = set(TEXT.splitlines())
    changed = {line for fault in faults(TEXT, random.Random(0)) for line in was - set(fault.planted_in(TEXT).splitlines())}
    assert not [line for line in changed if "raise" in line or "docstring" in line or "def " in line or "import" in line]


def test_the_same_seed_draws_the_same_faults_where_asked() -> None:
    drawn = draw(["scheduler/hazards/deadlock.py"], 3, 20)
    assert drawn == draw(["scheduler/hazards/deadlock.py"], 3, 20) != draw(["scheduler/hazards/deadlock.py"], 4, 20)
    assert {path for path, _ in drawn} == {"scheduler/hazards/deadlock.py"}
    assert {fault.function for _, fault in draw(["missing_orders.py:_carried"], 0, 9)} == {"_carried"}
    for path, fault in drawn:
        made = mutant(path, fault)
        assert made is None or made.source() != (ROOT / path).read_text()


def test_every_file_has_tests_beside_it() -> None:
    assert all((ROOT / place).exists() for place in BESIDE)
    for path in files():
        assert beside(path)
        assert all((ROOT / test.partition("::")[0]).is_file() for test in beside(path))
