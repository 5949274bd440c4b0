"""Communication of every rank: what comes when on each channel, whether partners agree, and digests to compare at run time.

A channel is a group, or one direction between two ranks of a group. Groups are known by their ranks, and by their number
where a program has several of the same ranks: ring ids may differ from rank to rank.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from interlace.errors import PlanError
from interlace.ir import Op, Pipeline, Program, Value
from interlace.ir.kinds import is_collective, is_p2p, is_send, stream_of
from interlace.scheduler.hazards.finding import Finding, Where, where
from interlace.scheduler.hazards.steps import Item, item_lists
from interlace.scheduler.schedule import interleaved

ROOTS = ("root", "root_id", "reduce_type")
"""Attributes in which partners must agree."""
SHARES_NO_CONTEXT = frozenset({"send_v2", "recv_v2", "c_allreduce_sum"})
"""Kinds that look their ring up by id at every call, so that rings may share a stream."""
USES_COMPUTE_CONTEXT = frozenset({"p_send", "p_recv", "reduce"})
"""Kinds that, without a stream of their own, take the communicator that the compute stream's context holds."""
VPP_CROSSES = (
    "Paddle's own VPP order receives in another order than it sends where a value skips a stage, and on 2 stages where the "
    "micro-batches are no multiple of them; stock training then swaps messages of equal size and says nothing. Hand such a value "
    "on through every stage, set accumulate_steps to a multiple of the stages, or use schedule_mode 1F1B"
)
Signature = tuple[str, int, str, str]


@dataclass(slots=True)
class Channel:
    """Calls of one rank on one channel: items in host order, and for each the number of its signature."""

    members: tuple[int, ...]
    title: str
    items: list[Item] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Calls:
    """All communication of one rank; `log` holds `(channel, item)` in host order."""

    program: Program
    signatures: list[Signature] = field(default_factory=list)
    channels: dict[str, Channel] = field(default_factory=dict)
    log: list[tuple[str, Item]] = field(default_factory=list)
    ops: dict[int, Op] = field(default_factory=dict)


def calls_of(program: Program) -> Calls:
    """Read a program's communication in host order."""
    calls = Calls(program)
    names = group_names(program)
    values = {value.id: value for value in program.values}
    numbers: dict[Signature, int] = {}
    known: dict[int, tuple[str, Channel, Signature]] = {}
    for op in program.ops:
        if op.group in names and (is_collective(op) or is_p2p(op)):
            calls.ops[op.id] = op
            key, channel = _channel(program, op, names, calls)
            known[op.id] = (key, channel, signature(op, values))
    for items in item_lists(program):
        for item in items:
            if item[0] in known:
                key, channel, (kind, size, dtype, more) = known[item[0]]
                whose = f"{more} {calls.ops[item[0]].role} of micro-batch {item[1]}".strip()
                channel.items.append(item)
                channel.calls.append(numbers.setdefault((kind, size, dtype, whose), len(numbers)))
                calls.log.append((key, item))
    calls.signatures = list(numbers)
    return calls


def group_names(program: Program) -> dict[int, str]:
    """Group id -> its ranks as text, with a number where several groups have the same ranks."""
    seen: dict[tuple[int, ...], int] = defaultdict(int)
    names = {}
    for group in sorted(program.groups, key=lambda g: g.id):
        number = seen[group.ranks]
        seen[group.ranks] += 1
        names[group.id] = ",".join(map(str, group.ranks)) + (f"#{number}" if number else "")
    return names


def signature(op: Op, values: dict[int, Value]) -> Signature:
    """What partners of a call must agree on: kind, bytes (-1: unknown until run time), dtype, root and reduction; besides,
    in a plan, the part of the step and the micro-batch."""
    data = values.get(op.operands[0] if op.operands else op.results[0] if op.results else -1)
    kind = op.kind if not is_p2p(op) else "partial_p2p" if op.kind.startswith("partial") else "p2p"
    more = " ".join(f"{name}={op.attrs[name]}" for name in ROOTS if name in op.attrs)
    return kind, data.size_bytes if data else 0, data.dtype if data else "", more


def _channel(program: Program, op: Op, names: dict[int, str], calls: Calls) -> tuple[str, Channel]:
    ranks = next(group.ranks for group in program.groups if group.id == op.group)
    key, members, title = names[op.group], ranks, f"group {op.group} of ranks {list(ranks)}"
    if is_p2p(op):
        peer = int(op.attrs.get("peer", -1))
        if not 0 <= peer < len(ranks):
            raise PlanError(f"rank {program.rank}: op #{op.id} {op.name} names peer {peer} of group {list(ranks)}, "
                            "expected a place in that list")  # fmt: skip
        members = (program.rank, ranks[peer]) if is_send(op) else (ranks[peer], program.rank)
        key, title = f"{key}:{members[0]}>{members[1]}", f"{title}, {members[0]} to {members[1]}"
    return key, calls.channels.setdefault(key, Channel(members, title))


