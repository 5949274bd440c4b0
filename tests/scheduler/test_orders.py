"""Transfers that are posted when their peer is about to be ready: never slower, safe on every target, and said in the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.config import make_config
from interlace.cost_model import GivenCosts
from interlace.ir import Graph, OpInstance, Program, dependencies, parse
from interlace.ir.kinds import is_comm, is_p2p, is_receive
from interlace.ir.target import CPU, CUSTOM, GPU
from interlace.passes import Context, DelayTransfers
from interlace.planning.plan import Plan, make_plans
from interlace.scheduler.hazards import check
from interlace.scheduler.simulate.simulator import simulate
from interlace.scheduler.whole_step.orders import Orders, _recorders, find_orders, simulation, transfers_in_time, transfers_of, with_orders
from interlace.units import ms
from tests.proofs import KNOWN
from tests.remarks import sentences
from tests.strategies import World, programs, worlds

SLOWED = GivenCosts({"comm": 20, "gemm": 100, "default": 10}, {("gemm", "wait"): (1.8, 1.0), ("memory", "wait"): (1.1, 1.0)})
"""Computation beside a transfer that waits for its peer takes up to 1.8 times as long."""
NO_MARGIN = {"margin_us": 0}
CALM = GivenCosts({"comm": 20, "gemm": 100, "default": 10})


def planned(given_: Sequence[Program], costs: GivenCosts, form: str, delays: object, waits: object = "on", **more: object) -> list[Plan]:
    options = {
        "schedule_1f1b": {"interleave": form, "only_gains": False, "search": False, **more},
        "delay_transfers": delays,
        "throttle_host": waits,
    }
    return make_plans(given_, make_config(options), costs, "given")


def step_ns(plans: Sequence[Plan], costs: GivenCosts) -> int:
    return max(rank.step_ns for rank in simulate([plan.program for plan in plans], costs).ranks)


def said(plan: Plan) -> str:
    report = next(each for each in plan.reports if each.name == "delay-transfers")
    return " ".join(sentences(report.remarks))


def delayed(plan: Plan) -> list[tuple[OpInstance, OpInstance]]:
    """Transfers that wait for computation, by what they wait for."""
    ops = {op.id: op for op in plan.program.ops}
    return [
        (event.record, wait)
        for event in plan.program.events
        for wait in event.waits
        if is_p2p(ops[wait[0]]) and ops[event.record[0]].results and not is_p2p(ops[event.record[0]])
    ]


@settings(max_examples=4, deadline=None)
@given(
    worlds(max_pp=3, max_micro_batches=6, schedule="1F1B"),
    st.sampled_from(["dx-first", "mixed"]),
    st.sampled_from([0, 1]),
    st.sampled_from(["on", "off", {"syncs": "job-ends"}, {"run_ahead_bytes": 0}]),
)
def test_delays_never_slow_a_step_and_stay_safe(world: World, form: str, weight_delay: int, waits: object) -> None:
    """Whatever waits of the host they run with."""
    plain = programs(world)
    early, late = (planned(plain, SLOWED, form, option, waits, weight_delay=weight_delay) for option in ("off", NO_MARGIN))
    assert step_ns(late, SLOWED) <= step_ns(early, SLOWED)
    for place in (GPU, CPU, CUSTOM):
        before, after = (check([plan.program for plan in plans], place) for plans in (early, late))
        assert {str(each) for each in after if each.kind not in KNOWN} <= {str(each) for each in before if each.kind not in KNOWN}
        assert any(each.kind == "deadlock" for each in before) or not any(each.kind == "deadlock" for each in after)
    for plan, before in zip(late, early, strict=True):
        assert_only_transfers_moved(before.program, plan.program)
        at = {item: k for k, item in enumerate(item for job in plan.program.jobs for item in job.items)}
        known = [(after, transfer) for after, transfer in delayed(plan) if after in at]  # others are of the job that splits the batch
        assert all(at[after] < at[transfer] for after, transfer in known)  # an event is recorded before it is waited for


def assert_only_transfers_moved(before: Program, after: Program) -> None:
    """Jobs hold what they held; transfers keep their order, and so do all others. Operations that keep memory alive count for neither."""
    ops = {op.id: op for op in before.ops}
    added = {op.id for op in (*before.ops, *after.ops) if op.name == "pd_op.share_data"}
    known = {item for job in before.jobs for item in job.items if item[0] not in added}
    for job, late in zip(before.jobs, after.jobs, strict=True):
        for transfers in (True, False):
            was, now = ([item for item in each.items if item in known and is_p2p(ops[item[0]]) == transfers] for each in (job, late))
            assert was == now


def places(program: Program) -> dict[OpInstance, tuple[str, int]]:
    """The job of each op instance, and its place there."""
    return {item: (job.name, k) for job in program.jobs for k, item in enumerate(job.items)}


def test_a_transfer_is_issued_behind_what_it_waits_for() -> None:
    """In a mixed job a gradient is ready long before the job ends; what ends shortly before the neighbour gets there is issued later."""
    plain = programs(World(pp=4, mp=2, micro_batches=6, layers=4))
    early, late = (planned(plain, SLOWED, "mixed", option, weight_delay=1) for option in ("off", NO_MARGIN))
    moved = 0
    for before, after in zip(early, late, strict=True):
        was, now = places(before.program), places(after.program)
        assert_only_transfers_moved(before.program, after.program)
        for record, transfer in delayed(after):
            assert now[record] < now[transfer] or now[record][0] != now[transfer][0]
            if was[record][0] == was[transfer][0] and was[record][1] > was[transfer][1]:
                moved += 1
                assert now[record][0] == now[transfer][0]
    assert moved >= 8
    stay = [
        with_orders(plan.program, [pair for pair in delayed(after) if earlier(places(plan.program), pair)])
        for plan, after in zip(early, late, strict=True)
    ]
    assert step_ns(late, SLOWED) < simulate(stay, SLOWED).step_ns  # moving them is worth something besides waiting


@pytest.mark.slow
def test_a_receive_that_would_be_issued_late_is_issued_earlier() -> None:
    """The host does not run ahead here, so what stands late in a job is posted late, and a sender that is busier waits for it."""
    plain = programs(World(pp=4, mp=2, micro_batches=6, layers=6))
    early, late = (planned(plain, SLOWED, "mixed", option, {"run_ahead_bytes": 0}, weight_delay=1) for option in ("off", NO_MARGIN))
    moved_up = []
    for before, after in zip(early, late, strict=True):
        was, now = places(before.program), places(after.program)
        assert_only_transfers_moved(before.program, after.program)
        ops = {op.id: op for op in before.program.ops}
        of_job = [(record, transfer) for record, transfer in delayed(after) if was[record][0] == was[transfer][0]]
        moved_up.append(
            [
                (record, transfer)
                for record, transfer in of_job
                if was[record][1] + 1 < was[transfer][1] and now[record][1] + 1 == now[transfer][1]
            ]
        )
        assert all(is_receive(ops[transfer[0]]) for _, transfer in moved_up[-1])
    assert any(moved_up)
    stay = [with_orders(plan.program, set(delayed(after)) - set(moved)) for plan, after, moved in zip(early, late, moved_up, strict=True)]
    assert step_ns(late, SLOWED) < simulate(stay, SLOWED).step_ns


def test_a_transfer_that_keeps_its_peer_waiting_waits_for_less() -> None:
    """The next round of orders posts it earlier, as if the other side had become ready sooner since."""
    plans = [plan.program for plan in planned(programs(World(pp=3, mp=1, micro_batches=6, layers=6)), SLOWED, "zb-h1", "off")]
    run = simulation(SLOWED, {plan.rank: plan.rank for plan in plans})
    known = transfers_in_time(transfers_of(plans), [{} for _ in plans], run(plans), 0)
    ordered = [[(record, transfer) for transfer, record in mine.items()] for mine in known]
    result = run([with_orders(plan, mine) for plan, mine in zip(plans, ordered, strict=True)])
    sim, times = result.input, result.times
    for at, mine in enumerate(known):
        items = range(int(sim.first[at]), int(sim.first[at + 1]))
        place = {(int(sim.op[k]), int(sim.micro_batch[k])): k for k in items}
        for transfer, record in mine.items():
            k = place[transfer]
            mates = sim.mates[sim.meet_first[sim.meet[k]] : sim.meet_first[sim.meet[k] + 1]]
            start, ready, until = times.start.copy(), times.ready.copy(), int(times.end[place[record]]) - 1
            start[k] = ready[k]  # the last one to be ready
            ready[mates[mates != k]] = until
            waits = transfers_in_time(transfers_of(plans), known, replace(result, times=replace(times, start=start, ready=ready)), 0)[at]
            assert transfer not in waits or times.end[place[waits[transfer]]] <= until
    assert any(known)


def earlier(place: dict[OpInstance, tuple[str, int]], pair: tuple[OpInstance, OpInstance]) -> bool:
    """Whether what a transfer waits for was issued before it anyway."""
    (job, k), (other, n) = (place[item] for item in pair)
    return job != other or k < n


@pytest.mark.parametrize("waits", ["on", "off", {"syncs": "job-ends"}, {"run_ahead_bytes": 0}])
def test_delays_are_decided_with_the_waits_of_the_host_that_follow(waits: object) -> None:
    """The step that the report says is the plan's."""
    plans = planned(programs(World(pp=4, mp=2, micro_batches=6, layers=2)), SLOWED, "mixed", NO_MARGIN, waits, weight_delay=1)
    assert any(delayed(plan) for plan in plans)
    assert f"whole step simulated {ms(step_ns(plans, SLOWED))}, " in said(plans[0])


