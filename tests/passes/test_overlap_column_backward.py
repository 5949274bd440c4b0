"""Overlap-column-backward: legal, complete, and it says what it did."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.cost_model import GivenCosts
from interlace.errors import PassError
from interlace.ir import Graph, Job, Op, Program, dependencies, parse, verify
from interlace.ir.graph import is_topological
from interlace.ir.kinds import is_comm
from interlace.passes.base import Context
from interlace.passes.overlap_column_backward import OverlapColumnBackward, Work, beside
from interlace.passes.split_backward import SplitBackward
from interlace.passes.weight_gradients import Backward
from tests.interpreter import assert_same
from tests.passes.programs import Recipe, backward_programs, recipes
from tests.remarks import applied, declined, rules_of, sentences

COSTS = {"comm": 100, "gemm": 5, "default": 1}
"""By hand."""
tables = st.fixed_dictionaries({"comm": st.integers(0, 200), "gemm": st.integers(0, 100), "default": st.integers(0, 3)})
stretches = st.tuples(st.floats(1, 5), st.floats(1, 2)).map(lambda pair: {("comm", "gemm"): pair})


def overlapped(program: Program, costs: GivenCosts | None = None, **options: Any) -> tuple[Program, Program, Context]:
    """The program behind split-backward, behind both passes, and what the second one said."""
    context = Context(costs or GivenCosts(COSTS))
    split = SplitBackward().run(program, Context(context.cost))
    result = OverlapColumnBackward(**options).run(split, context)
    verify(result)
    return split, result, context


def comm_order(program: Program) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for op in program.ops:
        if is_comm(op):
            found.setdefault(op.group, []).append(op.id)
    return found


# -------------------------------------------------------------------------------------------------------------- properties


@given(recipes(), tables, stretches, st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_backward_keeps_its_numbers(recipe: Recipe, table: dict[str, int], stretch: Any, only_gains: bool, borrow: bool) -> None:
    costs = GivenCosts(table, stretch)
    before = backward_programs(recipe)
    both = [overlapped(program, costs, only_gains=only_gains, borrow=borrow) for program in before]
    assert_same(before, [result for _, result, _ in both])
    for split, result, _ in both:
        order = [op.id for op in result.ops]
        assert sorted(order) == sorted(op.id for op in split.ops)
        assert is_topological(order, dependencies(Graph(split), split.ops))
        assert comm_order(split) == comm_order(result)


@given(recipes(), tables, stretches)
@settings(max_examples=60, deadline=None)
def test_every_site_is_reported_once(recipe: Recipe, table: dict[str, int], stretch: Any) -> None:
    split, _, context = overlapped(backward_programs(recipe)[0], GivenCosts(table, stretch))
    sites = Backward(Graph(split)).collectives()
    assert sorted(each.place.op for each in context.remarks) == sorted(op.id for op in sites)


@given(recipes(), tables)
@settings(max_examples=60, deadline=None)
def test_running_it_again_changes_nothing(recipe: Recipe, table: dict[str, int]) -> None:
    _, once, _ = overlapped(backward_programs(recipe)[0], GivenCosts(table), borrow=False)
    again = OverlapColumnBackward(borrow=False).run(once, Context(GivenCosts(table)))
    assert again == once


@given(recipes())
@settings(max_examples=40, deadline=None)
def test_only_streams_differ(recipe: Recipe) -> None:
    split, result, _ = overlapped(backward_programs(recipe)[0])
    old = {op.id: op for op in split.ops}
    for op in result.ops:
        assert msgspec.structs.replace(op, stream="") == msgspec.structs.replace(old[op.id], stream="")
    assert result.values == split.values


# ---------------------------------------------------------------------------------------------------------------- estimate


def timed(comm: int, gemms: list[int], stretch: tuple[float, float]) -> Any:
    ops = [Op(k, f"pd_op.matmul_{k}", (), (), "backward") for k in range(len(gemms))]
    table = {"all_reduce": comm, **{op.name: dur for op, dur in zip(ops, gemms, strict=True)}, "default": 0}

    class Costs(GivenCosts):
        def stretch(self, *_: Any) -> tuple[float, float]:
            return stretch

    return beside(Costs(table), ({}, {}), Op(99, "pd_op.all_reduce", (), (), "backward", group=1), ops)


def test_estimate_counts_stretch_on_both_sides() -> None:
    alone = timed(100, [50], (1.0, 1.0))
    assert (alone.done, alone.both, alone.gain) == (50, 100, 50)
    slower = timed(100, [100], (2.0, 1.5))
    assert (slower.done, slower.both, slower.gain) == (75, 175, 25)
    worse = timed(100, [100], (5.0, 1.5))
    assert (worse.done, worse.both, worse.gain) == (30, 220, -20)
    assert timed(100, [300], (1.0, 1.0)).both == 300
    assert timed(100, [300], (1.5, 1.5)).both == 350
    assert timed(100, [], (1.0, 1.0)).gain == 0


@given(st.integers(0, 1000), st.lists(st.integers(0, 500), max_size=5), st.floats(1, 5), st.floats(1, 3))
def test_estimate_stays_within_bounds(comm: int, gemms: list[int], slow: float, slower: float) -> None:
    found = timed(comm, gemms, (slow, slower))
    assert 0 <= found.done <= comm
    assert found.both >= max(comm, sum(gemms)) - 1
    assert found.gain <= min(comm, sum(gemms)) + 1


# ------------------------------------------------------------------------------------------------------------------ refusals


def test_a_schedule_in_front_is_refused() -> None:
    program = backward_programs(Recipe(("column",)))[0]
    planned = msgspec.structs.replace(program, jobs=(Job("forward_0", "forward", 0, ()),))
    with pytest.raises(PassError, match="has a schedule already"):
        OverlapColumnBackward().run(planned, Context(GivenCosts(COSTS)))


def test_input_is_untouched() -> None:
    program = SplitBackward().run(backward_programs(Recipe(("qkv", "column")))[0], Context(GivenCosts(COSTS)))
    text = repr(program)
    assert OverlapColumnBackward().run(program, Context(GivenCosts(COSTS))) != program
    assert repr(program) == text
    assert [Graph(program).ops[op.id] for op in program.ops] == [*program.ops]


def test_both_ranks_decide_alike() -> None:
    left, right = (overlapped(program)[1] for program in backward_programs(Recipe(("qkv", "row", "sequence"))))
    assert left.ops == right.ops


# ------------------------------------------------------------------------------------------------------------- small programs

LAYER = """program rank=0 world=2 mode=train
pipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=none
group 17 = 0,1
group 18 = 0,1
#0 %0:float32[8,16]!"w" = builtin.parameter() forward
#1 %1:float32[8,16]!"w@GRAD@MERGE" = builtin.kwarg() forward
#2 %2:float32[4,8]"x" = pd_op.data() forward
#3 %3:float32[4,16]"dout" = pd_op.data() forward
#4 %4:float32[4,8], %5:float32[8,16] = pd_op.matmul_grad(%2, %0, %3) backward {"transpose_x":false,"transpose_y":false}
#5 %6:float32[8,16]~1! = pd_op.add_(%1, %5) backward inplace=0:0 {"grad_merge_add":true}
#6 %7:float32[4,8] = pd_op.all_reduce(%4) backward group=17 {"ring_id":17}
#7 %8:float32[4,8] = pd_op.layer_norm_grad(%2, %7) backward
#8 builtin.shadow_output(%8) optimize {"output_name":"out_0"}
"""
SLOWED = GivenCosts({"comm": 100, "gemm": 100, "default": 1}, {("comm", "gemm"): (5.0, 1.5)})


@pytest.mark.parametrize("only_gains", [True, False])
def test_a_site_that_loses_is_moved_only_where_that_is_asked_for(only_gains: bool) -> None:
    """Sites reported. Beside the product the collective takes five times as long."""
    split, result, context = overlapped(parse(LAYER), SLOWED, only_gains=only_gains)
    assert (result.ops == split.ops) == only_gains
    assert (len(applied(context)), rules_of(declined(context))) == ((0, ["overlap-slower"]) if only_gains else (1, []))


@pytest.mark.parametrize(
    ("dims", "least", "told"),
    [
        ("4,8", 128, ""),
        ("4,8", 129, "moves 128 B, less than min_bytes, 129 B"),
        ("-1,8", 0, ""),
        ("-1,8", 1, "moves 0 B, less than min_bytes, 1 B"),
    ],
)
def test_a_collective_of_unknown_size_counts_as_none(dims: str, least: int, told: str) -> None:
    _, _, context = overlapped(parse(LAYER.replace("[4,8]", f"[{dims}]")), min_bytes=least)
    assert [line.partition(": ")[2] for line in sentences(declined(context))] == [told] * bool(told)
    assert len(applied(context)) == (not told)


def test_a_collective_of_another_group_is_not_put_off() -> None:
    """Equal losses. Nothing in it needs it to stay in front, but other ranks wait for it there."""
    other = '#9 %9:float32[4,8] = pd_op.all_reduce(%2) backward group=18 {"ring_id":18}\n'
    text = LAYER.replace("#6 ", f"{other}#6 ").replace("grad(%2, %7)", "grad(%9, %7)")
    _, result, context = overlapped(parse(text))
    assert 6 in [each.place.op for each in applied(context)]
    assert [op.id for op in result.ops if is_comm(op)] == [9, 6]


def test_a_later_term_of_a_weights_sum_goes_with_the_earlier_one() -> None:
    """The weight is used twice. The second product's gradient belongs to another site, and is summed in order into the same buffer."""
    second = """#9 %9:float32[4,16]"other" = pd_op.data() forward
#10 %10:float32[8,16] = pd_op.matmul(%2, %9) backward {"transpose_x":true,"transpose_y":false}
#11 %11:float32[8,16]~1! = pd_op.add_(%1, %10) backward inplace=0:0 {"grad_merge_add":true}
"""
    _, result, context = overlapped(parse(LAYER.replace("#6 ", f"{second}#6 ")))
    assert [op.id for op in result.ops if op.id in (5, 6, 11)] == [6, 5, 11]
    assert not [each for each in declined(context) if each.place.op == 6]


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=6), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_behind_dx_only_what_is_communicated_comes_first(between: list[tuple[int, int]], sent: int) -> None:
    """Of operations between dX and its collective those that this needs, through others too; the rest runs beside it, in the old order."""
    made, lines = [4], []
    for k, reads in enumerate(between, 20):
        first, second = (made[read % len(made)] for read in reads)
        lines.append(f"#{k} %{k}:float32[4,8] = pd_op.add(%{first}, %{second}) backward\n")
        made.append(k)
    text = LAYER.replace("#6 ", "".join(lines) + "#6 ").replace("all_reduce(%4)", f"all_reduce(%{made[sent % len(made)]})")
    text = text.replace("grad(%2, %7)", f"grad({', '.join(f'%{value}' for value in (2, 7, *made))})")
    text = text.replace("#8 ", '#9 pd_op.send_v2(%8) backward group=18 {"peer":1}\n#8 ')  # no part of a weight's gradient
    split, result, _ = overlapped(parse(text), only_gains=False, borrow=False)
    producer = {value: op for op in split.ops for value in op.results}
    needed: set[int] = set()
    rest = [6]
    while rest:
        op = Graph(split).ops[rest.pop()]
        needed.add(op.id)
        rest += [producer[value].id for value in op.operands if value in producer]
    order = [op.id for op in split.ops]
    first, last = order.index(producer[4].id), order.index(6) + 1
    expected = sorted(order[first:last], key=lambda op: op not in needed)
    assert [op.id for op in result.ops] == [*order[:first], *expected, *order[last:]]


