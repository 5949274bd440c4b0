"""Times of copies between a device and pinned memory, in one direction at a time and with no other device copying."""

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
"""Rows, and columns, of the float32 matrices that are copied: 4 and 64 MiB."""
Direction = Literal["d2h", "h2d"]
DIRECTIONS: tuple[Direction, Direction] = ("d2h", "h2d")


def copy_samples(device: Device, quick: bool) -> Iterator[CopySample]:
    """A sample for each size and direction that can be told from noise; only the small size when `quick`."""
    with settings():
        lab = Lab(device)
        for rows in ROWS[:1] if quick else ROWS:
            for direction, each_ns in copies_ns(lab, rows, NUM_RUNS).items():
                if (once_ns := round(median(each_ns))) > 0:
                    yield CopySample(direction, 4 * rows**2, once_ns, 1, round(spread(each_ns)), NUM_RUNS)


def copies_ns(lab: Lab, rows: int, num_runs: int) -> dict[Direction, list[float]]:
    """Times of one copy in nanoseconds, `num_runs` for each direction: what `NUM_COPIES` additional copies add to a step, divided by their
    number. Each copy to the host needs one back, whose median time is subtracted."""
    once, more_in, more = (_steps_s(lab, rows, *counts, num_runs) for counts in ((1, 1), (1, 1 + NUM_COPIES), (1 + NUM_COPIES, 0)))
    back = [(long - short) / NUM_COPIES * 1e9 for short, long in zip(once, more_in, strict=True)]
    both = [(long - short) / NUM_COPIES * 1e9 for short, long in zip(once, more, strict=True)]
    return {"d2h": [each - median(back) for each in both], "h2d": back}


def _steps_s(lab: Lab, rows: int, copies_out: int, copies_in: int, num_runs: int) -> list[float]:
    """Times of steps with these numbers of copies on one stream, in seconds: the shortest `num_runs` of twice as many, ascending.
    `copies_in` times the first copy comes back, or with 0 each copy once."""
    made: list[Any] = []

    def out(x: Any, one: Any) -> None:
        made.extend(on(paddle._C_ops.memcpy_d2h(x, 0), STREAMS[1]) for _ in range(copies_out))

    def back(x: Any, one: Any) -> None:
        for each in made[:1] * copies_in or made:
            on(paddle._C_ops.memcpy_h2d(each, 1), STREAMS[1])

    step = lab.step([out, back], size=rows, watched=False)
    return sorted(step.run().done_s for _ in range(2 * num_runs))[:num_runs]
