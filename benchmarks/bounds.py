"""Lower bounds of the time from one step to the next (`Result.step_ns`), for any schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from prices import Floats, Prices, least_milliwatts, prices_of

from interlace.cost_model import Costs
from interlace.cost_model.base import Draw, tables_of
from interlace.ir import Graph, Op, Program, dependencies
from interlace.ir.arrays import Ints
from interlace.ir.kinds import NO_KERNEL, is_collective, is_comm, is_send
from interlace.ir.schedule import in_flight
from interlace.passes import ChooseRecompute, Pipeline, find_pass
from interlace.passes.narrow_gathers import narrowed
from interlace.planning.floor import AT_ONCE, PRICES, ROUNDED, side_by_side
from interlace.planning.limits import SLACK
from interlace.scheduler.interleave.allocations import PairMemory, PartOps
from interlace.scheduler.interleave.inline_weights import units_of
from interlace.scheduler.jobs.parts import Parts
from interlace.scheduler.recompute.copies import recomputes

Key = tuple[str, int]
"""Kind of a part, and chunk."""
ROUNDS = 3
"""How often the price of each kind of collectives is changed."""


class Computation(NamedTuple):
    """Computation of one power and category: its time in nanoseconds; for each kind of collectives, and each way in which they run beside
    it (`side_by_side`), by which factor it takes longer, and how much of their own time is done in a nanosecond.
    `[num_kinds, num_ways]`"""

    draw: Draw
    took_ns: int
    slower: Floats
    done: Floats


@dataclass(frozen=True, slots=True)
class Hiding:
    """Collectives of a step, and computation that may hide them.

    Attributes:
        talk_ns: Time of the collectives of each kind, which share the links. `[num_kinds]`
        energy: Least energy of communication, in milliwatts times nanoseconds.
    """

    talk_ns: Ints
    energy: float
    computation: Sequence[Computation]

    def cost(self, prices: Prices) -> float:
        """The least that they add to the price of the computation.

        This is a dual bound, as `least_ns`: for any price of a nanosecond of collectives of each kind, they cost that much, less what these
        prices gain at most by having them beside computation. It is the largest for which one price for all kinds, and then a change of one
        kind's price after another, are tried.
        """
        kinds = np.arange(len(self.talk_ns))
        if not self.talk_ns.sum():
            return prices.energy * self.energy
        price = np.arange(PRICES + 1) / PRICES * prices.idle
        gains = np.zeros((len(self.computation), len(kinds), len(price)))
        for at, (draw, took, slower, done) in enumerate(self.computation):
            for kind in kinds:
                beside = prices.beside(draw, slower[kind], done[kind], price).min(axis=1, initial=np.inf)
                gains[at, kind] = took * np.minimum(0.0, beside - prices.of(draw))
        alike = price * self.talk_ns.sum() + gains.min(axis=1).sum(axis=0)
        taken, best = np.full(len(kinds), alike.argmax()), float(alike.max())
        for kind in [*kinds] * ROUNDS if len(kinds) > 1 else ():
            others = kinds[kinds != kind]
            paid = float(price[taken[others]] @ self.talk_ns[others])
            gained = np.minimum(gains[:, others, taken[others]].min(axis=1)[:, None], gains[:, kind])
            found = paid + price * self.talk_ns[kind] + gained.sum(axis=0)
            taken[kind], best = found.argmax(), max(best, float(found.max()))
        return best + prices.energy * self.energy


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stage must do for a micro-batch, in nanoseconds and bytes.

    Attributes:
        compute: Computation of each part.
        path: Time until forward and input gradients of the first chunk are sent: that of the longest chain, collectives included, or of all
            computation that the message needs if that is longer.
        draws: The same computation by the power that it draws.
        inner: Collectives of forward and of input gradients, and the computation of a step without the optimizer that may hide them.
        whole: All collectives and all computation of a step.
        deferred: The most time of weight gradients whose operands fit into memory in addition to what the stage always holds.
    """

    compute: dict[Key, int]
    path: dict[str, int]
    draws: dict[str, Counter[Draw]]
    inner: Hiding
    whole: Hiding
    deferred: float

    def all(self, kind: str) -> int:
        """Computation of a kind, summed over chunks."""
        return sum(took for (each, _), took in self.compute.items() if each == kind)


def bound_ns(programs: Sequence[Program], cost: Costs) -> int:
    """A bound from every stage's computation at full speed; collectives, messages and memory are free.

    A stage computes all its micro-batches; while it waits for its first one, it may still run the step before. Or, after the forwards of
    the stages before it, it computes all forwards and input gradients; then the last gradient passes the stages before it, and the first
    stage still has weight gradients and the optimizer to run.
    """
    return min(_bound_ns(each, cost) for each in _whole_or_narrowed(programs))


def _whole_or_narrowed(programs: Sequence[Program]) -> Iterator[list[Program]]:
    """The programs, by stage, with gathers as captured and, if any can be, with all of them narrowed (`narrow-gathers`)."""
    given = sorted(programs, key=lambda program: program.pipeline.stage)
    yield given
    less = [narrowed(program) for program in given]
    if any(one is not other for one, other in zip(given, less, strict=True)):
        yield less


