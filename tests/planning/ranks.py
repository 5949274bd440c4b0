"""Ranks in one process or several, and tasks that say where they ran."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from interlace.cost_model import GivenCosts
from interlace.planning.processes import world_of
from interlace.planning.tasks import task
from interlace.planning.worker import Worker
from interlace.planning.world import World
from tests.strategies import World as Shape
from tests.strategies import programs

COSTS = GivenCosts({"comm": 100, "gemm": 50, "default": 10}, {("gemm", "comm"): (1.1, 1.2)})
RANKS = programs(Shape(pp=3, micro_batches=2))


@task
def who_am_i(worker: Worker, given: tuple[int, ...]) -> tuple[int, int, int]:
    """The rank, what was given for it, and the process that it is in."""
    print("rank", worker.seat)
    return worker.seat, given[worker.seat], os.getpid()


@task
def collected(worker: Worker) -> int:
    """How many objects are garbage in the process of the rank, and end."""
    return gc.collect()


DONE: list[int] = []


@contextmanager
def ranks(where: Sequence[int] = (), seats: Sequence[int] = (0, 1, 2)) -> Iterator[World]:
    """Three ranks in these processes; all but this one are gone afterwards."""
    DONE.clear()
    with world_of([Worker(program, COSTS) for program in RANKS], seats, where) as world:
        yield world
    assert not multiprocessing.active_children()
