"""Memory that is reused, or written in the next step, while an operation may still use it."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

from interlace.ir.target import Target
from interlace.scheduler.hazards.flat_plan import HOST
from interlace.scheduler.hazards.happens_before import NO_ITEM, Fault, Trace


def freed_in_use(trace: Trace, target: Target) -> list[Fault]:
    """Uses of a block that may still run when the block is reused.

    A storage is freed after the last reader of each of its variables. The collector waits for these last readers, but not for anything
    issued later on their streams. A use on another stream is safe if it is one of them, if it has completed before one of them
    starts, or if it has completed when the stream that owns the block issues its next operation: each stream has its own memory pool,
    so only that stream can reuse the block.
    """
    if target.serial:
        return []
    plan = trace.plan
    items_of: list[list[int]] = [[] for _ in plan.streams]
    for item, stream in enumerate(plan.stream):
        if stream != HOST:
            items_of[stream].append(item)
    variables: dict[int, list[int]] = defaultdict(list)
    for (key, _), last in trace.last_of_variable.items():
        variables[key].append(last)
    faults = []
    for key, users in trace.users.items():
        storage = plan.storage(key)
        if storage.kept or storage.lasting:
            continue
        lasts = variables[key] if key in variables else [max(users.values())]
        faults += _uncovered(trace, target, key, users, lasts, items_of)
    return faults


def _uncovered(trace: Trace, target: Target, key: int, users: dict[int, int], lasts: list[int], items_of: list[list[int]]) -> list[Fault]:
    freed, owner = max(users.values()), next(iter(users))
    marks = list(lasts) if target.free == "end" or target.records_streams else []
    after = bisect_right(items_of[owner], freed)
    marks += items_of[owner][after : after + 1]
    wraps = after == len(items_of[owner])
    return [
        Fault("freed-in-use", use, freed, key)
        for use in users.values()
        if not any(use == mark or (use < mark and trace.before(use, mark)) for mark in marks)
        and not (wraps and _reaches_next_step(trace, use, items_of[owner][0]))
    ]


def overlapping_steps(trace: Trace, target: Target) -> list[Fault]:
    """Accesses to parameters and host buffers in the next step that nothing orders after this step's accesses; events do not reach beyond
    their step."""
    faults = []
    for key, write in trace.first_write.items():
        last = trace.writer[key]
        reads = trace.first_reads.get(key, {}).values()
        faults += [Fault("next-step-read", last, read, key) for read in reads if not _across(trace, target, last, read, key)]
        users = {last, *trace.readers.get(key, ())}
        faults += [Fault("next-step-write", use, write, key) for use in sorted(users) if not _across(trace, target, use, write, key)]
    return faults


def _across(trace: Trace, target: Target, use: int, item: int, key: int) -> bool:
    """Whether a use in one step has completed when an access in the next step starts. A job waits for its own last use of a variable if the
    executor orders streams by that memory."""
    plan, storage = trace.plan, trace.plan.storage(key)
    waits = len(storage.variables) == 1 and (target.host_memory_edges or storage.memory == "device")
    return (waits and plan.job[use] == plan.job[item]) or _reaches_next_step(trace, use, item)


def _reaches_next_step(trace: Trace, use: int, item: int) -> bool:
    """Whether an item of one step has completed when another starts in the next step, through the order of any stream or the host."""
    streams = trace.plan.stream
    stream = streams[use]
    if stream in (HOST, streams[item]) or trace.host[stream] >= use:
        return True
    reached = [s for s, known in enumerate(trace.clock[item]) if known != NO_ITEM or s == streams[item]]
    return any(s == stream or trace.tip[s][stream] >= use for s in reached)
