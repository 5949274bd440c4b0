"""The intervals in which a rank does not compute are what the split of its step sums up."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from interlace.cost_model import GivenCosts
from interlace.scheduler.simulate.parts import overlap, parts_of, union
from interlace.scheduler.simulate.simulator import simulate
from tests.scheduler.plans import Shape, shapes, world

COST = GivenCosts({"comm": 100, "p2p": 30, "gemm": 50, "copy": 20, "default": 3}, host_ns=7)


@settings(max_examples=60, deadline=None)
@given(shapes())
def test_intervals_have_the_lengths_of_the_split(shape: Shape) -> None:
    result = simulate(world(shape), COST)
    sim, times = result.input, result.times
    for at, rank in enumerate(result.ranks):
        found = parts_of(result, at)
        lengths = [int((spans[:, 1] - spans[:, 0]).sum()) for spans in found]
        assert lengths == [rank.exposed_comm_ns, rank.host_ns, rank.bubble_ns]
        together = np.concatenate(found)
        assert int((union(together)[:, 1] - union(together)[:, 0]).sum()) == sum(lengths), "intervals of two parts overlap"
        mine = range(int(sim.first[at]), int(sim.first[at + 1]))
        compute = np.array([[times.start[k], times.end[k]] for k in mine if not sim.side[k]]).reshape(-1, 2)
        assert not overlap(compute, union(together)).any(), "a part lies beside a computation"
