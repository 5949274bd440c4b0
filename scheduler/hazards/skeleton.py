"""What other ranks must know about a rank's communication to prove the absence of deadlocks.

A skeleton contains no rank, group number or operation, so ranks that do the same at different positions of the mesh have equal
skeletons: a world of thousands of ranks has one per stage. The proof (`all_ranks.check_together`) needs only skeletons and the groups of
each rank (`RankComm`).
"""

from __future__ import annotations

import hashlib
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from interlace.errors import PlanError
from interlace.ir import Group, Op, Program
from interlace.ir.kinds import is_comm, is_p2p, is_send, meets_others
from interlace.ir.signatures import Signature, signature
from interlace.ir.target import Target
from interlace.scheduler.hazards.flat_plan import FlatPlan
from interlace.scheduler.hazards.happens_before import NO_ITEM, Trace

ROLES = ("forward", "backward", "optimize")
COLLECTIVE = 0
NO_RING = -1
"""Used instead of a ring for a call that names no group (`operation_kinds.WITHOUT_GROUP`)."""
MAX_BYTES = 1 << 28
"""Most bytes that another rank's skeleton may have when unpacked; one call takes about ten bytes."""
Channel = tuple[int, int]
"""A rank's ring, and the direction: `COLLECTIVE`, `1 + k` for sends to the ring's k-th rank, `-1 - k` for receives from it."""


