"""Blocks that another stream reads last: given back in the order of their own stream where that stream waits for the reader anyway."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from interlace.config import make_config
from interlace.cost_model import CostModel, GivenCosts, load_profile
from interlace.ir import Program, parse
from interlace.ir.kinds import BOUNDARY, is_p2p, is_send
from interlace.ir.target import CPU, CUSTOM, GPU
from interlace.passes import InsertEvents, Pipeline, ReturnMemory
from interlace.planning.plan import make_plans
from interlace.scheduler.hazards import check, graph_memory
from interlace.scheduler.host_waits.throttle import gpu_peak
from interlace.scheduler.interleave import planner as interleave
from interlace.scheduler.memory.live import in_order
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.simulator import simulate
from tests.captured.stored import programs_of
from tests.closure import Closure, collected
from tests.default_passes import STREAMS
from tests.interpreter import assert_same
from tests.strategies import World, plan, programs, worlds

COST = GivenCosts({"comm": 400, "gemm": 1000, "default": 50}, host_ns=1, job_ns=2)
H200 = CostModel(load_profile("h200"))
BLOCK = 4 << 20
MICRO_BATCHES = 6


def summed(sums: int = 6, before: int = 0) -> Program:
    """Products whose sums over two ranks run on a stream of their own, each read by the next product: in one job for each micro-batch.

    `before`: products between one that is summed and the first reader of its sum.
    """
    ops = ['#0 %0:float32[1024,1024]!"w" = builtin.parameter() forward', '#1 %1:float32[1024,1024]"x" = pd_op.data() forward']
    last = 1
    for _ in range(sums):
        at = len(ops)
        ops += [
            f"#{at} %{at}:float32[1024,1024] = pd_op.matmul(%{last}, %0) forward",
            f'#{at + 1} %{at + 1}:float32[1024,1024] = pd_op.all_reduce(%{at}) forward group=7 stream="auto_parallel_mp"',
        ]
        ops += [f"#{k} %{k}:float32[1024,1024] = pd_op.matmul(%1, %0) forward" for k in range(at + 2, at + 2 + before)]
        last = at + 1
    ops.append(f"#{len(ops)} %{len(ops)}:float32[1] = pd_op.mean(%{last}) forward")
    jobs = "".join(f"job forward_{m} forward {m}: 2-{len(ops) - 1}@{m}\n" for m in range(MICRO_BATCHES))
    head = f"program rank=0 world=2 mode=train\npipeline stage=0 of 1 micro_batches={MICRO_BATCHES} chunks=1 schedule=accumulate\n"
    return parse("\n".join([f"{head}group 7 = 0,1\npasses schedule-1f1b", *ops, jobs]))


def returned(program: Program) -> Program:
    return Pipeline((STREAMS[0], ReturnMemory(), *STREAMS[1:])).run(program, COST)[0]


def findings(program: Program) -> set[str]:
    return {finding.kind for finding in check([program], GPU)}


def require_proved(plans: list[Program]) -> None:
    for target in (GPU, CPU, CUSTOM):
        assert [str(finding) for finding in check(plans, target)] == []
    for each in plans:
        closure = Closure(each)
        assert (closure.races(), closure.freed_early(), closure.unwritten()) == ([], [], [])


def test_a_host_that_runs_ahead_holds_little_more_than_operations_in_turn() -> None:
    """Each sum's operand and result are used again by what is issued next; the step is as long as before."""
    without = Pipeline(STREAMS).run(summed(), COST)[0]
    found = returned(summed())
    require_proved([found])
    in_turn = in_order(without).peak()
    assert in_order(found).peak() == in_turn
    assert gpu_peak(without, COST) >= in_turn + 5 * MICRO_BATCHES * BLOCK
    assert gpu_peak(found, COST) <= in_turn + 2 * MICRO_BATCHES * BLOCK, "the last product and its sum: nothing in their job waits for them"
    alone = Options(peers_ready=True)
    slack = 50 * (len(found.ops) - len(without.ops)) * MICRO_BATCHES
    assert simulate([found], COST, alone).step_ns <= simulate([without], COST, alone).step_ns + slack


