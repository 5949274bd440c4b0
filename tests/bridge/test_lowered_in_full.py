"""Small plans as Paddle's executor gets them, operation by operation. `pytest --update-golden` rewrites what is expected.

Each case of `CASES` makes a plan and says for what it is lowered; `lowered/<case>.txt` holds the jobs. Left out are types of values, which
Paddle infers, and where in a script an operation was made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

paddle = pytest.importorskip("paddle")

from paddle.distributed.auto_parallel.static.process_group import new_process_group  # noqa: E402

from interlace.bridge.capture import Captured, capture  # noqa: E402
from interlace.bridge.lower import Lowered, kept_names, lower  # noqa: E402
from interlace.bridge.targets import Device  # noqa: E402
from interlace.bridge.targets.cpu import CpuDevice  # noqa: E402
from interlace.bridge.targets.custom import CustomDevice  # noqa: E402
from interlace.bridge.targets.gpu import GpuDevice  # noqa: E402
from interlace.errors import PlanError  # noqa: E402
from interlace.ir import Event, Pipeline, Program  # noqa: E402
from interlace.ir.kinds import DATA  # noqa: E402
from interlace.passes import OffloadOptimizerState, Schedule1F1B, ThrottleHost  # noqa: E402
from interlace.passes import Pipeline as Passes  # noqa: E402
from interlace.passes.insert_events import fetching  # noqa: E402
from tests.bridge.small import COSTS, Build, C, captured_small, planned  # noqa: E402
from tests.default_passes import STREAMS  # noqa: E402
from tests.golden import require_text  # noqa: E402

pytestmark = pytest.mark.paddle

FOLDER = Path(__file__).parent / "lowered"
TWO = Pipeline(num_micro_batches=2, schedule="accumulate")
TOLD = (
    *("output_name", "name", "shape", "value", "num", "axis", "axes", "starts", "ends", "transpose_x", "transpose_y", "dst_place_type"),
    *("peer", "chunk_id", "stream_priority", "interlace_at"),
)
"""Attributes that are told, beside streams, events and rings; a ring is called by the turn in which its first operation comes."""
Made = tuple[Captured, Program, type[Device]]


def of_kinds(program: Program, *kinds: str) -> list[int]:
    """First results of the operations of some kinds."""
    return [op.results[0] for op in program.ops if op.kind in kinds]


def plain() -> Made:
    """What the user fetches is stacked beside the loss; the sum has two names."""
    captured = captured_small(TWO, alias=True)
    return captured, fetching(planned(captured), of_kinds(planned(captured), "matmul", "share_data_")), CpuDevice


def copied() -> Made:
    """Copies out and in on streams of their own; the host waits where jobs end; each job but the last has a middle to wait for too."""
    captured = captured_small(TWO, rows=600)
    return captured, planned(captured, offload=True, throttle=ThrottleHost(syncs="job-ends")), GpuDevice


def left_out() -> Made:
    """One micro-batch keeps on the device what the other moves: its reader takes the copied value itself."""
    captured, program, _ = copied()
    kept = {op.id for op in program.ops if op.kind.startswith("memcpy")}
    jobs = tuple(msgspec.structs.replace(job, items=tuple(i for i in job.items if i[0] not in kept or i[1] == 0)) for job in program.jobs)
    events = tuple(event for event in program.events if event.record[0] not in kept)
    return captured, msgspec.structs.replace(program, jobs=jobs, events=events), GpuDevice


def copied_on_custom() -> Made:
    """The same with the custom device's copies and without waits."""
    captured = captured_small(TWO, scaled=True)
    return captured, planned(captured, offload=True, throttle=None), CustomDevice


def inner_waits() -> Made:
    """The host waits in the middle of a job for what was computed before, twice for one."""
    captured = captured_small(TWO)
    program = planned(captured, throttle=None)
    first, *rest = program.jobs
    a, b, c, *_ = first.items
    held = msgspec.structs.replace(first, host_waits=((b, a), (c, a), (first.items[-1], c)))
    return captured, msgspec.structs.replace(program, jobs=(held, *rest)), GpuDevice


