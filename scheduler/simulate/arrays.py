"""The arrays that both simulators run on, and how programs are taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from interlace.ir import Op, Program, describe
from interlace.ir.kinds import is_receive, is_send
from interlace.scheduler.target import UNBOUNDED, Target

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

ONE = 1 << 20
"""Fixed point of stretch factors and rates: a factor of 1."""
MAX_DUR_NS = 1 << 40
"""Longest op (18 minutes); keeps work, `dur_ns * ONE`, inside 64 bits."""
COMPUTE = "compute"
NOTHING = ""
"""What an op that launches nothing competes for."""


def blocks_host(op: Op) -> bool:
    """Whether the host waits until the op is done: a copy to pageable memory, or a fetch."""
    return op.kind == "fetch" or (op.kind == "memcpy_d2h" and op.attrs.get("dst_place_type", 0) == 0)


def _always(op: Op) -> bool:
    """On a serial target the host waits for every operation."""
    return True


@dataclass(frozen=True, slots=True)
class Options:
    """How programs are taken.

    Attributes:
        p2p: `rendezvous`: a send and its receive start and end together; `buffered`: a send runs alone, its receive from the
            send's start (or its own) to the send's end.
        share: Two ops that want one resource on one rank (two collectives, two sends, two receives, two copies of one
            direction, two compute kernels on two streams) get half of it each; off: each runs as if alone.
        peers_ready: Ranks without a program are taken to be ready whenever they are needed; off: they are an error.
        stands_for: Rank without a program -> rank whose program stands for it.
        blocks: Which ops the host waits for.
        host_waits: Whether the host waits where the plan says so; off for targets on which it never runs ahead.
        job_end_waits: Whether the host waits for the compute stream at the end of each job.
    """

    p2p: Literal["rendezvous", "buffered"] = "rendezvous"
    share: bool = True
    peers_ready: bool = False
    stands_for: Mapping[int, int] = field(default_factory=dict)
    blocks: Callable[[Op], bool] = blocks_host
    host_waits: bool = True
    job_end_waits: bool = False

    @classmethod
    def of(cls, target: Target, **others: Any) -> Options:
        """The options by a target's rules, with the others as given."""
        return cls(**{
            "p2p": "buffered" if target.p2p_buffer_bytes == UNBOUNDED else "rendezvous",
            "blocks": _always if target.serial else blocks_host,
            "host_waits": target.host_runs_ahead,
            "job_end_waits": target.job_end_waits,
            **others,
        })  # fmt: skip


@dataclass(slots=True)
class SimInput:
    """The arrays; per item unless said otherwise.

    Attributes:
        ranks: Simulated ranks, ascending. `[num_ranks]`
        first: First item of each rank, and the number of items. `[num_ranks + 1]`
        first_stream: The same of streams. `[num_ranks + 1]`
        stream_names: Per stream; each rank's first is `compute`.
        op, micro_batch: What the item is.
        stream: Global number of its stream.
        issue: Host time at which it is issued if the host never blocks.
        dur: Time alone, in nanoseconds.
        side: Communication or copy; everything else counts as compute.
        awaits: The item whose end the host waits for before it issues the next one: the item itself (a blocking copy), an
            earlier one (`Job.host_waits`), or -1.
        kind: Interference class.
        excess: `[classes, classes]`: by how much class a is stretched beside class b, over 1, in units of 1 / ONE.
        standing: `[classes]`: by how much class a is stretched beside one item that stands at a rendezvous, whichever it is, in
            units of 1 / ONE.
        dep_first, dep: What the item waits for on its rank, beside its stream's earlier items. `[items + 1]`, `[deps]`
        meet: Number of its rendezvous, or -1.
        meet_first, mates: Items of each rendezvous. `[meets + 1]`
        meet_size: How many must arrive. `[meets]`
        follow: The send whose message a buffered receive waits for, or -1.
        host_end: When each rank's host is through with its jobs if it never blocks. `[num_ranks]`
        job_first: Per rank, `(job name, first item)`.
        absent: Rendezvous -> text saying which rank lacks its part.
    """

    ranks: list[int]
    first: Ints
    first_stream: Ints
    stream_names: list[str]
    op: Ints
    micro_batch: Ints
    stream: Ints
    issue: Ints
    dur: Ints
    side: Flags
    awaits: Ints
    kind: Ints
    excess: Ints
    standing: Ints
    dep_first: Ints
    dep: Ints
    meet: Ints
    meet_first: Ints
    mates: Ints
    meet_size: Ints
    follow: Ints
    host_end: Ints
    job_first: list[list[tuple[str, int]]]
    absent: dict[int, str]
    programs: list[Program]
    _ops: dict[int, dict[int, Op]] = field(default_factory=dict, repr=False)

    @property
    def num_items(self) -> int:
        """Number of items of all ranks."""
        return len(self.op)

    def rank_index(self, item: int) -> int:
        """Position in `ranks` of an item's rank."""
        return int(np.searchsorted(self.first, item, side="right")) - 1

    def op_at(self, item: int) -> Op:
        """The op of an item."""
        at = self.rank_index(item)
        if at not in self._ops:
            self._ops[at] = {op.id: op for op in self.programs[at].ops}
        return self._ops[at][int(self.op[item])]

    def describe(self, item: int) -> str:
        """How messages name an item: rank, stream, op with layer, micro-batch."""
        where = f"rank {self.ranks[self.rank_index(item)]} stream {self.stream_names[self.stream[item]]}"
        return f"{where}: {describe(self.op_at(item))} of micro-batch {self.micro_batch[item]}"


@dataclass(slots=True)
class RankItems:
    """One rank's part of the arrays, with item and stream numbers of its own."""

    program: Program
    items: Ints
    ops: dict[int, Op]
    stream_names: list[str]
    columns: dict[str, npt.NDArray[Any]]
    deps: Ints
    host_end: int
    job_first: list[tuple[str, int]]


def direction(op: Op) -> tuple[str, int]:
    if is_send(op):
        return "send", int(op.attrs.get("peer", -1))
    if is_receive(op):
        return "receive", int(op.attrs.get("peer", -1))
    return "collective", -1


def rows(keys: Ints, entries: Ints, count: int) -> tuple[Ints, Ints]:
    """Entries grouped by key: offsets `[count + 1]` and the entries, each group in the given order."""
    order = np.argsort(keys, kind="stable")
    return offsets(np.bincount(keys, minlength=count)), entries[order]


def offsets(counts: Sequence[int] | Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(counts, np.int64))])


def ints(numbers: Sequence[int]) -> Ints:
    return np.array(numbers, np.int64)


def pairs_of(pairs: Sequence[tuple[int, int]]) -> Ints:
    return np.array(pairs, np.int64).reshape(-1, 2)


def joined(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.concatenate(arrays)
