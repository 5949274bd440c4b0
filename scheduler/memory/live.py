"""Live memory over a step, by storage, so that views, in-place results and shape-only operands are counted correctly.

An *instance* is one storage of one micro-batch. It is allocated by the op that produces it and freed after its last reader, through
any alias; without a reader, after the op itself. Operands of which only the shape is read keep nothing alive. Persistable
storages are always live and counted once (`base`). Inputs are live from the start of the step, outputs (`shadow_output`,
`set_parameter`) until its end. A vector takes no memory besides its tensors. A tensor of unknown size counts as 0 bytes and is listed
in `unknown`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from interlace.grouping import grouped
from interlace.ir import OpInstance, Program
from interlace.ir.arrays import Flags, Ints, ints, offsets
from interlace.ir.copies import Renaming, fills_memory, items_of, only_takes_memory, renaming
from interlace.ir.kinds import DATA, SET_PARAMETER, SHADOW_OUTPUT
from interlace.ir.per_ops import FEW, once_per_items, once_per_ops, once_per_ops_and
from interlace.ir.storage import storages_of
from interlace.ir.target import IDEAL, Target, with_paddles_jobs
from interlace.scheduler.memory.executor import executor_variants, feed_bytes

Order = Sequence[OpInstance] | Ints
"""A sequence of op instances (`items` in names); as an array `[n, 2]` of op id and micro-batch."""
Pool = Literal["device", "pinned", "all"]
"""Kinds of memory; `all` is the sum, for targets whose device memory is the host's."""
END = 1 << 61
"""The time at which outputs are freed: the end of the step, later than any other time."""
TOGETHER = 16
"""Number of micro-batches whose instances are computed together."""
NONE: frozenset[int] = frozenset()
"""No copies."""