def test_a_draw_in_a_weight_gradient_stays_where_it_stands() -> None:
    """Sinks of dW. The generator's draws keep their place, though only the sum reads this one."""
    draw = "#9 %9:float32[8,16] = pd_op.dropout(%5) backward\n"
    split, result, context = overlapped(parse(LAYER.replace("#5 ", f"{draw}#5 ").replace("add_(%1, %5)", "add_(%1, %9)")))
    assert 9 not in Backward(Graph(split)).sinks
    order = [op.id for op in result.ops]
    assert order.index(9) < order.index(6)
    assert 6 in [each.place.op for each in declined(context)]


def test_a_collective_borrows_up_to_the_second_collective_before_it() -> None:
    """Four layers, of which the last alone is large enough: it takes its own weight's gradient and the one before, and is not covered."""
    data = [
        f'#{k} %{k}:float32[4,{columns}]"{name}" = pd_op.data() forward'
        for k, (name, columns) in enumerate(zip("dxy", (8, 8, 16), strict=True))
    ]
    weights, backward = [], []
    for k, dout, x, rows in ((10, 0, 1, 8), (20, 14, 1, 8), (30, 24, 1, 8), (40, 34, 2, 16)):
        weights += [
            f'#{k} %{k}:float32[{rows},8]!"w{k}" = builtin.parameter() forward',
            f'#{k + 1} %{k + 1}:float32[{rows},8]!"w{k}@GRAD@MERGE" = builtin.kwarg() forward',
        ]
        backward += [
            f"#{k + 2} %{k + 2}:float32[4,{rows}], %{k + 3}:float32[{rows},8] = pd_op.matmul_grad(%{x}, %{k}, %{dout}) backward "
            '{"transpose_x":false,"transpose_y":false}',
            f'#{k + 3} %{k + 5}:float32[{rows},8]~{k + 1}! = pd_op.add_(%{k + 1}, %{k + 3}) backward inplace=0:0 {{"grad_merge_add":true}}',
            f'#{k + 4} %{k + 4}:float32[4,{rows}] = pd_op.all_reduce(%{k + 2}) backward group=17 {{"ring_id":17}}',
        ]
    head = LAYER.splitlines()[:4]
    _, result, context = overlapped(parse("\n".join([*head, *data, *weights, *backward])), min_bytes=200)
    sums = [op.id for op in result.ops if op.id in (13, 23, 33, 43, 44)]
    assert sums == [13, 23, 44, 33, 43]
    (told,) = sentences(applied(context))
    assert told.endswith("4 operations moved after it (1 matmul borrowed from other layers)")


