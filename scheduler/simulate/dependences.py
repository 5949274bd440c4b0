"""Dependencies of op instances (`item` in names) on others of the same rank, besides the order within a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from interlace.errors import PlanError
from interlace.ir import ABSENT, Graph, Program, describe
from interlace.ir.arrays import Flags, Ints, pairs_of
from interlace.ir.copies import Renaming, items_of, places_of, renaming, variants
from interlace.ir.effects import is_ordered
from interlace.ir.graph import overwritten, written_operands
from interlace.ir.kinds import COMPUTE_STREAMS, is_boundary, is_comm, is_p2p
from interlace.ir.per_ops import FEW, once_per_items, once_per_ops
from interlace.scheduler.simulate.arrays import COMPUTE, direction, rows


def item_order(program: Program) -> Ints:
    """Dependencies as pairs `[n, 2]` (before, after) of op instances: by data of a micro-batch, persistable memory, groups and events."""
    found = _ordered(program)
    return np.concatenate([places_of(program, *found.items.T)[found.pairs], _events(program)])


def across_streams(program: Program) -> Ints:
    """The pairs of `item_order` that streams do not imply: only those across streams, and of these only the last op instance of each other
    stream that an op instance waits for. Raises PlanError if an op instance is issued before one that it waits for."""
    found, events, stream = _ordered(program), _events(program), streams_of(program)[1]
    looked = places_of(program, *found.looked)
    if found.is_late or (looked[:, 0] > looked[:, 1]).any() or (events[:, 0] > events[:, 1]).any():
        pairs = item_order(program)
        wrong = pairs[pairs[:, 0] > pairs[:, 1]]
        raise PlanError(_issued_late(wrong[np.lexsort((wrong[:, 0], wrong[:, 1]))[0]], program))
    op = items_of(program)[:, 0]
    pairs = np.concatenate([looked[found.is_across], events])
    pairs = pairs[stream[op[pairs[:, 0]]] != stream[op[pairs[:, 1]]]]
    pairs = pairs[np.lexsort((pairs[:, 0], stream[op[pairs[:, 0]]], pairs[:, 1]))]
    of = stream[op[pairs[:, 0]]]
    is_last = (pairs[1:, 1] != pairs[:-1, 1]) | (of[1:] != of[:-1])
    last: Ints = pairs[np.append(is_last, True)[: len(pairs)]]
    return last


@once_per_ops
def streams_of(program: Program) -> tuple[list[str], Ints]:
    """Names of the streams, `compute` first, and for each operation id the number of its stream."""
    listed = [op for op in program.ops if not is_boundary(op)]
    names = [COMPUTE, *sorted({op.stream for op in listed} - {COMPUTE, *COMPUTE_STREAMS})]
    number = {name: k for k, name in enumerate(names)} | dict.fromkeys(COMPUTE_STREAMS, 0)
    found = np.zeros(1 + max((op.id for op in program.ops), default=-1), np.int64)
    found[[op.id for op in listed]] = [number[op.stream] for op in listed]
    return names, found


@dataclass(frozen=True, slots=True)
class _Ordered:
    """Dependencies of the op instances of one rank, except through events.

    Attributes:
        num_micro_batches: Number of micro-batches per step.
        kept: As returned by `_kept_order`.
        items: All op instances, in issue order. `[n, 2]`
        pairs: Dependencies, as indices into `items`. `[m, 2]`
        looked: The pairs that must be looked at again for other jobs with the same `kept`, as (operation, micro-batch): those across
            streams, and those with a transfer, which may be at another place. `[2, pairs, 2]`
        is_across: Whether a pair of `looked` is across streams. `[pairs]`
        is_late: Whether in one of the other pairs an op instance is issued before one that it waits for; if so, it is in all such jobs.
    """

    num_micro_batches: int
    kept: Ints
    items: Ints
    pairs: Ints
    looked: Ints
    is_across: Flags
    is_late: bool

    @classmethod
    def of(cls, program: Program, kept: Ints) -> _Ordered:
        """Compute the dependencies."""
        items = items_of(program)
        pairs, stream, moves = _all_pairs(program, items), streams_of(program)[1][items[:, 0]], _moving(program)[items[:, 0]]
        is_across = stream[pairs[:, 0]] != stream[pairs[:, 1]]
        looked = is_across | moves[pairs].any(axis=1)
        late = bool((pairs[:, 0] > pairs[:, 1])[~looked].any())
        return cls(program.pipeline.num_micro_batches, kept, items, pairs, items[pairs[looked].T].T, is_across[looked], late)


@once_per_items
def _ordered(program: Program) -> _Ordered:
    """Dependencies, computed once for jobs that differ only in the positions of transfers: these have the same dependencies."""
    newest, kept = _newest(program), _kept_order(program, items_of(program))
    for found in newest:
        if found.num_micro_batches == program.pipeline.num_micro_batches and np.array_equal(found.kept, kept):
            return found
    newest[:] = [_Ordered.of(program, kept), *newest[:1]]
    return newest[0]


_newest: Callable[[Program], list[_Ordered]] = once_per_ops(lambda program: [], FEW)
"""The results for the last jobs, at most two: a search comes back to the plan that it makes variants of."""


def _kept_order(program: Program, items: Ints) -> Ints:
    """The op instances in issue order, with transfers moved to the end and grouped by channel, except transfers of persistable memory.
    `[n, 2]`"""
    moves = _moving(program)[items[:, 0]]
    moving = items[moves]
    return np.concatenate([items[~moves], moving[np.argsort(_channels(program)[moving[:, 0]], kind="stable")]])


@once_per_ops
def _moving(program: Program) -> Flags:
    """Whether an operation is a transfer, and not of persistable memory, by operation id."""
    found = _channels(program) < 0
    found[_persistable_accesses(program)[:, 0]] = False
    return found


def _all_pairs(program: Program, items: Ints) -> Ints:
    pairs = [_persistable(program, items), _group_order(program, items)]
    for variant in variants(program):
        before, after = (places_of(program, op, np.array(variant.micro_batches)[:, None]) for op in op_edges(program, variant.absent).T)
        both = (before >= 0) & (after >= 0)
        pairs.append(np.stack([before[both], after[both]], axis=1))
    return np.concatenate(pairs)


def op_edges(program: Program, absent: frozenset[int]) -> Ints:
    """Pairs of op ids that are ordered through data if the copies `absent` are skipped: those that `dependencies` returns for the program
    without them, except the order within groups, which follows the issue order."""
    known = _known_edges(program)
    if absent not in known:
        known[absent] = _edges(_touched(program), renaming(program, absent))
    return known[absent]


_known_edges: Callable[[Program], dict[frozenset[int], Ints]] = once_per_ops(lambda program: {}, FEW)
"""Edges by skipped copies."""


@dataclass(frozen=True, slots=True)
class _Touched:
    """Values and storages that operations use, in program order.

    Attributes:
        operands: Rows of operation id and operand. `[n, 2]`
        producer: Id of the operation that computes a value, -1 for none. `[1 + highest value id]`
        moments: Rows of operation id, number of a storage, and how it is used: 0 if it holds an operand, 1 if it is written, 2 if it is
            read. `[n, 3]`
        ordered: Pairs of ids of successive operations whose order must be kept (`is_ordered`). `[n, 2]`
    """

    operands: Ints
    producer: Ints
    moments: Ints
    ordered: Ints


@once_per_ops
def _touched(program: Program) -> _Touched:
    graph = Graph(program)
    lies_in, over = graph.storages.numbers, overwritten(program)
    producer = np.full(1 + max(graph.values, default=-1), -1, np.int64)
    producer[list(graph.producer)] = list(graph.producer.values())
    operands, moments = list[tuple[int, int]](), list[tuple[int, int, int]]()
    for op in program.ops:
        mine = [value for value in op.operands if value != ABSENT]
        operands += [(op.id, value) for value in mine]
        moments += [(op.id, storage, 0) for value in mine for storage in lies_in(value)]
        moments += [(op.id, storage, 1) for storage in over.get(op.id, ())]
        moments += [(op.id, storage, 2) for value in graph.reads(op) for storage in lies_in(value)]
    ordered = [op.id for op in program.ops if is_ordered(op)]
    return _Touched(pairs_of(operands), producer, np.array(moments, np.int64).reshape(-1, 3), pairs_of(list(pairwise(ordered))))


def _edges(touched: _Touched, renamed: Renaming) -> Ints:
    """Pairs of op ids (before, after): each operation comes after those that compute its operands and after the previous write to memory
    that it uses, and a write comes after all reads of what it overwrites."""
    operands = touched.operands[~renamed.is_gone[touched.operands[:, 0]]]
    made = np.stack([touched.producer[renamed.value[operands[:, 1]]], operands[:, 0]], axis=1)
    moments = touched.moments[~renamed.is_gone[touched.moments[:, 0]]]
    storage, written = renamed.storage[moments[:, 1]], np.zeros(len(renamed.storage), np.bool_)
    written[storage[moments[:, 2] == 1]] = True
    chosen = written[storage]
    found = pairs_of(_in_turn(moments[chosen, 0].tolist(), storage[chosen].tolist(), moments[chosen, 2].tolist()))
    pairs = np.concatenate([made[made[:, 0] >= 0], found, touched.ordered])
    return np.stack(np.divmod(np.unique(pairs[pairs[:, 0] != pairs[:, 1]] @ [len(renamed.is_gone), 1]), len(renamed.is_gone)), axis=1)


def _in_turn(ops: Sequence[int], storages: Sequence[int], hows: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of operations that are ordered because they use the same storage, at least one of them to write."""
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    pairs = []
    for op, storage, how in zip(ops, storages, hows, strict=True):
        if how == 2:
            readers.setdefault(storage, []).append(op)
            continue
        if storage in writer:
            pairs.append((writer[storage], op))
        if how == 1:
            pairs += [(reader, op) for reader in readers.pop(storage, ())]
            writer[storage] = op
    return pairs


