"""Results of collectives in memory of the compute stream's pool."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from interlace.cost_model import CostModel, GivenCosts, load_profile
from interlace.errors import PlanError
from interlace.ir import Program, parse
from interlace.ir.copies import fills_memory, only_takes_memory
from interlace.ir.kinds import stream_of
from interlace.ir.target import CPU, GPU
from interlace.passes import AllocateOnCompute, InsertEvents, Pipeline, allocate_on_compute
from interlace.passes.pipeline import PassReport
from interlace.scheduler.hazards import check
from interlace.scheduler.host_waits.throttle import gpu_memory
from interlace.scheduler.memory.live import in_order
from interlace.scheduler.memory.pools import pool_bytes
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.lower import lower
from interlace.scheduler.simulate.simulator import Times, device_memory
from tests.closure import Closure
from tests.interpreter import assert_same
from tests.strategies import World, plan, worlds

COST = GivenCosts({"comm": 400, "gemm": 1000, "default": 50}, host_ns=1, job_ns=2)
H200 = CostModel(load_profile("h200"))
BLOCK = 4 << 20
HEAD = """program rank=0 world=2 mode=train
pipeline stage=0 of 1 micro_batches={count} chunks=1 schedule=accumulate
group 7 = 0,1
passes schedule-1f1b
#0 %0:float32[1024,1024]!"w" = builtin.parameter() forward
#1 %1:float32[1024,1024]"x" = pd_op.data() forward
"""
SCATTERED = """#2 %2:float32[2048,1024] = pd_op.matmul(%1, %0) forward
#3 %3:float32[1024,1024] = pd_op.reduce_scatter(%2) forward group=7 stream="auto_parallel_mp"
#4 %4:float32[1024,1024] = pd_op.matmul(%1, %0) forward
#5 %5:float32[1024,1024] = pd_op.matmul(%3, %4) forward
job forward_0 forward 0: 2-5@0
job forward_1 forward 1: 2-5@1
"""
GATHERED = """#2 %2:float32[1024,1024] = pd_op.matmul(%1, %0) forward
#3 %3:float32[1024,1024] = pd_op.matmul(%1, %0) forward
#4 %4:float32[1024,1024] = pd_op.matmul(%3, %2) forward
#5 %5:float32[2048,1024] = pd_op.all_gather(%2) forward group=7 stream="auto_parallel_mp"
#6 %6:float32[1024,1024] = pd_op.matmul(%4, %0) forward
#7 %7:float32[2] = pd_op.add(%5, %6) forward
job first_0 forward 0: 2@0
job second_0 forward 0: 3-7@0
"""
"""A gathering that waits for the first product, and so starts before the products that are issued before it."""


def program(text: str, count: int = 2) -> Program:
    return parse(HEAD.format(count=count) + text)


def changed(given: Program, min_bytes: int = 1 << 20) -> tuple[Program, PassReport]:
    found, (report,) = Pipeline((AllocateOnCompute(min_bytes=min_bytes),)).run(given, COST)
    return found, report


def times_of(given: Program, cost: GivenCosts | CostModel) -> Times:
    return device_memory(lower([given], cost, Options.of(GPU, peers_ready=True)))[0]


def test_memory_is_taken_behind_the_computation_that_the_collective_waits_for() -> None:
    found, report = changed(program(SCATTERED))
    (memory,), (filled,) = ([op for op in found.ops if which(op)] for which in (only_takes_memory, fills_memory))
    assert (stream_of(memory), memory.attrs, memory.role) == ("", {"shape": [1024, 1024], "dtype": "float32"}, "forward")
    assert (filled.id, filled.operands, filled.results) == (3, (2, *memory.results), (3,))
    assert [job.items for job in found.jobs] == [tuple((op, m) for op in (2, memory.id, 3, 4, 5)) for m in range(2)]
    assert [(each.rule, each.numbers) for each in report.remarks] == [("allocated-on-compute", {"collectives": 1, "size_bytes": BLOCK})]


def test_the_collective_waits_for_its_memory_by_an_event() -> None:
    """Without it, it would write into a block that earlier computation may still use."""
    found, _ = changed(program(SCATTERED))
    assert {finding.kind for finding in check([found])} >= {"race"}
    ordered, _ = Pipeline((InsertEvents(),)).run(found, COST)
    assert check([ordered], GPU) == check([ordered], CPU) == []


def test_the_compute_stream_gives_the_block_and_takes_it_again() -> None:
    """A fast host holds the results of both micro-batches in the collectives' pool; in the other pool, one block serves both."""
    before, after = (Pipeline((*passes, InsertEvents())).run(program(SCATTERED), COST)[0] for passes in ((), (AllocateOnCompute(),)))
    taken, less = (gpu_memory(each, COST) for each in (before, after))
    assert sorted(pool_bytes(taken).values())[0] == 2 * BLOCK
    assert 2 * BLOCK not in pool_bytes(less).values()
    assert taken.peak() - less.peak() >= BLOCK
    assert sum(pool_bytes(taken).values()) - sum(pool_bytes(less).values()) >= BLOCK


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("pd_op.reduce_scatter", "pd_op.all_reduce"),
        (' stream="auto_parallel_mp"', ""),
        ("%3:float32[1024,1024] = pd_op.reduce_scatter", '%3:float32[1024,1024]!"b" = pd_op.reduce_scatter'),
        ("pd_op.matmul(%3, %4) forward", 'pd_op.matmul(%3, %4) forward stream="auto_parallel_mp"'),
        ("%3:float32[1024,1024] = pd_op.reduce_scatter", "%3:float32[1024,-1] = pd_op.reduce_scatter"),
    ],
    ids=["a sum", "on the compute stream", "memory that lasts", "read by its own stream alone", "of unknown size"],
)
def test_other_results_keep_their_memory(old: str, new: str) -> None:
    assert old in SCATTERED
    given = program(SCATTERED.replace(old, new))
    found, report = changed(given)
    assert (found.ops, found.jobs, report.remarks) == (given.ops, given.jobs, ())


