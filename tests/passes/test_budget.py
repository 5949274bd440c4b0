"""A memory budget is held against what the place holds, and the plan says so."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from interlace.config import make_config
from interlace.cost_model import GivenCosts
from interlace.errors import BudgetError, PlanError
from interlace.ir import Program
from interlace.passes.pipeline import PassReport, Pipeline
from interlace.planning.baseline import baseline_plan
from interlace.planning.budget import baseline_peak_bytes, peak_bytes, say_budget
from interlace.planning.limits import Limit, budget_bytes
from interlace.planning.plan import Plan, make_plans
from interlace.planning.search import Search
from interlace.planning.tasks import MemoryLimits
from interlace.planning.variants import in_paddles_order
from interlace.planning.world import Made
from interlace.planning.world import World as Ranks
from interlace.scheduler.host_waits import throttle
from interlace.scheduler.interleave import planner as interleave
from interlace.scheduler.memory.live import order_peak
from interlace.units import size
from tests.remarks import rules_of
from tests.scheduler.run_ahead import run_ahead_program
from tests.strategies import World, programs, worlds
from tests.together import together

COPIES = GivenCosts({"comm": 100, "gemm": 50, "copy": 5, "default": 10}, {("gemm", "comm"): (1.1, 1.2)})
EMPTY = PassReport("offload-activations", (), 0, 0, 0)
SMALL = World(pp=2, micro_batches=4, layers=2, schedule="1F1B")
ALONE = World(pp=1, micro_batches=4, layers=2, schedule="1F1B")
SLOW_COPIES = GivenCosts({"comm": 100, "gemm": 50, "copy": 20, "default": 10}, {("gemm", "comm"): (1.1, 1.2)})


@pytest.fixture(autouse=True)
def _no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair's first order keeps a budget, or does not, as its best one."""
    monkeypatch.setattr(interleave, "SEARCH_WORK", 0)


def within(plain: Sequence[Program], budget: float | str, cost: GivenCosts = COPIES, **options: object) -> list[Plan]:
    """Plans under a budget, where every byte counts."""
    every = {"offload_activations": {"min_bytes": 0}, "throttle_host": {"run_ahead_bytes": 0}, **options}
    asked = f"{budget}B" if isinstance(budget, int) else budget
    return make_plans(plain, make_config({"memory_budget": asked, **every}), cost, "h200")


def baseline_peak(plain: Sequence[Program]) -> int:
    return max(peak_bytes(baseline_plan(each, COPIES), COPIES) or 0 for each in plain)


def test_without_a_budget_nothing_is_said() -> None:
    assert say_budget(run_ahead_program(), (), [EMPTY], 0, 1) == [EMPTY]


@pytest.mark.parametrize(
    ("world", "form", "least"),
    [
        pytest.param(SMALL, "dx-first", 608, marks=pytest.mark.long),
        (ALONE, "auto", 580),
        pytest.param(SMALL, "auto", 608, marks=pytest.mark.long),
    ],
)
def test_a_refusal_names_the_least_that_can_be_kept_and_what_holds_it(world: World, form: str, least: int) -> None:
    """Not always what moves and recomputes everything: a value that is recomputed cannot move, and copies back take room."""
    plain, options = programs(world), {"schedule_1f1b": {"interleave": form}}
    refused = r"memory_budget 1 B \(1 bytes\) cannot be kept; the least feasible one is .* stage \d holds "
    with pytest.raises(BudgetError, match=refused) as caught:
        within(plain, 1, SLOW_COPIES, **options)
    assert caught.value.least_bytes == least
    assert max(peak_bytes(plan.program, SLOW_COPIES) or 0 for plan in within(plain, least, SLOW_COPIES, **options)) <= least
    with pytest.raises(BudgetError, match=f"the least feasible one is {least} bytes"):
        within(plain, least - 1, SLOW_COPIES, **options)


def test_a_refusal_gives_the_baseline_by_the_same_count() -> None:
    """With a host that runs ahead it is more than the peak that step tables show; that very number is a budget that the baseline keeps."""
    plain, waiting = programs(SMALL), GivenCosts({"comm": 100, "gemm": 50, "copy": 5, "default": 10, "host": 500})
    with pytest.raises(BudgetError) as caught:
        within(plain, 1, waiting)
    told = re.search(r"however fast its host; so counted, Paddle's baseline holds (\d+) bytes \((.*)\)$", str(caught.value))
    assert told is not None
    held = max(baseline_peak_bytes(each, waiting) or 0 for each in plain)
    assert (int(told[1]), told[2]) == (held, size(held))
    assert held >= caught.value.least_bytes