class LiveBytes(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Live bytes and number of the storages that one kind of op produces in one layer."""

    layer: str
    kind: str
    size_bytes: int
    count: int


@dataclass(slots=True)
class Lifetimes:
    """Which operations allocate and use the storages of one variant of the program; rows are storages that are not persistable.

    Attributes:
        producer: Id of the op that allocates it. `[rows]`
        size, pinned: Its bytes, and whether it is in host memory. `[rows]`
        output: Whether it is live until the end of the step. `[rows]`
        reader_first, reader: Ids of the ops that read it, the producer first, grouped by variable. `[rows + 1]`, `[readers]`
        variable_first: Offsets of each variable's readers in `reader`. A storage has one variable for itself and its in-place results, and
            one for each view. `[variables + 1]`
        base: Bytes of persistable storages, by pool.
        unknown: Ids of values of unknown size.
    """

    producer: Ints
    size: Ints
    pinned: Flags
    output: Flags
    reader_first: Ints
    reader: Ints
    variable_first: Ints
    base: dict[str, int]
    unknown: list[int]


def lifetimes(program: Program, workspace: Mapping[int, int] | None = None, absent: frozenset[int] = NONE) -> Lifetimes:
    """The lifetimes of a program without its copies `absent`, and a row for each op in `workspace` (op id -> bytes that it allocates while
    it runs); O(ops + operands)."""
    return _lifetimes(_uses(program), renaming(program, absent), workspace) if workspace else _without_workspace(program, absent)


@partial(once_per_ops_and, kept=FEW)
def _without_workspace(program: Program, absent: frozenset[int]) -> Lifetimes:
    return _lifetimes(_uses(program), renaming(program, absent), {})


@dataclass(frozen=True, slots=True)
class _Uses:
    """Uses of storages by operations, through variables, in program order; and the properties of the storages.

    Attributes:
        op, storage, variable: Id of the op, number of the storage, and id of the variable. `[uses]`
        producer, size, value: For each storage, the id of the op that allocates it, its bytes (-1 if unknown), and the value that it is
            named after. `[storages]`
        pinned, persistable, output: Whether it is in host memory, always live, and live until the end of the step. `[storages]`
    """

    op: Ints
    storage: Ints
    variable: Ints
    producer: Ints
    size: Ints
    value: Ints
    pinned: Flags
    persistable: Flags
    output: Flags


@once_per_ops
def _uses(program: Program) -> _Uses:
    table = storages_of(program)
    op_id, storage, variable = np.array(table.uses(), np.int64).reshape(-1, 3).T
    outputs = table.numbers_of(value for op in program.ops if op.name in (SHADOW_OUTPUT, SET_PARAMETER) for value in op.operands)
    every = table.storages
    return _Uses(
        op_id,
        storage,
        variable,
        ints([each.producer for each in every]),
        ints([each.size_bytes for each in every]),
        ints([each.value for each in every]),
        np.array([each.memory != "device" for each in every], np.bool_),
        np.array([each.persistable for each in every], np.bool_),
        np.array([n in outputs for n in range(len(every))], np.bool_),
    )


def _lifetimes(uses: _Uses, renamed: Renaming, workspace: Mapping[int, int]) -> Lifetimes:
    storage = renamed.storage[uses.storage]
    there = np.flatnonzero(~renamed.is_gone[uses.op] & ~uses.persistable[storage])
    op, storage, variable = uses.op[there], storage[there], renamed.variable[uses.variable[there]]
    _, first, pair = np.unique(storage * len(renamed.variable) + variable, return_index=True, return_inverse=True)
    first = first[pair]  # variables of a storage in the order of their first uses
    order = np.lexsort((first, storage))
    op, storage, first = op[order], storage[order], first[order]
    again = np.r_[False, (first[1:] == first[:-1]) & (op[1:] == op[:-1])] if len(op) else np.empty(0, np.bool_)
    op, storage, first = op[~again], storage[~again], first[~again]
    rows, num_readers = np.unique(storage, return_counts=True)
    _, starts, per_variable = np.unique(first, return_index=True, return_counts=True)
    output, extra = np.zeros(len(uses.output), np.bool_), len(workspace)
    output[renamed.storage[uses.output]] = True
    lasting, sizes = np.flatnonzero(uses.persistable), np.maximum(uses.size, 0)
    base = {pool: int(sizes[lasting][uses.pinned[lasting] == (pool == "pinned")].sum()) for pool in ("device", "pinned")}
    unknown = [n for n in (*rows.tolist(), *lasting.tolist()) if uses.size[n] < 0]
    return Lifetimes(
        np.r_[uses.producer[rows], ints([*workspace])],
        np.r_[sizes[rows], ints([*workspace.values()])],
        np.r_[uses.pinned[rows], np.zeros(extra, np.bool_)],
        np.r_[output[rows], np.zeros(extra, np.bool_)],
        offsets([*num_readers, *[1] * extra]),
        np.r_[op, ints([*workspace])],
        offsets([*per_variable[np.argsort(starts)], *[1] * extra]),
        base,
        list(dict.fromkeys(uses.value[unknown].tolist())),
    )


@dataclass(slots=True)
class Lives:
    """Instances of one rank's step, as arrays `[instances]`.

    Attributes:
        alloc_at, free_at: When it is allocated and freed: times in nanoseconds, or indices in the issue order.
        alloc_tie, free_tie: Sort keys for events at the same moment: frees before allocations, then in issue order.
        size, pinned: Its bytes, and whether it is in host memory.
        producer, micro_batch: Id of the op that allocates it, and its micro-batch.
        stream: Number of the stream whose pool it comes from; 0 if streams make no difference.
        in_next_step: Whether its own stream frees it when it allocates in the next step.
    """

    alloc_at: Ints
    free_at: Ints
    alloc_tie: Ints
    free_tie: Ints
    size: Ints
    pinned: Flags
    producer: Ints
    micro_batch: Ints
    stream: Ints
    in_next_step: Flags

    def pool(self, pool: Pool) -> Lives:
        """The instances of one kind of memory."""
        if pool == "all" or (pool == "device" and not self.pinned.any()):
            return self
        return self.rows(self.pinned == (pool == "pinned"))

    def rows(self, chosen: Flags) -> Lives:
        """The instances selected by a mask."""
        return Lives(*(column[chosen] for column in self.columns()))

    def columns(self) -> list[Any]:
        """All arrays, in the order of the fields."""
        return [getattr(self, name) for name in Lives.__slots__]

    def along(self, count: int) -> Ints:
        """Live bytes while each of `count` op instances runs, and after the last, if moments are indices in their order. `[count + 1]`"""
        change = np.zeros(count + 2, np.int64)
        np.add.at(change, self.alloc_at, self.size)
        np.add.at(change, np.minimum(self.free_at, count + 1), -self.size)
        live: Ints = np.cumsum(change)[:-1]
        return live


@dataclass(slots=True)
class Profile:
    """Memory of one rank over a step.

    Attributes:
        program, lives: The program and its instances.
        base: Bytes of persistable storages, by pool.
        unknown: Ids of values of unknown size, which count as 0 bytes.
        carried: Instances of the previous step that are still live when this one begins.
        step: Time at which the next step begins; None if no step follows.
    """

    program: Program
    lives: Lives
    base: dict[str, int]
    unknown: list[int] = field(default_factory=list)
    carried: Lives | None = None
    step: int | None = None

    def curve(self, pool: Pool = "device") -> tuple[Ints, Ints]:
        """Moments in ascending order, and the live bytes from each on; outputs are never freed."""
        lives = self._every.pool(pool)
        order = in_time(lives)
        change = np.concatenate([lives.size, -lives.size])[order]
        when = np.concatenate([lives.alloc_at, lives.free_at])[order]
        inside = when < END
        return np.r_[0, when[inside]], self.persistable_bytes(pool) + np.r_[0, np.cumsum(change[inside])]

    @property
    def _every(self) -> Lives:
        if self.carried is None:
            return self.lives
        return Lives(*map(np.concatenate, zip(self.lives.columns(), self.carried.columns(), strict=True)))

    def persistable_bytes(self, pool: Pool = "device") -> int:
        """Bytes of the persistable storages in a pool."""
        return sum(self.base.values()) if pool == "all" else self.base[pool]

    def peak(self, pool: Pool = "device") -> int:
        """Most live bytes at one moment."""
        lives = self._every.pool(pool)
        order = in_time(lives)
        live = np.cumsum(np.concatenate([lives.size, -lives.size])[order])
        return self.persistable_bytes(pool) + int(live.max(initial=0))

    def at_peak(self, pool: Pool = "device") -> list[LiveBytes]:
        """What is live at the first moment of the peak, largest first; persistable storages are `parameters`. Memory that was only taken
        counts as that of the operation that fills it."""
        lives = self._every.pool(pool)
        order = in_time(lives)
        turn = np.empty(len(order), np.int64)
        turn[order] = np.arange(len(order))
        now = int(self.curve(pool)[1].argmax()) - 1
        there = (turn[: len(lives.size)] <= now) & (turn[len(lives.size) :] > now)
        ops = {op.id: op for op in self.program.ops}
        sizes_of = zip(lives.producer[there].tolist(), lives.size[there].tolist(), strict=True)
        filled = {op.operands[1]: op for op in self.program.ops if fills_memory(op)}
        made = {op_id: filled.get(op.results[0], op) if only_takes_memory(op) else op for op_id, op in ops.items()}
        found = grouped(((made[producer].layer, made[producer].kind), size) for producer, size in sizes_of)
        if self.persistable_bytes(pool):
            found["", "parameters"] = [self.persistable_bytes(pool)]
        live = [LiveBytes(layer, kind, sum(sizes), len(sizes)) for (layer, kind), sizes in found.items() if sum(sizes)]
        return sorted(live, key=lambda each: (-each.size_bytes, each.layer, each.kind))


def _carried(lives: Lives, step: int) -> Lives:
    """Device instances that live into the next step, with their times relative to its start, at which a host that issues in no time frees
    them."""
    rows = lives.rows(~lives.pinned & ((lives.free_at > step) | lives.in_next_step) & (lives.free_at < END))
    rows.free_at, rows.alloc_at = rows.free_at - step, np.zeros(len(rows.size), np.int64)
    rows.alloc_tie = np.full(len(rows.size), -1)
    return rows


def in_time(lives: Lives) -> Ints:
    """Allocations (numbers below `n`, for n instances) and frees (from `n` on) in the order in which they happen. `[2 n]`"""
    tie, when = np.concatenate([lives.alloc_tie, lives.free_tie]), np.concatenate([lives.alloc_at, lives.free_at])
    tie -= tie.min(initial=0)
    end, span = 1 + int(when[when < END].max(initial=0)), 1 + int(tie.max(initial=0))
    if end * span < END:  # sorting by one key takes a fifth of the time
        return np.argsort(np.where(when < END, when, end) * span + tie, kind="stable")
    order: Ints = np.lexsort((tie, when))
    return order


def over_time(
    program: Program,
    issue: Ints,
    start: Ints,
    end: Ints,
    stream: Ints,
    target: Target = IDEAL,
    placed: Placed | None = None,
    step: int | None = None,
) -> Profile:
    """Memory of a rank whose op instances were issued, started and ended at these times (ns); arrays in the issue order of its jobs.

    Of the executor's own effects (`memory/executor.py`), only tensors that are never collected count.

    Args:
        stream: Stream number of each op instance.
        placed: The result of `placed_on`, if already known.
        step: Time at which the next step begins. If given, the profile is that of a step that follows another.
    """
    placed = placed or placed_on(program, stream, target)
    alloc = start if target.alloc == "start" else issue
    lives = placed.lives(alloc, end) if target.free == "end" else placed.lives(alloc, issue, end, step if placed.away is not None else None)
    if target.keeps_pinned:
        lives.alloc_at[lives.pinned], lives.free_at[lives.pinned] = 0, END
    return Profile(program, lives, placed.base, placed.unknown, _carried(lives, step) if step is not None else None, step)


def placed_on(program: Program, stream: Ints, target: Target = IDEAL) -> Placed:
    """The instances of a program whose op instances run on these streams; `Placed.lives` gives them times."""
    planner = OrderMemory(program, with_paddles_jobs(IDEAL) if target.keeps_shapes else IDEAL)
    return planner.placed(items_of(program), stream if target.free == "issue" and target.records_streams else None)


def in_order(program: Program, items: Order | None = None, target: Target = IDEAL) -> Profile:
    """Memory if op instances run one after the other, as in Paddle's executor on the CPU; moments are indices in the order.

    The default order is that of the program's jobs. A target such as `CPU` adds the effects of its executor.
    """
    planner = OrderMemory(program, target)
    order = items_of(program) if items is None else np.asarray(items, np.int64).reshape(-1, 2)
    return Profile(program, planner.order_lives(order), planner.base, planner.unknown)


@once_per_items
def order_peak(program: Program) -> int:
    """Peak of live device bytes if the op instances of a program's jobs run one after the other."""
    return in_order(program).peak()


def order_curve(program: Program) -> Ints:
    """Live device bytes while each op instance of a program's jobs runs, if they run one after the other; for a program without any, one
    entry with the bytes at the start. `[max(1, items)]`"""
    profile, count = in_order(program), len(items_of(program))
    return profile.base["device"] + profile.lives.pool("device").along(count)[: max(1, count)]


def needed_at_once(program: Program) -> int:
    """Device bytes that any plan of a program needs, whatever its order and offload: the persistable storages, and the largest sum of
    operands and results of one operation; O(ops + operands)."""
    table, most = storages_of(program), 0
    for op in program.ops:
        sizes: dict[int, int] = {}
        for part in (part for value in (*table.reads(op), *table.writes(op)) for part in table.parts[value]):
            storage = table.storages[part.storage]
            if storage.memory == "device" and not storage.persistable and part.value in table.values:
                size = min(storage.size_bytes, table.values[part.value].size_bytes)
                sizes[part.storage] = max(sizes.get(part.storage, 0), size)
        most = max(most, sum(sizes.values()))
    return lifetimes(program).base["device"] + most


def saved_bytes(program: Program) -> int:
    """Device bytes per micro-batch that forward computes and backward reads; O(ops)."""
    table = storages_of(program)
    forward = {value for op in program.ops if op.role == "forward" for value in op.results}
    read = {value for op in program.ops if op.role == "backward" for value in op.reads if value in forward}
    found = (table.storages[number] for number in table.numbers_of(read))
    return sum(max(0, each.size_bytes) for each in found if not each.persistable and each.memory == "device")


@dataclass(slots=True)
class Placed:
    """The instances of an order of op instances, independent of when these run. Arrays are `[instances]` unless stated otherwise; op
    instances are indices in the order.

    Attributes:
        first, last_read: The op instance that allocates it, and its last reader.
        is_input, output: Whether it is live from the start of the step, and until its end.
        size, pinned, producer, micro_batch: As in `Lives`.
        read_first, reads: All readers, with -1 for op instances that do not exist. `[instances + 1]`, `[readers]`
        away_row, away: Instances whose variable is last read on another stream than that of the producer, and those readers, which need
            the instance until they have completed. `[away]` `away` is None if streams make no difference.
        stream: Stream of each op instance; empty if streams make no difference. `[items]`
        base, unknown: As in `Profile`.
        looks: For each stream whose instances are last needed by another stream: these instances; the op instances that allocate memory
            on the stream, ascending; and for each of the instances the index of the first of these op instances after its last reader.
            Computed on first use.
    """

    first: Ints
    last_read: Ints
    is_input: Flags
    output: Flags
    size: Ints
    pinned: Flags
    producer: Ints
    micro_batch: Ints
    read_first: Ints
    reads: Ints
    away_row: Ints
    away: Ints | None
    stream: Ints
    base: dict[str, int]
    unknown: list[int]
    looks: list[tuple[Ints, Ints, Ints]] | None = None

    def lives(self, alloc: Ints, free: Ints, complete: Ints | None = None, step: int | None = None) -> Lives:
        """The instances if the op instances run at given times. Arrays are `[items]`.

        Args:
            alloc: When the results of each op instance are allocated.
            free: When each no longer needs its operands: an instance is freed at the latest `free` of its readers.
            complete: When each has completed.
            step: When the next step begins. If given, a block that another stream reads last is only freed when its own stream next
                allocates after that reader has completed, possibly in the next step, as the allocator does not check earlier.
        """
        by_issue = np.zeros(len(self.first), np.bool_)
        free_at = self._latest(free)
        if self.away is not None and complete is not None:
            np.maximum.at(free_at, self.away_row, complete[self.away])
            by_issue = np.ones(len(self.first), np.bool_)
            by_issue[self.away_row] = False
        alloc_at = np.where(self.is_input, 0, alloc[self.first])
        free_at = np.maximum(free_at, alloc_at)
        tie = np.where((free_at == alloc_at) | by_issue, 2 * self.last_read + 2, 0)
        in_next_step = np.zeros(len(self.first), np.bool_)
        if step is not None:
            self._looked_at(alloc, step, free_at, tie, in_next_step)
        free_at = np.where(self.output, END, free_at)
        columns = (self.size, self.pinned, self.producer, self.micro_batch, self._home(), in_next_step)
        return Lives(alloc_at, free_at, 2 * self.first + 1, tie, *columns)

    def _looked_at(self, alloc: Ints, step: int, free_at: Ints, tie: Ints, in_next_step: Flags) -> None:
        """Delay the free of blocks until their own stream next allocates, in place (the last three arguments)."""
        if self.looks is None:
            self.looks = [*self._looks()]
        for mine, looks, behind in self.looks:
            taken = alloc[looks]
            at = np.maximum(np.searchsorted(taken, free_at[mine]), behind)
            again = np.searchsorted(taken, np.maximum(free_at[mine] - step, 0))
            which, is_next = np.where(at < len(looks), at, again), at == len(looks)
            found = which < len(looks)
            rows, which, is_next = mine[found], looks[which[found]], is_next[found]
            free_at[rows], tie[rows] = alloc[which] + np.where(is_next, step, 0), 2 * which
            in_next_step[rows] = is_next

    def _looks(self) -> Iterator[tuple[Ints, Ints, Ints]]:
        """Compute `looks`."""
        away = np.zeros(len(self.first), np.bool_)
        away[self.away_row] = True
        takes = ~self.is_input & ~self.pinned
        pool = np.where(self.is_input, -1, self.stream[self.first])
        for stream in np.unique(pool[away]).tolist():
            mine = np.flatnonzero(away & (pool == stream))
            looks = np.flatnonzero(np.bincount(self.first[takes & (pool == stream)]))
            yield mine, looks, np.searchsorted(looks, self.last_read[mine], side="right")

    def _home(self) -> Ints:
        """Stream of each instance's pool. Inputs are cut from the batch on the compute stream, which has the lowest number."""
        if not len(self.stream):
            return np.zeros(len(self.first), np.int64)
        home: Ints = np.where(self.is_input, self.stream.min(), self.stream[self.first])
        return home

    def _latest(self, free: Ints) -> Ints:
        """The latest `free` of each instance's readers, which is that of the last reader if times ascend with the order."""
        if (free[1:] >= free[:-1]).all():
            found: Ints = np.where(self.last_read >= 0, free[self.last_read], 0)
            return found
        most: Ints = _most(np.where(self.reads >= 0, free[self.reads], 0)[None], self.read_first)[0]
        return most


class OrderMemory:
    """A program's tables, built once to compute the memory of many orders of its op instances.

    The copies that each micro-batch skips, and the executor's in-place results, are taken from the program's jobs, so all orders must
    have the same op instances as the jobs.
    """

    def __init__(self, program: Program, target: Target = IDEAL) -> None:
        found = executor_variants(program, target)
        self.tables = [
            (lifetimes(each.program, each.workspace, each.absent), ints(sorted(each.late)), each.micro_batches) for each in found
        ]
        first = next(table for table, _, micro_batches in self.tables if 0 in micro_batches)
        self.base = dict(first.base) if target.runs_as_written else dict(lifetimes(program).base)
        lasting_bytes = sum(len(each.micro_batches) * each.lasting_bytes for each in found)
        self.base["device"] += lasting_bytes + feed_bytes(program, target)
        self.unknown = first.unknown
        self.inputs = ints(sorted(op.id for op in program.ops if op.name == DATA))
        self.num_ids = 1 + max((op.id for op in program.ops), default=-1)

    def order_lives(self, order: Ints) -> Lives:
        """Instances of an order `[n, 2]`; moments are indices in it."""
        count = np.arange(len(order), dtype=np.int64)
        return self.placed(order).lives(count, count + 1)

    def placed(self, items: Ints, stream: Ints | None = None) -> Placed:
        """The instances of an order of op instances `[n, 2]`. If their streams are given, a last reader on another stream than that of the
        producer needs its operand until it has completed; otherwise streams make no difference."""
        found = [
            self._instances(table, late, mine, items, stream) for table, late, micro_batches in self.tables for mine in _some(micro_batches)
        ]
        columns = {name: np.concatenate([each[name] for each in found]) for name in found[0]}
        many, away = columns.pop("many"), columns.pop("is_away")
        read_first = np.concatenate([[0], np.cumsum(many)])
        row = np.repeat(np.arange(len(many)), many)
        reads = columns.pop("reads")
        return Placed(
            **columns,
            read_first=read_first,
            reads=reads,
            away_row=row[away],
            away=None if stream is None else reads[away],
            stream=ints([]) if stream is None else stream,
            base=self.base,
            unknown=self.unknown,
        )

    def _instances(self, table: Lifetimes, late: Ints, micro_batches: Sequence[int], items: Ints, stream: Ints | None) -> dict[str, Any]:
        """The instances of some micro-batches. Intermediate tables are `[micro-batches, rows]`, from which nonexistent instances are then
        dropped."""
        index = self._index(items, micro_batches)
        at = index[:, table.producer]
        reads = index[:, table.reader]
        many = np.diff(table.reader_first)
        away = np.zeros(reads.shape, np.bool_)
        if stream is not None:
            home = np.repeat(at, many, axis=1)
            is_last = reads == np.repeat(_most(reads, table.variable_first), np.diff(table.variable_first), axis=1)
            away = is_last & (reads >= 0) & (home >= 0) & (stream[reads] != stream[home])
        last_read = _most(reads, table.reader_first)
        is_input = np.isin(table.producer, self.inputs)
        there = (at >= 0) | (is_input & (last_read >= 0))
        first = self._first_use(table, at, reads, late)
        row, column = np.nonzero(there)
        inside = np.repeat(there, many, axis=1)
        return {
            "first": first[there],
            "last_read": last_read[there],
            "is_input": is_input[column],
            "output": table.output[column],
            "size": table.size[column],
            "pinned": table.pinned[column],
            "producer": table.producer[column],
            "micro_batch": ints(micro_batches)[row],
            "many": many[column],
            "reads": reads[inside],
            "is_away": away[inside],
        }

    def _index(self, items: Ints, micro_batches: Sequence[int]) -> Ints:
        """Index of each op's instance in each micro-batch, -1 if there is none. `[micro-batches, ids]`"""
        place = np.full(1 + max(*micro_batches, int(items[:, 1].max(initial=0))), -1, np.int64)
        place[micro_batches] = np.arange(len(micro_batches))
        mine = np.flatnonzero(place[items[:, 1]] >= 0)
        index = np.full((len(micro_batches), self.num_ids), -1, np.int64)
        index[place[items[mine, 1]], items[mine, 0]] = mine
        return index

    @staticmethod
    def _first_use(table: Lifetimes, at: Ints, reads: Ints, late: Ints) -> Ints:
        """Index at which each row is allocated: its producer, or, if the producer is in `late`, its first reader.

        A late result whose reader follows immediately is allocated by its producer.
        """
        if not len(late):
            return at
        later = np.where(reads > np.repeat(at, np.diff(table.reader_first), axis=1), reads, END)
        reader = np.minimum.reduceat(later, table.reader_first[:-1], axis=1).astype(np.int64)
        return np.where(np.isin(table.producer, late) & (reader < END), np.where(reader > at + 1, reader, at), at)


def _some(micro_batches: Sequence[int]) -> Iterator[Sequence[int]]:
    """Micro-batches in chunks of `TOGETHER`, so that tables stay small."""
    return (micro_batches[k : k + TOGETHER] for k in range(0, len(micro_batches), TOGETHER))


def _most(columns: npt.NDArray[Any], first: Ints) -> Ints:
    """Maximum of each row of a ragged table, for each micro-batch; no row may be empty. `[micro-batches, rows]`"""
    if len(first) < 2:
        return np.empty((len(columns), 0), np.int64)
    return np.maximum.reduceat(columns, first[:-1], axis=1).astype(np.int64)
