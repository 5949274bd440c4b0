"""`interleave: auto`: never slower than Paddle's baseline or a named form that holds no more, and the same on every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.config import make_config
from interlace.cost_model import CostModel, GivenCosts, load_profile
from interlace.errors import BudgetError
from interlace.ir import Program, parse
from interlace.ir.program import Pipeline as PipelineOfStages
from interlace.ir.remarks import Remark
from interlace.ir.target import CPU, CUSTOM, GPU
from interlace.passes import ChooseRecompute, Pass, Pipeline, ReturnMemory, Schedule1F1B, ThrottleHost
from interlace.planning import budget, coarse, fastest, tasks
from interlace.planning.budget import baseline_peak_bytes, peak_bytes
from interlace.planning.drafts import Drafts, Judged
from interlace.planning.fastest import _in_full
from interlace.planning.limits import Limit
from interlace.planning.making import BASELINE_KEPT, FORM_TAKEN, Beaten, Making
from interlace.planning.plan import Plan, make_plans
from interlace.planning.proposals import (
    HALVINGS,
    MORE,
    PROPOSALS,
    Tried,
    coarse_schedules,
    in_less_memory,
    in_paddles_order,
    less_recomputed,
    levels_between,
    more_on_one_stage,
    more_recomputed,
    same_recomputed,
    tighter,
)
from interlace.planning.search import Search
from interlace.planning.tasks import MemoryLimits
from interlace.planning.variants import paddles_jobs
from interlace.planning.world import World as Ranks
from interlace.scheduler.hazards import check
from interlace.scheduler.memory.live import in_order
from interlace.scheduler.simulate.simulator import simulate
from interlace.scheduler.whole_step.search import Ranked
from interlace.units import ms, size
from tests.passes.recomputed import PLAIN, layered
from tests.planning.costs import FairCosts
from tests.proofs import KNOWN
from tests.remarks import rules_of, sentences
from tests.strategies import World, programs, worlds
from tests.together import together

LOADED = FairCosts({"comm": 100, "gemm": 50, "default": 10}, {("gemm", "comm"): (1.1, 1.2)})
CALM = FairCosts({"comm": 5, "gemm": 50, "default": 5}, host_ns=1, job_ns=20)
BASELINE = dict.fromkeys(("split_backward", "overlap_column_backward", "name_streams", "delay_transfers", "throttle_host"), "off")


def planned(given_: Sequence[Program], costs: GivenCosts, form: str, memory_budget: str | None = None, **options: Any) -> list[Plan]:
    more = {"memory_budget": memory_budget, **(BASELINE if form == "off" else {})}
    return make_plans(given_, make_config({"schedule_1f1b": {"interleave": form, "only_gains": False, **options}, **more}), costs, "given")


def step_ns(plans: Sequence[Plan], costs: GivenCosts) -> int:
    return max(rank.step_ns for rank in simulate([plan.program for plan in plans], costs).ranks)


def peak(plans: Sequence[Plan]) -> int:
    return max(in_order(plan.program).peak() for plan in plans)


def remarks(plans: Sequence[Plan], rank: int = 0) -> list[Remark]:
    report = next(each for each in plans[rank].reports if each.name == "schedule-1f1b")
    return [*report.done, *report.declined]


def told(plans: Sequence[Plan], rank: int = 0) -> list[str]:
    return sentences(remarks(plans, rank))


def choice(plans: Sequence[Plan]) -> Remark:
    """What `auto` took."""
    (found,) = [each for each in remarks(plans) if each.rule in (FORM_TAKEN, BASELINE_KEPT)]
    return found


TOOK_MORE = World(pp=3, mp=2, micro_batches=5, layers=3, gather=True, seed=35)
"""The local search inside its jobs took more memory."""


@pytest.mark.slow
@settings(max_examples=2, deadline=None)
@given(worlds(max_pp=3, max_micro_batches=6, schedule="1F1B"), st.sampled_from((LOADED, CALM)))
def test_auto_is_never_slower_than_what_holds_no_more(world: World, costs: FairCosts) -> None:
    never_slower(world, costs)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("costs", [LOADED, CALM])
def test_auto_that_took_more_memory(costs: FairCosts) -> None:
    never_slower(TOOK_MORE, costs)


def never_slower(world: World, costs: FairCosts) -> None:
    plain = programs(world)
    baseline, auto = planned(plain, costs, "off"), planned(plain, costs, "auto")
    limit = int(peak(baseline) * 1.01)
    on_gpu = max(peak_bytes(plan.program, costs) or 0 for plan in auto), max(baseline_peak_bytes(each, costs) or 0 for each in plain)
    assert peak(auto) <= limit or on_gpu[0] <= int(1.01 * on_gpu[1])
    names = ("dx-first", "mixed", "zb-h1") if world.pp > 1 else ("dx-first", "mixed")
    others = [baseline, *(planned(plain, costs, form, search=False) for form in names)]
    assert step_ns(auto, costs) <= min(step_ns(each, costs) for each in others if peak(each) <= limit)
    assert len({told(auto, rank)[-1] for rank in range(len(auto))}) == 1
    for place in (GPU, CPU, CUSTOM):
        assert [str(finding) for finding in check([plan.program for plan in auto], place) if finding.kind != "shared-stream"] == []


@pytest.mark.slow
def test_weight_gradients_trail_where_that_hides_more() -> None:
    """The last stage has room that Paddle's plan leaves: a weight-gradient delay there is faster than every named form that holds as
    little."""
    plain, costs = programs(World(pp=2, mp=2, micro_batches=6, layers=4)), FairCosts({"comm": 30, "gemm": 100, "default": 10})
    auto = planned(plain, costs, "auto")
    form = choice(auto).names["form"]
    assert isinstance(form, str)
    assert form.startswith("interleave: dx-first, weight_delay [0, 1], ")
    for form in ("dx-first", "zb-h1"):
        assert step_ns(auto, costs) < step_ns(planned(plain, costs, form, search=False), costs)


@pytest.mark.slow
@pytest.mark.long
def test_more_memory_makes_it_no_slower() -> None:
    plain = programs(World(pp=3, mp=2, micro_batches=4, layers=2))
    tight, roomy = (planned(plain, LOADED, "auto", memory_budget=budget) for budget in (None, "+1MiB"))
    assert step_ns(roomy, LOADED) <= step_ns(tight, LOADED)


@pytest.mark.slow
def test_what_was_considered_is_told() -> None:
    auto = planned(programs(World(pp=2, micro_batches=6, layers=2)), LOADED, "auto")
    assert {"step_ns", "baseline_step_ns", "baseline_peak_bytes", "limit_bytes"} <= choice(auto).numbers.keys()
    for form in ("dx-first", "mixed", "zb-h1"):
        assert any(f"interleave: {form}" in line for line in told(auto)), form


@pytest.mark.slow
def test_one_baseline() -> None:
    """What `auto` calls Paddle's baseline is what the closing sentence calls so; with an offload of the user's it is something else."""
    plain, costs = programs(World(pp=2, micro_batches=6, layers=2)), CostModel(load_profile("h200"))
    moving = {"offload_activations": {"fraction": 0.5, "min_bytes": 1}}
    mine, offloaded = (make_plans(plain, make_config(more), costs, "h200") for more in ({}, moving))
    assert mine[0].outcome is not None
    assert mine[0].outcome.before is not None
    assert choice(mine).numbers["baseline_step_ns"] == mine[0].outcome.before.step_ns
    assert "baseline_passes" not in choice(mine).names
    assert choice(offloaded).names["baseline_passes"] == ("offload-activations",)
    assert not any("Paddle's baseline" in line for line in told(offloaded))


@pytest.mark.parametrize("world", [World(), World(micro_batches=2), World(mp=2)])
def test_one_order_has_one_name(world: World) -> None:
    """Where Paddle's baseline is kept, its own order of jobs is not declined beside it under another name."""
    bare = {
        "schedule_1f1b": {"search": False},
        "throttle_host": {"syncs": "outputs"},
        "split_backward": "off",
        "overlap_column_backward": "off",
        "name_streams": "off",
    }
    for options in ({"schedule_1f1b": {"search": False}}, bare):
        plans = make_plans(programs(world), make_config(options), CostModel(load_profile("h200")), "h200")
        assert not [line for line in told(plans) if line.startswith("interleave: off")]
    if world == World():  # nothing to interleave: with Paddle's own streams and waits the order is Paddle's baseline
        kept = choice(plans)
        assert kept.rule == BASELINE_KEPT
        assert not [each for each in remarks(plans) if "jobs" in each.names and each.numbers["step_ns"] == kept.numbers["baseline_step_ns"]]


