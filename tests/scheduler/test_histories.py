"""Which pass is blamed for orders that partners no longer share, by hand: from the orders after each pass, and from strays."""

from __future__ import annotations

import msgspec
import pytest

from interlace.ir import parse
from interlace.scheduler.hazards.captured_calls import ALONE, LIKE_OTHERS, SAME_FLOW, Stray
from interlace.scheduler.hazards.pass_orders import (
    EXCHANGED,
    REMEDY,
    UNKNOWN,
    Break,
    Call,
    Change,
    History,
    breaks,
    changes,
    first_difference,
)
from interlace.scheduler.hazards.skeleton import COLLECTIVE

SUMS = (7, COLLECTIVE)
NAMES = ("one", "two", "three")


def history(rank: int, orders: str, names: tuple[str, ...] = NAMES, **more: object) -> History:
    """Of a rank of three in group 7: a letter for its order as captured and after each pass; a space for none."""
    seat = parse(f"program rank={rank} world=3 mode=train\npipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=none\ngroup 7 = 0,1,2\n")
    found = [(Change(*SUMS, now.strip()),) if now != was else () for was, now in zip(" " + orders, orders, strict=False)]
    return History(seat, found[0], tuple(zip(names, found[1:], strict=True)), **more)  # type: ignore[arg-type]


def told(found: list[Break]) -> list[tuple[str, tuple[int, int], bool]]:
    return [(each.name, each.ranks, each.is_unclear) for each in found]


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        (("aaaa", "aaaa", "aaaa"), []),
        (("aaaa", "abbb", "aaaa"), [("one", (0, 1), False)]),
        (("aabb", "aabc", "aabb"), [("three", (0, 1), False)]),
        (("aabb", "aabb", "aacc"), [("two", (0, 2), False)]),
        (("abcd", "adcb", "abcd"), [("three", (0, 1), False)]),  # parted and one again: the last pass counts
        (("abbb", "acbb", "abbb"), []),
        (("aabb", "bbbb", "aabb"), []),  # parted before any pass, and one since
        (("aaaa", "bbbb", "aaaa"), []),  # captured apart: nobody's fault
        (("aaaa", "   a", "aaaa"), []),
        (("aaaa", "aaa ", "aaaa"), [("three", (0, 1), False)]),
        (("aaaa", "aaab", "abbb"), [("three", (0, 1), False)]),  # one for a line
    ],
)
def test_the_last_pass_before_which_two_ranks_had_one_order_is_named(orders: tuple[str, ...], expected: list[object]) -> None:
    found = breaks([history(rank, each) for rank, each in enumerate(orders)])
    assert told(found) == expected
    for each in found:
        assert each.channels == (SUMS, SUMS)
        assert each.remedy == REMEDY
        assert each.message().endswith(
            f"after pass '{each.name}' ranks {each.ranks[0]} and {each.ranks[1]} no longer issue the same collectives in one order"
        )
        assert each.finding().kind == "collective-order"


def test_groups_of_which_it_is_unclear_which_are_the_same_blame_no_pass() -> None:
    """One rank has two groups of these ranks, and numbers them as nobody else does: the check says so (`wrong-group`)."""
    histories = [history(rank, "aa" + ("b" if rank else "c"), NAMES[:2]) for rank in range(2)]
    assert len(breaks(histories)) == 1
    head, groups = "program rank=1 world=3 mode=train\npipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=none\n", (8, 9)
    seat = parse(head + "".join(f"group {number} = 0,1,2\n" for number in groups))
    steps = tuple((name, tuple(Change(8, each.way, each.digest) for each in found)) for name, found in histories[1].steps)
    captured = tuple(Change(8, each.way, each.digest) for each in histories[1].captured)
    other = msgspec.structs.replace(histories[1], seat=seat, steps=steps, captured=captured)
    assert breaks([histories[0], other]) == []


def test_ranks_on_which_other_passes_ran_are_not_compared() -> None:
    first, second = history(0, "aaab"), history(1, "aaac")
    assert told(breaks([first, second])) == [("three", (0, 1), False)]
    assert breaks([first, history(1, "aaac", ("one", "two", "other"))]) == []
    assert breaks([first, history(1, "aac", ("one", "two"))]) == []


def test_a_rank_that_never_calls_has_no_channel() -> None:
    (found,) = breaks([history(0, "   a"), history(1, "    ")])
    assert (found.name, found.channels) == ("three", (SUMS, None))


SENDS, RECEIVES = (7, 3), (7, -2)
"""To the third member of the ring, and from the second."""


