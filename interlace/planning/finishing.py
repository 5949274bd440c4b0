"""The plan of a world, from the complete runs that its search found: what the search leaves open is compared on the whole step.

- Memory that was returned in order (`return-memory`) although nobody asked for it may not pay in the end.
- Jobs of the fastest runs are searched further.
- With a limit above the default's, the plan of the default is made as well, and taken if it is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from interlace.ir.remarks import Remark
from interlace.passes import Pass, Pipeline, ordered
from interlace.planning.limits import SLACK, baseline_bytes
from interlace.planning.making import Making, said
from interlace.planning.search import Search, key_of
from interlace.planning.tasks import is_long
from interlace.planning.variants import deciding, is_open, label, schedule_of, with_schedule, with_search
from interlace.planning.world import Made

MOST_SEARCHED = 3000
"""Most operations of programs whose jobs are searched further in the end, summed over ranks that are not equivalent. In larger ones the
step got 0.1 % shorter at most, and planning took up to a fifth longer (eight programs, simulated)."""

NEARLY = 1.01
"""Runs whose step is longer by at most this factor than that of the fastest run searched so far are searched inside jobs too: that makes
steps 0.1 to 1 % shorter, depending on the schedule."""

LEAST_GAIN = 1.0001
"""Another run is taken if its step is shorter by more than this factor. A smaller gain does not justify pools that may be larger: one
program's grew by 5 % for 0.0006 % of the step."""


def planned_within(search: Search, budget: int, means: Sequence[Pass] = ()) -> Made:
    """The plan within a memory budget, in device bytes; see `Search.within`."""
    return or_by_default(search, finished(search, search.within(budget, means), budget, means), budget, means)


def planned_by_default(search: Search, means: Sequence[Pass] = ()) -> Made:
    """The plan without a budget; see `Search.beside_baseline`."""
    limit = search.limit_of_baseline
    return or_by_default(search, finished(search, search.beside_baseline(means), limit, means), limit, means)


def finished(search: Search, made: Made, limit: int, means: Sequence[Pass] = ()) -> Made:
    """The run that a search decided on, or a faster one within a limit in device bytes (0 for none) without passes that nobody asked for,
    or with jobs that are searched further. `means` as for `ordered_further`."""
    return ordered_further(search, with_fewer_means(search, made, limit), limit, means)


def with_fewer_means(search: Search, made: Made, limit: int) -> Made:
    """`made`, or the run of its passes without `return-memory`, if nobody asked for that pass, and the step is shorter and within the limit
    (device bytes) without it: offload then frees more, and no stream waits to return memory. Not tried with long steps, of which another
    plan takes long."""
    world, fewer = search.world, Pipeline(tuple(each for each in made.passes.passes if each.decides != "memory-returned"))
    took, is_asked = world.step_ns(made), deciding(search.asked.passes, "memory-returned") is not None
    if fewer == made.passes or is_asked or took is None or not any(made.memory_limits) or is_long(world.captured):
        return made
    run = search.make.made(fewer, made.memory_limits)
    other = world.step_ns(run)
    if other is None or other >= took or any(world.bytes_over_in_step(run, limit)):
        return made
    gone = {label(each) for each in made.passes.passes if each not in fewer.passes}
    kept = [_without_others(each, gone) for each in made.notes if each.rule not in ("memory-returned-faster", "made-again")]
    search.recorded(made)
    return search.recorded(run.noted(*kept, said("decided", "memory-not-returned-faster", step_ns=other, with_ns=took)))


