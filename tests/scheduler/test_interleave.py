"""Backward and forward in one job: same numbers, no operation lost or doubled, memory within what is allowed, no waiting in circles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from interlace.cost_model import GivenCosts
from interlace.errors import ConfigError
from interlace.ir import Job, Program, parse, show, verify
from interlace.ir.effects import is_random
from interlace.ir.kinds import is_boundary, is_comm, is_receive
from interlace.ir.storage import storages_of
from interlace.passes import Pipeline as Passes
from interlace.passes import Schedule1F1B
from interlace.passes.base import Context
from interlace.planning.variants import milder
from interlace.scheduler.hazards import check
from interlace.scheduler.interleave.planner import Pair, PartOps, plan_pair
from interlace.scheduler.jobs.parts import Parts
from interlace.scheduler.memory.live import in_order
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.simulator import simulate
from tests.default_passes import THROTTLED
from tests.interpreter import assert_same
from tests.scheduler.sides import Sides, side_program
from tests.searches import SOME
from tests.strategies import World, programs, worlds

COSTS = GivenCosts({"comm": 100, "gemm": 50, "default": 10}, {("gemm", "comm"): (1.3, 2.0)})
Form = Literal["off", "dx-first", "mixed", "zb-h1"]
FORMS = st.sampled_from(["dx-first", "mixed", "zb-h1"])
PAIRED: st.SearchStrategy[Form] = st.sampled_from(["dx-first", "mixed"])
ALLOWANCES = st.sampled_from([0, 64, 10_000])


def planned(given_: Sequence[Program], form: Form, extra_bytes: int = 0, **options: Any) -> list[Program]:
    """All ranks through the real passes."""
    passes = Passes((Schedule1F1B(interleave=form, **options), *THROTTLED))
    return [passes.run(program, COSTS, extra_bytes=extra_bytes)[0] for program in given_]


def pairs_of(program: Program) -> list[Job]:
    return [job for job in program.jobs if job.kind == "pair"]


# ------------------------------------------------------------------------------------------------------------- whole worlds


@settings(max_examples=15, deadline=None)
@given(worlds(max_pp=3, max_micro_batches=6, schedule="1F1B", dropout=True), FORMS, ALLOWANCES)
def test_every_output_and_buffer_equals_the_plain_schedule(world: World, form: Form, allowance: int) -> None:
    """Pairs of parts, nothing lost. All ranks computed; verify finds every operation once for each micro-batch; the text holds the plan."""
    plain = programs(world)
    for made in (planned(plain, "off"), planned(plain, form, extra_bytes=allowance)):
        for program in made:
            verify(program)
            assert parse(show(program)) == program
        assert_same(plain, made)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(worlds(max_pp=3, max_micro_batches=6, schedule="1F1B", dropout=True), PAIRED, ALLOWANCES, st.data())
def test_weight_gradients_may_trail_by_any_lag(world: World, form: Form, allowance: int, data: st.DataObject) -> None:
    """A weight_delay for each stage: every output and buffer as in the plain schedule, nothing for the checker to find."""
    weight_delay = data.draw(st.integers(0, world.micro_batches + 1) | st.tuples(*[st.integers(0, 3)] * world.pp))
    inline_share = data.draw(st.sampled_from([0.0, 0.25, 0.75])) if weight_delay else 0.0
    at_end = data.draw(st.sampled_from([None, 0.0, 2.0]))
    plain = programs(world)
    made = planned(
        plain, form, weight_delay=weight_delay, inline_share=inline_share, extra_bytes=allowance, send_latency_weight_at_end=at_end
    )
    for program in made:
        verify(program)
    assert_same(plain, made)
    assert [str(finding.message) for finding in check(made)] == []


def test_a_list_of_forms_that_stalls_is_refused_with_its_place() -> None:
    given_, forms = programs(World(pp=4, micro_batches=8, layers=4)), ("dx-first", "dx-first", "mixed", "mixed")
    with pytest.raises(ConfigError, match=r"(?s)interleave: found \[dx-first, .* mixed\] without depth; give depth.*<-- here"):
        planned(given_, forms)  # type: ignore[arg-type]


def test_a_list_of_forms_falls_back_like_its_forms() -> None:
    forms: list[Any] = ["dx-first", ("dx-first", "dx-first"), "mixed", ("dx-first", "mixed"), "zb-h1", "auto"]
    found = [[each.interleave for each in milder(Schedule1F1B(interleave=form, send_latency_weight_at_end=None))] for form in forms]
    assert found == [["off"], ["off"], ["dx-first", "off"], ["dx-first", "off"], [], []]


def test_jobs_at_the_end_have_an_order_of_their_own() -> None:
    """From the last forward on, sends weigh as `send_latency_weight_at_end` says, before it as `send_latency_weight`."""
    plain = programs(World(pp=2, mp=2, micro_batches=5, layers=3))
    same = {"weight_delay": 1, "depth": (3, 1), "extra_bytes": 10_000}
    late, early, both = (
        planned(plain, "mixed", send_latency_weight=first, send_latency_weight_at_end=last, **same)[1].jobs
        for first, last in ((0.0, None), (4.0, None), (0.0, 4.0))
    )
    end = next(k for k, job in enumerate(both) if "4F" in job.name)
    assert both == (*late[:end], *early[end:])
    assert late[:end] != early[:end]
    assert late[end:] != early[end:]


def test_receives_of_chunks_go_with_input_gradients() -> None:
    """Equal results. The model's start sends no gradient; its receive stays among those of the other chunk, from the same stage."""
    for rank, chunks in ((0, 2), (0, 1)):
        schedule = "VPP" if chunks > 1 else "1F1B"
        parts = Parts(programs(World(pp=2, micro_batches=2, schedule=schedule, chunks=chunks))[rank], {"I", "W"})
        assert any(is_receive(op) for op in parts.ops["I", 0]) == (chunks > 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"interleave": "zb-h1", "weight_delay": 1}, "found 1 beside interleave: zb-h1"),
        ({"interleave": "off", "weight_delay": (1, 1)}, r"found \[1, 1\] beside interleave: off"),
        ({"schedule_file": "my.txt", "weight_delay": 1}, "found 1 beside schedule_file: my.txt"),
        ({"weight_delay": 1}, "found 1 beside interleave: auto"),
        (
            {"interleave": "dx-first", "inline_share": 0.5},
            "inline_share: found 0.5 beside interleave: dx-first without weight-gradient delay",
        ),
        (
            {"interleave": "dx-first", "weight_delay": 1, "inline_share": (0.5,)},
            r"inline_share: found \[0.5\], 1 numbers; expected one number",
        ),
        ({"interleave": "zb-h1", "depth": (2, 1)}, r"depth: found \[2, 1\] beside interleave: zb-h1; it goes with interleave dx-first or"),
        ({"interleave": "dx-first", "depth": (1, 1)}, r"depth: found \[1, 1\]; stages would wait for each other:"),
        (
            {"interleave": "dx-first", "send_latency_weight": (0.5,)},
            r"send_latency_weight: found \[0.5\], 1 numbers; expected one number, or one for each",
        ),
        (
            {"interleave": "dx-first", "send_latency_weight_at_end": (0.5,)},
            r"send_latency_weight_at_end: found \[0.5\], 1 numbers; expected one number",
        ),
        ({"interleave": ("mixed",)}, r"interleave: found \[mixed\], 1 forms; expected one form, or one for each of 2 stages"),
        (
            {"interleave": "dx-first", "weight_delay": 2, "weight_delay_at_end": (2, 1)},
            r"weight_delay_at_end: found \[2, 1\] beside weight_delay 2; expected no less than weight_delay",
        ),
        ({"interleave": "zb-h1", "weight_delay_at_end": 1}, "weight_delay_at_end: found 1 beside interleave: zb-h1"),
        ({"weight_delay_at_end": 0}, "weight_delay_at_end: found 0 beside interleave: auto"),
        ({"send_latency_weight_at_end": 0.5}, "send_latency_weight_at_end: found 0.5 beside interleave: auto, which chooses its own"),
        ({"interleave": "off", "send_latency_weight_at_end": (0.5, 0)}, r"found \[0.5, 0\] beside interleave: off, which keeps the order"),
        ({"interleave": "dx-first", "weight_delay": (1, 2, 3)}, r"found \[1, 2, 3\], 3 numbers; expected one for each of 2 stages"),
    ],
)
def test_a_lag_that_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Schedule1F1B(**options).run(programs(World(pp=2, micro_batches=4))[0], Context(COSTS))


