"""One rank during planning: it holds its programs by number, the captured one and what passes made of it, and does what rank 0 asks for."""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from interlace.config import Beyond, MemoryBudget
from interlace.cost_model import Costs
from interlace.ir import Op, Program, Value, verify
from interlace.ir.effects import draws_twice
from interlace.ir.equivalent_ranks import equivalence_key
from interlace.ir.per_ops import RANKS, once_per_ops
from interlace.passes.base import Context, Pass, find_pass, is_built_in
from interlace.passes.pipeline import PassReport, applied, errors_named, report_of
from interlace.planning.peers import decoded, mark
from interlace.scheduler.interleave.optimizer import optimizer_communicates
from interlace.scheduler.recompute.copies import recomputes
from interlace.scheduler.whole_step.orders import Orders

LIMITED = ("host-waits", "states")
"""Decisions of those built-in passes whose `run` depends on the memory limit. The `run` of the others depends at most on whether there is a
limit; their facts may depend on it."""


class Spec(msgspec.Struct, frozen=True):
    """A pass as ranks send it: its name and its encoded options."""

    name: str
    options: bytes


def spec_of(each: Pass) -> Spec:
    """The name and options of a pass."""
    return Spec(each.name, msgspec.msgpack.encode(each))


class RankFacts(msgspec.Struct, frozen=True):
    """What every rank tells the others about itself before planning.

    Attributes:
        equivalence_key: Equal for ranks that can be simulated in place of each other.
        draws: Whether both its forward and its backward draw random numbers, or may.
        recomputes: Whether its captured program recomputes anything.
        optimizer_communicates: Whether its optimizer has collectives.
        num_ops: Number of operations of its captured program.
        options: A digest of its configuration.
    """

    stage: int
    equivalence_key: bytes
    draws: bool
    recomputes: bool
    optimizer_communicates: bool
    num_ops: int
    options: bytes = b""
    memory_budget: MemoryBudget = None


class Decision(msgspec.Struct, frozen=True):
    """The input of a pass beyond this rank's program: encoded facts of every rank; or orders that were decided for all ranks, and for each
    rank the index of its plan in `Orders.of_plans`."""

    facts: tuple[bytes, ...] = ()
    orders: Orders | None = None
    plan_of: tuple[int, ...] = ()


@dataclass(slots=True)
class Step:
    """The result of a pass on a program: the number of the new program, and the report."""

    result: int
    report: PassReport
    is_verified: bool


