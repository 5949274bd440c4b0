"""The rules of a program: each planted fault is found, with the operation named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from interlace.errors import ProgramError
from interlace.ir import Event, Job, Op, Program, TensorType, Value, describe, parse, verify
from tests.strategies import plan, programs, worlds

GOOD = parse("""program rank=3 world=4 mode=train
pipeline stage=0 of 1 micro_batches=2 chunks=1 schedule=1F1B
group 5 = 0,3
#0 %0:float32[2]!"w" = builtin.parameter() forward
#1 %1:float32[2]"x" = pd_op.data() forward
#2 %2:float32[2] = pd_op.add(%1, %0, _) forward layer="fc1" no_buffer=1
#3 %3:float32[2]~2 = pd_op.all_reduce_(%2) forward group=5 inplace=0:0
#4 %4:vector<float32[2]> = builtin.combine(%3) forward
#5 pd_op.send_v2(%3) forward group=5 {"peer":0}
#6 %5:float32[2]~0!"w" = pd_op.sgd_(%0) optimize inplace=0:0
job forward_0 forward 0: 2-5@0
job forward_1 forward 1: 2-5@1
job optimizer optimizer 0: 6@0
event e 2@0 -> 6@0
""")


def replaced(place: int, **fields: Any) -> Program:
    """The good program with one operation changed."""
    ops = list(GOOD.ops)
    ops[place] = msgspec.structs.replace(ops[place], **fields)
    return GOOD.with_ops(ops)


def with_values(place: int, **fields: Any) -> Program:
    """The good program with one value changed."""
    values = list(GOOD.values)
    values[place] = msgspec.structs.replace(values[place], **fields)
    return GOOD.with_ops(GOOD.ops, values)


def with_items(*items: tuple[int, int], name: str = "more", kind: str = "forward") -> Program:
    """The good program with one job more."""
    return msgspec.structs.replace(GOOD, jobs=(*GOOD.jobs, Job(name, kind, 0, items)))


def with_waits(*waits: tuple[tuple[int, int], tuple[int, int]]) -> Program:
    """The good program with waits of the host in its first job."""
    return msgspec.structs.replace(GOOD, jobs=(msgspec.structs.replace(GOOD.jobs[0], host_waits=waits), *GOOD.jobs[1:]))


def with_event(*events: Event) -> Program:
    """The good program with events more."""
    return msgspec.structs.replace(GOOD, events=(*GOOD.events, *events))


PLANTED: dict[str, tuple[Callable[[], Program], str]] = {
    "ring without a group": (lambda: replaced(2, attrs={"ring_id": 7}), "#2 pd_op.add (fc1) has ring 7 but no group"),
    "group of an unknown kind": (lambda: replaced(2, group=5), "#2 pd_op.add (fc1) has group 5, and it is not known how"),
    "host wait elsewhere": (lambda: with_waits(((5, 0), (2, 1))), "after (5, 0) the host waits for (2, 1); both must be in the job"),
    "host wait too early": (lambda: with_waits(((2, 0), (3, 0))), "after (2, 0) the host waits for (3, 0), which it issues only later"),
    "host wait for a name": (lambda: with_waits(((5, 0), (4, 0))), "waits for #4 builtin.combine, which computes nothing on the device"),
    "two host waits": (lambda: with_waits(((5, 0), (2, 0)), ((5, 0), (3, 0))), "job forward_0: the host waits twice after one op instance"),
    "value twice": (lambda: GOOD.with_ops(GOOD.ops, [*GOOD.values, GOOD.values[2]]), "value %2 is declared twice"),
    "value of nobody": (lambda: GOOD.with_ops(GOOD.ops, [*GOOD.values, Value(9, (), "int32", 9)]), "%9 is declared, but no op gives it"),
    "vector of nothing": (lambda: with_values(4, elements=()), "value %4 is a vector without element types"),
    "vector with a shape": (lambda: with_values(4, shape=(1,)), "value %4 of dtype vector has shape [1]"),
    "op twice": (lambda: GOOD.with_ops([*GOOD.ops, Op(2, "pd_op.nop", (), (), "forward")]), "#2 pd_op.nop: op id 2 is used twice"),
    "read too early": (lambda: replaced(2, operands=(3, 0, -1)), "#2 pd_op.add (fc1) reads %3, which is given only later"),
    "read of nothing": (lambda: replaced(2, operands=(1, 77)), "#2 pd_op.add (fc1) reads %77, which is not declared"),
    "given twice": (lambda: replaced(3, results=(2,), inplace=()), "#3 pd_op.all_reduce_ gives %2, which an earlier op gives already"),
    "given undeclared": (lambda: replaced(2, results=(2, 78)), "#2 pd_op.add (fc1) gives %78, which is not declared"),
    "alias out of range": (lambda: replaced(3, inplace=((0, 1),)), "#3 pd_op.all_reduce_: alias 0:1 is out of range"),
    "negative alias": (lambda: replaced(3, views=((-1, 0),)), "#3 pd_op.all_reduce_: alias -1:0 is out of range"),
    "alias elsewhere": (lambda: with_values(3, storage=3), "#3 pd_op.all_reduce_: result 0 aliases operand 0 but has another storage"),
    "no_buffer out of range": (lambda: replaced(2, no_buffer=(3,)), "#2 pd_op.add (fc1): no_buffer (3,) is out of range"),
    "group of nobody": (lambda: replaced(3, group=6), "#3 pd_op.all_reduce_ uses group 6, which the program does not list"),
    "p2p group of nobody": (lambda: replaced(5, group=6), "#5 pd_op.send_v2 uses group 6, which the program does not list"),
    "peer out of group": (lambda: replaced(5, attrs={"peer": 2}), "#5 pd_op.send_v2: peer 2 is not in group 5 [0, 3]"),
    "job name": (lambda: with_items(name="a-b"), "job 'a-b': a name or kind is letters, digits and _"),
    "job kind": (lambda: with_items(kind="a b"), "job 'a b': a name or kind is letters, digits and _"),
    "job twice": (lambda: with_items(name="forward_0"), "job 'forward_0' occurs twice"),
    "job of no op": (lambda: with_items((77, 0)), "job more: op #77 is not in the program"),
    "no such micro-batch": (lambda: with_items((2, 2)), "job more: micro-batch 2 of #2 pd_op.add (fc1), there are 2"),
    "optimizer again": (lambda: with_items((6, 1)), "job more: #6 pd_op.sgd_ of the optimizer for micro-batch 1"),
    "boundary in a job": (lambda: with_items((1, 0)), "job more: #1 pd_op.data names an input or output"),
    "op doubled": (lambda: with_items((2, 1)), "job more: #2 pd_op.add (fc1) runs a second time for micro-batch 1"),
    "op lost": (lambda: msgspec.structs.replace(GOOD, jobs=GOOD.jobs[1:], events=()), "#2 pd_op.add (fc1) is in no job for micro-batch 0"),
    "event twice": (lambda: with_event(Event("e", (3, 0), ())), "event 'e' is recorded twice"),
    "event name": (lambda: with_event(Event("a b", (3, 0), ())), "event 'a b': a name has no blanks"),
    "two events of one item": (lambda: with_event(Event("f", (2, 0), ())), "events 'e' and 'f' are both recorded after (2, 0)"),
    "recorder of no job": (lambda: with_event(Event("f", (77, 0), ())), "event 'f' is recorded after (77, 0), which no job runs"),
    "waiter of no job": (lambda: with_event(Event("f", (3, 0), ((77, 0),))), "event 'f' is waited for by (77, 0), which no job runs"),
    "wait too early": (lambda: with_event(Event("f", (3, 1), ((3, 0),))), "event 'f': (3, 0) waits before (3, 1) is issued"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_named(name: str) -> None:
    """Odd programs, nothing lost. One fault a rule; the message names rank and operation."""
    make, words = PLANTED[name]
    with pytest.raises(ProgramError) as caught:
        verify(make())
    assert str(caught.value).startswith("rank 3: ")
    assert words in str(caught.value)


def test_the_good_program_is_good() -> None:
    """Odd programs. Fails where a rule refuses what all planted faults start from: they would be found for nothing."""
    verify(GOOD)


@settings(max_examples=15, deadline=None)
@given(worlds(dropout=True))
def test_random_programs_and_plans_are_good(world: Any) -> None:
    """Odd programs. Fails where a rule refuses (`ProgramError`) a program that the generator, or the planner, makes."""
    for program in (*programs(world), *plan(world)):
        verify(program)


def test_a_copy_may_be_left_out_for_a_micro_batch() -> None:
    """No quick return. A copy that no job runs is the identity; every other operation must run."""
    copy = Op(9, "pd_op.memcpy_d2h", (2,), (9,), "forward")
    values = [*GOOD.values, Value(9, (2,), "float32", 9, memory="pinned")]
    verify(GOOD.with_ops([*GOOD.ops, copy], values))
    with pytest.raises(ProgramError, match=r"#9 pd_op.relu is in no job for micro-batch 0"):
        verify(GOOD.with_ops([*GOOD.ops, msgspec.structs.replace(copy, name="pd_op.relu")], values))


def test_many_faults_are_counted_and_the_first_are_shown() -> None:
    """Odd programs."""
    ops = [Op(k, "pd_op.nop", (99,), (), "forward") for k in range(30)]
    with pytest.raises(ProgramError) as caught:
        verify(Program(tuple(ops), ()))
    assert str(caught.value).startswith("rank 0: 30 rule(s) broken:\n  #0 pd_op.nop reads %99")
    assert str(caught.value).endswith("... and 10 more")


def test_sizes() -> None:
    """Odd programs. Unknown dims and dtypes have no size, vectors that of their tensors."""
    assert TensorType((2, 3), "bfloat16").size_bytes == 12
    assert TensorType((), "float64").size_bytes == 8
    assert TensorType((-1, 3), "float32").size_bytes == TensorType((2,), "string").size_bytes == -1
    parts = (TensorType((2,), "int8"), TensorType((3,), "int32"))
    assert Value(0, (), "vector", 0, elements=parts).size_bytes == 14
    assert Value(0, (), "vector", 0, elements=(*parts, TensorType((-1,), "int8"))).size_bytes == -1
    assert Value(0, (), "null", 0).size_bytes == 0


def test_describe() -> None:
    """Odd programs."""
    assert [describe(op) for op in GOOD.ops[2:4]] == ["#2 pd_op.add (fc1)", "#3 pd_op.all_reduce_"]
