"""Matching of the calls of a plan to captured calls. The plan alone does not show which calls passes removed, or gave another group, peer
or operands."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cached_property

import msgspec

from interlace.ir import Op, Program, describe
from interlace.ir.kinds import is_comm
from interlace.ir.signatures import signature
from interlace.scheduler.hazards.skeleton import Channel, places_of_calls, way_of

Place = tuple[str, int]
"""Part of the step, and index of the call among those of its channel in that part (see `places_of_calls`)."""
Kind = tuple[int, int, str]
"""Channel and part of the step of a call."""
ALONE, LIKE_OTHERS, SAME_FLOW = range(3)
"""Whether a call is the only one with its signature that is matched to its captured call; if not, whether others carry the same up to
attributes of operations (as two slices of one gradient do)."""


class Stray(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A call of a plan that does not correspond to the captured call at its own channel and place, is not the only one that does, or
    carries something else.

    Attributes:
        channel, place: Channel and place of the call in the plan.
        captured: Channel and place of the captured call that it is matched to; None if that is not known.
        text: Name of the operation, for messages.
        flow: Digest of the values it carries and how new operations compute them from captured values; empty if it carries the same as
            the captured call.
        exact: As `flow`, but with the attributes of these operations, which may differ between ranks (a slice by rank).
        others: `ALONE`, `LIKE_OTHERS` or `SAME_FLOW`.
    """

    channel: Channel
    place: Place
    captured: tuple[Channel, Place] | None
    text: str
    flow: str = ""
    exact: str = ""
    others: int = ALONE


def strays(captured: Program, planned: Program) -> tuple[Stray, ...]:
    """Calls of a plan that are matched to other captured calls than their places suggest, are not the only match, or carry something
    else. O(ops).

    A call is matched to the captured call with its id or origin. It is matched to another one of its channel instead if it carries what
    that one carried and no longer carries: a pass replaced that call, or exchanged what two calls carry. New operations may lie between
    the captured value and what the call carries, or between the call's result and the readers of the captured call's result. Repetitions
    of a call are not looked at.
    """
    match = _Match(captured, planned)
    then, now = places_of_calls(captured), places_of_calls(planned)
    values = {value.id: value for value in planned.values}
    calls = [op for op in planned.ops if is_comm(op) and now[op.id] >= 0]
    stand = [(op, match.representative(op)) for op in calls]
    found = [(op, old, *match.flow_of(op, old)) for op, old in stand]
    signed = {op.id: signature(op, values) for op in calls}
    vague = {_kind(op) for op in calls if signed[op.id][1] < 0}  # a size unknown until run time matches any other
    kinds = [
        (_kind(op), -1 if old is None else old.id, *(part for k, part in enumerate(signed[op.id]) if k != 1 or _kind(op) not in vague))
        for op, old in stand
    ]
    others, same_flow = Counter(kinds), Counter((kind, flow) for kind, (_, _, flow, _) in zip(kinds, found, strict=True))
    strange = []
    for kind, (op, old, flow, exact) in zip(kinds, found, strict=True):
        here = (op.group, way_of(op)), (op.role, now[op.id])
        what = None if old is None else ((old.group, way_of(old)), (old.role, then[old.id]))
        alone = ALONE if others[kind] == 1 else LIKE_OTHERS if same_flow[kind, flow] == 1 else SAME_FLOW
        if what != here or flow or alone != ALONE:
            strange.append(Stray(*here, what, describe(op), flow, exact, alone))
    return tuple(strange)


def _kind(op: Op) -> Kind:
    return op.group, way_of(op), op.role


def _carried(op: Op) -> tuple[int, ...]:
    """The values that a call sends; for a receive, those that it receives."""
    return op.operands or op.results


class _Match:
    """Matches the calls of a plan to captured calls."""

    def __init__(self, captured: Program, planned: Program) -> None:
        self._captured, self._planned = captured, planned
        self._before = {op.id: op for op in captured.ops if is_comm(op)}
        self._known = {value.id for value in captured.values}
        carried = {op.id: _carried(op) for op in planned.ops if is_comm(op)}
        lost = [op for op in self._before.values() if carried.get(op.id) != _carried(op)]
        self._lost = {(_kind(op), op.kind, _carried(op)): op for op in reversed(lost)}  # the first of several that carry the same
        self._lost_of: dict[Kind, list[Op]] = defaultdict(list)
        for op in lost:
            self._lost_of[_kind(op)].append(op)

    def representative(self, op: Op) -> Op | None:
        """The captured call that a call of the plan is matched to; None if there is none."""
        own = self._before.get(op.id) or self._before.get(op.origin)
        if own is not None and _carried(own) == _carried(op):
            return own
        same = self._lost.get((_kind(op), op.kind, _carried(op)))
        if same is not None:
            return same
        for values, near, of in (
            ((op.operands, self._sources, _carried), (op.results, self._uses, lambda op: op.results)) if self._lost else ()
        ):
            wanted = frozenset[int]().union(*(near.get(value, frozenset((value,))) for value in values))
            found = [each for each in self._lost_of[_kind(op)] if not wanted.isdisjoint(of(each))]
            if own in found or len(found) == 1:
                return own if own in found else found[0]
        return own

    def flow_of(self, op: Op, old: Op | None) -> tuple[str, str]:
        """`Stray.flow` and `Stray.exact` of a call that is matched to `old`."""
        if old is not None and _carried(old) == _carried(op):
            return "", ""
        flow, exact = ([table.get(value, str(value)) for value in op.operands] for table in self._digests)
        return _digest(flow), _digest(exact)

    @cached_property
    def _sources(self) -> dict[int, frozenset[int]]:
        """New value -> captured values from which new operations compute it."""
        found: dict[int, frozenset[int]] = {}
        for op in self._planned.ops:
            new = [value for value in op.results if value not in self._known]
            if new:
                near = frozenset[int]().union(*(found.get(value, frozenset((value,))) for value in op.operands))
                found |= dict.fromkeys(new, near)
        return found

    @cached_property
    def _uses(self) -> dict[int, frozenset[int]]:
        """New value -> captured values in whose place captured operations read it or a value that new operations compute from it, and
        captured values that new operations compute from it."""
        read = {op.id: op.operands for op in self._captured.ops}
        found: dict[int, frozenset[int]] = defaultdict(frozenset)
        for op in reversed(self._planned.ops):
            through = frozenset(value for value in op.results if value in self._known and op.id not in read)
            through = through.union(*(found[value] for value in op.results if value not in self._known))
            for place, value in enumerate(op.operands):
                if value not in self._known:
                    found[value] |= through | frozenset(read.get(op.id, ())[place : place + 1])
        return found

    @cached_property
    def _digests(self) -> tuple[dict[int, str], dict[int, str]]:
        """New value -> digest of how it is computed from captured ones: first without the attributes of operations, then with them."""
        flow, exact = dict[int, str](), dict[int, str]()
        for op in self._planned.ops:
            new = [(place, value) for place, value in enumerate(op.results) if value not in self._known]
            for table, attrs in ((flow, ""), (exact, repr(sorted(op.attrs.items())))) if new else ():
                near = _digest([op.name, attrs, *(table.get(value, str(value)) for value in op.operands)])
                table |= {value: f"{near}.{place}" for place, value in new}
        return flow, exact


def _digest(words: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(words).encode(), digest_size=8).hexdigest()