def _persistable(program: Program, items: Ints) -> Ints:
    """Order of accesses to persistable memory, in issue order: each access comes after the previous write and before the next one."""
    listed = _persistable_accesses(program)
    if not len(listed):
        return np.empty((0, 2), np.int64)
    starts, order = rows(listed[:, 0], np.arange(len(listed)), 1 + max(int(listed[:, 0].max()), int(items[:, 0].max(initial=0))))
    counts = np.diff(starts)[items[:, 0]]
    who = np.repeat(np.arange(len(items)), counts)
    within = np.arange(len(who)) - np.repeat(np.cumsum(counts) - counts, counts)
    found = listed[order[starts[items[who, 0]] + within]]
    return _write_edges(who, found[:, 1], found[:, 2].astype(np.bool_))


@once_per_ops
def _persistable_accesses(program: Program) -> Ints:
    """Rows `[n, 3]` of op id, storage, and whether it is a write, for persistable storages that some op writes."""
    graph = Graph(program)
    table, lies_in = graph.storages.storages, graph.storages.numbers
    accesses: dict[int, list[tuple[int, bool]]] = {}
    for op in program.ops:
        written = {n for value in written_operands(op) for n in lies_in(value)}
        accessed = {n for value in graph.reads(op) for n in lies_in(value)} | written
        accesses[op.id] = [(n, n in written) for n in sorted(accessed) if table[n].persistable]
    ever_written = {n for pairs in accesses.values() for n, write in pairs if write}
    flat = [(op_id, n, write) for op_id, pairs in accesses.items() for n, write in pairs if n in ever_written]
    return np.array(flat, np.int64).reshape(-1, 3)


