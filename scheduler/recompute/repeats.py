"""Recomputation that could be added: the program as if backward recomputed all values of forward that it reads and can recompute.

Repetitions of values that are to be kept are then removed again (`copies.py`). Operations that draw random numbers, have side effects or
work in place are not repeated. Collectives are repeated only on request, and only in groups within one stage, whose ranks decide alike. A
repetition starts from the nearest values that backward reads anyway, and from those that pass from layer to layer (the residual sum), which
are kept: if these were recomputed too, the first layer of backward would need all of forward again, and hold all of it.
"""

from __future__ import annotations

import msgspec

from interlace.ir import ABSENT, Edit, Graph, Op, Program
from interlace.ir.effects import is_repeatable
from interlace.ir.equivalent_ranks import groups_within_stage
from interlace.ir.graph import written_operands
from interlace.ir.kinds import is_boundary, is_comm, is_p2p
from interlace.scheduler.recompute.copies import COPY, IDENTITY, aliased

MUCH = 4
"""A value from which all later ones follow stays where what lies between it and the one before takes so many times its bytes. Between two
residual sums lie nine times their bytes and more; what one operation gives has once or twice those of what it reads. Where collectives
cut the layers (mp 2) values from 1 to any give the same: 31, 47 and 36 groups of GPT-3 6.7B, Llama 7B, and GPT-3 on one stage."""
ADDED = -2
"""`bwd_recompute_id` of operations that are added here; Paddle numbers its own from 0."""


def with_repeats(program: Program, collectives: bool = False) -> Program:
    """The captured program with a repetition, marked as by Paddle's recompute pass, of every value of forward that backward reads and can
    recompute; each comes before its first reader. With `collectives`, those within the stage are repeated too. Returns the same program if
    there is nothing to repeat, or if nested blocks may read unknown values."""
    nested = any(op.num_blocks for op in program.ops if op.role != "optimize")
    return program if nested else _Adding(program, collectives).run()


class _Adding:
    """Attributes:
    groups: Ids of groups whose collectives may be repeated.
    there: Values from which repetitions start: what backward reads anyway, and what passes from layer to layer.
    again: Results of forward that can be computed again from those -> the operation that gives them.
    wanted: Those of them that backward reads, and whose memory nothing else holds.
    repeated: Value of forward -> the repeated one."""

    def __init__(self, program: Program, collectives: bool) -> None:
        self.groups = groups_within_stage(program) if collectives else set[int]()
        self.program, self.graph, self.edit = program, Graph(program), Edit(program)
        writers = [op for op in program.ops if op.name not in IDENTITY and op.role != "optimize"]
        self.changing = self.graph.storages.numbers_of(v for op in writers for v in written_operands(op))
        self.read = {v: None for op in program.ops if op.role == "backward" for v in op.reads if self._role(v) == "forward"}
        given = (v for op in program.ops if is_boundary(op) for v in op.results)
        self.there = {v for v in (*self.read, *given) if self._is_steady(v)}
        self.again = self._again()
        self.wanted = self._wanted()
        self.repeated: dict[int, int] = {}

    def run(self) -> Program:
        if not self.wanted:
            return self.program
        for op in self.program.ops:
            if op.role != "backward":
                continue
            made = [each for value in op.reads for each in self._repeat(value)]
            self.edit.before(op.id, made)
            read = {v for v in op.reads if v in self.wanted}
            operands = tuple(self.repeated[v] if v in read and k not in op.no_buffer else v for k, v in enumerate(op.operands))
            if operands != op.operands:
                self.edit.replace(op.id, [msgspec.structs.replace(op, operands=operands)])
        return aliased(self.edit.build())

    def _role(self, value: int) -> str:
        producer = self.graph.producer_op(value)
        return producer.role if producer is not None else ""

    def _is_steady(self, value: int) -> bool:
        """Whether forward and backward never overwrite its memory."""
        return self.changing.isdisjoint(self.graph.storages.numbers(value))

    def _again(self) -> dict[int, Op]:
        found: dict[int, Op] = {}
        narrow, between = self._narrow(), 0
        for op in self.program.ops:
            if op.role != "forward":
                continue
            passes_on = [v for v in op.results if v in narrow]
            if not self._can_repeat(op, found):
                between = 0 if passes_on else between
            elif passes_on and between >= MUCH * sum(map(self._bytes, passes_on)):
                self.there.update(op.results)
                between = 0
            else:
                found.update(dict.fromkeys(op.results, op))
                between += sum(self._bytes(v) for v in op.results if v in self.read)
        return found

    def _can_repeat(self, op: Op, found: dict[int, Op]) -> bool:
        """Whether an operation of forward gives the same from what is there, or is computed again."""
        if not is_repeatable(op) or COPY in op.attrs or (is_comm(op) and op.group not in self.groups):
            return False
        return all(v in self.there or v in found for v in op.reads) and all(self._is_steady(v) for v in op.results)

    def _bytes(self, value: int) -> int:
        return max(0, self.graph.values[value].size_bytes)

    def _narrow(self) -> set[int]:
        """Results of forward from which alone, of all that the data or a received activation has led to, later operations of forward
        follow."""
        forward = [op for op in self.program.ops if op.role == "forward"]
        last = {v: k for k, op in enumerate(forward) for v in op.reads}
        given = (v for op in forward if is_boundary(op) for v in op.results)
        led = {v for v in given if not any(self.graph.storages.storages[n].persistable for n in self.graph.storages.numbers(v))}
        found, live = set[int](), set[int]()
        for k, op in enumerate(forward):
            if is_p2p(op) or not led.isdisjoint(op.reads):
                led.update(op.results)
                live.update(v for v in op.results if not is_boundary(op))
            live = {v for v in live if last.get(v, -1) > k}
            if len(live) == 1:
                found |= live
        return found

    def _wanted(self) -> set[int]:
        """What backward reads and can compute again; not where something else keeps the same memory all the same."""
        ends = [op for op in self.program.ops if is_boundary(op) or op.role == "optimize"]
        storages = self.graph.storages
        held = storages.numbers_of(v for v in self.read if v not in self.again)
        held |= storages.numbers_of(v for op in ends for v in (*op.results, *op.operands) if v != ABSENT)
        return {v for v in self.read if v in self.again and held.isdisjoint(storages.numbers(v))}

    def _repeat(self, value: int) -> list[Op]:
        """The operations that compute a value again, from what is there, in order; none where that is done already, or not wanted."""
        return self._made(value) if value in self.wanted and value not in self.repeated else []

    def _made(self, value: int) -> list[Op]:
        op = self.again[value]
        made = [each for v in op.reads if self._is_repeated(v) and v not in self.repeated for each in self._made(v)]
        results = [self.edit.value(like.type, elements=like.elements) for like in (self.graph.values[v] for v in op.results)]
        operands = [self.repeated.get(v, v) if v != ABSENT and k not in op.no_buffer else v for k, v in enumerate(op.operands)]
        self.repeated.update(zip(op.results, (each.id for each in results), strict=True))
        made.append(
            self.edit.op(
                op.name,
                operands,
                results,
                like=op,
                attrs={**op.attrs, COPY: ADDED},
                role="backward",
                views=op.views,
                no_buffer=op.no_buffer,
                origin=op.origin,
                group=op.group,
                stream=op.stream,
                priority=op.priority,
            )
        )
        return made

    def _is_repeated(self, value: int) -> bool:
        """Whether a repetition reads the repeated value: it is wanted itself, or only forward has it."""
        return value in self.wanted or value not in self.there
