"""A scheduled `Program` -> Paddle job programs and the executor's plan.

Each job becomes a Paddle program of its own, with its operations in plan order. All jobs run in one scope: a value that leaves its
job is named `<value>@<micro-batch>`, so that one program can contain operations of several micro-batches. A job at the start of the
step cuts the fed batch into micro-batches, and one at the end collects losses, and whatever else the user fetches, for Paddle.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import paddle
from paddle.base import core
from paddle.base.libpaddle import pir

from interlace.bridge.capture import Captured, operand_sources
from interlace.bridge.host_state import names_on_host
from interlace.bridge.newops import BUILDERS
from interlace.bridge.targets import Device
from interlace.bridge.targets.base import PINNED_PREFIX
from interlace.errors import PlanError
from interlace.grouping import grouped
from interlace.ir import ABSENT, Event, Graph, Job, Op, OpInstance, Program, describe
from interlace.ir.copies import fills_memory, omitted_copies, only_takes_memory
from interlace.ir.kinds import COMBINE, KEYWORD, MEMORY, SHADOW_OUTPUT, is_comm, is_p2p, stream_of, takes_events
from interlace.ir.storage import FETCH, collect_items, feed_items
from interlace.ir.waits import is_computed
from interlace.passes.streams import AutoParallelStreamType
from interlace.scheduler.hazards.flat_plan import flatten, is_used_beside, writers_of

FEED_JOB, STACK_JOB, COLLECT_JOB = "interlace_feed", "interlace_stack", "interlace_collect"
STACKED = "interlace_stacked"
"""Name of the event after outputs are stacked, and prefix of the names of stacked variables and of events after their parts."""
ROLE_NUMBER = {"forward": 0, "backward": 1, "optimize": 2}
CLONE = pir.CloneOptions(True, True, True)


@dataclass(slots=True)
class JobProgram:
    """One lowered job.

    Attributes:
        reads: Names of variables that it reads from other jobs or the feed.
        names: Names of all its variables in the scope.
    """

    name: str
    program: Any
    reads: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Lowered:
    """The lowered plan. Paddle's engine takes it in place of a `core.Plan`, so it has the methods of that which engine and executor call.

    Attributes:
        outputs: Output name -> value of the collecting program, for fetching.
        fetched: Id of a fetched value -> value of the collecting program.
        fed: Name of an input -> shape of its whole batch, with -1 for unknown dimensions.
        has_p2p: Whether there are sends and receives, which fix the sizes of values.
        on_host: Names of variables that are in host memory between steps.
        is_read_early: Whether outputs of issued steps are read as soon as they are written, so that the host prepares the next step while
            the device finishes this one.
    """

    jobs: list[JobProgram]
    outputs: dict[str, Any]
    fetched: dict[int, Any]
    plan: Any
    fed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    num_micro_batches: int = 1
    has_p2p: bool = False
    on_host: frozenset[str] = frozenset()
    is_read_early: bool = False
    interlace_prepared: bool = True

    def ir_program(self, job_type: str) -> Any:
        """The program of a job. For `forward`, or the last chunk's forward, where the engine looks for the loss: the collecting job's."""
        types = {job.name: job.program for job in self.jobs}
        return types.get(job_type, types.get(COLLECT_JOB, self.jobs[-1].program))

    def job_types(self) -> list[str]:
        """Names of all jobs."""
        return list(self.plan.job_types())

    def job_list(self) -> list[Any]:
        """Jobs in order."""
        return list(self.plan.job_list())

    def micro_batch_num(self) -> int:
        """Always 1: names contain the micro-batch, so the executor needs only one scope."""
        return 1


def lower(captured: Captured, program: Program, device: Device, is_graph: bool = False) -> Lowered:
    """Build the job programs of a scheduled program. Each operation has a captured one as `origin`, or is a new one known to `newops`.
    Values to fetch besides the program's named outputs must be outputs too (`passes.insert_events.fetching`).

    With `is_graph`, steps are captured: outputs are not fetched but copied to variables of the same names in host memory, in the global
    scope. Raises PlanError, with the operation and the job, if something in the plan cannot be built.
    """
    with _short_stacks():
        return _Lowering(captured, program, device, is_graph).run()


_ONE_AT_A_TIME = threading.RLock()
"""Paddle's insertion point, and the function patched below, are global to the process."""


