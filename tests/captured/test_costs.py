"""Nothing that computes is free or unknown to the cost model, on programs that Paddle built."""

from __future__ import annotations

import pytest

from interlace.cost_model import CostModel, load_profile
from interlace.ir import Graph, parse
from interlace.ir.kinds import HOST_PLACE, NO_KERNEL
from interlace.ir.operation_kinds import is_free
from interlace.ir.program import Op
from tests.captured.build import CASES
from tests.captured.stored import programs_of

GIVEN = """
program rank=0 world=2 mode=train paddle=3.3.1
group 5 = 0,1
#0 %0:bfloat16[4,512,1024]"x" = pd_op.data() forward
#1 %1:bfloat16[1024]"w" = pd_op.data() forward
#2 %2:bool[4,512]"mask" = pd_op.data() forward
#3 %3:float32[4,512]"losses" = pd_op.data() forward
#4 %4:float32[2048,16000]"logits" = pd_op.data() forward
#5 %5:int64[2048,1]"labels" = pd_op.data() forward
#6 %6:bfloat16[4,512,1024], %7:float32[-1] = pd_op.fused_rms_norm_ext(%0, %1) forward
#7 %8:float32[-1] = pd_op.masked_select(%3, %2) forward
#8 %9:float32[] = pd_op.mean(%8) forward
#9 %10:float32[2048,16000], %11:float32[2048,1] = pd_op.c_softmax_with_cross_entropy(%4, %5) forward group=5
#10 %12:float32[2048,16000] = pd_op.c_softmax_with_cross_entropy_grad(%10, %5, %11) backward
#11 %13:bfloat16[4,512,1024], %14:bfloat16[1024] = pd_op.fused_rms_norm_ext_grad(%0, %1, %7, %6) backward
#12 %15:bfloat16[4,512,1024]~13 = pd_op.assign_out_(%6, %13) backward inplace=0:1
"""
"""Operations that the stored programs lack: shapes known only at run time, and kinds that one rank's program has."""


LOWER_BOUND = ("conv2d", "depthwise_conv2d", "pool2d", "max_pool2d_with_index")
"""Kinds outside of what the profile knows, and their gradients: their memory traffic is paid for and said to be a lower bound."""


def unpaid(listed: list[tuple[Op, Graph]], cost: CostModel) -> list[str]:
    """Operations that launch something, are no view and communicate with nobody absent, and cost nothing or nobody knows what."""
    found = []
    for op, graph in listed:
        if op.name in NO_KERNEL or is_free(op) or op.views or op.attrs.get("place") == HOST_PLACE:
            continue
        groups = {group.id: group for group in graph.program.groups}
        alone = op.group in groups and len(groups[op.group].ranks) == 1
        estimate = cost.op_time(op, graph.values, groups)
        if (estimate.dur_ns <= 0 and not alone) or (estimate.how == "unknown" and not op.kind.startswith(LOWER_BOUND)):
            found.append(f"#{op.id} {op.name}: {estimate}")
    return found


@pytest.mark.slow
def test_no_computing_operation_is_free() -> None:
    cost = CostModel(load_profile("h200"))
    graphs = [Graph(program) for name in CASES for program in programs_of(name)]
    assert len({op.name for graph in graphs for op in graph.program.ops}) > 80
    assert unpaid([(op, graph) for graph in graphs for op in graph.program.ops], cost) == []


@pytest.mark.parametrize("kind", ["fused_rms_norm_ext", "fused_rms_norm_ext_grad", "masked_select"])
def test_shapes_of_the_run_are_taken_from_operands(kind: str) -> None:
    """The estimate says so, and is no better than one from another kind."""
    graph = Graph(parse(GIVEN, "given"))
    cost = CostModel(load_profile("h200"))
    op = next(op for op in graph.program.ops if op.kind == kind)
    found = cost.op_time(op, graph.values, {})
    assert "known only at run time: [-1] as [2048]" in found.detail
    assert found.how in ("proxy", "roofline")
    assert found.rel_error >= 1


def test_every_given_operation_costs_something() -> None:
    graph = Graph(parse(GIVEN, "given"))
    assert unpaid([(op, graph) for op in graph.program.ops], CostModel(load_profile("h200"))) == []
