"""Which schedules are worth planning in full: lag and depth of each stage, ranked by the coarse model, within the memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from interlace.scheduler.legal_rows import stall
from interlace.scheduler.schedule import Slot, in_flight, interleaved, joined, lagged, one_f_one_b
from interlace.scheduler.whole_step.coarse import kind_of, peak_bytes, step_ns
from interlace.scheduler.whole_step.slot_times import SlotTimes, StageTimes

Numbers = tuple[int, ...]
EVALUATIONS = 600
"""Schedules that the search may look at; about two seconds of host time with 8 stages and 16 micro-batches."""
SAME = 0.001
"""Share of a step within which times count as the same: the schedule that holds less comes first."""
MICRO_BATCHES = 16
"""A step with more is ranked by one with so many: the steady state repeats."""


class LagSchedule(msgspec.Struct, frozen=True, order=True):
    """Lag of weight gradients, micro-batches in flight, and whether jobs are ordered for early sends; each by stage."""

    lag: Numbers
    depth: Numbers
    early: tuple[bool, ...]

    def rows(self, num_micro_batches: int, num_chunks: int = 1) -> list[list[Slot]]:
        """Slots of each stage; with chunks the depth is that of Paddle's VPP."""
        stages = len(self.lag)
        return [joined(s, stages, num_micro_batches, num_chunks, lag=self.lag[s], warmup=self.depth[s]) for s in range(stages)]


class Ranked(msgspec.Struct, frozen=True):
    """A schedule and the time that the coarse model gives it."""

    schedule: LagSchedule
    step_ns: float


def find_schedules(
    stages: Sequence[StageTimes], num_micro_batches: int, limit_bytes: int, count: int, fixed_depth: bool, num_chunks: int = 1
) -> list[Ranked]:
    """The best schedules of different depth, orders and time that the coarse model finds, the fastest first; the same on every machine.

    Schedules that only differ in the lag of a stage that waits anyway have one time: one of them is enough.

    Args:
        stages: One for each stage.
        num_micro_batches: Of the step.
        limit_bytes: Device memory that no stage may pass.
        count: How many, at most.
        fixed_depth: Whether each stage must hold as many micro-batches as in 1F1B (random draws would change their order).
        num_chunks: Model chunks of each stage; with more than one the depth is fixed.
    """
    ranked = ranked_micro_batches(num_micro_batches, len(stages), num_chunks)
    return _Search(stages, ranked, limit_bytes, fixed_depth, num_chunks).run(count)


