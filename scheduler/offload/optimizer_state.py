"""Planning of optimizer-state offload: the values, used only by the optimizer part, that stay in host memory between updates, and when each
is copied in before its update.

Times are computation time, as in `planner.py`. Copies in of one step run one after another, in the order of the updates. A value is copied
out right after its last use. Its device memory belongs to the stream of copies in and returns to that stream in issue order: the next
operation there waits for the copy out. So the memory of a rank does not depend on the duration of copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec
import numpy as np

from interlace.cost_model import Costs
from interlace.cost_model.base import tables_of
from interlace.grouping import grouped
from interlace.ir import Graph, Op, OpInstance, Program
from interlace.ir.arrays import Ints
from interlace.ir.copies import index_of_items
from interlace.ir.kinds import KEYWORD, PARAMETER, is_boundary, is_comm
from interlace.ir.per_ops import once_per_ops
from interlace.ir.remarks import Remark, remark
from interlace.ir.storage import Storage, is_fed
from interlace.scheduler.memory.live import order_curve
from interlace.scheduler.offload.measures import Measured, durations
from interlace.scheduler.offload.selection import Count, Share, names_layer

SLACK = 0.25
"""Share of its duration by which a copy in is issued before the latest possible time: copies share the link with those of activations."""
Why = Literal["below-floor", "other-module", "kept", "output", "shared", "communicated", "nested-block", "unknown-size"]
WHYS: tuple[Why, ...] = get_args(Why)
"""Why a value that an update writes stays on the device."""


class StateOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options. Without modules, a fraction or a memory budget nothing is moved.

    Attributes:
        modules: Names or globs of layers (`mlp`, `layers.*.attn`) whose optimizer state is moved; empty means all layers, if a fraction or
            a budget is given. When: as for `offload_activations`. Details: a parameter belongs to the layer of the operations that read
            it.
        min_bytes: Smaller values stay on the device. When: 1 MiB suits GPUs, and keeps single numbers such as `beta1_pow_acc` on the
            device; small models on a CPU need a lower limit to have anything to move.
        fraction: Share of the eligible bytes to move; by default all of them, or what the budget needs. When: to move a fixed share; to
            limit memory in bytes, set a `memory_budget` instead.
    """

    modules: tuple[str, ...] = ()
    min_bytes: Count = 1 << 20
    fraction: Share | None = None


