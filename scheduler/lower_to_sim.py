"""Programs of all ranks and a cost model as flat arrays: the one input of the plain simulator and of its compiled twin.

An *item* is one `(op, micro-batch)` of one rank. Items are numbered rank by rank in the order in which the host issues them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from interlace.cost_model import Costs
from interlace.cost_model.work import copy_direction
from interlace.scheduler.variants import Variant, places, variants

from interlace.errors import PlanError
from interlace.ir import Graph, Group, Op, Program, Value, dependencies, describe
from interlace.ir.kinds import NO_KERNEL, is_boundary, is_collective, is_comm, is_copy, is_receive, is_send

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

ONE = 1 << 20
"""Fixed point of stretch factors and rates: a factor of 1."""
MAX_DUR_NS = 1 << 40
"""Longest op (18 minutes); keeps work, `dur_ns * ONE`, inside 64 bits."""
COMPUTE = "compute"
NOTHING = ""
"""What an op that launches nothing competes for."""


def blocks_host(op: Op) -> bool:
    """Whether the host waits until the op is done: a copy to pageable memory, or a fetch."""
    return op.kind == "fetch" or (op.kind == "memcpy_d2h" and op.attrs.get("dst_place_type", 0) == 0)


@dataclass(frozen=True, slots=True)
class Options:
    """How programs are taken.

    Attributes:
        p2p: `rendezvous`: a send and its receive start and end together; `buffered`: a send runs alone, its receive runs from
            the send's start (or its own) to the send's end.
        share: Two ops that want one resource on one rank (two collectives, two sends, two receives, two copies of one
            direction, two compute kernels on two streams) get half of it each; off: each runs as if alone.
        peers_ready: Ranks without a program are taken to be ready whenever they are needed; off: they are an error.
        stands_for: Rank without a program -> rank whose program stands for it.
        blocks: Which ops the host waits for.
    """

    p2p: Literal["rendezvous", "buffered"] = "rendezvous"
    share: bool = True
    peers_ready: bool = False
    stands_for: Mapping[int, int] = field(default_factory=dict)
    blocks: Callable[[Op], bool] = blocks_host


@dataclass(slots=True)
class SimInput:
    """The arrays; per item unless said otherwise.

    Attributes:
        ranks: Simulated ranks, ascending. `[num_ranks]`
        first: First item of each rank, and the number of items. `[num_ranks + 1]`
        first_stream: The same of streams. `[num_ranks + 1]`
        stream_names: Per stream; each rank's first is `compute`.
        op, micro_batch: What the item is.
        stream: Global number of its stream.
        issue: Host time at which it is issued if the host never blocks.
        dur: Time alone, in nanoseconds.
        side: Communication or copy; everything else counts as compute.
        blocking: The host waits for its end.
        kind: Interference class.
        excess: `[classes, classes]`: by how much class a is stretched beside class b, over 1, in units of 1 / ONE.
        dep_first, dep: What the item waits for on its own rank, other than its stream's earlier items. `[items + 1]`, `[deps]`
        meet: Number of its rendezvous, or -1.
        meet_first, mates: Items of each rendezvous. `[meets + 1]`
        meet_size: How many must arrive. `[meets]`
        follow: The send whose message a buffered receive waits for, or -1.
        host_end: When each rank's host is through with its jobs if it never blocks. `[num_ranks]`
        job_first: Per rank, `(job name, first item)`.
        absent: Rendezvous -> text saying which rank lacks its part.
    """

    ranks: list[int]
    first: Ints
    first_stream: Ints
    stream_names: list[str]
    op: Ints
    micro_batch: Ints
    stream: Ints
    issue: Ints
    dur: Ints
    side: Flags
    blocking: Flags
    kind: Ints
    excess: Ints
    dep_first: Ints
    dep: Ints
    meet: Ints
    meet_first: Ints
    mates: Ints
    meet_size: Ints
    follow: Ints
    host_end: Ints
    job_first: list[list[tuple[str, int]]]
    absent: dict[int, str]
    programs: list[Program]
    _ops: dict[int, dict[int, Op]] = field(default_factory=dict, repr=False)

    @property
    def num_items(self) -> int:
        """Number of items of all ranks."""
        return len(self.op)

    def rank_index(self, item: int) -> int:
        """Position in `ranks` of an item's rank."""
        return int(np.searchsorted(self.first, item, side="right")) - 1

    def op_at(self, item: int) -> Op:
        """The op of an item."""
        at = self.rank_index(item)
        if at not in self._ops:
            self._ops[at] = {op.id: op for op in self.programs[at].ops}
        return self._ops[at][int(self.op[item])]

    def describe(self, item: int) -> str:
        """How messages name an item: rank, stream, op with layer, micro-batch."""
        where = f"rank {self.ranks[self.rank_index(item)]} stream {self.stream_names[self.stream[item]]}"
        return f"{where}: {describe(self.op_at(item))} of micro-batch {self.micro_batch[item]}"