@pytest.mark.slow
def test_under_a_budget_the_baseline_is_paddles_own_plan() -> None:
    """Without what the budget moves; its peak is the one of which budgets are fractions."""
    plain, costs = programs(World(pp=2, micro_batches=6, layers=2)), CostModel(load_profile("h200"))
    made = make_plans(plain, make_config({"memory_budget": 4096}), costs, "h200")
    assert made[0].outcome is not None
    assert made[0].outcome.before is not None
    peak = max(baseline_peak_bytes(program, costs) or 0 for program in plain)
    line = f"Paddle's baseline {ms(made[0].outcome.before.step_ns)}, {size(peak)} on the fullest stage"
    assert any(line in each for each in told(made)), told(made)


@pytest.mark.slow
@pytest.mark.parametrize(
    "world",
    [
        World(pp=2, micro_batches=4, layers=2, schedule="VPP", chunks=2),
        World(pp=1, mp=2, micro_batches=3, schedule="accumulate"),
        World(pp=2, micro_batches=3, schedule="FThenB"),
        World(pp=1, mp=2, dp=2, layers=3, schedule="FThenB"),
        World(pp=2, micro_batches=5, dropout=True),
    ],
)
def test_other_schedules(world: World) -> None:
    """VPP and accumulation have forms to choose from, FThenB has `dx-first`; draws keep their order."""
    plain = programs(world)
    auto, baseline, dx_first = (planned(plain, LOADED, form) for form in ("auto", "off", "dx-first"))
    if world.schedule == "FThenB" and peak(dx_first) <= 1.01 * peak(baseline):
        assert step_ns(auto, LOADED) <= step_ns(dx_first, LOADED)
    if world.schedule != "VPP":  # of two stages Paddle's own VPP waits in a circle where sends wait for their receivers
        assert step_ns(auto, LOADED) <= step_ns(baseline, LOADED)
    assert check([plan.program for plan in auto], CPU) == []
    assert choice(auto).kind == "decided"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["mixed", "auto"])
def test_stages_keep_one_depth_where_one_of_them_draws_in_forward_and_backward(form: str) -> None:
    """Dropout that the last stage alone computes again: the first one's draws would allow the depth of mixed pairs, which its neighbour
    does not have; the ranks would wait for each other for ever."""
    plain = programs(World(pp=2, micro_batches=5, layers=4, schedule="1F1B"))
    drawing = {
        next(op.id for op in plain[1].ops if op.role == role and op.kind in ("gelu", "relu", "gelu_grad", "relu_grad"))
        for role in ("forward", "backward")
    }
    plain[1] = plain[1].with_ops([msgspec.structs.replace(op, name="pd_op.dropout") if op.id in drawing else op for op in plain[1].ops])
    made, dx_first = (planned(plain, LOADED, each, search=False) for each in (form, "dx-first"))
    if form == "mixed":
        assert [plan.program.jobs for plan in made] == [plan.program.jobs for plan in dx_first]
        assert all("random-draws" in rules_of(remarks(made, rank)) for rank in (0, 1))
        forms = planned(plain, LOADED, ("dx-first", "mixed"), search=False)  # type: ignore[arg-type]
        assert [plan.program.jobs for plan in forms] != [plan.program.jobs for plan in dx_first]  # its depth is that of 1F1B
    assert not any("interleave: mixed" in line for line in told(made))
    assert step_ns(made, LOADED) > 0


@pytest.mark.slow
def test_forms_and_the_end_are_chosen_by_stage() -> None:
    """What `auto` says that it took orders jobs in the same way when it is given by hand; where the host waits depends on the limit."""
    plain, costs = programs(World(pp=2, mp=2, micro_batches=6, layers=2)), FairCosts({"comm": 30, "gemm": 100, "default": 10})
    auto = planned(plain, costs, "auto", send_latency_weight=0.0)
    taken = next(each for each in auto[0].passes if isinstance(each, Schedule1F1B))
    assert taken.weight_delay_at_end is not None
    assert f"weight_delay_at_end [{', '.join(map(str, taken.weight_delay_at_end))}]" in choice(auto).names["form"]  # type: ignore[arg-type]
    again = planned(plain, costs, **{**msgspec.structs.asdict(taken), "form": taken.interleave})
    ordered = [[[(job.name, job.items) for job in plan.program.jobs] for plan in plans] for plans in (again, auto)]
    assert ordered[0] == ordered[1]


@pytest.mark.slow
@pytest.mark.parametrize("weight_delay", [pytest.param(1, marks=pytest.mark.long), 3, (0, 2)])
def test_weight_gradients_trail_with_chunks(weight_delay: int | tuple[int, ...]) -> None:
    """VPP with any weight_delay is proved, and computes every part once; weight gradients of a chunk stay in the order of their
    micro-batches."""
    plain = programs(World(pp=2, mp=2, micro_batches=4, layers=4, schedule="VPP", chunks=2))
    plans = planned(plain, LOADED, "dx-first", weight_delay=weight_delay, search=False)
    for place in (GPU, CPU, CUSTOM):
        assert [str(finding) for finding in check([plan.program for plan in plans], place) if finding.kind not in KNOWN] == []
    for plan, whole in zip(plans, planned(plain, LOADED, "dx-first", search=False), strict=True):
        assert sorted(item for job in plan.jobs for item in job.items) == sorted(item for job in whole.jobs for item in job.items)
    assert any("W" in job.name or "backward_w" in job.name for job in plans[-1].jobs)


