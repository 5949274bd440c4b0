"""Memory that Paddle's executor uses or saves beyond what the program specifies; benchmarks/memory.py compares it with measurements.

The executor's in-place pass lets an op overwrite an operand that no later op reads, some kernels allocate buffers of their own,
and the fed batch stays allocated. In Paddle's own jobs, two kinds of tensors are never collected: a tensor of a vector if another job
reads only the vector's shape, and a received tensor if the next job reads it and a later one reads its shape. In jobs of our lowering both
are collected after the last reader of their contents.

Rules of the in-place pass: paddle/fluid/pir/transforms/general/inplace_pass.cc.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from interlace.grouping import grouped
from interlace.ir import ABSENT, Graph, Op, Program, Value
from interlace.ir.copies import Variant, variants
from interlace.ir.kinds import COMBINE, NO_KERNEL, SHADOW_OUTPUT, SPLIT, is_comm
from interlace.ir.operators import names
from interlace.ir.per_ops import once_per_items
from interlace.ir.storage import feed_items
from interlace.ir.target import Target

Pairs = tuple[tuple[int, int], ...]
_FIRST, _SECOND, _THIRD = (((0, at),) for at in range(3))
REUSING: Mapping[str, Pairs] = {
    **dict.fromkeys(
        names("""
        scale softmax add subtract multiply divide cast relu exp log sqrt rsqrt square cos sin tanh sigmoid silu clip pow triu tril
        reshape squeeze unsqueeze flatten cross_entropy_with_softmax logical_and logical_not logical_or
        """),
        _FIRST,
    ),
    **dict.fromkeys(
        names("""
        reshape_grad squeeze_grad unsqueeze_grad flatten_grad cross_entropy_with_softmax_grad relu_grad exp_grad log_grad sqrt_grad
        rsqrt_grad square_grad cos_grad sin_grad tanh_grad sigmoid_grad
        """),
        _SECOND,
    ),
    "silu_grad": _THIRD,
}
"""Kind -> `(result, operand)` positions that share memory in its in-place form (from Paddle 3.3's op definitions). `transpose` is not
listed because the pass skips it; `add_grad` and `subtract_grad` are not because it skips them on the CPU."""


@dataclass(frozen=True, slots=True)
class ExecutorVariant:
    """The program as the executor runs it for some of the micro-batches.

    Attributes:
        program: The program, in which in-place results share their operand's storage, and tensors that are never collected are
            persistable.
        micro_batches: The micro-batches that run this variant.
        absent: Ids of its copies that are skipped.
        late: Ids of ops whose result is allocated by its first reader.
        workspace: Op id -> bytes that it allocates while it runs.
        lasting_bytes: Bytes per micro-batch of the tensors that are never collected.
    """

    program: Program
    micro_batches: list[int]
    absent: frozenset[int] = frozenset()
    late: frozenset[int] = frozenset()
    workspace: Mapping[int, int] = field(default_factory=dict)
    lasting_bytes: int = 0


def executor_variants(program: Program, target: Target) -> list[ExecutorVariant]:
    """The variants of a scheduled program that the target's executor runs for its micro-batches; cost O(micro-batches x ops)."""
    if target.runs_as_written:
        return [ExecutorVariant(program, variant.micro_batches, variant.absent) for variant in variants(program)]
    known = _known_variants(program)
    rules = (target.in_place_pass, target.late_results, target.keeps_shapes, *target.workspace.items())
    if rules not in known:
        issued: dict[int, dict[int, tuple[int, int]]] = {}
        items = ((number, item) for number, job in enumerate(program.jobs) for item in job.items)
        for index, (job, (op_id, micro_batch)) in enumerate(items):
            issued.setdefault(micro_batch, {})[op_id] = (job, index)
        known[rules] = [each for variant in variants(program) for each in _variants_of(variant, issued, target)]
    return known[rules]


_known_variants: Callable[[Program], dict[tuple[Any, ...], list[ExecutorVariant]]] = once_per_items(lambda program: {})
"""Variants by the rules of the target that determine them."""


def feed_bytes(program: Program, target: Target) -> int:
    """Bytes of the copies of the fed batch that stay live, apart from the inputs of each micro-batch.

    A step with a single micro-batch uses one of these copies as its input, which does not count here.
    """
    if not target.feed_copies:
        return 0
    graph = Graph(program)
    fed = [graph.values[value] for op_id, _ in feed_items(program) for value in graph.ops[op_id].results]
    copies = target.feed_copies - (1 if program.pipeline.num_micro_batches == 1 else 0)
    return max(0, copies) * sum(max(0, value.size_bytes) for value in fed)


def _variants_of(variant: Variant, issued: Mapping[int, dict[int, tuple[int, int]]], target: Target) -> list[ExecutorVariant]:
    graph = Graph(variant.program)
    alike: dict[tuple[frozenset[int], frozenset[int], frozenset[int]], list[int]] = {}
    runs = grouped((_shape(issued.get(micro_batch, {})), micro_batch) for micro_batch in variant.micro_batches)
    for shape, members in runs.items():
        run = _Run(graph, {op_id: (job, index) for index, (op_id, job) in enumerate(shape)})
        lasting = run.lasting() if target.keeps_shapes else frozenset()
        chosen = run.in_place(lasting) if target.in_place_pass else frozenset()
        late = run.late() if target.late_results else frozenset()
        alike.setdefault((chosen, lasting, late), []).extend(members)
    workspace = {op.id: size for op in variant.program.ops if (size := _workspace(graph, op, target))}
    return [
        ExecutorVariant(
            _rewritten(graph, chosen, lasting),
            sorted(members),
            frozenset(),
            late,
            workspace,
            sum(max(0, graph.values[home].size_bytes) for home in lasting),
        )
        for (chosen, lasting, late), members in alike.items()
    ]


def _shape(step: Mapping[int, tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The ops of a micro-batch in issue order, each with its job. Jobs are numbered among those of the micro-batch and the step's first
    job, so that micro-batches that run in the same way have equal shapes."""
    number = {job: k for k, job in enumerate(sorted({0, *(job for job, _ in step.values())}))}
    return tuple((op_id, number[job]) for op_id, (job, _) in step.items())


def _workspace(graph: Graph, op: Op, target: Target) -> int:
    if target.late_results and is_comm(op) and op.inplace:
        return max(0, graph.values[op.results[0]].size_bytes)
    times = target.workspace.get(op.kind, 0)
    return times * max(0, graph.values[op.operands[0]].size_bytes) if times else 0


def _rewritten(graph: Graph, chosen: frozenset[int], lasting: frozenset[int]) -> Program:
    """The program with the results of the chosen ops in their operands' storages."""
    home: dict[int, int] = {}
    for op in graph.program.ops:
        for result, operand in REUSING[op.kind] if op.id in chosen else ():
            old, new = (graph.values[v].storage for v in (op.results[result], op.operands[operand]))
            if old not in lasting:
                home[old] = home.get(new, new)

    def moved(value: Value) -> Value:
        if value.storage in lasting:
            return msgspec.structs.replace(value, persistable=True)
        return msgspec.structs.replace(value, storage=home[value.storage]) if value.storage in home else value

    return graph.program.with_ops(graph.program.ops, [moved(v) for v in graph.program.values])


class _Run:
    """The ops of one micro-batch in the jobs of the plan; `step` maps an op id to `(job, index in the issue order)`."""

    def __init__(self, graph: Graph, step: Mapping[int, tuple[int, int]]) -> None:
        self.graph, self.step = graph, step
        self.ops = sorted((op for op in graph.program.ops if op.id in step), key=lambda op: step[op.id][1])
        self.crossing = {v for op in graph.program.ops if op.name == SHADOW_OUTPUT for v in op.operands}
        self.elements: set[int] = set()
        self.shape_job: dict[int, int] = {}
        self.content_job: dict[int, int] = {}
        self.last: dict[int, int] = {}
        for op in self.ops:
            for value in dict.fromkeys(op.operands):
                if value != ABSENT:
                    self._note(op, value, value not in op.reads)

    def lasting(self) -> frozenset[int]:
        """Storages that are never collected, as the last job that uses them is later than their producer's and reads only their shape. For
        tensors other than those of a vector, a job between these two must also read the contents."""
        found = [v for v, job in self.shape_job.items() if job > max(self.content_job.get(v, -1), self._job_of_producer(v))]
        last = [v for v in found if v in self.elements or self.content_job.get(v, -1) > self._job_of_producer(v)]
        return frozenset(self.graph.values[v].storage for v in last if not self.graph.values[v].persistable)

    def late(self) -> frozenset[int]:
        """Ids of communications whose result is read only in its own job, or in other jobs only after another op has overwritten it."""
        over = {op.operands[operand] for op in self.ops for _, operand in op.inplace}
        found = [op for op in self.ops if is_comm(op) and op.results and not op.inplace]
        return frozenset(op.id for op in found if op.results[0] not in self.crossing or op.results[0] in over)

    def in_place(self, lasting: frozenset[int]) -> frozenset[int]:
        """Ids of ops that the in-place pass changes; its rules are applied in issue order."""
        before: dict[int, int] = {}
        chosen = set()
        for op in self.ops:
            pairs = op.inplace or self._pairs(op, before, lasting)
            if pairs and not op.inplace:
                chosen.add(op.id)
            before.update((op.results[result], op.operands[operand]) for result, operand in pairs)
        return frozenset(chosen)

    def _note(self, op: Op, value: int, shape_only: bool) -> None:
        job, index = self.step[op.id]
        producer = self.graph.producer_op(value)
        for element in producer.operands if producer is not None and producer.name == COMBINE else ():
            if element != ABSENT:
                self.elements.add(element)
                (self.shape_job if shape_only else self.content_job)[element] = job
                self.crossing.update((element,) if self._leaves(op, element) else ())
        if op.name == COMBINE:
            self.last[value] = index
            return
        self.crossing.update((value,) if self._leaves(op, value) else ())
        if shape_only:
            self.shape_job[value] = job
        else:
            self.last[value] = index
            self.content_job[value] = job

    def _job_of_producer(self, value: int) -> int:
        return self.step.get(self.graph.producer.get(value, ABSENT), (0, 0))[0]

    def _leaves(self, op: Op, value: int) -> bool:
        """Whether an op is in a different job than the producer of a value."""
        producer = self.graph.producer.get(value)
        return producer is not None and producer in self.step and self.step[producer][0] != self.step[op.id][0]

    def _pairs(self, op: Op, before: Mapping[int, int], lasting: frozenset[int]) -> Pairs:
        pairs = REUSING.get(op.kind, ())
        return pairs if all(self._may(op, result, operand, before) for result, operand in pairs) else ()

    def _may(self, op: Op, result: int, operand: int, before: Mapping[int, int]) -> bool:
        if operand >= len(op.operands) or op.operands[operand] == ABSENT:
            return False
        old, new = self.graph.values[op.operands[operand]], self.graph.values[op.results[result]]
        producer = self.graph.producer_op(old.id)
        if producer is None or producer.id not in self.step or producer.name in NO_KERNEL - {SPLIT} or old.id in self.crossing:
            return False
        alike = old.dtype == new.dtype and old.size_bytes == new.size_bytes and not old.persistable and not new.persistable
        return alike and all(self.last.get(v, -1) <= self.step[op.id][1] for v in _chain(old.id, before))


def _chain(value: int, before: Mapping[int, int]) -> Iterable[int]:
    """A value and, in turn, the values that it overwrote."""
    while True:
        yield value
        if value not in before:
            return
        value = before[value]