def wait_for_one_of_three() -> Made:
    """The host waits for an operation with three results: one of them is watched."""
    build = Build()
    with paddle.static.program_guard(build.main):
        x = build.data("x", [2, 4])
        y = C.layer_norm(x, None, None, 1e-5, 1)[0]
        C.set_persistable_value(C.mean(C.exp(y), [], False), "loss")
        build.role(0)
    captured = capture(build.main, TWO)
    program = planned(captured, throttle=None)
    (norm,) = (op.id for op in program.ops if op.kind == "layer_norm")
    jobs = tuple(msgspec.structs.replace(job, host_waits=((job.items[-1], (norm, job.items[0][1])),)) for job in program.jobs)
    return captured, msgspec.structs.replace(program, jobs=jobs), GpuDevice


def states() -> Made:
    """A moment that lives on the host between steps."""
    captured = captured_small(TWO, moment=True)
    passes = Passes((Schedule1F1B(interleave="off"), OffloadOptimizerState(fraction=1.0, min_bytes=1, modules=()), *STREAMS))
    return captured, passes.run(captured.program, COSTS)[0], GpuDevice


def one_micro_batch() -> Made:
    """Nothing is cut and nothing stacked."""
    captured = captured_small(Pipeline(num_micro_batches=1, schedule="accumulate"), rows=-1)
    return captured, planned(captured), CpuDevice


def two_inputs() -> Made:
    """One event behind all inputs, whichever waits for which; a vector that another job makes again; a branch; sends."""
    build = Build()
    ring = new_process_group([0, 1]).id
    with paddle.static.program_guard(build.main):
        w = build.data("w", [2, 4], persistable=True)
        x, s = build.data("x", [2, 4]), build.data("s", [])
        a, b = C.exp(x), C.tanh(x)
        both = C.concat([a, b], 0)
        loss = C.mean(C.add(both, s), [], False)
        C.set_persistable_value(loss, "loss")
        C.send_v2(a, ring, 1, False, False)
        build.role(0)
        gradients = C.split_with_num(C.add_n([C.concat([a, b], 0), both]), 2, 0)
        C.add_(w, gradients[1])
        build.role(1)
        C.relu_(w)
        build.role(2)
    captured = capture(build.main, TWO)
    program = planned(captured)
    names = {value.id: value.name for value in program.values}
    x_op, s_op = (next(op.id for op in program.ops if op.name == DATA and names[op.results[0]] == name) for name in "xs")
    concat, add = (next(op.id for op in program.ops if op.kind == kind) for kind in ("concat", "add"))
    events = (Event("cut_x", (x_op, 0), ((concat, 0), (add, 1))), Event("cut_s", (s_op, 1), ((add, 1),)), *program.events)
    return captured, msgspec.structs.replace(program, events=events), GpuDevice


def keyword() -> Made:
    """An argument of the captured program is one of the jobs that read it."""
    build = Build()
    with paddle.static.program_guard(build.main):
        x = build.data("x", [2, 4])
        total = build.main.global_block().add_kwarg("total", x.type())
        total.persistable = True
        C.set_persistable_value(C.mean(C.exp(x), [], False), "loss")
        build.role(0)
        C.add_(total, x)
        build.role(1)
        C.relu_(total)
        build.role(2)
    captured = capture(build.main, TWO)
    return captured, planned(captured), CpuDevice


CASES: Sequence[Callable[[], Made]] = (
    plain,
    copied,
    left_out,
    keyword,
    copied_on_custom,
    inner_waits,
    wait_for_one_of_three,
    states,
    one_micro_batch,
    two_inputs,
)


def lowered_text(made: Lowered, device: Device) -> str:
    """All jobs: what they keep, their arguments, and their operations with streams, events and attributes."""
    rings = dict[int, int]()
    lines = [
        f"fed: {made.fed}, micro-batches: {made.num_micro_batches}, messages: {made.has_p2p}, on the host: {sorted(made.on_host)}",
        f"outputs: {sorted(made.outputs)}, fetched: {len(made.fetched)}",
    ]
    for job, names in zip(made.jobs, kept_names(made.jobs, device), strict=True):
        block, known = job.program.global_block(), dict[Any, str]()
        lines.append(f"job {job.name}: keeps {' '.join(sorted(names)) or 'nothing'}; reads {' '.join(sorted(job.reads)) or 'nothing'}")
        for name, value in sorted(block.kwargs().items()):
            known[value.id] = name
            place = value.place_attr
            lines.append(f"  argument {name}{'!' if value.persistable else ''} {place}")
        for op in block.ops:
            lines.append(f"  {op_text(op, known, rings)}")
    return "\n".join(lines) + "\n"


