"""A small Paddle program of one rank of a tensor-parallel pair, built in one process: forward, backward, accumulation, optimizer."""

from __future__ import annotations

from typing import Any

import paddle
from paddle.base import core
from paddle.distributed.auto_parallel.static.process_group import new_process_group

from interlace.bridge.capture import Captured, capture
from interlace.cost_model import GivenCosts
from interlace.ir import Pipeline, Program
from interlace.passes import OffloadActivations, Pass, Schedule1F1B, ThrottleHost
from interlace.passes import Pipeline as Passes
from tests.default_passes import STREAMS

AUTO = ThrottleHost()
COSTS = GivenCosts({"comm": 100, "copy": 10, "gemm": 50, "default": 10})
ACCUMULATE = Pipeline(num_micro_batches=3, schedule="accumulate")
C = paddle._C_ops


class Build:
    """A program whose operations get roles as they are made."""

    def __init__(self) -> None:
        paddle.enable_static()
        self.main = paddle.static.Program()

    def role(self, number: int) -> None:
        """Give a role to all operations that have none yet."""
        for op in self.main.global_block().ops:
            if op.op_role == -1:
                op.op_role = number

    def data(self, name: str, shape: list[int], dtype: Any = paddle.float32, persistable: bool = False) -> Any:
        """An input."""
        made = C.data(name, shape, dtype, core.Place())
        made.persistable = persistable
        return made


def small_program(
    rows: int = 2, ring_ranks: tuple[int, ...] = (0, 1), alias: bool = False, scaled: bool = False, moment: bool = False
) -> Any:
    """x @ w, all_reduce, gelu, mean; gradients; `g += dW`; `w -= g`. With `alias`, gelu and its gradient read the sum by a second name.

    With `scaled` a number is fed besides, with which the product is multiplied. With `moment` the update is `m += g; w -= m`.
    """
    build = Build()
    ring = new_process_group(list(ring_ranks)).id
    with paddle.static.program_guard(build.main):
        w, g = (build.data(name, [4, 4], persistable=True) for name in "wg")
        m = build.data("m", [4, 4], persistable=True) if moment else None
        x = build.data("x", [rows, 4])
        h = C.matmul(x, w, False, False)
        h = C.multiply(h, build.data("by", [])) if scaled else h
        r = C.all_reduce(h, ring, 0)
        s = C.share_data_(r) if alias else r
        a = C.gelu(s, False)
        y = C.add(a, r)
        loss = C.mean(y, [], False)
        C.set_persistable_value(loss, "loss")
        build.role(0)
        one = C.full([], 1.0, paddle.float32, core.Place())
        dy = C.mean_grad(y, one, [], False, True)
        da, _ = C.add_grad(a, r, dy, -1)
        dr = C.gelu_grad(s, da, False)
        dh = C.all_reduce(dr, ring, 0)
        _, dw = C.matmul_grad(x, w, dh, False, False)
        C.add_(g, dw)
        build.role(1)
        C.add_(w, C.add_(m, g) if moment else g)
        build.role(2)
    return build.main


def planned(captured: Captured, *extra: Pass, offload: bool = False, throttle: ThrottleHost | None = AUTO) -> Program:
    """The captured program scheduled, with copies where asked for, and streams."""
    passes: list[Pass] = [Schedule1F1B(interleave="off")]
    passes += [OffloadActivations(fraction=1.0, min_bytes=0)] if offload else []
    return Passes((*passes, *STREAMS, *([throttle] if throttle else []), *extra)).run(captured.program, COSTS)[0]


def captured_small(pipeline: Pipeline = ACCUMULATE, **options: Any) -> Captured:
    """The small program captured."""
    return capture(small_program(**options), pipeline)
