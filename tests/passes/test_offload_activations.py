"""`offload-activations`: data flow, frees, memory, job boundaries of what it writes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.config import make_config
from interlace.cost_model import GivenCosts
from interlace.errors import ConfigError, PassError
from interlace.ir import Program, parse, show, verify
from interlace.passes import Pipeline
from interlace.passes.base import Context
from interlace.passes.offload_activations import OffloadActivations, apply
from interlace.scheduler.memory.live import in_order, order_curve
from interlace.scheduler.offload import COPY_BACK, COPY_OUT, OffloadOptions, OffloadPlan, measure, plan_offload
from tests.interpreter import assert_same
from tests.remarks import applied, rules_of
from tests.renumbered import renumbered
from tests.strategies import World, plan, worlds
from tests.together import run_together

ALL: dict[str, Any] = {"fraction": 1.0, "min_bytes": 1}


def costs(copy: int = 1, default: int = 1) -> GivenCosts:
    return GivenCosts({"copy": copy, "comm": 5, "default": default})


def offload(program: Program, cost: GivenCosts | None = None, **options: Any) -> Program:
    """The pass's result, verified."""
    result = told(OffloadActivations(**options), program, Context(cost or costs()))
    verify(result)
    return result


def told(asked: OffloadActivations, program: Program, context: Context) -> Program:
    """The pass's result with this rank's facts alone; the context has its report."""
    context.facts = [asked.facts(program, context)]
    return asked.run(program, context)


def reasons(context: Context) -> dict[object, dict[str, object]]:
    """Reasons to keep values on the device, with how many."""
    kept = [each for each in context.remarks if each.rule == "kept-on-device"]
    return {each.names["reason"]: {name: number for name, number in each.numbers.items() if name != "size_bytes"} for each in kept}


def peak_bytes(program: Program) -> int:
    return in_order(program).peak()


def items(program: Program) -> list[tuple[int, int]]:
    return [item for job in program.jobs for item in job.items]


def copies(program: Program, name: str) -> set[int]:
    return {op.id for op in program.ops if op.name == name}


choices = st.fixed_dictionaries(
    {
        "fraction": st.sampled_from([0.0, 0.3, 0.5, 1.0]),
        "min_bytes": st.just(1),
        "keep_bytes": st.sampled_from([0, 32, 100]),
        "max_in_flight": st.sampled_from([None, 1, 2]),
        "include_integers": st.booleans(),
    }
)
cost_models = st.builds(costs, st.sampled_from([0, 1, 3, 7, 20]), st.sampled_from([1, 4]))


@settings(max_examples=30, deadline=None)
@given(worlds(offload=False), choices, cost_models)
def test_data_flow_is_kept_and_nothing_is_freed_early(world: World, options: dict[str, Any], cost: GivenCosts) -> None:
    """What is moved, equal results. The interpreter frees each storage at its last reader, and poisons what is gone."""
    programs = plan(world)
    assert_same(programs, [offload(program, cost, **options) for program in programs])


@settings(max_examples=25, deadline=None)
@given(worlds(offload=False), choices, cost_models)
def test_memory_is_as_predicted_and_never_above_before(world: World, options: dict[str, Any], cost: GivenCosts) -> None:
    """Memory budget, measured peaks. Device bytes by host order, counted on the result, are those of the program less what each transfer
    frees, from the op instance after which it is issued to that before which it is back; the plan, whose copies take time, has them free no
    earlier."""
    for program in plan(world):
        decided = plan_offload(program, measure(program, cost), OffloadOptions(**options))
        result = apply(program, decided)
        assert decided.before_peak_bytes == peak_bytes(program)
        at, live = {item: k for k, item in enumerate(items(program))}, order_curve(program).copy()
        for move in decided.moves:
            for transfer in move.transfers:
                live[at[transfer.out_after] + 1 : at[transfer.back_before]] -= move.saved.freed_bytes
        assert peak_bytes(result) == max(live)
        assert peak_bytes(result) <= decided.peak_bytes <= decided.before_peak_bytes
        assert in_order(result, items(result)).peak("pinned") <= decided.pinned_peak_bytes


