"""The number of tokens in a training step."""

from __future__ import annotations

from math import prod
from typing import Any

LOOK_UPS = {"pd_op.embedding": 0, "pd_op.c_embedding": 1}
"""Operation that looks up ids -> index of the operand with the ids."""


def tokens_of(program: Any, num_micro_batches: int) -> int:
    """Number of ids that the largest look-up of fed ids reads in a step, over all data-parallel ranks. 0 if no fed ids are looked up (later
    stages, images), or a shape is not known. `program` is Paddle's program of a micro-batch before tensors are split, with global
    shapes."""
    ids = [op.operand_source(LOOK_UPS[op.name()]) for op in program.global_block().ops if op.name() in LOOK_UPS]
    return num_micro_batches * max((prod(max(0, dim) for dim in each.shape) for each in ids if _is_fed(each)), default=0)


def _is_fed(value: Any) -> bool:
    """Whether a value is an input of the step, part of one, or the same data in another form."""
    while (op := value.get_defining_op()) is not None and op.num_operands():
        value = op.operand_source(0)
    return op is not None and op.name() == "pd_op.data" and not value.persistable
