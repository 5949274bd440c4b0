"""The order inside one part, by hand: collectives early, other work beneath them, gathered parameters ahead of their reader."""

from __future__ import annotations

from interlace.cost_model import CostModel
from interlace.ir import Graph, Op, Program, parse
from interlace.ir.graph import dependencies, is_topological
from interlace.scheduler.interleave.part_order import early_collectives
from interlace.scheduler.interleave.planner import PartOps

COST = CostModel.from_table({"comm": 1000, "gemm": 1000, "default": 10})
HEAD = "program rank=0 world=2 mode=train\ngroup 7 = 0,1\n"
EXPERTS = HEAD + """#0 %0:float32[4] = pd_op.data() forward
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
"""%3, the weights of what the experts give back, is computed before the tokens are sent, and needed when they are back."""
GATHERS = HEAD + """#0 %0:float32[4] = pd_op.data() forward
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


def ordered(text: str, kind: str = "F", spare: int = 1000) -> list[int]:
    """Ids in the order that is found, which keeps every dependency."""
    made: Program = parse(text)
    ops: list[Op] = [op for op in made.ops if op.name.startswith("pd_op")]
    found = [op.id for op in early_collectives(made, PartOps(kind, kind, ops), COST, spare)]
    assert sorted(found) == [op.id for op in ops]
    assert is_topological(found, dependencies(Graph(made), ops))
    return found


def test_what_is_needed_after_the_experts_is_computed_while_tokens_are_on_their_way() -> None:
    order = ordered(EXPERTS)
    assert order.index(5) < order.index(3) < order.index(6)


def test_a_parameter_is_gathered_beneath_the_products_before_its_reader_and_no_earlier_than_it_has_to() -> None:
    """Due two durations before its reader: the second product of three; what it casts first goes with it."""
    order = [op_id for op_id in ordered(GATHERS) if op_id not in (0, 8)]
    assert order == [4, 5, 9, 6, 7, 10, 13, 11, 12, 14]


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


def test_a_part_without_collectives_keeps_its_order() -> None:
    assert ordered(EXPERTS.replace("all_to_all", "relu").replace(" group=7", "")) == [0, 2, 3, 4, 5, 6, 7, 8, 9]