def test_a_collective_that_its_own_gradients_cover_borrows_none() -> None:
    """Though another layer's stands nearer to it: the program computes dW of both before dX."""
    other = """#9 %9:float32[8,16]!"v@GRAD@MERGE" = builtin.kwarg() forward
#10 %10:float32[4,16]"other" = pd_op.data() forward
"""
    backward = """#4 %5:float32[8,16] = pd_op.matmul(%2, %3) backward {"transpose_x":true,"transpose_y":false}
#5 %6:float32[8,16]~1! = pd_op.add_(%1, %5) backward inplace=0:0 {"grad_merge_add":true}
#11 %11:float32[8,16] = pd_op.matmul(%2, %10) backward {"transpose_x":true,"transpose_y":false}
#12 %12:float32[8,16]~9! = pd_op.add_(%9, %11) backward inplace=0:0 {"grad_merge_add":true}
#13 %4:float32[4,8] = pd_op.matmul(%3, %0) backward {"transpose_x":false,"transpose_y":true}
"""
    lines = LAYER.splitlines(keepends=True)
    text = "".join(lines[:8]) + other + backward + "".join(lines[10:])
    for gemm, order in ((100, [11, 12, 13, 6, 4, 5]), (40, [13, 6, 4, 5, 11, 12])):
        _, result, context = overlapped(parse(text), GivenCosts({"comm": 100, "gemm": gemm, "default": 0}))
        assert [op.id for op in result.ops if op.id in order] == order
        (told,) = sentences(applied(context))
        assert ("borrowed" in told) == (gemm < 100)


