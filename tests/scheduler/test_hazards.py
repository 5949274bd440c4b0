"""The checker on small plans written by hand: each rule of each target once, with the text that a user would read."""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from interlace.cli import check as check_command
from interlace.errors import ConfigError, InterlaceError, PlanError, ProgramError
from interlace.ir import Event, Job, Op, Pipeline, Program, parse, save, verify
from interlace.ir.target import CPU, CUSTOM, GPU, as_graph
from interlace.passes.insert_events import fetching
from interlace.scheduler.hazards import Finding, check, kept_from_graph, require_safe
from interlace.scheduler.hazards.flat_plan import flatten, is_used_beside, writers_of
from tests.closure import is_unsafe
from tests.interpreter import run
from tests.strategies import World, plan, programs

HEAD = "program rank={rank} world={world} mode=train\npipeline stage=0 of 1 micro_batches={count} chunks=1 schedule=none\n"


def program(text: str, rank: int = 0, world: int = 1, count: int = 1) -> Program:
    made = parse(HEAD.format(rank=rank, world=world, count=count) + text)
    verify(made)
    return made


def kinds(found: list[Finding]) -> list[str]:
    return [finding.kind for finding in found]


# ------------------------------------------------------------------------------------------------------- races and events

ACROSS = """
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = pd_op.exp(%0) forward layer="a"
#2 %2:float32[2] = pd_op.relu(%1) forward stream="side" layer="b"
job one forward 0: 1@0
job two forward 0: 2@0
"""


def test_a_job_does_not_wait_for_another_jobs_stream() -> None:
    (finding,) = check([program(ACROSS)])
    assert finding.kind == "race"
    assert finding.message == (
        "rank 0: #2 pd_op.relu (b) of micro-batch 0 on stream 'side' may read %1 of #1 pd_op.exp (a) before #1 pd_op.exp (a) of "
        "micro-batch 0 on the compute stream has written it"
    )
    assert finding.remedy == "record an event after #1@0 and wait for it before #2@0"
    assert [(item.rank, item.op, item.micro_batch) for item in finding.items] == [(0, 1, 0), (0, 2, 0)]


def test_an_event_or_one_job_or_one_stream_or_a_serial_place_mends_it() -> None:
    assert check([program(ACROSS + "event e 1@0 -> 2@0")]) == []
    assert check([program(ACROSS.replace("job one forward 0: 1@0\njob two forward 0: 2@0", "job one forward 0: 1-2@0"))]) == []
    assert check([program(ACROSS.replace('stream="side" ', ""))]) == []
    assert check([program(ACROSS)], CPU) == []


def test_an_event_that_is_waited_for_too_early_is_named() -> None:
    plan_ = program(ACROSS.replace("1@0\njob two", "2@0\njob two").replace("two forward 0: 2@0", "two forward 0: 1@0"))
    plan_ = msgspec.structs.replace(plan_, events=(Event("e", (1, 0), ((2, 0),)),))
    assert set(kinds(check([plan_]))) == {"event-order", "read-before-write"}


def test_an_operand_of_which_only_the_shape_is_read_needs_no_order() -> None:
    assert check([program(ACROSS.replace('stream="side"', 'stream="side" no_buffer=0').replace(' layer="b"', ""))]) == []


def test_memcpy_d2h_loses_its_waits_and_the_remedy_says_so() -> None:
    text = ACROSS.replace("%2:float32[2] = pd_op.relu", "%2:float32[2]^pinned = pd_op.memcpy_d2h") + "event e 1@0 -> 2@0"
    assert check([program(text)]) == []  # one that a pass made is lowered to the asynchronous copy
    text = text.replace('stream="side"', 'stream="side" origin=2')
    (finding,) = check([program(text)])
    assert finding.kind == "race"
    assert "memcpy_d2h loses its waits" in finding.remedy
    assert check([program(text.replace("memcpy_d2h", "memcpy"))]) == []


# ----------------------------------------------------------------------------------------------------------- freed memory

HOLE = """
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = pd_op.exp(%0) forward
#2 %2:float32[2]^pinned = pd_op.memcpy(%1) forward stream="d2h" layer="copy"
#3 %3:float32[2] = pd_op.relu(%1) forward layer="last"
#4 builtin.shadow_output(%3) forward {"output_name":"y"}
job one forward 0: 1-3@0
"""


def test_a_side_reader_that_is_not_the_last_one_is_overtaken_by_the_free() -> None:
    """Only the last reader's stream is recorded, and host order counts as an order for that (GPU notes, section 5)."""
    (finding,) = check([program(HOLE)])
    assert finding.kind == "freed-in-use"
    assert finding.message == (
        "rank 0: %1 of #1 pd_op.exp is freed when #3 pd_op.relu (last) of micro-batch 0 on the compute stream is issued, while #2 "
        "pd_op.memcpy (copy) of micro-batch 0 on stream 'd2h' may still use it"
    )


def test_the_hole_closes_where_the_side_reader_is_last_or_ordered_before_the_last() -> None:
    assert check([program(HOLE.replace("1-3@0", "1@0 3@0 2@0"))]) == []
    assert check([program(HOLE + "event e 2@0 -> 3@0")]) == []
    assert check([program(HOLE)], CPU) == []


def test_event_collection_waits_for_the_last_reader_only() -> None:
    """Each stream has a pool of its own there too: what reads on the stream that took the block is over in front of its next owner."""
    assert kinds(check([program(HOLE)], CUSTOM)) == ["freed-in-use"]
    assert check([program(HOLE + "event e 2@0 -> 3@0")], CUSTOM) == []
    assert check([program(HOLE.replace("1-3@0", "1@0 3@0 2@0"))], CUSTOM) == []
    third = HOLE.replace(' forward layer="last"', ' forward stream="third" layer="last"')
    third = third.replace('#4 builtin.shadow_output(%3) forward {"output_name":"y"}\n', "")
    assert kinds(check([program(third)], CUSTOM)) == ["freed-in-use"]
    assert kinds(check([program(third.replace("1-3@0", "1@0 3@0 2@0"))], CUSTOM)) == ["freed-in-use"]
    assert check([program(third + "event e 2@0 -> 3@0")], CUSTOM) == []