@pytest.mark.slow
def test_with_chunks_lags_and_orders_are_searched() -> None:
    """No slower than the forms by name in the same memory, and a weight_delay for each stage that memory allows."""
    plain = programs(World(pp=2, micro_batches=4, layers=4, schedule="VPP", chunks=2))
    costs = FairCosts({"comm": 30, "gemm": 100, "default": 10})
    auto = planned(plain, costs, "auto")
    assert any(", weight_delay [" in line for line in told(auto) if "interleave: dx-first" in line or "interleave: mixed" in line)
    limit = 1.01 * peak(planned(plain, costs, "off"))
    others = [planned(plain, costs, form, search=False) for form in ("dx-first", "mixed")]
    on_gpu = max(peak_bytes(plan.program, costs) or 0 for plan in auto), max(baseline_peak_bytes(each, costs) or 0 for each in plain)
    assert on_gpu[0] <= int(1.01 * on_gpu[1])
    assert step_ns(auto, costs) <= min(step_ns(each, costs) for each in others if peak(each) <= limit)


def test_a_rank_alone_takes_dx_first_and_says_so() -> None:
    (plan,) = planned(programs(World(pp=2, micro_batches=4))[:1], CALM, "auto")
    assert "auto-not-simulated" in rules_of(remarks([plan]))


def recomputing(schedule: str) -> list[Program]:
    """Two ranks of a tensor-parallel model with full recomputation."""
    text = PLAIN.replace("512", "64").replace("schedule=accumulate", f"schedule={schedule}")
    program = parse(text if schedule == "accumulate" else text.replace("micro_batches=3", "micro_batches=1"))
    return [msgspec.structs.replace(program, rank=rank) for rank in range(2)]


@pytest.mark.parametrize("schedule", ["accumulate", "none", "FThenB"])
def test_recomputation_is_left_out_whatever_the_schedule(schedule: str) -> None:
    """What nothing reads, in forms by name; with `auto` all that Paddle's memory has room for."""
    baseline, auto = (planned(recomputing(schedule), LOADED, form) for form in ("off", "auto"))
    for plan in baseline:
        assert [op.kind for op in plan.program.ops if "bwd_recompute_id" in op.attrs] == ["matmul", "gelu"]
    for plan in auto:
        assert not [op for op in plan.program.ops if "bwd_recompute_id" in op.attrs]
    assert step_ns(auto, LOADED) < step_ns(baseline, LOADED)
    assert peak(auto) <= 1.01 * peak(baseline)


def test_a_budget_that_cannot_be_kept_is_refused() -> None:
    config = make_config({"memory_budget": 1000})
    with pytest.raises(BudgetError, match="memory_budget 1000 B"):
        make_plans(recomputing("accumulate"), config, LOADED, "given")


@pytest.mark.slow
@pytest.mark.parametrize("over", [0, 10, 10**9])
def test_schedules_are_looked_for_in_less_memory_where_all_exceed_it_by_a_little(monkeypatch: pytest.MonkeyPatch, over: int) -> None:
    """The coarse model says less than plans hold: it is asked again, for as much less as it was off by, which gives other schedules; not
    where they hold far more."""
    asked, drafts = dict[int, list[Ranked]](), Drafts.draft
    find = coarse.find_schedules

    def watched(given_: Any, count: int, limit: int, *more: Any) -> Any:
        found = find(given_, count, limit, *more)
        if limit != coarse.ANY:
            asked[limit] = found
        return found

    def draft(self: Drafts, recomputed: Any, form: Schedule1F1B, later: Any, limit: int) -> Judged:
        found = drafts(self, recomputed, form, later, limit)
        is_over = over and form.weight_delay and min(asked) == limit
        return dataclasses.replace(found, step_ns=1, peak_bytes=limit + over) if is_over else found

    monkeypatch.setattr(coarse, "find_schedules", watched)
    monkeypatch.setattr(Drafts, "draft", draft)
    monkeypatch.setattr(Search, "beside_baseline", lambda search, _: search.unlimited())
    monkeypatch.setattr("interlace.planning.plan.memory_limit", lambda *_: None)  # which asks for more memory afterwards
    plans = planned(programs(World(pp=3, mp=1, micro_batches=6, layers=3)), LOADED, "auto")
    first, *others = asked
    assert all(each.peak_bytes <= limit for limit, found in asked.items() for each in found)
    assert others == ([min(each.peak_bytes for each in asked[first] if any(each.schedule.weight_delay)) - 10] if over == 10 else [])
    assert not {each.schedule for each in asked[first]} & {each.schedule for other in others for each in asked[other]}
    assert peak(plans) <= first


