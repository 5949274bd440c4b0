"""The coarse model of a step, and the search for schedules that it ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.ir.schedule import Slot, joined, parse_rows
from interlace.scheduler.interleave.planner import Form
from interlace.scheduler.interleave.slot_times import NO_MESSAGE, PartTimes, SlotTimes, StageOrder, StageTimes
from interlace.scheduler.jobs.legal_rows import stall
from interlace.scheduler.whole_step import search as search_module
from interlace.scheduler.whole_step.coarse import costs_of, jobs_of, peak_bytes, run_jobs
from interlace.scheduler.whole_step.search import CoarseSchedule, Ranked, find_schedules, kinds_of

FORWARD, INPUT, WEIGHT = 10.0, 8.0, 12.0
HELD, OPERANDS = 100, 40
"""Bytes that a forward leaves, and those of them that weight gradients still need."""


def step_ns(rows: Sequence[Sequence[Slot]], tables: Sequence[Mapping[str, SlotTimes]]) -> float | None:
    """Time of the slots of each stage, by the kinds of slots of each."""
    every = enumerate(zip(rows, tables, strict=True))
    return run_jobs([jobs_of(row, costs_of(row, table), stage, len(rows)) for stage, (row, table) in every])


def rows_of(schedule: CoarseSchedule, num_micro_batches: int, num_chunks: int = 1) -> list[list[Slot]]:
    """Slots of each stage; with chunks the depth is that of Paddle's VPP."""
    stages = len(schedule.weight_delay)
    return [
        joined(
            s,
            stages,
            num_micro_batches,
            num_chunks,
            weight_delay=schedule.weight_delay[s],
            warmup=schedule.depth[s],
            weight_delay_at_end=schedule.weight_delay[s] + schedule.more_weight_delay_at_end[s],
        )
        for s in range(stages)
    ]


def same_lag(weight_delay: tuple[int, ...], depth: tuple[int, ...]) -> CoarseSchedule:
    """With everything else as it is at first."""
    count = len(weight_delay)
    return CoarseSchedule(
        weight_delay, depth, (True,) * count, (0.0,) * count, (0,) * count, ("dx-first",) * count, (True,) * count, (0,) * count
    )


def times(stage: int, last: int, chunks: int = 1) -> dict[str, SlotTimes]:
    """Jobs whose parts run in turn; messages are needed at a part's start and sent at its end."""
    took = {"F": FORWARD, "B": INPUT + WEIGHT, "I": INPUT, "W": WEIGHT, "O": 5.0}
    net = {"F": HELD, "B": -HELD, "I": OPERANDS - HELD, "W": -OPERANDS, "O": 0}
    found = {}
    for slot in kinds_of(stage, last + 1, 2 * (last + 1), chunks):
        now, parts, live, rise = 0.0, [], 0, 0
        for part in slot.split("+"):
            kind, chunk = part[0], int(part[2:] or 0)
            starts, ends = (stage, chunk) == (0, 0), (stage, chunk) == (last, chunks - 1)
            live += net[kind]
            rise = max(rise, live)
            needs, sends = {"F": (not starts, not ends), "W": (False, False), "O": (False, False)}.get(kind, (not ends, not starts))
            gone = now + (INPUT if kind == "B" else took[kind])
            parts.append(PartTimes(kind, now if needs else NO_MESSAGE, gone if sends else NO_MESSAGE))
            now += took[kind]
        found[slot] = SlotTimes(now, tuple(parts), rise, live)
    return found


def inline_share(whole: dict[str, SlotTimes], share: float) -> dict[str, SlotTimes]:
    """Jobs whose input gradients hold a share of the weight gradients, those that need most memory for their time."""
    took, held = share * WEIGHT, round(1.6 * share * OPERANDS)
    found = {}
    for slot, each in whole.items():
        inputs, trailing = "I" in slot, "W" in slot
        late = took * inputs
        parts = tuple(
            PartTimes(
                part.kind,
                part.need_ns + late * (part.kind == "F" and part.need_ns != NO_MESSAGE),
                part.sent_ns + late * (part.kind == "F" and part.sent_ns != NO_MESSAGE),
            )
            for part in each.parts
        )
        less = held * (trailing - inputs)
        found[slot] = SlotTimes(each.duration_ns + late - took * trailing, parts, each.rise_bytes + min(0, less), each.net_bytes + less)
    return {slot: each for slot, each in found.items() if "I" in slot or "W" in slot}


