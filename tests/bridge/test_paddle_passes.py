"""The second door: `new_pass("interlace_...")` on plain programs, run on the CPU; every bit as without it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

from paddle.distributed.auto_parallel.static.process_group import new_process_group  # noqa: E402
from paddle.distributed.passes import PassContext, new_pass  # noqa: E402

import interlace  # noqa: E402, F401
from interlace.bridge.capture import capture  # noqa: E402
from interlace.bridge.rewrite import write_back  # noqa: E402
from interlace.bridge.roles import require_sums  # noqa: E402
from interlace.bridge.targets.cpu import CpuDevice  # noqa: E402
from interlace.cpu import ops as cpu_ops  # noqa: E402
from interlace.cpu.transport import Pending  # noqa: E402
from interlace.errors import ConfigError, InterlaceError, PlanError, ProgramError  # noqa: E402
from interlace.ir import parse  # noqa: E402
from interlace.ir.kinds import is_copy  # noqa: E402
from interlace.local.build_rank import LonelyTransport  # noqa: E402
from tests.bridge.small import ACCUMULATE, small_program  # noqa: E402

pytestmark = pytest.mark.paddle
C = paddle._C_ops
NAMES = ("split_backward", "overlap_column_backward", "schedule_1f1b", "offload_activations")
MOVES_ALL = {"fraction": 1.0, "min_bytes": 0}
X = np.arange(32, dtype=np.float32).reshape(4, 8) / 7 - 2
Made = tuple[Any, Any, Any, list[Any]]


def sgd(parameters: Any) -> Any:
    return paddle.optimizer.SGD(0.1, parameters=parameters)


def adamw(parameters: Any) -> Any:
    clip = paddle.nn.ClipGradByGlobalNorm(0.5)
    return paddle.optimizer.AdamW(0.01, parameters=parameters, grad_clip=clip)


def mlp(optimizer: Any = sgd, depth: int = 1) -> Made:
    """A plain program as a user of `paddle.static` writes it: no operation has a role; `depth` layers, and the last."""
    paddle.enable_static()
    paddle.seed(3)
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.utils.unique_name.guard(), paddle.static.program_guard(main, startup):
        x = paddle.static.data("x", [4, 8], "float32")
        layers = [paddle.nn.Linear(16 if k else 8, 16) for k in range(depth)]
        last = paddle.nn.Linear(16, 4)
        h = x
        for layer in layers:
            h = paddle.nn.functional.gelu(layer(h))
        loss = last(h).mean()
        parameters = [each for layer in (*layers, last) for each in layer.parameters()]
        optimizer(parameters).minimize(loss)
    return main, startup, loss, [p.name for p in parameters]


def column_parallel(number: int, ring: int) -> Made:
    """Two column-parallel products with all_reduce of dX, made by hand with roles as auto-parallel has them where `number` is 1."""
    paddle.enable_static()
    paddle.seed(5)
    main, startup = paddle.static.Program(), paddle.static.Program()
    guard = paddle.base.framework.pir_op_role_guard
    with paddle.utils.unique_name.guard(), paddle.static.program_guard(main, startup):
        x = paddle.static.data("x", [4, 8], "float32")
        first, second = paddle.nn.Linear(8, 8, bias_attr=False), paddle.nn.Linear(8, 8, bias_attr=False)
        with guard(0 if number else -1):
            h = C.matmul(x, first.weight, False, False)
            a = C.gelu(h, False)
            y = C.matmul(a, second.weight, False, False)
            loss = C.mean(y, [], False)
        with guard(1 if number else -1):
            dy = C.mean_grad(y, C.full([], 1.0, paddle.float32, paddle.CPUPlace()), [], False, True)
            da, dw2 = C.matmul_grad(a, second.weight, dy, False, False)
            da = C.all_reduce(da, ring, 0)
            dh = C.gelu_grad(h, da, False)
            _, dw1 = C.matmul_grad(x, first.weight, dh, False, False)
        with guard(2 if number else -1):
            rate = C.full([1], 0.1, paddle.float32, paddle.CPUPlace())
            for weight, grad in ((first.weight, dw1), (second.weight, dw2)):
                C.sgd_(weight, rate, grad, None, False)
    return main, startup, loss, [first.weight.name, second.weight.name]


def apply(made: Made, *names: str, context: Any = None, **attrs: Any) -> Any:
    """The context after passes of ours, one after the other."""
    context = context or PassContext()
    for name in names:
        new_pass(f"interlace_{name}", dict(attrs)).apply([made[0]], [made[1]], context)
    return context


def trained(made: Made, plan: Any = None, fetch: Any = None) -> list[bytes]:
    """Bits of the loss of three steps, and of every parameter behind them."""
    main, startup, loss, names = made
    executor, scope = paddle.static.Executor(paddle.CPUPlace()), paddle.static.Scope()
    with paddle.static.scope_guard(scope):
        executor.run(startup)
        if plan is not None:
            executor._set_plan(plan)
        losses = [executor.run(main, feed={"x": X * (k + 1)}, fetch_list=fetch or [loss])[0].tobytes() for k in range(3)]
        return losses + [np.asarray(scope.find_var(name).get_tensor()).tobytes() for name in names]


def kinds(program: Any) -> list[str]:
    return [op.name() for op in program.global_block().ops]


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("names", [("split_backward",), ("overlap_column_backward",), ("split_backward", "overlap_column_backward")])
def test_a_rewritten_plain_program_trains_to_the_same_bits(optimizer: Any, names: tuple[str, ...]) -> None:
    """Plain programs. No operation has a role before, none after."""
    expected = trained(mlp(optimizer))
    made = mlp(optimizer)
    context = apply(made, *names)
    assert [each.name for each in context.passes] == [f"interlace_{name}" for name in names]
    assert kinds(made[0]).count("pd_op.matmul_grad") + kinds(made[0]).count("pd_op.matmul") == 5  # of second, dX and dW apart
    assert {op.op_role for op in made[0].global_block().ops} == {-1}
    assert trained(made) == expected


class Alone(LonelyTransport):
    """One rank that hears its own data back."""

    def start_all_reduce(self, array: Any, *args: Any) -> Pending:
        kept = np.array(array)
        return Pending(lambda: kept)


@pytest.fixture
def pair(monkeypatch: Any) -> None:
    """A world of two ranks, of which this process is the first."""
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")


@pytest.fixture
def alone(pair: None) -> Any:
    """A transport of a rank without others."""
    before = cpu_ops._WORLD.transport
    cpu_ops.set_transport(Alone(0, 2))  # type: ignore[arg-type]
    yield
    cpu_ops.set_transport(before)


def _place(program: Any, op: Any) -> int:
    return int(next(k for k, each in enumerate(program.global_block().ops) if each.id() == op.id()))


def _giver_of_dw(program: Any) -> Any:
    """What gives the gradient of the second weight."""
    update = [op for op in program.global_block().ops if op.name() == "pd_op.sgd_"][1]
    return update.operand_source(2).get_defining_op()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("roles", [0, 1])
def test_overlap_moves_the_collective_and_changes_no_bit(roles: int) -> None:
    """Sites found, sinks of dW, equal losses through the second door, one pass or two; with roles and without any."""
    ring = new_process_group([0, 1]).id
    baseline = column_parallel(roles, ring)
    assert kinds(baseline[0]).index("pd_op.all_reduce") > _place(baseline[0], _giver_of_dw(baseline[0]))
    cpu_ops.rewrite_program(baseline[0], "baseline")
    expected = trained(baseline)
    for names in (("overlap_column_backward",), ("split_backward", "overlap_column_backward")):
        made = column_parallel(roles, ring)
        context = apply(made, *names, device="h200")
        assert "1 changed" in context.get_attr("interlace_overlap_column_backward").explain().split("overlap-column-backward")[1]
        reduced = next(op for op in made[0].global_block().ops if op.name() == "pd_op.all_reduce")
        assert _place(made[0], reduced) < _place(made[0], _giver_of_dw(made[0]))
        assert reduced.attrs()["execution_stream"] == "auto_parallel_mp"
        cpu_ops.rewrite_program(made[0], "ours")
        assert trained(made) == expected


OFFLOAD = {"interlace": {"offload_activations": MOVES_ALL}}


@pytest.mark.parametrize("attrs", [{}, OFFLOAD, {"schedule_mode": "none"}])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_a_plan_of_a_plain_program_trains_to_the_same_bits(optimizer: Any, attrs: dict[str, Any]) -> None:
    """Plain programs. Backward and updates stand in jobs of their own; the program stays as it was."""
    expected = trained(mlp(optimizer))
    made = mlp(optimizer)
    before = str(made[0])
    context = apply(made, "schedule_1f1b", fetch_list=[made[2]], **attrs)
    assert str(made[0]) == before
    plan = context.get_attr("interlace_schedule_1f1b").plan
    job_of = {op_id: job.kind for job in plan.jobs for op_id, _ in job.items}
    for op in plan.program.ops:
        if op.id in job_of and op.kind in ("matmul_grad", "sgd", "adamw"):
            assert job_of[op.id] == ("backward" if op.kind == "matmul_grad" else "optimizer")
    assert trained(made, context.get_attr("plan"), context.get_attr("fetch_list")) == expected


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_offload_alone_trains_a_plain_program_to_the_same_bits(optimizer: Any) -> None:
    """What forward saves leaves for the host and returns; jobs stand in Paddle's order, no gradient is split."""
    expected = trained(mlp(optimizer, 4))
    made = mlp(optimizer, 4)
    before = str(made[0])
    context = apply(made, "offload_activations", fetch_list=[made[2]], device="h200", **MOVES_ALL)
    assert str(made[0]) == before
    plan = context.get_attr("interlace_offload_activations").plan
    assert [job.kind for job in plan.jobs if job.items] == ["forward", "backward", "optimizer"]
    assert {"split-backward", "overlap-column-backward"}.isdisjoint(plan.program.passes)
    copies = [op for op in plan.program.ops if is_copy(op)]
    assert len(copies) > 10
    assert len(copies) % 2 == 0
    assert trained(made, context.get_attr("plan"), context.get_attr("fetch_list")) == expected


