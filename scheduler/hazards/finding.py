"""Findings: what the checker reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from interlace.grouping import grouped
from interlace.ir import Op, describe
from interlace.ir.kinds import COMPUTE_STREAMS, is_boundary
from interlace.units import ranks_text

Kind = Literal[
    "read-before-write",  # the read's producer comes later in host order, or is in no job
    "wrong-version",  # the last write before an access is not the same as in the sequential step
    "race",  # nothing orders a read and a write, or two writes, of one storage
    "copy-read-early",  # a host buffer is read when the copy into it may not have completed
    "buffer-reused",  # a host buffer is written while a copy may still use it
    "freed-in-use",  # memory may be reused while a reader still uses it
    "draw-order",  # random draws or operations with other side effects are in another order than in Paddle's own schedule
    "event-order",  # an event is waited for before it is recorded, is never recorded, or names an op instance that no job runs
    "collective-order",  # ranks of a group issue different collectives, or in different orders
    "p2p-mismatch",  # sends and receives between two ranks do not match
    "deadlock",  # ranks wait for each other in a cycle
    "wrong-group",  # a call on a group that the rank is not in, to the rank itself, or on a group that cannot be identified
    "shared-stream",  # two rings share a stream, which keeps the communicator of the first
    "host-in-graph",  # inside a captured step, the host would have to wait, read a value or decide
    "draw-in-graph",  # a captured step would draw the same random numbers at each launch
]


class Where(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One operation of one micro-batch on one rank."""

    rank: int
    op: int
    micro_batch: int
    name: str
    layer: str
    stream: str

    def __str__(self) -> str:
        layer = f" ({self.layer})" if self.layer else ""
        return f"rank {self.rank} #{self.op} {self.name}{layer} of micro-batch {self.micro_batch} on {stream_text(self.stream)}"


class Finding(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One fault of a plan.

    Attributes:
        kind: Class of the fault.
        ranks: The ranks concerned.
        items: The op instances involved: a pair, or a cycle.
        message, remedy: What is wrong, and what would correct it.
        count: Number of faults of this kind between these operations, over all micro-batches; the first is shown.
    """

    kind: Kind
    ranks: tuple[int, ...]
    items: tuple[Where, ...]
    message: str
    remedy: str
    count: int = 1

    def __str__(self) -> str:
        more = f" (and for {self.count - 1} more micro-batches)" if self.count > 1 else ""
        return f"{self.kind}: {self.message}{more}; {self.remedy}"


IN_FULL = 5
"""Number of findings that are shown in full; more are summarized by class."""


def findings_text(findings: Sequence[Finding], in_full: bool = False) -> list[str]:
    """Findings as lines of text, in their order. More than `IN_FULL` are summarized in one line per class, with their number, ranks and
    first finding, unless `in_full`."""
    if in_full or len(findings) <= IN_FULL:
        return [str(finding) for finding in findings]
    return [_class_text(found) for found in grouped((finding.kind, finding) for finding in findings).values()]


def _class_text(found: Sequence[Finding]) -> str:
    ranks = ranks_text(sorted({rank for finding in found for rank in finding.ranks}))
    return str(found[0]) if len(found) == 1 else f"{found[0].kind}, {len(found)} findings on {ranks}; the first: {found[0]}"


def where(rank: int, op: Op, micro_batch: int) -> Where:
    """Description of an op instance of a rank for findings."""
    return Where(rank, op.id, micro_batch, op.name, op.layer, op.stream)


def stream_text(stream: str) -> str:
    """Text of a stream for messages."""
    return "the compute stream" if stream in COMPUTE_STREAMS else f"stream '{stream}'"


def item_text(op: Op, micro_batch: int) -> str:
    """Text of an op instance for a message that already names the rank."""
    if is_boundary(op):
        job = "the job that cuts the batch" if op.results else "the job that collects the outputs"
        return f"{job} ({describe(op)} of micro-batch {micro_batch})"
    return f"{describe(op)} of micro-batch {micro_batch} on {stream_text(op.stream)}"


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings about the same operations in several micro-batches into one with their count; keeps the order."""
    first: dict[tuple[object, ...], Finding] = {}
    for finding in findings:
        key = (finding.kind, finding.ranks, tuple(item.op for item in finding.items))
        old = first.get(key)
        first[key] = finding if old is None else msgspec.structs.replace(old, count=old.count + finding.count)
    return list(first.values())