@pytest.mark.slow
def test_every_reader_that_is_added_comes_behind_what_waits() -> None:
    """One place sooner, while its stream has not waited, the block may be overwritten under the sum: proof and closure refuse it."""
    found = returned(summed(sums=3, before=2))
    require_proved([found])
    readers = {op.id: op.operands[0] for op in found.ops if op.kind == "share_data" and not op.stream}
    assert readers
    for job in found.jobs:
        for reader, m in ((op, m) for op, m in job.items if op in readers):
            items = [item for item in job.items if item != (reader, m)]
            at = 1 + items.index((readers[reader] + 1, m))  # behind the sum
            if job.items.index((reader, m)) <= at:
                continue
            wrong = _with_items(found, job.name, (*items[:at], (reader, m), *items[at:]))
            assert "freed-in-use" in findings(wrong), (job.name, reader)
            assert Closure(wrong).freed_early()


def _with_items(program: Program, name: str, items: tuple[tuple[int, int], ...]) -> Program:
    jobs = tuple(msgspec.structs.replace(job, items=items) if job.name == name else job for job in program.jobs)
    return msgspec.structs.replace(program, jobs=jobs)


def test_what_no_stream_of_its_own_waits_for_stays_and_is_told() -> None:
    program = summed(sums=1)
    alone = program.with_ops([op for op in program.ops if op.kind != "mean"], program.values[:-1])
    alone = msgspec.structs.replace(alone, jobs=tuple(msgspec.structs.replace(job, items=job.items[:-1]) for job in alone.jobs))
    found, (*_, report) = Pipeline((ReturnMemory(joins=False),)).run(alone, COST)
    assert found.ops == alone.ops
    assert [(each.rule, each.numbers) for each in report.declined] == [
        ("returned-by-the-host", {"blocks": MICRO_BATCHES, "size_bytes": 24 << 20})
    ]
    joined, (*_, report) = Pipeline((ReturnMemory(),)).run(alone, COST)
    added = {op.id for op in joined.ops} - {op.id for op in alone.ops}
    count = MICRO_BATCHES  # the last product starts before the sum before it ends, so the wait comes behind it
    assert sum(op in added for event in joined.events for op, _ in event.waits) == count
    assert {each.rule: each.numbers for each in report.done} == {"memory-returned": {"blocks": count}, "streams-joined": {"waits": count}}
    assert findings(joined) == set()


@pytest.mark.parametrize(("last", "at_end", "waits"), [("exp", "auto", 0), ("exp", "off", 0), ("exp", "on", 1), ("matmul", "off", 1)])
def test_a_stream_waits_at_its_end_for_what_ends_later_only_where_that_is_asked_for(
    last: str, at_end: Literal["auto", "on", "off"], waits: int
) -> None:
    """The sum takes 400 ns, `exp` 50 and a product 1000, and nothing else follows it on the stream of the product that is summed."""
    operands = "%1, %0" if last == "matmul" else "%1"
    program = parse(
        f"""program rank=0 world=2 mode=train
pipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=1F1B
group 7 = 0,1
passes schedule-1f1b
#0 %0:float32[1024,1024]!"w" = builtin.parameter() forward
#1 %1:float32[1024,1024]"x" = pd_op.data() forward
#2 %2:float32[1024,1024] = pd_op.matmul(%1, %0) forward
#3 %3:float32[1024,1024] = pd_op.all_reduce(%2) forward group=7 stream="auto_parallel_mp"
#4 %4:float32[1024,1024] = pd_op.{last}({operands}) forward
job forward_0 forward 0: 2-4@0
"""
    )
    found, (*_, report) = Pipeline((ReturnMemory(at_end=at_end),)).run(program, COST)
    assert len(found.events) == waits
    assert [each.rule for each in report.declined] == ["returned-by-the-host"] * (not waits)
    assert findings(found) == findings(program)


