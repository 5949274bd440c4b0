"""The order inside one part, by hand: collectives early, other work beneath them, gathered parameters ahead of their reader."""

from __future__ import annotations

import re

from interlace.cost_model import GivenCosts
from interlace.ir import Graph, Op, Program, parse
from interlace.ir.graph import dependencies, is_topological
from interlace.scheduler.interleave.gathers import may_start_early
from interlace.scheduler.interleave.part_order import EarlyCollectives
from interlace.scheduler.interleave.planner import EARLY, Pair, PartOps, plan_pair

COST = GivenCosts({"comm": 1000, "gemm": 1000, "reshape": 0, "default": 10})
HEAD = "program rank=0 world=2 mode=train\ngroup 7 = 0,1\n"
EXPERTS = (
    HEAD
    + """#0 %0:float32[4] = pd_op.data() forward
#1 %1:float32[4]!"w" = builtin.parameter() forward
#2 %2:float32[4] = pd_op.relu(%0) forward
#3 %3:float32[4] = pd_op.matmul(%2, %1) forward
#4 %4:float32[4] = pd_op.matmul(%2, %0) forward
#5 %5:float32[4] = pd_op.all_to_all(%4) forward group=7
#6 %6:float32[4] = pd_op.matmul(%5, %1) forward
#7 %7:float32[4] = pd_op.all_to_all(%6) forward group=7
#8 %8:float32[4] = pd_op.multiply(%7, %3) forward
#9 %9:float32[4] = pd_op.all_to_all(%8) forward group=7
"""
)
"""%3, the weights of what the experts give back, is computed before the tokens are sent, and needed when they are back."""
GATHERS = (
    HEAD
    + """#0 %0:float32[4] = pd_op.data() forward
#1 %1:float32[4]!"a" = builtin.parameter() forward
#2 %2:float32[4]!"b" = builtin.parameter() forward
#3 %3:float32[4]!"c" = builtin.parameter() forward
#4 %4:float32[4] = pd_op.all_gather(%1) forward group=7
#5 %5:float32[4] = pd_op.matmul(%0, %4) forward
#6 %6:float32[4] = pd_op.matmul(%5, %4) forward
#7 %7:float32[4] = pd_op.matmul(%6, %4) forward
#8 %8:float32[4] = pd_op.cast(%2) forward
#9 %9:float32[4] = pd_op.all_gather(%8) forward group=7
#10 %10:float32[4] = pd_op.matmul(%7, %9) forward
#11 %11:float32[4] = pd_op.matmul(%10, %9) forward
#12 %12:float32[4] = pd_op.matmul(%11, %9) forward
#13 %13:float32[4] = pd_op.all_gather(%3) forward group=7
#14 %14:float32[4] = pd_op.matmul(%12, %13) forward
"""
)


def ordered(text: str, kind: str = "F", spare: int = 1000) -> list[int]:
    """Ids in the order that is found, which keeps every dependency."""
    made: Program = parse(text)
    ops: list[Op] = [op for op in made.ops if op.name.startswith("pd_op")]
    found = [op.id for op in EarlyCollectives(made, PartOps(kind, kind, ops), COST, spare).fastest(EARLY)]
    assert sorted(found) == sorted(op.id for op in ops)
    assert is_topological(found, dependencies(Graph(made), ops))
    return found


def test_what_is_needed_after_the_experts_is_computed_while_tokens_are_on_their_way() -> None:
    order = ordered(EXPERTS)
    assert order.index(5) < order.index(3) < order.index(6)


def test_a_parameter_is_gathered_beneath_the_products_before_its_reader_and_no_earlier_than_it_has_to() -> None:
    """Due two durations before its reader: the second product of three; what it casts first goes with it."""
    order = [op_id for op_id in ordered(GATHERS) if op_id not in (0, 8)]
    assert order == [4, 5, 9, 6, 7, 10, 13, 11, 12, 14]


def test_what_a_gathering_needs_comes_before_it() -> None:
    """Nothing but the gathering needs the cast, so that it has no turn of its own."""
    order = ordered(re.sub(r"matmul\((%[056]), %4\)", r"matmul(\1, %0)", GATHERS))
    assert order.index(8) < order.index(9) < order.index(6)