def test_trailing_weight_gradients_fill_the_end_of_a_pipeline() -> None:
    """Two stages without tensor-parallel communication: what the last stage puts off runs while it would wait, and at its end."""
    costs = GivenCosts({"comm": 5, "gemm": 20, "default": 5})
    plain = programs(World(pp=2, micro_batches=6, layers=2))
    first, trailing = (planned_with(plain, costs, weight_delay) for weight_delay in (0, (1, 2)))
    assert step_of(trailing, costs) < step_of(first, costs)


def planned_with(given_: Sequence[Program], costs: GivenCosts, weight_delay: Any) -> list[Program]:
    passes = Passes((Schedule1F1B(interleave="dx-first", weight_delay=weight_delay), *THROTTLED))
    return [passes.run(program, costs, extra_bytes=10_000)[0] for program in given_]


def step_of(made: Sequence[Program], costs: GivenCosts) -> int:
    return max(rank.step_ns for rank in simulate(made, costs, Options(peers_ready=True)).ranks)


@settings(max_examples=12, deadline=None)
@given(worlds(max_pp=4, max_micro_batches=7, max_layers=2, schedule="1F1B"), st.just("off") | FORMS, ALLOWANCES)
def test_the_checker_finds_nothing(world: World, form: Form, allowance: int) -> None:
    """No deadlock. With sends that wait for their receiver, on a GPU: no race, no circle, partners agree."""
    assert [str(finding.message) for finding in check(planned(programs(world), form, extra_bytes=allowance))] == []


