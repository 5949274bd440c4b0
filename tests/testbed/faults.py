"""Missing orders, one for each way in which the checker's classes know them, planted into real plans.

A fault takes the plans of a world and gives two worlds: one that is safe, and the same without one order. The safe one is the plan
itself, or a variant of it in which the order hangs on one thing that can be left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from interlace.ir import Event, Graph, Job, Op, Program, Value
from interlace.ir.kinds import is_collective, is_copy, stream_of
from interlace.passes.insert_events import events_of
from interlace.scheduler.hazards import Finding
from tests.testbed.tasks import Item

World = list[Program]
Check = Callable[[Sequence[Program]], list[Finding]]
Plant = Callable[[World, Check], tuple[World, World]]
SIDE = "planted_side"


@dataclass(frozen=True, slots=True)
class Fault:
    """A planted fault.

    Attributes:
        kind: The class of the checker that it stands for.
        base: Which run's plan it is planted into.
        plant: Gives the safe world and the broken one.
        delayed: Whether it takes a delay to show; the checker's finding says in front of what.
        switches, fetch: Under which it shows, as of a task.
    """

    name: str
    kind: str
    base: str
    plant: Plant
    delayed: bool = True
    switches: dict[str, int] = field(default_factory=dict)
    fetch: bool = True


FAULTS: dict[str, Fault] = {}


def fault(kind: str, base: str, **more: Any) -> Callable[[Plant], Plant]:
    """Register a fault under its function's name."""

    def put(plant: Plant) -> Plant:
        name = plant.__name__.replace("_", " ")
        FAULTS[name] = Fault(name, kind, base, plant, **more)
        return plant

    return put


# -- plans with one thing changed --------------------------------------------------------------------------------------


def _at(world: World, rank: int, program: Program) -> World:
    return [program if k == rank else each for k, each in enumerate(world)]


def _ops(program: Program) -> dict[int, Op]:
    return {op.id: op for op in program.ops}


def _without_wait(program: Program, event: Event, wait: Item) -> Program:
    rest = [msgspec.structs.replace(e, waits=tuple(w for w in e.waits if e is not event or w != wait)) for e in program.events]
    return msgspec.structs.replace(program, events=tuple(e for e in rest if e.waits))


def _with_jobs(program: Program, lists: Sequence[Sequence[Item]]) -> Program:
    jobs = [msgspec.structs.replace(job, items=tuple(items)) for job, items in zip(program.jobs, lists, strict=True)]
    return msgspec.structs.replace(program, jobs=tuple(jobs))


def _with_events(program: Program) -> Program:
    """With the events that its order of items asks for."""
    return msgspec.structs.replace(program, events=tuple(events_of(program)))


def _on_side(program: Program, op_id: int) -> Program:
    """One operation on a stream of its own, and the events that this asks for."""
    ops = [msgspec.structs.replace(op, stream=SIDE) if op.id == op_id else op for op in program.ops]
    return _with_events(program.with_ops(ops))


def _one_wait_less(program: Program, safe: Program) -> Iterator[Program]:
    """The safe form without one of the waits that the program does not have."""
    known = {(event.record, wait) for event in program.events for wait in event.waits}
    for event in safe.events:
        yield from (_without_wait(safe, event, wait) for wait in event.waits if (event.record, wait) not in known)


def _moved(program: Program, item: Item, before: Item) -> Program:
    """An item in front of another, in that one's job."""
    lists = [[each for each in job.items if each != item] for job in program.jobs]
    for items in lists:
        if before in items:
            items.insert(items.index(before), item)
    return _with_jobs(program, lists)


def _lost(world: World, check: Check, kind: str, wanted: Callable[[Op, Op], bool]) -> tuple[World, World]:
    """The first wait between two such operations whose loss nothing else makes good."""
    for rank, program in enumerate(world):
        ops = _ops(program)
        for event in program.events:
            for wait in event.waits if wanted(ops[event.record[0]], ops[event.waits[0][0]]) else ():
                broken = _at(world, rank, _without_wait(program, event, wait))
                if {finding.kind for finding in check(broken)} == {kind}:
                    return world, broken
    raise LookupError(f"no such wait is needed for want of {kind}")


def _first(found: Iterator[tuple[World, World]], check: Check, kind: str) -> tuple[World, World]:
    """The first candidate that is safe and whose broken form has faults of this kind alone."""
    seen = []
    for safe, broken in found:
        kinds = {finding.kind for finding in check(broken)}
        if kinds == {kind} and not check(safe):
            return safe, broken
        seen.append((sorted(kinds), [str(finding) for finding in check(safe)][:2]))
    raise LookupError(f"no candidate shows {kind}; of each, what it shows and what is found in its safe form: {seen[:6]}")


