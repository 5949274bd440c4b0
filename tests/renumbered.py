"""The same program with other numbers: what a plan is must not depend on them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from interlace.ir import OpInstance, Program


def renumbered(program: Program, number: Mapping[int, int]) -> Program:
    """A program whose operations have other numbers; new ones keep theirs."""

    def item(old: OpInstance) -> OpInstance:
        return number.get(old[0], old[0]), old[1]

    ops = [msgspec.structs.replace(op, id=number.get(op.id, op.id), origin=number.get(op.origin, op.origin)) for op in program.ops]
    jobs = tuple(
        msgspec.structs.replace(job, items=tuple(map(item, job.items)), host_waits=tuple((item(a), item(b)) for a, b in job.host_waits))
        for job in program.jobs
    )
    events = tuple(
        msgspec.structs.replace(each, name=f"given_{k}", record=item(each.record), waits=tuple(map(item, each.waits)))
        for k, each in enumerate(program.events)
    )
    return msgspec.structs.replace(program.with_ops(ops), jobs=jobs, events=events)