def test_a_place_that_records_no_streams_needs_the_order_even_for_the_last_reader() -> None:
    careless = msgspec.structs.replace(GPU, name="careless", records_streams=False)
    assert kinds(check([program(HOLE.replace("1-3@0", "1@0 3@0 2@0"))], careless)) == ["freed-in-use"]


# ---------------------------------------------------------------------------------------------------------- pinned memory

OFFLOAD = """
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = pd_op.exp(%0) forward
#2 %2:float32[2]^pinned = pd_op.memcpy(%1) forward stream="d2h"
#3 %3:float32[2] = pd_op.memcpy_h2d(%2) backward stream="h2d"
#4 %4:float32[2] = pd_op.exp_grad(%3) backward
#5 builtin.shadow_output(%4) backward {"output_name":"y"}
"""
FOUR_JOBS = "job f0 forward 0: 1-2@0\njob f1 forward 1: 1-2@1\njob b0 backward 0: 3-4@0\njob b1 backward 1: 3-4@1\n"
EVENTS = "event e0 2@0 -> 3@0\nevent e1 2@1 -> 3@1\n"


def test_the_copy_in_must_wait_for_the_copy_out() -> None:
    found = check([program(OFFLOAD + FOUR_JOBS, count=2)])
    assert kinds(found) == ["copy-read-early"]
    assert found[0].count == 2
    assert "and for 1 more micro-batches" in str(found[0])
    assert check([program(OFFLOAD + FOUR_JOBS + EVENTS, count=2)]) == []


INTO_MEMORY = """
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = pd_op.exp(%0) forward
#2 %2:float32[2]^pinned = pd_op.memcpy(%1) forward stream="d2h"
#3 %3:float32[2] = pd_op.empty() backward
#4 %4:float32[2]~3 = pd_op.memcpy_h2d(%2, %3) backward stream="h2d" no_buffer=1 inplace=0:1
#5 %5:float32[2] = pd_op.exp_grad(%4) backward
#6 builtin.shadow_output(%5) backward {"output_name":"y"}
job f0 forward 0: 1-2@0
job f1 forward 1: 1-2@1
job b0 backward 0: 3-5@0
job b1 backward 1: 3-5@1
event e0 2@0 -> 4@0
event e1 2@1 -> 4@1
"""


def test_a_copy_waits_only_by_an_event_for_the_memory_that_it_writes_into() -> None:
    """The executor knows no operand for it, though both are in one job."""
    found = check([program(INTO_MEMORY, count=2)])
    assert kinds(found) == ["race"]
    assert found[0].count == 2
    assert is_unsafe([program(INTO_MEMORY, count=2)])
    ordered = program(INTO_MEMORY + "event m0 3@0 -> 4@0\nevent m1 3@1 -> 4@1\n", count=2)
    assert check([ordered]) == []
    assert not is_unsafe([ordered])


def test_memory_for_a_copy_is_taken_where_the_copy_runs() -> None:
    kept = INTO_MEMORY.replace("event e0 2@0 -> 4@0\n", "").replace("1-2@0", "1@0")
    assert check([program(kept.replace("3-5@0", "5@0") + "event m1 3@1 -> 4@1\n", count=2)]) == []
    apart = INTO_MEMORY.replace("job b0 backward 0: 3-5@0", "job m0 backward 0: 3@0\njob b0 backward 0: 4-5@0")
    wrong = [kept.replace("3-5@0", left) for left in ("3@0 5@0", "4-5@0")] + [apart]
    for text in wrong:
        with pytest.raises(ProgramError, match="micro-batch 0: no job runs both"):
            verify(parse(HEAD.format(rank=0, world=1, count=2) + text))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "pd_op.exp_grad(%4)",
            "pd_op.exp_grad(%3)",
            "#5 pd_op.exp_grad reads %3, memory of #3 pd_op.empty that only a copy or a collective may fill",
        ),
        ("(%2, %3)", "(%3, %2)", "#4 pd_op.memcpy_h2d reads %3, memory of #3"),
        (
            '~3 = pd_op.memcpy_h2d(%2, %3) backward stream="h2d" no_buffer=1 inplace=0:1',
            ' = pd_op.memcpy_h2d(%2) backward stream="h2d"',
            "#3 pd_op.empty takes memory that nothing fills; expected one copy or collective",
        ),
        (
            "#5 %5:float32[2] = pd_op.exp_grad(%4)",
            '#7 %7:float32[2]~3 = pd_op.memcpy_h2d(%2, %3) backward stream="h2d" no_buffer=1 inplace=0:1\n'
            "#5 %5:float32[2] = pd_op.exp_grad(%4)",
            "#3 pd_op.empty takes memory that 2 operations fill; expected one copy or collective",
        ),
        ("no_buffer=1 inplace=0:1", "no_buffer=1 views=0:1", "#4 pd_op.memcpy_h2d reads %3, memory of #3"),
    ],
)
def test_memory_for_a_copy_is_written_by_one_copy_and_read_by_nothing_else(old: str, new: str, told: str) -> None:
    wrong = INTO_MEMORY.replace(old, new)
    assert wrong != INTO_MEMORY
    with pytest.raises(ProgramError, match=re.escape(told)):
        verify(parse(HEAD.format(rank=0, world=1, count=2) + wrong))


