"""Preparation of Paddle programs for the testbed.

Point-to-point operations become broadcasts on their two-rank ring, because Paddle's own are legacy operators that no plugin can supply.
An operation that records an event for other jobs gets a reader on another stream, without which Paddle creates no event on a custom
device. Streams get the priority that the plan asks for. An operation without a kernel, and two rings or two priorities under one stream
name, are errors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import paddle
from paddle.base import core

from interlace.bridge.blocks import blocks_of
from testbed import device
from testbed.device import NAME, TestbedError

SHARED_STREAM_VARIABLE = "TESTBED_SHARED_STREAM"  # "first": rings of one stream name use that of the first, as on the GPU place
EVENT_STREAM, COPY_STREAM = "testbed_events", "D2HStream"
HOST_OPS = frozenset({"data", "fetch", "feed", "full_int_array", "shadow_output", "if", "nop", "print", "shape", "share_var"})
KERNEL_NAMES = {"assign_out": "assign", "flatten": "flatten", "send_v2": "broadcast", "recv_v2": "broadcast"}
DEFAULT_STREAMS = frozenset({"", "DefaultStream"})


def prepare_program(program: Any, job: str) -> None:
    """Rewrite one program in place.

    Raises:
        TestbedError: An operation has no kernel on the testbed, or two rings or two priorities have one stream name.
    """
    rewrite_p2p(program)
    rewrite_assign(program)
    name_copies(program)
    check_streams(program, job)
    check_kernels(program, job)
    let_events_exist(program)
    put_something_first(program)
    make_streams(program, job)


# -- point to point --------------------------------------------------------------------------------------------------


def rewrite_p2p(program: Any) -> int:
    """Replace sends and receives by broadcasts, and return their number."""
    found = [op for op in _ops(program) if op.name() in ("pd_op.send_v2", "pd_op.recv_v2")]
    for op in found:
        paddle.pir.set_insertion_point(op)
        ring, peer = op.int_attr("ring_id"), op.int_attr("peer")
        if op.name() == "pd_op.send_v2":
            made = paddle._C_ops.broadcast(op.operand_source(0), ring, 1 - peer)
        else:
            made = _receive(op, ring, peer)
            op.result(0).replace_all_uses_with(made)
        _take_over(made.get_defining_op(), op)
        if op.name() == "pd_op.send_v2":
            _take_holds_along(op)
        made.get_defining_op().set_execution_stream(_p2p_stream(op))
        op.erase()
    return len(found)


def rewrite_assign(program: Any) -> int:
    """Replace `assign` by a multiplication by one: for `assign` the wheel chooses its own kernel, which cannot write to this device."""
    found = [op for op in _ops(program) if op.name() == "pd_op.assign" and _type_name(op.result(0)) in ("float32", "bfloat16")]
    for op in found:
        paddle.pir.set_insertion_point(op)
        made = paddle._C_ops.scale(op.operand_source(0), 1.0, -0.0, True)
        op.result(0).replace_all_uses_with(made)
        _take_over(made.get_defining_op(), op)
        op.erase()
    return len(found)


def name_copies(program: Any) -> int:
    """Put copies to the host that have no stream on the one that the GPU place uses, so that computation continues while the host waits."""
    found = [op for op in _ops(program) if op.name() == "pd_op.memcpy_d2h" and not _stream(op)]
    for op in found:
        op.set_execution_stream(COPY_STREAM)
    return len(found)


def _text(op: Any, name: str) -> str:
    """A text attribute, or empty text. `attrs()` would fail if Paddle cannot convert any one of them (`interlace/bridge/attributes.py`)."""
    return str(op.str_attr(name)) if op.has_attr(name) else ""


def _stream(op: Any) -> str:
    named = _text(op, "execution_stream")
    return "" if named in DEFAULT_STREAMS else named


def _p2p_stream(op: Any) -> str:
    """The stream of a ring. Each has its own: unlike Paddle's operators, which find their ring by number, broadcasts cannot share one."""
    named = _text(op, "execution_stream")
    return f"{named or 'p2p'}.{op.int_attr('ring_id')}"


