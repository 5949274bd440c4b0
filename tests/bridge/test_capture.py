"""What a snapshot says of a Paddle program: every form of value and operation, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

paddle = pytest.importorskip("paddle")

from paddle.distributed.auto_parallel.static.process_group import new_process_group, remove_process_group  # noqa: E402

from interlace.bridge.attributes import attributes  # noqa: E402
from interlace.bridge.capture import Captured, capture, complete_roles, fused_parameters, plain, with_group  # noqa: E402
from interlace.bridge.lower import lower  # noqa: E402
from interlace.bridge.targets.cpu import CpuDevice  # noqa: E402
from interlace.cpu.ops import type_name  # noqa: E402
from interlace.errors import ProgramError  # noqa: E402
from interlace.ir import (  # noqa: E402
    ABSENT,
    Graph,
    Job,
    Op,
    Pipeline,
    Program,
    TensorType,
    Value,
    dependencies,
    load,
    parse,
    save,
    show,
    verify,
)
from interlace.ir.effects import is_ordered  # noqa: E402
from interlace.ir.graph import written_operands  # noqa: E402
from interlace.ir.kinds import DATA, OPAQUE  # noqa: E402
from tests.bridge.small import Build, C, captured_small, small_program  # noqa: E402

pytestmark = pytest.mark.paddle


def captured_of(write: Any, pipeline: Pipeline | None = None) -> Captured:
    """A program that `write(build)` makes, forward roles where it gives none."""
    build = Build()
    with paddle.static.program_guard(build.main):
        write(build)
    return capture(build.main, pipeline)


def op_named(program: Program, kind: str) -> Op:
    return next(op for op in program.ops if op.kind == kind)


def value(program: Program, number: int) -> Value:
    return next(each for each in program.values if each.id == number)


def test_a_program_is_captured_verified_printed_and_stored(tmp_path: Any) -> None:
    """Text and dumps, odd programs. Roles, groups with their ranks, inputs; the captured program is not changed."""
    source = small_program()
    before = str(source)
    program = capture(source, Pipeline(num_micro_batches=3, schedule="accumulate")).program
    assert str(source) == before
    verify(program)
    assert parse(show(program)) == program
    assert load(save(program, tmp_path / "small.ilp")) == program
    assert [group.ranks for group in program.groups] == [(0, 1)]
    assert {op.role for op in program.ops} == {"forward", "backward", "optimize"}
    fed = [value(program, op.results[0]) for op in program.ops if op.name == DATA]
    assert [each.name for each in fed if not each.persistable] == ["x"]
    assert program.paddle == paddle.__version__
    assert all(op.origin == op.id for op in program.ops)


def test_capture_is_the_same_twice() -> None:
    """Text and dumps."""
    source = small_program()
    assert capture(source).program == capture(source).program


def test_persistable_buffers_and_in_place_writes() -> None:
    """Odd programs. `g += dW` writes a persistable storage; its result shares it and lasts too where Paddle says so."""
    program = captured_small().program
    add = next(op for op in program.ops if op.name == "pd_op.add_")
    buffer, result = value(program, add.operands[0]), value(program, add.results[0])
    assert (buffer.name, buffer.persistable) == ("g", True)
    assert add.inplace == ((0, 0),)
    assert result.storage == buffer.storage


def test_operands_without_contents_are_marked() -> None:
    """Odd programs, never moved. As Paddle says, operand by operand."""
    program = captured_small().program
    assert op_named(program, "add_grad").no_buffer == (0, 1)
    assert op_named(program, "mean_grad").no_buffer == (0,)
    assert op_named(program, "gelu_grad").no_buffer == ()


def test_what_holds_a_ring_is_communication() -> None:
    """A loss over split classes has the group that its attributes name, with more than one rank; what sends nothing has none."""
    ring = new_process_group([0, 1]).id

    def write(build: Build) -> None:
        x, label = build.data("x", [4, 8]), build.data("label", [4, 1], paddle.int64)
        for ranks in (2, 1):
            C.margin_cross_entropy(x, label, True, ring, 0, ranks, 1.0, 0.5, 0.0, 64.0)
        C.c_identity(x, ring, True, True)

    program = captured_of(write).program
    verify(program)
    assert [op.group for op in program.ops if op.kind == "margin_cross_entropy"] == [ring, -1]
    assert op_named(program, "c_identity").group == -1
    assert (ring, (0, 1)) in [(group.id, group.ranks) for group in program.groups]


def test_a_ring_in_an_operation_that_nobody_knows_is_refused_by_name() -> None:
    op = Op(9, "pd_op.fused_multi_transformer_", (), (), "forward", attrs={"ring_id": 5}, layer="decoder")
    with pytest.raises(ProgramError, match=r"#9 pd_op.fused_multi_transformer_ \(decoder\) communicates over ring 5, and Interlace does"):
        with_group(op)
    assert with_group(msgspec.structs.replace(op, attrs={"ring_id": -1})).group == -1


def test_groups_of_the_same_ranks_are_listed_with_the_one_in_use() -> None:
    """So that ranks that use different ones of them do not take theirs for the same."""
    first = new_process_group([0, 1]).id
    second = new_process_group([0, 1], force_new_group=True).id
    try:
        program = captured_of(lambda build: C.all_reduce(build.data("x", [2]), second, 0)).program
    finally:
        remove_process_group(second)
    assert [(group.id, group.ranks) for group in program.groups] == [(first, (0, 1)), (second, (0, 1))]


def with_batch_norm(build: Build, **attrs: bool) -> None:
    """Forward and backward of a batch norm whose running statistics last."""
    x = build.data("x", [4, 8])
    scale, bias, mean, var = (build.data(name, [8], persistable=True) for name in ("scale", "bias", "mean", "var"))
    flags = {"is_test": False, "use_global_stats": False, "trainable_statistics": False} | attrs
    y, *kept = C.batch_norm_(
        x, mean, var, scale, bias, flags["is_test"], 0.9, 1e-5, "NCHW", flags["use_global_stats"], flags["trainable_statistics"]
    )
    build.role(0)
    C.batch_norm_grad(x, scale, bias, *kept, C.exp(y), 0.9, 1e-5, "NCHW", *flags.values())
    build.role(1)


@pytest.mark.parametrize(
    ("attrs", "unread", "views"),
    [
        ({}, (3, 4), ()),
        ({"use_global_stats": True}, (), ((1, 1), (2, 2))),
        ({"is_test": True}, (), ((1, 1), (2, 2))),
        ({"is_test": True, "trainable_statistics": True}, (), ()),
    ],
)
def test_running_statistics_are_touched_as_the_kernels_do(attrs: Any, unread: Any, views: Any) -> None:
    """Backward of a training step leaves them unread, forward with global ones unwritten; Paddle declares both always."""
    program = captured_of(lambda build: with_batch_norm(build, **attrs)).program
    verify(program)
    assert op_named(program, "batch_norm").inplace == ((1, 1), (2, 2))
    assert op_named(program, "batch_norm").views == views
    assert op_named(program, "batch_norm_grad").no_buffer == unread


def test_a_result_written_into_a_buffer_lasts_in_every_job() -> None:
    """Paddle marks the buffer as persistable and not what is written into it: a job that reads that would free the buffer."""
    captured = captured_of(with_batch_norm)
    ops = [op for op in captured.program.ops if op.name != "pd_op.data"]
    jobs = tuple(Job(role, role, 0, tuple((op.id, 0) for op in ops if op.role == role)) for role in ("forward", "backward"))
    lowered = lower(captured, msgspec.structs.replace(captured.program, jobs=jobs), CpuDevice(paddle.CPUPlace()))
    read = lowered.jobs[2].program.global_block().kwargs()
    assert {name for name, given in read.items() if given.persistable} == {"scale", "bias", "mean", "var"}


def test_vectors() -> None:
    """Odd programs. Split by a kernel, taken apart, put together; types of the tensors are kept."""

    def write(build: Build) -> None:
        C.concat(C.split_with_num(build.data("x", [2, 4]), 2, 1), 1)

    program = captured_of(write).program
    verify(program)
    half = TensorType((2, 2), "float32")
    for kind in ("split_with_num", "combine"):
        made = value(program, op_named(program, kind).results[0])
        assert (made.dtype, made.shape, made.elements, made.size_bytes) == ("vector", (), (half, half), 32)
    assert [value(program, v).shape for v in op_named(program, "split").results] == [(2, 2), (2, 2)]


def test_dynamic_dims_have_no_size() -> None:
    """Odd programs."""
    program = captured_of(lambda build: C.exp(build.data("x", [-1, 4]))).program
    verify(program)
    result = value(program, op_named(program, "exp").results[0])
    assert (result.shape, result.size_bytes) == ((-1, 4), -1)


def test_absent_operands_and_null_results() -> None:
    """Odd programs. layer_norm without scale and bias; a gradient that nobody asked for."""

    def write(build: Build) -> None:
        x = build.data("x", [4, 4])
        C.layer_norm(x, None, None, 1e-5, 1)
        unwanted, _ = C.matmul_grad(x, x, x, False, False)
        unwanted.set_type(paddle.base.libpaddle.pir.fake_value().type())

    program = captured_of(write).program
    verify(program)
    norm, grad = op_named(program, "layer_norm"), op_named(program, "matmul_grad")
    assert norm.operands == (norm.operands[0], ABSENT, ABSENT)
    assert [value(program, v).dtype for v in grad.results] == ["null", "float32"]
    assert value(program, grad.results[0]).size_bytes == 0
    assert parse(show(program)) == program


def test_operations_without_a_role_take_their_neighbours() -> None:
    """Odd programs. Of the right one, at the end of the left one."""
    assert complete_roles([-1, 0, -1, 1, -1, 2, -1]) == ["forward", "forward", "backward", "backward", "optimize", "optimize", "optimize"]
    assert complete_roles([-1, -1]) == ["forward", "forward"]
    assert complete_roles([]) == []

    def write(build: Build) -> None:
        x = C.exp(build.data("x", [2]))
        build.role(0)
        y = C.tanh(x)
        z = C.relu(y)
        z.get_defining_op().op_role = 1

    program = captured_of(write).program
    assert op_named(program, "tanh").role == "backward"
    assert program.refusals == ()
    (why,) = captured_of(write, Pipeline(num_stages=2, num_micro_batches=2, num_chunks=2, schedule="VPP")).program.refusals
    assert re.fullmatch(r"Paddle's VPP refuses \d operations without a role, such as pd_op.\w+; 1F1B completes roles", why)
    assert parse(show(refused := msgspec.structs.replace(program, refusals=(why,)))) == refused


def test_forward_that_reads_backward_is_refused() -> None:
    """Odd programs. Both operations named."""

    def write(build: Build) -> None:
        x = C.exp(build.data("x", [2]))
        build.role(1)
        C.tanh(x)
        build.role(0)

    with pytest.raises(ProgramError, match=r"op #2 pd_op.tanh of forward reads what op #1 pd_op.exp of backward gives"):
        captured_of(write)


def test_a_group_that_paddle_does_not_know_is_refused() -> None:
    """Odd programs."""
    with pytest.raises(ProgramError, match="communication group 98765 is used by an operation but Paddle knows no ranks"):
        captured_of(lambda build: C.all_reduce(build.data("x", [2]), 98765, 0))


def with_branch(build: Build) -> None:
    """A conditional that reads values from around it."""
    x = build.data("x", [2, 4])
    outer = C.exp(x)
    flag = C.less_than(C.full([1], 1.0, paddle.float32, paddle.CPUPlace()), C.full([1], 2.0, paddle.float32, paddle.CPUPlace()))
    result = paddle.static.nn.cond(flag, lambda: C.tanh(outer), lambda: C.add(outer, outer))
    C.set_persistable_value(C.relu(result), "y")
    build.role(0)


def test_an_operation_with_regions_is_moved_whole_and_reads_what_its_blocks_read() -> None:
    """Odd programs. What a nested block reads from outside is an operand of the operation, for order, liveness and lowering."""
    captured = captured_of(with_branch)
    program = captured.program
    verify(program)
    branch = op_named(program, "if")
    assert branch.num_blocks == 2
    assert len(branch.operands) == 2
    assert op_named(program, "exp").results[0] in branch.operands


def with_gradient_of_branch(build: Build) -> None:
    """A conditional whose blocks leave what their gradients need on a stack."""
    x = build.data("x", [2, 4])
    x.stop_gradient = False
    result = paddle.static.nn.cond(C.mean(x, [], False) > 0, lambda: C.tanh(x), lambda: C.exp(x))
    loss = C.mean(result, [], False)
    build.role(0)
    C.set_persistable_value(paddle.static.gradients([loss], [x])[0], "dx")
    for op in build.main.global_block().ops:
        op.op_role = 0 if op.name() == "cf.stack_create" else op.op_role
    build.role(1)


def test_stacks_of_control_flow_cross_jobs() -> None:
    """Odd programs. Differentiable control flow: pushes come before pops, and the stack goes from job to job under a name."""
    captured = captured_of(with_gradient_of_branch)
    program = captured.program
    verify(program)
    assert parse(show(program)) == program
    stack = op_named(program, "stack_create").results
    assert {value(program, v).dtype for v in stack} == {"stack"}
    assert len({value(program, v).storage for v in stack}) == 1
    push, pop = (op for op in program.ops if op.kind == "if")
    assert (push.role, pop.role) == ("forward", "backward")
    inner = [op for op in program.ops if op.name not in ("pd_op.data", "builtin.shadow_output")]
    after = dependencies(Graph(program), inner)
    assert push.id in after[pop.id]
    jobs = tuple(Job(role, role, 0, tuple((op.id, 0) for op in inner if op.role == role)) for role in ("forward", "backward"))
    lowered = lower(captured, msgspec.structs.replace(program, jobs=jobs), CpuDevice(paddle.CPUPlace()))
    kinds = {str(given.type()) for given in lowered.jobs[2].program.global_block().kwargs().values()}
    assert "cf.outlet" in kinds


def test_values_of_other_types_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd programs. With the operation named, and what to do; here as if stacks were unknown."""
    monkeypatch.setattr("interlace.bridge.capture.STACK_TYPES", frozenset())
    with pytest.raises(ProgramError, match=r"op cf.stack_create gives a value of type cf.stack; expected tensors, .*set enable: false"):
        captured_of(with_gradient_of_branch)


