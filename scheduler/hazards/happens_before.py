"""Happens-before of one rank by vector clocks, and the accesses that it leaves unordered.

The clock of an op instance (`item` in names) holds, for each stream, the last op instance that has completed when it starts.
Streams are first in, first out, so "a has completed when b starts" is one comparison. Op instances share a clock until one of
them waits for another stream: cost O(items x operands + waits x streams).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from interlace.ir.copies import fills_memory
from interlace.ir.kinds import NO_KERNEL, is_copy, takes_events
from interlace.ir.target import Target
from interlace.scheduler.hazards.flat_plan import HOST, Access, FlatPlan, Version

Clock = tuple[int, ...]
Table = TypeVar("Table")
NO_ITEM = -1
"""Used instead of the index of an op instance: nothing on a stream is known to have run, or nothing has written."""


@dataclass(slots=True)
class Fault:
    """An access out of order: `second` is the access, `first` the other one (or `NO_ITEM`), as indices in host order."""

    kind: str
    first: int
    second: int
    key: int
    expected: int = NO_ITEM


@dataclass(slots=True)
class Trace:
    """The result of walking a rank's plan. An item is the index of an op instance in host order.

    Attributes:
        plan: The plan.
        faults: Accesses out of order.
        clock: Clock of each item; its entry for the item's own stream is unused, as earlier items there have always completed.
        tip: Clock at the end of each stream.
        host: Clock of what the host knows to have completed.
        last: Last item of each stream.
        joins: Item -> `(earlier item, reason)` for each item of another stream that it waits for.
        writer, readers: Last writer, and readers since then, by key, at the end of the step.
        users: Key of a storage that several streams use -> stream -> its last item that uses it, recorded from the second stream's first
            use on; the first entry is the stream that wrote it.
        last_of_variable: For storages with several variables: `(key, variable)` -> last item that uses the variable.
        wanted: Missing orders `(earlier item, item)`, if the walk supplies them.
        first_reads, first_write: For storages that outlive the step, by key: the first read on each stream before any write, and the
            first write.
    """

    plan: FlatPlan
    clock: list[Clock] = field(default_factory=list)
    tip: list[Clock] = field(default_factory=list)
    host: Clock = ()
    last: list[int] = field(default_factory=list)
    joins: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    writer: dict[int, int] = field(default_factory=dict)
    readers: dict[int, list[int]] = field(default_factory=dict)
    users: dict[int, dict[int, int]] = field(default_factory=dict)
    last_of_variable: dict[tuple[int, int], int] = field(default_factory=dict)
    wanted: list[tuple[int, int]] = field(default_factory=list)
    first_reads: dict[int, dict[int, int]] = field(default_factory=dict)
    first_write: dict[int, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def before(self, a: int, b: int) -> bool:
        """Whether item a has completed when item b starts; a must be earlier in host order."""
        stream = self.plan.stream
        return stream[a] in (HOST, stream[b]) or (stream[b] != HOST and self.clock[b][stream[a]] >= a)


class Row(NamedTuple):
    """One access of an operation, reduced to what the inner loop of the walk needs.

    Attributes:
        base, stride, writer: As in `Access`.
        plain: Whether its storage belongs to one micro-batch and has one variable, and is read as written by this micro-batch or newly
            written.
        constant: Whether it reads the contents from before the step.
    """

    base: int
    stride: int
    writer: int
    writes: bool
    plain: bool
    constant: bool
    access: Access


class Stored(NamedTuple):
    """Properties of a storage that the walk needs at every access.

    Attributes:
        several: Whether several variables name it.
        on_device: Whether it is in device memory.
        persistable, lasting: As in `Storage`.
    """

    several: bool
    on_device: bool
    persistable: bool
    lasting: bool


class Tracer:
    """Walks the op instances of a rank once, in host order.

    With `supply`, a missing order is not a fault: the item is assumed to wait, and the pair is added to `Trace.wanted`.
    """

    def __init__(self, plan: FlatPlan, target: Target, supply: bool = False) -> None:
        self.plan, self.target, self.supply = plan, target, supply
        count = len(plan.streams)
        never = (NO_ITEM,) * count
        self.trace = Trace(plan, tip=[never] * count, host=never, last=[NO_ITEM] * count)
        self.seen: list[Clock] = [never] * count
        self.count = plan.num_micro_batches
        self.stored = self._once("stored", self._stored)
        self.blocks = self._once(("blocks", target.blocking), self._blocking)
        self.into = self._once("fills memory", lambda: [fills_memory(op) for op in plan.program.ops])
        self.waits = self._waits()
        self.awaited = self._awaited()
        self.defined_by: dict[tuple[int, int], int] = {}
        self.used: dict[tuple[int, int], dict[int, int]] = {}
        self.rows = self._once(("rows", bool(plan.omitted)), lambda: [self._rows(k) for k in range(len(plan.program.ops))])
        self.views_read = self._once("views read", self._views_read)

    def _once(self, key: Any, make: Callable[[], Table]) -> Table:
        """A table over operations, computed once for all plans that share it."""
        tables = self.plan.tables
        if key not in tables:
            tables[key] = make()
        made: Table = tables[key]
        return made

    def _stored(self) -> list[Stored]:
        return [Stored(len(each.variables) > 1, each.memory == "device", each.persistable, each.lasting) for each in self.plan.storages]

    def _rows(self, position: int) -> list[Row]:
        plan = self.plan
        rows = []
        for access, writes in [(t, False) for t in plan.reads[position]] + [(t, True) for t in plan.writes[position]]:
            storage = plan.storage(access.base)
            plain = access.version == (Version.ANY if writes else Version.SAME) and not (
                plan.omitted or storage.lasting or len(storage.variables) > 1
            )
            constant = access.version == Version.INITIAL and not writes and not plan.omitted
            rows.append(Row(access.base, access.stride, access.writer, writes, plain, constant, access))
        return rows

    def _views_read(self) -> list[list[tuple[int, Access]]]:
        """For each operation, the operations that define the views that it reads, and the accesses. `share_data_` defines none, as its
        result has its operand's variable."""
        plan = self.plan
        ops = plan.program.ops
        makers = (k for k, op in enumerate(ops) if op.name not in (*NO_KERNEL, "pd_op.share_data_"))
        maker = {view.variable: k for k in makers for view in plan.views[k]}
        return [
            [(maker[access.variable], access) for access in accesses if maker.get(access.variable, k) != k]
            for k, accesses in enumerate(plan.reads)
        ]

    def _blocking(self) -> list[bool]:
        """For each operation, whether the host waits for it."""
        on_host = {value.id for value in self.plan.program.values if value.memory == "host"}
        return [
            is_copy(op) and ((op.origin >= 0 and op.kind in self.target.blocking) or any(value in on_host for value in op.results))
            for op in self.plan.program.ops
        ]

    def _awaited(self) -> dict[int, int]:
        """Item after which the host waits -> the item that it waits for."""
        jobs, index = self.plan.program.jobs, self.plan.index
        return {index[after]: index[item] for job in jobs for after, item in job.host_waits} if self.target.host_runs_ahead else {}

    def _waits(self) -> dict[int, list[tuple[int, str]]]:
        """Waiting item -> the items and events that it waits for. An event that is never recorded, or recorded too late, is a fault."""
        plan, waits = self.plan, defaultdict(list)
        takes = self._once("takes events", lambda: [takes_events(op) for op in plan.program.ops])
        for event in plan.program.events:
            record = plan.index.get(event.record, NO_ITEM)
            for item in event.waits:
                wait = plan.index.get(item, NO_ITEM)
                if record == NO_ITEM or wait == NO_ITEM or record >= wait:
                    self.trace.faults.append(Fault("event-order", record, wait, NO_ITEM))
                elif not self.target.serial and not takes[plan.op[record]]:
                    self.trace.faults.append(Fault("no-event", record, wait, NO_ITEM))
                elif takes[plan.op[wait]]:
                    waits[wait].append((record, f"event {event.name}"))
        return waits

    def run(self) -> Trace:
        """Fill the trace."""
        plan, clocks = self.plan, self.trace.clock
        job = -1
        for item, (position, stream) in enumerate(zip(plan.op, plan.stream, strict=True)):
            if plan.job[item] != job:
                job = plan.job[item]
                self._start_job()
            if stream == HOST:
                clocks.append(self.trace.host)
                for access in plan.writes[position]:
                    self.trace.writer[access.base + access.stride * plan.micro_batch[item]] = item
            else:
                self._step(item, position, stream)
            if item in self.awaited:
                self.trace.host = self._joined(self.trace.host, self.awaited[item])
        return self.trace

    def _start_job(self) -> None:
        trace = self.trace
        if self.target.job_end_waits and trace.last[0] != NO_ITEM:
            trace.host = self._joined(trace.host, trace.last[0])

    def _joined(self, clock: Clock, item: int) -> Clock:
        """The clock extended by an item and by everything that had completed when that item started."""
        stream = self.plan.stream[item]
        merged = list(map(max, clock, self.trace.clock[item]))
        merged[stream] = max(merged[stream], item)
        return tuple(merged)

    def _step(self, item: int, position: int, stream: int) -> None:
        trace, plan = self.trace, self.plan
        clock = trace.tip[stream]
        if self.seen[stream] is not trace.host:
            self.seen[stream] = trace.host
            clock = tuple(map(max, clock, trace.host))
        micro_batch = plan.micro_batch[item]
        if item in self.waits and not self._loses_waits(item, position):
            for source, why in self.waits[item]:
                clock = self._learn(item, stream, clock, source, why)
        for maker, access in self.views_read[position]:
            made = plan.index.get((plan.program.ops[maker].id, micro_batch), NO_ITEM)
            if not NO_ITEM < made < item:
                trace.faults.append(Fault("read-before-write", made, item, self._place(access, micro_batch)[0], made))
        late: list[tuple[str, int, int]] = []
        writer_of, readers_of, op_of, stream_of = trace.writer, trace.readers, plan.op, plan.stream
        for base, stride, expected, writes, plain, constant, access in self.rows[position]:
            key = base + stride * micro_batch
            writer = writer_of.get(key, NO_ITEM)
            if constant and writer == NO_ITEM and key in readers_of and stream_of[readers_of[key][-1]] == stream:
                readers_of[key][-1] = item
            elif not plain or key in trace.users:
                clock = self._access(item, stream, access, key, writes, clock, late)
            elif writes and writer == NO_ITEM:
                writer_of[key] = item
            elif not writes and writer != NO_ITEM and stream_of[writer] == stream and op_of[writer] == expected:
                readers_of[key] = [item]  # no other stream has used the storage, otherwise it would be in `users`
            else:
                clock = self._access(item, stream, access, key, writes, clock, late)
        for access in plan.views[position]:
            key, name = self._place(access, micro_batch)
            if self._has_several(key):
                clock = self._known_by_variable(item, stream, name, True, clock)
                trace.last_of_variable[name] = item
        if late:
            clock = self._settled(item, stream, clock, late)
        trace.clock.append(clock)
        trace.tip[stream] = clock
        trace.last[stream] = item
        if self.blocks[position]:
            trace.host = self._joined(trace.host, item)

    def _settled(self, item: int, stream: int, clock: Clock, late: list[tuple[str, int, int]]) -> Clock:
        """Report the orders that are still missing after all accesses of an item as faults, or supply them."""
        trace = self.trace
        for kind, first, key in sorted(late, key=lambda each: -each[1]) if self.supply else late:
            if clock[self.plan.stream[first]] >= first:
                continue
            if self.supply:
                source = max(first, self.plan.num_fed - 1) if first < self.plan.num_fed else first
                trace.wanted.append((source, item))
                clock = self._learn(item, stream, clock, source, "event")
            else:
                trace.faults.append(Fault(kind, first, item, key))
        return clock

    def _learn(self, item: int, stream: int, clock: Clock, source: int, why: str) -> Clock:
        other = self.plan.stream[source]
        if other in (stream, HOST) or clock[other] >= source:
            return clock
        self.trace.joins.setdefault(item, []).append((source, why))
        return self._joined(clock, source)

    def _loses_waits(self, item: int, position: int) -> bool:
        op = self.plan.program.ops[position]
        if op.origin < 0 or op.kind not in self.target.loses_waits:
            return False  # a copy that a pass added is lowered to the device's own asynchronous one
        keys = [self._place(access, self.plan.micro_batch[item])[0] for access in self.plan.reads[position]]
        makers = [self.trace.writer.get(key, NO_ITEM) for key in keys]
        return not any(maker != NO_ITEM and self.plan.job[maker] == self.plan.job[item] for maker in makers)

    def _access(
        self, item: int, stream: int, access: Access, key: int, writes: bool, clock: Clock, late: list[tuple[str, int, int]]
    ) -> Clock:
        """Process one read or write of one storage; returns the item's clock, extended by the orders that the executor ensures itself.

        Orders that it does not ensure are added to `late`.
        """
        trace, streams, jobs = self.trace, self.plan.stream, self.plan.job
        expected, version, micro_batch = access.writer, access.version, self.plan.micro_batch[item]
        if self.plan.omitted:
            key, name = self._place(access, micro_batch)
            access, expected, version = self._resolved(access, item)
        else:
            key = access.base + access.stride * micro_batch
            name = key, access.variable + access.own * micro_batch
        writer = trace.writer.get(key, NO_ITEM)
        if writer == item:  # it wrote the storage itself, through another operand, after all its reads
            pass
        elif version == Version.BASELINE:
            wanted = self._baseline_writer(item, access)
            if writer != wanted:
                trace.faults.append(Fault("wrong-version", writer, item, key, wanted))
        elif not self._right_version(item, writer, expected, version):
            trace.faults.append(self._version_fault(item, writer, key, expected, version))
        several = self._has_several(key)
        is_ordered = self._ordered_in_job(key) and not (writes and self.into[self.plan.op[item]])
        if several and self._ordered_in_job(key):
            clock = self._known_by_variable(item, stream, name, writes, clock, is_ordered)
        others: Iterable[int] = (writer, *trace.readers.get(key, ())) if writes else (writer,)
        for other in others:
            if other in (NO_ITEM, item) or streams[other] in (stream, HOST) or clock[streams[other]] >= other:
                continue
            if not several and jobs[other] == jobs[item] and is_ordered:
                clock = self._learn(item, stream, clock, other, "data")
            else:
                late.append(("read" if not writes else "write", other, key))
        self._note(item, stream, name, writes, writer, several)
        return clock

    def _known_by_variable(
        self, item: int, stream: int, name: tuple[int, int], defines: bool, clock: Clock, is_ordered: bool = True
    ) -> Clock:
        """Extend the clock by what the executor orders inside a job if several variables name one storage: users of the same variable."""
        jobs, streams = self.plan.job, self.plan.stream
        producer = self.defined_by.get(name, NO_ITEM)
        earlier = (producer, *self.used.get(name, {}).values()) if defines else (producer,)
        for other in earlier if is_ordered else ():
            if other not in (NO_ITEM, item) and jobs[other] == jobs[item]:
                clock = self._learn(item, stream, clock, other, "data")
        if defines:
            self.defined_by[name] = item
            self.used.pop(name, None)
        else:
            self.used.setdefault(name, {})[streams[item]] = item
        return clock

    def _has_several(self, key: int) -> bool:
        """Whether several variables name one storage. An omitted copy adds the variables of its result's views to its operand's storage."""
        return self.stored[key // self.count].several or key in self.plan.viewed

    def _ordered_in_job(self, key: int) -> bool:
        return self.target.host_memory_edges or self.stored[key // self.count].on_device

    def _place(self, access: Access, micro_batch: int) -> tuple[int, tuple[int, int]]:
        """The key of an access's storage, and this key with its variable; results of omitted copies are replaced by their operands."""
        key, variable = access.base + access.stride * micro_batch, access.variable + access.own * micro_batch
        while self.plan.omitted and (found := self.plan.omitted.get((access.root, micro_batch))) is not None:
            _, source, copied = found
            same = variable == copied
            access = source
            key = source.base + source.stride * micro_batch
            variable = source.variable + source.own * micro_batch if same else variable
        return key, (key, variable)

    def _resolved(self, access: Access, item: int) -> tuple[Access, int, Version]:
        """Follow results of omitted copies to their operands; returns the access, expected writer and version there."""
        expected, version = access.writer, access.version
        micro_batch = self.plan.micro_batch[item]
        while (found := self.plan.omitted.get((access.root, micro_batch))) is not None:
            copy, access, _ = found
            if expected == copy:
                expected, version = access.writer, access.version
        return access, expected, version

    def _baseline_writer(self, item: int, access: Access) -> int:
        """The last item that writes before an access in Paddle's own schedule."""
        plan = self.plan
        found = plan.baseline.get((plan.op[item], access.base, plan.micro_batch[item]))
        return NO_ITEM if found is None else plan.index.get((plan.program.ops[found[0]].id, found[1]), NO_ITEM)

    def _right_version(self, item: int, writer: int, expected: int, version: Version) -> bool:
        plan = self.plan
        if version is Version.ANY:
            return True
        if version == Version.PREVIOUS and plan.micro_batch[item] == 0:
            version = Version.INITIAL
        if version == Version.INITIAL:
            return writer == NO_ITEM
        if writer == NO_ITEM or plan.op[writer] != expected:
            return False
        if version == Version.ONCE:
            return True
        wanted = plan.micro_batch[item] - (version == Version.PREVIOUS) if version != Version.LAST else plan.num_micro_batches - 1
        return plan.micro_batch[writer] == wanted

    def _version_fault(self, item: int, writer: int, key: int, expected: int, version: Version) -> Fault:
        plan = self.plan
        if version == Version.INITIAL or (version == Version.PREVIOUS and plan.micro_batch[item] == 0):
            return Fault("wrong-version", writer, item, key)
        wanted = plan.micro_batch[item] if version in (Version.SAME, Version.ONCE) else plan.num_micro_batches - 1
        wanted -= version == Version.PREVIOUS
        source = plan.index.get((plan.program.ops[expected].id, wanted), NO_ITEM)
        kind = "wrong-version" if writer != NO_ITEM else "read-before-write"
        return Fault(kind, writer if writer != NO_ITEM else source, item, key, source)

    def _note(self, item: int, stream: int, name: tuple[int, int], writes: bool, writer: int, several: bool) -> None:
        trace, streams, key = self.trace, self.plan.stream, name[0]
        storage = self.stored[key // self.count]
        if storage.lasting and writer == NO_ITEM:
            if writes:
                trace.first_write[key] = item
            else:
                trace.first_reads.setdefault(key, {}).setdefault(stream, item)
        if not storage.persistable:
            self._note_user(item, stream, key, writer)
            if several:
                trace.last_of_variable[name] = item
        if writes:
            trace.writer[key] = item
            trace.readers.pop(key, None)
            return
        readers = trace.readers.get(key)
        if readers is None:
            trace.readers[key] = [item]
        elif streams[readers[-1]] == stream:
            readers[-1] = item
        else:
            trace.readers[key] = [r for r in readers if streams[r] != stream] + [item]

    def _note_user(self, item: int, stream: int, key: int, writer: int) -> None:
        """Record users by stream, from the second stream's first use of a storage on."""
        trace, streams = self.trace, self.plan.stream
        users = trace.users.get(key)
        if users is not None:
            users[stream] = item
        elif writer != NO_ITEM and streams[writer] not in (stream, HOST):
            trace.users[key] = {streams[writer]: writer, stream: item}
