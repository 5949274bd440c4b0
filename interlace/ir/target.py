"""The rules of a kind of device and of Paddle's executor on it.

The checker, the simulator, both memory models, lowering and the command line all use this record. Source: Paddle's executor and
allocators, as read in the source and, except on a GPU, run (docs/gpu-place.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Literal

import msgspec

UNBOUNDED = 1 << 62


class Target(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The rules of one kind of device.

    Order:

    Attributes:
        name: Value of `--target`.
        serial: Every operation ends before the next is issued; streams and events do not exist.
        host_runs_ahead: The host issues ahead of the device, and waits as the plan says (`Job.host_waits`); on other targets these
            waits have no effect.
        job_end_waits: The host waits for the compute stream at the end of every job.
        blocking: Kinds of copies that the host waits for. A copy to pageable host memory blocks it on every target.
        loses_waits: Kinds whose waits for events of other jobs are lost if none of their operands is computed in their own job.
        host_memory_edges: Inside a job, values in host and pinned memory also order streams.
        ring_is_serial: Operations of one ring run one after the other in launch order, whatever their streams.
        one_ring_a_stream: A stream keeps the communicator of the first ring used on it.
        p2p_buffer_bytes: A send up to this size completes without its receiver.
        is_graph: Steps are captured and launched as one graph, so that the host issues nothing within a step.

    Memory:

    Attributes:
        alloc: When an operation's results are allocated: at its `start` on its stream, or at its `issue` by the host.
        free: When a value is freed: at the `end` of its last readers, or at the `issue` of the last reader. If that reader runs on
            another stream than the allocation and `records_streams` is set, the allocator keeps the block until the reader has ended,
            which it checks when the block's own stream next takes memory.
        records_streams: The allocator knows the streams of the last readers; it never knows those of earlier readers.
        keeps_pinned: Pinned buffers are never freed; each copied value has one per micro-batch.
        in_place_pass: Paddle's in-place pass runs: an operation may write its result over an operand that nobody reads later.
        late_results: A communication's result is allocated at its first reader, and an in-place one is received into another buffer.
        keeps_shapes: A tensor stays until the end of the step if the last job that names it reads only the shape of a vector that
            contains it; or if that job reads only the tensor's own shape, and an earlier job that did not compute it reads its contents.
        feed_copies: Number of copies of the fed batch, besides the inputs of the micro-batches.
        workspace: Kind of operation -> bytes that its kernel allocates while it runs, in multiples of its first operand's size.
    """

    name: str
    serial: bool = False
    host_runs_ahead: bool = False
    job_end_waits: bool = False
    blocking: frozenset[str] = frozenset()
    loses_waits: frozenset[str] = frozenset()
    host_memory_edges: bool = True
    ring_is_serial: bool = True
    one_ring_a_stream: bool = True
    p2p_buffer_bytes: int = 0
    is_graph: bool = False
    alloc: Literal["start", "issue"] = "start"
    free: Literal["end", "issue"] = "end"
    records_streams: bool = True
    keeps_pinned: bool = False
    in_place_pass: bool = False
    late_results: bool = False
    keeps_shapes: bool = False
    feed_copies: int = 0
    workspace: Mapping[str, int] = {}

    @property
    def has_pools(self) -> bool:
        """Whether memory comes from a pool for each stream as `scheduler/memory/pools.py` simulates it."""
        return self.free == "issue" and self.records_streams and not self.is_graph

    @property
    def runs_as_written(self) -> bool:
        """Whether the executor allocates exactly what the program states."""
        beside = (self.in_place_pass, self.late_results, self.keeps_shapes, self.feed_copies, self.workspace)
        return not any(beside)


IDEAL = Target("ideal", host_runs_ahead=True)
"""No real device: nothing is allocated before it is written, and everything is freed when its last reader ends."""
CPU = Target(
    "cpu",
    serial=True,
    one_ring_a_stream=False,
    p2p_buffer_bytes=UNBOUNDED,
    in_place_pass=True,
    late_results=True,
    feed_copies=2,
    workspace={"layer_norm_grad": 2},
)
"""Paddle's CPU build with Interlace's jobs and transport, which reads from its peers at all times, so that no send waits. The loader and
the feed variable each keep the batch; `layer_norm_grad` (phi/kernels/cpu/layer_norm_grad_kernel.cc) allocates two temporaries of its
input's size."""
CUSTOM = Target("custom", job_end_waits=True, host_memory_edges=False, alloc="issue", keeps_pinned=True)
"""A custom device with asynchronous copies out, where events decide when memory is freed (`FLAGS_fast_eager_deletion_mode=0`)."""
GPU = Target(
    "gpu",
    host_runs_ahead=True,
    blocking=frozenset({"memcpy_d2h"}),
    loses_waits=frozenset({"memcpy_d2h"}),
    alloc="issue",
    free="issue",
    keeps_pinned=True,
)
"""CUDA. NCCL may buffer a few megabytes of a send; a plan must not depend on it."""
TARGETS = {target.name: target for target in (CPU, CUSTOM, GPU)}
"""Targets on which plans run, by name."""


def as_graph(target: Target) -> Target:
    """The target's rules if whole steps are captured and launched as a graph."""
    return msgspec.structs.replace(target, name=f"{target.name}-graph", is_graph=True)


def with_paddles_jobs(target: Target) -> Target:
    """The target's rules for Paddle's own jobs, which never free some tensors of which backward reads only the shape.

    Measured on two H200s (benchmarks/results/gpu.md): tensors of a rotary embedding's `concat`, and received activations. Jobs that
    Interlace lowers keep only what a later job reads the contents of.
    """
    return msgspec.structs.replace(target, keeps_shapes=True)


def target_of(profile: str) -> Target:
    """The default target for a device profile, given by name or path: the CPU for the profile `cpu`, otherwise a GPU.

    >>> [target_of(name).name for name in ("h200", "cpu", "profiles/cpu.json")]
    ['gpu', 'cpu', 'cpu']
    """
    return CPU if PurePath(profile).stem == CPU.name else GPU
