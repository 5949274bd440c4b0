"""Whole steps decide: a form that is simulated slower than the plain order is not taken, and all ranks take the same one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings

from interlace.config import make_config
from interlace.cost_model import GivenCosts
from interlace.errors import ConfigError, InterlaceError, PassError, PlanError
from interlace.ir import Program
from interlace.passes import Context, OffloadActivations, Pass, Schedule1F1B, ThrottleHost
from interlace.passes import Pipeline as Passes
from interlace.passes.peers import Peers
from interlace.planning.budget import peak_bytes
from interlace.planning.judge import run_judged
from interlace.planning.plan import make_plans
from interlace.planning.together import plan_together
from interlace.scheduler.memory.saved import saved_bytes
from interlace.scheduler.simulate.simulator import simulate
from interlace.units import size
from tests.default_passes import THROTTLED
from tests.strategies import World, programs, worlds

LOADED = GivenCosts({"comm": 100, "gemm": 50, "default": 10}, {("gemm", "comm"): (1.1, 1.2)})
CALM = GivenCosts({"comm": 2, "gemm": 50, "default": 10}, host_ns=1, job_ns=20)
MOVED = GivenCosts({"gemm": 50, "copy": 1, "default": 10})
SHAPE = World(pp=3, mp=2, micro_batches=2, layers=2)
"""Next to no communication to hide, and too few micro-batches for pairs to make up for what they delay."""


@pytest.fixture(autouse=True)
def _short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlace.scheduler.interleave.planner.SEARCH_WORK", 2_000)


class Counted(Pass, frozen=True, kw_only=True):
    """A user's pass that counts its runs; what it makes is broken where asked for."""

    name = "counted"
    number: int = 0
    is_broken: bool = False

    def run(self, program: Program, context: Context) -> Program:
        RUNS.append(self.number)
        return program.with_ops([*program.ops, *program.ops]) if self.is_broken else program.with_ops(program.ops)


RUNS: list[int] = []


def test_a_pass_runs_once_on_the_same_program_with_the_same_rooms() -> None:
    """Of passes that differ at the end only what differs runs again; other rooms, and no rooms given, run all."""
    program, memo = programs(SHAPE)[0], dict[Any, Any]()
    passes = [Passes((Counted(number=1), Counted(number=last))) for last in (2, 3, 2)]
    RUNS.clear()
    made = [each.run(program, CALM, None, 5, memo, (5, 7))[0] for each in passes]
    assert RUNS == [1, 2, 3]
    assert made[0] is made[2]
    passes[0].run(program, CALM, None, 5, memo, (5, 8))
    passes[0].run(program, CALM, None, 5, memo)
    assert RUNS == [1, 2, 3, 1, 2, 1, 2]


def test_a_stage_keeps_its_offload_and_what_follows_where_another_has_less_room() -> None:
    program, memo = programs(World(pp=2, micro_batches=4, layers=3, schedule="1F1B"))[0], dict[Any, Any]()
    passes = Passes((Schedule1F1B(interleave="off"), OffloadActivations(min_bytes=1), Counted()))
    RUNS.clear()
    same, other, less = (passes.run(program, MOVED, None, room, memo, (room, more))[0] for room, more in ((900, 7), (900, 8), (700, 8)))
    assert "offload-activations" in same.passes
    assert same.jobs == other.jobs != less.jobs
    assert same.ops is other.ops is not less.ops
    assert same.ops != program.ops


def test_a_pass_that_asks_no_rank_runs_again_only_where_its_own_has_other_room(monkeypatch: pytest.MonkeyPatch) -> None:
    program, memo = programs(World(pp=2, micro_batches=4, layers=3, schedule="1F1B"))[0], dict[Any, Any]()
    passes, rooms, run = Passes((Schedule1F1B(interleave="off"), ThrottleHost())), list[int | None](), ThrottleHost.run

    def counted(self: ThrottleHost, program: Program, context: Context) -> Program:
        rooms.append(context.room_bytes)
        return run(self, program, context)

    monkeypatch.setattr(ThrottleHost, "run", counted)
    for room, more in ((900, 7), (900, 8), (700, 8)):
        passes.run(program, CALM, None, room, memo, (room, more))
    assert rooms == [900, 700]


def test_what_other_options_make_too_is_known_to_later_passes() -> None:
    program, memo = programs(SHAPE)[0], dict[Any, Any]()
    RUNS.clear()
    for numbers in ([1, 5], [2, 5]):
        Passes((*(Counted(number=each) for each in numbers),)).run(program, CALM, None, None, memo, (None,))
    assert RUNS == [1, 5, 2]