@settings(max_examples=12, deadline=None)
@example(World(mp=2, micro_batches=2, gather=True, seed=3502), 64)  # extend-lifetimes keeps 8 bytes longer than the schedule knows
@given(worlds(max_pp=3, max_micro_batches=6, schedule="1F1B"), st.sampled_from([0, 32, 64, 10_000]))
def test_live_memory_stays_under_the_plain_order_and_the_allowance(world: World, allowance: int) -> None:
    """At no place of the whole step's order; measured by another module than the planner's own.

    Later passes add only what `extend-lifetimes` keeps alive for side streams.
    """
    for program in programs(world):
        plain, scheduled = (_scheduled(program, form, allowance) for form in ("off", "dx-first"))
        assert _peak(scheduled) <= _peak(plain) + allowance
        made = planned([program], "dx-first", extra_bytes=allowance)[0]
        assert _peak(made) <= _peak(scheduled) + _kept_longer(program, made)


def _scheduled(program: Program, form: Form, allowance: int) -> Program:
    return Passes((Schedule1F1B(interleave=form),)).run(program, COSTS, extra_bytes=allowance)[0]


def _peak(program: Program) -> int:
    return in_order(program).peak()


def _kept_longer(before: Program, after: Program) -> int:
    """Bytes of the storages, of all micro-batches, that operations added to a program read."""
    known, table = {op.id for op in before.ops}, storages_of(after)
    kept = {n for op in after.ops if op.id not in known for value in op.operands for n in table.numbers(value)}
    return before.pipeline.num_micro_batches * sum(table.storages[n].size_bytes for n in kept)


@settings(max_examples=12, deadline=None)
@given(worlds(max_pp=3, max_micro_batches=6, schedule="1F1B"), FORMS, st.integers(1, 60))
def test_no_job_is_larger_than_allowed(world: World, form: Form, limit: int) -> None:
    """Nothing lost. A pair that would be larger stays two jobs; receives that come early, and what keeps values alive, are not counted."""
    plain = programs(world)
    made = planned(plain, form, max_ops_per_job=limit)
    assert_same(plain, made)
    for before, program in zip(plain, made, strict=True):
        own = {op.id for op in before.ops if not is_receive(op)}
        assert all(sum(op in own for op, _ in job.items) <= limit for job in pairs_of(program))


@settings(max_examples=6, deadline=None)
@given(worlds(max_pp=3, max_micro_batches=4, schedule="1F1B"), FORMS)
def test_the_same_input_gives_the_same_plan(world: World, form: Form) -> None:
    """Equal plans. Twice, and on both ranks of a tensor-parallel group."""
    plain = programs(msgspec.structs.replace(world, mp=2))
    first, second = planned(plain, form), planned(plain, form)
    assert first == second
    for left, right in zip(first[::2], first[1::2], strict=True):
        assert left.jobs == right.jobs


@pytest.mark.parametrize("form", ["dx-first", "mixed"])
@pytest.mark.parametrize(("pp", "stage"), [(2, 0), (2, 1), (4, 0), (4, 3)])
def test_depth(form: Form, pp: int, stage: int) -> None:
    """Warm-up depth. Mixed pairs hold 2 (stages - 1 - stage) + 1 micro-batches, dx-first as many as Paddle."""
    program = planned(programs(World(pp=pp, micro_batches=12)), form)[stage]
    warm = [job.kind for job in program.jobs].index("pair")
    assert warm == (2 * (pp - 1 - stage) + 1 if form == "mixed" else pp - stage)