def test_what_reads_nothing_that_would_wait_goes_with_a_gradient_whatever_its_size() -> None:
    """A repetition of forward from parameters alone; its result has a dim that is unknown until run time."""
    again = '#9 %9:float32[-1,16] = pd_op.exp(%0) backward {"bwd_recompute_id":0}\n#10 %10:float32[8,16] = pd_op.add(%5, %9) backward\n'
    text = LAYER.replace("#5 ", f"{again}#5 ").replace("add_(%1, %5)", "add_(%1, %10)")
    assert 9 in Backward(Graph(parse(text))).sinks


def test_sizes_that_are_unknown_until_run_time_count_as_nothing() -> None:
    """A repetition of forward reads two tensors of unknown size and gives a byte: putting it off keeps nothing that is known to be more."""
    again = """#9 %9:float32[-1]"y" = pd_op.data() forward
#10 %10:float32[-1]"z" = pd_op.data() forward
#11 %11:int8[1] = pd_op.equal_all(%9, %10) backward {"bwd_recompute_id":0}
#12 %12:float32[8,16] = pd_op.where(%11, %5) backward
"""
    program = parse(LAYER.replace("#5 ", f"{again}#5 ").replace("add_(%1, %5)", "add_(%1, %12)"))
    assert 11 in Backward(Graph(program)).sinks


