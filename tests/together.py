"""Ranks that plan together in a test: the worker of each, in this process, or one thread a rank as in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier, BrokenBarrierError, Lock
from typing import Any, TypeVar

from interlace.cost_model import Costs
from interlace.ir import Program
from interlace.passes.base import Pass
from interlace.passes.pipeline import PassReport, Pipeline
from interlace.planning.peers import Peers, require_one_topic
from interlace.planning.processes import world_of
from interlace.planning.tasks import finish, finished_plan
from interlace.planning.worker import Worker, spec_of
from interlace.planning.world import Made, World

Given = TypeVar("Given")
Result = TypeVar("Result")


@contextmanager
def together(given: Sequence[Program], costs: Costs | Sequence[Costs], passes: Sequence[Pass] = (), **more: Any) -> Iterator[World]:
    """Ranks 0, 1, ... with these programs; each with costs of its own where several are given."""
    of_rank = costs if isinstance(costs, Sequence) else [costs] * len(given)
    workers = [Worker(program, cost, passes, **more) for program, cost in zip(given, of_rank, strict=True)]
    with world_of(workers, range(len(given))) as found:
        yield found


def programs_of(found: World, made: Made) -> list[Program]:
    """By rank."""
    return [found.workers[place].programs[number] for place, number in zip(found.of_rank, made.programs, strict=True)]


def run_together(
    pipeline: Pipeline, given: Sequence[Program], costs: Costs | Sequence[Costs], **more: Any
) -> list[tuple[Program, list[PassReport]]]:
    """What passes make of ranks' programs, and what they say."""
    with together(given, costs, pipeline.passes, **more) as found:
        made = found.run(pipeline, found.memory_limits(None))
        reports = [
            [found.workers[place].steps[step].report for step in steps] for place, steps in zip(found.of_rank, made.steps, strict=True)
        ]
        return list(zip(programs_of(found, made), reports, strict=True))


def finished(found: World, made: Made) -> list[tuple[Program, tuple[PassReport, ...]]]:
    """The plans of a decision by rank, with their reports."""
    found.map(finish, tuple(map(spec_of, made.passes.passes)), made.programs, made.steps, made.notes, 0)
    return [(plan.program, reports) for plan, reports in found.map(finished_plan)]


def in_threads(call: Callable[[Given, Peers], Result], given: Sequence[Given]) -> list[Result]:
    """Call it for every rank, each in a thread of its own with the others as its peers. One runs at a time, until it waits for the others:
    msgspec 0.22 crashes where threads meet a type for the first time at once.

    Raises:
        Exception: What the first of them raised by itself.
    """
    said, heard, turn = [("", b"")] * len(given), list[tuple[str, bytes]](), Lock()

    def exchange() -> None:
        heard[:] = said

    barrier = Barrier(len(given), exchange, timeout=120)

    class Rank:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def gather(self, topic: str, mine: bytes) -> list[bytes]:
            """See `Peers`."""
            said[self.rank] = (topic, mine)
            turn.release()
            try:
                barrier.wait()
            finally:
                turn.acquire()
            require_one_topic([topic for topic, _ in heard])
            return [text for _, text in heard]

    def at(rank: int) -> Result:
        with turn:
            try:
                return call(given[rank], Rank(rank))
            except BaseException:
                barrier.abort()
                raise

    with ThreadPoolExecutor(len(given)) as pool:
        futures = [pool.submit(at, rank) for rank in range(len(given))]
    failed = [error for future in futures if (error := future.exception()) is not None]
    by_itself = [error for error in failed if not isinstance(error, BrokenBarrierError) and "BrokenBarrier" not in repr(error.__cause__)]
    for error in [*by_itself, *failed]:
        raise error
    return [future.result() for future in futures]
