"""Programs of all ranks and a cost model as flat arrays: the input of both simulation engines.

Op instances are numbered rank by rank in the order in which the host issues them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from interlace.cost_model import Costs
from interlace.cost_model.base import Draw, tables_of
from interlace.cost_model.interference import D2H, H2D, STILL
from interlace.cost_model.work import copy_direction
from interlace.errors import PlanError
from interlace.grouping import grouped
from interlace.ir import Group, Op, Program, Value, describe
from interlace.ir.arrays import Flags, Ints, ints, offsets, pairs_of
from interlace.ir.copies import fills_memory, items_of, job_bounds, places_of
from interlace.ir.kinds import NO_KERNEL, is_boundary, is_comm, is_copy
from interlace.ir.per_ops import once_per_ops
from interlace.scheduler.simulate.arrays import (
    COMPUTE,
    MAX_DUR_NS,
    NOTHING,
    ONE,
    TO_DEVICE,
    TO_HOST,
    BothDirections,
    Options,
    RankItems,
    SimInput,
    direction,
    rows,
)
from interlace.scheduler.simulate.dependences import across_streams, streams_of
from interlace.scheduler.simulate.power import PowerInput
from interlace.scheduler.simulate.rendezvous import meetings

WAYS = {H2D: TO_DEVICE, D2H: TO_HOST}
"""`BothDirections.way` of categories of copies."""


def lower(programs: Sequence[Program], cost: Costs, options: Options | None = None) -> SimInput:
    """The arrays of a world; cost O(op instances + ops x operands), vectorised over op instances.

    Raises PlanError if a program has no jobs; if an op instance is issued before one that it waits for; if a group has a rank without a
    program; if ranks of a group issue collectives of different kinds; or if an op's time is negative or too long.
    """
    options = options or Options()
    programs = sorted(programs, key=lambda program: program.rank)
    cost = cost.for_world(max((program.world for program in programs), default=1))
    classes = _Classes(cost, options)
    parts = [_lower_rank(program, cost, options, classes) for program in programs]
    first = offsets([len(part.items) for part in parts])
    first_stream = offsets([len(part.stream_names) for part in parts])
    column: dict[str, Any] = {key: np.concatenate([part.columns[key] for part in parts]) for key in parts[0].columns} if parts else {}
    column["stream"] += np.repeat(first_stream[:-1], np.diff(first))
    column["awaits"] = np.where(column["awaits"] >= 0, column["awaits"] + np.repeat(first[:-1], np.diff(first)), -1)
    drawn = [column.pop(name) for name in ("draw", "share", "own_mhz", "moves") if name in column]
    limit = cost.power() if options.power else None
    power = PowerInput.of(limit, *drawn) if limit and drawn else None
    deps = np.concatenate([part.deps + first[k] for k, part in enumerate(parts)])
    both, excess = _both_directions(programs, cost, options, classes), classes.excess()
    if both:
        excess[:, (both.way[:, None] + both.way) == TO_DEVICE + TO_HOST] = 0
    tail, mark = _tail(parts, first, column) if parts else (None, None)
    dep_first, dep = rows(deps[:, 1], deps[:, 0], int(first[-1]))
    return SimInput(
        [program.rank for program in programs],
        first,
        first_stream,
        [n for part in parts for n in part.stream_names],
        excess=excess,
        blocked_excess=classes.blocked_excess(),
        dep_first=dep_first,
        dep=dep,
        host_end=np.array([p.host_end for p in parts], np.int64),
        job_first=[[(name, at + int(first[k])) for name, at in part.job_first] for k, part in enumerate(parts)],
        programs=list(programs),
        power=power,
        tail=tail,
        mark=mark,
        both=both,
        **column,
        **meetings(parts, first, options),
    )


def _both_directions(programs: Sequence[Program], cost: Costs, options: Options, classes: _Classes) -> BothDirections | None:
    """`SimInput.both`; None without copies of both directions, or if their factors are those of `SimInput.excess` at all times."""
    found, way = cost.both_directions(), ints([WAYS.get(category, 0) for category, _, _ in classes.numbers])
    if not found or not {TO_DEVICE, TO_HOST}.issubset(way.tolist()):
        return None
    host, devices, last = [cost.host_of(program.rank) for program in programs], _devices(programs, cost, options), max(found)
    factors = np.array([found[min(max(1, number), last)] for number in range(sum(devices) + 1)])
    if (factors[min(devices) :] == found[last]).all():
        return None
    # One direction more than those of some devices: between the factors of these and of one more.
    ways = np.arange(2 * len(factors) - 1)
    excess = np.round(((factors[ways // 2] + factors[-(-ways // 2)]) / 2 - 1) * ONE).astype(np.int64)
    return BothDirections(way, excess, ints(host), ints(devices))


def _devices(programs: Sequence[Program], cost: Costs, options: Options) -> list[int]:
    """How many devices of its host each program's rank stands for: those that it represents there, and a share of those that no rank of the
    host represents."""
    simulated, found = {program.rank for program in programs}, dict[int, int]()
    acting = options.acting(simulated)
    hosts = grouped((cost.host_of(rank), rank) for rank in range(max(program.world for program in programs)))
    for ranks in hosts.values():
        mine = [rank for rank in ranks if rank in simulated]
        stands = Counter(acting.get(rank) for rank in ranks)
        others = len(ranks) - sum(stands[rank] for rank in mine)
        found |= {rank: stands[rank] + (others + len(mine) - 1 - k) // len(mine) for k, rank in enumerate(mine)}
    return [found[program.rank] for program in programs]


def _tail(parts: Sequence[RankItems], first: Ints, column: dict[str, Any]) -> tuple[Flags | None, Ints | None]:
    """`SimInput.tail` and `SimInput.mark`: the copies to the host that the next step does not wait for, with ops that only free their
    memory; and of each rank the first op instance on their stream, which also represents the copies of the previous step."""
    copies = [_copies_into(part.program) for part in parts]
    if not any(copies):
        return None, None
    tail = np.concatenate([np.isin(part.columns["op"], ids) for part, ids in zip(parts, copies, strict=True)])
    mark = np.full(len(parts), -1, np.int64)
    for at, part in enumerate(parts):
        mine = np.flatnonzero(tail[first[at] : first[at + 1]]) + int(first[at])
        if len(mine):
            opened = int(first[at]) + int(np.argmax(column["stream"][first[at] : first[at + 1]] == column["stream"][mine[0]]))
            if not tail[opened]:
                mark[at], column["side"][opened], column["kind"][opened] = opened, True, column["kind"][mine[0]]
            orders = [op.id for op in part.program.ops if op.kind in ("full", "share_data") and op.role == "optimize" and op.stream]
            tail[mine[0] : first[at + 1]] |= np.isin(part.columns["op"], orders)[mine[0] - int(first[at]) :]
    return tail, mark


@once_per_ops
def _copies_into(program: Program) -> list[int]:
    pinned = {value.id for value in program.values if value.memory == "pinned"}
    return [op.id for op in program.ops if fills_memory(op) and pinned.issuperset(op.results)]


def _lower_rank(program: Program, cost: Costs, options: Options, classes: _Classes) -> RankItems:
    if not options.host_waits and any(job.host_waits for job in program.jobs):
        jobs = tuple(msgspec.structs.replace(job, host_waits=()) for job in program.jobs)
        program = msgspec.structs.replace(program, jobs=jobs)
    if not program.jobs:
        raise PlanError(f"rank {program.rank}: the program has no jobs, so nothing to simulate; run a schedule pass on it first")
    table, items = _table_of(program, cost, options), items_of(program)
    row = table.row[np.minimum(items[:, 0], len(table.row) - 1)]
    if (row < 0).any() or (items[:, 0] >= len(table.row)).any():
        raise PlanError(f"rank {program.rank}: a job has an op that is not in the program; `verify` names it")
    ends = list(_job_ends(program, table.stream[row])) if options.job_end_waits else []
    issue, host_end, job_first = _host(program, cost, table.host[row])
    columns = {
        "op": items[:, 0],
        "micro_batch": items[:, 1],
        "stream": table.stream[row],
        "issue": issue,
        "dur": table.dur[row],
        "side": table.side[row],
        "awaits": awaits(program, table.blocking[row], ends),
        "kind": classes.numbered(table.classes)[table.kind[row]],
        "draw": table.draw[row],
        "share": table.share[row],
        "own_mhz": table.own_mhz[row],
        "moves": table.moves[row],
    }
    return RankItems(program, items, table.ops, table.stream_names, columns, across_streams(program), host_end, job_first)


@dataclass(slots=True)
class _OpTable:
    """Columns over the ops of a rank; `row` maps an op id to its row, and `kind` is the index of an op's class in `classes`."""

    ops: dict[int, Op]
    stream_names: list[str]
    row: Ints
    host: Ints
    dur: Ints
    stream: Ints
    kind: Ints
    classes: list[Class]
    side: Flags
    blocking: Flags
    draw: Ints
    share: Ints
    own_mhz: Ints
    moves: Flags

    @staticmethod
    def make(program: Program, cost: Costs, options: Options) -> _OpTable:
        """Ask the cost model once for every op."""
        values, groups = tables_of(program)
        listed = [op for op in program.ops if not is_boundary(op)]
        ops = {op.id: op for op in listed}
        names, stream_of = streams_of(program)
        row = np.full(1 + max(ops, default=0), -1, np.int64)
        row[list(ops)] = np.arange(len(listed))
        durs = [_checked(program, op, 0 if op.name in NO_KERNEL else cost.op_time(op, values, groups).dur_ns) for op in listed]
        classes = [_class_of(op, cost, values, groups) for op in listed]
        draws = [cost.draw(op, values, groups) if options.power and op.name not in NO_KERNEL else Draw(0, 0.0) for op in listed]
        place = {each: k for k, each in enumerate(dict.fromkeys(classes))}
        return _OpTable(
            ops,
            names,
            row,
            ints([cost.host_ns(op) for op in listed]),
            ints(durs),
            stream_of[[*ops]],
            ints([place[each] for each in classes]),
            list(place),
            np.array([resource not in (COMPUTE, NOTHING) for _, resource, _ in classes], np.bool_),
            np.array([options.blocks(op) or (op.origin >= 0 and op.kind in options.blocking) for op in listed], np.bool_),
            ints([each.milliwatts for each in draws]),
            ints([round(ONE * each.clock_share) for each in draws]),
            ints([each.own_mhz for each in draws]),
            np.array([is_comm(op) for op in listed], np.bool_),
        )


