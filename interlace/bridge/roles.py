"""Roles: which part of the step each operation of a plain Paddle program belongs to.

Auto-parallel sets a role on every operation, `paddle.static` on none. In the latter case roles are derived from positions: Paddle appends
backward after forward and the optimizer after both, so that if the program is cut before the first gradient and after the last one, each
part reads only values of its own and of earlier parts.
"""

from __future__ import annotations

from typing import Any

from interlace.bridge.capture import complete_roles
from interlace.errors import ProgramError
from interlace.ir import Graph, Program, describe
from interlace.ir.effects import is_ordered
from interlace.ir.kinds import DATA, is_boundary, is_receive
from interlace.ir.storage import storages_of

FORWARD, BACKWARD, OPTIMIZE = 0, 1, 2
MISSING = -1
GIVE_ROLES = (
    "give every operation its op_role (0 forward, 1 backward, 2 optimize) as you build the program, "
    "with paddle.base.framework.pir_op_role_guard"
)


def give_roles(source: Any) -> bool:
    """Set missing roles on the operations of a program, which must be a private copy; returns whether it had none at all. Raises
    ProgramError, with the first such operation, if some operations have roles and a missing one cannot be derived from them."""
    ops = list(source.global_block().ops)
    raw = [op.op_role for op in ops]
    if all(role == MISSING for role in raw):
        for op, number in zip(ops, _by_place(ops), strict=True):
            op.op_role = number
        return True
    for k, (op, role) in enumerate(zip(ops, complete_roles(raw), strict=True)):
        if is_update(op) and role != "optimize":
            raise ProgramError(_wrong(k, op, "updates a parameter", raw[k], role, "optimize"))
        if raw[k] == MISSING and is_gradient(op) and role != "backward":
            raise ProgramError(_wrong(k, op, "is a gradient", raw[k], role, "backward"))
    return False


def require_sums(program: Program, derived: bool) -> None:
    """Check that the optimizer, which runs once for several micro-batches, does not see the gradients of one alone. Raises ProgramError if
    it reads values that every micro-batch computes anew, or if no operation has a role."""
    count = program.pipeline.num_micro_batches
    updates = [op for op in program.ops if op.role == "optimize"]
    if count < 2 or not updates:
        return
    if derived:
        raise ProgramError(
            f"num_micro_batches is {count}, and no operation of the program has a role (all op_role are -1): which of them "
            f"run once a step, as {describe(updates[0])}, cannot be told; {GIVE_ROLES}, and sum gradients over micro-batches "
            "in persistable buffers; or use num_micro_batches 1"
        )
    graph = Graph(program)
    anew = _made_anew(program)
    for op in updates:
        value = next((v for v in graph.reads(op) if v in anew), None)
        if value is not None:
            raise ProgramError(
                f"op {describe(op)} of the optimizer runs once a step and reads %{value}, which "
                f"{describe(graph.ops[graph.producer[value]])} makes anew for each of the {count} micro-batches; sum it over "
                "micro-batches in a persistable buffer in backward (paddle's gradient merge does), or use num_micro_batches 1"
            )


def is_update(op: Any) -> bool:
    """Whether a Paddle operation is an optimizer's update of a parameter."""
    return {"param", "grad"} <= set(op.get_input_names()) if op.name().startswith("pd_op.") else False


def is_gradient(op: Any) -> bool:
    """Whether a Paddle operation is the gradient of another."""
    return bool(op.name().rstrip("_").endswith("_grad"))


def _by_place(ops: list[Any]) -> list[int]:
    """Roles by position: forward before the first gradient, backward up to the last gradient before the first update, then optimizer."""
    update = next((k for k, op in enumerate(ops) if is_update(op)), len(ops))
    gradients = [k for k, op in enumerate(ops[:update]) if is_gradient(op)]
    if not gradients:
        return [FORWARD] * update + [OPTIMIZE] * (len(ops) - update)
    end = gradients[-1] + 1 if update < len(ops) else len(ops)
    return [FORWARD] * gradients[0] + [BACKWARD] * (end - gradients[0]) + [OPTIMIZE] * (len(ops) - end)


def _made_anew(program: Program) -> set[int]:
    """Ids of values that each micro-batch computes anew; persistable values with a name do not count (`Storages.is_once`)."""
    table = storages_of(program)
    found: set[int] = set()
    for op in program.ops:
        if op.role == "optimize":
            continue
        fed = op.name == DATA or is_ordered(op) or is_receive(op) or (not is_boundary(op) and any(v in found for v in op.operands))
        found |= {v for v in op.results if fed and not any(table.is_once(each) for part in table.of(v) for each in part.values)}
    return found


def _wrong(place: int, op: Any, what: str, raw: int, role: str, expected: str) -> str:
    found = f"{role} (op_role {raw})" if raw != MISSING else f"missing (op_role -1; its neighbours would make it {role})"
    return f"op #{place} {op.name()} {what}, and its role is {found}; expected {expected}: {GIVE_ROLES}"