def test_an_operation_with_regions_is_lowered_whole_in_one_job() -> None:
    """Odd programs. Its clone reads the job's own values, not the captured program's."""
    captured = captured_of(with_branch)
    inner = [op.id for op in captured.program.ops if op.name not in ("pd_op.data", "builtin.shadow_output")]
    jobs = (Job("all", "forward", 0, tuple((op, 0) for op in inner)),)
    lowered = lower(captured, msgspec.structs.replace(captured.program, jobs=jobs), CpuDevice(paddle.CPUPlace()))
    block = lowered.jobs[1].program.global_block()
    mine = {op.id() for op in block.ops}
    (branch,) = [op for op in block.ops if op.name() == "pd_op.if"]
    read = [v for each in branch.blocks() for op in each.ops for v in op.operands_source()]
    outer = [v for v in read if v.get_defining_op().name() == "pd_op.exp"]
    assert outer
    assert all(v.get_defining_op().id() in mine for v in outer)


@pytest.mark.parametrize(
    ("inside", "words"),
    [
        (lambda x: C.all_reduce(x, 12, 0), "pd_op.all_reduce communicates"),
        (lambda x: C.gaussian([2, 4], 0.0, 1.0, 0, paddle.float32, paddle.CPUPlace()), "pd_op.gaussian draws random numbers"),
        (
            lambda x: C.uniform_random_batch_size_like(x, [2, 4], 0, 0, -1.0, 1.0, 0, 0, 0, 1.0, paddle.float32),
            "pd_op.uniform_random_batch_size_like draws random numbers",
        ),
        (lambda x: C.relu_(x), "pd_op.relu_ writes a value of the block around it"),
        (lambda x: C.relu_(C.view_shape(x, [2, 4])), "pd_op.relu_ writes a value of the block around it"),
        (
            lambda x: C.relu_(paddle.static.nn.cond(C.any(x > 0, [], False), lambda: x, lambda: C.exp(x))),
            "pd_op.relu_ writes a value of .*",
        ),
    ],
)
def test_what_nobody_would_see_in_a_nested_block_is_refused(inside: Any, words: str) -> None:
    """Odd programs. With both operations named."""

    def write(build: Build) -> None:
        x = C.exp(build.data("x", [2, 4]))
        flag = C.less_than(C.mean(x, [], False), C.max(x, [], False))
        paddle.static.nn.cond(flag, lambda: inside(x), lambda: C.tanh(x))

    with pytest.raises(ProgramError, match=rf"op #\d+ pd_op.if has a nested block in which {words}; it cannot be captured"):
        captured_of(write)