def _bound_ns(programs: Sequence[Program], cost: Costs) -> int:
    stages = [_stage(program, cost, 0, 0) for program in programs]
    count, longest = programs[0].pipeline.num_micro_batches, 0
    for s, mine in enumerate(stages):
        busy = count * (mine.all("F") + mine.all("I"))
        ends = sum(each.compute["F", 0] + each.compute["I", 0] for each in stages[:s]) + _last(stages[0]) if s else 0
        longest = max(longest, busy + max(count * mine.all("W") + mine.all("O"), ends))
    return longest


def firm_bound_ns(programs: Sequence[Program], cost: Costs, peaks: Sequence[int], limit_bytes: int = 0) -> int:
    """Like `bound_ns`, with collectives, memory and the power limit, for a step that is repeated.

    The first forward and the last input gradients wait for their collectives; all other collectives, those of gradients and the optimizer
    included, run beside the computation that slows down least, and cost this slowdown and their energy. Before its last input gradients, a
    stage can defer only those weight gradients of other micro-batches whose operands, together with the last forward, fit into the limit;
    those that keep least memory for their time are counted. Computation counts at its price under the power limit (`prices.py`), if that is
    known. Recomputation does not count, and for programs that recompute, neither does memory. Plans with offload may defer more weight
    gradients, and so beat the bound.

    Args:
        programs: The program of one rank of each stage.
        cost: Times, interference and power.
        peaks: Peaks of Paddle's baseline if operations run one after another, in the order of `programs`.
        limit_bytes: What a stage may hold; without it the largest of these, as `SLACK` counts.
    """
    return max(firm_bounds_ns(programs, cost, peaks, limit_bytes))


def firm_bounds_ns(programs: Sequence[Program], cost: Costs, peaks: Sequence[int], limit_bytes: int = 0) -> tuple[int, int]:
    """The bounds at the full clock, and with the power limit."""
    limit = limit_bytes or int(max(peaks) * SLACK)
    order = [peak for _, peak in sorted(zip((program.pipeline.stage for program in programs), peaks, strict=True))]
    full, limited = zip(*(_firm_bounds_ns(each, cost, order, limit) for each in _whole_or_narrowed(programs)), strict=True)
    return min(full), min(limited)


def least_slowed_ns(programs: Sequence[Program], cost: Costs) -> list[int]:
    """By stage, the least time by which its collectives lengthen its step at the full clock, whatever the order."""
    *_, given = _whole_or_narrowed(programs)
    stages = [_stage(program, cost, 0, 0) for program in given]
    at_full_clock, *_ = prices_of(_draws(stages), None)
    return [int(stage.whole.cost(at_full_clock)) for stage in stages]


def _firm_bounds_ns(programs: Sequence[Program], cost: Costs, peaks: Sequence[int], limit_bytes: int) -> tuple[int, int]:
    """`firm_bounds_ns` of programs by stage, with the gathers that they have."""
    stages = [_stage(program, cost, peak, limit_bytes) for program, peak in zip(programs, peaks, strict=True)]
    comm_mw = max(_most_milliwatts(program, cost) for program in programs)
    count = programs[0].pipeline.num_micro_batches
    full, *limited = (_firm_ns(stages, count, prices) for prices in prices_of(_draws(stages), cost.power(), comm_mw))
    return full, max([full, *limited])


def _draws(stages: Sequence[Stage]) -> list[Draw]:
    return sorted({draw for stage in stages for counted in stage.draws.values() for draw in counted})


def _firm_ns(stages: Sequence[Stage], count: int, prices: Prices) -> int:
    longest = 0.0
    for s, mine in enumerate(stages):
        of = {kind: prices.total(mine.draws[kind]) for kind in "FIWO"}
        fill = prices.waited(sum(each.path["F"] for each in stages[:s]))
        busy = count * (of["F"] + of["I"])
        put_off = min(mine.deferred, count * mine.all("W")) * max((prices.of(draw) for draw in mine.draws["W"]), default=0.0)
        drain = sum(each.path["I"] for each in stages[1:s]) + stages[0].compute["I", 0] + _last(stages[0]) if s else 0
        ends = fill + max(0.0, count * of["W"] - put_off) + drain * prices.idle + mine.inner.cost(prices)
        longest = max(longest, busy + max(count * of["W"] + of["O"] + mine.whole.cost(prices), ends) - prices.ends)
    return int(longest * (1 - ROUNDED))


def _last(first: Stage) -> int:
    """The time that the first stage needs after it has the last gradient."""
    return first.compute["W", 0] + first.compute["O", 0]


