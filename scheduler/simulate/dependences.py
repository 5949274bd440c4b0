"""What an op instance (`item` in names) waits for on its own rank, besides the earlier ones of its stream."""

from __future__ import annotations

import msgspec
import numpy as np

from interlace.errors import PlanError
from interlace.ir import Graph, OpInstance, Program, dependencies, describe
from interlace.ir.copies import indices_by_op, items_of, variants
from interlace.ir.graph import written_operands
from interlace.ir.kinds import is_boundary, is_comm
from interlace.ir.per_ops import once_per_items, once_per_ops
from interlace.scheduler.simulate.arrays import Flags, Ints, direction, pairs_of, rows


def item_order(program: Program) -> Ints:
    """Pairs `[n, 2]` (before, after) of op instances: by data of one micro-batch, persistable memory, groups, and events."""
    lasting, events = _without_events(program), _events(program)
    return np.concatenate([lasting, events]) if len(events) else lasting


@once_per_items
def _without_events(program: Program) -> Ints:
    items = items_of(program)
    pairs = [_persistable(program, items), _group_order(program, items)]
    edges = {m: table for variant in variants(program) for table in [_op_edges(variant.program)] for m in variant.micro_batches}
    num_ids = 1 + max((op.id for op in program.ops), default=-1)
    for micro_batch, index in indices_by_op(items, num_ids):
        both = index[edges[micro_batch]]
        pairs.append(both[(both >= 0).all(axis=1)])
    return np.concatenate(pairs)


@once_per_ops
def _op_edges(program: Program) -> Ints:
    """Pairs of op ids that data orders. Order within groups and among random draws is left to the issue order."""
    plain = [msgspec.structs.replace(op, group=-1) if op.group >= 0 else op for op in program.ops]
    after = dependencies(Graph(program), plain)
    return pairs_of([(before, op_id) for op_id, befores in after.items() for before in befores])


def _persistable(program: Program, items: Ints) -> Ints:
    """Order of accesses to persistable memory, as issued: each access after the write before it, and before the next write."""
    listed = _persistable_accesses(program)
    if not len(listed):
        return np.empty((0, 2), np.int64)
    starts, order = rows(
        listed[:, 0], np.arange(len(listed)), 1 + max(int(listed[:, 0].max()), int(items[:, 0].max(initial=0)))
    )
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
    """Pairs of each access with the write before it and the write after it, per storage, in the order of `who`."""
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
    channel = {op.id: (op.group, *direction(op)) for op in program.ops if is_comm(op)}
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


def _events(program: Program) -> Ints:
    """Pairs that the plan's events order; events of the jobs that cut the batch and collect the outputs are left out."""
    if not program.events:
        return np.empty((0, 2), np.int64)
    index = _index_of_items(program)
    ends = {op.id for op in program.ops if is_boundary(op)}
    pairs = []
    for event in program.events:
        named = [item for item in (event.record, *event.waits) if item[0] not in ends]
        for item in named:
            if item not in index:
                raise PlanError(f"rank {program.rank}: event {event.name!r} names op instance {item}, which no job runs")
        pairs += [(index[event.record], index[item]) for item in named[1:]] if event.record in named else []
    return pairs_of(pairs)


@once_per_items
def _index_of_items(program: Program) -> dict[OpInstance, int]:
    return {item: k for k, item in enumerate(item for job in program.jobs for item in job.items)}


def reduced(pairs: Ints, stream: Ints, program: Program, items: Ints) -> Ints:
    """The pairs that streams do not imply: across streams only, and for each stream only the last op instance that is waited for."""
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
