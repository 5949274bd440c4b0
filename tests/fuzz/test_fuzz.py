"""A short run of the fuzzer, the oracle's own rules on plans by hand, and what is printed of a disagreement."""

from __future__ import annotations

import msgspec
import pytest

from interlace.ir import Program, parse, show, verify
from interlace.ir.target import CPU, CUSTOM, GPU, IDEAL
from testbed.target import RULES
from tests.closure import Closure, closure_of, collected, is_unsafe
from tests.fuzz import run
from tests.fuzz.plans import random_plans

HEAD = "program rank=0 world=1 mode=train\npipeline stage=0 of 1 micro_batches={count} chunks=1 schedule=accumulate\n"


def program(text: str, count: int = 1) -> Program:
    made = parse(HEAD.format(count=count) + text)
    verify(made)
    return made


@pytest.mark.slow
def test_what_the_checker_calls_safe_is_safe_on_every_target() -> None:
    outcome = run.compare(iter(range(150)), lambda: False)
    assert [(seed, target.name) for seed, target in outcome.too_safe] == []
    assert outcome.plans > 140
    for target in run.EVERY_TARGET:
        assert outcome.verdicts[f"{target.name} safe"] > 15
        assert outcome.verdicts[f"{target.name} unsafe"] > 15
    assert len({seed for seed, *_ in outcome.too_strict}) <= 3


def test_a_plan_is_a_function_of_its_seed() -> None:
    for seed in (3, 4):
        assert [show(each) for each in random_plans(seed)] == [show(each) for each in random_plans(seed)]


def test_a_disagreement_is_printed_as_a_small_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A checker that finds no races: the plan that is left is one race."""
    found = run.found_kinds
    monkeypatch.setattr(run, "found_kinds", lambda plans, target: tuple(kind for kind in found(plans, target) if kind != "race"))
    assert run.main(["--seconds", "60", "--seed", "0"]) == 1
    printed = capsys.readouterr().out
    assert "the checker calls unsafe plans safe on " in printed
    text = printed.partition("the smallest like it:\n")[2].partition("\n\n")[0]
    small = parse(text)
    assert sum(len(job.items) for job in small.jobs) <= 6
    assert any(is_unsafe([small], target) for target in run.EVERY_TARGET)


# ---------------------------------------------------------------------------------------------------------------- oracle

VECTORS = """
#0 %0:float32[4]"x" = pd_op.data() forward
#1 %1:float32[4] = pd_op.exp(%0) forward
#2 %2:float32[4] = pd_op.exp(%1) forward stream="side"
#3 %3:float32[4] = pd_op.relu(%1) forward
#4 %4:vector<float32[4];float32[4]> = builtin.combine(%0, %0) forward
#5 %5:float32[4] = pd_op.add_n(%4) forward{}
job one forward 0: 1-5@0
"""


def test_combining_tensors_is_no_work() -> None:
    """The next operation of a block's stream is a kernel: the one that takes the vector, and not the vector's making."""
    free = Closure(program(VECTORS.format("") + "event e 2@0 -> 5@0"))
    assert free.freed_early() == []
    assert [(use, last) for use, last in Closure(program(VECTORS.format("") + "event e 2@0 -> 4@0")).freed_early()] != []


def test_events_of_what_launches_nothing_order_nothing() -> None:
    across = VECTORS.format(' stream="other"').replace("0: 1-5@0", "0: 1@0 3-4@0\njob two forward 0: 2@0 5@0")
    assert Closure(program(across + "event e 1@0 -> 2@0\nevent f 4@0 -> 5@0")).races() != []
    assert Closure(program(across + "event e 1@0 -> 2@0 5@0")).races() == []


OUTPUTS = """
#0 %0:float32[4]"x" = pd_op.data() forward
#1 %1:float32[4]!"p" = builtin.parameter() forward
#2 %2:float32[4] = pd_op.exp(%0) forward stream="side"
#3 %3:float32[4]~1! = pd_op.add_(%1, %2) optimize inplace=0:0
#4 %4:float32[4] = pd_op.exp(%3) optimize stream="side"
#5 builtin.shadow_output(%2) forward {"output_name":"y"}
#6 builtin.shadow_output(%3) optimize {"interlace_fetch":3}
#7 builtin.shadow_output(%4) optimize {"interlace_fetch":4}
job one forward 0: 2@0 2@1
job two optimize 0: 3-4@0
event cut 0@1 -> 2@0
event made 2@1 -> 3@0
"""


def test_events_end_at_outputs_of_every_kind() -> None:
    """Those of each micro-batch, and what is fetched of what runs once: each is an item of the last job."""
    plan = program(OUTPUTS + "event done 4@0 -> 5@1 7@0", count=2)
    assert collected(plan) == [(5, 0), (5, 1), (6, 0), (7, 0)]
    assert not is_unsafe([plan])
    without = msgspec.structs.replace(plan, events=plan.events[:2])
    assert closure_of(without).races() != []


LATE = """
#0 %0:float32[4]"x" = pd_op.data() forward
#1 %1:float32[4] = pd_op.exp(%0) forward
#2 %2:float32[4] = pd_op.exp(%0) backward stream="side"
#3 %3:float32[4] = pd_op.exp(%1) backward stream="side"
job one forward 0: 1@0
job two backward 0: 2-3@0
event cut 0@0 -> 2@0
"""


def test_the_oracle_knows_where_hosts_wait() -> None:
    """At the end of a job on a custom device; where the plan says so, or a copy to pageable memory blocks, on a GPU."""
    late = program(LATE)
    assert {target.name: is_unsafe([late], target) for target in (GPU, CUSTOM, RULES, IDEAL, CPU)} == {
        "gpu": True,
        "custom": False,
        "testbed": True,
        "ideal": True,
        "cpu": False,
    }
    waits = program(LATE.replace("0: 1@0", "0: 1@0 | 1@0<1@0"))
    assert not is_unsafe([waits], GPU)
    behind_a_vector = LATE.replace("job one", "#4 %4:vector<float32[4];float32[4]> = builtin.combine(%0, %0) forward\njob one")
    assert not is_unsafe([program(behind_a_vector.replace("0: 1@0", "0: 1@0 4@0 | 4@0<1@0"))], GPU)
    copied = LATE.replace("job one", "#4 %4:float32[4]^host = pd_op.memcpy_d2h(%1) forward\njob one").replace("0: 1@0", "0: 1@0 4@0")
    assert not is_unsafe([program(copied)], GPU)


def test_a_copy_that_is_left_out_gives_what_it_would_have_copied() -> None:
    """What is written over its operand afterwards is not that."""
    text = """