def op_text(op: Any, known: dict[Any, str], rings: dict[int, int]) -> str:
    """An operation of a job; its results get the next numbers."""
    attrs = op.attrs()
    operands = ["-" if paddle.pir.is_fake_value(value) else known.get(value.id, "?") for value in op.operands_source()]
    for result in op.results():
        known[result.id] = f"%{len(known)}"
    made = " ".join(known[result.id] + ("!" if result.persistable else "") for result in op.results())
    told = [f"role {op.op_role}"]
    told += [f"stream {attrs['execution_stream']}"] if attrs.get("execution_stream") not in (None, "", "DefaultStream") else []
    told += [f"waits {' '.join(attrs['events_to_wait'])}"] if attrs.get("events_to_wait") else []
    told += [f"records {attrs['event_to_record']}"] if attrs.get("event_to_record") else []
    told += [f"always {attrs['force_record_event']}"] if "force_record_event" in attrs else []
    told += [f"ring {rings.setdefault(attrs['ring_id'], len(rings))}"] if "ring_id" in attrs else []
    told += [f"{name}={attrs[name]}" for name in TOLD if name in attrs]
    return f"{made} = {op.name()}({', '.join(operands)}) {', '.join(told)}".strip()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_lowered_jobs(case: Callable[[], Made], update_golden: bool) -> None:
    captured, program, kind = case()
    device = kind(paddle.CPUPlace())
    now = lowered_text(lower(captured, program, device), device)
    require_text(FOLDER / f"{case.__name__}.txt", now, update_golden)


def test_the_host_waits_for_a_result_that_the_device_computes() -> None:
    """Of three results the first is on the host: the second one is watched."""
    captured, program, kind = wait_for_one_of_three()
    (first,) = (op.results[0] for op in program.ops if op.kind == "layer_norm")
    values = tuple(msgspec.structs.replace(value, memory="host") if value.id == first else value for value in program.values)
    device = kind(paddle.CPUPlace())
    made = lowered_text(lower(captured, msgspec.structs.replace(program, values=values), device), device)
    assert made.count("pd_op.slice(%2, %4, %5) role 0, axes=[0]") == 2
    assert made.count("pd_op.sync_calc_stream_") == 2


@pytest.mark.parametrize(("kind", "count"), [(CpuDevice, 1), (GpuDevice, 0)])
def test_a_fused_buffer_of_which_a_tensor_is_written_over_is_read_at_the_end_of_its_job(kind: type[Device], count: int) -> None:
    """On a serial target, where the in-place pass would else put another result into it before that."""
    build = Build()
    with paddle.static.program_guard(build.main):
        x = build.data("x", [2, 4])
        tensors = [C.exp(x), C.tanh(x)]
        _, fused = C.coalesce_tensor_(tensors, paddle.float32, True, False, False, 0.0, True, -1, -1, [], [])
        C.relu_(tensors[0])
        C.set_persistable_value(C.scale(fused, 2.0, 0.0, True), "loss")
        build.role(0)
    captured = capture(build.main, Pipeline(num_micro_batches=1, schedule="accumulate"))
    device = kind(paddle.CPUPlace())
    text = lowered_text(lower(captured, planned(captured, throttle=None), device), device)
    (buffer,) = re.findall(r"(\S+) = pd_op\.coalesce_tensor_", text)
    job = text.partition("job forward_0")[2].partition("job interlace_collect")[0]
    assert len(re.findall(rf"pd_op\.share_data\({buffer}\)", job)) == count


def test_a_copy_that_no_job_in_front_makes_is_refused_by_its_number() -> None:
    """The captured program has no such value, so nothing says of which type it is."""
    captured, program, kind = copied()
    (copy, *_) = (op for op in program.ops if op.kind.startswith("memcpy") and op.role == "backward")
    (job, *_) = (job for job in program.jobs if any(op == copy.id for op, _ in job.items))
    first = msgspec.structs.replace(program, jobs=(job, *(each for each in program.jobs if each is not job)), events=())
    with pytest.raises(PlanError, match=rf"value %{copy.operands[0]} is read before any job gives it"):
        lower(captured, first, kind(paddle.CPUPlace()))
