"""Rewriting of communication in Paddle programs, on a world of one rank in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from interlace.cpu.transport import Pending, Transport
from interlace.errors import ProgramError

pytestmark = pytest.mark.paddle


@pytest.fixture(scope="module")
def paddle() -> Iterator[Any]:
    """Paddle in static mode with a transport of one rank, and group 77 of that rank."""
    import paddle
    from paddle.distributed.auto_parallel.static import process_group

    from interlace.cpu import ops

    process_group.new_process_group([0], group_id=77, force_new_group=True)
    flag = "FLAGS_new_executor_sequential_run"  # as in a rank: a view and what it views have no edge in the program
    before = paddle.get_flags(flag)
    paddle.set_flags({flag: True})
    paddle.enable_static()
    with tempfile.TemporaryDirectory() as run_dir, Transport(0, 1, run_dir) as transport:
        ops.set_transport(transport)
        yield paddle
        ops.set_transport(None)
    paddle.disable_static()
    paddle.set_flags(before)
    process_group.remove_process_group(77)


def names(program: Any) -> list[str]:
    return [op.name().rpartition(".")[2].rsplit("_-", 1)[0].rstrip("0123456789_") for op in program.global_block().ops]


def run(paddle: Any, program: Any, fetches: list[Any], **feed: Any) -> list[Any]:
    return list(paddle.static.Executor().run(program, feed=feed, fetch_list=fetches))


def rewrite(program: Any, job: str = "forward") -> dict[str, int]:
    from interlace.cpu.ops import rewrite_program

    return rewrite_program(program, job)


def test_starts_in_its_place_and_waits_at_the_first_reader(paddle: Any) -> None:
    program = paddle.static.Program()
    with paddle.static.program_guard(program):
        x = paddle.static.data("x", [2, 3], "float32")
        reduced = paddle._C_ops.all_reduce(x, 77, 0)
        op = reduced.get_defining_op()
        op.op_role, op.chunk_id = 1, 2
        op.set_str_attr("interlace_at", "micro-batch 3")
        other = paddle.exp(x)
        total = other + reduced
    assert rewrite(program) == {"all_reduce": 1}
    ops = program.global_block().ops
    assert names(program) == ["data", "interlace_all_reduce_start", "exp", "interlace_all_reduce_finish", "add"]
    for made in (ops[1], ops[3]):
        assert (made.op_role, made.chunk_id, made.str_attr("interlace_at")) == (1, 2, "micro-batch 3")
    x_value = np.ones((2, 3), np.float32)
    assert np.allclose(run(paddle, program, [total], x=x_value)[0], np.e + 1)


def test_one_op_where_the_reader_comes_next(paddle: Any) -> None:
    program = paddle.static.Program()
    with paddle.static.program_guard(program):
        x = paddle.static.data("x", [-1, 3], "float16")
        result = paddle._C_ops.all_gather(x, 77, 1).astype("float32")
    rewrite(program)
    assert names(program) == ["data", "interlace_all_gather", "cast"]
    value = np.full((4, 3), 1.5, np.float16)
    assert np.array_equal(run(paddle, program, [result], x=value)[0], value.astype(np.float32))


def test_bfloat16_travels_as_its_bits(paddle: Any) -> None:
    from interlace.cpu.ops import to_tensor, transport, type_name

    paddle.disable_static()
    tensor = paddle.to_tensor([1.5, -2.0]).astype("bfloat16")
    name = type_name(tensor.dtype)
    back = to_tensor(transport().all_gather(tensor.numpy(), 77, (0,), dtype=name)[0], name)
    values = back.astype("float32").numpy().tolist()
    paddle.enable_static()
    assert (name, type_name(back.dtype), values) == ("bfloat16", "bfloat16", [1.5, -2.0])


@pytest.mark.parametrize("shape", [[], [0, 3], [4]])
def test_every_collective_over_one_rank(paddle: Any, shape: list[int]) -> None:
    """0-d and empty values too; group order and roots come from the group."""
    program, c_ops = paddle.static.Program(), paddle._C_ops
    with paddle.static.program_guard(program):
        x = paddle.full(shape, 2.0, "float32")
        results = [c_ops.all_reduce(x, 77, kind) for kind in range(5)]
        results += [c_ops.broadcast(x, 77, 0), c_ops.reduce(x, 77, 0, 0), c_ops.mp_allreduce_sum(x, 77, True)]
        results += [c_ops.c_allreduce_sum(x, 77, True, True), c_ops.c_identity(x, 77, True, True)]
        if shape:
            results += [c_ops.reduce_scatter(x, 77, 1), c_ops.all_to_all(x, 77), c_ops.c_concat(x, 0, 1, 77, True, True)]
        ends = [paddle.scale(result, 3.0) for result in results]
    counts = rewrite(program)
    assert counts["all_reduce"] == 5
    for value in run(paddle, program, ends):
        assert np.array_equal(value, np.full(shape, 6.0, np.float32))


def test_send_reaches_receive(paddle: Any) -> None:
    program = paddle.static.Program()
    with paddle.static.program_guard(program):
        x = paddle.static.data("x", [2], "int64")
        received = paddle._C_ops.recv_v2([2], paddle.int64, 0, 77, True, False)
        paddle._C_ops.send_v2(x, 77, 0, True, False)
        result = received + 1
    assert rewrite(program) == {"recv_v2": 1, "send_v2": 1}
    assert run(paddle, program, [result], x=np.array([4, 5]))[0].tolist() == [5, 6]


@pytest.fixture
def adds_ten(paddle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every all_reduce adds ten, so that its result can be told from its operand."""
    from interlace.cpu import ops

    def add(transport: Transport, array: Any, *rest: Any) -> Pending:
        return Pending(lambda: array + 10)

    monkeypatch.setitem(ops.STARTERS, "all_reduce", lambda site: add)


