"""Partners issue the same call, not one that is as large: the checker finds each swap on one rank, and so does the oracle."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from interlace.ir import Program, parse, verify
from interlace.ir.target import CPU
from interlace.scheduler.hazards import check
from interlace.scheduler.hazards.skeleton import places_of_calls
from tests.closure import channels, mismatched, whole
from tests.strategies import World, plan, worlds

HEAD = """program rank={rank} world=2 mode=train
pipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=none
group 7 = 0,1
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2]"y" = pd_op.data() forward
"""
SUMS = """
#2 %2:float32[2] = pd_op.all_reduce(%0) forward group=7 layer="a"
#3 %3:float32[2] = pd_op.all_reduce(%1) forward group=7 layer="b"
"""
EXCHANGES = """
#2 %2:float32[2] = pd_op.global_scatter(%0) forward group=7 layer="a"
#3 %3:float32[2] = pd_op.global_scatter(%1) forward group=7 layer="b"
"""
SENDS = """
#2 pd_op.send_v2(%0) forward group=7 layer="a" {"peer":1}
#3 pd_op.send_v2(%1) forward group=7 layer="b" {"peer":1}
"""
RECEIVES = """
#2 %2:float32[2] = pd_op.recv_v2() forward group=7 layer="a" {"peer":0}
#3 %3:float32[2] = pd_op.recv_v2() forward group=7 layer="b" {"peer":0}
"""
INPUTS = {"sums": (SUMS, SUMS), "uneven exchanges": (EXCHANGES, EXCHANGES), "messages": (SENDS, RECEIVES)}
STRAIGHT, SWAPPED = "job f forward 0: 2@0 3@0", "job f forward 0: 3@0 2@0"


def world(texts: tuple[str, str], orders: tuple[str, str]) -> list[Program]:
    made = [parse(HEAD.format(rank=rank) + text + order) for rank, (text, order) in enumerate(zip(texts, orders, strict=True))]
    for program in made:
        verify(program)
    return made


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("texts", INPUTS.values(), ids=INPUTS)
def test_two_equal_calls_in_the_other_order_on_one_rank_are_found(texts: tuple[str, str], rank: int) -> None:
    ranks = world(texts, (SWAPPED, STRAIGHT) if rank == 0 else (STRAIGHT, SWAPPED))
    assert mismatched(ranks)
    (finding,) = check(ranks)
    assert finding.kind == ("p2p-mismatch" if texts[0] == SENDS else "collective-order")
    assert all(f"forward call {number} of micro-batch 0" in finding.message for number in (0, 1))
    assert {item.layer for item in finding.items} == {"a", "b"}


@pytest.mark.parametrize("texts", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("order", [STRAIGHT, SWAPPED])
def test_the_same_order_on_all_ranks_passes(texts: tuple[str, str], order: str) -> None:
    ranks = world(texts, (order, order))
    assert not mismatched(ranks)
    assert check(ranks) == []


def test_operations_moved_in_the_program_keep_their_place() -> None:
    """A pass moves the operation itself, and jobs follow its order."""
    ranks = world((SUMS, SUMS), (STRAIGHT, SWAPPED))
    moved = [*ranks[1].ops[:2], ranks[1].ops[3], ranks[1].ops[2]]
    for jobs in (ranks[1].jobs, ()):
        other = msgspec.structs.replace(ranks[1].with_ops(moved), jobs=jobs)
        both = [msgspec.structs.replace(ranks[0], jobs=jobs and ranks[0].jobs), other]
        assert mismatched(both)
        assert [finding.kind for finding in check(both)] == ["collective-order"]


def test_numbers_of_operations_may_differ_between_ranks() -> None:
    """On rank 1 other operations come before, and the calls have other numbers; a call that a pass made anew comes behind them."""
    other = SUMS.replace("#3", "#9").replace("#2", "#5")
    made = '#{} %4:float32[2] = pd_op.all_to_all(%0) forward group=7 layer="c"\n'
    texts = (SUMS + made.format(20), other + made.format(30))
    orders = ("job f forward 0: 20@0 2@0 3@0", "job f forward 0: 30@0 5@0 9@0")
    assert check(world(texts, orders)) == []
    assert not mismatched(world(texts, orders))
    wrong = world(texts, (orders[0], "job f forward 0: 30@0 9@0 5@0"))
    assert mismatched(wrong)
    assert [finding.kind for finding in check(wrong)] == ["collective-order"]


def test_a_new_operation_is_the_captured_call_that_it_stands_for() -> None:
    """Rank 1's first sum was made anew, with a number behind all others."""
    texts = (SUMS, SUMS.replace("#2", "#12").replace("group=7 layer", "group=7 origin=2 layer", 1))
    for order, wrong in (("12@0 3@0", False), ("3@0 12@0", True)):
        ranks = world(texts, (STRAIGHT, f"job f forward 0: {order}"))
        assert mismatched(ranks) == wrong
        assert bool(check(ranks)) == wrong


