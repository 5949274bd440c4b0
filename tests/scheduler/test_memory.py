"""Memory of a plan: by storage, at every moment."""

from __future__ import annotations

import dataclasses
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.cost_model import GivenCosts
from interlace.ir import Graph, Program, parse
from interlace.ir.copies import variants
from interlace.ir.kinds import DATA, PARAMETER
from interlace.ir.target import GPU, IDEAL
from interlace.scheduler.host_waits.throttle import gpu_memory
from interlace.scheduler.memory import live as memory
from interlace.scheduler.memory.live import END, Lives, in_order, lifetimes, needed_at_once, over_time
from interlace.scheduler.simulate.arrays import Options
from interlace.scheduler.simulate.simulator import simulate
from tests.scheduler.plans import Shape, shapes, world

COST = GivenCosts({"comm": 97, "p2p": 31, "gemm": 53, "copy": 41, "default": 7}, host_ns=2, job_ns=5)


def items_of(program: Program) -> list[tuple[int, int]]:
    """The items of all jobs in issue order."""
    return [item for job in program.jobs for item in job.items]


def held(program: Program, items: list[tuple[int, int]]) -> list[dict[str, int]]:
    """What is held while each item runs: a plain interpreter that counts who will still read each storage."""
    forms = {m: Graph(form.program) for form in variants(program) for m in form.micro_batches}
    readers: dict[tuple[int, int], set[int]] = {}
    born: dict[tuple[int, int], int] = {}
    size: dict[tuple[int, int], tuple[str, int]] = {}
    base = {"device": 0, "pinned": 0}
    for value in program.values:
        if value.persistable and value.id == value.storage:
            base["device"] += value.size_bytes
    for at, (op_id, micro_batch) in enumerate(items):
        graph = forms[micro_batch]
        op = graph.ops[op_id]
        for value_id in [*graph.reads(op), *op.results]:
            value = graph.values[value_id]
            key = (value.storage, micro_batch)
            if graph.values[value.storage].persistable:
                continue
            maker = graph.ops[graph.producer[value.storage]]
            born.setdefault(key, 0 if maker.name in (DATA, PARAMETER) else at)
            readers.setdefault(key, set()).add(at)
            root = graph.values[value.storage]
            size[key] = ("device" if root.memory == "device" else "pinned", root.size_bytes)
    rows = []
    for at in range(len(items)):
        row = dict(base)
        for key, first in born.items():
            if first <= at <= max(readers[key]):
                row[size[key][0]] += size[key][1]
        rows.append(row)
    return rows


def mixed(program: Program, seed: int) -> list[tuple[int, int]]:
    """The items, each micro-batch in program order, mixed; the optimizer last."""
    rng = random.Random(seed)
    ops = {op.id: op for op in program.ops}
    items = sorted(items_of(program))
    queues = [[i for i in items if i[1] == m and ops[i[0]].role != "optimize"] for m in range(program.pipeline.num_micro_batches)]
    order = []
    while left := [queue for queue in queues if queue]:
        order.append(rng.choice(left).pop(0))
    return order + [item for item in items if ops[item[0]].role == "optimize"]


@settings(max_examples=60, deadline=None)
@given(shapes(), st.integers(0, 1000))
def test_order_based_equals_an_interpreter(shape: Shape, seed: int) -> None:
    """For the plan's own order, and with its micro-batches mixed at will."""
    for program in world(shape)[:1]:
        items = items_of(program)
        for order in (items, mixed(program, seed)):
            rows = held(program, order)
            for pool in ("device", "pinned"):
                wanted = max(row[pool] for row in rows)
                assert in_order(program, order).peak(pool) == wanted  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(shapes(), st.integers(0, 1000))
def test_no_order_holds_less_than_an_operation_needs_at_once(shape: Shape, seed: int) -> None:
    """Of the program as it was captured, before copies to the host were added."""
    plain = world(dataclasses.replace(shape, offloaded=NONE))[0]
    moved = world(shape)[0]
    assert needed_at_once(plain) <= in_order(moved, mixed(moved, seed)).peak()


@settings(max_examples=60, deadline=None)
@given(shapes())
def test_lifetimes_without_copies_are_those_of_the_program_without_them(shape: Shape) -> None:
    for form in (form for program in world(shape) for form in variants(program)):
        mine, plain = lifetimes(form.whole, absent=form.absent), lifetimes(form.program)
        for name in (field.name for field in dataclasses.fields(plain)):
            assert np.array_equal(getattr(mine, name), getattr(plain, name)), name


