"""The calls of all ranks side by side: who meets whom on which channel, and where partners disagree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from interlace.scheduler.hazards.call_names import Ask, Told
from interlace.scheduler.hazards.communication import VPP_CROSSES, Signature
from interlace.scheduler.hazards.finding import Finding
from interlace.scheduler.hazards.skeleton import COLLECTIVE, ROLES, Channel, Skeleton, Voice
from interlace.scheduler.rings import RingName, RingNames

NOBODY = -1
Line = tuple[RingName, int, int]
"""What partners share: a ring, and for messages the ranks they go from and to (`NOBODY` for collectives)."""


class World:
    """Voices of several ranks.

    Attributes:
        voices: By rank.
        skeletons: The different ones.
        kind: Rank -> place of its skeleton there.
        lines: What each rank calls the channels that it shares with others: line -> rank -> channel.
    """

    def __init__(self, voices: Sequence[Voice]) -> None:
        voices = sorted(voices, key=lambda voice: voice.rank)
        self.voices = {voice.rank: voice for voice in voices}
        self.names = RingNames({voice.rank: voice.groups for voice in voices})
        marks: dict[bytes, int] = {}
        self.kind = {voice.rank: marks.setdefault(voice.skeleton.mark, len(marks)) for voice in voices}
        by_kind = {self.kind[voice.rank]: voice.skeleton for voice in voices}
        self.skeletons = [by_kind[kind] for kind in range(len(marks))]
        self.lines: dict[Line, dict[int, Channel]] = defaultdict(dict)
        for voice in voices:
            self._add(voice)

    def _add(self, voice: Voice) -> None:
        rings: dict[int, tuple[RingName, int]] = {}
        listed = {group.id for group in voice.groups}
        for number, group in enumerate(voice.rings):
            if group not in listed:
                continue  # a finding of the rank by itself
            name = self.names.name(voice.rank, group)
            if voice.rank in name[0]:
                rings[number] = name, name[0].index(voice.rank)
        for channel in self.skeletons[self.kind[voice.rank]].channels:
            if channel[0] in rings:
                name, place = rings[channel[0]]
                line = _line(name, place, channel[1])
                if line is not None:
                    self.lines[line][voice.rank] = channel

    def present(self, line: Line) -> list[int]:
        """Ranks at hand that take part."""
        (ranks, _), source, target = line
        return [rank for rank in ((source, target) if source != NOBODY else ranks) if rank in self.voices]


def _line(name: RingName, place: int, way: int) -> Line | None:
    """The line of a channel of the rank at a place of a ring; None to nobody else."""
    ranks, peer = name[0], abs(way) - 1
    if way == COLLECTIVE:
        return name, NOBODY, NOBODY
    if peer >= len(ranks) or peer == place:
        return None
    return (name, ranks[place], ranks[peer]) if way > 0 else (name, ranks[peer], ranks[place])


@dataclass(slots=True, frozen=True)
class Difference:
    """The first call of a line in which two ranks differ; `NOBODY` for a rank that calls less often."""

    line: Line
    ranks: tuple[int, int]
    place: int
    calls: tuple[int, int]

    def asks(self) -> list[Ask]:
        """The calls to be named."""
        return [Ask(rank, call) for rank, call in zip(self.ranks, self.calls, strict=True) if call != NOBODY]


def differences(world: World) -> list[Difference]:
    """Of each line the first difference between the ranks at hand; O(lines x ranks + different calls)."""
    known: dict[object, int | None] = {}
    found = []
    for line in sorted(world.lines):
        by_rank, present = world.lines[line], world.present(line)
        for other in present[1:]:
            pair = (present[0], other)
            sides = [(world.kind[rank], by_rank.get(rank)) for rank in pair]
            key = tuple(sides)
            if key not in known:
                known[key] = _first_difference(*[(world.skeletons[kind], channel) for kind, channel in sides])
            place = known[key]
            if place is not None:
                calls = [_call(world.skeletons[kind], channel, place) for kind, channel in sides]
                found.append(Difference(line, pair, place, (calls[0], calls[1])))
                break
    return found


def _call(skeleton: Skeleton, channel: Channel | None, place: int) -> int:
    calls = skeleton.channels[channel] if channel is not None else []
    return calls[place] if place < len(calls) else NOBODY


def _first_difference(left: tuple[Skeleton, Channel | None], right: tuple[Skeleton, Channel | None]) -> int | None:
    if left[0] is right[0] and left[1] == right[1]:
        return None
    agree = [[_agree(x, y) for y in right[0].signatures] for x in left[0].signatures]
    a, b = (skeleton.channels[channel] if channel is not None else [] for skeleton, channel in (left, right))
    one, two = left[0].calls, right[0].calls
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if not agree[one.signature[x]][two.signature[y]] or (one.role[x], one.micro_batch[x]) != (two.role[y], two.micro_batch[y]):
            return place
    return None if len(a) == len(b) else min(len(a), len(b))


def _agree(x: Signature, y: Signature) -> bool:
    """Whether two calls match; sizes that are unknown until run time match any."""
    return x == y or (x[0] == y[0] and x[2:] == y[2:] and -1 in (x[1], y[1]))


def difference_text(world: World, found: Difference, told: Sequence[Told]) -> Finding:
    """A difference as a finding; `told` answers `found.asks()`."""
    p2p, ring = found.line[1] != NOBODY, world.voices[found.ranks[0]]
    words = iter(told)
    texts = []
    for rank, call in zip(found.ranks, found.calls, strict=True):
        if call == NOBODY:
            texts.append(f"rank {rank} has only {found.place}")
        else:
            texts.append(f"{next(words).call} ({_call_text(world.voices[rank].skeleton, call)})")
    what, mend = ("message", "send and receive in one order, with equal sizes and dtypes") if p2p else (
        "collective", "issue the group's collectives in one order on all its ranks")  # fmt: skip
    mend += f". {VPP_CROSSES}" if p2p and ring.skeleton.schedule == "VPP" else ""
    way = f", {found.line[1]} to {found.line[2]}" if p2p else ""
    title = f"group {_number(world, found.line[0])} of ranks {list(found.line[0][0])}{way}"
    return Finding("p2p-mismatch" if p2p else "collective-order", tuple(sorted(found.ranks)), tuple(each.call for each in told),
                   f"{title}: {what} {found.place} differs: {', '.join(texts)}", mend)  # fmt: skip


def _number(world: World, name: RingName) -> int:
    """What the first rank that lists a ring calls it."""
    for rank in name[0]:
        for group in world.voices[rank].groups if rank in world.voices else ():
            if world.names.name(rank, group.id) == name:
                return group.id
    return name[1]


def _call_text(skeleton: Skeleton, call: int) -> str:
    calls = skeleton.calls
    kind, size, dtype, more = skeleton.signatures[calls.signature[call]]
    return f"{kind} {size} B {dtype}{' ' + more if more else ''} {ROLES[calls.role[call]]} of micro-batch {calls.micro_batch[call]}"


def unclear(world: World) -> list[Finding]:
    """Ranks that list several groups of the same ranks so differently that nobody can tell which of them meet."""
    found = []
    for ranks, by_rank in sorted(world.names.unclear.items()):
        lists = ", ".join(f"rank {rank} has {', '.join(map(str, numbers))}" for rank, numbers in sorted(by_rank.items()))
        message = f"groups of ranks {list(ranks)}: {lists}; which of them are the same cannot be told"
        found.append(Finding("wrong-group", tuple(sorted(by_rank)), (), message, "make these groups on all their ranks, in one order"))
    return found
