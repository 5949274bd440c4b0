"""Paddle's own plan: what every report compares with."""

from __future__ import annotations

from interlace.cost_model import Costs
from interlace.ir import Program
from interlace.passes.pipeline import built_in, ordered

STOCK = "Paddle's own plan"
"""What reports call it."""


def stock_plan(program: Program, costs: Costs) -> Program:
    """A captured program as Paddle itself would run it, as the preset `stock` has it; one that has jobs stays as it is.

    Raises:
        PassError: As `Pipeline.run`.
    """
    if program.jobs:
        return program
    passes = (kind().stock() for kind in built_in() if kind.is_default)
    return ordered(tuple(each for each in passes if each is not None)).run(program, costs)[0]
