"""`interleave: auto`: Paddle's own plan, the named forms and schedules with a form, a lag, a depth, orders and recomputation for each stage
are simulated as whole steps; the fastest that holds no more memory than it may is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from interlace.cost_model import Costs
from interlace.ir import Program
from interlace.passes.base import Context, Pass
from interlace.passes.choose_recompute import ChooseRecompute
from interlace.passes.offload_activations import OffloadActivations
from interlace.passes.peers import Peers, gather, stand_ins
from interlace.passes.pipeline import PassReport, Pipeline
from interlace.passes.schedule_1f1b import DRAWS, Schedule1F1B, draws_twice, mixed_depth
from interlace.planning.budget import peak_bytes
from interlace.planning.judge import Run, noted, run_judged, step_ns
from interlace.planning.stock import STOCK
from interlace.scheduler.interleave.planner import EARLY, Form
from interlace.scheduler.jobs import stock_jobs
from interlace.scheduler.memory.live import in_order, order_peak
from interlace.scheduler.recompute import recomputes
from interlace.scheduler.recompute_choices import LEVELS
from interlace.scheduler.schedule import in_flight
from interlace.scheduler.target import GPU, IDEAL, with_paddles_jobs
from interlace.scheduler.whole_step.alike import likeness_of_work
from interlace.scheduler.whole_step.search import AT_ONCE, Numbers, Ranked, find_schedules, kinds_of
from interlace.scheduler.whole_step.slot_times import SlotTimes, StageOrder, StageTimes, changed_by
from interlace.units import ms, size

FORMS: tuple[Form, ...] = ("dx-first", "mixed")
"""Forms of jobs of which the coarse model makes schedules."""
LAG_SCHEDULES = 3
"""Schedules of the coarse model that are planned in full, as drafts."""
SLACK = 1.01
"""A peak counts as Paddle's own up to this factor: allocators round by more."""


ROUNDS = 4
"""Plans of one form that are made at most; each keeps free the bytes by which the one before exceeded the budget on a GPU."""
PADDLES_JOBS = "Paddle's order of jobs with the other passes (interleave: off)"
"""How reports call the form that leaves jobs as they are: Paddle's own plan has neither these passes nor their streams."""
FINALISTS = 1
"""Forms, the fastest first, whose later passes are tried in their alternatives too, under a budget (waits at the peak hold less than those
at the ends of jobs) and where transfers are delayed: where the host waits then changes a step by 1 % at most. Else all that fit."""
SHRINKS = 0.75
"""A form is given up where a plan with less room exceeds the budget by more than this part of what the one before did."""
OVER_BUDGET = (1.1, 1.3)
"""Schedules are also looked for in so many times the budget, one of each: offload then moves the rest."""
PAYS = 0.005
"""Without a budget, recomputation is looked at only where steps that hold as much as they like are shorter by this part."""
ANY = 1 << 60
"""More bytes than any device has."""
TIGHTER = (0.95, 0.85)
"""Parts of the budget: forms that exceed it are drafted again as these would have them."""
MOST_TIGHTER = 3
"""Forms, the fastest first, of which that is done."""
CLOSER, NEARLY = 2, 1.05
"""Without a budget: times that schedules are looked for in less memory, and so many times what they may hold is nearly that."""
LESS = (0.03, 0.015)
"""Parts of the budget that recomputation leaves to offload, on one stage after the other: the first that it can give back. With 0.06 tried
besides three of nine plans are faster, by 0.1 % at most, and planning takes a fifth longer."""
FAR = 0.25
"""What exceeds the budget by more than this part of it is not drafted again with less room."""


class Found(msgspec.Struct, frozen=True):
    """What rank 0's search gave, and whether schedules that hold more would be faster by as much as `PAYS`."""

    schedules: tuple[Ranked, ...] = ()
    memory_pays: bool = False


class Stage(msgspec.Struct, frozen=True):
    """What one rank says of its stage with more and more recomputed; nothing from ranks that others stand for.

    Attributes:
        work: What its jobs do (`likeness_of_work`): where it is equal, what they cost is worked out on one stage.
        peak_bytes: Device memory of Paddle's own plan at its peak.
    """

    stage: int = -1
    work: tuple[str, ...] = ()
    peak_bytes: tuple[int, ...] = ()


