"""What `choose-recompute` keeps, leaves out, and leaves alone; results stay the same under every choice."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.cost_model import GivenCosts
from interlace.errors import ConfigError
from interlace.ir import Graph, Program, parse, verify
from interlace.ir.effects import is_random
from interlace.ir.kinds import is_comm
from interlace.ir.target import GPU
from interlace.passes import ChooseRecompute, OffloadActivations, Pipeline, Schedule1F1B
from interlace.passes.base import Context
from interlace.passes.choose_recompute import RecomputeFacts, choices
from interlace.passes.choose_recompute import recomputation as recomputation_of
from interlace.passes.weight_gradients import Backward
from interlace.scheduler.hazards import check
from interlace.scheduler.memory.live import in_order
from interlace.scheduler.recompute.copies import Recomputation
from interlace.scheduler.recompute.early_repeats import with_early_repeats
from interlace.scheduler.recompute.repeats import ADDED, with_repeats
from tests.interpreter import assert_same
from tests.passes.recomputed import PLAIN, layered
from tests.remarks import rules_of
from tests.strategies import World, programs, worlds
from tests.together import run_together

COSTS = GivenCosts({"comm": 40, "gemm": 50, "default": 5})
FORMER = "stage=0 of 1 micro_batches=3 chunks=1 schedule=accumulate"
IN_FLIGHT = "stage=0 of 4 micro_batches=4 chunks=1 schedule=1F1B"
BEHIND = ["matmul", "add"]
"""Marked copies after gelu: they repeat nothing exactly where gelu does not."""
VIEWED = PLAIN.replace(
    "#4 %4:float32[512,512] = pd_op.gelu(%3)",
    '#24 %24:float32[512,512]~3 = pd_op.share_data(%3) forward layer="act" views=0:0 '
    '{"fwd_recompute_id":0}\n#4 %4:float32[512,512] = pd_op.gelu(%24)',
).replace(
    "#11 %11:float32[512,512] = pd_op.gelu(%10)",
    '#25 %25:float32[512,512]~10 = pd_op.share_data(%10) backward layer="act" views=0:0 '
    '{"bwd_recompute_id":0}\n#11 %11:float32[512,512] = pd_op.gelu(%25)',
)
"""The same with a view between the product and gelu."""


RECEIVED = """program rank=1 world=2 mode=train
pipeline stage=1 of 2 micro_batches=2 chunks=1 schedule=1F1B
group 12 = 0,1
#0 %1:float32[512,512] = pd_op.recv_v2() forward group=12 {"peer":0}
#1 %2:float32[512,512] = pd_op.recv_v2() forward group=12 {"peer":0}
#2 %3:float32[512,512] = pd_op.gelu(%1) forward {"fwd_recompute_id":0}
#3 %4:float32[512,512] = pd_op.gelu(%2) forward {"fwd_recompute_id":0}
#4 %5:float32[512,512] = pd_op.matmul(%3, %4) forward {"fwd_recompute_id":0,"transpose_x":false,"transpose_y":false}
#5 %6:float32[512,512] = pd_op.gelu(%1) backward {"bwd_recompute_id":0}
#6 %7:float32[512,512] = pd_op.gelu(%2) backward {"bwd_recompute_id":0}
#7 %8:float32[512,512], %9:float32[512,512] = pd_op.matmul_grad(%6, %7, %5) backward {"transpose_x":false,"transpose_y":false}
#8 builtin.shadow_output(%8) optimize {"output_name":"dx"}
"""


def parsed(text: str) -> Program:
    program = parse(text)
    verify(program)
    return program


def recomputation(program: Program) -> Recomputation:
    times = {"matmul": 50, "c_allreduce_sum": 40}
    return Recomputation(program, {op.id: times.get(op.kind, 5) for op in program.ops})


def kinds(program: Program) -> list[str]:
    """Copies that still run."""
    return [op.kind for op in program.ops if "bwd_recompute_id" in op.attrs]


@pytest.mark.parametrize("text", [PLAIN, VIEWED])
@settings(max_examples=8, deadline=None)
@given(chosen=st.lists(st.booleans(), min_size=4, max_size=4))
def test_any_choice_gives_the_same_results(text: str, chosen: Sequence[bool]) -> None:
    program = parsed(text.replace("512", "4"))
    found = recomputation(program)
    made = found.without([group for group, keep in zip(found.groups, chosen, strict=False) if keep])
    verify(made)
    scheduled = Pipeline((Schedule1F1B(interleave="off"),))
    assert_same(*([scheduled.run(msgspec.structs.replace(each, rank=rank), COSTS)[0] for rank in range(2)] for each in (program, made)))


def test_the_cheapest_byte_is_recomputed_first() -> None:
    """Of gelu's result and the product's, which are of one size, gelu's takes less to compute again."""
    found = choices(parsed(PLAIN.replace(FORMER, IN_FLIGHT)), COSTS, {})
    named = [found.found.producer[found.found.groups[k][0]].kind for k in found.order]
    assert named.index("gelu") < named.index("matmul")


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (PLAIN.replace("pd_op.gelu(", "pd_op.dropout("), ["dropout", *BEHIND]),
        (
            PLAIN.replace(
                '%11:float32[512,512] = pd_op.gelu(%10) backward layer="act" {',
                '%11:float32[512,512] = pd_op.gelu(%10) backward layer="act" {"approximate":true,',
            ),
            ["gelu", *BEHIND],
        ),
        (
            PLAIN.replace(
                '%19:float32[512,512] = pd_op.gelu_grad(%10, %17) backward layer="act"',
                '%19:float32[512,512]~10 = pd_op.gelu_grad_(%10, %17) backward layer="act" inplace=0:0',
            ),
            ["matmul", "gelu", *BEHIND],
        ),
        (
            PLAIN.replace("#4 %4", "#26 %26:float32[512,512]~2 = pd_op.relu_(%2) forward inplace=0:0\n#4 %4"),
            ["matmul", "gelu", "matmul", "add"],
        ),
        (PLAIN.replace("pd_op.gelu(", "custom_op.gelu("), ["matmul", "gelu", *BEHIND]),  # it may write what it reads
    ],
    ids=["draws", "other attributes", "written over", "reads what changes", "not Paddle's"],
)
def test_what_is_no_exact_repetition_stays(text: str, left: list[str]) -> None:
    found = recomputation(parsed(text))
    assert kinds(found.without(found.groups)) == left


