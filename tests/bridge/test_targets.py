"""What each device's rules make of the same plan, read off the lowered Paddle programs (docs/gpu-place.md has the table)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

paddle = pytest.importorskip("paddle")

from paddle.base.libpaddle import pir  # noqa: E402

from interlace import notice  # noqa: E402
from interlace.bridge import modes  # noqa: E402
from interlace.bridge.capture import Captured, capture  # noqa: E402
from interlace.bridge.lower import COLLECT_JOB, FEED_JOB, STACK_JOB, Lowered, Names, kept_names, lower  # noqa: E402
from interlace.bridge.targets.base import PINNED_PREFIX  # noqa: E402
from interlace.ir import Event, Graph, Op, Pipeline, Program, Value  # noqa: E402
from interlace.ir.kinds import is_comm, is_copy  # noqa: E402
from interlace.ir.storage import with_fetches  # noqa: E402
from interlace.passes import ThrottleHost  # noqa: E402
from interlace.report.measured import Measured  # noqa: E402
from tests.bridge.lowered import DEVICES, attrs_of, copies, job, ops_of  # noqa: E402
from tests.bridge.small import ACCUMULATE, captured_small, planned  # noqa: E402

pytestmark = pytest.mark.paddle


class Case(msgspec.Struct, frozen=True):
    """A plan and its lowered form."""

    captured: Any
    program: Program
    lowered: Any
    device: Any


_cases: dict[tuple[str, bool, bool], Case] = {}


def case(target: str, offload: bool = True, hold: bool = False) -> Case:
    """The small program for a target, the host held behind jobs with work on side streams or nowhere; made once."""
    if (target, offload, hold) not in _cases:
        captured = captured_small()
        program = planned(captured, offload=offload, throttle=ThrottleHost(syncs="job-ends") if hold else None)
        made = DEVICES[target]
        _cases[target, offload, hold] = Case(captured, program, lower(captured, program, made), made)
    return _cases[target, offload, hold]


def waits(lowered: Lowered, job_name: str) -> list[Any]:
    """What holds the host in a job."""
    return ops_of(job(lowered, job_name), "pd_op.sync_calc_stream_")


# ------------------------------------------------------------------------------------------------------------------ copies


@pytest.mark.parametrize(
    ("target", "out"), [("cpu", ("pd_op.memcpy_d2h", 0)), ("custom", ("pd_op.memcpy_d2h", 1)), ("gpu", ("pd_op.memcpy", 2))]
)
def test_the_copy_out_is_the_targets_own(target: str, out: tuple[str, int]) -> None:
    """What is moved. On the GPU only `memcpy` to pinned memory (2) does not block the host."""
    assert copies(case(target).lowered, "forward_1")[0] == out


def test_a_copied_value_crosses_a_job_and_comes_back_from_the_executors_own_place() -> None:
    """What is moved, no races. No operation of the copying job reads the pinned result; the reader's argument has the executor's own."""
    lowered, device = case("gpu").lowered, case("gpu").device
    (out,) = ops_of(job(lowered, "forward_0"), "pd_op.memcpy")
    assert [user.name() for user in out.result(0).all_used_ops()] == ["builtin.shadow_output"]
    (back,) = ops_of(job(lowered, "backward_0"), "pd_op.memcpy_h2d")
    name = next(name for name in job(lowered, "backward_0").names if name.startswith(PINNED_PREFIX))
    source = job(lowered, "backward_0").program.global_block().kwargs()[name]
    assert back.operand_source(0).is_same(source)
    assert str(source.place_attr) == str(device.place_attribute())


@pytest.mark.parametrize("target", ["gpu", "testbed"])
def test_the_host_waits_after_jobs_that_say_so(target: str) -> None:
    """Measured peaks. Memory is taken at issue: what waits for the last computation ends the job."""
    made = case(target, hold=True)
    lowered = made.lowered
    blocking = {each.name for each in lowered.jobs if waits(lowered, each.name)}
    assert (
        blocking
        == {each.name for each in made.program.jobs if each.host_waits}
        == {*(f"{kind}_{m}" for kind in ("forward", "backward") for m in range(3))}
    )
    for name in ("forward_0", "backward_2"):
        last = ops_of(job(lowered, name))[-1]
        assert (last.name(), last.attrs()["execution_stream"]) == ("pd_op.sync_calc_stream_", "auto_parallel_host_wait")
        assert last.op_role == (0 if name == "forward_0" else 1)
        giver = last.operand_source(0).get_defining_op()
        assert giver.name() == ("pd_op.assign" if name == "forward_0" else "pd_op.slice")
        assert giver.operand_source(0).get_defining_op().name() == ("pd_op.mean" if name == "forward_0" else "pd_op.add_")


def test_what_the_host_waits_for_is_cut_out_where_it_is_computed() -> None:
    """Measured peaks. Nothing issued between a computation and the wait for it keeps the host longer: only the wait stands there."""
    captured = captured_small(rows=600)
    program = planned(captured, throttle=None)
    first, rest = program.jobs[0], program.jobs[1:]
    wait = (first.items[-1], first.items[0])
    program = msgspec.structs.replace(program, jobs=(msgspec.structs.replace(first, host_waits=(wait,)), *rest))
    names = [op.name() for op in ops_of(job(lower(captured, program, DEVICES["gpu"]), "forward_0")) if "shadow" not in op.name()]
    assert names[:3] == ["pd_op.matmul", "pd_op.full_int_array", "pd_op.full_int_array"] or names[:2] == ["pd_op.matmul", "pd_op.slice"]
    assert names.index("pd_op.slice") < names.index("pd_op.all_reduce")
    assert names[-1] == "pd_op.sync_calc_stream_"
    assert "pd_op.slice" not in [op.name() for op in ops_of(job(lower(captured, program, DEVICES["cpu"]), "forward_0"))]


def test_each_wait_of_the_host_is_for_its_own_operation() -> None:
    """Two of one job, which are both computed before the first wait."""
    captured = captured_small()
    program = planned(captured, throttle=None)
    first, rest = program.jobs[0], program.jobs[1:]
    kinds = {op.id: op.name for op in program.ops}
    product, gelu = (next(item for item in first.items if kinds[item[0]] == name) for name in ("pd_op.matmul", "pd_op.gelu"))
    host_waits = ((first.items[-2], product), (first.items[-1], gelu))
    held = msgspec.structs.replace(program, jobs=(msgspec.structs.replace(first, host_waits=host_waits), *rest))
    lowered = lower(captured, held, DEVICES["gpu"])
    assert [source_of(source_of(each)).name() for each in waits(lowered, "forward_0")] == ["pd_op.matmul", "pd_op.gelu"]


def source_of(op: Any) -> Any:
    """What gives an operation its first operand."""
    return op.operand_source(0).get_defining_op()


def test_only_jobs_that_say_so_hold_the_host() -> None:
    """Measured peaks, plain lowering. Without the plan's word the host is not held; the CPU and other devices wait by themselves."""
    for target in ("gpu", "testbed"):
        assert not waits(case(target, hold=True).lowered, "optimizer")
        assert not any(waits(case(target, offload=False).lowered, each.name) for each in case(target, offload=False).lowered.jobs)
        assert len(waits(case(target, offload=False, hold=True).lowered, "forward_0")) == 1
    for target in ("cpu", "custom"):
        held = case(target, hold=True).lowered
        assert not waits(held, "forward_0")
        assert not waits(held, "backward_0")


