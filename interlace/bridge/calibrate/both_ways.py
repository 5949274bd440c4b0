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
from interlace.bridge.calibrate.factors import BothWays, both_ways
from interlace.bridge.calibrate.messages import DTYPE
from interlace.bridge.probe.bench import Runner, spread
from interlace.cost_model.profile import CopySample, Interference
from interlace.ir.program import DTYPE_BYTES

ops: Any = paddle._C_ops
SIZE_BYTES, SLOW_BYTES = 1 << 26, 1 << 22
"""Bytes of a copy on a fast device (`Bench.is_fast`), and on another."""
FEW, MANY = 4, 12
"""Copies in a row of the direction that ends first, and of the other one."""
OUT, BACK = "interlace_copies_out", "interlace_copies_in"
NOISE = "their times do not differ from noise"


class Copies(NamedTuple):
    """Samples of copies while all ranks copy in the same direction, if there are several ranks; how much the two directions slow each other
    down, if known; and what could not be measured, with the reason."""

    samples: tuple[CopySample, ...] = ()
    rows: tuple[Interference, ...] = ()
    failed: tuple[str, ...] = ()


def copies_of_all_ranks(lab: Lab) -> Copies:
    """Measure copies; every rank must call this. Raises what Paddle raises if a copy fails."""
    ranks = lab.everyone.nranks if lab.everyone is not None else 1
    size_bytes = SIZE_BYTES if lab.bench.is_fast else SLOW_BYTES
    counts = (0, 0), (MANY, 0), (0, MANY), (MANY, FEW), (FEW, MANY)
    steps = [_step(lab, size_bytes // DTYPE_BYTES[DTYPE], *each) for each in counts]
    rounds = [[times.all_s for times in each] for each in lab.rounds(*steps)]
    out_ns, in_ns = ([(round[way] - round[0]) / MANY * 1e9 for round in rounds] for way in (1, 2))
    if min(median(out_ns), median(in_ns)) < 1:
        return Copies(failed=(f"copies of {ranks} device(s) at once: {NOISE}",))
    alone = tuple(
        CopySample(way, size_bytes, round(median(each)), ranks, round(spread(each)), len(each))
        for way, each in zip(DIRECTIONS, (out_ns, in_ns), strict=True)
    )
    found = [both_ways(each, FEW, MANY) for each in rounds]
    known = [each for each in found if each is not None]
    samples = alone if ranks > 1 else ()
    if len(known) < len(found) / 2:
        return Copies(samples, failed=(f"copies in both directions of {ranks} device(s) at once: {NOISE}",))
    return Copies(samples, (_row(known, ranks),))


def _step(lab: Lab, elements: int, copies_out: int, copies_in: int) -> Runner:
    """A step with copies of both directions on streams of their own, which begin together on all ranks."""
    device = lab.bench.device

    def build() -> None:
        x = paddle.full([elements], 0.5, DTYPE)
        on_host = on_stream(OUT, partial(device.copy_out, x))
        on_stream(BACK, partial(device.copy_in, on_host))
        lab.bench.add_lead(LEAD_S)
        lab.add_barrier()
        begun = paddle.full([1], 1.0, DTYPE)
        for stream, copy, value, count in ((OUT, device.copy_out, x, copies_out), (BACK, device.copy_in, on_host, copies_in)):
            on_stream(stream, partial(ops.square, begun))
            for _ in range(count):
                on_stream(stream, partial(copy, value))

    return lab.bench.runner(build)


def _row(found: list[BothWays], ranks: int) -> Interference:
    into, out = sorted(round(each.into, 3) for each in found), sorted(round(each.out, 3) for each in found)
    return Interference("copy:h2d", "copy:d2h", ranks, median(into), median(out), (into[0], into[-1]), (out[0], out[-1]))