@dataclass(slots=True)
class _Rank:
    """One rank's part of the arrays, with item and stream numbers of its own."""

    program: Program
    items: Ints
    ops: dict[int, Op]
    stream_names: list[str]
    columns: dict[str, npt.NDArray[Any]]
    deps: Ints
    host_end: int
    job_first: list[tuple[str, int]]


def lower(programs: Sequence[Program], cost: Costs, options: Options | None = None) -> SimInput:
    """The arrays of a world; cost O(items + ops x operands), vectorised over items.

    Raises:
        PlanError: A program has no jobs; an item is issued before one it waits for; a group has a rank without a program;
            ranks of a group issue collectives of different kinds; an op's time is negative or too long.
    """
    options = options or Options()
    programs = sorted(programs, key=lambda program: program.rank)
    classes = _Classes(cost, options)
    parts = [_lower_rank(program, cost, options, classes) for program in programs]
    first = _offsets([len(part.items) for part in parts])
    first_stream = _offsets([len(part.stream_names) for part in parts])
    column = {key: _joined([part.columns[key] for part in parts]) for key in parts[0].columns} if parts else {}
    column["stream"] += np.repeat(first_stream[:-1], np.diff(first))
    deps = _joined([part.deps + first[k] for k, part in enumerate(parts)])
    dep_first, dep = _rows(deps[:, 1], deps[:, 0], int(first[-1]))
    meetings = _meetings(parts, first, options)
    return SimInput(
        [program.rank for program in programs], first, first_stream, [n for part in parts for n in part.stream_names],
        excess=classes.excess(), dep_first=dep_first, dep=dep, host_end=np.array([p.host_end for p in parts], np.int64),
        job_first=[[(name, at + int(first[k])) for name, at in part.job_first] for k, part in enumerate(parts)],
        programs=list(programs), **column, **meetings,
    )  # fmt: skip


def _lower_rank(program: Program, cost: Costs, options: Options, classes: _Classes) -> _Rank:
    if not program.jobs:
        raise PlanError(f"rank {program.rank}: the program has no jobs, so nothing to simulate; run a schedule pass on it first")
    ops = {op.id: op for op in program.ops if not is_boundary(op)}
    items = np.array([item for job in program.jobs for item in job.items], np.int64).reshape(-1, 2)
    names = [COMPUTE, *sorted({op.stream for op in ops.values()} - {"", COMPUTE})]
    stream_of = {name: k for k, name in enumerate(names)} | {"": 0}
    table = _OpTable.make(program, ops, cost, options, classes, stream_of)
    row = table.row[np.minimum(items[:, 0], len(table.row) - 1)]
    if (row < 0).any() or (items[:, 0] >= len(table.row)).any():
        raise PlanError(f"rank {program.rank}: a job holds an op that is no op of the program; `verify` says which")
    issue, host_end, job_first = _host(program, cost, table.host[row])
    columns = {
        "op": items[:, 0], "micro_batch": items[:, 1], "stream": table.stream[row], "issue": issue, "dur": table.dur[row],
        "side": table.side[row], "blocking": table.blocking[row], "kind": table.kind[row],
    }  # fmt: skip
    deps = _reduced(_deps(program, items), columns["stream"], program, items)
    return _Rank(program, items, ops, names, columns, deps, host_end, job_first)


