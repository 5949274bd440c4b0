"""`assign-streams`: which stream each operation runs on, the events between jobs, and where the host waits."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from interlace.ir import Edit, Graph, Job, Op, Program, TensorType, Value
from interlace.ir.kinds import is_collective, is_copy, is_receive, is_send, stream_of
from interlace.passes.base import Context, Pass, register
from interlace.passes.events import Item, events_of
from interlace.passes.streams import AutoParallelStreamType, mp_stream
from interlace.scheduler.hold import at_ends, candidates, held, plan_holds


@register
class AssignStreams(Pass, frozen=True, kw_only=True):
    """Give communication streams of its own, with priorities, and order what crosses jobs between streams.

    Contract: needs a schedule; keeps every value and the order of all items; adds names, events, and where memory would be
    handed out again under a side stream's read, one `share_data` that holds it.

    Steps: 1 tensor-parallel collectives go on one stream a ring, receives and sends on one a ring and direction; collectives
    and p2p of the optimizer part, those that read a parameter, and those that name a stream already, stay. 2 A value given in
    one job on one stream and read in another job on another gets an event, once for each reading stream: inside a job the
    executor orders streams itself. 3 A value that a side stream reads and a compute operation reads later is held until compute
    has waited for the side stream, or, where compute has nothing to wait for (a send), on that stream. A send of an earlier
    job, and the last read of a parameter on a side stream before its update, get an event. 4 The host waits for the device now
    and then in jobs with work on side streams, where running ahead would hold too much of the memory that these touch
    (scheduler/hold.py).

    Options:
        rename: False leaves every stream as Paddle named it; what a plan needs to be safe is added all the same.
        priority: Stream priority of communication; 0 is normal, lower runs first.
        hold_host: Where the host waits, on places where it runs ahead and memory is taken at issue: `auto` as seldom as keeps
            memory, `on` at the end of every job with work on side streams, `off` nowhere.
        run_ahead_bytes: By how much run-ahead may raise the peak of device memory before `auto` lets the host wait.

    Source: paddle-gpu rules 1 to 5 in docs/gpu-place.md.
    """

    name = "assign-streams"
    needs = frozenset({"scheduled"})
    gives = frozenset({"streams"})
    after = ("split-backward", "overlap-column-backward", "schedule-1f1b", "offload-activations")

    rename: bool = True
    priority: int = -1
    hold_host: Literal["auto", "on", "off"] = "auto"
    run_ahead_bytes: Annotated[int, msgspec.Meta(ge=0)] = 256 << 20

    def draft(self) -> Pass:
        """Without waits of the host."""
        return msgspec.structs.replace(self, hold_host="off")

    def run(self, program: Program, context: Context) -> Program:
        program = self._named(program, context) if self.rename else program
        program = _with_holds(program, context)
        events = tuple(events_of(program))
        context.changed.append(f"{len(events)} events between jobs")
        return self._held(msgspec.structs.replace(program, events=events), context)

    def _held(self, program: Program, context: Context) -> Program:
        if self.hold_host == "off":
            return program
        if self.hold_host == "on":
            waits = at_ends(program, candidates(program))
            if waits:
                context.changed.insert(0, f"the host waits at the end of {len(waits)} of {len(program.jobs)} jobs, as asked")
            else:
                context.declined.append("hold_host: no job has work beside computation that holds memory")
            return held(program, waits)
        plan = plan_holds(program, context.cost, self.run_ahead_bytes)
        numbers = plan.text() if plan.free_bytes else ""
        why = ": ".join(part for part in (plan.reason, numbers) if part)
        if plan.count:
            context.changed.insert(0, f"the host waits {plan.count} times a step: {why}")
        else:
            context.declined.append(f"hold_host: the host waits nowhere, {why}")
        return held(program, plan.waits)

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
    for kind, stream in ((is_send, AutoParallelStreamType.PP_SEND), (is_receive, AutoParallelStreamType.PP_RECV)):
        found = [op for op in inner if kind(op)]
        single = len({op.group for op in found}) <= 1
        names.update({op.id: stream.value if single else f"{stream.value}_{op.group}" for op in found})
    return names


def _parameters(program: Program) -> set[int]:
    """Values that last, and that only the optimizer part writes: no event says to the next step's first reader that it has."""
    lasting = {value.storage for value in program.values if value.persistable}
    storage = {value.id: value.storage for value in program.values}
    written = {storage[op.operands[operand]] for op in program.ops if op.role != "optimize" for _, operand in op.inplace}
    return {value for value, place in storage.items() if place in lasting - written}