@settings(max_examples=25, deadline=None)
@given(worlds(offload=False), choices, cost_models)
def test_copies_stand_in_different_jobs_and_all_else_keeps_its_order(world: World, options: dict[str, Any], cost: GivenCosts) -> None:
    """What is moved. A pinned result crosses a job boundary; other items and operations stay in order."""
    for program in plan(world):
        result = offload(program, cost, **options)
        known = {op.id for op in program.ops}
        assert [op.id for op in result.ops if op.id in known] == [op.id for op in program.ops]
        for before, after in zip(program.jobs, result.jobs, strict=True):
            views = [item for item in after.items if item[0] in known]
            assert views == list(before.items)
        job = {item: k for k, each in enumerate(result.jobs) for item in each.items}
        giver = {value: op for op in result.ops for value in op.results}
        for op in result.ops:
            for micro_batch in range(world.micro_batches) if op.name == COPY_BACK else ():
                out = giver[op.operands[0]]
                assert ((op.id, micro_batch) in job) == ((out.id, micro_batch) in job)
                if (op.id, micro_batch) in job:
                    assert job[out.id, micro_batch] < job[op.id, micro_batch]


@settings(max_examples=40, deadline=None)
@given(worlds(offload=False), choices, cost_models)
def test_same_inputs_same_plan(world: World, options: dict[str, Any], cost: GivenCosts) -> None:
    """Ranks of one tensor-parallel group, and a second run, decide alike; what is written reads back."""
    programs = plan(world)
    results = [offload(program, cost, **options) for program in programs]
    for rank, (program, result) in enumerate(zip(programs, results, strict=True)):
        assert offload(parse(show(program)), cost, **options) == result
        assert parse(show(result)) == result
        twin = results[rank - rank % world.mp]
        assert [op.name for op in result.ops] == [op.name for op in twin.ops]
        if world.mp > 1 and not world.pairs and not world.cut and not world.hoist:
            assert items(result) == items(twin)


@settings(max_examples=25, deadline=None)
@given(worlds(offload=False, max_mp=1), st.integers(0, 300), cost_models, st.sampled_from([None, 1]))
def test_any_budget_holds_or_everything_moves(world: World, less: int, cost: GivenCosts, cap: int | None) -> None:
    """Memory budget. On the result, by host order and with copies out in flight; where it is too small, what all that can move leaves is
    enough."""
    for program in plan(world):
        budget = max(1, peak_bytes(program) - less)
        choice = OffloadOptions(min_bytes=1, max_in_flight=cap)
        decided = plan_offload(program, measure(program, cost, budget), choice)
        if "everything-moved" in [note.rule for note in decided.notes]:
            assert decided.peak_bytes > budget
            budget = decided.peak_bytes
            decided = plan_offload(program, measure(program, cost, budget), choice)
        assert decided.peak_bytes <= budget
        assert peak_bytes(apply(program, decided)) <= budget
        assert (not decided.moves) == (peak_bytes(program) <= budget)


@settings(max_examples=30, deadline=None)
@given(worlds(offload=False, max_mp=1, max_pp=2, cut=False, hoist=False))
def test_no_move_of_the_least_is_idle(world: World) -> None:
    """Memory budget. Leaving out any one transfer of a budget's plan breaks the budget (no bandwidth in the way)."""
    for program in plan(world):
        budget = peak_bytes(program) - 32
        decided = plan_offload(program, measure(program, costs(0), budget), OffloadOptions(min_bytes=1))
        if "everything-moved" in [note.rule for note in decided.notes]:
            continue
        for less in without_one(decided):
            assert peak_bytes(apply(program, less)) > budget


def without_one(decided: OffloadPlan) -> list[OffloadPlan]:
    """The plan less each of its transfers."""
    plans = []
    for k, move in enumerate(decided.moves):
        for transfer in move.transfers:
            rest = tuple(each for each in move.transfers if each != transfer)
            kept = (msgspec.structs.replace(move, transfers=rest),) if rest else ()
            plans.append(msgspec.structs.replace(decided, moves=(*decided.moves[:k], *kept, *decided.moves[k + 1 :])))
    return plans


VIEWS = """program rank=0 world=1 mode=train
pipeline stage=0 of 1 micro_batches=2 chunks=1 schedule=FThenB
passes schedule-1f1b
#0 %0:float32[2,4]"x" = pd_op.data() forward
#1 %1:float32[2,4] = pd_op.exp(%0) forward layer="a"
#2 %2:float32[4,2]~1 = pd_op.reshape(%1) forward layer="a" views=0:0
#3 %3:float32[8]~1 = pd_op.reshape(%2) forward layer="b" views=0:0
#4 %4:float32[8] = pd_op.gelu(%3) forward layer="b"
#5 %5:float32[2,4] = pd_op.add(%1, %0) forward layer="b"
#6 %6:float32[8] = pd_op.gelu_grad(%3, %4) backward layer="b"
#7 %7:float32[4,2] = pd_op.relu_grad(%2, %6) backward layer="b"
#8 %8:float32[2,4] = pd_op.exp_grad(%1, %7) backward layer="a"
#9 %9:float32[2,4] = pd_op.tanh_grad(%1, %8) backward layer="a"
#10 builtin.shadow_output(%9) optimize {"output_name":"dx"}
#11 builtin.shadow_output(%5) optimize {"output_name":"y"}
job forward_0 forward 0: 1-5@0
job forward_1 forward 1: 1-5@1
job backward_0 backward 0: 6-9@0
job backward_1 backward 1: 6-9@1
"""