@dataclass(slots=True)
class _OpTable:
    """Columns over a rank's ops; `row` is op id -> row."""

    row: Ints
    host: Ints
    dur: Ints
    stream: Ints
    kind: Ints
    side: Flags
    blocking: Flags

    @staticmethod
    def make(program: Program, ops: Mapping[int, Op], cost: Costs, options: Options, classes: _Classes,
             stream_of: Mapping[str, int]) -> _OpTable:  # fmt: skip
        """Ask the cost model once for every op."""
        values = {value.id: value for value in program.values}
        groups = {group.id: group for group in program.groups}
        listed = list(ops.values())
        row = np.full(1 + max(ops, default=0), -1, np.int64)
        row[list(ops)] = np.arange(len(listed))
        durs = [_checked(program, op, 0 if op.kind in NO_KERNEL else cost.op_time(op, values, groups).dur_ns) for op in listed]
        return _OpTable(
            row, _ints([cost.host_ns(op) for op in listed]), _ints(durs), _ints([stream_of[op.stream] for op in listed]),
            _ints([classes.number(op, values, groups) for op in listed]),
            np.array([_resource(op, values) not in (COMPUTE, NOTHING) for op in listed], np.bool_),
            np.array([options.blocks(op) for op in listed], np.bool_),
        )  # fmt: skip


def _checked(program: Program, op: Op, dur_ns: int) -> int:
    if not 0 <= dur_ns < MAX_DUR_NS:
        raise PlanError(f"rank {program.rank}: {describe(op)} takes {dur_ns} ns, expected 0 to {MAX_DUR_NS} ns; mend the profile")
    return int(dur_ns)


def _host(program: Program, cost: Costs, op_ns: Ints) -> tuple[Ints, int, list[tuple[str, int]]]:
    """Issue time of every item, end of the host's work, and where jobs begin."""
    charge = op_ns.copy()
    job_first, at, trailing = [], 0, 0
    for job in program.jobs:
        job_first.append((job.name, at))
        if at < len(charge):
            charge[at] += cost.job_ns()
        else:
            trailing += cost.job_ns()
        at += len(job.items)
    issue = np.cumsum(charge)
    return issue, (int(issue[-1]) if len(issue) else 0) + trailing, job_first


def _deps(program: Program, items: Ints) -> Ints:
    """Pairs `[n, 2]` (before, after) of a rank's items: data of one micro-batch, persistable memory across them, events, groups."""
    pairs = [_persistable(program, items), _group_order(program, items), _events(program, items)]
    edges = {m: table for variant in variants(program) for table in [_op_edges(variant)] for m in variant.micro_batches}
    num_ids = 1 + max((op.id for op in program.ops), default=-1)
    for micro_batch, place in places(items, num_ids):
        both = place[edges[micro_batch]]
        pairs.append(both[(both >= 0).all(axis=1)])
    return np.concatenate(pairs)


def _op_edges(variant: Variant) -> Ints:
    """Pairs of op ids that data orders. Order within groups and among random draws is left to the issue order."""
    program = variant.program
    plain = [msgspec.structs.replace(op, group=-1) if op.group >= 0 else op for op in program.ops]
    after = dependencies(Graph(program), plain)
    return _pairs([(before, op_id) for op_id, befores in after.items() for before in befores])