def test_what_an_operation_needs_at_once() -> None:
    """Its operands and results, shared memory once and by what is used of it; and what persists. Where only a shape is read, nothing."""
    text = """program rank=0 world=1 mode=train
#0 %0:float32[100]!"w" = builtin.parameter() forward
#1 %1:float32[40] = pd_op.full() forward
#2 %2:float32[40] = pd_op.exp(%1) forward
#3 %3:float32[10]~2 = pd_op.slice(%2) forward views=0:0
#4 %4:float32[10] = pd_op.add(%3, %0) forward
#5 %5:float32[30] = pd_op.full_like(%2) forward no_buffer=0"""
    assert needed_at_once(parse(text)) == 4 * (100 + 40 + 40)
    assert needed_at_once(parse(text.replace("[40]", "[15]"))) == 4 * (100 + 30)
    assert needed_at_once(parse(text.replace("%4:float32[10]", "%4:float32[90]"))) == 4 * (100 + 10 + 90)


@settings(max_examples=60, deadline=None)
@given(shapes())
def test_over_time_equals_looking_at_every_moment(shape: Shape) -> None:
    """Never negative; in the end only what persists; at the peak, holdings add up to it."""
    found = simulate(world(shape), COST)
    for at, profile in enumerate(found.memory):
        mine = slice(int(found.input.first[at]), int(found.input.first[at + 1]))
        for pool in ("device", "pinned"):
            moments, sizes = profile.curve(pool)  # type: ignore[arg-type]
            assert (sizes >= 0).all()
            assert (np.diff(moments) >= 0).all()
            assert sizes[-1] == profile.base[pool]
            lives = profile.lives.pool(pool)  # type: ignore[arg-type]
            tops = [int(lives.size[(lives.alloc_at <= t) & (lives.free_at > t)].sum()) for t in found.times.start[mine].tolist()]
            assert profile.peak(pool) == max([profile.base[pool] + top for top in tops])  # type: ignore[arg-type]
            assert sum(h.size_bytes for h in profile.at_peak(pool)) == profile.peak(pool)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(shapes())
def test_one_stream_gpu_is_the_serial_order(shape: Shape) -> None:
    """On one stream, memory taken and returned at issue is what a serial executor holds, however far the host runs ahead.

    Pinned buffers are never collected there: each copied value of each micro-batch has its own.
    """
    shape = Shape(1, 1, shape.micro_batches, shape.layers, ("", "", "", ""), shape.offloaded)
    program = world(shape)[0]
    found = simulate([program], COST, target=GPU)
    assert found.ranks[0].peak_bytes == in_order(program).peak()
    pinned = in_order(program).lives.pool("pinned")
    assert found.ranks[0].pinned_bytes == pinned.size.sum() >= in_order(program).peak("pinned")


def test_run_ahead_defeats_offload() -> None:
    """Memory taken at issue and returned when a copy on another stream ends: what the copies should save is not saved."""
    shape = Shape(1, 1, 4, 6, ("", "", "", "copies"), frozenset({0, 1, 2, 3}), width=64)
    fast_host = GivenCosts({"gemm": 500, "copy": 400, "default": 50}, host_ns=1)
    programs = world(shape)
    at_issue = simulate(programs, fast_host, target=GPU).ranks[0].peak_bytes
    ideal = simulate(programs, fast_host, target=IDEAL).ranks[0].peak_bytes
    assert at_issue > ideal


READY = Options.of(GPU, peers_ready=True)
LEFT_BEHIND = """program rank=0 world=2 mode=train
pipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=accumulate
group 7 = 0,1
passes schedule-1f1b
#0 %0:float32[32,32]!"w" = builtin.parameter() forward
#1 %1:float32[32,32]"x" = pd_op.data() forward
#2 %2:float32[96,32] = pd_op.matmul(%1, %0) forward
#3 %3:float32[2] = pd_op.exp(%2) forward
#4 %4:float32[32,32] = pd_op.matmul(%1, %0) forward
#5 %5:float32[32,32] = pd_op.all_to_all(%4) forward group=7 stream="auto_parallel_mp"
#6 %6:float32[2] = pd_op.add(%5, %3) forward
job forward_0 forward 0: 2-6@0
"""


