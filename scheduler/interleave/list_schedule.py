"""A first order for a pair: a list scheduler that prefers the node that hides most of the communication in flight, under a memory cap.

It postpones fillers only while the rest still fits: after every choice there is memory left to run the postponed fillers, then
backward in program order, then forward. So its order is within the cap if the plain order is.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from interlace.scheduler.interleave.clock import Clock, Node, Stretch
from interlace.scheduler.interleave.live_bytes import PairBytes, Walk
from interlace.scheduler.interleave.local_search import Form

CANDIDATES = 6
"""Number of fillers that each decision considers."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of a choice, as shares of the node's own duration.

    Attributes:
        lead: Added for a node that later communication waits for.
        save: Subtracted for a node that hides communication well, while none is in flight.
        backward: Added for a node of backward.
        keep: Whether fillers wait until the last input gradient is computed: the gradient then leaves as early as it can.
    """

    lead: float = 0.1
    save: float = 0.0
    backward: float = 0.0
    keep: bool = False


TRIES = (Weights(), Weights(0.3), Weights(0.0, 0.2), Weights(0.1, 0.2, 0.1), Weights(0.6, 0.0, 0.2), Weights(keep=True))
"""Weights that are tried; the local search starts from the fastest order."""


class ListScheduler:
    """Builds one order."""

    def __init__(self, nodes: Sequence[Node], stretch: Stretch, form: Form, table: PairBytes, cap_bytes: int, weights: Weights,
                 hides: Sequence[float]) -> None:  # fmt: skip
        self.nodes, self.form, self.cap, self.weights, self.hides = nodes, form, cap_bytes, weights, hides
        self.stretch, self.table = stretch, table
        self.clock = Clock(nodes, stretch)
        self.walk = Walk(table, [node.forward for node in nodes])
        self.pending = [len(set(node.deps)) for node in nodes]
        self.users: list[list[int]] = [[] for _ in nodes]
        for k, node in enumerate(nodes):
            for dep in set(node.deps):
                self.users[dep].append(k)
        self.issued = bytearray(len(nodes))
        self.order: list[int] = []
        self.lines: dict[str, list[int]] = {}
        for k in sorted((k for k, node in enumerate(nodes) if not node.filler), key=lambda k: nodes[k].forward):
            self.lines.setdefault(nodes[k].side, []).append(k)
        """Nodes other than fillers, by part; backward before forward."""
        self.backward = [side for side, line in self.lines.items() if not nodes[line[0]].forward]
        self.at = dict.fromkeys(self.lines, 0)
        self.fillers = [k for k, n in enumerate(nodes) if n.filler and not self.pending[k]]
        self.distance = self._comm_distance()
        self.backward_peak, self.largest = self._plain_backward()

    def run(self) -> list[int]:
        """The order."""
        while len(self.order) < len(self.nodes):
            self._issue(self._choose())
        return self.order

    def _choose(self) -> int:
        heads = self._heads()
        ready = [k for k in heads if not self.pending[k]]
        comm = next((k for k in ready if self.nodes[k].stream and self._fits(k)), None)
        if comm is not None:
            return comm
        open_heads = [k for k in ready if not self.nodes[k].stream and not self.clock.blocked(k)]
        if self.weights.keep and ready and any(self._head(side) is not None for side in self.backward):
            return next((k for k in (*open_heads, *ready) if self._fits(k)), ready[0])
        flying = bool(self.clock.flying)  # the one that was issued first waits for none
        if self.form == "dx-first" and open_heads:
            choices = open_heads
        elif flying:
            choices = [*open_heads, *self._free_fillers()]
        else:
            choices = open_heads
        rank = self._gain if flying else self._alone
        for k in sorted(choices, key=lambda k: (-rank(k), k)) if len(choices) > 1 else choices:
            if self._fits(k):
                return k
        if self.fillers:
            return next(iter(self._free_fillers()), self.fillers[0])
        return next((k for k in ready if self._fits(k)), ready[0])

    def _free_fillers(self) -> list[int]:
        """Fillers that wait for no communication in flight."""
        return [k for k in self.fillers[:CANDIDATES] if not self.clock.blocked(k)]

    def _fits(self, node: int) -> bool:
        """Whether all remaining nodes still fit into the memory after a node."""
        walk = self.walk
        need = walk.need(node)
        if walk.live + need > self.cap:
            return False
        after = walk.live + need - walk.frees(node)
        postponed = self.largest if self.fillers and not (len(self.fillers) == 1 and self.fillers[0] == node) else 0
        if after + postponed > self.cap:
            return False
        if self.nodes[node].forward:
            return walk.forward + after - walk.live + self._backward_ahead() <= self.cap
        return not walk.forward or walk.forward + self._backward_ahead() <= self.cap

    def _backward_ahead(self) -> int:
        """Peak of live memory of backward from its next operation on, in program order."""
        heads = [head for side in self.backward if (head := self._head(side)) is not None]
        return max((self.backward_peak[head] for head in heads), default=self.backward_peak[len(self.nodes)])

    def _plain_backward(self) -> tuple[list[int], int]:
        """For each node of backward the peak of live memory from it on in program order; and the most that a filler allocates."""
        walk = Walk(self.table, self.walk.is_forward)
        peaks = [0] * (len(self.nodes) + 1)
        line, largest = [k for k, node in enumerate(self.nodes) if not node.forward], 0
        for k in line:
            need = walk.need(k)
            largest = max(largest, need) if self.nodes[k].filler else largest
            peaks[k] = walk.live + need
            walk.run(k)
        ahead = walk.live
        peaks[len(self.nodes)] = ahead
        for k in reversed(line):
            ahead = peaks[k] = max(peaks[k], ahead)
        return peaks, largest

    def _heads(self) -> list[int]:
        """The next operation of each part; in `dx-first` a part waits for the end of those before it, except for receives that a
        send must follow."""
        heads = (head for side in self.lines if (head := self._head(side)) is not None)
        if self.form == "mixed":
            return list(heads)
        chain = next(heads, None)
        if chain is None:
            return []
        ahead = [dep for dep in self.nodes[chain].deps if self.nodes[dep].forward and not self.issued[dep]]
        return [chain, *(dep for dep in ahead if dep != chain)]

    def _head(self, side: str) -> int | None:
        line = self.lines[side]
        while self.at[side] < len(line) and self.issued[line[self.at[side]]]:
            self.at[side] += 1
        return line[self.at[side]] if self.at[side] < len(line) else None

    def _gain(self, node: int) -> float:
        """Communication time that a node hides, less its slow-down, as a share of its own duration."""
        item = self.nodes[node]
        if not item.dur:
            return 2.0
        gain = 0.0
        for head in self.clock.heads():
            slow, other = self.stretch(item.category, self.nodes[head.node].category)
            together = min(item.dur * slow, head.left * other)
            gain += together / other - together * (1 - 1 / slow)
        gain /= item.dur
        if not item.filler:
            gain += self.weights.lead
        return gain + (0.0 if item.forward else self.weights.backward)

    def _alone(self, node: int) -> float:
        """Minus the compute time to the next communication; nodes that hide communication well count as further away."""
        return -self.distance[node] * (1 + self.weights.save * self.hides[node])

    def _comm_distance(self) -> list[float]:
        """Compute time from each node to the next communication of its side."""
        far = [0.0] * len(self.nodes)
        for line in self.lines.values():
            ahead = 1e18
            for k in reversed(line):
                ahead = 0.0 if self.nodes[k].stream else ahead + self.nodes[k].dur
                far[k] = ahead
        return far

    def _issue(self, node: int) -> None:
        self.issued[node] = 1
        self.order.append(node)
        self.clock.run(node)
        self.walk.run(node)
        if self.nodes[node].filler:
            self.fillers.remove(node)
        for user in self.users[node]:
            self.pending[user] -= 1
            if not self.pending[user] and self.nodes[user].filler:
                heapq.heappush(self.fillers, user)
        self.fillers.sort()