class State(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A persistable value that only the optimizer part uses.

    Attributes:
        value: The value that names it at the start of the step.
        size_bytes: Bytes of its tensor.
        users: Operations that read or write it, in program order.
        is_written: Whether one of them writes it, so that it must be copied out again.
        layer: Layer of the parameter that it belongs to; empty if unknown.
    """

    value: int
    size_bytes: int
    users: tuple[int, ...]
    is_written: bool
    layer: str = ""


class KeptState(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A persistable value of the optimizer part that stays on the device, and why."""

    value: int
    size_bytes: int
    reason: Why


class StateMove(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A value that stays in host memory, and where it is on the device.

    Attributes:
        in_before: The copy in is issued before this op instance.
        back_before: Its memory is given back before this op instance; None for the end of the step.
    """

    state: State
    in_before: OpInstance
    back_before: OpInstance | None = None


class StatePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The decision for one rank.

    Attributes:
        moves: In the order of first users.
        measured: Whether copy times were known.
        stall_ns: Estimated time for which updates wait for copies.
        before_peak_bytes, peak_bytes: Peak of live device bytes in the order of operations, without copies and with them.
    """

    moves: tuple[StateMove, ...] = ()
    kept: tuple[KeptState, ...] = ()
    measured: bool = True
    before_peak_bytes: int = 0
    peak_bytes: int = 0
    stall_ns: int = 0

    @property
    def moved_bytes(self) -> int:
        """Device memory that is free between updates."""
        return sum(move.state.size_bytes for move in self.moves)

    def remarks(self) -> list[Remark]:
        """The whole decision: one remark for what is moved, and one for each reason to keep values."""
        found = grouped((each.reason, max(0, each.size_bytes)) for each in self.kept)
        kept = [
            remark("declined", "state-kept", reason=reason, values=len(found[reason]), size_bytes=sum(found[reason]))
            for reason in WHYS
            if reason in found
        ]
        if not self.moves:
            return [remark("declined", "no-state-moved", before_peak_bytes=self.before_peak_bytes), *kept]
        written = sum(move.state.size_bytes for move in self.moves if move.state.is_written)
        how: dict[str, int | str] = {"stall_ns": self.stall_ns} if self.measured else {"copies": "not measured"}
        peaks = {"before_peak_bytes": self.before_peak_bytes, "peak_bytes": self.peak_bytes}
        return [
            remark("applied", "state-moved", values=len(self.moves), in_bytes=self.moved_bytes, out_bytes=written, **peaks, **how),
            *kept,
        ]


@once_per_ops
def find_states(program: Program) -> tuple[list[State], list[KeptState]]:
    """The values that can stay on the host between updates, by their first users, and those of the optimizer part that cannot;
    O(values + operands)."""
    return _Finder(program).run()


class _Finder:
    def __init__(self, program: Program) -> None:
        self.graph = Graph(program)
        self.users: dict[int, dict[int, None]] = {}
        for op in program.ops:
            for value in (*op.operands, *op.results):
                for number in self.graph.storages.numbers(value):
                    self.users.setdefault(number, {})[op.id] = None

    def run(self) -> tuple[list[State], list[KeptState]]:
        states, kept = [], []
        for number, storage in enumerate(self.graph.storages.storages):
            ops = [self.graph.ops[op_id] for op_id in self.users.get(number, ())]
            inner = [op for op in ops if not is_boundary(op)]
            if not self._is_named(storage) or not inner or not any(op.role == "optimize" for op in inner):
                continue
            if any(op.role != "optimize" for op in inner):
                continue  # a parameter, or a buffer of gradients
            reason = self._reason(storage, ops, inner)
            if reason:
                kept.append(KeptState(storage.value, storage.size_bytes, reason))
            else:
                written = any(value in op.results for op in inner for value in storage.values)
                users = tuple(op.id for op in inner)
                states.append(State(storage.value, storage.size_bytes, users, written, self._layer(inner)))
        states.sort(key=lambda each: (self.graph.position[each.users[0]], each.value))
        return states, kept

    def _is_named(self, storage: Storage) -> bool:
        """Whether it is a variable of the program's scope that is there before the step."""
        maker, value = self.graph.ops[storage.producer], self.graph.values[storage.value]
        given = maker.name in (PARAMETER, KEYWORD) or (is_boundary(maker) and not is_fed(maker, dict(self.graph.values)))
        return storage.persistable and bool(value.name) and value.memory == "device" and given and value.id in maker.results

    def _reason(self, storage: Storage, ops: Sequence[Op], inner: Sequence[Op]) -> Why | None:
        checks: tuple[tuple[bool, Why], ...] = (
            (storage.size_bytes < 0, "unknown-size"),
            (any(is_boundary(op) and op.id != storage.producer for op in ops), "output"),
            (len(storage.variables) > 1 or bool(storage.vectors) or self._may_be_elsewhere(storage), "shared"),
            (any(is_comm(op) for op in inner), "communicated"),
            (any(op.num_blocks for op in inner), "nested-block"),
        )
        return next((why for holds, why in checks if holds), None)

    def _may_be_elsewhere(self, storage: Storage) -> bool:
        return any(len(self.graph.storages.parts[value]) > 1 for value in storage.values)

    def _layer(self, inner: Sequence[Op]) -> str:
        """The layer of the operations that read what these update besides, the parameter."""
        for op in inner:
            for value in op.operands:
                for user in self._of_the_same(value):
                    if user.role != "optimize" and user.layer:
                        return user.layer
        return ""

    def _of_the_same(self, value: int) -> Iterable[Op]:
        for number in self.graph.storages.numbers(value):
            if self.graph.storages.storages[number].persistable:
                yield from (self.graph.ops[op_id] for op_id in self.users[number])


def measure_states(program: Program, cost: Costs, memory_limit: int | None = None) -> Measured:
    """Durations by a cost model: of the program's operations, and of copies of every state that could be moved."""
    values, _ = tables_of(program)
    return durations(program, cost, (values[state.value] for state in find_states(program)[0]), memory_limit)


def plan_states(program: Program, facts: Measured, options: StateOptions) -> StatePlan:
    """Decide which values are moved, and where each copy in is issued: those that the options select, or the fewest that keep a memory
    limit, or all that can be moved if that does not suffice. O(values x op instances)."""
    states, kept = find_states(program)
    chosen, more = _chosen(states, options)
    return _Planner(program, facts, options).run(chosen, (*kept, *more))


def state_bytes(program: Program, options: StateOptions) -> int:
    """Bytes of what the options allow to move, whatever the fraction; O(values + operands)."""
    everything = StateOptions(modules=options.modules, min_bytes=options.min_bytes)
    return sum(state.size_bytes for state in _chosen(find_states(program)[0], everything)[0])


def _chosen(states: Sequence[State], options: StateOptions) -> tuple[list[State], list[KeptState]]:
    """The values that the options ask for, the largest first until the fraction is reached, and why others are kept."""
    kept: list[KeptState] = []
    eligible: list[State] = []
    for state in states:
        if state.size_bytes < options.min_bytes or not state.size_bytes:
            kept.append(KeptState(state.value, state.size_bytes, "below-floor"))
        elif options.modules and not any(names_layer(pattern, state.layer) for pattern in options.modules):
            kept.append(KeptState(state.value, state.size_bytes, "other-module"))
        else:
            eligible.append(state)
    if options.fraction is None:
        return eligible, kept
    room = options.fraction * sum(state.size_bytes for state in eligible)
    taken: set[int] = set()
    for state in _largest_first(eligible):
        if state.size_bytes <= room:
            room -= state.size_bytes
            taken.add(state.value)
    kept += [KeptState(state.value, state.size_bytes, "kept") for state in eligible if state.value not in taken]
    return [state for state in eligible if state.value in taken], kept


def _largest_first(states: Sequence[State]) -> list[State]:
    """States, largest first, as few large copies are faster than many small ones; of equal ones those updated last, whose copies in have
    the most time."""
    return [state for _, state in sorted(enumerate(states), key=lambda each: (-each[1].size_bytes, -each[0]))]


class _Planner:
    """Places copies in, and chooses the least to move under a memory limit.

    Attributes:
        clock: Computation time at which each op instance starts, and at the end. `[items + 1]`
        live: Live device bytes while each op instance runs, if nothing is moved. `[items]`
    """

    def __init__(self, program: Program, facts: Measured, options: StateOptions) -> None:
        self.facts, self.options = facts, options
        self.items = [item for job in program.jobs for item in job.items]
        self.index = index_of_items(program)
        self.clock = np.cumsum([0, *(facts.op_ns.get(op_id, 0) for op_id, _ in self.items)], dtype=np.int64)
        self.live = order_curve(program)

    def run(self, states: Sequence[State], kept: Sequence[KeptState]) -> StatePlan:
        """See `plan_states`."""
        limit, asked = self.facts.memory_limit, bool(self.options.modules) or self.options.fraction is not None
        before = int(self.live.max(initial=0))
        if asked or limit is None:
            taken = list(states)
        elif before <= limit:
            taken = []
        else:
            taken = self._least(states, limit)
        there = {state.value for state in taken}
        kept = (*kept, *(KeptState(state.value, state.size_bytes, "kept") for state in states if state.value not in there))
        groups = self._groups(taken)
        places, live = self._placed(groups, self._limit(taken))
        moves = tuple(
            StateMove(state, self.items[place.start], self.items[place.stop] if place.stop < len(self.items) else None)
            for group, place in zip(groups, places, strict=True)
            for state in group.states
        )
        peak, is_measured = int(live.max(initial=0)), self.facts.back_ns is not None
        return StatePlan(moves, tuple(kept), is_measured, before, peak, self._stall_ns(groups, places))

    def _limit(self, states: Sequence[State]) -> int:
        """The limit of live bytes for copies in; without one, the peak with copies in right before their users."""
        return self._peak(states, states, 0) if self.facts.memory_limit is None else self.facts.memory_limit

    def _least(self, states: Sequence[State], limit: int) -> list[State]:
        """The fewest of the largest states that keep the limit; all if that is impossible."""
        ordered = _largest_first(states)
        few, many = 0, len(ordered)
        while few < many:
            tried = (few + many) // 2
            if self._peak(ordered[:tried], states, limit) <= limit:
                many = tried
            else:
                few = tried + 1
        return self._in_order(ordered[:many], states)

    def _peak(self, taken: Sequence[State], states: Sequence[State], limit: int) -> int:
        return int(self._placed(self._groups(self._in_order(taken, states)), limit)[1].max(initial=0))

    @staticmethod
    def _in_order(taken: Sequence[State], states: Sequence[State]) -> list[State]:
        there = {state.value for state in taken}
        return [state for state in states if state.value in there]

    def _placed(self, groups: Sequence[_Group], limit: int) -> tuple[list[_Place], Ints]:
        """From where to where each group is on the device, and live bytes with them.

        Each copy in is issued as late as it can be without making its user wait, with those that follow it, and later where the limit
        leaves no room. Where there is only room once earlier groups have been given back, these are given back right before it. The others
        are given back when all copies in have been issued, so that no copy in waits for them.
        """
        live = self.live - sum(group.size_bytes for group in groups)
        due = self._due(groups)
        starts, stops = list[int](), list[int]()
        for number, group in enumerate(groups):
            behind, room = len(stops), limit - int(live[group.at]) - group.size_bytes
            while room < 0 and behind < number and groups[behind].stop <= group.at:
                room += groups[behind].size_bytes
                behind += 1
            start = max(0, int(np.searchsorted(self.clock, due[number], side="right")) - 1)
            if behind > len(stops):
                start = max(group.stop for group in groups[:behind])
            start = min(group.at, max([start, *starts[-1:]]))
            given_back = sum(each.size_bytes for each in groups[len(stops) : behind])
            full = np.flatnonzero(live[start : group.at] + group.size_bytes - given_back > limit)
            start += int(full[-1]) + 1 if len(full) else 0
            stops += [start] * (behind - len(stops))
            live[start:] += group.size_bytes - given_back
            starts.append(start)
        for group in groups[len(stops) :]:
            stops.append(max(group.stop, starts[-1] + 1))
            live[stops[-1] :] -= group.size_bytes
        return [_Place(*each) for each in zip(starts, stops, strict=True)], live

    def _stall_ns(self, groups: Sequence[_Group], places: Sequence[_Place]) -> int:
        """Time for which updates wait for copies, as each copy in waits for those before it and for copies out whose memory it takes."""
        if self.facts.back_ns is None or self.facts.out_ns is None:
            return 0
        link = out = update = before = 0
        out_end: list[int] = []
        for group, place in zip(groups, places, strict=True):
            free = max((end for end, earlier in zip(out_end, places, strict=False) if earlier.stop <= place.start), default=0)
            link = max(link, free, int(self.clock[place.start])) + sum(self.facts.back_ns[s.size_bytes] for s in group.states)
            update = max(update + int(self.clock[group.at]) - before, link) + int(self.clock[group.at + 1] - self.clock[group.at])
            before = int(self.clock[group.at + 1])
            out = max(out, update) + sum(self.facts.out_ns[s.size_bytes] for s in group.states if s.is_written)
            out_end.append(out)
        return update - before

    def _groups(self, states: Sequence[State]) -> list[_Group]:
        """Values that one operation uses first, in the order of these."""
        found = grouped((min(self.index[op_id, 0] for op_id in state.users), state) for state in states)
        return [
            _Group(tuple(group), at, 1 + max(self.index[op_id, 0] for state in group for op_id in state.users))
            for at, group in sorted(found.items())
        ]

    def _due(self, groups: Sequence[_Group]) -> list[int]:
        """The time at which copies in of each group must start."""
        due: list[int] = []
        end = int(self.clock[-1])
        for group in reversed(groups):
            took = sum(self.facts.back_ns[state.size_bytes] for state in group.states) if self.facts.back_ns is not None else 0
            end = min(end, int(self.clock[group.at])) - int((1 + SLACK) * took)
            due.append(end)
        return due[::-1]


@dataclass(frozen=True, slots=True)
class _Group:
    """Values that come in together: first use and end of the last one, as indices of op instances."""

    states: tuple[State, ...]
    at: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return sum(state.size_bytes for state in self.states)


@dataclass(frozen=True, slots=True)
class _Place:
    """Indices of the op instances before which a group's copies in are issued, and its memory is given back; their number for the end."""

    start: int
    stop: int
