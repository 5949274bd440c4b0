"""`reduce-in-place`: an all_reduce whose operand nothing else reads overwrites that operand with the sum."""

from __future__ import annotations

import msgspec

from interlace.ir import Graph, Op, Program
from interlace.ir.kinds import NO_KERNEL
from interlace.ir.operation_kinds import SILENT
from interlace.ir.storage import Storage
from interlace.passes.base import Context, Pass, check_unscheduled, register
from interlace.passes.own_memory import has_own_memory, users_of

NAME = "pd_op.all_reduce"


@register
class ReduceInPlace(Pass, frozen=True, kw_only=True):
    """Let an all_reduce overwrite its operand with the sum if nothing else reads the operand.

    A collective on a stream of its own allocates its result on that stream. The blocks of its operand and its result are then each read
    last on another stream, and so are not reused before the host sees that this reader has completed. In place, it needs one block, which
    the compute stream both allocates and reads last, so that the memory is reused in the order of that stream.

    Contract: keeps every value that is read, bit for bit, and the order of all operations. Each rank decides for itself; peers see the
    same collective.

    Before / After:
        %2 = pd_op.matmul_grad(%0, %1)                  %2 = pd_op.matmul_grad(%0, %1)
        %3 = pd_op.all_reduce(%2)                       %3~2 = pd_op.all_reduce_(%2)

    Steps: 1 find sums whose operand is a tensor in memory of its own that nothing else reads, or a buffer that lives across steps (such as
    one in which Paddle accumulates gradients of micro-batches) whose next user overwrites all of it; 2 let each overwrite its operand.

    Source: rules 7 and 9 in docs/gpu-place.md. Paddle's in-place pass, which is off for our jobs, does this for the first kind of operand.
    """

    name = "reduce-in-place"
    after = ("narrow-gathers", "overlap-column-backward")
    is_default = True
    in_baseline = False

    def run(self, program: Program, context: Context) -> Program:
        check_unscheduled(program)
        graph, found = Graph(program), dict[int, Op]()
        for op in program.ops:
            if op.name == NAME and _is_free(graph, op):
                found[op.id] = msgspec.structs.replace(op, name=f"{NAME}_", origin=-1, inplace=((0, 0),))
        if not found:
            return program
        sizes = [graph.values[op.operands[0]].size_bytes for op in found.values()]
        context.applied("reduced-in-place", collectives=len(found), size_bytes=sum(sizes))
        joined = {graph.values[op.results[0]].storage: graph.values[op.operands[0]].storage for op in found.values()}
        values = [msgspec.structs.replace(value, storage=_end_of(joined, value.storage)) for value in program.values]
        return program.with_ops([found.get(op.id, op) for op in program.ops], values)


def _end_of(joined: dict[int, int], storage: int) -> int:
    """The storage that a storage is finally merged into; sums in a row make a chain."""
    while storage in joined:
        storage = joined[storage]
    return storage


def _is_free(graph: Graph, op: Op) -> bool:
    """Whether an operation may write its result over its first operand."""
    table, value = graph.storages, op.operands[0]
    source, result = table.of(value), table.of(op.results[0])
    if len(source) != 1 or len(result) != 1 or not has_own_memory(graph, op.results[0], result[0]):
        return False
    (storage,) = source
    if storage.memory != "device" or storage.vectors or {*table.numbers(value)} & table.cleared_buffers():
        return False
    if graph.values[value].size_bytes != storage.size_bytes:
        return False
    users = users_of(graph, storage)
    if not storage.persistable:
        maker = graph.producer_op(value)
        is_alone = storage.values == [value] and [each.id for each in users] == [op.id]
        return is_alone and not storage.kept and maker is not None and _makes_memory(maker)
    place = graph.position
    later = sorted((each for each in users if place[each.id] > place[op.id]), key=lambda each: place[each.id])
    before = [each for each in users if place[each.id] < place[op.id]]
    return (
        op.role == "optimize"  # runs once per step
        and bool(later)
        and _overwrites(later[0], storage)
        and all(_only_writes(each, storage) for each in before)
        and all(place[each.id] < place[later[0].id] for each in users_of(graph, result[0]))
    )


def _makes_memory(op: Op) -> bool:
    """Whether an operation computes its result into memory that it allocates: not an input, a constant, or one that CPU ranks skip."""
    return op.name not in NO_KERNEL and op.kind not in SILENT and op.kind != "constant"


def _overwrites(op: Op, storage: Storage) -> bool:
    """Whether an operation writes all of a buffer and reads nothing of it."""
    whole = op.kind == "set_value_with_tensor" and not any(op.attrs.get(name, ()) for name in ("axes", "decrease_axes", "none_axes"))
    return whole and (0, 0) in op.inplace and op.operands[0] in storage.values and not set(op.operands[1:]) & set(storage.values)


def _only_writes(op: Op, storage: Storage) -> bool:
    """Whether an operation takes values of a buffer only as operands that it overwrites."""
    written = {op.operands[operand] for _, operand in op.inplace}
    return written >= {value for value in op.operands if value in storage.values}