@pytest.mark.parametrize(
    "other",
    [
        '%3:float32[1024,1024]!"v" = builtin.parameter()',
        "%3:float32[2] = pd_op.exp(%1)",
        '%3:float32[1024,1024]"y" = pd_op.data()',
        "%3:float32[1024,1024]^pinned = pd_op.memcpy_d2h(%1)",
    ],
    ids=["parameter", "small", "input", "on the host"],
)
@pytest.mark.parametrize("order", ["%2, %3", "%3, %2"])
def test_a_block_of_a_vector_is_given_back_whatever_else_is_in_it(other: str, order: str) -> None:
    """Of what the other stream reads last in one vector, the block of this step's computation, and none that stays or is small."""
    program = parse(f"""program rank=0 world=1 mode=train
pipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=accumulate
passes schedule-1f1b
#0 %0:float32[1024,1024]!"w" = builtin.parameter() forward
#1 %1:float32[1024,1024]"x" = pd_op.data() forward
#2 %2:float32[1024,1024] = pd_op.matmul(%1, %0) forward
#3 {other} forward
#4 %4:vector<float32[1024,1024];float32[1024,1024]> = builtin.combine({order}) forward
#5 %5:float32[2] = pd_op.add_n(%4) forward stream="side"
#6 %6:float32[2] = pd_op.exp(%1) forward
#7 %7:float32[2] = pd_op.exp(%5) forward
#8 %8:float32[2] = pd_op.exp(%7) forward
#9 %9:float32[1024,1024] = pd_op.relu(%2) forward
job a forward 0: {"" if "builtin" in other or "data" in other else "3@0 "}2@0 9@0 4-8@0
""")
    found, (report,) = Pipeline((ReturnMemory(),)).run(program, COST)
    (reader,) = (op for op in found.ops if op.kind == "share_data")
    assert (reader.operands, reader.stream, reader.role) == ((2,), "", "forward")
    items = found.jobs[0].items
    assert items[items.index((reader.id, 0)) - 1] == (7, 0)
    assert [(each.rule, each.numbers) for each in report.remarks] == [("memory-returned", {"blocks": 1})]


def test_what_a_micro_batch_does_not_compute_is_given_back_in_none() -> None:
    """The first micro-batch would give back what it copied in, the second does not wait for its reader, and the third copies nothing."""
    program = parse("""program rank=0 world=2 mode=train
pipeline stage=0 of 1 micro_batches=3 chunks=1 schedule=accumulate
group 7 = 0,1
passes schedule-1f1b
#0 %0:float32[1024,1024]!"w" = builtin.parameter() forward
#1 %1:float32[1024,1024]"x" = pd_op.data() forward
#2 %2:float32[4096,1024] = pd_op.matmul(%1, %0) forward
#3 %3:float32[1024,1024] = pd_op.matmul(%1, %0) forward
#4 %4:float32[1024,1024]^pinned = pd_op.memcpy_d2h(%3) forward stream="d2h"
#5 %5:float32[1024,1024] = pd_op.memcpy_h2d(%4) backward stream="h2d"
#6 %6:float32[2] = pd_op.all_reduce(%5) backward group=7 stream="auto_parallel_mp"
#7 %7:float32[2] = pd_op.exp(%6) backward stream="h2d"
job forward_0 forward 0: 2-4@0
job forward_1 forward 1: 2-4@1
job forward_2 forward 2: 2-3@2
job backward_0 backward 0: 5-7@0
job backward_1 backward 1: 5-6@1
job backward_2 backward 2: 6@2 7@1 7@2
""")
    two = msgspec.structs.replace(program, pipeline=msgspec.structs.replace(program.pipeline, num_micro_batches=2))
    jobs = tuple(msgspec.structs.replace(job, items=tuple(item for item in job.items if item[1] < 2)) for job in program.jobs)
    two = msgspec.structs.replace(two, jobs=tuple(job for job in jobs if job.items))
    for each, rule in ((program, "not-in-all-micro-batches"), (two, "memory-returned")):
        found, (report,) = Pipeline((ReturnMemory(joins=False),)).run(each, COST)
        assert any(op.kind == "share_data" for op in found.ops) == (rule == "memory-returned")
        assert rule in [told.rule for told in report.remarks]


@pytest.mark.parametrize(("min_bytes", "some"), [(BLOCK, True), (BLOCK + 1, False)])
def test_small_blocks_are_left_to_the_allocator(min_bytes: int, some: bool) -> None:
    found, _ = Pipeline((STREAMS[0], ReturnMemory(min_bytes=min_bytes))).run(summed(), COST)
    assert any(op.kind == "share_data" for op in found.ops) == some


@pytest.fixture
def _no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleave, "SEARCH_WORK", 0)