def stage_times(stage: int, slots: dict[str, SlotTimes], peak: int, shares: tuple[float, ...] = ()) -> StageTimes:
    """A stage whose jobs take as long whatever leaves early."""
    orders = [StageOrder("dx-first", early, 0.0, slots) for early in (True, False)]
    orders += [StageOrder("dx-first", early, share, inline_share(slots, share)) for share in shares for early in (True, False)]
    return StageTimes(stage, tuple(orders), peak)


def stages(count: int, micro_batches: int) -> list[StageTimes]:
    return [stage_times(s, times(s, count - 1), 1000 + HELD * min(count - s, micro_batches)) for s in range(count)]


def test_two_stages_by_hand() -> None:
    """F 0-10 | F 10-20, then backward: its gradient leaves at 28 and is used at once on the first stage."""
    rows = list(parse_rows("0 | 0F 0B O\n1 | 0F 0B O").values())
    assert step_ns(rows, [times(0, 1), times(1, 1)]) == 28 + INPUT + WEIGHT + 5
    halves = list(parse_rows("0 | 0F 0I 0W O\n1 | 0F 0I 0W O").values())
    assert step_ns(halves, [times(0, 1), times(1, 1)]) == 28 + INPUT + WEIGHT + 5


def test_a_last_stage_that_ends_last_does_not_wait_for_its_first_message() -> None:
    """Its F, I and W, 10-40, and an optimizer of 100 end at 140, while the next step has begun; the first stage ends at 53."""
    rows = list(parse_rows("0 | 0F 0I 0W O\n1 | 0F 0I 0W O").values())
    last = times(1, 1)
    assert step_ns(rows, [times(0, 1), last | {"O": longer(last["O"], 20.0)}]) == FORWARD + INPUT + WEIGHT + 100


def test_two_stages_of_two_chunks_by_hand() -> None:
    """F of both chunks 0-40, from stage to stage and back; gradients leave at 48 (stage 1), 56 (stage 0) and, behind B.1, 68."""
    rows = list(parse_rows("0 | 0F 0F.1 0B.1 0B O\n1 | 0F 0F.1 0B.1 0B O").values())
    assert step_ns(rows, [times(stage, 1, 2) for stage in (0, 1)]) == 68 + INPUT + WEIGHT + 5


def test_what_is_late_moves_the_rest_of_its_job() -> None:
    """The second part of a job needs a message: the first runs before it is there."""
    rows = list(parse_rows("0 | 0F 1F 0B 1B O\n1 | 0F 0B+1F 1B O").values())
    slow = times(0, 1) | {"F": SlotTimes(50.0, (PartTimes("F", NO_MESSAGE, 50.0),), HELD, HELD)}
    # stage 1: F0 50-60, B0 60-80, F1 waits for 100, B1 110-130, its gradient leaves at 118; stage 0: B0 100-120, B1 120-140
    assert step_ns(rows, [slow, times(1, 1)]) == 140 + 5


def test_stages_that_wait_for_each_other_never_end() -> None:
    rows = list(parse_rows("0 | 0F 0B 1F 1B O\n1 | 1F 0F 0B 1B O").values())
    assert step_ns(rows, [times(0, 1), times(1, 1)]) is None


def test_memory_by_hand() -> None:
    """A weight-gradient delay of two keeps the operands of three micro-batches' weight gradients while the next forward runs."""
    plain, trailing = (joined(1, 2, 6, weight_delay=weight_delay) for weight_delay in (0, 2))
    assert peak_bytes(costs_of(plain, times(1, 1))) == HELD
    assert peak_bytes(costs_of(trailing, times(1, 1))) == HELD + 3 * OPERANDS


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 5, 20])
def test_the_best_schedules_fit_and_are_as_good_as_any_near(count: int, micro_batches: int) -> None:
    """With more memory never slower; of small pipelines no schedule of all that there are is faster."""
    given = stages(count, micro_batches)
    took = []
    worst = max(each.peak_bytes for each in given)
    for limit in (worst, worst + 300, worst + 2000):
        found = find_schedules(given, micro_batches, limit, 3, fixed_depth=False)
        assert found == find_schedules(given, micro_batches, limit, 3, fixed_depth=False)
        assert len({round(ranked.step_ns) for ranked in found}) == len(found)  # a draft of what takes as long is of no use
        for ranked in found:
            for s, row in enumerate(rows_of(ranked.schedule, micro_batches)):
                assert 1000 + peak_bytes(costs_of(row, times(s, count - 1))) <= limit
        took.append(found[0].step_ns)
    assert took == sorted(took, reverse=True)
    if count == 2 and micro_batches == 5:
        every = itertools.product(itertools.product(range(4), repeat=2), [(2, 1), (3, 1), (3, 2), (4, 2)])
        rows = [row for weight_delay, depth in every if not stall(row := rows_of(same_lag(weight_delay, depth), 5))]
        steps = [step_ns(row, [each.orders[0].slots for each in given]) for row in rows]
        assert took[-1] <= min(step for step in steps if step is not None)


