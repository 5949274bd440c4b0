"""The input arrays of both simulation engines, and the options for making them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from interlace.ir import Op, Program, describe
from interlace.ir.arrays import Flags, Ints, offsets
from interlace.ir.kinds import is_receive, is_send
from interlace.ir.target import GPU, UNBOUNDED, Target

if TYPE_CHECKING:
    from interlace.scheduler.simulate.power import PowerInput

ONE = 1 << 20
"""Fixed point of stretch factors and rates: a factor of 1."""
MAX_DUR_NS = 1 << 40
"""Bound on the duration of an op (18 minutes), so that its work, `dur_ns * ONE`, fits into 64 bits."""
COMPUTE = "compute"
NOTHING = ""
"""Resource of an op that launches nothing."""


def blocks_host(op: Op) -> bool:
    """Whether the host waits until the op is done: it is a copy to pageable memory, or a fetch."""
    return op.kind == "fetch" or (op.kind == "memcpy_d2h" and op.attrs.get("dst_place_type", 0) == 0)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a simulation.

    Attributes:
        p2p: `rendezvous`: a send and its receive start and end together; `buffered`: a send runs alone, its receive from the
            send's start (or its own) to the send's end.
        share: Whether two ops that use the same resource of a rank (two collectives, two sends, two receives, two copies in one
            direction, two compute kernels on two streams) get half of it each; if not, each runs as if alone.
        peers_ready: Whether ranks without a program are assumed to be ready whenever they are needed; if not, they are an error.
        representative: Rank without a program -> rank whose program is simulated in its place.
        blocks: Predicate for the ops that block the host.
        blocking: Kinds of captured copies that block the host too.
        host_waits: Whether the host executes the plan's waits; false for targets on which it never runs ahead.
        job_end_waits: Whether the host waits for the compute stream at the end of each job.
        power: Whether the power limit lowers the clock, if the profile has one; false for comparisons and simulations of a single rank.
    """

    p2p: Literal["rendezvous", "buffered"] = "rendezvous"
    share: bool = True
    peers_ready: bool = False
    representative: Mapping[int, int] = field(default_factory=dict)
    blocks: Callable[[Op], bool] = blocks_host
    blocking: frozenset[str] = GPU.blocking
    host_waits: bool = True
    job_end_waits: bool = False
    power: bool = True

    def acting(self, simulated: Iterable[int]) -> dict[int, int]:
        """Rank -> the rank whose program is simulated for it: itself if it is one of `simulated`, else its representative."""
        own = {rank: rank for rank in simulated}
        return own | {rank: twin for rank, twin in self.representative.items() if rank not in own}

    @classmethod
    def of(cls, target: Target, **others: Any) -> Options:
        """Options that follow a target's rules; `others` override them."""
        return cls(
            **{
                "p2p": "buffered" if target.p2p_buffer_bytes == UNBOUNDED else "rendezvous",
                "blocks": (lambda op: True) if target.serial else blocks_host,  # a serial target's host waits for every operation
                "blocking": target.blocking,
                "host_waits": target.host_runs_ahead,
                "job_end_waits": target.job_end_waits,
                **others,
            }
        )


@dataclass(frozen=True, slots=True)
class BothDirections:
    """How much copies of both directions of a device slow each other down: the more, the more devices of the host copy at the same time.

    Attributes:
        way: Of each interference class: `TO_DEVICE`, `TO_HOST`, or 0 for what is no such copy. `[classes]`
        excess: Stretch of a copy to the device and of one to the host beside one of the other direction, over 1, in units of 1 / ONE, by
            the number of directions in which devices of the host copy: 2 for each device that copies in both. `[2 * devices + 1, 2]`
        host: Number of each rank's host. `[num_ranks]`
        devices: How many devices of its host each rank stands for, which are assumed to copy when it does. `[num_ranks]`
    """

    way: Ints
    excess: Ints
    host: Ints
    devices: Ints


TO_DEVICE, TO_HOST = 1, 2


