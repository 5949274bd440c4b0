"""What forward leaves for backward."""

from __future__ import annotations

from interlace.ir import Program
from interlace.ir.storage import storages_of


def saved_bytes(program: Program) -> int:
    """Device bytes of a micro-batch that forward computes and backward reads. O(operations)."""
    table = storages_of(program)
    forward = {value for op in program.ops if op.role == "forward" for value in op.results}
    read = {number for op in program.ops if op.role == "backward" for v in op.reads if v in forward for number in table.numbers(v)}
    found = (table.storages[number] for number in read)
    return sum(max(0, each.size_bytes) for each in found if not each.persistable and each.memory == "device")