def test_forward_alone_runs_for_every_micro_batch() -> None:
    """Nothing runs once a step in a program without backward: one loss for each micro-batch, as of that part alone."""
    paddle.enable_static()
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.utils.unique_name.guard(), paddle.static.program_guard(main, startup):
        loss = C.mean(paddle.static.data("x", [2, 8], "float32"), [], False)
    context = apply((main, startup, loss, []), "schedule_1f1b", num_micro_batches=2, fetch_list=[loss])
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor._set_plan(context.get_attr("plan"))
    with paddle.static.scope_guard(paddle.static.Scope()):
        found = executor.run(main, feed={"x": X}, fetch_list=context.get_attr("fetch_list"))[0]
    baseline = paddle.static.Executor(paddle.CPUPlace())
    assert found.tolist() == [baseline.run(main, feed={"x": part}, fetch_list=[loss])[0].item() for part in (X[:2], X[2:])]


def test_a_gradient_that_is_only_kept_from_collection_is_no_sum() -> None:
    """Sharding over fused buffers marks gradients as persistable without a name: every micro-batch has its own."""
    text = """program rank=0 world=1 mode=train
pipeline stage=0 of 1 micro_batches=2 chunks=1 schedule=1F1B
#0 %0:float32[4]"x" = pd_op.data() forward
#1 %1:float32[4]!GIVEN = builtin.kwarg() forward
#2 %2:float32[4]~1!NAME = pd_op.add_(%1, %0) backward inplace=0:0
#3 %3:float32[4] = pd_op.sgd_(%2) optimize
"""
    require_sums(parse(text.replace("GIVEN", '"sum"').replace("NAME", "")), derived=False)
    with pytest.raises(ProgramError, match=r"reads %2, which .*add_.* makes anew for each of the 2 micro-batches"):
        require_sums(parse(text.replace("GIVEN", "").replace("NAME", "")), derived=False)


