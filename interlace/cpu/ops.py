"""Make the communication of a Paddle program run on CPU processes.

Paddle's CPU kernels cannot do it: send and receive throw, and all groups share one communicator. So every communication
op of a PIR program is replaced by Python ops that call the transport. If the result of an op is first read after other
ops, the op is split in two: its data leaves at the op's own place, and the wait is at the first reader, as if the op ran
on a separate stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle.base import core
from paddle.distributed.auto_parallel.static import process_group

from interlace.cpu.parallel_cross_entropy import cross_entropy, cross_entropy_grad
from interlace.cpu.reduction import Array
from interlace.cpu.transport import Pending, Transport
from interlace.errors import ProgramError, TransportError
from interlace.ir.operation_kinds import COLLECTIVES, RECEIVES, SENDS, SILENT, WITHOUT_GROUP

WHERE_ATTRIBUTE = "interlace_at"  # a string attribute of an op that says, for users, where in the step it is
_REDUCE_NAMES = {0: "sum", 1: "max", 2: "min", 3: "prod", 4: "avg"}  # paddle.distributed.ReduceOp
_IDENTITIES = frozenset({"c_identity", "sync_calc_stream", "sync_comm_stream", "mp_allreduce_sum_grad"})

Starter = Callable[[Transport, Array, str, str], Pending]


@dataclass(slots=True)
class _World:
    """The transport of this rank, and the first failure of a communication op."""

    transport: Transport | None = None
    failure: BaseException | None = None


@dataclass(slots=True, frozen=True)
class _Site:
    """One communication op of a program: its group, and how to name it in an error."""

    op: Any
    name: str
    group: int
    ranks: tuple[int, ...]
    where: str

    def rank_of(self, attribute: str) -> int:
        """The global rank for an attribute that contains a rank within the group."""
        return self.ranks[int(self.op.int_attr(attribute))]

    def reduce_name(self) -> str:
        """The reduction, such as `sum`."""
        return _REDUCE_NAMES[int(self.op.int_attr("reduce_type"))]


_WORLD = _World()
_PENDING: dict[int, Pending] = {}
_TICKETS = itertools.count()
_LABELS = itertools.count()


def set_transport(transport: Transport | None) -> None:
    """Use this transport in all rewritten programs of this process."""
    _WORLD.transport = transport


def has_transport() -> bool:
    """Whether this process is a rank that a transport connects to the others."""
    return _WORLD.transport is not None


def transport() -> Transport:
    """The transport of this process. Raises TransportError before `set_transport`."""
    if _WORLD.transport is None:
        raise TransportError("no transport in this process: start the script with `interlace run`, or call install()")
    return _WORLD.transport


def first_failure() -> BaseException | None:
    """The first exception of a communication op; Paddle's executor loses it and raises a SystemError instead."""
    return _WORLD.failure


def forget_failure() -> None:
    """Reset `first_failure`."""
    _WORLD.failure = None


def rewrite_program(program: Any, job: str) -> dict[str, int]:
    """Replace all communication ops of `program`, in place; returns how many of each name were replaced.

    Roles and chunk ids stay; waits for events are removed, because the CPU executor has no events. `job` names the program
    in errors. Raises ProgramError on an unknown op that communicates.
    """
    counts: dict[str, int] = {}
    for block in _blocks(program.global_block()):
        for index, op in enumerate(list(block.ops)):
            name = op.name().removeprefix("pd_op.")
            if _rewrite_op(op, name, f"job {job}, op {index} {op.name()}"):
                counts[op_name(name)] = counts.get(op_name(name), 0) + 1
        for op in list(block.ops):
            if op.has_attr("events_to_wait"):
                op.erase_attr("events_to_wait")
            if op.name() == "pd_op.share_var" and _is_released(op):
                op.erase()
    return counts


def communication_names() -> list[str]:
    """Names of all ops that `rewrite_program` replaces or refuses; programs with them must build before they can be rewritten."""
    return sorted({*COLLECTIVES, *SENDS, *RECEIVES, *SILENT, *WITHOUT_GROUP})


