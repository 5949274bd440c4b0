"""Values that are live from forward to backward, and which of them could be moved to the host in between."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

import msgspec

from interlace.ir import ABSENT, Graph, Op, Program, Value
from interlace.ir.effects import is_constant, is_repeatable
from interlace.ir.graph import written_operands
from interlace.ir.kinds import COMBINE, PARAMETER, is_boundary, is_comm, is_copy
from interlace.ir.per_ops import once_per_ops
from interlace.ir.storage import Storage
from interlace.scheduler.recompute.copies import COPY

Reason = Literal[
    "parameter",
    "persistable",
    "input",
    "output",
    "on-host",
    "vector",
    "unknown-size",
    "may-share",
    "no-buffer",
    "recomputed",
    "optimizer-read",
    "overwritten",
    "alias",
    "nested-block",
    "integer",
    "below-floor",
    "other-module",
    "opted-out",
    "kept",
    "at-once",
    "one-job",
    "congested",
    "capped",
]
"""Why a value, or one micro-batch of it, is kept on the device."""

REASONS: tuple[Reason, ...] = get_args(Reason)
KEEP = "keep_on_device"
"""Attribute by which one operation opts out: its results are never moved."""


class Rebuilt(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Another saved value of the same storage, and the forward view operations that lead to it from the copied one."""

    value: int
    ops: tuple[int, ...]


