"""Random draws: one generator gives a device's numbers, so the order of draws decides them."""

from __future__ import annotations

from collections import defaultdict

from interlace.ir import Program
from interlace.ir.kinds import is_random
from interlace.ir.storage import Item
from interlace.scheduler.hazards.order import Fault
from interlace.scheduler.hazards.steps import Steps
from interlace.scheduler.schedule import SCHEDULES


def draws_out_of_order(steps: Steps) -> list[Fault]:
    """The first draw of a step that Paddle's own schedule makes in another place, if there is one."""
    drawing = {position for position, op in enumerate(steps.program.ops) if is_random(op)}
    if not drawing:
        return []
    found = [item for item, position in enumerate(steps.op) if position in drawing]
    wanted = [steps.index[item] for item in stock_draws(steps.program) if item in steps.index]
    return next(([Fault("draw-order", other, item, -1)] for item, other in zip(found, wanted, strict=True) if item != other), [])


def stock_draws(program: Program) -> list[Item]:
    """Every draw of a step in the order of Paddle's own schedule."""
    pipe = program.pipeline
    parts: dict[tuple[str, int], list[int]] = defaultdict(list)
    for op in program.ops:
        if is_random(op):
            kind = "O" if op.role == "optimize" else "F" if op.role == "forward" else "B"
            parts[kind, 0 if kind == "O" else op.chunk].append(op.id)
    schedule = SCHEDULES.get(pipe.schedule, SCHEDULES["accumulate"])
    slots = schedule(pipe.stage, pipe.num_stages, pipe.num_micro_batches, pipe.num_chunks)
    return [(op_id, part.micro_batch) for slot in slots for part in slot.parts for op_id in parts[part.kind, part.chunk]]
