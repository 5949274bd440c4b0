"""The ranks of a world that is planned by one command: in this process, or spread over copies of it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

import msgspec

from interlace.garbage import not_collected, own_objects_only
from interlace.interrupts import SIGNALS, uninterrupted
from interlace.planning.peers import decoded
from interlace.planning.worker import Worker
from interlace.planning.world import Answer, LinkError, Order, World, answered
from interlace.units import ranks_text


def usable_processes() -> int:
    """How many processes plan at once where they may: as many as this one may use cores, and one where a process cannot be copied."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


def dealt(number: int, processes: int) -> int:
    """Which of some processes plans a stage, where the first stages, which hold most and take longest, are dealt out there and back.

    >>> [dealt(stage, 3) for stage in range(8)]
    [0, 1, 2, 2, 1, 0, 0, 1]
    """
    turn, place = divmod(number, processes)
    return processes - 1 - place if turn % 2 else place


@contextmanager
def world_of(workers: Sequence[Worker], seats: Sequence[int], processes: Sequence[int] = ()) -> Iterator[World]:
    """A world of which one command plans all ranks; other processes, copies of this one, are ended at the end of the block. Raises
    LinkError where one ended early.

    `seats` has for each rank the place of its worker, where one of them speaks for several ranks; `processes` for each worker the number of
    the process that it works in, 0 for this one; without it all work here.
    """
    where = tuple(processes) or (0,) * len(workers)
    mine, others = {place: each for place, each in enumerate(workers) if not where[place]}, list[_Other]()
    try:
        with uninterrupted():
            for number in sorted({*where} - {0}):
                theirs = {place: each for place, each in enumerate(workers) if where[place] == number}
                others.append(_Other(theirs, [rank for rank, place in enumerate(seats) if place in theirs], others))
        yield World(mine, seats, _Others(others) if others else None)
    finally:
        for other in others:
            other.end()


class _Others:
    def __init__(self, others: Sequence[_Other]) -> None:
        self.others, self.asked = others, list[_Other]()
        self.helpers = [min(other.places) for other in others]

    def ask(self, *orders: Order) -> None:
        """See `Link`."""
        asked = [(other, order) for order in orders for other in self.others if other.places & {*order.asked}]
        self.asked = [other for other, _ in asked]
        for other, order in asked:
            with suppress(OSError):  # it has ended: where it should answer that is told
                other.link.send_bytes(msgspec.msgpack.encode(order))

    def answers(self) -> dict[int, Answer]:
        """See `Link`."""
        return {place: answer for other in self.asked for place, answer in other.heard().items()}


class _Other:
    """Another process, as this one sees it."""

    def __init__(self, workers: Mapping[int, Worker], ranks: list[int], before: Sequence[_Other]) -> None:
        context = multiprocessing.get_context("fork")
        self.link, theirs = context.Pipe()
        self.places, self.ranks = {*workers}, ranks
        ours = [*(other.link for other in before), self.link]
        self.process = context.Process(target=_serve, args=(theirs, ours, workers), daemon=True)
        with not_collected():
            self.process.start()
        theirs.close()

    def heard(self) -> dict[int, Answer]:
        """What its ranks answer, by place. Raises LinkError where it ended."""
        try:
            return decoded(self.link.recv_bytes(), dict[int, Answer])  # type: ignore[no-any-return]
        except (EOFError, OSError):
            self.process.join()
            code, ranks = self.process.exitcode, ranks_text(self.ranks)
            hint = " (from outside, often for want of memory: `taskset -c 0 interlace plan ...` plans in one process)" if code == -9 else ""
            raise LinkError(f"the process that planned {ranks} ended with code {code} before it was done{hint}") from None

    def end(self) -> None:
        """End it where it still runs."""
        self.process.kill()
        self.process.join()
        self.link.close()


def _serve(link: Connection, not_mine: Sequence[Connection], workers: Mapping[int, Worker]) -> None:
    """What another process does. The process that made it ends it, whatever signal comes; it ends by itself where that one is gone."""
    own_objects_only()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    for other in not_mine:
        other.close()
    with suppress(EOFError, OSError):  # the process that made this one is there no longer
        while True:
            order = decoded(link.recv_bytes(), Order)
            answers = {place: answered(worker, order) for place, worker in workers.items() if place in order.asked}
            for stream in (sys.stdout, sys.stderr):  # it may be ended as soon as it has answered
                with suppress(OSError, ValueError):
                    stream.flush()
            link.send_bytes(msgspec.msgpack.encode(answers))
