"""Where waiting and memory come from: nothing is left out, and the cause is what was waited for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from interlace.cost_model import GivenCosts
from interlace.ir import parse
from interlace.report.causes import held, held_text, waits, waits_text
from interlace.scheduler.memory.live import LiveBytes
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.simulator import simulate
from tests.scheduler.plans import Shape, shapes, world

COST = GivenCosts({"comm": 100, "p2p": 30, "gemm": 50, "copy": 20, "default": 3}, host_ns=2)


@settings(max_examples=40, deadline=None)
@given(shapes())
def test_all_waiting_has_a_cause(shape: Shape) -> None:
    """The gaps in front of computation, and what is left behind the last, are the step without compute."""
    result = simulate(world(shape), COST)
    sim, times = result.input, result.times
    for at, rank in enumerate(result.ranks):
        mine = range(int(sim.first[at]), int(sim.first[at + 1]))
        behind = rank.step_ns - max((int(times.end[k]) for k in mine if not sim.side[k]), default=0)
        found = waits(result, at)
        assert sum(row.wait_ns for row in found) + behind == rank.step_ns - rank.compute_ns
        running = sum(row.wait_ns for row in found if row.kind != "host" and "later" not in row.why.split()[-1:])
        assert running <= rank.exposed_comm_ns


TWO_STAGES = """program rank={rank} world=2 mode=train
pipeline stage={rank} of 2 micro_batches=1 chunks=1 schedule=1F1B
group 3=0,1
group 7={rank}
"""
SENDER = """#0 %0:float32[8] = pd_op.relu() forward
#1 %1:float32[8] = pd_op.gelu(%0) forward
#2 pd_op.send_v2(%1) forward group=3 stream="send" {"peer":1}
job all forward 0: 0-2@0
"""
RECEIVER = """#0 %0:float32[8] = pd_op.recv_v2() forward group=3 stream="recv" {"peer":0}
#1 %1:float32[8] = pd_op.all_reduce(%0) forward group=7 stream="mp"
#2 %2:float32[8] = pd_op.relu(%1) forward
job all forward 0: 0-2@0
"""


@pytest.mark.parametrize("p2p", ["rendezvous", "buffered"])
def test_the_cause_is_the_first_thing_that_makes_it_late(p2p: str) -> None:
    """A collective behind a receive has its own time alone; what the receive waits for is the other stage."""
    programs = [parse(TWO_STAGES.format(rank=rank) + text) for rank, text in enumerate((SENDER, RECEIVER))]
    cost = GivenCosts({"comm": 10, "p2p": 30, "relu": 50, "gelu": 900, "default": 3})
    found = waits(simulate(programs, cost, Options(p2p=p2p)), 1)  # type: ignore[arg-type]
    assert [(row.kind, row.wait_ns, row.why) for row in found] == [
        ("recv_v2", 950, "stage 0 comes later"),
        ("recv_v2", 30, ""),
        ("all_reduce", 10, "the rest of its job needs it"),
    ]


def test_a_host_that_waits_passes_the_blame_on() -> None:
    """Where a copy holds the host, it is what the next operation waits for; the host has the rest."""
    program = parse("""program rank=0 world=1 mode=train
pipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=none
#0 %0:float32[8] = pd_op.relu() forward
#1 %1:float32[8] = pd_op.memcpy_d2h(%0) forward stream="d2h"
#2 %2:float32[8] = pd_op.relu() forward
job a forward 0: 0-1@0 | 1@0<1@0
job b forward 0: 2@0
""")
    result = simulate([program], GivenCosts({"copy": 500, "default": 50}, host_ns=2))
    found = waits(result, 0)
    assert {(row.kind, row.why): row.wait_ns for row in found if row.kind != "host"} == {("memcpy_d2h", "the host waits for it"): 500}


def test_the_cause_is_what_was_waited_for() -> None:
    program = parse("""program rank=0 world=2 mode=train
pipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=none
group 7=0,1
#0 %0:float32[8] = pd_op.relu() forward layer="blocks.0.mlp"
#1 %1:float32[8] = pd_op.all_reduce(%0) forward layer="blocks.0.mlp" group=7 stream="mp"
#2 %2:float32[8] = pd_op.relu(%1) forward layer="blocks.0.norm"
#3 %3:float32[8] = pd_op.all_reduce(%2) forward layer="blocks.1.mlp" group=7 stream="mp"
#4 %4:float32[8] = pd_op.relu(%3) forward
job all forward 0: 0-4@0
""")
    found = waits(simulate([program], GivenCosts({"comm": 100, "default": 3}), Options(peers_ready=True)), 0)
    assert waits_text(found) == "all_reduce (blocks.*.mlp, 2 neighbours) 0.000200 ms in 2 waits (the rest of its job needs it)"
    assert [row.wait_ns for row in found] == [200]


@pytest.mark.parametrize(
    ("reads", "why"),
    [
        ((0, 1, 0), ["what could run meanwhile comes later in its job"]),
        ((1, 2, 3), ["the rest of its job needs it"]),
        ((9, 2, 3), ["the rest of its job needs it", "what is waited for comes after it on its stream"]),
    ],
)
def test_an_exposed_collective_has_its_reason(reads: tuple[int, int, int], why: list[str]) -> None:
    second, third, fourth = reads
    kinds = ("pd_op.relu", "") if second == 0 else ("pd_op.all_reduce", ' group=7 stream="mp"')
    second = 0 if second == 9 else second
    program = parse(f"""program rank=0 world=4 mode=train
pipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=none
group 7=0,2
#0 %0:float32[8] = pd_op.relu() forward
#1 %1:float32[8] = pd_op.all_reduce(%0) forward group=7 stream="mp"
#2 %2:float32[8] = {kinds[0]}(%{second}) forward{kinds[1]}
#3 %3:float32[8] = pd_op.relu(%{third}) forward
#4 %4:float32[8] = pd_op.relu(%{fourth}) forward
job all forward 0: 0-4@0
""")
    found = waits(simulate([program], GivenCosts({"comm": 200, "default": 100}), Options(peers_ready=True)), 0)
    assert sorted((row.group, row.why) for row in found) == [("2 ranks 2 apart", each) for each in why]


def test_layers_of_one_name_stand_together() -> None:
    parts = [("blocks.0.mlp", "gelu", 1 << 30, 1), ("blocks.1.mlp", "gelu", 1 << 29, 2), ("", "parameters", 1 << 28, 1)]
    rows = held(LiveBytes(*part) for part in parts)
    assert held_text(rows) == "gelu (blocks.*.mlp) 1.500 GiB in 3 values; parameters and optimizer state 256.0 MiB"