def digest(program: Program) -> str:
    """A program's collective and p2p orders as one line of JSON, for comparison between ranks before the first step.

    Small: each call is one number in a table of the kinds, sizes and dtypes that occur.
    """
    calls = calls_of(program)
    table = [" ".join(map(str, s)).strip() for s in calls.signatures]
    order = sorted(range(len(table)), key=table.__getitem__)
    place = {old: new for new, old in enumerate(order)}
    body = {key: {"members": channel.members, "title": channel.title, "calls": [place[c] for c in channel.calls],
                  "ops": [f"#{op} {calls.ops[op].name} {calls.ops[op].layer}@{m}" for op, m in _named(channel.items)]}
            for key, channel in sorted(calls.channels.items())}  # fmt: skip
    schedule = program.pipeline.schedule
    text = msgspec.json.encode({"rank": program.rank, "schedule": schedule, "table": [table[k] for k in order], "channels": body}).decode()
    return f"{hashlib.sha256(text.encode()).hexdigest()[:16]} {text}"


def _named(items: list[Item]) -> list[Item]:
    """Items that a digest names: the first ones, so that its size stays in bounds."""
    return items[:256]


class _ChannelDigest(msgspec.Struct, frozen=True):
    members: tuple[int, ...]
    title: str
    calls: list[int]
    ops: list[str]


class _Digest(msgspec.Struct, frozen=True):
    rank: int
    table: list[str]
    channels: dict[str, _ChannelDigest]
    schedule: str = ""


def compare_digests(digests: Sequence[str]) -> list[Finding]:
    """Findings where ranks disagree: the first difference of each channel. All ranks that get the same digests find the
    same.

    Raises:
        PlanError: A digest is cut short or altered.
    """
    read = []
    for text in digests:
        mark, _, body = text.partition(" ")
        if hashlib.sha256(body.encode()).hexdigest()[:16] != mark:
            raise PlanError(f"digest {text[:40]!r} is not whole; expected what `digest` gave on another rank, unaltered")
        read.append(msgspec.json.decode(body, type=_Digest))
    lists = {
        d.rank: {key: ([d.table[c] for c in channel.calls], channel) for key, channel in d.channels.items()} for d in read
    }
    return _compare(lists, read[0].schedule if read else "")


_Log = tuple[list[str], _ChannelDigest | None]


def _compare(lists: dict[int, dict[str, tuple[list[str], _ChannelDigest]]], schedule: str) -> list[Finding]:
    findings = []
    for key in sorted({key for channels in lists.values() for key in channels}):
        members = next(channels[key][1].members for channels in lists.values() if key in channels)
        present = [rank for rank in members if rank in lists]
        first = present[0]
        for rank in present[1:]:
            mine: _Log = lists[first].get(key, ([], None))
            other: _Log = lists[rank].get(key, ([], None))
            place = next((k for k, (a, b) in enumerate(zip(mine[0], other[0], strict=False)) if not agree(a, b)), None)
            if place is None and len(mine[0]) != len(other[0]):
                place = min(len(mine[0]), len(other[0]))
            if place is not None:
                title = next(lists[r][key][1].title for r in (first, rank) if key in lists[r])
                texts = [_call_text(first, *mine, place), _call_text(rank, *other, place)]
                findings.append(_disagreement(":" in key, schedule, title, (first, rank), (), place, texts))
                break
    return findings


def _call_text(rank: int, calls: list[str], channel: _ChannelDigest | None, place: int) -> str:
    if place >= len(calls) or channel is None:
        return f"rank {rank} has only {len(calls)}"
    name = f" ({channel.ops[place]})" if place < len(channel.ops) else ""
    return f"rank {rank} calls {calls[place]}{name}"


def agree(left: str, right: str) -> bool:
    """Whether two calls match; sizes that are unknown until run time match any."""
    if left == right:
        return True
    a, b = left.split(" "), right.split(" ")
    return len(a) == len(b) and a[0] == b[0] and a[2:] == b[2:] and "-1" in (a[1], b[1])


def _disagreement(
    p2p: bool, schedule: str, title: str, ranks: tuple[int, ...], items: tuple[Where, ...], place: int, texts: list[str]
) -> Finding:
    what = "message" if p2p else "collective"
    mend = ("send and receive in one order, with equal sizes and dtypes" if p2p
            else "issue the group's collectives in one order on all its ranks")  # fmt: skip
    mend += f". {VPP_CROSSES}" if p2p and schedule == "VPP" else ""
    return Finding("p2p-mismatch" if p2p else "collective-order", tuple(sorted(ranks)), items,
                   f"{title}: {what} {place} differs: {', '.join(texts)}", mend)  # fmt: skip


