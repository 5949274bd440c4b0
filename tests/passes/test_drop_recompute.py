"""What `drop-recompute` keeps, leaves out, and leaves alone; results stay the same under every choice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.cost_model import GivenCosts
from interlace.ir import Program, parse, verify
from interlace.passes import DropRecompute, Pipeline, Schedule1F1B
from interlace.passes.peers import Peers, plan_together
from interlace.scheduler.memory.live import in_order
from interlace.scheduler.recompute import Recomputation
from tests.interpreter import assert_same

COSTS = GivenCosts({"comm": 40, "gemm": 50, "default": 5})
TEXT = (Path(__file__).parent / "fixtures" / "recompute_unread.txt").read_text()
PLAIN = TEXT.partition("=== program\n")[2].partition("=== report")[0]
FORMER = "stage=0 of 1 micro_batches=3 chunks=1 schedule=accumulate"
IN_FLIGHT = "stage=0 of 4 micro_batches=4 chunks=1 schedule=1F1B"
BEHIND = ["matmul", "add"]
"""Marked copies after gelu: they repeat nothing exactly where gelu does not."""
VIEWED = PLAIN.replace(
    '#4 %4:float32[512,512] = pd_op.gelu(%3)', '#24 %24:float32[512,512]~3 = pd_op.share_data(%3) forward layer="act" views=0:0 '
    '{"fwd_recompute_id":0}\n#4 %4:float32[512,512] = pd_op.gelu(%24)').replace(
    '#11 %11:float32[512,512] = pd_op.gelu(%10)', '#25 %25:float32[512,512]~10 = pd_op.share_data(%10) backward layer="act" views=0:0 '
    '{"bwd_recompute_id":0}\n#11 %11:float32[512,512] = pd_op.gelu(%25)')  # fmt: skip
"""The same with a view between the product and gelu."""


def parsed(text: str) -> Program:
    program = parse(text)
    verify(program)
    return program


def recomputation(program: Program) -> Recomputation:
    times = {"matmul": 50, "c_allreduce_sum": 40}
    return Recomputation(program, {op.id: times.get(op.kind, 5) for op in program.ops})


def kinds(program: Program) -> list[str]:
    """Copies that still run."""
    return [op.kind for op in program.ops if "bwd_recompute_id" in op.attrs]


@pytest.mark.parametrize("text", [PLAIN, VIEWED])
@settings(max_examples=8, deadline=None)
@given(chosen=st.lists(st.booleans(), min_size=4, max_size=4))
def test_any_choice_gives_the_same_results(text: str, chosen: Sequence[bool]) -> None:
    program = parsed(text.replace("512", "4"))
    found = recomputation(program)
    made = found.without([group for group, keep in zip(found.groups, chosen, strict=False) if keep])
    verify(made)
    scheduled = Pipeline((Schedule1F1B(interleave="off"),))
    assert_same(*([scheduled.run(msgspec.structs.replace(each, rank=rank), COSTS)[0] for rank in range(2)] for each in (program, made)))


def test_the_cheapest_byte_is_recomputed_first() -> None:
    """Of gelu's result and the product's, which are of one size, gelu's takes less to compute again."""
    found = recomputation(parsed(PLAIN))
    assert found.groups == [(11,), (10,)]
    assert [kinds(found.without(found.groups[count:])) for count in range(3)] == [[], ["gelu"], ["matmul", "gelu"]]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (PLAIN.replace("pd_op.gelu(", "pd_op.dropout("), ["dropout", *BEHIND]),
        (PLAIN.replace('%11:float32[512,512] = pd_op.gelu(%10) backward layer="act" {', '%11:float32[512,512] = pd_op.gelu(%10) backward '
                       'layer="act" {"approximate":true,'), ["gelu", *BEHIND]),
        (PLAIN.replace('%19:float32[512,512] = pd_op.gelu_grad(%10, %17) backward layer="act"',
                       '%19:float32[512,512]~10 = pd_op.gelu_grad_(%10, %17) backward layer="act" inplace=0:0'),
         ["matmul", "gelu", *BEHIND]),
    ],
    ids=["draws", "other attributes", "written over"],
)  # fmt: skip
def test_what_is_no_exact_repetition_stays(text: str, left: list[str]) -> None:
    found = recomputation(parsed(text))
    assert kinds(found.without(found.groups)) == left


def test_a_budget_keeps_as_much_as_it_has_room_for() -> None:
    """Four micro-batches in flight, each with one value more, or two."""
    program = parsed(PLAIN.replace(FORMER, IN_FLIGHT))
    found: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
    for budget in range(8 << 20, 24 << 20, 1 << 19):
        made, _ = Pipeline((DropRecompute(memory_budget=budget), Schedule1F1B(interleave="off"))).run(program, COSTS)
        assert in_order(made).peak() <= budget or len(kinds(made)) == 2
        found[len(kinds(made))].add(budget)
    assert max(found[2]) < min(found[1]) <= max(found[1]) < min(found[0])


def test_ranks_of_a_stage_recompute_alike() -> None:
    """Collectives are left out on all ranks of a group or on none: the rank with the least room decides."""
    program = parsed(PLAIN)

    def plan_one(rank: int, peers: Peers) -> list[str]:
        mine = msgspec.structs.replace(program, rank=rank)
        asked = DropRecompute(memory_budget=1 << 30 if rank else 100)
        return kinds(Pipeline((asked,)).run(mine, COSTS, peers)[0])

    assert plan_together(plan_one, [0, 1]) == [["matmul", "gelu"]] * 2


def test_a_program_without_recomputation_stays_as_it_is() -> None:
    program = parsed(PLAIN.replace("bwd_recompute_id", "other"))
    made, (report,) = Pipeline((DropRecompute(),)).run(program, COSTS)
    assert made.ops == program.ops
    assert report.declined == ("the program recomputes nothing that repeats forward exactly",)