def test_what_cannot_be_told_is_refused() -> None:
    """Odd programs, interrupts. Several micro-batches without roles, gradients that nobody sums, updates in a wrong part."""
    for optimizer in (sgd, adamw):
        with pytest.raises(ProgramError, match=r"num_micro_batches is 2, and no operation of the program has a role.*num_micro_batches 1"):
            apply(mlp(optimizer), "schedule_1f1b", num_micro_batches=2)
    once = r"of the optimizer runs once a step and reads %\d+, which .*matmul_grad.* makes anew for each of the 2"
    with pytest.raises(ProgramError, match=once):
        apply(column_parallel(1, new_process_group([0, 1]).id), "schedule_1f1b", num_micro_batches=2)
    made = mlp()
    for op in made[0].global_block().ops:
        op.op_role = 0
    before = str(made[0])
    wrong = r"op #\d+ pd_op\.sgd_ updates a parameter, and its role is forward \(op_role 0\); expected optimize"
    for name in NAMES:
        with pytest.raises(ProgramError, match=wrong):
            apply(made, name, **(MOVES_ALL if name == "offload_activations" else {}))
    assert str(made[0]) == before
    made = mlp()
    made[0].global_block().ops[-1].op_role = 2
    with pytest.raises(ProgramError, match=r"op #\d+ pd_op\.mean_grad is a gradient, and its role is missing \(op_role -1; its neighbours"):
        apply(made, "split_backward")


