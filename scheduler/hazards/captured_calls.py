"""Which captured calls the calls of a plan stand for: the plan itself does not hold what passes left out, or gave another group or peer."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from interlace.ir import Op, Program, describe
from interlace.ir.kinds import is_comm
from interlace.scheduler.hazards.skeleton import Channel, places_of_calls, way_of

Place = tuple[str, int]
"""Part of the step, and which call of its channel there it is, see `places_of_calls`."""
Kind = tuple[int, int, str, str]
"""Channel, part of the step and kind of a call."""


class Stray(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A call of a plan that is not the captured call of its own channel and place.

    Attributes:
        channel, place: Of the call in the plan.
        captured: Channel and place of the captured call that it stands for; None where that is not known.
        text: The operation by name.
    """

    channel: Channel
    place: Place
    captured: tuple[Channel, Place] | None
    text: str


def strays(captured: Program, planned: Program) -> tuple[Stray, ...]:
    """Calls of a plan that stand for other captured calls than places in the plan say. O(operations).

    A call stands for the captured one of its number or origin. It stands for another one of its channel if it carries what that one
    carried, and that one does no longer: a pass replaced it, or exchanged what two calls carry. Repetitions go with what they repeat.
    """
    before = {op.id: op for op in captured.ops if is_comm(op)}
    then, now = places_of_calls(captured), places_of_calls(planned)
    calls = [op for op in planned.ops if is_comm(op) and now[op.id] >= 0]
    carried = {op.id: _carried(op) for op in calls}
    lost = {(_kind(op), _carried(op)): op for op in reversed(before.values()) if carried.get(op.id) != _carried(op)}
    found = []
    for op in calls:
        here, place = (op.group, way_of(op)), (op.role, now[op.id])
        old = _representatives(op, before, lost)
        what = None if old is None else ((old.group, way_of(old)), (old.role, then[old.id]))
        if what != (here, place):
            found.append(Stray(here, place, what, describe(op)))
    return tuple(found)


def _kind(op: Op) -> Kind:
    return op.group, way_of(op), op.role, op.kind


def _carried(op: Op) -> tuple[int, ...]:
    """Values that are sent; of a receive what it gives."""
    return op.operands or op.results


def _representatives(op: Op, before: Mapping[int, Op], lost: Mapping[tuple[Kind, tuple[int, ...]], Op]) -> Op | None:
    own = before.get(op.id) or before.get(op.origin)
    return own if own is not None and _carried(own) == _carried(op) else lost.get((_kind(op), _carried(op)), own)
