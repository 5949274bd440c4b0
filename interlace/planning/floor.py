"""A step that no schedule can pass, with the communication that nothing hides; memory counts nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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
"""Prices of communication that are tried: each gives a bound."""
AT_ONCE = 8
"""Collectives that run at once at most, in groups of their own."""
ROUNDED = 1e-5
"""The simulator rounds paces up: a long step may be a millionth shorter than the work in it."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage, in nanoseconds.

    Attributes:
        whole: The step of its rank if it waited for nobody.
        late: The same of what needs a message of the stage before it.
        middle: Forwards and input gradients of all micro-batches, of what needs such a message and is needed by one back.
        fill, drain: From a message to the message that it leads to, this one included: forward, and input gradients. At the start of the
            pipeline from the start of the step, and to its end.
        chain: The longest chain of operations of one micro-batch and the optimizer, on a stage without messages.
    """

    whole: float
    late: float
    middle: float
    fill: float
    drain: float
    chain: float


class Floors(NamedTuple):
    """What a step takes at least, in nanoseconds.

    Attributes:
        own: In this layout.
        shared: In any that differs from it in what is sharded over replicas, or computes more again. Only what lies between the data of a
            micro-batch and one of its products counts. Parameters that are gathered, gradients that are accumulated and reduced, and the
            optimizer do not: sharding may leave a rank a part of them.
    """

    own: int
    shared: int


def floors_of(programs: Sequence[Program], cost: Costs) -> Floors:
    """Of one rank of each stage.

    Each rank computes and communicates all that it must, with each collective beneath the computation that suffers least. A stage starts
    when the first message reaches it, through a forward of all stages before it with its collectives, and behind its last input gradients
    lie those of the stages before it. Collectives that `narrow-gathers` may replace count nothing.
    """
    splits = [_split(program, cost) for program in sorted(programs, key=lambda program: program.pipeline.stage)]
    own = [_stage(_Rank(split, cost)) for split in splits]
    return Floors(_floor_ns(own), _floor_ns([_stage(_Rank(split, cost, _between_data_and_products(split))) for split in splits]))


def occupied(program: Program, cost: Costs) -> Floors:
    """What one rank takes at least, whatever the others do."""
    ranks = _Rank(program, cost), _Rank(program, cost, _between_data_and_products(program))
    own, shared = (int(rank.least(program.ops) * (1 - ROUNDED)) for rank in ranks)
    return Floors(own, shared)


def _floor_ns(stages: Sequence[Stage]) -> int:
    fill, drain, longest = 0.0, 0.0, 0.0
    for s, mine in enumerate(stages):
        longest = max(longest, mine.whole, mine.chain, fill + mine.late, fill + mine.middle + drain if s else 0.0)
        fill, drain = fill + mine.fill, drain + mine.drain
    return int(longest * (1 - ROUNDED))


def least_ns(computation: Counter[str], collectives: Counter[str], cost: Costs) -> float:
    """Time in which a device can do both, by category: computation is on one stream, and collectives share what they transfer with.

    While n collectives run beside an operation both take longer. At a price p of a nanosecond of communication, a nanosecond in which both
    run costs 1 - p (communication that is done in it), times what the operation is stretched by for each nanosecond of its own. What is
    least over n, 0 included, is paid at least, whatever runs beside what. Any price bounds the time.
    """
    alone, talk = sum(computation.values()), sum(collectives.values())
    found = float(max(alone, talk))
    if not talk:
        return found
    pairs = {kind: [cost.stretch_between(kind, beside) for beside in sorted(collectives)] for kind in computation}
    for price in (k / PRICES for k in range(1, PRICES)):
        total = price * talk
        for kind, took in computation.items():
            beside = (
                (1 - price * n / (n + max(1.0, each.beside) - 1)) * (1 + n * (max(1.0, each.op) - 1))
                for each in pairs[kind]
                for n in range(1, AT_ONCE + 1)
            )
            total += took * min(1.0, *beside)
        found = max(found, total)
    return found


def _between_data_and_products(program: Program) -> set[int]:
    """Ids of the computation of a micro-batch that its data leads to, or what other stages make of it, and that leads to a product."""
    values, ops = tables_of(program)[0], [op for op in program.ops if op.role != "optimize"]
    after, first = _reads(Graph(program), ops), program.pipeline.stage == 0

    def is_data(op: Op) -> bool:
        return first and op.name == DATA and not all(values[each].persistable for each in op.results)

    fed = _led_to(ops, after, lambda op: is_receive(op) or is_data(op))
    needed = _needed(ops, after, lambda op: bool(products_of(op, values)))
    return {op.id for op in ops if op.id in fed & needed and not is_comm(op)}


def _reads(graph: Graph, ops: Sequence[Op]) -> dict[int, set[int]]:
    """Op id -> ids of those whose results it reads: the order that holds whatever communication there is besides."""
    return {op.id: {graph.producer[each] for each in op.operands if each in graph.producer} for op in ops}


class _Rank:
    """Times of one rank's operations; `counted`: ids of those that count, and then only what they read makes an order between them."""

    def __init__(self, program: Program, cost: Costs, counted: set[int] | None = None) -> None:
        self.program, self.cost, self.counted, self.tables = program, cost, counted, tables_of(program)
        self.graph, self.count = Graph(program), program.pipeline.num_micro_batches
        self._narrowed = {site.gather.id for site in sites(self.graph).values()}

    def took(self, op: Op) -> int:
        """An operation, once."""
        if self.counted is not None and op.id not in self.counted:
            return 0
        return 0 if op.name in NO_KERNEL or op.id in self._narrowed else self.cost.op_time(op, *self.tables).dur_ns

    def after(self, ops: Sequence[Op]) -> dict[int, set[int]]:
        """Op id -> ids of those that it comes after."""
        return dependencies(self.graph, ops) if self.counted is None else _reads(self.graph, ops)

    def least(self, ops: Iterable[Op]) -> float:
        """What these take at least in a step."""
        computation, collectives = Counter[str](), Counter[str]()
        for op in ops:
            into = computation if not is_comm(op) else collectives if is_collective(op) else None
            if into is not None and (took := self.took(op)):
                into[self.cost.category(op, *self.tables)] += took * (1 if op.role == "optimize" else self.count)
        return least_ns(computation, collectives, self.cost)

    def between(self, ops: Sequence[Op], starts: Callable[[Op], bool], ends: Callable[[Op], bool]) -> float:
        """From operations to operations: the longest chain, or all computation on the way, with what it ends with."""
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
    """With gradients split: their parts take as long as the whole, and a weight gradient is in nobody's way."""
    return Pipeline((find_pass("split-backward")(), find_pass("overlap-column-backward")())).run(program, cost)[0]


def _stage(rank: _Rank) -> Stage:
    split = rank.program
    parts = Parts(split, {"I", "W"})
    stage, stages = split.pipeline.stage, split.pipeline.num_stages
    if stages == 1:
        return Stage(rank.least(split.ops), 0.0, 0.0, 0.0, 0.0, rank.between(split.ops, lambda op: True, lambda op: True))
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
        rank.least(op for op in split.ops if op.id in late),
        rank.least(op for op in step if op.id in late and op.id in back),
        rank.between(forward, starting, is_send) if stage + 1 < stages else 0.0,
        rank.between(rest, is_receive, is_send if stage else lambda op: True) + (0 if stage else optimizer),
        0.0,
    )
