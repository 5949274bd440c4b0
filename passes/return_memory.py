"""`return-memory`: blocks that another stream reads last are given back in the order of their own stream."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import msgspec

from interlace.grouping import grouped
from interlace.ir import Edit, Graph, Op, OpInstance, Program
from interlace.ir.copies import job_bounds
from interlace.ir.edit import with_items
from interlace.ir.equivalent_ranks import groups_within_stage
from interlace.ir.kinds import COMBINE, SPLIT, is_comm, is_receive, is_send, stream_of
from interlace.ir.storage import storages_of
from interlace.ir.stream_waits import waited_for
from interlace.ir.target import GPU
from interlace.passes.base import Context, Pass, register
from interlace.scheduler.memory.live import in_order
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.lower import lower
from interlace.scheduler.simulate.simulator import Times, device_memory
from interlace.scheduler.whole_step.orders import merged

Variable = tuple[int, int]
"""A variable of the executor, by number, and its micro-batch."""


@register
class ReturnMemory(Pass, frozen=True, kw_only=True):
    """Reuse a block that another stream reads last in the order of its own stream, by adding a `share_data` there as its last reader.

    A block whose last reader is on another stream than its producer is not reused before the host sees that this reader has completed, so a
    host that runs ahead keeps allocating new memory. After a last reader on the producer's stream, which waits for the other one, the next
    operation issued there reuses the block.

    Contract: needs a schedule; keeps every value and the order of all op instances; adds `share_data` operations and, with `joins`, events.
    As far as the rank's simulated times hold, no stream waits longer than before, except with `at_end: on`. The peak of memory of
    operations that run one after the other does not rise, except with `at_peak`.

    Before / After, where the collective runs on a stream of its own and #8 is the first computation that waits for it:
        #6 %6 = pd_op.all_reduce(%5) stream mp          #6 %6 = pd_op.all_reduce(%5) stream mp
        #7 %7 = pd_op.matmul(%4, %1)                    #7 %7 = pd_op.matmul(%4, %1)
        #8 %8 = pd_op.add(%6, %2)                       #8 %8 = pd_op.add(%6, %2)
                                                        #20 %20 = pd_op.share_data(%5)

    Options:
        min_bytes: Smaller blocks are left to the allocator. When: 1 MiB suits GPUs; small models on a CPU need less. Details: planning
            tries the pass by itself on a GPU, and keeps it where it gives a faster step in the same memory.
        joins: Where the producer's stream does not wait for the last reader anyway, or so late that the peak would rise, add an event that
            makes it wait. When: off to see what blocks return without more events. Details: the wait is placed at the first operation that
            starts after the reader's simulated end, behind the stream's last operation if that ends after the reader, or right behind the
            reader if the stream has none left; after a send, at the first operation that has waited for a receive of the same micro-batch.
        at_end: Also let a stream wait at its end for a last reader that ends later: `on`, `off`, or `auto`, where a plan holds too much
            otherwise. When: on if memory is short, off if no stream may wait longer; the next step may start later.
        at_peak: Also give back blocks that would then raise the peak of operations that run one after the other. When: `capture` turns it
            on: in a captured step the host does not see that a reader has completed, so what is not given back is held.

    Source: rule 7 in docs/gpu-place.md, docs/decisions/029.
    """

    name = "return-memory"
    needs = frozenset({"scheduled"})
    gives = frozenset({"returned"})
    after = ("name-streams", "allocate-on-compute")
    decides = "memory-returned"
    in_baseline = False

    min_bytes: Annotated[int, msgspec.Meta(ge=0)] = 1 << 20
    joins: bool = True
    at_end: Literal["auto", "on", "off"] = "auto"
    at_peak: bool = False

    def run(self, program: Program, context: Context) -> Program:
        walk = _Walk(program, self.min_bytes, self._times(program, context), self.at_end == "on")
        found, left = walk.returns(self.at_peak)
        if left.num_blocks:
            context.declined("returned-by-the-host", blocks=left.num_blocks, size_bytes=left.size_bytes)
        by_value = grouped(((each.value, each.stream), each) for each in found)
        edit, graph, made = Edit(program), Graph(program), 0
        there = {item for job in program.jobs for item in job.items}
        added: dict[OpInstance, list[OpInstance]] = {}
        waits: list[tuple[OpInstance, OpInstance]] = []
        for (value, stream), returns in by_value.items():
            source, last = graph.producer_op(value), graph.ops[returns[0].last]
            assert source is not None
            places = {each.micro_batch: each.behind for each in returns}
            rest = _others(program, source, places)
            if (source.role == "optimize") != (last.role == "optimize"):
                context.declined("returned-by-the-optimizer", source)
                continue
            if rest and stream_of(source) != stream:
                context.declined("returned-in-order-elsewhere", source)
                continue
            if not there.issuperset(rest.values()):
                context.declined("not-in-all-micro-batches", source)
                continue
            reader = _reader(edit, graph, returns[0], last)
            for m, behind in {**places, **rest}.items():
                added.setdefault(behind, []).append((reader.id, m))
            waits += [((each.last, each.micro_batch), (reader.id, each.micro_batch)) for each in returns if each.joins]
            made += len(places)
        if not made:
            return program
        context.applied("memory-returned", blocks=made)
        if waits:
            context.applied("streams-joined", waits=len(waits))
        return msgspec.structs.replace(edit.build(), jobs=with_items(program.jobs, {}, added), events=merged(program.events, waits))

    def _times(self, program: Program, context: Context) -> Times | None:
        """Simulated times of op instances with peers that are always ready, to place joins where they cost no time; None if `joins` is
        off or the program has no jobs."""
        return device_memory(lower([program], context.cost, Options.of(GPU, peers_ready=True)))[0] if self.joins and program.jobs else None


def _others(program: Program, source: Op, places: Mapping[int, OpInstance]) -> dict[int, OpInstance]:
    """Where to put the reader in micro-batches that do not need it: right after the producer of what it reads, where it has no effect."""
    count = 1 if source.role == "optimize" else program.pipeline.num_micro_batches
    return {m: (source.id, m) for m in range(count) if m not in places}


def _reader(edit: Edit, graph: Graph, found: Return, last: Op) -> Op:
    kept = graph.values[found.value]
    priority = next((op.priority for op in graph.program.ops if op.stream == found.stream), 0)
    made = edit.reader(kept.id, kept.type, kept.storage, like=last, stream=found.stream, priority=priority)
    edit.after(found.last, [made])
    return made


class Return(NamedTuple):
    """A last reader to add, on the stream that allocated the block of a value.

    Attributes:
        value, micro_batch: The value to read, by id, and its micro-batch.
        stream: The stream to read it on.
        last: Id of the op that is the last reader so far.
        behind: The op instance on `stream` after which the new reader comes; it has waited for `last`, unless `joins`.
        joins: Whether the new reader itself must wait for `last`, by an event.
    """

    value: int
    micro_batch: int
    stream: str
    last: int
    behind: OpInstance
    joins: bool = False


class Left(NamedTuple):
    """Blocks of a step that get no reader."""

    num_blocks: int
    size_bytes: int


@dataclass(slots=True)
class _Use:
    """The last use of a variable so far: its index in the issue order, and the value used."""

    index: int
    value: int


class _Walk:
    """One pass over the issue order of a rank. A stream has waited for whatever produced the variables that it reads, within a job."""

    def __init__(self, program: Program, min_bytes: int, times: Times | None, at_end: bool) -> None:
        self.program, self.min_bytes, self.times, self.at_end, self.table = program, min_bytes, times, at_end, storages_of(program)
        self.items = [item for job in program.jobs for item in job.items]
        self.ops = {op.id: op for op in program.ops}
        self.streams = [stream_of(self.ops[op]) for op, _ in self.items]
        self.inside = groups_within_stage(program)

    def returns(self, at_peak: bool) -> tuple[list[Return], Left]:
        """The readers to add, and the blocks that get none. Blocks that would live the least longer go first, as long as the peak of memory
        of operations that run one after the other does not rise; with `at_peak` the others get a reader too."""
        home, last = self._uses()
        uses = [(home[variable], variable[1], use) for variable, use in last.items() if self.streams[use.index] != home[variable]]
        bounds, waited = job_bounds(self.program), waited_for(self.program)
        of_stream = grouped((name, k) for k, name in enumerate(self.streams))
        blocks = [(self._places(use, of_stream[own], bounds, waited), own, m, use) for own, m, use in uses]
        blocks.sort(key=lambda each: (each[0][0][0] - each[3].index if each[0] else 0, each[3].index))
        live = in_order(self.program).lives.pool("device").along(len(self.items))
        found, left, most = list[Return](), list[int](), int(live.max(initial=0))
        for places, own, m, use in blocks:
            size = self._bytes(use.value)
            spans = [(live[use.index + 1 : behind + 1], behind, joins) for behind, joins in places]
            fits = next((each for each in spans if int(each[0].max(initial=0)) + size <= most), spans[-1] if at_peak and spans else None)
            if fits is None:
                left.append(size)
                continue
            longer, behind, joins = fits
            longer += size
            found.append(Return(use.value, m, own, self.items[use.index][0], self.items[behind], joins))
        return found, Left(len(left), sum(left))

    def _places(self, use: _Use, mine: Sequence[int], bounds: Sequence[int], waited: Sequence[Mapping[str, int]]) -> list[tuple[int, bool]]:
        """Where a reader of a block may go, the better place first: behind the op instance with this index, and whether the reader itself
        must wait for the last use. `mine` has the indices of the stream's op instances, `bounds` those of jobs; `waited` is the result of
        `waited_for`."""
        other, end = self.streams[use.index], bounds[bisect_right(bounds, use.index)]
        at = bisect_right(mine, use.index)
        behind = next((k for k in _while_below(mine, at, end) if waited[k].get(other, -1) >= use.index), None)
        join = self._join(use, mine, waited)
        found = [] if behind is None else [(behind, False)]
        return found if join is None or (behind is not None and join >= behind) else [*found, (join, True)]

    def _join(self, use: _Use, mine: Sequence[int], waited: Sequence[Mapping[str, int]]) -> int | None:
        """Index of the op instance after which a stream can wait for a last use at no cost; None if there is none. `mine` has the indices
        of the stream's op instances, `waited` the result of `waited_for`."""
        if self.times is None:
            return None
        op, m = self.ops[self.items[use.index][0]], self.items[use.index][1]
        at = bisect_right(mine, use.index)
        if is_send(op):  # once something comes back for the micro-batch, its activation must have arrived
            later = (k for k in mine[at:] if any(index > use.index and self._receives(index, m) for index in waited[k].values()))
            return next(later, None)
        if is_comm(op) and op.group not in self.inside:  # when it ends depends on another stage
            return None
        if at == len(mine):
            return use.index
        after = bisect_left(mine, self.times.end[use.index], at, key=self.times.start.__getitem__)  # a stream's operations start in order
        if after == len(mine):
            return mine[-1] if self.at_end or self.times.end[mine[-1]] >= self.times.end[use.index] else None
        return mine[after - 1] if after > at else use.index

    def _receives(self, index: int, micro_batch: int) -> bool:
        op, m = self.items[index]
        return m == micro_batch and is_receive(self.ops[op])

    def _bytes(self, value: int) -> int:
        return self.table.of(value)[0].size_bytes

    def _uses(self) -> tuple[dict[Variable, str], dict[Variable, _Use]]:
        """The stream that allocates each variable's block, and the variable's last use, for the blocks that this pass may return.

        A variable is left out of the last uses if its block is overwritten later under the name of another variable.
        """
        known = {op.id: self._accesses(op) for op in self.program.ops}
        producer: dict[tuple[int, int], str] = {}
        written: dict[tuple[int, int], int] = {}
        home, last, storage_of = dict[Variable, str](), dict[Variable, _Use](), dict[Variable, int]()
        for k, (op_id, m) in enumerate(self.items):
            writes, parts = known[op_id]
            written.update(((number, m), k) for number in writes)
            for storage, variable, value, makes, has_value in parts:
                if makes:
                    producer.setdefault((storage, m), self.streams[k])
                if has_value and (stream := producer.get((storage, m))) is not None:
                    key = variable, m
                    home[key], last[key], storage_of[key] = stream, _Use(k, value), storage
        return home, {each: use for each, use in last.items() if written.get((storage_of[each], each[1]), -1) <= use.index}

    def _accesses(self, op: Op) -> tuple[list[int], list[tuple[int, int, int, bool, bool]]]:
        """The storages that an operation writes; and those that it reads or makes, of the blocks that this pass may return, each with the
        variable, the value, whether the operation makes it, and whether the value is one of the program's."""
        if op.name in (COMBINE, SPLIT):
            return [], []
        table, parts = self.table, list[tuple[int, int, int, bool, bool]]()
        for value in (*table.reads(op), *op.results):
            for part in table.parts[value]:
                storage = table.storages[part.storage]
                if storage.persistable or storage.kept or storage.memory != "device" or storage.size_bytes < self.min_bytes:
                    continue
                parts.append((part.storage, part.variable, part.value, storage.producer == op.id, part.value in table.values))
        return [number for value in table.writes(op) for number in table.numbers(value)], parts


def _while_below(numbers: Sequence[int], first: int, end: int) -> Iterator[int]:
    for at in range(first, len(numbers)):
        if numbers[at] >= end:
            return
        yield numbers[at]
