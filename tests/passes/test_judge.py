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
from interlace.planning.peers import Peers
from interlace.planning.plan import make_plans
from interlace.planning.search import Search
from interlace.planning.variants import drafted
from interlace.scheduler.memory.live import saved_bytes
from interlace.scheduler.simulate.simulator import simulate
from interlace.units import size
from tests.default_passes import THROTTLED
from tests.remarks import rules_of, sentences
from tests.strategies import World, programs, worlds
from tests.together import finished, in_threads, programs_of, together

LOADED = GivenCosts({"comm": 100, "gemm": 50, "default": 10}, {("gemm", "comm"): (1.1, 1.2)})
CALM = GivenCosts({"comm": 2, "gemm": 50, "default": 10}, host_ns=1, job_ns=20)
MOVED = GivenCosts({"gemm": 50, "copy": 1, "default": 10})
SHAPE = World(pp=3, mp=2, micro_batches=2, layers=2)
"""Next to no communication to hide, and too few micro-batches for pairs to make up for what they delay."""


class Counted(Pass, frozen=True, kw_only=True):
    """A user's pass that counts its runs; what it makes is broken where asked for."""

    name = "counted"
    number: int = 0
    is_broken: bool = False

    def run(self, program: Program, context: Context) -> Program:
        RUNS.append(self.number)
        return program.with_ops([*program.ops, *program.ops]) if self.is_broken else program.with_ops(program.ops)


RUNS: list[int] = []


def test_a_pass_runs_once_on_the_same_program_with_the_same_room() -> None:
    """Of passes that differ at the end only what differs runs again; with other room for the rank all run, as they may look at it."""
    passes = [Passes((Counted(number=1), Counted(number=last))) for last in (2, 3, 2)]
    RUNS.clear()
    with together(programs(SHAPE), CALM, passes[0].passes) as world:
        made = [world.run(each, world.memory_limits(5), ranks=[0]) for each in passes]
        assert RUNS == [1, 2, 3]
        assert made[0].steps == made[2].steps != made[1].steps
        others = (None, *world.memory_limits(5)[1:])
        world.run(passes[0], (5, *others[1:]), ranks=[0])
        assert RUNS == [1, 2, 3]
        world.run(passes[0], others, ranks=[0])
        assert RUNS == [1, 2, 3, 1, 2]


def test_a_stage_keeps_its_offload_and_what_follows_where_another_has_less_room() -> None:
    plain = programs(World(pp=2, micro_batches=4, layers=3, schedule="1F1B"))
    passes = Passes((Schedule1F1B(interleave="off"), OffloadActivations(min_bytes=1), Counted()))
    with together(plain, MOVED, passes.passes) as world:
        memory_limits = ((900, 7), (900, 8), (700, 8))
        same, other, less = (programs_of(world, world.run(passes, each))[0] for each in memory_limits)
    assert "offload-activations" in same.passes
    assert same is other
    assert same.jobs != less.jobs
    assert same.ops != plain[0].ops


