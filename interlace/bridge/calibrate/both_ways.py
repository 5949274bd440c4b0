"""Copies while all ranks of a host copy at once: in one direction, and in both, where they slow each other down.

The two directions do not suffer equally: in steps of two H200s that move all activations, copies to the device take 1.23 times as long as
copies of the same tensors to the host, and alone equally long (benchmarks/results/gpu.md).
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any, NamedTuple

import paddle

from interlace.bridge.calibrate.beside import LEAD_S, Lab, on_stream
from interlace.bridge.calibrate.copies import DIRECTIONS
from interlace.bridge.calibrate.factors import both_ways
from interlace.bridge.calibrate.messages import DTYPE
from interlace.bridge.probe.bench import Runner, spread
from interlace.cost_model.interference import D2H, H2D
from interlace.cost_model.profile import CopySample, Interference
from interlace.ir.program import DTYPE_BYTES

ops: Any = paddle._C_ops
SIZES, SLOW_SIZES = (1 << 22, 1 << 26), (1 << 20, 1 << 22)
"""Bytes of copies on a fast device (`Bench.is_fast`), and on another. The factors are those of the largest."""
FEW, MANY = 4, 12
"""Copies in a row of the direction that ends first, and of the other one."""
OUT, IN = "interlace_copies_d2h", "interlace_copies_h2d"
"""Names of the streams."""


class Copies(NamedTuple):
    """Samples of copies while all ranks copy in the same direction, if there are several ranks; how much the two directions slow each other
    down, if known; and what could not be measured, with the reason."""

    samples: tuple[CopySample, ...] = ()
    rows: tuple[Interference, ...] = ()
    failed: tuple[str, ...] = ()


def copies_of_all_ranks(lab: Lab) -> Copies:
    """Measure copies. Every rank must call this. Raises what Paddle raises if a copy fails; the launcher must then end the other ranks."""
    ranks = lab.everyone.nranks if lab.everyone is not None else 1
    samples, rounds = list[CopySample](), list[tuple[float, ...]]()
    for size_bytes in SIZES if lab.bench.is_fast else SLOW_SIZES:
        counts = (0, 0), (MANY, 0), (0, MANY), (MANY, FEW), (FEW, MANY)
        steps = [_step(lab, size_bytes // DTYPE_BYTES[DTYPE], *each) for each in counts]
        rounds = [tuple(times.all_s for times in each) for each in lab.rounds(*steps)]
        for at, way in enumerate(DIRECTIONS, 1):
            each_ns = [(round_s[at] - round_s[0]) / MANY * 1e9 for round_s in rounds]
            if (once_ns := round(median(each_ns))) > 0:
                samples.append(CopySample(way, size_bytes, once_ns, ranks, round(spread(each_ns)), len(each_ns)))
    alone = tuple(samples) if ranks > 1 else ()  # of one rank, `copies.py` measures them
    found = both_ways(rounds, FEW, MANY)
    if isinstance(found, str):
        return Copies(alone, failed=(f"copies in both directions on {ranks} device(s) at once: {found}",))
    h2d, d2h = round(found.h2d, 3), round(found.d2h, 3)
    return Copies(alone, (Interference(H2D, D2H, ranks, h2d, d2h, (h2d, h2d), (d2h, d2h)),))


def _step(lab: Lab, elements: int, copies_out: int, copies_in: int) -> Runner:
    """A step with copies of both directions on streams of their own, which begin together on all ranks."""
    device = lab.bench.device

    def build() -> None:
        x = paddle.full([elements], 0.5, DTYPE)
        on_host = on_stream(OUT, partial(device.copy_out, x))
        on_stream(IN, partial(device.copy_in, on_host))
        lab.bench.add_lead(LEAD_S)
        lab.add_barrier()
        begun = paddle.full([1], 1.0, DTYPE)
        for stream, copy, value, count in ((OUT, device.copy_out, x, copies_out), (IN, device.copy_in, on_host, copies_in)):
            on_stream(stream, partial(ops.square, begun))
            for _ in range(count):
                on_stream(stream, partial(copy, value))

    return lab.bench.runner(build)