def test_evaluation_has_forwards_only() -> None:
    """Evaluation. A program without backward is no pipeline of pairs."""
    program = programs(World(pp=2, micro_batches=3))[0]
    ops = [op for op in program.ops if op.role == "forward"]
    used = {value for op in ops for value in op.results}
    program = program.with_ops(ops, [value for value in program.values if value.id in used])
    assert [job.kind for job in planned([program], "mixed")[0].jobs] == ["forward"] * 3


# ------------------------------------------------------------------------------------------------------- unequal sides


COUNTS = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple)


@pytest.mark.parametrize("form", ["dx-first", "mixed"])
@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ((2, 1), (1, 2)),
        ((2,), (1,)),
        ((1,), (2,)),
        ((1, 1), (1, 1)),
        ((1,), (1, 1)),
        ((1, 1), (1,)),
        ((0,), (2,)),
        ((2,), (0,)),
        ((0,), (0,)),
    ],
)
def test_unequal_numbers_of_layers_and_collectives(forward: tuple[int, ...], backward: tuple[int, ...], form: Form) -> None:
    """Pairs of parts. More collectives in backward than in forward and the reverse, none in forward, none at all."""
    plain = side_program(Sides(forward, backward))
    made = planned([plain], form)
    verify(made[0])
    assert_same(plain, made)
    assert len(pairs_of(made[0])) == 2


@settings(max_examples=60, deadline=None)
@given(st.builds(Sides, COUNTS, COUNTS, st.just(0), st.just(1), st.integers(1, 4), *[st.booleans()] * 3), FORMS, ALLOWANCES)
def test_random_draws_and_state_keep_their_order(sides: Sides, form: Form, allowance: int) -> None:
    """Pairs of parts. Dropout on both sides (recompute) draws in Paddle's order; state that forward writes is read as in Paddle's order."""
    plain = side_program(sides)
    baseline, made = planned([plain], "off")[0], planned([plain], form, extra_bytes=allowance)[0]
    verify(made)
    assert_same(baseline, made)


@pytest.mark.parametrize("form", ["dx-first", "mixed"])
def test_draws_in_backward_keep_the_order_of_the_whole_step(form: Form) -> None:
    """Pairs of parts. A pipeline whose backward draws random numbers keeps Paddle's depth: another would change the draws."""
    plain = [side_program(Sides(stage=stage, stages=3, micro_batches=6, recompute=True, draws=True), stage) for stage in range(3)]
    made = planned(plain, form, extra_bytes=10_000)
    assert_same(planned(plain, "off"), made)
    for program in made:
        random_ops = {op.id for op in program.ops if is_random(op)}
        draws = [item for job in program.jobs for item in job.items if item[0] in random_ops]
        baseline = planned([plain[program.rank]], "off")[0]
        assert draws == [item for job in baseline.jobs for item in job.items if item[0] in random_ops]


# --------------------------------------------------------------------------------------------------------------- decisions


def pair_order(sides: Sides, costs: GivenCosts, form: Any, **options: Any) -> tuple[list[str], Any]:
    """A pair's operations as `side.kind`, and its plan."""
    program = side_program(sides)
    inner = [op for op in program.ops if not is_boundary(op)]
    parts = [PartOps(kind, kind, [op for op in inner if op.role == role]) for kind, role in (("B", "backward"), ("F", "forward"))]
    plan = plan_pair(Pair(program, parts, costs, work=SOME), form, **options)
    ops = {op.id: op for op in inner}
    return [f"{side}.{ops[op_id].kind}" for side, op_id in plan.order], plan


def test_costs_decide_what_fills_a_collective() -> None:
    """By hand. dX's collective is filled by dW; where communication costs nothing, the plain order stays."""
    order, plan = pair_order(Sides(), GivenCosts({"comm": 100, "gemm": 5, "default": 1}), "dx-first", extra_bytes=10_000)
    start = order.index("B.all_reduce")
    assert "B.matmul" in order[start : order.index("B.tanh")]
    assert plan.planned_ns < plan.serial_ns
    order, plan = pair_order(Sides(), GivenCosts({"comm": 0, "gemm": 5, "default": 1}), "dx-first", extra_bytes=10_000)
    assert plan.why_plain == "nothing-faster-fits"