def test_a_micro_batch_may_keep_its_activation_on_the_device() -> None:
    text = FOUR_JOBS.replace("1-2@0", "1@0").replace("3-4@0", "4@0") + "event e1 2@1 -> 3@1\n"
    half = parse(HEAD.format(rank=0, world=1, count=2) + OFFLOAD + text)
    assert check([half]) == []
    assert run(half)[0].outputs == run(program(OFFLOAD, count=2))[0].outputs


def test_a_pinned_buffer_that_all_micro_batches_share_is_overwritten_too_early() -> None:
    shared = program(OFFLOAD.replace("%2:float32[2]^pinned", "%2:float32[2]!^pinned") + FOUR_JOBS + EVENTS, count=2)
    assert "wrong-version" in kinds(check([shared]))


def test_the_next_step_must_not_write_a_buffer_that_this_step_still_reads() -> None:
    """Nothing on the d2h stream, or before it, waits for the copy in: the next step's copy out may come first."""
    text = OFFLOAD.replace("exp_grad(%3)", "exp_grad(%1)")
    found = check([program(text + "job f forward 0: 1-2@0\njob b backward 0: 4@0 3@0\nevent e 2@0 -> 3@0\n")])
    assert "buffer-reused" in kinds(found)
    assert "of the next step may overwrite %2" in next(f.message for f in found if f.kind == "buffer-reused")


def test_on_a_custom_place_nothing_orders_a_copy_in_behind_its_copy_out_even_in_one_job() -> None:
    one_job = program(OFFLOAD + "job f forward 0: 1-4@0")
    assert check([one_job]) == []
    assert "copy-read-early" in kinds(check([one_job], CUSTOM))


# ------------------------------------------------------------------------------------------------------------ many ranks


def two_ranks(first: str, second: str, ops: str) -> list[Program]:
    groups = "group 7 = 0,1\ngroup 8 = 0,1\n"
    return [program(groups + ops + job, rank, 2) for rank, job in enumerate((first, second))]


REDUCES = """
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = pd_op.all_reduce(%0) forward group=7 layer="a"
#2 %2:float32[4]"z" = pd_op.data() forward
#3 %3:float32[4] = pd_op.all_reduce(%2) forward group=7 layer="b"
#4 %4:float32[2] = pd_op.all_gather(%0) forward group=8 layer="c"
"""


def test_unequal_order_within_a_group_is_shown_with_both_operations() -> None:
    (finding,) = check(two_ranks("job f forward 0: 1@0 3-4@0", "job f forward 0: 3@0 1@0 4@0", REDUCES))
    assert finding.kind == "collective-order"
    assert finding.message == (
        "group 7 of ranks [0, 1]: collective 0 differs: rank 0 #1 pd_op.all_reduce (a) of micro-batch 0 on the compute "
        "stream (all_reduce 8 B float32, forward call 0 of micro-batch 0), rank 1 #3 pd_op.all_reduce (b) of micro-batch 0 on the compute "
        "stream (all_reduce 16 B float32, forward call 1 of micro-batch 0)"
    )


def test_two_groups_in_unequal_order_are_a_circle() -> None:
    (finding,) = check(two_ranks("job f forward 0: 1@0 3-4@0", "job f forward 0: 4@0 1@0 3@0", REDUCES))
    assert finding.kind == "deadlock"
    assert finding.ranks == (0, 1)
    assert {item.op for item in finding.items} == {1, 4} or {item.op for item in finding.items} == {3, 4}
    assert "earlier on the compute stream" in finding.message


SWAP = """
#0 %0:float32[2]"x" = pd_op.data() forward
#1 pd_op.send_v2(%0) forward group=7 {stream}layer="out" {{"peer":{peer}}}
#2 %2:float32[2] = pd_op.recv_v2() forward group=8 layer="in" {{"peer":{peer}}}
"""


def test_sends_that_wait_for_receivers_are_a_circle_unless_buffered_or_on_a_stream_of_their_own() -> None:
    def world(stream: str, ops: str) -> list[Program]:
        made = []
        for rank in range(2):
            text = SWAP.format(peer=1 - rank, stream=stream)
            groups = "group 7 = 0,1\ngroup 8 = 0,1\n"
            if rank:  # what rank 0 sends on group 7 rank 1 receives there
                text = text.replace("group=7", "group=x").replace("group=8", "group=7").replace("group=x", "group=8")
            cut = "\nevent cut 0@0 -> 1@0" if stream else ""
            made.append(program(groups + text + f"job f forward 0: {ops}{cut}", rank, 2))
        return made

    (finding,) = check(world("", "1-2@0"))
    assert finding.kind == "deadlock"
    assert "recv_v2 (in)" in finding.message
    assert "send_v2 (out)" in finding.message
    assert check(world("", "1-2@0"), CPU) == []
    assert check(world('stream="s" ', "1-2@0")) == []
    assert check(world("", "1-2@0"), msgspec.structs.replace(GPU, p2p_buffer_bytes=8)) == []
    (finding,) = check(world("", "2@0 1@0"), CPU)
    assert finding.kind == "deadlock", "both receive first: nobody ever sends"
    item = "rank {} #{} pd_op.{} of micro-batch 0 on the compute stream"
    out, into = ([item.format(rank, *call) for rank in range(2)] for call in ((1, "send_v2 (out)"), (2, "recv_v2 (in)")))
    first, *waits = finding.message.split("\n    ")
    assert first == "ranks wait in a circle:"
    assert waits == [
        f"{into[0]} waits for what its partner sends",
        f"and its partner {out[1]} waits for {into[1]} (earlier on the compute stream)",
        "which waits for what its partner sends",
        f"and its partner {out[0]} waits for {into[0]} (earlier on the compute stream)",
    ]