FORMS: tuple[dict[str, Any], ...] = (
    {"schedule_1f1b": {"interleave": "off"}},
    {"schedule_1f1b": {"interleave": "dx-first", "only_gains": False}},
    {"memory_budget": "+1GB", "schedule_1f1b": {"interleave": "mixed", "only_gains": False}, "offload_activations": {"fraction": 0.5}},
)


@pytest.mark.usefixtures("_no_search")
@settings(max_examples=4, deadline=None)
@given(worlds(max_pp=2, max_dp=2, max_micro_batches=4, max_layers=2, streams=False, pairs=False, offload=False, hoist=False, cut=False))
def test_plans_of_random_programs_are_safe(world: World) -> None:
    """Proved on every target, by the closure too; the numbers are the program's."""
    before = programs(world)
    for form in FORMS:
        plans = [plan.program for plan in make_plans(before, make_config({**form, "return_memory": {"min_bytes": 0}}), H200, "h200")]
        require_proved(plans)
        assert_same(before, plans)


WRITTEN_OVER = World(mp=2, micro_batches=1, layers=1, seed=40000, streams=True, gather=True)
"""A collective's result is written over in place on another stream."""


@settings(max_examples=25, deadline=None)
@given(worlds(max_micro_batches=4, max_layers=2))
@example(WRITTEN_OVER)
def test_of_any_safe_plan_another_is_made_that_holds_no_more(world: World) -> None:
    """Law: safe with the events that are missing then, the same numbers, and operations in turn hold what they held at most."""
    plans = [msgspec.structs.replace(each, passes=("schedule-1f1b",)) for each in plan(world)]
    found = [Pipeline((ReturnMemory(min_bytes=0), InsertEvents())).run(each, H200)[0] for each in plans]
    assert [str(finding) for finding in check(found, GPU)] == []
    assert_same(plans, found)
    for before, after in zip(plans, found, strict=True):
        assert Closure(after).freed_early() == []
        assert in_order(after).peak() <= in_order(before).peak()


@settings(max_examples=8, deadline=None)
@given(worlds(max_pp=2, max_micro_batches=3, max_layers=2, streams=True, offload=False), st.sampled_from([0, 9, 32]))
@example(WRITTEN_OVER, 0)
@example(World(pp=2, mp=2, streams=True, gather=True), 0)
def test_a_block_is_given_back_at_the_first_operation_of_its_stream_that_waits(world: World, min_bytes: int) -> None:
    """By the closure without events, variable by variable; of each block that another stream uses last it is told what became of it."""
    for each in plan(world):
        before = msgspec.structs.replace(each, passes=("schedule-1f1b",), events=())
        after, (report, *_) = Pipeline((ReturnMemory(min_bytes=min_bytes, joins=False),)).run(before, H200)
        closure, far = Closure(before), _used_last_elsewhere(before, min_bytes)
        told = {remark.rule: remark for remark in report.remarks}
        done, left = (told[rule].numbers["blocks"] if rule in told else 0 for rule in ("memory-returned", "returned-by-the-host"))
        unusual = told.keys() - {"memory-returned", "returned-by-the-host"}
        assert done + left == len(far) if not unusual else done + left <= len(far)
        readers = {op.id: op for op in after.ops if op.id not in {op.id for op in before.ops}}
        found = 0
        for job in after.jobs:
            for at, item in enumerate(job.items):
                if item[0] in readers:
                    behind = closure.place[next(other for other in reversed(job.items[:at]) if other[0] not in readers)]
                    (value,) = readers[item[0]].operands
                    (name,) = closure.names(value, item[1])
                    if behind != closure.place[closure.rank.producer[value].id, item[1]]:  # there a reader changes nothing
                        assert behind == _first_that_waits(closure, *far[name])
                        found += 1
        assert found == done


