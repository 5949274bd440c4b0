"""Rewriting: new operations where they are asked for, the given program untouched."""

from __future__ import annotations

import pytest

from interlace.errors import ProgramError
from interlace.ir import Edit, Program, TensorType, parse, show, verify

ROW = TensorType((2,), "float32")
TEXT = """program rank=0 world=1 mode=train
pipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=none
#3 %5:float32[2]"x" = pd_op.data() forward layer="in"
#4 %6:float32[2] = pd_op.exp(%5) forward chunk=1 layer="a.b"
#9 %8:float32[2] = pd_op.relu(%6) backward
"""


def program() -> Program:
    """Three operations with gaps in their ids."""
    return parse(TEXT)


def names(made: Program) -> list[str]:
    return [op.kind for op in made.ops]


def test_new_operations_come_where_they_are_put_and_ids_are_new() -> None:
    """Interrupts. The given program stays as it was, whatever is done to the copy."""
    given = program()
    edit = Edit(given)
    like = given.ops[1]
    first = edit.op("pd_op.sin", [5], [ROW], like=like)
    second = edit.op("pd_op.cos", [first.results[0]], [ROW], like=like, role="backward", stream="side", attrs={"a": 1})
    edit.after(3, [first])
    edit.before(9, [second])
    made = edit.build()
    verify(made)
    assert names(made) == ["data", "sin", "exp", "cos", "relu"]
    assert (first.id, first.results, first.role, first.chunk, first.layer) == (10, (9,), "forward", 1, "a.b")
    assert (second.id, second.results, second.role, second.stream, second.attrs) == (11, (10,), "backward", "side", {"a": 1})
    assert show(given) == TEXT


def test_replace_rename_and_remove() -> None:
    """Interrupts. Readers follow the new value; values that nothing gives any more are gone."""
    edit = Edit(program())
    made_op = edit.op("pd_op.tanh", [5], [ROW], like=edit.program.ops[1])
    edit.replace(4, [made_op])
    edit.rename(6, made_op.results[0])
    made = edit.build()
    verify(made)
    assert names(made) == ["data", "tanh", "relu"]
    assert made.ops[2].operands == made_op.results
    assert [value.id for value in made.values] == [5, 8, 9]
    gone = Edit(program())
    gone.replace(9, [])
    assert names(gone.build()) == ["data", "exp"]


def test_what_is_put_beside_a_replaced_operation_stays() -> None:
    """Interrupts."""
    edit = Edit(program())
    extra = [edit.op(f"pd_op.{word}", [5], [ROW], like=edit.program.ops[1]) for word in ("sin", "cos")]
    edit.before(4, extra[:1])
    edit.after(4, extra[1:])
    edit.replace(4, [])
    edit.rename(6, 5)
    assert names(edit.build()) == ["data", "sin", "cos", "relu"]


def test_changes_at_an_operation_that_is_not_there_are_refused() -> None:
    """Interrupts. Not dropped in silence."""
    for change in ("before", "after", "replace"):
        edit = Edit(program())
        getattr(edit, change)(77, [])
        with pytest.raises(ProgramError, match=r"changes at \[77\], which the program does not have"):
            edit.build()
