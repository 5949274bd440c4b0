"""Waits in a circle over all ranks.

Only communication can wait for another rank, so the graph holds communication alone: the partners of a call are one node,
and the clocks of `order` say which earlier calls of a rank a call waits for. Cost O(calls x streams).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from interlace.ir.kinds import is_send
from interlace.scheduler.hazards.comm import Calls
from interlace.scheduler.hazards.finding import Finding, Where, stream_text, where
from interlace.scheduler.hazards.order import NEVER, Trace
from interlace.scheduler.hazards.place import Place
from interlace.scheduler.hazards.steps import HOST

Node = int


@dataclass(slots=True)
class Waits:
    """Who waits for whom: node -> `(node it waits for, rank place, earlier item, item)`; a call's partners are one node."""

    edges: dict[Node, list[tuple[Node, int, int, int]]] = field(default_factory=lambda: defaultdict(list))
    node: list[dict[int, Node]] = field(default_factory=list)
    count: int = 0


def circles(all_calls: Sequence[Calls], traces: Sequence[Trace], place: Place) -> list[Finding]:
    """A finding with one cycle where some communication can never start; channels must match already."""
    waits = Waits()
    _number(waits, all_calls, traces, place)
    for k, (calls, trace) in enumerate(zip(all_calls, traces, strict=True)):
        _local_waits(waits, k, calls, trace, place)
    stuck = _stuck(waits)
    if not stuck:
        return []
    return [_describe(_cycle(waits, stuck), len(stuck), all_calls, traces)]


def _number(waits: Waits, all_calls: Sequence[Calls], traces: Sequence[Trace], place: Place) -> None:
    """Give every call its node; a buffered send and its receive get two, with a wait between them."""
    meeting: dict[tuple[str, int], Node] = {}
    sent: dict[tuple[str, int], tuple[Node, int, int]] = {}
    received: list[tuple[tuple[str, int], Node, int, int]] = []
    for k, (calls, trace) in enumerate(zip(all_calls, traces, strict=True)):
        nodes: dict[int, Node] = {}
        for key, channel in calls.channels.items():
            for number, item in enumerate(channel.items):
                size = calls.signatures[channel.calls[number]][1]
                apart = ":" in key and 0 <= size <= place.p2p_buffer_bytes
                node = waits.count if apart else meeting.setdefault((key, number), waits.count)
                waits.count += node == waits.count
                at = trace.steps.index[item]
                nodes[at] = node
                if apart and is_send(calls.ops[item[0]]):
                    sent[key, number] = (node, k, at)
                elif apart:
                    received.append(((key, number), node, k, at))
        waits.node.append(nodes)
    for name, node, k, at in received:
        if name in sent:
            waits.edges[node].append((sent[name][0], k, NEVER, at))


def _local_waits(waits: Waits, k: int, calls: Calls, trace: Trace, place: Place) -> None:
    """Earlier calls of the same rank that a call waits for: the last one known of each stream, and of its ring."""
    steps = trace.steps
    nodes = waits.node[k]
    by_stream: list[list[int]] = [[] for _ in steps.streams]
    ring: dict[int, int] = {}
    for item in sorted(nodes):
        clock, stream = trace.clock[item], steps.stream[item]
        sources = [_last_at(earlier, clock[s] if s != stream else item) for s, earlier in enumerate(by_stream)]
        group = steps.program.ops[steps.op[item]].group
        sources.append(ring.get(group, NEVER) if place.ring_is_serial else NEVER)
        waits.edges[nodes[item]] += [
            (nodes[source], k, source, item) for source in dict.fromkeys(sources) if source != NEVER
        ]
        ring[group] = item
        by_stream[stream].append(item)


def _last_at(items: list[int], bound: int) -> int:
    """The last item of an ascending list that is not beyond a bound."""
    place = bisect_right(items, bound)
    return items[place - 1] if place else NEVER


def _stuck(waits: Waits) -> set[Node]:
    """Nodes that never start (Kahn's algorithm)."""
    missing = [0] * waits.count
    after: dict[Node, list[Node]] = defaultdict(list)
    for node, edges in waits.edges.items():
        for source, *_ in edges:
            missing[node] += 1
            after[source].append(node)
    ready = [node for node in range(waits.count) if not missing[node]]
    done = 0
    while ready:
        done += 1
        for node in after[ready.pop()]:
            missing[node] -= 1
            if not missing[node]:
                ready.append(node)
    return {node for node in range(waits.count) if missing[node]} if done < waits.count else set()


