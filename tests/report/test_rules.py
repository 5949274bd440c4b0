"""What passes say, told by rule: figures become ranges that keep their signs, ids go, idle passes take no room."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from interlace.ir.remarks import Place, Remark, remark
from interlace.passes.pipeline import PassReport
from interlace.report.rules import rules
from interlace.report.screen import places_text, reports_text, rules_text


def report(name: str, *remarks: Remark) -> PassReport:
    return PassReport(name, tuple(each.of(name) for each in remarks), 4, 4, 0)


@given(st.lists(st.integers(-999, 999), min_size=1, max_size=5))
def test_a_range_reads_back_as_its_ends(tenths: list[int]) -> None:
    """Of any sign; of percentages, as they are written."""
    changes = [each / 1000 for each in tenths]
    jobs = [
        remark(
            "applied", "job-ordered", Place(job="B"), operations=7, serial_ns=1, planned_ns=1, plain_peak_bytes=1, peak_bytes=1, change=each
        )
        for each in changes
    ]
    (rule,) = rules({0: [report("schedule-1f1b", *jobs)]}, lambda each: each.done)
    found = re.search(r"7 ops, .* \((.*) %\)", rule.text)
    assert found
    ends = [float(each) for each in found[1].split(" to ")]
    assert (ends[0], ends[-1]) == (min(tenths) / 10, max(tenths) / 10)
    assert all(each[0] in "+-" for each in found[1].split(" to "))
    assert (rule.rule, rule.kind, rule.numbers["change"]) == ("job-ordered", "applied", (min(changes), max(changes)))


@given(st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=4), min_size=1, max_size=4))
def test_a_list_of_operations_goes_with_its_ids(ids: list[list[int]]) -> None:
    """However many each place has, they are one rule."""
    sites = [
        Remark(
            "started-after-dx",
            "applied",
            place=Place(k, "pd_op.all_reduce", f"blocks.{k}.mlp"),
            numbers={"moved": 3},
            ops={"dx": tuple(Place(each, "pd_op.matmul") for each in some)},
        )
        for k, some in enumerate(ids)
    ]
    (rule,) = rules({0: [report("overlap", *sites)]}, lambda each: each.done)
    assert rule.text == "all_reduce: put right after dX; 3 operations moved after it"
    assert (rule.layers, rule.count) == (["blocks.*.mlp"], len(ids))
    named = ", ".join(f"#{each}" for each in ids[0])
    assert places_text([report("overlap", sites[0])])[1] == (
        f"  + #0 pd_op.all_reduce (blocks.0.mlp): put right after dX {named}; 3 operations moved after it [started-after-dx]"
    )


def test_figures_of_unlike_units_keep_both() -> None:
    sizes = [remark("declined", "below-min-bytes", size_bytes=size, min_bytes=4 << 20) for size in (512, 2 << 20, 3 << 20)]
    (rule,) = rules({0: [report("overlap", *sizes)]}, lambda each: each.declined)
    assert rule.text == "moves 512 B to 3.0 MiB, less than min_bytes, 4.0 MiB"


def test_remarks_of_other_names_are_other_rules() -> None:
    streams = [
        remark("applied", "stream-named", stream=name, operations=count, priority=-1) for name, count in (("a", 1), ("b", 2), ("a", 4))
    ]
    found = rules({0: [report("name-streams", *streams)]}, lambda each: each.done)
    assert [rule.text for rule in found] == ["stream a: 1 to 4 operations, priority -1", "stream b: 2 operations, priority -1"]


def test_passes_that_did_nothing_take_a_line() -> None:
    reports = [
        report("made", remark("applied", "one-thing"), remark("declined", "another")),
        report("idle"),
        report("left", remark("declined", "no-room", free_bytes=2 << 20), remark("declined", "no-time", took_ns=2_000_000)),
        report("bare"),
    ]
    assert reports_text(reports) == [
        "made: 1 changed, 1 declined, ops 4 -> 4",
        "  + one thing",
        "  - another",
        "changed nothing:",
        "  left: no room: free 2.0 MiB; no time: took 2.000 ms",
        "nothing to do for idle, bare",
    ]
    assert reports_text(reports[:1], names_rules=True)[1:] == ["  + one thing [one-thing]", "  - another [another]"]
    busy = [report("idle", remark("applied", "this"))]
    assert rules_text({0: reports}).splitlines()[-1] == "nothing to do for idle, bare"
    assert "nothing to do for bare" in rules_text({0: reports, 1: busy})
