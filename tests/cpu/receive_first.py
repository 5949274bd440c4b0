"""A pass for `--import`: one stage receives in front of what its neighbour waits for. Only tests have reason to."""

from __future__ import annotations

import msgspec

from interlace.ir import Program
from interlace.ir.kinds import is_receive, is_send
from interlace.passes import Pass, register
from interlace.passes.base import Context


@register
class ReceiveFirst(Pass, frozen=True, kw_only=True):
    """On the first stage, the first receive goes in front of the first send: safe for that rank, and partners still agree."""

    name = "receive-first"
    after = ("throttle-host", "schedule-1f1b")

    def run(self, program: Program, context: Context) -> Program:
        if program.pipeline.stage:
            return program
        ops = {op.id: op for op in program.ops}
        found = next(item for job in program.jobs for item in job.items if is_receive(ops[item[0]]))
        jobs = [msgspec.structs.replace(job, items=tuple(item for item in job.items if item != found)) for job in program.jobs]
        place = next(k for k, job in enumerate(jobs) if any(is_send(ops[op]) for op, _ in job.items))
        items = list(jobs[place].items)
        items.insert(next(k for k, (op, _) in enumerate(items) if is_send(ops[op])), found)
        jobs[place] = msgspec.structs.replace(jobs[place], items=tuple(items))
        context.applied("received-first", ops[found[0]])
        return msgspec.structs.replace(program, jobs=tuple(jobs))
