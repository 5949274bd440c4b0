"""Tasks that rank 0 has ranks do while a world is planned (`World.map`). Arguments that differ by rank are sequences in rank order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from interlace.cost_model import Costs
from interlace.errors import PlanError
from interlace.ir import Program
from interlace.ir.equivalent_ranks import equivalence_key
from interlace.ir.kinds import is_copy
from interlace.ir.remarks import Remark
from interlace.ir.target import GPU, IDEAL, with_paddles_jobs
from interlace.passes.base import Context, Pass
from interlace.passes.choose_recompute import choices, recomputation
from interlace.passes.pipeline import PassReport, Pipeline, errors_named
from interlace.planning.baseline import BASELINE, baseline_plan
from interlace.planning.budget import peak_bytes, say_budget
from interlace.planning.variants import decided_for_all, send_weight
from interlace.planning.worker import Decision, RankFacts, Sent, Spec, Worker, digest_of
from interlace.scheduler.hazards.pass_orders import changes, orders_of
from interlace.scheduler.interleave.planner import Form
from interlace.scheduler.interleave.slot_times import SlotTimes, StageOrder, changed_by
from interlace.scheduler.jobs.making import Jobs
from interlace.scheduler.jobs.options import ScheduleOptions
from interlace.scheduler.jobs.parts import baseline_jobs
from interlace.scheduler.memory.live import in_order, lifetimes, needed_at_once, order_peak
from interlace.scheduler.offload.optimizer_state import StateOptions, state_bytes
from interlace.scheduler.whole_step.equivalent_stages import work_key
from interlace.scheduler.whole_step.orders import ROUNDS, simulation, with_orders
from interlace.scheduler.whole_step.search import INLINE_SHARES, Numbers, kinds_of
from interlace.units import size

MemoryLimits = tuple[int | None, ...]
"""`Context.memory_limit` of each rank, in bytes."""
Programs = tuple[int, ...]
"""For each rank, the number of a program in its `Worker`; -1 if it was not made there."""
FORMS: tuple[Form, ...] = ("dx-first", "mixed")
"""Forms of jobs from which the coarse model makes schedules."""
MOST_HOLDERS = 4
"""Number of kinds of memory that the error for a budget names."""
TASKS: dict[str, Callable[..., Any]] = {}
"""Tasks by name. The annotated types of a task's arguments and result determine how these are encoded for other processes."""
MANY_JOBS = 256
"""Micro-batches times stages beyond which a step is long (`is_long`)."""
T = TypeVar("T", bound=Callable[..., Any])


def is_long(captured: Program) -> bool:
    """Whether simulating the whole step of a plan takes seconds, so that fewer plans are drafted and simulated less often."""
    return captured.pipeline.num_micro_batches * captured.pipeline.num_stages > MANY_JOBS


def task(function: T) -> T:
    """Decorator that registers a function of a worker as a task."""
    TASKS[function.__name__] = function
    return function


@task
def rank_facts(worker: Worker) -> RankFacts:
    """What a rank tells rank 0 about itself."""
    return worker.facts()


class Passes(msgspec.Struct, frozen=True):
    """Passes to run: `specs[first:last]` of a pipeline."""

    specs: tuple[Spec, ...]
    first: int
    last: int
    memory_limits: MemoryLimits
    draft: bool


class Ran(msgspec.Struct, frozen=True):
    """What some passes made: the number of the program, the numbers of their steps, and the next pass's facts about this rank, encoded."""

    program: int
    steps: tuple[int, ...]
    facts: bytes = b""


@task
def run_passes(worker: Worker, passes: Passes, programs: Programs, told: Decision, wants_facts: bool) -> Ran:
    """Run passes on a program. `told`: facts for the first one; `wants_facts`: whether to return facts for the pass after them."""
    program, room, steps = programs[worker.seat], passes.memory_limits[worker.seat], list[int]()
    if passes.first == 0:
        Pipeline(tuple(map(worker.pass_of, passes.specs))).check(worker.programs[program])
    for k in range(passes.first, passes.last):
        steps.append(worker.step(passes.specs[k], program, room, told if k == passes.first else Decision(), passes.draft))
        program = worker.steps[steps[-1]].result
    facts = worker.facts_of(passes.specs[passes.last], program, room) if wants_facts else b""
    return Ran(program, tuple(steps), facts)


@task
def program_equivalence_key(worker: Worker, programs: Programs) -> bytes:
    """A key that is equal for ranks whose programs can be simulated in place of each other."""
    return equivalence_key(worker.program(programs))


