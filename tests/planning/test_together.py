"""Ranks that are planned by one call, in one process or several."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from interlace.config import make_config
from interlace.cost_model import GivenCosts
from interlace.errors import BudgetError, PassError, PlanError
from interlace.interrupts import as_interrupts
from interlace.passes.base import Context, Pass
from interlace.passes.peers import Peers, gather
from interlace.passes.pipeline import Pipeline
from interlace.planning.plan import digest_of, make_plans
from interlace.planning.together import plan_together, usable_processes
from tests.processes import alive, wait_until
from tests.strategies import World, programs

COSTS = GivenCosts({"comm": 100, "gemm": 50, "default": 10}, {("gemm", "comm"): (1.1, 1.2)})


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


def test_ranks_of_several_processes_hear_each_other() -> None:
    """Two ranks that each speak for two of the world, of six; every process is another one, and all are gone afterwards."""

    def plan(rank: int, peers: Peers) -> tuple[list[int], list[int], int]:
        return gather(peers, "ranks", rank), gather(peers, "squares", rank * rank), os.getpid()

    made = plan_together(plan, [0, 1, 2, 3], [0, 0, 1, 2, 3, 3], [0, 1, 0, 2])
    assert [each[:2] for each in made] == [([0, 0, 1, 2, 3, 3], [0, 0, 1, 4, 9, 9])] * 4
    assert made[0][2] == made[2][2] == os.getpid()
    assert len({each[2] for each in made}) == 3
    assert not multiprocessing.active_children()


def failing(rank: int, peers: Peers) -> list[int]:
    """Rank 1 fails; its peers wait for it."""
    if rank == 1:
        raise BudgetError("too little", 7)
    return gather(peers, "plans", rank)


@pytest.mark.parametrize("where", [[0, 1, 0], [0, 1, 1], [0, 1, 2]])
def test_an_error_of_another_process_is_raised_here(where: list[int]) -> None:
    with pytest.raises(BudgetError, match="too little") as found:
        plan_together(failing, [0, 1, 2], (), where)
    assert found.value.least_bytes == 7
    assert not multiprocessing.active_children()


def test_an_error_here_ends_the_others() -> None:
    def plan(rank: int, peers: Peers) -> list[int]:
        if rank == 0:
            raise PlanError("no plan")
        return gather(peers, "plans", rank)

    with pytest.raises(PlanError, match="no plan"):
        plan_together(plan, [0, 1, 2], (), [0, 1, 2])
    assert not multiprocessing.active_children()


def test_an_error_that_cannot_be_sent_is_told() -> None:
    class Own(Exception):  # not known by name, as pickle needs it
        pass

    def plan(rank: int, peers: Peers) -> list[int]:
        if rank:
            raise Own("of a pass")
        return gather(peers, "plans", rank)

    with pytest.raises(PlanError, match="Own: of a pass"):
        plan_together(plan, [0, 1], (), [0, 1])


@pytest.mark.parametrize("late", [False, True])
def test_a_process_that_is_killed_is_named(late: bool) -> None:
    """While the others wait for what it says, and for its plan."""

    def plan(rank: int, peers: Peers) -> list[int]:
        said = gather(peers, "plans", rank) if late else []
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return said or gather(peers, "plans", rank)

    with pytest.raises(PlanError, match=r"the process that planned ranks 1-2 ended with code -9 before it was done"):
        plan_together(plan, [0, 1, 2], (), [0, 1, 1])


def test_different_topics_are_told_across_processes() -> None:
    def say(topic: str, peers: Peers) -> list[bytes]:
        return peers.gather(topic, topic.encode())

    with pytest.raises(PlanError, match="ranks 0 and 1 planned with different options: one is at 'plan', the other at 'offload'"):
        plan_together(say, ["plan", "offload"], (), [0, 1])


def test_processes_end_with_the_one_that_made_them(tmp_path: Path) -> None:
    """SIGKILL, while one waits for it; fails in `wait_until` where one lives on."""
    code = f"""
import os, time
from pathlib import Path
from interlace.planning.together import plan_together

def plan(rank, peers):
    (Path({str(tmp_path)!r}) / str(rank)).write_text(str(os.getpid()))
    if rank == 0:
        time.sleep(60)
    return peers.gather("plans", b"")

