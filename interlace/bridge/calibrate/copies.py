"""Copies between a device and pinned memory, one way and one device alone."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any, Literal

import paddle

from interlace.bridge.probe.bench import spread
from interlace.bridge.probe.lab import STREAMS, Lab, on, settings
from interlace.bridge.targets import Device
from interlace.cost_model.profile import CopySample

NUM_COPIES = 8
NUM_RUNS = 7
ROWS = (1024, 4096)
"""Rows and columns of float32 matrices that are copied: 4 and 64 MiB."""
Direction = Literal["d2h", "h2d"]
DIRECTIONS: tuple[Direction, Direction] = ("d2h", "h2d")


def copy_samples(device: Device, quick: bool) -> Iterator[CopySample]:
    """In each direction, of each size."""
    with settings():
        lab = Lab(device)
        for rows in ROWS[:1] if quick else ROWS:
            for direction, each_ns in copies_ns(lab, rows, NUM_RUNS).items():
                yield CopySample(direction, 4 * rows**2, max(1, round(median(each_ns))), 1, round(spread(each_ns)), NUM_RUNS)


def copies_ns(lab: Lab, rows: int, num_runs: int) -> dict[Direction, list[float]]:
    """Nanoseconds of one copy, from what `NUM_COPIES` more of them add to a step; the shortest half of twice as many runs. Of copies out,
    each of which is copied back behind all of them, what both add less a copy in."""
    once, more_in, more = (_steps_s(lab, rows, *counts, num_runs) for counts in ((1, 1), (1, 1 + NUM_COPIES), (1 + NUM_COPIES, 0)))
    back = [(long - short) / NUM_COPIES * 1e9 for short, long in zip(once, more_in, strict=True)]
    both = [(long - short) / NUM_COPIES * 1e9 for short, long in zip(once, more, strict=True)]
    return {"d2h": [each - median(back) for each in both], "h2d": back}


def _steps_s(lab: Lab, rows: int, copies_out: int, copies_in: int, num_runs: int) -> list[float]:
    """Times of steps with so many copies on one stream, the shortest first; `copies_in` of the first that went out, 0 for one of each."""
    made: list[Any] = []

    def out(x: Any, one: Any) -> None:
        made.extend(on(paddle._C_ops.memcpy_d2h(x, 0), STREAMS[1]) for _ in range(copies_out))

    def back(x: Any, one: Any) -> None:
        for each in made[:1] * copies_in or made:
            on(paddle._C_ops.memcpy_h2d(each, 1), STREAMS[1])

    step = lab.step([out, back], size=rows, watched=False)
    return sorted(step.run().done_s for _ in range(2 * num_runs))[:num_runs]
