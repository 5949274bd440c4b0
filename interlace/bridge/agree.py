"""Exchange between the ranks of one run while they plan, and the common proof of their plans before the first step."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Any, Protocol

import msgspec
import numpy as np
import paddle

from interlace.cpu import ops
from interlace.errors import PlanError
from interlace.ir import Group, Program
from interlace.ir.target import Target
from interlace.planning.peers import Peers, mark, require_one_topic, require_same_options
from interlace.planning.plan import Plan
from interlace.scheduler.hazards import (
    AnswerQueries,
    CallAnswer,
    CallQuery,
    RankComm,
    answer_queries,
    check_together,
    refuse,
    trace_of,
    unpacked,
)

CHANNEL = -2
"""Channel of the CPU transport for this exchange; the groups of programs have numbers from 0."""
STORE_KEY = "interlace/plan"
STORE_TIMEOUT_S = 900.0
"""Paddle's own time-out for a store. Paddle does not apply it, so reading a key that no rank writes would never end."""
Run = tuple[int, int, int]
"""Some ranks of a group as an arithmetic sequence: first, step, count."""


class PlanSummary(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What each rank sends about its plan, a few hundred bytes: digests of its options and of the skeleton of its communication, its
    groups, and the groups of the skeleton's rings."""

    options: bytes
    skeleton: bytes
    groups: tuple[tuple[int, tuple[Run, ...]], ...]
    rings: tuple[int, ...]


def require_agreement(plan: Plan, comm: RankComm, target: Target) -> None:
    """Compare options, and prove the plans of all ranks together: calls match between ranks, and there is no deadlock. `comm` is this
    rank's communication, as `require_safe` returned it.

    Every rank sends a few hundred bytes; equal orders of communication are sent only once. Raises PlanError on all ranks, with the findings
    that `interlace check` reports for the same plans.
    """
    peers = peers_of(plan.program)
    if peers is not None:
        agree(peers, plan.program, plan.fingerprint(), comm, target)


def agree(peers: Peers, program: Program, options: str, comm: RankComm, target: Target) -> None:
    """The exchange of `require_agreement`, through the given peers."""
    options += ", captured" * target.is_graph  # ranks that launch and ranks that issue may wait for each other
    mine = PlanSummary(mark(options), comm.skeleton.mark, tuple((group.id, runs(group.ranks)) for group in comm.groups), comm.rings)
    summaries = [msgspec.msgpack.decode(each, type=PlanSummary) for each in peers.gather("the finished plan", msgspec.msgpack.encode(mine))]
    require_same_options(peers, program.rank, options, [each.options for each in summaries])
    firsts = {each.skeleton: rank for rank, each in reversed([*enumerate(summaries)])}
    own = comm.skeleton.packed if program.rank in firsts.values() else b""
    packed = peers.gather("orders of communication", own)
    skeletons = {mark: unpacked(packed[rank]) for mark, rank in firsts.items()}
    comms = [
        RankComm(rank, tuple(Group(number, members(each)) for number, each in one.groups), one.rings, skeletons[one.skeleton])
        for rank, one in enumerate(summaries)
    ]
    found = check_together(comms, target, _answers_of_ranks(peers, program, target))
    refuse(found, f"the plans of all ranks together are not safe on {target.name}")


def _answers_of_ranks(peers: Peers, program: Program, target: Target) -> AnswerQueries:
    """A function that gets the names of calls from the ranks that issue them; every rank must call it with the same queries."""

    def ask(queries: Sequence[CallQuery]) -> list[CallAnswer]:
        mine = [each for each in queries if each.rank == program.rank]
        answers = answer_queries(trace_of(program, target), program.rank, mine) if mine else []
        said = peers.gather("what waits", msgspec.msgpack.encode(answers))
        by_rank = [iter(msgspec.msgpack.decode(each, type=list[CallAnswer])) for each in said]
        return [next(by_rank[each.rank]) for each in queries]

    return ask


def runs(ranks: Sequence[int]) -> tuple[Run, ...]:
    """Ranks as arithmetic sequences; a group of a mesh has one or a few of them.

    >>> runs((0, 1, 2, 8, 9, 10)), runs((5,)), runs((1, 0))
    (((0, 1, 3), (8, 1, 3)), ((5, 1, 1),), ((1, -1, 2),))
    """
    found: list[Run] = []
    for rank in ranks:
        first, step, length = found[-1] if found else (rank, 1, 0)
        if length == 1:
            found[-1] = (first, rank - first, 2)
        elif length and rank == first + step * length:
            found[-1] = (first, step, length + 1)
        else:
            found.append((rank, 1, 1))
    return tuple(found)


def members(found: Sequence[Run]) -> tuple[int, ...]:
    """The ranks of `runs`.

    >>> members(runs((3, 7, 11, 1, 0, 4)))
    (3, 7, 11, 1, 0, 4)
    """
    return tuple(first + step * k for first, step, length in found for k in range(length))


def peers_of(program: Program) -> Peers | None:
    """The ranks of this run, which all plan at the same time; None if there is only one."""
    return _Ranks(program.rank, program.world) if program.world > 1 else None


def peers_of_run() -> Peers | None:
    """As `peers_of`, before there is a program."""
    env = paddle.distributed.ParallelEnv()
    return _Ranks(env.rank, env.world_size) if env.world_size > 1 else None


class _Ranks:
    """Peers in other processes, connected by the transport of CPU ranks or by Paddle's store."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def gather(self, topic: str, mine: bytes) -> list[bytes]:
        """See `Peers.gather`."""
        rounds = TransportRounds(ops.transport(), self.world) if ops.has_transport() else _store_rounds(self.rank, self.world)
        return gather_on(rounds, topic, mine)


class Rounds(Protocol):
    """An all-gather of bytes."""

    def exchange(self, mine: bytes) -> list[bytes]:
        """The bytes of every rank, in the order of ranks; all ranks must call this the same number of times."""
        ...


def gather_on(rounds: Rounds, topic: str, mine: bytes) -> list[bytes]:
    """One all-gather on a topic; see `Peers.gather`."""
    said = [msgspec.msgpack.decode(each, type=tuple[str, bytes]) for each in rounds.exchange(msgspec.msgpack.encode((topic, mine)))]
    require_one_topic([topic for topic, _ in said])
    return [text for _, text in said]


class StoreRounds:
    """All-gathers through Paddle's store. Rank 0 collects the bytes of all ranks and writes them once, so that the number of calls is
    linear in the number of ranks, not quadratic."""

    def __init__(self, store: Any, rank: int, world: int, timeout_s: float = STORE_TIMEOUT_S) -> None:
        self.store, self.rank, self.world, self.timeout_s = store, rank, world, timeout_s
        self.rounds = count()

    def exchange(self, mine: bytes) -> list[bytes]:
        """See `Rounds`. Raises PlanError if a rank sends nothing within the time-out."""
        key, deadline_s = f"{STORE_KEY}/{next(self.rounds)}", time.monotonic() + self.timeout_s
        self._write(f"{key}/{self.rank}", mine)
        if self.rank == 0:
            every = [self._read(f"{key}/{rank}", rank, deadline_s) for rank in range(self.world)]
            self._write(f"{key}/all", zlib.compress(msgspec.msgpack.encode(every), 1))
        return msgspec.msgpack.decode(zlib.decompress(self._read(f"{key}/all", 0, deadline_s)), type=list[bytes])

    def _write(self, key: str, text: bytes) -> None:
        self.store.set(key, text)
        self.store.add(f"{key}/there", 1)

    def _read(self, key: str, rank: int, deadline_s: float) -> bytes:
        pause_s = 0.001
        while not self.store.add(f"{key}/there", 0):
            if time.monotonic() > deadline_s:
                raise PlanError(
                    f"rank {rank} sent nothing to rank {self.rank} within {self.timeout_s:g} s; it failed, or does something else: "
                    "see its log"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.5)
        return bytes(self.store.get(key))


class TransportRounds:
    """All-gathers through the transport of CPU ranks."""

    def __init__(self, transport: Any, world: int) -> None:
        self.transport, self.ranks = transport, tuple(range(world))

    def exchange(self, mine: bytes) -> list[bytes]:
        """See `Rounds`."""
        sizes = self.transport.all_gather(np.array([len(mine)], dtype=np.int64), CHANNEL, self.ranks, "planning", "int64")
        longest = max(int(size[0]) for size in sizes)
        padded = np.frombuffer(mine.ljust(longest, b"\0"), dtype=np.uint8)
        rows = self.transport.all_gather(padded, CHANNEL, self.ranks, "planning", "uint8")
        return [row.tobytes()[: int(size[0])] for row, size in zip(rows, sizes, strict=True)]


@cache
def _store_rounds(rank: int, world: int) -> StoreRounds:
    """The only object of this process, so that each all-gather uses keys of its own."""
    return StoreRounds(paddle.base.core.create_or_get_global_tcp_store(), rank, world)
