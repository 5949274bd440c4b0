"""The optimizer in one job with the last gradients, and in a job of its own, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest

from interlace.cost_model import GivenCosts
from interlace.ir import Graph, Program, parse
from interlace.passes import NameStreams, Pipeline, Schedule1F1B
from interlace.planning import proposals
from interlace.planning.variants import schedule_label, with_optimizer_alone
from interlace.scheduler.interleave.engine import Engine
from interlace.scheduler.interleave.list_schedule import TRIES, USUAL, Weights
from interlace.scheduler.interleave.optimizer import in_completion_order
from interlace.scheduler.interleave.planner import FREE_SHARE, REDUCTIONS_SHARE, Pair, PartOps, plan_pair
from interlace.scheduler.jobs import making
from tests.searches import SOME

COST = GivenCosts({"comm": 1000, "gemm": 1000, "default": 10})
TEXT = """program rank=0 world=4 mode=train
pipeline stage={stage} of {stages} micro_batches=2 chunks=1 schedule=1F1B
group 7 = 0,1
group 8 = 0,2
#0 %0:float32[4]! = builtin.kwarg() forward {{"name":"grad0"}}
#1 %1:float32[4]! = builtin.kwarg() forward {{"name":"grad1"}}
#2 %2:float32[4]!"w0" = builtin.parameter() forward
#3 %3:float32[4]!"w1" = builtin.parameter() forward
#4 %4:float32[4] = pd_op.data() forward
#5 %5:float32[4] = pd_op.matmul(%4, %3) backward
#6 %6:float32[4]~1 = pd_op.add_(%1, %5) backward inplace=0:0
#7 %7:float32[4] = pd_op.matmul(%4, %2) backward
#8 %8:float32[4]~0 = pd_op.add_(%0, %7) backward inplace=0:0
#9 %9:float32[4] = pd_op.all_reduce(%0) optimize group={group}
#10 %10:float32[4] = pd_op.all_reduce(%1) optimize group={group}
#11 %11:float32[4] = pd_op.scale(%9) optimize
#12 %12:float32[4] = pd_op.scale(%10) optimize
#13 %13:float32[4] = pd_op.all_gather(%11) optimize group={group}
#14 %14:float32[4]~2 = pd_op.assign_out_(%13, %2) optimize inplace=0:1
#15 %15:float32[4] = pd_op.all_gather(%12) optimize group={group}
#16 %16:float32[4]~3 = pd_op.assign_out_(%15, %3) optimize inplace=0:1
"""


def program(group: int = 7, stages: int = 1) -> Program:
    return parse(TEXT.format(group=group, stage=0, stages=stages))


def split(made: Program) -> tuple[list, list]:
    return [op for op in made.ops if op.role == "backward"], [op for op in made.ops if op.role == "optimize"]


def test_gradients_are_reduced_in_the_order_in_which_backward_completes_them() -> None:
    made = program()
    backward, optimizer = split(made)
    assert [op.id for op in in_completion_order(Graph(made), backward, optimizer)] == [10, 9, 12, 15, 16, 11, 13, 14]


def test_a_group_that_reaches_into_another_stage_keeps_its_order() -> None:
    made = program(group=8, stages=2)
    backward, optimizer = split(made)
    comm = [op.id for op in in_completion_order(Graph(made), backward, optimizer) if op.group == 8]
    assert comm == [9, 10, 13, 15]


def test_a_gradient_is_reduced_beneath_the_next_one() -> None:
    made = program()
    backward, optimizer = split(made)
    parts = [PartOps("B", "B", backward), PartOps("O", "O", in_completion_order(Graph(made), backward, optimizer))]
    plan = plan_pair(Pair(made, parts, COST, work=SOME), "dx-first")
    order = [op_id for _, op_id in plan.order]
    assert order.index(6) < order.index(10) < order.index(7), "the first gradient's all_reduce starts before the second is computed"
    assert order.index(8) < order.index(9)
    assert plan.serial_ns - plan.planned_ns >= 1000, "at least one of the collectives is hidden"


SLICED = """program rank=0 world=2 mode=train
pipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=accumulate
group 7 = 0,1
#0 %0:float32[8]! = builtin.kwarg() forward {"name":"grad0"}
#1 %1:float32[8]! = builtin.kwarg() forward {"name":"grad1"}
#2 %2:float32[8]!"w0" = builtin.parameter() forward
#3 %3:float32[8]!"w1" = builtin.parameter() forward
#16 %16:float32[8] = pd_op.data() forward
#17 %17:float32[8] = pd_op.matmul(%16, %2) forward
#18 %18:float32[8]~0 = pd_op.add_(%0, %17) backward inplace=0:0
#4 %4:float32[4] = pd_op.reduce_scatter(%0) optimize group=7
#5 %5:float32[4] = pd_op.reduce_scatter(%1) optimize group=7
#6 %6:float32[2] = pd_op.full() optimize
#7 %7:float32[4] = pd_op.slice(%2, %6) optimize
#8 %8:float32[4] = pd_op.slice(%3, %6) optimize
#9 %9:float32[4] = pd_op.matmul(%4, %6) optimize
#10 %10:float32[4] = pd_op.matmul(%7, %9) optimize
#11 %11:float32[8] = pd_op.all_gather(%10) optimize group=7
#12 %12:float32[8]~2 = pd_op.assign_out_(%11, %2) optimize inplace=0:1
#13 %13:float32[4] = pd_op.matmul(%8, %5) optimize
#14 %14:float32[8] = pd_op.all_gather(%13) optimize group=7
#15 %15:float32[8]~3 = pd_op.assign_out_(%14, %3) optimize inplace=0:1
"""


def test_a_slice_of_a_parameter_is_computed_when_its_reader_is_otherwise_ready() -> None:
    """Not while gradients are reduced, where nothing else runs. What the slices need is also read earlier, by #9, and comes before it."""
    made = parse(SLICED)
    optimizer = [op for op in made.ops if op.role == "optimize"]
    pair = Pair(made, [PartOps("O", "O", optimizer)], COST, work=SOME)
    assert {("O", 9)} <= pair.after["O", 7]
    assert {("O", 5)} <= pair.after["O", 8]
    assert not pair.after["O", 6] & {("O", 9), ("O", 10), ("O", 13)}
    order = [op_id for _, op_id in plan_pair(pair, "dx-first").order]
    assert order.index(4) < order.index(6) < order.index(9) < order.index(7)
    assert order.index(5) < order.index(8)


