"""Ranks that are planned by one command in one process or several, and ranks of a run that serve."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from interlace.config import make_config
from interlace.errors import BudgetError, PassError, PlanError
from interlace.interrupts import as_interrupts
from interlace.passes import DelayTransfers, NameStreams, Schedule1F1B
from interlace.passes.base import Context, Pass
from interlace.passes.pipeline import Pipeline
from interlace.planning import world as planning_world
from interlace.planning.peers import Peers
from interlace.planning.plan import make_plan, make_plans
from interlace.planning.processes import usable_processes, world_of
from interlace.planning.tasks import task
from interlace.planning.worker import Worker, digest_of
from interlace.planning.world import Draft, LinkError, decide
from tests.planning.ranks import COSTS, DONE, RANKS, collected, ranks, who_am_i
from tests.processes import alive, wait_until
from tests.strategies import World as Shape
from tests.strategies import programs
from tests.together import in_threads, run_together


class Ended:
    """Ends the process that collects it, as Paddle's executors do in a copy of theirs."""

    def __init__(self, owner: int) -> None:
        self.owner, self.itself = owner, self

    def __del__(self) -> None:
        if os.getpid() != self.owner:
            os._exit(11)


class Own(Exception):
    """Of a pass; not known elsewhere by name."""


@task
def fail(worker: Worker, how: str, on: tuple[int, ...]) -> int:
    """Fails on some ranks."""
    DONE.append(worker.seat)
    if worker.seat in on:
        if how == "budget":
            raise BudgetError("too little", 7)
        if how == "own":
            raise Own("of a pass")
        if how == "file":
            Path("/no/such/file").read_text()
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "interrupted":
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(60)
        if how == "unpacked":
            return object()  # type: ignore[return-value]
    return worker.seat


def test_what_was_garbage_before_is_left_alone_in_copies() -> None:
    """Its end may need threads that a copy of the process does not have."""
    Ended(os.getpid())
    with ranks(where=(0, 1, 1)) as world:
        assert len(world.map(collected)) == 3
        Ended(os.getpid())  # here it is collected as ever
    assert gc.isenabled()


def test_ranks_of_several_processes_answer_in_the_order_of_ranks() -> None:
    """Some are not asked. A rank may speak for several; every process is another one."""
    with ranks([0, 1, 2]) as world:
        found = world.map(who_am_i, (5, 6, 7))
        assert [each[:2] for each in found] == [(0, 5), (1, 6), (2, 7)]
        assert found[0][2] == os.getpid()
        assert len({each[2] for each in found}) == 3
        assert [each and each[0] for each in world.map(who_am_i, (0, 0, 0), ranks=[0, 2])] == [0, None, 2]
    with ranks([0, 1, 0], [0, 0, 1, 1, 2, 2]) as world:
        assert [each[0] for each in world.map(who_am_i, (0, 0, 0))] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("where", [[], [0, 1, 0], [0, 1, 1], [0, 1, 2]])
def test_the_first_rank_that_fails_is_named(where: list[int]) -> None:
    """Whatever process it is in; rank 0's errors are as they are where it plans alone."""
    with ranks(where) as world:
        with pytest.raises(BudgetError, match=r"^rank 1: too little$") as found:
            world.map(fail, "budget", (1, 2))
        assert found.value.least_bytes == 7
        with pytest.raises(BudgetError, match=r"^too little$"):
            world.map(fail, "budget", (0, 2))


def test_ranks_of_a_process_do_nothing_after_one_failed() -> None:
    with ranks() as world:
        with pytest.raises(BudgetError):
            world.map(fail, "budget", (1,))
        assert DONE == [0, 1]


def test_errors_of_other_classes_come_back_with_their_place() -> None:
    """One that is known here as itself, another one with its name; both with where they were raised."""
    with ranks([0, 1, 1]) as world:
        with pytest.raises(FileNotFoundError, match="/no/such/file") as found:
            world.map(fail, "file", (2,))
        assert "in fail" in str(found.value.__cause__)
        with pytest.raises(PlanError, match=r"^rank 1: Own: of a pass$") as other:
            world.map(fail, "own", (1,))
        assert "in fail" in str(other.value.__cause__)
        with pytest.raises(TypeError, match="object cannot be sent to another process"):
            world.map(fail, "unpacked", (1,))


def test_a_process_that_is_killed_is_named() -> None:
    """Where it should answer, and where it is asked again."""
    with ranks([0, 1, 1]) as world:
        for _ in range(2):
            with pytest.raises(LinkError, match=r"the process that planned ranks 1-2 ended with code -9 before it was done"):
                world.map(fail, "killed", (2,))


