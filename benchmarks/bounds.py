"""Lower bounds of the time from one step to the next (`Result.step_ns`), for any schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prices import Prices, prices_of

from interlace.cost_model import Costs
from interlace.cost_model.base import Draw, tables_of
from interlace.ir import Graph, Op, Program, dependencies
from interlace.ir.kinds import NO_KERNEL, is_comm, is_p2p, is_send
from interlace.ir.schedule import in_flight
from interlace.passes import ChooseRecompute, Pipeline, find_pass
from interlace.planning.limits import SLACK
from interlace.scheduler.interleave.allocations import PairMemory, PartOps
from interlace.scheduler.interleave.inline_weights import units_of
from interlace.scheduler.jobs.parts import Parts
from interlace.scheduler.recompute.copies import recomputes

Key = tuple[str, int]
"""Kind of a part, and chunk."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stage must do for a micro-batch, in nanoseconds and bytes.

    Attributes:
        compute: Computation of each part.
        path: Time until forward and input gradients of the first chunk are sent: that of the longest chain, collectives included, or of all
            computation that the message needs if that is longer.
        draws: The same computation by the power that it draws.
        hiding: By how much computation takes longer if it hides all collectives of the stage, each during the computation that slows down
            least.
        deferred: The most time of weight gradients whose operands fit into memory in addition to what the stage always holds.
    """

    compute: dict[Key, int]
    path: dict[str, int]
    draws: dict[str, Counter[Draw]]
    hiding: float
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
    stages = [_stage(program, cost, 0, 0) for program in sorted(programs, key=lambda program: program.pipeline.stage)]
    count, longest = programs[0].pipeline.num_micro_batches, 0
    for s, mine in enumerate(stages):
        busy = count * (mine.all("F") + mine.all("I"))
        ends = sum(each.compute["F", 0] + each.compute["I", 0] for each in stages[:s]) + _last(stages[0]) if s else 0
        longest = max(longest, busy + max(count * mine.all("W") + mine.all("O"), ends))
    return longest


def firm_bound_ns(programs: Sequence[Program], cost: Costs, peaks: Sequence[int], limit_bytes: int = 0) -> int:
    """Like `bound_ns`, with collectives, memory and the power limit, for a step that is repeated.

    The first forward and the last input gradients wait for their collectives; all other collectives are hidden during the computation that
    slows down least, and cost this slowdown. Before its last input gradients, a stage can defer only those weight gradients of other
    micro-batches whose operands, together with the last forward, fit into the limit; those that keep least memory for their time are
    counted. Computation counts at its price under the power limit (`prices.py`), if that is known. Recomputation does not count, and for
    programs that recompute, neither does memory. Plans with offload may defer more weight gradients, and so beat the bound.

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
    order = sorted(range(len(programs)), key=lambda k: programs[k].pipeline.stage)
    stages = [_stage(programs[k], cost, peaks[k], limit) for k in order]
    draws = sorted({draw for stage in stages for counted in stage.draws.values() for draw in counted})
    full, *limited = (_firm_ns(stages, programs[0].pipeline.num_micro_batches, prices) for prices in prices_of(draws, cost.power()))
    return full, max([full, *limited])


def _firm_ns(stages: Sequence[Stage], count: int, prices: Prices) -> int:
    longest = 0.0
    for s, mine in enumerate(stages):
        of = {kind: prices.total(mine.draws[kind]) for kind in "FIWO"}
        fill = prices.waited(sum(each.path["F"] for each in stages[:s]))
        busy = count * (of["F"] + of["I"] + mine.hiding * prices.idle)
        put_off = min(mine.deferred, count * mine.all("W")) * max((prices.of[draw] for draw in mine.draws["W"]), default=0.0)
        drain = sum(each.path["I"] for each in stages[1:s]) + stages[0].compute["I", 0] + _last(stages[0]) if s else 0
        rest = max(count * of["W"] + of["O"], fill + max(0.0, count * of["W"] - put_off) + drain * prices.idle)
        longest = max(longest, busy + rest - prices.ends)
    return int(longest)


def _last(first: Stage) -> int:
    """The time that the first stage needs after it has the last gradient."""
    return first.compute["W", 0] + first.compute["O", 0]


def _stage(program: Program, cost: Costs, peak_bytes: int, limit_bytes: int) -> Stage:
    kept = (ChooseRecompute(level=0.0),) if recomputes(program) else ()
    split, _ = Pipeline((*kept, find_pass("split-backward")(), find_pass("overlap-column-backward")())).run(program, cost)
    graph, tables, parts = Graph(split), tables_of(split), Parts(split, {"I", "W"})

    def took(op: Op) -> int:
        return 0 if op.name in NO_KERNEL else cost.op_time(op, *tables).dur_ns

    def within(op: Op) -> bool:
        return is_comm(op) and not is_p2p(op)

    draws: dict[str, Counter[Draw]] = {kind: Counter() for kind in "FIWO"}
    for (kind, _), ops in parts.ops.items():
        for op in ops:
            if op.name not in NO_KERNEL and not is_comm(op):
                draws[kind][cost.draw(op, *tables)] += took(op)
    inner = [op for (kind, _), ops in parts.ops.items() if kind in "FI" for op in ops]
    return Stage(
        {key: sum(took(op) for op in ops if not is_comm(op)) for key, ops in parts.ops.items()},
        {kind: _longest(graph, [op for op in parts.ops[kind, 0] if not is_comm(op) or within(op) or is_send(op)], took) for kind in "FI"},
        draws,
        _hiding(split, [op for op in inner if within(op)], [op for op in split.ops if op.role != "optimize" and not is_comm(op)], cost),
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


def _hiding(program: Program, collectives: Sequence[Op], computation: Sequence[Op], cost: Costs) -> float:
    """The cost of hiding collectives, if each kind of computation hides as much as can run beside it; the rest costs its own time."""
    tables = tables_of(program)
    took: dict[str, int] = {}
    for op in computation:
        if op.name not in NO_KERNEL:
            kind = cost.category(op, *tables)
            took[kind] = took.get(kind, 0) + cost.op_time(op, *tables).dur_ns
    left = float(sum(cost.op_time(op, *tables).dur_ns for op in collectives))
    against = sorted({cost.category(op, *tables) for op in collectives})
    ways = []
    for kind, alone in took.items():
        for beside in against:
            found = cost.stretch_between(kind, beside)
            ways.append((found.beside * (1 - 1 / found.op), alone * found.op / found.beside))
    longer = 0.0
    for price, most in sorted(ways):
        hidden = min(left, most) if price < 1 else 0.0
        longer += price * hidden
        left -= hidden
    return longer + left


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
