"""All ranks of a world planned by one call: each in a thread of its own, the threads in one process or spread over several."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Barrier, BrokenBarrierError, Lock
from typing import Any, Generic, Literal, TypeVar

from interlace.errors import InterlaceError, PlanError
from interlace.interrupts import SIGNALS, uninterrupted
from interlace.passes.peers import Peers, require_one_topic
from interlace.units import ranks_text

Given = TypeVar("Given")
Made = TypeVar("Made")
Said = dict[int, tuple[str, bytes]]
"""What ranks say: by the place of what is given for them, a topic and what is said on it."""


def usable_processes() -> int:
    """How many processes plan at once where they may: as many as this one may use cores, and one where a process cannot be copied."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


def plan_together(
    plan: Callable[[Given, Peers], Made], given: Sequence[Given], seats: Sequence[int] = (), processes: Sequence[int] = ()
) -> list[Made]:
    """Call `plan` for everything given, each in a thread of its own with the others as its peers.

    One thread of a process runs at a time, until it waits for the others: threads that all want Python's lock take a fifth more
    processor time. Other processes are copies of this one, made by this call and ended before it returns; what `plan` gives there is
    sent back by pickle, and what else it changes is lost.

    Args:
        plan: What each does.
        given: For whom.
        seats: For each rank the place of what is given for it, where one of them speaks for several ranks; else each for itself.
        processes: For each of what is given the number of the process that plans it; 0 is this one. Else all are planned here.

    Raises:
        PlanError: Another process ended before it had planned, or what it made cannot be sent.
        Exception: What the first of them raised by itself; the others are ended.
    """
    where = tuple(processes) or (0,) * len(given)
    of_rank = tuple(seats) or tuple(range(len(given)))
    others: list[_Other] = []

    def end() -> None:
        for other in others:
            other.end()

    try:
        with uninterrupted():
            for number in sorted({*where} - {0}):
                others.append(_Other(plan, _given_to(number, given, where), of_rank, others))
        made = _Table(_given_to(0, given, where), of_rank, lambda said: _told_to_all(said, others), end).run(plan)
        for other in others:
            made |= other.heard("made")
    finally:
        end()
    return [made[place] for place in range(len(given))]


def _given_to(number: int, given: Sequence[Given], where: Sequence[int]) -> dict[int, Given]:
    return {place: each for place, each in enumerate(given) if where[place] == number}


class _Table(Generic[Given]):
    """Where the ranks of one process meet.

    Args:
        given: For whom this process plans, by place.
        of_rank: For each rank of the world the place of what is given for it.
        tell: Given what these say, gives what those of all processes say.
        end: Ends the other processes, so that `tell` waits for them no longer.
    """

    def __init__(
        self, given: Mapping[int, Given], of_rank: Sequence[int], tell: Callable[[Said], Said], end: Callable[[], None] = lambda: None
    ) -> None:
        self.given, self.of_rank, self.tell, self.end = given, of_rank, tell, end
        self.turn, self.barrier = Lock(), Barrier(max(1, len(given)), self._exchange)
        self.said, self.told = Said(), Said()
        self.elsewhere: BaseException | None = None
        """Why another process failed."""

    def run(self, plan: Callable[[Given, Peers], Made]) -> dict[int, Made]:
        """What `plan` gives for each, by place.

        Raises:
            Exception: As `plan_together`.
        """

        def at(place: int) -> Made:
            with self.turn:
                self._require_all()
                try:
                    return plan(self.given[place], _Seat(self, place))
                except BaseException:
                    self.barrier.abort()
                    raise

        pool, futures = ThreadPoolExecutor(max(1, len(self.given))), dict[int, Future[Made]]()
        try:
            futures |= {place: pool.submit(at, place) for place in self.given}
            wait(futures.values())
        except BaseException:  # an interrupt while they start, or of the wait for them
            self.end()  # first: who waits for another process holds the barrier's lock
            self.barrier.abort()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()
        failed = [error for future in futures.values() if (error := future.exception()) is not None]
        by_itself = [error for error in failed if not isinstance(error, BrokenBarrierError)]
        for error in [*by_itself, *([self.elsewhere] if self.elsewhere else []), *failed]:
            raise error
        return {place: future.result() for place, future in futures.items()}

    def meet(self) -> Said:
        """Wait until all others have said something too, and then for this one's turn; gives what all have said."""
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()
        self._require_all()
        return self.told

    def _exchange(self) -> None:
        try:
            self.told = self.tell(dict(self.said))
        except BaseException as error:
            self.elsewhere = error
            raise BrokenBarrierError from error

    def _require_all(self) -> None:
        """Raises BrokenBarrierError where another has failed: what this one makes is of no use then."""
        if self.barrier.broken:
            raise BrokenBarrierError