class OrdersOfWork(msgspec.Struct, frozen=True):
    """What one rank found of the jobs that do a kind of work."""

    of_work: dict[str, tuple[StageOrder, ...]] = {}


@dataclass(frozen=True, slots=True)
class Room:
    """Under a memory budget.

    Attributes:
        bytes: What passes may use on this rank for the order of operations.
        limit_bytes: The budget, which a form must keep on a GPU.
        levels: How much each stage recomputes (`ChooseRecompute.level_index`) with which Paddle's own order keeps the budget, for forms
            by name; then what leaves more and more of the excess to offload. Empty where the passes say it.
    """

    bytes: int
    limit_bytes: int
    levels: tuple[Numbers, ...] = ()


class Levels(Protocol):
    """How much each stage may recompute."""

    def __call__(self, limit: int, beyond: Sequence[float] = ...) -> tuple[Numbers, ...]:
        """By stage, from nothing to most: a schedule may have any of them on each stage.

        Args:
            limit: Device bytes that no stage may pass in Paddle's order.
            beyond: Parts of the limit by which recomputation may give back more than it takes for that, one for each level after the first.
        """
        ...


@dataclass(frozen=True, slots=True)
class Before:
    """The passes before the schedule, what they made of the program, and what they said."""

    passes: tuple[Pass, ...]
    program: Program
    reports: list[PassReport]


@dataclass(frozen=True, slots=True)
class Judged:
    """A form and the passes after it, as drafted.

    Attributes:
        recomputed: How much each stage recomputes; None where the passes say it.
        room_bytes: What passes might use on this rank.
        step_ns: Simulated step; None if it never ends.
        peak_bytes: Peak on the worst stage.
    """

    form: Schedule1F1B
    later: tuple[Pass, ...]
    recomputed: Numbers | None
    room_bytes: int | None
    step_ns: int | None
    peak_bytes: int

    def label(self, asked: tuple[Pass, ...]) -> str:
        """The form in a few words, how much it recomputes, and what differs from the later passes as they were asked for."""
        again = [f"recomputed {_level_text(self.recomputed)}"] if self.recomputed else []
        named = PADDLES_JOBS if self.form.interleave == "off" else self.form.label()
        return ", ".join([named, *again, *(each.label() for each in self.later if each not in asked)])


def run_passes(
    pipeline: Pipeline, program: Program, cost: Costs, peers: Peers | None = None, room: Room | None = None, levels: Levels | None = None,
    memo: dict[Any, Any] | None = None,
) -> tuple[Run, int | None]:  # fmt: skip
    """Run the passes; where the form of one is open, or has milder ones, the whole step decides. Without `levels` the passes say how much
    is recomputed. `memo` has what is known of the program (`Context.memo`).

    Returns:
        The run, and the bytes that its passes might use on this rank; None without a budget.

    Raises:
        PassError: As `Pipeline.run`.
    """
    asked = next((each for each in pipeline.passes if isinstance(each, Schedule1F1B)), None)
    alone = peers is None and program.pipeline.num_stages > 1
    if asked is not None and asked.changes_depth(program) and any(gather(peers, "draws", draws_twice(program))):
        plain = Pipeline(tuple(asked.at_plain_depth() if each is asked else each for each in pipeline.passes))
        run, used = run_passes(plain, program, cost, peers, room, levels, memo)
        return noted(run, Schedule1F1B.name, [], [DRAWS]), used
    if asked is not None and asked.is_open() and not alone:
        pipeline.check(program)
        return _Choice(pipeline, asked, program, cost, peers, room, levels, memo).run()
    if room is None or not room.levels:
        used, limit = (room.bytes, room.limit_bytes) if room else (None, 0)
        return run_judged(pipeline, program, cost, peers, used, limit), used
    pipeline.check(program)
    recomputed, used = room.levels[0], room.bytes
    if asked is not None and not alone and len(set(room.levels)) > 1:
        best = _Choice(pipeline, asked, program, cost, peers, room, memo=memo).best_level()
        recomputed, used = best.recomputed or recomputed, best.room_bytes or used
    return run_judged(recomputing(pipeline, recomputed), program, cost, peers, used, room.limit_bytes), used


