"""The tables of the page: communication and how much of it is hidden, what is offloaded, and what is recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from interlace.ir import Graph, Op, Program
from interlace.ir.kinds import is_comm, is_copy, layer_pattern
from interlace.report.page.document import Communication, Offload, Recomputed, Return
from interlace.report.page.picture import Items
from interlace.scheduler.recompute.copies import COPY, recomputes
from interlace.scheduler.simulate.parts import Parts, overlap, parts_of, union
from interlace.scheduler.simulate.simulator import Result
from interlace.units import ms


@dataclass(frozen=True, slots=True)
class RankStep:
    """One rank's step, and the number of ranks that it represents."""

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
    """Communication by kind, layer pattern and group size, as a mean over ranks; first what computation waits for longest."""
    world = sum(rank.num_ranks for rank in ranks)
    sums: dict[tuple[str, str, int], _Sum] = {}
    for rank in ranks:
        _add_communication(rank, sums)
    rows = [
        Communication(
            kind, layer, size, each.size_bytes, each.count / world, each.time_ns // world, each.hidden_ns // world, each.exposed_ns // world
        )
        for (kind, layer, size), each in sums.items()
    ]
    return sorted(rows, key=lambda row: (-row.exposed_ns, -row.time_ns, row.kind, row.layer))


def communication_of(result: Result, at: int) -> list[Communication]:
    """`communication` of the rank with index `at` alone."""
    return communication([RankStep(result.input.programs[at], Items.of(result, at), parts_of(result, at), 1)])


def communication_text(rows: Sequence[Communication], limit: int = 8) -> str:
    """The rows that take longest, in one line: how long, how much of it is hidden, and how long computation waits for it."""
    ranked = sorted(rows, key=lambda row: -row.time_ns)
    found = [
        f"{row.kind}{f' ({row.layer})' if row.layer else ''} of {row.num_ranks} ranks {ms(row.time_ns)} in {row.count:g}, "
        f"{row.hidden_ns / max(1, row.time_ns):.0%} hidden, {ms(row.exposed_ns)} exposed"
        for row in ranked[:limit]
    ]
    more = [f"{len(ranked) - limit} more, {ms(sum(row.time_ns for row in ranked[limit:]))}"] if len(ranked) > limit else []
    return "; ".join(found + more) or "none"


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
    time_ns: int = 0
    away_ns: list[int] = field(default_factory=list)
    returns: list[Return] = field(default_factory=list)

    def note(self, rank: RankStep, size_bytes: int, time_ns: int) -> None:
        """Count one instance, for all ranks that this one represents."""
        self.stages.add(rank.program.pipeline.stage)
        self.count += rank.num_ranks
        self.size_bytes += rank.num_ranks * size_bytes
        self.time_ns += rank.num_ranks * time_ns

    def tightest(self) -> Return | None:
        """The return with the least slack, the earliest of several; None if there is none."""
        return min(self.returns, key=lambda each: (_slack(each), each.left_ns), default=None)

    def slack_ns(self) -> int:
        """The least slack of a return; 0 if there is none."""
        return min(map(_slack, self.returns), default=0)


def _slack(each: Return) -> int:
    return max(0, each.read_ns - each.back_ns)


def offloaded(ranks: Sequence[RankStep]) -> list[Offload]:
    """Activations that are copied to pinned memory, by the kind of operation that computed them and by layer; most bytes first."""
    rows = [
        Offload(*head, min(each.away_ns, default=0), each.slack_ns(), each.tightest()) for head, _, each in _moves(ranks, _add_offloaded)
    ]
    return sorted(rows, key=lambda row: (-row.size_bytes, row.kind, row.layer))