def _used_last_elsewhere(program: Program, min_bytes: int) -> dict[Any, tuple[int, int]]:
    """Variable of a block -> its first and its last use, where these are on two streams."""
    closure = Closure(program)
    collects = {op for op, _ in collected(program)}  # what they read is given back as others are
    ends = {v for op in program.ops if op.name in BOUNDARY and op.id not in collects for v in (*op.operands, *op.results)}
    kept = {id(cell) for v in ends for m in range(program.pipeline.num_micro_batches) for cell in closure.rank.cells_of(v, m)}
    first, last, cell_of, written = {}, {}, {}, {}
    for place in (closure.place[item] for job in program.jobs for item in job.items):
        access = closure.access[place]
        written.update(dict.fromkeys(access.writes, place))
        for value in closure._named(place):
            m = closure.items[place][1]
            for cell, name in zip(closure.rank.cells_of(value, m), closure.names(value, m), strict=True):
                if closure.lasting(id(cell)) or id(cell) in kept or closure.rank.values[name[0]].size_bytes < min_bytes:
                    continue
                first.setdefault(id(cell), place)
                last[name], cell_of[name] = place, id(cell)
    return {
        name: (first[cell], last[name])
        for name, cell in cell_of.items()
        if closure.stream[first[cell]] != closure.stream[last[name]] and written[cell] <= last[name]
    }


def _first_that_waits(closure: Closure, made: int, last: int) -> int:
    """The first operation of the block's stream, in the job of the last use, that starts when the last use is over."""
    mine = (k for k in range(last + 1, closure.count) if closure.stream[k] == closure.stream[made] and closure.job[k] == closure.job[last])
    return next(k for k in mine if closure.ordered(last, k))


def moved_out() -> Program:
    """Three products, each copied to the host by a stream that no other waits for, then others, the last of them four times as large."""
    ops = ['#0 %0:float32[1024,1024]!"w" = builtin.parameter() forward', '#1 %1:float32[1024,1024]"x" = pd_op.data() forward']
    for at in range(2, 14):
        ops.append(f"#{at} %{at}:float32[{1024 * (4 if at == 13 else 1)},1024] = pd_op.matmul(%1, %0) forward")
    for at in range(14, 17):
        copy = f'pd_op.memcpy_d2h(%{at - 12}) forward stream="out" {{"dst_place_type":2}}'  # to pinned memory, so that the host goes on
        ops.append(f"#{at} %{at}:float32[1024,1024]^pinned = {copy}")
    head = "program rank=0 world=1 mode=train\npipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=none\n"
    items = "2@0 14@0 3@0 15@0 4@0 16@0 " + " ".join(f"{k}@0" for k in range(5, 14))
    return parse("\n".join([f"{head}passes schedule-1f1b", *ops, f"job forward_0 forward 0: {items}\n"]))


def test_a_stream_waits_for_copies_to_the_host_when_they_are_done() -> None:
    """Only with `joins`: an event from each copy to a last reader on the stream of its block, behind what runs during the copy."""
    costs = GivenCosts({"copy": 2500, "gemm": 1000, "default": 1000}, host_ns=1, job_ns=2)
    plain, joined = (Pipeline((ReturnMemory(joins=joins),)).run(moved_out(), costs)[0] for joins in (False, True))
    assert plain.events == ()
    assert len(plain.ops) == len(moved_out().ops)
    assert findings(joined) == set()
    assert [event.record for event in joined.events] == [(14, 0), (15, 0), (16, 0)]
    ops = {op.id: op for op in joined.ops}
    order = [item for job in joined.jobs for item in job.items]
    for event, value, behind in zip(joined.events, (2, 3, 4), (5, 7, 10), strict=True):
        (reader,) = event.waits
        assert (ops[reader[0]].kind, ops[reader[0]].operands, ops[reader[0]].stream) == ("share_data", (value,), "")
        assert order[order.index(reader) - 1] == (behind, 0)  # what follows that starts when the copy is over
    held = [graph_memory(each).peak() for each in (plain, joined)]
    assert [peak / BLOCK for peak in held] == [9, 6]  # all that the copies read is held without a wait
    step = [simulate([each], costs, Options.of(GPU)).step_ns for each in (plain, joined)]
    assert step[0] == pytest.approx(step[1], abs=2000)


