"""Calls that a user's pass makes anew, over new values: refused where ranks pair others than those of the captured program, by the
results of an interpreter; accepted where all ranks change alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.ir import Op, Program, parse, verify
from interlace.ir.equivalent_ranks import equivalence_key
from interlace.ir.kinds import is_comm
from interlace.scheduler.hazards.captured_calls import strays
from interlace.scheduler.hazards.pass_orders import Break, History, breaks, changes, orders_of
from tests.interpreter import Poisoned, Stuck, run

HEAD = """program rank={rank} world=2 mode=train
pipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=none
group 7 = 0,1
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2]"y" = pd_op.data() forward
"""
SUMS = """#4 %4:float32[2] = pd_op.all_reduce(%0) forward group=7 layer="a"
#5 %5:float32[2] = pd_op.all_reduce(%1) forward group=7 layer="b"
"""
SENDS = """#4 pd_op.send_v2(%0) forward group=7 layer="a" {"peer":1}
#5 pd_op.send_v2(%1) forward group=7 layer="b" {"peer":1}
"""
RECEIVES = """#4 %4:float32[2] = pd_op.recv_v2() forward group=7 layer="a" {"peer":0}
#5 %5:float32[2] = pd_op.recv_v2() forward group=7 layer="b" {"peer":0}
"""
READERS = """#6 %6:float32[2] = pd_op.relu(%4) forward
#7 %7:float32[2] = pd_op.tanh(%5) forward
#8 builtin.shadow_output(%6) forward {"output_name":"a"}
#9 builtin.shadow_output(%7) forward {"output_name":"b"}
"""
MORE = "#10 %10:float32[2] = pd_op.gelu(%6) forward\n"
WORLDS = {
    "sums": (SUMS + READERS, SUMS + READERS),
    "sums of unlike ranks": (SUMS + READERS, SUMS + READERS + MORE),
    "messages": (SENDS, RECEIVES + READERS),
}


@dataclass(frozen=True)
class Style:
    """How a pass makes the two calls.

    Attributes:
        exchanged: The second comes first.
        numbers: They keep theirs, or have new ones with or without origin.
        before, after: New operations between the values and the calls.
        renamed: Readers read new values, where there are some; otherwise the last new operation gives the captured one.
        falling: New numbers fall in program order.
        lies: Each call is said to be the other one, by its number or origin.
    """

    exchanged: bool = False
    numbers: str = "new"
    before: int = 0
    after: int = 0
    renamed: bool = False
    falling: bool = False
    lies: bool = False


styles = st.builds(
    Style,
    exchanged=st.booleans(),
    numbers=st.sampled_from(["kept", "new", "origin"]),
    before=st.integers(0, 2),
    after=st.integers(0, 1),
    renamed=st.booleans(),
    falling=st.booleans(),
    lies=st.booleans(),
)


def captured(world: str) -> list[Program]:
    made = [parse(HEAD.format(rank=rank) + text) for rank, text in enumerate(WORLDS[world])]
    for program in made:
        verify(program)
    return made


class Remaking:
    """A program whose calls are made in a style."""

    def __init__(self, program: Program, style: Style) -> None:
        self.program, self.style = program, style
        self.values, self.next = list(program.values), 100
        self.calls = [op for op in program.ops if is_comm(op)]

    def made(self) -> Program:
        style, order = self.style, self.calls[:: -1 if self.style.exchanged else 1]
        fresh = iter((21, 20) if style.falling else (20, 21))
        renamed: dict[int, int] = {}
        new: list[Op] = []
        for slot, call in zip(self.calls, order, strict=True):
            other = next(each for each in self.calls if each is not call)
            claimed = other if style.lies else call
            if style.numbers == "kept":
                number, origin = (slot if not style.lies else claimed).id, -1
            else:
                number, origin = next(fresh), claimed.id if style.numbers == "origin" else -1
            operands = tuple(self.chain(new, value, style.before) for value in call.operands)
            results = call.results
            behind: list[Op] = []
            if results and (style.after or style.renamed):
                results = (self.value(),)
                given = self.chain(behind, results[0], style.after)
                if style.renamed:
                    renamed[call.results[0]] = given
                elif behind:
                    behind[-1] = msgspec.structs.replace(behind[-1], results=call.results)
            new += [msgspec.structs.replace(call, id=number, origin=origin, operands=operands, results=results), *behind]
        at = self.program.ops.index(self.calls[0])
        rest = [op for op in self.program.ops if op not in self.calls]
        rest = [msgspec.structs.replace(op, operands=tuple(renamed.get(value, value) for value in op.operands)) for op in rest]
        given_now = {value for op in (*rest, *new) for value in op.results}
        program = self.program.with_ops([*rest[:at], *new, *rest[at:]], [value for value in self.values if value.id in given_now])
        verify(program)
        return program

    def value(self) -> int:
        like = self.values[0]
        number = max(value.id for value in self.values) + 1
        self.values.append(msgspec.structs.replace(like, id=number, storage=number, name=""))
        return number

    def chain(self, ops: list[Op], value: int, length: int) -> int:
        """A value copied so often."""
        for _ in range(length):
            copy = self.value()
            self.next += 1
            ops.append(Op(self.next, "pd_op.assign", (value,), (copy,), "forward"))
            value = copy
        return value


def found(before: Sequence[Program], after: Sequence[Program]) -> list[Break]:
    """What is said of a pass that made these programs of those."""
    return breaks(
        [
            History(
                msgspec.structs.replace(one, ops=(), values=()),
                changes({}, orders_of(one)),
                (("own", changes(orders_of(one), orders_of(other))),),
                ("own",),
                strays(one, other),
                equivalence_key(one),
            )
            for one, other in zip(before, after, strict=True)
        ]
    )


def same_results(before: Sequence[Program], after: Sequence[Program]) -> bool:
    try:
        return all(run(before, seed=seed) == run(after, seed=seed) for seed in range(2))
    except (Poisoned, Stuck):
        return False


@pytest.mark.parametrize("world", WORLDS)
@settings(max_examples=100, deadline=None)
@given(drawn=st.tuples(styles, styles))
def test_calls_that_meet_others_than_captured_are_refused(world: str, drawn: tuple[Style, Style]) -> None:
    """Whatever each rank does: if the numbers are others, a pass is named."""
    before = captured(world)
    after = [Remaking(program, style).made() for program, style in zip(before, drawn, strict=True)]
    assert same_results(before, before)
    if not same_results(before, after):
        assert [each.name for each in found(before, after)] == ["own"]


@pytest.mark.parametrize("world", WORLDS)
@settings(max_examples=50, deadline=None)
@given(style=styles)
def test_calls_that_all_ranks_make_alike_are_accepted(world: str, style: Style) -> None:
    before = captured(world)
    after = [Remaking(program, style).made() for program in before]
    assert same_results(before, after)
    assert found(before, after) == []


def rewritten(world: str, changes_by_rank: Sequence[str]) -> list[Break]:
    """What is said where the calls of a rank are replaced by a text."""
    before = captured(world)
    own = {"sums": (SUMS, SUMS), "messages": (SENDS, RECEIVES)}[world]
    after = [
        parse(HEAD.format(rank=rank) + WORLDS[world][rank].replace(own[rank], text + "\n")) for rank, text in enumerate(changes_by_rank)
    ]
    for program in after:
        verify(program)
    return found(before, after)


NEW_SUMS = """
#20 %20:float32[2] = pd_op.relu(%{0}) forward
#21 %21:float32[2] = pd_op.relu(%{1}) forward
#30 %30:float32[2] = pd_op.all_reduce(%20) forward group=7
#31 %31:float32[2] = pd_op.all_reduce(%21) forward group=7
"""
HALVES = """
#20 %20:float32[1] = pd_op.slice(%0) forward {{"axes":[0],"starts":[{0}],"ends":[{1}]}}
#21 %21:float32[1] = pd_op.slice(%0) forward {{"axes":[0],"starts":[{1}],"ends":[{2}]}}
#30 %30:float32[1] = pd_op.all_reduce(%20) forward group=7{3}
#31 %31:float32[1] = pd_op.all_reduce(%21) forward group=7{3}
#32 %4:float32[2] = pd_op.concat(%30, %31) forward
#5 %5:float32[2] = pd_op.all_reduce(%1) forward group=7
"""
OWN_PART = """
#20 %20:float32[1] = pd_op.slice(%0) forward {{"axes":[0],"starts":[{0}],"ends":[{1}]}}
#21 %21:float32[1] = pd_op.slice(%1) forward {{"axes":[0],"starts":[{0}],"ends":[{1}]}}
#30 %4:float32[2] = pd_op.all_gather(%20) forward group=7
#31 %5:float32[2] = pd_op.all_gather(%21) forward group=7
"""
OTHER_VALUE = (
    "#2 %2:float32[2] = pd_op.relu(%{0}) forward\n#4 %4:float32[2] = pd_op.all_reduce(%2) forward group=7\n" + SUMS[SUMS.index("#5") :]
)
SENT = '#20 pd_op.send_v2(%{0}) forward group=7 {{"peer":1}}\n#21 pd_op.send_v2(%{1}) forward group=7 {{"peer":1}}\n'
GOT = '#20 %20:float32[2] = pd_op.recv_v2() forward group=7 {"peer":0}\n#21 %21:float32[2] = pd_op.recv_v2() forward group=7 {"peer":0}\n'
CASES: dict[str, tuple[str, str, str, str]] = {
    "more sums": ("sums", SUMS + NEW_SUMS.format(0, 1), SUMS + NEW_SUMS.format(0, 1), ""),
    "more sums, exchanged": ("sums", SUMS + NEW_SUMS.format(0, 1), SUMS + NEW_SUMS.format(1, 0), "it cannot be told whether ranks 0 and 1"),
    "one sum in halves": ("sums", HALVES.format(0, 1, 2, ""), HALVES.format(0, 1, 2, ""), ""),
    "halves, exchanged": ("sums", HALVES.format(0, 1, 2, ""), HALVES.format(1, 0, 2, ""), "it cannot be told"),
    "halves of one origin, exchanged": (
        "sums",
        HALVES.format(0, 1, 2, " origin=4"),
        HALVES.format(1, 0, 2, " origin=4"),
        "it cannot be told",
    ),
    "each rank's own part": ("sums", OWN_PART.format(0, 1), OWN_PART.format(1, 2), ""),
    "another value on one rank": ("sums", OTHER_VALUE.format(0), OTHER_VALUE.format(1), "carries something else"),
    "another value on both": ("sums", OTHER_VALUE.format(1), OTHER_VALUE.format(1), ""),
    "one new message": ("messages", SENDS + SENT.format(0, 1).splitlines()[0], RECEIVES + GOT.splitlines()[0], ""),
    "two new messages": ("messages", SENDS + SENT.format(0, 1), RECEIVES + GOT, "it cannot be told whether ranks 0 and 1 send and receive"),
    "a captured message and a new one": ("messages", SENDS + SENT.format(0, 0).splitlines()[0], RECEIVES, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_what_new_calls_are(case: str) -> None:
    """A call that stands for no captured one, or shares one with others, is told by what it carries, between ranks of equal programs;
    between others it must be the only one of its kind and size."""
    world, one, other, told = CASES[case]
    said = rewritten(world, (one, other))
    if case == "a captured message and a new one":
        assert [each.calls for each in said] == [""], "one has no partner: the orders differ"
    elif told:
        assert len(said) == 1
        assert told in said[0].message()
        assert ("`origin`" in said[0].remedy) == said[0].is_unclear
    else:
        assert said == []


def test_a_sender_and_a_receiver_that_change_alike_exchange_operands_and_results() -> None:
    """Not the readers of the results: what a receive gives tells which one it is. The remedy says so."""
    sent = SENDS.replace("(%0)", "(%9)").replace("(%1)", "(%0)").replace("(%9)", "(%1)")
    results = RECEIVES.replace("%4:", "%9:").replace("%5:", "%4:").replace("%9:", "%5:")
    assert rewritten("messages", (sent, results)) == []
    before = captured("messages")
    readers = WORLDS["messages"][1].replace("relu(%4)", "relu(%9)").replace("tanh(%5)", "tanh(%4)").replace("relu(%9)", "relu(%5)")
    after = [parse(HEAD.format(rank=0) + sent), parse(HEAD.format(rank=1) + readers)]
    assert same_results(before, after)
    (said,) = found(before, after)
    assert "a message is told by what is sent and by what its receive gives, not by who reads that" in said.remedy