def _write_edges(who: Ints, storage: Ints, write: Flags) -> Ints:
    """Pairs of each access with the previous and the next write to the same storage, in the order of `who`."""
    order = np.lexsort((who, storage))
    who, storage, write = who[order], storage[order], write[order]
    count = np.arange(len(who))
    new = np.r_[True, storage[1:] != storage[:-1]] if len(who) else np.empty(0, np.bool_)
    start = np.maximum.accumulate(np.where(new, count, 0))
    last = np.r_[-1, np.maximum.accumulate(np.where(write, count, -1))[:-1]]
    has_last = last >= start
    following = np.minimum.accumulate(np.where(write, count, len(who))[::-1])[::-1]
    following = np.r_[following[1:], len(who)]
    end = np.r_[np.flatnonzero(new)[1:], len(who)][np.cumsum(new) - 1]
    has_next = following < end
    before = np.stack([who[last[has_last]], who[has_last]], axis=1)
    after = np.stack([who[has_next], who[following[has_next]]], axis=1)
    pairs: Ints = np.concatenate([before, after])
    apart: Ints = pairs[pairs[:, 0] != pairs[:, 1]]
    return apart


def _group_order(program: Program, items: Ints) -> Ints:
    """Communications of one group and direction run one after the other, in issue order."""
    mine = _channels(program)[items[:, 0]]
    chosen = np.flatnonzero(mine)
    order = chosen[np.argsort(mine[chosen], kind="stable")]
    same = mine[order[1:]] == mine[order[:-1]]
    return np.stack([order[:-1][same], order[1:][same]], axis=1)


@once_per_ops
def _channels(program: Program) -> Ints:
    """Number of a communication's channel (group and direction), by operation id: negative for transfers, positive for collectives, 0 for
    all other operations."""
    channel = {op.id: (op.group, *direction(op)) for op in program.ops if is_comm(op)}
    numbers = {key: n for n, key in enumerate(sorted(set(channel.values())), 1)}
    table = np.zeros(1 + max((op.id for op in program.ops), default=-1), np.int64)
    for op in program.ops:
        if op.id in channel:
            table[op.id] = -numbers[channel[op.id]] if is_p2p(op) else numbers[channel[op.id]]
    return table


def _events(program: Program) -> Ints:
    """Pairs ordered by the plan's events, except events of the jobs that split the batch and collect the outputs. Raises PlanError if an
    event names an op instance that no job runs."""
    if not program.events:
        return np.empty((0, 2), np.int64)
    ends = _boundaries(program)
    named = [(event, item) for event in program.events for item in (event.record, *event.waits) if item[0] not in ends]
    place = places_of(program, *pairs_of([item for _, item in named]).T).tolist()
    for (event, item), at in zip(named, place, strict=True):
        if at < 0:
            raise PlanError(f"rank {program.rank}: event {event.name!r} names op instance {item}, which no job runs")
    index = {item: at for (_, item), at in zip(named, place, strict=True)}
    return pairs_of([(index[event.record], index[item]) for event, item in named if event.record in index and item != event.record])


@once_per_ops
def _boundaries(program: Program) -> set[int]:
    return {op.id for op in program.ops if is_boundary(op)}


def _issued_late(pair: Ints, program: Program) -> str:
    ops, items = {op.id: op for op in program.ops}, items_of(program)
    before, after = (f"{describe(ops[int(items[k, 0])])} of micro-batch {items[k, 1]}" for k in pair)
    return f"rank {program.rank}: {after} is issued before {before}, which it waits for; put the latter earlier in the jobs"
