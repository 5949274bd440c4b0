"""The passes that come after the schedule by default."""

from __future__ import annotations

from interlace.passes import ExtendLifetimes, InsertEvents, NameStreams, Pass, ThrottleHost

STREAMS: tuple[Pass, ...] = (NameStreams(), ExtendLifetimes(), InsertEvents())
"""What names and orders side streams."""
THROTTLED = (*STREAMS, ThrottleHost())
"""The same with waits of the host."""