def baseline_1f1b(receive_first: bool) -> list[Program]:
    """Two stages, one ring, one stream; Paddle receives the next activation before it sends a gradient."""
    text = {
        0: '#0 %0:float32[2]"x" = pd_op.data() forward\n#1 pd_op.send_v2(%0) forward group=7 {"peer":1}\n'
        '#2 %2:float32[2] = pd_op.recv_v2() backward group=7 {"peer":1}\n',
        1: '#1 %1:float32[2] = pd_op.recv_v2() forward group=7 {"peer":0}\n#2 %2:float32[2] = pd_op.exp(%1) backward\n'
        '#3 pd_op.send_v2(%2) backward group=7 {"peer":0}\n',
    }
    steady = ("b0 backward 0: 2@0", "r1 recv 1: 1@1", "s0 send 0: 3@0") if receive_first else ("b0 backward 0: 2-3@0", "f1 forward 1: 1@1")
    last = "b1 backward 1: 2-3@1"
    jobs = {
        0: ["f0 forward 0: 1@0", "f1 forward 1: 1@1", "b0 backward 0: 2@0", "b1 backward 1: 2@1"],
        1: ["f0 forward 0: 1@0", *steady, last],
    }
    return [program("group 7 = 0,1\n" + text[r] + "\n".join(f"job {job}" for job in jobs[r]), r, 2, 2) for r in range(2)]


def test_paddles_own_order_of_1f1b_passes_and_the_naive_one_is_a_circle() -> None:
    assert check(baseline_1f1b(receive_first=True)) == []
    (finding,) = check(baseline_1f1b(receive_first=False))
    assert finding.kind == "deadlock"
    assert check(baseline_1f1b(receive_first=False), CPU) == []


def test_a_message_of_another_size_is_a_mismatch() -> None:
    ranks = baseline_1f1b(receive_first=True)
    wider = [msgspec.structs.replace(v, shape=(4,)) if v.id == 2 else v for v in ranks[0].values]
    (finding,) = check([ranks[0].with_ops(ranks[0].ops, wider), ranks[1]])
    assert finding.kind == "p2p-mismatch"
    assert "1 to 0: message 0 differs" in finding.message
    unknown = [msgspec.structs.replace(v, shape=(-1,)) if v.id == 2 else v for v in ranks[0].values]
    assert check([ranks[0].with_ops(ranks[0].ops, unknown), ranks[1]]) == []


def test_ranks_that_are_not_given_are_not_judged() -> None:
    for one in plan(World(pp=2, mp=2, micro_batches=3, layers=2, streams=True)):
        assert check([one]) == []


def test_two_rings_on_one_stream_would_share_a_communicator() -> None:
    text = REDUCES.replace("group=7 layer", 'group=7 stream="mp" layer').replace("group=8 layer", 'group=8 stream="mp" layer')
    job = "job f forward 0: 1@0 3-4@0\nevent cut 2@0 -> 1@0"
    found = check(two_ranks(job, job, text))
    assert kinds(found) == ["shared-stream"] * 2
    assert found[0].remedy == "give group 8 a stream of its own"


def test_programs_that_are_no_world_are_refused() -> None:
    one = programs(World())[0]
    with pytest.raises(PlanError, match=r"rank\(s\) \[0\] are given twice"):
        check([one, one])
    with pytest.raises(PlanError, match="of different worlds"):
        check([one, msgspec.structs.replace(one, rank=1, world=2)])


def test_require_safe_prints_what_it_found() -> None:
    require_safe(plan(World(micro_batches=2)))
    with pytest.raises(PlanError, match=r"not safe on gpu: 1 finding.*\n  race: rank 0: #2 pd_op.relu"):
        require_safe([program(ACROSS)])


# ------------------------------------------------------------------------------------------- both ends of the step, variables

ENDS = """
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = pd_op.exp(%0) forward stream="side"
#2 builtin.shadow_output(%1) forward {"output_name":"y"}
job one forward 0: 1@0
"""


def test_the_jobs_at_both_ends_of_the_step_are_part_of_the_plan() -> None:
    first, second = check([program(ENDS)])
    assert [first.kind, second.kind] == ["race", "race"]
    assert first.message == (
        "rank 0: #1 pd_op.exp of micro-batch 0 on stream 'side' may read %0 'x' before the job that cuts the batch (#0 pd_op.data of "
        "micro-batch 0) has written it"
    )
    assert "the job that collects the outputs (#2 builtin.shadow_output of micro-batch 0) may read %1 of #1" in second.message
    assert check([program(ENDS + "event cut 0@0 -> 1@0\nevent y 1@0 -> 2@0")]) == []
    assert kinds(check([program(ENDS + "event cut 0@0 -> 1@0")])) == ["race"]


def test_an_event_of_the_batch_stands_behind_all_that_is_cut() -> None:
    more = '#3 %3:float32[2]"z" = pd_op.data() forward\n#4 %4:float32[2] = pd_op.exp(%3) forward\njob'
    two = ENDS.replace("job", more, 1).replace("1@0", "1@0 4@0")
    with pytest.raises(ProgramError, match=r"recorded after \(0, 0\), which cuts the batch; expected \(3, 0\), the last that does"):
        program(two + "event cut 0@0 -> 1@0")
    assert check([program(two + "event cut 3@0 -> 1@0\nevent y 1@0 -> 2@0")]) == []


def test_memory_of_an_input_is_handed_out_again_too() -> None:
    text = ENDS.replace("#2 builtin.shadow_output(%1)", "#3 %3:float32[2] = pd_op.relu(%0) forward\n#2 builtin.shadow_output(%3)")
    text = text.replace("1@0", "1@0 3@0") + "event cut 0@0 -> 1@0"
    (finding,) = check([program(text.replace("job one", "#4 %4:float32[2] = pd_op.exp(%3) forward\njob one").replace("3@0", "3-4@0"))])
    assert finding.kind == "freed-in-use"
    assert "%0 'x' is freed when #3 pd_op.relu" in finding.message