def test_an_optimizer_in_a_job_of_its_own_gathers_one_parameter_while_it_computes_the_next() -> None:
    made = parse(SLICED)
    scheduled, reports = Pipeline((Schedule1F1B(interleave="dx-first", join_optimizer=False, only_gains=False), NameStreams())).run(
        made, COST
    )
    assert [job.kind for job in scheduled.jobs] == ["forward", "backward", "optimizer"]
    order = [op_id for op_id, _ in scheduled.jobs[-1].items]
    assert order.index(11) < order.index(13) < order.index(12), "the first parameter travels beside the second one's update"
    assert {op.stream for op in scheduled.ops if op.group == 7} == {"auto_parallel_dp"}
    assert "job-ordered" in [remark.rule for report in reports for remark in report.remarks]
    kept, _ = Pipeline((Schedule1F1B(interleave="off"), NameStreams())).run(made, COST)
    assert [op_id for op_id, _ in kept.jobs[-1].items] == [op.id for op in made.ops if op.role == "optimize"]
    assert {op.stream for op in kept.ops if op.group == 7} == {""}


@pytest.mark.parametrize(("first", "share", "tries"), [(False, FREE_SHARE, USUAL), (True, REDUCTIONS_SHARE, TRIES)])
def test_reductions_first_tries_more_orders_and_gives_the_job_with_the_optimizer_more_memory(
    monkeypatch: pytest.MonkeyPatch, first: bool, share: int, tries: tuple[Weights, ...]
) -> None:
    asked, orders, plans = list[tuple[Weights, ...]](), Engine.orders, making.plan_pair

    def listed(engine: Engine, task: Any, form: Any, cap_bytes: int, given: tuple[Weights, ...]) -> Any:
        asked.append(given)
        return orders(engine, task, form, cap_bytes, given)

    def planned(pair: Pair, form: Any, extra_bytes: int, max_ops: int, small_share: int) -> Any:
        shares.append((pair.parts[-1].kind, small_share))
        return plans(pair, form, extra_bytes, max_ops, small_share)

    shares = list[tuple[str, int]]()
    monkeypatch.setattr(Engine, "orders", listed)
    monkeypatch.setattr(making, "plan_pair", planned)
    schedule = Schedule1F1B(interleave="dx-first", reductions_first=first, only_gains=False, search=False)
    scheduled, _ = Pipeline((schedule,)).run(parse(SLICED), COST)
    assert [job.kind for job in scheduled.jobs] == ["forward", "pair"]
    assert shares == [("O", share)]
    assert set(asked) == {tries}


@pytest.mark.parametrize(("other", "refused"), [({"interleave": "off"}, True), ({"join_optimizer": False}, False), ({}, False)])
def test_reductions_first_needs_jobs_that_are_ordered(other: dict[str, Any], refused: bool) -> None:
    mistake = Schedule1F1B(**{"interleave": "dx-first", "reductions_first": True, **other}).mistake()
    assert (mistake or ("",))[0] == ("reductions_first" if refused else "")
    assert mistake is None or "leave it out" in mistake[1]


class Candidate(NamedTuple):
    """What proposals read of a draft."""

    form: Schedule1F1B
    step_ns: int
    peak_bytes: int
    recomputed: None = None
    joules: float = 0.0


def test_the_fastest_forms_are_drafted_with_reductions_first() -> None:
    """The fastest of those that keep the limit and of those that do not, if their optimizer runs with the last gradients."""
    alone, joined = Schedule1F1B(interleave="dx-first", join_optimizer=False), Schedule1F1B(interleave="dx-first")
    judged = [Candidate(alone, 10, 90), Candidate(joined, 20, 90), Candidate(joined, 15, 110), Candidate(replace(joined, "mixed"), 12, 110)]
    for communicates, found in ((True, [joined, replace(joined, "mixed")]), (False, [])):
        drafts = SimpleNamespace(optimizer_communicates=communicates)
        tried: Any = SimpleNamespace(drafts=drafts, judged=judged, limit=100, new=lambda forms: [form for _, form in forms])
        assert proposals.reductions_first(tried) == [msgspec.structs.replace(form, reductions_first=True) for form in found]
    assert with_optimizer_alone(msgspec.structs.replace(joined, reductions_first=True)) == alone
    assert "reductions_first on" in schedule_label(msgspec.structs.replace(joined, reductions_first=True))


def replace(schedule: Schedule1F1B, form: Any) -> Schedule1F1B:
    return msgspec.structs.replace(schedule, interleave=form)