@pytest.mark.parametrize("turned", [{}, {6: 7, 7: 6}])
def test_one_storage_is_copied_once(turned: dict[int, int]) -> None:
    """Shared storage. Two saved views and their base, read by four operations: one copy out, one back, views remade."""
    program = renumbered(parse(VIEWS), turned)
    result = offload(program, **ALL)
    assert len(copies(result, COPY_OUT)) == len(copies(result, COPY_BACK)) == 2
    remade = [op for op in result.ops if op.name == "pd_op.reshape" and op.role == "backward"]
    assert [len(op.views) for op in remade] == [1, 1]
    assert_same(program, result)
    order, made = items(result), {value: op.id for op in result.ops for value in op.results}
    for op in result.ops:
        for m in range(2) if op.role == "backward" else ():
            assert all(order.index((made[value], m)) < order.index((op.id, m)) for value in op.operands)


def test_copy_starts_behind_the_last_forward_reader() -> None:
    """What is moved. Through views and the residual add, of the micro-batch's own items."""
    result = offload(parse(VIEWS), **ALL)
    out = next(op.id for op in result.ops if op.name == COPY_OUT and op.operands == (1,))
    order = items(result)
    assert order[order.index((out, 0)) - 1] == (5, 0)


def test_view_without_its_base_is_copied_as_the_view() -> None:
    """Shared storage."""
    text = VIEWS.replace("pd_op.relu_grad(%2, %6)", "pd_op.relu(%6)").replace("exp_grad(%1, %7)", "exp(%7)")
    program = parse(text.replace("tanh_grad(%1, %8)", "tanh(%8)"))
    result = offload(program, **ALL)
    moved = {op.operands[0] for op in result.ops if op.name == COPY_OUT}
    assert 3 in moved
    assert not moved & {1, 2}
    assert_same(program, result)


def test_views_that_cannot_be_remade_stay() -> None:
    """Shared storage. A view made from a value computed in forward is not repeated."""
    text = VIEWS.replace("pd_op.reshape(%1) forward", "pd_op.reshape(%1, %0) forward")
    program = parse(text.replace('layer="a" views=0:0', 'layer="a" views=0:0 no_buffer=1'))
    context = Context(costs())
    result = told(OffloadActivations(**ALL), program, context)
    assert not any(op.operands == (1,) for op in result.ops if op.name == COPY_OUT)
    assert reasons(context)["alias"] == {"values": 3}
    assert_same(program, result)


def test_backward_that_overwrites_what_came_back() -> None:
    """Shared storage. In-place results and later readers follow the returned storage; kept micro-batches their own."""
    text = VIEWS.replace(
        '%9:float32[2,4] = pd_op.tanh_grad(%1, %8) backward layer="a"',
        '%9:float32[2,4]~1 = pd_op.tanh_grad_(%1, %8) backward layer="a" inplace=0:0',
    )
    text = (
        text.replace("#10 builtin", "#12 %12:float32[2,4] = pd_op.sin(%9) backward\n#10 builtin")
        .replace("shadow_output(%9)", "shadow_output(%12)")
        .replace("6-9@", "6-9@0 12@")
        .replace("6-9@0 12@1", "6-9@1 12@1")
    )
    program = parse(text)
    verify(program)
    result = offload(program, **ALL)
    values = {value.id: value for value in result.values}
    assert copies(result, COPY_OUT)
    assert values[9].storage != 1
    assert_same(program, result)


def test_micro_batch_left_out_keeps_its_value() -> None:
    """No quick return. Micro-batch 1's backward follows at once: its jobs hold no copy and it computes the same."""
    text = VIEWS.replace(
        "job backward_0 backward 0: 6-9@0\njob backward_1 backward 1: 6-9@1",
        "job backward_1 backward 1: 6-9@1\njob backward_0 backward 0: 6-9@0",
    )
    program = parse(text)
    context = Context(costs(copy=3))
    result = told(OffloadActivations(**ALL), program, context)
    verify(result)
    moved = {m for op, m in items(result) if op in copies(result, COPY_OUT)}
    assert moved == {0}
    assert "at-once" in reasons(context)
    assert_same(program, result)


