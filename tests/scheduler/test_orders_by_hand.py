"""Orders of transfers in plans so short that they are told by hand: what may move, what may be recorded behind, what an event keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.cost_model import GivenCosts
from interlace.errors import PlanError
from interlace.ir import Event, Program, parse
from interlace.scheduler.simulate.simulator import Result
from interlace.scheduler.whole_step.orders import find_orders, merged, simulation, transfers_in_time, transfers_of, with_orders

COST = GivenCosts({"comm": 20, "gemm": 100, "default": 100}, host_ns=1, job_ns=1)
HEAD = """program rank={rank} world={world} mode=train
pipeline stage={stage} of 2 micro_batches=1 chunks=1 schedule=1F1B
group 3 = {pair}
group 7 = {stages}
group 8 = {alike}
#0 %0:float32[4,4]!"w" = builtin.parameter() forward
#1 %1:float32[4,4]"x" = pd_op.data() forward
"""
SENDS = """#2 %2:float32[4,4] = pd_op.matmul(%1, %0) forward
#3 pd_op.send_v2(%2) forward group=3 stream="send" {"peer":1}
#4 %4:float32[4,4] = pd_op.matmul(%1, %0) forward
#5 %5:float32[4,4] = pd_op.matmul(%4, %0) forward
#6 %6:float32[4,4] = pd_op.matmul(%1, %0) forward
#7 %7:float32[4,4] = pd_op.matmul(%6, %0) forward
job a forward 0: 2-6@0
job b forward 0: 7@0
"""
"""A product is sent, and three more follow it in its job: they end at 200, 300 and 400 ns."""
RECEIVES = """#2 %2:float32[4,4] = pd_op.recv_v2() forward group=3 stream="receive" {"peer":0}
#3 %3:float32[4,4] = pd_op.matmul(%2, %0) forward
#4 %4:float32[4,4] = pd_op.matmul(%1, %0) forward
job a forward 0: 4@0
job b forward 0: 2-3@0
"""


def text(stage: int, ops: str, tensor: int = 1) -> str:
    """The plan of the first rank of a stage that has so many."""
    ranks = [tensor * stage + k for k in range(tensor)]
    return (
        HEAD.format(
            rank=ranks[0],
            world=2 * tensor,
            stage=stage,
            pair=f"0,{tensor}",
            alike=",".join(map(str, ranks)),
            stages=",".join(map(str, range(2 * tensor))),
        )
        + ops
    )


def send_waits_for(ops: str, ready: int, after_ns: int = 0, events: tuple[Event, ...] = (), margin_ns: int = 0) -> int:
    """The operation that the send (#3) waits for if its peer is ready so long after operation `ready` has ended; -1 for none. It is issued
    behind it, and nothing else moves."""
    plans = [parse(text(0, ops)), parse(text(1, RECEIVES))]
    plans[0] = msgspec.structs.replace(plans[0], events=events)
    result = simulation(COST, {0: 0, 1: 1})(plans)
    start, at = result.times.start.copy(), {int(result.input.op[k]): k for k in range(int(result.input.first[1]))}
    start[at[3]] = result.times.end[at[ready]] + after_ns
    waits = transfers_in_time(transfers_of(plans), [{}, {}], replace(result, times=replace(result.times, start=start)), margin_ns)[0]
    made = with_orders(plans[0], [(after, transfer) for transfer, after in waits.items()])
    before, after = ([item for item in each.jobs[0].items if item != (3, 0)] for each in (plans[0], made))
    assert before == after
    found = waits.get((3, 0), (-1, 0))[0]
    place = [op_id for op_id, _ in made.jobs[0].items]
    assert place.index(3) == (place.index(found) + 1 if found > 2 else 1)
    return found


@pytest.mark.parametrize(
    ("ready", "after_ns", "margin_ns", "after"),
    [(2, 1, 0, -1), (4, -1, 0, -1), (4, 0, 0, 4), (5, -1, 0, 4), (5, 0, 0, 5), (5, 29, 30, 4), (5, 30, 30, 5), (7, 0, 0, 6)],
)
def test_a_send_is_issued_behind_the_last_that_ends_by_the_time_its_peer_is_ready(
    ready: int, after_ns: int, margin_ns: int, after: int
) -> None:
    """Or by a margin before, and never behind what is of another job."""
    assert send_waits_for(SENDS, ready, after_ns, margin_ns=margin_ns) == after


def test_a_transfer_behind_which_an_event_is_recorded_stays_where_it_is() -> None:
    """What waits for the event would wait for all that the transfer is issued behind."""
    assert send_waits_for(SENDS, 7, events=(Event("e", (3, 0), ((7, 0),)),)) == -1
    assert send_waits_for(SENDS, 7, events=(Event("e", (2, 0), ((7, 0),)),)) == 6


@pytest.mark.parametrize(
    ("other", "after"),
    [
        ("%5:float32[4,4] = pd_op.gelu(%4) forward", 5),
        ("%5:float32[4,4] = pd_op.all_reduce(%4) forward group=8", 4),  # communicates
        ("%5:float32[4,4]^pinned = pd_op.memcpy_d2h(%4) forward", 4),  # copies
        ("%5:float32[4,4] = pd_op.full() forward", 4),  # computes from no tensor: constants are folded away
        ("%5:vector<float32[2,4];float32[2,4]> = pd_op.split_with_num(%4) forward", 4),  # gives no tensor
        ("%5:null = pd_op.assign(%4) forward", 4),  # gives nothing
        ('%5:float32[4,4] = pd_op.exp(%4) forward {"place":"Place(cpu)"}', 4),  # runs on the host, where no event is recorded
        ("%5:int64[2] = pd_op.shape(%4) forward", 4),  # does so too
    ],
)
def test_events_are_recorded_behind_what_computes_tensors_from_tensors(other: str, after: int) -> None:
    assert send_waits_for(SENDS.replace("%5:float32[4,4] = pd_op.matmul(%4, %0) forward", other), 5, 10) == after


def test_a_send_stays_before_what_writes_over_it_and_keeps_to_its_job() -> None:
    over = SENDS.replace("%5:float32[4,4] = pd_op.matmul(%4, %0) forward", "%5:float32[4,4]~2 = pd_op.relu_(%2) forward inplace=0:0")
    assert send_waits_for(over, 7) == 4


@pytest.mark.parametrize(("group", "tensor", "after"), [(8, 1, 6), (7, 1, 4), (8, 2, 6)])
def test_a_send_stays_before_collectives_with_other_stages(group: int, tensor: int, after: int) -> None:
    """The other stage may call them before it receives. Those within the stage it may pass, as its ranks do alike."""
    summed = SENDS.replace("pd_op.matmul(%4, %0) forward", f"pd_op.all_reduce(%4) forward group={group}")
    plans = [parse(text(stage, ops, tensor)) for stage, ops in enumerate((summed, RECEIVES))]
    spans = transfers_of(plans)[0].spans[3, 0]
    assert spans.before == (5 if after == 6 else 3)


def test_an_op_instance_keeps_all_who_wait_for_its_event() -> None:
    """Waits that there are stay, each once; an op instance records one event."""
    known = (Event("first", (2, 0), ((3, 0), (4, 0))), Event("second", (5, 0), ((6, 0),)))
    made = merged(known, [((2, 0), (6, 0)), ((2, 0), (4, 0)), ((2, 0), (7, 0)), ((8, 1), (9, 1)), ((8, 1), (9, 0)), ((5, 0), (6, 0))])
    assert made == (
        Event("first", (2, 0), ((3, 0), (4, 0), (6, 0), (7, 0))),
        Event("second", (5, 0), ((6, 0),)),
        Event("interlace_8_1", (8, 1), ((9, 1), (9, 0))),
    )
    assert merged(known, []) == known


LATE = """#2 %2:float32[4,4] = pd_op.matmul(%1, %0) forward
#3 %3:float32[4,4] = pd_op.matmul(%2, %0) forward
#4 %4:float32[4,4] = pd_op.matmul(%3, %0) forward
#5 %5:float32[4,4] = pd_op.recv_v2() forward group=3 stream="receive" {"peer":0}
#6 %6:float32[4,4] = pd_op.matmul(%5, %0) forward
job a forward 0: 2-6@0
"""
"""A receive that is issued behind three products."""
BUSY = SENDS.replace("job b forward 0: 7@0", "#8 %8:float32[4,4] = pd_op.matmul(%7, %0) forward\njob b forward 0: 7-8@0")


def receive_waits_for(
    ready: int,
    after_ns: int = 0,
    *,
    margin_ns: int = 0,
    sender: str = BUSY,
    late: str = LATE,
    known: int = -1,
    issue_ns: int = 10**6,
    events: tuple[Event, ...] = (),
) -> tuple[int, list[int]]:
    """The operation that the receive (#5), issued so long after its sender is ready, waits for where that is so long after operation
    `ready` has ended; and the job's operations as they are issued then."""
    plans = [parse(text(0, sender)), parse(text(1, late))]
    plans[1] = msgspec.structs.replace(plans[1], events=events)
    result = simulation(COST, {0: 0, 1: 1})(plans)
    first, times = int(result.input.first[1]), result.times
    at = {int(result.input.op[k]): k for k in range(first, result.input.num_items)}
    send = next(k for k in range(first) if result.input.op[k] == 3)
    issue, is_ready, start = times.issue.copy(), times.ready.copy(), times.start.copy()
    is_ready[send] = times.end[at[ready]] + after_ns
    issue[at[5]] = is_ready[send] + issue_ns
    start[at[5]] = is_ready[at[5]] = max(issue[at[5]], is_ready[send] + 10**6)
    changed = replace(result, times=replace(times, issue=issue, ready=is_ready, start=start))
    before = {(5, 0): (known, 0)} if known >= 0 else {}
    waits = transfers_in_time(transfers_of(plans), [{}, before], changed, margin_ns)[1]
    made = with_orders(plans[1], [(after, transfer) for transfer, after in waits.items()])
    return waits.get((5, 0), (-1, 0))[0], [op_id for op_id, _ in made.jobs[0].items]


@pytest.mark.parametrize(
    ("ready", "after_ns", "margin_ns", "found"),
    [
        (2, 0, 0, (2, [2, 5, 3, 4, 6])),
        (3, -1, 0, (2, [2, 5, 3, 4, 6])),
        (3, 0, 0, (3, [2, 3, 5, 4, 6])),
        (3, 9, 10, (2, [2, 5, 3, 4, 6])),
        (3, 10, 10, (3, [2, 3, 5, 4, 6])),
        (4, 0, 0, (-1, [2, 3, 4, 5, 6])),
    ],
)
def test_a_receive_that_is_issued_late_goes_up_to_what_ends_when_its_sender_is_ready(
    ready: int, after_ns: int, margin_ns: int, found: tuple[int, list[int]]
) -> None:
    """It waits for the last that ends the margin before; where that is right before it, it stays."""
    assert receive_waits_for(ready, after_ns, margin_ns=margin_ns) == found


def test_a_receive_stays_where_it_is_unless_it_keeps_a_busier_sender_waiting() -> None:
    stays = (-1, [2, 3, 4, 5, 6])
    assert receive_waits_for(2, issue_ns=1)[0] == 2
    assert receive_waits_for(2, issue_ns=0) == stays  # it is issued in time
    idle = SENDS.replace("#7 %7:float32[4,4] = pd_op.matmul(%6, %0) forward\n", "").replace("job b forward 0: 7@0\n", "")
    assert receive_waits_for(2, sender=idle) == stays
    assert receive_waits_for(2, margin_ns=10**7) == stays  # its sender does not wait for so long


def test_a_receive_goes_up_no_further_than_what_it_needs_and_what_it_waits_for() -> None:
    assert receive_waits_for(2, events=(Event("e", (3, 0), ((5, 0),)),)) == (3, [2, 3, 5, 4, 6])
    both = BUSY.replace("job b", "#9 %9:float32[4,4] = pd_op.all_reduce(%7) forward group=7\njob b").replace("7-8@0", "7-9@0")
    for number, found in ((2, (3, [2, 3, 5, 4, 6])), (3, (-1, [2, 3, 4, 5, 6]))):  # a collective with the other stage
        summed = LATE.replace(f"pd_op.matmul(%{number - 1}, %0) forward", f"pd_op.all_reduce(%{number - 1}) forward group=7")
        assert receive_waits_for(3, sender=both, late=summed) == found


@pytest.mark.parametrize(
    ("ready", "after_ns", "margin_ns", "after"), [(2, 0, 0, 2), (3, 0, 0, 3), (3, 5, 10, 2), (4, 0, 0, 4), (2, -1, 0, -1)]
)
def test_a_receive_that_waits_and_keeps_its_sender_waiting_waits_for_less(ready: int, after_ns: int, margin_ns: int, after: int) -> None:
    assert receive_waits_for(ready, after_ns, margin_ns=margin_ns, known=4, issue_ns=0)[0] == after


def test_what_keeps_nobody_waiting_waits_for_what_it_did() -> None:
    assert receive_waits_for(2, margin_ns=10**7, known=3) == (3, [2, 3, 5, 4, 6])
    assert receive_waits_for(2, margin_ns=10**7, known=9)[0] == -1  # it has not computed


FIRST = SENDS.replace("pd_op.send_v2(%2)", "pd_op.send_v2(%1)")
"""What is sent is an input, ready before anything has computed."""


@pytest.mark.parametrize(("ready", "after_ns", "after"), [(2, 0, 2), (2, -1, -1), (4, 0, 4)])
def test_what_could_be_sent_from_the_start_waits_too(ready: int, after_ns: int, after: int) -> None:
    """For the first that computes, if its peer is ready when that has ended."""
    assert send_waits_for(FIRST, ready, after_ns) == after


@pytest.mark.parametrize(("known", "ready", "found"), [(-1, 2, -1), (5, 2, 2), (5, 4, 4), (5, 5, 5)])
def test_a_send_that_keeps_its_receiver_waiting_is_not_issued_before_it_was(known: int, ready: int, found: int) -> None:
    """One that waits, waits for what ends when its receiver is ready; one that waits for nothing is left alone."""
    busy = RECEIVES.replace("job b", "".join(f"#{k} %{k}:float32[4,4] = pd_op.matmul(%4, %0) forward\n" for k in range(5, 15)) + "job b")
    plans = [parse(text(0, SENDS)), parse(text(1, busy.replace("2-3@0", "2-3@0 5-14@0")))]
    result = simulation(COST, {0: 0, 1: 1})(plans)
    first, times = int(result.input.first[1]), result.times
    at = {int(result.input.op[k]): k for k in range(first)}
    receive = next(k for k in range(first, result.input.num_items) if result.input.op[k] == 2)
    issue, is_ready, start = times.issue.copy(), times.ready.copy(), times.start.copy()
    is_ready[receive] = times.end[at[ready]]
    issue[at[3]] = is_ready[at[3]] = start[at[3]] = times.end[at[7]] + 10**6
    changed = replace(result, times=replace(times, issue=issue, ready=is_ready, start=start))
    before = {(3, 0): (known, 0)} if known >= 0 else {}
    waits = transfers_in_time(transfers_of(plans), [before, {}], changed, 0)[0]
    assert waits.get((3, 0), (-1, 0))[0] == found


@pytest.mark.parametrize(("end_of", "after_ns", "found"), [(2, 0, 2), (2, -1, -1), (3, 0, 3), (4, 0, 4)])
def test_a_receive_may_wait_for_what_an_earlier_job_computes(end_of: int, after_ns: int, found: int) -> None:
    """It stays where it is then: only behind what is of its own job it is issued again."""
    late = LATE.replace("job a forward 0: 2-6@0", "job a forward 0: 2-3@0\njob b forward 0: 4-6@0")
    plans = [parse(text(0, BUSY)), parse(text(1, late))]
    result = simulation(COST, {0: 0, 1: 1})(plans)
    first, times = int(result.input.first[1]), result.times
    at = {int(result.input.op[k]): k for k in range(first, result.input.num_items)}
    is_ready, start = times.ready.copy(), times.start.copy()
    is_ready[at[5]], start[at[5]] = 0, times.end[at[end_of]] + after_ns
    changed = replace(result, times=replace(times, ready=is_ready, start=start))
    waits = transfers_in_time(transfers_of(plans), [{}, {}], changed, 0)[1]
    assert waits.get((5, 0), (-1, 0))[0] == found
    made = with_orders(plans[1], [(after, transfer) for transfer, after in waits.items()])
    assert [op for op, _ in made.jobs[1].items] == [4, 5, 6]


def test_bounds_of_transfers_are_places_among_all_that_a_plan_issues() -> None:
    """Of its job, of itself, of the last before it that it needs or may not pass, of what it waits for, of the first behind it that needs
    it or that it may not pass."""
    ops = """#2 %2:float32[4,4] = pd_op.matmul(%1, %0) forward
#3 %3:float32[4,4] = pd_op.matmul(%1, %0) forward
#4 pd_op.send_v2(%2) forward group=3 stream="send" {"peer":1}
#5 %5:float32[4,4] = pd_op.recv_v2() forward group=3 stream="receive" {"peer":1}
#6 %6:float32[4,4] = pd_op.matmul(%1, %0) forward
#7 %7:float32[4,4] = pd_op.matmul(%5, %0) forward
#8 %8:float32[4,4] = pd_op.all_reduce(%3) forward group=7
#9 %9:float32[4,4] = pd_op.matmul(%7, %0) forward
#10 %10:float32[4,4] = pd_op.relu_(%2) forward inplace=0:0
job a forward 0: 6@0
job b forward 0: 3@0 2@0 4-5@0 7@0 9@0
job c forward 0: 8@0 10@0
"""
    plan = parse(text(0, ops))
    assert list(transfers_of([plan])[0].spans.items()) == [((5, 0), (1, 7, 4, 1, -1, 5)), ((4, 0), (1, 7, 3, 2, -1, 7))]
    waiting = msgspec.structs.replace(plan, events=(Event("e", (6, 0), ((5, 0),)), Event("f", (4, 0), ((9, 0),))))
    assert transfers_of([waiting])[0].spans == {(5, 0): (1, 7, 4, 1, 0, 5), (4, 0): (1, 7, 3, 2, -1, 3)}
    summed = parse(text(0, ops.replace("4-5@0 7@0 9@0", "4@0 8@0 5@0 7@0 9@0").replace("8@0 10@0", "10@0")))
    assert transfers_of([summed])[0].spans == {(5, 0): (1, 8, 5, 4, -1, 6), (4, 0): (1, 8, 3, 2, -1, 4)}
    assert transfers_of([summed])[0].receives == {5}


# ------------------------------------------------------------------------------------------------------------------ rounds


class Scripted:
    """A simulation whose steps take what is written, in the order in which they are asked for; a text is why one cannot be simulated."""

    def __init__(self, plans: Sequence[Program], steps: Sequence[int | str]) -> None:
        self.run, self.steps, self.asked = simulation(COST, {0: 0, 1: 1}), steps, list[Sequence[Program]]()
        self.real = self.run(plans)

    def __call__(self, programs: Sequence[Program]) -> Result:
        step = self.steps[len(self.asked)]
        self.asked.append(programs)
        if isinstance(step, str):
            raise PlanError(step)
        # the send waits a little longer for its peer each time, so that every round finds another order
        start = self.real.times.start.copy()
        start[1] = self.real.times.end[1 + len(self.asked) % 4]
        return replace(self.real, times=replace(self.real.times, start=start, end=self.real.times.end * 0), host_end=np.array([step]))


@pytest.mark.parametrize(
    ("steps", "asked", "best"),
    [
        ([1000, 1000, 900], 2, 0),  # two rounds must bring something
        ([1000, 1001, 900], 2, 0),
        ([10_000, 9_995, 900], 2, 1),  # no less than a thousandth
        ([1000, 990, 990, 990, 900], 4, 1),
        ([10_000, 9_900, 9_895, 9_885, 9_880, 9_880, 900], 6, 4),  # two together
        ([1000, 990, "a circle", 900], 3, 1),
        (["no plan"], 1, -1),
        ([1000, *range(900, 0, -100)], 9, 8),  # no more than eight rounds
    ],
)
def test_orders_are_looked_for_as_long_as_two_rounds_bring_something(steps: list[int | str], asked: int, best: int) -> None:
    """And the best of all is taken, with the step that it gives and the one before."""
    plans = [parse(text(0, SENDS)), parse(text(1, RECEIVES))]
    run = Scripted(plans, steps)
    if best < 0:
        with pytest.raises(PlanError, match="no plan"):
            find_orders(plans, run, 0)
        return
    found = find_orders(plans, run, 0)
    assert len(run.asked) == asked
    once = Scripted(plans, steps)
    assert (find_orders(plans, once, 0, 1).step_ns, len(once.asked)) == (min(each for each in steps[:2] if isinstance(each, int)), 2)
    assert (found.before_ns, found.step_ns) == (steps[0], steps[best])
    assert [with_orders(plan, mine) for plan, mine in zip(plans, found.of_plans, strict=True)] == list(run.asked[best])


# ------------------------------------------------------------------------------------------------------- where what is issued

CHAIN = "".join(f"#{k} %{k}:float32[4,4] = pd_op.matmul(%1, %0) forward\n" for k in range(2, 12))


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(2, 12)), st.sets(st.integers(2, 11), max_size=5), st.integers(1, 9), st.data())
def test_transfers_are_issued_behind_what_they_wait_for_and_keep_their_order(
    order: list[int], transfers: set[int], cut: int, data: st.DataObject
) -> None:
    """A send moves down only, a receive up too, and both only within their job. Whatever moves, transfers keep their order: one that would
    come before another stands right behind it."""
    kinds = {k: data.draw(st.sampled_from(["send", "recv"])) for k in sorted(transfers)}
    ops = CHAIN
    for k, kind in kinds.items():
        new = f"#{k} pd_op.send_v2(%1) forward" if kind == "send" else f"#{k} %{k}:float32[4,4] = pd_op.recv_v2() forward"
        ops = ops.replace(f"#{k} %{k}:float32[4,4] = pd_op.matmul(%1, %0) forward", new + ' group=3 stream="p2p" {"peer":1}')
    jobs = [order[:cut], order[cut:]]
    lines = "\n".join(f"job {name} forward 0: {' '.join(f'{k}@0' for k in job)}" for name, job in zip("ab", jobs, strict=True))
    plan = parse(text(0, ops + lines))
    computing = sorted(set(range(2, 12)) - transfers)
    after = {k: data.draw(st.sampled_from(computing)) for k in sorted(transfers) if data.draw(st.booleans())}
    made = with_orders(plan, [((after[k], 0), (k, 0)) for k in after])
    for was, job in zip(jobs, made.jobs, strict=True):
        place = {op: k for k, op in enumerate(was)}
        keys, upto = dict[int, tuple[int, int, int]](), -1
        for n, op in enumerate(each for each in was if each in transfers):
            behind = place.get(after.get(op, -1), -1)
            own = place[op]
            goes = behind if behind > own or (behind >= 0 and kinds[op] == "recv") else own
            upto = max(upto, goes)
            keys[op] = (upto, 0, 0) if upto == own else (upto, 1, n)
        assert [op for op, _ in job.items] == sorted(was, key=lambda op: keys.get(op, (place[op], 0, 0)))
    found = {(event.record[0], wait[0]) for event in made.events for wait in event.waits}
    assert found == {(record, k) for k, record in after.items()}
    assert (made.ops, made.values) == (plan.ops, plan.values)
