"""A meeting of all ranks before a check that needs all of them: a rank that failed says why, and nobody waits long for one that says
nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import paddle
from paddle.distributed.auto_parallel.static.process_group import get_process_group, new_process_group

from interlace.bridge.guard import attempt
from interlace.cpu import ops

KEY = "interlace/meeting"
WAIT_S = 120.0
POLL_S = 0.05


class Meeting:
    """The meeting from the view of one rank.

    Args:
        rank, world: This rank, and the number of ranks.
        connect: Connects to Paddle's store, which is in the process of rank 0.
        wait_s: Seconds to wait for the others.
    """

    def __init__(self, rank: int, world: int, connect: Callable[[], Any], wait_s: float = WAIT_S) -> None:
        self.rank, self.world, self.connect, self.wait_s = rank, world, connect, wait_s
        self.is_over = world < 2

    def come(self, why_not: str = "") -> str:
        """Report to the meeting, or say why this rank cannot take part. Returns which rank is missing and why; empty if none is, or if
        called again."""
        if self.is_over:
            return ""
        self.is_over, until_s = True, time.monotonic() + self.wait_s
        found: list[tuple[Any, Exception | None]] = []
        thread = threading.Thread(target=lambda: found.append(attempt(self.connect)), daemon=True)
        thread.start()
        thread.join(self.wait_s)  # Paddle's own wait for rank 0 takes minutes
        store, failure = found[0] if found else (None, TimeoutError(f"nothing for {self.wait_s:g} s"))
        if failure is None:
            missing, failure = attempt(lambda: self._met(store, why_not, until_s))
        return missing if failure is None else f"rank 0, in whose process all ranks meet, is not there: {failure}"

    def _met(self, store: Any, why_not: str, until_s: float) -> str:
        store.set(f"{KEY}/{self.rank}", why_not.encode() or b" ")
        store.add(f"{KEY}/{self.rank}/there", 1)
        if why_not and self.rank:
            store.add(f"{KEY}/gone", 1)
            return ""
        missing = next((said for rank in range(self.world) if (said := self._said(store, rank, until_s))), "")
        gone = store.add(f"{KEY}/gone", 1)
        while self.rank == 0 and gone < self.world and time.monotonic() < until_s:  # the store ends with this process
            time.sleep(POLL_S)
            gone = store.add(f"{KEY}/gone", 0)
        return missing

    def _said(self, store: Any, rank: int, until_s: float) -> str:
        """Why a rank is missing; empty if it came."""
        while not store.add(f"{KEY}/{rank}/there", 0):
            if time.monotonic() > until_s:
                return f"rank {rank} said nothing for {self.wait_s:g} s"
            time.sleep(POLL_S)
        why = bytes(store.get(f"{KEY}/{rank}")).decode().strip()
        return f"rank {rank} failed before: {why}" if why else ""


def meeting_of_run() -> Meeting:
    """The meeting of all ranks of this run; already over if they are connected by Interlace's own transport rather than Paddle's store."""
    env = paddle.distributed.ParallelEnv()
    meeting = Meeting(env.rank, env.world_size, paddle.base.core.create_or_get_global_tcp_store)
    meeting.is_over |= ops.has_transport()
    return meeting


def make_groups(of_ranks: Iterable[Iterable[int]]) -> list[Any]:
    """Make groups of ranks, with communicators for those that this rank is in. Every rank must make all of them, in the same order, and one
    must have all ranks.

    Group 0 is connected first, because Paddle waits for the ranks of each new group with a barrier on it.
    """
    found = [new_process_group(list(ranks)) for ranks in of_ranks]
    get_process_group(0).instantiate()
    for group in found:
        group.instantiate()
    return found
