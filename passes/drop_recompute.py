"""`drop-recompute`: backward reads what forward computed, where the memory allows it, and computes it again elsewhere."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Annotated

import msgspec

from interlace.cost_model.base import tables_of
from interlace.ir import Program
from interlace.passes.base import Context, Pass, register
from interlace.passes.weight_gradients import check_unscheduled
from interlace.scheduler.jobs import stock_jobs
from interlace.scheduler.memory.live import in_order
from interlace.scheduler.recompute import Recomputation, recomputes
from interlace.units import ms, size


class RecomputeFacts(msgspec.Struct, frozen=True):
    """What a rank tells the others: its stage, its groups of values in the order in which they are recomputed (`Recomputation.names`), and
    how many of them must be.
    """

    stage: int
    groups: tuple[tuple[tuple[int, int], ...], ...]
    count: int


@register
class DropRecompute(Pass, frozen=True, kw_only=True):
    """Leave out recomputation that the user's program has: what nothing reads, and what the memory budget has room to keep.

    Contract: keeps every value that is read, bit for bit; removes operations that repeat others exactly, collectives among them, on all
    ranks of a stage alike. Nothing that draws random numbers is left out.

    Before / After, where the matmul is kept and of the sum only the shape is read:
        #3 %3 = pd_op.matmul(%2, %0) forward {"fwd_recompute_id":0}     #3 %3 = pd_op.matmul(%2, %0) forward
        #4 %4 = pd_op.gelu(%3) forward {"fwd_recompute_id":0}           #4 %4 = pd_op.gelu(%3) forward
        #7 %7 = pd_op.matmul(%2, %0) backward {"bwd_recompute_id":0}
        #8 %8 = pd_op.gelu(%7) backward {"bwd_recompute_id":0}          #8 %8 = pd_op.gelu(%3) backward

    Steps: 1 match each copy with its original; 2 remove copies whose results nothing reads (with full recomputation the last product of
    every segment is one); 3 with a budget, order the values that backward reads by the bytes that recomputing them frees for each
    nanosecond it takes, and recompute as few as keep the peak of Paddle's own schedule within the budget.

    Options:
        memory_budget: Limit of the live device bytes of a rank at any time of the step; without it only what nothing reads is left out.
            When: the script recomputes more than the device's memory makes necessary.

    Source: POET (joint rematerialisation and paging, 2022) weighs the same costs.
    """

    name = "drop-recompute"
    gives = frozenset({"recompute-chosen"})
    is_default = True

    memory_budget: Annotated[int, msgspec.Meta(ge=1)] | None = None

    def stock(self) -> None:
        return None

    def facts(self, program: Program, context: Context) -> RecomputeFacts:
        """The order of this rank's values, and how many of them its budget makes it recompute."""
        check_unscheduled(program)
        found = self._found(program, context)
        return RecomputeFacts(program.pipeline.stage, found.names(), self._count(found, context.reserve_bytes))

    def run(self, program: Program, context: Context) -> Program:
        everyone: Sequence[RecomputeFacts] = context.facts
        mine = everyone[program.rank if context.is_whole else 0]
        found = self._found(program, context)
        if not found.copies:
            context.declined.append("the program recomputes nothing that repeats forward exactly")
            return program
        stage = [each for each in everyone if each.stage == mine.stage]
        if any(each.groups != mine.groups for each in stage):
            context.declined.append("ranks of this stage differ in what they recompute: what is read is recomputed on all of them")
            count = len(found.groups)
        else:
            count = max(each.count for each in stage)
        kept = found.groups[count:]
        made = found.without(kept)
        self._report(found, kept, made, context)
        return made

    def _found(self, program: Program, context: Context) -> Recomputation:
        if "recomputation" not in context.memo or context.memo["recomputation"].program is not program:
            tables, timed = tables_of(program), program.ops if recomputes(program) else ()
            op_ns = {op.id: context.cost.op_time(op, *tables).dur_ns for op in timed if op.role == "backward"}
            context.memo["recomputation"] = Recomputation(program, op_ns)
        found: Recomputation = context.memo["recomputation"]
        return found

    def _count(self, found: Recomputation, reserve_bytes: int) -> int:
        """How many groups are recomputed, in their order: all without a budget, or else as few as keep it.

        A plan that exceeded its budget by some bytes is made again with these in reserve: its peak must fall by so many.
        """
        if self.memory_budget is None:
            return len(found.groups)

        def peak(count: int) -> int:
            return _peak(found.without(found.groups[count:]))

        def least(limit: int) -> int:
            return bisect_left(range(len(found.groups)), True, key=lambda count: peak(count) <= limit)

        count = least(self.memory_budget)
        return least(peak(count) - reserve_bytes) if reserve_bytes else count

    def _report(self, found: Recomputation, kept: Sequence[tuple[int, ...]], made: Program, context: Context) -> None:
        left = {op.id for op in made.ops}
        gone = [op for op in found.copies.values() if op.id not in left]
        took = sum(found.op_ns[op.id] for op in gone)
        whole = sum(found.op_ns[op_id] for op_id in found.copies)
        if gone:
            saved = size(sum(found.bytes_of(group) for group in kept))
            context.changed.append(f"{len(gone)} of {len(found.copies)} repeated operations are not recomputed: {ms(took)} of {ms(whole)} "
                                   f"a micro-batch; for it {len(kept)} of {len(found.groups)} groups of values stay in memory, {saved} a "
                                   "micro-batch")  # fmt: skip
        else:
            why = "the memory budget has no room to keep originals" if self.memory_budget else "a memory_budget would keep originals"
            context.declined.append(f"every copy is read; {why}")


def _peak(program: Program) -> int:
    """Live device bytes at the peak of Paddle's own schedule."""
    return in_order(msgspec.structs.replace(program, jobs=stock_jobs(program))).peak()