class Saved(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One storage that forward fills and backward reads.

    Attributes:
        value: The value that is copied; of several saved values the one that the others are views of.
        freed_bytes: Size of the storage, which may be larger than a view of it.
        producer: The operation that produces the value.
        before: Forward operations that write or read the contents of the storage; the copy out comes after all of them.
        readers: Backward operations that read the contents; the copy back comes before all of them.
        rebuilt: Saved aliases, which are computed again from the value that was copied back.
    """

    value: int
    storage: int
    size_bytes: int
    freed_bytes: int
    producer: int
    before: tuple[int, ...]
    readers: tuple[int, ...]
    rebuilt: tuple[Rebuilt, ...] = ()


class Skipped(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A value that is kept on the device, its size in bytes (-1: unknown), and the reason."""

    value: int
    size_bytes: int
    reason: Reason


@dataclass(slots=True)
class Candidates:
    """Values that are live from forward to backward, in the order of their producers."""

    saved: list[Saved] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


@once_per_ops
def find_candidates(program: Program) -> Candidates:
    """Find the values that are live from forward to backward; O(values + operands).

    A value can be moved only if every value that shares its storage can.
    """
    return _Finder(program).run()


class _Finder:
    def __init__(self, program: Program) -> None:
        self.graph = Graph(program)
        self.found = Candidates()
        self.nested = any(op.num_blocks for op in program.ops if op.role != "optimize")

    def run(self) -> Candidates:
        for storage in self.graph.storages.storages:
            made = [self.graph.values[value] for value in storage.values]
            crossing = [v for v in made if self._crosses(v)]
            if crossing:
                self._storage(storage, made, crossing)
            else:
                self._skip([v for v in made if self._is_recomputed(v)], "recomputed")
        vectors = [value for value in self.graph.program.values if value.dtype == "vector"]
        self._skip([vector for vector in vectors if self._crosses(vector)], "vector")
        self._skip([vector for vector in vectors if not self._crosses(vector) and self._is_recomputed(vector)], "recomputed")
        self.found.saved.sort(key=lambda s: (self.graph.position[s.producer], s.value))
        return self.found

    def _storage(self, storage: Storage, made: list[Value], crossing: list[Value]) -> None:
        read = [v for v in crossing if self._backward_reads(v.id)]
        reason = self._pinned_down(storage, made) or self._unmovable(made, read)
        base, rebuilt = self._base(made, read) if not reason else (None, ())
        if reason or base is None:
            self._skip(crossing, reason or "alias")
            return
        roles = self._users(made)
        first = self.graph.producer[base.id]
        freed_bytes = max(storage.size_bytes, base.size_bytes)
        self.found.saved.append(
            Saved(base.id, base.storage, base.size_bytes, freed_bytes, first, roles["forward"], roles["backward"], rebuilt)
        )

    def _pinned_down(self, storage: Storage, made: list[Value]) -> Reason | None:
        """The reason if something else keeps the storage alive, so that a copy to the host would free nothing."""
        makers = [self.graph.ops[self.graph.producer[v.id]] for v in made]
        users = [op for v in made for op in self.graph.user_ops(v.id)]
        checks: tuple[tuple[bool, Reason], ...] = (
            (any(op.name == PARAMETER for op in makers), "parameter"),
            (any(v.persistable for v in made), "persistable"),
            (any(is_boundary(op) for op in makers), "input"),
            (any(is_boundary(op) for op in users), "output"),
            (any(v.memory != "device" for v in made), "on-host"),
            (any(self._is_saved_vector(vector) for vector in storage.vectors), "vector"),
            (any(op.role == "optimize" for op in users), "optimizer-read"),
            (any(op.attrs.get(KEEP, False) for op in makers), "opted-out"),
        )
        return next((reason for holds, reason in checks if holds), None)

    def _unmovable(self, made: list[Value], read: list[Value]) -> Reason | None:
        if not read:
            return "no-buffer"
        if any(v.size_bytes < 0 for v in made):
            return "unknown-size"
        if any(len(self.graph.storages.parts[v.id]) > 1 for v in made):
            return "may-share"
        if self.nested:
            return "nested-block"
        last = self._last_overwrite(made)
        return "overwritten" if any(self.graph.position[self.graph.producer[v.id]] < last for v in read) else None

    def _last_overwrite(self, made: list[Value]) -> int:
        ids = {v.id for v in made}
        users = (op for v in made for op in self.graph.user_ops(v.id) if op.role == "forward")
        return max((self.graph.position[op.id] for op in users if written_operands(op) & ids), default=-1)

    def _base(self, made: list[Value], read: list[Value]) -> tuple[Value | None, tuple[Rebuilt, ...]]:
        by_position = sorted(made, key=lambda v: self.graph.position[self.graph.producer[v.id]])
        first_read = next(v for v in by_position if v in read)
        for base in (first_read, by_position[0]):
            paths = [(v.id, self._path(base.id, v.id)) for v in read if v is not base]
            if all(path is not None for _, path in paths):
                return base, tuple(Rebuilt(v, path) for v, path in paths if path is not None)
        return None, ()

    def _path(self, base: int, value: int) -> tuple[int, ...] | None:
        ops: list[int] = []
        while value != base:
            op = self.graph.ops[self.graph.producer[value]]
            source = next((op.operands[k] for r, k in op.views if op.results[r] == value), None)
            if source is None or not self._can_repeat(op, source):
                return None
            ops.append(op.id)
            value = source
        return tuple(reversed(ops))

    def _can_repeat(self, op: Op, source: int) -> bool:
        others = [v for v in op.operands if v not in (ABSENT, source)]
        pure = is_repeatable(op) and not is_comm(op) and not is_copy(op)
        return pure and op.role == "forward" and all(is_constant(self.graph.ops[self.graph.producer[v]]) for v in others)

    def _users(self, made: list[Value]) -> dict[str, tuple[int, ...]]:
        users = {op.id: op for v in made for op in self.graph.user_ops(v.id) if v.id in self.graph.reads(op)}
        users |= {op.id: op for v in made for op in self.graph.readers(v.id)}
        makers = {self.graph.producer[v.id]: self.graph.ops[self.graph.producer[v.id]] for v in made}
        every = sorted((users | makers).values(), key=lambda op: self.graph.position[op.id])
        return {role: tuple(op.id for op in every if op.role == role) for role in ("forward", "backward")}

    def _crosses(self, value: Value) -> bool:
        return self._role(value) == "forward" and any(op.role == "backward" for op in self.graph.user_ops(value.id))

    def _is_saved_vector(self, vector: int) -> bool:
        """Whether backward reads a vector of forward: one that was put together, its contents."""
        producer = self.graph.ops[self.graph.producer[vector]]
        users = (self.graph.readers if producer.name == COMBINE else self.graph.user_ops)(vector)
        return producer.role == "forward" and any(user.role == "backward" for user in users)

    def _backward_reads(self, value_id: int) -> bool:
        return any(op.role == "backward" and value_id in self.graph.reads(op) for op in self.graph.user_ops(value_id))

    def _is_recomputed(self, value: Value) -> bool:
        return COPY in self.graph.ops[self.graph.producer[value.id]].attrs and bool(self.graph.users.get(value.id))

    def _role(self, value: Value) -> str:
        return self.graph.ops[self.graph.producer[value.id]].role

    def _skip(self, values: Iterable[Value], reason: Reason) -> None:
        self.found.skipped += [Skipped(v.id, v.size_bytes, reason) for v in values]