def _persistable(program: Program, items: Ints) -> Ints:
    """Order of accesses to memory that lives across micro-batches, in issue order: to and from every write."""
    storage = {value.id: value.storage for value in program.values}
    lasting = {value.storage for value in program.values if value.persistable}
    accesses: dict[int, list[tuple[int, bool]]] = {}
    for op in program.ops:
        written = {storage[op.operands[k]] for _, k in op.inplace}
        touched = {storage[v] for k, v in enumerate(op.operands) if v >= 0 and k not in op.no_buffer} | written
        for place in sorted(touched & lasting):
            accesses.setdefault(op.id, []).append((place, place in written))
    ever_written = {place for pairs in accesses.values() for place, write in pairs if write}
    flat = [(op_id, place, write) for op_id, pairs in accesses.items() for place, write in pairs if place in ever_written]
    if not flat:
        return np.empty((0, 2), np.int64)
    table = np.array(flat, np.int64)
    starts, order = _rows(table[:, 0], np.arange(len(table)), 1 + max(int(table[:, 0].max()), int(items[:, 0].max(initial=0))))
    counts = np.diff(starts)[items[:, 0]]
    who = np.repeat(np.arange(len(items)), counts)
    within = np.arange(len(who)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = table[order[starts[items[who, 0]] + within]]
    return _write_edges(who, rows[:, 1], rows[:, 2].astype(np.bool_))


def _write_edges(who: Ints, place: Ints, write: Flags) -> Ints:
    """Pairs between each access and the write before it and the write behind it, per place, accesses in the order of `who`."""
    order = np.lexsort((who, place))
    who, place, write = who[order], place[order], write[order]
    count = np.arange(len(who))
    new = np.r_[True, place[1:] != place[:-1]] if len(who) else np.empty(0, np.bool_)
    start = np.maximum.accumulate(np.where(new, count, 0))
    last = np.r_[-1, np.maximum.accumulate(np.where(write, count, -1))[:-1]]
    has_last = last >= start
    following = np.minimum.accumulate(np.where(write, count, len(who))[::-1])[::-1]
    following = np.r_[following[1:], len(who)]
    end = np.r_[np.flatnonzero(new)[1:], len(who)][np.cumsum(new) - 1]
    has_next = following < end
    before = np.stack([who[last[has_last]], who[has_last]], axis=1)
    behind = np.stack([who[has_next], who[following[has_next]]], axis=1)
    pairs = np.concatenate([before, behind])
    return pairs[pairs[:, 0] != pairs[:, 1]]


def _group_order(program: Program, items: Ints) -> Ints:
    """Communications of one group and direction run one after the other, in issue order."""
    channel = {op.id: (op.group, *_direction(op)) for op in program.ops if is_comm(op)}
    numbers = {key: n for n, key in enumerate(sorted(set(channel.values())))}
    table = np.full(1 + int(items[:, 0].max(initial=0)), -1, np.int64)
    for op_id, key in channel.items():
        if op_id < len(table):
            table[op_id] = numbers[key]
    mine = table[items[:, 0]]
    chosen = np.flatnonzero(mine >= 0)
    order = chosen[np.argsort(mine[chosen], kind="stable")]
    same = mine[order[1:]] == mine[order[:-1]]
    return np.stack([order[:-1][same], order[1:][same]], axis=1)


def _direction(op: Op) -> tuple[str, int]:
    if is_send(op):
        return "send", int(op.attrs.get("peer", -1))
    if is_receive(op):
        return "receive", int(op.attrs.get("peer", -1))
    return "collective", -1


def _events(program: Program, items: Ints) -> Ints:
    """Pairs that the plan's events order."""
    if not program.events:
        return np.empty((0, 2), np.int64)
    place = {(int(op), int(m)): k for k, (op, m) in enumerate(items)}
    pairs = []
    for event in program.events:
        for item in (event.record, *event.waits):
            if item not in place:
                raise PlanError(f"rank {program.rank}: event {event.name!r} names item {item}, which no job runs")
        pairs += [(place[event.record], place[item]) for item in event.waits]
    return _pairs(pairs)


def _reduced(pairs: Ints, stream: Ints, program: Program, items: Ints) -> Ints:
    """Pairs across streams only, and of each stream only the last item waited for: what streams order needs no pair."""
    wrong = pairs[pairs[:, 0] > pairs[:, 1]]
    if len(wrong):
        raise PlanError(_issued_late(wrong[np.lexsort((wrong[:, 0], wrong[:, 1]))[0]], program, items))
    pairs = pairs[stream[pairs[:, 0]] != stream[pairs[:, 1]]]
    order = np.lexsort((pairs[:, 0], stream[pairs[:, 0]], pairs[:, 1]))
    pairs = pairs[order]
    if len(pairs) < 2:
        return pairs
    same = (pairs[1:, 1] == pairs[:-1, 1]) & (stream[pairs[1:, 0]] == stream[pairs[:-1, 0]])
    return pairs[np.r_[~same, True]]


def _issued_late(pair: Ints, program: Program, items: Ints) -> str:
    ops = {op.id: op for op in program.ops}
    before, after = (f"{describe(ops[int(items[k, 0])])} of micro-batch {items[k, 1]}" for k in pair)
    return (f"rank {program.rank}: {after} is issued before {before}, which it waits for; "
            f"put the latter earlier in the jobs")  # fmt: skip


def _meetings(parts: Sequence[_Rank], first: Ints, options: Options) -> dict[str, Any]:
    """Which items of which ranks start together: the k-th of each rank on each channel."""
    acting = {part.program.rank: part.program.rank for part in parts}
    acting |= {rank: twin for rank, twin in options.stands_for.items() if rank not in acting}
    queues: dict[Hashable, dict[int, list[int]]] = {}
    for k, part in enumerate(parts):
        channel = {op.id: _channel(op, part.program, acting, options) for op in part.ops.values() if is_comm(op)}
        comm = np.flatnonzero(np.isin(part.items[:, 0], list(channel)))
        for at, op_id in zip(comm.tolist(), part.items[comm, 0].tolist(), strict=True):
            if (found := channel[op_id]) is not None:
                queues.setdefault(found[0], {rank: [] for rank in found[1]})[found[2]].append(at + int(first[k]))
    return _numbered(queues, parts, first, options)


def _channel(op: Op, program: Program, acting: Mapping[int, int], options: Options) -> tuple[Hashable, list[Any], Any] | None:
    """Key of the channel, who takes part in it, and as whom this op does; None where nobody else does."""
    ranks = next((group.ranks for group in program.groups if group.id == op.group), ())
    missing = [rank for rank in ranks if acting.get(rank) is None]
    if missing and not options.peers_ready:
        raise PlanError(
            f"rank {program.rank}: {describe(op)} talks to rank {missing[0]}, for which there is no program; give that rank's "
            f"dump, say which rank stands for it, or take absent ranks as ready"
        )
    if is_collective(op):
        members = sorted({acting[rank] for rank in ranks if rank in acting})
        exact = all(acting[rank] == rank for rank in ranks if rank in acting)
        return ((op.group if exact else -1, tuple(members)), members, program.rank)
    peer = ranks[int(op.attrs.get("peer", 0))]
    if peer not in acting:
        return None
    source, target = (program.rank, acting[peer]) if is_send(op) else (acting[peer], program.rank)
    if source == target:
        raise PlanError(f"rank {program.rank}: {describe(op)} sends to rank {peer}, for which the same rank stands")
    exact = all(acting[rank] == rank for rank in (program.rank, peer))
    return (("p2p", op.group if exact else -1, source, target), ["send", "receive"], "send" if is_send(op) else "receive")


def _numbered(queues: Mapping[Hashable, Mapping[Any, list[int]]], parts: Sequence[_Rank], first: Ints,
              options: Options) -> dict[str, Any]:  # fmt: skip
    total = int(first[-1])
    meet, follow = np.full(total, -1, np.int64), np.full(total, -1, np.int64)
    rows: list[list[int]] = []
    sizes: list[int] = []
    absent: dict[int, str] = {}
    for key, queue in queues.items():
        members = list(queue)
        if len(members) < 2:
            continue
        for k in range(max(map(len, queue.values()))):
            row = [queue[who][k] for who in members if k < len(queue[who])]
            lacking = [str(who) for who in members if k >= len(queue[who])]
            _same_kind(row, k, parts, first)
            if members[0] == "send" and options.p2p == "buffered" and not lacking:
                follow[row[1]] = row[0]
                continue
            if lacking == ["receive"] and options.p2p == "buffered":
                continue
            meet[row] = len(rows)
            if lacking:
                absent[len(rows)] = _lack(key, lacking, k)
            rows.append(row)
            sizes.append(len(members))
    mates = _ints([item for row in rows for item in row])
    return {"meet": meet, "follow": follow, "meet_first": _offsets([len(row) for row in rows]), "mates": mates,
            "meet_size": _ints(sizes), "absent": absent}  # fmt: skip


def _lack(key: Hashable, lacking: Sequence[str], k: int) -> str:
    if isinstance(key, tuple) and key[0] == "p2p":
        return f"number {k + 1} from rank {key[2]} to rank {key[3]} on group {key[1]} has no {lacking[0]}"
    assert isinstance(key, tuple)
    return f"number {k + 1} on group {key[0]} is never issued by rank(s) {', '.join(lacking)}"


def _same_kind(row: Sequence[int], k: int, parts: Sequence[_Rank], first: Ints) -> None:
    """Collectives that meet are of one kind."""
    found = []
    for item in row:
        at = int(np.searchsorted(first, item, side="right")) - 1
        found.append((parts[at].program.rank, parts[at].ops[int(parts[at].items[item - int(first[at]), 0])]))
    (rank, op), *others = found
    for other_rank, other in others:
        if other.kind != op.kind and is_collective(op):
            raise PlanError(
                f"ranks {rank} and {other_rank} issue different collectives as number {k + 1} of group {op.group}: "
                f"{describe(op)} and {describe(other)}; every rank of a group must issue them in one order"
            )


class _Classes:
    """Numbers the classes of interference as ops come by: equal category and resource, equal stretch."""

    def __init__(self, cost: Costs, options: Options) -> None:
        self.cost, self.options = cost, options
        self.numbers: dict[tuple[str, str], int] = {}

    def number(self, op: Op, values: Mapping[int, Value], groups: Mapping[int, Group]) -> int:
        """The class of an op."""
        return self.numbers.setdefault((self.cost.category(op, values, groups), _resource(op, values)), len(self.numbers))

    def excess(self) -> Ints:
        """By how much each class is stretched beside each other one, over 1, in units of 1 / ONE."""
        table = np.zeros((len(self.numbers), len(self.numbers)), np.int64)
        for a, (category, resource) in enumerate(self.numbers):
            for b, (beside, other) in enumerate(self.numbers):
                table[a, b] = self._excess(category, resource, beside, other)
        return table

    def _excess(self, category: str, resource: str, beside: str, other: str) -> int:
        if NOTHING in (resource, other):
            return 0
        if resource == other:
            return ONE if self.options.share else 0
        if resource != COMPUTE and other == COMPUTE:
            return _over_one(self.cost.stretch_between(beside, category)[1])
        return _over_one(self.cost.stretch_between(category, beside)[0])


def _over_one(factor: float) -> int:
    return max(0, round((factor - 1.0) * ONE))


def _resource(op: Op, values: Mapping[int, Value]) -> str:
    """What two ops of one rank compete for: a direction of communication or of copies, or the device's kernels."""
    if op.kind in NO_KERNEL:
        return NOTHING
    if is_comm(op):
        return _direction(op)[0]
    if is_copy(op) and (way := copy_direction(op, values)) != "d2d":
        return way
    return COMPUTE


def _rows(keys: Ints, entries: Ints, count: int) -> tuple[Ints, Ints]:
    """Entries grouped by key: offsets `[count + 1]` and the entries, each group in the given order."""
    order = np.argsort(keys, kind="stable")
    return _offsets(np.bincount(keys, minlength=count)), entries[order]


def _offsets(counts: Sequence[int] | Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(counts, np.int64))])


def _ints(numbers: Sequence[int]) -> Ints:
    return np.array(numbers, np.int64)


def _pairs(pairs: Sequence[tuple[int, int]]) -> Ints:
    return np.array(pairs, np.int64).reshape(-1, 2)


def _joined(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.concatenate(arrays)