plan_together(plan, [0, 1, 2], (), [0, 1, 2])
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    files = [tmp_path / str(rank) for rank in range(3)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    process.kill()
    process.wait()
    wait_until(lambda: not any(alive(file) for file in files[1:]))


@pytest.mark.parametrize("budget", [None, 0.93])
def test_plans_of_several_processes_are_those_of_one(budget: float | None) -> None:
    given = programs(World(pp=3, mp=2, micro_batches=4, layers=2))
    config = make_config({"memory_budget": budget} if budget else {})
    *others, one = (make_plans(given, config, COSTS, "given", count) for count in (8, 2, 1))  # this process knows nothing at first
    for other in others:
        assert [digest_of(plan.program) for plan in other] == [digest_of(plan.program) for plan in one]
        assert [(plan.set_digest, plan.outcome, plan.room_bytes) for plan in other] == [(plan.set_digest, plan.outcome, plan.room_bytes)
                                                                                        for plan in one]  # fmt: skip
        assert [[(each.changed, each.declined) for each in plan.reports] for plan in other] == [
            [(each.changed, each.declined) for each in plan.reports] for plan in one
        ]


class Picky(Pass):
    """Fails on the last stage."""

    name = "picky"

    def run(self, program: Any, context: Context) -> Any:
        """As it is."""
        if program.pipeline.stage == program.pipeline.num_stages - 1:
            raise ValueError("not here")
        return program


def test_a_pass_that_fails_in_another_process_is_named_once() -> None:
    def plan(program: Any, peers: Peers) -> Any:
        return Pipeline((Picky(),)).run(program, COSTS, peers)[0]

    with pytest.raises(PassError) as found:
        plan_together(plan, programs(World(pp=2, micro_batches=2)), (), [0, 1])
    assert str(found.value) == "pass 'picky' failed with ValueError: not here; the program is as it was"


def test_as_many_processes_as_cores(monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 3}, raising=False)
    assert usable_processes() == 2
    monkeypatch.setattr(sys, "platform", "darwin")
    assert usable_processes() == 1


def test_a_file_that_another_process_lacks_is_named() -> None:
    """An error of the system is not taken for a broken pipe; where it was raised is told."""

    def plan(rank: int, peers: Peers) -> list[int]:
        if rank:
            Path("/no/such/file").read_text()
        return gather(peers, "plans", rank)

    with pytest.raises(FileNotFoundError, match="/no/such/file") as found:
        plan_together(plan, [0, 1], (), [0, 1])
    assert "in plan" in str(found.value.__cause__)


def test_plans_that_cannot_be_sent_are_told() -> None:
    with pytest.raises(PlanError, match=r"a plan cannot be sent from the process that made it: .*lambda"):
        plan_together(lambda rank, peers: lambda: rank, [0, 1], (), [0, 1])


@pytest.mark.parametrize("more", [0, 1])
def test_processes_that_ask_for_other_things_are_told(more: int) -> None:
    """Where this process has planned and another one asks on, and the other way round."""

    def plan(rank: int, peers: Peers) -> int:
        said = gather(peers, "plans", rank)
        return len(gather(peers, "more", rank)) if rank == more else len(said)

    with pytest.raises(PlanError, match=r"rank 1: found what was (said|made) where rank 0 waits for what is (made|said)"):
        plan_together(plan, [0, 1], (), [0, 1])


def test_what_another_process_prints_is_not_lost(tmp_path: Path) -> None:
    """Standard output is a file, so that lines wait in a buffer."""
    code = """
from interlace.planning.together import plan_together

def plan(rank, peers):
    print("rank", rank)
    return rank

plan_together(plan, [0, 1, 2], (), [0, 1, 2])
"""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, env=env, check=True)
    assert sorted((tmp_path / "out").read_text().splitlines()) == ["rank 0", "rank 1", "rank 2"]


@pytest.mark.main_thread
@pytest.mark.parametrize("waits", [False, True])
def test_an_interrupt_is_heard_while_another_process_plans(waits: bool) -> None:
    """While this process waits for what the other says, and for its plans; the other one hears no signal itself."""

    def plan(rank: int, peers: Peers) -> int:
        if rank:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(60)
        return len(gather(peers, "plans", rank)) if waits else rank

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), as_interrupts():
        plan_together(plan, [0, 1], (), [0, 1])
    assert time.monotonic() - start < 20
    assert not multiprocessing.active_children()