def test_two_receives_are_two_values() -> None:
    """They have no operands, and the same attributes."""
    text = RECEIVED.replace("512", "4")
    program = parsed(text)
    found = recomputation(program)
    made = found.without(found.groups)
    verify(made)
    (both,) = [op for op in made.ops if op.kind == "matmul_grad"]
    assert both.operands[:2] == (3, 4)


def test_so_much_is_recomputed() -> None:
    """On each stage as it says; of exp, which the program keeps, gelu and the product, gelu frees a byte for the least time."""
    program = parsed(PLAIN.replace(FORMER, IN_FLIGHT))
    for level, left in ((0, []), (0.001, ["gelu"]), (0.6, ["exp", "gelu"]), (1, ["exp", "matmul", "gelu"])):
        for asked in (level, (level, 0, 0, 0)):
            made, _ = Pipeline((ChooseRecompute(level=asked), Schedule1F1B(interleave="off"))).run(program, COSTS)
            assert kinds(made) == left
    with pytest.raises(ConfigError, match=r"level: 2 numbers \[0.1, 0.2\]; expected one number, or one for each of 4 stages"):
        Pipeline((ChooseRecompute(level=(0.1, 0.2)),)).run(program, COSTS)


def test_what_passes_from_layer_to_layer_stays() -> None:
    """With six layers and two micro-batches (MiB of each: 1 for x, 9 for what lies between): were x computed again too, the last layer
    would want all of forward again, and nothing would be freed."""
    program, held = parsed(layered(6)), {}
    for level in (0.0, 1.0):
        made, _ = Pipeline((ChooseRecompute(level=level), Schedule1F1B(interleave="off"))).run(program, COSTS)
        held[level] = in_order(made).peak() >> 20
    assert held == {0.0: 126, 1.0: 26}


def test_keeping_everything_leaves_a_program_without_recomputation_as_it_is() -> None:
    for program in programs(World(pp=2, micro_batches=3, layers=2)):
        made, _ = Pipeline((ChooseRecompute(level=0),)).run(program, COSTS)
        assert (made.ops, made.values) == (program.ops, program.values)


SUMMED = """program rank=0 world=2 mode=train
pipeline stage=0 of 1 micro_batches=2 chunks=1 schedule=accumulate
group 12 = 0,1
#0 %0:float32[4,4]!"w_0" = builtin.parameter() forward
#1 %1:float32[4,4]"x" = pd_op.data() forward
#2 %2:float32[4,4] = pd_op.matmul(%1, %0) forward {"transpose_x":false,"transpose_y":false}
#3 %3:float32[4,4] = pd_op.all_reduce(%2) forward group=12 {"ring_id":12}
#4 %4:float32[4,4] = pd_op.gelu(%3) forward
#5 %5:float32[4,4] = pd_op.gelu_grad(%3, %4) backward
#6 %6:float32[4,4], %7:float32[4,4] = pd_op.matmul_grad(%1, %0, %5) backward {"transpose_x":false,"transpose_y":false}
#7 builtin.shadow_output(%7) optimize {"output_name":"dw"}
"""
"""Backward reads what a collective gives, and what follows from it."""


