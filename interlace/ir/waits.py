"""Operations that the host can wait for inside a job (`Job.host_waits`): computation on the compute stream."""

from __future__ import annotations

from collections.abc import Container, Mapping

from interlace.ir.kinds import NO_KERNEL, stream_of
from interlace.ir.per_ops import once_per_ops
from interlace.ir.program import Job, Op, OpInstance, Program, Value


def is_computed(op: Op, value: Value) -> bool:
    """Whether a result exists only once the compute stream has computed it (constants and shapes may be computed on the host)."""
    on_device = value.memory == "device" and value.dtype not in ("vector", "null", "stack")
    launched = not stream_of(op) and op.name not in NO_KERNEL and not op.kind.startswith("shape")
    return on_device and launched and bool(op.operands)


def computes(op: Op, values: Mapping[int, Value]) -> bool:
    """Whether the compute stream computes any result of an operation."""
    return any(is_computed(op, values[value]) for value in op.results)


@once_per_ops
def computing(program: Program) -> set[int]:
    """Ids of the operations of which the compute stream computes any result; read-only."""
    values = {value.id: value for value in program.values}
    return {op.id for op in program.ops if computes(op, values)}


def last_of(job: Job, ops: Container[int]) -> OpInstance | None:
    """The last op instance of a job that belongs to one of these operations; None if there is none."""
    return next((item for item in reversed(job.items) if item[0] in ops), None)
