"""`interleave: auto`: Paddle's own plan, the named forms and schedules with a lag for each stage are simulated as whole steps; the
fastest that holds no more memory than it may is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from interlace.cost_model import Costs
from interlace.ir import Program
from interlace.passes.base import Context, Pass
from interlace.passes.peers import Peers, gather, stand_ins
from interlace.passes.pipeline import PassReport, Pipeline
from interlace.passes.schedule_1f1b import Schedule1F1B, draws_twice
from interlace.planning.budget import peak_bytes
from interlace.planning.judge import Run, noted, run_judged, step_ns
from interlace.planning.stock import STOCK
from interlace.scheduler.interleave.planner import EARLY
from interlace.scheduler.memory.live import in_order
from interlace.scheduler.schedule import in_flight
from interlace.scheduler.target import GPU, IDEAL, with_paddles_jobs
from interlace.scheduler.whole_step.search import SHARES, Ranked, find_schedules, kinds_of
from interlace.scheduler.whole_step.slot_times import SlotTimes, StageOrder, StageTimes
from interlace.units import ms, size

NAMED = ("dx-first", "mixed", "zb-h1")
LAG_SCHEDULES = 3
"""Schedules of the coarse model that are planned in full, as drafts."""
SLACK = 1.01
"""A peak counts as Paddle's own up to this factor: allocators round by more."""


class Found(msgspec.Struct, frozen=True):
    """What rank 0's search gave."""

    schedules: tuple[Ranked, ...]


@dataclass(frozen=True, slots=True)
class Room:
    """Under a memory budget: the bytes that passes may use on this rank for the order of operations, and the budget, which a form must
    keep on a GPU."""

    bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class Judged:
    """A form and the passes after it, as drafted: its simulated step (None: it never ends) and its peak on the worst stage."""

    form: Schedule1F1B
    later: tuple[Pass, ...]
    step_ns: int | None
    peak_bytes: int

    def label(self, asked: tuple[Pass, ...]) -> str:
        """The form in a few words, and what differs from the later passes as they were asked for."""
        return ", ".join([self.form.label(), *(each.label() for each in self.later if each not in asked)])


def run_passes(pipeline: Pipeline, program: Program, cost: Costs, peers: Peers | None = None, room: Room | None = None) -> Run:
    """Run the passes; where the form of one is open, or has milder ones, the whole step decides. Raises PassError, as `Pipeline.run`."""
    asked = next((each for each in pipeline.passes if isinstance(each, Schedule1F1B) and each.is_open()), None)
    if asked is None or (peers is None and program.pipeline.num_stages > 1):
        return run_judged(pipeline, program, cost, peers, room.bytes if room else None)
    return run_best(pipeline, asked, program, cost, peers, room)


def run_best(
    pipeline: Pipeline, asked: Schedule1F1B, program: Program, cost: Costs, peers: Peers | None = None, room: Room | None = None
) -> Run:
    """Run the passes with the form of `asked`, one of them, that is simulated fastest within the memory.

    Every form is drafted, without local search inside its jobs, and simulated; the fastest is then planned in full. Where Paddle's own
    plan is the fastest it is kept as it is. Rank 0 simulates and tells the others, so that all decide alike.

    Raises:
        PassError: As `Pipeline.run`.
    """
    pipeline.check(program)
    return _Choice(pipeline, asked, program, cost, peers, room).run()