# -- copy-read-early, buffer-reused ------------------------------------------------------------------------------------


@fault("copy-read-early", "pp2")
def a_copy_in_without_its_wait(world: World, check: Check) -> tuple[World, World]:
    """The event between a copy out and the copy in of the same value is lost."""
    return _lost(world, check, "copy-read-early", lambda record, wait: is_copy(record) and is_copy(wait))


@fault("buffer-reused", "pp2")
def a_pinned_buffer_reused(world: World, check: Check) -> tuple[World, World]:
    """All micro-batches leave through one pinned buffer, and one's copy out need not wait for the copy in of the one before."""

    def candidates() -> Iterator[tuple[World, World]]:
        for rank, program in enumerate(world):
            for value in program.values:
                if value.memory == "pinned":
                    for loose in _read_behind_the_next_copy_out(program, value):
                        shared = msgspec.structs.replace(value, persistable=True)
                        broken = loose.with_ops(loose.ops, [shared if each.id == value.id else each for each in loose.values])
                        yield _at(world, rank, _buffer_in_turn(broken, value)), _at(world, rank, broken)

    return _first(candidates(), check, "buffer-reused")


def _read_behind_the_next_copy_out(program: Program, value: Value) -> Iterator[Program]:
    """The next micro-batch's copy out, which the only reader of what came in held back on the compute stream, goes before that reader: the
    copy is issued earlier, or the reader later."""
    graph = Graph(program)
    out, back = graph.producer_op(value.id), graph.readers(value.id)
    users = graph.readers(back[0].results[0]) if len(back) == 1 else []
    for job in program.jobs if out is not None and len(users) == 1 else ():
        for k, (op_id, micro_batch) in enumerate(job.items[:-1]):
            user = (users[0].id, micro_batch - 1)
            if out is not None and op_id == out.id and user in job.items[:k]:
                yield _moved(program, user, job.items[k + 1])
                yield _with_events(_moved(program, (op_id, micro_batch), user))


def _buffer_in_turn(program: Program, value: Value) -> Program:
    """The same with an event from each copy in to the next copy out."""
    graph = Graph(program)
    out = graph.producer_op(value.id)
    assert out is not None
    copies = {out.id, *(reader.id for reader in graph.readers(value.id))}
    order = [item for job in program.jobs for item in job.items if item[0] in copies]
    events = {event.record: event for event in program.events}
    for before, behind in itertools.pairwise(order):
        if before[0] != out.id and behind[0] == out.id:
            known = events.get(before, Event(f"planted_{before[1]}", before, ()))
            events[before] = msgspec.structs.replace(known, waits=(*known.waits, behind))
    return msgspec.structs.replace(program, events=tuple(events.values()))


# -- freed-in-use ------------------------------------------------------------------------------------------------------


@fault("freed-in-use", "pp2", switches={"nosync": 0})
def a_last_reader_that_does_not_wait(world: World, check: Check) -> tuple[World, World]:
    """The last reader of a block, on a stream of its own, no longer waits for the copy out that reads it too.

    It shows where the host still has something to issue on the block's own stream when that reader is done: it waits for jobs here.
    """

    def candidates() -> Iterator[tuple[World, World]]:
        for rank, program in enumerate(world):
            for item, reader in _copied_and_read(program):
                k = next(k for k, job in enumerate(program.jobs) if reader in job.items)
                moved = _moved(program, item, reader)
                safe = _on_side(_cut(moved, k, moved.jobs[k].items.index(reader)), reader[0])
                event = next((each for each in safe.events if each.record == item and reader in each.waits), None)
                if event is not None:
                    yield _at(world, rank, safe), _at(world, rank, _without_wait(safe, event, reader))

    return _first(candidates(), check, "freed-in-use")


@fault("freed-in-use", "pp2")
def a_freed_source_of_a_copy_out(world: World, check: Check) -> tuple[World, World]:
    """A copy out is issued in front of the last computation that reads its source: the collector knows that one alone."""

    def candidates() -> Iterator[tuple[World, World]]:
        for rank, program in enumerate(world):
            for item, reader in _copied_and_read(program):
                yield world, _at(world, rank, _moved(program, item, reader))

    return _first(candidates(), check, "freed-in-use")


def _copied_and_read(program: Program) -> Iterator[tuple[Item, Item]]:
    """Copies out, each with the last computation in front of it that reads the same."""
    ops = _ops(program)
    for job in program.jobs:
        for k, item in enumerate(job.items):
            op = ops[item[0]]
            if op.kind == "memcpy_d2h" and op.origin < 0:
                reader = next((each for each in reversed(job.items[:k]) if op.operands[0] in ops[each[0]].operands), None)
                if reader is not None:
                    yield item, reader