def test_as_much_is_recomputed_as_the_schedule_pays_for() -> None:
    """Of two stages with two levels each no weight_delays and levels are faster than those found, in any memory."""
    kinds = [times(s, 1) for s in (0, 1)]
    less = [{kind: recomputed(kind, each) for kind, each in stage.items()} for stage in kinds]
    levels = [(kinds[s], less[s]) for s in (0, 1)]
    held = [[1000 + peak_bytes(costs_of(joined(s, 2, 6, weight_delay=0), each)) for each in levels[s]] for s in (0, 1)]
    given = [stage_times(s, each, held[s][k]) for s in (0, 1) for k, each in enumerate(levels[s])]
    took = []
    for limit in range(min(held[0]), max(held[0]) + 200, 20):
        found = find_schedules(given, 6, limit, 3, fixed_depth=True)
        fitting = [
            step_ns(rows, [levels[s][level[s]] for s in (0, 1)])
            for level in itertools.product((0, 1), repeat=2)
            for rows in (rows_of(same_lag(weight_delay, (2, 1)), 6) for weight_delay in itertools.product(range(7), repeat=2))
            if all(1000 + peak_bytes(costs_of(row, levels[s][level[s]])) <= limit for s, row in enumerate(rows))
        ]
        assert found[0].step_ns <= 1.001 * min(step for step in fitting if step is not None)
        took.append((found[0].step_ns, sum(found[0].schedule.level)))
    assert [step for step, _ in took] == sorted((step for step, _ in took), reverse=True)
    assert {count for _, count in took} >= {0, 1}


def recomputed(kind: str, each: SlotTimes) -> SlotTimes:
    """A job of a stage that keeps half as much of forward, and takes 1 longer in backward."""
    again = 1.0 if "I" in kind or "B" in kind else 0.0
    forward = sum(part[0] == "F" for part in kind.split("+")) - sum(part[0] in "BI" for part in kind.split("+"))
    return SlotTimes(each.duration_ns + again, each.parts, each.rise_bytes - forward * 30, each.net_bytes - forward * 30)


def test_weight_gradients_of_chunks_trail_as_memory_allows() -> None:
    """Of two stages with two chunks no weight_delays are faster than those found, in any memory."""
    every = [same_lag(weight_delay, (2, 1)) for weight_delay in itertools.product(range(9), repeat=2)]
    each = [times(stage, 1, 2) for stage in (0, 1)]
    given = [stage_times(s, each[s], 1000 + peak_bytes(costs_of(joined(s, 2, 4, 2, weight_delay=0), each[s]))) for s in (0, 1)]
    for room in (0, 100, 5000):
        limit = max(stage.peak_bytes for stage in given) + room
        found = find_schedules(given, 4, limit, 3, fixed_depth=False, num_chunks=2)
        fitting = [
            rows
            for rows in (rows_of(one, 4, 2) for one in every)
            if all(1000 + peak_bytes(costs_of(row, each[s])) <= limit for s, row in enumerate(rows))
        ]
        assert all(1000 + peak_bytes(costs_of(row, each[s])) <= limit for s, row in enumerate(rows_of(found[0].schedule, 4, 2)))
        assert found[0].step_ns <= min(step_ns(rows, each) or 0.0 for rows in fitting)


def test_depth_stays_where_it_must() -> None:
    for ranked in find_schedules(stages(3, 8), 8, 5000, 3, fixed_depth=True):
        assert ranked.schedule.depth == (3, 2, 1)


