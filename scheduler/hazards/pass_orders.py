"""Search for the pass that gave partners different orders of calls. Each rank records the orders after every pass, and ranks compare
them."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import msgspec
import numpy as np

from interlace.ir import Program, describe
from interlace.ir.copies import items_of
from interlace.ir.equivalent_ranks import with_given_partners
from interlace.ir.kinds import is_comm
from interlace.ir.per_ops import once_per_items
from interlace.ir.rings import RingNames
from interlace.scheduler.hazards.captured_calls import ALONE, SAME_FLOW, Place, Stray
from interlace.scheduler.hazards.channels import NOBODY, Line, line_of, line_text, present
from interlace.scheduler.hazards.finding import Finding, Kind
from interlace.scheduler.hazards.flat_plan import item_lists
from interlace.scheduler.hazards.skeleton import ROLES, Channel, place_text, places_of_calls, way_of

Orders = dict[Channel, str]
"""Ring (the rank's own number of the group) and direction -> digest of the order of the calls there, equal on partners with the same order.
Channels without calls have no entry, or ""."""

REMEDY = "let the pass keep the order of communication inside each group, or change it on all ranks alike"
EXCHANGED = (
    "let the pass keep what each call carries, or change it on all ranks alike; a message is told by what is sent and by what its receive "
    "gives, not by who reads that: where a sender exchanges what two sends carry, its receiver exchanges the results of the receives"
)
UNKNOWN = (
    "let the pass keep captured calls and change what they carry, or give a new call of the same kind the number of the captured one as "
    "`origin`; several calls in place of one need different sizes, or ranks with equal programs on which they carry the same"
)
"""Remedy if it cannot be determined which calls are the same."""


class Change(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A new order of calls on one channel of a rank, as a digest; see `Orders`."""

    group: int
    way: int
    digest: str


class History(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The orders of a rank's calls from pass to pass.

    Attributes:
        seat: The rank and its groups: its program without operations.
        captured: The orders in the captured program.
        steps: Name of each pass, and the orders that it changed.
        own: Names of the passes that the user added.
        strays: Calls of the plan that do not correspond to the captured calls at their places, or carry something else.
        equivalence_key: A key of the captured program, equal on ranks with equal programs; empty if there are no strays.
    """

    seat: Program
    captured: tuple[Change, ...]
    steps: tuple[tuple[str, tuple[Change, ...]], ...]
    own: tuple[str, ...] = ()
    strays: tuple[Stray, ...] = ()
    equivalence_key: bytes = b""

    def names(self) -> list[str]:
        """Names of the passes."""
        return [name for name, _ in self.steps]

    def channels(self) -> set[Channel]:
        """Channels on which the rank has calls before or after some pass."""
        return {(each.group, each.way) for found in (self.captured, *(found for _, found in self.steps)) for each in found}

    def digests(self, channel: Channel | None) -> list[str]:
        """Digests of one channel before the first pass and after each pass."""
        found = [""]
        for changes in (self.captured, *(changes for _, changes in self.steps)):
            found.append(next((each.digest for each in changes if (each.group, each.way) == channel), found[-1]))
        return found[1:]


class Call(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A call: what partners compare (part of the step, place, micro-batch), and a text for messages."""

    same: tuple[str, int, int]
    text: str


@dataclass(slots=True, frozen=True)
class Break:
    """A pass after which two ranks no longer have the same order of calls.

    Attributes:
        name: Name of the pass.
        line: The channel that the ranks share.
        ranks: The two ranks.
        channels: The line as `Channel` of each rank; None for a rank that never has calls there.
        calls: If only the captured calls differ that calls are matched to: a description of these on each rank.
        is_unclear: Whether it cannot be determined if they differ.
    """

    name: str
    line: Line
    ranks: tuple[int, int]
    channels: tuple[Channel | None, Channel | None]
    calls: str = ""
    is_unclear: bool = False

    @property
    def remedy(self) -> str:
        """Text of what to do."""
        return UNKNOWN if self.is_unclear else EXCHANGED if self.calls else REMEDY

    def message(self) -> str:
        """Description in one sentence."""
        number = next(channel[0] for channel in self.channels if channel is not None)
        what = "issue the same collectives" if self.line[1] == NOBODY else "send and receive the same messages"
        pair = f"ranks {self.ranks[0]} and {self.ranks[1]}"
        said = f"it cannot be told whether {pair} {what}" if self.is_unclear else f"{pair} no longer {what}"
        return f"{line_text(self.line, number)}: after pass {self.name!r} {said} in one order{self.calls and '; '}{self.calls}"

    def finding(self) -> Finding:
        """The finding for the report of a check."""
        kind: Kind = "collective-order" if self.line[1] == NOBODY else "p2p-mismatch"
        return Finding(kind, self.ranks, (), self.message(), self.remedy)


def calls_on(program: Program, channel: Channel | None) -> tuple[Call, ...]:
    """The calls of a plan on one channel, in issue order; without jobs, in the order of `item_lists`."""
    places, ops = places_of_calls(program), {op.id: op for op in program.ops if is_comm(op) and (op.group, way_of(op)) == channel}
    items = [item for each in item_lists(program) for item in each if item[0] in ops]
    return tuple(Call((ops[number].role, places[number], m), f"{describe(ops[number])} of micro-batch {m}") for number, m in items)


def first_difference(told: Sequence[Sequence[Call]], ranks: Sequence[int]) -> str:
    """Description of the first difference between the calls of two ranks; empty if there is none."""
    for index, pair in enumerate(zip_longest(*told)):
        if len({None if each is None else each.same for each in pair}) > 1:
            words = (f"{each.text if each else 'none'} on rank {rank}" for each, rank in zip(pair, ranks, strict=True))
            return f"number {index} is {', '.join(words)}"
    return ""


@once_per_items
def orders_of(program: Program) -> Orders:
    """The orders of a program's calls; without jobs, those of its operations. O(op instances). The result is shared: do not modify it."""
    calls, places = [op for op in program.ops if is_comm(op)], places_of_calls(program)
    channels = list(dict.fromkeys((op.group, way_of(op)) for op in calls))
    table = np.full((1 + max((op.id for op in program.ops), default=-1), 3), -1, np.int64)
    for op in calls:
        table[op.id] = channels.index((op.group, way_of(op))), ROLES.index(op.role), places[op.id]
    items = items_of(program) if program.jobs else np.array([(op.id, 0) for op in calls], np.int64).reshape(-1, 2)
    items = items[table[items[:, 0], 0] >= 0]
    rows = np.column_stack((table[items[:, 0]], items[:, 1]))
    return {channel: hashlib.blake2b(rows[rows[:, 0] == k, 1:].tobytes(), digest_size=8).hexdigest() for k, channel in enumerate(channels)}


def changes(before: Orders, after: Orders) -> tuple[Change, ...]:
    """The orders that differ between `before` and `after`."""
    return tuple(Change(*channel, after.get(channel, "")) for channel in {**before, **after} if before.get(channel) != after.get(channel))


def breaks(histories: Sequence[History]) -> list[Break]:
    """For each line on which two known ranks end with different orders, the pass that followed the last state with equal orders.

    Ranks are not compared if different passes ran on them, or if their captured programs already differ. Lines with equal orders, but whose
    calls are matched to different captured calls, are found too.
    """
    by_rank = {each.seat.rank: each for each in histories}
    seats = with_given_partners([each.seat for each in by_rank.values()])
    lines = _Lines({seat.rank: seat for seat in seats})
    shared: dict[Line, dict[int, Channel]] = defaultdict(dict)
    for rank, each in by_rank.items():
        for channel in each.channels():
            line = lines.of(rank, channel)
            if line is not None:
                shared[line][rank] = channel
    strays = {rank: _by_line(each.strays, rank, lines) for rank, each in by_rank.items()}
    found = (_break(line, shared[line], by_rank) or _exchanged(line, shared[line], by_rank, strays) for line in sorted(shared))
    return [each for each in found if each is not None]


class _Lines:
    """The lines of the channels of several ranks."""

    def __init__(self, seats: Mapping[int, Program]) -> None:
        self._members = {rank: {group.id: group.ranks for group in seat.groups} for rank, seat in seats.items()}
        self._names = RingNames({rank: seat.groups for rank, seat in seats.items()})

    def of(self, rank: int, channel: Channel) -> Line | None:
        """The line of a rank's channel; None if the rank is not in the group, or the group cannot be identified on other ranks."""
        group, way = channel
        ranks = self._members[rank].get(group, ())
        if rank not in ranks or ranks in self._names.unclear:
            return None
        return line_of(self._names.name(rank, group), ranks.index(rank), way)


Captured = tuple[Line | None, Place]


@dataclass(slots=True, frozen=True)
class _Stand:
    """The captured call that a call of a plan is matched to, and what it carries, as in `Stray`; `captured` is None if not known."""

    captured: Captured | None
    text: str = ""
    flow: str = ""
    exact: str = ""
    others: int = ALONE


def _by_line(found: Sequence[Stray], rank: int, lines: _Lines) -> dict[Captured, _Stand]:
    """Strays of a rank by line and place in the plan."""
    return {
        (lines.of(rank, each.channel), each.place): _Stand(
            each.captured and (lines.of(rank, each.captured[0]), each.captured[1]), each.text, each.flow, each.exact, each.others
        )
        for each in found
    }


def _exchanged(
    line: Line, channels: dict[int, Channel], histories: dict[int, History], strays: Mapping[int, Mapping[Captured, _Stand]]
) -> Break | None:
    """The first calls at one place that are matched to different captured calls although all orders are equal, as the ranks removed
    different calls or gave a call another partner or other operands; or for which this cannot be determined."""
    first, *others = present(line, histories)
    for other in others:
        mine, theirs, pair = strays[first], strays[other], (first, other)
        has_own = any(histories[rank].own for rank in pair)
        for at in sorted(at for at in {**mine, **theirs} if at[0] == line):
            one, two = (each.get(at, _Stand(at)) for each in (mine, theirs))
            differ = None not in (one.captured, two.captured) and one.captured != two.captured
            alike = line[1] == NOBODY and histories[first].equivalence_key == histories[other].equivalence_key
            if differ or (has_own and not _are_same(one, two, alike)):
                words = (f"{_captured_text(line, each)} on rank {rank}" for each, rank in zip((one, two), pair, strict=True))
                said = f"{at[1][0]} {place_text(at[1][1])} is {', '.join(words)}"
                name = _who(histories, channels, pair)
                return Break(name, line, pair, (channels.get(first), channels.get(other)), said, not differ)
    return None


def _are_same(one: _Stand, two: _Stand, alike: bool) -> bool:
    """Whether two calls at one place, both matched to the same captured call or to none, are the same. `alike`: the ranks have equal
    captured programs and both issue this call, so that what the calls carry can be compared."""
    others = max(one.others, two.others)
    if (one.captured is None) != (two.captured is None):
        return False
    if alike:
        return one.flow == two.flow and (one.exact == two.exact or others < SAME_FLOW)
    return others == ALONE


def _captured_text(line: Line, stand: _Stand) -> str:
    name = f" ({stand.text})" if stand.text else ""
    if stand.captured is None:
        return f"one that stands for no captured call{name}"
    there, (role, place) = stand.captured
    where = "" if there == line else f" of {line_text(there, there[0][1])}" if there else " of another group"
    more = ", and not alone" if stand.others else ", and carries something else" if stand.flow else ""
    return f"the captured {role} {place_text(place)}{where}{name}{more}"


def _who(histories: Mapping[int, History], channels: Mapping[int, Channel], ranks: tuple[int, int]) -> str:
    """Name of the user's last pass that changed the order of these calls on one of the ranks; if none did, of all the user's passes."""
    own = [(name, found, rank) for rank in ranks for name, found in histories[rank].steps if name in histories[rank].own]
    touched = [name for name, found, rank in own if any((each.group, each.way) == channels.get(rank) for each in found)]
    return "' or '".join(touched[-1:] or dict.fromkeys([name for name, _, _ in own] or histories[ranks[0]].names()))


def _break(line: Line, channels: dict[int, Channel], histories: dict[int, History]) -> Break | None:
    first, *others = present(line, histories)
    for other in others:
        one, two = (histories[rank].digests(channels.get(rank)) for rank in (first, other))
        if histories[first].names() == histories[other].names() and one[0] == two[0] and one[-1] != two[-1]:
            step = max(k for k, (mine, theirs) in enumerate(zip(one, two, strict=True)) if mine == theirs)
            return Break(histories[first].names()[step], line, (first, other), (channels.get(first), channels.get(other)))
    return None
