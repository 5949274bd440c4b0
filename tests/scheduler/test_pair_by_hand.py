"""Pairs of a backward and a forward, worked out by hand: the clock, live memory, first orders, and what must keep its order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from interlace.cost_model import GivenCosts
from interlace.cost_model.interference import START_NS
from interlace.ir import Graph, Program, parse
from interlace.scheduler.interleave.allocations import PairMemory
from interlace.scheduler.interleave.clock import Factors, Node, Stretch, columns_of, run_order
from interlace.scheduler.interleave.engine import PLAIN
from interlace.scheduler.interleave.list_schedule import TRIES, Weights, task_of
from interlace.scheduler.interleave.live_bytes import PairBytes, Walk
from interlace.scheduler.interleave.local_search import INITIAL_TEMPERATURE, NEAR, Form, Rules, Search
from interlace.scheduler.interleave.planner import Pair, PairPlan, PartOps, chain_ops, plan_pair
from tests.searches import SOME

# ---------------------------------------------------------------------------------------------------------------- the clock


def duration(nodes: Sequence[Node], order: Sequence[int], stretch: Stretch) -> float:
    """Time of an order, in nanoseconds."""
    return run_order(*columns_of(nodes, stretch), order)[0]


def comm(dur: float, stream: str = "a", deps: tuple[int, ...] = (), side: str = "B", filler: bool = False) -> Node:
    return Node(0, side, dur, "comm", stream, list(deps), filler, side == "F")


def work(dur: float, deps: tuple[int, ...] = (), side: str = "B", category: str = "gemm", filler: bool = False) -> Node:
    return Node(0, side, dur, category, "", list(deps), filler, side == "F")


@pytest.mark.parametrize(
    ("nodes", "stretch", "told"),
    [
        ([comm(100), work(100)], (1.5, 2.0), 175),
        ([comm(100), work(10, (0,))], (1.0, 1.0), 110),
        ([comm(100, "a"), comm(100, "b"), work(100), work(10, (0,))], (1.0, 1.0), 210),
        ([comm(100, "a"), comm(50, "b", (0,)), work(10, (0,))], (1.0, 1.0), 150),
        ([comm(100, "a"), comm(50, "a"), work(120)], (1.0, 1.0), 150),
    ],
    ids=["both slow down", "compute waits", "two share", "communication waits", "one stream in turn"],
)
def test_the_clock_of_one_rank(nodes: list[Node], stretch: tuple[float, float], told: float) -> None:
    """Time of the order. Two that fly at once share; the one that needs another does not fly yet.

    In the fourth the product is through at 110, the rest of the second communication is waited for at the end.
    """
    assert duration(nodes, range(len(nodes)), lambda a, b: (*stretch, False)) == pytest.approx(told)


@pytest.mark.parametrize(("between", "told"), [(0, 60_000), (START_NS, 60_000), (START_NS + 1, 50_000)])
def test_a_product_that_runs_holds_a_communication_up(between: float, told: float) -> None:
    """30 us of communication behind 10 us of work, then some work, and a product of 20 us: as in the simulator (test_simulator_by_hand)."""
    nodes = [work(10_000, category="memory"), comm(30_000, deps=(0,)), work(between, category="memory"), work(20_000)]
    found = duration(nodes, range(4), lambda a, b: (1.5, 1.5, True) if (a, b) == ("gemm", "comm") else (1.0, 1.0, False))
    assert found == pytest.approx(told, abs=50)


# -------------------------------------------------------------------------------------------------------------- live memory

SAVED = """program rank=0 world=1 mode=train
#0 %0:float32[64]!"w" = builtin.parameter() forward
#1 %1:float32[64] = pd_op.matmul(%0) forward
#2 %2:float32[64] = pd_op.gelu(%1) forward
#3 %3:float32[32] = pd_op.matmul(%2) forward
#4 %4:float32[64] = pd_op.gelu_grad(%1,%0) backward
"""
"""What forward saves, %1, is read by the gradient; 64 numbers are 256 bytes."""


def sides(program: Program, **roles: str) -> list[list[Any]]:
    return [[op for op in program.ops if op.role == role and not op.name.startswith("builtin.p")] for role in ("backward", "forward")]


@pytest.mark.parametrize(
    ("more", "order", "peak"),
    [
        ("", "BF", 256 + 256 + 128),
        ("", "FB", 256 + 256 + 256 + 128),
        ("#5 %5:float32[1] = pd_op.mean(%1) backward\n", "BF", 256 + 256 + 256 + 128),
    ],
    ids=["backward first", "forward first", "another chunk reads it too"],
)
def test_what_a_pair_holds(more: str, order: str, peak: int) -> None:
    """What backward reads is there from the start and goes; what forward saves stays; the weight is not counted.

    A backward operation that is not of this pair keeps what it reads.
    """
    program = parse(SAVED + more)
    backward, forward = sides(program)
    memory = PairMemory(Graph(program), [PartOps("B", "B", backward[:1]), PartOps("F", "F", forward)])
    items = {"B": [("B", op.id) for op in backward[:1]], "F": [("F", op.id) for op in forward]}
    listed = items[order[0]] + items[order[1]]
    assert memory.start == 256
    assert memory.peak(listed) == peak
    walk = Walk(PairBytes(memory, [[item] for item in listed], listed))
    for node in range(len(listed)):
        walk.run(node)
    assert walk.peak == peak


def test_a_sum_into_a_buffer_that_lasts_is_no_memory_of_the_pair() -> None:
    program = parse(SAVED + "#5 %5:float32[64]~0! = pd_op.add_(%0, %4) backward inplace=0:0\n")
    backward, _ = sides(program)
    memory = PairMemory(Graph(program), [PartOps("B", "B", backward)])
    assert memory.start == 256
    assert memory.peak([("B", op.id) for op in backward]) == 256 + 256


def test_a_view_does_not_make_its_storage_smaller() -> None:
    program = parse(SAVED.replace("#3 %3", "#9 %9:float32[8]~2 = pd_op.slice(%2) forward views=0:0\n#3 %3"))
    _, forward = sides(program)
    memory = PairMemory(Graph(program), [PartOps("F", "F", forward)])
    assert memory.peak([("F", op.id) for op in forward]) == 256 + 256 + 128


def test_what_an_operation_that_nobody_needs_reads_is_held_for_it() -> None:
    """Taking a vector apart, whose tensors nobody reads, comes last in the order: they live through the large product."""
    program = parse("""program rank=0 world=1 mode=train
