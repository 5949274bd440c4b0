"""How many tokens a training step computes."""

from __future__ import annotations

from math import prod
from typing import Any

LOOK_UPS = {"pd_op.embedding": 0, "pd_op.c_embedding": 1}
"""Operations that look up ids -> which of their operands the ids are."""


def tokens_of(program: Any, num_micro_batches: int) -> int:
    """Ids of a whole step that the largest look-up of fed ids reads, on all data-parallel ranks together; 0 where no fed ids are looked up
    (a later stage; images), or where a shape is not known. `program` is that of a micro-batch as Paddle builds it before it splits tensors,
    with shapes of the whole ones."""
    ids = [op.operand_source(LOOK_UPS[op.name()]) for op in program.global_block().ops if op.name() in LOOK_UPS]
    return num_micro_batches * max((prod(max(0, dim) for dim in each.shape) for each in ids if _is_fed(each)), default=0)


def _is_fed(value: Any) -> bool:
    """Whether it is an input of the step, part of one, or the same in another form."""
    while (op := value.get_defining_op()) is not None and op.num_operands():
        value = op.operand_source(0)
    return op is not None and op.name() == "pd_op.data" and not value.persistable