@pytest.mark.parametrize("host_ns", [0, 1])
def test_the_next_step_begins_with_what_side_streams_have_not_given_back(host_ns: int) -> None:
    """Computation reads the exchanged block last, and the block's own stream takes memory again only in the next step. Until then it is
    held beside the largest result, three blocks, also by a host that issues a whole step in no time."""
    block, cost = 4 * 32 * 32, GivenCosts({"gemm": 500, "comm": 400, "default": 50}, host_ns=host_ns)
    found = gpu_memory(parse(LEFT_BEHIND), cost) if not host_ns else simulate([parse(LEFT_BEHIND)], cost, READY, target=GPU).memory[0]
    assert found.carried is not None
    assert block in found.carried.size.tolist()
    held = {(each.kind, each.size_bytes) for each in found.at_peak()}
    assert held >= {("matmul", 3 * block), ("all_to_all", block)}


def test_offload_moves_bytes_and_loses_none() -> None:
    """Acceptance: R2 (simulated). What leaves the device is on the host at that moment, byte for byte."""
    baseline, ours = (world(Shape(1, 1, 1, 4, ("", "", "", ""), offloaded, width=32))[0] for offloaded in (NONE, frozenset({0})))
    at_turn = []
    for program in (baseline, ours):
        turn = next(at for at, item in enumerate(items_of(program)) if program.ops[item[0]].role == "backward")
        profile = in_order(program)
        at_turn.append((_while_running(profile, turn + 1)[turn], _while_running(profile, turn + 1, "pinned")[turn]))
    assert at_turn[1][1] == 3 * (2 * 32 * 4) == in_order(ours).peak("pinned")
    assert at_turn[0] == (sum(at_turn[1]), 0)
    assert in_order(baseline).peak() > in_order(ours).peak()


NONE: frozenset[int] = frozenset()
TEXT = """
program rank=0 world=1 mode=train
pipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=none
#0 %0:float32[8]!"w" = builtin.parameter() forward
#1 %1:float32[4]"x" = pd_op.data() forward
#2 %2:float32[4] = pd_op.relu(%1) forward layer="a"
#3 %3:float32[2,2]~2 = pd_op.reshape(%2) forward layer="a" views=0:0
#4 %4:vector<float32[4];float32[4]> = builtin.combine(%1, %2) forward
#5 %5:float32[8] = pd_op.concat(%4) forward layer="b"
#6 %6:vector<float32[4];float32[4]> = pd_op.split_with_num(%5) forward layer="b"
#7 %7:float32[4], %8:float32[4] = builtin.split(%6) forward
#8 %9:float32[4] = pd_op.relu_grad(%3, %7) backward layer="a" no_buffer=0
#9 %10:float32[4]~8 = pd_op.add_(%8, %9) backward layer="a" inplace=0:0
#10 %11:float32[-1] = pd_op.nonzero(%10) backward
#11 builtin.shadow_output(%10) backward
job all forward 0: 2-10@0
"""


def test_views_vectors_and_outputs() -> None:
    """By hand: views and in-place results add nothing, a vector holds nothing, shapes hold nothing, outputs stay."""
    program = parse(TEXT)
    table = lifetimes(program)
    assert dict(zip(table.producer.tolist(), table.size.tolist(), strict=False))[5] == 32
    assert sorted(zip(table.producer.tolist(), table.size.tolist(), strict=True)) == [
        (1, 16),
        (2, 16),
        (5, 32),
        (6, 16),
        (6, 16),
        (8, 16),
        (10, 0),
    ]
    assert table.unknown == [11]
    assert table.base == {"device": 32, "pinned": 0}
    profile = in_order(program)
    base, x, relu, cat, half = 32, 16, 16, 32, 16
    # relu, reshape, combine, concat | split_with_num, split, relu_grad (reads only the shape of %3), add_, nonzero
    wanted = [x + relu, x + relu, x + relu, x + relu + cat, cat + 2 * half, 2 * half, 3 * half, 2 * half, half]
    assert [row + base for row in wanted] == [int(size) for size in _while_running(profile, 9)]
    assert profile.curve()[1][-1] == base + half
    assert profile.at_peak()[:2] == [memory.LiveBytes("", "parameters", 32, 1), memory.LiveBytes("b", "concat", 32, 1)]