def test_facts_are_gathered_on_all_ranks_where_one_does_not_know_what_a_pass_makes() -> None:
    """The first rank plans the very same program again, the second another one."""
    passes = Passes((Schedule1F1B(interleave="off"), OffloadActivations(min_bytes=1), Counted()))
    RUNS.clear()

    def made(program: Program, peers: Peers) -> list[Program]:
        memo = dict[Any, Any]()
        second = program.with_ops(program.ops) if program.rank else program
        return [passes.run(each, MOVED, peers, 900, memo, (900, 900))[0] for each in (program, program, second)]

    (first, again, other), (_, _, changed) = plan_together(made, programs(World(pp=2, micro_batches=4, layers=3, schedule="1F1B")))
    assert again is first
    assert first.ops is other.ops
    assert changed.jobs


def test_what_a_draft_made_is_verified_where_the_whole_plan_takes_it() -> None:
    program, memo, broken = programs(SHAPE)[0], dict[Any, Any](), Counted(is_broken=True)
    Passes((broken,)).draft().run(program, CALM, None, None, memo, (None,))
    with pytest.raises(InterlaceError, match=r"pass 'counted': rank 0: .* broken"):
        Passes((broken,)).run(program, CALM, None, None, memo, (None,))


def judged(given_: Sequence[Program], form: str, costs: GivenCosts, **options: Any) -> tuple[list[Program], list[str], list[str]]:
    """Plans of all ranks together, the form that each kept, and rank 0's report lines."""

    def plan(program: Program, peers: Peers) -> tuple[Program, str, list[str]]:
        passes = Passes((Schedule1F1B(interleave=form, **options), *THROTTLED))  # type: ignore[arg-type]
        kept, made, reports = run_judged(passes, program, costs, peers)
        return made, kept.passes[0].interleave, [*reports[0].changed, *reports[0].declined]  # type: ignore[attr-defined]

    found = plan_together(plan, given_)
    return [made for made, _, _ in found], [form for _, form, _ in found], found[0][2]


def step_ns(made: Sequence[Program], costs: GivenCosts) -> int:
    return max(rank.step_ns for rank in simulate(made, costs).ranks)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(worlds(max_pp=3, max_micro_batches=6, schedule="1F1B"))
def test_no_plan_is_simulated_slower_than_the_plain_order(world: World) -> None:
    """Warm-up depth. Of any world, with and without host time; one rank a stage judges as the whole world would."""
    plain = programs(world)
    for costs in (LOADED, CALM):
        off = step_ns(judged(plain, "off", costs)[0], costs)
        for form in ("mixed", "dx-first"):
            made, forms, _ = judged(plain, form, costs)
            assert len(set(forms)) == 1
            assert step_ns(made, costs) <= off


def test_what_was_given_up_is_reported_and_can_be_kept() -> None:
    """Warm-up depth. Both figures stand in the report; `only_gains: off` keeps the form that was asked for."""
    plain = programs(SHAPE)
    lag = (2, 0, 0)  # the first stage would end later for what it puts off
    made, forms, lines = judged(plain, "dx-first", CALM, lag=lag)
    assert set(forms) == {"dx-first"}
    line = next(line for line in lines if "it would be slower" in line)
    assert line.startswith("interleave: dx-first, lag [2, 0, 0]: whole step simulated")
    kept = judged(plain, "dx-first", CALM, lag=lag, only_gains=False)
    assert step_ns(kept[0], CALM) > step_ns(made, CALM)


def test_depth_is_reported() -> None:
    """Warm-up depth."""
    lines = judged(programs(World(pp=3, mp=2, micro_batches=6, layers=2)), "mixed", LOADED)[2]
    saved = size(saved_bytes(programs(World(pp=3, mp=2, micro_batches=6, layers=2))[0]))
    assert f"mixed has 5 micro-batches in flight on stage 0, 2 more than 1F1B: {saved} of activations each" in lines