@pytest.mark.parametrize("repeats", [False, True])
def test_collectives_are_repeated_where_that_is_asked_for(repeats: bool) -> None:
    """On all ranks of the group alike, with the same results; not in a group with ranks of other stages, which decide for themselves."""
    plain = [msgspec.structs.replace(parse(SUMMED), rank=rank) for rank in range(2)]
    passes = Pipeline((ChooseRecompute(level=1, repeat_collectives=repeats), Schedule1F1B(interleave="off")))
    before = [Pipeline((Schedule1F1B(interleave="off"),)).run(each, COSTS)[0] for each in plain]
    made = [program for program, _ in run_together(passes, plain, COSTS)]
    assert_same(before, made)
    assert check(made, GPU) == []
    for each in made:
        assert [op.name for op in each.ops if op.role == "backward" and is_comm(op)] == ["pd_op.all_reduce"] * repeats
    other = parse(SUMMED.replace("stage=0 of 1", "stage=0 of 2"))
    assert not [op for op in with_repeats(other, repeats).ops if op.role == "backward" and is_comm(op)]


def test_what_frees_more_than_it_gives_does_not_wait_for_a_weight_gradient() -> None:
    """A repetition that only a weight's gradient reads runs before what reads the same large value: postponed with that gradient, it
    would hold the value."""
    text = SUMMED.replace(
        "#4 %4:float32[4,4] = pd_op.gelu(%3) forward",
        "#4 %4:float32[4,4] = pd_op.gelu(%3) forward\n#8 %8:float32[2,4] = pd_op.mean(%4) forward",
    ).replace(
        "#7 builtin",
        '#9 %9:float32[2,4] = pd_op.mean(%4) backward {"bwd_recompute_id":0}\n'
        '#10 %10:float32[4,4] = pd_op.matmul(%9, %9) backward {"transpose_x":true,"transpose_y":false}\n'
        '#11 builtin.shadow_output(%10) optimize {"output_name":"dv"}\n#7 builtin',
    )
    small, large = (Backward(Graph(parse(each))).sinks for each in (text, text.replace("[2,4]", "[8,4]")))
    assert 9 not in small
    assert 9 in large
    assert 10 in small & large


def test_what_is_added_frees_memory() -> None:
    """With everything recomputed less is live at the peak of Paddle's own schedule."""
    (program, *_) = programs(World(pp=2, micro_batches=3, layers=3))
    found = recomputation_of(program, COSTS, {}, adds=True)
    schedule = Pipeline((Schedule1F1B(interleave="off"),))
    kept, again = (in_order(schedule.run(found.without(groups), COSTS)[0]).peak() for groups in (found.groups, []))
    assert again < kept
    assert not any(is_comm(op) or is_random(op) or op.inplace for op in found.program.ops if op.attrs.get("bwd_recompute_id") == ADDED)


def test_what_is_added_reads_nothing_that_is_written_over() -> None:
    """Neither exp, which relu_ overwrites, nor the product that read it before."""
    repeats = ("#10 ", "#11 ", "#12 ", "#13 ", "#14 ")
    text = "\n".join(line for line in PLAIN.splitlines() if not line.startswith(repeats))
    text = text.replace("(%13", "(%6").replace("(%11", "(%4").replace("(%10", "(%3")
    for over, added in (("", ["matmul", "gelu", "exp"]), ("#26 %26:float32[512,512]~2 = pd_op.relu_(%2) forward inplace=0:0\n", ["gelu"])):
        found = recomputation_of(parsed(text.replace("#4 %4", over + "#4 %4")), COSTS, {}, adds=True)
        assert sorted(op.kind for op in found.copies.values()) == sorted(added)


@settings(max_examples=25, deadline=None)
@given(worlds(max_micro_batches=3), st.randoms(use_true_random=False))
def test_any_choice_of_what_is_kept_recomputed_or_moved_gives_the_same_results(world: World, draw: Random) -> None:
    """Of programs that recompute nothing by themselves."""
    chosen, plain = [], programs(world)
    for program in plain:
        found = recomputation_of(program, COSTS, {}, adds=True)
        made = found.without([group for group in found.groups if draw.random() < 0.5])
        chosen.append(with_early_repeats(made, set(found.copies)))
        verify(chosen[-1])
    share = draw.choice([0.0, 0.5, 1.0])
    schedule = Schedule1F1B(interleave="off")
    moving = Pipeline((schedule, OffloadActivations(fraction=share, min_bytes=1)))
    assert_same(*([passes.run(each, COSTS)[0] for each in given] for passes, given in ((Pipeline((schedule,)), plain), (moving, chosen))))