@task
def show_plan(worker: Worker, programs: Programs) -> Sent:
    """This rank's program, for the simulation of the whole step."""
    return Sent(worker.program(programs))


@task
def show_simulated(worker: Worker, programs: Programs, passes: Passes) -> Sent:
    """The same with the waits of the host that a pass after the first of `passes` would add now: what is issued late starts late."""
    program, (_, *later) = worker.program(programs), map(worker.pass_of, passes.specs[passes.first :])
    for each in later:
        if each.decides == "host-waits":
            with errors_named(each):
                program = each.run(program, Context(worker.cost))
    return Sent(program)


class Plans(msgspec.Struct, frozen=True):
    """Plans of one rank of each stage, and passes that delay transfers, which the plans were drafted without."""

    programs: tuple[Sent, ...]
    delaying: tuple[Spec, ...]


Simulated = tuple[int, float] | None
"""Time and energy of a step; None where it would never end."""


@task
def simulated_steps(worker: Worker, every: tuple[Plans, ...], representative: dict[int, int]) -> tuple[Simulated, ...]:
    """The steps of some drafts, of which any process can simulate some."""
    found = []
    for each in every:
        delaying = [worker.pass_of(spec) for spec in each.delaying]
        found.append(simulated_step([sent.program for sent in each.programs], delaying, worker.cost, representative))
    return tuple(found)


def simulated_step(plans: Sequence[Program], delaying: Sequence[Pass], cost: Costs, representative: dict[int, int]) -> Simulated:
    """The step of these plans, one of each stage, with the delays of transfers that these passes decide; of a long step with those of the
    first round, which bring all but some thousandths."""
    run = simulation(cost, representative)
    try:
        if not delaying:
            result = run(plans)
            return result.step_ns, sum(result.joules)
        for each in delaying:
            orders = decided_for_all(each, plans, run, 1 if is_long(plans[0]) else ROUNDS)
            plans = [with_orders(plan, mine) for plan, mine in zip(plans, orders.of_plans, strict=True)]
        return orders.step_ns, orders.joules
    except PlanError:
        return None


@task
def same_jobs(worker: Worker, one: Programs, other: Programs) -> bool:
    """Whether two plans run the same operations in the same order."""
    mine, theirs = ([job.items for job in worker.program(each).jobs] for each in (one, other))
    return mine == theirs


@task
def moves_states(worker: Worker, programs: Programs) -> bool:
    """Whether a plan moves optimizer state to the host."""
    return any(is_copy(op) and op.role == "optimize" for op in worker.program(programs).ops)


# ------------------------------------------------------------------------------------------------------------------- memory


@task
def peak_in_order(worker: Worker, programs: Programs, by_paddle: bool) -> int:
    """Peak device bytes of a plan whose operations run one after the other; 0 without jobs. `by_paddle`: whether Paddle's own jobs run
    rather than those of our lowering."""
    program = worker.program(programs)
    if not program.jobs:
        return 0
    return in_order(program, target=with_paddles_jobs(IDEAL)).peak() if by_paddle else order_peak(program)


@task
def peak_on_gpu(worker: Worker, programs: Programs, by_paddle: bool) -> int | None:
    """Peak device bytes of a plan on a GPU, however fast its host; None if not known. `by_paddle` as in `peak_in_order`."""
    program, key = worker.program(programs), ("GPU peak", programs[worker.seat], by_paddle)
    if key not in worker.memo:
        worker.memo[key] = peak_bytes(program, worker.cost, with_paddles_jobs(GPU) if by_paddle else GPU) if program.jobs else None
    found: int | None = worker.memo[key]
    return found


@task
def baseline_peak(worker: Worker) -> int | None:
    """Peak device bytes of Paddle's baseline on a GPU; None if not known."""
    return peak_bytes(_baseline(worker), worker.cost, with_paddles_jobs(GPU))


def _baseline(worker: Worker) -> Program:
    if BASELINE not in worker.memo:
        worker.memo[BASELINE] = baseline_plan(worker.captured, worker.cost)
    found: Program = worker.memo[BASELINE]
    return found


@task
def least_bytes(worker: Worker, programs: Programs, always: bool, states: StateOptions | None) -> int:
    """Least device bytes with which a program can run, in whatever order and whatever is moved. `always`: count only what lives through the
    whole step. `states`: optimizer state that may leave the device."""
    program = worker.program(programs)
    moved = state_bytes(program, states) if states is not None else 0
    return (lifetimes(program).base["device"] if always else needed_at_once(program)) - moved


@task
def movable_states(worker: Worker, states: StateOptions) -> int:
    """Bytes of optimizer state that may leave the device between updates."""
    return state_bytes(worker.captured, states)


