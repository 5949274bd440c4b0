"""Single operations as programs, for the cost model's tests."""

from __future__ import annotations

from interlace.ir.program import Group, Op, Value
from interlace.ir.text import parse

Parts = tuple[Op, dict[int, Value], dict[int, Group]]
HEAD = "program rank=0 world=2 mode=train\npipeline stage=0 of 1 micro_batches=1 chunks=1 schedule=none\ngroup 1 = 0,1\n"


def last_op(*lines: str, groups: str = "") -> Parts:
    """The last operation of a program given as text lines without numbers, with its values and groups."""
    text = HEAD + groups + "\n".join(f"#{number} {line}" for number, line in enumerate(lines)) + "\n"
    program = parse(text)
    return program.ops[-1], {v.id: v for v in program.values}, {g.id: g for g in program.groups}


def unary(name: str, shape: str, dtype: str = "bfloat16", fields: str = "") -> Parts:
    """`name` from one tensor to one of the same type."""
    return last_op(f"%0:{dtype}[{shape}] = pd_op.data() forward", f"%1:{dtype}[{shape}] = {name}(%0) forward {fields}")


def binary(name: str, shape: str, dtype: str = "bfloat16") -> Parts:
    """`name` from two tensors to one of the same type."""
    data = [f"%{k}:{dtype}[{shape}] = pd_op.data() forward" for k in range(2)]
    return last_op(*data, f"%2:{dtype}[{shape}] = {name}(%0, %1) forward")


def matmul(x: str, y: str, out: str, dtype: str = "bfloat16", attrs: str = "{}", role: str = "forward") -> Parts:
    """A matrix product of the given shapes."""
    return last_op(
        f"%0:{dtype}[{x}] = pd_op.data() forward",
        f"%1:{dtype}[{y}] = pd_op.data() forward",
        f"%2:{dtype}[{out}] = pd_op.matmul(%0, %1) {role} {attrs}",
    )


def collective(name: str, shape: str, out: str = "", ranks: str = "0,1", group: int = 7) -> Parts:
    """A collective over a group of the given ranks."""
    return last_op(
        f"%0:bfloat16[{shape}] = pd_op.data() forward",
        f"%1:bfloat16[{out or shape}] = {name}(%0) forward group={group}",
        groups=f"group 7 = {ranks}\n",
    )