def check_ranked(found: Ranked, given: list[StageTimes], micro_batches: int, limit: int) -> None:
    """Its time is that of its first micro-batches, all of it fits, and something trails wherever something else does not."""
    weight_delay, share = found.schedule.weight_delay, found.schedule.inline_share
    tables = [
        {**stage.orders[0].slots, **next(each.slots for each in stage.orders if each.inline_share == part)}
        for stage, part in zip(given, share, strict=True)
    ]
    assert step_ns(rows_of(found.schedule, min(micro_batches, 16)), tables) == found.step_ns
    held = (peak_bytes(costs_of(row, table)) for row, table in zip(rows_of(found.schedule, micro_batches), tables, strict=True))
    assert all(1000 + each <= limit for each in held)
    assert all(not part or trails for part, trails in zip(share, weight_delay, strict=True))


@pytest.mark.parametrize("micro_batches", [8, 40])
def test_part_of_the_weight_gradients_trails_where_all_of_them_do_not_fit(micro_batches: int) -> None:
    """With shares the step is never longer, and where not all weight gradients fit it is shorter. A long step is ranked by a short one:
    what trails by all of that fits into the memory of the long one."""
    given, shared = ([stage_times(s, times(s, 3), 1000 + HELD * (4 - s), shares) for s in range(4)] for shares in ((), (0.25, 0.5)))
    gains = []
    for limit in range(1400, 1800, 50):
        plain = find_schedules(given, micro_batches, limit, 3, fixed_depth=True)[0]
        for found in reversed(find_schedules(shared, micro_batches, limit, 50, fixed_depth=True)):
            check_ranked(found, shared, micro_batches, limit)
        gains.append(plain.step_ns - found.step_ns)
    assert min(gains) >= 0
    assert max(gains) > 0


def test_what_trails_by_all_micro_batches_of_a_short_step_fits_a_long_one() -> None:
    """Ranked by 16 micro-batches, of which the last ones have no forward beside them any more; in a step of 40 most have."""
    search = search_module._Search(stages(2, 40), 40, 1000 + 15 * OPERANDS + HELD, True, 1)
    fitted = search._fitted(1, search_module.StageSchedule(16, 1, True, 0.0, 0, "dx-first", early_at_end=True))
    assert fitted.weight_delay == 14
    assert 1000 + peak_bytes(costs_of(joined(1, 2, 40, weight_delay=15), times(1, 1))) > search.limit


def longer(each: SlotTimes, factor: float, less: float = 0.0, late: bool = False) -> SlotTimes:
    """A job that takes so many times as long, less so much; its messages are sent at its end where they leave `late`."""
    took = factor * each.duration_ns - less
    parts = tuple(
        PartTimes(
            part.kind,
            part.need_ns if part.need_ns == NO_MESSAGE else factor * part.need_ns,
            part.sent_ns if part.sent_ns == NO_MESSAGE else took if late else factor * part.sent_ns,
        )
        for part in each.parts
    )
    return SlotTimes(took, parts, each.rise_bytes, each.net_bytes)


def two_forms(stage: int) -> StageTimes:
    """The last of two stages has half as much more to do. Pairs are shorter where sends need not leave early: on the first stage those
    of dx-first, on the last mixed ones."""
    saved: dict[Form, float] = {"dx-first": (2.0, 0.0)[stage], "mixed": (0.0, 4.0)[stage]}
    orders = [
        StageOrder(
            form,
            early,
            0.0,
            {
                kind: longer(each, (1.0, 1.5)[stage], *((saved[form], True) if late else ()))
                for kind, each in times(stage, 1).items()
                for late in ["+F" in kind and not early]
            },
        )
        for form, early in itertools.product(saved, (True, False))
    ]
    return StageTimes(stage, tuple(orders), 1000 + HELD * (2 - stage))


def test_each_stage_has_its_form_and_the_end_its_own_orders() -> None:
    """No forms, orders and weight_delays by stage, at the end the same orders or others, are faster than those found, in any memory."""
    given, chosen = [two_forms(0), two_forms(1)], []
    for limit in (1240, 1400, 2000):
        ways = []
        for stage, each in enumerate(given):
            tables = {(order.form, order.early): order.slots for order in each.orders}
            found = []
            for weight_delay, form, *early in itertools.product(range(6), ("dx-first", "mixed"), (True, False), (True, False)):
                row = joined(stage, 2, 5, weight_delay=weight_delay)
                costs = costs_of(row, *(tables[form, which] for which in early))
                found += [jobs_of(row, costs, stage, 2)] if 1000 + peak_bytes(costs) <= limit else []
            ways.append(found)
        best = find_schedules(given, 5, limit, 1, fixed_depth=True)[0]
        assert best.step_ns == min(run_jobs(pair) or 1e9 for pair in itertools.product(*ways))
        chosen.append(best.schedule)
    assert chosen[0].form == ("dx-first", "mixed")
    assert {each.form[1] for each in chosen} == {"mixed"}
    assert any(each.early_at_end != each.early for each in chosen)


