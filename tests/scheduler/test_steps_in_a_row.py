"""The time from step to step, against several steps that are simulated one after another."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest

from interlace.config import make_config
from interlace.cost_model import CostModel, GivenCosts, load_profile
from interlace.cost_model.profile import HostCosts
from interlace.ir import parse
from interlace.ir.target import GPU
from interlace.planning.plan import make_plans
from interlace.scheduler.simulate.arrays import Options, SimInput
from interlace.scheduler.simulate.lower import lower
from interlace.scheduler.simulate.simulator import Result, last_end, run, simulate, step_of
from tests.captured.stored import programs_of


def repeated(sim: SimInput, steps: int) -> SimInput:
    """The op instances of several steps in a row: a stream runs those of a step after those of the one before."""
    sizes, ranks = np.diff(sim.first), range(len(sim.ranks))
    first = np.concatenate([[0], np.cumsum(steps * sizes)])
    rank_of = np.repeat(np.arange(len(sizes)), sizes)

    def at(items: np.ndarray, step: int) -> np.ndarray:
        """Where op instances of a step are now; -1 stays."""
        rank = rank_of[items]
        return np.where(items < 0, -1, first[rank] + step * sizes[rank] + items - sim.first[rank])

    def each(of: object) -> np.ndarray:
        """A row of each rank's op instances, step by step; `of` gives that of all op instances for a step."""
        rows = [of(step) for step in range(steps)]
        return np.concatenate([rows[step][sim.first[rank] : sim.first[rank + 1]] for rank in ranks for step in range(steps)])

    meets, deps = len(sim.meet_size), np.diff(sim.dep_first)
    mates = np.diff(sim.meet_first)
    dep = [
        at(sim.dep, step)[sim.dep_first[sim.first[rank]] : sim.dep_first[sim.first[rank + 1]]] for rank in ranks for step in range(steps)
    ]
    same = {name: each(lambda step, name=name: getattr(sim, name)) for name in ("op", "micro_batch", "stream", "dur", "side", "kind")}
    return dataclasses.replace(
        sim,
        first=first,
        issue=each(lambda step: sim.issue + step * sim.host_end[rank_of]),
        awaits=each(lambda step: at(sim.awaits, step)),
        follow=each(lambda step: at(sim.follow, step)),
        meet=each(lambda step: np.where(sim.meet < 0, -1, sim.meet + step * meets)),
        dep_first=np.concatenate([[0], np.cumsum(each(lambda step: deps))]),
        dep=np.concatenate(dep),
        meet_first=np.concatenate([[0], np.cumsum(np.tile(mates, steps))]),
        mates=np.concatenate([at(sim.mates, step) for step in range(steps)]),
        meet_size=np.tile(sim.meet_size, steps),
        host_end=steps * sim.host_end,
        mark=None,
        **same,
    )


ALONE = msgspec.structs.replace(load_profile("h200"), host=HostCosts(1, 1, "measured"), interference=(), late_beside_wait_ns=0)
"""Without a host that limits the step, and without slowdown beside a receive of the next step, which one simulated step does not have."""


@pytest.mark.parametrize(
    ("name", "form", "is_shorter"),
    [
        ("pp4 zero bubble", "off", False),
        ("pp4 zero bubble", "zb-h1", False),
        ("pp2 mixed, offload", "dx-first", False),
        ("pp2 mp2, everything on", "zb-h1", False),
        ("pp2 vpp2, offload", "dx-first", False),
        ("pp2, clip", "zb-h1", True),
    ],
)
def test_the_step_is_that_of_steps_in_a_row(name: str, form: str, is_shorter: bool) -> None:
    """If the last stage ends last, it ends while the first one begins the next step."""
    cost = CostModel(ALONE)
    config = make_config({"schedule_1f1b": {"interleave": form, "only_gains": False, "search": False}, "memory_budget": False})
    plans = make_plans(programs_of(name), config, cost, "h200")
    sim = lower([plan.program for plan in plans], cost, Options.of(GPU, power=False, host_waits=False))
    one, ends = run(sim, with_memory=False), []
    for steps in (2, 3):
        many = repeated(sim, steps)
        ends.append(last_end(many, run(many, with_memory=False).times.end))
    assert one.step_ns == pytest.approx(ends[1] - ends[0], abs=10)
    assert (one.step_ns < one.span_ns) == is_shorter


def test_without_stages_the_step_is_the_span() -> None:
    cost = CostModel(load_profile("h200"))
    plans = make_plans(programs_of("mp2 without accumulation"), make_config({}), cost, "h200")
    found = run(lower([plan.program for plan in plans], cost, Options.of(GPU)), with_memory=False)
    assert found.step_ns == found.span_ns


@pytest.mark.parametrize(("name", "form"), [("pp2, clip", "zb-h1"), ("pp4 zero bubble", "off"), ("mp2 without accumulation", "off")])
@pytest.mark.parametrize("waits", [True, False])
def test_a_script_may_take_as_long_as_hosts_are_ahead(name: str, form: str, waits: bool) -> None:
    """Also where hosts wait for the device late, and then are not ahead by much."""
    form_of = {"interleave": form, "only_gains": False, "search": False}
    config = make_config(
        {"schedule_1f1b": form_of, "memory_budget": False}
        | ({"throttle_host": {"syncs": "job-ends"}} if waits else {"throttle_host": False})
    )
    plans = make_plans(programs_of(name), config, CostModel(ALONE), "h200")

    def stepped(later_ns: int) -> Result:
        host = msgspec.structs.replace(ALONE.host, between_steps_ns=ALONE.host.between_steps_ns + later_ns)
        return run(
            lower([plan.program for plan in plans], CostModel(msgspec.structs.replace(ALONE, host=host)), Options.of(GPU)),
            with_memory=False,
        )

    found = stepped(0)
    assert found.spare_ns >= 0
    assert stepped(found.spare_ns).step_ns == found.step_ns
    assert stepped(found.spare_ns + 1000).step_ns == found.step_ns + 1000
    assert stepped(found.spare_ns + 1000).spare_ns == 0
    assert plans[0].outcome is not None
    assert plans[0].outcome.plan.spare_ns == found.spare_ns