@fault("freed-in-use", "pp2")
def a_sent_value_that_nothing_holds(world: World, check: Check) -> tuple[World, World]:
    """The last reader on a send's stream, which holds what is sent, is left out; computation reads it last."""

    def candidates() -> Iterator[tuple[World, World]]:
        for rank, program in enumerate(world):
            for op in program.ops:
                if op.kind == "share_data" and op.origin < 0 and op.stream:
                    rest = _with_jobs(program, [[item for item in job.items if item[0] != op.id] for job in program.jobs])
                    values = [value for value in program.values if value.id not in op.results]
                    yield world, _at(world, rank, rest.with_ops([each for each in program.ops if each.id != op.id], values))

    return _first(candidates(), check, "freed-in-use")


@fault("freed-in-use", "pp2")
def a_reader_on_a_side_stream(world: World, check: Check) -> tuple[World, World]:
    """dX is computed on a stream of its own; compute reads the gradient once more, for dW, and last, and does not wait for dX."""

    def candidates() -> Iterator[tuple[World, World]]:
        for rank, program in enumerate(world):
            for op in program.ops:
                if op.role == "backward" and op.kind == "matmul" and op.origin < 0:
                    safe = _on_side(program, op.id)
                    yield from ((_at(world, rank, safe), _at(world, rank, broken)) for broken in _one_wait_less(program, safe))

    return _first(candidates(), check, "freed-in-use")


# -- race --------------------------------------------------------------------------------------------------------------


@fault("race", "pp2")
def a_receive_without_its_wait(world: World, check: Check) -> tuple[World, World]:
    """Computation in a later job no longer waits for what a receive gives."""
    return _lost(world, check, "race", lambda record, wait: record.kind == "recv_v2" and not stream_of(wait))


@fault("race", "pp2")
def a_wait_lost_between_jobs(world: World, check: Check) -> tuple[World, World]:
    """A copy out of the job before no longer waits for the computation that gives its source."""

    def candidates() -> Iterator[tuple[World, World]]:
        for rank, later, item in _copies_out_later(world):
            event = next((e for e in later.events if item in e.waits and not stream_of(_ops(later)[e.record[0]])), None)
            if event is not None:
                yield _at(world, rank, later), _at(world, rank, _without_wait(later, event, item))

    return _first(candidates(), check, "race")


def _copies_out_later(world: World) -> Iterator[tuple[int, Program, Item]]:
    """Each copy out with the rest of its job as a job of its own, and on a stream of its own, with the events that it then needs.

    Inside a job the executor orders streams by more than the data: what stands in front of an operation is waited for as well.
    """
    for rank, program in enumerate(world):
        for op in program.ops:
            if op.kind == "memcpy_d2h" and op.origin < 0:
                alone = _on_side(program, op.id)
                for k, job in enumerate(alone.jobs):
                    for n, item in enumerate(job.items):
                        if item[0] == op.id:
                            yield rank, _with_events(_cut(alone, k, n)), item


@fault("race", "pp2")
def a_host_wait_lost(world: World, check: Check) -> tuple[World, World]:
    """As before, but the host waits for the source in the place of the event; then it does not."""

    def candidates() -> Iterator[tuple[World, World]]:
        for safe, broken in _safe_and_broken():
            rank = next(k for k, (a, b) in enumerate(zip(safe, broken, strict=True)) if a != b)
            lost = set(safe[rank].events) - set(broken[rank].events)
            awaited = next(iter(lost)).record
            jobs = tuple(_host_waits(job, awaited) for job in broken[rank].jobs)
            yield _at(broken, rank, msgspec.structs.replace(broken[rank], jobs=jobs)), broken

    def _safe_and_broken() -> Iterator[tuple[World, World]]:
        yield a_wait_lost_between_jobs(world, check)

    return _first(candidates(), check, "race")


def _host_waits(job: Job, awaited: Item) -> Job:
    return msgspec.structs.replace(job, host_waits=((job.items[-1], awaited),)) if awaited in job.items else job


@fault("race", "pp2", fetch=False)
def a_parameter_read_in_front_of_its_update(world: World, check: Check) -> tuple[World, World]:
    """A forward operation reads a parameter on a stream of its own: in the next step nothing makes it wait for the update.

    Where a loss is fetched the host waits for it, and with it for the update: the checker does not count on that.
    """

    def candidates() -> Iterator[tuple[World, World]]:
        for rank, program in enumerate(world):
            lasting = {value.id for value in program.values if value.persistable}
            for op in program.ops:
                if op.role == "forward" and op.kind in ("matmul", "layer_norm") and lasting & set(op.operands):
                    safe = _on_side(program, op.id)
                    yield from ((_at(world, rank, safe), _at(world, rank, broken)) for broken in _one_wait_less(program, safe))

    return _first(candidates(), check, "race")