def op_name(name: str) -> str:
    """Name of an op without the mark of its in-place form."""
    return name.removesuffix("_")


def _blocks(block: Any) -> Iterator[Any]:
    yield block
    for op in block.ops:
        for inner in op.blocks() if op.num_regions() else ():  # calling `blocks` for every op would take most of the time
            yield from _blocks(inner)


def _rewrite_op(op: Any, name: str, place: str) -> bool:
    """Replace one op if it communicates, or is a communication op that does nothing; returns whether it did. Raises ProgramError."""
    plain = op_name(name)
    if plain in _IDENTITIES:
        op.result(0).replace_all_uses_with(op.operand_source(0))
        op.erase()
        return True
    if plain in _SPECIAL:
        _replace(op, _SPECIAL[plain](_site(op, place)))
        return True
    if plain in STARTERS:
        site = _site(op, place)
        _replace_communication(site, STARTERS[plain](site), in_place=name.endswith("_"))
        return True
    if op.has_attr("ring_id") or plain in WITHOUT_GROUP:
        known = ", ".join(sorted([*STARTERS, *_SPECIAL, *_IDENTITIES]))
        raise ProgramError(
            f"{place} communicates, and CPU processes cannot run it yet; known are: {known}. Build the model without it, or run it on GPUs"
        )
    return False


def _site(op: Any, place: str) -> _Site:
    ring = op.int_attr("ring_id") if op.has_attr("ring_id") else -1
    where = op.str_attr(WHERE_ATTRIBUTE) if op.has_attr(WHERE_ATTRIBUTE) else place
    return _Site(op, op.name(), ring, () if ring < 0 else _ranks_of(ring, place), where)


def _ranks_of(ring: int, place: str) -> tuple[int, ...]:
    """Ranks of a group, in Paddle's order."""
    group = process_group.get_process_group(ring)
    if group is not None and group.ranks:
        return tuple(int(rank) for rank in group.ranks)  # numpy integers if the group comes from a mesh
    known = sorted(int(each.id) for each in process_group.get_all_process_groups())
    raise ProgramError(f"{place}: group {ring} is unknown to Paddle; known groups: {known}")


# -- replacing ops ---------------------------------------------------------------------------------------------------


def _replace_communication(site: _Site, start: Starter, in_place: bool) -> None:
    """Replace one communication op by Python ops: two if its result is first read after other ops, otherwise one."""
    op = site.op
    paddle.pir.set_insertion_point(op)
    operand = op.operand_source(0) if op.num_operands() else None
    result = op.result(0) if op.num_results() else None
    reader = None if result is None else _first_later_reader(op, (result, operand) if in_place else (result,))
    if result is not None and reader is None:
        value = _python_op(site.name, _whole_function(site, start), operand, result.shape, result.dtype)
        _replace(op, [value], in_place)
        return
    ticket = _python_op(f"{site.name}.start", _start_function(site, start), operand, [1], paddle.int64)
    _take_over(ticket, op)
    if result is None:
        op.erase()
        return
    paddle.pir.set_insertion_point(reader)
    value = _python_op(f"{site.name}.finish", _finish, ticket, result.shape, result.dtype)
    _replace(op, [value], in_place)


def _first_later_reader(op: Any, values: Sequence[Any]) -> Any | None:
    """The first later op that reads one of these values. None if there is none, if it is the next op, or if a value is read inside a
    region."""
    block = op.get_parent_block()
    readers = {reader for value in values for reader in value.all_used_ops()}
    if not readers or any(reader.get_parent_block() != block for reader in readers):
        return None
    after = itertools.dropwhile(lambda other: other != op, block.ops)
    for distance, other in enumerate(after):
        if distance and other in readers:
            return other if distance > 1 else None
    return None


