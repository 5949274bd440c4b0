"""Search for schedules that are worth planning in full: form, weight-gradient delay, depth, orders, share of weight gradients that are not
delayed, and recomputation of each stage, ranked by the coarse model, within the memory limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from interlace.ir.schedule import Slot, in_flight, interleaved, joined, one_f_one_b
from interlace.scheduler.interleave.engine import engine_for
from interlace.scheduler.interleave.planner import Form
from interlace.scheduler.interleave.slot_times import SlotTimes, StageTimes
from interlace.scheduler.jobs.legal_rows import Links, links, reached
from interlace.scheduler.whole_step.coarse import Kinds, Row, costs_of, jobs_of, kind_of, peak_bytes, run_jobs

Numbers = tuple[int, ...]
INLINE_SHARES = (0.0, 0.125, 0.25, 0.375, 0.5)
"""Shares of weight gradients, by time, that are tried as not delayed (`interleave/inline_weights.py`): every second one at first, and all
once the best schedules are known. With all from the start, a climb stops at a share that is too small to be worth its memory."""
JOBS = 240_000
"""Number of jobs, over all schedules, that the first climbs may evaluate; up to three seconds of host time."""
REFINED = 6
"""Number of best schedules that are refined, if not more are asked for."""
FINER = 4
"""The refinement of each may evaluate this many times fewer schedules than the first climbs together."""
FAR = 2
"""How far delays of finer neighbours are apart, in micro-batches."""
SAME = 0.001
"""Share of a step within which times count as equal; of equal schedules the one that takes less memory comes first."""
MICRO_BATCHES = 16
"""A step with more micro-batches is ranked by one with this many, as the steady state repeats."""


class CoarseSchedule(msgspec.Struct, frozen=True, order=True):
    """A schedule by stage; see `StageSchedule`."""

    weight_delay: Numbers
    depth: Numbers
    early: tuple[bool, ...]
    inline_share: tuple[float, ...]
    level: Numbers
    form: tuple[Form, ...]
    early_at_end: tuple[bool, ...]
    more_weight_delay_at_end: Numbers


class StageSchedule(NamedTuple):
    """A schedule's choices for one stage.

    Attributes:
        weight_delay: Delay of weight gradients, in micro-batches.
        depth: Micro-batches in flight.
        early: Whether jobs are ordered for early sends.
        inline_share: Share of weight gradients that are not delayed.
        level: Index into the stage's `StageTimes` (recomputation).
        early_at_end: As `early`, for the jobs from the last forward on.
        more_weight_delay_at_end: Additional delay of delayed weight gradients from the last forward on, in micro-batches.
    """

    weight_delay: int
    depth: int
    early: bool
    inline_share: float
    level: int
    form: Form
    early_at_end: bool
    more_weight_delay_at_end: int = 0


class Ranked(msgspec.Struct, frozen=True):
    """A schedule with its time, and the memory of its fullest stage, according to the coarse model."""

    schedule: CoarseSchedule
    step_ns: float
    peak_bytes: int


_RowKey = tuple[int, int, int, int, int]


@dataclass(slots=True)
class Known:
    """Results of searches with other memory limits for the same stages.

    Attributes:
        rows, kinds: The slots of a stage and their kinds, by stage, micro-batches, depth, and delays of weight gradients.
        peaks, jobs: Memory and jobs of a stage.
        steps: Times of schedules that complete.
        stuck: Whether stages wait for each other forever, by depth.
        links: Links of the slots of a stage, by depth.
    """

    rows: dict[_RowKey, list[Slot]] = field(default_factory=dict)
    kinds: dict[_RowKey, Kinds] = field(default_factory=dict)
    peaks: dict[tuple[int, StageSchedule], int] = field(default_factory=dict)
    jobs: dict[tuple[int, StageSchedule], Row] = field(default_factory=dict)
    steps: dict[CoarseSchedule, float | None] = field(default_factory=dict)
    stuck: dict[Numbers, bool] = field(default_factory=dict)
    links: dict[tuple[int, int], list[Links]] = field(default_factory=dict)


def find_schedules(
    stages: Sequence[StageTimes],
    num_micro_batches: int,
    limit_bytes: int,
    count: int,
    fixed_depth: bool,
    num_chunks: int = 1,
    known: Known | None = None,
) -> list[Ranked]:
    """The best schedules by the coarse model, at most `count`, with different depths, orders and times, fastest first; the same on every
    machine. Of schedules with the same time, which differ only in the weight-gradient delay of a stage that waits anyway, one is returned.

    `stages` has one entry per stage, or several per stage that differ in recomputation, least recomputation first. With `fixed_depth` each
    stage must hold as many micro-batches as in 1F1B (otherwise random draws would change their order); with more than one chunk per stage
    the depth is always fixed. `known` must belong to the same stages and micro-batches; new results are added to it.
    """
    return _Search(stages, num_micro_batches, limit_bytes, fixed_depth, num_chunks, known or Known()).run(count)


def ranked_micro_batches(num_micro_batches: int, num_stages: int, num_chunks: int) -> int:
    """Number of micro-batches of the step that is ranked in place of a longer one; with chunks, a multiple of the stages if the step's is.

    >>> [ranked_micro_batches(48, stages, 2) for stages in (2, 6, 24)]
    [16, 12, 24]
    """
    most = min(num_micro_batches, MICRO_BATCHES)
    return most if num_chunks == 1 or num_micro_batches % num_stages else max(num_stages, most // num_stages * num_stages)


class _Search:
    def __init__(
        self,
        stages: Sequence[StageTimes],
        num_micro_batches: int,
        limit_bytes: int,
        fixed_depth: bool,
        num_chunks: int,
        known: Known | None = None,
    ) -> None:
        self.all, self.limit, self.chunks, self.known = num_micro_batches, limit_bytes, num_chunks, known or Known()
        numbers = range(1 + max(each.stage for each in stages))
        self.num = num_micro_batches = ranked_micro_batches(num_micro_batches, len(numbers), num_chunks)
        self.stages = [[each for each in stages if each.stage == number] for number in numbers]
        self.fixed = fixed_depth or num_chunks > 1
        self.plain = tuple(in_flight(s, len(numbers), num_micro_batches) for s in numbers)
        self.tables = [
            [{(order.form, order.early, order.inline_share): order.slots for order in each.orders} for each in levels]
            for levels in self.stages
        ]
        self.inline_share = sorted({order.inline_share for order in stages[0].orders})
        draws = fixed_depth and num_chunks > 1  # without a depth of its own a mixed pair would change their order
        self.forms = sorted({order.form for order in stages[0].orders if not draws or order.form == "dx-first"})
        rows = [_plain_row(s, len(numbers), num_micro_batches, num_chunks) for s in numbers]
        plain = self.forms[0], True, 0
        self.always = [
            [each.peak_bytes - peak_bytes(costs_of(rows[s], table[plain])) for each, table in zip(levels, self.tables[s], strict=True)]
            for s, levels in enumerate(self.stages)
        ]
        self.most = num_micro_batches * num_chunks
        self.evaluations, self.engine = JOBS // (self.most * len(self.stages)), engine_for(0)
        self.seen: dict[CoarseSchedule, float | None] = {}

    def run(self, count: int) -> list[Ranked]:
        starts: dict[tuple[tuple[Form, ...], Numbers], tuple[float, CoarseSchedule]] = {}
        for found in sorted(self._ranked(start) for start in self._starts()):
            starts.setdefault((found[1].form, found[1].depth), found)
        for left, found in zip(range(len(starts), 0, -1), starts.values(), strict=True):
            self._climb(found, len(self.seen) + (self.evaluations - len(self.seen)) // left)
        for best in self._best(max(count, REFINED)):
            self._refine((best.step_ns, best.schedule), len(self.seen) + self.evaluations // FINER)
        return self._best(count)

    def _best(self, count: int) -> list[Ranked]:
        """The best of the schedules evaluated so far."""
        known = [(took, each) for each, took in self.seen.items() if took is not None]
        unit = SAME * min((took for took, _ in known), default=1.0)
        known.sort(
            key=lambda pair: (round(pair[0] / unit), sum(pair[1].weight_delay + pair[1].depth + pair[1].more_weight_delay_at_end), pair)
        )
        best: dict[tuple[Any, ...], Ranked] = {}
        for took, each in known:
            peak = max(self.known.peaks[s, choice] for s, choice in enumerate(_choices(each)))
            best.setdefault((each.form, each.depth, each.early, each.early_at_end, each.level), Ranked(each, took, peak))
        distinct = {round(ranked.step_ns / unit): ranked for ranked in reversed(best.values())}
        return list(reversed(distinct.values()))[:count]

    def _starts(self) -> list[CoarseSchedule]:
        stages = range(len(self.stages))
        weight_delays = {tuple(min(self.most, a + b * s) for s in stages) for a in (0, 1, 2) for b in (0, 1, 2)}
        depths = (
            {self.plain}
            if self.fixed
            else {
                tuple(min(self.num, self.plain[s] + (more * (len(stages) - 1 - s) + up) // 2) for s in stages)
                for more in (0, 1, 2)
                for up in (0, 1)
            }
        )
        return sorted(
            _schedule([StageSchedule(weight_delay[s], depth[s], early, 0.0, 0, form, early) for s in stages])
            for weight_delay in weight_delays
            for depth in depths
            for early in (True, False)
            for form in self.forms
        )

    def _ranked(self, schedule: CoarseSchedule) -> tuple[float, CoarseSchedule]:
        """Within the memory: where a stage has no room weight gradients trail by less; and by as much, with more recomputed."""
        several = max(map(len, self.stages)) > 1
        found = []
        for more in (False, True)[: 1 + several]:
            fitted = _schedule([self._fitted(s, each, more) for s, each in enumerate(_choices(schedule))])
            took = self._step(fitted)
            found.append(((took if took is not None else float("inf")), fitted))
        return min(found)

    def _fitted(self, stage: int, each: StageSchedule, more: bool = False) -> StageSchedule:
        """The choices for a stage adapted to its memory. Before the weight-gradient delay is reduced, recomputation is raised only as far
        as it is needed without delay, or with `more` as far as possible."""
        last = len(self.stages[stage]) - 1
        plain = (each._replace(weight_delay=0, depth=self.plain[stage], inline_share=0.0, level=level) for level in range(each.level, last))
        most = last if more else next((found.level for found in plain if self._jobs(stage, found) is not None), last)
        while self._jobs(stage, each) is None:
            if each.level < most:
                each = each._replace(level=each.level + 1)
            elif each.more_weight_delay_at_end:
                each = each._replace(more_weight_delay_at_end=each.more_weight_delay_at_end - 1)
            elif each.weight_delay:
                each = each._replace(weight_delay=each.weight_delay - 1)
            elif each.depth > self.plain[stage]:
                each = each._replace(depth=each.depth - 1)
            else:
                break
        return each

    def _jobs(self, stage: int, each: StageSchedule) -> Row | None:
        """The jobs of a stage; None if they do not fit into its memory."""
        key, known = (stage, each), self.known
        if known.peaks.get(key, 0) > self.limit:
            return None
        if key not in known.jobs:
            times, at_end = (self._times(stage, each, early) for early in (each.early, each.early_at_end))
            shape = each.depth, each.weight_delay, each.more_weight_delay_at_end
            row = self._row(stage, self.num, *shape)
            costs = self._kinds(stage, self.num, *shape).costs(times, at_end)
            whole = costs if self.num == self.all or self.chunks > 1 else self._kinds(stage, self.all, *shape).costs(times, at_end)
            known.peaks[key] = self.always[stage][each.level] + peak_bytes(whole)
            if known.peaks[key] > self.limit:
                return None
            known.jobs[key] = jobs_of(row, costs, stage, len(self.stages), self.engine)
        return known.jobs[key]

    def _row(self, stage: int, num_micro_batches: int, depth: int, weight_delay: int, more_weight_delay_at_end: int = 0) -> list[Slot]:
        key = stage, num_micro_batches, depth, weight_delay, more_weight_delay_at_end
        if key not in self.known.rows:
            self.known.rows[key] = joined(
                stage,
                len(self.stages),
                num_micro_batches,
                self.chunks,
                weight_delay=weight_delay,
                warmup=depth,
                weight_delay_at_end=weight_delay + more_weight_delay_at_end,
            )
        return self.known.rows[key]

    def _kinds(self, stage: int, num_micro_batches: int, depth: int, weight_delay: int, more_weight_delay_at_end: int) -> Kinds:
        key = stage, num_micro_batches, depth, weight_delay, more_weight_delay_at_end
        if key not in self.known.kinds:
            self.known.kinds[key] = Kinds.of(self._row(*key))
        return self.known.kinds[key]

    def _times(self, stage: int, each: StageSchedule, early: bool) -> Mapping[str, SlotTimes]:
        """Parts whose backward is whole, and those without one, are the same whatever trails."""
        table = self.tables[stage][each.level]
        return {**table[each.form, early, 0], **table[each.form, early, each.inline_share]}

    def _step(self, schedule: CoarseSchedule) -> float | None:
        """Time of a schedule by the coarse model; None if it does not fit into memory or never completes."""
        if schedule not in self.seen:
            jobs = [found for s, each in enumerate(_choices(schedule)) if (found := self._jobs(s, each)) is not None]
            runs = len(jobs) == len(self.stages) and not self._stuck(schedule.depth)
            if runs and schedule not in self.known.steps:
                self.known.steps[schedule] = run_jobs(jobs, self.engine)
            self.seen[schedule] = self.known.steps[schedule] if runs else None
        return self.seen[schedule]

    def _stuck(self, depth: Numbers) -> bool:
        """Whether stages would wait for each other forever at this depth; the delay of weight gradients does not matter for that."""
        if depth not in self.known.stuck:
            rows = [self._links(*each) for each in enumerate(depth)]
            self.known.stuck[depth] = reached(rows) != [len(row) for row in rows]
        return self.known.stuck[depth]

    def _links(self, stage: int, depth: int) -> list[Links]:
        if (stage, depth) not in self.known.links:
            row = self._row(stage, self.all, depth, weight_delay=0)
            self.known.links[stage, depth] = [links(slot, stage, "B" * len(self.stages), self.chunks) for slot in row]
        return self.known.links[stage, depth]

    def _climb(self, start: tuple[float, CoarseSchedule], evaluations: int) -> None:
        """Move to the best neighbour, which differs on one stage, while it is faster and fewer than `evaluations` schedules are known."""
        took, here = start
        while len(self.seen) < evaluations:
            best = self._fastest(each for stage in range(len(self.stages)) for each in self._near(here, stage))
            if best is None or best[0] >= took:
                return
            took, here = best

    def _refine(self, start: tuple[float, CoarseSchedule], evaluations: int) -> None:
        """As `_climb`, with finer neighbours, one stage after the other, until no stage has a faster one."""
        (took, here), stage, unchanged = start, 0, 0
        while len(self.seen) < evaluations and unchanged < len(self.stages):
            best, unchanged = self._fastest(self._finer(here, stage)), unchanged + 1
            if best is not None and best[0] < took:
                (took, here), unchanged = best, 0
            stage = (stage + 1) % len(self.stages)

    def _fastest(self, schedules: Iterable[CoarseSchedule]) -> tuple[float, CoarseSchedule] | None:
        return min(((took, each) for each in schedules if (took := self._step(each)) is not None), default=None)

    def _near(self, schedule: CoarseSchedule, stage: int) -> list[CoarseSchedule]:
        """Neighbours that differ on this stage: one micro-batch more or less of delay or depth, another order, the next level, or another
        share of weight gradients that are not delayed, two steps away; for depth, level and share with the same delay, or with as much as
        the memory allows."""
        here = _choices(schedule)[stage]
        others = [here._replace(weight_delay=here.weight_delay + more) for more in (-1, 1) if 0 <= here.weight_delay + more <= self.most]
        others.append(here._replace(early=not here.early, early_at_end=not here.early))
        return self._with(schedule, stage, [*others, *self._refitted(stage, self._others(stage, here, 2))])

    def _finer(self, schedule: CoarseSchedule, stage: int) -> list[CoarseSchedule]:
        """More neighbours that differ on this stage: also another form, the next share, and all combinations of orders, and of delays up to
        `FAR` micro-batches away, before the last forward and from there on."""
        here = _choices(schedule)[stage]
        others = [here._replace(form=form) for form in self.forms if form != here.form]
        delays = [
            (delay, more)
            for delay in range(max(0, here.weight_delay - FAR), 1 + min(self.most, here.weight_delay + FAR))
            for more in range(max(0, here.more_weight_delay_at_end - 1), 2 + here.more_weight_delay_at_end)
            if (delay or not more) and delay + more <= self.most
        ]
        orders = [
            here._replace(weight_delay=delay, more_weight_delay_at_end=more, early=early, early_at_end=at_end)
            for delay, more in delays
            for early in (True, False)
            for at_end in (True, False)
        ]
        return self._with(schedule, stage, [*orders, *self._refitted(stage, [*others, *self._others(stage, here, 1)])])

    def _others(self, stage: int, here: StageSchedule, step: int) -> list[StageSchedule]:
        """With the next levels, depths, and shares of weight gradients that are not delayed (`step` away)."""
        at, last = self.inline_share.index(here.inline_share), len(self.stages[stage]) - 1
        near = [here._replace(inline_share=self.inline_share[k]) for k in (at - step, at, at + step) if 0 <= k < len(self.inline_share)]
        near += [here._replace(level=level) for level in (here.level - 1, here.level + 1) if 0 <= level <= last]
        depths = (here.depth - 1, here.depth + 1) if not self.fixed else ()
        return near + [here._replace(depth=depth) for depth in depths if self.plain[stage] <= depth <= self.num]

    def _refitted(self, stage: int, choices: Sequence[StageSchedule]) -> list[StageSchedule]:
        """Each choice with its own delay, with as much of this delay as fits into memory, and with the longest delay that fits."""
        found = list[StageSchedule]()
        for each in choices:
            found += [each, self._fitted(stage, each), self._fitted(stage, each._replace(weight_delay=self.most))]
        return found

    def _with(self, schedule: CoarseSchedule, stage: int, others: Iterable[StageSchedule]) -> list[CoarseSchedule]:
        """The schedule with each of these choices for a stage."""
        choices = _choices(schedule)
        different = (each for each in dict.fromkeys(others) if each != choices[stage])
        return [_schedule([*choices[:stage], each, *choices[stage + 1 :]]) for each in different]


def _choices(schedule: CoarseSchedule) -> list[StageSchedule]:
    columns = (getattr(schedule, name) for name in StageSchedule._fields)
    return [StageSchedule(*each) for each in zip(*columns, strict=True)]


def _schedule(choices: Sequence[StageSchedule]) -> CoarseSchedule:
    """The schedule of these choices, with `inline_share` and `more_weight_delay_at_end` reset on stages that delay no weight gradients."""
    return CoarseSchedule(
        *zip(*(each if each.weight_delay else each._replace(inline_share=0.0, more_weight_delay_at_end=0) for each in choices), strict=True)
    )


def kinds_of(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int) -> list[str]:
    """All kinds of slots that the searched schedules, including Paddle's own, may have on a stage."""
    if num_chunks == 1:
        rows = [
            joined(0, 1, 4, weight_delay=weight_delay, warmup=depth, weight_delay_at_end=weight_delay + more)
            for weight_delay in (0, 1, 2, 4)
            for depth in (1, 2, 4)
            for more in (0, 1)
        ]
    else:
        count = ranked_micro_batches(num_micro_batches, num_stages, num_chunks)
        rows = [
            joined(stage, num_stages, count, num_chunks, weight_delay=weight_delay, weight_delay_at_end=most)
            for most in range(count * num_chunks + 1)
            for weight_delay in {most, min(most, 1)}
        ]
        rows.append(_plain_row(stage, num_stages, count, num_chunks))
    return sorted({kind_of(slot) for row in rows for slot in row})


def _plain_row(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int) -> list[Slot]:
    """Paddle's own row, without separate receives and sends."""
    row = (interleaved if num_chunks > 1 else one_f_one_b)(stage, num_stages, num_micro_batches, num_chunks)
    return [slot for slot in row if slot.parts[0].kind not in "RS"]
