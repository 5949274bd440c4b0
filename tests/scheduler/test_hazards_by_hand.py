"""Plans in which one order is missing, and the same plans with it: the checker must tell them apart (acceptance: F5)."""

from __future__ import annotations

import msgspec
import pytest

from interlace.ir import Program, parse
from interlace.scheduler.hazards import GPU, Place, check

LOOSE = msgspec.structs.replace(GPU, name="loose", ring_is_serial=False)


def rank(number: int, ops: str, jobs: str, world: int = 2, groups: str = "", micro_batches: int = 1) -> Program:
    """A rank's program; `#0` gives an input `%0`; each group has all ranks unless it is given."""
    listed = groups or "".join(f"group {k} = {','.join(map(str, range(world)))}\n" for k in (6, 7, 8, 9))
    head = f"program rank={number} world={world} mode=train\n"
    pipe = f"pipeline stage=0 of 1 micro_batches={micro_batches} chunks=1 schedule=accumulate\n"
    return parse(f'{head}{pipe}{listed}#0 %0:float32[4]"x" = pd_op.data() forward\n{ops.strip()}\n{jobs.strip()}\n')


def kinds(programs: list[Program], place: Place = GPU) -> set[str]:
    """Classes of what is found, but for streams that two rings share, which is no matter here."""
    return {finding.kind for finding in check(programs, place)} - {"shared-stream"}


def reduce(number: int, group: int, stream: str, name: str = "all_reduce", operand: int = 0, dims: str = "4", more: str = "") -> str:
    return f'#{number} %{number}:float32[{dims}] = pd_op.{name}(%{operand}) forward group={group} stream="{stream}"{more}\n'


# ---------------------------------------------------------------------------------------------------- circles over ranks


def test_operations_of_one_ring_run_in_turn_on_whatever_stream() -> None:
    """Rank 0 calls 7, 7, 9 and waits with 9 for the second 7; rank 1 waits with the first 7 for 9."""
    first = reduce(1, 7, "a") + reduce(2, 7, "b") + reduce(3, 9, "b")
    second = reduce(1, 9, "a") + reduce(2, 7, "a") + reduce(3, 7, "b")
    programs = [rank(0, first, "job all forward 0: 1-3@0"), rank(1, second, "job all forward 0: 1-3@0")]
    assert kinds(programs) == {"deadlock"}
    assert kinds(programs, LOOSE) == set()


@pytest.mark.parametrize(("event", "found"), [("", set()), ('event "e" 1@0 -> 2@0', {"deadlock"})])
def test_a_call_waits_for_calls_of_other_streams_that_its_events_bring(event: str, found: set[str]) -> None:
    programs = [rank(0, reduce(1, 7, "a") + reduce(2, 8, "b"), f"job all forward 0: 1-2@0\n{event}"),
                rank(1, reduce(1, 8, "a") + reduce(2, 7, "a"), "job all forward 0: 1-2@0")]  # fmt: skip
    assert kinds(programs) == found


def test_a_call_waits_for_the_last_of_the_calls_that_an_event_brings() -> None:
    """The event brings 6 and 7 to rank 0; rank 1 holds up 7 alone."""
    programs = [rank(0, reduce(1, 6, "a") + reduce(2, 7, "a") + reduce(3, 8, "b"), 'job all forward 0: 1-3@0\nevent "e" 2@0 -> 3@0'),
                rank(1, reduce(1, 6, "a") + reduce(2, 8, "a") + reduce(3, 7, "a"), "job all forward 0: 1-3@0")]  # fmt: skip
    assert kinds(programs) == {"deadlock"}


@pytest.mark.parametrize(("dims", "found"), [("4", set()), ("4096", {"deadlock"}), ("-1", {"deadlock"})])
def test_only_a_message_that_is_known_to_fit_is_over_before_it_is_received(dims: str, found: set[str]) -> None:
    """Both send first, then receive, on one stream; messages of up to 1024 bytes are buffered."""
    ops = """
#1 %1:float32[{dims}] = pd_op.relu(%0) forward
#2 pd_op.send_v2(%1) forward group=7 stream="p2p" {{"peer":{other}}}
#3 %3:float32[{dims}] = pd_op.recv_v2() forward group=7 stream="p2p" {{"peer":{other}}}
"""
    programs = [rank(k, ops.format(dims=dims, other=1 - k), "job all forward 0: 1-3@0") for k in (0, 1)]
    assert kinds(programs, msgspec.structs.replace(GPU, name="buffers", p2p_buffer_bytes=1024)) == found


