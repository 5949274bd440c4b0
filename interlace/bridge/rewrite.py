"""Writes a rewritten `Program` back into the Paddle program from which it was captured."""

from __future__ import annotations

from typing import Any

import paddle

from interlace.bridge.attributes import attributes
from interlace.bridge.capture import Captured
from interlace.bridge.lower import ROLE_NUMBER
from interlace.bridge.newops import BUILDERS
from interlace.bridge.targets import Device
from interlace.errors import PlanError
from interlace.ir import ABSENT, Op, Program, describe
from interlace.ir.kinds import KEYWORD


def write_back(captured: Captured, program: Program, device: Device, *, roles: bool = True) -> None:
    """Change a Paddle program in place: add new operations, erase those that are gone, and set order, operands and streams. New operations
    get their role in `program`, unless `roles` is false, for Paddle programs without roles.

    Raises PlanError, before anything is changed, if an operation cannot be built.
    """
    ops = [op for op in program.ops if op.name != KEYWORD]
    for op in ops:
        if op.origin < 0 and op.name not in BUILDERS:
            raise PlanError(f"{describe(op)} is new and cannot be built; known are {sorted(BUILDERS)}")
    _Writer(captured, device, roles).write(ops)


class _Writer:
    def __init__(self, captured: Captured, device: Device, roles: bool) -> None:
        self.captured, self.device, self.roles = captured, device, roles
        self.block = captured.source.global_block()
        self.values: dict[int, Any] = {}
        for op in captured.program.ops:
            results = self._keyword(op) if op.name == KEYWORD else captured.source_ops[op.origin].results()
            self.values.update(zip(op.results, results, strict=True))

    def write(self, ops: list[Op]) -> None:
        """Build new operations at the end, then move every operation to the end in its new order, and update operands.

        Only building can fail, and it is then undone, as Paddle cannot even destroy a program whose operations are in a wrong order.
        """
        built = self._build_all([op for op in ops if op.origin < 0])
        for op in ops:
            source = built[op.id] if op.origin < 0 else self.captured.source_ops[op.origin]
            self.block.move_op_to_block_end(source)
            self._mark(op, source)
        for op in ops:
            self._mend(op)
        kept = {op.origin for op in ops}
        for number in reversed(range(len(self.captured.source_ops))):
            if number not in kept:
                self.captured.source_ops[number].erase()

    def _build_all(self, ops: list[Op]) -> dict[int, Any]:
        """Operation id -> the Paddle operation that was built (each builder makes one)."""
        first = len(self.block.ops)
        try:
            return {op.id: self._build(op) for op in ops}
        except BaseException:
            for made in reversed(self.block.ops[first:]):
                made.erase()
            raise

    def _keyword(self, op: Op) -> list[Any]:
        names = {value.id: value.name for value in self.captured.program.values}
        return [self.block.kwargs()[names[op.results[0]]]]

    def _build(self, op: Op) -> Any:
        paddle.pir.set_insertion_point_to_block_end(self.block)
        made = BUILDERS[op.name](op, [None if v == ABSENT else self.values[v] for v in op.operands], self.device)
        results = list(made) if isinstance(made, (list, tuple)) else [made]
        self.values.update(zip(op.results, results, strict=True))
        built = results[-1].get_defining_op()
        if self.roles:
            built.op_role = ROLE_NUMBER[op.role]
        built.set_int_attr("chunk_id", op.chunk if self.captured.program.pipeline.num_chunks > 1 else -1)
        return built

    def _mend(self, op: Op) -> None:
        if op.origin < 0:
            return
        source = self.captured.source_ops[op.origin]
        for k, value in enumerate(op.operands[: source.num_operands()]):
            if value != ABSENT and not source.operand_source(k).is_same(self.values[value]):
                source.operand(k).set_source(self.values[value])

    @staticmethod
    def _mark(op: Op, built: Any) -> None:
        if op.stream and attributes(built).get("execution_stream", "") != op.stream:
            built.set_execution_stream(op.stream)
        if op.priority:
            built.set_int_attr("stream_priority", op.priority)