def messages(orders: str, channel: tuple[int, int], rank: int, **more: object) -> History:
    made = history(rank, orders, **more)  # type: ignore[arg-type]
    steps = tuple((name, tuple(Change(*channel, each.digest) for each in found)) for name, found in made.steps)
    return msgspec.structs.replace(made, steps=steps, captured=tuple(Change(*channel, each.digest) for each in made.captured))


def test_messages_are_compared_by_the_two_that_share_them() -> None:
    """Not by others of the ring, and not where one of the two is not given."""
    both = [messages("aaaa", SENDS, 1), messages("aaab", RECEIVES, 2)]
    (found,) = breaks([history(0, "aaaa"), *both])
    assert (found.name, found.ranks, found.channels, found.finding().kind) == ("three", (1, 2), (SENDS, RECEIVES), "p2p-mismatch")
    assert breaks(both[:1]) == breaks([history(0, "aaaa"), both[0]]) == []


def test_a_partner_that_is_not_given_is_compared_by_the_rank_that_stands_for_it() -> None:
    """Ranks 0 and 1 are of one stage, 2 and 3 of the next; each calls with one of the other stage that is not given."""
    found = []
    for rank, other, orders in ((0, 3, "aaab"), (2, 1, "aaaa")):
        made = history(rank, orders)
        group = msgspec.structs.replace(made.seat.groups[0], ranks=tuple(sorted((rank, other))))
        seat = msgspec.structs.replace(made.seat, world=4, groups=(group,), equivalent_ranks=(rank + 1,))
        found.append(msgspec.structs.replace(made, seat=seat))
    assert told(breaks(found)) == [("three", (0, 2), False)]


def stray(place: int, captured: int | None, flow: str = "", exact: str = "", others: int = ALONE) -> Stray:
    return Stray(SUMS, ("forward", place), None if captured is None else (SUMS, ("forward", captured)), "#3 x", flow, exact, others)


def compared(one: tuple[Stray, ...], two: tuple[Stray, ...], keys: tuple[bytes, bytes] = (b"k", b"k"), own: bool = True) -> list[Break]:
    """Ranks with one order of calls, which stand for these."""
    mine: tuple[str, ...] = ("two",) if own else ()
    pairs = zip((one, two), keys, strict=True)
    return breaks([history(rank, "aaaa", own=mine, strays=each, equivalence_key=key) for rank, (each, key) in enumerate(pairs)])


@pytest.mark.parametrize("own", [False, True])
def test_calls_of_one_place_stand_for_one_captured_call(own: bool) -> None:
    """Whoever wrote the pass. Without a stray a call stands for the captured one of its place."""
    assert compared((stray(0, 1), stray(1, 0)), (stray(0, 1), stray(1, 0)), own=own) == []
    assert compared((stray(0, 0),), (), own=own) == []
    (found,) = compared((stray(0, 1), stray(1, 0)), (), own=own)
    assert (found.name, found.is_unclear, found.remedy) == ("two" if own else "one' or 'two' or 'three", False, EXCHANGED)
    assert found.calls == "forward call 0 is the captured forward call 1 (#3 x) on rank 0, the captured forward call 0 on rank 1"
    assert compared((), (stray(1, 0),), own=own)[0].calls.startswith("forward call 1 is the captured forward call 1 on rank 0")


@pytest.mark.parametrize(
    ("orders", "own", "elsewhere", "blamed"),
    [
        ("abcd", "one two three", "", "three"),
        ("abcc", "one two three", "", "two"),
        ("abcc", "one three", "", "one"),  # the second changed them too, and is none of the user's
        ("abbb", "one two three", "two three", "one"),
        ("aaaa", "one three", "two three", "one' or 'three"),  # none changed them: one of the user's it is
        ("aabb", "one", "one", "one"),
        ("abab", "", "", "one' or 'two' or 'three"),
    ],
)
def test_of_a_users_passes_the_last_that_changed_these_calls_is_named(orders: str, own: str, elsewhere: str, blamed: str) -> None:
    """Those that changed the calls of another group only are none of them. `orders`: of the one group, the same on both ranks."""
    for strayed in (0, 1):
        both = []
        for rank in (0, 1):
            made = history(rank, orders, own=tuple(own.split()))
            other = tuple((name, (*found, *(Change(8, COLLECTIVE, name),) * (name in elsewhere))) for name, found in made.steps)
            strange = (stray(0, 1), stray(1, 0)) if rank == strayed else ()
            both.append(msgspec.structs.replace(made, steps=other, strays=strange))
        (found,) = breaks(both)
        assert (found.name, found.line[0][0], found.ranks) == (blamed, (0, 1, 2), (0, 1))


