"""Planning of optimizer-state offload: which values that only the optimizer part uses stay in host memory between updates, and when each is
copied in before its update.

Times are computation time, as in `planner.py`. A value is copied out right after its last use; its device memory is free from the end of
that copy to the start of the next step's copy in. Copies in of one step run one after another, in the order of the updates.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np

from interlace.cost_model import Costs
from interlace.errors import ConfigError
from interlace.ir import Graph, Op, OpInstance, Program, Value
from interlace.ir.kinds import KEYWORD, PARAMETER, is_boundary, is_comm
from interlace.ir.per_ops import once_per_ops
from interlace.ir.remarks import Remark, remark
from interlace.ir.storage import Storage, is_fed
from interlace.scheduler.offload.measures import COPY_BACK, COPY_OUT, copy_times
from interlace.scheduler.offload.selection import names_layer

Why = Literal[
    "small", "not-chosen", "fraction-reached", "used-elsewhere", "output", "shared", "communicated", "nested-block", "unknown-size"
]
WHYS: tuple[Why, ...] = (
    "small",
    "not-chosen",
    "fraction-reached",
    "used-elsewhere",
    "output",
    "shared",
    "communicated",
    "nested-block",
    "unknown-size",
)
"""Why a value that an update writes stays on the device."""


class StateOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options. Without modules, a fraction or a memory budget nothing is moved.

    Attributes:
        modules: Names or globs of layers (`mlp`, `layers.*.attn`) whose optimizer state is moved; empty means all layers, if a fraction or
            a budget is given. When: as for `offload_activations`. Details: the layer is that of the operations which read the parameter.
        min_bytes: Smaller values are kept. When: 1 MiB suits GPUs, and leaves out what is a single number (`beta1_pow_acc`); small models
            on a CPU need less to have anything to move.
        fraction: Share of the eligible bytes to move; by default all of them, or what the budget needs. When: you want a fixed share moved,
            whatever the memory; for a limit in bytes set a budget.
    """

    modules: tuple[str, ...] = ()
    min_bytes: int = 1 << 20
    fraction: float | None = None

    def __post_init__(self) -> None:
        if self.fraction is not None and not 0 <= self.fraction <= 1:
            raise ConfigError(f"offload of optimizer state: fraction={self.fraction}, expected a number from 0 to 1")
        if self.min_bytes < 0:
            raise ConfigError(f"offload of optimizer state: min_bytes={self.min_bytes}, expected 0 or more")