@pytest.mark.parametrize(("layers", "found"), [(("", "up"), "up"), (("gate", "up"), "gate"), (("", ""), "sum")])
def test_a_site_is_of_the_first_layer_that_its_products_name(layers: tuple[str, str], found: str) -> None:
    """Sites reported. Where none has a layer, it is of the collective's own."""
    text = "".join(f"{line}\n" for line in LAYER.splitlines()[:8]) + '#9 %9:float32[8,16]!"v" = builtin.parameter() forward\n'
    for k, weight, layer in ((10, 0, layers[0]), (20, 9, layers[1])):
        text += f"#{k} %{k}:float32[4,8], %{k + 1}:float32[8,16] = pd_op.matmul_grad(%2, %{weight}, %3) backward "
        text += f'layer="{layer}" {{"transpose_x":false,"transpose_y":false}}\n'
    text += (
        '#30 %30:float32[4,8] = pd_op.add(%10, %20) backward\n#31 %31:float32[4,8] = pd_op.all_reduce(%30) backward layer="sum" group=17\n'
    )
    split = SplitBackward().run(parse(text), Context(GivenCosts(COSTS)))
    assert OverlapColumnBackward().facts(split, Context(GivenCosts(COSTS))) == (found,)


@pytest.mark.parametrize("reader_first", [True, False])
def test_what_comes_behind_the_first_reader_or_another_collective_fills_no_time(reader_first: bool) -> None:
    """Its weight's gradient is computed there already, when the collective may be over."""
    lines = LAYER.splitlines(keepends=True)
    other = "#11 %11:float32[4,8] = pd_op.all_reduce(%2) backward group=18\n"
    text = "".join([*lines[:8], "#10 %4:float32[4,8] = pd_op.matmul(%3, %0) backward\n", lines[10], lines[11] if reader_first else other])
    text += "#9 %5:float32[8,16] = pd_op.matmul(%2, %3) backward\n" + "".join([lines[9], *lines[12 if reader_first else 11 :]])
    split, result, context = overlapped(parse(text))
    assert result.ops == split.ops
    assert {each.place.op: each.rule for each in declined(context)}[6] == "no-weight-gradient"
    assert applied(context) == []