def _take_holds_along(send: Any) -> None:
    """Move last readers that keep the sent value alive from the send's stream to the ring's stream.

    Raises:
        TestbedError: A reader keeps the value alive for sends on two rings, which have different streams here.
    """
    named = _text(send, "execution_stream")
    users = [op for op in send.operand_source(0).all_used_ops() if named and _text(op, "execution_stream") == named]
    readers = [op for op in users if op.name() == "pd_op.share_data"]
    rings = {op.int_attr("ring_id") for op in users if op.name() == "pd_op.send_v2"}
    if readers and len(rings) > 1:
        raise TestbedError(
            f"rings {sorted(rings)} send one value on stream {named!r}, and one reader keeps it alive for both; each "
            "ring has a stream of its own here: name their streams differently (name_streams: on)"
        )
    for reader in readers:
        reader.set_execution_stream(_p2p_stream(send))


def _receive(op: Any, ring: int, peer: int) -> Any:
    """A broadcast into new memory, which is allocated on the receive's stream, so that it need not wait there."""
    result = op.result(0)
    empty = paddle._C_ops.empty(result.shape, result.dtype, paddle.CustomPlace(NAME, 0))
    maker = empty.get_defining_op()
    maker.op_role, maker.chunk_id = op.op_role, op.chunk_id
    maker.set_execution_stream(_p2p_stream(op))
    maker.set_int_attr("stream_priority", _priority(op))
    return paddle._C_ops.broadcast_(empty, ring, peer)


def _take_over(new: Any, old: Any) -> None:
    attributes = old.attrs()
    new.op_role, new.chunk_id = old.op_role, old.chunk_id
    for name in ("event_to_record", "interlace_at"):
        if name in attributes:
            new.set_str_attr(name, attributes[name])
    if attributes.get("force_record_event"):
        new.set_bool_attr("force_record_event", True)
    if "events_to_wait" in attributes:
        new.set_str_array_attr("events_to_wait", attributes["events_to_wait"])
    if "execution_stream" in attributes:
        new.set_execution_stream(attributes["execution_stream"])
    if "scheduling_priority" in attributes:
        new.set_scheduling_priority(attributes["scheduling_priority"])
    if "stream_priority" in attributes:
        new.set_int_attr("stream_priority", attributes["stream_priority"])


# -- events between jobs ---------------------------------------------------------------------------------------------


def let_events_exist(program: Any) -> int:
    """Give each operation that records an event a reader on another stream; return the number of these operations."""
    recorders = [op for op in _ops(program) if op.has_attr("force_record_event") and op.attrs()["force_record_event"]]
    for op in recorders:
        made = next((each for each in op.results() if each.initialized()), None)  # a gradient that is left out has no value
        if made is None:
            raise TestbedError(f"{op.name()} records event {_text(op, 'event_to_record')!r} and has no result that could be read")
        paddle.pir.set_insertion_point_after(op)
        on_host = op.name() == "pd_op.memcpy_d2h"  # where the wheel's share_data does not support bfloat16
        read = paddle._C_ops.shape if on_host else paddle._C_ops.share_data
        result = paddle._C_ops.builtin_split(made)[0] if made.type().as_vec_type() else made
        reader = read(result).get_defining_op()
        reader.op_role, reader.chunk_id = op.op_role, op.chunk_id
        reader.set_execution_stream(EVENT_STREAM)
    return len(recorders)


