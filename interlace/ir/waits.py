"""What the host can wait for inside a job (`Job.host_waits`): computation on the compute stream."""

from __future__ import annotations

from collections.abc import Mapping

from interlace.ir.kinds import NO_KERNEL, stream_of
from interlace.ir.program import Job, Op, OpInstance, Value


def is_computed(op: Op, value: Value) -> bool:
    """Whether a result exists only once the compute stream has computed it (constants and shapes may be computed on the host)."""
    on_device = value.memory == "device" and value.dtype not in ("vector", "null", "stack")
    launched = not stream_of(op) and op.name not in NO_KERNEL and not op.kind.startswith("shape")
    return on_device and launched and bool(op.operands)


def computes(op: Op, values: Mapping[int, Value]) -> bool:
    """Whether the compute stream computes some result of an operation."""
    return any(is_computed(op, values[value]) for value in op.results)


def last_computation(job: Job, ops: Mapping[int, Op], values: Mapping[int, Value]) -> OpInstance | None:
    """The last op instance of a job that computes a result on the compute stream."""
    return next((item for item in reversed(job.items) if computes(ops[item[0]], values)), None)