@pytest.mark.parametrize(("min_bytes", "some"), [(BLOCK, True), (BLOCK + 1, False)])
def test_small_results_keep_their_memory(min_bytes: int, some: bool) -> None:
    found, _ = changed(program(SCATTERED), min_bytes)
    assert any(map(only_takes_memory, found.ops)) == some


def test_a_collective_that_starts_early_takes_its_memory_no_later_unless_that_holds_more() -> None:
    """Taken before the products of its job, it would be held beside three blocks of these; the peak is four blocks, unless the last result
    is large."""
    given = program(GATHERED, 1)
    found, report = changed(given)
    assert [(each.rule, each.numbers) for each in report.remarks] == [("would-hold-more", {"collectives": 1, "size_bytes": 2 * BLOCK})]
    assert (found.ops, found.jobs) == (given.ops, given.jobs)
    found, report = changed(program(GATHERED.replace("#7 %7:float32[2]", "#7 %7:float32[2048,1024]"), 1))
    assert [each.rule for each in report.remarks] == ["allocated-on-compute"]
    assert [op for op, _ in found.jobs[1].items[:2]] == [8, 3]


@pytest.mark.parametrize("jobs", ["job first_0 forward 0: 2-4@0\njob second_0 forward 0: 5-7@0", "job first_0 forward 0: 5@0 2-4@0 6-7@0"])
def test_a_collective_that_starts_during_computation_of_another_job_or_step_keeps_its_pool(jobs: str) -> None:
    """A gathering of a weight waits for nothing in this step."""
    given = program(GATHERED[: GATHERED.index("job")].replace("all_gather(%2)", "all_gather(%0)") + jobs, 1)
    found, report = changed(given)
    assert (found.ops, found.jobs) == (given.ops, given.jobs)
    assert [(each.rule, each.numbers["collectives"]) for each in report.remarks] == [("starts-during-computation", 1)]


def test_where_a_rank_cannot_be_simulated_results_keep_their_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    def stalls(*_: object) -> None:
        raise PlanError("rank 0 waits for ever")

    monkeypatch.setattr(allocate_on_compute, "lower", stalls)
    given = program(SCATTERED)
    found, report = changed(given)
    assert (found.ops, found.jobs) == (given.ops, given.jobs)
    assert [(each.rule, each.numbers, each.names) for each in report.remarks] == [
        ("starts-not-simulated", {"collectives": 1}, {"error": "rank 0 waits for ever"})
    ]


GATHERS = World(dp=2, micro_batches=3, layers=2, streams=True, gather=True)


def test_gatherings_of_random_programs_take_memory_of_the_compute_stream() -> None:
    for each in plan(GATHERS):
        found, _ = changed(msgspec.structs.replace(each, passes=("schedule-1f1b",)), 0)
        assert any(map(fills_memory, found.ops))


@settings(max_examples=25, deadline=None)
@given(worlds(max_micro_batches=4, max_layers=2), st.booleans())
@example(GATHERS, True)
@example(World(pp=2, dp=2, micro_batches=4, layers=1, streams=True, gather=True, pairs=True, seed=3), True)
def test_of_any_safe_plan_another_is_made_that_holds_no_more_and_is_no_later(world: World, gather: bool) -> None:
    """Law: safe with the events that are missing then, the same numbers; no collective starts later; operations in turn hold no more."""
    world = msgspec.structs.replace(world, gather=gather, streams=True)
    plans = [msgspec.structs.replace(each, passes=("schedule-1f1b",)) for each in plan(world)]
    found = [Pipeline((AllocateOnCompute(min_bytes=0), InsertEvents())).run(each, H200)[0] for each in plans]
    assert [str(finding) for finding in check(found, GPU)] == []
    assert_same(plans, found)
    for before, after in zip(plans, found, strict=True):
        assert Closure(after).freed_early() == []
        assert in_order(after).peak() <= in_order(before).peak()
        there = {item for job in before.jobs for item in job.items}
        items = [item for job in after.jobs for item in job.items]
        start, start_now = times_of(before, H200).start, times_of(after, H200).start[[k for k, item in enumerate(items) if item in there]]
        assert (start_now <= start + 20_000).all()  # what the host takes to issue more operations
