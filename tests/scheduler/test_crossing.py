"""Schedules of Paddle's own that receive in another order than they send: refused with cause and remedy."""

from __future__ import annotations

import msgspec
import pytest

from interlace.errors import PlanError
from interlace.ir import Pipeline, parse
from interlace.scheduler.hazards import check, require_straight


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (2, 3), (3, 2), (4, 2), (4, 3)])
def test_vpp_needs_whole_rounds_on_two_stages(stages: int, chunks: int) -> None:
    for count in range(1, 13):
        pipeline = Pipeline(num_stages=stages, num_micro_batches=count, num_chunks=chunks, schedule="VPP")
        if stages == 2 and count > 2 and count % 2:
            with pytest.raises(PlanError, match=rf"set it to {count - 1} or {count + 1}, or use schedule_mode 1F1B"):
                require_straight(pipeline)
        else:
            require_straight(pipeline)
    require_straight(Pipeline(num_stages=stages, num_micro_batches=5, schedule="1F1B"))


BUFFER = """program rank=0 world=1 mode=train
#0 %0:float32[2]!"buffer" = pd_op.data() forward
#1 %1:float32[2] = pd_op.exp(%0) forward
#2 %2:float32[2]~0! = pd_op.add_(%0, %1) forward inplace=0:0
#3 %3:float32[2] = pd_op.multiply_grad(%0, %1) backward
"""
JOBS = {"F": "job F{m} forward {m}: 1@{m} 2@{m}", "B": "job B{m} backward {m}: 3@{m}"}


@pytest.mark.parametrize(("order", "kinds"), [("F0 F1 B0 F2 B1 B2", []), ("F0 B0 F1 B1 F2 B2", ["wrong-version"]),
                                              ("F0 F1 F2 B0 B1 B2", ["wrong-version"])])  # fmt: skip
def test_a_buffer_that_backward_reads_is_found_as_in_paddles_own_order(order: str, kinds: list[str]) -> None:
    """Stage 0 of 2 under 1F1B runs one more forward ahead of each backward, and backward finds what that one left."""
    jobs = [JOBS[word[0]].format(m=word[1]) for word in order.split()]
    program = parse(BUFFER + "\n".join(jobs))
    pipeline = Pipeline(num_stages=2, num_micro_batches=3, schedule="1F1B")
    found = check([msgspec.structs.replace(program, pipeline=pipeline)])
    assert sorted({finding.kind for finding in found}) == kinds
