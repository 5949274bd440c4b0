"""From a captured program to a plan, and what a plan tells."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from interlace.config import Config
from interlace.cost_model import Costs
from interlace.ir import Job, Program, save
from interlace.ir.dump import SUFFIX
from interlace.passes import PassReport


@dataclass(frozen=True, slots=True)
class Plan:
    """One rank's schedule and the reasons for it.

    Attributes:
        captured: The program as Paddle built it.
        program: The program with its jobs.
        reports: What each pass did and declined.
        profile: Name of the device profile that was asked.
    """

    captured: Program
    program: Program
    reports: tuple[PassReport, ...] = field(default=())
    profile: str = ""

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Jobs in the order the executor runs them."""
        return self.program.jobs

    def explain(self, limit: int = 8) -> str:
        """What was moved and why, and what was declined and why; at most `limit` lines of each sort a pass."""
        pipe = self.program.pipeline
        head = (f"rank {self.program.rank} of {self.program.world}, stage {pipe.stage} of {pipe.num_stages}, "
                f"{pipe.num_micro_batches} micro-batches, schedule {pipe.schedule}, profile {self.profile}")  # fmt: skip
        return "\n".join([head, *(report.text(limit) for report in self.reports)])

    def dump(self, path: str | Path) -> list[Path]:
        """Write the captured and the planned program below a folder; gives the files' paths."""
        folder = Path(path)
        rank = self.program.rank
        return [save(self.captured, folder / "captured" / f"rank{rank}{SUFFIX}"), save(self.program, folder / f"rank{rank}{SUFFIX}")]


def make_plan(program: Program, config: Config, cost: Costs, profile: str) -> Plan:
    """Run the configured passes over a captured program.

    Raises:
        InterlaceError: A pass cannot do what is asked; the program stays as it is.
    """
    planned, reports = config.pipeline().run(program, cost)
    return Plan(program, planned, tuple(reports), profile)