def _cycle(waits: Waits, stuck: set[Node]) -> list[tuple[int, int, int]]:
    """A circle of waits `(rank place, earlier item, item)`, each for the next one's item, staying on a rank where it can."""
    walk: dict[Node, int] = {}
    steps: list[tuple[int, int, int]] = []
    node, rank = min(stuck), -1
    while node not in walk:
        walk[node] = len(steps)
        edges = [edge for edge in waits.edges[node] if edge[0] in stuck]
        node, rank, earlier, item = next((edge for edge in edges if edge[1] == rank), edges[0])
        steps.append((rank, earlier, item))
    return _shortened(steps[walk[node] :])


def _shortened(steps: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Waits of one rank behind each other as one wait."""
    short: list[tuple[int, int, int]] = []
    for k, earlier, item in steps:
        if short and short[-1][:2] == (k, item):
            short[-1] = (k, earlier, short[-1][2])
        else:
            short.append((k, earlier, item))
    if len(short) > 2 and short[-1][:2] == (short[0][0], short[0][2]):
        k, _, item = short.pop()
        short[0] = (k, short[0][1], item)
    return short


def _describe(cycle: list[tuple[int, int, int]], stuck: int, all_calls: Sequence[Calls], traces: Sequence[Trace]) -> Finding:
    lines, items = [], []
    for k, earlier, item in cycle:
        rank, trace = all_calls[k].program.rank, traces[k]
        here = _where(trace, item, rank)
        items.append(here)
        if earlier == NEVER:
            lines.append(f"{here} waits for its send")
            continue
        lines.append(f"{here} waits for {_where(trace, earlier, rank)} ({_reason(trace, earlier, item)})")
    last_ranks = tuple(sorted({item.rank for item in items}))
    message = "ranks wait in a circle:\n    " + "\n    and its partner ".join(lines)
    remedy = (f"{stuck} communications never start; put one of these pairs in the other order, or on two streams "
              "(a receive in front of the send its neighbour waits behind)")  # fmt: skip
    return Finding("deadlock", last_ranks, tuple(items), message, remedy)


def _where(trace: Trace, item: int, rank: int) -> Where:
    steps = trace.steps
    return where(rank, steps.program.ops[steps.op[item]], steps.micro_batch[item])


def _reason(trace: Trace, earlier: int, item: int) -> str:
    """Why an item waits for an earlier one: same stream, same ring, or the chain of events and data between them."""
    steps = trace.steps
    if steps.stream[earlier] == steps.stream[item]:
        return f"ahead of it on {stream_text(steps.program.ops[steps.op[item]].stream)}"
    if not trace.before(earlier, item):
        ops = [steps.program.ops[steps.op[k]] for k in (earlier, item)]
        return "next on the same ring" if ops[0].group == ops[1].group else "ordered behind it"
    path = _path(trace, earlier, item)
    return "through " + ", ".join(path) if path else "ordered behind it"


def _path(trace: Trace, earlier: int, item: int) -> list[str]:
    """The items and reasons that carry an order from one stream to another, from the later item back."""
    steps = trace.steps
    previous: list[int] = [NEVER] * len(steps.streams)
    behind: dict[int, int] = {}
    for k in range(item + 1):
        if steps.stream[k] != HOST:
            behind[k] = previous[steps.stream[k]]
            previous[steps.stream[k]] = k
    came: dict[int, tuple[int, str]] = {}
    queue = [item]
    for at in queue:
        if at <= earlier or steps.stream[at] == steps.stream[earlier]:
            if steps.stream[at] == steps.stream[earlier] and at >= earlier:
                return _hops(trace, came, at, item)
            continue
        for source, why in [*trace.joins.get(at, ()), (behind[at], "")]:
            if source != NEVER and source not in came and source != item:
                came[source] = (at, why)
                queue.append(source)
    return []


def _hops(trace: Trace, came: dict[int, tuple[int, str]], at: int, item: int) -> list[str]:
    hops = []
    while at != item:
        nxt, why = came[at]
        if why:
            op = trace.steps.program.ops[trace.steps.op[nxt]]
            hops.append(f"{why} to #{op.id} {op.name}" + (f" ({op.layer})" if op.layer else ""))
        at = nxt
    return hops[:6]