def ordered_further(search: Search, made: Made, limit: int, means: Sequence[Pass] = ()) -> Made:
    """The fastest with a local search inside the jobs: `made`, the fastest without that search, or one of the search's runs that take
    nearly as long (`NEARLY`) and hold no more than the limit in device bytes (0 for none), or than `made` if that is more. `made` itself is
    returned if the form was not open, or if nothing faster is found. `means` are passes that were not asked for; those that follow a budget
    may be used to keep the limit."""
    world, asked = search.world, schedule_of(search.asked)
    took = world.step_ns(made)
    if asked is None or not (asked.search and is_open(asked)) or took is None or search.make.is_alone:
        return made
    if sum(world.facts[rank].num_ops for rank in world.firsts) > MOST_SEARCHED:
        return made
    limit = limit and limit + max(world.bytes_over_in_step(made, limit))
    others = [run for run in search.runs if key_of(run) != key_of(made) and world.step_ns(run) is not None]
    first = best = search.recorded(_searched_inside_jobs(search, search.recorded(made), limit, means))
    for run in sorted(others, key=lambda each: _step_ns(search, each)):
        if _step_ns(search, run) > NEARLY * _step_ns(search, best):
            break
        if not limit or not any(world.bytes_over_in_step(run, limit)):
            searched = search.recorded(_searched_inside_jobs(search, run, limit, means))
            best = searched if LEAST_GAIN * _step_ns(search, searched) < _step_ns(search, best) else best
    if best is first:
        return first
    return best.noted(said("decided", "searched-run-faster", step_ns=_step_ns(search, best), other_ns=_step_ns(search, first)))


def or_by_default(search: Search, within: Made, limit: int, means: Sequence[Pass]) -> Made:
    """`within`, a run within a limit in device bytes, or the plan of the default, if the limit exceeds the default's and that plan is
    faster: among more schedules, the coarse model may take the better ones for worse. `means` are the passes that were not asked for and
    may be used. Not tried with long steps, of which another plan takes long."""
    world, form = search.world, schedule_of(search.asked)
    default, took = int(SLACK * baseline_bytes(world)), world.step_ns(within)
    if not 0 < default < limit or took is None or form is None or not is_open(form) or is_long(world.captured):
        return within
    again = Search(world, search.without_budget)
    again.make.beaten = search.make.beaten_by(took)
    every = (*(each for each in search.asked.passes if each not in again.asked.passes), *means)
    found = finished(again, again.beside_baseline(every, default), default, every)
    for run in (*again.runs, found, within):
        search.recorded(run)
    other = world.step_ns(found)
    if other is None or other >= took or any(world.bytes_over_in_step(found, limit)):
        return within
    found = replace(found, memory_limits=tuple(each or 0 for each in found.memory_limits))
    return found.noted(said("decided", "default-faster", step_ns=other, within_ns=took, limit_bytes=default))


def _searched_inside_jobs(search: Search, made: Made, limit: int, means: Sequence[Pass]) -> Made:
    """`made` with a local search inside its jobs, or as it is; see `ordered_further`."""
    world, form = search.world, schedule_of(made.passes)
    if form is None or form.interleave == "off":
        return made
    passes, memory_limits = with_schedule(made.passes, with_search(form)), made.memory_limits
    searched = search.make.holding_less(passes, tuple(each or None for each in memory_limits), limit)
    before, after = world.step_ns(made), world.step_ns(searched)
    if before is None or after is None or after >= before:
        return made
    if limit and any(world.bytes_over_in_step(searched, limit)):
        there = {each.name for each in made.passes.passes}
        more = [each for each in search.following(means) if each.name not in there]
        every = ordered((*passes.passes, *more))
        lighter = Making(world, every).within(every, limit) if more else None
        after = world.step_ns(lighter) if lighter is not None else None
        if lighter is None or after is None or after >= before:
            return made
        searched, memory_limits = lighter, lighter.memory_limits
    taken = searched.noted(*made.notes, said("decided", "searched-inside-jobs", step_ns=after, without_ns=before))
    return replace(taken, memory_limits=memory_limits)


def _step_ns(search: Search, run: Made) -> int:
    """The simulated step of a run that ends; 0 of one that never does."""
    return search.world.step_ns(run) or 0


def _without_others(note: Remark, gone: set[str]) -> Remark:
    """A remark on the form that was taken, without variants of passes that did not run in the end, by label."""
    if "others" not in note.names:
        return note
    others = tuple(each for each in note.names["others"] if each not in gone)
    names = {name: value for name, value in note.names.items() if name != "others"} | ({"others": others} if others else {})
    return msgspec.structs.replace(note, names=names)