def test_a_pass_that_asks_no_rank_runs_again_only_where_its_own_has_other_room(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, memory_limits, run = Passes((Schedule1F1B(interleave="off"), ThrottleHost())), list[int | None](), ThrottleHost.run

    def counted(self: ThrottleHost, program: Program, context: Context) -> Program:
        if program.rank == 0:
            memory_limits.append(context.memory_limit)
        return run(self, program, context)

    monkeypatch.setattr(ThrottleHost, "run", counted)
    with together(programs(World(pp=2, micro_batches=4, layers=3, schedule="1F1B")), CALM) as world:
        for each in ((900, 7), (900, 8), (700, 8)):
            world.run(passes, each)
    assert memory_limits == [900, 700]


def test_what_other_options_make_too_is_known_to_later_passes() -> None:
    RUNS.clear()
    with together(programs(SHAPE)[:1], CALM, [Counted()], is_whole=False) as world:
        for numbers in ([1, 5], [2, 5]):
            world.run(Passes(tuple(Counted(number=each) for each in numbers)), (None,))
    assert RUNS == [1, 5, 2]


def test_a_pass_runs_again_where_the_facts_of_another_rank_are_others() -> None:
    """The second rank has less room: the first one, which has as much as before, hears that and decides the same."""
    passes = Passes((OffloadActivations(min_bytes=1),))
    with together(programs(World(pp=2, micro_batches=4, layers=3, schedule="1F1B")), MOVED) as world:
        before = world.run(Passes((Schedule1F1B(interleave="off"),)), world.memory_limits(None))
        first, again, other = (world.run(passes, memory_limits, before) for memory_limits in ((900, 900), (900, 900), (900, 700)))
    assert again.steps == first.steps
    assert first.steps[0] != other.steps[0]
    assert first.programs[0] == other.programs[0]


def test_what_a_draft_made_is_verified_where_the_whole_plan_takes_it() -> None:
    broken = Counted(is_broken=True)
    with together(programs(SHAPE), CALM, [broken]) as world:
        world.run(drafted(Passes((broken,))), world.memory_limits(None))
        with pytest.raises(InterlaceError, match=r"pass 'counted': rank 0: .* broken"):
            world.run(Passes((broken,)), world.memory_limits(None))


def judged(given_: Sequence[Program], form: str, costs: GivenCosts, **options: Any) -> tuple[list[Program], list[str], list[str]]:
    """Plans of all ranks together, the form that was kept, and rank 0's report lines."""
    passes = Passes((Schedule1F1B(interleave=form, **options), *THROTTLED))  # type: ignore[arg-type]
    with together(given_, costs, passes.passes) as world:
        run = Search(world, passes).judged(passes, world.memory_limits(None))
        found = finished(world, run)
    report = found[0][1][0]
    return [made for made, _ in found], [run.passes.passes[0].interleave], sentences(report.remarks)  # type: ignore[attr-defined]


def step_ns(made: Sequence[Program], costs: GivenCosts) -> int:
    return max(rank.step_ns for rank in simulate(made, costs).ranks)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(worlds(max_pp=3, max_micro_batches=6, schedule="1F1B"))
def test_no_plan_is_simulated_slower_than_the_plain_order(world: World) -> None:
    """Warm-up depth. Of any world, with and without host time; one rank a stage judges as the whole world would."""
    plain = programs(world)
    for costs in (LOADED, CALM):
        off = step_ns(judged(plain, "off", costs)[0], costs)
        for form in ("mixed", "dx-first"):
            made, _, _ = judged(plain, form, costs)
            assert step_ns(made, costs) <= off


def test_what_was_given_up_is_reported_and_can_be_kept() -> None:
    """Warm-up depth. Both figures stand in the report; `only_gains: off` keeps the form that was asked for."""
    plain = programs(SHAPE)
    weight_delay = (2, 0, 0)  # the first stage would end later for what it puts off
    made, forms, lines = judged(plain, "dx-first", CALM, weight_delay=weight_delay)
    assert set(forms) == {"dx-first"}
    line = next(line for line in lines if "it would be slower" in line)
    assert line.startswith("interleave: dx-first, weight_delay [2, 0, 0]: whole step simulated")
    kept = judged(plain, "dx-first", CALM, weight_delay=weight_delay, only_gains=False)
    assert step_ns(kept[0], CALM) > step_ns(made, CALM)


def test_depth_is_reported() -> None:
    """Warm-up depth."""
    lines = judged(programs(World(pp=3, mp=2, micro_batches=6, layers=2)), "mixed", LOADED)[2]
    saved = size(saved_bytes(programs(World(pp=3, mp=2, micro_batches=6, layers=2))[0]))
    assert f"mixed has 5 micro-batches in flight on stage 0, 2 more than 1F1B: {saved} of activations each" in lines


def test_a_stage_alone_does_not_judge() -> None:
    passes = Passes((Schedule1F1B(interleave="mixed"), *THROTTLED))
    with together(programs(SHAPE)[:1], CALM, is_whole=False) as world:
        run = Search(world, passes).judged(passes, (None,))
        ((_, reports),) = finished(world, run)
    assert run.passes == passes
    assert reports[0].declined[-1].rule == "stages-not-known"


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
    form = {"schedule_1f1b": {"interleave": "dx-first", "search": False}}
    for name in ("layers.0", "layers.3"):
        plans = make_plans(given, make_config({**form, key: {**table, "modules": [name]}}), LOADED, "h200")
        assert not any(each.rule == "no-such-layer" for plan in plans for report in plan.reports for each in report.declined)
    with pytest.raises((ConfigError, PassError), match=told) as found:
        make_plans(given, make_config({**form, key: {**table, "modules": ["tail"]}}), LOADED, "h200")
    assert not str(found.value).startswith("rank ")  # rank 0 finds it too


@pytest.mark.parametrize("key", ["split_backward", "overlap_column_backward"])
def test_a_stage_alone_says_what_it_lacks(key: str) -> None:
    """What is chosen. Whether another stage has the module is not known there; without a pipeline it is a mistake."""
    given = programs(World(pp=2, mp=2, micro_batches=4, layers=2))[:1]
    (plan,) = make_plans(given, make_config({key: {"modules": ["layers.3"]}}), LOADED, "h200")
    (line,) = sentences(each for report in plan.reports for each in report.declined if each.rule == "no-such-layer")
    assert line.startswith("modules: 'layers.3' matches no layer of stage 0; there are ")
    assert line.endswith("; the other stages are not known here")
    with pytest.raises(PassError, match="matches no layer of any rank"):
        make_plans(programs(World(mp=2, micro_batches=4)), make_config({key: {"modules": ["layers.9"]}}), LOADED, "h200")


def test_ranks_at_different_topics_are_told() -> None:
    """Equal plans."""

    def say(topic: str, peers: Peers) -> list[bytes]:
        return peers.gather(topic, topic.encode())

    assert in_threads(say, ["plan", "plan"]) == [[b"plan", b"plan"]] * 2
    with pytest.raises(PlanError, match="ranks 0 and 1 have different options: one is at 'plan', the other at 'offload'"):
        in_threads(say, ["plan", "offload"])


def test_a_named_form_takes_the_alternative_that_is_faster() -> None:
    """Beside a receive that waits products are slow; a host that waits at the ends of jobs posts it when it is due."""
    costs = GivenCosts({"comm": 20, "gemm": 100, "default": 10}, {("gemm", "wait"): (1.8, 1.0)})
    plain, common = programs(World(pp=2, mp=1, micro_batches=6, layers=4)), {"delay_transfers": "off"}
    schedule = {"interleave": "zb-h1", "only_gains": False, "search": False}
    for wide in (1 << 40, 0):  # a wide allowance for running ahead makes the host wait nowhere by itself
        open_, ends = (
            make_plans(plain, make_config({**common, "schedule_1f1b": schedule, "throttle_host": options}), costs, "given")
            for options in ({"run_ahead_bytes": wide}, {"syncs": "job-ends"})
        )
        took = [step_ns([plan.program for plan in plans], costs) for plans in (open_, ends)]
        assert took[0] <= took[1]
        report = next(each for each in open_[0].reports if each.name == "throttle-host")
        assert "form-faster" in rules_of(report.done)


def test_of_alternatives_the_fastest_that_keeps_the_budget_is_taken() -> None:
    """A host that waits at the ends of jobs holds less and is slower; where nothing keeps the budget, what exceeds it least is taken."""
    costs, plain = GivenCosts({"comm": 100, "gemm": 50, "default": 10}), programs(World(pp=2, micro_batches=4, layers=2, schedule="1F1B"))
    passes = make_config({"schedule_1f1b": {"interleave": "zb-h1", "only_gains": False}, "delay_transfers": "off"}).pipeline()

    def taken(budget: int) -> tuple[str, int]:
        with together(plain, costs, passes.passes) as world:
            run = Search(world, passes).judged(passes, world.memory_limits(None), budget)
            syncs = next(each.syncs for each in run.passes.passes if isinstance(each, ThrottleHost))
            return syncs, max(each or 0 for each in world.gpu_peaks(run))

    (fast, most), (slow, least) = taken(0), taken(1)
    assert (fast, slow) == ("auto", "job-ends")
    assert least < most
    assert [taken(budget)[0] for budget in (least, most - 1, most)] == ["job-ends", "job-ends", "auto"]
