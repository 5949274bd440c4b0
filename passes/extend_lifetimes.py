"""`extend-lifetimes`: what a side stream still reads, or has just written, outlives the job on the compute stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from interlace.ir import ABSENT, Edit, Graph, Op, OpInstance, Program
from interlace.ir.copies import index_of_items
from interlace.ir.edit import with_items
from interlace.ir.kinds import NO_KERNEL, stream_of
from interlace.ir.remarks import Place
from interlace.passes.base import Context, Pass, register
from interlace.scheduler.hazards.happens_before import Fault
from interlace.scheduler.hazards.missing_orders import Needs, needs_of

READER_ROUNDS = 4
"""Limit on rounds of adding readers: a new last reader of a block may reveal that nothing waits for another of its readers either."""


@register
class ExtendLifetimes(Pass, frozen=True, kw_only=True):
    """Keep a value alive that a side stream reads after Paddle would free it, by adding a `share_data` as its last reader.

    Contract: needs a schedule; keeps every value and the order of all op instances; adds `share_data` operations.

    Before / After, where the send runs on a stream of its own and #7 is the last reader on compute:
        #6 () = pd_op.send_v2(%5) stream pp_send        #6 () = pd_op.send_v2(%5) stream pp_send
        #7 %7 = pd_op.matmul(%5, %1)                    #7 %7 = pd_op.matmul(%5, %1)
                                                        #20 %20 = pd_op.share_data(%5) stream pp_send

    Steps: 1 a value that is read by a side stream, and by a compute operation issued later, is kept alive until the compute stream has
    waited for the side stream or, if it never does (a send), by a new reader on the side stream; 2 at the end of the step the compute
    stream waits for what side streams wrote to persistable values.

    Source: rules 6 to 8 in docs/gpu-place.md.
    """

    name = "extend-lifetimes"
    needs = frozenset({"scheduled"})
    gives = frozenset({"lifetimes"})
    after = ("name-streams", "delay-transfers")
    is_default = True
    in_drafts = False

    def run(self, program: Program, context: Context) -> Program:
        return _with_joins_at_the_end(_with_lifetimes_extended(program, context), context)


def _with_lifetimes_extended(program: Program, context: Context) -> Program:
    """Add a last reader to values whose memory would be reused while a side stream still reads it.

    Paddle frees a value after its last reader. Where computation waits for the side stream later in the job, the new reader comes
    after that wait; otherwise (a send, a result without readers) it runs on the side stream, after the last reader. A value whose last
    reader is in another job or on another side stream gets no reader here; `insert-events` adds an event instead.
    """
    for _ in range(READER_ROUNDS):
        missing = _missing_readers(program, context)
        if not missing:
            return program
        program = _with_readers(program, missing, index_of_items(program), context)
    ops = {op.id: op for op in program.ops}
    for reader in _missing_readers(program, context):
        side = Place.of(ops[reader.side], reader.value)
        context.declined("lifetime-not-extended", side, rounds=READER_ROUNDS, last=ops[reader.last])
    return program


@dataclass(frozen=True, slots=True)
class MissingReader:
    """A last reader to add.

    Attributes:
        side: Id of the operation on a side stream.
        value: Id of the value to keep alive.
        last: Id of the last reader so far; the new one comes after it.
        waiter: Id of the computation that waits for the side stream, after which the new reader comes; -1 for none.
    """

    side: int
    value: int
    last: int
    waiter: int


def _missing_readers(program: Program, context: Context) -> list[MissingReader]:
    """All last readers to add, without duplicates."""
    needs = needs_of(program, memo=context.memo)
    return list(dict.fromkeys(reader for fault in needs.frees if (reader := _missing_reader(needs, fault)) is not None))


def _missing_reader(needs: Needs, fault: Fault) -> MissingReader | None:
    """The reader to add that keeps a block alive; None if an event is needed instead."""
    plan = needs.trace.plan
    use, last = fault.first, fault.second
    if plan.job[use] != plan.job[last] or plan.stream[last]:
        return None
    accesses = (*plan.reads[plan.op[use]], *plan.writes[plan.op[use]])
    micro_batch = plan.micro_batch[use]
    value = next((a.value for a in accesses if a.base + a.stride * micro_batch == fault.key), ABSENT)
    if value == ABSENT or plan.micro_batch[last] != micro_batch:
        return None
    return MissingReader(plan.op_of(use).id, value, plan.op_of(last).id, _waiter(needs, use, last))


def _waiter(needs: Needs, use: int, last: int) -> int:
    """Id of the first computation after `last`, of the same job, micro-batch and role, that waits for `use`; -1 for none. Both arguments
    are indices in issue order."""
    plan = needs.trace.plan
    for item in range(last + 1, len(plan.job)):
        if plan.job[item] != plan.job[last]:
            break
        alike = plan.stream[item] == 0 and plan.micro_batch[item] == plan.micro_batch[last]
        same_part = plan.op_of(item).role == plan.op_of(last).role
        if alike and same_part and needs.trace.before(use, item):
            return plan.op_of(item).id
    return -1


def _with_readers(program: Program, missing: Sequence[MissingReader], index_of: Mapping[OpInstance, int], context: Context) -> Program:
    graph, edit = Graph(program), Edit(program)
    added: dict[OpInstance, list[OpInstance]] = {}
    for reader in missing:
        side, waiter = graph.ops[reader.side], graph.ops.get(reader.waiter)
        kept = graph.values[reader.value]
        where: dict[str, Any] = {} if waiter else {"stream": side.stream, "priority": side.priority}
        reader_op = edit.reader(kept.id, kept.type, kept.storage, like=waiter or side, **where)
        group = [op_id for op_id in (reader.side, reader.last, reader.waiter) if op_id >= 0]
        edit.after(max(group, key=graph.position.__getitem__), [reader_op])
        for m in range(program.pipeline.num_micro_batches):
            there = [(op_id, m) for op_id in group if (op_id, m) in index_of]
            if there:  # operations that run once per step, and copies, are missing from some micro-batches
                added.setdefault(max(there, key=index_of.__getitem__), []).append((reader_op.id, m))
        behind = {"waiter": waiter} if waiter else {"last": graph.ops[reader.last]}
        context.applied("lifetime-extended", Place.of(side, reader.value), **behind)
    return msgspec.structs.replace(edit.build(), jobs=with_items(program.jobs, {}, added))


def _is_parameter(graph: Graph, value: int) -> bool:
    """Whether a value is stored in device memory that outlives the step: computation does not read host memory."""
    return any(storage.persistable and storage.memory == "device" for storage in graph.storages.of(value))


def _with_joins_at_the_end(program: Program, context: Context) -> Program:
    """Let computation wait at the end of the step for side streams' writes of persistable values: no event reaches into the next step.

    Sharding with overlap gathers the new parameters on its own stream, after everything else.
    """
    graph, edit = Graph(program), Edit(program)
    last: dict[str, tuple[Op, int]] = {}
    for op in (graph.ops[op_id] for job in program.jobs for op_id, _ in job.items):
        if op.role == "optimize" and stream_of(op):
            last.update((op.stream, (op, value)) for value in op.results if _is_parameter(graph, value))
    joins = [
        (op, value)
        for op, value in last.values()
        if not any(user.name not in NO_KERNEL and not stream_of(user) for user in graph.readers(value))
    ]
    if not joins or not program.jobs:
        return program
    end = graph.ops[program.jobs[-1].items[-1][0]]
    made = []
    for op, value in joins:
        kept = graph.values[value]
        made.append(edit.reader(kept.id, kept.type, kept.storage, like=end, stream="", priority=0))
        context.applied("joined-at-end", Place.of(op, value))
    edit.after(max((end.id, *(op.id for op, _ in joins)), key=graph.position.__getitem__), made)
    items = (*program.jobs[-1].items, *((op.id, 0) for op in made))
    jobs = (*program.jobs[:-1], msgspec.structs.replace(program.jobs[-1], items=items))
    return msgspec.structs.replace(edit.build(), jobs=jobs)