@cache
def _plans_of_three_stages() -> list[Program]:
    made = planned(programs(World(pp=3, mp=2, micro_batches=6, layers=4)), SLOWED, "mixed", "off", weight_delay=1)
    return [plan.program for plan in made]


@pytest.mark.parametrize(("ranks", "share", "seed"), [(1, 1, 0), *((1, 0.5, seed) for seed in range(6)), (2, 1, 0)])
def test_a_transfer_stays_before_what_needs_it_and_among_its_like(ranks: int, share: float, seed: int) -> None:
    """However late its peer comes. Where plans of one stage are not alike it stays before collectives too: on the CPU place a rank that
    sends first and one that reduces first would wait for each other."""
    plans = [plan for plan in _plans_of_three_stages() if plan.rank % 2 < ranks]
    result = simulation(SLOWED, {plan.rank: plan.rank for plan in plans} if ranks == 2 else {})(plans)
    chosen = result.input.side & (np.random.default_rng(seed).random(result.input.num_items) < share)
    start = result.times.start + 10**9 * chosen  # as if their peers came much later
    late = replace(result, times=replace(result.times, start=start))
    moved = 0
    for plan, waits in zip(plans, transfers_in_time(transfers_of(plans), [{} for _ in plans], late, 0), strict=True):
        after = with_orders(plan, [(record, transfer) for transfer, record in waits.items()])
        assert_only_transfers_moved(plan, after)
        moved += after.jobs != plan.jobs
        ops, now = {op.id: op for op in plan.ops}, places(after)
        for op_id, needs in dependencies(Graph(plan), plan.ops).items():
            pairs = (((need, m), (op_id, m)) for need in needs for m in range(6) if {(need, m), (op_id, m)} <= now.keys())
            assert all(now[need] < now[item] for need, item in pairs if now[need][0] == now[item][0])
        for job in plan.jobs if ranks == 2 else ():
            assert [item for item in job.items if is_comm(ops[item[0]])] == [
                item for item, (name, _) in now.items() if name == job.name and is_comm(ops[item[0]])
            ]
    assert moved