def _while_running(profile: memory.Profile, count: int, pool: memory.Pool = "device") -> list[int]:
    lives = profile.lives.pool(pool)
    base = profile.base[pool]
    return [base + int(lives.size[(lives.alloc_at <= at) & (lives.free_at > at)].sum()) for at in range(count)]


def test_peak_names_layers() -> None:
    program = world(Shape(1, 1, 2, 2, width=16))[0]
    holdings = in_order(program).at_peak()
    assert {"parameters", "matmul"} <= {holding.kind for holding in holdings}
    assert "layers.1.fc" in {holding.layer for holding in holdings}


CARELESS = msgspec.structs.replace(GPU, name="careless", records_streams=False)


def test_returned_at_issue_on_its_own_stream_only() -> None:
    """A reader on another stream keeps memory until it is done, where the allocator knows it; one on the same stream only until it is
    issued."""
    text = """
program rank=0 world=1 mode=train
pipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=none
#0 %0:float32[4] = pd_op.full() forward
#1 %1:float32[4] = pd_op.relu(%0) forward{stream}
job all forward 0: 0-1@0
"""
    issue, start, end = np.array([1, 2]), np.array([1, 50]), np.array([50, 90])
    for stream, wanted in (("", 2), (' stream="side"', 90)):
        numbers = np.array([0, 1 if stream else 0])
        assert over_time(parse(text.format(stream=stream)), issue, start, end, numbers, GPU).lives.free_at[0] == wanted
        assert over_time(parse(text.format(stream=stream)), issue, start, end, numbers, CARELESS).lives.free_at[0] == 2
        assert over_time(parse(text.format(stream=stream)), issue, start, end, numbers).lives.free_at[0] == 90


LINE = "program rank=0 world=1 mode=train\npipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=none\n"


LOOKS = """
#0 %0:float32[4] = pd_op.full() forward stream="side"
#1 %1:float32[4] = pd_op.relu(%0) forward
#2 %2:float32[8] = pd_op.tanh(%1) forward
#3 %3:float32[4] = pd_op.full() forward stream="side"
#4 %4:float32[4] = pd_op.relu(%3) forward
job all forward 0: 0-4@0
"""


@pytest.mark.parametrize(
    ("ends", "first", "second"), [(90, 95, 1001), (95, 95, 1001), (96, 1001, 1001), (1000, 1001, 1095), (1002, 1095, 1095)]
)
def test_a_block_is_given_back_when_its_own_stream_next_takes_memory(ends: int, first: int, second: int) -> None:
    """Two blocks of a side stream, which computation reads last until `ends` and 5 later. A step takes 1000; the side stream takes memory
    at 1 and 95."""
    issue, end = np.array([1, 10, 20, 95, 96]), np.array([5, ends, 30, 97, ends + 5])
    found = over_time(parse(LINE + LOOKS), issue, issue, end, np.array([1, 0, 0, 1, 0]), GPU, step=1000)
    given_back = dict(zip(found.lives.producer.tolist(), found.lives.free_at.tolist(), strict=True))
    assert (given_back[0], given_back[3]) == (first, second)
    assert found.carried is not None
    assert sorted(found.carried.free_at.tolist()) == sorted(each - 1000 for each in given_back.values() if each > 1000)


def test_a_view_that_another_stream_reads_keeps_the_storage_till_that_is_over() -> None:
    """Each variable has a last reader; the storage's own, issued later on compute, does not speak for the view's."""
    program = parse(
        LINE
        + """
#0 %0:float32[4] = pd_op.full() forward
#1 %1:float32[4]~0 = pd_op.reshape(%0) forward views=0:0
#2 %2:float32[4] = pd_op.relu(%1) forward stream="side"
#3 %3:float32[4] = pd_op.tanh(%0) forward
job all forward 0: 0-3@0
"""
    )
    issue, end = np.array([1, 2, 3, 4]), np.array([10, 20, 90, 30])
    assert over_time(program, issue, issue, end, np.array([0, 0, 1, 0]), GPU).lives.free_at[0] == 90


def test_a_reader_on_another_stream_that_is_not_the_last_keeps_nothing() -> None:
    """Garbage collection records an event behind the last reader of a variable alone."""
    program = parse(
        LINE
        + """
#0 %0:float32[4] = pd_op.full() forward
#1 %1:float32[4] = pd_op.relu(%0) forward stream="side"
#2 %2:float32[4] = pd_op.tanh(%0) forward
job all forward 0: 0-2@0
"""
    )
    issue, end = np.array([1, 2, 3]), np.array([10, 90, 30])
    assert over_time(program, issue, issue, end, np.array([0, 1, 0]), GPU).lives.free_at[0] == 3


