"""`reduce-in-place`: an all_reduce of what nothing else reads writes its sum over it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from interlace.ir import Graph, Op, Program
from interlace.ir.storage import Storage
from interlace.passes.base import Context, Pass, register
from interlace.passes.weight_gradients import check_unscheduled

NAME = "pd_op.all_reduce"


@register
class ReduceInPlace(Pass, frozen=True, kw_only=True):
    """Let an all_reduce of what nothing else reads write its sum over it.

    A collective on a stream of its own takes its result from that stream's memory, and neither what it reads nor its result is used again
    before the host sees that the last reader, on another stream, has completed. In place it needs one block, which the stream of
    computation takes and reads last, so that memory comes back in the order of that stream.

    Contract: keeps every value that is read, bit for bit, and the order of all operations. Each rank decides for itself; peers see the
    same collective.

    Before / After:
        %2 = pd_op.matmul_grad(%0, %1)                  %2 = pd_op.matmul_grad(%0, %1)
        %3 = pd_op.all_reduce(%2)                       %3~2 = pd_op.all_reduce_(%2)

    Steps: 1 find sums of a tensor in memory of its own that nothing else reads; and of a buffer that lasts, such as one in which Paddle
    merges gradients of micro-batches, if what uses it next overwrites all of it; 2 let each write over its operand.

    Source: rules 7 and 9 in docs/gpu-place.md; Paddle's in-place pass, which is off for our jobs, does it to tensors that do not last.
    """

    name = "reduce-in-place"
    after = ("narrow-gathers", "overlap-column-backward")
    is_default = True
    in_baseline = False

    def run(self, program: Program, context: Context) -> Program:
        check_unscheduled(program)
        graph, found = Graph(program), dict[int, Op]()
        place = {op.id: k for k, op in enumerate(program.ops)}
        for op in program.ops:
            if op.name == NAME and _is_free(graph, place, op):
                found[op.id] = msgspec.structs.replace(op, name=f"{NAME}_", origin=-1, inplace=((0, 0),))
        if not found:
            return program
        sizes = [graph.values[op.operands[0]].size_bytes for op in found.values()]
        context.applied("reduced-in-place", collectives=len(found), size_bytes=sum(sizes))
        joined = {graph.values[op.results[0]].storage: graph.values[op.operands[0]].storage for op in found.values()}
        values = [msgspec.structs.replace(value, storage=_end_of(joined, value.storage)) for value in program.values]
        return program.with_ops([found.get(op.id, op) for op in program.ops], values)


def _end_of(joined: dict[int, int], storage: int) -> int:
    """The storage that one became part of: sums may follow each other."""
    while storage in joined:
        storage = joined[storage]
    return storage


def _is_free(graph: Graph, place: dict[int, int], op: Op) -> bool:
    """Whether what an operation reads first may be overwritten by it."""
    table, value = graph.storages, op.operands[0]
    numbers = set(table.numbers(value))
    if len(numbers) != 1 or numbers & table.cleared_buffers() or numbers & set(table.numbers(op.results[0])):
        return False
    (storage,) = table.of(value)
    if storage.memory != "device" or storage.vectors or graph.values[value].size_bytes != storage.size_bytes:
        return False
    users = [graph.ops[each] for each in dict.fromkeys(user for each in storage.values for user in graph.users.get(each, ()))]
    if not storage.persistable:
        return not storage.kept and storage.values == [value] and [each.id for each in users] == [op.id]
    later = sorted((each for each in users if place[each.id] > place[op.id]), key=lambda each: place[each.id])
    before = [each for each in users if place[each.id] < place[op.id]]
    return bool(later) and _overwrites(later[0], storage) and all(_only_writes(each, storage) for each in before)


def _overwrites(op: Op, storage: Storage) -> bool:
    """Whether an operation writes all of a buffer and reads nothing of it."""
    whole = op.kind == "set_value_with_tensor" and not any(op.attrs.get(name, ()) for name in ("axes", "decrease_axes", "none_axes"))
    return whole and (0, 0) in op.inplace and op.operands[0] in storage.values and not set(op.operands[1:]) & set(storage.values)


def _only_writes(op: Op, storage: Storage) -> bool:
    """Whether an operation reads a buffer to write over it alone."""
    written: Sequence[int] = [op.operands[operand] for _, operand in op.inplace]
    return set(written) >= {value for value in op.operands if value in storage.values}
