"""What the search for a pair's order may spend in tests: little, unless a test is about how good its orders are.

What it finds with less work is as legal, proved and simulated in the same way.
"""

from __future__ import annotations

from interlace.scheduler.interleave import planner

SHORT = 500
"""Of 150,000 in a run: it takes less than all else that a test does."""
SOME = 5_000
"""Enough for a pair of some twenty operations."""
WHOLE = planner.SEARCH_WORK


def shorten() -> None:
    """From now on in this process."""
    planner.SEARCH_WORK = SHORT