def test_nine_tenths_by_recomputation_and_the_rest_by_offload_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a form by name. 126 MiB are held where 76 may be: nine tenths of what is too much leave 81, and a level of 0.393 holds 78. It
    is taken where its draft is the fastest of those that fit."""
    steps = {471: (9, 70), 393: (5, 70), 314: (1, 90), 236: (7, 70), 79: (7, 70), 0: (7, 70)}
    tried = []

    def draft(self: Drafts, recomputed: tuple[int], form: Schedule1F1B, later: tuple[Pass, ...], limit: int) -> Judged:
        tried.append(recomputed[0])
        step, held = steps[recomputed[0]]
        return Judged(form, later, recomputed, (limit,), step, held << 20)

    def judged(self: Search, pipeline: Pipeline, *given: Any) -> Any:
        taken.append(next(each.level for each in pipeline.passes if isinstance(each, ChooseRecompute)))
        return judge(self, pipeline, *given)

    taken, judge = list[Any](), Search.judged
    monkeypatch.setattr(Drafts, "draft", draft)
    monkeypatch.setattr(Search, "judged", judged)
    off = dict.fromkeys(("split_backward", "overlap_column_backward", "return_memory"), "off")
    options = {"memory_budget": 76 << 20, "schedule_1f1b": {"interleave": "off"}, **off}
    make_plans([parse(layered(6))], make_config(options), GivenCosts({"default": 5}), "given")
    assert tried == list(steps)
    assert taken == [(0.393,)]


@pytest.mark.parametrize(
    ("over", "fits_with", "parts"),
    [(5, 0.97, [0.96, 0.95, 0.85]), (5, 0.9, [0.96, 0.84, 0.95, 0.85]), (5, 0.5, [0.96, 0.84, 0.95, 0.85]), (11, 0.97, [0.95, 0.85])],
)
def test_what_exceeds_a_budget_by_little_is_drafted_with_a_little_less_room(over: int, fits_with: float, parts: list[float]) -> None:
    """With 8 and 32 times what it exceeds a budget of 1000 by less, until it fits; above a hundredth, with twentieths less alone. What is
    foreseen is drafted."""
    tried, foreseen = [], list[float]()

    def draft(recomputed: None, form: Schedule1F1B, later: tuple[Pass, ...], limit: int, part: float) -> Judged:
        tried.append(part)
        return Judged(form, later, recomputed, (limit,), int(100 / part), limit if part <= fits_with else limit + 1)

    kept = Judged(Schedule1F1B(), (), None, (1000,), 110, 1000)
    missed = dataclasses.replace(kept, form=Schedule1F1B(interleave="mixed"), step_ns=100, peak_bytes=1000 + over)
    drafts = SimpleNamespace(
        make=SimpleNamespace(levels=SimpleNamespace(states=None)),
        draft=draft,
        foresee=lambda forms, limit, parts: foreseen.extend(parts),
        fastest_ns=kept.step_ns,
        chooses=False,
        offloads=True,
        given=True,
        later=(),
    )
    found = tighter(tried_so_far(drafts, 1000, kept, missed))
    assert tried == pytest.approx(parts)
    assert foreseen == pytest.approx([parts[0], *parts[-2:]] if over <= 10 else parts)
    steps = [each.step_ns for each in found if each.peak_bytes <= 1000]
    assert steps == [int(100 / part) for part in parts if part <= fits_with]
    slower = dataclasses.replace(missed, step_ns=111)
    assert tighter(tried_so_far(drafts, 1000, kept, slower)) == []  # nothing is won
    drafts.fastest_ns = 99
    for unheld_ns, again in ((99, False), (98, True)):  # than a known run only without waits of the host
        known = dataclasses.replace(missed, unheld_ns=unheld_ns)
        assert bool(tighter(tried_so_far(drafts, 1000, known))) == again
    drafts.fastest_ns, tried[len(parts) :] = None, []
    assert len(tried) == len(parts)
    drafts.offloads = False
    assert len(tighter(tried_so_far(drafts, 1000, kept, missed))) == 2  # less room moves nothing


def tried_so_far(drafts: Any, limit: int, *judged: Judged) -> Tried:
    """What a search knows that made these drafts, of a program for which there are forms by name."""
    return Tried(drafts, SimpleNamespace(), [Schedule1F1B()], limit, (), list(judged))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("over", "taken"),
    [
        ((), (400, 0, 200)),
        (((400, 0, 200),), (450, 0, 200)),
        (((500, 0, 200),), (400, 0, 250)),
        (((400, 0, 200), (450, 0, 200)), (500, 0, 200)),
        (((500, 0, 200), (500, 0, 250)), (400, 0, 300)),
    ],
)
def test_less_is_recomputed_on_one_stage_after_the_other(over: Sequence[tuple[int, ...]], taken: tuple[int, ...]) -> None:
    """The last first, by half as much less where that holds too much; what is no faster, or holds too much, is not gone on from. Not where
    nothing moves in its place."""
    ends = ThrottleHost(syncs="job-ends")
    steps = {(first, 0, last): 70 + (first + last - 600) // 10 for first in (400, 450, 500) for last in (200, 250, 300)}
    fewer = {-0.03: (400, 0, 200), -0.015: (450, 0, 250)}
    tried = []

    def draft(recomputed: tuple[int, ...], form: Schedule1F1B, later: tuple[Pass, ...], limit: int) -> Judged:
        tried.append(recomputed)
        return Judged(form, later, recomputed, (limit,), steps[recomputed], limit + 1 if recomputed in over else limit)

    def foresee(forms: Sequence[Any], limit: int) -> None:
        less = [(each, start.form, start.later) for each in ((500, 0, 200), (400, 0, 300))]
        assert [*forms] == [*less, (start.recomputed, start.form, (ends,))]
        assert limit == 7

    def levels(limit: int, beyond: Sequence[float]) -> list[tuple[int, ...]]:
        assert limit == 7
        return [(0, 0, 0), fewer[beyond[0]]]

    start = draft((500, 0, 300), Schedule1F1B(), (ThrottleHost(),), 7)
    slower = dataclasses.replace(start, recomputed=(0, 0, 1), step_ns=(start.step_ns or 0) + 1)
    drafts = SimpleNamespace(
        make=SimpleNamespace(levels=SimpleNamespace(within=levels), by_stage=True),
        draft=draft,
        foresee=foresee,
        later=(ThrottleHost(),),
        chooses=True,
        offloads=True,
        given=True,
    )
    found = [start, *less_recomputed(tried_so_far(drafts, 7, slower, start))]
    assert min((each for each in found if each.peak_bytes <= 7), key=lambda each: each.step_ns or 0).recomputed == taken
    assert len(tried) == 3 + bool(over)
    drafts.make.by_stage = False
    assert less_recomputed(tried_so_far(drafts, 7, start)) == []
    drafts.make.by_stage, drafts.offloads = True, False
    assert less_recomputed(tried_so_far(drafts, 7, start)) == []


@pytest.mark.parametrize(
    ("faster", "over", "tried", "taken"),
    [
        ((), (), [(500, 0, 500), (500, 0, 400), (700, 0, 300), (600, 0, 300)], (500, 0, 300)),
        (((500, 0, 500),), (), [(500, 0, 500), (700, 0, 500), (600, 0, 500)], (500, 0, 500)),
        (((500, 0, 400), (600, 0, 400)), (), [(500, 0, 500), (500, 0, 400), (700, 0, 400), (600, 0, 400)], (600, 0, 400)),
        (((500, 0, 500), (700, 0, 300)), ((500, 0, 500),), [(500, 0, 500), (500, 0, 400), (700, 0, 300)], (700, 0, 300)),
    ],
)
def test_more_is_recomputed_on_one_stage_after_the_other(
    faster: Sequence[tuple[int, ...]], over: Sequence[tuple[int, ...]], tried: list[tuple[int, ...]], taken: tuple[int, ...]
) -> None:
    """The last first, by half as much more where that is no faster, or holds too much; nothing where a stage recomputes nothing, or all.
    Not where nothing moves that it could take the place of."""
    asked, foreseen = [], []

    def draft(recomputed: tuple[int, ...], form: Schedule1F1B, later: tuple[Pass, ...], limit: int) -> Judged:
        asked.append(recomputed)
        step_ns = 100 - sum(recomputed) * (recomputed in faster) // 100
        return Judged(form, later, recomputed, (limit,), step_ns, limit + (recomputed in over))

    def higher(recomputed: tuple[int, ...], freed: Sequence[int]) -> tuple[int, ...]:
        return tuple(min(1000, level + 10 * each) for level, each in zip(recomputed, freed, strict=True))

    assert MORE == (0.2, 0.1)
    start = Judged(Schedule1F1B(), (ThrottleHost(),), (500, 0, 300), (100,), 100, 100)
    drafts = SimpleNamespace(
        make=SimpleNamespace(levels=SimpleNamespace(higher=higher), by_stage=True),
        draft=draft,
        foresee=lambda forms, limit: foreseen.extend(levels for levels, _, _ in forms),
        memory_limits=(100, 100, 100),
        chooses=True,
        offloads=True,
        given=True,
    )
    found = [start, *more_on_one_stage(tried_so_far(drafts, 100, start))]
    assert asked == tried
    assert {*asked} <= {*foreseen}
    assert min((each for each in found if each.peak_bytes <= 100), key=lambda each: each.step_ns or 0).recomputed == taken
    full = dataclasses.replace(start, recomputed=(1000, 0, 1000))
    assert more_on_one_stage(tried_so_far(drafts, 100, full)) == []
    for name in ("given", "chooses", "offloads"):
        assert more_on_one_stage(tried_so_far(SimpleNamespace(**{**vars(drafts), name: False}), 100, start)) == []


@pytest.mark.parametrize(
    ("best_at", "tried", "taken"),
    [
        (550, [499, 626, 445, 553, 526, 580, 539, 566], 553),
        (900, [499, 626, 617, 635, 630, 640], 640),
        (608, [499, 626, 553, 617, 580, 612, 594], 608),
    ],
)
def test_levels_between_those_that_were_tried_are_looked_at_with_a_single_stage(best_at: int, tried: list[int], taken: int) -> None:
    """Halfway to the nearest on both sides, again from the best; not where several stages decide, nothing is chosen, or none fits."""
    asked: list[int] = []

    def draft(recomputed: tuple[int, ...], form: Schedule1F1B, later: tuple[Pass, ...], limit: int) -> Judged:
        asked.append(recomputed[0])
        return Judged(form, later, recomputed, (limit,), 1000 + abs(recomputed[0] - best_at), limit)

    def at(level: int, step_ns: int, peak: int = 100) -> Judged:
        return Judged(Schedule1F1B(), (ThrottleHost(),), (level,), (100,), step_ns, peak)

    assert HALVINGS == 4
    before = [at(608, 1000 + abs(608 - best_at)), at(391, 2000), at(645, 2000), at(860, 3000)]
    before.append(dataclasses.replace(at(0, 1, peak=101), recomputed=None))
    drafts = SimpleNamespace(draft=draft, foresee=lambda forms, limit: None, chooses=True, given=True)
    found = levels_between(tried_so_far(drafts, 100, *before))
    assert [each.recomputed for each in found] == [(level,) for level in asked]
    assert sorted(asked) == sorted(tried)
    fastest = min([*before[:-1], *found], key=lambda each: each.step_ns or 0)
    assert fastest.recomputed == (taken,)
    for name in ("given", "chooses"):
        assert levels_between(tried_so_far(SimpleNamespace(**{**vars(drafts), name: False}), 100, *before)) == []
    assert levels_between(tried_so_far(drafts, 99, *before)) == []
    two = dataclasses.replace(before[0], recomputed=(608, 608))
    assert levels_between(tried_so_far(drafts, 100, two)) == []


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("fits", [False, True])
def test_more_is_recomputed_where_copies_may_cost_more(beside: bool, fits: bool) -> None:
    """On every stage as much as smaller budgets need, and no less than before: with the fastest that keeps the budget or, if none does,
    with what is nearest to it. What was drafted already is not drafted again, and nothing if nothing moves or the user said how much."""
    first, other = Schedule1F1B(interleave="mixed", search=False), Schedule1F1B(interleave="dx-first", search=False)
    needed = {975: (300, 0), 950: (350, 150)}

    def to_free(limit: int, freed: Sequence[tuple[float, int]], beside_states: bool) -> tuple[tuple[int, ...], ...]:
        assert (freed, beside_states) == ([(1.0, 0)], beside)
        return (needed[limit],)

    def draft(recomputed: tuple[int, ...], form: Schedule1F1B, later: tuple[Pass, ...], limit: int) -> Judged:
        return Judged(form, later, recomputed, (limit,), 90, limit)

    levels = SimpleNamespace(to_free=to_free, states=object() if beside else None)
    drafts = SimpleNamespace(make=SimpleNamespace(levels=levels), draft=draft, foresee=lambda *_: None, later=(), offloads=True, given=True)
    slow = Judged(other, (), (320, 100), (1000,), 110 if fits else 90, 1000 if fits else 1200)
    start = Judged(first, (), (320, 100), (1000,), 100, 1000 if fits else 1100)
    found = more_recomputed(tried_so_far(drafts, 1000, slow, start))
    assert [(each.recomputed, each.form) for each in found] == [((350, 150), first)]  # the other is what it was
    assert more_recomputed(tried_so_far(drafts, 1000, start, *found)) == []
    assert more_recomputed(tried_so_far(drafts, 1000, dataclasses.replace(start, recomputed=None))) == []
    for name in ("offloads", "given"):
        setattr(drafts, name, False)
        assert more_recomputed(tried_so_far(drafts, 1000, start)) == []
        setattr(drafts, name, True)


@pytest.mark.parametrize("fits", [False, True])
def test_other_forms_recompute_as_much_as_the_fastest_plan(fits: bool) -> None:
    """The six fastest, whether they kept the budget with their own levels or not: with those of the fastest that keeps it or, if none does,
    of what is nearest to it. Not without a budget, and not where the user said how much."""
    forms = [Schedule1F1B(interleave="mixed", weight_delay=each, search=False) for each in range(9)]
    drafts = SimpleNamespace(
        draft=lambda recomputed, form, later, limit: Judged(form, later, recomputed, (limit,), 90, limit),
        foresee=lambda *_: None,
        later=(),
        given=True,
    )
    rows = [Judged(form, (), (k, 0), (1000,), 100 - k, 1000 + 10 * (9 - k)) for k, form in enumerate(forms)]
    taken = 3 if fits else 8
    rows[3] = dataclasses.replace(rows[3], peak_bytes=1000 if fits else 1100)
    rows.append(Judged(Schedule1F1B(interleave="zb-h1"), (), (0, 0), (1000,), 50, 1251))  # far too large
    found = same_recomputed(tried_so_far(drafts, 1000, *rows))
    others = [form for form in reversed(forms[3:]) if form != forms[taken]]
    assert [(each.recomputed, each.form) for each in found] == [((taken, 0), form) for form in others]
    assert same_recomputed(tried_so_far(drafts, 1000, *rows, *found)) == []
    assert same_recomputed(tried_so_far(drafts, 1000, *(dataclasses.replace(each, recomputed=None) for each in rows))) == []
    drafts.given = False
    assert same_recomputed(tried_so_far(drafts, 1000, *rows)) == []


@pytest.mark.parametrize(
    ("over", "steps", "given_", "taken"),
    [
        ((0, 0, 0, 0), (1000, 1001, 1002, 1002), True, 0),
        ((1, 0, 0, 0), (1000, 1001, 1002, 1002), True, 1),
        ((1, 1, 0, 0), (1000, 1001, 1002, 1002), True, 2),
        ((1, 1, 1, 0), (1000, 1001, 1002, 1002), True, 0),  # three are planned in full
        ((1, 0, 0, 0), (1000, 1003, 1003, 1003), True, 0),  # clearly slower
        ((1, 0, 0, 0), (1000, 1001, 1002, 1002), False, 0),
    ],
)
def test_a_draft_that_is_as_fast_is_taken_where_the_full_plan_of_the_fastest_exceeds_the_budget(
    over: Sequence[int], steps: Sequence[int], given_: bool, taken: int
) -> None:
    """Of three drafts at most; if none keeps the budget, also with lower limits, the fastest stays, for the caller to do something else."""
    planned_in_full, rows = list[int](), [Judged(Schedule1F1B(), (), (k,), (1000,), step, 1000) for k, step in enumerate(steps)]

    def whole(judged: Judged) -> tuple[int, ...]:
        planned_in_full.append(rows.index(judged))
        return (rows.index(judged),)

    world = SimpleNamespace(bytes_over_in_step=lambda run, limit: [0, over[run[0]]] if limit == 1000 else [])
    make = SimpleNamespace(made=None, with_lower_limits=lambda made, run, limit: None)
    drafts = SimpleNamespace(given=given_, whole=whole, world=world, make=make, foresee=lambda *_: None, fastest_ns=None)
    drafts.offloads, drafts.memory_limits, drafts.draft = True, (1000,), lambda form, *_: rows[form[0]]
    assert _in_full(tried_so_far(drafts, 1000, *rows), rows[0]) == (rows[taken], (taken,))
    assert planned_in_full == ([*range(3)] if sum(over) == 3 else [*range(taken + 1)])
    nearest = [dataclasses.replace(each, peak_bytes=1001 + k) for k, each in enumerate(rows)]
    rows = nearest
    assert _in_full(tried_so_far(drafts, 1000, *nearest), nearest[0]) == (nearest[0], (0,)), "the others exceed it as drafts"


MISSED = (1000, 1000, 1000, 50)
"""The fastest draft: its step, that of its full plan, its peak, and the bytes by which the full plan exceeds a budget of 1000."""


@pytest.mark.parametrize(
    ("lowered_ns", "others", "taken", "planned"),
    [
        (1002, [(1003, 1003, 900, 0)], "lowered", [0]),  # nearly as fast
        (1300, [(1400, 1400, 900, 0)], "lowered", [0]),
        (1300, [(1100, 1100, 950, 0)], 1, [0, 1]),
        (1300, [(1100, 1310, 950, 0)], "lowered", [0, 1]),
        (1300, [(1100, 1100, 950, 1)], "lowered", [0, 1]),
        (1300, [(1100, 1290, 950, 0), (1200, 1210, 950, 0)], 2, [0, 1, 2]),
        (1300, [(1100, 1150, 950, 0), (1200, 1100, 950, 0)], 1, [0, 1]),
        (1300, [(1100, 1100, 950, 1), (1200, 1200, 950, 0)], 2, [0, 1, 2]),
        (1300, [(1100, 1100, 950, 0), (1050, 1051, 951, 0)], 4, [0, 4]),  # drafted again, as the first is
        (None, [(1400, 1400, 950, 0)], 1, [0, 1]),
        (None, [(1400, 1400, 1000, 50)], 0, [0]),
    ],
)
@pytest.mark.parametrize("offloads", [True, False])
def test_where_lower_limits_cost_much_a_draft_with_more_room_is_planned_in_full(
    lowered_ns: int | None, others: list[tuple[int, int, int, int]], taken: int | str, planned: list[int], offloads: bool
) -> None:
    """A draft that is made again takes 1 ns more and holds 950 bytes if it held 951 before; without offload it recomputes more."""
    rows = [Judged(Schedule1F1B(), (), (k,), (1000,), took, peak) for k, (took, _, peak, _) in enumerate([MISSED, *others])]
    full_ns, over = ([each[k] for each in (MISSED, *others)] for k in (1, 3))
    every, in_full = [*rows], list[int]()

    def whole(judged: Judged) -> int:
        in_full.append(every.index(judged))
        return in_full[-1]

    def draft(recomputed: tuple[int], form: Schedule1F1B, later: tuple[Pass, ...], limit: int, part: float) -> Judged:
        assert (limit, part, drafts.fastest_ns) == (950, 0.95, lowered_ns)
        was = rows[recomputed[0] - (0 if offloads else 100)]
        full_ns.append((was.step_ns or 0) + 1)
        every.append(dataclasses.replace(was, step_ns=full_ns[-1], peak_bytes=950 if was.peak_bytes == 951 else was.peak_bytes))
        return every[-1]

    def lower(made: object, run: int, limit: int) -> str | None:
        assert (made, run, limit) == ("made", 0, 1000)
        return "lowered" if lowered_ns else None

    def higher(levels: tuple[int], freed: list[int]) -> tuple[int]:
        assert freed == [50]
        return (levels[0] + 100,)

    def bytes_over_in_step(run: int | str, limit: int) -> list[int]:
        return [0, over[run] if isinstance(run, int) and run < len(rows) else 0]

    def step_ns(run: int | str) -> int | None:
        return full_ns[run] if isinstance(run, int) else lowered_ns

    world = SimpleNamespace(bytes_over_in_step=bytes_over_in_step, step_ns=step_ns)
    make = SimpleNamespace(made="made", with_lower_limits=lower, levels=SimpleNamespace(higher=higher))
    drafts = SimpleNamespace(given=True, whole=whole, world=world, make=make, foresee=lambda *_: None, draft=draft, fastest_ns=1000)
    drafts.offloads, drafts.chooses, drafts.memory_limits = offloads, True, (1000,)
    tried = tried_so_far(drafts, 1000, *rows)
    best, run = _in_full(tried, rows[0])
    assert (run, best) == (taken, rows[0] if taken == "lowered" else every[int(taken)])
    assert in_full == planned
    assert drafts.fastest_ns == 1000
    assert tried.judged[0].peak_bytes == (1050 if isinstance(taken, int) and taken else 1000), "what the full plan held is said"


def test_where_drafts_exceed_the_budget_or_full_plans_do_by_far_no_room_is_looked_for() -> None:
    for peak, over in ((1001, 1), (1000, 251)):
        drafts = SimpleNamespace(given=True, whole=lambda judged: "first", world=SimpleNamespace())
        drafts.world.bytes_over_in_step = lambda run, limit, over=over: [over]
        row = Judged(Schedule1F1B(), (), (0,), (1000,), 1000, peak)
        assert _in_full(tried_so_far(drafts, 1000, row), row) == (row, "first")


@pytest.mark.parametrize("given_", [False, True])
def test_levels_of_recomputation_are_tried_where_forward_and_backward_do_not_alternate(given_: bool) -> None:
    """With Paddle's order and each form by name; none if the user says what is recomputed."""
    asked, drafted = Schedule1F1B(), list[tuple[tuple[int, ...], str]]()

    def draft(recomputed: tuple[int, ...], form: Schedule1F1B, later: tuple[Pass, ...], limit: int) -> Judged:
        drafted.append((recomputed, form.form_text()))
        return Judged(form, later, recomputed, (limit,), 1, limit)

    drafts = SimpleNamespace(pipe=PipelineOfStages(schedule="none"), chooses=True, given=given_, asked=asked, later=(), draft=draft)
    drafts.foresee = lambda *_: None
    tried = tried_so_far(drafts, 100)
    tried.coarse = SimpleNamespace(recomputation=lambda limit: [(0,), (limit,), (400,)])  # type: ignore[assignment]
    tried.by_name = [Schedule1F1B(interleave="dx-first")]
    assert len(coarse_schedules(tried)) == 6
    assert drafted == [((level,), form) for level in (0, 100, 400) for form in ("off", "dx-first")]
    drafts.chooses = False
    assert coarse_schedules(tried) == []