def test_nothing_to_do_is_said(caplog: Any) -> None:
    """Sites reported. In the log, and in the plan."""
    paddle.enable_static()
    main = paddle.static.Program()
    with paddle.static.program_guard(main):
        C.mean(paddle.static.data("x", [2, 8], "float32"), [], False)
    with caplog.at_level("WARNING", logger="interlace"):
        apply((main, paddle.static.Program(), None, []), "split_backward")
        apply((main, paddle.static.Program(), None, []), "offload_activations", fraction=0.5)
    assert "interlace_split_backward changed nothing: found nothing to do" in caplog.text
    assert "interlace_offload_activations changed nothing: " in caplog.text


WRONG = [
    ("split_backward", {"foo": 1}, r"unknown attributes \['foo'\]; there are \['device', 'fold', 'force_paddle', 'modules'\]"),
    ("overlap_column_backward", {"min_bytes": "lots"}, "size 'lots': expected a number with B"),
    ("offload_activations", {}, "pass interlace_offload_activations: .*on, but nothing says what to move; choose modules"),
    ("offload_activations", {"interlace": {"offload_activations": "on"}}, "other passes only: offload_activations's are attributes"),
    ("split_backward", {"device": 7}, "attribute device: found 7, expected the name or path of a device profile"),
    ("split_backward", {"device": "abacus"}, "no device profile 'abacus'"),
    ("schedule_1f1b", {"num_micro_batches": 0}, "_1f1b': attribute num_micro_batches: found 0, expected a whole number, 1 or more"),
    ("schedule_1f1b", {"num_micro_batches": "4"}, "attribute num_micro_batches: found '4', expected a whole number"),
    ("schedule_1f1b", {"num_micro_batches": True}, "attribute num_micro_batches: found True, expected a whole number"),
    ("schedule_1f1b", {"pp_degree": 2, "pp_stage": 5}, "attribute pp_stage: found 5, expected a stage below pp_degree, which is 2"),
    ("schedule_1f1b", {"pp_stage": -1}, "attribute pp_stage: found -1, expected a whole number, 0 or more"),
    ("schedule_1f1b", {"vpp_degree": 2}, "attribute vpp_degree: found 2, expected 1, because schedule_mode is '1F1B'"),
    ("schedule_1f1b", {"schedule_mode": "Bogus"}, r"attribute schedule_mode: found 'Bogus', expected one of \['1F1B'"),
    ("schedule_1f1b", {"interlace": "x"}, "attribute interlace: found 'x', expected a table of options"),
    ("schedule_1f1b", {"interlace": {"bogus": 1}}, "bogus: unknown option 'bogus'"),
    ("schedule_1f1b", {"interlace": {"enable": False}}, "attribute interlace: found .* expected options of other passes only"),
    ("schedule_1f1b", {"fetch_list": "loss"}, "attribute fetch_list: found 'loss', expected a list of values"),
    ("schedule_1f1b", {"fetch_list": [7]}, "attribute fetch_list: .* not 7"),
]


