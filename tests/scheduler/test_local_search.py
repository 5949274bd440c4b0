"""The planner's local search: what it keeps step by step equals the clock and the memory of the whole order."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from interlace.cost_model import GivenCosts
from interlace.ir import Graph, parse
from interlace.scheduler.interleave.allocations import PairMemory
from interlace.scheduler.interleave.clock import run_order
from interlace.scheduler.interleave.engine import PLAIN
from interlace.scheduler.interleave.gathers import may_start_early
from interlace.scheduler.interleave.list_schedule import task_of
from interlace.scheduler.interleave.live_bytes import Walk
from interlace.scheduler.interleave.local_search import NEAR, Form, Rules, Search
from interlace.scheduler.interleave.planner import Pair, PartOps, plan_pair
from tests.searches import WHOLE
from tests.strategies import World, programs

COSTS = GivenCosts({"comm": 100, "gemm": 50, "default": 10}, {("gemm", "comm"): (1.3, 2.0), ("memory", "comm"): (1.1, 1.4)})
FORMS: st.SearchStrategy[Form] = st.sampled_from(["dx-first", "mixed"])


HELD = GivenCosts(
    {"comm": 100_000, "gemm": 50_000, "default": 3_000},
    {("gemm", "comm"): (1.7, 1.2), ("memory", "comm"): (1.2, 1.6)},
    holds=[("gemm", "comm")],
)
"""Products that run hold communication up."""


def pair_of(seed: int, layers: int, pp: int = 2, costs: GivenCosts = COSTS) -> Pair:
    program = programs(World(pp=pp, mp=2, micro_batches=2, layers=layers, seed=seed))[0]
    sides = [
        [op for op in program.ops if op.role == role and not op.name.startswith("builtin.") and op.name != "pd_op.data"]
        for role in ("backward", "forward")
    ]
    return Pair(program, [PartOps(*side) for side in zip("BF", "BF", sides, strict=True)], costs)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 999), st.integers(1, 4), FORMS, st.sampled_from([0, 64, 1 << 30]), st.sampled_from([COSTS, HELD]), st.booleans())
@example(349, 4, "dx-first", 1 << 30, COSTS, False)
def test_kept_time_and_memory_are_those_of_the_whole_order(
    seed: int, layers: int, form: Form, allowance: int, costs: GivenCosts, at_will: bool
) -> None:
    """Whether collectives that may start at any time start as soon as they can or are listed."""
    pair = pair_of(seed, layers, costs=costs)
    early = may_start_early(pair.nodes, pair.graph.ops)
    assert any(early)
    rules = Rules(pair.nodes, form, {k for k, may in enumerate(early) if may and at_will})
    plain = [pair.index[item] for item in pair.plain() if item in pair.index]
    cap = peak(pair, rules.full(rules.listed(plain))) + allowance
    search = Search(rules, pair.stretch, pair.node_bytes, cap, plain)
    found = search.run(3_000)
    full = rules.full(search.order)
    assert run_order(*pair.columns.copy(), full)[0] == pytest.approx(search.time, rel=1e-6, abs=NEAR)
    assert search.live_bytes == live_before_each(pair, full, set(search.order))
    assert sorted(found) == sorted(range(len(pair.nodes)))
    assert peak(pair, found) <= cap
    assert run_order(*pair.columns.copy(), found)[0] <= run_order(*pair.columns.copy(), rules.full(rules.listed(plain)))[0] + 1e-6
    assert all(found.index(dep) < found.index(k) for k in found for dep in pair.nodes[k].deps)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 999), st.integers(1, 4), FORMS)
def test_a_list_schedule_holds_every_dependency_and_node(seed: int, layers: int, form: Form) -> None:
    pair = pair_of(seed, layers)
    task = task_of(pair.columns, [node.side for node in pair.nodes], pair.node_bytes, [0.0] * len(pair.nodes))
    for order in PLAIN.orders(task, form, 1 << 40):
        assert sorted(order) == list(range(len(pair.nodes)))
        assert all(order.index(dep) < order.index(k) for k in order for dep in pair.nodes[k].deps)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 999), st.integers(1, 4), FORMS, st.sampled_from([0, 64, 1 << 30]), st.sampled_from([COSTS, HELD]))
def test_compiled_orders_and_times_are_the_plain_ones(seed: int, layers: int, form: Form, allowance: int, costs: GivenCosts) -> None:
    """To the last bit, with little memory and with much. Where this fails after a change of `clock.py` alone: numba knows its cached code
    by the file of `list_schedule.py`; write that anew, too."""
    pytest.importorskip("numba")
    from interlace.scheduler.interleave.compiled import ENGINE as fast

    pair = pair_of(seed, layers, costs=costs)
    beside = [0.1 * (k % 7) for k in range(len(pair.nodes))]
    task = task_of(pair.columns, [node.side for node in pair.nodes], pair.node_bytes, beside)
    cap = pair.memory.peak(pair.plain()) + allowance
    orders = PLAIN.orders(task, form, cap)
    assert fast.orders(fast.pack(task), form, cap) == orders
    packed = fast.pack(pair.columns)
    assert [fast.duration_and_sends(packed, each) for each in orders] == [PLAIN.duration_and_sends(pair.columns, each) for each in orders]
    assert [fast.duration_and_times(packed, each) for each in orders] == [PLAIN.duration_and_times(pair.columns, each) for each in orders]


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(st.integers(0, 999), st.integers(1, 4), FORMS)
def test_plans_are_the_same_each_time_and_no_slower_than_in_turn(seed: int, layers: int, form: Form) -> None:
    program = programs(World(pp=2, mp=2, micro_batches=2, layers=layers, seed=seed))[0]
    sides = [[op for op in program.ops if op.role == role and not op.name.startswith("builtin.")] for role in ("backward", "forward")]
    parts = [PartOps(*side) for side in zip("BF", "BF", sides, strict=True)]
    made = [plan_pair(Pair(program, parts, COSTS, work=WHOLE), form) for _ in range(2)]
    assert made[0] == made[1]
    assert made[0].planned_ns <= made[0].serial_ns
    assert made[0].peak_bytes <= made[0].plain_peak_bytes


def peak(pair: Pair, order: list[int]) -> int:
    walk = Walk(pair.node_bytes)
    for node in order:
        walk.run(node)
    return walk.peak


def live_before_each(pair: Pair, order: list[int], listed: set[int]) -> list[int]:
    """Live bytes before each node of those that the search lists, and at the end."""
    walk, live = Walk(pair.node_bytes), []
    for node in order:
        if node in listed:
            live.append(walk.live)
        walk.run(node)
    return [*live, walk.live]


def test_tensors_of_a_vector_live_as_long_as_the_vector_is_read() -> None:
    """Put together they stay until the join has run; a kernel's vector counts by its parts; a shape-only reader holds nothing."""
    program = parse("""program rank=0 world=1 mode=train
#0 %0:float32[64] = pd_op.matmul() forward
#1 %1:float32[64] = pd_op.gelu(%0) forward
#2 %2:vector<float32[64];float32[64]> = builtin.combine(%0,%1) forward
#3 %3:float32[8] = pd_op.relu(%1) forward
#4 %4:float32[128] = pd_op.concat(%2) forward
#5 %5:vector<float32[32];float32[96]> = pd_op.split_with_num(%4) forward
#6 %6:float32[32], %7:float32[96] = builtin.split(%5) forward
#7 %8:float32[96] = pd_op.gelu(%7) forward
#8 %9:vector<float32[64];float32[64]> = builtin.combine(%0,%1) backward
#9 %10:vector<float32[64];float32[64]> = pd_op.concat_grad(%9,%8) backward no_buffer=0
""")
    forward = [op for op in program.ops if op.role == "forward"]
    backward = [op for op in program.ops if op.role == "backward"]
    graph = Graph(program)
    memory = PairMemory(graph, [PartOps("B", "B", backward), PartOps("F", "F", forward)])
    assert memory.start == 96 * 4
    parts = [*graph.storages.numbers(6), *graph.storages.numbers(7)]
    assert {program.ops[k].name: memory.allocs["F", k] for k in (2, 5, 6)} == {
        "builtin.combine": [],
        "pd_op.split_with_num": parts,
        "builtin.split": [],
    }
    whole = memory.peak([("F", op.id) for op in forward])
    assert whole == memory.start + 4 * (64 + 64 + 128)
