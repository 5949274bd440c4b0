"""The picture of one rank's step: runs of computation and communication at screen resolution, and every operation in packed form."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from interlace.cost_model.base import Row as CostRow
from interlace.cost_model.work import is_weight_gradient
from interlace.ir import Graph, Op, Program
from interlace.ir.arrays import Ints
from interlace.ir.kinds import is_comm, is_copy, is_p2p
from interlace.report.page.document import KINDS, Ops
from interlace.scheduler.jobs.parts import slot_text
from interlace.scheduler.simulate.parts import Parts, union
from interlace.scheduler.simulate.simulator import Result

RESOLUTION = 8000
"""Parts of a span that the picture can distinguish; a wide screen has half as many pixels."""
CODE = {name: code for code, name in enumerate(KINDS)}


def codes(program: Program) -> dict[int, int]:
    """Operation id -> code of its kind."""
    graph = Graph(program)
    kept = {value.storage for value in program.values if value.persistable}
    return {op.id: CODE[_kind(op, graph, kept)] for op in program.ops}


def _kind(op: Op, graph: Graph, kept: set[int]) -> str:
    if is_copy(op):
        return "copy"
    if is_comm(op):
        return "p2p" if is_p2p(op) else "collective"
    if op.role == "backward":
        into_gradient = any(graph.values[value].storage in kept for value in op.results)
        return "weight" if into_gradient or is_weight_gradient(op) else "backward"
    return "optimizer" if op.role == "optimize" else "forward"


@dataclass(frozen=True, slots=True)
class Items:
    """Op instances of one rank that take time, in the order of their starts. `[n]` each.

    Attributes:
        stream: Index of the stream among the rank's.
        side: 1 on streams other than the compute stream, 0 on it.
        code: Position of the kind in `KINDS`.
        job: Index of the job.
    """

    op: Ints
    micro_batch: Ints
    stream: Ints
    start: Ints
    end: Ints
    side: Ints
    code: Ints
    job: Ints

    @classmethod
    def of(cls, result: Result, at: int) -> Items:
        """The items of the rank with index `at`."""
        sim, times = result.input, result.times
        first, last = int(sim.first[at]), int(sim.first[at + 1])
        of_op = codes(sim.programs[at])
        code = np.array([of_op[op] for op in sim.op[first:last].tolist()], np.int64)
        job = np.searchsorted(np.array([start for _, start in sim.job_first[at]], np.int64), np.arange(first, last), side="right") - 1
        columns = (
            sim.op[first:last],
            sim.micro_batch[first:last],
            sim.stream[first:last] - sim.first_stream[at],
            times.start[first:last],
            times.end[first:last],
            np.asarray(sim.side[first:last], np.int64),
            code,
            job,
        )
        takes = times.end[first:last] > times.start[first:last]
        order = np.argsort(times.start[first:last][takes], kind="stable")
        return cls(*(column[takes][order] for column in columns))


def jobs(result: Result, at: int, items: Items) -> list[tuple[str, int, int, str]]:
    """Slot, start and end of computation, and kind of each job that computes."""
    kinds = {job.name: job.kind for job in result.input.programs[at].jobs}
    found = []
    for number, (name, _) in enumerate(result.input.job_first[at]):
        mine = (items.job == number) & (items.side == 0)
        if mine.any():
            found.append((slot_text(name), int(items.start[mine].min()), int(items.end[mine].max()), kinds[name]))
    return found


def compute_runs(items: Items, span_ns: int) -> list[int]:
    """Computation as flat `[start, length, code]`, with one run for neighbours of the same kind and job."""
    mine = items.side == 0
    return coarse(zip(*(column[mine].tolist() for column in (items.start, items.end, items.code, items.job)), strict=True), span_ns)


def side_runs(items: Items, span_ns: int) -> list[int]:
    """Communication and copies as flat `[start, length, code]`, with one run for those of one kind that touch."""
    found = []
    for code in sorted({int(code) for code in items.code[items.side == 1]}):
        mine = (items.side == 1) & (items.code == code)
        found += [(low, high, code, -1) for low, high in union(np.stack([items.start[mine], items.end[mine]], 1)).tolist()]
    return [
        number for code in sorted({each[2] for each in found}) for number in coarse((each for each in found if each[2] == code), span_ns)
    ]


def gap_runs(parts: Parts, span_ns: int) -> list[int]:
    """Time without computation as flat `[start, length, code]`, without what is too short for a screen."""
    named = ((parts.exposed, "exposed"), (parts.host, "host"), (parts.bubble, "bubble"))
    rows = sorted((low, high - low, CODE[name]) for spans, name in named for low, high in spans.tolist())
    return [number for row in rows if row[1] * RESOLUTION * 8 >= span_ns for number in row]


def coarse(runs: Iterable[tuple[int, int, int, int]], span_ns: int) -> list[int]:
    """Runs `(start, end, code, job)` in order as flat `[start, length, code]`. Neighbours that are too short to be seen become one run with
    the code that takes most of its time.

    >>> coarse([(0, 5, 1, 0), (5, 6, 2, 0), (6, 9, 1, 0), (9, 20, 2, 0)], 16000)
    [0, 9, 1, 9, 11, 2]
    """
    least, joined = span_ns // RESOLUTION, list[list[int]]()
    for start, end, code, job in runs:
        before = joined[-1] if joined else None
        if before and before[2:] == [code, job] and start - before[1] < max(1, least):
            before[1] = max(before[1], end)
        else:
            joined.append([start, end, code, job])
    found: list[list[int]] = []
    small: list[list[int]] = []
    for run in [*joined, [0, 0, -1, -2]]:
        fits = not small or (run[3] == small[0][3] and run[0] - small[-1][1] < least)
        if small and not (fits and run[1] - run[0] < least):
            _show(found, small, least)
            small = []
        if run[1] - run[0] >= least > 0 or not least:
            _show(found, [run], least)
        else:
            small.append(run)
    return [number for start, end, code, _ in found if code >= 0 for number in (start, end - start, code)]


def _show(found: list[list[int]], runs: list[list[int]], least: int) -> None:
    """Append neighbouring runs of a job as one. If that touches the run before it, and is too short or has the same code, extend the run
    before it instead."""
    spent: dict[int, int] = {}
    for start, end, code, _ in runs:
        spent[code] = spent.get(code, 0) + end - start
    start, end, job = runs[0][0], max(run[1] for run in runs), runs[0][3]
    code = max(sorted(spent), key=lambda each: spent[each])
    touches = bool(found) and found[-1][3] == job and start - found[-1][1] < max(1, least)
    if touches and (end - start < least or found[-1][2] == code):
        found[-1][1] = end
    else:
        found.append([start, end, code, job])


def packed(result: Result, at: int, items: Items, costs: Mapping[int, CostRow]) -> Ops:
    """Every op instance of a rank in packed form; `costs`: operation id -> row of the cost table."""
    sim = result.input
    ops = {op.id: op for op in sim.programs[at].ops}
    first = np.unique(items.op, return_index=True)
    index = {int(op): k for k, op in enumerate(first[0])}
    table = []
    for op_id, where in zip(first[0].tolist(), first[1].tolist(), strict=True):
        op, cost = ops[op_id], costs[op_id]
        table.append((op.kind, op.layer, int(items.stream[where]), int(items.code[where]), str(cost.how), cost.dur_ns))
    columns = np.stack(
        [np.diff(items.start, prepend=0), items.end - items.start, [index[op] for op in items.op.tolist()], items.micro_batch]
    )
    data = zlib.compress(columns.astype("<i4").tobytes(), 9)
    names = sim.stream_names[int(sim.first_stream[at]) : int(sim.first_stream[at + 1])]
    return Ops(names, table, len(items.op), base64.b64encode(data).decode())


def curve(moments: Ints, sizes: Ints, span_ns: int, points: int = 1200) -> list[int]:
    """Memory over time as flat `[moment, bytes]`: the most in each of `points` parts of the span, with one entry for equal neighbours."""
    edges = np.linspace(0, span_ns, points + 1).astype(np.int64)[:-1]
    before = sizes[np.maximum(np.searchsorted(moments, edges, side="right") - 1, 0)]
    inside = np.minimum(np.searchsorted(edges, moments, side="right") - 1, points - 1)
    np.maximum.at(before, inside, sizes)
    changes = np.r_[True, before[1:] != before[:-1]]
    return [int(number) for pair in zip(edges[changes], before[changes], strict=True) for number in pair]


def clock(moments: Ints, mhz: Ints, span_ns: int, points: int = 1200) -> list[int]:
    """The clock over time as flat `[moment, MHz]`; if it changes more than `points` times, the mean in each of as many parts of the span.

    >>> clock(np.array([0, 30, 60]), np.array([1980, 1890, 1800]), 120)
    [0, 1980, 30, 1890, 60, 1800]
    >>> clock(np.array([0, 30, 60]), np.array([1980, 1890, 1800]), 120, 2)
    [0, 1935, 60, 1800]
    """
    if len(moments) > points:
        edges = np.linspace(0, span_ns, points + 1).astype(np.int64)
        cycles = np.r_[0, np.cumsum(mhz * np.diff(moments, append=span_ns))]
        means = np.diff(np.interp(edges, np.r_[moments, span_ns], cycles)) / np.diff(edges)
        moments, mhz = edges[:-1], np.round(means).astype(np.int64)
    return [int(number) for pair in zip(moments, mhz, strict=True) for number in pair]