@pytest.mark.parametrize(("given_", "offloads", "looks"), [(False, False, True), (True, False, True), (True, True, False)])
def test_where_nothing_is_offloaded_schedules_in_less_memory_are_looked_for(given_: bool, offloads: bool, looks: bool) -> None:
    """A schedule that the model says holds 95 bytes holds 102 of 100: one that holds 93 is asked for."""
    asked, mixed = list[int](), Schedule1F1B(interleave="mixed")

    def find(within: int, count: int) -> list[int]:
        asked.append(within)
        return [within]

    drafts = SimpleNamespace(pipe=PipelineOfStages(schedule="1F1B"), given=given_, offloads=offloads, later=(), foresee=lambda *_: None)
    drafts.draft = lambda recomputed, form, later, limit: Judged(form, later, recomputed, (limit,), 4, recomputed[0])
    tried = tried_so_far(drafts, 100, Judged(mixed, (), (0,), (100,), 5, 90), Judged(mixed, (), (7,), (100,), 4, 102))
    tried.coarse = SimpleNamespace(looked_at=([], []), expected={((7,), mixed): 95}, find=find)  # type: ignore[assignment]
    tried.coarse.as_forms = lambda found, levels: [((each,), mixed) for each in found]  # type: ignore[method-assign, assignment, misc]
    assert [each.recomputed for each in in_less_memory(tried)] == [(93,)] * looks
    assert asked == [93] * looks


