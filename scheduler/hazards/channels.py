"""The communication calls of all ranks: the ranks that share a channel, and the first calls in which partners differ."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass

from interlace.ir.rings import RingName, RingNames
from interlace.ir.signatures import agree
from interlace.scheduler.hazards.call_names import CallAnswer, CallQuery
from interlace.scheduler.hazards.communication import VPP_CROSSES
from interlace.scheduler.hazards.finding import Finding
from interlace.scheduler.hazards.skeleton import COLLECTIVE, NO_RING, ROLES, Channel, RankComm, Skeleton, place_text

NOBODY = -1
Line = tuple[RingName, int, int]
"""A channel in terms that are the same on all its ranks: a ring and, for messages, the sending and the receiving rank (`NOBODY` for
collectives)."""


class World:
    """The communication of several ranks.

    Attributes:
        skeletons: The distinct skeletons.
        kind: Rank -> index of its skeleton.
        lines: Line -> rank -> the rank's own `Channel` for it.
    """

    def __init__(self, comms: Sequence[RankComm]) -> None:
        comms = sorted(comms, key=lambda comm: comm.rank)
        self.comms = {comm.rank: comm for comm in comms}
        self.names = RingNames({comm.rank: comm.groups for comm in comms})
        marks: dict[bytes, int] = {}
        self.kind = {comm.rank: marks.setdefault(comm.skeleton.mark, len(marks)) for comm in comms}
        by_kind = {self.kind[comm.rank]: comm.skeleton for comm in comms}
        self.skeletons = [by_kind[kind] for kind in range(len(marks))]
        self.lines: dict[Line, dict[int, Channel]] = defaultdict(dict)
        for comm in comms:
            self._add(comm)

    def _add(self, comm: RankComm) -> None:
        rings: dict[int, tuple[RingName, int]] = {}
        listed = {group.id for group in comm.groups}
        for number, group in enumerate(comm.rings):
            if group not in listed:
                continue  # a finding of the rank's own check
            name = self.names.name(comm.rank, group)
            if comm.rank in name[0]:
                rings[number] = name, name[0].index(comm.rank)
        for channel in self.skeletons[self.kind[comm.rank]].channels:
            if channel[0] in rings:
                name, index = rings[channel[0]]
                line = line_of(name, index, channel[1])
                if line is not None:
                    self.lines[line][comm.rank] = channel

    def present(self, line: Line) -> list[int]:
        """The known ranks that share a line."""
        return present(line, self.comms)


def present(line: Line, known: Container[int]) -> list[int]:
    """The known ranks that share a line."""
    (ranks, _), source, target = line
    return [rank for rank in ((source, target) if source != NOBODY else ranks) if rank in known]


def line_of(name: RingName, index: int, way: int) -> Line | None:
    """The line of a channel (direction `way`) of the rank with this index in a ring; None if the ring has no such peer."""
    ranks, peer = name[0], abs(way) - 1
    if way == COLLECTIVE:
        return name, NOBODY, NOBODY
    if peer >= len(ranks):
        return None
    return (name, ranks[index], ranks[peer]) if way > 0 else (name, ranks[peer], ranks[index])


@dataclass(slots=True, frozen=True)
class Difference:
    """The first call of a line in which two ranks differ.

    Attributes:
        ranks: The two ranks.
        index: Index of the call among those of the line and those that name no group.
        calls: Number of the call on each of the two ranks; `NOBODY` for a rank with fewer calls.
    """

    line: Line
    ranks: tuple[int, int]
    index: int
    calls: tuple[int, int]

    def queries(self) -> list[CallQuery]:
        """Requests for the names of the two calls."""
        return [CallQuery(rank, call) for rank, call in zip(self.ranks, self.calls, strict=True) if call != NOBODY]


Side = tuple[Skeleton, Channel | None]


def differences(world: World) -> list[Difference]:
    """For each line the first difference between the known ranks; O(lines x ranks + different calls).

    A call that names no group may belong to any group of collectives, so ranks that issue the same such calls must issue them at the same
    place among the collectives that they share. For ranks that issue different ones (stages of a pipeline) this is not checked.
    """
    known: dict[object, tuple[int, tuple[int, int]] | None] = {}
    found = []
    for line in sorted(world.lines):
        by_rank, present = world.lines[line], world.present(line)
        for other in present[1:]:
            pair = (present[0], other)
            key = tuple((world.kind[rank], by_rank.get(rank)) for rank in pair)
            if key not in known:
                known[key] = _first_difference(*((world.skeletons[kind], channel) for kind, channel in key))
            first = known[key]
            if first is not None:
                found.append(Difference(line, pair, *first))
                break
    return found


def _calls(left: Side, right: Side) -> list[list[int]]:
    """The numbers of the calls of each side that must match, in host order."""
    found = [skeleton.channels[channel] if channel is not None else [] for skeleton, channel in (left, right)]
    ways = {channel[1] for _, channel in (left, right) if channel is not None}
    if ways == {COLLECTIVE} and left[0].without_group == right[0].without_group:
        more = [skeleton.channels.get((NO_RING, COLLECTIVE), []) for skeleton, _ in (left, right)]
        return [sorted(each) for each in map(operator.add, found, more)]
    return found


def _first_difference(left: Side, right: Side) -> tuple[int, tuple[int, int]] | None:
    """Index and calls of a `Difference`; None if there is no difference."""
    if left[0] is right[0] and left[1] == right[1]:
        return None
    fits = [[agree(x, y) for y in right[0].signatures] for x in left[0].signatures]
    a, b = _calls(left, right)
    one, two = left[0].calls, right[0].calls
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        same = (one.role[x], one.micro_batch[x], one.place[x]) == (two.role[y], two.micro_batch[y], two.place[y])
        if not same or not fits[one.signature[x]][two.signature[y]]:
            return index, (x, y)
    index = min(len(a), len(b))
    return None if len(a) == len(b) else (index, (a[index] if len(a) > index else NOBODY, b[index] if len(b) > index else NOBODY))


def difference_text(world: World, found: Difference, answers: Sequence[CallAnswer]) -> Finding:
    """A difference as a finding; `answers` answers `found.queries()`."""
    p2p, ring = found.line[1] != NOBODY, world.comms[found.ranks[0]]
    words = iter(answers)
    texts = []
    for rank, call in zip(found.ranks, found.calls, strict=True):
        if call == NOBODY:
            texts.append(f"rank {rank} has only {found.index}")
        else:
            texts.append(f"{next(words).call} ({_call_text(world.comms[rank].skeleton, call)})")
    what, mend = (
        ("message", "send and receive in one order, with equal sizes and dtypes")
        if p2p
        else ("collective", "issue the group's collectives in one order on all its ranks")
    )
    mend += f". {VPP_CROSSES}" if p2p and ring.skeleton.schedule == "VPP" else ""
    title = line_text(found.line, _number(world, found.line[0]))
    return Finding(
        "p2p-mismatch" if p2p else "collective-order",
        tuple(sorted(found.ranks)),
        tuple(each.call for each in answers),
        f"{title}: {what} {found.index} differs: {', '.join(texts)}",
        mend,
    )


def line_text(line: Line, group: int) -> str:
    """Text of a line for messages."""
    way = f", {line[1]} to {line[2]}" if line[1] != NOBODY else ""
    return f"group {group} of ranks {list(line[0][0])}{way}"


def _number(world: World, name: RingName) -> int:
    """The group number of a ring on the first rank that lists it."""
    for rank in name[0]:
        for group in world.comms[rank].groups if rank in world.comms else ():
            if world.names.name(rank, group.id) == name:
                return group.id
    return name[1]


def _call_text(skeleton: Skeleton, call: int) -> str:
    calls = skeleton.calls
    kind, size, dtype, more = skeleton.signatures[calls.signature[call]]
    part = f"{ROLES[calls.role[call]]} {place_text(calls.place[call])} of micro-batch {calls.micro_batch[call]}"
    return f"{kind} {size} B {dtype}{' ' + more if more else ''}, {part}"


def unclear(world: World) -> list[Finding]:
    """Findings for ranks whose numbers for several groups of the same ranks differ so much that the groups cannot be matched."""
    found = []
    for ranks, by_rank in sorted(world.names.unclear.items()):
        lists = ", ".join(f"rank {rank} has {', '.join(map(str, numbers))}" for rank, numbers in sorted(by_rank.items()))
        message = f"groups of ranks {list(ranks)}: {lists}; which of them are the same cannot be told"
        found.append(Finding("wrong-group", tuple(sorted(by_rank)), (), message, "make these groups on all their ranks, in one order"))
    return found