def _table_of(program: Program, cost: Costs, options: Options) -> _OpTable:
    """The table of a program's ops, made once per cost model. A table with the power of ops is also used if power is not needed."""
    known = _known_tables(program)
    key = (id(cost), program.groups, options.blocks, options.blocking)
    if (*key, options.power) not in known and (*key, True) not in known:
        # The cost model is stored too: it must stay alive, or another could get its id.
        known[(*key, options.power)] = (_OpTable.make(program, cost, options), cost)
    return (known.get((*key, True)) or known[(*key, options.power)])[0]


_known_tables: Callable[[Program], dict[Any, tuple[_OpTable, Costs]]] = once_per_ops(lambda program: {})


def _checked(program: Program, op: Op, dur_ns: int) -> int:
    if not 0 <= dur_ns < MAX_DUR_NS:
        raise PlanError(f"rank {program.rank}: {describe(op)} takes {dur_ns} ns, expected 0 to {MAX_DUR_NS} ns; mend the profile")
    return int(dur_ns)


def awaits(program: Program, blocking: Flags, more: Sequence[tuple[int, int]] = ()) -> Ints:
    """The op instance that the host waits for after each op instance, or -1. `more` are pairs (after, awaited) besides the plan's. All are
    indices within the rank."""
    found = np.where(blocking, np.arange(len(blocking)), -1)
    for after, awaited in (*_host_waits(program), *more):
        while found[after] >= 0:  # there is a wait already (a blocking copy): the new one goes before it
            after -= 1
        if after >= awaited:
            found[after] = awaited
    return found