def test_what_a_branch_hands_on_may_be_its_result() -> None:
    """Odd programs. Also through a view; and what it prints orders it among whatever acts."""

    def write(build: Build) -> None:
        x, y = C.exp(build.data("x", [2, 4])), C.tanh(build.data("y", [2, 4]))
        flag = C.less_than(C.mean(x, [], False), C.max(y, [], False))

        def other() -> Any:
            paddle.static.Print(y)
            return C.view_shape(y, [2, 4])

        C.relu(paddle.static.nn.cond(flag, lambda: x, other))
        paddle.static.nn.cond(flag, lambda: C.exp(x), lambda: C.exp(y))
        build.role(0)

    program = captured_of(write).program
    verify(program)
    assert parse(show(program)) == program
    first, second = (op for op in program.ops if op.kind == "if")
    handed_on = {first.operands.index(op_named(program, kind).results[0]) for kind in ("exp", "tanh")}
    assert set(first.views) == {(0, k) for k in handed_on}
    assert first.inplace == ()
    assert is_ordered(first)
    assert second.views == second.inplace == ()
    assert not is_ordered(second)


def test_a_loop_starts_in_the_memory_of_its_variables() -> None:
    """Odd programs. One that its block counts up in place is written, another one may be the result as it is."""

    def write(build: Build) -> None:
        x = C.exp(build.data("x", [2, 4]))
        number = C.full([1], 0, paddle.int64, paddle.CPUPlace())

        def body(k: Any, kept: Any) -> list[Any]:
            return [C.increment_(k, 1.0), C.tanh(kept)]

        paddle.static.nn.while_loop(lambda k, kept: C.less_than(k, C.full([1], 3, paddle.int64, paddle.CPUPlace())), body, [number, x])
        build.role(0)

    program = captured_of(write).program
    verify(program)
    loop = op_named(program, "while")
    number, x = (loop.operands.index(op_named(program, kind).results[0]) for kind in ("full", "exp"))
    assert loop.inplace == ((number - 1, number),)
    assert loop.views == ((x - 1, x),)
    assert written_operands(loop) == {loop.operands[0], loop.operands[number]}


