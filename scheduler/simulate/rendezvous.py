"""Rendezvous: the k-th communication of each rank on a channel starts together with the k-th of the others."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from interlace.errors import PlanError
from interlace.ir import Op, Program, describe
from interlace.ir.arrays import Ints, ints, offsets
from interlace.ir.kinds import is_collective, is_comm, is_send
from interlace.ir.rings import RingName, RingNames
from interlace.scheduler.simulate.arrays import Options, RankItems


def meetings(parts: Sequence[RankItems], first: Ints, options: Options) -> dict[str, Any]:
    """The columns of `SimInput` about rendezvous and messages; `first` as there.

    Raises PlanError if a group has a rank without a program, unless `options.peers_ready`; if a rank would represent both sides of a
    message; or if ranks of a group issue collectives of different kinds."""
    acting = options.acting(part.program.rank for part in parts)
    queues: dict[Hashable, dict[int, list[int]]] = {}
    names = RingNames({part.program.rank: part.program.groups for part in parts})
    for k, part in enumerate(parts):
        channel = {
            op.id: found
            for op in part.ops.values()
            if is_comm(op) and (found := _channel(op, part.program, acting, options, names)) is not None and len(found[1]) > 1
        }
        waiting: dict[int, list[int]] = {}
        comm = np.flatnonzero(np.isin(part.items[:, 0], list(channel)))
        for item, op_id in zip((comm + first[k]).tolist(), part.items[comm, 0].tolist(), strict=True):
            if op_id not in waiting:
                key, members, me = channel[op_id]
                waiting[op_id] = queues.setdefault(key, {member: [] for member in members})[me]
            waiting[op_id].append(item)
    return _numbered(queues, parts, first, options)


def _channel(
    op: Op, program: Program, acting: Mapping[int, int], options: Options, names: RingNames
) -> tuple[Hashable, list[Any], Any] | None:
    """Key of the channel of a communication, its members, and which member this op is; None for a message to or from an absent rank."""
    ranks = next((group.ranks for group in program.groups if group.id == op.group), ())
    missing = [rank for rank in ranks if acting.get(rank) is None]
    if missing and not options.peers_ready:
        raise PlanError(
            f"rank {program.rank}: {describe(op)} talks to rank {missing[0]}, for which there is no program; give that "
            f"rank's dump, say which rank stands for it, or assume that absent ranks are always ready"
        )
    if is_collective(op):
        members = sorted({acting[rank] for rank in ranks if rank in acting})
        exact = all(acting[rank] == rank for rank in ranks if rank in acting)
        return ((names.name(program.rank, op.group) if exact else None, tuple(members)), members, program.rank)
    peer = ranks[int(op.attrs.get("peer", 0))]
    if peer not in acting:
        return None
    source, target = (program.rank, acting[peer]) if is_send(op) else (acting[peer], program.rank)
    if source == target:
        raise PlanError(f"rank {program.rank}: {describe(op)} sends to rank {peer}, which the same rank stands for")
    exact = all(acting[rank] == rank for rank in (program.rank, peer))
    name = names.name(program.rank, op.group) if exact else None
    return (("p2p", name, source, target), ["send", "receive"], "send" if is_send(op) else "receive")


def _numbered(
    queues: Mapping[Hashable, Mapping[Any, list[int]]], parts: Sequence[RankItems], first: Ints, options: Options
) -> dict[str, Any]:
    total = int(first[-1])
    meet, follow = np.full(total, -1, np.int64), np.full(total, -1, np.int64)
    rows: list[list[int]] = []
    sizes: list[int] = []
    absent: dict[int, str] = {}
    for key, queue in queues.items():
        members = list(queue)
        is_buffered = members[0] == "send" and options.p2p == "buffered"
        counts = {*map(len, queue.values())}
        if members[0] == "send" and len(counts) == 1 and not is_buffered:
            found = np.array([*queue.values()], np.int64).T
            meet[found] = len(rows) + np.arange(len(found))[:, None]
            rows += found.tolist()
            sizes += [len(members)] * len(found)
            continue
        for k in range(max(counts)):
            row = [queue[who][k] for who in members if k < len(queue[who])]
            lacking = [str(who) for who in members if k >= len(queue[who])]
            if members[0] != "send":
                _same_kind(row, k, parts, first)
            if is_buffered and not lacking:
                follow[row[1]] = row[0]
                continue
            if is_buffered and lacking == ["receive"]:
                continue
            meet[row] = len(rows)
            if lacking:
                absent[len(rows)] = _lack(key, lacking, k)
            rows.append(row)
            sizes.append(len(members))
    mates = ints([item for row in rows for item in row])
    return {
        "meet": meet,
        "follow": follow,
        "meet_first": offsets([len(row) for row in rows]),
        "mates": mates,
        "meet_size": ints(sizes),
        "absent": absent,
    }


def _lack(key: Hashable, lacking: Sequence[str], k: int) -> str:
    if isinstance(key, tuple) and key[0] == "p2p":
        return f"number {k + 1} from rank {key[2]} to rank {key[3]}{_on_group(key[1])} has no {lacking[0]}"
    assert isinstance(key, tuple)
    return f"number {k + 1}{_on_group(key[0])} is never issued by rank(s) {', '.join(lacking)}"


def _on_group(name: RingName | None) -> str:
    return f" on group {name[1]} of ranks {list(name[0])}" if name else ""


def _same_kind(row: Sequence[int], k: int, parts: Sequence[RankItems], first: Ints) -> None:
    """Raises PlanError if collectives that meet are of different kinds."""
    found = []
    for item in row:
        at = int(np.searchsorted(first, item, side="right")) - 1
        found.append((parts[at].program.rank, parts[at].ops[int(parts[at].items[item - int(first[at]), 0])]))
    (rank, op), *others = found
    for other_rank, other in others:
        if other.kind != op.kind:
            raise PlanError(
                f"ranks {rank} and {other_rank} issue different collectives as number {k + 1} of group {op.group}: "
                f"{describe(op)} and {describe(other)}; every rank of a group must issue them in one order"
            )
