"""`assign-streams`: which stream each operation runs on, the events between jobs, and where the host waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from interlace.ir import ABSENT, Edit, Graph, Op, OpInstance, Program, TensorType, describe
from interlace.ir.graph import written_operands
from interlace.ir.kinds import NO_KERNEL, is_collective, is_copy, is_receive, is_send, stream_of
from interlace.ir.storage import Storages
from interlace.passes.base import Context, Pass, register
from interlace.passes.events import events_of
from interlace.passes.streams import AutoParallelStreamType, mp_stream
from interlace.scheduler.hazards.happens_before import Fault
from interlace.scheduler.hazards.missing_orders import Needs, needs_of
from interlace.scheduler.memory.throttle import jobs_with_side_work, plan_host_syncs, sync_at_job_ends, with_host_syncs

READER_ROUNDS = 4
"""Rounds of adding readers: a new last reader of a block may show that another reader of it is not waited for either."""


@register
class AssignStreams(Pass, frozen=True, kw_only=True):
    """Assign communication to streams of its own, with priorities, and order what crosses jobs between streams.

    Contract: needs a schedule; keeps every value and the order of all op instances; adds stream names, events, waits of the host,
    and a `share_data` as last reader where memory would be reused while a side stream still reads it.

    Steps: 1 tensor-parallel collectives go on one stream for each ring, receives and sends on one for each ring and direction.
    Collectives of the optimizer part, those that read a parameter, those that name a stream already, and p2p of the optimizer part
    on the compute stream keep theirs. 2 A value that a side stream reads, and a compute operation reads later, is kept alive until
    compute has waited for the side stream or, where it has nothing to wait for (a send), by a reader on that stream. 3 The plan is
    analysed as in its proof, with the jobs that split the batch and collect the outputs; each missing order becomes an event.
    4 The host waits for the device at some op instances of jobs with work on side streams, where a host that runs ahead would raise
    the peak of memory too much (scheduler/memory/throttle.py).

    Options:
        rename: False keeps the streams that Paddle named; events and readers that a plan needs to be safe are added all the same.
        priority: Stream priority of communication; 0 is normal, lower runs first.
        throttle_host: Where the host waits for the device, on devices where it runs ahead and memory is allocated at issue (GPUs):
            `auto` as rarely as keeps the peak of memory, `on` at the end of every job with work on side streams, `off` nowhere.
        run_ahead_bytes: By how much a host that runs ahead may raise the peak of device memory before `auto` makes it wait.

    Source: paddle-gpu rules 1 to 5 in docs/gpu-place.md.
    """

    name = "assign-streams"
    needs = frozenset({"scheduled"})
    gives = frozenset({"streams"})
    after = ("split-backward", "overlap-column-backward", "schedule-1f1b", "offload-activations")
    renamed: ClassVar[Mapping[str, str]] = {"hold_host": "throttle_host"}
    asks_ranks = False

    rename: bool = True
    priority: int = -1
    throttle_host: Literal["auto", "on", "off"] = "auto"
    run_ahead_bytes: Annotated[int, msgspec.Meta(ge=0)] = 256 << 20

    def draft(self) -> Pass:
        """The pass without waits of the host."""
        return msgspec.structs.replace(self, throttle_host="off")

    def run(self, program: Program, context: Context) -> Program:
        program = self._named(program, context) if self.rename else program
        program = _with_joins_at_the_end(_with_lifetimes_extended(program, context), context)
        events = events_of(program)
        context.changed.append(f"{len(events)} events between jobs")
        return self._throttled(msgspec.structs.replace(program, events=events), context)

    def _throttled(self, program: Program, context: Context) -> Program:
        if self.throttle_host == "off":
            return program
        if self.throttle_host == "on":
            waits = sync_at_job_ends(program, jobs_with_side_work(program))
            if waits:
                context.changed.insert(0, f"the host waits at the end of {len(waits)} of {len(program.jobs)} jobs, as asked")
            else:
                context.declined.append("throttle_host: no job has work beside computation that uses memory")
            return with_host_syncs(program, waits)
        plan = plan_host_syncs(program, context.cost, self.run_ahead_bytes)
        numbers = plan.text() if plan.free_bytes else ""
        why = ": ".join(part for part in (plan.reason, numbers) if part)
        if plan.count:
            context.changed.insert(0, f"the host waits {plan.count} times a step: {why}")
        else:
            context.declined.append(f"throttle_host: the host waits nowhere, {why}")
        return with_host_syncs(program, plan.waits)

    def _named(self, program: Program, context: Context) -> Program:
        names = _names(program)
        count: dict[str, int] = {}
        ops = []
        for op in program.ops:
            name = names.get(op.id)
            if name:
                count[name] = count.get(name, 0) + 1
                op = msgspec.structs.replace(op, stream=name, priority=0 if is_copy(op) else self.priority)
            ops.append(op)
        context.changed += [f"stream {name}: {number} operations, priority {self.priority}" for name, number in sorted(count.items())]
        if not count:
            context.declined.append("streams: one rank alone communicates with nobody")
        return program.with_ops(ops)


def _names(program: Program) -> dict[int, str]:
    """Stream names of operations that get one."""
    inner = [op for op in program.ops if op.role != "optimize" and op.group >= 0]
    parameters = _parameters(program)
    collectives = [op for op in inner if is_collective(op) and not parameters & set(op.operands)
                   and (not op.stream or op.stream.startswith(AutoParallelStreamType.MP.value))]  # fmt: skip
    rings = {op.group for op in collectives}
    names = {op.id: mp_stream(op.group, rings) for op in collectives}
    p2p = [*inner, *(op for op in program.ops if op.role == "optimize" and op.group >= 0 and op.stream)]
    for kind, stream in ((is_send, AutoParallelStreamType.PP_SEND), (is_receive, AutoParallelStreamType.PP_RECV)):
        found = [op for op in p2p if kind(op)]
        single = len({op.group for op in found}) <= 1
        names.update({op.id: stream.value if single else f"{stream.value}_{op.group}" for op in found})
    return names


def _parameters(program: Program) -> set[int]:
    """Values that last, and that only the optimizer part writes: no event says to the next step's first reader that it has."""
    table = Storages(program)
    written = {n for op in program.ops if op.role != "optimize" for value in written_operands(op) for n in table.numbers(value)}
    return {value.id for value in program.values if table.is_persistable(value.id) and not written.intersection(table.numbers(value.id))}