def _replace(op: Any, values: list[Any], in_place: bool = False) -> None:
    """Replace the results of `op` by `values`, and erase it.

    A Python op always puts its result into a new buffer. So the first result is copied into the operand's buffer if
    `op` is an in-place form, and into the buffer that a `share_var` names for it (fused gradients and parameters).
    """
    _take_over(values[0], op)
    targets = [op.operand_source(0)] if in_place else []
    targets += [_shared_target(use) for use in op.result(0).all_used_ops() if use.name() == "pd_op.share_var"]
    for target in targets:
        paddle.pir.set_insertion_point_after(values[0].get_defining_op())
        values = [paddle._C_ops.assign_out_(values[0], target), *values[1:]]
        _take_over(values[0], op)
    for result, value in zip(op.results(), values, strict=True):
        value.stop_gradient = True
        result.replace_all_uses_with(value)
    op.erase()


def _shared_target(share: Any) -> Any:
    """The value into whose buffer the result must be written: `target` of `share_var(target, result)`. Raises ProgramError if it shares
    more than two values."""
    if share.num_operands() != 2:
        raise ProgramError(
            f"pd_op.share_var over {share.num_operands()} values, one of them the result of communication: "
            "expected a target and the result; CPU processes cannot keep more in one buffer"
        )
    return share.operand_source(0)


def _is_released(share: Any) -> bool:
    """Whether a `share_var` has been replaced by writing into its target."""
    maker = share.operand_source(share.num_operands() - 1).get_defining_op()
    return bool(maker is not None and maker.name() == "pd_op.assign_out_" and share.num_operands() == 2)


def _take_over(value: Any, op: Any) -> None:
    new = value.get_defining_op()
    new.op_role = op.op_role
    new.chunk_id = op.chunk_id
    if op.has_attr(WHERE_ATTRIBUTE):
        new.set_str_attr(WHERE_ATTRIBUTE, op.str_attr(WHERE_ATTRIBUTE))


def _python_op(name: str, function: Callable[..., Any], operand: Any | None, shape: Sequence[int], dtype: Any) -> Any:
    """Insert a Python op with at most one operand and one result of this shape and dtype; returns the result."""
    shape = list(shape)

    def meta() -> Any:
        return paddle.static.MetaTensor(shape=shape, dtype=dtype)

    if operand is None:
        return _registered(name, function, meta, [], ["out"])()
    return _registered(name, function, lambda x: meta(), ["x"], ["out"])(operand)


def _registered(name: str, function: Callable[..., Any], meta: Callable[..., Any], inputs: list[str], outputs: list[str]) -> Any:
    """A function that inserts a Python op which runs `function`; `meta` returns the types of its results."""
    return paddle.static.python_op.register_op(
        function, name=_unique_label(name), infer_meta=meta, input_names=inputs, output_names=outputs
    )


def _unique_label(name: str) -> str:
    """A name that no other Python op has: Paddle keeps one function per name, the one registered last."""
    plain = name.removeprefix("pd_op.").replace(".", "_").replace("_grad", "_backward")  # Paddle parses "_grad"
    return f"interlace_{plain}_{next(_LABELS)}"


def _runner(site: _Site, start: Starter) -> Callable[[Any | None], Pending]:
    """A function that starts this site's communication, and counts its runs so that errors can name the run."""
    runs = itertools.count(1)
    known_where = site.op.has_attr(WHERE_ATTRIBUTE)
    where = site.where

    def run(tensor: Any | None) -> Pending:
        label = where if known_where else f"{where}, run {next(runs)}"
        if tensor is None:
            return start(transport(), np.zeros(0, np.uint8), "", label)
        return start(transport(), tensor.numpy(), type_name(tensor.dtype), label)

    return run


def _whole_function(site: _Site, start: Starter) -> Callable[..., Any]:
    run, dtype = _runner(site, start), type_name(site.op.result(0).dtype)
    if not site.op.num_operands():

        def receive() -> Any:
            return _guarded(lambda: to_tensor(run(None).wait(), dtype))

        return receive

    def communicate(x: Any) -> Any:
        return _guarded(lambda: to_tensor(run(x).wait(), dtype))

    return communicate


