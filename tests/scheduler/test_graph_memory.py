"""When a captured step uses a block again that another stream reads last: by hand."""

from __future__ import annotations

import pytest

from interlace.ir import parse
from interlace.scheduler.hazards import graph_memory
from interlace.scheduler.memory.live import END

HEAD = """program rank=0 world=1 mode=train
pipeline stage=0 of 1 micro_batches=2 chunks=1 schedule=accumulate
#0 %0:float32[4]"x" = pd_op.data() forward
#1 %1:float32[4] = pd_op.relu(%0) forward
#2 %2:float32[4] = pd_op.exp(%0) forward stream="other"
#3 %3:float32[4] = pd_op.add(%1, %2) forward stream="side"
"""


def given_back(ops: str, jobs: str) -> dict[tuple[int, int], int]:
    """Producer and micro-batch of each block -> the index in the order of jobs at which it is free."""
    lives = graph_memory(parse(HEAD + ops + jobs)).lives
    return dict(zip(zip(lives.producer.tolist(), lives.micro_batch.tolist(), strict=True), lives.free_at.tolist(), strict=True))


@pytest.mark.parametrize(
    ("events", "compute", "other"),
    [
        ("", END, END),
        ("event e 3@0 -> 4@0\nevent f 3@1 -> 4@1", 3, END),
        ("event e 3@0 -> 6@0\nevent f 3@1 -> 6@1", 5, END),
        ("event e 3@0 -> 5@0\nevent f 3@1 -> 5@1", END, 4),
        ("event e 3@0 -> 4@0 5@0\nevent f 3@1 -> 4@1 5@1", 3, 4),
        ("event e 3@0 -> 5@0\nevent f 5@0 -> 6@0\nevent g 3@1 -> 5@1\nevent h 5@1 -> 6@1", 5, 4),
    ],
    ids=["nobody waits", "what is next", "later", "the other stream", "both", "through another stream"],
)
def test_a_block_is_free_where_its_own_stream_is_behind_the_reader(events: str, compute: int, other: int) -> None:
    """One reader of two blocks, on a third stream: each block waits for its own stream, in each micro-batch for its own reader."""
    ops = """#4 %4:float32[4] = pd_op.full() forward
#5 %5:float32[4] = pd_op.full() forward stream="other"
#6 %6:float32[4] = pd_op.full() forward
"""
    found = given_back(ops, f"job f0 forward 0: 1-6@0\njob f1 forward 1: 1-6@1\n{events}\n")
    later = {END: END}
    assert (found[1, 1], found[2, 1]) == (later.get(compute, compute + 6), later.get(other, other + 6))
    assert (found[1, 0], found[2, 0]) == (compute, other)


def test_a_block_that_waits_for_nobody_in_its_micro_batch_waits_for_the_next_one() -> None:
    """Streams are in order: behind the second reader is behind the first."""
    ops = "#4 %4:float32[4] = pd_op.full() forward\n"
    found = given_back(ops, "job f0 forward 0: 1-4@0\njob f1 forward 1: 1-4@1\nevent e 3@1 -> 4@1\n")
    assert (found[1, 0], found[1, 1]) == (7, 7)


def test_what_its_own_stream_reads_last_is_free_behind_that() -> None:
    ops = "#4 %4:float32[4] = pd_op.sin(%1) forward\n"
    found = given_back(ops, "job f0 forward 0: 1-4@0\njob f1 forward 1: 1-4@1\n")
    assert (found[1, 0], found[1, 1]) == (4, 8)
