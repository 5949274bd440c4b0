"""What passes say, told by rule: ranges keep their signs, lists lose their numbers whole, idle passes take no room."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from interlace.passes.pipeline import PassReport
from interlace.report.rules import joined, rules
from interlace.report.screen import reports_text, rules_text

TENTHS = st.integers(-999, 999).map(lambda tenths: tenths / 10)


@given(st.lists(TENTHS, min_size=1, max_size=5))
def test_a_range_reads_back_as_its_ends(figures: list[float]) -> None:
    """Of any sign, written as percentages are."""
    text = joined([f"jobs 3-5: simulated ({figure:+.1f} %), 7 -> 8" for figure in figures])
    found = re.fullmatch(r"jobs 3-5: simulated \((.*) %\), 7 -> 8", text)
    assert found
    ends = [float(each) for each in found[1].split(" to ")]
    assert (ends[0], ends[-1]) == (min(figures), max(figures))
    assert all(each[0] in "+-" for each in found[1].split(" to "))


@given(st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=4), min_size=1, max_size=4))
def test_a_list_of_operations_goes_with_its_commas(ids: list[list[int]]) -> None:
    """However many each place has, they are one rule."""
    lines = [
        f"#{k} pd_op.all_reduce (blocks.{k}.mlp): put right after dX {', '.join(f'#{each}' for each in some)}; 3 operations moved"
        for k, some in enumerate(ids)
    ]
    report = PassReport("overlap", tuple(lines), (), 1, 1, 0)
    (rule,) = rules({0: [report]}, lambda each: each.changed)
    assert rule.text == "all_reduce: put right after dX; 3 operations moved"
    assert rule.count == len(ids)


def test_passes_that_did_nothing_take_a_line() -> None:
    reports = [
        PassReport("made", ("one thing",), ("another",), 3, 4, 0),
        PassReport("idle", (), ("found nothing to do",), 4, 4, 0),
        PassReport("left", (), ("no room", "no time"), 4, 4, 0),
        PassReport("bare", (), (), 4, 4, 0),
    ]
    assert reports_text(reports) == [
        "made: 1 changed, 1 declined, ops 3 -> 4",
        "  + one thing",
        "  - another",
        "changed nothing:",
        "  left: no room; no time",
        "nothing to do for idle, bare",
    ]
    busy = [PassReport("idle", ("this",), (), 4, 4, 0)]
    assert rules_text({0: reports}).splitlines()[-1] == "nothing to do for idle, bare"
    assert "nothing to do for bare" in rules_text({0: reports, 1: busy})
