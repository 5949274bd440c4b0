"""Schedules that the coarse model of a step finds best, from what the stages say of their jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from interlace.passes import Schedule1F1B
from interlace.planning.drafts import Drafts
from interlace.planning.tasks import StageWork, job_orders, stage_work
from interlace.planning.variants import as_found, without_search
from interlace.scheduler.interleave.slot_times import StageOrder, StageTimes
from interlace.scheduler.whole_step.search import Known, Numbers, Ranked, find_schedules

COARSE_SCHEDULES = 3
"""Schedules of the coarse model that are planned in full, as drafts."""
OVER_BUDGET = (1.1, 1.3)
"""Schedules are also looked for in so many times the budget, one of each: offload then moves the rest."""
PAYS = 0.005
"""Without a budget, recomputation is looked at only where steps that hold as much as they like are shorter by this part."""
ANY = 1 << 60
"""More bytes than any device has."""


class Found(msgspec.Struct, frozen=True):
    """What the coarse model gave, and whether schedules that hold more would be faster by as much as `PAYS`."""

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
        """The schedules that the coarse model finds best, with how much each stage recomputes."""
        levels = self.recomputation(limit) if self.drafts.given and self.drafts.chooses else (self.drafts.needed,)
        found = self._looked_for(levels, baseline_peaks, limit)
        if self.drafts.chooses and not self.drafts.given and (found.memory_pays or self.drafts.recomputes):
            levels = self.recomputation(limit)
            found = self._looked_for(levels, baseline_peaks, limit)
        return self.as_forms(found.schedules, levels)

    def as_forms(self, found: Sequence[Ranked], levels: Sequence[Numbers | None]) -> list[tuple[Numbers | None, Schedule1F1B]]:
        """Schedules as forms, with how much each stage recomputes."""
        forms = {
            (_recomputed(each, levels), as_found(self.drafts.asked, each, self.drafts.world.captured, self.drafts.draws)): each.peak_bytes
            for each in found
        }
        self.expected |= {(recomputed, without_search(form)): peak for (recomputed, form), peak in forms.items()}
        return list(forms)

    def recomputation(self, limit: int) -> tuple[Numbers | None, ...]:
        """What a schedule may recompute; None without a budget where neither it nor the program recomputes anything."""
        return tuple(
            level if any(level) or self.drafts.given or self.drafts.recomputes else None for level in self.drafts.make.levels.within(limit)
        )

    def _looked_for(self, levels: Sequence[Numbers | None], baseline_peaks: Sequence[int], limit: int) -> Found:
        """What is found from what the first rank of each stage says of its jobs."""
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
        limits = [(limit, COARSE_SCHEDULES), *((int(limit * more), 1) for more in OVER_BUDGET if self.drafts.offloads)]
        best = [each for most, count in limits for each in self.find(most, count)]
        free = [] if self.drafts.given or len(levels) > 1 else self.find(ANY, 1)
        return Found(tuple(best), bool(free) and (not best or free[0].step_ns < (1 - PAYS) * best[0].step_ns))

    def find(self, limit: int, count: int) -> list[Ranked]:
        pipe = self.drafts.pipe
        return find_schedules(self.looked_at[1], pipe.num_micro_batches, limit, count, self.drafts.draws, pipe.num_chunks, self.known)

    def best_in(self, limit: int) -> list[tuple[Numbers | None, Schedule1F1B]]:
        """The schedule that is found best in so much memory, of what was looked at, with how much each stage recomputes."""
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
        """The levels of a stage without what it holds above the limit at each of them, which only offload can give back, and without
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
    """How much each stage recomputes at the levels of a schedule; None for what the program has."""
    at = found.schedule.level
    if not any(at):
        return levels[0]
    return tuple((levels[level] or (0,) * len(at))[stage] for stage, level in enumerate(at))