class _Seat:
    def __init__(self, table: _Table[Any], place: int) -> None:
        self.table, self.place = table, place

    def gather(self, topic: str, mine: bytes) -> list[bytes]:
        self.table.said[self.place] = (topic, mine)
        told = self.table.meet()
        said = [told[place] for place in self.table.of_rank]
        require_one_topic([topic for topic, _ in said])
        return [text for _, text in said]


class _Other:
    """Another process that plans, as this one sees it."""

    def __init__(
        self, plan: Callable[[Given, Peers], Any], given: Mapping[int, Given], of_rank: Sequence[int], before: Sequence[_Other]
    ) -> None:
        context = multiprocessing.get_context("fork")
        self.link, theirs = context.Pipe()
        self.ranks = [rank for rank, place in enumerate(of_rank) if place in given]
        ours = [*(other.link for other in before), self.link]
        self.process = context.Process(target=_plan_for, args=(theirs, ours, plan, given, of_rank), daemon=True)
        self.process.start()
        theirs.close()

    def heard(self, wanted: Literal["said", "made"]) -> Any:
        """What it sends next: what its ranks say, or what was made for them.

        Raises:
            PlanError: It ended, or its ranks are at something else.
            Exception: What its ranks raised.
        """
        try:
            kind, heard = self.link.recv()
        except (EOFError, OSError):
            self.process.join()
            code, ranks = self.process.exitcode, ranks_text(self.ranks)
            hint = " (from outside, often for want of memory: `taskset -c 0 interlace plan ...` plans in one process)" if code == -9 else ""
            raise PlanError(f"the process that planned {ranks} ended with code {code} before it was done{hint}") from None
        if kind == "failed":
            error, trace = heard
            raise error from (None if isinstance(error, InterlaceError) else RuntimeError(f"in the process that made it:\n{trace}"))
        if kind != wanted:
            raise PlanError(f"{ranks_text(self.ranks)}: found what was {kind} where rank 0 waits for what is {wanted}; "
                            "give every rank the same configuration")  # fmt: skip
        return heard

    def end(self) -> None:
        """End it where it still runs."""
        self.process.kill()
        self.process.join()
        self.link.close()


def _told_to_all(said: Said, others: Sequence[_Other]) -> Said:
    """What the ranks of all processes say, which all are told."""
    told = said
    for other in others:
        told |= other.heard("said")
    for other in others:
        with suppress(OSError):  # it has ended: the next time it should say something tells why
            other.link.send(told)
    return told


class _Gone(Exception):
    """The process that made this one is there no longer."""


def _plan_for(
    link: Connection,
    not_mine: Sequence[Connection],
    plan: Callable[[Given, Peers], Any],
    given: Mapping[int, Given],
    of_rank: Sequence[int],
) -> None:
    """What another process does. The process that made it ends it, whatever signal comes; it ends by itself where that one is gone."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    for other in not_mine:
        other.close()

    def tell(said: Said) -> Said:
        try:
            link.send(("said", said))
            told: Said = link.recv()
        except (EOFError, OSError) as error:
            raise _Gone from error
        return told

    try:
        sent = _packed("made", _Table(given, of_rank, tell).run(plan))
    except _Gone:
        return
    except BaseException as error:
        sent = _packed("failed", (error, traceback.format_exc()))
    for stream in (sys.stdout, sys.stderr):  # it may be ended as soon as it has sent
        with suppress(OSError, ValueError):
            stream.flush()
    with suppress(OSError):
        link.send_bytes(sent)


def _packed(kind: str, what: Any) -> bytes:
    """A message, or one that says why it cannot be sent. An error is unpacked too: not all that can be packed can be made again."""
    try:
        packed = pickle.dumps((kind, what))
        if kind == "failed":
            pickle.loads(packed)
    except Exception as error:
        if kind == "failed":
            return pickle.dumps((kind, (PlanError(f"{type(what[0]).__name__}: {what[0]}"), what[1])))
        return pickle.dumps(("failed", (PlanError(f"a plan cannot be sent from the process that made it: {error}"), "")))
    return packed