def within_100_bytes(held: Callable[[Any], int], world: dict[str, Any], **told: Any) -> Any:
    """What `Drafts.draft` reads of a search with that budget on one rank; `held` gives the bytes of a plan, `world` makes and simulates."""
    return SimpleNamespace(
        before=lambda recomputed: SimpleNamespace(passes=Pipeline(())),
        memory_limits=(100,),
        ranks=(0,),
        given=True,
        world=SimpleNamespace(joules=lambda *_: 0.0, drafts=[], **world),
        peaks=lambda plan: [held(plan)],
        **told,
    )


@pytest.mark.parametrize(
    ("held", "later", "streams_wait"),
    [
        (100, (ReturnMemory(),), False),
        (101, (ReturnMemory(),), True),
        (101, (ReturnMemory(at_end="off"),), False),  # as the user says
        (101, (ThrottleHost(),), False),  # nothing returns memory
        (126, (ReturnMemory(),), False),  # far too much
    ],
)
def test_a_draft_that_holds_too_much_is_made_again_with_streams_that_wait_at_their_ends(
    held: int, later: tuple[Pass, ...], streams_wait: bool
) -> None:
    made = list[tuple[Pass, ...]]()

    def run(passes: Pipeline, *_: Any) -> Any:
        made.append(passes.passes[1:])
        return SimpleNamespace(held=100 if ReturnMemory(at_end="on") in passes.passes else held)

    choice = within_100_bytes(lambda plan: plan.held, {"run": run, "step_ns": lambda *_: 50}, fastest_ns=None, offloads=False)
    found = Drafts.draft(choice, None, Schedule1F1B(), later, 100)
    assert made == [later, *[(ReturnMemory(at_end="on"),)] * streams_wait]
    assert (found.later, found.peak_bytes) == (made[-1], 100 if streams_wait else held)