@contextmanager
def _short_stacks() -> Iterator[None]:
    """Shorten the Python stacks that Paddle records on every operation to their last frame, in this thread only.

    Recording them in full would take half of the lowering's time, and no flag of Paddle turns that off.
    """
    with _ONE_AT_A_TIME:
        whole, lowering = traceback.extract_stack, threading.get_ident()

        def last_frame(frame: FrameType | None = None, limit: int | None = None) -> traceback.StackSummary:
            frame = sys._getframe(1) if frame is None else frame
            return whole(frame, 1 if threading.get_ident() == lowering else limit)

        traceback.extract_stack = last_frame  # type: ignore[assignment]
        try:
            yield
        finally:
            traceback.extract_stack = whole


class _Lowering:
    def __init__(self, captured: Captured, program: Program, device: Device, is_graph: bool) -> None:
        self.captured, self.program, self.device, self.is_graph = captured, program, device, is_graph
        self.graph = Graph(program)
        self.count, self.has_p2p = program.pipeline.num_micro_batches, any(is_p2p(op) for op in program.ops)
        self.omitted = omitted_copies(program)
        self.job_of = {item: job.name for job in program.jobs for item in job.items}
        self.names = Names(self.graph)
        self.kinds: dict[int, Any] = {}
        self.fed: dict[str, tuple[int, ...]] = {}
        self.crossing = self._crossing()
        self.cleared = self.graph.storages.cleared_buffers()
        self.events = _EventTable(() if device.target.serial else program.events, feed_items(program))
        self.collected = collect_items(program)
        self.writers = self._writers_of_outputs() if is_graph or device.target.host_runs_ahead else None
        # Outputs that are collected early are read at the end, beside computation: their stacks, or each output by itself.
        is_stacked = len(self.collected) > len({op_id for op_id, _ in self.collected})
        self.stacks_are_read = self.writers is not None and not is_graph and is_stacked
        self.each_is_read = self.writers is not None and not is_graph and not is_stacked
        if self.each_is_read and self._awaits_others():
            self.writers, self.each_is_read = None, False
        for writer, item in self._last_writers():
            if self.each_is_read or stream_of(self.graph.ops[writer[0]]):
                self.events.order(writer, item)

    def run(self) -> Lowered:
        found = [self._feed_job(), *(self._job(job) for job in self.program.jobs)]
        early, late, outputs, fetched = self._collect_jobs()
        found.insert(1 + self._last_output(), early)
        found.append(late)
        jobs = [job for job in found if job is not None]
        for job in jobs:
            self.device.finish(job.program, job.name)
        is_read_early = (self.stacks_are_read or self.each_is_read) and self._last_output() < len(self.program.jobs)
        plan, on_host = make_plan(jobs, self.device), names_on_host(self.program)
        return Lowered(jobs, outputs, fetched, plan, self.fed, self.count, self.has_p2p, on_host, is_read_early)

    def resolve(self, value: int, micro_batch: int) -> int:
        """The value itself; for the result of a copy that no job runs for this micro-batch, the value that it would copy."""
        op = self.graph.producer_op(value)
        while op is not None and op.operands and (op.id, micro_batch) in self.omitted:
            value = op.operands[0]
            op = self.graph.producer_op(value)
        return value

    def _crossing(self) -> set[str]:
        """Names of values that are fetched, or read in a job other than their producer's."""
        found = {self.names.of(op.operands[0], m) for op in self.program.ops if op.name == SHADOW_OUTPUT for m in range(self.count)}
        for item, job in self.job_of.items():
            op = self.graph.ops[item[0]]
            for value in op.operands:
                if value != ABSENT:
                    found.update(self._names_from_elsewhere(value, item[1], job))
        return found

    def _names_from_elsewhere(self, value: int, micro_batch: int, job: str) -> Iterable[str]:
        value = self.resolve(value, micro_batch)
        producer = self.graph.producer_op(value)
        if producer is None or self.job_of.get((producer.id, micro_batch), "") == job:
            return
        if producer.name == COMBINE:
            for element in producer.operands:
                yield from self._names_from_elsewhere(element, micro_batch, job)
        else:
            yield self.names.of(value, micro_batch)

    def _job(self, job: Job) -> JobProgram:
        build = _JobBuilder(self, job)
        for op_id, micro_batch in job.items:
            build.add(self.graph.ops[op_id], micro_batch)
        return build.done()

    def _feed_job(self) -> JobProgram | None:
        items = feed_items(self.program)
        if not items:
            return None
        made = JobProgram(FEED_JOB, paddle.static.Program())
        with paddle.static.program_guard(made.program):
            for op_id in dict.fromkeys(op_id for op_id, _ in items):
                last = self._cut(self.graph.ops[op_id], made)
            self.events.mark(items[-1], last)
        return made

    def _cut(self, op: Op, made: JobProgram) -> Any:
        """Cut an input by micro-batch; returns the last operation that does."""
        value = self.graph.values[op.results[0]]
        source = self.captured.source_ops[op.origin].result(0)
        shape = [size if size < 0 or k else size * self.count for k, size in enumerate(value.shape)]
        self.fed[value.name] = tuple(shape)
        fed = paddle._C_ops.data(value.name, shape, source.dtype, self.device.undefined())
        if not value.shape or self.count == 1:
            parts = [paddle._C_ops.share_data(fed) for _ in range(self.count)]
            last = parts[-1].get_defining_op()
        else:
            parts = paddle._C_ops.split_with_num(fed, self.count, 0)
            last = parts[0].get_defining_op().operand_source(0).get_defining_op()  # the split: taking its vector apart launches nothing
        for micro_batch, part in enumerate(parts):
            paddle._C_ops.set_persistable_value(part, self.names.of(value.id, micro_batch))
            made.names.add(self.names.of(value.id, micro_batch))
        made.names.add(value.name)
        made.reads.add(value.name)
        return last

    def _writers_of_outputs(self) -> dict[OpInstance, list[OpInstance]] | None:
        """The op instances that write each output, if all outputs may be collected right after their writers; None if they must be
        collected at the end of the step.

        Plans are proved with outputs that the compute stream reads at the end of the step. Reading them earlier is safe: the compute stream
        waits for an output's last writer, after which nothing overwrites the output; and if no other stream uses the output's memory, none
        does when that is freed. With stages such a wait could close a cycle: a rank that waits for another one's broadcast would not have
        posted yet what that one waits for. Without stages all ranks issue the same. Other values that the user fetches may be large, and
        would be held twice throughout backward.
        """
        has_stages = self.program.pipeline.num_stages > 1 or self.has_p2p
        flat, found = flatten(self.program), {}
        for item in self.collected:
            writers = writers_of(flat, item)
            if writers is None or not all(each in self.job_of for each in writers):
                return None
            ops = [self.graph.ops[op_id] for op_id, _ in writers]
            if not all(map(takes_events, ops)) or (has_stages and any(map(stream_of, ops))):
                return None
            found[item] = writers
        outputs = {item[0]: item for item in found}
        return None if any(FETCH in self.graph.ops[each].attrs or is_used_beside(flat, outputs[each]) for each in outputs) else found

    def _awaits_others(self) -> bool:
        """Whether in the plan some output waits for more than its writers: for what must precede the next step's computation. Then the
        compute stream must do the waiting."""
        written = {item: {self.events.records.get(each) for each in writers} for item, writers in (self.writers or {}).items()}
        return any(not written[item].issuperset(self.events.waits.get(item, ())) for item in written)

    def _last_writers(self) -> Iterator[tuple[OpInstance, OpInstance]]:
        """Pairs of a writer and an output that it writes, for outputs that are collected early: for each writing operation only its last
        instance, as all are on one stream."""
        place = {item: at for at, item in enumerate(item for job in self.program.jobs for item in job.items)}
        written: dict[tuple[int, int], tuple[int, OpInstance, OpInstance]] = {}
        for item, writers in (self.writers or {}).items():
            for writer in writers:
                key = item[0], writer[0]
                written[key] = max(written.get(key, (-1, writer, item)), (place[writer], writer, item))
        for _, writer, item in written.values():
            yield writer, item

    def _collect_jobs(self) -> tuple[JobProgram | None, JobProgram | None, dict[str, Any], dict[int, Any]]:
        """The jobs that collect what the user may fetch, with one tensor for all micro-batches in order: the job after the last output, and
        the job at the end of the step, either of which may be None. Also the named outputs, and the other fetched values.

        Usually a single job stacks the values and hands them to Paddle: at the end of the step, or in captured steps after the last output.
        If the host runs ahead and outputs may be collected early, there are two: one stacks after the last job that computes an output, the
        other copies the stacks at the end, on the stream for waits of the host. The host then has the outputs as soon as they are computed,
        and prepares the next step while the device finishes this one. A single job cannot do this, because the `builtin.combine` before a
        stack always runs on the compute stream, at the end after the whole step. With one micro-batch nothing is stacked.
        """
        items = grouped((item[0], item) for item in self.collected)
        if not items:
            return None, None, {}, {}
        made, stacker = JobProgram(COLLECT_JOB, paddle.static.Program()), None
        block = made.program.global_block()
        stacks: dict[int, Any] = {}
        with paddle.static.program_guard(made.program):
            for op_id, instances in items.items():
                stacks[op_id] = self._stack(self.graph.ops[op_id].operands[0], instances, made, block)
                if self.is_graph:
                    stacks[op_id] = self.device.copy_result(stacks[op_id])
                    stacks[op_id].persistable = True
                if self.is_graph or self.each_is_read:
                    stacks[op_id].get_defining_op().set_execution_stream(AutoParallelStreamType.HOST_WAIT.value)
        if self.stacks_are_read:
            made.name, stacker = STACK_JOB, made
            made, stacks = self._fetch_job(made, stacks)
        outputs: dict[str, Any] = {}
        fetched: dict[int, Any] = {}
        with paddle.static.program_guard(made.program):
            for op_id, stacked in stacks.items():
                op = self.graph.ops[op_id]
                if FETCH in op.attrs:
                    fetched[op.operands[0]] = stacked
                    continue
                name = op.attrs["output_name"]
                outputs[name] = stacked
                paddle._C_ops.set_persistable_value(stacked, name)
                made.names.add(name)
        return (made, None, outputs, fetched) if self.is_graph else (stacker, made, outputs, fetched)

    def _fetch_job(self, stacker: JobProgram, stacks: Mapping[int, Any]) -> tuple[JobProgram, dict[int, Any]]:
        """A job that copies what `stacker` has stacked, on the stream for waits of the host, and its copies."""
        names = {op_id: f"{STACKED}_{op_id}" for op_id in stacks}
        made = JobProgram(COLLECT_JOB, paddle.static.Program(), reads=set(names.values()), names=set(names.values()))
        stacker.names.update(names.values())
        with paddle.static.program_guard(stacker.program):
            for op_id, stacked in stacks.items():
                paddle._C_ops.set_persistable_value(stacked, names[op_id])
        last = list(stacks.values())[-1].get_defining_op()
        last.set_bool_attr("force_record_event", True)
        last.set_str_attr("event_to_record", STACKED)
        copies, block = {}, made.program.global_block()
        with paddle.static.program_guard(made.program):
            for op_id, stacked in stacks.items():
                copies[op_id] = paddle._C_ops.assign(self._keyword(block, names[op_id], stacked.type(), persistable=False))
                copy = copies[op_id].get_defining_op()
                copy.set_execution_stream(AutoParallelStreamType.HOST_WAIT.value)
                copy.set_str_array_attr("events_to_wait", [STACKED])
        return made, copies

    def _last_output(self) -> int:
        """Number, from 1, of the last job that writes an output or that an output waits for; the number of jobs if outputs are collected at
        the end."""
        if self.writers is None:
            return len(self.program.jobs)
        awaited = {name for item in self.collected for name in self.events.waits.get(item, ())}
        given = {item for item, name in self.events.records.items() if name in awaited}
        given.update(item for writers in self.writers.values() for item in writers)
        return max((place for place, job in enumerate(self.program.jobs, 1) if not given.isdisjoint(job.items)), default=0)

    def _stack(self, value: int, items: Sequence[OpInstance], made: JobProgram, block: Any) -> Any:
        kind = self.type_of(value)
        parts = []
        for _, micro_batch in items:
            name = self.names.of(value, micro_batch)
            known = block.kwargs().get(name)
            parts.append(known if known is not None else self._keyword(block, name, kind, self.names.persistable(value)))
            made.reads.add(name)
            made.names.add(name)
        stacked = paddle._C_ops.stack(parts, 0) if len(parts) > 1 else paddle._C_ops.assign(parts[0])
        self.events.mark_waits(items, stacked.get_defining_op())
        return stacked

    def _keyword(self, block: Any, name: str, kind: Any, persistable: bool) -> Any:
        made = block.add_kwarg(name, kind)
        made.place_attr = self.device.place_attribute()
        made.persistable = persistable
        return made

    def type_of(self, value: int) -> Any:
        """Paddle's type of a value: that of the captured value, or as recorded when a job computed it."""
        if value not in self.kinds:
            producer = self.graph.producer_op(value)
            if producer is None or producer.origin < 0:
                raise PlanError(f"value %{value} is read before any job gives it; expected its producer in an earlier job")
            self.kinds[value] = self._source_value(producer, value).type()
        return self.kinds[value]

    def _source_value(self, producer: Op, value: int) -> Any:
        if producer.name == KEYWORD:
            return self.captured.source.global_block().kwargs()[self.graph.values[value].name]
        return self.captured.source_ops[producer.origin].result(producer.results.index(value))