def put_something_first(program: Any) -> bool:
    """Put a host operation before a copy out that is the first of its program.

    For such a `memcpy_d2h`, Paddle's executor records the events to wait for again, on the compute stream, so that it waits for the work
    issued there so far instead of for the right work. The GPU place copies to the host by `memcpy`, which is not affected.
    """
    first = next(iter(_ops(program)), None)
    if first is None or first.name() != "pd_op.memcpy_d2h":
        return False
    paddle.pir.set_insertion_point(first)
    made = paddle._C_ops.full_int_array([0], paddle.int64, paddle.CPUPlace()).get_defining_op()
    made.op_role, made.chunk_id = first.op_role, first.chunk_id
    return True


# -- streams ---------------------------------------------------------------------------------------------------------

_streams: dict[str, tuple[int, int]] = {}
"""Stream name -> the requested priority, and the stream's number on the device."""


def make_streams(program: Any, job: str) -> int:
    """Create each stream that this program is the first to name, with the priority that its operations ask for; return their number.

    Paddle creates a stream at the first operation that names it, for the rest of the process. On the GPU place the stream gets that
    operation's priority; a custom device does not get it, so the stream is created here, before the operation runs.

    Raises:
        TestbedError: Operations of one stream name ask for different priorities.
    """
    before = len(_streams)
    for op in _ops(program):
        stream, asked = _stream(op), _priority(op)
        if not stream:
            continue
        if stream not in _streams:
            _streams[stream] = (asked, _make_stream(stream, asked))
        if (first := _streams[stream][0]) != asked:
            raise TestbedError(
                f"job {job}: {op.name()} asks for priority {asked} on stream {stream!r}, whose first operation asked for {first}; "
                "a stream name has one priority on a device: give all its operations the same one, or put them on another stream"
            )
    return len(_streams) - before


def _make_stream(name: str, priority: int) -> int:
    """Create a stream and return its number on the device; -1 if a program that was not prepared has created it, with priority 0."""
    if not _streams:
        _run_on(None)  # creates the streams of every program
    with device.new_streams(priority):
        before = len(device.stream_priorities())
        _run_on(name)
    made = len(device.stream_priorities()) - before
    if not made and not priority:
        return -1
    if made != 1:
        raise TestbedError(
            f"creating stream {name!r} with priority {priority} created {made} streams, expected one; "
            "a program that was not prepared may have named it before"
        )
    return before


def _run_on(stream: str | None) -> None:
    """Run one operation on a stream; None is the compute stream."""
    program, place = paddle.static.Program(), core.Place()
    place.set_place(paddle.CustomPlace(NAME, 0))
    with paddle.static.program_guard(program, paddle.static.Program()):
        made = paddle._C_ops.full([1], 0.0, paddle.float32, paddle.CustomPlace(NAME, 0))
        if stream is not None:
            made.get_defining_op().set_execution_stream(stream)
    core.StandaloneExecutor(place, core.Plan([core.Job("stream")], {"stream": program}), core.Scope()).run([], False)


def stream_priorities() -> dict[str, int]:
    """Stream name -> its priority on the device, for the streams of prepared programs."""
    found = device.stream_priorities()
    return {name: found[number] if number >= 0 else 0 for name, (_, number) in _streams.items()}


def _priority(op: Any) -> int:
    return int(op.int_attr("stream_priority")) if op.has_attr("stream_priority") else 0


# -- checks ----------------------------------------------------------------------------------------------------------

_ring_of_stream: dict[str, int] = {}


def check_streams(program: Any, job: str) -> None:
    """Check that each stream name has one ring in the whole process; with `TESTBED_SHARED_STREAM=first`, the first ring is used for all."""
    for op in _ops(program):
        stream = _text(op, "execution_stream") if op.has_attr("ring_id") else ""
        if stream in DEFAULT_STREAMS:
            continue
        first = _ring_of_stream.setdefault(stream, op.int_attr("ring_id"))
        if first == op.int_attr("ring_id"):
            continue
        if os.environ.get(SHARED_STREAM_VARIABLE) != "first":
            raise TestbedError(
                f"job {job}: {op.name()} of ring {op.int_attr('ring_id')} is on stream {stream!r}, which belongs to ring {first}; "
                "a stream name has one communicator on a device: give each ring a stream of its own"
            )
        op.set_int_attr("ring_id", first)


