"""Which weight gradients are computed with their own input gradients where the others trail."""

from __future__ import annotations

import pytest

from interlace.cost_model.base import GivenCosts
from interlace.ir import Graph, Op, Program
from interlace.ir.program import TensorType
from interlace.scheduler.interleave.inline_weights import inline_weights
from interlace.scheduler.jobs.parts import Parts
from tests.strategies import Builder, World, programs

COSTS = GivenCosts({"comm": 50, "gemm": 20, "default": 5})
NARROW, WIDE = TensorType((2, 4), "float32"), TensorType((2, 64), "float32")


def products(buffers: list[str], inputs: list[str]) -> tuple[Program, list[Op]]:
    """Weight gradients one after another: each reads an input (wide where its name is in capitals) and adds to a buffer."""
    build = Builder()
    made = {name: build.op("pd_op.make", (), [WIDE if name.isupper() else NARROW])[0] for name in dict.fromkeys(inputs)}
    sums = {name: build.named("builtin.parameter", NARROW, name, persistable=True) for name in dict.fromkeys(buffers)}
    build.role = "backward"
    first = len(build.ops)
    for buffer, name in zip(buffers, inputs, strict=True):
        gradient = build.op("pd_op.matmul", [made[name]], [NARROW])[0]
        build.op("pd_op.add_", [sums[buffer], gradient], [NARROW], inplace=((0, 0),))
    program = Program(tuple(build.ops), tuple(build.values))
    return program, list(program.ops[first:])


def taken(buffers: list[str], inputs: list[str], share: float) -> list[int]:
    """The numbers of the products that are taken, each with its sum."""
    program, ops = products(buffers, inputs)
    found = inline_weights(Graph(program), ops, COSTS, share)
    pairs = [{ops[2 * k].id, ops[2 * k + 1].id} for k in range(len(buffers))]
    assert all(pair <= found or pair.isdisjoint(found) for pair in pairs)
    return [k for k, pair in enumerate(pairs) if pair <= found]


def test_those_that_keep_most_memory_first_and_then_in_program_order() -> None:
    assert taken(list("abcd"), ["x", "Y", "z", "W"], 0.25) == [1]
    assert taken(list("abcd"), ["x", "Y", "z", "W"], 0.5) == [1, 3]
    assert taken(list("abcd"), ["x", "Y", "z", "W"], 0.75) == [0, 1, 3]
    assert taken(list("abcd"), ["x", "Y", "z", "W"], 0.99) == [0, 1, 3]


def test_what_reads_one_activation_or_adds_to_one_buffer_stays_together() -> None:
    """An activation is free once all that read it have run; a sum over micro-batches must keep its order."""
    assert taken(list("abcd"), ["X", "y", "X", "y"], 0.3) == [0, 2]
    assert taken(list("abcd"), ["X", "y", "X", "y"], 0.2) == []
    assert taken(["a", "b", "a", "c"], ["X", "y", "z", "w"], 0.3) == [0, 2]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.99])
def test_some_always_trail(share: float) -> None:
    for program in programs(World(pp=2, mp=2, layers=3, micro_batches=2)):
        ops = Parts(program, {"I", "W"}).ops["W", 0]
        found = inline_weights(Graph(program), ops, COSTS, share)
        assert found < {op.id for op in ops}
        assert bool(found) == bool(share)
        parts = Parts(program, {"I", "W"}, found)
        assert found <= {op.id for op in parts.ops["I", 0]}
        assert not found & {op.id for op in parts.ops["W", 0]}
        assert parts.ops["W", 0]
