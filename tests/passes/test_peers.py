"""Ranks of one process that plan together."""

from __future__ import annotations

import time

import pytest

from interlace.errors import PlanError
from interlace.passes.peers import Peers, gather, plan_together


def test_ranks_take_turns_and_end_together() -> None:
    """Threads that all want Python's lock take it from each other; what they say is the same."""
    running, most = list[int](), list[int]()

    def plan(rank: int, peers: Peers) -> list[int]:
        said = list[int]()
        for turn in range(3):
            running.append(rank)
            time.sleep(0.002)
            most.append(len(running))
            running.remove(rank)
            said = gather(peers, f"turn {turn}", rank + turn)
        return said

    assert plan_together(plan, [0, 1, 2]) == [[2, 3, 4]] * 3
    assert most == [1] * 9


def test_a_rank_that_fails_ends_those_that_wait_for_it() -> None:
    def plan(rank: int, peers: Peers) -> int:
        if rank == 1:
            raise PlanError("no plan")
        return gather(peers, "plans", rank)[0]

    with pytest.raises(PlanError, match="no plan"):
        plan_together(plan, [0, 1, 2])


def test_ranks_whose_turn_comes_after_one_failed_do_not_plan() -> None:
    planned = []

    def plan(rank: int, peers: Peers) -> None:
        planned.append(rank)
        raise PlanError("no plan")

    with pytest.raises(PlanError, match="no plan"):
        plan_together(plan, [0, 1, 2])
    assert len(planned) == 1
