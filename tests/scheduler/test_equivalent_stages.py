"""Which stages do the same work."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from interlace.cost_model import GivenCosts
from interlace.ir import Group, Op, Program, Value
from interlace.ir.kinds import is_comm
from interlace.scheduler.whole_step.equivalent_stages import work_key
from tests.strategies import World, programs

COSTS = GivenCosts({"comm": 40, "gemm": 50, "default": 5})
FIRST, SECOND, *_, LAST = programs(World(pp=4, mp=2, micro_batches=4, layers=2, schedule="1F1B", seed=3))[::2]


def changed(which: Callable[[Op], bool], change: Callable[[Op], Op]) -> Program:
    """The second stage with the first of these operations changed."""
    at = next(k for k, op in enumerate(SECOND.ops) if which(op))
    return SECOND.with_ops((*SECOND.ops[:at], change(SECOND.ops[at]), *SECOND.ops[at + 1 :]))


def renumbered() -> Program:
    """The second stage with other numbers and names of values, storages, operations and groups."""

    def value(number: int) -> int:
        return 900 - number if number >= 0 else number

    values = [
        msgspec.structs.replace(each, id=value(each.id), storage=value(each.storage), name=f"{each.name}_" if each.name else "")
        for each in SECOND.values
    ]
    ops = [
        msgspec.structs.replace(
            op,
            id=op.id + 7,
            operands=tuple(map(value, op.operands)),
            results=tuple(map(value, op.results)),
            layer="elsewhere",
            group=op.group + 50 if op.group >= 0 else -1,
            attrs={**op.attrs, **({"ring_id": op.group + 50} if "ring_id" in op.attrs else {})},
        )
        for op in SECOND.ops
    ]
    made = msgspec.structs.replace(SECOND, groups=tuple(Group(each.id + 50, each.ranks) for each in SECOND.groups))
    return made.with_ops(tuple(ops), tuple(values))


def test_names_and_numbers_do_not_count() -> None:
    assert renumbered() != SECOND
    assert work_key(renumbered(), COSTS) == work_key(SECOND, COSTS)


def test_stages_at_the_ends_do_other_work() -> None:
    assert len({work_key(each, COSTS) for each in (FIRST, SECOND, LAST)}) == 3


@pytest.mark.parametrize(
    "other",
    [
        changed(lambda op: op.kind == "matmul", lambda op: msgspec.structs.replace(op, name="pd_op.add")),
        changed(lambda op: op.kind == "matmul", lambda op: msgspec.structs.replace(op, operands=op.operands[::-1])),
        changed(lambda op: op.kind == "matmul", lambda op: msgspec.structs.replace(op, attrs={"transpose_y": True})),
        changed(is_comm, lambda op: msgspec.structs.replace(op, stream="comm_stream")),
        SECOND.with_ops(SECOND.ops, tuple(Value(v.id, (*v.shape, 2), v.dtype, v.storage, v.name, v.persistable) for v in SECOND.values)),
    ],
    ids=["operation", "operands", "attribute", "stream", "shapes"],
)
def test_other_work_is_not_alike(other: Program) -> None:
    assert work_key(other, COSTS) != work_key(SECOND, COSTS)


def test_communication_that_takes_longer_is_other_work() -> None:
    slower = GivenCosts({"comm": 41, "gemm": 50, "default": 5})
    assert work_key(SECOND, slower) != work_key(SECOND, COSTS)
