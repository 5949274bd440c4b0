"""What is recomputed for how much memory at the peak, and that it starts before the gradient arrives."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.cost_model import GivenCosts
from interlace.ir import Program, verify
from interlace.ir.kinds import is_receive
from interlace.passes.choose_recompute import choices
from interlace.scheduler.early_repeats import with_early_repeats
from interlace.scheduler.jobs import stock_jobs
from interlace.scheduler.memory.live import in_order
from interlace.scheduler.recompute_choices import LEVELS, Choices, fullest
from tests.strategies import World, programs

COSTS = GivenCosts({"comm": 40, "gemm": 50, "default": 5})
PIPELINE = programs(World(pp=2, micro_batches=4, layers=5, schedule="1F1B"))


def live(program: Program) -> int:
    return in_order(msgspec.structs.replace(program, jobs=stock_jobs(program))).peak()


def made(found: Choices, chosen: frozenset[int]) -> Program:
    return found.found.without(group for k, group in enumerate(found.found.groups) if k not in chosen)


@pytest.mark.parametrize("program", PIPELINE, ids=["first stage", "last stage"])
def test_a_choice_keeps_its_limit_and_recomputes_nothing_that_could_be_kept(program: Program) -> None:
    found = choices(program, COSTS, {})
    for level in range(100, LEVELS, 100):
        limit = found.peaks[0] - (found.peaks[0] - min(found.peaks)) * level // LEVELS
        chosen = found.at(level)
        curve = found.memory.curve(sorted(chosen))
        assert chosen or limit == found.peaks[0]
        assert curve.max() <= limit
        for k in chosen:
            assert (curve + found.memory.kept[k]).max() > limit


@pytest.mark.parametrize("program", PIPELINE, ids=["first stage", "last stage"])
def test_memory_counted_by_groups_is_that_of_the_program(program: Program) -> None:
    """Where everything is recomputed; where less is, repetitions that are left out took memory of their own at most."""
    found = choices(program, COSTS, {})
    assert found.memory.least.max() == live(made(found, found.at(LEVELS)))
    for level in (0, 300, 600):
        assert live(made(found, found.at(level))) <= found.memory.curve(sorted(found.at(level))).max()


@pytest.mark.parametrize("program", PIPELINE, ids=["first stage", "last stage"])
@pytest.mark.parametrize("more", [0, -700, 300])
def test_the_least_level_within_a_limit_is_found_with_few_peaks(program: Program, more: int) -> None:
    """Peaks differ from those that are counted, by another amount from the middle on."""
    found, asked = choices(program, COSTS, {}), list[int]()

    def peak(level: int) -> int:
        asked.append(level)
        return int(found.memory.curve(sorted(found.at(level))).max()) + (more if level < LEVELS // 2 else more // 2)

    for limit in range(min(found.peaks) - 1000, found.peaks[0] + 1000, 97):
        asked.clear()
        least = found.least(limit, peak)
        assert least == LEVELS or peak(least) <= limit
        assert least == 0 or peak(least - 1) > limit
        assert len({found.at(level) for level in asked}) <= 8


def test_what_the_last_stage_needs_at_once_is_kept_until_the_end() -> None:
    """One micro-batch is in flight there, so at the peak, in backward's first layer, its own values are live in any case."""
    found = choices(PIPELINE[1], COSTS, {})
    useless = {k for k, row in enumerate(found.memory.kept) if not row[found.memory.curve([]) == found.peaks[0]].any()}
    assert useless
    assert not found.at(100) & useless


def test_recomputation_starts_before_the_gradient_arrives() -> None:
    """As far as it raises no peak; on the last stage, which waits for none, it stays where it is."""
    for program in PIPELINE:
        found = choices(program, COSTS, {})
        plain = made(found, found.at(LEVELS))
        early = with_early_repeats(plain, set(found.found.copies))
        verify(early)
        assert live(early) <= live(plain)
        if program.pipeline.stage == 1:
            assert early == plain
        else:
            backward = [op for op in early.ops if op.role == "backward"]
            first = next(k for k, op in enumerate(backward) if is_receive(op))
            assert any(op.id in found.found.copies for op in backward[:first])


@given(st.lists(st.tuples(st.integers(0, 9), st.tuples(*[st.integers(0, 2)] * 3)), min_size=1, max_size=20), st.sets(st.integers(0, 2)))
def test_sections_that_are_left_out_are_never_the_fullest(sections: list[tuple[int, tuple[int, ...]]], recomputed: set[int]) -> None:
    """Whatever is recomputed, the peak is that of all sections, in the first section that has it."""
    least, kept = np.array([each for each, _ in sections]), np.array([each for _, each in sections]).T
    few = fullest(least, kept)
    freed = sorted(recomputed)
    every = least + kept.sum(0) - kept[freed].sum(0)
    assert few[every[few].argmax()] == every.argmax()
    assert len(few) == len({each for _, each in sections})