def _host_waits(program: Program) -> list[tuple[int, int]]:
    """The waits of the host as pairs of indices of the rank's op instances: after the first, wait for the second."""
    items = [item for job in program.jobs for pair in job.host_waits for item in pair]
    places = places_of(program, *pairs_of(items).T).tolist()
    return list(zip(places[::2], places[1::2], strict=True))


def _job_ends(program: Program, stream: Ints) -> Iterator[tuple[int, int]]:
    """The last item of each job and its last item on the compute stream; jobs without the latter are skipped."""
    for first, end in pairwise(job_bounds(program)):
        computed = np.flatnonzero(stream[first:end] == 0)
        if len(computed):
            yield end - 1, first + int(computed[-1])


def wait_ns(program: Program, cost: Costs) -> int:
    """Host time of one wait, in nanoseconds, without the waiting itself: one element of a result is sliced, and its stream synchronized.

    The synchronization was not measured; the time of a copy of that element is used instead. It runs on another host thread, and the
    switch there and back is taken to cost as much as a job (both use Paddle's work queue).
    """
    values = {0: Value(0, (1,), "float32", 0), 1: Value(1, (1,), "float32", 1, memory="host")}
    copy = Op(-1, "pd_op.memcpy_d2h", (0,), (1,), "forward", attrs={"dst_place_type": 0})
    cut = Op(-1, "pd_op.slice", (0,), (0,), "forward")
    return cost.host_ns(cut) + cost.host_ns(copy) + cost.job_ns() + _checked(program, copy, cost.op_time(copy, values, {}).dur_ns)


