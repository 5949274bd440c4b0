"""Copies between a device and pinned memory, one way and one device alone."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any, Literal

import paddle

from interlace.bridge.doctor.lab import STREAMS, Lab, on
from interlace.bridge.targets import Device
from interlace.cost_model.profile import CopySample

NUM_COPIES = 8
NUM_RUNS = 7
ROWS = (1024, 4096)
"""Rows and columns of float32 matrices that are copied: 4 and 64 MiB."""
Way = Literal["d2h", "h2d"]
WAYS: tuple[Way, Way] = ("d2h", "h2d")


def copy_samples(device: Device, quick: bool) -> Iterator[CopySample]:
    """Each way, of each size."""
    lab = Lab(device)
    for rows in ROWS[:1] if quick else ROWS:
        for way in WAYS:
            each_ns = copies_ns(lab, way, rows, NUM_RUNS)
            yield CopySample(way, 4 * rows**2, max(1, round(median(each_ns))), 1, round(max(each_ns) - min(each_ns)), NUM_RUNS)


def copies_ns(lab: Lab, way: Way, rows: int, num_runs: int) -> list[float]:
    """Nanoseconds of one copy, from what `NUM_COPIES` more of them in a row add to a step; the shortest half of twice as many runs."""
    once, several = (_steps_s(lab, way, rows, count, num_runs) for count in (1, 1 + NUM_COPIES))
    return [(long - short) / NUM_COPIES * 1e9 for short, long in zip(once, several, strict=True)]


def _steps_s(lab: Lab, way: Way, rows: int, count: int, num_runs: int) -> list[float]:
    """Times of steps with so many copies, the shortest first."""
    made: list[Any] = []

    def build(x: Any, one: Any) -> None:
        for _ in range(count if way == "d2h" else 1):
            made.append(on(paddle._C_ops.memcpy_d2h(x, 0), STREAMS[1]))

    def back(x: Any, one: Any) -> None:
        for _ in range(count if way == "h2d" else 1):
            on(paddle._C_ops.memcpy_h2d(made[0], 1), STREAMS[2])

    step = lab.step([build, back], size=rows, watched=False)
    return sorted(step.run().done_s for _ in range(2 * num_runs))[:num_runs]