def test_parameters_on_one_stream_are_gathered_in_time_one_after_another() -> None:
    """All three are needed at once: the first of them is due six durations earlier."""
    products = "".join(f"#{k} %{k}:float32[4] = pd_op.matmul(%{k - 1 if k > 10 else 0}, %0) forward\n" for k in range(10, 18))
    gathered = "".join(f"#{17 + k} %{17 + k}:float32[4] = pd_op.all_gather(%{k}) forward group=7\n" for k in (1, 2, 3))
    order = ordered(GATHERS[: GATHERS.index("#4")] + products + gathered + "#21 %21:float32[4] = pd_op.add(%17, %18, %19, %20) forward\n")
    assert [op_id for op_id in order if op_id] == [10, 11, 18, 12, 13, 19, 14, 15, 20, 16, 17, 21]


def test_many_short_casts_before_a_chain_of_gathers_do_not_bind_the_last() -> None:
    """Each gather follows the one before, so all casts are before the last; its own takes less time than it does."""
    cast = GivenCosts({"comm": 1000, "gemm": 1000, "cast": 600, "default": 10})
    ops = [f'#{k} %{k}:float32[4]!"p{k}" = builtin.parameter() forward' for k in range(1, 5)]
    ops += ["#5 %5:float32[4] = pd_op.data() forward"]
    for k in range(4):
        at, last = 6 + 4 * k, 5 if not k else 9 + 4 * (k - 1)
        ops += [
            f"#{at} %{at}:float32[4] = pd_op.cast(%{k + 1}) forward",
            f"#{at + 1} %{at + 1}:float32[4] = pd_op.all_gather(%{at}) forward group=7",
            f"#{at + 2} %{at + 2}:float32[4] = pd_op.matmul(%{last}, %{at + 1}) forward",
            f"#{at + 3} %{at + 3}:float32[4] = pd_op.matmul(%{at + 2}, %5) forward",
        ]
    made = parse(HEAD + "\n".join(ops) + "\n")
    pair = Pair(made, [PartOps("F", "F", [op for op in made.ops if op.name.startswith("pd_op")])], cast)
    early = may_start_early(pair.nodes, pair.graph.ops)
    assert [pair.nodes[k].op for k, may in enumerate(early) if may] == [7, 11, 15, 19]


def test_in_a_job_of_two_parts_a_parameter_is_gathered_beside_the_end_of_the_other() -> None:
    """And not while backward still holds most: there is no room then for what is gathered."""
    text = (
        HEAD
        + """#0 %0:float32[4] = pd_op.data() forward
#1 %1:float32[64]!"a" = builtin.parameter() forward
#2 %2:float32[64] = pd_op.all_gather(%1) forward group=7
#3 %3:float32[64] = pd_op.matmul(%0, %2) forward
#4 %4:float32[64] = pd_op.matmul(%3, %0) forward
#5 %5:float32[64] = pd_op.matmul(%4, %0) backward
#6 %6:float32[64] = pd_op.matmul(%5, %3) backward
#7 %7:float32[2] = pd_op.matmul(%6, %0) backward
#8 %8:float32[2] = pd_op.matmul(%7, %0) backward
#9 %9:float32[2] = pd_op.matmul(%8, %0) backward
"""
    )
    made = parse(text)
    parts = [
        PartOps(kind, kind, [op for op in made.ops if op.role == role and op.id > 1])
        for kind, role in (("B", "backward"), ("F", "forward"))
    ]
    plan = plan_pair(Pair(made, parts, COST), "dx-first")
    order = [op_id for _, op_id in plan.order]
    assert order.index(6) < order.index(2) < order.index(9)
    assert plan.peak_bytes <= plan.plain_peak_bytes
    assert plan.planned_ns == plan.serial_ns - 1000