class Worker:
    """The programs of one rank, the captured one first.

    Args:
        program: As captured.
        passes: As configured; rank 0 may ask for these and for registered ones.
        options: The whole configuration as text, which must be the same on every rank.
        is_whole: Whether all ranks of the world plan together; otherwise this one plans alone.
    """

    def __init__(
        self,
        program: Program,
        cost: Costs,
        passes: Sequence[Pass] = (),
        options: str = "",
        memory_budget: MemoryBudget = None,
        is_whole: bool = True,
    ) -> None:
        self.programs, self.cost, self.is_whole = [program], cost, is_whole
        self.seat = program.rank if is_whole else 0
        """Index of this rank in sequences with one entry per rank."""
        self.steps: list[Step] = []
        self.memo: dict[Any, Any] = {}
        """Cache of results about the programs, also used by passes (`Context.memo`)."""
        self.finished: tuple[Program, tuple[PassReport, ...]] = (program, ())
        """The finished plan, and the reports of its passes."""
        self._kinds = {each.name: type(each) for each in passes}
        self.options, self._memory_budget = options, memory_budget
        self.extra_bytes = memory_budget.more_bytes if isinstance(memory_budget, Beyond) else 0
        """See `Context`."""
        self._passes: dict[Spec, Pass] = {}
        self._steps: dict[Any, int] = {}
        self._results: dict[tuple[int, str], list[int]] = {}
        self._parts: dict[bytes, Any] = {}
        self._facts: dict[Any, tuple[Any, bytes]] = {}

    @property
    def captured(self) -> Program:
        """The program as Paddle built it."""
        return self.programs[0]

    def program(self, numbers: Sequence[int]) -> Program:
        """This rank's program; `numbers` has the program number of every rank."""
        return self.programs[numbers[self.seat]]

    def facts(self) -> RankFacts:
        """What this rank tells the others about itself."""
        program = self.captured
        return RankFacts(
            program.pipeline.stage,
            equivalence_key(program),
            draws_twice(program),
            recomputes(program),
            optimizer_communicates(program),
            len(program.ops),
            mark(self.options),
            self._memory_budget,
        )

    def pass_of(self, spec: Spec) -> Pass:
        """The pass with this name and options."""
        if spec not in self._passes:
            self._passes[spec] = decoded(spec.options, self._kinds.get(spec.name) or find_pass(spec.name))
        return self._passes[spec]

    def context(self, memory_limit: int | None) -> Context:
        """A context without facts for a pass; `memory_limit` as in `Context`."""
        return Context(
            self.cost,
            is_whole=self.is_whole,
            memory_limit=memory_limit,
            extra_bytes=self.extra_bytes,
            memo=self.memo,
        )

    def facts_of(self, spec: Spec, number: int, memory_limit: int | None) -> bytes:
        """The pass's facts about this rank, encoded."""
        key = (spec, number, memory_limit)
        if key not in self._facts:
            each = self.pass_of(spec)
            with errors_named(each):
                found = each.facts(self.programs[number], self.context(memory_limit))
            self._facts[key] = (found, msgspec.msgpack.encode(found))
        return self._facts[key][1]

    def step(self, spec: Spec, number: int, memory_limit: int | None, told: Decision, draft: bool) -> int:
        """Run a pass on program `number`, unless the result is known already; returns the index of the step in `steps`. `told` has its
        facts, if it gathers any. A draft is only simulated, and so is not verified. `memory_limit` as in `Context`."""
        each, mine = self.pass_of(spec), self._told(spec, number, memory_limit, told)
        looks = each.decides in LIMITED or not is_built_in(type(each))
        limit = memory_limit if looks else memory_limit is not None
        key = (number, spec, limit, told.facts or msgspec.msgpack.encode(mine if told.orders else None))
        if key not in self._steps:
            self.steps.append(self._run(each, number, self.context(memory_limit), mine))
            self._steps[key] = len(self.steps) - 1
        found = self.steps[self._steps[key]]
        if not draft and not found.is_verified:
            with errors_named(each):
                verify(self.programs[found.result])
            found.is_verified = True
        return self._steps[key]

    def _told(self, spec: Spec, number: int, memory_limit: int | None, told: Decision) -> tuple[Any, ...]:
        """The facts as `Context.facts` has them."""
        if told.orders is not None:
            return (told.orders, told.orders.of_plans[told.plan_of[self.seat]]) if told.orders.of_plans else ()
        if not told.facts:
            return ()
        own, packed = self._facts[spec, number, memory_limit]
        kind: Any = type(own)
        return tuple(own if each == packed else _facts_of(each, kind) for each in told.facts)

    def _run(self, each: Pass, number: int, context: Context, facts: tuple[Any, ...]) -> Step:
        start, program = time.perf_counter_ns(), self.programs[number]
        context.facts = facts
        with errors_named(each):
            made = self._with_known_parts(applied(each, program, context), program)
        report = report_of(each, context, program, made, time.perf_counter_ns() - start)
        return Step(self._number(made, (number, each.name)), report, is_verified=False)

    def _with_known_parts(self, made: Program, before: Program) -> Program:
        """A program made of `before`, with what equals a part of an earlier program replaced by that part, so that tables which follow from
        operations or jobs are made once, however these came about."""
        found = {}
        for name in ("ops", "values", "jobs", "events"):
            if (part := getattr(made, name)) is not getattr(before, name):
                found[name] = self._parts.setdefault(hashlib.sha256(msgspec.msgpack.encode(part)).digest(), part)
        return msgspec.structs.replace(made, **found) if found else made

    def _number(self, made: Program, of: tuple[int, str]) -> int:
        """The number of the program that a pass made; if the pass with other options made an equal one before, that one's."""
        known = self._results.setdefault(of, [])
        found = next((number for number in known if self.programs[number] == made), None)
        if found is None:
            found = len(self.programs)
            self.programs.append(made)
            known.append(found)
        return found


@lru_cache(maxsize=4 * RANKS)
def _facts_of(packed: bytes, kind: Any) -> Any:
    return decoded(packed, kind)


def digest_of(program: Program) -> str:
    """A digest that is equal for equal programs, in memory and in files."""
    return hashlib.sha256(msgspec.json.encode(program, order="deterministic")).hexdigest()[:32]


class Sent:
    """Wrapper for a program in the result of a task, which is encoded only if it goes to another process."""

    def __init__(self, program: Program) -> None:
        self.program = program


class _Packed(msgspec.Struct, frozen=True):
    """A program encoded for another process. Operations and values are separate from the rest, as many plans share them."""

    ops: bytes
    rest: bytes


_packed_ops = once_per_ops(lambda program: zlib.compress(msgspec.msgpack.encode((program.ops, program.values)), 1))


@lru_cache(maxsize=2 * RANKS)
def _unpacked(packed: bytes) -> tuple[tuple[Op, ...], tuple[Value, ...]]:
    """Cached, so that plans with equal operations and values share the same tuples, and tables derived from these are made once."""
    found: tuple[tuple[Op, ...], tuple[Value, ...]] = decoded(zlib.decompress(packed), tuple[tuple[Op, ...], tuple[Value, ...]])
    return found


def packed(found: Any) -> bytes:
    """Encode a value for another process; programs in it must be `Sent`."""
    return msgspec.msgpack.encode(found, enc_hook=_pack)


def unpacked(found: bytes, kind: Any) -> Any:
    """Decode what `packed` encoded as a value of type `kind`."""
    return decoded(found, kind, _unpack)


def _pack(found: Any) -> Any:
    if not isinstance(found, Sent):
        raise TypeError(f"{type(found).__name__} cannot be sent to another process")
    return _Packed(_packed_ops(found.program), zlib.compress(msgspec.msgpack.encode(found.program.with_ops((), ())), 1))


def _unpack(kind: type, found: Any) -> Any:
    parts = msgspec.convert(found, _Packed)
    return Sent(decoded(zlib.decompress(parts.rest), Program).with_ops(*_unpacked(parts.ops)))
