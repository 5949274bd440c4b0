"""The time from step to step, against several steps that are simulated one after another."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest

from interlace.config import make_config
from interlace.cost_model import CostModel, load_profile
from interlace.cost_model.profile import HostCosts
from interlace.ir.target import GPU
from interlace.planning.plan import make_plans
from interlace.scheduler.simulate.arrays import Options, SimInput
from interlace.scheduler.simulate.lower import lower
from interlace.scheduler.simulate.simulator import last_end, run
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
def test_the_interval_is_that_of_steps_in_a_row(name: str, form: str, is_shorter: bool) -> None:
    """If the last stage ends last, it ends while the first one begins the next step."""
    cost = CostModel(ALONE)
    config = make_config({"schedule_1f1b": {"interleave": form, "only_gains": False, "search": False}, "memory_budget": False})
    plans = make_plans(programs_of(name), config, cost, "h200")
    sim = lower([plan.program for plan in plans], cost, Options.of(GPU, power=False, host_waits=False))
    one, ends = run(sim, with_memory=False), []
    for steps in (2, 3):
        many = repeated(sim, steps)
        ends.append(last_end(many, run(many, with_memory=False).times.end))
    assert one.interval_ns == pytest.approx(ends[1] - ends[0], abs=10)
    assert (one.interval_ns < one.step_ns) == is_shorter


def test_without_stages_the_interval_is_the_step() -> None:
    cost = CostModel(load_profile("h200"))
    plans = make_plans(programs_of("mp2 without accumulation"), make_config({}), cost, "h200")
    found = run(lower([plan.program for plan in plans], cost, Options.of(GPU)), with_memory=False)
    assert found.interval_ns == found.step_ns