def test_weight_gradients_trail_by_more_at_the_end() -> None:
    """Of three stages, the last with a quarter more to do, in the memory of Paddle's plan: faster than all delays that stay the same."""
    slots = [{kind: longer(each, 1.25 if s == 2 else 1.0) for kind, each in times(s, 2).items()} for s in range(3)]
    given = [stage_times(s, slots[s], 1000 + HELD * (3 - s)) for s in range(3)]
    steps: dict[bool, float] = {}
    for weight_delays, more in itertools.product(itertools.product(range(5), repeat=3), itertools.product((0, 1), repeat=3)):
        rows = [
            joined(s, 3, 4, weight_delay=weight_delay, weight_delay_at_end=weight_delay + more[s])
            for s, weight_delay in enumerate(weight_delays)
        ]
        if all(1000 + peak_bytes(costs_of(row, slots[s])) <= 1300 for s, row in enumerate(rows)):
            steps[any(more)] = min(steps.get(any(more), 1e9), step_ns(rows, slots) or 1e9)
    found = find_schedules(given, 4, 1300, 1, fixed_depth=True)[0]
    assert found.step_ns == steps[True] < steps[False]
    assert any(found.schedule.more_weight_delay_at_end)


@given(st.integers(2, 4), st.integers(1, 6), st.data())
def test_weight_gradients_that_trail_keep_no_stage_waiting_for_ever(count: int, micro_batches: int, data: st.DataObject) -> None:
    """Whether stages wait for each other for ever follows from their depths alone."""
    depths = data.draw(st.lists(st.integers(1, micro_batches), min_size=count, max_size=count))
    weight_delays = data.draw(st.lists(st.integers(0, micro_batches), min_size=count, max_size=count))
    plain, trailing = (
        [joined(s, count, micro_batches, weight_delay=weight_delay, warmup=depths[s]) for s, weight_delay in enumerate(each)]
        for each in ([0] * count, weight_delays)
    )
    assert bool(stall(plain)) == bool(stall(trailing))


@pytest.mark.parametrize(("micro_batches", "chunks"), [(6, 1), (40, 1), (4, 2)])
def test_jobs_of_a_stage_are_those_of_its_choice_and_fit_by_all_micro_batches(micro_batches: int, chunks: int) -> None:
    """Ranked by the jobs of a short step, held against the memory by those of the whole; orders at the end, levels and delays count."""
    slots = [times(1, 1, chunks), {kind: recomputed(kind, each) for kind, each in times(1, 1, chunks).items()}]
    num = min(micro_batches, 16)
    weight_delays = (
        (1, 0),
        (2, 0),
        (1, 1),
        *[(16, 0)] * (micro_batches > num),
    )  # what trails by all of the short step differs in the whole one
    whole, short = (
        [
            joined(1, 2, count, chunks, weight_delay=weight_delay, warmup=1, weight_delay_at_end=weight_delay + more)
            for weight_delay, more in weight_delays
        ]
        for count in (micro_batches, num)
    )
    orders = [[{kind: longer(each, factor) for kind, each in level.items()} for factor in (1.0, 1.25)] for level in slots]
    ways = [tuple(StageOrder("dx-first", early, 0.0, level[not early]) for early in (True, False)) for level in orders]
    given = [StageTimes(stage, ways[level], 5000 - 700 * level) for stage in (0, 1) for level in (0, 1)]
    for k, (weight_delay, more) in enumerate(weight_delays):
        for level, early, at_end in itertools.product((0, 1), (True, False), (True, False)):
            choice = search_module.StageSchedule(weight_delay, 1, early, 0.0, level, "dx-first", at_end, more)
            tables = orders[level][not early], orders[level][not at_end]
            plain = search_module._plain_row(1, 2, num, chunks)
            always = 5000 - 700 * level - peak_bytes(costs_of(plain, orders[level][0]))
            held = always + peak_bytes(costs_of(whole[k], *tables))
            for limit in (held - 1, held):
                search = search_module._Search(given, micro_batches, limit, True, chunks)
                found = search._jobs(1, choice)
                assert search.known.peaks[1, choice] == held
                known = jobs_of(short[k], costs_of(short[k], *tables), 1, 2) if limit == held else ()
                assert [list(column) for column in found or ()] == [*known]