@pytest.mark.parametrize(
    ("one", "two", "alike", "apart"),
    [
        (stray(0, None), stray(0, None), True, True),  # what they carry is equal; on ranks with other programs too, alone in their place
        (stray(0, None), stray(0, 0), False, False),
        (stray(0, 0, "f"), stray(0, 0, "f"), True, True),
        (stray(0, 0, "f"), stray(0, 0, "g"), False, True),
        (stray(0, 0, "f", "e"), stray(0, 0, "f", "d"), True, True),  # slices by rank
        (stray(0, 0, "f", "e", LIKE_OTHERS), stray(0, 0, "f", "d", LIKE_OTHERS), True, False),
        (stray(0, 0, "f", "e", SAME_FLOW), stray(0, 0, "f", "d", SAME_FLOW), False, False),
        (stray(0, 0, "f", "e", SAME_FLOW), stray(0, 0, "f", "e", SAME_FLOW), True, False),
        (stray(0, 0, "f", "e", SAME_FLOW), stray(0, 0, "f", "d"), False, False),
    ],
)
def test_what_cannot_be_told_of_a_users_pass_is_refused(one: Stray, two: Stray, alike: bool, apart: bool) -> None:
    """Ranks with equal captured programs compare what calls carry; others do not, and then a call has to be alone."""
    for keys, passes in (((b"k", b"k"), alike), ((b"k", b"l"), apart)):
        found = compared((one,), (two,), keys)
        assert [(each.name, each.is_unclear, each.remedy) for each in found] == [("two", True, UNKNOWN)] * (not passes)
        assert compared((one,), (two,), keys, own=False) == []


@pytest.mark.parametrize("users", [(("two",), ()), ((), ("two",)), ((), ())])
def test_a_pass_of_a_user_on_either_rank_is_enough(users: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
    both = [
        history(rank, "aaaa", own=own, strays=(stray(0, 0, flow),), equivalence_key=b"k")
        for rank, (own, flow) in enumerate(zip(users, "fg", strict=True))
    ]
    assert [each.is_unclear for each in breaks(both)] == [True] * any(users)


def test_what_is_sent_and_what_a_receive_gives_are_not_compared() -> None:
    """How a rank computes what it sends its partner cannot know, whatever else they have in common; the call has to be alone."""
    for others, found in ((ALONE, 0), (LIKE_OTHERS, 1)):
        one, two = (msgspec.structs.replace(stray(0, 0, flow, flow, others), channel=way) for flow, way in (("f", SENDS), ("g", RECEIVES)))
        one, two = (msgspec.structs.replace(each, captured=(way, ("forward", 0))) for each, way in ((one, SENDS), (two, RECEIVES)))
        more = {"own": ("two",), "equivalence_key": b"k"}
        assert (
            len(breaks([messages("aaaa", SENDS, 1, strays=(one,), **more), messages("aaaa", RECEIVES, 2, strays=(two,), **more)])) == found
        )


def test_the_first_call_that_differs_is_told() -> None:
    calls = [(Call(("forward", k, 0), f"call {k}"), Call(("forward", more, 0), f"call {more}")) for k, more in ((0, 1), (0, 2))]
    assert first_difference((calls[0], calls[0]), (3, 5)) == ""
    assert first_difference((calls[0], calls[1]), (3, 5)) == "number 1 is call 1 on rank 3, call 2 on rank 5"
    assert first_difference((calls[0], ()), (3, 5)) == "number 0 is call 0 on rank 3, none on rank 5"


def test_changes_are_those_of_channels_with_another_order() -> None:
    before, after = {(7, 0): "a", (7, 1): "b", (8, 0): "c"}, {(7, 0): "a", (7, 1): "d", (9, 0): "e"}
    assert changes(before, after) == (Change(7, 1, "d"), Change(8, 0, ""), Change(9, 0, "e"))
    assert changes(before, before) == ()


def test_a_history_has_an_order_after_each_pass() -> None:
    made = history(0, "aabb")
    assert made.digests(SUMS) == ["a", "a", "b", "b"]
    assert made.digests(None) == made.digests((8, COLLECTIVE)) == ["", "", "", ""]
    assert made.channels() == {SUMS}
    assert made.names() == [*NAMES]
    assert msgspec.json.decode(msgspec.json.encode(made), type=History).steps == made.steps
