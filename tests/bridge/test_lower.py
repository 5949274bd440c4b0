"""The lowering's own housekeeping."""

from __future__ import annotations

import threading
import traceback

import msgspec
import pytest

paddle = pytest.importorskip("paddle")

from paddle.distributed.auto_parallel.static.process_group import new_process_group  # noqa: E402

from interlace.bridge.capture import capture  # noqa: E402
from interlace.bridge.lower import COLLECT_JOB, STACK_JOB, JobProgram, _EventTable, _Lowering, _short_stacks, lower  # noqa: E402
from interlace.bridge.targets.cpu import CpuDevice  # noqa: E402
from interlace.bridge.targets.gpu import GpuDevice  # noqa: E402
from interlace.ir import ABSENT, Event  # noqa: E402
from interlace.ir.kinds import COMBINE  # noqa: E402
from interlace.passes.insert_events import fetching  # noqa: E402
from tests.bridge.small import ACCUMULATE, Build, C, captured_small, planned  # noqa: E402

pytestmark = pytest.mark.paddle


def names() -> list[str]:
    return [frame.name for frame in traceback.extract_stack()]


def output_names(made: JobProgram) -> list[str]:
    """Names that a job gives to its values."""
    ops = made.program.global_block().ops
    return [op.attrs()["output_name"] for op in ops if op.name() == "builtin.shadow_output"]


def test_one_thread_lowers_at_a_time() -> None:
    """Paddle's insertion point exists once in a process."""
    begun, lowers = threading.Event(), threading.Event()

    def other() -> None:
        begun.set()
        with _short_stacks():
            lowers.set()

    thread = threading.Thread(target=other)
    with _short_stacks():
        thread.start()
        assert begun.wait(60)
        assert not lowers.wait(0.1)
    thread.join()
    assert lowers.is_set()


def test_stacks_are_short_in_the_lowering_thread_only() -> None:
    other: list[list[str]] = []
    with _short_stacks(), _short_stacks():
        assert names() == ["names"]
        thread = threading.Thread(target=lambda: other.append(names()))
        thread.start()
        thread.join()
    assert len(other[0]) > 1


def test_stacks_are_whole_again_after_an_error() -> None:
    whole = traceback.extract_stack
    with pytest.raises(ZeroDivisionError), _short_stacks():
        raise ZeroDivisionError
    assert traceback.extract_stack is whole


def test_what_waits_for_any_input_waits_for_the_last_that_is_cut() -> None:
    """The job that cuts the batch records one event; others stay where they are recorded, and an op instance records one."""
    fed = [(0, 0), (0, 1), (1, 0), (1, 1)]
    table = _EventTable((Event("x", (0, 0), ((5, 0), (6, 0))), Event("y", (1, 1), ((6, 0),)), Event("z", (5, 0), ((6, 0), (1, 0)))), fed)
    assert table.records == {(1, 1): "x", (5, 0): "z"}
    assert table.waits == {(5, 0): ["x"], (6, 0): ["x", "x", "z"], (1, 0): ["z"]}


def test_what_a_job_reads_from_another_keeps_its_variable() -> None:
    """A value that is written in place into such a variable gets no name of its own: it has one. Each is declared once."""
    captured = captured_small()
    program = planned(captured)
    made = lower(captured, program, CpuDevice(paddle.CPUPlace()))
    for each in made.jobs[1:-1]:
        block = each.program.global_block()
        declared = set(block.kwargs())
        named = [op.attrs()["output_name"] for op in block.ops if op.name() == "builtin.shadow_output"]
        assert not declared & set(named)
        assert len(named) == len(set(named))
    backward = next(each for each in made.jobs if each.name.startswith("backward")).program.global_block()
    assert "g" in backward.kwargs()