class _JobBuilder:
    """Builds one job's program, operation by operation."""

    def __init__(self, lowering: _Lowering, job: Job) -> None:
        self.low, self.job = lowering, job
        self.made = JobProgram(job.name, paddle.static.Program())
        self.block = self.made.program.global_block()
        self.values: dict[OpInstance, Any] = {}
        self.given: dict[str, Any] = {}
        self.shared: list[Any] = []
        self.shapes: dict[tuple[int, ...], Any] = {}
        self.read = {(value, m) for op_id, m in job.items for value in lowering.graph.reads(lowering.graph.ops[op_id])}
        self.last_producer = self._last_producers()
        self.awaited = {item for _, item in job.host_waits}
        self.waits = dict(job.host_waits)
        self.watched: dict[OpInstance, Any] = {}

    def add(self, op: Op, micro_batch: int) -> None:
        """Append one operation."""
        paddle.pir.set_insertion_point_to_block_end(self.block)
        whole = op.name != COMBINE or (op.results[0], micro_batch) in self.read
        operands = [None if v == ABSENT else self._operand(v, micro_batch, whole and v in op.reads) for v in op.operands]
        paddle.pir.set_insertion_point_to_block_end(self.block)
        if fills_memory(op):
            del operands[1]
        results, built = self._clone(op, operands) if op.origin >= 0 else self._new(op, operands)
        self._mark(op, built, micro_batch)
        for value, result in zip(op.results, results, strict=True):
            self.values[value, micro_batch] = result
            self._leave(value, micro_batch, result)
            if (op.id, micro_batch) in self.awaited and is_computed(op, self.low.graph.values[value]):
                self._sync_host(op, (op.id, micro_batch), result)
        if fills_memory(op):
            self._write_into(op.operands[1], micro_batch, results[0])
        if (op.id, micro_batch) in self.waits:
            self._sync_host(op, self.waits[op.id, micro_batch])

    def _operand(self, value: int, micro_batch: int, contents: bool) -> Any:
        value = self.low.resolve(value, micro_batch)
        found = self.values.get((value, micro_batch))
        if found is not None:
            return found
        producer = self.low.graph.ops[self.low.graph.producer[value]]
        if producer.name == COMBINE:
            self.add(producer, micro_batch)
            return self.values[value, micro_batch]
        if self.low.graph.values[value].dtype == "vector":
            raise PlanError(
                f"job {self.job.name} reads the vector that {describe(producer)} gives in another job; "
                "a vector and its readers must share a job"
            )
        return self._outside(value, micro_batch, contents)

    def _outside(self, value: int, micro_batch: int, contents: bool) -> Any:
        name = self.low.names.of(value, micro_batch)
        if contents:
            self.made.reads.add(name)
        self.made.names.add(name)
        if name not in self.given:
            self.given[name] = self.low._keyword(self.block, name, self.low.type_of(value), self.low.names.persistable(value))
        return self.given[name]

    def _clone(self, op: Op, operands: list[Any]) -> tuple[list[Any], Any]:
        source = self.low.captured.source_ops[op.origin]
        mapping = pir.IrMapping()
        mixed: list[tuple[int, Any]] = []
        for k, (old, new) in enumerate(zip(operand_sources(source), operands, strict=True)):
            if new is None:
                continue
            if not mapping.has(old):
                mapping.add(old, new)
            elif not mapping.look_up(old).is_same(new):
                mixed.append((k, new))
        built = source.clone(mapping, CLONE)
        for k, new in mixed:
            built.operand(k).set_source(new)
        return list(built.results()), built

    def _new(self, op: Op, operands: list[Any]) -> tuple[list[Any], Any]:
        if op.name == MEMORY:
            operands = [self._shape(op)]
        build = BUILDERS.get(op.name)
        if build is None:
            raise PlanError(f"job {self.job.name}: {describe(op)} is new and the lowering cannot build it; it can build {sorted(BUILDERS)}")
        made = build(op, operands, self.low.device)
        results = list(made) if isinstance(made, tuple) else [made]
        self.low.kinds.update((value, result.type()) for value, result in zip(op.results, results, strict=True))
        return results, results[-1].get_defining_op()

    def _shape(self, op: Op) -> Any:
        """The shape of memory that an operation takes: a constant on the host, one for each shape of the job."""
        shape = tuple(op.attrs["shape"])
        if shape not in self.shapes:
            self.shapes[shape] = paddle._C_ops.full_int_array(op.attrs["shape"], paddle.int64, paddle.CPUPlace())
            self.shapes[shape].get_defining_op().op_role = ROLE_NUMBER[op.role]
        return self.shapes[shape]

    def _mark(self, op: Op, built: Any, micro_batch: int) -> None:
        low = self.low
        if op.origin < 0:
            built.op_role = ROLE_NUMBER[op.role]
            built.set_int_attr("chunk_id", op.chunk if low.program.pipeline.num_chunks > 1 else -1)
        if op.stream:
            built.set_execution_stream(op.stream)
        if op.priority:
            built.set_int_attr("stream_priority", op.priority)
        if low.device.labels_all or is_comm(op):
            low.device.label(built, f"micro-batch {micro_batch}, op {describe(op)}")
        low.events.mark((op.id, micro_batch), built)

    def _leave(self, value: int, micro_batch: int, result: Any) -> None:
        """Name a value that other jobs read; if several values share a variable, only the last one in this job is named.

        On serial targets the other values are read once more at the end of the job. The executor's in-place pass, which is off on other
        targets, looks at each value alone: it would let the last reader of an earlier value overwrite the shared variable, or put its
        result into a part of a fused buffer that is cleared before the result is read. With streams, this additional reader would replace
        the plan's last reader, for which garbage collection waits.
        """
        name = self.low.names.of(value, micro_batch)
        if self.low.cleared.intersection(self.low.graph.storages.numbers(value)):
            self.shared.append(result)
        if name not in self.low.crossing or name in self.given:
            return
        if self.last_producer[name] != (value, micro_batch):
            self.shared.append(result)
            return
        self.low.kinds.setdefault(value, result.type())
        paddle.pir.set_insertion_point_to_block_end(self.block)
        paddle._C_ops.set_persistable_value(result, name)
        self.made.names.add(name)

    def _write_into(self, target: int, micro_batch: int, result: Any) -> None:
        """Give the result of a copy or a collective the variable that it writes into, so that the executor's kernel finds memory there and
        takes none. For a block argument of the job the executor then keeps that memory."""
        name = self.low.names.of(target, micro_batch)
        paddle.pir.set_insertion_point_to_block_end(self.block)
        producer = self.low.graph.producer_op(target)
        if name in self.given:
            result.persistable = True
        elif producer is not None and only_takes_memory(producer):
            paddle._C_ops.set_persistable_value(self.values[target, micro_batch], name)
            self.made.names.add(name)
        else:
            raise PlanError(f"job {self.job.name}: {name} is filled after the job computed it; expected memory that was only taken")
        paddle._C_ops.set_persistable_value(result, name)

    def done(self) -> JobProgram:
        paddle.pir.set_insertion_point_to_block_end(self.block)
        for result in self.shared if self.low.device.target.serial else ():
            paddle._C_ops.share_data(result)
        return self.made

    def _sync_host(self, op: Op, awaited: OpInstance, result: Any = None) -> None:
        """With a result, prepare it for a later wait of the host; without, make the host wait for what was prepared."""
        paddle.pir.set_insertion_point_to_block_end(self.block)
        first = len(self.block.ops)
        if result is None:
            self.low.device.wait_for(self.watched[awaited])
        elif awaited not in self.watched:
            self.watched[awaited] = self.low.device.watch(result)
        for built in self.block.ops[first:]:
            built.op_role = ROLE_NUMBER[op.role]

    def _last_producers(self) -> dict[str, OpInstance]:
        low = self.low
        given = ((value, m) for op_id, m in self.job.items for value in low.graph.ops[op_id].results)
        return {low.names.of(value, m): (value, m) for value, m in given}