@pytest.mark.parametrize(
    "make", [lambda x: C.npu_identity(x, -1), lambda x: C.view_shape(x, [8]), lambda x: C.index_select_strided(x, 0, 0)]
)
def test_views_are_those_of_the_kernels(make: Any) -> None:
    """Aliases. Whatever gives its operand's memory without declaring it."""

    def write(build: Build) -> None:
        C.exp(make(C.tanh(build.data("x", [2, 4]))))
        build.role(0)

    program = captured_of(write).program
    view = program.ops[-2]
    assert view.views == ((0, 0),)
    assert value(program, view.results[0]).storage == view.operands[0]


def test_attributes_are_plain_data() -> None:
    """Text and dumps. Dtypes as words, infinities as text: JSON has neither."""
    assert plain(paddle.base.core.DataType.BFLOAT16) == "bfloat16"
    assert plain([1, (2.5, float("inf"))]) == [1, [2.5, "inf"]]
    assert plain(paddle.CPUPlace()) == "Place(cpu)"
    assert type_name("DataType.FLOAT8_E4M3FN") == "float8_e4m3fn"


def test_an_attribute_that_paddle_cannot_give_stays_opaque_and_is_lowered_as_it_is() -> None:
    """An array with a null in it, as sharding with tensor fusion makes: `attrs()` fails on the whole operation."""

    def write(build: Build) -> None:
        tensors = [build.data(name, [4, 8]) for name in "xy"]
        _, fused = C.coalesce_tensor_(tensors, paddle.float32, True, False, False, 0.0, True, -1, -1, [], [])
        fused.persistable = True
        C.set_persistable_value(C.scale(fused, 2.0, 0.0, True), "out")
        with pytest.raises(NotImplementedError):
            fused.get_defining_op().attrs()
        assert attributes(fused.get_defining_op())["persistable"] == OPAQUE
        build.role(0)

    captured = captured_of(write)
    found = op_named(captured.program, "coalesce_tensor")
    assert (found.attrs["copy_data"], found.attrs["align_size"]) == (True, -1)
    assert [value(captured.program, v).persistable for v in found.results] == [False, True]
    items = tuple((op.id, 0) for op in captured.program.ops)
    program = msgspec.structs.replace(captured.program, jobs=(Job("all", "forward", 0, items),))
    lowered = lower(captured, program, CpuDevice(paddle.CPUPlace()))
    again = [op for op in lowered.ir_program("all").global_block().ops if op.name() == "pd_op.coalesce_tensor_"]
    assert [attributes(op)["persistable"] for op in again] == [OPAQUE]