HEAD = """program rank={stage} world=2 mode=train
pipeline stage={stage} of 2 micro_batches=1 chunks=1 schedule=1F1B
group 3 = 0,1
#0 %0:float32[4,4]!"w" = builtin.parameter() forward
#1 %1:float32[4,4]"x" = pd_op.data() forward
"""
FIRST = """#2 %2:float32[4,4] = pd_op.matmul(%1, %0) forward
#3 %3:float32[4,4] = pd_op.matmul(%2, %0) forward
#4 pd_op.send_v2(%3) forward group=3 stream="send" {"peer":1}
job a forward 0: 2-4@0
"""
LATER = """#5 %5:float32[4,4] = pd_op.matmul(%4, %0) forward
#6 %6:float32[4,4] = pd_op.matmul(%5, %0) forward
#7 %7:float32[4,4] = pd_op.matmul(%6, %0) forward
"""
RECEIVE = '#4 %4:float32[4,4] = pd_op.recv_v2() forward group=3 stream="receive" {"peer":0}\n'


COPY = '#3 %3:float32[4,4] = pd_op.memcpy_d2h(%0) forward stream="d2h" {"dst_place_type":2}\n'


def two_stages(before: str, jobs: str) -> SimInput:
    """The second stage has an operation `before` it receives, and three products afterwards."""
    texts = HEAD.format(stage=0) + FIRST, HEAD.format(stage=1) + before + RECEIVE + LATER + f"job a forward 0: {jobs}\n"
    return lower([parse(each) for each in texts], GivenCosts({"memcpy_d2h": 30, "default": 100}))


@pytest.mark.parametrize(
    ("before", "jobs", "step_ns"),
    [
        ("", "4-7@0", 300),  # three products; the receive ends during those of the step before
        ("#3 %3:float32[4,4] = pd_op.matmul(%1, %0) forward\n", "3-7@0", 400),
        (COPY, "3-7@0", 330),
    ],
)
def test_a_stage_waits_for_its_first_value_while_it_does_nothing_else(before: str, jobs: str, step_ns: int) -> None:
    """The first value is there after 300 ns. What a stage does before that is part of its step, also on other streams."""
    found = run(two_stages(before, jobs), with_memory=False)
    assert (found.span_ns, found.step_ns) == (600, step_ns)
    for rank in found.ranks:
        assert rank.step_ns == rank.compute_ns + rank.exposed_comm_ns + rank.bubble_ns + rank.host_ns == step_ns
    assert found.ranks[0].compute_ns == 200


def test_copies_of_the_step_before_are_not_part_of_a_step() -> None:
    """They prolong an op instance of this one (`SimInput.mark`), here from 30 to 130 ns."""
    sim = two_stages(COPY, "3-7@0")
    copy = int(sim.first[1] + np.flatnonzero(sim.op[sim.first[1] :] == 3)[0])
    longer = sim.dur.copy()
    longer[copy] += 100
    times = run(dataclasses.replace(sim, dur=longer), with_memory=False).times
    marked = dataclasses.replace(sim, mark=np.array([-1, copy]))
    assert [step_of(each, times, np.zeros(2, np.int64)) for each in (sim, marked)] == [430, 330]


def test_stages_that_meet_before_wait_for_each_other_in_the_next_step_too() -> None:
    """A collective of both stages comes first: no stage can be behind the other in it."""
    meet = '#8 %8:float32[4,4] = pd_op.all_reduce(%0) forward group=3 {"ring_id":3,"reduce_type":0}\n'
    texts = [
        HEAD.format(stage=0) + meet + FIRST.replace("2-4@0", "8@0 2-4@0"),
        HEAD.format(stage=1) + meet + RECEIVE + LATER + "job a forward 0: 8@0 4-7@0\n",
    ]
    found = simulate([parse(each) for each in texts], GivenCosts({"default": 100}), with_memory=False)
    assert (found.span_ns, found.step_ns) == (700, 700)


def test_a_receive_on_the_stream_of_computation_is_part_of_a_step() -> None:
    """Its wait is not, but its transfer keeps the stream from the step before."""
    texts = (
        HEAD.format(stage=0) + FIRST,
        HEAD.format(stage=1) + RECEIVE.replace(' stream="receive"', "") + LATER + "job a forward 0: 4-7@0\n",
    )
    found = simulate([parse(each) for each in texts], GivenCosts({"default": 100}), with_memory=False)
    assert (found.span_ns, found.step_ns) == (600, 400)


def test_what_a_rank_alone_receives_is_not_waited_for() -> None:
    text = HEAD.format(stage=1) + RECEIVE + LATER + "job a forward 0: 4-7@0\n"
    found = simulate([parse(text)], GivenCosts({"default": 100}), Options(peers_ready=True), with_memory=False)
    assert found.step_ns == found.span_ns == 400
