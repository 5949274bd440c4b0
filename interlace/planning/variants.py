"""Variants of a pass that planning compares, according to what the pass decides (`Pass.decides`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar, cast

import msgspec

from interlace.ir import Program
from interlace.ir.schedule import in_flight, mixed_depth
from interlace.passes import ChooseRecompute, DelayTransfers, Pass, Pipeline, ReturnMemory, Schedule1F1B, ThrottleHost
from interlace.passes.base import Decides
from interlace.scheduler.interleave.planner import EARLY, Form
from interlace.scheduler.jobs.options import ScheduleOptions, numbers_text
from interlace.scheduler.offload.optimizer_state import StateOptions
from interlace.scheduler.recompute.choices import LEVELS
from interlace.scheduler.whole_step.orders import ROUNDS, Orders, Simulation, find_orders
from interlace.scheduler.whole_step.search import Numbers, Ranked

S = TypeVar("S", bound=ScheduleOptions)


def deciding(passes: Sequence[Pass], what: Decides) -> Pass | None:
    """The pass that decides `what`; None if there is none."""
    return next((each for each in passes if each.decides == what), None)


def schedule_of(made: Pipeline) -> Schedule1F1B | None:
    """The pass that makes the schedule; None if there is none."""
    return cast("Schedule1F1B | None", deciding(made.passes, "schedule"))


def recomputation_of(made: Pipeline) -> ChooseRecompute | None:
    """The pass that chooses what is recomputed; None if there is none."""
    return cast("ChooseRecompute | None", deciding(made.passes, "recomputation"))


def moving_states(made: Pipeline) -> StateOptions | None:
    """Which optimizer state a pass may move under a budget; None if no pass moves any."""
    found = deciding(made.passes, "states")
    return StateOptions(modules=found.modules, min_bytes=found.min_bytes) if isinstance(found, StateOptions) else None


# ---------------------------------------------------------------------------------------------------------------- of one pass


def draft(each: Pass) -> Pass | None:
    """The pass in a draft: without what is slow to plan and hardly changes the simulated step. None if it can be left out, unless another
    pass needs what it gives."""
    if each.decides == "schedule":
        return without_search(cast("Schedule1F1B", each))
    return each if each.in_drafts else None


def baseline(each: Pass) -> Pass | None:
    """The pass in Paddle's baseline; None if the baseline does not have it."""
    if each.decides == "schedule":
        return paddles_jobs(cast("Schedule1F1B", each))
    if each.decides == "host-waits":
        return ThrottleHost(syncs="outputs")
    return each if each.in_baseline else None


def alternatives(each: Pass) -> tuple[Pass, ...]:
    """Other variants of a pass, compared with it by the simulated whole step. The only ones: a host that waits at the ends of jobs, so that
    receives are posted when they are due and do not slow products while they wait."""
    if each.decides != "host-waits" or cast("ThrottleHost", each).syncs != "auto":
        return ()
    return (msgspec.structs.replace(each, syncs="job-ends"),)


