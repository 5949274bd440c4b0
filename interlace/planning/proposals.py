"""Forms that are proposed after the first: with less memory, less or more recomputation, or other waits of the host.

Each function gets the drafts that there are and gives more (`Drafts.draft`), for `fastest.py`, which calls them in turn; none raises the
limit.
"""

from __future__ import annotations

from collections.abc import Sequence

from interlace.passes import Schedule1F1B
from interlace.planning.coarse import COARSE_SCHEDULES, PAYS, Coarse
from interlace.planning.drafts import ROUNDS, Drafts, Judged, fitting
from interlace.planning.variants import alternatives, paddles_jobs, without_search
from interlace.scheduler.whole_step.search import Numbers

TIGHTER = (0.95, 0.85)
"""Parts of the budget: forms that exceed it are drafted again as these would have them."""
MOST_TIGHTER = 3
"""Forms, the fastest first, of which that is done."""
CLOSER, NEARLY = 2, 1.05
"""Without a budget: times that schedules are looked for in less memory, and so many times what they may hold is nearly that."""
LESS = (0.03, 0.015)
"""Parts of the budget that recomputation leaves to offload, on one stage after the other: the first that it can give back. With 0.06 tried
besides three of nine plans are faster, by 0.1 % at most, and planning takes a fifth longer."""


def tighter(drafts: Drafts, judged: Sequence[Judged], limit: int) -> list[Judged]:
    """What exceeds the budget and would be faster than all that keeps it, as tighter budgets would have it."""
    best = next((each.step_ns or 0 for each in fitting(judged, limit)), None)
    over = [each for each in judged if each.step_ns is not None and each.peak_bytes > limit and (best is None or each.step_ns < best)]
    over.sort(key=lambda each: each.step_ns or 0)
    found: dict[tuple[Numbers | None, Schedule1F1B, float], None] = {}
    for part in TIGHTER if over else ():
        needed = drafts.make.levels.within(int(part * limit), (0.0,))[-1] if drafts.chooses else None
        for each in over[:MOST_TIGHTER]:
            more = tuple(map(max, each.recomputed, needed)) if each.recomputed and needed else needed or each.recomputed
            found |= {(level, each.form, part): None for level in (each.recomputed, more)}
    return [drafts.draft(more, form, drafts.later, limit, part) for more, form, part in found]


def less_recomputed(drafts: Drafts, judged: Sequence[Judged], limit: int) -> list[Judged]:
    """The fastest that keeps the budget with less recomputed on one stage after the other, as long as that makes it faster: offload
    gives back what a stage then holds too much, and what that costs only a simulation of the whole step says."""
    best, found = next(iter(fitting(judged, limit)), None), list[Judged]()
    if best is None or best.recomputed is None or not drafts.chooses or not drafts.offloads:
        return found
    fewer = [drafts.make.levels.within(limit, (-part,))[-1] for part in LESS]
    for stage in reversed(range(len(best.recomputed))):
        for levels in fewer:
            if levels[stage] < best.recomputed[stage]:
                recomputed = (*best.recomputed[:stage], levels[stage], *best.recomputed[stage + 1 :])
                found.append(drafts.draft(recomputed, best.form, best.later, limit))
                if found[-1].peak_bytes <= limit:
                    break
        best = fitting((best, *found), limit)[0]
    return found


def with_less(drafts: Drafts, coarse: Coarse, judged: Sequence[Judged], limit: int) -> list[Judged]:
    """Schedules that are looked for in less memory: where what the coarse model found holds more than it says, and more than it may,
    though it would be faster than all that fits. They leave free by how much it holds more than expected."""
    newest, more, levels = judged, list[Judged](), coarse.looked_at[0]
    for _ in range(CLOSER):
        best = next((each.step_ns or 0 for each in fitting((*judged, *more), limit)), None)
        ranked = [each for each in newest if (each.recomputed, each.form) in coarse.expected]
        over = [
            each
            for each in ranked
            if each.step_ns is not None and limit < each.peak_bytes <= NEARLY * limit and (best is None or each.step_ns < (1 - PAYS) * best)
        ]
        if not over:
            break
        within = limit - max(each.peak_bytes - coarse.expected[each.recomputed, each.form] for each in over)
        found = coarse.as_forms(coarse.find(within, COARSE_SCHEDULES), levels)
        newest = [
            drafts.draft(*each, drafts.later, limit) for each in dict.fromkeys((level, without_search(form)) for level, form in found)
        ]
        more += newest
    return more


def in_paddles_order(drafts: Drafts, limit: int) -> list[Judged]:
    """Without a budget, Paddle's order of a program that recomputes with what that order needs; where it holds more than it should by
    what is recomputed, with more of it. Other orders may hold too much on a stage on which all is recomputed already."""
    judged, within = list[Judged](), limit
    for _ in range(ROUNDS if drafts.recomputes and drafts.chooses else 0):
        judged.append(drafts.draft(drafts.make.levels.within(within, (0.0,))[-1], paddles_jobs(drafts.asked), drafts.later, limit))
        if judged[-1].peak_bytes <= limit:
            break
        within -= 2 * (judged[-1].peak_bytes - limit)
    return judged


def with_other_waits(drafts: Drafts, judged: Judged, limit: int) -> list[Judged]:
    """A form with the alternatives of each pass after it."""
    return [
        drafts.draft(judged.recomputed, judged.form, (*drafts.later[:k], other, *drafts.later[k + 1 :]), limit)
        for k, each in enumerate(drafts.later)
        for other in alternatives(each)
    ]
