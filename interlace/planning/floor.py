"""Lower bounds of the time from one step to the next that hold for any schedule. They include communication that nothing can hide, and
ignore memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from interlace.cost_model import Costs
from interlace.cost_model.base import tables_of
from interlace.cost_model.work import products_of
from interlace.ir import Graph, Op, Program, dependencies
from interlace.ir.kinds import DATA, NO_KERNEL, is_collective, is_comm, is_receive, is_send
from interlace.passes import Pipeline, find_pass
from interlace.passes.narrow_gathers import sites
from interlace.scheduler.jobs.parts import Parts

PRICES = 20
"""Number of intervals into which prices of communication between 0 and 1 are divided; each price gives a bound (`least_ns`)."""
AT_ONCE = 8
"""Most collectives that run at the same time, each in a group of its own."""
ROUNDED = 1e-5
"""Share by which bounds are lowered: the simulator rounds rates up, so a long step may be a millionth shorter than the work in it."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Least times of one stage, in nanoseconds.

    Attributes:
        whole: The step of its rank if it waited for nobody.
        middle: The part of the step between messages from the previous stage and messages back to it; without the optimizer.
        fill, drain: From the arrival of a message to the end of the message that depends on it, in forward and for input gradients. On the
            first stage `fill` begins with the step, and `drain` includes all backward and the optimizer.
        chain: The longest chain of operations of one micro-batch and the optimizer, if there is only one stage; else 0.
    """

    whole: float
    middle: float
    fill: float
    drain: float
    chain: float


class Floors(NamedTuple):
    """Lower bounds of the step, in nanoseconds.

    Attributes:
        own: For this layout.
        shared: For all layouts that differ from it only in sharding over replicas, or by more recomputation. It counts only what lies
            between the data of a micro-batch and one of its products: not the gathering of parameters, the accumulation and reduction of
            gradients, or the optimizer, of which sharding may leave a rank only a part.
    """

    own: int
    shared: int


def floors_of(programs: Sequence[Program], cost: Costs) -> Floors:
    """Lower bounds from one rank of each stage.

    Each rank does all its computation and communication, with each collective beside the computation that suffers least; while it waits for
    its first message, it may still run the step before. What a stage computes between messages of its step comes after one forward, with
    its collectives, of all earlier stages; after its last input gradients come those of the earlier stages. Collectives that
    `narrow-gathers` may replace do not count.
    """
    splits = [_split(program, cost) for program in sorted(programs, key=lambda program: program.pipeline.stage)]
    own = [_stage(_Rank(split, cost)) for split in splits]
    return Floors(_floor_ns(own), _floor_ns([_stage(_Rank(split, cost, _between_data_and_products(split))) for split in splits]))


def occupied(program: Program, cost: Costs) -> Floors:
    """Lower bounds from one rank alone, whatever the others do."""
    ranks = _Rank(program, cost), _Rank(program, cost, _between_data_and_products(program))
    own, shared = (int(rank.least(program.ops) * (1 - ROUNDED)) for rank in ranks)
    return Floors(own, shared)


def _floor_ns(stages: Sequence[Stage]) -> int:
    fill, drain, longest = 0.0, 0.0, 0.0
    for s, mine in enumerate(stages):
        longest = max(longest, mine.whole, mine.chain, fill + mine.middle + drain if s else 0.0)
        fill, drain = fill + mine.fill, drain + mine.drain
    return int(longest * (1 - ROUNDED))


def least_ns(computation: Counter[str], collectives: Counter[str], cost: Costs) -> float:
    """Lower bound of the time for computation and collectives together, both in nanoseconds by category. Computation is on one stream, and
    collectives share the links.

    This is a dual bound. For a price p in (0, 1) of a nanosecond of communication, the time is at least p times all communication, plus for
    each operation its time multiplied by its least cost per nanosecond. With n collectives beside it, an operation takes s(n) times as
    long, and each nanosecond of that costs 1 less p times the communication done in it; the least cost is the minimum over n = 0, 1, ...
    `AT_ONCE`. Any price gives a valid bound; the largest of several is returned.
    """
    alone, talk = sum(computation.values()), sum(collectives.values())
    found = float(max(alone, talk))
    if not talk:
        return found
    states = {kind: [*side_by_side(kind, collectives, cost)] for kind in computation}
    for price in (k / PRICES for k in range(1, PRICES)):
        total = price * talk
        for kind, took in computation.items():
            total += took * min(1.0, *((1 - price * done) * slower for slower, done in states[kind]))
        found = max(found, total)
    return found


def side_by_side(kind: str, collectives: Iterable[str], cost: Costs) -> Iterator[tuple[float, float]]:
    """The ways in which computation of a category can have collectives of these categories beside it, 1 to `AT_ONCE` of them at a time: by
    which factor it then takes longer, and how much of the collectives' own time is done in a nanosecond."""
    for beside in sorted(collectives):
        found = cost.stretch_between(kind, beside)
        for n in range(1, AT_ONCE + 1):
            yield 1 + n * (max(1.0, found.op) - 1), n / (n + max(1.0, found.beside) - 1)


