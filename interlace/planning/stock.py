"""Paddle's own plan: what every report compares with."""

from __future__ import annotations

from interlace.cost_model import Costs
from interlace.ir import Program
from interlace.passes import Pipeline
from interlace.passes.assign_streams import AssignStreams
from interlace.passes.schedule_1f1b import Schedule1F1B

STOCK = "Paddle's own plan"
"""What reports call it."""
PASSES = (Schedule1F1B(interleave="off"), AssignStreams(rename=False, throttle_host="off"))
"""Paddle's own jobs on Paddle's own streams, as the preset `stock` has them."""


def stock_plan(program: Program, costs: Costs) -> Program:
    """A captured program as Paddle itself would run it; one that has jobs stays as it is.

    Raises:
        PassError: As `Pipeline.run`.
    """
    return program if program.jobs else Pipeline(PASSES).run(program, costs)[0]