def test_processes_end_with_the_one_that_made_them(tmp_path: Path) -> None:
    """SIGKILL, while they wait for it; fails in `wait_until` where one lives on."""
    code = f"""
import os, time
from pathlib import Path
from tests.planning.ranks import ranks, who_am_i

with ranks([0, 1, 2]) as world:
    for rank, _, process in world.map(who_am_i, (0, 0, 0)):
        (Path({str(tmp_path)!r}) / str(rank)).write_text(str(process))
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    files = [tmp_path / str(rank) for rank in range(3)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    process.kill()
    process.wait()
    wait_until(lambda: not any(alive(file) for file in files[1:]))


@pytest.mark.slow
@pytest.mark.parametrize("budget", [pytest.param(None, marks=pytest.mark.long), 0.95])
def test_plans_of_several_processes_are_those_of_one(budget: float | None) -> None:
    given = programs(Shape(pp=2 if budget else 3, mp=2, micro_batches=4))
    config = make_config({"memory_budget": budget} if budget else {})
    counts = (8, 1) if budget else (2, 1)
    *others, one = (make_plans(given, config, COSTS, "given", count) for count in counts)  # this process knows nothing at first
    others.append(in_threads(lambda program, peers: make_plan(program, config, COSTS, "given", peers), given))
    for other in others:
        assert [digest_of(plan.program) for plan in other] == [digest_of(plan.program) for plan in one]
        assert [(plan.set_digest, plan.outcome, plan.memory_limit) for plan in other] == [
            (plan.set_digest, plan.outcome, plan.memory_limit) for plan in one
        ]
        assert [plan.passes for plan in other] == [plan.passes for plan in one]
        assert [plan.compared is not None for plan in other] == [True, *[False] * (len(given) - 1)]
        assert [[each.remarks for each in plan.reports] for plan in other] == [[each.remarks for each in plan.reports] for plan in one]


@pytest.mark.parametrize("where", [(0, 0, 0), (0, 1, 1), (0, 1, 2)])
def test_steps_are_simulated_in_several_processes_at_once(where: tuple[int, ...]) -> None:
    """They are those that this process finds; without another one nothing is simulated before it is asked for."""
    forms = [Pipeline((Schedule1F1B(interleave=form, search=False), NameStreams())) for form in ("off", "dx-first", "zb-h1")]
    later = (DelayTransfers(margin_us=0),)
    with ranks() as world:
        given = [Draft(world.run(form, world.memory_limits(None)), later) for form in forms]
        expected = [(world.step_ns(*draft[:2]), world.joules(*draft[:2])) for draft in given]
    assert None not in {step_ns for step_ns, _ in expected}
    assert len({*expected}) == 3
    with ranks(where) as world:
        given = [Draft(world.run(form, world.memory_limits(None)), later) for form in forms]
        world.simulate(given)
        assert world.has_helpers == (len({*where}) > 1) == bool(world._steps)
        asked = []
        world.plans = lambda made: asked.append(made) or []  # type: ignore[assignment, func-returns-value, method-assign]
        if world.has_helpers:
            assert [(world.step_ns(*draft[:2]), world.joules(*draft[:2])) for draft in given] == expected
            world.simulate(given)
        assert not asked


def test_a_simulation_that_fails_elsewhere_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(plans: Any, delaying: Any, cost: Any, representative: Any) -> None:
        if os.getpid() != owner:
            raise ValueError("not here")

    owner = os.getpid()
    monkeypatch.setattr("interlace.planning.tasks.simulated_step", failing)
    with ranks((0, 1, 1)) as world:
        forms = [Pipeline((Schedule1F1B(interleave=form, search=False),)) for form in ("off", "dx-first")]
        drafts = [Draft(world.run(form, world.memory_limits(None))) for form in forms]
        with pytest.raises(ValueError, match="not here"):
            world.simulate(drafts)


class Picky(Pass):
    """Fails on the last stage."""

    name = "picky"

    def run(self, program: Any, context: Context) -> Any:
        """As it is."""
        if program.pipeline.stage == program.pipeline.num_stages - 1:
            raise ValueError("not here")
        return program


def test_a_pass_that_fails_is_named_once() -> None:
    told = "rank 1: pass 'picky' failed with ValueError: not here; the program is as it was"
    given, passes = programs(Shape(pp=2, micro_batches=2)), Pipeline((Picky(),))
    with pytest.raises(PassError) as found:
        run_together(passes, given, COSTS)
    assert str(found.value) == told
    with world_of([Worker(program, COSTS, passes.passes) for program in given], [0, 1], [0, 1]) as world:
        with pytest.raises(PassError) as found:
            world.run(passes, world.memory_limits(None))
        assert str(found.value) == told


def test_as_many_processes_as_cores(monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 3}, raising=False)
    assert usable_processes() == 2
    monkeypatch.setattr(sys, "platform", "darwin")
    assert usable_processes() == 1


def test_what_another_process_prints_is_not_lost(tmp_path: Path) -> None:
    """Standard output is a file, so that lines wait in a buffer."""
    code = "from tests.planning.ranks import ranks, who_am_i\nwith ranks([0, 1, 2]) as world:\n    world.map(who_am_i, (0, 0, 0))\n"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, env=env, check=True)
    assert sorted((tmp_path / "out").read_text().splitlines()) == ["rank 0", "rank 1", "rank 2"]


def test_an_interrupt_is_heard_while_another_process_plans() -> None:
    """The other one hears no signal itself."""
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), as_interrupts(), ranks([0, 1, 1]) as world:
        world.map(fail, "interrupted", (1,))
    assert time.monotonic() - start < 20
    assert not multiprocessing.active_children()


# ------------------------------------------------------------------------------------------------------------- ranks of a run


def served(search: Any, given: Sequence[Any] = RANKS, options: Sequence[str] = ("", "", "")) -> list[Any]:
    """What each rank gets: the decision, or the error that it ends with."""

    def one(each: tuple[Any, str], peers: Peers) -> Any:
        try:
            return decide(Worker(each[0], COSTS, options=each[1]), peers, search, list[int])
        except Exception as error:
            return error

    return in_threads(one, list(zip(given, options, strict=True)))


def test_ranks_of_a_run_do_what_rank_0_asks_for_and_hear_what_it_decided() -> None:
    assert served(lambda world: [each[1] for each in world.map(who_am_i, (5, 6, 7))]) == [[5, 6, 7]] * 3
    assert served(lambda world: [sum(each is None for each in world.map(who_am_i, (0, 0, 0), ranks=[1]))]) == [[2]] * 3


@pytest.mark.parametrize(
    ("search", "kind", "told"),
    [
        (lambda world: world.map(fail, "budget", (2,)), BudgetError, "rank 2: too little"),
        (lambda world: world.map(fail, "budget", (0, 1)), BudgetError, "too little"),
        (lambda world: world.map(fail, "own", (1,)), PlanError, "rank 1: Own: of a pass"),
        (lambda world: [][1], IndexError, "list index out of range"),
    ],
)
def test_an_error_ends_all_ranks_alike(search: Any, kind: type[Exception], told: str) -> None:
    found = served(search)
    assert [type(each) for each in found] == [kind] * 3
    assert {str(each) for each in found} == {told}
    assert {getattr(each, "least_bytes", 7) for each in found} == {7}


def test_ranks_with_other_options_are_refused_alike() -> None:
    found = served(lambda world: [0], options=("[h200]", "[h200]", "[cpu]"))
    assert {str(each) for each in found} == {
        "ranks 0 and 2 planned with different options: [h200] and [cpu]; give every rank the same configuration and device profile"
    }


def test_where_a_rank_is_gone_nobody_is_told() -> None:
    """Rank 0 ends with what the transport says: to tell the others it would wait for that rank once more."""
    said = list[str]()

    class Gone:
        def gather(self, topic: str, mine: bytes) -> list[bytes]:
            said.append(topic)
            if len(said) > 1:
                raise PlanError("rank 1 sent nothing")
            return [mine] * 3

    with pytest.raises(PlanError, match="rank 1 sent nothing"):
        decide(Worker(RANKS[0], COSTS), Gone(), lambda world: world.map(who_am_i, (0, 0, 0)), list[int])
    assert said == ["ranks", "what is asked"]


def test_a_step_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither asked for again, nor made by a rank that knows it."""
    runs, run = list[int](), planning_world.run_passes

    def counted(worker: Worker, *given: Any) -> Any:
        runs.append(worker.seat)
        return run(worker, *given)

    monkeypatch.setattr(planning_world, "run_passes", counted)
    passes = make_config({"schedule_1f1b": {"interleave": "off"}, "narrow_gathers": "off", "choose_recompute": "off"}).pipeline()
    with world_of([Worker(program, COSTS) for program in RANKS], [0, 1, 2]) as world:
        first, again = (world.run(passes, world.memory_limits(2)) for _ in range(2))
        assert again == first
        count, steps = len(runs), len(world.workers[0].steps)
        # the last one, throttle-host, looks at its room
        assert world.run(passes, world.memory_limits(1)).steps[0][:2] == first.steps[0][:2]
        assert len(runs) == 2 * count
        assert len(world.workers[0].steps) < 2 * steps