#0 %0:float32[4] = pd_op.full() forward
#1 %1:float32[4]^pinned = pd_op.memcpy(%0) forward
#2 %2:float32[4] = pd_op.memcpy_h2d(%1) forward
#3 %3:float32[4]~0 = pd_op.relu_(%0) forward inplace=0:0
#4 %4:float32[4] = pd_op.exp({}) forward
job one forward 0: 0@0 3-4@0
"""
    assert Closure(program(text.format("%2"))).unwritten() != []
    assert Closure(program(text.format("%3"))).unwritten() == []
    for operands in ("%2, %3", "%3, %2"):  # one memory cannot be both
        assert Closure(program(text.format(operands))).unwritten() != []


def test_an_element_of_a_vector_that_is_written_over_is_the_same_memory() -> None:
    text = """
#0 %0:float32[4]"x" = pd_op.data() forward
#1 %1:vector<float32[2];float32[2]> = pd_op.split_with_num(%0) forward
#2 %2:float32[2], %3:float32[2] = builtin.split(%1) forward
#3 %4:float32[2]~2 = pd_op.relu_(%2) forward inplace=0:0
#4 %5:float32[2] = pd_op.add_n(%1) forward
job one forward 0: {}
"""
    assert Closure(program(text.format("1-4@0"))).unwritten() == []
    assert Closure(program(text.format("1-2@0 4@0 3@0"))).unwritten() != []


def test_the_oracle_looks_at_draws_of_backward_where_micro_batches_come_in_turn() -> None:
    text = """
#0 %0:float32[4]"x" = pd_op.data() forward
#1 %1:float32[4] = pd_op.dropout(%0) forward
#2 %2:float32[4] = pd_op.dropout(%0) backward
job one forward 0: {}
"""
    in_turn, together = (program(text.format(items), count=2) for items in ("1-2@0 1-2@1", "1@0 1@1 2@0 2@1"))
    assert [is_unsafe([plan], CPU) for plan in (in_turn, together)] == [False, True]