def test_a_stage_alone_does_not_judge() -> None:
    passes = Passes((Schedule1F1B(interleave="mixed"), *THROTTLED))
    kept, _, reports = run_judged(passes, programs(SHAPE)[0], CALM)
    assert kept == passes
    assert "the other stages' plans are not known here" in reports[0].declined[-1]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"offload_activations": {"min_bytes": 0}}, r"'tail' fits no layer; there are head, "),
        ({"split_backward": {}}, r"split-backward': modules: 'tail' matches no layer of any rank; there are .*layers.3"),
        ({"overlap_column_backward": {}}, r"column-backward': modules: 'tail' matches no layer of any rank; there are "),
    ],
)
def test_names_of_all_ranks_are_asked(options: dict[str, dict[str, Any]], told: str) -> None:
    """What is chosen. A module of another stage is known; one that no rank has is an error on every rank."""
    given = programs(World(pp=2, mp=2, micro_batches=4, layers=2))
    ((key, table),) = options.items()
    for name in ("layers.0", "layers.3"):
        plans = make_plans(given, make_config({key: {**table, "modules": [name]}}), LOADED, "h200")
        assert not any("matches no layer" in line for plan in plans for report in plan.reports for line in report.declined)
    with pytest.raises((ConfigError, PassError), match=told) as found:
        make_plans(given, make_config({key: {**table, "modules": ["tail"]}}), LOADED, "h200")
    assert "BrokenBarrier" not in repr(found.value)


@pytest.mark.parametrize("key", ["split_backward", "overlap_column_backward"])
def test_a_stage_alone_says_what_it_lacks(key: str) -> None:
    """What is chosen. Whether another stage has the module is not known there; without a pipeline it is a mistake."""
    given = programs(World(pp=2, mp=2, micro_batches=4, layers=2))[:1]
    (plan,) = make_plans(given, make_config({key: {"modules": ["layers.3"]}}), LOADED, "h200")
    lines = [line for report in plan.reports for line in report.declined if "matches no layer" in line]
    assert len(lines) == 1
    assert lines[0].startswith("modules: 'layers.3' matches no layer of stage 0; there are ")
    assert lines[0].endswith("; the other stages are not known here")
    with pytest.raises(PassError, match="matches no layer of any rank"):
        make_plans(programs(World(mp=2, micro_batches=4)), make_config({key: {"modules": ["layers.9"]}}), LOADED, "h200")


def test_ranks_at_different_topics_are_told() -> None:
    """Equal plans."""

    def say(topic: str, peers: Peers) -> list[bytes]:
        return peers.gather(topic, topic.encode())

    assert plan_together(say, ["plan", "plan"]) == [[b"plan", b"plan"]] * 2
    with pytest.raises(PlanError, match="ranks 0 and 1 planned with different options: one is at 'plan', the other at 'offload'"):
        plan_together(say, ["plan", "offload"])


def test_a_named_form_takes_the_alternative_that_is_faster() -> None:
    """Beside a receive that waits products are slow; a host that waits at the ends of jobs posts it when it is due."""
    costs = GivenCosts({"comm": 20, "gemm": 100, "default": 10}, {("gemm", "wait"): (1.8, 1.0)})
    plain, common = programs(World(pp=2, mp=1, micro_batches=6, layers=4)), {"delay_transfers": "off"}
    schedule = {"interleave": "zb-h1", "only_gains": False, "search": False}
    for wide in (1 << 40, 0):  # a wide allowance for running ahead makes the host wait nowhere by itself
        open_, ends = (make_plans(plain, make_config({**common, "schedule_1f1b": schedule, "throttle_host": options}), costs, "given")
                       for options in ({"run_ahead_bytes": wide}, {"syncs": "job-ends"}))  # fmt: skip
        took = [step_ns([plan.program for plan in plans], costs) for plans in (open_, ends)]
        assert took[0] <= took[1]
        report = next(each for each in open_[0].reports if each.name == "throttle-host")
        assert any("whole step simulated" in line for line in report.changed)


def test_of_alternatives_the_fastest_that_keeps_the_budget_is_taken() -> None:
    """A host that waits at the ends of jobs holds less and is slower; where nothing keeps the budget, what exceeds it least is taken."""
    costs, plain = GivenCosts({"comm": 100, "gemm": 50, "default": 10}), programs(World(pp=2, micro_batches=4, layers=2, schedule="1F1B"))
    passes = make_config({"schedule_1f1b": {"interleave": "zb-h1", "only_gains": False}, "delay_transfers": "off"}).pipeline()

    def taken(budget: int) -> tuple[str, int]:
        runs = plan_together(lambda program, peers: run_judged(passes, program, costs, peers, None, budget), plain)
        syncs = next(each.syncs for each in runs[0][0].passes if isinstance(each, ThrottleHost))
        return syncs, max(peak_bytes(program, costs) or 0 for _, program, _ in runs)

    (fast, most), (slow, least) = taken(0), taken(1)
    assert (fast, slow) == ("auto", "job-ends")
    assert least < most
    assert [taken(budget)[0] for budget in (least, most - 1, most)] == ["job-ends", "job-ends", "auto"]
