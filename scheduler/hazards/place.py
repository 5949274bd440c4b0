"""What a place does by itself, as far as safety depends on it. Source: Paddle's executor and allocators, read and run."""

from __future__ import annotations

from typing import Literal

import msgspec

UNBOUNDED = 1 << 62


class Place(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The rules of one kind of device.

    Attributes:
        serial: Every operation is over before the next is issued; streams do not exist.
        collector: When a value's memory is given back after its last reader: `issue`, as soon as that is issued, the streams
            of the last readers being recorded where `records_streams`; `event`, when the last readers are over.
        records_streams: Whether the collector tells the allocator about the last readers' streams. Readers before them are
            recorded nowhere.
        blocking: Kinds that hold the host until they are over. A copy to plain host memory does so everywhere.
        loses_waits: Kinds whose waits for events of other jobs are lost where no operand is made in their own job.
        host_memory_edges: Whether the executor orders streams by host and pinned values inside a job.
        job_end_waits: Whether the host waits for the compute stream at the end of every job.
        holds_host: Whether the host waits for computation where the plan says so (`Job.host_waits`).
        ring_is_serial: Whether one ring's operations run one after the other in launch order, whatever their streams.
        one_ring_a_stream: Whether a stream keeps the communicator of the first ring used on it.
        p2p_buffer_bytes: Sends up to this size are over without their receiver.
    """

    name: str
    serial: bool = False
    collector: Literal["issue", "event"] = "issue"
    records_streams: bool = True
    blocking: frozenset[str] = frozenset()
    loses_waits: frozenset[str] = frozenset()
    host_memory_edges: bool = True
    job_end_waits: bool = False
    holds_host: bool = False
    ring_is_serial: bool = True
    one_ring_a_stream: bool = True
    p2p_buffer_bytes: int = 0


GPU = Place("gpu", blocking=frozenset({"memcpy_d2h"}), loses_waits=frozenset({"memcpy_d2h"}), holds_host=True)
"""CUDA: memory goes back when the last reader is issued, and only that reader's stream is known to the allocator.

NCCL may buffer a few megabytes of a send; a plan must not lean on it.
"""
CPU = Place("cpu", serial=True, one_ring_a_stream=False, p2p_buffer_bytes=UNBOUNDED)
"""Program order; the socket transport drains its peers at all times, so that no send waits."""
CUSTOM = Place("custom", collector="event", host_memory_edges=False, job_end_waits=True)
"""A custom device with asynchronous copies out and event garbage collection (`FLAGS_fast_eager_deletion_mode=0`)."""
PLACES = {place.name: place for place in (GPU, CPU, CUSTOM)}
