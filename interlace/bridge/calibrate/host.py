"""The host's time for operations, jobs and runs of the executor."""

from __future__ import annotations

from statistics import median
from typing import Any

import paddle

from interlace.bridge.probe.bench import Bench
from interlace.cost_model.profile import HostCosts
from interlace.ir.kinds import NO_KERNEL

ops: Any = paddle._C_ops
TINY = 4
"""Elements, or rows and columns, of a tensor so small that an operation on it is only dispatch."""


def host_costs(bench: Bench, quick: bool) -> HostCosts:
    """The host's time for an operation, for a job in addition to its operations, and for a run in addition to its jobs.

    That of a job comes from the same operations in one job and in 16. If the host executes operations itself, that of an operation comes
    from `scale` on a tiny tensor. If the host runs ahead, it comes from training steps on tiny tensors: their operations have several
    operands, keep results for backward and free memory, which costs the host more.
    """

    def scales(count: int) -> None:
        x = paddle.full((TINY,), 0.5, "float32")
        for _ in range(count):
            ops.scale(x, 2.0, 1.0, True)

    num_jobs, each, runs = 16, 8, 20 if quick else 60
    short = median(bench.seconds(lambda: scales(each), num_runs=runs))
    long = median(bench.seconds(lambda: scales(each * num_jobs), num_runs=runs))
    cut = median(bench.seconds(lambda: scales(each), num_jobs, runs))
    op_s = max(0.0, (long - short) / (each * (num_jobs - 1)))
    job_s = max(0.0, (cut - short) / (num_jobs - 1) - each * op_s)
    run_s = max(0.0, short - each * op_s - job_s)
    note = f"an operation on {TINY} elements"
    if not bench.is_serial:
        few, many = (_training_step(layers, bench, runs) for layers in TRAINED_LAYERS)
        op_s = max(0.0, (many[1] - few[1]) / (many[0] - few[0]))
        note = f"an operation of training steps on {TINY} x {TINY} elements, from steps of {many[0]} and {few[0]} operations"
    note = f"{note}; a job in addition to its operations; between steps a run of the executor in addition to its jobs, without any script"
    return HostCosts(round(op_s * 1e9), round(job_s * 1e9), "measured", note, round(run_s * 1e9))


TRAINED_LAYERS = (2, 12)
"""Numbers of layers of the two training steps whose difference gives the host's time for an operation."""


def _training_step(layers: int, bench: Bench, runs: int) -> tuple[int, float]:
    """A training step of `layers` layers on tiny tensors (forward, backward, update): its number of launched operations and its median time
    in seconds."""
    count = 0

    def build() -> None:
        nonlocal count
        x = paddle.full([TINY, TINY], 1.0, "float32")
        weights: list[Any] = []
        for _ in range(layers):
            made = [paddle.full([TINY, TINY], 0.5, "float32"), *(paddle.full([TINY], value, "float32") for value in (0.1, 1.0, 0.0))]
            w, b, scale, shift = made
            for each in made:
                each.stop_gradient = False
            y = ops.gelu(ops.add(ops.matmul(x, w, False, False), b), True)
            x = ops.add(x, ops.layer_norm(y, scale, shift, 1e-5, 1))
            weights += made
        gradients = paddle.static.gradients([ops.mean(x, [], False)], weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            ops.subtract(weight, ops.scale(gradient, 0.1, 0.0, True))
        launched = paddle.static.default_main_program().global_block().ops
        count = sum(op.name() not in NO_KERNEL for op in launched)

    seconds = median(bench.seconds(build, num_runs=runs))
    return count, seconds