def recomputing(made: Pipeline, level: int | Numbers) -> Pipeline:
    """The passes with so much recomputed, on every stage or by stage."""
    return Pipeline(tuple(each.with_level(level) if isinstance(each, ChooseRecompute) else each
                          for each in made.passes))  # fmt: skip


class _Choice:
    def __init__(
        self,
        pipeline: Pipeline,
        asked: Schedule1F1B,
        program: Program,
        cost: Costs,
        peers: Peers | None,
        room: Room | None,
        levels: Levels | None = None,
        memo: dict[Any, Any] | None = None,
    ) -> None:
        self.pipeline, self.asked, self.program, self.cost, self.peers = pipeline, asked, program, cost, peers
        self.room, self.room_bytes, self.levels = room, room.bytes if room else None, levels
        self.context = Context(cost, room_bytes=self.room_bytes, memo={} if memo is None else memo)
        at = pipeline.passes.index(asked)
        self.earlier, self.later = Pipeline(pipeline.passes[:at]), pipeline.passes[at + 1 :]
        self.early = asked.early_sends if isinstance(asked.early_sends, float) else EARLY
        self.known: dict[Numbers | None, Before] = {}
        self.needed = room.levels[0] if room and room.levels else None
        self.recomputes = any(gather(peers, "recomputation", recomputes(program)))
        self.draws = any(gather(peers, "draws", draws_twice(program)))
        self.stands_for = stand_ins(program, peers)
        asking = (Pipeline(self.later), self._paddles())
        self.expected: dict[tuple[Numbers | None, Schedule1F1B], int] = {}
        """Schedules that the coarse model found, and the bytes that it gives their fullest stage."""
        self.fastest_ns: int | None = None
        """Simulated step of the fastest draft so far that keeps the memory."""
        self.looked_at: tuple[Sequence[Numbers | None], list[StageTimes]] = ((), [])
        """What may be recomputed, and what the stages say of their jobs with it: what schedules were looked for in."""
        self.drafts = self.stands_for.get(program.rank, program.rank) == program.rank or any(each.asks_ranks for each in asking)
        """Whether this rank makes drafts: one of each stage does, and all where a pass asks them."""

    def run(self) -> tuple[Run, int | None]:
        """Run the passes with the form that is simulated fastest within the memory, with as much recomputation as the schedule pays for.

        Every form is drafted, without local search inside its jobs, and simulated; the fastest is then planned in full. Where Paddle's own
        plan is the fastest it is kept as it is. Rank 0 simulates and tells the others, so that all decide alike.

        Returns, and raises, as `run_passes`.
        """
        made = self._stock(draft=True)[1] if self.drafts else self.program
        peaks = self._peaks(made)
        own = Judged(self.asked.stock(), (), None, self.room_bytes, self._step_ns(made), max(self._peaks(made, by_paddle=True)))
        limit = self.room.limit_bytes if self.room else int(own.peak_bytes * SLACK) + self.asked.extra_live_bytes
        named = self.asked.named(self.program, self.draws)
        forms = [(self.needed, form) for form in (self.asked.stock(), *named)]
        if named:
            forms += self._lagging(peaks[self._seat()], limit)
        elif self.levels and not self.room:
            forms += [(level, self.asked.stock()) for level in self._recomputation(limit)[:2]]
        drafts = dict.fromkeys((recomputed, form.draft()) for recomputed, form in forms)
        judged = [self._draft(recomputed, form, self.later, limit) for recomputed, form in drafts]
        if self.room:
            judged += self._tighter(judged, limit)
            judged += self._less_recomputed(judged, limit)
        elif named:
            judged += self._with_less(judged, limit)
            judged += self._in_paddles_order(limit)
        fitting = _fitting(judged, limit)
        few = self.room or any(each.decides_for_all for each in self.later)
        others = fitting or (self._nearest(judged) if self.room else [])
        judged += [other for each in others[: FINALISTS if few else None] for other in self._alternatives(each, limit)]
        best = next(iter(_fitting(judged, limit)), None)
        if best is None and self.room:  # what is nearest to the budget is made again with less room
            best = next(iter(self._nearest(judged)), None)
        if best is None and own.step_ns is None and forms:
            unknown = "auto: no form could be judged, the simulated ranks wait for each other in a circle; `interlace check` shows it"
            return noted(self._whole(judged[0]), Schedule1F1B.name, [], [unknown, *self._lost(judged, limit)]), self.room_bytes
        if best is None or (max(peaks) <= limit and own.step_ns is not None and (best.step_ns or 0) >= own.step_ns):
            lines = [f"auto: {self._own_name()}, whole step simulated {_text(own)}{self._how_counted()}"]
            others = [each for each in judged if each.form.interleave != "off" or each.step_ns != own.step_ns]
            return noted(self._stock(), Schedule1F1B.name, lines, self._lost(others, limit)), self.room_bytes
        run = self._whole(best)
        lines = [f"auto: {best.label(self.later)}: whole step simulated {ms(self._step_ns(run[1]) or 0)}, {self._own_name()} {_text(own)}; "
                 f"no stage may hold more than {size(limit)}{self._how_counted()}"]  # fmt: skip
        return noted(run, Schedule1F1B.name, lines, self._lost([each for each in judged if each is not best], limit)), best.room_bytes

    def best_level(self) -> Judged:
        """How much of what is over the budget recomputation gives back with a form that is given: the fastest draft that fits, or else
        what exceeds the budget least."""
        assert self.room is not None
        limit, form = self.room.limit_bytes, self.asked.draft()
        judged = [self._draft(each, form, self.later, limit) for each in dict.fromkeys(self.room.levels)]
        return min(judged, key=lambda each: (max(0, each.peak_bytes - limit), each.step_ns is None, each.step_ns or 0))

    def before(self, recomputed: Numbers | None) -> Before:
        """The program up to the schedule with so much recomputed; made once, and the very same one where only other stages recompute
        more or less, so that what later passes make of it is known."""
        if recomputed not in self.known:
            passes = self.earlier if recomputed is None else recomputing(self.earlier, recomputed)
            made, said = passes.run(self.program, self.cost, self.peers, self.room_bytes, self.context.memo, self._rooms(self.room_bytes))
            self.known[recomputed] = Before(passes.passes, made, said)
        return self.known[recomputed]

    def _seat(self) -> int:
        """Where this rank stands in what is gathered."""
        return self.program.rank if self.peers else 0

    def _paddles(self) -> Pipeline:
        return paddles_own(self.pipeline, self.room is not None)

    def _own_name(self) -> str:
        """How reports call `_paddles`: other passes that a user asked for are no part of Paddle's own plan."""
        others = [each.name for each in self._paddles().passes if not each.is_default]
        return f"Paddle's order with {', '.join(others)}" if others else STOCK

    def _stock(self, draft: bool = False) -> Run:
        pipeline = self._paddles().draft() if draft else self._paddles()
        made, reports = pipeline.run(self.program, self.cost, self.peers, self.room_bytes)
        return pipeline, made, reports

    def _lagged(self, found: Ranked) -> Schedule1F1B:
        pipe, each = self.program.pipeline, found.schedule
        plain = tuple((mixed_depth if form == "mixed" else in_flight)(s, pipe.num_stages, pipe.num_micro_batches)
                      for s, form in enumerate(each.form))  # fmt: skip
        lag_at_end = tuple(lag + more for lag, more in zip(each.lag, each.more_lag_at_end, strict=True))
        early, at_end = (self.early if all(which) else tuple(self.early * one for one in which)
                         for which in (each.early, each.early_at_end))  # fmt: skip
        return msgspec.structs.replace(self.asked, interleave=each.form[0] if len({*each.form}) == 1 else each.form,
                                       lag=each.lag if any(each.lag) else 0, lag_at_end=None if lag_at_end == each.lag else lag_at_end,
                                       depth=() if pipe.num_chunks > 1 or (each.depth == plain and not self.draws) else each.depth,
                                       early_sends=early, early_sends_at_end=None if at_end == early else at_end,
                                       at_once=each.at_once if any(each.at_once) else 0.0)  # fmt: skip

    def _lagging(self, stock_peak_bytes: int, limit: int) -> list[tuple[Numbers | None, Schedule1F1B]]:
        """The schedules that the coarse model finds best, with how much each stage recomputes."""
        levels = self._recomputation(limit) if self.room and self.levels else (self.needed,)
        found = self._schedules(levels, stock_peak_bytes, limit)
        if self.levels and not self.room and (found.memory_pays or self.recomputes):
            levels = self._recomputation(limit)
            found = self._schedules(levels, stock_peak_bytes, limit)
        return self._as_forms(found, levels)

    def _as_forms(self, found: Found, levels: Sequence[Numbers | None]) -> list[tuple[Numbers | None, Schedule1F1B]]:
        """Schedules as forms, with how much each stage recomputes."""
        forms = {(_recomputed(each, levels), self._lagged(each)): each.peak_bytes for each in found.schedules}
        self.expected |= {(recomputed, form.draft()): peak for (recomputed, form), peak in forms.items()}
        return list(forms)

    def _recomputation(self, limit: int) -> tuple[Numbers | None, ...]:
        """What a schedule may recompute; None without a budget where neither it nor the program recomputes anything."""
        assert self.levels is not None
        return tuple(level if any(level) or self.room or self.recomputes else None for level in self.levels(limit))

    def _schedules(self, levels: Sequence[Numbers | None], stock_peak_bytes: int, limit: int) -> Found:
        """What rank 0 finds from what the first rank of each stage says of its jobs."""
        made = [self.before(level).program for level in levels]  # on all ranks: passes ask each other
        told = gather(self.peers, "work of stages", self._stage(made, stock_peak_bytes) if self.drafts else Stage())
        speaker = {each.stage: rank for rank, each in reversed([*enumerate(told)]) if each.work}
        stages = {stage: told[rank] for stage, rank in speaker.items()}
        orders = self._all_orders(stages, made if speaker.get(self.program.pipeline.stage) == self._seat() else ())
        times = {s: tuple(StageTimes(s, orders[work], peak) for work, peak in zip(stages[s].work, stages[s].peak_bytes, strict=True))
                 for s in sorted(stages)}  # fmt: skip
        self.looked_at = levels, [each for stage in times.values() for each in self._without_moved(stage, limit)]
        found = Found()
        if self.peers is None or self.program.rank == 0:
            limits = [(limit, LAG_SCHEDULES), *((int(limit * more), 1) for more in OVER_BUDGET if self._offloads())]
            best = [each for most, count in limits for each in self._find(most, count)]
            free = [] if self.room or len(levels) > 1 else self._find(ANY, 1)
            pays = bool(free) and (not best or free[0].step_ns < (1 - PAYS) * best[0].step_ns)
            found = Found(tuple(best), pays)
        return gather(self.peers, "schedules", found)[0]

    def _find(self, limit: int, count: int) -> list[Ranked]:
        pipe = self.program.pipeline
        return find_schedules(self.looked_at[1], pipe.num_micro_batches, limit, count, self.draws, pipe.num_chunks)

    def _with_less(self, judged: Sequence[Judged], limit: int) -> list[Judged]:
        """Schedules that are looked for in less memory: where what the coarse model found holds more than it says, and more than it may,
        though it would be faster than all that fits. They leave free by how much it holds more than expected."""
        newest, more, levels = judged, list[Judged](), self.looked_at[0]
        for _ in range(CLOSER):
            best = next((each.step_ns or 0 for each in _fitting((*judged, *more), limit)), None)
            ranked = [each for each in newest if (each.recomputed, each.form) in self.expected]
            over = [each for each in ranked if each.step_ns is not None and limit < each.peak_bytes <= NEARLY * limit
                    and (best is None or each.step_ns < (1 - PAYS) * best)]  # fmt: skip
            if not over:
                break
            within = limit - max(each.peak_bytes - self.expected[each.recomputed, each.form] for each in over)
            found = Found(tuple(self._find(within, LAG_SCHEDULES)) if self.peers is None or self.program.rank == 0 else ())
            found = gather(self.peers, "schedules in less memory", found)[0]
            new = dict.fromkeys((recomputed, form.draft()) for recomputed, form in self._as_forms(found, levels))
            newest = [self._draft(recomputed, form, self.later, limit) for recomputed, form in new]
            more += newest
        return more

    def _in_paddles_order(self, limit: int) -> list[Judged]:
        """Without a budget, Paddle's order of a program that recomputes with what that order needs; where it holds more than it should by
        what is recomputed, with more of it. Other orders may hold too much on a stage on which all is recomputed already."""
        judged, within = list[Judged](), limit
        for _ in range(ROUNDS if self.recomputes and self.levels else 0):
            assert self.levels is not None
            judged.append(self._draft(self.levels(within, (0.0,))[-1], self.asked.stock(), self.later, limit))
            if judged[-1].peak_bytes <= limit:
                break
            within -= 2 * (judged[-1].peak_bytes - limit)
        return judged

    def _stage(self, made: Sequence[Program], stock_peak_bytes: int) -> Stage:
        """What this rank says of its stage, with these programs before the schedule."""
        works = [f"{' '.join(self._kinds())} {likeness_of_work(each, self.cost)}" for each in made]
        peaks = {works[0]: stock_peak_bytes}
        if len(made) > 1:
            peaks = {work: in_order(msgspec.structs.replace(each, jobs=stock_jobs(each))).peak()
                     for work, each in zip(works, made, strict=True)}  # fmt: skip
        return Stage(self.program.pipeline.stage, tuple(f"{works[0]} {work}" for work in works), tuple(peaks[work] for work in works))

    def _all_orders(self, stages: Mapping[int, Stage], made: Sequence[Program]) -> dict[str, tuple[StageOrder, ...]]:
        """The orders of the jobs of all stages: of each kind of work found on the first stage that does it.

        `made`: what this rank finds some for; nothing where another one speaks for its stage.
        """
        stage, found = self.program.pipeline.stage, dict[str, tuple[StageOrder, ...]]()
        owner = {work: s for s in sorted(stages, reverse=True) for work in stages[s].work}
        mine = {work: before for work, before in zip(stages[stage].work, made, strict=True) if owner[work] == stage} if made else {}
        base = stages[stage].work[0]
        for are_bases in (True, False):
            new = {work: self._orders(before, found.get(base, ())) for work, before in mine.items() if (work == base) == are_bases}
            for each in gather(self.peers, "orders of jobs", OrdersOfWork(new)):
                found |= each.of_work
        return found

    def _without_moved(self, levels: tuple[StageTimes, ...], limit: int) -> tuple[StageTimes, ...]:
        """The levels of a stage without what it holds above the limit at each of them, which only offload can give back."""
        over = min(each.peak_bytes for each in levels) - limit
        if over <= 0 or not self._offloads():
            return levels
        return tuple(msgspec.structs.replace(each, peak_bytes=each.peak_bytes - over) for each in levels)

    def _offloads(self) -> bool:
        """Whether under a budget offload moves what a plan holds too much."""
        return self.room is not None and any(isinstance(each, OffloadActivations) for each in self.later)

    def _kinds(self) -> list[str]:
        """Kinds of jobs that this stage may have."""
        pipe = self.program.pipeline
        return list(kinds_of(pipe.stage, pipe.num_stages, pipe.num_micro_batches, pipe.num_chunks))

    def _orders(self, before: Program, like: Sequence[StageOrder] = ()) -> tuple[StageOrder, ...]:
        """What each kind of job costs on this stage, in every order that schedules may ask for.

        `like`: the orders with something else recomputed. Where some weight gradients do not trail jobs are then taken to change as they
        do where all trail.
        """
        pipe, kinds = self.program.pipeline, self._kinds()
        halved = [kind for kind in kinds if {"I", "W"} & {part[0] for part in kind.split("+")}]
        whole = [kind for kind in kinds if kind not in halved]
        known = {(each.form, each.early, each.at_once): each.slots for each in like}
        found: dict[tuple[Form, bool, float], dict[str, SlotTimes]] = {}
        for name, early in itertools.product(FORMS, (True, False)):
            form = msgspec.structs.replace(self.asked, interleave=name, search=False, early_sends=self.early if early else 0.0)
            slots = self._times(before, form, {"I", "W"}, halved) | self._times(before, form, {"B"}, whole)
            if like:
                old = known[name, early, 0.0]
                found |= {key: {kind: changed_by(each, old[kind], slots[kind]) for kind, each in slots_of.items()}
                          for key, slots_of in known.items() if key[:2] == (name, early)}  # fmt: skip
                continue
            found[name, early, 0.0] = slots
            for at_once in AT_ONCE[1:] if pipe.num_stages > 1 and pipe.num_chunks == 1 else ():
                found[name, early, at_once] = self._times(before, msgspec.structs.replace(form, at_once=at_once), {"I", "W"}, halved)
        return tuple(StageOrder(*key, slots) for key, slots in sorted(found.items()))

    def _times(self, before: Program, form: Schedule1F1B, parts: set[str], kinds: Sequence[str]) -> dict[str, SlotTimes]:
        """Of kinds of jobs, with backward as a whole or in halves."""
        ops, found = form.parts(before, parts, self.context), {}
        for kind in kinds:
            each = tuple((part[0], part[0], int(part[2:] or 0)) for part in kind.split("+"))
            found[kind] = form.order(before, ops, each, form.form_of(before.pipeline.stage), self.context)[1]
        return found

    def _tighter(self, judged: Sequence[Judged], limit: int) -> list[Judged]:
        """What exceeds the budget and would be faster than all that keeps it, as tighter budgets would have it."""
        best = next((each.step_ns or 0 for each in _fitting(judged, limit)), None)
        over = [each for each in judged if each.step_ns is not None and each.peak_bytes > limit and (best is None or each.step_ns < best)]
        over.sort(key=lambda each: each.step_ns or 0)
        found: dict[tuple[Numbers | None, Schedule1F1B, float], None] = {}
        for part in TIGHTER if over else ():
            needed = self.levels(int(part * limit), (0.0,))[-1] if self.levels else None
            for each in over[:MOST_TIGHTER]:
                more = tuple(map(max, each.recomputed, needed)) if each.recomputed and needed else needed or each.recomputed
                found |= {(level, each.form, part): None for level in (each.recomputed, more)}
        return [self._draft(more, form, self.later, limit, part) for more, form, part in found]

    def _less_recomputed(self, judged: Sequence[Judged], limit: int) -> list[Judged]:
        """The fastest that keeps the budget with less recomputed on one stage after the other, as long as that makes it faster: offload
        gives back what a stage then holds too much, and what that costs only a simulation of the whole step says."""
        best, found = next(iter(_fitting(judged, limit)), None), list[Judged]()
        if best is None or best.recomputed is None or self.levels is None or not self._offloads():
            return found
        fewer = [self.levels(limit, (-part,))[-1] for part in LESS]
        for stage in reversed(range(len(best.recomputed))):
            for levels in fewer:
                if levels[stage] < best.recomputed[stage]:
                    recomputed = (*best.recomputed[:stage], levels[stage], *best.recomputed[stage + 1 :])
                    found.append(self._draft(recomputed, best.form, best.later, limit))
                    if found[-1].peak_bytes <= limit:
                        break
            best = _fitting((best, *found), limit)[0]
        return found

    @staticmethod
    def _nearest(judged: Sequence[Judged]) -> list[Judged]:
        """Of forms that exceed the budget, those first that do so least."""
        return sorted((each for each in judged if each.step_ns is not None), key=lambda each: each.peak_bytes)

    def _alternatives(self, judged: Judged, limit: int) -> list[Judged]:
        """A form with the alternatives of each pass after it."""
        return [self._draft(judged.recomputed, judged.form, (*self.later[:k], other, *self.later[k + 1 :]), limit)
                for k, each in enumerate(self.later) for other in each.alternatives()]  # fmt: skip

    def _draft(
        self, recomputed: Numbers | None, form: Schedule1F1B, later: tuple[Pass, ...], limit: int, part: float = 1.0
    ) -> Judged:
        """A draft; under a budget with so much less room as what it exceeds the budget by, where passes can give it back, and where it is
        not slower already than what keeps the budget. It starts from a part of the room."""
        before, last = self.before(recomputed).program, 0
        room = int(part * self.room_bytes) if self.room_bytes else None
        for _ in range(ROUNDS):
            rooms = self._rooms(room)
            made = self._run(before, Pipeline((form, *later)).draft(), room, rooms)[0] if self.drafts else before
            peaks = self._peaks(made)
            over, took = max(peaks) - limit, None
            if over <= 0 or over > FAR * limit or not self._offloads() or (last and over > last * SHRINKS):
                break
            if self.fastest_ns is not None:
                took = self._step_ns(made, later)
                if took is None or took >= self.fastest_ns:
                    break
            last, room = over, less_room(made, room or 0, peaks[self._seat()] - limit)
        took = took or self._step_ns(made, later)
        if took is not None and max(peaks) <= limit:
            self.fastest_ns = min(took, self.fastest_ns or took)
        return Judged(form, later, recomputed, room, took, max(peaks))

    def _rooms(self, room_bytes: int | None) -> tuple[int | None, ...]:
        """What passes may use on each rank."""
        return tuple(gather(self.peers, "rooms", room_bytes)) if self.room else (None,)

    def _run(
        self, before: Program, passes: Pipeline, room_bytes: int | None, rooms: tuple[int | None, ...]
    ) -> tuple[Program, list[PassReport]]:
        """The passes from the schedule on; forms that begin alike share what is made."""
        return passes.run(before, self.cost, self.peers, room_bytes, self.context.memo, rooms)

    def _step_ns(self, made: Program, left_out: tuple[Pass, ...] = ()) -> int | None:
        return step_ns(made, self.cost, self.peers, self.stands_for, left_out)

    def _peaks(self, made: Program, by_paddle: bool = False) -> list[int]:
        """Device bytes of the plan at its peak, by rank, under a budget those on a GPU; a rank without jobs holds nothing.

        `by_paddle`: where Paddle's own jobs run, and not those of our lowering.
        """
        peak = (in_order(made, target=with_paddles_jobs(IDEAL)).peak() if by_paddle else order_peak(made)) if made.jobs else 0
        place = with_paddles_jobs(GPU) if by_paddle else GPU
        return gather(self.peers, "peaks", max(peak, peak_bytes(made, self.cost, place) or 0) if self.room and made.jobs else peak)

    def _whole(self, judged: Judged) -> Run:
        before, passes = self.before(judged.recomputed), (judged.form, *judged.later)
        made, reports = self._run(before.program, Pipeline(passes), judged.room_bytes, self._rooms(judged.room_bytes))
        return Pipeline((*before.passes, *passes)), made, [*before.reports, *reports]

    def _how_counted(self) -> str:
        """What the bytes of the choice are, where they are not a GPU's."""
        return "" if self.room else " (live memory with operations one after another: on a GPU, what other streams still read comes on top)"

    def _lost(self, judged: list[Judged], limit: int) -> list[str]:
        """A line for each form that was not taken, with the reason."""
        return [f"{each.label(self.later)}: {_text(each)}{', more memory than it may hold' if each.peak_bytes > limit else ''}"
                for each in judged]  # fmt: skip