def test_a_block_is_returned_behind_the_issue_of_its_last_reader() -> None:
    """The reader's own result is taken first; then the block serves others."""
    program = parse(
        LINE
        + """
#0 %0:float32[4] = pd_op.full() forward
#1 %1:float32[4] = pd_op.relu(%0) forward
#2 %2:float32[4] = pd_op.tanh(%1) forward
job all forward 0: 0-2@0
"""
    )
    times = np.array([1, 2, 3])
    assert over_time(program, times, times, times, np.zeros(3, np.int64), GPU).peak() == 32


def test_what_ends_at_a_moment_makes_room_for_what_starts_then() -> None:
    """The third operation runs from 10 to 50 beside compute, the second starts when it ends."""
    program = parse(
        LINE
        + """
#0 %0:float32[4] = pd_op.full() forward
#1 %1:float32[4] = pd_op.full() forward
#2 %2:float32[4] = pd_op.relu(%0) forward stream="side"
job all forward 0: 0-2@0
"""
    )
    start, end = np.array([0, 50, 10]), np.array([10, 60, 50])
    assert over_time(program, np.zeros(3, np.int64), start, end, np.array([0, 0, 1])).peak() == 32


def test_pinned_buffers_stay_on_the_gpu_place_one_for_each_micro_batch() -> None:
    program = world(Shape(1, 1, 3, 3, ("", "", "", ""), frozenset({0, 1, 2}), width=32))[0]
    pinned = [simulate([program], COST, target=target).ranks[0].pinned_bytes for target in (GPU, IDEAL)]
    assert pinned[0] == 3 * 2 * (2 * 32 * 4) > pinned[1]


def test_what_lasts_is_counted_where_it_is() -> None:
    program = parse(
        LINE
        + """
#0 %0:float32[4]!"w" = builtin.parameter() forward
#1 %1:float32[16]!^pinned"moment" = builtin.parameter() forward
#2 %2:float32[4] = pd_op.relu(%0) forward
job all forward 0: 2@0
"""
    )
    profile = in_order(program)
    assert profile.base == {"device": 16, "pinned": 64}
    assert [profile.persistable_bytes(pool) for pool in ("device", "pinned", "all")] == [16, 64, 80]  # type: ignore[arg-type]


def test_a_kernels_vector_has_the_sizes_of_its_elements() -> None:
    """Also where the results that take it apart have lost theirs."""
    program = parse(
        LINE
        + """
#0 %0:vector<float32[4];float32[12]> = pd_op.split_with_num() forward
#1 %1:float32[-1], %2:float32[-1] = builtin.split(%0) forward
#2 %3:float32[4] = pd_op.relu(%2) forward
job all forward 0: 0-2@0
"""
    )
    table = lifetimes(program)
    assert sorted(table.size.tolist()) == [16, 16, 48]
    assert table.unknown == []


def test_at_the_peak_only_what_is_still_there_is_named_the_largest_first() -> None:
    program = parse(
        LINE
        + """
#0 %0:float32[64] = pd_op.full() forward layer="early"
#1 %1:float32[4] = pd_op.relu(%0) forward layer="a"
#2 %2:float32[128] = pd_op.matmul(%1) forward layer="z"
job all forward 0: 0-2@0
"""
    )
    assert [(h.kind, h.size_bytes) for h in in_order(program).at_peak()] == [("matmul", 512), ("relu", 16)]


def test_what_stays_is_live_to_the_end_and_after_it() -> None:
    """One block is there from the first op instance on and is never freed, another while the second runs alone."""
    columns = {"alloc_at": [0, 1], "free_at": [END, 2], "alloc_tie": [0, 0], "free_tie": [0, 0], "size": [5, 10], "producer": [0, 1]}
    given_ = {name: np.array(each) for name, each in columns.items()}
    none, never = np.zeros(2, np.int64), np.zeros(2, np.bool_)
    lives = Lives(**given_, pinned=never, micro_batch=none, stream=none, in_next_step=never)
    assert lives.along(3).tolist() == [5, 15, 5, 5]
