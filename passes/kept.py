"""Checks on a user's pass: it must not alter what lowering takes from Paddle's program, or the proof would not be about what runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from interlace.errors import PassError
from interlace.ir import ABSENT, Op, Program, Value, describe
from interlace.ir.kinds import is_boundary, is_comm
from interlace.ir.operation_kinds import WITHOUT_GROUP
from interlace.ir.storage import storages_of

COPIED = ("name", "attrs", "group", "inplace", "views", "no_buffer", "num_blocks")
"""Fields of an operation that lowering takes from its captured operation (`origin`), whatever the pass sets them to."""
FACTS = ("role", "chunk", "origin", *COPIED)
"""Fields that a pass must not change in an operation that it keeps: `COPIED`, the part of the step, and the captured operation."""
VALUE_FACTS = ("dtype", "storage", "persistable", "memory")
"""The same for a value."""
NOBODY, NEXT_STEP = -1, -2
"""Used instead of an operation's id: as a writer, no operation of this step; as a reader, the next step."""


def require_kept(before: Program, made: Program) -> None:
    """Check the program that a pass returned against the one it was given.

    Raises PassError if a kept operation, a kept value or the pipeline has changed, an input or output of the program is gone, an operation
    finds other contents in memory than before, or has changed places with a call that waits for unnamed ranks.
    """
    if made.pipeline != before.pipeline:
        raise PassError(f"the step is now {made.pipeline}, expected {before.pipeline}; a pass does not change it")
    old, ops, values = {op.id: op for op in before.ops}, {op.id: op for op in made.ops}, {value.id: value for value in made.values}
    captured = {op.origin: op for op in reversed(before.ops) if op.origin >= 0}
    for op in made.ops:
        if op.id in old:
            _require_same(describe(old[op.id]), FACTS, old[op.id], op)
        elif op.origin in captured:
            _require_same(f"{describe(op)}, which stands for #{op.origin},", COPIED, captured[op.origin], op)
    for op in before.ops:
        if op.id not in ops and is_boundary(op):
            raise PassError(f"{describe(op)} is gone; inputs and outputs of the program stay")
    for value in before.values:
        if value.id in values:
            _require_same(f"%{value.id}", VALUE_FACTS, value, values[value.id])
    _require_contents(before, made)
    _require_meetings(before, made)


def _require_same(what: str, facts: Sequence[str], before: Op | Value, now: Op | Value) -> None:
    for fact in facts:
        if getattr(now, fact) != getattr(before, fact):
            raise PassError(
                f"{what} has {fact} {getattr(now, fact)!r}, expected {getattr(before, fact)!r} as before the pass; put a new operation "
                "with a new value in its place instead"
            )


def _require_contents(before: Program, made: Program) -> None:
    """Check that each operation still reads, or overwrites, what the same operation wrote last. Only writers that the pass kept with the
    same operands are compared.

    A fused buffer holds several tensors: the set of its writers before a reader counts, not their order.
    """
    declared = {ABSENT, *(value.id for value in made.values)}
    if len({op.id for op in made.ops}) < len(made.ops) or not all(declared.issuperset((*op.operands, *op.results)) for op in made.ops):
        return  # `verify` says what is wrong
    was, now = _writers(before), _writers(made)
    old, new = ({op.id: op for op in program.ops} for program in (before, made))
    staying = {NOBODY, *(op_id for op_id, op in new.items() if op_id in old and old[op_id].operands == op.operands)}
    for (op_id, value), writers in now.items():
        for expected, found in zip(was.get((op_id, value), writers), writers, strict=False):
            lost, other = expected - found, found - expected
            if expected != found and lost | other <= staying:
                its, theirs = (_named(ops, new) for ops in (lost, other))
                reader = describe(new[op_id]) if op_id in new else "the next step"
                raise PassError(
                    f"{reader} finds in %{value} what {theirs} wrote last, expected {its}, as before the pass; keep an "
                    "operation between those that write this memory"
                )


def _require_meetings(before: Program, made: Program) -> None:
    """Check that the same communication comes before each operation that waits for ranks that no attribute names."""
    was, now, ops = _calls_before(before), _calls_before(made), {op.id: op for op in made.ops}
    stay = {op.id for op in before.ops if is_comm(op)} & ops.keys()
    for op_id in was.keys() & now.keys():
        moved = sorted((was[op_id] ^ now[op_id]) & stay)
        if moved:
            raise PassError(
                f"{describe(ops[moved[0]])} has changed places with {describe(ops[op_id])}, which waits for ranks that no attribute names; "
                "keep their order"
            )


def _calls_before(program: Program) -> dict[int, frozenset[int]]:
    calls: set[int] = set()
    found: dict[int, frozenset[int]] = {}
    for op in program.ops:
        if op.kind in WITHOUT_GROUP:
            found[op.id] = frozenset(calls)
        elif is_comm(op):
            calls.add(op.id)
    return found


def _named(op_ids: Set[int], ops: Mapping[int, Op]) -> str:
    return ", ".join(describe(ops[each]) if each in ops else "an earlier step" for each in sorted(op_ids)) or "nobody else"


def _writers(program: Program) -> dict[tuple[int, int], list[frozenset[int]]]:
    """The last writers of memory: (operation id, value id) -> for each part of the value that the operation reads or replaces, the ids of
    the operations that gave it its contents, or `NOBODY`. With `NEXT_STEP` as operation, the same for every named persistable value."""
    storages = storages_of(program)
    fused = storages.cleared_buffers()
    nobody = frozenset([NOBODY])
    last: dict[int, frozenset[int]] = {}
    found: dict[tuple[int, int], list[frozenset[int]]] = {}
    for op in program.ops:
        written = [(value, part.storage) for value in storages.writes(op) for part in storages.written_parts(op, value)]
        for value in storages.reads(op):
            found[op.id, value] = [last.get(part.storage, nobody) for part in storages.parts[value]]
        for value, storage in written:
            if storage not in fused:
                found.setdefault((op.id, value), []).append(last.get(storage, nobody))
        for _, storage in written:
            last[storage] = last.get(storage, nobody) | {op.id} if storage in fused else frozenset([op.id])
    for lasting in program.values:
        if lasting.persistable and lasting.name and lasting.id in storages.parts:
            found[NEXT_STEP, lasting.id] = [last.get(part.storage, nobody) for part in storages.parts[lasting.id]]
    return found