class Names:
    """Names in the executor's scope. Values of one variable (in-place chains) share a name; each micro-batch has its own names."""

    def __init__(self, graph: Graph) -> None:
        self.values, self.storages = graph.values, graph.storages
        self.output = {
            self.storages.variable(op.operands[0]): op.attrs["output_name"]
            for op in graph.program.ops
            if op.name == SHADOW_OUTPUT and FETCH not in op.attrs
        }

    def persistable(self, value: int) -> bool:
        """Whether a value's variable outlives the step. Paddle marks only the variable itself, not results that are written into it."""
        return self.values[self.storages.variable(value)].persistable

    def of(self, value: int, micro_batch: int) -> str:
        """Name of a value's variable for a micro-batch."""
        variable = self.storages.variable(value)
        kept = self.values[variable]
        if kept.persistable and kept.name:  # without a name, Paddle only protects a result from garbage collection
            return kept.name
        prefix = PINNED_PREFIX if self.values[value].memory == "pinned" else "v"
        base = self.output.get(variable) or kept.name or f"{prefix}{variable}"
        return base if self.storages.is_once(value) else f"{base}@{micro_batch}"


class _EventTable:
    """The events that each op instance records and waits for. The first job, which cuts all inputs, records one event for all of them."""

    def __init__(self, events: Sequence[Event], fed: Sequence[OpInstance]) -> None:
        self.records: dict[OpInstance, str] = {}
        self.waits: dict[OpInstance, list[str]] = {}
        for event in events:
            name = self.records.setdefault(fed[-1] if event.record in fed else event.record, event.name)
            for item in event.waits:
                self.waits.setdefault(item, []).append(name)

    def order(self, first: OpInstance, second: OpInstance) -> None:
        """Make `second` wait for `first`."""
        names = self.waits.setdefault(second, [])
        name = self.records.setdefault(first, f"{STACKED}_{first[0]}_{first[1]}")
        if name not in names:
            names.append(name)

    def mark(self, item: OpInstance, built: Any) -> None:
        """Set an op instance's events on its Paddle operation."""
        if item in self.records:
            built.set_bool_attr("force_record_event", True)
            built.set_str_attr("event_to_record", self.records[item])
        self.mark_waits([item], built)

    def mark_waits(self, items: Sequence[OpInstance], built: Any) -> None:
        """Make an operation wait for all events for which any of these op instances wait."""
        names = list(dict.fromkeys(name for item in items for name in self.waits.get(item, ())))
        if names:
            built.set_str_array_attr("events_to_wait", names)


def make_plan(jobs: Sequence[JobProgram], device: Device) -> Any:
    """The executor's plan."""
    made = []
    for job, names in zip(jobs, kept_names(jobs, device), strict=True):
        item = core.Job(job.name)
        item.set_micro_batch_id(0)
        item.set_skip_gc_vars(names)
        made.append(item)
    return core.Plan(made, {job.name: job.program for job in jobs})


def kept_names(jobs: Sequence[JobProgram], device: Device) -> list[set[str]]:
    """For each job, the names that the executor must not garbage-collect: those that a later job reads, and those never collected."""
    made: list[set[str]] = []
    later: set[str] = set()
    for job in reversed(jobs):
        made.append({name for name in job.names if name in later or device.never_collected(name)})
        later |= job.reads
    return made[::-1]