def check_kernels(program: Any, job: str) -> None:
    """Raise TestbedError for the first operation that Paddle would silently run on the CPU."""
    for op in _ops(program):
        dialect, _, name = op.name().partition(".")
        plain = name.removesuffix("_")
        plain = KERNEL_NAMES.get(plain, plain)
        if dialect != "pd_op" or plain in HOST_OPS:
            continue
        types = kernel_types().get(plain)
        if types is None:
            raise TestbedError(f"job {job}: {op.name()} has no kernel on the testbed, and would run on the CPU; write one in testbed/src")
        wanted = {_type_name(value) for value in (*op.operands_source(), *op.results())} - {""}
        if wanted and not wanted & types:
            raise TestbedError(f"job {job}: {op.name()} of {sorted(wanted)} has no kernel on the testbed; it has {sorted(types)}")


@cache
def kernel_types() -> dict[str, frozenset[str]]:
    """Kernel name -> element types, for every kernel of the testbed."""
    found: dict[str, frozenset[str]] = {}
    registered = vars(core)["_get_registered_phi_kernels"]  # missing in Paddle's type stubs
    for name, keys in registered("all").items():
        types = {key.strip("()").split(", ")[2] for key in keys if key.startswith(f"({NAME},")}
        if types:
            found[name] = frozenset(types)
    return found


def _type_name(value: Any) -> str:
    try:
        return _name_of(value.dtype)
    except (ValueError, RuntimeError, AttributeError):  # vectors and absent operands have no type
        return ""


@cache
def _name_of(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2].lower()


def _ops(program: Any) -> Iterator[Any]:
    """All operations; those inside branches come after the operation that contains them."""
    return iter(list(_ops_in(program.global_block())))


def _ops_in(block: Any) -> Iterator[Any]:
    for op in block.ops:
        yield op
        for inner in blocks_of(op):
            yield from _ops_in(inner)


# -- names in traces -------------------------------------------------------------------------------------------------

_ROLES = {0: "forward", 1: "backward", 2: "optimize"}


def planned_ops(plan: Any) -> tuple[list[str], list[tuple[int, str, str, str, int | None, str]]]:
    """The names of a plan's jobs, and its operations in host order as (job, kernel, stream, role, micro-batch, label)."""
    jobs, rows = list(plan.job_list()), []
    one_id = len({job.micro_batch_id() for job in jobs}) == 1  # jobs mix micro-batches, or there is only one
    for number, job in enumerate(jobs):
        for op in _ops(plan.ir_program(job.type())):
            dialect, _, name = op.name().partition(".")
            if dialect == "pd_op" and name not in HOST_OPS:
                rows.append((number, *_row(op, name.removesuffix("_"), None if one_id else job.micro_batch_id())))
    return [job.type() for job in jobs], rows


def _row(op: Any, name: str, micro_batch: int | None) -> tuple[str, str, str, int | None, str]:
    label = _text(op, "interlace_at")
    if label.startswith("micro-batch "):
        micro_batch = int(label.removeprefix("micro-batch ").partition(",")[0])
    return KERNEL_NAMES.get(name, name), _stream(op), _ROLES.get(op.op_role, "other"), micro_batch, label


def labels(plan: Any, issued: Sequence[str]) -> dict[int, str]:
    """Index in `issued`, the names of a step's operations in host order -> label of the matching operation of the plan."""
    from testbed.device import Issue
    from testbed.trace import Planned, align, snake

    issues = [Issue(0.0, name, 0, number) for number, name in enumerate(issued)]
    names = {snake(name) for name in issued}
    planned = [Planned(*row) for row in planned_ops(plan)[1]]
    return {number: row.label for number, row in align([row for row in planned if row.name in names], issues).items() if row.label}