def test_ranks_that_differ_recompute_what_is_read() -> None:
    """Ids of values may differ; what is recomputed in which order must not."""
    program = parsed(PLAIN)
    other = parsed(PLAIN.replace("pd_op.gelu_grad(%10, %17)", "pd_op.gelu_grad(%11, %17)"))

    made = run_together(Pipeline((ChooseRecompute(level=0),)), [program, msgspec.structs.replace(other, rank=1)], COSTS)
    assert [kinds(each) for each, _ in made] == [["matmul", "gelu"]] * 2


def test_a_program_without_recomputation_stays_as_it_is() -> None:
    program = parsed(PLAIN.replace("bwd_recompute_id", "other"))
    made, (report,) = Pipeline((ChooseRecompute(),)).run(program, COSTS)
    assert made.ops == program.ops
    assert rules_of(report.remarks) == ["nothing-recomputed"]


def test_a_stage_recomputes_what_its_first_rank_would() -> None:
    """Its ranks measure otherwise, and other stages choose for themselves: neither all stages' choice nor rank 0's."""
    texts = [PLAIN.replace(FORMER, f"stage={rank // 2} of 2 micro_batches=3 chunks=1 schedule=1F1B") for rank in range(4)]
    programs_ = [msgspec.structs.replace(parsed(text), rank=rank) for rank, text in enumerate(texts)]
    choose = ChooseRecompute(level=0.5)
    groups = choose.facts(programs_[0], Context(COSTS)).groups
    assert len(groups) == 3
    for chosen in ([(0,), (1,), (2,), ()], [(), (0, 1, 2), (1, 2), (0,)]):
        everyone = [RecomputeFacts(rank // 2, groups, each) for rank, each in enumerate(chosen)]
        made = [kinds(choose.run(program, Context(COSTS, facts=everyone, is_whole=True))) for program in programs_]
        alone = [kinds(choose.run(programs_[0], Context(COSTS, facts=[everyone[rank]]))) for rank in (0, 2)]
        assert made == [alone[0], alone[0], alone[1], alone[1]]
        assert alone[0] != alone[1]


def test_only_ranks_of_its_own_stage_must_know_the_same_values() -> None:
    """Another stage has other values; what differs within a stage is recomputed as the program has it, on all of its ranks."""
    program = msgspec.structs.replace(parsed(PLAIN.replace(FORMER, "stage=1 of 2 micro_batches=3 chunks=1 schedule=1F1B")), rank=3)
    choose = ChooseRecompute(level=0.5)
    mine = choose.facts(program, Context(COSTS))
    said = []
    for other in (0, 2):
        everyone = [mine if rank >= 2 else RecomputeFacts(0, mine.groups, ()) for rank in range(4)]
        everyone[other] = msgspec.structs.replace(everyone[other], groups=mine.groups[:1])
        context = Context(COSTS, facts=everyone, is_whole=True)
        made = choose.run(program, context)
        said.append((kinds(made), "ranks-differ" in rules_of(context.remarks)))
    assert said[0] == (kinds(choose.run(program, Context(COSTS, facts=[mine]))), False)
    assert said[1] == (["matmul", "gelu"], True)


def test_what_was_worked_out_for_a_program_is_kept_for_that_program_alone() -> None:
    """By what is added and repeated, too."""
    program, other, memo = parsed(PLAIN), parsed(PLAIN), dict[object, object]()
    for made in (lambda each, more: choices(each, COSTS, memo, more), lambda each, more: recomputation_of(each, COSTS, memo, adds=more)):
        first = {more: made(program, more) for more in (False, True)}
        assert first[False] is not first[True]
        assert all(made(program, more) is found for more, found in first.items())
        assert made(other, True) is not first[True]
        assert made(program, True) is not first[True]  # one program at a time


def test_the_report_names_the_first_of_values_that_share_memory() -> None:
    """Backward reads the product and a view of it; what takes time is the product."""
    shared = VIEWED.replace("pd_op.gelu_grad(%10, %17)", "pd_op.gelu_grad(%10, %25)")
    program = parsed(shared)
    costs = GivenCosts({"gemm": 50_000_000, "default": 5_000_000})
    assert (10, 25) in recomputation_of(program, costs, {}, adds=True).groups
    context = Context(costs)
    context.facts = (ChooseRecompute(level=0).facts(program, context),)
    ChooseRecompute(level=0).run(program, context)
    (told,) = [each for each in context.remarks if each.place.op == 3]
    assert (told.rule, told.numbers) == ("recomputation-dropped", {"kept_bytes": 1 << 20, "took_ns": 50_000_000})
    assert not [each for each in context.remarks if "share_data" in each.place.name]
