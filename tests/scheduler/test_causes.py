"""Where waiting and memory come from: nothing is left out, and the cause is what was waited for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from interlace.cost_model import CostModel
from interlace.ir import parse
from interlace.report.causes import held, held_text, waits, waits_text
from interlace.scheduler.memory.live import LiveBytes
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.simulator import simulate
from tests.scheduler.plans import Shape, shapes, world

COST = CostModel.from_table({"comm": 100, "p2p": 30, "gemm": 50, "copy": 20, "default": 3}, host_ns=2)


@settings(max_examples=40, deadline=None)
@given(shapes())
def test_all_waiting_has_a_cause(shape: Shape) -> None:
    """The gaps in front of computation, and what is left behind the last, are the step without compute."""
    result = simulate(world(shape), COST)
    sim, times = result.input, result.times
    for at, rank in enumerate(result.ranks):
        mine = range(int(sim.first[at]), int(sim.first[at + 1]))
        behind = rank.step_ns - max((int(times.end[k]) for k in mine if not sim.side[k]), default=0)
        assert sum(row.wait_ns for row in waits(result, at)) + behind == rank.step_ns - rank.compute_ns


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
    found = waits(simulate([program], CostModel.from_table({"comm": 100, "default": 3}), Options(peers_ready=True)), 0)
    assert waits_text(found) == "all_reduce (blocks.*.mlp, 2 neighbours) 0.000200 ms in 2 waits (the rest of its job needs it)"
    assert [row.wait_ns for row in found] == [200]


@pytest.mark.parametrize(
    ("reads", "why"),
    [((0, 1, 0), "what could run meanwhile comes later in its job"), ((1, 2, 3), "behind others on its stream")],
)
def test_an_exposed_collective_has_its_reason(reads: tuple[int, int, int], why: str) -> None:
    second, third, fourth = reads
    kinds = ("pd_op.relu", "") if second == 0 else ("pd_op.all_reduce", ' group=7 stream="mp"')
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
    found = waits(simulate([program], CostModel.from_table({"comm": 200, "default": 100}), Options(peers_ready=True)), 0)
    assert [(row.group, row.why) for row in found] == [("2 ranks 2 apart", why)]


def test_layers_of_one_name_stand_together() -> None:
    parts = [("blocks.0.mlp", "gelu", 1 << 30, 1), ("blocks.1.mlp", "gelu", 1 << 29, 2), ("", "parameters", 1 << 28, 1)]
    rows = held(LiveBytes(*part) for part in parts)
    assert held_text(rows) == "gelu (blocks.*.mlp) 1.500 GiB in 3 values; parameters 256.0 MiB in 1 value"
