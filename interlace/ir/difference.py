"""The first difference between two captured programs of one rank, in words."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import msgspec

from interlace.ir.program import Op, Program, Value
from interlace.ir.text import show_value
from interlace.ir.verify import describe

PLACE = "Place("
"""Prefix of attributes that name a place. Places are not compared: a dump is built without the device that the program runs on."""


def first_difference(found: Program, expected: Program) -> str:
    """The first difference, with what was found and what was expected; empty if both programs do the same work.

    Places (`Place(gpu:0)`), refusals, schedules and the version of Paddle are not compared. O(operations).

    >>> first_difference(Program((), (), rank=1), Program((), ()))
    'rank: found 1, expected 0'
    """
    for name in ("rank", "world", "mode"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        if mine != theirs:
            return _words(name, mine, theirs)
    return _of_pipelines(found, expected) or _of_lasting(found, expected) or _of_ops(found, expected) or _of_groups(found, expected)


def first_unlike(found: Program, expected: Program) -> str:
    """The first difference between the programs of ranks that should be equivalent; empty if one can represent the other.

    Compares the pipeline, operations in order with their operands, layers and roles, shapes, dtypes and storage of values, and the number
    of ranks of each communication. Ignores attributes, because they can depend on the rank (`start_index` of its part of a table).
    """
    found, expected = without_place(found), without_place(expected)
    return _of_pipelines(found, expected) or _of_lasting(found, expected) or _of_ops(found, expected)


def without_place(program: Program) -> Program:
    """The program with the sizes of groups instead of their numbers, and without attributes and streams: equal for equivalent ranks."""
    sizes = {group.id: len(group.ranks) for group in program.groups}
    return program.with_ops([msgspec.structs.replace(op, attrs={}, group=sizes.get(op.group, op.group), stream="") for op in program.ops])


def _words(where: str, found: object, expected: object) -> str:
    return f"{where}: found {found}, expected {expected}"


def _of_pipelines(found: Program, expected: Program) -> str:
    for name in found.pipeline.__struct_fields__:
        mine, theirs = getattr(found.pipeline, name), getattr(expected.pipeline, name)
        if mine != theirs:
            return _words(f"pipeline, {name.replace('_', ' ')}", mine, theirs)
    return ""


def _of_groups(found: Program, expected: Program) -> str:
    mine, theirs = ({group.id: group.ranks for group in program.groups} for program in (found, expected))
    for ring in sorted({*mine, *theirs}):
        if mine.get(ring) != theirs.get(ring):
            return _words(f"communication group {ring}", _ranks(mine.get(ring)), _ranks(theirs.get(ring)))
    return ""


def _ranks(ranks: tuple[int, ...] | None) -> str:
    return f"ranks {', '.join(map(str, ranks))}" if ranks is not None else "no such group"


def _of_lasting(found: Program, expected: Program) -> str:
    """The first difference between parameters and other persistable values, by name; they are numbered before all operations."""
    mine, theirs = (
        {v.name: f"{v.dtype}{list(v.shape)}" for v in program.values if v.persistable and v.name} for program in (found, expected)
    )
    name = next((name for name in {**theirs, **mine} if mine.get(name) != theirs.get(name)), None)
    return "" if name is None else _words(name, *(table.get(name, "no such parameter or state") for table in (mine, theirs)))


def _of_ops(found: Program, expected: Program) -> str:
    mine, theirs = ({value.id: value for value in program.values} for program in (found, expected))
    for op, other in zip_longest(*(sorted(program.ops, key=lambda op: op.id) for program in (found, expected))):
        if op is None or other is None:
            counts = _words("number of operations", len(found.ops), len(expected.ops))
            return f"{counts}; the first that only one has is {describe(op or other)}"
        told = _of_op(op, other, mine, theirs)
        if told:
            return told
    return ""


def _of_op(op: Op, other: Op, values: dict[int, Value], others: dict[int, Value]) -> str:
    where = f"operation {describe(op)}"
    if op.name != other.name:
        return _words(f"operation #{op.id}", describe(op), describe(other))
    mine, theirs = (tuple(show_value(table[value]) for value in each.results) for each, table in ((op, values), (other, others)))
    if mine != theirs:
        return _words(f"{where}, results", ", ".join(mine) or "none", ", ".join(theirs) or "none")
    for name in (name for name in op.__struct_fields__ if name != "attrs"):
        if getattr(op, name) != getattr(other, name):
            return _words(f"{where}, {name}", _text(getattr(op, name)), _text(getattr(other, name)))
    for name in sorted({*op.attrs, *other.attrs}):
        a, b = (_text(each.attrs[name]) if name in each.attrs else "nothing" for each in (op, other))
        if a != b and not (a.startswith(f'"{PLACE}') and b.startswith(f'"{PLACE}')):
            return _words(f"{where}, attribute {name}", a, b)
    return ""


def _text(value: Any) -> str:
    return msgspec.json.encode(value, order="deterministic").decode()