@pytest.mark.slow
def test_a_captured_step_joins_copies_back_and_answered_sends() -> None:
    """Four stages that move all: blocks of copies out and of what is sent serve again within the step; a send is waited for behind what
    comes back for its micro-batch."""
    options = {"interleave": "mixed", "only_gains": "off"}
    moved = {"schedule_1f1b": options, "offload_activations": {"fraction": 1.0, "min_bytes": 64}, "return_memory": {"min_bytes": 64}}
    config = make_config({**moved, "capture": "on"})
    without = msgspec.structs.replace(config, passes={**config.passes, "return-memory": ReturnMemory(min_bytes=64, joins=False)})
    made = [make_plans(programs_of("pp4 mixed, offload"), each, GivenCosts({"default": 1000}), "given") for each in (config, without)]
    held = [[graph_memory(plan.program).peak() for plan in plans] for plans in made]
    assert all(joined < 0.99 * plain for joined, plain in zip(*held, strict=True))
    assert sum(held[0]) < 0.85 * sum(held[1])
    sends = 0
    for each in made[0]:
        program, ops = each.program, {op.id: op for op in each.program.ops}
        order = [item for job in program.jobs for item in job.items]
        for event in program.events:
            if is_send(ops[event.record[0]]) and all(ops[op].kind == "share_data" for op, _ in event.waits):
                sent = order.index(event.record)
                received = (k for k, (op, m) in enumerate(order) if m == event.record[1] and is_p2p(ops[op]) and not is_send(ops[op]))
                assert any(sent < k < order.index(wait) for k in received for wait in event.waits)
                sends += 1
    assert sends >= 3 * 4


OTHER = """#19 %19:float32[4096,1024] = pd_op.matmul(%1, %0) forward
#20 %20:float32[1024,1024] = pd_op.matmul(%1, %0) forward
#21 %21:float32[2] = pd_op.mean(%20) forward stream="side"
#22 %22:float32[2] = pd_op.exp(%1) forward
#23 %23:float32[2] = pd_op.exp(%21) forward
"""
OF_THE_OPTIMIZER = """#2 %2:float32[1024,1024] = pd_op.matmul(%1, %0) backward
#3 %3:float32[2] = pd_op.mean(%2) optimize stream="side"
#4 %4:float32[2] = pd_op.exp(%3) optimize
"""
ELSEWHERE = """#2 %2:float32[1024,1024] = pd_op.matmul(%1, %0) forward
#3 %3:float32[1024,1024]~2 = pd_op.relu_(%2) forward stream="other" inplace=0:0
#4 %4:float32[2] = pd_op.mean(%3) forward stream="side"
#5 %5:float32[2] = pd_op.exp(%4) forward
"""
NOT_IN_ALL = """#2 %2:float32[1024,1024]^pinned = pd_op.memcpy_d2h(%1) forward stream="d2h"
#3 %3:float32[1024,1024] = pd_op.memcpy_h2d(%2) forward stream="h2d"
#4 %4:float32[2] = pd_op.mean(%3) forward stream="side"
#5 %5:float32[2] = pd_op.exp(%4) forward stream="h2d"
"""


@pytest.mark.parametrize(
    ("ops", "jobs", "rule"),
    [
        (OF_THE_OPTIMIZER, ("19-23@0 2-4@0",), "returned-by-the-optimizer"),
        (ELSEWHERE, ("19-23@0 2-5@0", "19-23@1 2-4@1", "5@1"), "returned-in-order-elsewhere"),
        (NOT_IN_ALL, ("19-23@0 2-5@0", "19-23@1 2-4@1", "19-23@2 4@2 5@1 5@2"), "not-in-all-micro-batches"),
    ],
)
def test_what_cannot_be_given_back_keeps_no_other_block(ops: str, jobs: tuple[str, ...], rule: str) -> None:
    """One whose stream waits nearer to its reader, and so is looked at first; the other is given back in every micro-batch."""
    count = len({job.partition("@")[2][0] for job in jobs})
    pipe = f"pipeline stage=0 of 1 micro_batches={count} chunks=1 schedule=accumulate\n"
    text = f"program rank=0 world=1 mode=train\n{pipe}passes schedule-1f1b\n"
    text += '#0 %0:float32[1024,1024]!"w" = builtin.parameter() forward\n#1 %1:float32[1024,1024]"x" = pd_op.data() forward\n'
    text += OTHER + ops + "".join(f"job j{k} forward {job.partition('@')[2][0]}: {job}\n" for k, job in enumerate(jobs))
    found, (report,) = Pipeline((ReturnMemory(joins=False),)).run(parse(text), COST)
    (reader,) = (op for op in found.ops if op.kind == "share_data")
    assert (reader.operands, [m for job in found.jobs for op, m in job.items if op == reader.id]) == ((20,), [*range(count)])
    assert rule in [told.rule for told in report.remarks]