def _with_holds(program: Program, context: Context) -> Program:
    """Add a last reader for values that a side stream reads in front of their last compute reader.

    Collection at issue time records only last readers, so such a block would be handed out while the side stream reads it. The
    new reader stands behind what waits for the side stream; behind a send nothing does, and the send's own stream reads once more.
    """
    graph = Graph(program)
    edit = Edit(program)
    holds: dict[int, list[Op]] = {}
    items = {item: (k, job.name) for job in program.jobs for k, item in enumerate(job.items)}
    for op in program.ops:
        if stream_of(op):
            for value in dict.fromkeys(graph.reads(op)):
                waiter = _needs_hold(graph, op, value) if op.results else _reads_behind(graph, op, value, items)
                if waiter is not None:
                    result = edit.value(_type_of(graph, value), storage=graph.values[value].storage)
                    where: dict[str, Any] = {} if op.results else {"stream": op.stream, "priority": op.priority}
                    held = edit.op("pd_op.share_data", (value,), [result], like=waiter, views=((0, 0),), **where)
                    holds.setdefault(waiter.id, []).append(held)
                    how = f"until {waiter.kind} #{waiter.id} has waited for it" if op.results else f"behind {waiter.kind} #{waiter.id}"
                    context.change(op, f"%{value} is held {how}")
    if not holds:
        return program
    for waiter_id, waiting in holds.items():
        edit.after(waiter_id, waiting)
    jobs = tuple(_job_with_holds(job, holds) for job in program.jobs)
    return msgspec.structs.replace(edit.build(), jobs=jobs)


def _needs_hold(graph: Graph, side: Op, value: int) -> Op | None:
    """The first compute reader of the side operation's result, where the value's last reader stands in front of it."""
    kept = graph.values[value]
    if not _is_collected(kept):
        return None
    later = [user for user in _compute_readers(graph, side, value) if graph.position[user.id] > graph.position[side.id]]
    waiters = [user for result in side.results for user in graph.readers(result) if not stream_of(user) and user.role == side.role]
    first = min(waiters, key=lambda user: graph.position[user.id], default=None)
    if first is None or not later:
        return None
    return first if max(graph.position[user.id] for user in later) < graph.position[first.id] else None


def _reads_behind(graph: Graph, side: Op, value: int, items: dict[Item, tuple[int, str]]) -> Op | None:
    """The last compute reader behind a send in its job; jobs that mix micro-batches may have a send in front of one, others not."""
    if not _is_collected(graph.values[value]):
        return None
    readers = _compute_readers(graph, side, value)
    for (op_id, micro_batch), (place, job) in items.items() if readers else ():
        if op_id == side.id:
            there = [(items.get((user.id, micro_batch), (-1, "")), user.id) for user in readers]
            behind = [(at, user) for (at, where), user in there if where == job and at > place]
            if behind:
                return graph.ops[max(behind)[1]]
    return None


def _is_collected(value: Value) -> bool:
    return not value.persistable and value.memory == "device" and value.dtype not in ("vector", "null")


def _compute_readers(graph: Graph, side: Op, value: int) -> list[Op]:
    """Others of its part of the step that read what a side operation reads, on compute."""
    readers = (user for alias in graph.aliases[graph.values[value].storage] for user in graph.readers(alias))
    return [user for user in readers if user.id != side.id and not stream_of(user) and user.role == side.role]


def _type_of(graph: Graph, value: int) -> TensorType:
    return TensorType(graph.values[value].shape, graph.values[value].dtype)


def _job_with_holds(job: Job, holds: dict[int, list[Op]]) -> Job:
    items = [new for item in job.items for new in (item, *((held.id, item[1]) for held in holds.get(item[0], ())))]
    return msgspec.structs.replace(job, items=tuple(items))