#0 %0:float32[64] = pd_op.full() forward
#1 %1:vector<float32[32];float32[32]> = pd_op.split_with_num(%0) forward
#2 %2:float32[32], %3:float32[32] = builtin.split(%1) forward
#3 %4:float32[256] = pd_op.full() forward
""")
    forward = list(program.ops)
    memory = PairMemory(Graph(program), [PartOps("F", "F", forward)])
    nodes = [[("F", op_id)] for op_id in (0, 1, 3)]
    order = [item for items in nodes for item in items] + [("F", 2)]
    walk = Walk(PairBytes(memory, nodes, order))
    for node in range(len(nodes)):
        walk.run(node)
    assert walk.peak == memory.peak(order) == 256 + 1024


# ------------------------------------------------------------------------------------------------------------- first orders


class Bytes(SimpleNamespace):
    """A table of storages made by hand: `allocs` and `reads` by node."""

    def __init__(self, size: list[int], gives: list[list[int]], reads: list[list[int]]) -> None:
        readers = [[k for k, each in enumerate(reads) if s in each] for s in range(len(size))]
        givers = [[k for k, each in enumerate(gives) if s in each] for s in range(len(size))]
        none = [False] * len(size)
        super().__init__(
            size=size, allocs=gives, reads=reads, allocators=givers, readers=readers, live_before=none, live_after=list(none), start=0
        )


def no_bytes(nodes: list[Node]) -> Any:
    return Bytes([], [[] for _ in nodes], [[] for _ in nodes])


def first_order(
    nodes: list[Node], form: Form, stretch: Any = None, table: Any = None, cap: int = 1 << 40, weights: Weights = TRIES[0]
) -> list[int]:
    stretch = stretch or (lambda a, b: (1.0, 1.0, False))
    columns, sides = columns_of(nodes, stretch), [node.side for node in nodes]
    return PLAIN.orders(task_of(columns, sides, table or no_bytes(nodes), [0.0] * len(nodes)), form, cap, [weights])[0]


def rough(category: str, beside: str) -> Factors:
    """`rough` hides what `gemm` hides, and takes three times as long beside it."""
    return (3.0, 1.0, False) if category == "rough" else (1.0, 1.0, False)


@pytest.mark.parametrize(("form", "order"), [("dx-first", [0, 1, 2, 4, 3]), ("mixed", [0, 1, 3, 2, 4])])
def test_dx_first_goes_on_with_the_chain_and_mixed_takes_what_hides_most(form: Form, order: list[int]) -> None:
    """Beside a collective the chain may go on with what is slowed down a lot, or a filler may run that is not."""
    chain = [work(10), comm(100, deps=(0,)), work(50, category="rough"), work(50, deps=(0,), filler=True), work(10, (1, 2))]
    assert first_order(chain, form, rough) == order


@pytest.mark.parametrize("form", ["dx-first", "mixed"])
def test_communication_that_is_ready_goes_first(form: Form) -> None:
    assert first_order([comm(100), work(10, (0,)), work(40, side="F")], form)[0] == 0
    nodes = [work(10), comm(100, deps=(0,)), work(10, (1,)), comm(30, "b", side="F"), work(40, (3,), side="F")]
    assert first_order(nodes, "mixed")[:2] == [3, 0]


def test_in_dx_first_no_forward_runs_before_the_chain_is_through() -> None:
    nodes = [work(10), comm(100, deps=(0,)), work(10, (1,)), work(40, side="F"), work(40, (3,), side="F")]
    assert first_order(nodes, "dx-first") == [0, 1, 2, 3, 4]
    mixed = first_order(nodes, "mixed")
    assert mixed.index(3) < mixed.index(2)


def test_what_leaves_no_room_for_the_fillers_held_waits_for_them() -> None:
    """The filler takes 40 and frees 50; the chain's next takes 40 and keeps them: 50 + 40 + 40 is over the cap of 100."""
    nodes = [work(10), work(10, (0,), filler=True), work(10, (0,)), work(10, (2,))]
    table = Bytes([50, 40, 40], [[0], [1], [2], []], [[0], [0, 1], [2], [2]])
    assert first_order(nodes, "dx-first", table=table, cap=100) == [0, 1, 2, 3]
    assert first_order(nodes, "dx-first", table=table, cap=200) == [0, 2, 3, 1]