@pytest.mark.parametrize("given", [{"weight_delay": [0, 1], "inline_share": 0.25}, {"depth": [3, 1]}])
def test_a_lag_or_depth_that_is_given_does_not_hide_a_refusal(given: dict[str, object]) -> None:
    """Paddle's baseline order, which is tried too, has neither."""
    with pytest.raises(BudgetError, match="the least feasible one is"):
        within(programs(SMALL), 1, schedule_1f1b={"interleave": "dx-first", **given})


@pytest.mark.slow
def test_a_larger_budget_is_no_slower() -> None:
    """Forms that exceed a budget are also planned as a smaller one would have them (688: 2050 ns; 708: once 2190)."""
    plain, steps = programs(SMALL), []
    for budget in (688, 708):
        outcome = within(plain, budget, SLOW_COPIES)[0].outcome
        assert outcome is not None
        steps.append(outcome.plan.step_ns)
    assert steps == sorted(steps, reverse=True)


@pytest.mark.slow
def test_the_plan_without_a_budget_is_taken_where_it_keeps_the_budget_and_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not below what Paddle's baseline holds, where it is not made."""
    plain = programs(SMALL)
    monkeypatch.setattr(
        Search, "fitting", lambda self, budget: self.make.made(in_paddles_order(self.asked), self.world.memory_limits(budget))
    )
    without, paddles = make_plans(plain, make_config({}), COPIES, "h200"), baseline_peak(plain)
    roomy, tight = within(plain, 2 * paddles), within(plain, paddles - 1)
    assert [each.program.jobs for each in roomy] == [each.program.jobs for each in without]
    assert [each.program.jobs for each in tight] != [each.program.jobs for each in without]
    assert "without-budget-faster" in [each.rule for report in roomy[0].reports for each in report.remarks]
    assert {each.memory_limit for each in roomy} == {0}
    monkeypatch.setattr(Ranks, "bytes_over_in_step", lambda *_: [1] * len(plain))
    declined = [each for report in within(plain, 2 * paddles)[0].reports for each in report.declined]
    assert [each.numbers["over_bytes"] for each in declined if each.rule == "without-budget-too-large"] == [1]


@pytest.mark.parametrize("form", ["dx-first", "mixed", "zb-h1"])
def test_host_waits_are_chosen_among_those_that_keep_the_budget(form: str) -> None:
    """A host that waits at the ends of jobs holds less and is slower. Where that alone keeps the budget it is taken, and nothing moves
    (with zb-h1 736 bytes and 1975 ns; once all was moved for the faster waits first, in 2010). With dx-first, waits at the peak are enough,
    which cost nothing."""
    given_ = {"schedule_1f1b": {"interleave": form, "only_gains": False}, "choose_recompute": "off"}
    plain = programs(SMALL)

    def found(budget: float | str, syncs: str) -> tuple[int, int, str]:
        plans = within(plain, budget, throttle_host={"syncs": syncs}, **given_)
        outcome, (said,) = plans[0].outcome, [each.declined for each in plans[0].reports if each.name == "offload-activations"]
        assert outcome is not None
        return outcome.plan.step_ns, max(peak_bytes(plan.program, COPIES) or 0 for plan in plans), said[0].rule

    (fast, most, _), (slow, least, _) = (found("1TB", syncs) for syncs in ("auto", "job-ends"))
    assert (fast, most) < (slow, most)
    assert least < most
    step, held, said = found(least, "auto")
    assert step == (fast if form == "dx-first" else slow)
    assert held <= least
    assert said == "nothing-moved"


