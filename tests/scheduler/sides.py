"""Programs whose forward and backward have unequal numbers of collectives."""

from __future__ import annotations

import msgspec

from interlace.ir import Group, Pipeline, Program
from tests.strategies import ROW, SQUARE, Builder


class Sides(msgspec.Struct, frozen=True):
    """A stage with so many layers and collectives in forward and in backward.

    `recompute` draws random numbers in backward; `state` is written in forward and read in backward.
    """

    forward: tuple[int, ...] = (1,)
    backward: tuple[int, ...] = (1,)
    stage: int = 0
    stages: int = 1
    micro_batches: int = 3
    recompute: bool = False
    draws: bool = False
    state: bool = False


def side_program(sides: Sides, rank: int = 0) -> Program:
    """Each layer: product, that many collectives one behind the other, activation."""
    build = Builder()
    op = build.op
    last = sides.stage == sides.stages - 1
    weight, buffer = build.named("builtin.parameter", SQUARE, "w", True), build.named("builtin.parameter", SQUARE, "g", True)
    running = build.named("builtin.parameter", ROW, "running", True) if sides.state else -1

    def reduced(x: int, count: int) -> int:
        for _ in range(count):
            x = op("pd_op.all_reduce", [x], [ROW], group=10 + rank)[0]
            x = op("pd_op.tanh", [x], [ROW])[0]
        return x

    def received(group: int, peer: int) -> int:
        return op("pd_op.recv_v2", [], [ROW], group=group, attrs={"peer": peer})[0]

    x = build.named("pd_op.data", ROW, "x") if sides.stage == 0 else received(99 + rank, 0)
    saved = []
    for count in sides.forward:
        h = op("pd_op.matmul", [x, weight], [ROW])[0]
        saved.append((x, h))
        x = op("pd_op.dropout", [reduced(h, count)], [ROW])[0] if sides.draws else op("pd_op.gelu", [reduced(h, count)], [ROW])[0]
        if sides.state:
            op("pd_op.add_", [running, x], [ROW], inplace=((0, 0),))
    if last:
        build.raw("builtin.shadow_output", [x], [], attrs={"output_name": "loss"})
    else:
        op("pd_op.send_v2", [x], [], group=100 + rank, attrs={"peer": 1})
    build.role = "backward"
    g = op("pd_op.gelu_grad", [saved[-1][1], x], [ROW])[0] if last else received(200 + rank, 1)
    for k, count in enumerate(sides.backward):
        x, h = saved[-1 - k % len(saved)]
        if sides.recompute:
            h = op("pd_op.dropout", [h], [ROW])[0]
        if sides.state:
            h = op("pd_op.add", [h, running], [ROW])[0]
        g = op("pd_op.gelu_grad", [h, g], [ROW])[0]
        dx = op("pd_op.matmul", [g, weight], [ROW], attrs={"transpose_y": True})[0]
        dw = op("pd_op.matmul", [x, g], [SQUARE], attrs={"transpose_x": True})[0]
        op("pd_op.add_", [buffer, dw], [SQUARE], inplace=((0, 0),))
        g = reduced(dx, count)
    if sides.stage > 0:
        op("pd_op.send_v2", [g], [], group=199 + rank, attrs={"peer": 0})
    build.role = "optimize"
    op("pd_op.sgd_", [weight, buffer], [SQUARE], inplace=((0, 0),))
    ring = [Group(10 + rank, (rank,))]
    ring += [Group(number + rank - 1, (rank - 1, rank)) for number in (100, 200) if sides.stage > 0]
    ring += [Group(number + rank, (rank, rank + 1)) for number in (100, 200) if not last]
    pipe = Pipeline(sides.stage, sides.stages, sides.micro_batches, 1, "1F1B")
    return Program(tuple(build.ops), tuple(build.values), tuple(ring), pipe, rank, sides.stages)