@fault("race", "mp2")
def a_collective_without_its_wait(world: World, check: Check) -> tuple[World, World]:
    """A job ends between a collective and the first reader of its result, with the event that it then needs; then without."""

    def candidates() -> Iterator[tuple[World, World]]:
        for rank, program in enumerate(world):
            graph, ops = Graph(program), _ops(program)
            for k, job in enumerate(program.jobs):
                for n, item in enumerate(job.items):
                    if is_collective(ops[item[0]]) and stream_of(ops[item[0]]):
                        readers = {reader.id for result in ops[item[0]].results for reader in graph.readers(result)}
                        first = next((m for m, each in enumerate(job.items) if m > n and each[0] in readers and each[1] == item[1]), n + 1)
                        safe = _with_events(_cut(program, k, first))
                        event = next((e for e in safe.events if e.record == item), None)
                        if event is not None and first > n + 1:
                            yield _at(world, rank, safe), _at(world, rank, _without_wait(safe, event, event.waits[0]))

    return _first(candidates(), check, "race")


def _cut(program: Program, k: int, place: int) -> Program:
    """One job as two."""
    job = program.jobs[k]
    halves = [
        msgspec.structs.replace(job, name=f"{job.name}_{half}", items=items, host_waits=())
        for half, items in (("a", job.items[:place]), ("b", job.items[place:]))
    ]
    return msgspec.structs.replace(program, jobs=(*program.jobs[:k], *halves, *program.jobs[k + 1 :]))


# -- event-order, wrong-version ----------------------------------------------------------------------------------------


@fault("event-order", "pp2")
def an_event_recorded_behind_its_wait(world: World, check: Check) -> tuple[World, World]:
    """The event of a receive is recorded by the next micro-batch's receive, which is issued right after the wait."""

    def candidates() -> Iterator[tuple[World, World]]:
        for rank, program in enumerate(world):
            ops = _ops(program)
            for event in program.events:
                late = (event.record[0], event.record[1] + 1)
                job = next((job for job in program.jobs if late in job.items and event.waits[0] in job.items), None)
                if ops[event.record[0]].kind == "recv_v2" and job is not None:
                    after = job.items[job.items.index(event.waits[0]) + 1]
                    safe = _with_events(_moved(program, late, after) if after != late else program)
                    known = next((each for each in safe.events if each.record == event.record), None)
                    if known is not None:
                        events = (msgspec.structs.replace(e, record=late) if e is known else e for e in safe.events if e.record != late)
                        yield _at(world, rank, safe), _at(world, rank, msgspec.structs.replace(safe, events=tuple(events)))

    for safe, broken in candidates():
        if "event-order" in {finding.kind for finding in check(broken)} and not check(safe):
            return safe, broken
    raise LookupError("no event could be recorded later")


@fault("wrong-version", "pp2", delayed=False)
def gradients_added_in_another_order(world: World, check: Check) -> tuple[World, World]:
    """A micro-batch's gradient is added behind the next one's."""

    def candidates() -> Iterator[tuple[World, World]]:
        for rank, program in enumerate(world):
            for op in program.ops:
                if op.role == "backward" and op.inplace and op.kind == "add":
                    items = {item for job in program.jobs for item in job.items}
                    if {(op.id, m) for m in (1, 2, 3)} <= items:
                        yield world, _at(world, rank, _moved(program, (op.id, 1), (op.id, 3)))

    return _first(candidates(), check, "wrong-version")


# -- read-before-write -------------------------------------------------------------------------------------------------


@fault("read-before-write", "pp2", delayed=False)
def a_reader_in_front_of_its_copy(world: World, check: Check) -> tuple[World, World]:
    """On each rank a copy in goes to the next job, with the memory for it; the computation that reads what it brings stays."""

    def behind_its_reader(program: Program) -> Iterator[Program]:
        ops = _ops(program)
        maker = {value: op.id for op in program.ops for value in op.results}
        for job, behind in zip(program.jobs, program.jobs[1:], strict=False):
            for item in job.items:
                if ops[item[0]].kind == "memcpy_h2d" and item[1] and behind.kind != "optimizer":
                    memory = maker[ops[item[0]].operands[1]], item[1]
                    yield _moved(_moved(program, memory, behind.items[0]), item, behind.items[0])

    broken = [next(behind_its_reader(program)) for program in world]
    if "read-before-write" not in {finding.kind for finding in check(broken)}:
        raise LookupError("a copy in behind its reader is not seen as read before it is written")
    return world, broken