def disagreements(all_calls: Sequence[Calls]) -> list[Finding]:
    """The first difference of each channel between the ranks at hand."""
    findings = []
    by_rank = {calls.program.rank: calls for calls in all_calls}
    for key in sorted({key for calls in all_calls for key in calls.channels}):
        members = next(calls.channels[key].members for calls in all_calls if key in calls.channels)
        present = [by_rank[rank] for rank in members if rank in by_rank]
        for other in present[1:]:
            place = _first_difference(present[0], other, key)
            if place is not None:
                findings.append(_difference(present[0], other, key, place))
                break
    return findings


def _first_difference(left: Calls, right: Calls, key: str) -> int | None:
    a, b = (calls.channels[key].calls if key in calls.channels else [] for calls in (left, right))
    if left.signatures == right.signatures and a == b:
        return None
    match = [[_agree(x, y) for y in right.signatures] for x in left.signatures]
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if not match[x][y]:
            return place
    return None if len(a) == len(b) else min(len(a), len(b))


def _agree(x: Signature, y: Signature) -> bool:
    return x == y or (x[0] == y[0] and x[2:] == y[2:] and -1 in (x[1], y[1]))


def _difference(left: Calls, right: Calls, key: str, place: int) -> Finding:
    texts, items = [], []
    for calls in (left, right):
        channel, rank = calls.channels.get(key), calls.program.rank
        if channel is None or place >= len(channel.items):
            texts.append(f"rank {rank} has only {len(channel.items) if channel else 0}")
            continue
        op_id, micro_batch = channel.items[place]
        items.append(where(rank, calls.ops[op_id], micro_batch))
        kind, size, dtype, more = calls.signatures[channel.calls[place]]
        texts.append(f"{items[-1]} ({kind} {size} B {dtype}{' ' + more if more else ''})")
    title = next(calls.channels[key].title for calls in (left, right) if key in calls.channels)
    schedule, ranks = left.program.pipeline.schedule, (left.program.rank, right.program.rank)
    return _disagreement(":" in key, schedule, title, ranks, tuple(items), place, texts)


def require_straight(pipeline: Pipeline) -> None:
    """Refuse a pipeline in which Paddle's own order sends messages in one order and receives them in another.

    >>> require_straight(Pipeline(num_stages=2, num_micro_batches=6, num_chunks=2, schedule="VPP"))
    >>> require_straight(Pipeline(num_stages=2, num_micro_batches=5, num_chunks=2, schedule="VPP"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    interlace.errors.PlanError: pipeline of 2 stages, 2 chunks and 5 micro-batches: ...

    Raises:
        PlanError: With the cause, and what to do.
    """
    stages, count, chunks = pipeline.num_stages, pipeline.num_micro_batches, pipeline.num_chunks
    if pipeline.schedule != "VPP" or _sent_and_received(stages, count, chunks):
        return
    raise PlanError(
        f"pipeline of {stages} stages, {chunks} chunks and {count} micro-batches: Paddle's own VPP order sends messages between the "
        "stages in one order and receives them in another; stock training swaps those of equal size and says nothing; expected "
        f"accumulate_steps to be a multiple of the stages: set it to {count // stages * stages or stages} or "
        f"{-(-count // stages) * stages}, or use schedule_mode 1F1B"
    )


def _sent_and_received(stages: int, count: int, chunks: int) -> bool:
    """Whether Paddle's VPP order receives on each channel in the order in which it sends."""
    sent: dict[tuple[int, int], list[tuple[str, int, int]]] = defaultdict(list)
    received: dict[tuple[int, int], list[tuple[str, int, int]]] = defaultdict(list)
    last = stages * chunks - 1
    for stage in range(stages):
        for slot in interleaved(stage, stages, count, chunks):
            part = slot.chunk * stages + stage
            to = {"F": part + 1, "S": part - 1}.get(slot.kind, -1)
            came = {"R": part - 1, "B": part + 1}.get(slot.kind, -1)
            if 0 <= to <= last:
                sent[stage, to % stages].append(("F" if to > part else "B", slot.micro_batch, to))
            if 0 <= came <= last:
                received[came % stages, stage].append(("F" if came < part else "B", slot.micro_batch, part))
    return sent == received


def shared_streams(calls: Calls) -> list[Finding]:
    """Streams on which two rings would use one communicator."""
    first: dict[str, Op] = {}
    found: dict[str, Finding] = {}
    for op in calls.ops.values():
        stream = stream_of(op)
        if op.kind in SHARES_NO_CONTEXT or (not stream and op.kind not in USES_COMPUTE_CONTEXT):
            continue
        old = first.setdefault(stream, op)
        if old.group != op.group and stream not in found:
            rank = calls.program.rank
            items = (where(rank, old, 0), where(rank, op, 0))
            message = f"groups {old.group} and {op.group} share a stream, which keeps the first one's communicator"
            found[stream] = Finding("shared-stream", (rank,), items, f"rank {rank}: {message}: {items[0]}, {items[1]}",
                                       f"give group {op.group} a stream of its own")  # fmt: skip
    return list(found.values())
