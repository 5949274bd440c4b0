"""Recomputation before the gradient arrives: backward of a stage that waits for its neighbour starts with repetitions that need no
gradient."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec
import numpy as np

from interlace.ir import Op, Program
from interlace.ir.kinds import is_boundary, is_comm, is_receive
from interlace.scheduler.jobs.parts import baseline_jobs
from interlace.scheduler.memory.live import OrderMemory


def with_early_repeats(program: Program, repeats: set[int]) -> Program:
    """The captured program with the first of these repetitions moved to the start of each chunk's backward that receives a gradient: as
    many as do not raise the peak memory of one micro-batch there.

    So the operands of one layer of backward are recomputed before its gradient arrives, and those of the next layers beside it as before.
    """
    for chunk in range(program.pipeline.num_chunks):
        backward = [op for op in program.ops if op.role == "backward" and op.chunk == chunk and not is_boundary(op)]
        again = _that_can_start(backward, repeats)
        if again and any(is_receive(op) for op in backward):
            whole, peak = program, _Peak(program, backward)
            limit = peak.of(program.ops)
            count = bisect_right(range(len(again) + 1), False, 1, key=lambda n: peak.of(_moved(whole.ops, backward, again[:n])) > limit) - 1
            program = msgspec.structs.replace(whole, ops=_moved(whole.ops, backward, again[:count]))
    return program


def _that_can_start(backward: list[Op], repeats: set[int]) -> list[Op]:
    """Repetitions that depend on nothing in backward but each other, and do not communicate."""
    made = {value for op in backward for value in op.results}
    found: list[Op] = []
    for op in backward:
        if op.id in repeats and not is_comm(op) and made.isdisjoint(op.operands):
            found.append(op)
            made -= set(op.results)
    return found


def _moved(ops: Sequence[Op], backward: list[Op], first: list[Op]) -> tuple[Op, ...]:
    """The operations, with `first` moved before the rest of `backward`."""
    ids = {op.id for op in first}
    others = [op for op in ops if op.id not in ids]
    inside = {op.id for op in backward}
    at = next((k for k, op in enumerate(others) if op.id in inside), len(others))
    return (*others[:at], *first, *others[at:])


class _Peak:
    """Peak of live bytes of one micro-batch within backward, for different orders of a program's operations."""

    def __init__(self, program: Program, backward: list[Op]) -> None:
        self.memory = OrderMemory(msgspec.structs.replace(program, jobs=baseline_jobs(program)))
        self.inside = {op.id for op in backward}

    def of(self, ops: Sequence[Op]) -> int:
        """The peak for an order of the operations."""
        items = np.array([(op.id, 0) for op in ops if op.role != "optimize" and not is_boundary(op)], np.int64)
        live = self.memory.order_lives(items).pool("device").along(len(items))[:-1]
        return int(live[[op_id in self.inside for op_id, _ in items.tolist()]].max(initial=0))
