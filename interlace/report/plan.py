"""A plan with its reports: what passes did, the simulated step, and the measured one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from interlace.cost_model import CostModel
from interlace.errors import PlanError
from interlace.ir import Job, Program
from interlace.notice import say_once
from interlace.passes import PassReport
from interlace.planning.baseline import BASELINE
from interlace.planning.compare import Comparison
from interlace.planning.curve import Sweep, read_sweep
from interlace.planning.loaded import compared_in
from interlace.planning.outcome import NOT_COMPARED
from interlace.planning.plan import Plan
from interlace.report.measured import Measured, trial_lines
from interlace.report.outcome import outcome_sentence
from interlace.report.page.build import OURS, Given, Simulated, build_page
from interlace.report.page.document import Page
from interlace.report.page.write import write_page
from interlace.report.screen import imbalance_lines, reports_text, rules_text, step_table
from interlace.units import ranks_text


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The result of `interlace.plan_of(model)`: one rank's plan, and how long the first training steps with it took in this process."""

    plan: Plan
    measured: Measured = field(default_factory=Measured, compare=False)

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Jobs in the order in which the executor runs them."""
        return self.plan.jobs

    def explain(self, limit: int = 8) -> str:
        """What passes did and declined, and why, by rule, at most `limit` of each per pass; then `sentence`, and the trial of plans if
        there was one."""
        plan, trial = self.plan, trial_lines(self.measured.trial)
        if plan.why_off:
            return "\n".join([f"Interlace is off ({plan.why_off}): Paddle's plan is untouched", *trial])
        loaded = f", loaded from {plan.loaded_from}" if plan.loaded_from else ""
        head = f"{_heading([plan.program], plan)}{loaded}"
        return "\n".join([head, *imbalance_lines(plan.outcome), *reports_text(plan.reports, limit), self.sentence(), *trial])

    def sentence(self) -> str:
        """One sentence with the simulated steps of Paddle's baseline and of this plan, and the measured one once steps have run; or why
        they are not compared."""
        measured = self.measured.clause()
        if self.plan.outcome:
            return outcome_sentence(self.plan.outcome, measured)
        return f"{NOT_COMPARED}{f' A step was {measured}.' if measured else ''}"

    def measured_line(self) -> str:
        """The measured step and energy next to the predicted ones, with advice if the steps differ by more than a tenth; empty until the
        first steps have run."""
        step = self.plan.outcome.plan if self.plan.outcome else None
        own = next((each.joules for each in step.stages if self.plan.program.rank in each.ranks), 0.0) if step else 0.0
        energy = self.measured.energy_line(own, step.joules if step else 0.0)
        return "\n".join(filter(None, [self.measured.beside(step.step_ns if step else None, self.plan.profile), energy]))

    def report(self, path: str | Path) -> Path | None:
        """Write the page of this plan, one HTML file: a picture of the whole step, simulated, together with that of Paddle's baseline. Rank
        0 writes it for all ranks and returns the file's path; on other ranks nothing happens. If Interlace is off, there is no page, which
        a line on standard error says, so that the same script runs with and without Interlace.

        Raises PlanError if the other stages' plans are not known here, or a step cannot be simulated.
        """
        plan = self.plan
        if plan.why_off:
            say_once(f"no {path}: Interlace is off ({plan.why_off}), there is no plan to show")
            return None
        if plan.program.rank:
            return None
        folder = Path(plan.loaded_from)
        compared = compared_in(folder) if plan.loaded_from else plan.compared
        if compared is None:
            raise PlanError(
                "no page of rank 0 alone, the other stages' plans are not known here; `interlace report` writes it from the "
                "plans of all ranks"
            )
        sweep = read_sweep(folder) if plan.loaded_from else None
        page = page_of(compared, plan.costs(), self.measured.clause(), sweep)
        write_page(msgspec.structs.replace(page, trial=self.measured.trial), path)
        return Path(path)

    def summary(self) -> dict[str, object]:
        """Plain data for JSON: figures of the plan, what each pass did, and what was measured."""
        plan, pipe = self.plan, self.plan.program.pipeline
        return {
            "rank": plan.program.rank,
            "stage": pipe.stage,
            "profile": plan.profile,
            "ops": len(plan.program.ops),
            "jobs": len(plan.program.jobs),
            "passes": [_said(report) for report in plan.reports],
            "outcome": msgspec.to_builtins(plan.outcome),
            "measured_step_ns": self.measured.step_ns,
            "trial": trial_lines(self.measured.trial),
            "launches": self.measured.launches,
            "late_fetches": self.measured.late_fetches,
            "measured_joules": self.measured.joules,
            "measured_tokens_per_joule": self.measured.tokens_per_joule,
            "sentence": self.sentence(),
        }


def page_of(compared: Comparison, costs: CostModel, measured: str = "", sweep: Sweep | None = None) -> Page:
    """The data of a plan's page; `measured` is a clause with the measured step. Raises PlanError if a step would never end."""
    ranks = compared.equivalent_ranks()
    baseline, plan = (Simulated(name, result, ranks) for name, result in zip((BASELINE, OURS), compared.results(costs), strict=True))
    reports = {member.plan.rank: member.reports for member in compared.members}
    given = Given(compared.profile, costs, compared.target(costs))
    return build_page(plan, baseline, reports, given, compared.memory, measured, sweep, compared.pool_budget)


def summary_text(plans: Sequence[Plan], trust: str) -> str:
    """All plans on one screen: the step by stage, what passes did and declined by rule, and `trust`, how well times are known."""
    head = _heading([plan.program for plan in plans], plans[0])
    reports = {plan.program.pipeline.stage: plan.reports for plan in reversed(plans)}
    table = [step_table(plans[0].outcome), *imbalance_lines(plans[0].outcome)] if plans[0].outcome else []
    return "\n".join([head, *table, rules_text(reports), trust])


def _said(report: PassReport) -> dict[str, Any]:
    """A report as plain data, without the orders of communication calls."""
    return {name: each for name, each in msgspec.to_builtins(report).items() if name != "orders"}


def _heading(programs: Sequence[Program], plan: Plan) -> str:
    """One line with the ranks, stages, schedule and profile; `plan` is the plan of one of the programs."""
    pipe, stages = programs[0].pipeline, {program.pipeline.stage for program in programs}
    where = f"stage {pipe.stage} of {pipe.num_stages}" if len(stages) == 1 else f"{len(stages)} of {pipe.num_stages} stages"
    ranks = sorted(rank for program in programs for rank in program.ranks)
    return (
        f"{ranks_text(ranks)} of {programs[0].world}, {where}, {pipe.num_micro_batches} micro-batches, schedule {pipe.schedule}, "
        f"profile {plan.profile}{', steps launched as a graph' if plan.is_launched else ''}"
    )