VIEW = """
#0 %0:float32[4] = pd_op.full() forward
#1 %1:float32[2,2]~0 = pd_op.reshape(%0) forward views=0:0
#2 %2:float32[2,2] = pd_op.exp(%1) forward stream="side"
#3 %3:float32[4]~0 = pd_op.relu_(%0) forward inplace=0:0
job one forward 0: 0-3@0
"""


def test_inside_a_job_the_executor_orders_by_variable_and_not_by_memory() -> None:
    (finding,) = check([program(VIEW)])
    assert finding.kind == "race"
    assert "#3 pd_op.relu_ of micro-batch 0 on the compute stream may overwrite" in finding.message
    assert check([program(VIEW + "event e 2@0 -> 3@0")]) == []
    assert check([program(VIEW.replace("relu_(%0)", "relu_(%1)").replace("%3:float32[4]~0", "%3:float32[2,2]~0"))]) == []
    assert check([program(VIEW)], CPU) == []


LEFT_OUT = """
#0 %0:float32[4] = pd_op.full() forward
#1 %1:float32[4]^pinned = pd_op.memcpy(%0) forward
#2 %2:float32[4] = pd_op.memcpy_h2d(%1) backward
#3 %3:float32[2,2]~2 = pd_op.reshape(%2) backward views=0:0
#4 %4:float32[2,2] = pd_op.exp(%3) backward stream="side"
#5 %5:float32[4]~2 = pd_op.relu_(%2) backward inplace=0:0
job one forward 0: 0@0 3-5@0
"""


def test_a_view_of_what_a_copy_that_is_left_out_would_give_is_a_variable_of_its_own() -> None:
    """No order by memory inside a job, as for a view of the value itself; the copy's own result is the value's variable."""
    (finding,) = check([program(LEFT_OUT)])
    assert finding.kind == "race"
    assert "#5 pd_op.relu_ of micro-batch 0 on the compute stream may overwrite" in finding.message
    assert check([program(LEFT_OUT + "event e 4@0 -> 5@0")]) == []
    copied = LEFT_OUT.replace("~2 = pd_op.reshape", " = pd_op.reshape").replace(" views=0:0", "")
    assert check([program(copied)]) == []


TWO_VARIABLES = """
#0 %0:float32[4] = pd_op.full() forward
#1 %1:float32[4]~0 = pd_op.share_data(%0) forward views=0:0
#2 %2:float32[4] = pd_op.exp(%1) forward stream="side"
#3 %3:float32[4] = pd_op.relu(%0) forward stream="side"
#4 %4:float32[4] = pd_op.gelu(%0) forward
#5 %5:float32[4] = pd_op.full() forward
job one forward 0: 0-5@0
"""


def test_the_collector_notes_a_variables_last_reader_where_it_stands() -> None:
    """The view's last reader on the side stream is noted as it is issued; what that stream reads later, through the base, is not."""
    for target in (GPU, CUSTOM):
        (finding,) = check([program(TWO_VARIABLES)], target)
        assert finding.kind == "freed-in-use"
        assert "while #3 pd_op.relu of micro-batch 0 on stream 'side' may still use it" in finding.message
    assert check([program(TWO_VARIABLES.replace("0-5@0", "0-1@0 3@0 2@0 4-5@0"))]) == []
    assert check([program(TWO_VARIABLES + "event e 3@0 -> 4@0")]) == []


def test_the_next_run_of_a_job_waits_by_variable_too() -> None:
    text = """
#0 %0:float32[4]!"p" = builtin.parameter() forward
#1 %1:float32[4]~0! = pd_op.relu_(%0) forward inplace=0:0
#2 %2:float32[2,2]~0 = pd_op.reshape(%1) forward views=0:0
#3 %3:float32[2,2] = pd_op.exp(%2) forward stream="side"
job one forward 0: 1-3@0
"""
    (finding,) = check([program(text)])
    assert finding.kind == "race"
    assert "#1 pd_op.relu_ of micro-batch 0 on the compute stream of the next step may overwrite" in finding.message
    assert check([program(text.replace("views=0:0", "").replace("~0 = pd_op.reshape", " = pd_op.reshape"))]) == []


# ----------------------------------------------------------------------------------------------- draws, state, waits of the host

DRAWS = """
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = pd_op.dropout(%0) forward
"""


def test_draws_keep_the_order_of_paddles_own_schedule() -> None:
    """One generator gives all numbers: swapped draws of two micro-batches are other numbers than the baseline's."""
    assert check([program(DRAWS + "job a forward 0: 1@0\njob b forward 1: 1@1\n", count=2)]) == []
    (finding,) = check([program(DRAWS + "job b forward 1: 1@1\njob a forward 0: 1@0\n", count=2)])
    assert finding.kind == "draw-order"
    assert finding.message == (
        "rank 0: #1 pd_op.dropout of micro-batch 1 on the compute stream runs at the position of #1 "
        "pd_op.dropout of micro-batch 0 on the compute stream in Paddle's own schedule; it draws random numbers"
    )
    assert check([program(DRAWS + "job b forward 1: 1@1\njob a forward 0: 1@0\n", count=2)], CPU) != []


PLAIN_HEAD = "program rank=0 world=1 mode=train\npipeline stage=0 of 1 micro_batches=2 chunks=1 schedule=accumulate\n"


@pytest.mark.parametrize(
    ("jobs", "told"),
    [
        ("job a forward 0: 1@0\n", "#1 pd_op.dropout of micro-batch 1 0 time(s), expected 1"),
        ("job a forward 0: 1@0\njob b forward 1: 1@1\njob c forward 1: 1@1\n", "#1 pd_op.dropout of micro-batch 1 2 time(s), expected 1"),
    ],
    ids=["left out", "twice"],
)
def test_a_plan_that_does_not_hold_every_draw_once_is_refused(jobs: str, told: str) -> None:
    """There is no order to compare then, and the numbers are others."""
    with pytest.raises(PlanError, match=re.escape(told)):
        check([parse(PLAIN_HEAD + DRAWS + jobs)])


