"""What is recomputed for how much memory at the peak, and that it starts before the gradient arrives."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.cost_model import GivenCosts
from interlace.ir import Program, parse, verify
from interlace.ir.kinds import is_receive
from interlace.passes.choose_recompute import choices
from interlace.scheduler.jobs.parts import baseline_jobs
from interlace.scheduler.memory.live import in_order
from interlace.scheduler.recompute.choices import LEVELS, RecomputeLevels, fullest
from interlace.scheduler.recompute.early_repeats import with_early_repeats
from tests.strategies import World, programs

COSTS = GivenCosts({"comm": 40, "gemm": 50, "default": 5})
PIPELINE = programs(World(pp=2, micro_batches=4, layers=5, schedule="1F1B"))


def live(program: Program) -> int:
    return in_order(msgspec.structs.replace(program, jobs=baseline_jobs(program))).peak()


def made(found: RecomputeLevels, chosen: frozenset[int]) -> Program:
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


BACKWARD = """program rank=0 world=2 mode=train
pipeline stage=0 of 2 micro_batches=2 chunks={chunks} schedule=VPP
group 3 = 0,1
group 4 = 0,1
#0 %0:float32[640]"x" = pd_op.data() forward
#1 %1:float32[640] = pd_op.exp(%0) forward
#2 %2:float32[640] = pd_op.exp(%1) forward
#3 %3:float32[640] = pd_op.exp(%2) forward
#4 pd_op.send_v2(%3) forward group=3 {{"peer":1}}
"""
STEPS = """#10 %10:float32[640] = pd_op.recv_v2() backward group=3 {"peer":1}
#11 %11:float32[640] = pd_op.gelu(%0) backward
#12 %12:float32[640] = pd_op.gelu_grad(%11, %10) backward
#13 %13:float32[640] = pd_op.tanh(%0) backward
#14 %14:float32[640] = pd_op.gelu_grad(%13, %12) backward
#15 %15:float32[640] = pd_op.exp(%0) backward
#16 %16:float32[640] = pd_op.gelu_grad(%15, %14) backward
#17 builtin.shadow_output(%16) optimize {"output_name":"y"}
"""
"""Each step of backward repeats something, and reads it with the gradient of the step before."""


def order(steps: str, repeats: set[int], chunks: int = 1) -> list[int]:
    """Backward's operations as they are then."""
    program = parse(BACKWARD.format(chunks=chunks) + steps)
    verify(program)
    made = with_early_repeats(program, repeats)
    verify(made)
    assert [op for op in made.ops if op.role != "backward"] == [op for op in program.ops if op.role != "backward"]
    return [op.id for op in made.ops if op.role == "backward"]


@pytest.mark.parametrize(
    ("changed", "repeats", "found"),
    [
        ((), {11, 13, 15}, [11, 10, 12, 13, 14, 15, 16]),  # with two of them three gradients' worth would be live
        ((), {13, 15}, [10, 11, 12, 13, 14, 15, 16]),
        ((), set(), [10, 11, 12, 13, 14, 15, 16]),
        (
            (("[640] = pd_op.tanh(%0)", "[1] = pd_op.tanh(%0)"), ("[640] = pd_op.gelu_grad(%15", "[1281] = pd_op.gelu_grad(%15")),
            {11, 13, 15},
            [11, 13, 15, 10, 12, 14, 16],
        ),  # a small one raises no peak, as the last step has one as high
        ((("pd_op.recv_v2() backward group=3", "pd_op.exp(%0) backward"),), {11, 13, 15}, [10, 11, 12, 13, 14, 15, 16]),  # waits for nobody
        ((("gelu(%0)", "gelu(%10)"),), {11, 13, 15}, [10, 11, 12, 13, 14, 15, 16]),  # the first needs the gradient, the second has no room
        ((("tanh(%0)", "tanh(%11)"), ("gelu_grad(%11, %10)", "gelu_grad(%10, %10)")), {11, 13}, [11, 13, 10, 12, 14, 15, 16]),
        ((("pd_op.gelu(%0) backward", "pd_op.all_reduce(%0) backward group=4"),), {11}, [10, 11, 12, 13, 14, 15, 16]),  # communicates
    ],
)
def test_as_many_repetitions_come_first_as_raise_no_peak(changed: tuple[tuple[str, str], ...], repeats: set[int], found: list[int]) -> None:
    steps = STEPS
    for was, now in changed:
        assert was in steps
        steps = steps.replace(was, now)
    assert order(steps, repeats) == found


def test_each_chunk_begins_with_its_own_repetitions() -> None:
    other = STEPS.replace("%", "%1").replace("#", "#1").replace(" backward", " backward chunk=1").replace("optimize", "optimize chunk=1")
    other = other.replace('"y"', '"z"').replace("(%10)", "(%0)")
    assert order(other + STEPS, {11, 13, 15, 111, 113}, chunks=2) == [111, 110, 112, 113, 114, 115, 116, 11, 10, 12, 13, 14, 15, 16]