def _stage(program: Program, cost: Costs, peak_bytes: int, limit_bytes: int) -> Stage:
    kept = (ChooseRecompute(level=0.0),) if recomputes(program) else ()
    split, _ = Pipeline((*kept, find_pass("split-backward")(), find_pass("overlap-column-backward")())).run(program, cost)
    graph, tables, parts = Graph(split), tables_of(split), Parts(split, {"I", "W"})

    def took(op: Op) -> int:
        return 0 if op.name in NO_KERNEL else cost.op_time(op, *tables).dur_ns

    draws: dict[str, Counter[Draw]] = {kind: Counter() for kind in "FIWO"}
    of_kind = {kind: [op for (each, _), ops in parts.ops.items() if each == kind for op in ops] for kind in "FIWO"}
    for kind, ops in of_kind.items():
        for op in ops:
            if op.name not in NO_KERNEL and not is_comm(op):
                draws[kind][cost.draw(op, *tables)] += took(op)
    return Stage(
        {key: sum(took(op) for op in ops if not is_comm(op)) for key, ops in parts.ops.items()},
        {
            kind: _longest(graph, [op for op in parts.ops[kind, 0] if not is_comm(op) or is_collective(op) or is_send(op)], took)
            for kind in "FI"
        },
        draws,
        _hiding(split, of_kind, "FI", "FIW", took, cost),
        _hiding(split, of_kind, "FIWO", "FIWO", took, cost),
        float("inf") if kept else _deferred(graph, parts, cost, peak_bytes, limit_bytes),
    )


def _longest(graph: Graph, ops: Sequence[Op], took: Callable[[Op], int]) -> int:
    """Time before a message to another stage can start: that of the longest chain of operations that it needs, or of all computation among
    them, which runs on one stream."""
    after, ends = dependencies(graph, ops), dict[int, int]()
    longest, sent = 0, list[int]()
    for op in ops:
        ready = max((ends[each] for each in after[op.id]), default=0)
        ends[op.id] = ready + (0 if is_send(op) else took(op))
        if is_send(op):
            longest, sent = max(longest, ready), [*sent, op.id]
    needed = set[int]()
    while sent:
        more = after[sent.pop()] - needed
        needed |= more
        sent += more
    return max(longest, sum(took(op) for op in ops if op.id in needed and not is_comm(op)))


def _hiding(
    program: Program, of_kind: Mapping[str, Sequence[Op]], talk: str, computation: str, took: Callable[[Op], int], cost: Costs
) -> Hiding:
    """The collectives of parts of the kinds `talk`, with the energy of all their communication, and the computation of others."""
    tables = tables_of(program)
    collectives, computed, energy = Counter[str](), Counter[tuple[Draw, str]](), 0.0
    for kind, ops in of_kind.items():
        for op in ops:
            dur_ns = took(op) * (1 if kind == "O" else program.pipeline.num_micro_batches)
            if is_comm(op) and kind in talk:
                energy += dur_ns * least_milliwatts(cost.draw(op, *tables), cost.power())
            if is_collective(op) and kind in talk and dur_ns:
                collectives[cost.category(op, *tables)] += dur_ns
            elif not is_comm(op) and kind in computation and dur_ns:
                computed[cost.draw(op, *tables), cost.category(op, *tables)] += dur_ns
    beside = list[Computation]()
    for (draw, category), dur_ns in computed.items():
        ways = np.array([[*side_by_side(category, [kind], cost)] for kind in collectives]).reshape(len(collectives), AT_ONCE, 2)
        beside.append(Computation(draw, dur_ns, ways[..., 0], ways[..., 1]))
    return Hiding(np.array([*collectives.values()], np.int64), energy, beside)


def _most_milliwatts(program: Program, cost: Costs) -> float:
    """The most power that communication draws at a time: of collectives, which share the links, one; and one message each way."""
    found: dict[str, float] = {}
    for op in filter(is_comm, program.ops):
        kind = "collective" if is_collective(op) else "send" if is_send(op) else "receive"
        found[kind] = max(found.get(kind, 0.0), least_milliwatts(cost.draw(op, *tables_of(program)), cost.power()))
    return sum(found.values())


def _deferred(graph: Graph, parts: Parts, cost: Costs, peak_bytes: int, limit_bytes: int) -> float:
    pipe = graph.program.pipeline
    if pipe.num_chunks > 1 or pipe.num_stages == 1:
        return float("inf")
    forward, backward = (PartOps(kind, kind, ops) for kind, ops in (("F", parts.ops["F", 0]), ("B", parts.ops["I", 0] + parts.ops["W", 0])))
    memory = PairMemory(graph, [forward]), PairMemory(graph, [backward])
    rise = sum(
        each.peak([(part.label, op.id) for op in part.ops]) - low
        for each, part, low in zip(memory, (forward, backward), (memory[0].end, memory[1].start), strict=True)
    )
    saved = memory[0].end - memory[0].start
    always = peak_bytes - in_flight(pipe.stage, pipe.num_stages, pipe.num_micro_batches) * saved - max(0, rise)
    units, others = units_of(graph, parts.ops["W", 0], cost), pipe.num_micro_batches - 1
    left, found = float(limit_bytes - always - saved), float(sum(unit.dur_ns for unit in units))
    for unit in reversed(units):
        share = min(1.0, max(0.0, left) / max(1, others * unit.held_bytes))
        found += share * others * unit.dur_ns
        left -= share * others * unit.held_bytes
    return found