@pytest.mark.parametrize("read", [("exp", "tanh"), ("tanh", "exp"), ("exp", "exp"), ("tanh", "tanh")])
def test_an_operation_that_read_one_value_twice_may_read_two(read: tuple[str, str]) -> None:
    """A plan may give its operands apart, such as what is kept and what is computed again."""
    build = Build()
    with paddle.static.program_guard(build.main):
        x = build.data("x", [2, 4])
        a, b = C.exp(x), C.tanh(x)
        loss = C.mean(C.add(C.add(a, a), b), [], False)
        C.set_persistable_value(loss, "loss")
        build.role(0)
    captured = capture(build.main, ACCUMULATE)
    program = planned(captured)
    given = {op.kind: op.results[0] for op in program.ops if op.kind in ("exp", "tanh")}
    first = next(op for op in program.ops if op.kind == "add")
    apart = msgspec.structs.replace(first, operands=tuple(given[kind] for kind in read))
    made = lower(captured, program.with_ops([apart if op is first else op for op in program.ops]), CpuDevice(paddle.CPUPlace()))
    for each in made.jobs[1:-1]:
        built = next(op for op in each.program.global_block().ops if op.name() == "pd_op.add")
        assert tuple(built.operand_source(k).get_defining_op().name() for k in (0, 1)) == tuple(f"pd_op.{kind}" for kind in read)


def test_every_value_that_is_fetched_is_stacked_beside_the_outputs() -> None:
    captured = captured_small()
    program = planned(captured)
    values = [op.results[0] for op in program.ops if op.kind in ("matmul", "gelu", "add")]
    made = lower(captured, fetching(program, values), CpuDevice(paddle.CPUPlace()))
    assert set(made.fetched) == set(values)
    assert set(made.outputs) == {"loss"}
    left = {name for each in made.jobs[:-1] for name in output_names(each)}
    assert left >= made.jobs[-1].reads - {"w", "g"}, "a value that only the user reads is left for the last job too"


def test_the_first_operation_of_a_program_is_a_captured_one_like_all_others() -> None:
    """A constant, which several jobs read: it keeps its role, its type is known, and no builder of new operations is asked for it."""
    build = Build()
    with paddle.static.program_guard(build.main):
        one = C.full([2, 4], 1.0, paddle.float32, paddle.base.core.Place())
        x = build.data("x", [2, 4])
        y = C.add(x, one)
        loss = C.mean(y, [], False)
        C.set_persistable_value(loss, "loss")
        build.role(0)
        C.add(one, C.exp(y))
        build.role(1)
    captured = capture(build.main, ACCUMULATE)
    program = planned(captured)
    first = program.ops[0]
    assert (first.kind, first.origin) == ("full", 0)
    made = lower(captured, program, CpuDevice(paddle.CPUPlace()))
    forward = next(each for each in made.jobs if each.name == "forward_0").program.global_block()
    assert [op.op_role for op in forward.ops if op.name() == "pd_op.full"] == [0]


@pytest.mark.parametrize("scalar_last", [False, True])
def test_the_event_of_the_inputs_is_recorded_once_all_are_cut(scalar_last: bool) -> None:
    """By the last operation of the first job that launches anything; an input without rows is there once for each micro-batch."""
    build = Build()
    with paddle.static.program_guard(build.main):
        shapes = {"x": [2, 4], "s": []} if scalar_last else {"s": [], "x": [2, 4]}
        inputs = {name: build.data(name, shape) for name, shape in shapes.items()}
        loss = C.mean(C.add(inputs["x"], inputs["s"]), [], False)
        C.set_persistable_value(loss, "loss")
        build.role(0)
    program = planned(capture(build.main, ACCUMULATE))
    first, reader = program.ops[0], next(op for op in program.ops if op.kind == "add")
    event = Event("fed", (first.id, 0), ((reader.id, 0),))
    made = lower(capture(build.main, ACCUMULATE), msgspec.structs.replace(program, events=(event,)), GpuDevice(paddle.CPUPlace()))
    ops = made.jobs[0].program.global_block().ops
    assert made.jobs[0].name == "interlace_feed"
    (recorder,) = [k for k, op in enumerate(ops) if op.attrs().get("event_to_record") == "fed"]
    assert ops[recorder].name() == ("pd_op.share_data" if scalar_last else "pd_op.split_with_num")
    assert {op.name() for op in ops[recorder + 1 :]} == {"builtin.shadow_output"} | (set() if scalar_last else {"builtin.split"})


