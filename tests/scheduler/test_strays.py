"""Which captured call each call of a plan stands for, by hand: what was exchanged, made anew, cut, moved or left out."""

from __future__ import annotations

import pytest

from interlace.ir import parse, verify
from interlace.scheduler.hazards.captured_calls import ALONE, LIKE_OTHERS, SAME_FLOW, Stray, strays

HEAD = """program rank=0 world=2 mode=train
pipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=none
group 7 = 0,1
group 8 = 0,1
#0 %0:float32[4]"x" = pd_op.data() forward
#1 %1:float32[4]"y" = pd_op.data() forward
"""
A = '#2 %2:float32[4] = pd_op.all_reduce(%0) forward group=7 layer="a"\n'
B = '#3 %3:float32[4] = pd_op.all_reduce(%1) forward group=7 layer="b"\n'
END = "#4 %4:float32[4] = pd_op.add(%2, %3) forward\n"
SUMS = A + B + END
HALVES = """#5 %5:float32[2] = pd_op.slice(%0) forward {"starts":[0]}
#6 %6:float32[2] = pd_op.slice(%0) forward {"starts":[2]}
#7 %7:float32[2] = pd_op.all_reduce(%5) forward group=7
#8 %8:float32[2] = pd_op.all_reduce(%6) forward group=7
#9 %2:float32[4] = pd_op.concat(%7, %8) forward
"""
C, D = (f'#{k} %{k}:float32[4] = pd_op.recv_v2() forward group=7 layer="{layer}" {{"peer":1}}\n' for k, layer in ((2, "c"), (3, "d")))
RECEIVES = C + D + END
TWICE = A + B.replace("%1)", "%0)") + END
NEW = C.replace("#2 %2", "#12 %12") + D.replace("#3 %3", "#13 %13")


def found(captured: str, planned: str) -> tuple[Stray, ...]:
    programs = [parse(HEAD + text) for text in (captured, planned)]
    for program in programs:
        verify(program)
    return strays(*programs)


def told(captured: str, planned: str) -> list[tuple[int, int, int | None]]:
    """Of each stray its operation, its place and the captured place, in the same group and part of the step."""
    every = found(captured, planned)
    for each in every:
        assert each.captured is None or (each.channel, each.place[0]) == (each.captured[0], each.captured[1][0])
    return [(int(each.text[1:].split()[0]), each.place[1], each.captured and each.captured[1][1]) for each in every]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("captured", "planned", "expected"),
    [
        (SUMS, SUMS, []),
        (SUMS, A + B + END.replace("%2, %3", "%3, %2"), []),
        (SUMS, A.replace("%0)", "%1)") + B.replace("%1)", "%0)") + END, [(2, 0, 1), (3, 1, 0)]),
        (SUMS, A.replace("#2", "#9") + B + END, [(9, 1, 0), (3, 0, 1)]),
        (SUMS, A.replace("#2", "#9").replace("group=7", "group=7 origin=2") + B + END, []),
        (SUMS, B + END.replace("%2, %3", "%3, %3"), [(3, 0, 1)]),
        (SUMS, SUMS + "#9 %9:float32[4] = pd_op.all_reduce(%4) forward group=7\n", [(9, 2, None)]),
        (SUMS, B + "#6 %6:float32[4] = pd_op.all_reduce(%1) forward group=7\n" + END.replace("%2", "%6"), [(3, 0, 1), (6, 1, 0)]),
        (TWICE, TWICE.replace("#2", "#12").replace("#3", "#13"), [(12, 0, 0), (13, 1, 0)]),
        (RECEIVES, RECEIVES, []),
        (RECEIVES, C.replace("%2", "%3") + D.replace("%3", "%2") + END, [(2, 0, 1), (3, 1, 0)]),
        (RECEIVES, NEW + END.replace("%2, %3", "%12, %13"), [(12, 0, 0), (13, 1, 1)]),
        (RECEIVES, NEW + END.replace("%2, %3", "%13, %12"), [(12, 0, 1), (13, 1, 0)]),
    ],
    ids=[
        *("as captured", "read elsewhere", "exchanged", "made anew", "made anew with its origin", "left out", "one more"),
        *(
            "what is read where the lost one was",
            "one value twice, made anew",
            "receives",
            "exchanged results",
            "new receives",
            "new receives the other way round",
        ),
    ],
)
def test_a_call_stands_for_what_it_carries(captured: str, planned: str, expected: list[tuple[int, int, int | None]]) -> None:
    assert told(captured, planned) == expected