def test_messages_and_collectives_of_one_ring_are_numbered_apart() -> None:
    """Rank 0 sends before the sum, rank 1 receives behind it; the sum is the first of the ring on both."""
    total = '#2 %2:float32[2] = pd_op.all_reduce(%0) forward group=7 layer="a"\n'
    send, receive = '#4 pd_op.send_v2(%0) forward group=7 {"peer":1}\n', '#4 %4:float32[2] = pd_op.recv_v2() forward group=7 {"peer":0}\n'
    texts = (send.replace("#4", "#2") + total.replace("#2", "#5"), total + receive)
    ranks = world(texts, ("job f forward 0: 2@0 5@0", "job f forward 0: 2@0 4@0"))
    assert not mismatched(ranks)
    assert check(ranks, CPU) == []


def test_repetitions_of_different_calls_are_different_calls() -> None:
    """Each rank computes one sum again in backward, both of one size."""
    again = '#8 %8:float32[2] = pd_op.all_reduce(%{}) backward group=7 origin={} layer="{}"\n'
    captured = SUMS.replace("group=7", "group=7 origin=2", 1).replace("group=7 layer", "group=7 origin=3 layer")
    first, second = captured + again.format(0, 2, "a"), captured + again.format(1, 3, "b")
    order = STRAIGHT + "\njob b backward 0: 8@0"
    assert check(world((first, first), (order, order))) == []
    assert not mismatched(world((first, first), (order, order)))
    ranks = world((first, second), (order, order))
    assert mismatched(ranks)
    (finding,) = check(ranks)
    assert finding.kind == "collective-order"
    assert [item.op for item in finding.items] == [8, 8]


def test_repetitions_of_a_forward_and_of_a_backward_call_are_different_calls() -> None:
    """Both are the first of their part of the step, and both are repeated in backward."""
    first = SUMS.replace("group=7", "group=7 origin=2", 1)
    captured = first.replace("forward group=7 layer", "backward group=7 origin=3 layer")
    again = '#{0} %{0}:float32[2] = pd_op.all_reduce(%{1}) backward group=7 origin={2} layer="{3}"\n'
    text = captured + again.format(8, 0, 2, "a") + again.format(9, 1, 3, "b")
    straight, swapped = (f"job f forward 0: 2@0\njob b backward 0: 3@0 {order}" for order in ("8@0 9@0", "9@0 8@0"))
    assert check(world((text, text), (swapped, swapped))) == []
    ranks = world((text, text), (straight, swapped))
    assert mismatched(ranks)
    (finding,) = check(ranks)
    assert "backward repetition of forward call 0 of micro-batch 0" in finding.message
    assert "backward repetition of backward call 0 of micro-batch 0" in finding.message


NORM = "#3 %3:float32[2] = pd_op.sync_batch_norm_(%1) forward\n"
AROUND = (
    '#2 %2:float32[2] = pd_op.all_reduce(%0) forward group=7 layer="a"\n'
    + NORM
    + "#4 %4:float32[2] = pd_op.all_reduce(%1) forward group=7\n"
)