def test_draws_of_a_backward_keep_their_place_among_the_forwards() -> None:
    """1F1B's last stage draws forward 0, backward 0, forward 1, the one before it forward 0 and 1 first: other numbers."""
    text = DRAWS + "#2 %2:float32[2] = pd_op.dropout(%1) backward\n"
    head = "program rank=0 world=1 mode=train\npipeline stage=0 of {} micro_batches=2 chunks=1 schedule=1F1B\n"
    f0, b0, f1, b1 = (f"job {name}\n" for name in ("f0 forward 0: 1@0", "b0 backward 0: 2@0", "f1 forward 1: 1@1", "b1 backward 1: 2@1"))
    orders = (f0 + b0 + f1, f0 + f1 + b0)
    found = [kinds(check([parse(head.format(stages) + text + order + b1)])) for stages in (1, 2) for order in orders]
    assert found == [[], ["draw-order"], ["draw-order"], []]


def test_state_is_updated_in_the_order_of_micro_batches() -> None:
    text = """
#0 %0:float32[2]!"g" = builtin.parameter() forward
#1 %1:float32[2] = pd_op.full() backward
#2 %2:float32[2]~0! = pd_op.add_(%0, %1) backward inplace=0:0
"""
    assert check([program(text + "job a backward 0: 1-2@0\njob b backward 1: 1-2@1\n", count=2)]) == []
    found = check([program(text + "job b backward 1: 1-2@1\njob a backward 0: 1-2@0\n", count=2)])
    assert set(kinds(found)) == {"read-before-write", "wrong-version"}


def test_a_wait_of_the_host_covers_what_it_waits_for_and_no_more() -> None:
    text = """
#0 %0:float32[2] = pd_op.full() forward
#1 %1:float32[2] = pd_op.exp(%0) forward
#2 %2:float32[2] = pd_op.relu(%0) forward
#3 %3:float32[2] = pd_op.exp({}) forward stream="side"
#4 %4:float32[2] = pd_op.add(%1, %2) backward
job one forward 0: 0-2@0 | 2@0<1@0
job two forward 0: 3@0
job three backward 0: 4@0
event e 3@0 -> 4@0
"""
    assert check([program(text.format("%1"))]) == []
    (finding,) = check([program(text.format("%2"))])
    assert finding.kind == "race"
    assert "before #2 pd_op.relu" in finding.message


def test_calls_of_one_ring_wait_for_each_other_on_whatever_streams() -> None:
    """Rank 0's call on ring 8 waits for its second call on ring 7; rank 1's first call on ring 7 waits for its call on ring 8."""
    call = '#{k} %{k}:float32[2] = pd_op.all_reduce(%{of}) forward group={group} stream="{stream}"'
    calls = ((1, 7, "a"), (2, 7, "b"), (3, 8, "c"))
    first, second, other = ({"k": k, "group": group, "stream": stream} for k, group, stream in calls)
    ranks = [
        [call.format(**first, of=0), call.format(**second, of=0), call.format(**other, of=2)],
        [call.format(**other, of=0), call.format(**first, of=3), call.format(**second, of=0)],
    ]
    head, jobs = '#0 %0:float32[2]!"p" = builtin.parameter() forward', ("job f forward 0: 1-3@0", "job f forward 0: 3@0 1-2@0")
    world = two_ranks(*("\n".join((head, *lines, job)) for lines, job in zip(ranks, jobs, strict=True)), "")
    (finding,) = check(world)
    assert finding.kind == "deadlock"
    assert check(world, msgspec.structs.replace(GPU, ring_is_serial=False)) == []


# ---------------------------------------------------------------------------------------------------------------- command


def command(*words: str) -> int:
    """Run `interlace check` as the command line does."""
    parser = argparse.ArgumentParser()
    check_command.add_parser(parser.add_subparsers())
    return check_command.main(parser.parse_args(["check", *words]))


