"""What the host waits for at the end of a job that holds it back (`Job.host_waits`): the job's last computation."""

from __future__ import annotations

from collections.abc import Mapping

from interlace.ir.kinds import NO_KERNEL
from interlace.ir.program import Job, Op, Value

COMPUTE_STREAMS = frozenset({"", "DefaultStream"})
"""Names under which an operation runs on the compute stream."""


def is_computed(op: Op, value: Value) -> bool:
    """Whether a result is surely there only when computation has come so far (constants and shapes may be made on the host)."""
    on_device = value.memory == "device" and value.dtype not in ("vector", "null", "stack")
    launched = op.stream in COMPUTE_STREAMS and op.name not in NO_KERNEL and not op.kind.startswith("shape")
    return on_device and launched and bool(op.operands)


def computes(op: Op, values: Mapping[int, Value]) -> bool:
    """Whether some result of an operation is computed."""
    return any(is_computed(op, values[value]) for value in op.results)


def awaited(job: Job, ops: Mapping[int, Op], values: Mapping[int, Value]) -> int:
    """Place in a job's items of its last computation; -1 where it has none."""
    return next((k for k in range(len(job.items) - 1, -1, -1) if computes(ops[job.items[k][0]], values)), -1)
