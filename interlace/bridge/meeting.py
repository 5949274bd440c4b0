"""Ranks that look at their machine together meet once, before what needs all of them: one that failed says why, and nobody waits long for
one that says nothing."""

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
    """The meeting as one rank sees it.

    Args:
        rank, world: This rank, and the number of all.
        connect: Gives Paddle's store, which is in the process of rank 0.
        wait_s: How long others are waited for.
    """

    def __init__(self, rank: int, world: int, connect: Callable[[], Any], wait_s: float = WAIT_S) -> None:
        self.rank, self.world, self.connect, self.wait_s = rank, world, connect, wait_s
        self.is_over = world < 2

    def come(self, why_not: str = "") -> str:
        """Come, or say why this rank does not. Gives which rank is missing and why, empty where all came; nothing when called again."""
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
    """Of the ranks that were started together; over already where Interlace's own transport, not Paddle's store, connects them."""
    env = paddle.distributed.ParallelEnv()
    meeting = Meeting(env.rank, env.world_size, paddle.base.core.create_or_get_global_tcp_store)
    meeting.is_over |= ops.has_transport()
    return meeting


def make_groups(of_ranks: Iterable[Iterable[int]]) -> list[Any]:
    """Groups of ranks, with communicators where this rank is in them. Every rank makes all of them, in one order; one has all ranks.

    Group 0 comes first: Paddle waits for the ranks of each group with a barrier of that one.
    """
    found = [new_process_group(list(ranks)) for ranks in of_ranks]
    get_process_group(0).instantiate()
    for group in found:
        group.instantiate()
    return found
