"""The tables of the page: communication and how much of it is hidden, and what is offloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from interlace.ir import Graph, Op, Program
from interlace.ir.kinds import is_comm, is_copy
from interlace.report.causes import layer_pattern
from interlace.report.page.document import Communication, Offload
from interlace.report.page.picture import Items
from interlace.scheduler.simulate.parts import Parts, overlap, union


@dataclass(frozen=True, slots=True)
class RankStep:
    """One rank's step, and how many ranks it stands for."""

    program: Program
    items: Items
    parts: Parts
    num_ranks: int


@dataclass(slots=True)
class _Sum:
    size_bytes: int = 0
    count: int = 0
    time_ns: int = 0
    hidden_ns: int = 0
    exposed_ns: int = 0
    num_ranks: int = 0


def communication(ranks: Sequence[RankStep]) -> list[Communication]:
    """All of it, by kind and layers, for a mean rank; what keeps computation waiting longest stands first."""
    world = sum(rank.num_ranks for rank in ranks)
    sums: dict[tuple[str, str, int], _Sum] = {}
    for rank in ranks:
        _add_communication(rank, sums)
    rows = [Communication(kind, layer, size, each.size_bytes, each.count / world, each.time_ns // world, each.hidden_ns // world,
                          each.exposed_ns // world) for (kind, layer, size), each in sums.items()]  # fmt: skip
    return sorted(rows, key=lambda row: (-row.exposed_ns, -row.time_ns, row.kind, row.layer))


def _add_communication(rank: RankStep, sums: dict[tuple[str, str, int], _Sum]) -> None:
    items, program = rank.items, rank.program
    groups = {group.id: len(group.ranks) for group in program.groups}
    sizes = {value.id: max(0, value.size_bytes) for value in program.values}
    ops = {op.id: op for op in program.ops if is_comm(op)}
    mine = np.isin(items.op, np.array(sorted(ops), np.int64))
    spans = np.stack([items.start[mine], items.end[mine]], 1)
    computing = union(np.stack([items.start[items.side == 0], items.end[items.side == 0]], 1))
    columns = (items.op[mine], spans[:, 1] - spans[:, 0], overlap(spans, computing), overlap(spans, rank.parts.exposed))
    for op_id, took, hidden, exposed in zip(*(column.tolist() for column in columns), strict=True):
        op = ops[op_id]
        found = sums.setdefault((op.kind, layer_pattern(op.layer), groups.get(op.group, 0)), _Sum())
        found.size_bytes = max([found.size_bytes, *(sizes.get(value, 0) for value in (*op.operands, *op.results))])
        found.count += rank.num_ranks
        found.time_ns += rank.num_ranks * took
        found.hidden_ns += rank.num_ranks * hidden
        found.exposed_ns += rank.num_ranks * exposed


@dataclass(slots=True)
class _Moves:
    stages: set[int] = field(default_factory=set)
    size_bytes: int = 0
    count: int = 0
    away_ns: list[int] = field(default_factory=list)
    slack_ns: list[int] = field(default_factory=list)


def offloaded(ranks: Sequence[RankStep]) -> list[Offload]:
    """Activations that go to pinned memory and come back, by the kind of operation that gave them and layers; most bytes first."""
    world = sum(rank.num_ranks for rank in ranks)
    sums: dict[tuple[str, str], _Moves] = {}
    for rank in ranks:
        _add_offloaded(rank, sums)
    rows = [Offload(kind, layer, sorted(each.stages), each.size_bytes // world, each.count / world, min(each.away_ns, default=0),
                    min(each.slack_ns, default=0)) for (kind, layer), each in sums.items()]  # fmt: skip
    return sorted(rows, key=lambda row: (-row.size_bytes, row.kind, row.layer))


def _add_offloaded(rank: RankStep, sums: dict[tuple[str, str], _Moves]) -> None:
    graph = Graph(rank.program)
    start = {key: (begin, end) for key, begin, end in _moments(rank.items)}
    batches = range(rank.program.pipeline.num_micro_batches)
    for out in (op for op in rank.program.ops if is_copy(op) and op.results and graph.values[op.results[0]].memory == "pinned"):
        source = graph.producer_op(out.operands[0])
        found = sums.setdefault((source.kind if source else "input", layer_pattern(out.layer)), _Moves())
        backs = [op for op in graph.user_ops(out.results[0]) if is_copy(op)]
        for micro_batch in batches:
            if (out.id, micro_batch) not in start:
                continue
            found.stages.add(rank.program.pipeline.stage)
            found.count += rank.num_ranks
            found.size_bytes += rank.num_ranks * max(0, graph.values[out.operands[0]].size_bytes)
            for back in backs:
                _note_return(found, graph, back, micro_batch, start, start[out.id, micro_batch][1])


def _moments(items: Items) -> list[tuple[tuple[int, int], int, int]]:
    columns = (items.op.tolist(), items.micro_batch.tolist(), items.start.tolist(), items.end.tolist())
    return [((op, micro_batch), start, end) for op, micro_batch, start, end in zip(*columns, strict=True)]


def _note_return(found: _Moves, graph: Graph, back: Op, micro_batch: int, start: Mapping[tuple[int, int], tuple[int, int]],
                 left_at: int) -> None:  # fmt: skip
    if (back.id, micro_batch) not in start:
        return
    begin, end = start[back.id, micro_batch]
    found.away_ns.append(begin - left_at)
    readers = [start[op.id, micro_batch][0] for op in _readers(graph, back.results[0]) if (op.id, micro_batch) in start]
    if readers:
        found.slack_ns.append(max(0, min(readers) - end))


def _readers(graph: Graph, value: int) -> list[Op]:
    """What reads a value, through views that take no time as well."""
    found, stack, seen = list[Op](), [value], {value}
    while stack:
        for op in graph.user_ops(stack.pop()):
            found.append(op)
            views = {op.results[result] for result, _ in op.views} - seen
            seen |= views
            stack += sorted(views)
    return found