EARLY = Weights(early=True)


def test_a_filler_that_communication_waits_for_comes_before_the_chain() -> None:
    """A gradient is reduced while the chain goes on; a filler that nothing waits for comes last."""
    nodes = [work(10), work(10, (0,)), work(10, (1,)), work(10, (0,), filler=True), comm(100, "dp", (3,), filler=True)]
    nodes.append(work(10, (0,), filler=True))
    assert first_order(nodes, "dx-first") == [0, 1, 2, 3, 4, 5]
    assert first_order(nodes, "dx-first", weights=EARLY) == [0, 3, 4, 1, 2, 5]


def test_the_chain_goes_on_where_it_starts_communication() -> None:
    nodes = [work(10), work(10, (0,)), comm(50, deps=(1,)), work(10, (2,)), work(10, (0,), filler=True)]
    nodes.append(comm(100, "dp", (4,), filler=True))
    assert first_order(nodes, "dx-first", weights=EARLY) == [0, 1, 2, 4, 5, 3]


def test_the_filler_of_the_first_communication_comes_first() -> None:
    """Its group communicates in this order."""
    nodes = [work(10), work(10, (0,), filler=True), work(10, (0,), filler=True)]
    nodes += [comm(30, "dp", (2,), filler=True), comm(30, "dp", (1,), filler=True)]
    assert first_order(nodes, "dx-first", weights=EARLY) == [0, 2, 3, 1, 4]


def test_where_all_wait_for_communication_the_one_that_waits_least_is_next() -> None:
    """The chain for the rest of 50, the filler for 100."""
    nodes = [work(10), comm(50, deps=(0,)), work(10, (1,)), work(10, (0,), filler=True), comm(100, "dp", (3,), filler=True)]
    nodes += [work(10, (4,), filler=True), comm(10, "dp", (5,), filler=True)]
    assert first_order(nodes, "dx-first", weights=EARLY) == [0, 1, 3, 4, 2, 5, 6]