@pytest.mark.usefixtures("adds_ten")
def test_in_place_result_lands_in_the_operands_buffer(paddle: Any) -> None:
    """Readers of the operand see it too, as the optimizer reads gradient buffers."""
    program = paddle.static.Program()
    with paddle.static.program_guard(program):
        buffer = paddle.static.data("x", [3], "float32") * 1.0
        paddle._C_ops.all_reduce_(buffer, 77, 0)
        end = paddle.exp(buffer)
    rewrite(program)
    assert names(program)[-3:] == ["interlace_all_reduce", "assign_out", "exp"]
    assert np.allclose(run(paddle, program, [end], x=np.zeros(3, np.float32))[0], np.exp(10.0))


@pytest.mark.usefixtures("adds_ten")
def test_result_lands_in_the_buffer_it_shares(paddle: Any) -> None:
    """Fused sharding: `share_var(target, result)`, and other values are views of the target."""
    program = paddle.static.Program()
    with paddle.static.program_guard(program):
        target = paddle.static.data("x", [4], "float32") * 1.0
        view = paddle._C_ops.view_slice(target, 1, 3)
        result = paddle._C_ops.all_reduce(paddle.ones([4]), 77, 0)
        paddle._C_ops.share_var([target, result])
        end = paddle.exp(view)
    rewrite(program)
    assert "share_var" not in names(program)
    assert np.allclose(run(paddle, program, [end], x=np.zeros(4, np.float32))[0], np.exp([11.0, 11.0]))


def test_parallel_cross_entropy_equals_the_plain_one(paddle: Any) -> None:
    program = paddle.static.Program()
    with paddle.static.program_guard(program):
        logits = paddle.static.data("logits", [4, 8], "float32")
        logits.stop_gradient = False
        label = paddle.static.data("label", [4, 1], "int64")
        _, loss = paddle._C_ops.c_softmax_with_cross_entropy(logits, label, -100, 77, 0, 1)
        plain = paddle.nn.functional.cross_entropy(logits, label, reduction="none")
        grads = [paddle.static.gradients(each.mean(), logits)[0] for each in (loss, plain)]
        fetches = [paddle.scale(value, 1.0) for value in (loss, plain, *grads)]
    rewrite(program)
    feed = {"logits": np.random.default_rng(0).standard_normal((4, 8)).astype("float32")}
    ours, theirs, our_grad, their_grad = run(paddle, program, fetches, label=np.array([[0], [3], [-100], [7]]), **feed)
    assert np.allclose(ours, theirs, rtol=1e-6)
    assert np.allclose(our_grad, their_grad, atol=1e-7)


def test_unknown_communication_is_refused(paddle: Any) -> None:
    program = paddle.static.Program()
    with paddle.static.program_guard(program):
        x = paddle.static.data("x", [2], "float32")
        paddle.scale(x, 2.0).get_defining_op().set_int_attr("ring_id", 77)
    with pytest.raises(ProgramError, match=r"job forward, op 2 pd_op.scale communicates, and CPU processes cannot"):
        rewrite(program)


def test_unknown_group_is_refused(paddle: Any) -> None:
    program = paddle.static.Program()
    with paddle.static.program_guard(program):
        paddle._C_ops.all_reduce(paddle.static.data("x", [2], "float32"), 555, 0)
    with pytest.raises(ProgramError, match=r"op 1 pd_op.all_reduce: group 555 is unknown to Paddle; known groups: \[0,"):
        rewrite(program, "backward")


def test_failure_of_a_communication_is_kept(paddle: Any) -> None:
    """Paddle gives a SystemError without the cause; the cause stays readable."""
    from interlace.cpu import ops

    program = paddle.static.Program()
    with paddle.static.program_guard(program):
        x = paddle.static.data("x", [2], "bool")
        result = paddle._C_ops.all_reduce(x, 77, 4)
    rewrite(program)
    with pytest.raises(SystemError):
        run(paddle, program, [result], x=np.array([True, False]))
    assert "cannot reduce bool values by 'avg'" in str(ops.first_failure())
    ops._WORLD.failure = None