def _host(program: Program, cost: Costs, op_ns: Ints) -> tuple[Ints, int, list[tuple[str, int]]]:
    """Issue time of every op instance, end of the host's work, and the first op instance of each job.

    The work ends when the host could begin the next step, as a step cannot take less time than its host.
    """
    charge = op_ns.copy()
    trailing = cost.between_steps_ns()
    following = [item + 1 for item, _ in _host_waits(program)]
    each_ns = wait_ns(program, cost) if following else 0
    for item in following:
        if item < len(charge):
            charge[item] += each_ns
        else:
            trailing += each_ns
    job_first = [(job.name, first) for job, first in zip(program.jobs, job_bounds(program), strict=False)]
    for _, first in job_first:
        if first < len(charge):
            charge[first] += cost.job_ns()
        else:
            trailing += cost.job_ns()
    issue = np.cumsum(charge)
    return issue, (int(issue[-1]) if len(issue) else 0) + trailing, job_first


Class = tuple[str, str, int]
"""An interference class: category, resource, and the stretch beside a communication that waits for its peers (over 1, in units of 1 / ONE;
0 for all but computation)."""


def _class_of(op: Op, cost: Costs, values: Mapping[int, Value], groups: Mapping[int, Group]) -> Class:
    resource = _resource(op, values)
    blocked = _over_one(cost.stretch_beside_wait(op, values, groups)) if resource == COMPUTE else 0
    return cost.category(op, values, groups), resource, blocked


class _Classes:
    """Numbers the interference classes in order of appearance."""

    def __init__(self, cost: Costs, options: Options) -> None:
        self.cost, self.options = cost, options
        self.numbers: dict[Class, int] = {}

    def numbered(self, classes: Sequence[Class]) -> Ints:
        """The numbers of these classes; a new class gets the next number."""
        return ints([self.numbers.setdefault(each, len(self.numbers)) for each in classes])

    def excess(self) -> Ints:
        """`SimInput.excess`; computed once for classes that differ only in their stretch beside a waiting communication."""
        distinct = tuple({each[:2]: None for each in self.numbers})
        at = {each: number for number, each in enumerate(distinct)}
        place = ints([at[each[:2]] for each in self.numbers])
        return np.ascontiguousarray(_excess_of(self.cost, self.options.share, distinct)[place[:, None], place].transpose(2, 0, 1))

    def blocked_excess(self) -> Ints:
        """`SimInput.blocked_excess`: by how much each class is stretched beside a communication that waits for its peers."""
        return ints([blocked for _, _, blocked in self.numbers])


@lru_cache(maxsize=64)
def _excess_of(cost: Costs, share: bool, classes: tuple[tuple[str, str], ...]) -> Ints:
    """`_excess` of all pairs of categories and resources; drafts of one program have the same. The result is shared: do not modify it.
    `[num_classes, num_classes, 2]`"""
    table = np.array([_excess(cost, share, *a, *b) for a in classes for b in classes], np.int64)
    return table.reshape(len(classes), len(classes), 2)


def _excess(cost: Costs, share: bool, category: str, resource: str, beside: str, other: str) -> tuple[int, int]:
    if NOTHING in (resource, other):
        return 0, 0
    if resource == other:
        return (ONE, ONE) if share else (0, 0)
    found = cost.stretch_between(category, beside)
    excess = _over_one(found.op)
    if found.holds and COMPUTE in (resource, other):
        return excess, _over_one(STILL) if other == COMPUTE else 0
    return excess, excess


def _over_one(factor: float) -> int:
    return max(0, round((factor - 1.0) * ONE))


def _resource(op: Op, values: Mapping[int, Value]) -> str:
    """What two ops of one rank compete for: a direction of communication or of copies, or the device's kernels."""
    if op.name in NO_KERNEL:
        return NOTHING
    if is_comm(op):
        return direction(op)[0]
    if is_copy(op) and (way := copy_direction(op, values)) != "d2d":
        return way
    return COMPUTE