class State(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A persistable value that only the optimizer part uses.

    Attributes:
        value: The value that names it at the start of the step.
        size_bytes: Of its tensor.
        users: Operations that read or write it, in program order.
        is_written: Whether one of them writes it, so that it must be copied out again.
        layer: That of the parameter which it belongs to; empty where unknown.
    """

    value: int
    size_bytes: int
    users: tuple[int, ...]
    is_written: bool
    layer: str = ""


class Kept(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A persistable value of the optimizer part that stays on the device, and why."""

    value: int
    size_bytes: int
    reason: Why


class StateMove(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A value that stays in host memory, and where it is copied in.

    Attributes:
        in_before: The copy in is issued before this op instance.
        late_ns: Estimated time for which its first user waits for the copy.
    """

    state: State
    in_before: OpInstance
    late_ns: int = 0


class StatePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The decision for one rank.

    Attributes:
        moves: In the order of first users.
        kept: What stays on the device.
        measured: Whether copy times were known.
    """

    moves: tuple[StateMove, ...] = ()
    kept: tuple[Kept, ...] = ()
    measured: bool = True

    @property
    def moved_bytes(self) -> int:
        """Device memory that is free between updates."""
        return sum(move.state.size_bytes for move in self.moves)

    @property
    def late_ns(self) -> int:
        """Estimated time for which updates wait for copies in."""
        return sum(move.late_ns for move in self.moves)

    def remarks(self) -> list[Remark]:
        """The whole decision: one remark for what is moved, and one for each reason to keep values."""
        found: Counter[Why] = Counter()
        total: Counter[Why] = Counter()
        for each in self.kept:
            found[each.reason] += 1
            total[each.reason] += max(0, each.size_bytes)
        kept = [
            remark("declined", "state-kept", reason=reason, values=found[reason], size_bytes=total[reason])
            for reason in WHYS
            if found[reason]
        ]
        if not self.moves:
            return [remark("declined", "no-state-moved"), *kept]
        written = sum(move.state.size_bytes for move in self.moves if move.state.is_written)
        how: dict[str, int | str] = {"late_ns": self.late_ns} if self.measured else {"copies": "not measured"}
        return [remark("applied", "state-moved", values=len(self.moves), in_bytes=self.moved_bytes, out_bytes=written, **how), *kept]


@once_per_ops
def find_states(program: Program) -> tuple[list[State], list[Kept]]:
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

    def run(self) -> tuple[list[State], list[Kept]]:
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
                kept.append(Kept(storage.value, storage.size_bytes, reason))
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


class StateFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Input of planning besides the program and the options.

    Attributes:
        op_ns: Operation id -> duration.
        in_ns: Bytes -> duration of a copy to the device; None where copies were not measured.
    """

    op_ns: dict[int, int]
    in_ns: dict[int, int] | None = None


def measure_states(program: Program, cost: Costs) -> StateFacts:
    """Durations by a cost model: of the program's operations, and of copies of every size that could be moved."""
    graph = Graph(program)
    op_ns = {op.id: cost.op_time(op, graph.values, {group.id: group for group in program.groups}).dur_ns for op in program.ops}
    sizes: dict[int, Value] = {state.size_bytes: graph.values[state.value] for state in find_states(program)[0]}
    return StateFacts(op_ns, copy_times(sizes, cost, COPY_BACK))


def plan_states(program: Program, facts: StateFacts, options: StateOptions) -> StatePlan:
    """Decide what is moved, and where each copy in is issued; O(op instances + values)."""
    states, kept = find_states(program)
    chosen, more = _chosen(states, options)
    return StatePlan(_placed(program, chosen, facts), (*kept, *more), facts.in_ns is not None)


def _chosen(states: Sequence[State], options: StateOptions) -> tuple[list[State], list[Kept]]:
    """The values that the options ask for, the largest first until the fraction is reached, and why others are kept."""
    kept: list[Kept] = []
    eligible: list[State] = []
    for state in states:
        if state.size_bytes < options.min_bytes or not state.size_bytes:
            kept.append(Kept(state.value, state.size_bytes, "small"))
        elif options.modules and not any(names_layer(pattern, state.layer) for pattern in options.modules):
            kept.append(Kept(state.value, state.size_bytes, "not-chosen"))
        else:
            eligible.append(state)
    if options.fraction is None:
        return eligible, kept
    room = options.fraction * sum(state.size_bytes for state in eligible)
    taken: set[int] = set()
    for state in sorted(eligible, key=lambda each: -each.size_bytes):
        if state.size_bytes <= room:
            room -= state.size_bytes
            taken.add(state.value)
    kept += [Kept(state.value, state.size_bytes, "fraction-reached") for state in eligible if state.value not in taken]
    return [state for state in eligible if state.value in taken], kept


def _placed(program: Program, states: Sequence[State], facts: StateFacts) -> tuple[StateMove, ...]:
    """Each copy in as late as it can be without making its user wait, with those that follow it."""
    items = [item for job in program.jobs for item in job.items]
    index = {item: k for k, item in enumerate(items)}
    clock = np.cumsum([0, *(facts.op_ns.get(op_id, 0) for op_id, _ in items)]).tolist()
    first = [min(index[op_id, 0] for op_id in state.users) for state in states]
    moves: list[StateMove] = []
    if facts.in_ns is None:
        return tuple(StateMove(state, items[at]) for state, at in zip(states, first, strict=True))
    due = clock[-1]
    for state, at in reversed(list(zip(states, first, strict=True))):
        due = min(due, clock[at]) - facts.in_ns[state.size_bytes]
        place = max(0, min(at, bisect_right(clock, due) - 1))
        moves.append(StateMove(state, items[place], max(0, clock[place] - due)))
    return tuple(reversed(moves))


__all__ = [
    "COPY_OUT",
    "Kept",
    "State",
    "StateFacts",
    "StateMove",
    "StateOptions",
    "StatePlan",
    "find_states",
    "measure_states",
    "plan_states",
]