class _Choice:
    def __init__(
        self, pipeline: Pipeline, asked: Schedule1F1B, program: Program, cost: Costs, peers: Peers | None, room: Room | None
    ) -> None:
        self.pipeline, self.asked, self.program, self.cost, self.peers = pipeline, asked, program, cost, peers
        self.room, self.room_bytes = room, room.bytes if room else None
        self.context = Context(cost)
        at = pipeline.passes.index(asked)
        self.earlier, self.later = pipeline.passes[:at], pipeline.passes[at + 1 :]
        self.early = asked.early_sends if isinstance(asked.early_sends, float) else EARLY
        self.before, self.first = Pipeline(self.earlier).run(program, cost, peers, self.room_bytes)
        self.stands_for = stand_ins(program, peers)
        asking = (Pipeline(self.later), self._paddles())
        self.drafts = self.stands_for.get(program.rank, program.rank) == program.rank or any(each.asks_ranks() for each in asking)
        """Whether this rank makes drafts: one of each stage does, and all where a pass asks them."""

    def run(self) -> Run:
        made = self._stock(draft=True)[1] if self.drafts else self.before
        peaks = self._peaks(made)
        own = Judged(self.asked.stock(), (), self._step_ns(made), max(self._peaks(made, by_paddle=True)))
        limit = self.room.limit_bytes if self.room else int(own.peak_bytes * SLACK) + self.asked.extra_live_bytes
        forms = [self.asked.stock(), *(self._named(name) for name in NAMED if self._may(name))]
        if self._may("dx-first"):
            forms += [self._lagged(each) for each in self._schedules(peaks[self.program.rank if self.peers else 0], limit)]
        judged = [each for form in dict.fromkeys(form.draft() for form in forms) for each in self._judge(form, limit)]
        fitting = [each for each in judged if each.step_ns is not None and each.peak_bytes <= limit]
        best = min(fitting, key=lambda each: each.step_ns or 0, default=None)
        if best is None and self.room:  # what is nearest to the budget is made again with less room
            best = min((each for each in judged if each.step_ns is not None), key=lambda each: each.peak_bytes, default=None)
        if best is None and own.step_ns is None and forms:
            unknown = "auto: no form could be judged, the simulated ranks wait for each other in a circle; `interlace check` shows it"
            return noted(self._whole(forms[0], self.later), Schedule1F1B.name, [], [unknown, *self._lost(judged, limit)])
        if best is None or (max(peaks) <= limit and own.step_ns is not None and (best.step_ns or 0) >= own.step_ns):
            lines = [f"auto: {self._own_name()}, whole step simulated {_text(own)}"]
            return noted(self._stock(), Schedule1F1B.name, lines, self._lost(judged, limit))
        run = self._whole(best.form, best.later)
        lines = [f"auto: {best.label(self.later)}: whole step simulated {ms(self._step_ns(run[1]) or 0)}, {self._own_name()} {_text(own)}; "
                 f"no stage may hold more than {size(limit)}"]  # fmt: skip
        return noted(run, Schedule1F1B.name, lines, self._lost([each for each in judged if each is not best], limit))

    def _paddles(self) -> Pipeline:
        """Paddle's own jobs and streams; a user's other passes run all the same."""
        return Pipeline(tuple(kept for each in self.pipeline.passes if (kept := each.stock()) is not None))

    def _own_name(self) -> str:
        """How reports call `_paddles`: other passes that a user asked for are no part of Paddle's own plan."""
        others = [each.name for each in self._paddles().passes if not each.is_default]
        return f"Paddle's order with {', '.join(others)}" if others else STOCK

    def _stock(self, draft: bool = False) -> Run:
        pipeline = self._paddles().draft() if draft else self._paddles()
        made, reports = pipeline.run(self.program, self.cost, self.peers, self.room_bytes)
        return pipeline, made, reports

    def _may(self, name: str) -> bool:
        """Whether a form is possible for this program; the same on every rank."""
        pipe = self.program.pipeline
        return pipe.schedule not in ("FThenB", "none") and (name != "zb-h1" or (pipe.num_chunks == 1 and pipe.num_stages > 1))

    def _named(self, name: str) -> Schedule1F1B:
        return msgspec.structs.replace(self.asked, interleave=name)

    def _lagged(self, found: Ranked) -> Schedule1F1B:
        pipe, each = self.program.pipeline, found.schedule
        plain = tuple(in_flight(s, pipe.num_stages, pipe.num_micro_batches) for s in range(pipe.num_stages))
        early = self.early if all(each.early) else tuple(self.early * one for one in each.early)
        return msgspec.structs.replace(self.asked, interleave="dx-first", lag=each.lag if any(each.lag) else 0,
                                       depth=() if each.depth == plain else each.depth, early_sends=early,
                                       at_once=each.at_once if any(each.at_once) else 0.0)  # fmt: skip

    def _schedules(self, stock_peak_bytes: int, limit: int) -> tuple[Ranked, ...]:
        """What the coarse model finds best, by rank 0, from what the first rank of each stage says of its jobs."""
        mine = StageTimes(self.program.pipeline.stage, self._orders() if self.drafts else (), stock_peak_bytes)
        stages = {each.stage: each for each in reversed(gather(self.peers, "times of jobs", mine))}
        fixed = any(gather(self.peers, "draws", draws_twice(self.program)))
        found = Found(())
        if self.peers is None or self.program.rank == 0:
            pipe, given = self.program.pipeline, [stages[s] for s in sorted(stages)]
            found = Found(tuple(find_schedules(given, pipe.num_micro_batches, limit, LAG_SCHEDULES, fixed, pipe.num_chunks)))
        return gather(self.peers, "schedules", found)[0].schedules

    def _orders(self) -> tuple[StageOrder, ...]:
        """What each kind of job costs on this stage, in every order that schedules may ask for."""
        pipe = self.program.pipeline
        kinds = kinds_of(pipe.stage, pipe.num_stages, pipe.num_micro_batches, pipe.num_chunks)
        halved = [kind for kind in kinds if {"I", "W"} & {part[0] for part in kind.split("+")}]
        whole = [kind for kind in kinds if kind not in halved]
        form = msgspec.structs.replace(self.asked, interleave="dx-first", search=False)
        found = []
        for share in SHARES if pipe.num_stages > 1 and pipe.num_chunks == 1 else SHARES[:1]:
            for early in (True, False):
                form = msgspec.structs.replace(form, early_sends=self.early if early else 0.0, at_once=share)
                times = self._times(form, {"I", "W"}, halved)
                found.append(StageOrder(early, share, times if share else times | self._times(form, {"B"}, whole)))
        return tuple(found)

    def _times(self, form: Schedule1F1B, parts: set[str], kinds: Sequence[str]) -> dict[str, SlotTimes]:
        """Of kinds of jobs, with backward as a whole or in halves."""
        ops, found = form.parts(self.before, parts, self.context), {}
        for kind in kinds:
            each = tuple((part[0], part[0], int(part[2:] or 0)) for part in kind.split("+"))
            found[kind] = form.order(self.before, ops, each, "dx-first", self.context)[1]
        return found

    def _judge(self, form: Schedule1F1B, limit: int) -> list[Judged]:
        """A form with the passes after it as they were asked for; where it fits, also with the alternatives of each."""
        found = [self._draft(form, self.later)]
        if found[0].peak_bytes <= limit:
            found += [self._draft(form, (*self.later[:k], other, *self.later[k + 1 :]))
                      for k, each in enumerate(self.later) for other in each.alternatives()]  # fmt: skip
        return found

    def _draft(self, form: Schedule1F1B, later: tuple[Pass, ...]) -> Judged:
        made = self._run(Pipeline((form, *later)).draft())[0] if self.drafts else self.before
        return Judged(form, later, self._step_ns(made, later), max(self._peaks(made)))

    def _run(self, passes: Pipeline) -> tuple[Program, list[PassReport]]:
        """The passes from the schedule on."""
        return passes.run(self.before, self.cost, self.peers, self.room_bytes, self.context.memo)

    def _step_ns(self, made: Program, left_out: tuple[Pass, ...] = ()) -> int | None:
        return step_ns(made, self.cost, self.peers, self.stands_for, left_out)

    def _peaks(self, made: Program, by_paddle: bool = False) -> list[int]:
        """Device bytes of the plan at its peak, by rank, under a budget those on a GPU; a rank without jobs holds nothing.

        `by_paddle`: where Paddle's own jobs run, and not those of our lowering.
        """
        order, place = (with_paddles_jobs(IDEAL), with_paddles_jobs(GPU)) if by_paddle else (IDEAL, GPU)
        peak = in_order(made, target=order).peak() if made.jobs else 0
        return gather(self.peers, "peaks", max(peak, peak_bytes(made, self.cost, place) or 0) if self.room and made.jobs else peak)

    def _whole(self, form: Schedule1F1B, later: tuple[Pass, ...]) -> Run:
        passes = (form, *later)
        made, reports = self._run(Pipeline(passes))
        return Pipeline((*self.earlier, *passes)), made, [*self.first, *reports]

    def _lost(self, judged: list[Judged], limit: int) -> list[str]:
        """A line for each form that was not taken, with the reason."""
        return [f"{each.label(self.later)}: {_text(each)}{', more memory than it may hold' if each.peak_bytes > limit else ''}"
                for each in judged]  # fmt: skip


def _text(judged: Judged) -> str:
    took = "stages wait for each other" if judged.step_ns is None else ms(judged.step_ns)
    return f"{took}, {size(judged.peak_bytes)} on the worst stage"
