"""What searches for plans may spend in tests: little, unless a test is about how good its plans are.

What it finds with less work is as legal, proved and simulated in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import environ

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


FEW_FORMS = "TESTS_FEW_FORMS"
"""A variable of the environment: who forks a rank that has it lets it try few forms."""


@contextmanager
def few_forms() -> Iterator[None]:
    """Where `auto` decides, here and in ranks that are forked meanwhile, it tries Paddle's jobs and the first form that has a name, and no
    schedules of the coarse model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FEW_FORMS, "1")
        try_few_forms(patch)
        yield


def try_few_forms(patch: pytest.MonkeyPatch) -> None:
    """In this process, if its environment has `FEW_FORMS`."""
    if FEW_FORMS in environ:
        patch.setattr(fastest, "named", lambda *given: named(*given)[:1])
        patch.setattr(fastest, "PROPOSALS", (baseline_jobs, forms_by_name))
        patch.setattr(Tried, "draft_in", lambda *_: None)
