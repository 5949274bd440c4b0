"""The first difference of two captured programs is named, with both sides."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from interlace.ir import Group, Op, Program
from interlace.ir.difference import first_difference
from tests.strategies import World, programs, worlds

WORLD = World(pp=2, mp=2, micro_batches=3, layers=2)


def with_op(program: Program, at: int, **fields: Any) -> Program:
    ops = list(program.ops)
    ops[at] = msgspec.structs.replace(ops[at], **fields)
    return program.with_ops(ops)


def at(program: Program, kind: str) -> int:
    return next(k for k, op in enumerate(program.ops) if op.kind == kind)


@settings(max_examples=20, deadline=None)
@given(worlds())
def test_equal_programs_have_none_and_ranks_differ(world: World) -> None:
    made, again = programs(world), programs(world)
    assert [first_difference(a, b) for a, b in zip(made, again, strict=True)] == [""] * len(made)
    assert all(first_difference(made[0], other) == f"rank: found 0, expected {other.rank}" for other in made[1:])


def test_where_what_was_found_and_what_was_expected_is_told() -> None:
    plain = programs(WORLD)[0]
    k = at(plain, "matmul")
    op, other = plain.ops[k], plain.ops[k + 1]
    last: Op = max(plain.ops, key=lambda each: each.id)
    layer = msgspec.json.encode(op.layer).decode()
    shorter = f"found {len(plain.ops) - 1}, expected {len(plain.ops)}; the first that only one has is #{last.id}"
    told = {
        f'operation #{op.id} pd_op.matmul (layers.0.fc), layer: found "layers.0.fc", expected {layer}': with_op(
            plain, k, layer="layers.0.fc"
        ),
        f"operation #{op.id}: found #{op.id} pd_op.einsum": with_op(plain, k, name="pd_op.einsum"),
        f"operation #{op.id} pd_op.matmul": with_op(plain, k, operands=op.operands[::-1]),
        "attribute epsilon: found 0.5, expected nothing": with_op(plain, k + 1, attrs={**other.attrs, "epsilon": 0.5}),
        f"number of operations: {shorter}": plain.with_ops([each for each in plain.ops if each is not last]),
        "pipeline, num micro batches: found 5, expected 3": msgspec.structs.replace(
            plain, pipeline=msgspec.structs.replace(plain.pipeline, num_micro_batches=5)
        ),
        "communication group 999: found ranks 0, 3, expected no such group": msgspec.structs.replace(
            plain, groups=(*plain.groups, Group(999, (0, 3)))
        ),
    }
    for text, changed in told.items():
        assert text in first_difference(changed, plain)


def test_a_parameter_of_another_shape_is_named() -> None:
    plain = programs(WORLD)[0]
    weight = next(value for value in plain.values if value.persistable and value.shape and value.name)
    values = [msgspec.structs.replace(value, shape=(*value.shape, 7)) if value is weight else value for value in plain.values]
    told = first_difference(plain.with_ops(plain.ops, values), plain)
    assert told.startswith(f"{weight.name}: found ")
    assert ", 7]" in told.partition(", expected")[0]


@pytest.mark.parametrize(("mine", "theirs", "differ"), [("Place(gpu:0)", "Place(cpu)", False), ("Place(gpu:0)", "high", True)])
def test_places_are_not_compared(mine: str, theirs: str, differ: bool) -> None:
    """A dump is built where no GPU is."""
    plain = programs(WORLD)[0]
    k = at(plain, "matmul")
    one, other = (with_op(plain, k, attrs={"place": text}) for text in (mine, theirs))
    assert bool(first_difference(one, other)) == differ