def test_mixed_fills_backwards_collective_with_forward_and_forwards_with_backward() -> None:
    """By hand, pairs of parts. Two collectives a side: what is hidden grows from plain over dx-first to mixed."""
    costs = GivenCosts({"comm": 30, "gemm": 20, "default": 5})
    sides = Sides((1, 1), (1, 1))
    times = [pair_order(sides, costs, form, extra_bytes=10_000)[1].planned_ns for form in ("dx-first", "mixed")]
    serial = pair_order(sides, costs, "mixed")[1].serial_ns
    assert times[1] <= times[0] < serial


def test_interference_decides_too() -> None:
    """Interference, by hand. Where a product beside a collective costs more than it hides, nothing is gained by it."""
    calm = pair_order(Sides(), GivenCosts({"comm": 40, "gemm": 20, "default": 1}), "dx-first", extra_bytes=10_000)[1]
    rough = GivenCosts({"comm": 40, "gemm": 20, "default": 1}, {("gemm", "comm"): (3.0, 3.0)})
    assert pair_order(Sides(), rough, "dx-first", extra_bytes=10_000)[1].planned_ns > calm.planned_ns


def test_receives_of_the_forward_come_before_sends_of_the_backward() -> None:
    """No deadlock. The neighbour sends first; both forms."""
    for form in ("dx-first", "mixed"):
        for program in planned([side_program(Sides(stage=1, stages=3, micro_batches=6), 1)], form):
            ops = {op.id: op for op in program.ops}
            for job in pairs_of(program):
                kinds = [(ops[op].role, ops[op].kind) for op, _ in job.items if is_comm(ops[op])]
                received = [k for k, kind in enumerate(kinds) if kind == ("forward", "recv_v2")]
                if received:
                    assert received[0] < kinds.index(("backward", "send_v2"))


def test_the_report_says_what_a_pair_gains() -> None:
    """Warm-up depth."""
    context = Context(COSTS)
    Schedule1F1B(interleave="dx-first").run(side_program(Sides()), context)
    (ordered,) = [each for each in context.remarks if each.rule == "job-ordered" and each.place.job == "B+F"]
    assert ordered.numbers["operations"] == 11
    assert ordered.numbers["planned_ns"] < ordered.numbers["serial_ns"]  # type: ignore[operator]
    context = Context(COSTS)
    Schedule1F1B(max_ops_per_job=3).run(side_program(Sides()), context)
    assert {each.numbers["most_operations"] for each in context.remarks if each.rule == "job-too-large"} == {3}


def test_a_pair_uses_the_memory_it_is_allowed() -> None:
    """Nothing lost. 64 bytes more let mixed hide more."""
    plain = side_program(Sides())
    tight, ample = (planned([plain], "mixed", only_gains=False, extra_bytes=extra)[0] for extra in (0, 64))
    assert _peak(tight) <= _peak(planned([plain], "off")[0])
    assert pairs_of(tight)[0].items != pairs_of(ample)[0].items


def test_without_a_budget_a_pair_may_hold_a_little_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing lost. As much as counts as Paddle's own memory; under a budget next to nothing."""
    monkeypatch.setattr("interlace.scheduler.jobs.making.FREE_SHARE", 1)
    plain = side_program(Sides())
    ample = planned([plain], "mixed", only_gains=False, extra_bytes=64)[0]
    passes = Passes((Schedule1F1B(interleave="mixed", only_gains=False), *THROTTLED))
    orders = [passes.run(plain, COSTS, memory_limit=room)[0] for room in (None, 1 << 40)]
    free, tight = (pairs_of(each)[0].items for each in orders)
    assert free == pairs_of(ample)[0].items
    assert tight != free


@pytest.mark.parametrize("form", ["dx-first", "mixed"])
def test_a_stage_receives_all_that_its_neighbour_sends_before_it_takes_a_gradient(form: Form) -> None:
    """No deadlock. With sends that wait for their receiver."""
    first, second = planned(programs(World(pp=2, micro_batches=5)), form)
    ops = [{op.id: op for op in program.ops} for program in (first, second)]
    before: dict[int, int] = {}
    sent = 0
    for op_id, m in (item for job in first.jobs for item in job.items):
        sent += ops[0][op_id].kind == "send_v2" and ops[0][op_id].role == "forward"
        if ops[0][op_id].kind == "recv_v2" and ops[0][op_id].role == "backward":
            before[m] = sent
    received = 0
    for op_id, m in (item for job in second.jobs for item in job.items):
        received += ops[1][op_id].kind == "recv_v2"
        if ops[1][op_id].kind == "send_v2" and ops[1][op_id].role == "backward":
            assert received >= before[m]
