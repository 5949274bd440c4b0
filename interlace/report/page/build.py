"""The page's data, from simulated plans and what their passes reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from interlace.cost_model import CostModel
from interlace.cost_model.base import Row as CostRow
from interlace.cost_model.base import expected_error, largest_unmeasured, shares_by_how
from interlace.errors import PlanError
from interlace.ir import Program
from interlace.ir.target import Target
from interlace.passes.pipeline import PassReport
from interlace.planning.baseline import BASELINE, refusal_of
from interlace.planning.curve import Sweep
from interlace.planning.outcome import MemoryLimit, Outcome, Pools, Step, errors_of
from interlace.report.causes import held, waits
from interlace.report.outcome import WHOSE, imbalance, outcome_sentence
from interlace.report.page.document import Device, Label, Memory, Page, PlanPart, Row, Split, World
from interlace.report.page.picture import Items, clock, compute_runs, curve, gap_runs, jobs, packed, side_runs
from interlace.report.page.tables import RankStep, communication, offloaded, recomputed
from interlace.report.rules import rules
from interlace.scheduler.jobs.parts import slot_text
from interlace.scheduler.simulate.parts import parts_of
from interlace.scheduler.simulate.simulator import Result
from interlace.version import VERSION

HOW_TOLD = {
    "exact": "measured at these very shapes",
    "interpolated": "between measured sizes",
    "extrapolated": "beyond measured sizes",
    "proxy": "from measurements of another kind, type or group size",
    "roofline": "from the device's rates",
    "unknown": "a lower bound at best",
    "free": "takes no time",
    "given": "given by hand",
}
OURS = "This plan"


@dataclass(frozen=True, slots=True)
class Simulated:
    """A plan and its simulated step.

    Attributes:
        name: Its name on the page.
        result: The simulation of all given ranks, with memory.
        representative: Simulated rank -> the ranks that it represents, itself first; for ranks that are not in it, `Program.ranks`.
    """

    name: str
    result: Result
    representative: Mapping[int, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Given:
    """The source of times and rules: the profile's name, its cost model, and the rules of execution."""

    profile: str
    costs: CostModel
    target: Target


def build_page(
    ours: Simulated,
    other: Simulated | None,
    reports: Mapping[int, Sequence[PassReport]],
    given: Given,
    memory: MemoryLimit | None = None,
    measured: str = "",
    sweep: Sweep | None = None,
    pool_budget: int = 0,
) -> Page:
    """The page's data. `reports`: rank -> reports of its passes; `memory`: the plan's memory limit; `measured`: a clause with the measured
    step; `sweep`: step time against memory budget; `pool_budget`: see `Plan`. Raises PlanError if the plans are not of the same ranks."""
    both = [*([other] if other else []), ours]
    labels = _labels(both)
    costs = {label.ranks[0]: _costs(ours.result, label.ranks[0], given) for label in labels}
    parts = [_plan(each, labels, given) for each in both]
    of_stage = {label.stage: reports[label.ranks[0]] for label in reversed(labels) if label.ranks[0] in reports}
    outcome = Outcome(
        Step.of(ours.result, ours.representative),
        given.profile,
        Step.of(other.result, other.representative) if other else None,
        other.name if other else "",
        errors_of(given.costs, ours.result.input.programs) if other else None,
        memory,
        refusal_of(other.result.input.programs) if other and other.name == BASELINE else "",
        Pools.of(ours.result, other.result if other else None, given.target, pool_budget),
    )
    world = _world(ours.result.input.programs, labels)
    return Page(
        VERSION,
        world,
        _device(given, [row for rows in costs.values() for row in rows]),
        outcome,
        outcome_sentence(outcome, measured, ours.name),
        "" if world.missing else imbalance(outcome.plan),
        WHOSE[memory.whose] if memory else "",
        labels,
        parts,
        rules(of_stage, lambda report: report.done),
        rules(of_stage, lambda report: report.declined),
        sweep,
    )