@pytest.mark.parametrize("order", ["3@0 2@0 4@0", "2@0 4@0 3@0"])
def test_a_call_without_a_group_keeps_its_place_among_those_of_every_group(order: str) -> None:
    """A batch norm over all ranks: one rank waits in it for the other, which waits in the sum."""
    straight, moved = "job f forward 0: 2@0 3@0 4@0", f"job f forward 0: {order}"
    for orders in ((straight, straight), (moved, moved)):
        assert check(world((AROUND, AROUND), orders)) == []
        assert not mismatched(world((AROUND, AROUND), orders))
    ranks = world((AROUND, AROUND), (straight, moved))
    assert mismatched(ranks)
    (finding,) = check(ranks)
    assert finding.kind == "collective-order"
    assert {item.op for item in finding.items} > {3}
    assert "sync_batch_norm_" in finding.message


def test_two_calls_without_a_group_in_the_other_order_are_found() -> None:
    text = AROUND.replace(
        "#4 %4:float32[2] = pd_op.all_reduce(%1) forward group=7", "#4 %4:float32[2] = pd_op.sync_batch_norm_(%0) forward"
    )
    ranks = world((text, text), ("job f forward 0: 2@0 3@0 4@0", "job f forward 0: 2@0 4@0 3@0"))
    assert mismatched(ranks)
    assert "collective-order" in {finding.kind for finding in check(ranks)}


def test_ranks_with_other_calls_without_a_group_are_not_compared_in_them() -> None:
    """Stages of a pipeline have batch norms of their own; where they share a sum, only that is compared."""
    bare = AROUND.replace(NORM, "")
    ranks = world((AROUND, bare), ("job f forward 0: 2@0 4@0 3@0", "job f forward 0: 2@0 4@0"))
    assert check(ranks) == []
    assert not mismatched(ranks)


def swapped(program: Program, rng: random.Random) -> Program | None:
    """A plan with two calls of one channel in each other's place, and without events; None where no channel has two."""
    lines = [places for places in channels(program).values() if len(places) > 1]
    if not lines:
        return None
    items = whole(program)
    one, two = (items[place] for place in rng.sample(rng.choice(lines), 2))
    other = {one: two, two: one}
    jobs = [msgspec.structs.replace(job, items=tuple(other.get(item, item) for item in job.items)) for job in program.jobs]
    return msgspec.structs.replace(program, jobs=tuple(jobs), events=())


@settings(max_examples=25, deadline=None)
@given(worlds(max_pp=2, max_dp=2, max_micro_batches=3, max_layers=2), st.integers(0, 2**16))
def test_any_two_calls_of_a_channel_swapped_on_one_rank_are_found(drawn: World, seed: int) -> None:
    rng, ranks = random.Random(seed), plan(drawn)
    rank = rng.randrange(len(ranks))
    changed = swapped(ranks[rank], rng)
    assume(changed is not None)
    assert changed is not None
    assert not mismatched(ranks)
    ranks[rank] = changed
    assert mismatched(ranks)
    assert {finding.kind for finding in check(ranks)} & {"collective-order", "p2p-mismatch"}


@pytest.mark.parametrize(
    ("numbers", "places"),
    [
        ("5 9", {5: 0, 9: 1}),
        ("5 9:0", {9: 0, 5: 1}),  # what stands for the first operation of all
        ("9:3 5", {9: 0, 5: 1}),
        ("16:3 8:3 5", {8: 0, 16: 1, 5: 2}),  # of several in place of one the lower number
        ("8:3 16:3 5", {8: 0, 16: 1, 5: 2}),
        ("3 16:3 5", {3: 0, 5: 1, 16: -1}),  # one that is still there is repeated
    ],
)
def test_calls_are_counted_as_captured(numbers: str, places: dict[int, int]) -> None:
    """By the captured call that they stand for, whatever their order in the program."""
    text = HEAD.format(rank=0).replace("#0 ", "#20 ").replace("#1 ", "#21 ")
    for each in numbers.split():
        number, _, origin = each.partition(":")
        text += f"#{number} %{number}:float32[2] = pd_op.all_reduce(%0) forward group=7{f' origin={origin}' if origin else ''}\n"
    assert places_of_calls(parse(text)) == places
