"""What searches for plans may spend in tests: little, unless a test is about how good its plans are.

What it finds with less work is as legal, proved and simulated in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from interlace.planning import fastest
from interlace.planning.proposals import Tried, baseline_jobs, forms_by_name
from interlace.planning.variants import named
from interlace.scheduler.interleave import planner

SHORT = 500
"""Of 150,000 in a run: it takes less than all else that a test does."""
SOME = 5_000
"""Enough for a pair of some twenty operations."""
WHOLE = planner.SEARCH_WORK


def shorten() -> None:
    """From now on in this process."""
    planner.SEARCH_WORK = SHORT


@contextmanager
def few_forms() -> Iterator[None]:
    """Where `auto` decides, it tries Paddle's jobs and the first form that has a name, and no schedules of the coarse model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fastest, "named", lambda *given: named(*given)[:1])
        patch.setattr(fastest, "PROPOSALS", (baseline_jobs, forms_by_name))
        patch.setattr(Tried, "draft_in", lambda *_: None)
        yield
