"""A user's pass that says of Paddle's operations what they are not, or has them read other contents, is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from interlace.config import make_config
from interlace.cost_model import GivenCosts
from interlace.errors import PassError
from interlace.ir import Graph, Program
from interlace.ir.graph import dependencies
from interlace.ir.kinds import SHADOW_OUTPUT
from interlace.ir.text import parse
from interlace.passes import Pass, register
from interlace.passes.base import Context
from interlace.passes.kept import require_kept
from interlace.planning.plan import make_plans
from tests.strategies import World, programs

COSTS = GivenCosts({"comm": 100, "gemm": 50, "default": 10})


def of_op(program: Program, chosen: Callable[[Any], bool], **fields: Any) -> Program:
    """The program with other fields of its first operation of a kind."""
    first = next(op for op in program.ops if chosen(op))
    return program.with_ops([msgspec.structs.replace(op, **fields) if op is first else op for op in program.ops])


def of_values(program: Program, chosen: Callable[[Any], bool], **fields: Any) -> Program:
    """The program with other fields of values of a kind."""
    return program.with_ops(program.ops, [msgspec.structs.replace(value, **fields) if chosen(value) else value for value in program.values])


def apart(program: Program) -> Program:
    """What an operation writes in place is said to be in memory of its own."""
    written = next(op for op in program.ops if op.inplace)
    made = of_values(program, lambda value: value.id in written.results, storage=max(value.id for value in program.values) + 1)
    return of_op(made, lambda op: op.id == written.id, inplace=())


def fewer(program: Program) -> Program:
    return msgspec.structs.replace(program, pipeline=msgspec.structs.replace(program.pipeline, num_micro_batches=1))


def cleared_first(program: Program) -> Program:
    """Gradients are set to zero before the optimizer reads them."""
    first, clear = next(op for op in program.ops if op.role == "optimize"), next(op for op in program.ops if op.name == "pd_op.scale_")
    ops = [op for op in program.ops if op is not clear]
    at = ops.index(first)
    return program.with_ops([*ops[:at], clear, *ops[at:]])


def copied(program: Program) -> Program:
    """A copy of an operation that stands for the same captured one, of another kind."""
    first = next(op for op in program.ops if op.kind == "gelu")
    result = max(value.id for value in program.values) + 1
    value = msgspec.structs.replace(next(each for each in program.values if each.id == first.results[0]), id=result, storage=result)
    copy = msgspec.structs.replace(first, id=max(op.id for op in program.ops) + 1, name="pd_op.relu", results=(result,))
    at = program.ops.index(first) + 1
    return program.with_ops([*program.ops[:at], copy, *program.ops[at:]], [*program.values, value])


LIES: dict[str, tuple[Callable[[Program], Program], str]] = {
    "in place": (apart, "has inplace (), expected ((0, 0),)"),
    "role": (
        lambda program: of_op(program, lambda op: op.kind == "matmul_grad", role="optimize"),
        "has role 'optimize', expected 'backward'",
    ),
    "unread": (lambda program: of_op(program, lambda op: op.kind == "matmul", no_buffer=(0, 1)), "has no_buffer (0, 1), expected ()"),
    "origin": (lambda program: of_op(program, lambda op: op.kind == "gelu", origin=1), " has origin 1, expected "),
    "lasting": (
        lambda program: of_values(program, lambda value: value.persistable, persistable=False),
        "has persistable False, expected True",
    ),
    "micro-batches": (fewer, "the step is now "),
    "output": (
        lambda program: program.with_ops([op for op in program.ops if op.name != SHADOW_OUTPUT]),
        "inputs and outputs of the program stay",
    ),
    "kind": (
        lambda program: of_op(program, lambda op: op.kind == "gelu", name="pd_op.relu"),
        "has name 'pd_op.relu', expected 'pd_op.gelu'",
    ),
    "attribute": (
        lambda program: of_op(program, lambda op: op.name == "pd_op.scale_", attrs={"scale": 2}),
        "has attrs {'scale': 2}, expected {'scale': 0}",
    ),
    "copy": (copied, ", has name 'pd_op.relu', expected 'pd_op.gelu'"),
    "contents": (cleared_first, "finds in %1 what #16 pd_op.scale_ (optimizer) wrote last, expected #12 pd_op.add_ (layers.0)"),
}


@register
class Lies(Pass, frozen=True, kw_only=True):
    """Say what is not so."""

    name = "lies"
    what: str = ""

    def run(self, program: Program, context: Context) -> Program:
        return LIES[self.what][0](program)


@pytest.mark.parametrize("what", LIES)
def test_a_pass_that_says_what_paddle_does_not_is_refused(what: str) -> None:
    """Lowering takes operations as Paddle has them: a proof of anything else proves nothing."""
    given = [
        program.with_ops([msgspec.structs.replace(op, origin=op.id) for op in program.ops])
        for program in programs(World(dp=2, micro_batches=2, schedule="accumulate"))
    ]
    with pytest.raises(PassError) as found:
        make_plans(given, make_config({"schedule_1f1b": {"interleave": "off"}, "lies": {"what": what}}), COSTS, "gpu")
    assert str(found.value).startswith("pass 'lies': ")
    assert LIES[what][1] in str(found.value)


def test_operations_that_touch_other_memory_may_change_places() -> None:
    program = programs(World(dp=2, micro_batches=2, schedule="accumulate"))[0]
    at = next(k for k, op in enumerate(program.ops) if op.name == "pd_op.add_")
    one, two = program.ops[at : at + 2]
    require_kept(program, program.with_ops([*program.ops[:at], two, one, *program.ops[at + 2 :]]))


FUSED = """\
program rank=0 world=1 mode=train
pipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=accumulate
#1 %1:float32[4]!"g" = builtin.parameter() optimize
#2 %2:float32[2]!"h" = builtin.parameter() optimize
#3 %3:vector<float32[4];float32[2]> = builtin.combine(%1, %2) optimize
#4 %4:vector<float32[4];float32[2]>~3, %5:float32[6]! = pd_op.coalesce_tensor_(%3) optimize inplace=0:0
#5 %6:float32[4]~1 = pd_op.relu_(%1) optimize inplace=0:0
#6 %7:float32[2]~2 = pd_op.relu_(%2) optimize inplace=0:0
#7 %8:float32[6] = pd_op.square(%5) optimize
#8 %9:float32[4]~1 = pd_op.scale_(%1) optimize inplace=0:0
"""


def test_a_fused_buffer_has_the_contents_of_its_tensors() -> None:
    """Its writers may change places with each other, not with its reader."""
    program = parse(FUSED)
    *first, one, two, reader, clear = program.ops
    require_kept(program, program.with_ops([*first, two, one, reader, clear]))
    for ops in ([*first, one, reader, two, clear], [*first, one, two, clear, reader]):
        with pytest.raises(PassError, match=r"#7 pd_op\.square finds in %5 what "):
            require_kept(program, program.with_ops(ops))


LASTING = """\
program rank=0 world=1 mode=train
pipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=accumulate
#1 %1:float32[4]!{name} = pd_op.full() forward
#2 %2:float32[4]~1 = pd_op.scale_(%1) forward inplace=0:0
#3 %3:float32[4]~1 = pd_op.exp_(%1) forward inplace=0:0
#4 %4:float32[4]~1 = pd_op.relu_(%1) forward inplace=0:0
"""


@pytest.mark.parametrize("name", ["", '"state"'])
def test_the_next_step_finds_what_has_a_name(name: str) -> None:
    """A result without one is kept from collection alone: nothing reads it again."""
    before = parse(LASTING.format(name=name))
    made, first, *both = before.ops
    new = msgspec.structs.replace(first, id=9, origin=-1, results=(9,))
    values = [*before.values, msgspec.structs.replace(before.values[1], id=9)]
    require_kept(before, before.with_ops([made, new, *both], values))
    if name:
        with pytest.raises(PassError, match=r"the next step finds in %1 what #3 pd_op\.exp_ wrote last, expected #4 pd_op\.relu_"):
            require_kept(before, before.with_ops([made, new, *both[::-1]], values))
    else:
        require_kept(before, before.with_ops([made, new, *both[::-1]], values))


ADDED = """\
program rank=0 world=1 mode=train
pipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=accumulate
#1 %1:float32[4]!"state" = pd_op.full() forward
#2 %2:float32[4] = pd_op.full() forward
#3 %3:float32[4]~1 = pd_op.add_(%1, %2) forward inplace=0:0
#4 %4:float32[4] = pd_op.exp(%1) forward
"""


@pytest.mark.parametrize("other", [False, True])
def test_what_reads_other_operands_now_is_the_passs_own(other: bool) -> None:
    """With the operands that it had it may not change places with what reads its result."""
    before = parse(ADDED)
    state, given_, added, reader = before.ops
    new = msgspec.structs.replace(given_, id=9, name="pd_op.scale", operands=(2,), results=(9,))
    values = [*before.values, msgspec.structs.replace(before.values[1], id=9, storage=9)]
    made = before.with_ops([state, given_, new, reader, msgspec.structs.replace(added, operands=(1, 9 if other else 2))], values)
    if other:
        require_kept(before, made)
        return
    with pytest.raises(PassError, match=r"#4 pd_op\.exp finds in %1 what #1 pd_op\.full wrote last, expected #3 pd_op\.add_"):
        require_kept(before, made)


MEETING = """\
program rank=0 world=2 mode=train
pipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=accumulate
group 7 = 0,1
group 8 = 0,1
#1 %1:float32[4] = pd_op.data() forward
#2 %2:float32[4] = pd_op.all_reduce(%1) forward group=7
#3 %3:float32[4] = pd_op.sync_batch_norm_(%1) forward
#4 %4:float32[4] = pd_op.all_reduce(%1) forward group=8
"""


def test_calls_stay_on_their_side_of_one_that_names_no_group() -> None:
    """A rank that meets the others in a batch norm first, and one that meets them in a sum first, wait for ever."""
    program = parse(MEETING)
    data, one, norm, two = program.ops
    require_kept(program, program.with_ops([data, one, norm, two]))
    for ops in ([data, norm, one, two], [data, one, two, norm]):
        with pytest.raises(PassError, match=r"has changed places with #3 pd_op\.sync_batch_norm_"):
            require_kept(program, program.with_ops(ops))
    new = "#9 %9:float32[4] = pd_op.all_reduce(%1) forward group=8\n"
    require_kept(program, parse(MEETING.replace("#3 ", f"{new}#3 ")))  # ranks that make it alike meet alike; the proof compares them
    after = dependencies(Graph(program), program.ops)
    assert (after[3] - {1}, after[4] - {1}) == ({2}, {3})