def _start_function(site: _Site, start: Starter) -> Callable[..., Any]:
    run = _runner(site, start)
    dtype = type_name(site.op.result(0).dtype) if site.op.num_results() else ""

    def begin(tensor: Any | None) -> Any:
        ticket = next(_TICKETS)
        pending = run(tensor)
        if dtype:
            _PENDING[ticket] = pending.then(lambda array: to_tensor(array, dtype))
        return to_tensor(np.array([ticket]), "int64")

    if not site.op.num_operands():

        def start_receive() -> Any:
            return _guarded(lambda: begin(None))

        return start_receive

    def start_communication(x: Any) -> Any:
        return _guarded(lambda: begin(x))

    return start_communication


def _finish(x: Any) -> Any:
    return _guarded(lambda: _PENDING.pop(int(x.numpy()[0])).wait())


def _guarded(action: Callable[[], Any]) -> Any:
    """Run `action`, and remember the first failure in this process."""
    try:
        return action()
    except BaseException as error:
        _WORLD.failure = _WORLD.failure or error
        raise


# -- tensors and arrays ----------------------------------------------------------------------------------------------


def type_name(kind: Any) -> str:
    """The name of a Paddle dtype or reduction: `DataType.BFLOAT16` is `bfloat16`, `ReduceOp.SUM` is `sum`."""
    return str(kind).rpartition(".")[2].lower()


def to_tensor(array: Array, dtype: str) -> Any:
    """A CPU tensor of Paddle's element type `dtype` from a numpy array of `carrier_dtype(dtype)`; copies."""
    tensor = core.eager.Tensor(value=np.asarray(array), place=paddle.CPUPlace(), persistable=False, zero_copy=False, stop_gradient=True)
    return tensor.view(dtype) if dtype.startswith("float8") else tensor


# -- what each op does -----------------------------------------------------------------------------------------------


def _all_reduce_by(site: _Site, reduction: str) -> Starter:
    return lambda t, x, dtype, where: t.start_all_reduce(x, reduction, site.group, site.ranks, where, dtype)


def _reduce(site: _Site) -> Starter:
    root, reduction = site.rank_of("root_id"), site.reduce_name()
    return lambda t, x, dtype, where: t.start_reduce(x, reduction, root, site.group, site.ranks, where, dtype)


def _broadcast(site: _Site) -> Starter:
    root = site.rank_of("root")
    return lambda t, x, dtype, where: t.start_broadcast(x, root, site.group, site.ranks, where, dtype)


def _gather_along(site: _Site, axis: int) -> Starter:
    def start(t: Transport, x: Array, dtype: str, where: str) -> Pending:
        pending = t.start_all_gather(np.atleast_1d(x), site.group, site.ranks, where, dtype)
        return pending.then(lambda parts: np.concatenate(parts, axis=axis))

    return start


def _reduce_scatter(site: _Site) -> Starter:
    return lambda t, x, dtype, where: t.start_reduce_scatter(x, "sum", site.group, site.ranks, where, dtype)


def _all_to_all(site: _Site) -> Starter:
    return lambda t, x, dtype, where: t.start_all_to_all(x, site.group, site.ranks, where, dtype)


def _send(site: _Site) -> Starter:
    peer = site.rank_of("peer")

    def start(t: Transport, x: Array, dtype: str, where: str) -> Pending:
        t.send(x, peer, site.group, site.ranks, where, dtype)
        return Pending(lambda: None)

    return start


def _receive(site: _Site) -> Starter:
    peer = site.rank_of("peer")
    result = site.op.result(0)
    shape, element = tuple(result.shape), type_name(result.dtype)
    return lambda t, x, dtype, where: t.start_recv(shape, element, peer, site.group, site.ranks, where)


def _barrier(site: _Site) -> Starter:
    def start(t: Transport, x: Array, dtype: str, where: str) -> Pending:
        t.barrier(site.group, site.ranks, where)
        kept = np.array(x)
        return Pending(lambda: kept)

    return start