def test_a_wait_reads_a_float32_element_in_memory_of_its_own() -> None:
    """Measured peaks, no races. As the last reader of a value that side streams read too, it would be the one that collection records."""
    for shape, dtype in (([512, 512], "float32"), ([-1, 4], "bfloat16"), ([1], "int64"), ([], "float32"), ([], "bfloat16")):
        program = paddle.static.Program()
        with paddle.static.program_guard(program):
            x = paddle._C_ops.data("x", shape, getattr(paddle, dtype), paddle.base.core.Place())
            DEVICES["gpu"].wait_for(DEVICES["gpu"].watch(x))
        cut, wait = program.global_block().ops[-2:]
        assert wait.name() == "pd_op.sync_calc_stream_"
        assert cut.name() == ("pd_op.cast" if dtype != "float32" else "pd_op.slice" if shape else "pd_op.assign")
        assert wait.operand_source(0).is_same(cut.result(0))
        assert wait.operand_source(0).dtype == paddle.float32
        assert list(cut.result(0).shape) in ([1, 1], [-1, 1], [1], [])


def test_where_there_are_streams_lowering_adds_no_reader_of_its_own() -> None:
    """No races. A read of a shared variable that only lowering knows stood behind a copy out, as the last one that was recorded."""
    captured = captured_small(alias=True)
    program = planned(captured, offload=True, throttle=None)
    for target, number in (("cpu", 2), ("custom", 1), ("gpu", 1), ("testbed", 1)):
        ops = ops_of(job(lower(captured, program, DEVICES[target]), "forward_0"))
        assert sum("share_data" in op.name() for op in ops) == number, target
        if target != "cpu":
            kernels = [op for op in ops if op.name() not in ("builtin.shadow_output", "pd_op.data", "builtin.parameter")]
            assert len(kernels) == len(next(each for each in program.jobs if each.name == "forward_0").items)