@pytest.mark.parametrize("micro_batches", [8, 1000])
@pytest.mark.parametrize(("fastest_ns", "rounds", "after"), [(None, 3, 80), (90, 3, 80), (50, 2, 50), (30, 1, 30)])
def test_a_draft_that_is_slower_already_is_not_made_again(fastest_ns: int | None, rounds: int, after: int, micro_batches: int) -> None:
    """Steps of 30, 60 and 80 ns where the plan holds 120, 110 and 100 bytes of the 100 that it may."""
    made, simulated = list[MemoryLimits](), list[int]()

    def simulated_ns(plan: Any, later: Any) -> int:
        simulated.append(plan.round)
        return (30, 60, 80)[plan.round]

    def run(passes: Pipeline, memory_limits: MemoryLimits, *_: Any) -> Any:
        made.append(memory_limits)
        return SimpleNamespace(round=len(made) - 1)

    captured = SimpleNamespace(pipeline=SimpleNamespace(num_micro_batches=micro_batches, num_stages=1))
    choice = within_100_bytes(
        lambda plan: (120, 110, 100)[plan.round],
        {"run": run, "step_ns": simulated_ns, "step_ns_unheld": lambda _: 29, "captured": captured},
        fastest_ns=fastest_ns,
        offloads=True,
        make=SimpleNamespace(lower_limits=lambda plan, memory_limits, over: (memory_limits[0] - over[0],)),
    )
    found = Drafts.draft(choice, None, Schedule1F1B(), (), 100)
    assert made == [(100,), (80,), (70,)][:rounds]
    assert len(made) == rounds
    assert simulated == list(range(rounds))[-rounds if fastest_ns else -1 :]
    assert (found.step_ns, found.peak_bytes) == [(30, 120), (60, 110), (80, 100)][rounds - 1]
    slower = 29 if micro_batches == 8 else None  # asked where it holds too much and is slower than a known run, of a step that is not long
    assert found.unheld_ns == (80 if rounds == 3 else slower)
    assert choice.fastest_ns == after


@pytest.mark.parametrize(
    ("held", "tried"), [({500: 100}, [500]), ({500: 103, 506: 104, 514: 100}, [500, 506, 514]), ({}, [500, 520, 540, 560])]
)
def test_paddles_order_recomputes_more_where_it_holds_more_than_it_should(held: dict[int, int], tried: list[int]) -> None:
    """By twice what it is over, until it fits or four were tried: the levels say that 0.5 holds 100 bytes, and each 0.001 more one less."""
    asked = Schedule1F1B()

    def draft(recomputed: tuple[int, ...], form: Schedule1F1B, later: tuple[Pass, ...], limit: int) -> Judged:
        assert form == paddles_jobs(asked)
        return Judged(form, later, recomputed, (limit,), 1, held.get(recomputed[0], 110))

    def levels(limit: int, beyond: Sequence[float]) -> list[tuple[int, ...]]:
        assert tuple(beyond) == (0.0,)
        return [(0,), (600 - limit,)]

    make = SimpleNamespace(levels=SimpleNamespace(within=levels))
    drafts = SimpleNamespace(make=make, draft=draft, asked=asked, later=(), recomputes=True, chooses=True, given=None)
    drafts.pipe = PipelineOfStages(schedule="1F1B")
    assert [each.recomputed for each in in_paddles_order(tried_so_far(drafts, 100))] == [(level,) for level in tried]
    drafts.recomputes = False
    assert in_paddles_order(tried_so_far(drafts, 100)) == []


