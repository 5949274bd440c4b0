"""What the host can wait for inside a job (`Job.host_waits`): computation that it has issued there."""

from __future__ import annotations

from collections.abc import Mapping

from interlace.ir.kinds import NO_KERNEL, stream_of
from interlace.ir.program import Job, Op, Value


def is_computed(op: Op, value: Value) -> bool:
    """Whether a result is surely there only when computation has come so far (constants and shapes may be made on the host)."""
    on_device = value.memory == "device" and value.dtype not in ("vector", "null", "stack")
    launched = not stream_of(op) and op.name not in NO_KERNEL and not op.kind.startswith("shape")
    return on_device and launched and bool(op.operands)


def computes(op: Op, values: Mapping[int, Value]) -> bool:
    """Whether some result of an operation is computed."""
    return any(is_computed(op, values[value]) for value in op.results)


def last_computation(job: Job, ops: Mapping[int, Op], values: Mapping[int, Value]) -> tuple[int, int] | None:
    """The last item of a job that computes."""
    return next((item for item in reversed(job.items) if computes(ops[item[0]], values)), None)