STARTERS: dict[str, Callable[[_Site], Starter]] = {
    "all_gather": lambda site: _gather_along(site, 0),
    "all_reduce": lambda site: _all_reduce_by(site, site.reduce_name()),
    "all_to_all": _all_to_all,
    "barrier": _barrier,
    "broadcast": _broadcast,
    "c_allreduce_max": lambda site: _all_reduce_by(site, "max"),
    "c_allreduce_min": lambda site: _all_reduce_by(site, "min"),
    "c_allreduce_prod": lambda site: _all_reduce_by(site, "prod"),
    "c_allreduce_sum": lambda site: _all_reduce_by(site, "sum"),
    "c_concat": lambda site: _gather_along(site, -1),
    "mp_allreduce_sum": lambda site: _all_reduce_by(site, "sum"),
    "recv_v2": _receive,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "send_v2": _send,
}


# -- ops that are more than one communication, or none ---------------------------------------------------------------


def _split_last(site: _Site) -> list[Any]:
    """`c_split`: this rank's part of the last dimension."""

    def part(x: Any) -> Any:
        index = site.ranks.index(transport().rank)
        return _guarded(lambda: to_tensor(np.split(x.numpy(), len(site.ranks), axis=-1)[index], type_name(x.dtype)))

    paddle.pir.set_insertion_point(site.op)
    result = site.op.result(0)
    return [_python_op(site.name, part, site.op.operand_source(0), result.shape, result.dtype)]


def _cross_entropy(site: _Site) -> list[Any]:
    """`c_softmax_with_cross_entropy`: classes split over the group.

    The op's own `rank` attribute is not used: Paddle's pass writes the global rank there, not the rank within the group.
    """
    ignore, runs = int(site.op.attrs()["ignore_index"]), itertools.count(1)
    dtype = type_name(site.op.operand_source(0).dtype)
    shapes = [list(result.shape) for result in site.op.results()]
    dtypes = [result.dtype for result in site.op.results()]

    def forward(logits: Any, label: Any) -> Any:
        where = f"{site.where}, run {next(runs)}"
        both = _guarded(lambda: cross_entropy(transport(), logits.numpy(), label.numpy(), dtype, ignore, site.group, site.ranks, where))
        return tuple(to_tensor(array, dtype) for array in both)

    def meta(logits: Any, label: Any) -> Any:
        metas = (paddle.static.MetaTensor(shape=s, dtype=d) for s, d in zip(shapes, dtypes, strict=True))
        return tuple(metas)

    return _python_op_of_many(site, forward, meta, ["logits", "label"], ["softmax", "loss"])


def _cross_entropy_grad(site: _Site) -> list[Any]:
    ignore, result = int(site.op.attrs()["ignore_index"]), site.op.result(0)
    shape, paddle_dtype, dtype = list(result.shape), result.dtype, type_name(result.dtype)

    def backward(softmax: Any, label: Any, loss_grad: Any) -> Any:
        index = site.ranks.index(transport().rank)
        arrays = (softmax.numpy(), label.numpy(), loss_grad.numpy())
        return _guarded(lambda: to_tensor(cross_entropy_grad(*arrays, dtype, ignore, index), dtype))

    def meta(softmax: Any, label: Any, loss_grad: Any) -> Any:
        return paddle.static.MetaTensor(shape=shape, dtype=paddle_dtype)

    return _python_op_of_many(site, backward, meta, ["softmax", "label", "loss_grad"], ["logits_grad"])


def _python_op_of_many(
    site: _Site, function: Callable[..., Any], meta: Callable[..., Any], inputs: list[str], outputs: list[str]
) -> list[Any]:
    """Insert a Python op before `site.op` with the same operands and number of results; returns its results."""
    paddle.pir.set_insertion_point(site.op)
    made = _registered(site.name, function, meta, inputs, outputs)(*site.op.operands_source())
    return [made] if len(outputs) == 1 else list(made)


_SPECIAL: dict[str, Callable[[_Site], list[Any]]] = {
    "c_softmax_with_cross_entropy": _cross_entropy,
    "c_softmax_with_cross_entropy_grad": _cross_entropy_grad,
    "c_split": _split_last,
}