def test_one_job_is_never_crossed() -> None:
    """No quick return. Forward and backward of a micro-batch in one job: no boundary for a pinned result."""
    text = VIEWS.split("job forward_0")[0] + "job all step 0: 1-5@0 1-5@1 6-9@0 6-9@1\n"
    context = Context(costs(0))
    program = parse(text)
    assert told(OffloadActivations(**ALL), program, context) == program
    assert "one-job" in reasons(context)


def test_nested_blocks_keep_everything() -> None:
    """Never moved, odd programs. A nested block may read what is not among its operands."""
    program = parse(VIEWS.replace('pd_op.exp_grad(%1, %7) backward layer="a"', "pd_op.if(%1, %7) backward num_blocks=1"))
    context = Context(costs())
    assert told(OffloadActivations(**ALL), program, context) == program
    assert "nested-block" in reasons(context)


def test_integers_only_when_asked() -> None:
    """Never moved, what is chosen."""
    program = parse(VIEWS.replace("%4:float32[8]", "%4:int64[8]"))
    moved = {flag: len(copies(offload(program, include_integers=flag, **ALL), COPY_OUT)) for flag in (False, True)}
    assert moved == {False: 1, True: 2}


def test_nothing_asked_nothing_done() -> None:
    """Memory budget, one line. The program is untouched, byte for byte, and the reason is said."""
    program = parse(VIEWS)
    for options in ({}, {"fraction": 0.0}, {"modules": ()}, {"max_in_flight": 0, "fraction": 1.0}):
        context = Context(costs())
        assert told(OffloadActivations(min_bytes=1, **options), program, context) is program
        assert not applied(context)
        assert rules_of(context.remarks)[1] in ("no-copy-allowed", "nothing-asked", "fraction-zero")


def test_contract() -> None:
    """Wrong options. Needs a schedule; unknown and wrong options are errors before anything is built."""
    with pytest.raises(PassError, match="no jobs"):
        offload(parse(VIEWS.split("job forward_0")[0]), **ALL)
    for wrong, what in ((OffloadActivations(fraction=1.5), "<= 1"), (OffloadActivations(keep_bytes=(0, -1)), ">= 0")):
        with pytest.raises(ConfigError, match=f"offload_activations: .*{what}"):
            make_config({"offload_activations": wrong})
    with pytest.raises(msgspec.ValidationError, match="module"):
        msgspec.convert({"module": ["mlp"]}, OffloadActivations)
    assert [OffloadActivations().mistake(*given) is None for given in ((), (False,), (True,))] == [False, False, True]
    assert OffloadActivations.needs == {"scheduled"}
    assert OffloadActivations.gives == {"offloaded"}


TWO_READERS = VIEWS.replace("pd_op.gelu_grad(%3, %4)", "pd_op.gelu_grad(%4, %4)")
"""%4 is read last, and read first in backward, before %1, which is made before it."""


@pytest.mark.parametrize("last_reader", ["pd_op.tanh_grad(%1, %8)", "pd_op.tanh_grad(%4, %8)"])
def test_copies_at_one_item_stand_in_the_order_of_last_and_of_first_readers(last_reader: str) -> None:
    """What is moved. Copies of a direction follow one another, so what was read last in forward must not hold up the rest."""
    program = parse(TWO_READERS.replace("pd_op.tanh_grad(%1, %8)", last_reader))
    decided = plan_offload(program, measure(program, costs()), OffloadOptions(**ALL))
    moves = [
        msgspec.structs.replace(
            move,
            transfers=tuple(
                msgspec.structs.replace(each, out_after=(5, each.micro_batch), back_before=(6, each.micro_batch)) for each in move.transfers
            ),
        )
        for move in decided.moves
    ]
    assert [move.saved.value for move in moves] == [1, 4]
    result = apply(program, msgspec.structs.replace(decided, moves=tuple(moves)))
    verify(result)
    giver = {value: op for op in result.ops for value in op.results}
    moved = [next(op for op in result.ops if op.id == op_id) for op_id, micro_batch in items(result) if micro_batch == 0]
    assert [op.operands[0] for op in moved if op.name == COPY_OUT] == [4, 1]
    assert [giver[op.operands[0]].operands[0] for op in moved if op.name == COPY_BACK] == [4, 1]
    assert_same(program, result)