@task
def holders(worker: Worker, programs: Programs) -> str:
    """The kinds of memory of which a plan holds most at its peak, as text."""
    program = worker.program(programs)
    live = in_order(program).at_peak()[:MOST_HOLDERS] if program.jobs else []
    return ", ".join(f"{' '.join(filter(None, (each.layer, each.kind)))} {size(each.size_bytes)}" for each in live)


@task
def could_repeat(worker: Worker) -> bool:
    """Whether recomputation could be added that repeats collectives."""
    more, fewer = (recomputation(worker.captured, worker.cost, worker.memo, adds=True, collectives=each) for each in (True, False))
    return len(more.copies) > len(fewer.copies)


# ------------------------------------------------------------------------------------------------------------ recomputation


@task
def levels_of(
    worker: Worker, limit: int, freed: tuple[tuple[float, int], ...], collectives: bool, states: StateOptions | None
) -> tuple[int, ...]:
    """Levels of `ChooseRecompute` at which a stage frees given amounts of memory, relative to Paddle's order with nothing recomputed. For
    each level `freed` has a share of the bytes by which the stage exceeds `limit` device bytes, and further bytes. With `collectives`,
    added recomputation may repeat collectives; `states` is optimizer state that leaves the device first."""
    stage = _Recomputed(worker, collectives)
    limit += state_bytes(worker.captured, states) if states is not None else 0
    return tuple(stage.level(int(part * max(0, stage.peak(0) - limit)) + more) for part, more in freed)


@task
def higher_level(worker: Worker, levels: Numbers, freed_bytes: tuple[int, ...], collectives: bool) -> int:
    """The level at which a stage holds less than at its level in `levels` (by stage), by its entry of `freed_bytes` (by rank)."""
    stage, freed = _Recomputed(worker, collectives), freed_bytes[worker.seat]
    mine = levels[worker.captured.pipeline.stage]
    return max(mine, stage.level(stage.peak(0) - stage.peak(mine) + freed)) if freed else mine


class _Recomputed:
    """The peak of a stage in Paddle's own schedule at each level of recomputation."""

    def __init__(self, worker: Worker, collectives: bool) -> None:
        self.memo, self.collectives = worker.memo, collectives
        self.found = recomputation(worker.captured, worker.cost, worker.memo, adds=True, collectives=collectives)
        self.choices = choices(worker.captured, worker.cost, worker.memo, collectives)

    def level(self, freed_bytes: int) -> int:
        """The least level that frees `freed_bytes` at the peak; the last one if none does."""
        if freed_bytes <= 0 or not self.found.groups:
            return 0
        return self.choices.least(self.peak(0) - freed_bytes, self.peak)

    def peak(self, level: int) -> int:
        """Peak live device bytes at a level."""
        chosen = self.choices.at(level) if self.found.groups else frozenset()
        key = ("peak", self.collectives, chosen)
        if key not in self.memo:
            self.memo[key] = _baseline_order_peak(self.found.without(group for k, group in enumerate(self.found.groups) if k not in chosen))
        peak: int = self.memo[key]
        return peak


def _baseline_order_peak(program: Program) -> int:
    return in_order(msgspec.structs.replace(program, jobs=baseline_jobs(program))).peak()


# ---------------------------------------------------------------------------------------------- what the jobs of a stage cost


class StageWork(msgspec.Struct, frozen=True):
    """The work of a stage at each level of recomputation.

    Attributes:
        work: Keys of what its jobs do (`work_key`); for equal keys, the cost of jobs is computed on only one stage.
        peak_bytes: Peak device memory of Paddle's baseline.
    """

    work: tuple[str, ...]
    peak_bytes: tuple[int, ...]


@task
def stage_work(worker: Worker, programs: tuple[Programs, ...], baseline_peaks: tuple[int, ...]) -> StageWork:
    """The work of a stage. `programs`: for each level of recomputation, the programs before the schedule; `baseline_peaks`: peaks of
    Paddle's baseline."""
    made = [worker.program(each) for each in programs]
    works = [f"{' '.join(_kinds(worker.captured))} {work_key(each, worker.cost)}" for each in made]
    peaks = {works[0]: baseline_peaks[worker.seat]}
    if len(made) > 1:
        peaks = {work: _baseline_order_peak(each) for work, each in zip(works, made, strict=True)}
    return StageWork(tuple(f"{works[0]} {work}" for work in works), tuple(peaks[work] for work in works))


Orders = tuple[StageOrder, ...]
"""The cost of each kind of job on a stage, in every order that schedules may use."""