def test_what_was_judged_is_not_drafted_again_and_each_proposal_knows_those_before_it() -> None:
    """Of a form by name and of the same one of the coarse model there is one draft."""
    drafted = list[str]()

    def draft(recomputed: None, form: Schedule1F1B, later: tuple[Pass, ...], limit: int) -> Judged:
        drafted.append(form.form_text())
        return Judged(form, later, recomputed, (limit,), 1, limit)

    make = SimpleNamespace(beaten=Beaten(), by_name={})
    drafts = SimpleNamespace(draft=draft, foresee=lambda *_: None, asked=Schedule1F1B(), later=(), needed=None, given=None, make=make)
    drafts.pipe = PipelineOfStages(schedule="1F1B")
    tried = tried_so_far(drafts, 100)
    tried.coarse = SimpleNamespace(schedules=lambda peaks, limit: [(None, Schedule1F1B(interleave=name)) for name in ("mixed", "zb-h1")])  # type: ignore[assignment]
    tried.by_name = [Schedule1F1B(interleave=name) for name in ("dx-first", "mixed")]
    for propose in PROPOSALS[:3]:
        tried.judged += propose(tried)
    assert drafted == ["off", "dx-first", "mixed", "zb-h1"]


def test_auto_tries_paddles_order_with_other_recomputation_where_the_program_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it fits here, so nothing needs to be computed again in any order; not of a program without."""
    monkeypatch.setattr(Search, "beside_baseline", lambda search, _: search.unlimited())
    assert any("interleave: off), recomputed [0]" in line for line in told(planned(recomputing("accumulate"), LOADED, "auto")))
    plain = told(planned(programs(World(pp=2, micro_batches=4)), LOADED, "auto"))
    assert not any("interleave: off), recomputed" in line for line in plain)


def test_a_stage_starts_from_the_very_same_program_where_only_others_recompute_more() -> None:
    """So that what passes make of it is known."""
    asked = make_config({"memory_budget": "1GB"}).pipeline()
    schedule = next(each for each in asked.passes if isinstance(each, Schedule1F1B))
    with together(programs(World(pp=2, micro_batches=4, layers=2)), LOADED, asked.passes) as world:
        schedules = Drafts(Making(world, asked), asked, schedule, Limit(1 << 30))
        one, other = (schedules.before(each).programs for each in ((0, 0), (0, 1000)))
    assert [mine == theirs for mine, theirs in zip(one, other, strict=True)] == [True, False]


def test_a_plan_over_its_budget_is_made_again_with_less_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that are too many are kept free by all passes, in every form of the schedule; in the end what holds least is refused."""
    monkeypatch.setattr(budget, "peak_bytes", lambda *_: (1 << 30) + 777)
    monkeypatch.setattr(Ranks, "bytes_over", lambda self, made, budget: [max(0, (1 << 30) + 777 - budget)] * 2)
    seen = list[int | None]()
    run = Ranks.run

    def watched(self: Ranks, pipeline: Pipeline, memory_limits: MemoryLimits, *args: Any, **more: Any) -> Any:
        seen.append(memory_limits[0])
        return run(self, pipeline, memory_limits, *args, **more)

    monkeypatch.setattr(Ranks, "run", watched)
    for form in ("auto", "dx-first"):
        seen.clear()
        config = make_config({"memory_budget": 1 << 30, "schedule_1f1b": {"interleave": form}})
        with pytest.raises(BudgetError, match="the least feasible one is 1073742601 bytes"):
            make_plans(recomputing("accumulate"), config, LOADED, "given")
        order = list(dict.fromkeys(room for room in seen if room))
        order = order[: 1 + order.index(1)]  # the least feasible one is looked for after that
        assert order[0] == 1 << 30
        assert all(before - after >= 777 for before, after in pairwise(order[:-1]))


def test_a_plan_that_is_made_again_keeps_the_lines_of_its_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which form was taken, what was considered, and why it was made again."""
    plain, calls = programs(World(pp=2, micro_batches=4, layers=3)), list[Any]()

    def over(self: Ranks, made: Any, *_: Any) -> list[int]:
        calls.append(made.programs)
        return [777 * (made.programs == calls[0])] * len(plain)

    monkeypatch.setattr(Ranks, "bytes_over_in_step", over)
    monkeypatch.setattr(fastest, "PLANNED", 1)
    plan = make_plans(plain, make_config({"memory_budget": "1TB"}), LOADED, "given")[0]
    report = next(each for each in plan.reports if each.name == "schedule-1f1b")
    first, other = "the first, the same made again, one that may return memory", "three of the search for the default"
    assert len(dict.fromkeys(calls)) == 6, f"{first}; {other}"
    assert sum(each.kind == "decided" for each in report.remarks) == 2
    choice([plan])
    assert (report.done[-1].rule, report.done[-1].numbers) == ("made-again", {"over_bytes": 777})
    assert sum("form" in each.names for each in report.declined) >= 3  # what was considered


def with_work_of(program: Program, other: Program) -> Program:
    """The stage behind `other`, with what that does in its own place."""
    ops = tuple(msgspec.structs.replace(op, group=op.group + 2 if op.group >= 0 else -1) for op in other.ops)  # a stage has two groups
    return msgspec.structs.replace(other, rank=program.rank, pipeline=program.pipeline, groups=program.groups).with_ops(ops, other.values)


@pytest.mark.slow
def test_stages_that_do_the_same_work_have_their_orders_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four stages the two in the middle are alike; what one of them finds is what each would find."""
    found: dict[int, list[Any]] = {}
    plain, orders = list(programs(World(pp=4, micro_batches=4, schedule="1F1B"))), tasks.stage_orders
    plain[2] = with_work_of(plain[2], plain[1])

    def of_stage(asked: Any, before: Program, like: Any, context: Any) -> Any:
        made = orders(asked, before, like, context)
        if not like:  # with nothing recomputed
            found.setdefault(before.pipeline.stage, []).append(made)
        return made

    monkeypatch.setattr(tasks, "stage_orders", of_stage)
    together = planned(plain, CALM, "auto")
    assert sorted(found) == [0, 1, 3]
    once = found[1][0]
    found.clear()
    monkeypatch.setattr(tasks, "work_key", lambda program, cost: str(program.rank))
    apart = planned(plain, CALM, "auto")
    assert all(found[stage][0] == once for stage in (1, 2))
    assert [plan.program for plan in together] == [plan.program for plan in apart]