def test_a_gradient_right_before_the_collective_is_borrowed() -> None:
    """The collective has none of its own: it sums what is no product's result. The product before it moves behind it."""
    lines = LAYER.splitlines(keepends=True)
    text = (
        "".join(lines[:8])
        + """#9 %9:float32[4,16]"other" = pd_op.data() forward
#10 %4:float32[4,8] = pd_op.matmul(%9, %0) backward
#11 %5:float32[8,16] = pd_op.matmul(%2, %3) backward
"""
        + "".join(lines[10:])
    )
    _, result, context = overlapped(parse(text))
    assert [op.id for op in result.ops if op.id in (6, 11)] == [6, 11]
    assert rules_of(applied(context)) == ["started-before-others"]


@pytest.mark.parametrize(
    ("before", "summed", "behind", "told"),
    [
        ("", "%4, %4", "", "no weight gradient comes before it"),
        ("#9 %9 = pd_op.relu(%3)", "%4, %9", "", "no weight gradient comes before it"),
        ("#10 %10 = pd_op.matmul(%2, %3)", "%4, %10", "", "#10 pd_op.matmul must come first: it feeds more than its gradient's sum"),
        ("#9 %9 = pd_op.relu(%3)\n#10 %10 = pd_op.matmul(%2, %3)", "%9, %10, %4", "", "#10 pd_op.matmul must come first: it feeds more"),
        ("", "%4, %4", "#11 %11 = pd_op.matmul(%2, %3)\n#12 %12 = pd_op.all_reduce(%11)", "no weight gradient comes before it"),
    ],
    ids=["none", "no product", "bound", "bound behind another reader", "bound by what comes later"],
)
def test_where_nothing_fills_the_time_it_is_said_what_had_to_come_first(before: str, summed: str, behind: str, told: str) -> None:
    """Of what reads the same gradient as dX a product that feeds what is communicated."""
    head, first, last = "\n".join(LAYER.splitlines()[:8]), "#4 %4 = pd_op.matmul(%3, %0)", "#6 %6 = pd_op.all_reduce(%5)"
    lines = [first, *before.splitlines(), f"#5 %5 = pd_op.add_n({summed})", last, *behind.splitlines()]
    typed = (line.replace(" = ", ":float32[4,8] = ", 1) + " backward" + (" group=17" if "all_reduce" in line else "") for line in lines)
    context = Context(GivenCosts(COSTS))
    OverlapColumnBackward().run(parse("\n".join([head, *typed])), context)
    (line,) = sentences(each for each in declined(context) if each.place.op == 6)
    assert line.partition(": ")[2].startswith(told)


FORMS = "cast all_gather c_allgather share_data assign c_identity reshape view_shape transpose slice contiguous"
UPDATES = "cast scale add add_n combine split clip multiply divide assign slice share_data reshape concat split_with_num"


@pytest.mark.parametrize("kind", [*FORMS.split(), "relu"])
def test_a_weight_in_another_form_is_still_the_weight(kind: str) -> None:
    """AMP's copy, what sharding gathers, another shape; a value computed from it is none."""
    text = LAYER.replace("#4 ", f"#9 %9:float32[8,16] = pd_op.{kind}(%0) forward\n#4 ").replace("grad(%2, %0, %3)", "grad(%2, %9, %3)")
    backward = Backward(Graph(parse(text)))
    assert (9 in backward.weights) == (kind != "relu")
    assert [op.id for op in backward.sources(backward.graph.ops[6])] == ([4] if kind != "relu" else [])