def test_without_such_fillers_it_is_not_tried() -> None:
    nodes = [work(10), comm(50, deps=(0,)), work(10, (1,)), work(10, (0,), filler=True)]
    columns, sides = columns_of(nodes, lambda a, b: (1.0, 1.0, False)), [node.side for node in nodes]
    task = task_of(columns, sides, no_bytes(nodes), [0.0] * len(nodes))
    assert PLAIN.orders(task, "dx-first", 1 << 40, [EARLY]) == []
    assert len(PLAIN.orders(task, "dx-first", 1 << 40)) == len(TRIES) - 1


# --------------------------------------------------------------------------------------------------------- the local search


def searched(nodes: list[Node], form: Form, order: list[int], seed: int = 7, work_: int = 3_000, **more: Any) -> list[int]:
    table, cap = more.get("table", no_bytes(nodes)), more.get("cap", 1 << 40)
    return Search(Rules(nodes, form), more.get("stretch", lambda a, b: (1.0, 1.0, False)), table, cap, order, seed).run(work_)


def layers(count: int, side: str, start: int) -> list[Node]:
    """Product, collective on the side's own stream, activation; in backward a filler besides."""
    nodes: list[Node] = []
    last: tuple[int, ...] = ()
    for _ in range(count):
        at = start + len(nodes)
        nodes += [work(30, last, side), comm(50, "mp", (at,), side), work(10, (at + 1,), side)]
        nodes += [work(30, (at,), side, filler=True)] if side == "B" else []
        last = (at + 2,)
    return nodes