def test_a_receive_waits_for_computation_until_its_sender_is_about_to_be_ready() -> None:
    plain = programs(World(pp=2, mp=1, micro_batches=6, layers=4))
    early, late = (planned(plain, SLOWED, "zb-h1", option) for option in ("off", NO_MARGIN))
    assert step_ns(late, SLOWED) < 0.97 * step_ns(early, SLOWED)
    assert delayed(late[1])
    assert not delayed(early[1])
    assert "transfers are posted when their peer is about to be ready: whole step simulated" in said(late[1])
    for plan in late:
        assert len({after for after, _ in delayed(plan)}) == len(delayed(plan))
        assert_only_transfers_moved(early[plan.program.rank].program, plan.program)


def test_nothing_is_delayed_without_a_gain() -> None:
    plain = programs(World(pp=2, mp=1, micro_batches=4, layers=2))
    plans = planned(plain, CALM, "dx-first", NO_MARGIN)
    assert not any(delayed(plan) for plan in plans)
    assert "no transfer waits for its peer beside computation so long" in said(plans[0])
    assert not any(delayed(plan) for plan in planned(plain, SLOWED, "dx-first", {"margin_us": 1000}))  # no one waits for a millisecond


def test_what_is_not_known_is_said() -> None:
    lone = planned(programs(World(pp=2, mp=1, micro_batches=4, layers=2))[:1], SLOWED, "dx-first", NO_MARGIN)[0]
    assert "the other stages' plans are not known here" in said(lone)
    single = planned(programs(World(pp=1, mp=2, micro_batches=4, layers=2)), SLOWED, "dx-first", NO_MARGIN)[0]
    assert "nothing is sent or received between stages" in said(single)
    assert DelayTransfers().run(single.program, Context(SLOWED)) is single.program