@pytest.mark.parametrize("through", ["pd_op.cast", "pd_op.exp"])
def test_new_operations_between_are_followed(through: str) -> None:
    """To what is sent, and from what is received."""
    new = f"#5 %5:float32[4] = {through}(%0) forward\n#6 %6:float32[4] = {through}(%1) forward\n"
    straight = new + A.replace("%0)", "%5)") + B.replace("%1)", "%6)") + END
    crossed = new + A.replace("%0)", "%6)") + B.replace("%1)", "%5)") + END
    assert told(SUMS, straight) == [(2, 0, 0), (3, 1, 1)]
    assert told(SUMS, crossed) == [(2, 0, 1), (3, 1, 0)]
    behind = NEW + f"#14 %14:float32[4] = {through}(%12) forward\n"
    assert told(RECEIVES, behind + END.replace("%2, %3", "%14, %13")) == [(12, 0, 0), (13, 1, 1)]
    assert told(RECEIVES, behind + END.replace("%2, %3", "%13, %14")) == [(12, 0, 1), (13, 1, 0)]
    given = C.replace("%2", "%12") + D.replace("%3", "%13")
    given += f"#15 %2:float32[4] = {through}(%13) forward\n#16 %3:float32[4] = {through}(%12) forward\n"
    assert told(RECEIVES, given + END) == [(2, 0, 1), (3, 1, 0)]


def test_a_call_that_carries_something_of_several_stands_for_its_own() -> None:
    """Even where its result is read in another one's place."""
    new = "#5 %5:float32[4] = pd_op.add(%0, %1) forward\n#6 %6:float32[4] = pd_op.cast(%1) forward\n"
    calls = A.replace("#2 %2", "#12 %12").replace("%0)", "%5)").replace("group=7", "group=7 origin=2") + B.replace("%1)", "%6)")
    assert told(SUMS, new + calls + END.replace("%2, %3", "%3, %12")) == [(12, 0, 0), (3, 1, 1)]


def test_a_call_of_another_group_stands_for_the_one_of_its_number() -> None:
    first, second = found(SUMS, A.replace("group=7", "group=8") + B + END)
    assert (first.channel, first.place, first.captured) == ((8, 0), ("forward", 0), ((7, 0), ("forward", 0)))
    assert (second.channel, second.place, second.captured) == ((7, 0), ("forward", 0), ((7, 0), ("forward", 1)))
    assert first.text == "#2 pd_op.all_reduce (a)"


def flow(new: str) -> tuple[str, str]:
    (stray,) = found(SUMS, new + A.replace("%0)", "%5)") + B + END)
    return stray.flow, stray.exact


def test_what_a_call_carries_is_told_by_how_it_is_computed() -> None:
    """By operations and captured values, and exactly by attributes too; not by numbers of new values."""
    plain = flow("#5 %5:float32[4] = pd_op.scale(%0) forward\n")
    assert all(plain)
    assert plain == flow("#9 %5:float32[4] = pd_op.scale(%0) forward\n")
    with_attribute = flow('#5 %5:float32[4] = pd_op.scale(%0) forward {"by":2}\n')
    assert with_attribute[0] == plain[0]
    assert with_attribute[1] != plain[1]
    assert flow("#5 %5:float32[4] = pd_op.exp(%0) forward\n")[0] != plain[0]
    two = "#5 %5:float32[4] = pd_op.scale(%8) forward\n"
    assert flow("#8 %8:float32[4] = pd_op.scale(%0) forward\n" + two)[0] != plain[0]
    assert flow("#8 %8:float32[4] = pd_op.add(%0, %1) forward\n" + two) != flow("#8 %8:float32[4] = pd_op.add(%1, %0) forward\n" + two)
    parts = "#5 %5:float32[4], %8:float32[4] = pd_op.split(%0) forward\n"
    assert flow(parts) != flow(parts.replace("%5", "%x").replace("%8", "%5").replace("%x", "%8"))


def test_what_a_call_carries_is_told_where_it_stands_for_no_captured_one_too() -> None:
    """On ranks alike it is compared."""
    (one,), (two,) = (found(SUMS, SUMS + f"#9 %9:float32[4] = pd_op.all_reduce(%{value}) forward group=7\n") for value in (4, 0))
    assert (one.captured, two.captured) == (None, None)
    assert len({one.flow, two.flow, ""}) == 3


@pytest.mark.parametrize(
    ("halves", "others"),
    [
        (HALVES, SAME_FLOW),
        (HALVES.replace("#6 %6:float32[2] = pd_op.slice", "#6 %6:float32[2] = pd_op.gather"), LIKE_OTHERS),
        (HALVES.replace("%6:float32[2]", "%6:float32[3]").replace("%8:float32[2]", "%8:float32[3]"), ALONE),
        (HALVES.replace("%6:float32[2]", "%6:float32[-1]").replace("%8:float32[2]", "%8:float32[-1]"), SAME_FLOW),
        (HALVES.replace("#8 %8:float32[2] = pd_op.all_reduce", "#8 %8:float32[2] = pd_op.reduce"), ALONE),
    ],
    ids=["slices", "computed otherwise", "of other sizes", "of unknown size", "of another kind"],
)
def test_several_calls_in_place_of_one_are_told_apart_by_kind_and_size(halves: str, others: int) -> None:
    """Then by what they carry; of a size that is unknown until run time, they may be alike."""
    for text in (halves, halves.replace("group=7", "group=7 origin=2")):
        mine = [each for each in found(SUMS, text + B + END) if "(b)" not in each.text]
        assert [(each.captured, each.others) for each in mine] == [(((7, 0), ("forward", 0)), others)] * 2