@pytest.mark.parametrize("other", [{"fraction": 0.0, "min_bytes": 1}, {**ALL, "keep_bytes": 40}, ALL])
def test_what_was_planned_for_another_program_or_by_other_options_is_not_taken(other: dict[str, Any]) -> None:
    """One context, as in a search: two programs of equal times, bytes and names, of which backward reads something else."""
    context, made = Context(costs()), []
    for text in (VIEWS, TWO_READERS):
        for options in (ALL, other):
            program = parse(text)
            made.append((program, told(OffloadActivations(**options), program, context)))
            assert made[-1][1] == offload(program, **options)


def test_two_views_of_one_operation_are_remade_in_what_was_copied_back() -> None:
    text = VIEWS.replace("#2 %2:float32[4,2]~1 = pd_op.reshape(%1)", "#2 %2:float32[4,2]~1, %13:float32[4,2]~1 = pd_op.unbind(%1)")
    text = text.replace('layer="a" views=0:0', 'layer="a" views=0:0,1:0').replace("relu_grad(%2, %6)", "relu_grad(%2, %13, %6)")
    program = parse(text)
    verify(program)
    result = offload(program, **ALL)
    values = {value.id: value for value in result.values}
    back = {values[op.results[0]].storage for op in result.ops if op.name == COPY_BACK}
    (remade,) = [op for op in result.ops if op.kind == "unbind" and op.role == "backward"]
    assert len({values[value].storage for value in remade.results}) == 1
    assert {values[value].storage for value in remade.results} <= back


def test_what_is_read_for_its_shape_alone_stays_the_forward_value() -> None:
    """What is moved. An operation in front of the copy back, and the shape-only operand of one that reads the contents too."""
    text = VIEWS.replace('pd_op.gelu_grad(%3, %4) backward layer="b"', 'pd_op.gelu_grad(%4, %1) backward layer="b" no_buffer=1')
    text = text.replace("pd_op.relu_grad(%2, %6)", "pd_op.relu(%6)")
    program = parse(
        text.replace('pd_op.exp_grad(%1, %7) backward layer="a"', 'pd_op.where_grad(%1, %7, %1) backward layer="a" no_buffer=2')
    )
    verify(program)
    result = offload(program, **ALL)
    ops = {op.id: op for op in result.ops}
    assert ops[6].operands[1] == 1
    assert ops[8].operands[0] != 1
    assert ops[8].operands[2] == 1


def test_ranks_of_a_stage_decide_alike_whatever_each_measured() -> None:
    """Memory budget. On one rank copies take twice as long; both move what the slower one can, which is less."""
    alone = [items(offload(parse(VIEWS), costs(speed), **ALL)) for speed in (1, 2)]
    assert alone[0] != alone[1]
    ranks = [msgspec.structs.replace(parse(VIEWS), rank=rank, world=2) for rank in range(2)]
    made = run_together(Pipeline((OffloadActivations(**ALL),)), ranks, [costs(1), costs(2)])
    assert [items(each) for each, _ in made] == [alone[1], alone[1]]


def test_ranks_of_a_stage_that_run_other_operations_decide_for_themselves() -> None:
    """Memory budget. One more operation, of which nothing could move."""
    text = VIEWS.replace("#6 %6", '#20 %20:float32[2,4] = pd_op.sin(%0) forward layer="b"\n#6 %6')
    other = text.replace("0: 1-5@0", "0: 1-5@0 20@0").replace("1: 1-5@1", "1: 1-5@1 20@1")
    ranks = [msgspec.structs.replace(parse(each), rank=rank, world=2) for rank, each in enumerate((VIEWS, other))]
    made = run_together(Pipeline((OffloadActivations(**ALL),)), ranks, [costs(1), costs(2)])
    assert items(made[0][0]) == items(offload(parse(VIEWS), costs(1), **ALL)) != items(offload(parse(VIEWS), costs(2), **ALL))


def test_a_budget_leaves_free_what_side_streams_hold() -> None:
    """Memory budget."""
    program = parse(VIEWS)
    budget = peak_bytes(program)
    offloading = Pipeline((OffloadActivations(min_bytes=1),))
    assert peak_bytes(offloading.run(program, costs(), memory_limit=budget)[0]) == budget
    assert peak_bytes(offloading.run(program, costs(), memory_limit=budget - 16)[0]) <= budget - 16