def _moves(
    ranks: Sequence[RankStep], add: Callable[[RankStep, dict[tuple[str, str], _Moves]], None]
) -> Iterator[tuple[tuple[str, str, list[int], int, float], int, _Moves]]:
    """For each kind and layer: the first fields of a row and the time, as a mean over ranks, and the sums with all returns."""
    world, sums = sum(rank.num_ranks for rank in ranks), dict[tuple[str, str], _Moves]()
    for rank in ranks:
        add(rank, sums)
    for (kind, layer), each in sums.items():
        yield (kind, layer, sorted(each.stages), each.size_bytes // world, each.count / world), each.time_ns // world, each


def _add_offloaded(rank: RankStep, sums: dict[tuple[str, str], _Moves]) -> None:
    graph = Graph(rank.program)
    times = _moments(rank.items)
    for out in (op for op in rank.program.ops if is_copy(op) and op.results and graph.values[op.results[0]].memory == "pinned"):
        source = graph.producer_op(out.operands[0])
        found = sums.setdefault((source.kind if source else "input", layer_pattern(out.layer)), _Moves())
        backs = [op for op in graph.user_ops(out.results[0]) if is_copy(op)]
        for micro_batch, (start, left) in times.get(out.id, {}).items():
            found.note(rank, max(0, graph.values[out.operands[0]].size_bytes), left - start)
            for back in backs:
                if micro_batch in times.get(back.id, {}):
                    begin, end = times[back.id][micro_batch]
                    found.away_ns.append(begin - left)
                    read = _first_read(_readers(graph, back.results), micro_batch, times)
                    found.returns += [] if read is None else [Return(rank.program.pipeline.stage, micro_batch, start, end, read)]


def recomputed(ranks: Sequence[RankStep]) -> list[Recomputed]:
    """Operations of forward that backward repeats, by kind and layer; most time first."""
    rows = [Recomputed(*head, time_ns, each.slack_ns(), each.tightest()) for head, time_ns, each in _moves(ranks, _add_recomputed)]
    return sorted(rows, key=lambda row: (-row.time_ns, row.kind, row.layer))


def _add_recomputed(rank: RankStep, sums: dict[tuple[str, str], _Moves]) -> None:
    if not recomputes(rank.program):
        return
    graph, times = Graph(rank.program), _moments(rank.items)
    copies = _repeated(rank.program, graph)
    for op in copies.values():
        found = sums.setdefault((op.kind, layer_pattern(op.layer)), _Moves())
        read = [value for value in op.results if any(each.id not in copies for each in graph.readers(value))]
        size_bytes = sum(max(0, graph.values[value].size_bytes) for value in read)
        readers = [each for each in _readers(graph, read) if each.id not in copies]
        for micro_batch, (start, end) in times.get(op.id, {}).items():
            found.note(rank, size_bytes, end - start)
            first = _first_read(readers, micro_batch, times)
            found.returns += [] if first is None else [Return(rank.program.pipeline.stage, micro_batch, start, end, first)]


def _repeated(program: Program, graph: Graph) -> dict[int, Op]:
    """Operations of backward that Paddle marked as repeated (`COPY`), and unmarked communication between two of them."""
    found = {op.id: op for op in program.ops if op.role == "backward" and COPY in op.attrs}
    for op in program.ops:
        if op.role == "backward" and is_comm(op) and op.id not in found:
            makers = (graph.producer_op(value) for value in op.reads)
            if any(each is not None and each.id in found for each in makers) and any(
                each.id in found for value in op.results for each in graph.readers(value)
            ):
                found[op.id] = op
    return found


Times = dict[int, dict[int, tuple[int, int]]]
"""Operation id -> micro-batch -> start and end."""


def _moments(items: Items) -> Times:
    found: Times = {}
    for op, *span in zip(*(each.tolist() for each in (items.op, items.micro_batch, items.start, items.end)), strict=True):
        found.setdefault(op, {})[span[0]] = span[1], span[2]
    return found


def _first_read(readers: Iterable[Op], micro_batch: int, times: Times) -> int | None:
    return min((times[op.id][micro_batch][0] for op in readers if micro_batch in times.get(op.id, {})), default=None)


def _readers(graph: Graph, values: Iterable[int]) -> list[Op]:
    """Operations that read these values, directly or through views."""
    found, stack = list[Op](), list(values)
    seen = set(stack)
    while stack:
        for op in graph.user_ops(stack.pop()):
            found.append(op)
            views = {op.results[result] for result, _ in op.views} - seen
            seen |= views
            stack += sorted(views)
    return found