def _labels(plans: Sequence[Simulated]) -> list[Label]:
    """Ranks whose steps have the same figures in all plans, by stage. Raises PlanError if the plans are not of the same ranks."""
    if any(plan.result.input.ranks != plans[0].result.input.ranks for plan in plans):
        found = " and ".join(str(plan.result.input.ranks) for plan in plans)
        raise PlanError(f"a page compares plans of the same ranks; found {found}; give the same ranks of both")
    groups: dict[object, list[int]] = {}
    for at, rank in enumerate(plans[0].result.input.ranks):
        stage = plans[0].result.input.programs[at].pipeline.stage
        figures = [tuple(getattr(plan.result.ranks[at], name) for name in plan.result.ranks[at].__slots__[1:]) for plan in plans]
        groups.setdefault((stage, *figures), []).extend(plans[0].representative.get(rank, plans[0].result.input.programs[at].ranks))
    return sorted(
        (Label(int(key[0]), sorted(ranks)) for key, ranks in groups.items() if isinstance(key, tuple)),
        key=lambda label: (label.stage, label.ranks),
    )


def _plan(plan: Simulated, labels: Sequence[Label], given: Given) -> PlanPart:
    result = plan.result
    steps, rows = [], []
    for label in labels:
        at = result.input.ranks.index(label.ranks[0])
        items, parts = Items.of(result, at), parts_of(result, at)
        steps.append(RankStep(result.input.programs[at], items, parts, len(label.ranks)))
        rank, profile, span_ns = result.ranks[at], result.memory[at], result.span_ns
        moments, sizes = profile.curve()
        peak_at = int(moments[np.argmax(sizes)])
        memory = Memory(curve(moments, sizes, span_ns), rank.peak_bytes, peak_at, rank.pinned_bytes, held(profile.at_peak()))
        split = Split(*(getattr(rank, name) for name in Split.__struct_fields__))
        costs = {row.op: row for row in _costs(result, label.ranks[0], given)}
        rows.append(
            Row(
                split,
                memory,
                waits(result, at),
                jobs(result, at, items),
                compute_runs(items, span_ns),
                side_runs(items, span_ns),
                gap_runs(parts, span_ns),
                packed(result, at, items, costs),
                *((round(result.joules[at], 3), round(result.mean_mhz(at)), clock(*result.mhz(at), span_ns)) if result.joules else ()),
            )
        )
    return PlanPart(plan.name, result.span_ns, rows, _schedule(result, labels), communication(steps), offloaded(steps), recomputed(steps))


def _costs(result: Result, rank: int, given: Given) -> list[CostRow]:
    return given.costs.table(result.input.programs[result.input.ranks.index(rank)])


def _schedule(result: Result, labels: Sequence[Label]) -> list[str]:
    """Slots of each stage, in the notation of schedule files."""
    first = {label.stage: result.input.programs[result.input.ranks.index(label.ranks[0])] for label in reversed(labels)}
    return [f"{stage} | {' '.join(slot_text(job.name) for job in first[stage].jobs)}" for stage in sorted(first)]


def _world(programs: Sequence[Program], labels: Sequence[Label]) -> World:
    pipe, world = programs[0].pipeline, max(program.world for program in programs)
    there = {rank for label in labels for rank in label.ranks}
    return World(world, pipe.num_stages, pipe.num_micro_batches, pipe.num_chunks, pipe.schedule, sorted(set(range(world)) - there))


def _device(given: Given, rows: Sequence[CostRow]) -> Device:
    profile = given.costs.profile
    made = profile.provenance
    shares = [(how, share, HOW_TOLD[how]) for how, share in shares_by_how(rows).items()]
    return Device(
        given.profile,
        profile.device,
        made.date,
        made.machine,
        made.note,
        given.target.name,
        profile.memory_bytes,
        shares,
        float(np.round(expected_error(rows), 6)),
        [(kind, HOW_TOLD[how], share) for kind, how, share in largest_unmeasured(rows)[:8]],
    )
