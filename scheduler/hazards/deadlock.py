"""Deadlocks: cycles of waits over all ranks.

Only communication can wait for another rank, so the graph consists of communication calls: the matching calls of partners form one node,
and the skeleton of a rank lists the earlier calls that each call waits for. Ranks with the same skeleton are first merged into one
actor. Every cycle of the world is also a cycle of the merged graph, so if that has none, the proof is complete, at the cost of one rank
per stage. A cycle of the merged graph need not be one of the world; if there is one, its calls are checked rank by rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from interlace.ir.target import UNBOUNDED, Target
from interlace.scheduler.hazards.call_names import CallAnswer, CallQuery
from interlace.scheduler.hazards.channels import NOBODY, World
from interlace.scheduler.hazards.finding import Finding
from interlace.scheduler.hazards.happens_before import NO_ITEM
from interlace.scheduler.hazards.skeleton import Channel, Skeleton

Node = int
Endpoint = tuple[int, Channel]
"""The channel of one actor. An actor is a rank, or all ranks with the same skeleton."""


class Edge(NamedTuple):
    """A wait for a node, because of `call`, which its actor issues after `earlier` (`NO_ITEM` if a receive waits for its send)."""

    node: Node
    actor: int
    earlier: int
    call: int


@dataclass(slots=True)
class Waits:
    """The graph of waits: for each node its calls `(actor, call)`, and the edges to nodes that it waits for."""

    nodes: dict[Node, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    edges: dict[Node, list[Edge]] = field(default_factory=lambda: defaultdict(list))


@dataclass(slots=True, frozen=True)
class Circle:
    """A cycle, in which each wait is for the call of the next one, and the number of communications that never start."""

    waits: list[CallQuery]
    stuck: int


def circle(world: World, target: Target) -> Circle | None:
    """A cycle of waits; None if every communication can start. Partners must issue matching calls."""
    folded = _waits(world.skeletons, world, world.kind, target, None)
    stuck = _stuck(folded)
    if not stuck:
        return None
    suspects = {call for node in stuck for call in folded.nodes[node]}
    ranks = list(world.comms)
    allowed = [{call for actor, call in suspects if actor == world.kind[rank]} for rank in ranks]
    skeletons = [world.skeletons[world.kind[rank]] for rank in ranks]
    whole = _waits(skeletons, world, {rank: k for k, rank in enumerate(ranks)}, target, allowed)
    stuck = _stuck(whole)
    return Circle([CallQuery(ranks[actor], call, earlier) for actor, earlier, call in _cycle(whole, stuck)], len(stuck)) if stuck else None


def _waits(
    skeletons: Sequence[Skeleton], world: World, actor: Mapping[int, int], target: Target, allowed: Sequence[set[int]] | None
) -> Waits:
    """The graph over all calls of some actors, or only over those in `allowed`, which is indexed by actor."""
    first = [0, *accumulate(len(skeleton.calls.ring) for skeleton in skeletons)]
    node = list(range(first[-1]))
    sent: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for ends, p2p in _meetings(world, actor):
        rows = [skeletons[at].channels[channel] for at, channel in ends]
        for calls in zip(*rows, strict=True):
            if p2p and _is_buffered([skeletons[at] for at, _ in ends], calls, target):
                sent.append(((ends[0][0], calls[0]), (ends[1][0], calls[1])))
                continue
            roots = [_root(node, first[at] + call) for (at, _), call in zip(ends, calls, strict=True)]
            for root in roots:
                node[_root(node, root)] = _root(node, roots[0])
    waits = Waits()
    for at, skeleton in enumerate(skeletons):
        for call, earlier in enumerate(skeleton.waits):
            if allowed is None or call in allowed[at]:
                mine = _root(node, first[at] + call)
                waits.nodes[mine].append((at, call))
                waits.edges[mine] += [
                    Edge(_root(node, first[at] + source), at, source, call)
                    for source in earlier
                    if allowed is None or source in allowed[at]
                ]
    for (sender, source), (at, call) in sent:
        if allowed is None or (call in allowed[at] and source in allowed[sender]):
            waits.edges[_root(node, first[at] + call)].append(Edge(_root(node, first[sender] + source), at, NO_ITEM, call))
    return waits


def _meetings(world: World, actor: Mapping[int, int]) -> list[tuple[list[Endpoint], bool]]:
    """Sets of channels whose calls start together, and whether they are a send and its receive (in this order)."""
    found: dict[tuple[Endpoint, ...], bool] = {}
    for (_, source, target), by_rank in world.lines.items():
        p2p = source != NOBODY
        ranks = [source, target] if p2p else list(by_rank)
        if len(by_rank) > 1:
            ends = [(actor[rank], by_rank[rank]) for rank in ranks]
            found[tuple(ends if p2p else sorted(set(ends)))] = p2p
    return [(list(ends), p2p) for ends, p2p in found.items()]


def _is_buffered(skeletons: Sequence[Skeleton], calls: Sequence[int], target: Target) -> bool:
    """Whether a send completes before its message is received."""
    sizes = [skeleton.signatures[skeleton.calls.signature[call]][1] for skeleton, call in zip(skeletons, calls, strict=True)]
    return target.p2p_buffer_bytes == UNBOUNDED or 0 <= max(sizes) <= target.p2p_buffer_bytes


def _root(node: list[Node], at: Node) -> Node:
    """The representative of the set that a node was merged into (union-find)."""
    while node[at] != at:
        node[at] = node[node[at]]
        at = node[at]
    return at


def _stuck(waits: Waits) -> set[Node]:
    """Nodes that never start (Kahn's algorithm)."""
    missing = {node: len(waits.edges[node]) for node in waits.nodes}
    after: dict[Node, list[Node]] = defaultdict(list)
    for node, edges in waits.edges.items():
        for edge in edges:
            after[edge.node].append(node)
    ready = [node for node, count in missing.items() if not count]
    while ready:
        done = ready.pop()
        del missing[done]
        for node in after[done]:
            missing[node] -= 1
            if not missing[node]:
                ready.append(node)
    return set(missing)


def _cycle(waits: Waits, stuck: set[Node]) -> list[tuple[int, int, int]]:
    """A cycle of waits `(actor, earlier call, call)`, each for the call of the next one; it stays on one actor as long as possible."""
    walk: dict[Node, int] = {}
    steps: list[tuple[int, int, int]] = []
    node, rank = min(stuck), NOBODY
    while node not in walk:
        walk[node] = len(steps)
        edges = [edge for edge in waits.edges[node] if edge.node in stuck]
        node, rank, earlier, call = next((edge for edge in edges if edge.actor == rank), edges[0])
        steps.append((rank, earlier, call))
    return _shortened(steps[walk[node] :])


def _shortened(steps: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Join consecutive waits of one rank into one; waits of a receive for its send stay."""
    short: list[tuple[int, int, int]] = []
    for k, earlier, item in steps:
        if short and short[-1][:2] == (k, item) and earlier != NO_ITEM:
            short[-1] = (k, earlier, short[-1][2])
        else:
            short.append((k, earlier, item))
    if len(short) > 2 and short[-1][:2] == (short[0][0], short[0][2]) and short[0][1] != NO_ITEM:
        k, _, item = short.pop()
        short[0] = (k, short[0][1], item)
    return short


def circle_text(found: Circle, answers: Sequence[CallAnswer]) -> Finding:
    """A cycle as a finding; `answers` answers `found.waits`."""
    items = tuple(each.call for each in answers)
    message = "ranks wait in a circle:"
    for each, last in zip(answers, (None, *answers), strict=False):
        partner = "" if last is None else "and its partner "
        subject = "which" if last and last.earlier == each.call else f"{partner}{each.call}"
        message += f"\n    {subject} waits for " + (f"{each.earlier} ({each.why})" if each.earlier else "what its partner sends")
    remedy = (
        f"{found.stuck} communications never start; put one of these pairs in the other order, or on two streams "
        "(a receive before the send that its neighbour's receive waits for)"
    )
    return Finding("deadlock", tuple(sorted({item.rank for item in items})), items, message, remedy)