def _between_data_and_products(program: Program) -> set[int]:
    """Ids of a micro-batch's computation that depends on its data, or on messages from other stages, and on which a product depends."""
    values, ops = tables_of(program)[0], [op for op in program.ops if op.role != "optimize"]
    after, first = _reads(Graph(program), ops), program.pipeline.stage == 0

    def is_data(op: Op) -> bool:
        return first and op.name == DATA and not all(values[each].persistable for each in op.results)

    fed = _led_to(ops, after, lambda op: is_receive(op) or is_data(op))
    needed = _needed(ops, after, lambda op: bool(products_of(op, values)))
    return {op.id for op in ops if op.id in fed & needed and not is_comm(op)}


def _reads(graph: Graph, ops: Sequence[Op]) -> dict[int, set[int]]:
    """Op id -> ids of the ops whose results it reads: dependencies that hold whatever the communication."""
    return {op.id: {graph.producer[each] for each in op.operands if each in graph.producer} for op in ops}


class _Rank:
    """Times of one rank's operations. `counted`: ids of the operations that count, or None for all; if given, only reads count as
    dependencies."""

    def __init__(self, program: Program, cost: Costs, counted: set[int] | None = None) -> None:
        self.program, self.cost, self.counted, self.tables = program, cost, counted, tables_of(program)
        self.graph, self.count = Graph(program), program.pipeline.num_micro_batches
        self._narrowed = {site.gather.id for site in sites(self.graph).values()}

    def took(self, op: Op) -> int:
        """Nanoseconds of one run of an operation; 0 if it does not count."""
        if self.counted is not None and op.id not in self.counted:
            return 0
        return 0 if op.name in NO_KERNEL or op.id in self._narrowed else self.cost.op_time(op, *self.tables).dur_ns

    def after(self, ops: Sequence[Op]) -> dict[int, set[int]]:
        """Op id -> ids of the ops that it depends on."""
        return dependencies(self.graph, ops) if self.counted is None else _reads(self.graph, ops)

    def least(self, ops: Iterable[Op]) -> float:
        """Lower bound, in nanoseconds, of the time of these operations in a step."""
        computation, collectives = Counter[str](), Counter[str]()
        for op in ops:
            into = computation if not is_comm(op) else collectives if is_collective(op) else None
            if into is not None and (took := self.took(op)):
                into[self.cost.category(op, *self.tables)] += took * (1 if op.role == "optimize" else self.count)
        return least_ns(computation, collectives, self.cost)

    def between(self, ops: Sequence[Op], starts: Callable[[Op], bool], ends: Callable[[Op], bool]) -> float:
        """Lower bound, in nanoseconds, of the time from the first of the ops for which `starts` holds to the last for which `ends` holds:
        the longest chain, or all computation between them plus the longest final send, whichever is longer."""
        after = self.after(ops)
        on_way, reached = _needed(ops, after, ends) & _led_to(ops, after, starts), dict[int, float]()
        longest, last, computation = 0.0, 0.0, 0.0
        for op in ops:
            if op.id not in on_way:
                continue
            took = 0 if starts(op) and not ends(op) and is_comm(op) else self.took(op)
            reached[op.id] = max((reached[each] for each in after[op.id] if each in reached), default=0.0) + took
            longest = max(longest, reached[op.id])
            last = max(last, took) if is_send(op) and ends(op) else last
            computation += 0 if is_comm(op) else took
        return max(longest, computation + last)


def _led_to(ops: Sequence[Op], after: dict[int, set[int]], starts: Callable[[Op], bool]) -> set[int]:
    found = set[int]()
    for op in ops:
        if starts(op) or after[op.id] & found:
            found.add(op.id)
    return found


def _needed(ops: Sequence[Op], after: dict[int, set[int]], ends: Callable[[Op], bool]) -> set[int]:
    found = set[int]()
    for op in reversed(ops):
        if ends(op) or op.id in found:
            found |= {op.id, *after[op.id]}
    return found


def _split(program: Program, cost: Costs) -> Program:
    """The program with gradients split, so that no weight gradient delays an input gradient; the two halves together take as long as the
    whole."""
    return Pipeline((find_pass("split-backward")(), find_pass("overlap-column-backward")())).run(program, cost)[0]


def _stage(rank: _Rank) -> Stage:
    split = rank.program
    parts = Parts(split, {"I", "W"})
    stage, stages = split.pipeline.stage, split.pipeline.num_stages
    if stages == 1:
        return Stage(rank.least(split.ops), 0.0, 0.0, 0.0, rank.between(split.ops, lambda op: True, lambda op: True))
    step = [op for op in split.ops if op.role != "optimize"]
    after = rank.after(split.ops)
    late = _led_to(split.ops, after, lambda op: op.role == "forward" and is_receive(op))
    back = _needed(step, after, lambda op: op.role == "backward" and is_send(op))
    forward, backward, weights = (parts.ops[kind, 0] for kind in "FIW")
    optimizer = sum(rank.took(op) for op in parts.ops["O", 0] if not is_comm(op))

    def starting(op: Op) -> bool:
        return is_receive(op) or not stage

    ids = {op.id for op in (*backward, *weights)}
    rest = backward if stage else [op for op in split.ops if op.id in ids]
    return Stage(
        rank.least(split.ops),
        rank.least(op for op in step if op.id in late and op.id in back),
        rank.between(forward, starting, is_send) if stage + 1 < stages else 0.0,
        rank.between(rest, is_receive, is_send if stage else lambda op: True) + (0 if stage else optimizer),
        0.0,
    )