@pytest.mark.parametrize("sends", [False, True])
def test_a_lowered_program_says_whether_stages_fix_the_sizes_of_values(sends: bool) -> None:
    build = Build()
    with paddle.static.program_guard(build.main):
        y = C.exp(build.data("x", [2, 4]))
        if sends:
            C.send_v2(y, new_process_group([0, 1]).id, 1, False, False)
        C.set_persistable_value(C.mean(y, [], False), "loss")
        build.role(0)
    captured = capture(build.main, ACCUMULATE)
    assert lower(captured, planned(captured), CpuDevice(paddle.CPUPlace())).has_p2p == sends


def test_blocks_inside_an_operation_are_lowered_with_it() -> None:
    build = Build()
    with paddle.static.program_guard(build.main):
        x = build.data("x", [2, 4])
        y = paddle.static.nn.cond(paddle.any(x > 0), lambda: paddle.exp(x), lambda: paddle.tanh(x))
        C.set_persistable_value(C.mean(y, [], False), "loss")
        build.role(0)
    captured = capture(build.main, ACCUMULATE)
    made = lower(captured, planned(captured), CpuDevice(paddle.CPUPlace()))
    (branch,) = [op for op in made.jobs[1].program.global_block().ops if op.name() == "pd_op.if"]
    assert [block.ops[0].name() for block in branch.blocks()] == ["pd_op.exp", "pd_op.tanh"]


def test_operands_behind_an_absent_one_are_the_jobs_own() -> None:
    build = Build()
    with paddle.static.program_guard(build.main):
        x, bias = build.data("x", [2, 4]), build.data("bias", [4], persistable=True)
        y = C.layer_norm(x, None, bias, 1e-5, 1)[0]
        C.set_persistable_value(C.mean(y, [], False), "loss")
        build.role(0)
    captured = capture(build.main, ACCUMULATE)
    made = lower(captured, planned(captured), CpuDevice(paddle.CPUPlace()))
    block = made.jobs[1].program.global_block()
    (norm,) = [op for op in block.ops if op.name() == "pd_op.layer_norm"]
    assert paddle.pir.is_fake_value(norm.operand_source(1))
    assert norm.operand_source(2).is_same(block.kwargs()["bias"])


def test_what_outlives_the_step_is_marked_in_every_job() -> None:
    captured = captured_small()
    for each in lower(captured, planned(captured), CpuDevice(paddle.CPUPlace())).jobs[1:-1]:
        values = each.program.global_block().kwargs()
        assert {name for name, value in values.items() if value.persistable} == {"w", "g"} & values.keys()


def test_the_engine_finds_jobs_by_name_and_the_loss_in_the_last_one() -> None:
    captured = captured_small()
    made = lower(captured, planned(captured), CpuDevice(paddle.CPUPlace()))
    names = [each.name for each in made.jobs]
    assert [job.type() for job in made.job_list()] == names
    assert sorted(made.job_types()) == sorted(names)
    assert [made.ir_program(name) is each.program for name, each in zip(names, made.jobs, strict=True)] == [True] * len(names)
    assert made.ir_program("forward") is made.ir_program("forward3") is made.jobs[-1].program
    assert made.micro_batch_num() == 1
    assert made.num_micro_batches == 3
    assert made.interlace_prepared
    assert [job.micro_batch_id() for job in made.job_list()] == [0] * len(names)


@pytest.mark.parametrize("fed", [False, True])
@pytest.mark.parametrize("fetched", [False, True])
def test_without_inputs_nothing_is_cut_and_without_outputs_nothing_is_collected(fed: bool, fetched: bool) -> None:
    build = Build()
    with paddle.static.program_guard(build.main):
        x = build.data("x", [2, 4]) if fed else C.full([2, 4], 1.0, paddle.float32, paddle.base.core.Place())
        loss = C.mean(C.exp(x), [], False)
        if fetched:
            C.set_persistable_value(loss, "loss")
        build.role(0)
    captured = capture(build.main, ACCUMULATE)
    made = lower(captured, planned(captured), CpuDevice(paddle.CPUPlace()))
    names = [each.name for each in made.jobs]
    assert ("interlace_feed" in names, "interlace_collect" in names) == (fed, fetched)
    assert (set(made.fed), set(made.outputs)) == ({"x"} if fed else set(), {"loss"} if fetched else set())