def test_the_command_checks_a_world_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Offline."""
    for one in plan(World(pp=2, mp=2, micro_batches=3, layers=2, streams=True, offload=True)):
        save(one, tmp_path / f"rank{one.rank}.ilp.gz")
    assert command(str(tmp_path), "--json", str(tmp_path / "out.json")) == 0
    assert "safe: no race" in capsys.readouterr().out
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["findings"] == []
    assert [rank["rank"] for rank in written["ranks"]] == [0, 1, 2, 3]
    names = {"step_ns", "compute_ns", "exposed_comm_ns", "bubble_ns", "host_ns", "peak_bytes", "pinned_bytes"}
    assert names <= set(written["ranks"][0])
    with pytest.raises(ProgramError, match=r"nothing is given of ranks 0, 2-3 of 4, among them all of stage 1"):
        command(str(tmp_path / "rank1.ilp.gz"))
    assert command(str(tmp_path / "rank1.ilp.gz"), "--partial") == 0
    assert "not given: ranks 0, 2-3" in capsys.readouterr().out


def test_the_command_fails_on_an_unsafe_plan_and_names_the_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(program(ACROSS), tmp_path / "race.ilp")
    assert command(str(tmp_path / "race.ilp"), "--json", str(tmp_path / "out.json")) == 1
    assert "- race: rank 0: #2 pd_op.relu (b)" in capsys.readouterr().out
    (finding,) = json.loads((tmp_path / "out.json").read_text())["findings"]
    assert finding["kind"] == "race"
    assert [item["op"] for item in finding["items"]] == [1, 2]
    assert command(str(tmp_path / "race.ilp"), "--target", "cpu") == 0


def test_the_command_prints_the_circle_and_no_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for one in baseline_1f1b(receive_first=False):
        save(one, tmp_path / f"rank{one.rank}.ilp")
    assert command(str(tmp_path), "--json", str(tmp_path / "out.json")) == 1
    assert "ranks wait in a circle" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["ranks"] == []


def test_the_command_refuses_wrong_files_and_devices(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"a folder without \*.ilp files"):
        command(str(tmp_path))
    save(program(ACROSS), tmp_path / "race.ilp")
    with pytest.raises(InterlaceError, match="no device profile 'nowhere'"):
        command(str(tmp_path), "--device", "nowhere")
    with pytest.raises(ConfigError, match=r"--json .*race\.ilp is a file; expected a folder there"):
        command(str(tmp_path), "--json", str(tmp_path / "race.ilp" / "out.json"))


# ------------------------------------------------------------------------------------------------------- places of events

PLACES = """
#0 %0:float32[4]"x" = pd_op.data() forward
#1 %1:float32[4] = pd_op.relu(%0) forward
#2 %2:float32[4] = pd_op.exp(%1) forward
#3 %3:float32[4] = pd_op.exp(%2) forward stream="side"
#4 %4:float32[4] = pd_op.tanh(%3) forward
job one forward 0: 1-2@0
job two forward 0: 3@0
job three forward 0: 4@0
event there 2@0 -> 3@0
event back 3@0 -> 4@0
"""
NO_PLACES = {
    "control flow": "pd_op.if({}) forward num_blocks=2",
    "a loop": "pd_op.while({}) forward num_blocks=1",
    "a shape": "pd_op.shape({}) forward",
    "a constant of the host": 'pd_op.full({}) forward {{"place":"Place(cpu)"}}',
    "a user's operator": "custom_op.mine({}) forward",
}
"""Operations at which the executor takes no events; on which targets it has none at all."""


@pytest.mark.parametrize("instead", NO_PLACES.values(), ids=NO_PLACES)
def test_an_event_that_the_executor_never_records_is_refused(instead: str) -> None:
    text = PLACES.replace("pd_op.exp(%1) forward", instead.format("%1"))
    first, second = check([program(text)])
    assert (first.kind, second.kind) == ("event-order", "race")
    assert "after which Paddle's executor records none" in first.message
    assert "record an event after a kernel that follows #2@0 on its stream (#2@0 records none)" in second.remedy
    assert kinds(check([program(text)], CUSTOM)) == ["event-order"]  # its host waits for the compute stream
    assert check([program(text)], CPU) == []


@pytest.mark.parametrize("instead", NO_PLACES.values(), ids=NO_PLACES)
def test_a_wait_that_the_executor_ignores_orders_nothing(instead: str) -> None:
    text = PLACES.replace("pd_op.tanh(%3) forward", instead.format("%3"))
    for target in (GPU, CUSTOM):
        (finding,) = check([program(text)], target)
        assert finding.kind == "race"
        assert "wait for it before a kernel that precedes #4@0 on its stream (#4@0 waits for none)" in finding.remedy
    assert check([program(text)], CPU) == []


def test_control_flow_runs_on_the_compute_stream_whatever_its_stream() -> None:
    branch = PLACES.replace('pd_op.exp(%2) forward stream="side"', 'pd_op.if(%2) forward stream="side" num_blocks=2')
    one_stream = branch.replace("event there 2@0 -> 3@0\nevent back 3@0 -> 4@0\n", "")
    assert check([program(one_stream)]) == check([program(one_stream)], CUSTOM) == []


PINNED = """
#0 %0:float32[4]"x" = pd_op.data() forward
#1 %1:float32[4] = pd_op.exp(%0) forward
#2 %2:float32[4]^pinned = pd_op.memcpy_d2h(%1) forward stream="out"
#3 %3:float32[4] = pd_op.memcpy_h2d(%2) forward stream="in"
#4 %4:float32[4] = pd_op.exp(%3) forward{}
job one forward 0: 1-2@0{}3-4@0
event copied 2@0 -> 3@0
event back 3@0 -> 4@0
"""


@pytest.mark.parametrize("cut", [" ", "\njob two forward 0: "], ids=["one job", "two jobs"])
def test_a_copy_out_of_the_next_step_waits_for_a_copy_in_where_the_host_or_a_stream_does(cut: str) -> None:
    """A custom device orders no stream by host memory, and so not two steps of one job either."""
    (finding,) = check([program(PINNED.format(' stream="in"', cut))], CUSTOM)
    assert finding.kind == "buffer-reused"
    assert "#2 pd_op.memcpy_d2h of micro-batch 0 on stream 'out' of the next step may overwrite" in finding.message
    assert check([program(PINNED.format("", cut))], CUSTOM) == []


def test_a_fault_about_an_element_that_nothing_takes_out_names_the_vector() -> None:
    text = """