@pytest.mark.parametrize("form", ["dx-first", "mixed"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_search_keeps_every_need_and_the_form(form: Form, seed: int) -> None:
    backward = layers(3, "B", 0)
    nodes = backward + layers(3, "F", len(backward))
    found = searched(nodes, form, list(range(len(nodes))), seed)
    place = {node: k for k, node in enumerate(found)}
    assert sorted(found) == list(range(len(nodes)))
    assert all(place[dep] < place[k] for k, node in enumerate(nodes) for dep in node.deps)
    chain = [place[k] for k, node in enumerate(nodes) if node.side == "B" and not node.filler]
    forward = [place[k] for k, node in enumerate(nodes) if node.side == "F"]
    assert (max(chain) < min(forward)) == (form == "dx-first")
    assert duration(nodes, found, lambda a, b: (1.0, 1.0, False)) < duration(nodes, range(len(nodes)), lambda a, b: (1.0, 1.0, False))


def test_communication_of_one_stream_keeps_its_order_in_a_search() -> None:
    """Two that wait for nothing: the second one first would hide more, but the other ranks issue them in program order."""
    nodes = [comm(100), comm(10), work(50, (1,)), work(50, (2,)), work(5, (0,))]
    for seed in range(5):
        found = searched(nodes, "mixed", list(range(5)), seed, 1_000)
        assert found.index(0) < found.index(1)


def test_a_job_without_kernels_is_not_searched() -> None:
    """There is no node to move."""
    program = parse(SAVED)
    pair = Pair(program, [PartOps("F", "F", program.ops[:1])], GivenCosts({}), work=100)
    assert pair.nodes == []
    assert plan_pair(pair, "mixed").order == (("F", 0),)


class Watched(Search):
    """Remembers the least time of all orders it kept."""

    least = float("inf")

    def _try(self, first: int, window: list[int], least: float) -> bool:
        kept = super()._try(first, window, least)
        self.least = min(self.least, self.time)
        return kept


def test_a_search_gives_the_best_order_it_came_by_within_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every seed: no slower than where it began or any order on the way, though much slower ones are kept; the cap holds at every node."""
    monkeypatch.setattr("interlace.scheduler.interleave.local_search.INITIAL_TEMPERATURE", 3.0)
    backward = layers(3, "B", 0)
    nodes = backward + layers(3, "F", len(backward))
    gives = [[k] for k in range(len(nodes))]
    reads = [[k, *node.deps] for k, node in enumerate(nodes)]
    table = Bytes([10] * len(nodes), gives, reads)
    plain = Rules(nodes, "mixed").full(Rules(nodes, "mixed").listed(range(len(nodes))))
    cap = walked(table, nodes, plain)
    times = []
    for seed in range(12):
        search = Watched(Rules(nodes, "mixed"), lambda a, b: (1.2, 1.5, False), table, cap, plain, seed)
        before = search.time
        found = search.run(200 + 50 * seed)
        times.append(duration(nodes, found, lambda a, b: (1.2, 1.5, False)))
        assert walked(table, nodes, found) <= cap
        assert times[-1] <= min(before, search.least) + NEAR
    assert len(set(times)) > 1


def test_a_search_draws_the_same_moves_each_time() -> None:
    backward = layers(4, "B", 0)
    nodes = backward + layers(4, "F", len(backward))
    for seed in range(3):
        assert searched(nodes, "mixed", list(range(len(nodes))), seed, 600) == searched(nodes, "mixed", list(range(len(nodes))), seed, 600)


def test_orders_that_are_a_little_slower_are_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plain descent reaches over the same seeds is worse in sum."""
    backward = layers(4, "B", 0)
    nodes = backward + layers(4, "F", len(backward))
    sums = []
    for temperature in (INITIAL_TEMPERATURE, 0.0):
        monkeypatch.setattr("interlace.scheduler.interleave.local_search.INITIAL_TEMPERATURE", temperature)
        found = [searched(nodes, "mixed", list(range(len(nodes))), seed, 4_000) for seed in range(6)]
        sums.append(sum(duration(nodes, order, lambda a, b: (1.0, 1.0, False)) for order in found))
    assert sums[0] < sums[1]


def walked(table: Any, nodes: list[Node], order: list[int]) -> int:
    walk = Walk(table)
    for node in order:
        walk.run(node)
    return walk.peak


# ------------------------------------------------------------------------------------------------ what must keep its order

HEAD = """program rank=0 world=2 mode=train
pipeline stage=0 of 1 micro_batches=2 chunks=1 schedule=accumulate
group 7 = 0,1
group 3 = 0,1
group 4 = 0,1
#0 %0:float32[8]"x" = pd_op.data() forward
#1 %1:float32[8]!"s" = builtin.parameter() forward
"""
TABLES = [
    GivenCosts({"comm": 400, "gemm": 50, "default": 10}),
    GivenCosts({"comm": 40, "gemm": 50, "default": 60}),
    GivenCosts({"comm": 100, "p2p": 1, "gemm": 300, "default": 1}),
]


def numbered(lines: str) -> str:
    """Lines of a program with numbers from 10 on."""
    return "".join(f"#{k} {line}\n" for k, line in enumerate(filter(None, lines.splitlines()), 10))


def orders(forward: str, backward: str) -> Iterator[list[str]]:
    """A pair's operations as `side.kind`, for both forms and several costs."""
    program = parse(HEAD + numbered(f"{forward}\n{backward}"))
    kinds = {op.id: op.kind for op in program.ops}
    both = [
        PartOps(kind, kind, [op for op in program.ops if op.role == role and op.id >= 10])
        for kind, role in (("B", "backward"), ("F", "forward"))
    ]
    for form in ("dx-first", "mixed"):
        for costs in TABLES:
            plan = plan_pair(Pair(program, both, costs, work=SOME), form, extra_bytes=1 << 30)  # type: ignore[arg-type]
            yield [f"{side}.{kinds[op_id]}" for side, op_id in plan.order]


WAITS = """
%30:float32[8] = pd_op.all_reduce(%0) backward group=7
%31:float32[8] = pd_op.tanh(%30) backward
{}
%33:float32[8] = pd_op.all_reduce(%31) backward group=7
%34:float32[8] = pd_op.relu(%33) backward
{}
pd_op.send_v2(%34) backward group=3 {{"peer":1}}
"""
"""Backward waits for a collective before and behind the place of interest, so that forward would gladly go ahead."""


def test_forward_draws_behind_backwards_last_draw() -> None:
    draw = "%{}:float32[8] = pd_op.dropout(%{}) backward"
    forward = "%10:float32[8] = pd_op.dropout(%0) forward\n%11:float32[8] = pd_op.matmul(%10) forward"
    for backward in (WAITS.format(draw.format(32, 31), draw.format(35, 34)), WAITS.format(draw.format(32, 31), "")):
        for order in orders(forward, backward):
            last = max(k for k, each in enumerate(order) if each == "B.dropout")
            assert order.index("F.dropout") > last


WRITE, READ = "%{}:float32[8]~1! = pd_op.add_(%1, %{}) {} inplace=0:0", "%{}:float32[8] = pd_op.gelu(%1, %{}) {}"


@pytest.mark.parametrize(("first", "second"), [(WRITE, READ), (READ, WRITE), (WRITE, WRITE)], ids=["read", "overwrite", "write twice"])
def test_state_is_touched_by_backward_first(first: str, second: str) -> None:
    """Forward of the later micro-batch reads what backward wrote, and does not overwrite what backward still reads."""
    forward = second.format(10, 0, "forward") + "\n%11:float32[8] = pd_op.matmul(%0) forward"
    names = {WRITE: "add", READ: "gelu"}
    for order in orders(forward, WAITS.format("", first.format(35, 34, "backward"))):
        assert order.index(f"B.{names[first]}") < order.index(f"F.{names[second]}")


def test_state_that_both_only_read_holds_nobody_up() -> None:
    forward = READ.format(10, 0, "forward") + "\n%11:float32[8] = pd_op.matmul(%0) forward"
    found = list(orders(forward, WAITS.format("", READ.format(35, 34, "backward"))))
    assert any(order.index("F.gelu") < order.index("B.gelu") for order in found)


MESSAGES = (
    '%10:float32[8] = pd_op.recv_v2() forward group={} {{"peer":0}}\n%11:float32[8] = pd_op.relu(%10) forward\n'
    'pd_op.send_v2(%11) forward group={} {{"peer":1}}',
    '%30:float32[8] = pd_op.recv_v2() backward group={} {{"peer":1}}\n%31:float32[8] = pd_op.matmul(%30) backward\n'
    '%32:float32[8] = pd_op.matmul(%31) backward\npd_op.send_v2(%32) backward group={} {{"peer":0}}',
)


def test_forwards_receives_stand_in_front_of_backwards_sends() -> None:
    """The neighbour sends first, with a send that waits for its receiver."""
    for order in orders(MESSAGES[0].format(3, 4), MESSAGES[1].format(4, 7)):
        assert order.index("F.recv_v2") < order.index("B.send_v2")


def test_messages_of_a_group_that_carries_both_directions_keep_paddles_order() -> None:
    """Two stages with chunks: backward's receive, forward's, backward's send, forward's."""
    for order in orders(MESSAGES[0].format(3, 3), MESSAGES[1].format(3, 3)):
        assert [each for each in order if "_v2" in each] == ["B.recv_v2", "F.recv_v2", "B.send_v2", "F.send_v2"]


# ----------------------------------------------------------------------------------------------------------------- options


def planned(costs: GivenCosts, form: Form, **options: Any) -> PairPlan:
    from tests.scheduler.sides import Sides, side_program

    program = side_program(Sides())
    inner = [op for op in program.ops if not op.name.startswith("builtin.") and op.name != "pd_op.data"]
    both = [PartOps(kind, kind, [op for op in inner if op.role == role]) for kind, role in (("B", "backward"), ("F", "forward"))]
    return plan_pair(Pair(program, both, costs, work=SOME), form, **options)


def test_memory_beyond_the_plain_order_is_used_where_it_is_allowed_and_only_there() -> None:
    """Mixed hides more of 100 ns with 64 bytes than with none."""
    costs = GivenCosts({"comm": 100, "gemm": 50, "default": 10}, {("gemm", "comm"): (1.3, 2.0)})
    tight, ample = (planned(costs, "mixed", extra_bytes=extra) for extra in (0, 64))
    assert tight.peak_bytes <= tight.plain_peak_bytes < ample.peak_bytes <= tight.plain_peak_bytes + 64
    assert ample.planned_ns < tight.planned_ns < tight.serial_ns


def test_a_pair_of_more_operations_than_allowed_stays_in_turn() -> None:
    costs = GivenCosts({"comm": 100, "gemm": 50, "default": 10})
    count = len(planned(costs, "mixed").order)
    assert planned(costs, "mixed", max_ops=count - 1).why_plain == "too-large"
    assert planned(costs, "mixed", max_ops=count).why_plain == ""


def test_the_same_pair_is_planned_the_same_each_time() -> None:
    costs = GivenCosts({"comm": 100, "gemm": 50, "default": 10}, {("gemm", "comm"): (1.3, 2.0)})
    assert planned(costs, "mixed", extra_bytes=640) == planned(costs, "mixed", extra_bytes=640)


def test_the_chain_is_what_collectives_of_activations_and_draws_wait_for() -> None:
    """dX and its sum are of the chain, dW and its sum over ranks are not; a draw is, since draws keep their order."""
    backward = """
%30:float32[8,8] = pd_op.matmul(%0) backward
%31:float32[8,8] = pd_op.all_reduce(%30) backward group=7
%32:float32[8,8] = pd_op.gelu_grad(%31) backward
%33:float32[8,8] = pd_op.dropout(%0) backward
%34:float32[8] = pd_op.matmul(%33) backward
%35:float32[8] = pd_op.all_reduce(%34) backward group=3
%36:float32[8]~1! = pd_op.add_(%1, %35) backward inplace=0:0
"""
    program = parse(HEAD + numbered(backward))
    assert chain_ops(Graph(program), [op for op in program.ops if op.role == "backward"]) == {10, 11, 13}


# ------------------------------------------------------------------------------------------------ messages that leave together

TWO_MESSAGES = """program rank=1 world=2 mode=train
pipeline stage=1 of 2 micro_batches=2 chunks=1 schedule=1F1B
group 3 = 0,1
group 4 = 0,1
#0 %0:float32[4] = pd_op.recv_v2() forward group=3
#1 %1:float32[4] = pd_op.matmul(%0) forward
#2 %2:float32[4] = pd_op.relu(%1) backward
#3 pd_op.send_v2(%2) backward group=4
#4 %3:float32[4] = pd_op.matmul(%1) backward
#5 %4:float32[4] = pd_op.matmul(%3) backward
#6 pd_op.send_v2(%4) backward group=4
"""


def order_of_pair(text: str) -> list[int]:
    """Ids in the order of a pair of backward and forward."""
    made = parse(text)
    parts = [PartOps(kind, kind, [op for op in made.ops if op.role == role]) for kind, role in (("B", "backward"), ("F", "forward"))]
    plan = plan_pair(Pair(made, parts, GivenCosts({"comm": 10, "gemm": 100, "default": 10}), work=SOME), "dx-first", 1000)
    return [op_id for _, op_id in plan.order]


def test_messages_to_one_neighbour_leave_together_and_forward_receives_just_before() -> None:
    """The first message is ready long before the last; a receive in front of it would wait beside the products."""
    order = order_of_pair(TWO_MESSAGES)
    assert order.index(5) < order.index(0) < order.index(3) < order.index(6)


# ------------------------------------------------------------------------------------------ where the local search is worth it

HIDDEN = """program rank=0 world=2 mode=train
pipeline stage=0 of 1 micro_batches=2 chunks=1 schedule=1F1B
group 3 = 0,1
#0 %0:float32[4] = pd_op.relu() backward
#1 %1:float32[4] = pd_op.all_reduce(%0) backward group=3
#2 %2:float32[4] = pd_op.matmul(%1) backward
#3 %3:float32[4] = pd_op.matmul() forward
#4 %4:float32[4] = pd_op.matmul(%3) forward
"""


@pytest.mark.parametrize(("comm_ns", "searches"), [(100, 0), (201, 0), (202, 0), (205, 1), (300, 1)])
def test_jobs_are_searched_where_communication_shows(monkeypatch: pytest.MonkeyPatch, comm_ns: int, searches: int) -> None:
    """The collective runs under two products of 100 ns, and whatever is longer shows; up to 1 % of the job is not worth a search."""
    runs = list[int]()

    def run(search: Search, work: int) -> list[int]:
        runs.append(work)
        return search.rules.full(search.order)

    monkeypatch.setattr(Search, "run", run)
    made = parse(HIDDEN)
    parts = [PartOps(kind, kind, [op for op in made.ops if op.role == role]) for kind, role in (("B", "backward"), ("F", "forward"))]
    costs = GivenCosts({"comm": comm_ns, "gemm": 100, "default": 0})
    plan_pair(Pair(made, parts, costs, work=SOME), "mixed", 1000)
    assert len(runs) == searches