def test_an_output_that_is_fetched_too_is_read_once() -> None:
    """Its micro-batches' variables are declared once, and read by both."""
    captured = captured_small()
    program = planned(captured)
    loss = next(op.operands[0] for op in program.ops if op.name == "builtin.shadow_output")
    made = lower(captured, fetching(program, [loss]), CpuDevice(paddle.CPUPlace()))
    last = made.jobs[-1]
    assert last.reads == {f"loss@{k}" for k in range(3)}
    assert last.names == {*last.reads, "loss"}
    assert set(last.program.global_block().kwargs()) == last.reads
    stacked = [op for op in last.program.global_block().ops if op.name() == "pd_op.stack"]
    assert len(stacked) == 2
    assert list(made.fetched) == [loss]


def test_what_is_collected_waits_for_the_events_of_all_its_parts() -> None:
    captured = captured_small()
    program = planned(captured)
    output = next(op for op in program.ops if op.name == "builtin.shadow_output")
    producer = next(op for op in program.ops if output.operands[0] in op.results)
    events = tuple(Event(f"e{m}", (producer.id, m), ((output.id, m),)) for m in (0, 2))
    made = lower(captured, msgspec.structs.replace(program, events=events), GpuDevice(paddle.CPUPlace()))
    (stacker,) = [each.program for each in made.jobs if each.name == STACK_JOB]
    waits = {op.name(): op.attrs()["events_to_wait"] for op in stacker.global_block().ops if "events_to_wait" in op.attrs()}
    assert waits == {"pd_op.stack": ["e0", "e2"]}


def test_what_is_collected_is_behind_the_job_of_each_event_that_it_waits_for() -> None:
    """The executor refuses a wait in front of its event."""
    captured = captured_small()
    program = planned(captured)
    output = next(op for op in program.ops if op.name == "builtin.shadow_output")
    event = Event("late", program.jobs[-1].items[-1], ((output.id, 0),))
    made = lower(captured, msgspec.structs.replace(program, events=(event,)), GpuDevice(paddle.CPUPlace()))
    assert [each.name for each in made.jobs[-3:]] == [program.jobs[-1].name, STACK_JOB, COLLECT_JOB]


def test_what_is_written_into_memory_that_outlives_the_step_is_marked_where_another_job_reads_it() -> None:
    """Paddle marks the buffer and not the result that is written into it."""
    build = Build()
    with paddle.static.program_guard(build.main):
        w, g = (build.data(name, [2, 4], persistable=True) for name in "wg")
        x = build.data("x", [2, 4])
        C.set_persistable_value(C.mean(x, [], False), "loss")
        build.role(0)
        summed = C.add_(g, x)
        build.role(1)
        C.add_(w, summed)
        build.role(2)
    assert not summed.persistable
    captured = capture(build.main, ACCUMULATE)
    made = lower(captured, planned(captured), CpuDevice(paddle.CPUPlace()))
    (optimizer,) = (each.program.global_block().kwargs() for each in made.jobs if each.name == "optimizer")
    assert {name: value.persistable for name, value in optimizer.items()} == {"w": True, "g": True}


@pytest.mark.parametrize("absent", [False, True])
def test_of_a_vector_that_another_job_reads_each_element_that_is_there_has_a_name(absent: bool) -> None:
    build = Build()
    with paddle.static.program_guard(build.main):
        x = build.data("x", [2, 4])
        a, b = C.exp(x), C.tanh(x)
        C.set_persistable_value(C.mean(x, [], False), "loss")
        C.add_n([a, b]).get_defining_op().op_role = 1
        build.role(0)
    captured = capture(build.main, ACCUMULATE)
    program = planned(captured)
    (vector,) = (op for op in program.ops if op.name == COMBINE)
    first, second = vector.operands
    if absent:
        without = msgspec.structs.replace(vector, operands=(first, ABSENT))
        program = program.with_ops([without if op is vector else op for op in program.ops])
    low = _Lowering(captured, program, CpuDevice(paddle.CPUPlace()), False)
    elements = [first] if absent else [first, second]
    read = {f"{name}@{m}" for name in ("x", "loss") for m in range(3)}
    assert low.crossing == read | {low.names.of(value, m) for value in elements for m in range(3)}