@dataclass(slots=True)
class SimInput:
    """The arrays, with one entry per op instance (item) unless stated otherwise.

    Attributes:
        ranks: Simulated ranks, ascending. `[num_ranks]`
        first: First op instance of each rank, and the total number. `[num_ranks + 1]`
        first_stream: First stream of each rank, and the total number. `[num_ranks + 1]`
        stream_names: Name of each stream; the first of each rank is `compute`.
        op, micro_batch: Id of its op, and its micro-batch.
        stream: Number of its stream, over all ranks.
        issue: Time at which it is issued if the host never waits, in nanoseconds.
        dur: Duration alone, in nanoseconds.
        side: Whether it is a communication or copy; everything else counts as compute.
        awaits: The op instance whose end the host waits for before it issues the next one: itself (a blocking copy), an earlier
            one (`Job.host_waits`), or -1.
        kind: Interference class.
        excess: Stretch of class a beside class b, over 1, in units of 1 / ONE. `[2, classes, classes]` Index 1 holds if exactly one of the
            two is computation and it began first, index 0 in all other cases.
        both: Stretch of copies beside copies of the other direction, which is 0 in `excess` then; None if it does not depend on what other
            devices do.
        blocked_excess: Stretch of each class while any op instance of its rank is blocked at a rendezvous, over 1, in units of 1 / ONE.
            `[classes]`
        dep_first, dep: What it waits for on its rank, other than the earlier op instances of its stream. `[items + 1]`, `[deps]`
        meet: Number of its rendezvous, or -1.
        meet_first, mates: Op instances of each rendezvous. `[meets + 1]`, `[mates]`
        meet_size: Number of op instances that each rendezvous needs. `[meets]`
        follow: The send whose message a buffered receive waits for, or -1.
        host_end: When the host of each rank could begin the next step if it never waits, in nanoseconds. `[num_ranks]`
        job_first: `(job name, first op instance)` of each job, by rank.
        absent: Rendezvous -> text that names the ranks that never issue their part.
        programs: The programs of the ranks, in the same order.
        power: Power of the op instances, and the device's limit; None if the clock is constant.
        tail: Whether it belongs to the copies of optimizer state to the host that the next step need not wait for; None if there are none.
        mark: Op instance of each rank that is prolonged by such copies of the previous step, or -1. `[num_ranks]`
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
    blocked_excess: Ints
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
    power: PowerInput | None = None
    tail: Flags | None = None
    mark: Ints | None = None
    both: BothDirections | None = None
    _ops: dict[int, dict[int, Op]] = field(default_factory=dict, repr=False)

    @property
    def num_items(self) -> int:
        """Number of op instances of all ranks."""
        return len(self.op)

    def rank_index(self, item: int) -> int:
        """Index in `ranks` of the rank of an op instance."""
        return int(np.searchsorted(self.first, item, side="right")) - 1

    def needs(self, item: int) -> list[int]:
        """What an op instance waits for on its rank (`dep`)."""
        return [int(k) for k in self.dep[self.dep_first[item] : self.dep_first[item + 1]]]

    def mates_at(self, meet: int) -> list[int]:
        """The op instances of a rendezvous."""
        return [int(k) for k in self.mates[self.meet_first[meet] : self.meet_first[meet + 1]]]

    def op_at(self, item: int) -> Op:
        """The operation of an op instance."""
        at = self.rank_index(item)
        if at not in self._ops:
            self._ops[at] = {op.id: op for op in self.programs[at].ops}
        return self._ops[at][int(self.op[item])]

    def describe(self, item: int) -> str:
        """Text for messages that identifies an op instance by rank, stream, op with layer, and micro-batch."""
        where = f"rank {self.ranks[self.rank_index(item)]} stream {self.stream_names[self.stream[item]]}"
        return f"{where}: {describe(self.op_at(item))} of micro-batch {self.micro_batch[item]}"


@dataclass(slots=True)
class RankItems:
    """The part of `SimInput` of one rank, with op instances and streams numbered from 0."""

    program: Program
    items: Ints
    ops: dict[int, Op]
    stream_names: list[str]
    columns: dict[str, npt.NDArray[Any]]
    deps: Ints
    host_end: int
    job_first: list[tuple[str, int]]


def direction(op: Op) -> tuple[str, int]:
    """Direction of a communication (`send`, `receive` or `collective`) and its peer in the group (-1 for a collective)."""
    if is_send(op):
        return "send", int(op.attrs.get("peer", -1))
    if is_receive(op):
        return "receive", int(op.attrs.get("peer", -1))
    return "collective", -1


def rows(keys: Ints, entries: Ints, count: int) -> tuple[Ints, Ints]:
    """Entries grouped by key: offsets `[count + 1]` and the entries, each group in the given order."""
    order = np.argsort(keys, kind="stable")
    return offsets(np.bincount(keys, minlength=count)), entries[order]