# ------------------------------------------------------------------------------------------------------ partners that differ

MICRO_BATCHES = reduce(1, 7, "a")
HALVES = reduce(1, 7, "a") + reduce(2, 7, "a").replace("forward", "backward")


@pytest.mark.parametrize(
    ("ops", "jobs"),
    [
        (MICRO_BATCHES, ("job all forward 0: 1@0 1@1", "job all forward 0: 1@1 1@0")),
        (HALVES, ("job all forward 0: 1@0 2@0 1@1 2@1", "job all forward 0: 2@0 1@0 1@1 2@1")),
    ],
    ids=["micro-batch", "half of the step"],
)
def test_partners_are_of_one_micro_batch_and_one_half_of_the_step(ops: str, jobs: tuple[str, str]) -> None:
    same, other = ([rank(0, ops, jobs[0], micro_batches=2), rank(1, ops, each, micro_batches=2)] for each in jobs)
    assert kinds(same) == set()
    assert kinds(other) == {"collective-order"}


def test_every_rank_of_a_group_is_compared() -> None:
    third = [rank(k, reduce(1, 7, "a", "all_reduce" if k < 2 else "all_gather"), "job all forward 0: 1@0", 3) for k in range(3)]
    assert kinds(third) == {"collective-order"}
    assert kinds(third[:2]) == set()


@pytest.mark.parametrize(
    ("left", "right", "found"),
    [
        (reduce(1, 7, "a", dims="-1"), reduce(1, 7, "a"), set()),
        (reduce(1, 7, "a", operand=2, dims="-1"), reduce(1, 7, "a", "all_gather", operand=2), {"collective-order"}),
        (reduce(1, 7, "a", "broadcast", more=' {"root":0}'), reduce(1, 7, "a", "broadcast", more=' {"root":1}'), {"collective-order"}),
        (reduce(1, 7, "a", "broadcast", more=' {"root":1}'), reduce(1, 7, "a", "broadcast", more=' {"root":1}'), set()),
        (reduce(1, 7, "a", "margin_cross_entropy", operand=3), reduce(1, 7, "a", "margin_cross_entropy"), set()),
        (reduce(1, 7, "a", "all_reduce", operand=3), reduce(1, 7, "a", "all_reduce"), {"collective-order"}),
    ],
    ids=["unknown size", "unknown size of another kind", "another root", "one root", "a kind of uneven sizes", "another size"],
)
def test_what_partners_must_agree_on(left: str, right: str, found: set[str]) -> None:
    made = "#2 %2:float32[-1] = pd_op.relu(%0) forward\n#3 %3:float32[8] = pd_op.relu(%0) forward\n"
    programs = [rank(k, made + ops, "job all forward 0: 2-3@0 1@0") for k, ops in enumerate((left, right))]
    assert kinds(programs) == found


def test_each_difference_is_told_with_its_own_calls() -> None:
    ops = [reduce(1, 7, "a", name) + reduce(2, 8, "b", name) for name in ("all_reduce", "all_gather")]
    found = check([rank(k, each, "job all forward 0: 1-2@0") for k, each in enumerate(ops)])
    texts = {finding.message.partition(" of ranks")[0]: finding.message for finding in found}
    assert "#1 pd_op" in texts["group 7"]
    assert "#2 pd_op" not in texts["group 7"]
    assert "#2 pd_op" in texts["group 8"]
    assert "#1 pd_op" not in texts["group 8"]


def test_a_group_that_is_not_listed_is_a_finding() -> None:
    program = rank(0, reduce(1, 5, "a"), "job all forward 0: 1@0")
    assert kinds([program]) == {"wrong-group"}


# --------------------------------------------------------------------------------------------------------------- one rank

ACROSS = """
#1 %1:float32[4] = pd_op.relu(%0) forward stream="side"
#2 %2:float32[4] = pd_op.gelu(%1) forward
"""
TWO_JOBS = "job one forward 0: 1@0\njob two forward 0: 2@0\n"


def test_a_rank_that_differs_in_its_events_only_is_walked_by_itself() -> None:
    with_event, without = (rank(k, ACROSS, TWO_JOBS + event) for k, event in enumerate(('event "e" 1@0 -> 2@0', "")))
    assert {finding.ranks for finding in check([with_event, without])} == {(1,)}
