"""Order of operations inside a job that holds one backward and one forward. (first form)"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from interlace.ir import Op, Program

if TYPE_CHECKING:
    from interlace.cost_model import Costs


class PairPlan(msgspec.Struct, frozen=True):
    order: tuple[tuple[Literal["B", "F"], int], ...]

    def text(self) -> str:
        return f"{len(self.order)} ops"


def plan_pairs(program: Program, backward: Sequence[Op], forward: Sequence[Op], cost: Costs, form: str, allowance_bytes: int, max_ops: int) -> PairPlan:
    return PairPlan(tuple(("B", op.id) for op in backward) + tuple(("F", op.id) for op in forward))
