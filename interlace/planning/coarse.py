"""Schedules that the coarse model of a step finds best, from the costs of jobs that the stages report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from interlace.passes import Schedule1F1B
from interlace.planning.drafts import Drafts
from interlace.planning.tasks import StageWork, is_long, job_orders, stage_work
from interlace.planning.variants import as_found, without_search
from interlace.scheduler.interleave.slot_times import StageOrder, StageTimes
from interlace.scheduler.whole_step.search import Known, Numbers, Ranked, find_schedules

COARSE_SCHEDULES = 3
"""Number of schedules of the coarse model of which drafts are made."""
OVER_BUDGET = (1.05, 1.1, 1.15, 1.3)
"""One schedule is also searched for within each of these multiples of the budget, for offload to move the rest; if the step is long, within
every second of them."""
PAYS = 0.005
"""Without a budget, recomputation is considered only if steps without a memory limit are shorter by at least this share."""
ANY = 1 << 60
"""More bytes than any device has, for no limit."""


class Found(msgspec.Struct, frozen=True):
    """The schedules that the coarse model found, and whether schedules that hold more would be faster by at least `PAYS`."""

    schedules: tuple[Ranked, ...] = ()
    memory_pays: bool = False


class Coarse:
    """Looks for schedules.

    Attributes:
        expected: Schedules that were found, and the bytes that the model gives their fullest stage.
        looked_at: What may be recomputed, and what the stages say of their jobs with it: what schedules were looked for in.
    """

    def __init__(self, drafts: Drafts) -> None:
        self.drafts = drafts
        self.expected: dict[tuple[Numbers | None, Schedule1F1B], int] = {}
        self.looked_at: tuple[Sequence[Numbers | None], list[StageTimes]] = ((), [])
        self.known = Known()

    def schedules(self, baseline_peaks: Sequence[int], limit: int) -> list[tuple[Numbers | None, Schedule1F1B]]:
        """The schedules that the coarse model finds best, each with the level of recomputation of each stage."""
        levels = self.recomputation(limit) if self.drafts.given and self.drafts.chooses else (self.drafts.needed,)
        found = self._looked_for(levels, baseline_peaks, limit)
        if self.drafts.chooses and not self.drafts.given and (found.memory_pays or self.drafts.recomputes):
            levels = self.recomputation(limit)
            found = self._looked_for(levels, baseline_peaks, limit)
        return self.as_forms(found.schedules, levels)

    def as_forms(self, found: Sequence[Ranked], levels: Sequence[Numbers | None]) -> list[tuple[Numbers | None, Schedule1F1B]]:
        """The same schedules as options, each with the level of recomputation of each stage."""
        forms = {
            (_recomputed(each, levels), as_found(self.drafts.asked, each, self.drafts.world.captured, self.drafts.draws)): each.peak_bytes
            for each in found
        }
        self.expected |= {(recomputed, without_search(form)): peak for (recomputed, form), peak in forms.items()}
        return list(forms)

    def recomputation(self, limit: int) -> tuple[Numbers | None, ...]:
        """Levels of recomputation that a schedule may choose from; None instead of the level that recomputes nothing, if there is no budget
        and the program does not recompute either."""
        return tuple(
            level if any(level) or self.drafts.given or self.drafts.recomputes else None for level in self.drafts.make.levels.within(limit)
        )

    def _looked_for(self, levels: Sequence[Numbers | None], baseline_peaks: Sequence[int], limit: int) -> Found:
        """What is found from the costs of jobs that the first rank of each stage reports."""
        made = [self.drafts.before(level) for level in levels]
        speaker = {facts.stage: rank for rank, facts in reversed([*enumerate(self.drafts.world.facts)])}
        programs = tuple(each.programs for each in made)
        said = self.drafts.world.map(stage_work, programs, tuple(baseline_peaks), ranks=sorted(speaker.values()))
        stages: dict[int, StageWork] = {stage: said[rank] for stage, rank in sorted(speaker.items())}
        orders = self._all_orders(stages, {stage: [each.programs[rank] for each in made] for stage, rank in speaker.items()}, speaker)
        times = [
            tuple(StageTimes(stage, orders[work], peak) for work, peak in zip(each.work, each.peak_bytes, strict=True))
            for stage, each in stages.items()
        ]
        self.known = Known()
        self.looked_at = levels, [each for stage in times for each in self._without_moved(stage, limit)]
        over = OVER_BUDGET[1::2] if is_long(self.drafts.world.captured) else OVER_BUDGET
        limits = [(limit, COARSE_SCHEDULES), *((int(limit * more), 1) for more in over if self.drafts.offloads)]
        best = [each for most, count in limits for each in self.find(most, count)]
        free = [] if self.drafts.given or len(levels) > 1 else self.find(ANY, 1)
        return Found(tuple(best), bool(free) and (not best or free[0].step_ns < (1 - PAYS) * best[0].step_ns))

    def find(self, limit: int, count: int) -> list[Ranked]:
        pipe = self.drafts.pipe
        return find_schedules(self.looked_at[1], pipe.num_micro_batches, limit, count, self.drafts.draws, pipe.num_chunks, self.known)

    def best_in(self, limit: int) -> list[tuple[Numbers | None, Schedule1F1B]]:
        """The best schedule within `limit` bytes, of what was searched before, with the level of recomputation of each stage."""
        found = self.as_forms(self.find(limit, 1), self.looked_at[0])
        return [(level, without_search(form)) for level, form in found]

    def _all_orders(
        self, stages: Mapping[int, StageWork], programs: Mapping[int, Sequence[int]], speaker: Mapping[int, int]
    ) -> dict[str, tuple[StageOrder, ...]]:
        """The orders of the jobs of all stages: of each kind of work found on the first stage that does it, first with nothing more
        recomputed, which the others are like. `programs` are the numbers of the programs that do a stage's work, `speaker` the rank that
        speaks for it."""
        owner = {work: stage for stage in sorted(stages, reverse=True) for work in stages[stage].work}
        found: dict[str, tuple[StageOrder, ...]] = {}
        for are_bases in (True, False):
            new: dict[int, dict[str, int]] = {}
            for stage, each in stages.items():
                mine = {
                    work: number
                    for work, number in zip(each.work, programs[stage], strict=True)
                    if owner[work] == stage and (work == each.work[0]) == are_bases
                }
                new |= {speaker[stage]: mine} if mine else {}
            if not new:
                continue
            like = [() if are_bases else found.get(stages[facts.stage].work[0], ()) for facts in self.drafts.world.facts]
            numbers = tuple(tuple(new.get(rank, {}).values()) for rank in self.drafts.world.all)
            told = tuple(each if rank in new else () for rank, each in enumerate(like))
            given = self.drafts.asked, numbers, told, self.drafts.memory_limits
            answers = self.drafts.world.map(job_orders, *given, ranks=sorted(new))
            found |= {work: orders for rank, works in new.items() for work, orders in zip(works, answers[rank], strict=True)}
        return found

    def _without_moved(self, levels: tuple[StageTimes, ...], limit: int) -> tuple[StageTimes, ...]:
        """The levels of a stage, without the bytes by which it exceeds the limit at each of them, which only offload can free, and without
        optimizer state that then leaves the device."""
        moved = self.drafts.make.movable_states[levels[0].stage]
        if moved:
            held = [each.peak_bytes - min(moved, max(0, each.peak_bytes - limit)) for each in levels]
            levels = tuple(msgspec.structs.replace(each, peak_bytes=peak) for each, peak in zip(levels, held, strict=True))
        over = min(each.peak_bytes for each in levels) - limit
        if over <= 0 or not self.drafts.offloads:
            return levels
        return tuple(msgspec.structs.replace(each, peak_bytes=each.peak_bytes - over) for each in levels)


def _recomputed(found: Ranked, levels: Sequence[Numbers | None]) -> Numbers | None:
    """The level of recomputation of each stage in a schedule; None for what the program recomputes itself."""
    at = found.schedule.level
    if not any(at):
        return levels[0]
    return tuple((levels[level] or (0,) * len(at))[stage] for stage, level in enumerate(at))