class Calls(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The calls of a rank in host order, by column.

    Attributes:
        ring: Number of the rank's ring, in the order of first use, or `NO_RING`.
        way: The direction, see `Channel`.
        signature: Index in the skeleton's `signatures`.
        role: Index in `ROLES`.
        micro_batch: As in the plan.
        place: Index of the call among those of the captured program, see `places_of_calls`.
        num_waits: Number of earlier calls of the same rank that the call waits for.
        waits: For each of these, its distance in number of calls.
    """

    ring: list[int]
    way: list[int]
    signature: list[int]
    role: list[int]
    micro_batch: list[int]
    place: list[int]
    num_waits: list[int]
    waits: list[int]


class Skeleton(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, dict=True):
    """The communication of one rank, without its number.

    Attributes:
        stage, schedule: Pipeline stage and schedule.
        signatures: Properties of calls that partners must agree on: kind, bytes, dtype, root.
        calls: The calls.
    """

    stage: int
    schedule: str
    signatures: tuple[Signature, ...]
    calls: Calls

    @cached_property
    def channels(self) -> dict[Channel, list[int]]:
        """Calls of each channel, by number, in host order."""
        found: dict[Channel, list[int]] = defaultdict(list)
        for number, channel in enumerate(zip(self.calls.ring, self.calls.way, strict=True)):
            found[channel].append(number)
        return dict(found)

    @cached_property
    def without_group(self) -> Counter[tuple[Signature, int, int, int]]:
        """Number of calls that name no group, by signature, role, micro-batch and place."""
        calls = self.calls
        numbers = self.channels.get((NO_RING, COLLECTIVE), [])
        return Counter((self.signatures[calls.signature[k]], calls.role[k], calls.micro_batch[k], calls.place[k]) for k in numbers)

    @cached_property
    def waits(self) -> list[list[int]]:
        """For each call, the numbers of the earlier calls that it waits for."""
        back = iter(self.calls.waits)
        return [[number - next(back) for _ in range(count)] for number, count in enumerate(self.calls.num_waits)]

    @cached_property
    def packed(self) -> bytes:
        """Compressed encoding for other ranks; about two bytes per call."""
        return zlib.compress(msgspec.msgpack.encode(self), 6)

    @cached_property
    def mark(self) -> bytes:
        """A digest: equal for equal skeletons."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()[:16]


def unpacked(packed: bytes) -> Skeleton:
    """The skeleton that another rank packed. Raises PlanError if it is truncated or altered, or if its columns are inconsistent."""
    try:
        opened = zlib.decompressobj()
        skeleton = msgspec.msgpack.decode(opened.decompress(packed, MAX_BYTES), type=Skeleton)
    except (zlib.error, msgspec.DecodeError) as error:
        raise PlanError(_not_whole(str(error))) from error
    wrong = _misfit(skeleton)
    if wrong:
        raise PlanError(_not_whole(wrong))
    return skeleton


def _not_whole(why: str) -> str:
    return (
        f"the communication of another rank did not come whole ({why}); expected what its `packed` gave; "
        "run the same version of Interlace on all ranks and start them anew"
    )


def _misfit(skeleton: Skeleton) -> str:
    """Description of an inconsistency in the columns of calls; empty for a skeleton that `skeleton_of` could have made."""
    calls = skeleton.calls
    columns = {name: len(getattr(calls, name)) for name in calls.__struct_fields__ if name != "waits"}
    if len(set(columns.values())) > 1:
        return f"columns of unequal length: {', '.join(f'{name} {count}' for name, count in columns.items())}"
    if min(calls.num_waits, default=0) < 0 or sum(calls.num_waits) != len(calls.waits):
        return f"num_waits counts {sum(calls.num_waits)} waits, there are {len(calls.waits)}"
    for name, count in (("signature", len(skeleton.signatures)), ("role", len(ROLES))):
        wrong = next((place for place in getattr(calls, name) if not 0 <= place < count), None)
        if wrong is not None:
            return f"{name} {wrong} of {count}"
    wrong = next((number for number, found in enumerate(skeleton.waits) if any(not 0 <= before < number for before in found)), None)
    return "" if wrong is None else f"call {wrong} waits for one that is not before it"


@dataclass(slots=True, frozen=True)
class RankComm:
    """The communication of one rank: its rank, its groups, the group numbers of its skeleton's rings, and the skeleton."""

    rank: int
    groups: tuple[Group, ...]
    rings: tuple[int, ...]
    skeleton: Skeleton


def comm_of(program: Program, skeleton: Skeleton) -> RankComm:
    """The communication of a program's rank. The skeleton may come from another rank with the same operations and jobs."""
    used = dict.fromkeys(op.group for op in program.ops if is_comm(op))
    return RankComm(program.rank, program.groups, tuple(used), skeleton)


def call_items(plan: FlatPlan) -> list[int]:
    """Indices, in host order, of the op instances that wait for other ranks. The number of a call is its index in this list."""
    meets = [meets_others(op) for op in plan.program.ops]
    return [item for item, position in enumerate(plan.op) if meets[position]]


def skeleton_of(trace: Trace, target: Target) -> Skeleton:
    """The skeleton of a traced plan; O(calls x streams)."""
    plan, program = trace.plan, trace.plan.program
    values = {value.id: value for value in program.values}
    rings = {group: number for number, group in enumerate(dict.fromkeys(op.group for op in program.ops if is_comm(op)))}
    numbers: dict[Signature, int] = {}
    rows: dict[int, tuple[int, int, int, int, int]] = {}
    places = places_of_calls(program)
    for position, op in enumerate(program.ops):
        if meets_others(op):
            signed = numbers.setdefault(signature(op, values), len(numbers))
            rows[position] = (rings.get(op.group, NO_RING), way_of(op), signed, ROLES.index(op.role), places[op.id])
    items = call_items(plan)
    ring, way, signed_as, role, place = ([rows[plan.op[item]][k] for item in items] for k in range(5))
    waits = _waits(trace, items, target)
    back = [number - earlier for number, found in enumerate(waits) for earlier in found]
    micro_batches = [plan.micro_batch[item] for item in items]
    calls = Calls(ring, way, signed_as, role, micro_batches, place, [len(found) for found in waits], back)
    return Skeleton(program.pipeline.stage, program.pipeline.schedule, tuple(numbers), calls)


def places_of_calls(program: Program) -> dict[int, int]:
    """Op id -> place: index of the call, from 0, among those of its channel and part of the step in the captured program. A repetition of a
    call that is still in the program has a negative place, unique for the place and part of the step of that call.

    Partners have different programs and op ids, but the same order of captured calls on a channel, by which Paddle's baseline pairs them.
    Op ids ascend in captured order. A call that a pass added without an `origin` comes after the captured ones.
    """
    calls = {op.id: op for op in program.ops if meets_others(op)}
    again = [op for op in calls.values() if op.origin != op.id and op.origin in calls]
    first = calls.keys() - {op.id for op in again}
    count: Counter[tuple[int, int, str]] = Counter()
    places: dict[int, int] = {}
    for op in sorted((calls[number] for number in first), key=lambda op: (op.origin if op.origin >= 0 else op.id, op.id)):
        channel = (op.group, way_of(op), op.role)
        places[op.id] = count[channel]
        count[channel] += 1
    return places | {op.id: -1 - len(ROLES) * places.get(op.origin, 0) - ROLES.index(calls[op.origin].role) for op in again}


def place_text(place: int) -> str:
    """Text of a place for messages.

    >>> place_text(2), place_text(-1), place_text(-8)
    ('call 2', 'repetition of forward call 0', 'repetition of backward call 2')
    """
    first, role = divmod(-1 - place, len(ROLES))
    return f"call {place}" if place >= 0 else f"repetition of {ROLES[role]} call {first}"


def way_of(op: Op) -> int:
    """The direction of a call, see `Channel`."""
    if not is_p2p(op):
        return COLLECTIVE
    peer = int(op.attrs.get("peer", -1))
    return 1 + peer if is_send(op) else -1 - peer


def _waits(trace: Trace, items: Sequence[int], target: Target) -> list[list[int]]:
    """For each call, the earlier calls of the rank that it waits for: the last completed one of each stream, and the last of its ring."""
    plan = trace.plan
    number = {item: k for k, item in enumerate(items)}
    by_stream: list[list[int]] = [[] for _ in plan.streams]
    ring: dict[int, int] = {}
    found = []
    for item in items:
        clock, stream = trace.clock[item], plan.stream[item]
        sources = [_last_at(earlier, clock[s] if s != stream else item) for s, earlier in enumerate(by_stream)]
        group = plan.op_of(item).group
        sources.append(ring.get(group, NO_ITEM) if target.ring_is_serial else NO_ITEM)
        found.append([number[source] for source in dict.fromkeys(sources) if source != NO_ITEM])
        ring[group] = item
        by_stream[stream].append(item)
    return found


def _last_at(items: list[int], bound: int) -> int:
    """The last entry of an ascending list that is not above a bound; NO_ITEM if there is none."""
    count = bisect_right(items, bound)
    return items[count - 1] if count else NO_ITEM