# -------------------------------------------------------------------------------------------------------- streams and events


@pytest.mark.parametrize("target", ["custom", "gpu"])
def test_streams_priorities_and_events_stand_on_the_operations_as_planned(target: str) -> None:
    """Plain lowering, no races. Every planned stream, priority, recorder and waiter is found in the lowered jobs, and no other."""
    made = case(target)
    program, lowered = made.program, made.lowered
    ops = {op.id: op for op in program.ops}
    records = {event.record: event.name for event in program.events}
    assert records
    for planned_job in program.jobs:
        every = [op for op in ops_of(job(lowered, planned_job.name)) if op.name() != "builtin.shadow_output"]
        of_memory = [k - 1 for k, op in enumerate(every) if op.name() == "pd_op.empty" and every[k - 1].name() == "pd_op.full_int_array"]
        built = [op for k, op in enumerate(every) if k not in of_memory]  # without shapes of memory for copies back
        for item, op in zip(planned_job.items, built, strict=False):
            attrs, wanted = op.attrs(), ops[item[0]]
            assert op.name() in (wanted.name, "pd_op.memcpy")
            assert attrs.get("execution_stream", "") == wanted.stream
            assert attrs.get("stream_priority", 0) == wanted.priority
            assert attrs.get("event_to_record", "") == records.get(item, "")
            assert attrs.get("force_record_event", False) == (item in records)
            assert attrs.get("events_to_wait", []) == [event.name for event in program.events if item in event.waits]


def test_the_cpu_has_no_events_and_names_its_communication() -> None:
    """Plain lowering. One serial stream; a time-out of the transport can say which operation of which micro-batch it was."""
    lowered = case("cpu").lowered
    for each in lowered.jobs:
        for _, attrs in attrs_of(each):
            assert not {"event_to_record", "events_to_wait", "force_record_event"} & attrs.keys()
    (reduce,) = ops_of(job(lowered, "backward_2"), "pd_op.all_reduce")
    assert reduce.attrs()["interlace_at"].startswith("micro-batch 2, op #15 pd_op.all_reduce")


# ---------------------------------------------------------------------------------------------------------------- liveness


def really_read(lowered: Lowered, program: Program, captured: Captured) -> dict[str, set[str]]:
    """Job -> names of other jobs' variables whose contents it reads, from Paddle's own word on each operand."""
    found = {}
    for each in lowered.jobs:
        names = {value.id: name for name, value in each.program.global_block().kwargs().items()}
        found[each.name] = {
            names[v.id]
            for op in ops_of(each)
            for v in op.operands_source()
            if not paddle.pir.is_fake_value(v) and v.id in names and not op.is_no_need_buffer(v)
        }
    return found


@pytest.mark.parametrize("target", ["cpu", "custom", "gpu"])
@pytest.mark.parametrize("offload", [False, True])
def test_a_name_is_kept_exactly_where_a_later_job_reads_it(target: str, offload: bool) -> None:
    """Never moved, nothing lost. Operands of which only the shape is read keep nothing; pinned buffers stay where the target says so."""
    made = case(target, offload)
    reads = really_read(made.lowered, made.program, made.captured)
    kept = kept_names(made.lowered.jobs, made.device)
    for k, (each, names) in enumerate(zip(made.lowered.jobs, kept, strict=True)):
        later = set().union(*(reads[other.name] for other in made.lowered.jobs[k + 1 :]), set())
        pinned = {name for name in each.names if name.startswith(PINNED_PREFIX)} if target != "cpu" else set()
        assert names == (each.names & later) | pinned, each.name


