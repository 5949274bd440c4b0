"""Which order operations must keep: data, in-place writes, views, vectors, random draws, communication."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.ir import Graph, Program, dependencies, parse
from interlace.ir.graph import is_topological
from tests.interpreter import run
from tests.strategies import programs, worlds

HEAD = "program rank=0 world=1 mode=train\ngroup 5 = 0,1\ngroup 6 = 0,1\n"


def order_of(text: str) -> dict[int, set[int]]:
    """The order of the operations of a text."""
    program = parse(HEAD + text)
    return dependencies(Graph(program), program.ops)


CASES = {
    "a read follows its write": (
        """
        #0 %0:float32[2] = pd_op.full() forward
        #1 %1:float32[2] = pd_op.exp(%0) forward""",
        {1: {0}},
    ),
    "an in-place write follows earlier reads, and later reads of the old name follow it": (
        """
        #0 %0:float32[2] = pd_op.full() forward
        #1 %1:float32[2] = pd_op.exp(%0) forward
        #2 %2:float32[2]~0 = pd_op.relu_(%0) forward inplace=0:0
        #3 %3:float32[2] = pd_op.exp(%0) forward""",
        {1: {0}, 2: {0, 1}, 3: {0, 2}},
    ),
    "a write follows a write": (
        """
        #0 %0:float32[2] = pd_op.full() forward
        #1 %1:float32[2]~0 = pd_op.relu_(%0) forward inplace=0:0
        #2 %2:float32[2]~0 = pd_op.scale_(%0) forward inplace=0:0""",
        {1: {0}, 2: {0, 1}},
    ),
    "a write follows reads through views": (
        """
        #0 %0:float32[2] = pd_op.full() forward
        #1 %1:float32[2]~0 = pd_op.share_data(%0) forward views=0:0
        #2 %2:float32[2] = pd_op.exp(%1) forward
        #3 %3:float32[2]~0 = pd_op.relu_(%0) forward inplace=0:0
        #4 %4:float32[2] = pd_op.exp(%1) forward""",
        {1: {0}, 2: {1}, 3: {0, 1, 2}, 4: {1, 3}},
    ),
    "of an operand without contents only the definition counts": (
        """
        #0 %0:float32[2] = pd_op.full() forward
        #1 %1:float32[2] = pd_op.add_grad(%0) forward no_buffer=0
        #2 %2:float32[2]~0 = pd_op.relu_(%0) forward inplace=0:0""",
        {1: {0}, 2: {0}},
    ),
    "a write follows reads through a vector": (
        """
        #0 %0:float32[2] = pd_op.full() forward
        #1 %1:vector<float32[2]> = builtin.combine(%0) forward
        #2 %2:float32[2] = pd_op.add_n(%1) forward
        #3 %3:float32[2]~0 = pd_op.relu_(%0) forward inplace=0:0
        #4 %4:float32[2] = pd_op.add_n(%1) forward""",
        {1: {0}, 2: {1}, 3: {0, 1, 2}, 4: {1, 3}},
    ),
    "tensors of a vector are in it": (
        """
        #0 %0:vector<float32[2];float32[2]> = pd_op.split_with_num() forward
        #1 %1:float32[2], %2:float32[2] = builtin.split(%0) forward
        #2 %3:float32[2] = pd_op.add_n(%0) forward
        #3 %4:float32[2]~1 = pd_op.relu_(%1) forward inplace=0:0
        #4 %5:float32[2] = pd_op.exp(%2) forward""",
        {1: {0}, 2: {0}, 3: {1, 2}, 4: {1}},
    ),
    "a tensor taken out of a vector behind an operation in place is still the one that was put in": (
        """
        #0 %0:float32[2] = pd_op.full() forward
        #1 %1:vector<float32[2]> = builtin.combine(%0) forward
        #2 %2:vector<float32[2]>~1 = pd_op.check_(%1) forward inplace=0:0
        #3 %3:float32[2] = builtin.split(%2) forward
        #4 %4:float32[2] = pd_op.exp(%3) forward
        #5 %5:float32[2]~0 = pd_op.relu_(%0) forward inplace=0:0""",
        {1: {0}, 2: {1}, 3: {2}, 4: {2, 3}, 5: {0, 2, 3, 4}},
    ),
    "communication keeps its order in a group, and only there": (
        """
        #0 %0:float32[2] = pd_op.full() forward
        #1 %1:float32[2] = pd_op.all_reduce(%0) forward group=5
        #2 %2:float32[2] = pd_op.all_reduce(%0) forward group=6
        #3 %3:float32[2] = pd_op.all_gather(%0) forward group=5
        #4 pd_op.send_v2(%0) forward group=6""",
        {1: {0}, 2: {0}, 3: {0, 1}, 4: {0, 2}},
    ),
    "random draws keep their order": (
        """
        #0 %0:float32[2] = pd_op.full() forward
        #1 %1:float32[2] = pd_op.dropout(%0) forward
        #2 %2:float32[2] = pd_op.flash_attn(%0) forward {"dropout":0.0}
        #3 %3:float32[2] = pd_op.flash_attn(%0) forward {"dropout":0.1}
        #4 %4:float32[2] = pd_op.gaussian() forward""",
        {1: {0}, 2: {0}, 3: {0, 1}, 4: {3}},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_order(name: str) -> None:
    """Odd programs. Each reason for an order once."""
    text, wanted = CASES[name]
    assert {op: before for op, before in order_of(text).items() if before} == wanted


def test_only_the_given_operations_count() -> None:
    """Odd programs. Of a sub-sequence, what it reads from outside orders nothing."""
    program = parse(HEAD + CASES["a write follows reads through a vector"][0])
    assert dependencies(Graph(program), program.ops[2:4]) == {2: set(), 3: {2}}


@settings(max_examples=60, deadline=None)
@given(worlds(max_pp=1, max_mp=1, max_micro_batches=2, dropout=True), st.integers(0, 99))
def test_any_order_that_keeps_them_gives_the_same_numbers(world: Any, seed: int) -> None:
    """Odd programs. Random orders of whole programs, computed: dependencies leave out nothing that matters."""
    (program,) = programs(world)
    after = dependencies(Graph(program), program.ops)
    order = shuffled(program, after, random.Random(seed))
    assert is_topological(order, after)
    body = [op for op in order if program.ops[op].role != "optimize"]
    once = [op for op in order if program.ops[op].role == "optimize"]
    items = [(op, m) for m in range(world.micro_batches) for op in body] + [(op, 0) for op in once]
    assert run(program, orders=[items]) == run(program)


def shuffled(program: Program, after: dict[int, set[int]], rng: random.Random) -> list[int]:
    """A random order that keeps `after`."""
    waiting = {op.id: set(after[op.id]) for op in program.ops}
    order: list[int] = []
    while waiting:
        ready = sorted(op for op, before in waiting.items() if not before)
        order.append(rng.choice(ready))
        del waiting[order[-1]]
        for before in waiting.values():
            before.discard(order[-1])
    return order


def test_is_topological_sees_a_swap() -> None:
    """Odd programs."""
    assert is_topological([0, 1, 2], {2: {0}, 1: {0}})
    assert not is_topological([1, 0], {1: {0}})
    assert is_topological([1], {1: {0}})


def test_look_ups() -> None:
    """Odd programs. Users come once each, in program order; absent operands have no producer."""
    graph = Graph(
        parse(
            HEAD
            + """
        #4 %0:float32[2] = pd_op.full() forward
        #3 %1:float32[2] = pd_op.add(%0, %0, _) forward no_buffer=1
        #7 %2:float32[2]~0 = pd_op.relu_(%0) forward inplace=0:0"""
        )
    )
    assert graph.users == {0: [3, 7]}
    assert [op.id for op in graph.user_ops(0)] == [3, 7]
    assert graph.position == {4: 0, 3: 1, 7: 2}
    assert graph.producer_op(-1) is None
    assert graph.reads(graph.ops[3]) == [0]


def test_look_ups_are_made_once_for_the_same_operations_and_values() -> None:
    program = parse(HEAD + "#0 %0:float32[2] = pd_op.full() forward\n#1 %1:float32[2] = pd_op.exp(%0) forward")
    assert Graph(program.with_ops(program.ops)).users is Graph(program).users
    fewer = program.with_ops(program.ops[:1])
    assert (Graph(fewer).users, Graph(program).users) == ({}, {0: [1]})
