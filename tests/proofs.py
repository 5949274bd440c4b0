"""Every plan that a test makes is proved as it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from interlace.ir import Program
from interlace.passes.pipeline import Pipeline
from interlace.scheduler.hazards import check
from interlace.scheduler.target import CUSTOM, GPU

KNOWN = frozenset({"shared-stream", "deadlock"})
"""What a rank alone cannot help: rings that Paddle's own order puts on one stream."""


def proving(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on `Pipeline.run` fails where it gives a plan that the checker refuses. Without events a program is no plan yet."""
    run: Callable[..., Any] = Pipeline.run

    def run_and_prove(self: Pipeline, program: Program, *args: Any, **options: Any) -> Any:
        made, reports = run(self, program, *args, **options)
        if made.jobs and made.jobs != program.jobs and "insert-events" in made.passes:
            for place in (GPU, CUSTOM):
                found = [str(finding) for finding in check([made], place) if finding.kind not in KNOWN]
                names = [each.name for each in self.passes]
                assert not found, f"rank {made.rank}: a plan of {names} is unsafe on {place.name}: {found[:3]}"
        return made, reports

    monkeypatch.setattr(Pipeline, "run", run_and_prove)