def test_shape_only_operands_keep_nothing() -> None:
    """Never moved. add_grad's two operands are held by the backward job, and collected by the forward one."""
    made = case("gpu", offload=False)
    kept = dict(zip([each.name for each in made.lowered.jobs], kept_names(made.lowered.jobs, made.device), strict=True))
    assert {"v5@0", "v6@0"} <= job(made.lowered, "backward_0").names
    assert not {"v5@0", "v6@0"} & kept["forward_0"]
    assert "v4@0" in kept["forward_0"]


@pytest.mark.parametrize(("target", "stays"), [("cpu", False), ("custom", True), ("gpu", True)])
def test_pinned_buffers_are_never_collected_where_the_device_has_no_events_on_them(target: str, stays: bool) -> None:
    """Pinned memory, no races. In every job that has one, the last reader included."""
    made = case(target)
    for each, names in zip(made.lowered.jobs, kept_names(made.lowered.jobs, made.device), strict=True):
        pinned = {name for name in each.names if name.startswith(PINNED_PREFIX)}
        if each.name.startswith("backward"):
            assert pinned
            assert (pinned <= names) is stays


# ------------------------------------------------------------------------------------------------------------- feed and fetch


@pytest.mark.parametrize("target", ["cpu", "custom", "gpu"])
def test_the_feed_is_cut_and_losses_are_stacked_once(target: str) -> None:
    """Plain lowering. One job in front cuts the batch, one stacks a loss of every micro-batch, and the last has it; no job in between
    fetches."""
    lowered = case(target).lowered
    first, last = lowered.jobs[0], lowered.jobs[-1]
    stacker = next((each for each in lowered.jobs if each.name == STACK_JOB), last)
    assert (first.name, last.name) == (FEED_JOB, COLLECT_JOB)
    (fed,) = ops_of(first, "pd_op.data")
    assert list(fed.result(0).shape) == [6, 4]
    (cut,) = ops_of(first, "pd_op.split_with_num")
    assert cut.attrs()["num"] == 3
    assert {"x@0", "x@1", "x@2"} <= first.names
    (stack,) = ops_of(stacker, "pd_op.stack")
    assert list(lowered.outputs["loss"].shape) == [3]
    assert [v.name for v in stack.operand_source(0).get_defining_op().operands_source()] == ["loss@0", "loss@1", "loss@2"]
    for each in lowered.jobs:
        assert not ops_of(each, "pd_op.fetch")
    assert lowered.micro_batch_num() == 1
    assert [each.type() for each in lowered.job_list()] == [each.name for each in lowered.jobs]
    assert sorted(lowered.job_types()) == sorted(each.name for each in lowered.jobs)
    assert lowered.ir_program("forward") is last.program


@pytest.mark.parametrize("target", ["testbed", "gpu"])
def test_the_host_waits_for_losses_and_not_for_what_comes_behind_them(target: str) -> None:
    """A host that runs ahead. They are stacked behind the last one, and read at the end on a stream that waits for the stack alone."""
    lowered = case(target).lowered
    names = [each.name for each in lowered.jobs]
    at = names.index(STACK_JOB)
    assert (names[at - 1 : at + 2], names[-1]) == (["forward_2", STACK_JOB, "backward_2"], COLLECT_JOB)
    (stack,) = ops_of(lowered.jobs[at], "pd_op.stack")
    (copied,) = ops_of(lowered.jobs[-1], "pd_op.assign")
    assert (stack.attrs()["event_to_record"], stack.attrs()["force_record_event"]) == ("interlace_stacked", True)
    assert (copied.attrs()["events_to_wait"], copied.attrs()["execution_stream"]) == (["interlace_stacked"], "auto_parallel_host_wait")
    assert copied.operand_source(0).name == stack.result(0).name
    assert lowered.outputs["loss"].is_same(copied.result(0))
    assert lowered.is_read_early