def ranked_micro_batches(num_micro_batches: int, num_stages: int, num_chunks: int) -> int:
    """Micro-batches of the step that is ranked in place of a longer one; with chunks in multiples of the stages, where the step has them.

    >>> [ranked_micro_batches(48, stages, 2) for stages in (2, 6, 24)]
    [16, 12, 24]
    """
    most = min(num_micro_batches, MICRO_BATCHES)
    return most if num_chunks == 1 or num_micro_batches % num_stages else max(num_stages, most // num_stages * num_stages)


class _Search:
    def __init__(self, stages: Sequence[StageTimes], num_micro_batches: int, limit_bytes: int, fixed_depth: bool, num_chunks: int) -> None:
        self.stages, self.num, self.limit, self.chunks = stages, num_micro_batches, limit_bytes, num_chunks
        self.fixed = fixed_depth or num_chunks > 1
        self.plain = tuple(in_flight(s, len(stages), num_micro_batches) for s in range(len(stages)))
        self.always = [stage.peak_bytes - peak_bytes(_plain_row(s, len(stages), num_micro_batches, num_chunks), stage.slots)
                       for s, stage in enumerate(stages)]  # fmt: skip
        self.most = num_micro_batches * num_chunks
        self.seen: dict[LagSchedule, float | None] = {}

    def run(self, count: int) -> list[Ranked]:
        starts = sorted(self._ranked(start) for start in self._starts())
        for found in starts[:3]:
            self._climb(found)
        known = [(took, each) for each, took in self.seen.items() if took is not None]
        unit = SAME * min((took for took, _ in known), default=1.0)
        known.sort(key=lambda pair: (round(pair[0] / unit), sum(pair[1].lag) + sum(pair[1].depth), pair))
        best: dict[tuple[Numbers, tuple[bool, ...]], Ranked] = {}
        for took, each in known:
            best.setdefault((each.depth, each.early), Ranked(each, took))
        distinct = {round(ranked.step_ns / unit): ranked for ranked in reversed(best.values())}
        return list(reversed(distinct.values()))[:count]

    def _starts(self) -> list[LagSchedule]:
        stages = range(len(self.stages))
        lags = {tuple(min(self.most, a + b * s) for s in stages) for a in (0, 1, 2) for b in (0, 1, 2)}
        depths = {self.plain} if self.fixed else {
            tuple(min(self.num, self.plain[s] + more * (len(stages) - 1 - s) // 2) for s in stages) for more in (0, 1, 2)}  # fmt: skip
        return sorted(LagSchedule(lag, depth, (early,) * len(stages)) for lag in lags for depth in depths for early in (True, False))

    def _ranked(self, schedule: LagSchedule) -> tuple[float, LagSchedule]:
        """Within the memory: weight gradients trail by less where a stage has no room for them."""
        fitted = self._fitted(schedule)
        took = self._step(fitted)
        return (took if took is not None else float("inf")), fitted

    def _fitted(self, schedule: LagSchedule) -> LagSchedule:
        lag, depth = list(schedule.lag), list(schedule.depth)
        for s in range(len(self.stages)):
            while not self._fits(s, lag[s], depth[s], schedule.early[s]) and (lag[s] or depth[s] > self.plain[s]):
                if lag[s]:
                    lag[s] -= 1
                else:
                    depth[s] -= 1
        return LagSchedule(tuple(lag), tuple(depth), schedule.early)

    def _fits(self, stage: int, lag: int, depth: int, early: bool) -> bool:
        row = joined(stage, len(self.stages), self.num, self.chunks, lag=lag, warmup=depth)
        return self.always[stage] + peak_bytes(row, self._times(stage, early)) <= self.limit

    def _times(self, stage: int, early: bool) -> Mapping[str, SlotTimes]:
        return self.stages[stage].slots if early else self.stages[stage].late

    def _step(self, schedule: LagSchedule) -> float | None:
        """Time of a schedule that fits, by the coarse model; None of one that does not, or never ends."""
        if schedule not in self.seen:
            fits = all(self._fits(s, schedule.lag[s], schedule.depth[s], schedule.early[s]) for s in range(len(self.stages)))
            times = [self._times(s, schedule.early[s]) for s in range(len(self.stages))]
            rows = schedule.rows(self.num, self.chunks) if fits else []
            self.seen[schedule] = step_ns(rows, times) if rows and not stall(rows, self.chunks) else None
        return self.seen[schedule]

    def _climb(self, start: tuple[float, LagSchedule]) -> None:
        """To the best neighbour that is one micro-batch of lag or depth, or another order, away on one stage."""
        took, here = start
        while len(self.seen) < EVALUATIONS:
            near = sorted((found, each) for each in self._near(here) if (found := self._step(each)) is not None)
            if not near or near[0][0] >= took:
                return
            took, here = near[0]

    def _near(self, schedule: LagSchedule) -> list[LagSchedule]:
        found = []
        for s in range(len(self.stages)):
            for step in (-1, 1):
                lag, depth = list(schedule.lag), list(schedule.depth)
                lag[s] += step
                depth[s] += step
                if 0 <= lag[s] <= self.most:
                    found.append(LagSchedule(tuple(lag), schedule.depth, schedule.early))
                if not self.fixed and self.plain[s] <= depth[s] <= self.num:
                    found.append(LagSchedule(schedule.lag, tuple(depth), schedule.early))
            found.append(LagSchedule(schedule.lag, schedule.depth, tuple(each != (n == s) for n, each in enumerate(schedule.early))))
        return found


def kinds_of(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int) -> list[str]:
    """All kinds of slots that the schedules looked at may hold on a stage, Paddle's own among them."""
    if num_chunks == 1:
        rows = [lagged(0, 1, 4, lag=lag, warmup=depth) for lag in (0, 1, 2, 4) for depth in (1, 2, 4)]
    else:
        count = ranked_micro_batches(num_micro_batches, num_stages, num_chunks)
        rows = [joined(stage, num_stages, count, num_chunks, lag=lag) for lag in range(count * num_chunks + 1)]
        rows.append(_plain_row(stage, num_stages, count, num_chunks))
    return sorted({kind_of(slot) for row in rows for slot in row})


def _plain_row(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int) -> list[Slot]:
    """Paddle's own row, without receives and sends of their own."""
    row = (interleaved if num_chunks > 1 else one_f_one_b)(stage, num_stages, num_micro_batches, num_chunks)
    return [slot for slot in row if slot.parts[0].kind not in "RS"]