def test_gathers_of_a_job_keep_the_place_for_which_there_is_memory() -> None:
    """Started as soon as they can, as they wait for nothing but each other, all gathered parameters would be held at once."""
    ops = ["#0 %0:float32[4] = pd_op.data() forward"]
    ops += [f'#{k} %{k}:float32[64]!"p{k}" = builtin.parameter() forward' for k in range(1, 7)]
    at = 7
    for role in ("forward", "backward"):
        for k in range(1, 7):
            last = 0 if at == 7 else at - 1
            ops += [
                f"#{at} %{at}:float32[256] = pd_op.all_gather(%{k}) {role} group=7",
                f"#{at + 1} %{at + 1}:float32[4] = pd_op.matmul(%{last}, %{at}) {role}",
            ]
            at += 2
    made = parse(HEAD + "\n".join(ops) + "\n")
    parts = [
        PartOps(kind, kind, [op for op in made.ops if op.role == role and op.id > 6])
        for kind, role in (("B", "backward"), ("F", "forward"))
    ]
    pair = Pair(made, parts, COST)
    cap = pair.memory.peak(pair.plain()) + 1024  # room for one more
    listed, eager = pair._firsts("dx-first", cap)
    least, soonest = (min(pair.memory.peak(pair.spread(order)) for order in orders) for orders in (listed, eager))
    assert least <= cap < soonest
    plan = plan_pair(pair, "dx-first", extra_bytes=1024)
    assert plan.peak_bytes <= cap
    assert plan.planned_ns == plan.serial_ns - 6 * 1000  # one after another, each gather is waited for


def test_a_collective_of_what_takes_long_to_compute_starts_as_early_as_it_can() -> None:
    """Unlike a gathered parameter: what it needs comes first of all, however far its reader is."""
    products = "".join(f"#{k} %{k}:float32[4] = pd_op.matmul(%{k - 1 if k > 10 else 0}, %1) forward\n" for k in range(10, 16))
    order = ordered(
        EXPERTS[: EXPERTS.index("#2")]
        + products
        + """#20 %20:float32[4] = pd_op.matmul(%0, %1) forward
#21 %21:float32[4] = pd_op.all_to_all(%20) forward group=7
#22 %22:float32[4] = pd_op.add(%15, %21) forward
#23 %23:float32[4] = pd_op.all_to_all(%22) forward group=7
"""
    )
    assert [op_id for op_id in order if op_id][:3] == [20, 21, 10]


def test_an_order_that_gains_nothing_is_not_taken() -> None:
    """What the collective does not need stands in front of it, and takes no time."""
    text = EXPERTS.replace("#3 %3:float32[4] = pd_op.matmul(%2, %1)", "#3 %3:float32[4] = pd_op.reshape(%2)")
    assert ordered(text) == [0, 2, 3, 4, 5, 6, 7, 8, 9]


def test_memory_bounds_what_is_put_off() -> None:
    """What the weights are computed from is large, and so are the tokens that arrive: put off, both are there at once."""
    text = EXPERTS.replace("%2:float32[4]", "%2:float32[400]").replace("%5:float32[4]", "%5:float32[400]")
    assert ordered(text, spare=0).index(3) < ordered(text, spare=0).index(5)
    assert ordered(text, spare=4000).index(3) > ordered(text, spare=4000).index(5)


def test_weight_gradients_keep_their_places() -> None:
    """A whole backward: what neither a send nor a collective needs follows what came before it in program order."""
    text = EXPERTS.replace(") forward", ") backward").replace("#9 %9:float32[4] = pd_op.all_to_all(%8) backward group=7\n", "")
    order = ordered(text.replace("() backward", "() forward"), kind="B")
    assert order.index(3) < order.index(5)


def test_weight_gradients_follow_what_they_need_where_that_is_put_off() -> None:
    """One needs the product that is put off; another needs nothing, and keeps what comes before it in program order there."""
    text = EXPERTS.replace(") forward", ") backward").replace("() backward", "() forward")
    text = text.replace("#4 ", "#20 %20:float32[4] = pd_op.matmul(%3, %0) backward\n#4 ")
    text = text.replace("#8 ", "#21 %21:float32[4] = pd_op.matmul(%0, %0) backward\n#8 ")
    order = ordered(text, kind="B")
    assert order.index(5) < order.index(3) < order.index(20)
    assert order.index(7) < order.index(21)


def test_a_part_without_collectives_keeps_its_order() -> None:
    assert ordered(EXPERTS.replace("all_to_all", "relu").replace(" group=7", "")) == [0, 2, 3, 4, 5, 6, 7, 8, 9]
