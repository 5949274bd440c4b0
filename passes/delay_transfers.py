"""`delay-transfers`: sends and receives are posted when their peer is about to be ready."""

from __future__ import annotations

from typing import Annotated

import msgspec

from interlace.ir import Program
from interlace.ir.kinds import is_p2p
from interlace.passes.base import Context, Pass, register
from interlace.scheduler.whole_step.orders import with_orders


@register
class DelayTransfers(Pass, frozen=True, kw_only=True):
    """Let sends and receives of the pipeline start on the device shortly before their peer is ready, not as early as possible.

    NCCL's kernels wait for their peer on the device and meanwhile slow computation down. The time at which the peer is ready is simulated
    from the plans of all stages; the transfer then waits for a computation of its own rank that ends shortly before. A receive is issued
    earlier if it comes so late in its job that a stage with more to compute waits for it.

    Contract: needs a schedule; keeps every value and operation, and the order of all but transfers; adds events. Transfers keep their
    order among themselves, but may be issued later in their job, and receives also earlier. Nothing is done if the simulated step
    would not become shorter.

    Before / After:
        job forward_0: 3@0 4@0                          job forward_0: 3@0 4@0
        job forward_1: 2@1 3@1                          job forward_1: 2@1 3@1
                                                        event interlace_4_0: recorded after 4@0, waited for by 2@1 (a receive)
        job pair_0I_2F: 9@0 12@0 3@2 4@2                job pair_0I_2F: 9@0 3@2 12@0 4@2
                                                        event interlace_3_2: recorded after 3@2, waited for by 12@0 (a send)

    Options:
        margin_us: Microseconds between the start of a transfer and the time at which its peer is expected to be ready. When: raise it if
            stages run less evenly than simulated and peers have to wait.

    Source: docs/decisions/016.
    """

    name = "delay-transfers"
    needs = frozenset({"scheduled"})
    gives = frozenset({"delayed"})
    after = ("name-streams", "return-memory")
    is_default = True
    decides = "transfers"
    in_baseline = False
    in_drafts = False

    margin_us: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 100

    def run(self, program: Program, context: Context) -> Program:
        transfers = {op.id for op in program.ops if is_p2p(op)}
        count = sum(op in transfers for job in program.jobs for op, _ in job.items)
        if not count:
            context.declined("no-transfers")
            return program
        if not context.facts:
            context.declined("peers-not-simulated")
            return program
        found, mine = context.facts
        if found.step_ns == found.before_ns:
            context.declined("no-transfer-waits-long", step_ns=found.before_ns)
            return program
        steps = {"step_ns": found.step_ns, "before_ns": found.before_ns}
        if mine:
            context.applied("transfers-delayed", delayed=len(mine), transfers=count, **steps)
        else:
            context.declined("transfers-delayed-elsewhere", transfers=count, **steps)
        return with_orders(program, mine)