def test_fetches_for_which_outputs_are_read_late_are_said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Once, and how many there are among what was measured; without fetches the step is as before."""
    made, measured, values = case("testbed"), Measured(), pir.IrMapping()
    value = next(op.results[0] for op in made.program.ops if op.name == "pd_op.matmul")
    source = made.captured.source_ops[Graph(made.program).producer_op(value).origin].result(0)  # type: ignore[union-attr]
    values.add(source, source)
    monkeypatch.setattr(modes, "choose_device", lambda: made.device)
    monkeypatch.setattr(notice, "SAID", set())
    report: Any = SimpleNamespace(plan=SimpleNamespace(program=made.program), measured=measured)
    mode = modes.Mode(report, made.captured, made.lowered, values)
    for asked in ([source], [], [source]):
        assert len(mode.fetched(asked, check=False)) == len(asked)
        assert (mode.lowered.is_read_early, measured.late_fetches) == (not asked, len(asked))
    assert capfd.readouterr().err == f"interlace: {Measured(late_fetches=1).late_line()}\n"


@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("use", ["read", "written between stages", "fetched", "fed"])
def test_losses_that_another_stream_uses_are_collected_at_the_end(use: str, is_graph: bool) -> None:
    """There the plan is proved: behind the last loss nothing orders that stream's work, its memory may be given back under a reader, and
    between stages ranks would wait for each other. So is what the user fetches, which may be large, and what no job writes."""
    made = case("testbed")
    program = with_fetches(made.program, (5,)) if use == "fetched" else made.program
    if use == "fed":
        program = program.with_ops([*program.ops, Op(90, "builtin.shadow_output", (2,), (), "forward", attrs={"output_name": "x"})])
    (loss,) = (op.operands[0] for op in made.program.ops if op.name == "builtin.shadow_output")
    if use == "read":
        program = program.with_ops([*program.ops, Op(90, "pd_op.print", (loss,), (), "forward", stream="side")])
    if use == "written between stages":
        program = program.with_ops([msgspec.structs.replace(op, stream="side") if loss in op.results else op for op in program.ops])
        program = msgspec.structs.replace(program, pipeline=msgspec.structs.replace(program.pipeline, num_stages=2))
    lowered = lower(made.captured, program, made.device, is_graph)
    names = [each.name for each in lowered.jobs]
    assert (names.count(STACK_JOB), names[-1]) == (0, COLLECT_JOB)
    (stack,) = ops_of(lowered.jobs[-1], "pd_op.stack")[:1]
    assert "execution_stream" not in stack.attrs()


@pytest.mark.parametrize("is_graph", [False, True])
def test_losses_that_another_stream_writes_are_stacked_behind_the_last_of_them(is_graph: bool) -> None:
    """As data parallelism sums them. The stack waits for the last one alone: that stream runs them in order."""
    made = case("testbed")
    (loss,) = (op.operands[0] for op in made.program.ops if op.name == "builtin.shadow_output")
    beside = [msgspec.structs.replace(op, stream="side") if loss in op.results else op for op in made.program.ops]
    (writer,) = (op for op in beside if op.stream == "side")
    lowered = lower(made.captured, made.program.with_ops(beside), made.device, is_graph)
    stacker = next(each for each in lowered.jobs if each.name == (COLLECT_JOB if is_graph else STACK_JOB))
    assert [each.name for each in lowered.jobs][lowered.jobs.index(stacker) - 1] == "forward_2"
    (stack,) = ops_of(stacker, "pd_op.stack")
    written = [op for each in lowered.jobs for op in ops_of(each, writer.name) if op.attrs().get("execution_stream") == "side"]
    recorded = [op.attrs()["event_to_record"] for op in written if "event_to_record" in op.attrs()]
    assert set(recorded) >= set(stack.attrs()["events_to_wait"]) == {written[-1].attrs()["event_to_record"]}


@pytest.mark.parametrize(("value", "behind"), [(6, "forward_2"), (16, "backward_2")])
def test_several_outputs_are_stacked_behind_the_last_of_them(value: int, behind: str) -> None:
    """One event, behind all stacks; whoever reads one waits for it."""
    made = case("testbed")
    more = Op(90, "builtin.shadow_output", (value,), (), "forward", attrs={"output_name": "more"})
    lowered = lower(made.captured, made.program.with_ops([*made.program.ops, more]), made.device)
    names = [each.name for each in lowered.jobs]
    at = names.index(STACK_JOB)
    assert names[at - 1] == behind
    stacks = ops_of(lowered.jobs[at], "pd_op.stack")
    assert [op.attrs().get("event_to_record") for op in stacks] == [None, "interlace_stacked"]
    assert [op.attrs()["events_to_wait"] for op in ops_of(lowered.jobs[-1], "pd_op.assign")] == [["interlace_stacked"]] * 2
    assert {name: list(found.shape) for name, found in lowered.outputs.items()} == {"loss": [3], "more": [3, 2, 4]}


def of_one_micro_batch(program: Program, *events: Event) -> Program:
    """The first micro-batch alone, with these events."""
    pipeline = msgspec.structs.replace(program.pipeline, num_micro_batches=1)
    jobs = tuple(each for each in program.jobs if each.micro_batch == 0)
    return msgspec.structs.replace(program, pipeline=pipeline, jobs=jobs, events=events)


def test_a_loss_that_is_not_stacked_is_read_beside_computation() -> None:
    """One micro-batch."""
    made = case("testbed")
    lowered = lower(made.captured, of_one_micro_batch(made.program), made.device)
    assert STACK_JOB not in [each.name for each in lowered.jobs]
    (read,) = ops_of(lowered.jobs[-1], "pd_op.assign")
    recorded = [op.attrs()["event_to_record"] for each in lowered.jobs for op in ops_of(each) if "event_to_record" in op.attrs()]
    assert (read.attrs()["events_to_wait"], read.attrs()["execution_stream"]) == (recorded, "auto_parallel_host_wait")


def test_a_loss_that_is_not_stacked_and_awaits_more_is_read_at_the_end() -> None:
    """One micro-batch, and an order into the next step on the last of the compute stream, which must wait for it there."""
    made = case("testbed")
    (output,) = (op.id for op in made.program.ops if op.name == "builtin.shadow_output")
    last = of_one_micro_batch(made.program).jobs[-1].items[-1]
    lowered = lower(made.captured, of_one_micro_batch(made.program, Event("late", last, ((output, 0),))), made.device)
    (read,) = ops_of(lowered.jobs[-1], "pd_op.assign")
    assert "execution_stream" not in read.attrs()
    assert read.attrs()["events_to_wait"] == ["late"]
    assert not lowered.is_read_early


def test_of_two_outputs_one_is_written_by_another_stream() -> None:
    """Each stack waits for what writes it on another stream; both are stacked behind the last output."""
    made = case("testbed")
    more = Op(90, "builtin.shadow_output", (16,), (), "forward", attrs={"output_name": "more"})
    (loss,) = (op.operands[0] for op in made.program.ops if op.name == "builtin.shadow_output")
    beside = [msgspec.structs.replace(op, stream="side") if loss in op.results else op for op in made.program.ops]
    lowered = lower(made.captured, made.program.with_ops([*beside, more]), made.device)
    names = [each.name for each in lowered.jobs]
    stacker = lowered.jobs[names.index(STACK_JOB)]
    assert names[names.index(STACK_JOB) - 1] == "backward_2"
    assert sorted(len(op.attrs().get("events_to_wait", ())) for op in ops_of(stacker, "pd_op.stack")) == [0, 1]


def test_a_captured_step_copies_its_losses_to_the_host_before_it_goes_on() -> None:
    """Launched steps. What comes behind the last loss, the optimizer too, is issued behind the copy, and on other streams."""
    made = case("testbed")
    lowered = lower(made.captured, made.program, made.device, is_graph=True)
    names = [each.name for each in lowered.jobs]
    at = names.index(COLLECT_JOB)
    assert names[at - 1 : at + 2] == ["forward_2", COLLECT_JOB, "backward_2"]
    assert "optimizer" in names[at + 1 :]
    (copied,) = ops_of(lowered.jobs[at], "pd_op.memcpy_d2h")
    assert (copied.attrs()["dst_place_type"], copied.attrs()["execution_stream"]) == (2, "auto_parallel_host_wait")
    assert copied.operand_source(0).get_defining_op().name() == "pd_op.stack"
    assert lowered.outputs["loss"].is_same(copied.result(0))
    assert lowered.ir_program("forward") is lowered.jobs[at].program


def test_micro_batches_are_the_parts_of_the_batch_in_order() -> None:
    """Plain lowering."""
    first = case("cpu").lowered.jobs[0]
    (parts,) = ops_of(first, "builtin.split")
    named = {op.attrs()["output_name"]: op.operand_source(0) for op in ops_of(first, "builtin.shadow_output")}
    for micro_batch, part in enumerate(parts.results()):
        assert named[f"x@{micro_batch}"].is_same(part)


def test_only_what_another_job_reads_has_a_name() -> None:
    lowered = case("cpu", offload=False).lowered
    for each in lowered.jobs[1:-1]:
        elsewhere = {name for other in lowered.jobs if other is not each for name in other.names}
        assert {op.attrs()["output_name"] for op in ops_of(each, "builtin.shadow_output")} <= elsewhere


def test_a_micro_batch_without_copies_reads_what_was_to_be_copied() -> None:
    """No quick return. Where no job holds a copy it is the identity."""
    captured = captured_small()
    program = planned(captured, offload=True)
    out = [op for op in program.ops if is_copy(op) and op.origin < 0]
    left = {(op.id, 0) for op in out}
    jobs = tuple(msgspec.structs.replace(each, items=tuple(item for item in each.items if item not in left)) for each in program.jobs)
    events = tuple(event for event in program.events if not left & {event.record, *event.waits})
    lowered = lower(captured, msgspec.structs.replace(program, jobs=jobs, events=events), DEVICES["gpu"])
    names = Names(Graph(program))
    sources = [op.operands[0] for op in out if op.kind == "memcpy_d2h"]
    read = set().union(*(each.reads for each in lowered.jobs if each.name.startswith("backward")))
    assert sources
    assert {names.of(value, 0) for value in sources} <= read
    assert not any(name.startswith(PINNED_PREFIX) and name.endswith("@0") for each in lowered.jobs for name in each.names)


def test_what_a_pass_made_has_the_role_of_its_half() -> None:
    lowered = case("gpu").lowered
    made = [op for each in lowered.jobs for op in ops_of(each) if "memcpy" in op.name()]
    assert {op.name(): op.op_role for op in made} == {"pd_op.memcpy": 0, "pd_op.memcpy_h2d": 1}
    assert {op.attrs()["chunk_id"] for op in made} == {-1}


def test_one_micro_batch_is_not_cut_and_an_unknown_batch_stays_unknown() -> None:
    """Odd programs."""
    captured = captured_small(Pipeline(schedule="none"))
    lowered = lower(captured, planned(captured), DEVICES["cpu"])
    assert [name for name, _ in attrs_of(lowered.jobs[0])] == ["pd_op.data", "pd_op.share_data", "builtin.shadow_output"]
    captured = captured_small(rows=-1)
    lowered = lower(captured, planned(captured), DEVICES["cpu"])
    (fed,) = ops_of(lowered.jobs[0], "pd_op.data")
    assert list(fed.result(0).shape) == [-1, 4]


# --------------------------------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("target", "flag"),
    [
        ("gpu", "FLAGS_pir_apply_inplace_pass"),
        ("testbed", "FLAGS_pir_apply_inplace_pass"),
        ("custom", "FLAGS_pir_apply_inplace_pass"),
        ("custom", "FLAGS_fast_eager_deletion_mode"),
    ],
)
def test_prepare_sets_what_the_executor_reads(target: str, flag: str) -> None:
    """Plain lowering. The in-place pass would end overlaps on the GPU; fast collection would free too early on custom devices."""
    old = paddle.get_flags([flag])
    try:
        paddle.set_flags({flag: True})
        DEVICES[target].prepare()
        assert paddle.get_flags([flag]) == {flag: False}
    finally:
        paddle.set_flags(old)


def test_a_cpu_is_called_by_its_model() -> None:
    model = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    assert DEVICES["cpu"].name() == model.partition(":")[2].strip() != ""


def test_the_cpu_leaves_the_flags_alone() -> None:
    """One line."""
    flags = ["FLAGS_pir_apply_inplace_pass", "FLAGS_fast_eager_deletion_mode"]
    old = paddle.get_flags(flags)
    DEVICES["cpu"].prepare()
    assert paddle.get_flags(flags) == old


# ------------------------------------------------------------------------------------------------------------------- refusals


def test_a_vector_read_in_another_job_is_refused_or_built_again() -> None:
    """Odd programs. A vector of named tensors is put together again where it is read; one that a kernel gives is refused."""
    from interlace.errors import PlanError
    from interlace.ir import Job
    from tests.bridge.small import Build, C

    build = Build()
    with paddle.static.program_guard(build.main):
        x = build.data("x", [2, 4])
        parts = C.split_with_num(x, 2, 1)
        joined = C.concat(parts, 1)
        C.set_persistable_value(joined, "y")
        build.role(0)
    captured = capture(build.main, Pipeline(schedule="none"))
    kinds = {op.kind: op.id for op in captured.program.ops}
    order = [op.id for op in captured.program.ops if op.name not in ("pd_op.data", "builtin.shadow_output")]

    def cut_behind(kind: str) -> Program:
        cut = order.index(kinds[kind]) + 1
        halves = (order[:cut], order[cut:])
        jobs = tuple(Job(f"part_{k}", "forward", 0, tuple((op, 0) for op in half)) for k, half in enumerate(halves))
        return msgspec.structs.replace(captured.program, jobs=jobs)

    lowered = lower(captured, cut_behind("combine"), DEVICES["cpu"])
    assert "builtin.combine" in [name for name, _ in attrs_of(job(lowered, "part_1"))]
    with pytest.raises(PlanError, match=r"job part_1 reads the vector that #\d+ pd_op.split_with_num.* gives in another job"):
        lower(captured, cut_behind("split_with_num"), DEVICES["cpu"])


def test_a_vector_read_by_another_micro_batch_keeps_nothing() -> None:
    """Odd programs. The next micro-batch's forward reads the vector in the job of a gradient that needs its shape only."""
    from interlace.ir import Job
    from tests.bridge.small import Build, C

    build = Build()
    with paddle.static.program_guard(build.main):
        x, grad = build.data("x", [2, 4]), build.data("grad", [4, 4])
        vector = [C.gelu(x, False), C.relu(x)]
        C.concat(vector, 0)
        build.role(0)
        C.concat_grad(vector, grad, C.full([1], 0, paddle.int32, paddle.CPUPlace()))
        build.role(1)
    captured = capture(build.main, msgspec.structs.replace(ACCUMULATE, num_micro_batches=2))
    program = captured.program
    combine = [op for op in program.ops if op.name == "builtin.combine"]
    gradient = next(op for op in program.ops if op.kind == "concat_grad")
    ops = [
        msgspec.structs.replace(op, operands=(combine[0].results[0], *op.operands[1:])) if op is gradient else op
        for op in program.ops
        if op not in combine[1:]
    ]
    assert gradient.no_buffer == (0,)
    parts = {role: [op.id for op in ops if op.role == role and op.name != "pd_op.data"] for role in ("forward", "backward")}
    orders = [[("forward", 0)], [("backward", 0), ("forward", 1)], [("backward", 1)]]
    jobs = tuple(Job(f"job_{k}", "forward", 0, tuple((op, m) for role, m in order for op in parts[role])) for k, order in enumerate(orders))
    lowered = lower(captured, msgspec.structs.replace(program.with_ops(ops), jobs=jobs), DEVICES["cpu"])
    vectors = {f"v{value}@{m}" for value in combine[0].operands for m in (0, 1)}
    assert vectors == vectors & set.union(*(each.names for each in lowered.jobs))
    assert not vectors & set.union(*(each.reads for each in lowered.jobs))


def test_a_new_operation_that_nobody_can_build_is_refused() -> None:
    """Odd programs. With the operation and the job named."""
    from interlace.errors import PlanError

    made = case("cpu", offload=False)
    ops = [msgspec.structs.replace(op, name="pd_op.mystery", origin=-1) if op.kind == "gelu" else op for op in made.program.ops]
    with pytest.raises(PlanError, match=r"job forward_0: #5 pd_op.mystery is new and the lowering cannot build it; it can build \["):
        lower(made.captured, made.program.with_ops(ops), made.device)


def test_the_plan_has_copies_and_communication() -> None:
    """What is moved. What the cases above look at is there."""
    program = case("gpu").program
    assert sum(is_copy(op) for op in program.ops) == 2
    assert sum(is_comm(op) for op in program.ops) == 2
    assert program.pipeline == ACCUMULATE
    assert isinstance(program.values[0], Value)