@task
def job_orders(
    worker: Worker,
    asked: ScheduleOptions,
    programs: tuple[tuple[int, ...], ...],
    like: tuple[Orders, ...],
    memory_limits: MemoryLimits,
) -> list[Orders]:
    """The orders of jobs for several programs before the schedule (given by rank). `like` has, by rank, the orders with other
    recomputation. For jobs in which some weight gradients do not trail, it is then assumed that they change in the same way as those in
    which all do."""
    context = worker.context(memory_limits[worker.seat])
    return [stage_orders(asked, worker.programs[number], like[worker.seat], context) for number in programs[worker.seat]]


def stage_orders(asked: ScheduleOptions, before: Program, like: Sequence[StageOrder], context: Context) -> Orders:
    """See `job_orders`."""
    pipe, kinds = before.pipeline, _kinds(before)
    halved = [kind for kind in kinds if {"I", "W"} & {part[0] for part in kind.split("+")}]
    whole = [kind for kind in kinds if kind not in halved]
    known = {(each.form, each.early, each.inline_share): each.slots for each in like}
    found: dict[tuple[Form, bool, float], dict[str, SlotTimes]] = {}
    for name, early in itertools.product(FORMS, (True, False)):
        form = msgspec.structs.replace(asked, interleave=name, search=False, send_latency_weight=send_weight(asked) if early else 0.0)
        slots = _times(form, before, {"I", "W"}, halved, context) | _times(form, before, {"B"}, whole, context)
        if like:
            old = known[name, early, 0.0]
            found |= {
                key: {kind: changed_by(each, old[kind], slots[kind]) for kind, each in slots_of.items()}
                for key, slots_of in known.items()
                if key[:2] == (name, early)
            }
            continue
        found[name, early, 0.0] = slots
        for inline_share in INLINE_SHARES[1:] if pipe.num_stages > 1 and pipe.num_chunks == 1 else ():
            found[name, early, inline_share] = _times(
                msgspec.structs.replace(form, inline_share=inline_share), before, {"I", "W"}, halved, context
            )
    return tuple(StageOrder(*key, slots) for key, slots in sorted(found.items()))


def _times(form: ScheduleOptions, before: Program, parts: set[str], kinds: Sequence[str], context: Context) -> dict[str, SlotTimes]:
    """Times of kinds of jobs, with backward as a whole or in halves."""
    jobs = Jobs(before, form, context.cost, context.memo, context.memory_limit is not None, context.extra_bytes)
    found = dict[str, SlotTimes]()
    ops = jobs.parts(parts)
    for kind in kinds:
        each = tuple((part[0], part[0], int(part[2:] or 0)) for part in kind.split("+"))
        found[kind] = jobs.order(ops, each, form.form_of(before.pipeline.stage))[1]
    return found


def _kinds(program: Program) -> list[str]:
    """Kinds of jobs that a stage may have."""
    pipe = program.pipeline
    return list(kinds_of(pipe.stage, pipe.num_stages, pipe.num_micro_batches, pipe.num_chunks))


# ----------------------------------------------------------------------------------------------------------------- the plan


@task
def finish(
    worker: Worker, specs: tuple[Spec, ...], programs: Programs, steps: tuple[tuple[int, ...], ...], notes: tuple[Remark, ...], budget: int
) -> str:
    """Set the finished plan of a worker, with the reports of its steps and `notes` on what was decided; returns its digest. `specs` are the
    passes that made it, `budget` the device bytes that it may hold, 0 without a budget."""
    made, reports, before = worker.program(programs), list[PassReport](), worker.captured
    for step in (worker.steps[number] for number in steps[worker.seat]):
        after = worker.programs[step.result]
        reports.append(msgspec.structs.replace(_noted(step.report, notes), orders=changes(orders_of(before), orders_of(after))))
        before = after
    if budget:
        reports = say_budget(made, [worker.pass_of(spec) for spec in specs], reports, budget, peak_bytes(made, worker.cost))
    worker.finished = made, tuple(reports)
    return digest_of(made)


def _noted(report: PassReport, notes: Sequence[Remark]) -> PassReport:
    """A report with the remarks in `notes` about its pass added."""
    mine = tuple(each for each in notes if each.pass_name == report.name)
    return msgspec.structs.replace(report, remarks=(*report.remarks, *mine)) if mine else report


@task
def finished_plan(worker: Worker) -> tuple[Sent, tuple[PassReport, ...]]:
    """The finished plan, and the reports of its passes."""
    program, reports = worker.finished
    return Sent(program), reports


@task
def baseline_program(worker: Worker) -> Sent:
    """The program of Paddle's baseline."""
    return Sent(_baseline(worker))
