"""The passes that come after the schedule by default."""

from __future__ import annotations

from interlace.passes import (
    ExtendLifetimes,
    InsertEvents,
    NameStreams,
    Pass,
    ThrottleHost,
)

STREAMS: tuple[Pass, ...] = (NameStreams(), ExtendLifetimes(), InsertEvents())
"""What names and orders side streams."""
THROTTLED = (*STREAMS, ThrottleHost())
"""The same with waits of the host."""


DEFAULT = [
    "choose-recompute",
    "narrow-gathers",
    "split-backward",
    "overlap-column-backward",
    "reduce-in-place",
    "schedule-1f1b",
    "name-streams",
    "allocate-on-compute",
    "delay-transfers",
    "extend-lifetimes",
    "insert-events",
    "throttle-host",
]
NO_JOBS = dict.fromkeys(
    ("schedule_1f1b", "allocate_on_compute", "extend_lifetimes", "insert_events", "delay_transfers", "throttle_host"), "off"
)