@pytest.mark.parametrize(
    ("buffer", "known", "told"),
    [
        ("fused@-x-y", {"x", "x-y"}, ["x-y"]),
        ("fused@-a-x-y-b.w", {"a", "x", "x-y", "b.w", "w"}, ["a", "x-y", "b.w"]),
        ("fused@-a-gone-b", {"a", "b"}, ["a", "gone", "b"]),
        ("fused@-x-y", {"x", "y"}, ["x", "y"]),
    ],
)
def test_a_fused_buffer_holds_the_parameters_of_its_name(buffer: str, known: set[str], told: list[str]) -> None:
    """`x` is not in the buffer of `x-y`."""
    assert fused_parameters(buffer, known) == told


def test_a_fused_buffer_whose_name_reads_two_ways_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"fused@-x-y' may contain .* or .* without hyphens"):
        fused_parameters("fused@-x-y", {"x", "y", "x-y"})


def test_parts_of_a_fused_buffer_share_its_memory() -> None:
    """Names say what the start-up program made a view; `share_var` that a result lies in another value's variable."""

    def write(build: Build) -> None:
        block = build.main.global_block()
        for name in ("fused@-a-b.w", "shard@fused@-a-b.w"):
            block.add_kwarg(name, build.data("like", [64], persistable=True).type()).persistable = True
        for name in ("a", "slice@a", "b.w", "w"):
            build.data(name, [8], persistable=True)
        gathered = C.all_gather(block.kwargs()["shard@fused@-a-b.w"], new_process_group([0, 1]).id, 2)
        C.share_var([block.kwargs()["fused@-a-b.w"], gathered])
        C.view_slice(gathered, 0, 4)
        build.role(0)

    program = captured_of(write).program
    verify(program)
    buffer = next(each.storage for each in program.values if each.name == "fused@-a-b.w")
    inside = {each.name for each in program.values if each.storage == buffer and each.name}
    assert inside == {"fused@-a-b.w", "shard@fused@-a-b.w", "a", "slice@a", "b.w"}
    for kind in ("all_gather", "view_slice"):
        assert value(program, op_named(program, kind).results[0]).storage == buffer
    assert op_named(program, "view_slice").views == ((0, 0),)