def _fitting(judged: Sequence[Judged], limit: int) -> list[Judged]:
    """Forms whose step ends and that hold no more than they may, the fastest first; of equally fast ones the order stays."""
    return sorted((each for each in judged if each.step_ns is not None and each.peak_bytes <= limit), key=lambda each: each.step_ns or 0)


def _recomputed(found: Ranked, levels: Sequence[Numbers | None]) -> Numbers | None:
    """How much each stage recomputes at the levels of a schedule; None for what the program has."""
    at = found.schedule.level
    if not any(at):
        return levels[0]
    return tuple((levels[level] or (0,) * len(at))[stage] for stage, level in enumerate(at))


def _level_text(levels: Numbers) -> str:
    """Levels as `choose_recompute.level` has them."""
    return f"[{', '.join(f'{level / LEVELS:g}' for level in levels)}]"


def paddles_own(asked: Pipeline, within_budget: bool = True) -> Pipeline:
    """Paddle's own jobs and streams; a user's other passes run all the same, but none that only follows the budget."""
    mine = [each for each in asked.passes if not within_budget or not each.follows_budget]
    return Pipeline(tuple(kept for each in mine if (kept := each.stock()) is not None))


def paddles_streams(asked: Pipeline) -> Pipeline:
    """Paddle's own jobs and streams, with the passes that follow the budget."""
    forms = (each if each.follows_budget else each.stock() for each in asked.passes)
    return Pipeline(tuple(each for each in forms if each is not None))


def less_room(made: Program, room_bytes: int, over_bytes: int) -> int:
    """What passes may use on a rank after a plan that exceeds the budget there; as much as before where it does not."""
    order = order_peak(made) if made.jobs else 0
    return max(1, min(room_bytes, order) - over_bytes) if over_bytes > 0 else room_bytes


def _text(judged: Judged) -> str:
    took = "stages wait for each other" if judged.step_ns is None else ms(judged.step_ns)
    return f"{took}, {size(judged.peak_bytes)} on the fullest stage"
