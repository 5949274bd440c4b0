"""A rank while its world is planned: it knows programs and what passes made of them by number, and does what rank 0 asks for."""

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
from interlace.scheduler.recompute.copies import recomputes
from interlace.scheduler.whole_step.orders import Orders

LIMITED = ("host-waits", "states")
"""What our passes decide that look in `run` at how much they may hold; the others look at most at whether there is a limit, and at it in
their facts."""


class Spec(msgspec.Struct, frozen=True):
    """A pass as ranks tell it: its name, and its options packed."""

    name: str
    options: bytes


def spec_of(each: Pass) -> Spec:
    """A pass by what it holds."""
    return Spec(each.name, msgspec.msgpack.encode(each))


class RankFacts(msgspec.Struct, frozen=True):
    """What every rank tells of itself before anything is planned.

    Attributes:
        equivalence_key: Equal for ranks that can be simulated in each other's place.
        draws: Whether its forward and its backward draw random numbers.
        options: A digest of its configuration.
    """

    stage: int
    equivalence_key: bytes
    draws: bool
    recomputes: bool
    options: bytes = b""
    memory_budget: MemoryBudget = None


class Decision(msgspec.Struct, frozen=True):
    """What a pass finds as its facts: those of every rank, packed; or what was decided for all, and for each rank the place of its plan."""

    facts: tuple[bytes, ...] = ()
    orders: Orders | None = None
    plan_of: tuple[int, ...] = ()


@dataclass(slots=True)
class Step:
    """What a pass made of a program: the number of the result, and the report."""

    result: int
    report: PassReport
    is_verified: bool


class Worker:
    """The programs of one rank, the captured one first.

    Args:
        program: As captured.
        passes: As configured: rank 0 may ask for these and for registered ones.
        options: The whole configuration as text, the same on every rank.
        is_whole: Whether all ranks of the world plan together; else this one is alone.
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
        """Where this rank stands in what is given by rank."""
        self.steps: list[Step] = []
        self.memo: dict[Any, Any] = {}
        """What was found out about the programs, by passes too."""
        self.finished: tuple[Program, tuple[PassReport, ...]] = (program, ())
        """The plan, and what passes say of it."""
        self._kinds = {each.name: type(each) for each in passes}
        self.options, self._memory_budget = options, memory_budget
        self.extra_bytes = memory_budget.more_bytes if isinstance(memory_budget, Beyond) else 0
        """See `Context`."""
        self._passes: dict[Spec, Pass] = {}
        self._steps: dict[Any, int] = {}
        self._results: dict[tuple[int, str], list[int]] = {}
        self._facts: dict[Any, tuple[Any, bytes]] = {}

    @property
    def captured(self) -> Program:
        """The program as Paddle built it."""
        return self.programs[0]

    def program(self, numbers: Sequence[int]) -> Program:
        """This rank's of some programs by rank."""
        return self.programs[numbers[self.seat]]

    def facts(self) -> RankFacts:
        """What this rank tells of itself."""
        program = self.captured
        return RankFacts(
            program.pipeline.stage,
            equivalence_key(program),
            draws_twice(program),
            recomputes(program),
            mark(self.options),
            self._memory_budget,
        )

    def pass_of(self, spec: Spec) -> Pass:
        """The pass that rank 0 speaks of."""
        if spec not in self._passes:
            self._passes[spec] = decoded(spec.options, self._kinds.get(spec.name) or find_pass(spec.name))
        return self._passes[spec]

    def context(self, memory_limit: int | None) -> Context:
        """For a pass that may hold so many bytes."""
        return Context(
            self.cost,
            is_whole=self.is_whole,
            memory_limit=memory_limit,
            extra_bytes=self.extra_bytes,
            memo=self.memo,
        )

    def facts_of(self, spec: Spec, number: int, memory_limit: int | None) -> bytes:
        """What a pass wants to know of this rank, packed."""
        key = (spec, number, memory_limit)
        if key not in self._facts:
            each = self.pass_of(spec)
            with errors_named(each):
                found = each.facts(self.programs[number], self.context(memory_limit))
            self._facts[key] = (found, msgspec.msgpack.encode(found))
        return self._facts[key][1]

    def step(self, spec: Spec, number: int, memory_limit: int | None, told: Decision, draft: bool) -> int:
        """Run a pass on a program (`number`), unless what it makes is known; gives the number of the step. `told` are its facts, where it
        has some; a draft is only simulated, and need not be verified. For `memory_limit` see `context`."""
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
        """The facts as the pass finds them."""
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
            made = applied(each, program, context)
        report = report_of(each, context, program, made, time.perf_counter_ns() - start)
        return Step(self._number(made, (number, each.name)), report, is_verified=False)

    def _number(self, made: Program, of: tuple[int, str]) -> int:
        """The number of what a pass made of a program: the one that it has already where other options made the same."""
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
    """Equal for equal programs, in memory and in files."""
    return hashlib.sha256(msgspec.json.encode(program, order="deterministic")).hexdigest()[:32]


class Sent:
    """A program that goes to another process where it must."""

    def __init__(self, program: Program) -> None:
        self.program = program


class _Packed(msgspec.Struct, frozen=True):
    """A program on its way: operations and values apart, which are the same in many plans."""

    ops: bytes
    rest: bytes


_packed_ops = once_per_ops(lambda program: zlib.compress(msgspec.msgpack.encode((program.ops, program.values)), 1))


@lru_cache(maxsize=2 * RANKS)
def _unpacked(packed: bytes) -> tuple[tuple[Op, ...], tuple[Value, ...]]:
    """Plans of the same operations and values hold the same tuples of them: tables that follow from these are made once."""
    found: tuple[tuple[Op, ...], tuple[Value, ...]] = decoded(zlib.decompress(packed), tuple[tuple[Op, ...], tuple[Value, ...]])
    return found


def packed(found: Any) -> bytes:
    """For another process; programs in it are `Sent`."""
    return msgspec.msgpack.encode(found, enc_hook=_pack)


def unpacked(found: bytes, kind: Any) -> Any:
    """What another process packed, as its type."""
    return decoded(found, kind, _unpack)


def _pack(found: Any) -> Any:
    if not isinstance(found, Sent):
        raise TypeError(f"{type(found).__name__} cannot be sent to another process")
    return _Packed(_packed_ops(found.program), zlib.compress(msgspec.msgpack.encode(found.program.with_ops((), ())), 1))


def _unpack(kind: type, found: Any) -> Any:
    parts = msgspec.convert(found, _Packed)
    return Sent(decoded(zlib.decompress(parts.rest), Program).with_ops(*_unpacked(parts.ops)))
