"""Names of layers, by hand: parameters that are gathered before they are read, and collectives of the optimizer."""

from __future__ import annotations

from interlace.bridge.layers import LayerNames, name_layers
from interlace.ir import parse

NAMES = LayerNames({"q.w_0": "blocks.0.q", "k.w_0": "blocks.0.k"})
PATHS = {"#4 ": "/Net/Block/Linear/", "#7 ": "/Net/Block/Linear_1/"}
PROGRAM = """program rank=0 world=2 mode=train
group 7 = 0,1
#0 %0:float32[4] = pd_op.data() forward
#1 %1:float32[2]!"q.w_0" = builtin.parameter() forward
#2 %2:float32[2]!"k.w_0" = builtin.parameter() forward
#3 %3:float32[4] = pd_op.all_gather(%1) forward group=7
#4 %4:float32[4] = pd_op.matmul(%0, %3) forward
#5 %5:float32[2] = pd_op.cast(%2) forward
#6 %6:float32[4] = pd_op.all_gather(%5) forward group=7
#7 %7:float32[4] = pd_op.matmul(%4, %6) forward
#8 %8:float32[4]!"merge0" = pd_op.data() forward
#9 %9:float32[4]!"merge1" = pd_op.data() forward
#10 %10:float32[4], %11:float32[4] = pd_op.matmul_grad(%4, %6, %7) backward
#11 %12:float32[4]~9 = pd_op.add_(%9, %11) backward inplace=0:0
#12 %13:float32[4], %14:float32[4] = pd_op.matmul_grad(%0, %3, %10) backward
#13 %15:float32[4]~8 = pd_op.add_(%8, %14) backward inplace=0:0
#14 %16:float32[4] = pd_op.transpose(%8) optimize
#15 %17:float32[2] = pd_op.reduce_scatter(%16) optimize group=7
#16 %18:float32[2] = pd_op.reduce_scatter(%9) optimize group=7
#17 %19:vector<float32[2];float32[2]> = builtin.combine(%17, %18) optimize
#18 %20:float32[1] = pd_op.add_n(%19) optimize
#19 %21:float32[1] = pd_op.all_reduce(%20) optimize group=7
#20 %22:float32[2] = pd_op.multiply(%18, %21) optimize
#21 %23:float32[2]~2 = pd_op.sgd_(%2, %22) optimize inplace=0:0
#22 %24:float32[4] = pd_op.all_gather(%23) optimize group=7
"""


def named() -> dict[int, str]:
    """Layers by operation."""
    program = parse(PROGRAM)
    paths = [PATHS.get(f"#{op.id} ", "") for op in program.ops]
    return {op.id: op.layer for op in name_layers(program.ops, program.values, paths, NAMES)}


def test_a_layer_that_reads_a_gathered_parameter_has_that_parameters_name() -> None:
    assert (named()[4], named()[7], named()[10], named()[12]) == ("blocks.0.q", "blocks.0.k", "blocks.0.k", "blocks.0.q")


def test_what_gathers_a_parameter_belongs_to_its_layer() -> None:
    assert (named()[3], named()[5], named()[6]) == ("blocks.0.q", "blocks.0.k", "blocks.0.k")


def test_a_collective_of_the_optimizer_belongs_to_the_layer_of_its_gradient_or_parameter() -> None:
    """Sums over several layers belong to none, and neither does what is no collective."""
    found = named()
    assert {op: found[op] for op in range(14, 23) if found[op]} == {15: "blocks.0.q", 16: "blocks.0.k", 22: "blocks.0.k"}