def test_a_stage_that_delays_nothing_says_so() -> None:
    """Where transfers of other stages are delayed it has done nothing."""
    plan = planned(programs(World(pp=2, mp=1, micro_batches=4, layers=2)), SLOWED, "dx-first", "off")[0].program
    context = Context(SLOWED, facts=(Orders(step_ns=90, before_ns=100), ()))
    assert DelayTransfers().run(plan, context).jobs == plan.jobs
    (told,) = context.remarks
    assert (told.rule, told.kind) == ("transfers-delayed-elsewhere", "declined")


@pytest.mark.parametrize("margin_ns", [0, 50, 200])
def test_orders_shorten_the_step_at_any_margin(margin_ns: int) -> None:
    plans = [plan.program for plan in planned(programs(World(pp=3, mp=1, micro_batches=6, layers=6)), SLOWED, "zb-h1", "off")]
    run = simulation(SLOWED, {plan.rank: plan.rank for plan in plans})
    found = find_orders(plans, run, margin_ns)
    assert found.step_ns < found.before_ns
    result = run([with_orders(plan, mine) for plan, mine in zip(plans, found.of_plans, strict=True)])
    assert result.step_ns == found.step_ns
    assert any(found.of_plans)
    for orders in found.of_plans:
        assert len({transfer for _, transfer in orders}) == len(orders)  # each waits for one thing


@pytest.mark.parametrize("margin_ns", [0, 50, 200])
def test_what_a_transfer_waits_for_ends_the_margin_before_it_starts(margin_ns: int) -> None:
    plans = [plan.program for plan in planned(programs(World(pp=3, mp=1, micro_batches=6, layers=6)), SLOWED, "zb-h1", "off")]
    result = simulation(SLOWED, {plan.rank: plan.rank for plan in plans})(plans)
    found, times = transfers_in_time(transfers_of(plans), [{} for _ in plans], result, margin_ns), result.times
    assert any(found)
    for at, waits in enumerate(found):
        first, last = int(result.input.first[at]), int(result.input.first[at + 1])
        place = {(int(result.input.op[k]), int(result.input.micro_batch[k])): k for k in range(first, last)}
        for transfer, after in waits.items():
            assert times.end[place[after]] + margin_ns <= times.start[place[transfer]]
            assert times.ready[place[transfer]] < times.end[place[after]]


def test_transfers_wait_only_for_what_an_event_is_recorded_after() -> None:
    text = """program rank=0 world=1 mode=train
#0 %0:float32[2]"x" = pd_op.data() forward
#1 %1:float32[2] = pd_op.exp(%0) forward
#2 %2:float32[2] = pd_op.if(%1) forward num_blocks=2
#3 %3:int32[1] = pd_op.shape(%1) forward
#4 %4:float32[2] = custom_op.mine(%1) forward
"""
    assert _recorders(parse(text)) == {1}
