"""The ranks of a world that is planned by one command, in this process or distributed over copies of it."""

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
    """The number of processes that may plan at the same time: that of the cores that this process may use, or 1 if it cannot be forked."""
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
    """Context with a world whose ranks are all planned by one command. Other processes, copies of this one, are ended with the context.
    Raises LinkError if one ended early.

    `seats` has for each rank the index of its worker, as one worker may answer for several ranks; `processes` has for each worker the
    number of the process that it works in, 0 for this one (default: all).
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
            with suppress(OSError):  # it has ended, which `heard` reports
                other.link.send_bytes(msgspec.msgpack.encode(order))

    def answers(self) -> dict[int, Answer]:
        """See `Link`."""
        return {place: answer for other in self.asked for place, answer in other.heard().items()}


class _Other:
    """This process's view of another process."""

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
        """The answers of its workers, by place. Raises LinkError if it has ended."""
        try:
            return decoded(self.link.recv_bytes(), dict[int, Answer])  # type: ignore[no-any-return]
        except (EOFError, OSError):
            self.process.join()
            code, ranks = self.process.exitcode, ranks_text(self.ranks)
            hint = " (from outside, often for want of memory: `taskset -c 0 interlace plan ...` plans in one process)" if code == -9 else ""
            raise LinkError(f"the process that planned {ranks} ended with code {code} before it was done{hint}") from None

    def end(self) -> None:
        """End it if it still runs."""
        self.process.kill()
        self.process.join()
        self.link.close()


def _serve(link: Connection, not_mine: Sequence[Connection], workers: Mapping[int, Worker]) -> None:
    """Main function of another process. The process that made it ends it, whatever signals it gets; if that one is gone, it ends by
    itself."""
    own_objects_only()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    for other in not_mine:
        other.close()
    with suppress(EOFError, OSError):  # the process that made this one is gone
        while True:
            order = decoded(link.recv_bytes(), Order)
            answers = {place: answered(worker, order) for place, worker in workers.items() if place in order.asked}
            for stream in (sys.stdout, sys.stderr):  # it may be ended as soon as it has answered
                with suppress(OSError, ValueError):
                    stream.flush()
            link.send_bytes(msgspec.msgpack.encode(answers))
