"""The overlap clock of planners: one rank, one compute stream, communication on streams of its own, and their interference.

`scheduler/simulate/simulator.py` is the specification of the overlap clock. This one simplifies it: peers are always ready, the
host issues in no time, times are floating-point, communications that run at once share bandwidth equally, and a computation is
stretched by the largest factor beside it. Planners run it thousands of times.

It exists twice, in two modules that do not import each other's arithmetic. `Clock` runs a complete order node by node, for the list
scheduler, which decides while the clock runs, and for the duration of a finished order. `local_search._Run` starts at any index of an
order from stored communications in flight and stops where they are as before, which makes a move of the search much cheaper than
a complete run; it looks factors up in tables, and starts communication as soon as its data are there, wherever it is listed. The two
round differently in the last bits, so replacing one by the other could change plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_EPS = 1e-6


@dataclass(slots=True)
class Node:
    """One operation of one part of a job.

    Attributes:
        op: Operation id.
        side: Label of its part.
        dur: Duration alone, in nanoseconds.
        category: Interference category of the cost model.
        stream: Empty for compute, otherwise the communication stream.
        deps: Indices of nodes that it comes after; dependencies through operations that cost nothing are included.
        filler: Whether only weight gradients and their sums depend on it.
        forward: Whether its part is a forward.
        leaves: Number of sends to other stages that start when it has ended.
        send_ns: Duration of the longest of these sends.
        receive: Whether it is a receive from another stage.
    """

    op: int
    side: str
    dur: float
    category: str
    stream: str
    deps: list[int] = field(default_factory=list)
    filler: bool = False
    forward: bool = False
    leaves: int = 0
    send_ns: float = 0.0
    receive: bool = False


@dataclass(slots=True)
class Flight:
    """A communication in flight, and how much of its duration alone is left."""

    node: int
    left: float


Stretch = Callable[[str, str], tuple[float, float]]


class Clock:
    """Runs nodes in the order they are given and keeps the time.

    Attributes:
        now: Time of the compute stream, in nanoseconds.
    """

    def __init__(self, nodes: Sequence[Node], stretch: Stretch) -> None:
        self.nodes, self.stretch = nodes, stretch
        self.now = 0.0
        self.queues: dict[str, list[Flight]] = {}
        self.flying: set[int] = set()

    def run(self, node: int) -> None:
        """Run one node: wait for what it depends on and compute, or put a communication in flight."""
        item = self.nodes[node]
        if item.stream:
            self.queues.setdefault(item.stream, []).append(Flight(node, item.dur))
            self.flying.add(node)
            return
        if self.flying:
            for dep in item.deps:
                self.wait(dep)
        self._compute(item)

    def wait(self, node: int) -> None:
        """Let time pass until a communication in flight has ended."""
        while node in self.flying:
            self._idle()

    def finish(self) -> float:
        """Wait for everything in flight; returns the time."""
        for node in list(self.flying):
            self.wait(node)
        return self.now

    def blocked(self, node: int) -> bool:
        """Whether the node waits for a communication in flight."""
        return not self.flying.isdisjoint(self.nodes[node].deps)

    def heads(self) -> list[Flight]:
        """Communications that run now: the first of each stream, if it waits for none in flight."""
        return [queue[0] for queue in self.queues.values() if queue and not self.blocked(queue[0].node)] if self.flying else []

    def _compute(self, item: Node) -> None:
        left = item.dur
        while left > _EPS:
            heads = self.heads()
            if not heads:
                self.now += left
                break
            factors = [self.stretch(item.category, self.nodes[head.node].category) for head in heads]
            slow = max(factor for factor, _ in factors)
            rates = [1.0 / (other * len(heads)) for _, other in factors]
            step = min(left * slow, *(head.left / rate for head, rate in zip(heads, rates, strict=True)))
            left -= step / slow
            self._advance(heads, rates, step)

    def _idle(self) -> None:
        heads = self.heads()
        rates = [1.0 / len(heads)] * len(heads)
        self._advance(heads, rates, min(head.left * len(heads) for head in heads))

    def _advance(self, heads: list[Flight], rates: list[float], step: float) -> None:
        self.now += step
        for head, rate in zip(heads, rates, strict=True):
            head.left -= step * rate
            if head.left <= _EPS:
                self.queues[self.nodes[head.node].stream].pop(0)
                self.flying.discard(head.node)


def duration(nodes: Sequence[Node], order: Sequence[int], stretch: Stretch) -> float:
    """Time of an order, in nanoseconds."""
    clock = Clock(nodes, stretch)
    for node in order:
        clock.run(node)
    return clock.finish()


def duration_and_sends(nodes: Sequence[Node], order: Sequence[int], stretch: Stretch) -> tuple[float, float]:
    """Time of an order, and the sum of the times at which its sends to other stages start."""
    clock, sent = Clock(nodes, stretch), 0.0
    for node in order:
        clock.run(node)
        sent += nodes[node].leaves * clock.now
    return clock.finish(), sent


def serial_duration(nodes: Sequence[Node]) -> float:
    """Time of all nodes one after the other, communication too."""
    return sum(node.dur for node in nodes)