#0 %0:float32[4]"x" = pd_op.data() forward
#1 %1:vector<float32[2];float32[2]> = pd_op.split_with_num(%0) forward
#2 %2:float32[2] = pd_op.add_n(%1) forward
job one forward 0: 2@0 1@0
"""
    (finding,) = check([program(text)])
    assert (finding.kind, finding.count) == ("read-before-write", 1)
    assert "#2 pd_op.add_n of micro-batch 0 on the compute stream uses %1 of #1 pd_op.split_with_num" in finding.message


# ------------------------------------------------------------------------------------------------------------------ speed


def long_plan(num_ops: int) -> Program:
    """A chain that hops between four streams, cut in jobs, with an event at every cut."""
    rng = random.Random(0)
    lines = ['#0 %0:float32[2]"x" = pd_op.data() forward']
    base = program("\n".join(lines))
    ops, values = list(base.ops), list(base.values)
    for k in range(1, num_ops + 1):
        values.append(msgspec.structs.replace(values[0], id=k, storage=k, name=""))
        ops.append(Op(k, "pd_op.exp", (k - 1,), (k,), "forward", stream=rng.choice(["", "a", "b", "c"])))
    cuts = [*range(1, num_ops + 1, 500), num_ops + 1]
    jobs = tuple(Job(f"j{a}", "forward", 0, tuple((k, 0) for k in range(a, b))) for a, b in pairwise(cuts))
    events = tuple(Event(f"e{cut}", (cut - 1, 0), ((cut, 0),)) for cut in cuts[:-1])
    return Program(tuple(ops), tuple(values), pipeline=Pipeline(), jobs=jobs, events=events)


@pytest.mark.slow
def test_time_grows_with_the_plan_and_not_with_its_square() -> None:
    spent = []
    for num_ops in (4_000, 32_000):
        one = long_plan(num_ops)
        start = time.process_time()
        found = check([one])
        spent.append(time.process_time() - start)
        assert [f for f in found if f.kind != "freed-in-use"] == []
    assert spent[1] < 8 * 3 * spent[0], spent


def test_views_of_one_tensor_that_an_unknown_operation_may_write_over_are_its_own() -> None:
    """As a user's attention that takes queries, keys and values cut from one product: it reads all before it writes any."""
    text = """
#0 %0:float32[4]"x" = pd_op.data() forward
#1 %1:float32[4] = pd_op.exp(%0) forward
#2 %2:float32[2]~1 = pd_op.slice(%1) forward views=0:0
#3 %3:float32[2]~1 = pd_op.slice(%1) forward views=0:0
#4 %4:float32[4] = custom_op.mine(%2, %3) forward
#5 %5:float32[4] = pd_op.tanh(%4) forward
"""
    jobs = "\n".join(f"job step{k} forward {k}: 1-5@{k}" for k in range(2))
    assert check([program(f"{text}{jobs}\n", count=2)]) == []


# ------------------------------------------------------------------------------------------------------- captured steps

GRAPH = """
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = pd_op.exp(%0) forward layer="a"
#2 %2:float32[2] = {op}
"""


@pytest.mark.parametrize(
    ("op", "kind", "why"),
    [
        ("pd_op.relu(%1) forward", "", ""),
        ("pd_op.memcpy_d2h(%1) forward origin=2", "host-in-graph", "the host waits for its copy"),
        ("pd_op.dropout(%1) forward", "draw-in-graph", "it draws random numbers: each launch would repeat the first"),
        ("pd_op.if(%1) forward num_blocks=1", "host-in-graph", "the host decides in each step which operations of it run"),
        ("own.op(%1) forward", "draw-in-graph", "may draw random numbers"),
    ],
)
def test_what_a_captured_step_must_not_have(op: str, kind: str, why: str) -> None:
    made = program(GRAPH.format(op=op) + "job one forward 0: 1@0 2@0\n")
    assert [each.kind for each in kept_from_graph(made, GPU)] == []
    found = kept_from_graph(made, as_graph(GPU))
    assert [each.kind for each in found] == [kind] * bool(kind)
    assert [each.kind for each in check([made], as_graph(GPU)) if each.kind.endswith("-in-graph")] == [kind] * bool(kind)
    assert all(why in each.message and "capture: off" in each.remedy for each in found)


def test_a_captured_step_has_no_waits_of_the_host_and_no_fetches() -> None:
    waits = program(GRAPH.format(op="pd_op.relu(%1) forward") + "job one forward 0: 1@0 2@0 | 2@0<1@0\n")
    assert kinds(kept_from_graph(waits, GPU)) == []
    (found,) = kept_from_graph(waits, as_graph(GPU))
    assert (found.kind, found.remedy) == (
        "host-in-graph",
        "leave the waits out (throttle_host: off), or do not capture (capture: off)",
    )
    (fetched,) = kept_from_graph(
        fetching(program(GRAPH.format(op="pd_op.relu(%1) forward") + "job one forward 0: 1@0 2@0\n"), [2]), as_graph(GPU)
    )
    assert "its operand is fetched" in fetched.message


def test_what_is_collected_is_written_by_what_its_views_are_of() -> None:
    """Not by the view, which touches no memory; an input that is fetched is written by no job, and neither is what stays from the step
    before."""
    program = parse("""
program rank=0 world=2 mode=train
pipeline stage=0 of 1 micro_batches=2 chunks=1 schedule=accumulate
group 7 = 0,1
#0 %0:float32[4]"x" = pd_op.data() forward
#1 %1:float32[4]!"w" = builtin.parameter() forward
#2 %2:float32[4] = pd_op.all_reduce(%0) forward group=7 stream="side"
#3 %3:float32[2,2]~2 = pd_op.reshape(%2) forward views=0:0
#4 %4:float32[4]~1 = pd_op.sgd_(%1) optimize inplace=0:0
#5 builtin.shadow_output(%3) forward {"output_name":"loss"}
#6 builtin.shadow_output(%0) optimize {"interlace_fetch":0}
#7 builtin.shadow_output(%4) optimize {"interlace_fetch":4}
#8 builtin.shadow_output(%1) forward {"interlace_fetch":1}
job a forward 0: 2@0 2@1 3@0 3@1
job b optimizer 0: 4@0
""")
    flat = flatten(program)
    assert writers_of(flat, (5, 1)) == [(2, 1)]
    assert writers_of(flat, (7, 0)) == [(4, 0)]
    assert writers_of(flat, (8, 0)) is None
    assert writers_of(flat, (6, 1)) == [(0, 1)]
    assert [is_used_beside(flat, (op_id, 0)) for op_id in (5, 6, 7)] == [False, True, False]  # what alone writes it is no other user