def holding_less(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """The passes with streams that also wait at their ends for the last readers of blocks (`return-memory`); the same if none returns
    memory, or the user says whether they wait."""
    return tuple(
        msgspec.structs.replace(given, at_end="on")
        if each.decides == "memory-returned" and (given := cast("ReturnMemory", each)).at_end == "auto"
        else each
        for each in passes
    )


def fallbacks(each: Pass) -> tuple[Pass, ...]:
    """Milder variants of a pass, the plainest last, for when the step would be slower than with the plainest. For a schedule with pairs
    these are `dx-first`, then `off`. A schedule file and `zb-h1` are used as given and have none."""
    return milder(cast("Schedule1F1B", each)) if each.decides == "schedule" else ()


def label(each: Pass) -> str:
    """The short name of a variant in reports that compare it with another."""
    if each.decides == "schedule":
        return schedule_label(cast("Schedule1F1B", each))
    if each.decides == "memory-returned" and cast("ReturnMemory", each).at_end == "on":
        return "return_memory: {at_end: on}"
    return f"throttle_host: {{syncs: {cast('ThrottleHost', each).syncs}}}" if each.decides == "host-waits" else each.name


def decided_for_all(each: Pass, plans: Sequence[Program], run: Simulation, rounds: int = ROUNDS) -> Orders:
    """The decision of a pass that decides `transfers`, for all ranks, from one plan of each stage, after at most `rounds` rounds. Raises
    PlanError if the step cannot be simulated."""
    return find_orders(plans, run, 1000 * cast("DelayTransfers", each).margin_us, rounds)


# -------------------------------------------------------------------------------------------------------------- of a schedule


def is_open(schedule: ScheduleOptions) -> bool:
    """Whether the form is to be chosen by simulating whole steps (`fastest.py`)."""
    return schedule.interleave == "auto" and not schedule.schedule_file


def without_search(schedule: S) -> S:
    """The schedule without local search inside jobs."""
    return msgspec.structs.replace(schedule, search=False)


def with_search(schedule: S) -> S:
    """The schedule with local search inside jobs."""
    return msgspec.structs.replace(schedule, search=True)


def paddles_jobs(schedule: S) -> S:
    """The schedule with Paddle's own list of jobs, or with that of the schedule file if it has one."""
    plain = _in_time(schedule)
    return msgspec.structs.replace(plain, interleave="off", send_latency_weight_at_end=None, join_optimizer=True, reductions_first=False)


def at_plain_depth(schedule: S) -> S:
    """The replacement for a form that changes the depth, if on any rank forward and backward both draw random numbers."""
    return msgspec.structs.replace(schedule, interleave="dx-first")


def with_optimizer_alone(schedule: S) -> S:
    """The schedule with the optimizer in a job of its own, as it has with Paddle's jobs."""
    return schedule if schedule.interleave == "off" else msgspec.structs.replace(schedule, join_optimizer=False, reductions_first=False)


def with_reductions_first(schedule: S) -> S:
    """The schedule with gradients that are reduced first; the same if its jobs keep Paddle's order or are given, or its optimizer has a job
    of its own."""
    if schedule.interleave == "off" or not schedule.join_optimizer or schedule.schedule_file:
        return schedule
    return msgspec.structs.replace(schedule, reductions_first=True)


def _in_time(schedule: S) -> S:
    """The schedule at the usual depth, with weight gradients in their own backward jobs (no delay)."""
    return msgspec.structs.replace(schedule, weight_delay=0, weight_delay_at_end=None, depth=(), inline_share=0.0)


def milder(schedule: S) -> tuple[S, ...]:
    """See `fallbacks`."""
    forms: dict[Form, tuple[Literal["dx-first", "off"], ...]] = {"mixed": ("dx-first", "off"), "dx-first": ("off",)}
    if not schedule.only_gains or schedule.schedule_file:
        return ()
    plain = _in_time(schedule)
    names = () if schedule.interleave in ("auto", "off", "zb-h1") else forms["mixed" if schedule.mixes() else "dx-first"]
    simpler = tuple(paddles_jobs(plain) if name == "off" else msgspec.structs.replace(plain, interleave=name) for name in names)
    return (plain, *simpler) if simpler and (schedule.weight_delay or schedule.depth) else simpler


def named(schedule: S, program: Program, draws: bool) -> list[S]:
    """The forms by name that are possible for a program, the same on every rank. `draws`: whether `draws_twice` holds on any rank."""
    pipe = program.pipeline
    names: tuple[str, ...] = ("dx-first", "mixed") if pipe.alternates else ("dx-first",)
    if pipe.alternates and pipe.num_chunks == 1 and pipe.num_stages > 1:
        names = (*names, "zb-h1")
    forms = [msgspec.structs.replace(schedule, interleave=name) for name in names]
    return [form for form in forms if not (draws and form.changes_depth(pipe))]


def send_weight(schedule: ScheduleOptions) -> float:
    """The weight of sends in schedules that let them leave early."""
    return schedule.send_latency_weight if isinstance(schedule.send_latency_weight, float) else EARLY


def as_found(schedule: S, found: Ranked, program: Program, draws: bool) -> S:
    """The options for a schedule that the coarse model found; `draws` as in `named`."""
    pipe, each, weight = program.pipeline, found.schedule, send_weight(schedule)
    plain = tuple(
        (mixed_depth if form == "mixed" else in_flight)(s, pipe.num_stages, pipe.num_micro_batches) for s, form in enumerate(each.form)
    )
    weight_delay_at_end = tuple(
        weight_delay + more for weight_delay, more in zip(each.weight_delay, each.more_weight_delay_at_end, strict=True)
    )
    early, at_end = (weight if all(which) else tuple(weight * one for one in which) for which in (each.early, each.early_at_end))
    return msgspec.structs.replace(
        schedule,
        interleave=each.form[0] if len({*each.form}) == 1 else each.form,
        weight_delay=each.weight_delay if any(each.weight_delay) else 0,
        weight_delay_at_end=None if weight_delay_at_end == each.weight_delay else weight_delay_at_end,
        depth=() if pipe.num_chunks > 1 or (each.depth == plain and not draws) else each.depth,
        send_latency_weight=early,
        send_latency_weight_at_end=None if at_end == early else at_end,
        inline_share=each.inline_share if any(each.inline_share) else 0.0,
    )


def schedule_label(schedule: ScheduleOptions) -> str:
    """The form of interleaving as text, with the options that differ from its defaults."""
    at_end, early_at_end = schedule.weight_delay_at_end, schedule.send_latency_weight_at_end
    more = [f"weight_delay {numbers_text(schedule.weight_delay)}"] * bool(schedule.weight_delay)
    more += [f"weight_delay_at_end {numbers_text(at_end)}"] if at_end is not None else []
    more += [f"depth {numbers_text(schedule.depth)}"] * bool(schedule.depth)
    more += [f"inline_share {numbers_text(schedule.inline_share)}"] * bool(schedule.inline_share)
    more += [f"send_latency_weight {numbers_text(schedule.send_latency_weight)}"] * (schedule.send_latency_weight != EARLY)
    more += [f"send_latency_weight_at_end {numbers_text(early_at_end)}"] if early_at_end is not None else []
    more += ["join_optimizer off"] * (not schedule.join_optimizer)
    more += ["reductions_first on"] * schedule.reductions_first
    return ", ".join([f"interleave: {schedule.form_text()}", *more])


# --------------------------------------------------------------------------------------------------------------- of pipelines


def drafted(made: Pipeline) -> Pipeline:
    """The passes for a plan that is only simulated: drafts of passes, and full ones if another pass needs what they give."""
    drafts = [draft(each) for each in made.passes]
    needed = frozenset().union(*(each.needs for each in drafts if each is not None))
    kept = (each or whole for whole, each in zip(made.passes, drafts, strict=True) if each is not None or whole.gives & needed)
    return Pipeline(tuple(kept), is_draft=True)


def with_schedule(made: Pipeline, schedule: Schedule1F1B) -> Pipeline:
    """The passes with this schedule."""
    return Pipeline(tuple(schedule if each.decides == "schedule" else each for each in made.passes))


def recomputing(made: Pipeline, index: int | Numbers) -> Pipeline:
    """The passes with this level of recomputation (`ChooseRecompute.level_index`), one for all stages or one for each."""
    level = index / LEVELS if isinstance(index, int) else tuple(each / LEVELS for each in index)
    of_passes = (msgspec.structs.replace(each, level=level) if each.decides == "recomputation" else each for each in made.passes)
    return Pipeline(tuple(of_passes))


def waiting(made: Pipeline) -> Pipeline:
    """The passes with their alternatives in place: a host that waits at the ends of jobs."""
    return Pipeline(tuple(next(iter(alternatives(each)), each) for each in made.passes))


def in_paddles_order(made: Pipeline) -> Pipeline:
    """The passes with Paddle's own jobs, if the form was open; otherwise unchanged."""
    schedule = schedule_of(made)
    return with_schedule(made, paddles_jobs(schedule)) if schedule is not None and is_open(schedule) else made


def paddles_own(asked: Pipeline, within_budget: bool = True) -> Pipeline:
    """The passes with Paddle's own jobs and streams. Other passes of the user still run, but with `within_budget` not those that follow the
    budget."""
    mine = [each for each in asked.passes if not within_budget or not each.follows_budget]
    return Pipeline(tuple(kept for each in mine if (kept := baseline(each)) is not None))


def paddles_streams(asked: Pipeline) -> Pipeline:
    """The passes with Paddle's own jobs and streams, including those that follow the budget."""
    variants = (each if each.follows_budget else baseline(each) for each in asked.passes)
    return Pipeline(tuple(each for each in variants if each is not None))