@pytest.mark.parametrize(("name", "attrs", "words"), WRONG)
def test_wrong_attributes_are_refused(name: str, attrs: dict[str, Any], words: str) -> None:
    """Wrong options. Where, what was found, what was expected; the program and the context stay as they were."""
    made, context = mlp(), PassContext()
    before = str(made[0])
    with pytest.raises(ConfigError, match=words):
        apply(made, name, context=context, **attrs)
    assert (str(made[0]), context.passes, context._attrs) == (before, [], {})


@pytest.mark.parametrize("name", ["split_backward", "overlap_column_backward"])
@pytest.mark.parametrize("where", ["check", "build"])
def test_a_failure_leaves_the_program_as_it_was(monkeypatch: Any, name: str, where: str) -> None:
    """Interrupts. The checker refuses, or the last new operation cannot be built."""
    from interlace.bridge import newops, paddle_passes

    def fail(*args: Any) -> None:
        raise PlanError("planted")

    if where == "check":
        monkeypatch.setattr(paddle_passes, "require_safe", fail)
    else:
        built, build = [], newops.BUILDERS["pd_op.matmul"]
        monkeypatch.setitem(newops.BUILDERS, "pd_op.matmul", lambda *args: fail() if built else built.append(1) or build(*args))
    made, context = mlp(), PassContext()
    before = str(made[0])
    with pytest.raises(InterlaceError, match="planted"):
        apply(made, name, context=context)
    assert (str(made[0]), context.passes, context._attrs) == (before, [], {})


def test_the_plan_is_checked_before_it_is_lowered(monkeypatch: Any) -> None:
    """No deadlock. As in the engine; `check: off` leaves it out."""
    from interlace.bridge import paddle_passes

    seen: list[Any] = []
    monkeypatch.setattr(paddle_passes, "require_safe", lambda programs, target: seen.append((len(programs), target.name)))
    made = mlp()
    apply(made, "schedule_1f1b")
    apply(made, "schedule_1f1b", interlace={"check": "off"})
    assert seen == [(1, "cpu")]


@pytest.mark.usefixtures("pair")
def test_roles_given_by_auto_parallel_are_kept() -> None:
    """New operations of a rewrite carry the role of their part."""
    made = small_program()
    before = {op.op_role for op in made.global_block().ops}
    apply((made, paddle.static.Program(), None, []), "split_backward")
    assert {op.op_role for op in made.global_block().ops} == before == {0, 1, 2}


def test_an_operation_with_blocks_keeps_what_they_read() -> None:
    """Values that only its blocks read are operands in the captured program, and none of Paddle's operation."""
    paddle.enable_static()
    main = paddle.static.Program()
    with paddle.static.program_guard(main):
        x = paddle.static.data("x", [2, 4], "float32")
        y = paddle.static.nn.cond(paddle.any(x > 0), lambda: paddle.exp(x), lambda: paddle.tanh(x))
        loss = C.mean(y, [], False)
    captured = capture(main, ACCUMULATE)
    (branch,) = (op for op in captured.program.ops if op.kind == "if")
    assert len(branch.operands) > 1
    before = str(main)
    write_back(captured, captured.program, CpuDevice(paddle.CPUPlace()), roles=False)
    assert str(main) == before
    found = paddle.static.Executor(paddle.CPUPlace()).run(main, feed={"x": np.ones((2, 4), "float32")}, fetch_list=[loss])
    assert np.allclose(found[0], np.e)