def test_a_plan_that_exceeds_its_budget_is_tried_with_other_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was chosen as a draft and holds more as a whole, where nothing moves or is recomputed, and no wait is found at the peak."""
    monkeypatch.setattr(throttle, "PEAKS", 0)
    off = dict.fromkeys(("choose_recompute", "offload_activations"), "off")
    passes = make_config({"schedule_1f1b": {"interleave": "zb-h1", "only_gains": False}, **off}).pipeline()

    def chosen(self: Search, form: Pipeline, limit: Limit) -> Made:
        return replace(self.make.made(form, self.world.memory_limits(None)), memory_limits=self.world.memory_limits(limit.budget))

    monkeypatch.setattr(Search, "chosen", chosen)

    def held(budget: int) -> int:
        with together(programs(SMALL), COPIES, passes.passes) as world:
            found = Search(world, passes).fitting(budget)
            return max(each or 0 for each in world.gpu_peaks(found)) if found else 0

    assert held(832) == 832
    assert held(831) == held(736) == 736
    assert held(735) == 0


def test_a_plan_holds_its_budget_in_the_step_of_all() -> None:
    """What a send reads stays until the receiver is there. Alone, peers are always ready."""
    program = run_ahead_program()
    with together([program], COPIES, is_whole=False) as alone:
        assert alone.bytes_over_in_step(alone.start, (peak_bytes(program, COPIES) or 0) - 5) == [5]
    slow_sends = GivenCosts({"comm": 100, "gemm": 50, "copy": 5, "default": 10, "p2p": 200}, {})
    mixed = {"schedule_1f1b": {"interleave": "mixed", "only_gains": False}, "throttle_host": {"run_ahead_bytes": 0}}
    passes = make_config({"memory_budget": "1TB", **mixed}).pipeline()
    with together(programs(World(pp=2, micro_batches=4, layers=3, schedule="1F1B")), slow_sends, passes.passes) as world:
        made = Search(world, passes).within(1 << 40)
        assert (world.bytes_over(made, 0), world.bytes_over_in_step(made, 0)) == ([1152, 780], [1184, 780])


def test_what_little_less_room_does_not_change_gets_much_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offload moves whole values: a plan may hold the same bytes with a few bytes less room."""
    program, memory_limits = run_ahead_program(), list[int | None]()
    first = order_peak(program)
    monkeypatch.setattr(Ranks, "bytes_over_in_step", lambda *_: [5])

    def made(passes: Pipeline, of_rank: MemoryLimits) -> Made:
        memory_limits.extend(of_rank)
        return replace(run, memory_limits=of_rank)

    with together([program], COPIES, is_whole=False) as world:
        search = Search(world, make_config({}).pipeline())
        run = replace(world.start, passes=search.asked, memory_limits=(first,))
        assert search.make.with_lower_limits(made, run, 1) is None
    assert memory_limits == [first - 10, first - 50, first - 210]


def test_a_budget_that_holds_already_moves_and_recomputes_nothing() -> None:
    for plan in within(programs(SMALL), "1TB", schedule_1f1b={"interleave": "dx-first", "only_gains": False}):
        lines = {report.name: report for report in plan.reports}
        assert rules_of(lines["offload-activations"].remarks)[:2] == ["budget-kept", "nothing-moved"]
        assert lines["offload-activations"].remarks[0].numbers["budget_bytes"] == 10**12
        chosen = lines["choose-recompute"].done[0]
        assert (chosen.rule, chosen.numbers["recomputed"]) == ("recomputation-chosen", 0)


def test_a_fraction_is_of_what_paddles_own_plan_holds() -> None:
    plain = programs(SMALL)
    with together(plain, COPIES, memory_budget=0.5) as world:
        assert budget_bytes(world) == baseline_peak(plain) // 2


def test_ranks_of_a_stage_decide_alike_from_unequal_budgets() -> None:
    """The least of them counts for all; a budget beside none, or beside a fraction, is a mistake."""
    with together(programs(SMALL), COPIES) as world:
        for first, second, told in ((101, 100, "100"), (0.5, 101, "different options: memory_budget 0.5 and 101"), (None, 5, "None and 5")):
            world.facts = [
                msgspec.structs.replace(each, memory_budget=given) for each, given in zip(world.facts, (first, second), strict=True)
            ]
            if told == "100":
                assert budget_bytes(world) == 100
                continue
            with pytest.raises(PlanError, match=told):
                budget_bytes(world)


@pytest.mark.slow
def test_a_plan_keeps_its_budget_on_the_place_or_is_refused(examples: Callable[[int], int]) -> None:
    """Memory budget. What side streams hold is kept free by moving and recomputing more, on all ranks together."""
    kept: list[bool] = []
    least: list[float] = []

    @settings(max_examples=examples(8), deadline=None, database=None)
    @example(SMALL, 1.0)
    @given(worlds(max_pp=2, max_micro_batches=4, max_layers=2, schedule="1F1B"), st.sampled_from([0.6, 0.8, 1.0, 1.5]))
    def holds(world: World, share: float) -> None:
        plain = programs(world)
        budget = int(share * baseline_peak(plain))
        try:
            plans = within(plain, budget)
        except BudgetError as error:
            least.append(error.least_bytes / budget)
            return
        for plan in plans:
            kept.append(True)
            assert (peak_bytes(plan.program, COPIES) or 0) <= budget
            told = [each for report in plan.reports for each in report.done]
            assert [each.numbers["budget_bytes"] for each in told if each.rule == "budget-kept"] == [budget]

    holds()
    assert kept
    assert all(each > 1 for each in least)
