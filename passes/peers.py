"""What ranks tell each other while they plan, so that they decide alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError, Lock
from typing import Protocol, TypeVar

import msgspec

from interlace.errors import PlanError

Given = TypeVar("Given")
Made = TypeVar("Made")
Told = TypeVar("Told")
_DECODING = Lock()
"""msgspec 0.22 crashed (null read) where threads decoded a type for the first time at once."""


class Peers(Protocol):
    """The ranks that plan at the same time, this one among them."""

    def gather(self, topic: str, mine: bytes) -> list[bytes]:
        """What each rank says on a topic, in the order of ranks. Every rank asks for the same topics in the same order.

        Raises:
            PlanError: A rank is at another topic; on every rank alike.
        """
        ...


def gather(peers: Peers | None, topic: str, mine: Told) -> list[Told]:
    """What every rank says on a topic, by rank; only this one's own where nobody else plans at the same time.

    Raises:
        PlanError: As `Peers.gather`.
    """
    if peers is None:
        return [mine]
    said = peers.gather(topic, msgspec.msgpack.encode(mine))
    with _DECODING:
        told = {each: msgspec.msgpack.decode(each, type=type(mine)) for each in set(said)}
    return [told[each] for each in said]


def require_one_topic(topics: Sequence[str]) -> None:
    """Raises PlanError where ranks speak of different things."""
    other = next((rank for rank, topic in enumerate(topics) if topic != topics[0]), None)
    if other is not None:
        raise PlanError(f"ranks 0 and {other} planned with different options: one is at {topics[0]!r}, the other at {topics[other]!r}; "
                        "give every rank the same configuration")  # fmt: skip


def plan_together(plan: Callable[[Given, Peers], Made], given: Sequence[Given], seats: Sequence[int] = ()) -> list[Made]:
    """Call `plan` for everything given, each in a thread of its own with the others as its peers.

    Args:
        plan: What each does.
        given: For whom.
        seats: For each rank the place of what is given for it, where one of them speaks for several ranks; else each for itself.

    Raises:
        Exception: What the first of them raised by itself; the others are ended.
    """
    table = _Table(len(given), tuple(seats) or tuple(range(len(given))))

    def at(seat: int) -> Made:
        try:
            return plan(given[seat], _Seat(table, seat))
        except BaseException:
            table.barrier.abort()
            raise

    try:
        with ThreadPoolExecutor(max(1, len(given))) as pool:
            futures = [pool.submit(at, seat) for seat in range(len(given))]
    except BaseException:  # an interrupt of the wait for them
        table.barrier.abort()
        raise
    failed = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(failed, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


class _Table:
    def __init__(self, count: int, seats: Sequence[int]) -> None:
        self.barrier = Barrier(count)
        self.seats = seats
        self.said: list[tuple[str, bytes]] = [("", b"")] * count


class _Seat:
    def __init__(self, table: _Table, seat: int) -> None:
        self.table, self.seat = table, seat

    def gather(self, topic: str, mine: bytes) -> list[bytes]:
        self.table.said[self.seat] = (topic, mine)
        self.table.barrier.wait()
        said = [self.table.said[seat] for seat in self.table.seats]
        self.table.barrier.wait()
        require_one_topic([topic for topic, _ in said])
        return [text for _, text in said]