def _with_lifetimes_extended(program: Program, context: Context) -> Program:
    """Add a last reader to values whose memory would be reused while a side stream still reads it.

    Paddle frees a value after its last reader. Where computation waits for the side stream later in the job, the new reader comes
    after that wait; otherwise (a send, a result without readers) it runs on the side stream, after the last reader. A value that is
    read in another job, or last by another side stream, gets an event instead.
    """
    for _ in range(READER_ROUNDS):
        missing = _missing_readers(program)
        if not missing:
            return program
        places = {item: k for k, item in enumerate(item for job in program.jobs for item in job.items)}
        program = _with_readers(program, missing, places, context)
    ops = {op.id: op for op in program.ops}
    for reader in _missing_readers(program):
        context.decline(ops[reader.side], f"%{reader.value} would be freed while it is read, even after {READER_ROUNDS} rounds of added "
                                          f"readers; {describe(ops[reader.last])}, the last of them, waits for it instead")  # fmt: skip
    return program


@dataclass(frozen=True, slots=True)
class MissingReader:
    """A last reader to add.

    Attributes:
        side: The operation on a side stream.
        value: What it reads.
        last: The last reader so far; the new one comes after it.
        waiter: The computation that waits for the side stream and that the new one comes after; -1 for none.
    """

    side: int
    value: int
    last: int
    waiter: int


def _missing_readers(program: Program) -> list[MissingReader]:
    """All last readers to add, each once."""
    needs = needs_of(program)
    return list(dict.fromkeys(reader for fault in needs.frees if (reader := _missing_reader(needs, fault)) is not None))