@pytest.mark.parametrize("kind", [*UPDATES.split(), "check_finite_and_unscale", "tanh"])
def test_a_reduction_that_leads_to_a_gradients_sum_alone_goes_with_it(kind: str) -> None:
    """Of data parallelism, through what lies between a gradient and its sum; what another kind computes from it may be anything."""
    then = f"#10 %10:float32[8,16] = pd_op.{kind}(%9) backward"
    if kind == "combine":
        then = "#11 %11:vector<float32[8,16]> = builtin.combine(%9) backward\n#10 %10:float32[8,16] = pd_op.add_n(%11) backward"
    between = f'#9 %9:float32[8,16] = pd_op.all_reduce(%5) backward group=18 {{"ring_id":18}}\n{then}\n'
    text = LAYER.replace("#5 ", f"{between}#5 ").replace("add_(%1, %5)", "add_(%1, %10)")
    assert (9 in Backward(Graph(parse(text))).sinks) == (kind != "tanh")


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=4, max_size=9),
    st.sets(st.integers(1, 9), min_size=1, max_size=2),
    st.sets(st.integers(1, 9), max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_a_chain_has_what_follows_its_heads_and_what_only_the_chain_needs(
    drawn: list[tuple[int, int]], heads: set[int], left_out: set[int]
) -> None:
    text = 'program rank=0 world=1 mode=train\n#0 %0:float32[4]"x" = pd_op.data() forward\n'
    operands = {k: {max(0, k - back) for back in reads} for k, reads in enumerate(drawn, 1)}
    for k, reads in operands.items():
        text += f"#{k} %{k}:float32[4] = pd_op.add_n({', '.join(f'%{value}' for value in sorted(reads))}) backward\n"
    within = set(operands) - left_out
    expected, before = heads & within, None
    while expected != before:
        before = set(expected)
        followers = {k for k in within if operands[k] & before}
        makers = {value for k in before for value in operands[k] & within}
        expected |= followers | {maker for maker in makers if all(k in before for k in operands if maker in operands[k])}
    assert Backward(Graph(parse(text))).chain_of(heads, within) == expected


@pytest.mark.parametrize("kind", ["matmul_grad", "bmm_grad", "linear_grad", "linear_v2_grad", "fused_gemm_epilogue_grad", "conv2d_grad"])
def test_the_gradient_of_a_product_gives_dx_first(kind: str) -> None:
    backward = Backward(Graph(parse(LAYER.replace("pd_op.matmul_grad", f"pd_op.{kind}"))))
    assert [op.id for op in backward.sources(backward.graph.ops[6])] == ([4] if kind != "conv2d_grad" else [])
    assert [op.id for op in backward.collectives()] == [6]


def test_a_gradient_that_gives_dx_alone_is_split() -> None:
    """Sites found. It has one result: nothing of it is left to put off."""
    lines = LAYER.replace("#4 %4:float32[4,8], %5:float32[8,16] = pd_op.matmul_grad", "#4 %4:float32[4,8] = pd_op.linear_grad").splitlines()
    dw = "#9 %5:float32[8,16] = pd_op.matmul(%2, %3) backward"
    split, result, context = overlapped(parse("\n".join([*lines[:9], dw, *lines[9:]])))
    assert [op.kind for op in split.ops if op.id == 4] == ["linear_grad"]
    assert [op.id for op in result.ops if op.id in (4, 6, 9)] == [4, 6, 9]
    assert rules_of(applied(context)) == ["started-after-dx"]


def test_a_product_of_two_weights_is_no_dx() -> None:
    """Sites found. Both its results are gradients of weights, so it stays whole and no collective is taken for its."""
    text = LAYER.replace('%2:float32[4,8]"x" = pd_op.data()', '%2:float32[4,8]!"v" = builtin.parameter()')
    split, result, context = overlapped(parse(text))
    assert [op.name for op in split.ops if op.kind == "matmul_grad"] == ["pd_op.matmul_grad"]
    assert result.ops == split.ops
    assert applied(context) == []


@given(recipes(), st.booleans())
@settings(max_examples=20, deadline=None)
def test_places_follow_the_order_from_site_to_site(recipe: Recipe, borrow: bool) -> None:
    """What one collective moves is where the next one looks for it."""
    seen = []

    def applied(work: Work, moved: set[int], comm: Op) -> None:
        apply(work, moved, comm)
        seen.append(work.index == {op_id: k for k, op_id in enumerate(work.order)})

    apply = Work.move
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Work, "move", applied)
        for program in backward_programs(recipe):
            overlapped(program, only_gains=False, borrow=borrow)
    assert all(seen)
