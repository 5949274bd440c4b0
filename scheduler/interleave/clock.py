"""The overlap clock of planners: one rank, one compute stream, communication on streams of its own, and their interference.

`scheduler/simulate/simulator.py` is the specification of the overlap clock. This one simplifies it: peers are always ready, the
host issues in no time, times are floating-point, communications that run at once share bandwidth equally, and a computation is
stretched by the largest factor beside it. As there, a matrix product that began before a communication was ready delays it. Planners run
this clock thousands of times.

There are two implementations, in modules that share no arithmetic. The one here runs a complete order node by node, for the list
scheduler, which decides while the clock runs, and for the duration of a finished order. `local_search._Run` starts at any index of an
order from stored communications in flight and stops where these are as before, so a move of the search costs much less than a complete
run; it looks up factors in tables, and starts communication as soon as its data are ready, wherever it is listed. The two round
differently in the last bits, so replacing one with the other could change plans.

The functions over columns (`columns.py`) run as plain Python on lists, or compiled on arrays (`compiled.py`), with the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from interlace.cost_model.interference import START_NS, STILL
from interlace.scheduler.interleave.columns import Columns, Places, Times, Whole, rows

EPS = 1e-6


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
        forward: Whether it belongs to a forward.
        leaves: Number of sends to other stages that start when it ends.
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


Factors = tuple[float, float, bool]
Stretch = Callable[[str, str], Factors]
"""Categories of two nodes that run together -> the factors on both times, and whether the first delays the second if it began first
(`cost_model.interference.Stretch`)."""


def columns_of(nodes: Sequence[Node], stretch: Stretch) -> Columns:
    """Nodes, and nothing in flight, as lists. O(nodes + categories^2)"""
    streams = {stream: k for k, stream in enumerate(dict.fromkeys(node.stream for node in nodes if node.stream))}
    categories = {category: k for k, category in enumerate(dict.fromkeys(node.category for node in nodes))}
    first, dep = rows([list(dict.fromkeys(node.deps)) for node in nodes])
    factors = [stretch(a, b) for a in categories for b in categories]
    whole = {
        "leaves": [node.leaves for node in nodes],
        "forward": [int(node.forward) for node in nodes],
        "filler": [int(node.filler) for node in nodes],
        "stream": [streams.get(node.stream, -1) for node in nodes],
        "category": [categories[node.category] for node in nodes],
        "dep_first": first,
        "dep": dep,
        "flies": [0] * len(nodes),
        "behind": [-1] * len(nodes),
        **dict.fromkeys(("front", "back", "used", "heads"), [-1] * len(streams)),
        "num_flying": [0],
        "num_used": [0],
    }
    times = {
        "dur": [float(node.dur) for node in nodes],
        "left": [0.0] * len(nodes),
        "slow": [float(slow) for slow, _, _ in factors],
        "other": [float(other) for _, other, _ in factors],
        "holds": [float(holds) for _, _, holds in factors],
        "began": [-1.0] * len(nodes),
        "now": [0.0],
        "rates": [0.0] * len(streams),
    }
    return Columns([], [], Places()).with_parts(whole, times, num_nodes=len(nodes), num_categories=len(categories))


def run_node(whole: Whole, times: Times, at: Places, node: int) -> None:
    """Run one node: wait for what it depends on and compute, or put a communication in flight."""
    stream = whole[at.stream + node]
    if stream >= 0:
        _take_off(whole, times, at, node, stream)
        return
    if whole[at.num_flying]:
        for k in range(whole[at.dep_first + node], whole[at.dep_first + node + 1]):
            wait_for(whole, times, at, whole[at.dep + k])
    _compute(whole, times, at, node)


def wait_for(whole: Whole, times: Times, at: Places, node: int) -> None:
    """Let time pass until a communication in flight has ended."""
    while whole[at.flies + node]:
        count = find_heads(whole, times, at)
        rate = 1.0 / count
        step = times[at.left + whole[at.heads]] * count
        for k in range(count):
            times[at.rates + k] = rate
            step = min(step, times[at.left + whole[at.heads + k]] * count)
        _advance(whole, times, at, count, step)


def finish(whole: Whole, times: Times, at: Places) -> float:
    """Wait for everything in flight; returns the time."""
    for node in range(at.num_nodes):
        wait_for(whole, times, at, node)
    now: float = times[at.now]
    return now


def is_blocked(whole: Whole, times: Times, at: Places, node: int) -> bool:
    """Whether the node waits for a communication in flight."""
    if whole[at.num_flying]:
        for k in range(whole[at.dep_first + node], whole[at.dep_first + node + 1]):
            if whole[at.flies + whole[at.dep + k]]:
                return True
    return False


def find_heads(whole: Whole, times: Times, at: Places) -> int:
    """Put the communications that run now into `heads`: the first of each stream, if it waits for none in flight. Returns their number."""
    found = 0
    for k in range(whole[at.num_used] if whole[at.num_flying] else 0):
        head = whole[at.front + whole[at.used + k]]
        if head >= 0 and not is_blocked(whole, times, at, head):
            whole[at.heads + found] = head
            found += 1
            if times[at.began + head] < 0.0:
                times[at.began + head] = times[at.now]
    return found


def _take_off(whole: Whole, times: Times, at: Places, node: int, stream: int) -> None:
    if whole[at.front + stream] >= 0:
        whole[at.behind + whole[at.back + stream]] = node
    else:
        whole[at.front + stream] = node
        if whole[at.back + stream] < 0:
            whole[at.used + whole[at.num_used]] = stream
            whole[at.num_used] += 1
    whole[at.back + stream] = node
    times[at.left + node] = times[at.dur + node]
    whole[at.flies + node] = 1
    whole[at.num_flying] += 1


def _compute(whole: Whole, times: Times, at: Places, node: int) -> None:
    left, row, begin = times[at.dur + node], whole[at.category + node] * at.num_categories, times[at.now]
    while left > EPS:
        count = find_heads(whole, times, at)
        if not count:
            times[at.now] += left
            break
        slow = 1.0
        for k in range(count):
            head = whole[at.heads + k]
            pair = row + whole[at.category + head]
            other = times[at.other + pair]
            if times[at.holds + pair] and begin <= times[at.began + head] + START_NS:
                other = STILL
            else:
                slow = max(slow, times[at.slow + pair])
            times[at.rates + k] = 1.0 / (other * count)
        step = left * slow
        for k in range(count):
            head = whole[at.heads + k]
            step = min(step, times[at.left + head] / times[at.rates + k])
        left -= step / slow
        _advance(whole, times, at, count, step)


def _advance(whole: Whole, times: Times, at: Places, count: int, step: float) -> None:
    times[at.now] += step
    for k in range(count):
        head = whole[at.heads + k]
        times[at.left + head] -= step * times[at.rates + k]
        if times[at.left + head] <= EPS:
            whole[at.front + whole[at.stream + head]] = whole[at.behind + head]
            whole[at.flies + head] = 0
            whole[at.num_flying] -= 1


def run_order(whole: Whole, times: Times, at: Places, order: Sequence[int]) -> tuple[float, float]:
    """Duration of an order, and the sum of the times at which its sends to other stages start, in nanoseconds."""
    sent = 0.0
    for node in order:
        run_node(whole, times, at, node)
        sent += whole[at.leaves + node] * times[at.now]
    return finish(whole, times, at), sent


def run_stamped(whole: Whole, times: Times, at: Places, order: Sequence[int], after: Times) -> float:
    """Duration of an order, in nanoseconds; writes the time of the compute stream after each of its nodes to `after`. `[order]`"""
    for k in range(len(order)):
        run_node(whole, times, at, order[k])
        after[k] = times[at.now]
    return finish(whole, times, at)


HELPERS = (run_node, wait_for, finish, is_blocked, find_heads, _take_off, _compute, _advance)
"""What `run_order` and the list scheduler call; the compiled engine registers them with numba."""


class Clock:
    """A clock that runs nodes one by one, in the order of the calls."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns.copy()

    def run(self, node: int) -> None:
        """As `run_node`."""
        run_node(*self.columns, node)

    def wait(self, node: int) -> None:
        """As `wait_for`."""
        wait_for(*self.columns, node)

    def finish(self) -> float:
        """As `finish`."""
        return finish(*self.columns)

    def blocked(self, node: int) -> bool:
        """As `is_blocked`."""
        return is_blocked(*self.columns, node)