def _missing_reader(needs: Needs, fault: Fault) -> MissingReader | None:
    """The last reader that keeps a block alive, None where an event is needed instead."""
    plan = needs.trace.plan
    use, last = fault.first, fault.second
    if plan.job[use] != plan.job[last] or plan.stream[last] or not plan.stream[use]:
        return None
    accesses = (*plan.reads[plan.op[use]], *plan.writes[plan.op[use]])
    micro_batch = plan.micro_batch[use]
    value = next((a.value for a in accesses if a.base + a.stride * micro_batch == fault.key), ABSENT)
    if value == ABSENT or plan.micro_batch[last] != micro_batch:
        return None
    return MissingReader(needs.item(use)[0], value, needs.item(last)[0], _waiter(needs, use, last))


def _waiter(needs: Needs, use: int, last: int) -> int:
    """The first computation after the last reader, in its job and of its micro-batch, that waits for the use; -1 for none."""
    plan = needs.trace.plan
    for item in range(last + 1, len(plan.job)):
        if plan.job[item] != plan.job[last]:
            break
        alike = plan.stream[item] == 0 and plan.micro_batch[item] == plan.micro_batch[last]
        same_part = plan.program.ops[plan.op[item]].role == plan.program.ops[plan.op[last]].role
        if alike and same_part and needs.trace.before(use, item):
            return needs.item(item)[0]
    return -1


def _with_readers(program: Program, missing: Sequence[MissingReader], places: Mapping[OpInstance, int], context: Context) -> Program:
    graph, edit = Graph(program), Edit(program)
    added: dict[OpInstance, list[OpInstance]] = {}
    for reader in missing:
        side, waiter = graph.ops[reader.side], graph.ops.get(reader.waiter)
        kept = graph.values[reader.value]
        where: dict[str, Any] = {} if waiter else {"stream": side.stream, "priority": side.priority}
        result = edit.value(TensorType(kept.shape, kept.dtype), storage=kept.storage)
        reader_op = edit.op("pd_op.share_data", (reader.value,), [result], like=waiter or side, views=((0, 0),), **where)
        group = [op_id for op_id in (reader.side, reader.last, reader.waiter) if op_id >= 0]
        edit.after(max(group, key=graph.position.__getitem__), [reader_op])
        for m in range(program.pipeline.num_micro_batches):
            there = [(op_id, m) for op_id in group if (op_id, m) in places]
            if there:  # a micro-batch may lack operations that run once a step, and copies
                added.setdefault(max(there, key=places.__getitem__), []).append((reader_op.id, m))
        how = f"until {waiter.kind} #{waiter.id} has waited for it" if waiter else f"after {graph.ops[reader.last].kind} #{reader.last}"
        context.change(side, f"%{reader.value} is kept alive {how}")
    jobs = tuple(msgspec.structs.replace(job, items=tuple(new for item in job.items for new in (item, *added.get(item, ()))))
                 for job in program.jobs)  # fmt: skip
    return msgspec.structs.replace(edit.build(), jobs=jobs)


def _with_joins_at_the_end(program: Program, context: Context) -> Program:
    """Let computation wait at the end of the step for side streams' writes of persistable values: no event reaches into the next step.

    Sharding with overlap gathers the new parameters on its own stream, after everything else.
    """
    graph, edit = Graph(program), Edit(program)
    last: dict[str, tuple[Op, int]] = {}
    for op in program.ops:
        if op.role == "optimize" and stream_of(op):
            last.update((op.stream, (op, value)) for value in op.results if graph.storages.is_persistable(value))
    joins = [(op, value) for op, value in last.values()
             if not any(user.name not in NO_KERNEL and not stream_of(user) for user in graph.readers(value))]  # fmt: skip
    if not joins or not program.jobs:
        return program
    end = graph.ops[program.jobs[-1].items[-1][0]]
    made = []
    for op, value in joins:
        result = edit.value(TensorType(graph.values[value].shape, graph.values[value].dtype), storage=graph.values[value].storage)
        made.append(edit.op("pd_op.share_data", (value,), [result], like=end, views=((0, 0),), stream="", priority=0))
        context.change(op, f"computation waits for %{value} at the end of the step")
    edit.after(end.id, made)
    items = (*program.jobs[-1].items, *((op.id, 0) for op in made))
    jobs = (*program.jobs[:-1], msgspec.structs.replace(program.jobs[-1], items=items))
    return msgspec.structs.replace(edit.build(), jobs=jobs)
