"""Causes of the waiting and of the peak memory of a simulated step, by layer and kind of operation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from interlace.grouping import grouped
from interlace.ir.arrays import Ints
from interlace.ir.kinds import is_collective, is_p2p, layer_pattern
from interlace.scheduler.memory.live import LiveBytes
from interlace.scheduler.simulate.simulator import Result
from interlace.units import ms, size


class Wait(msgspec.Struct, frozen=True, gc=False):
    """What compute waited for: the kind of operation, or `host`; its layer with `*` for numbers; how long, how often, and why.

    Attributes:
        wait_ns: Time in which no compute ran because of it. In a chain of operations that wait for each other, each has the part of the gap
            that it caused.
        count: Number of such parts.
        group: Ranks of a collective, in words that are the same for all ranks of a stage; empty for other operations.
        why: What it waited for itself; otherwise, for a collective, why nothing else ran meanwhile.
    """

    layer: str
    kind: str
    wait_ns: int
    count: int
    group: str = ""
    why: str = ""


def waits(result: Result, at: int) -> list[Wait]:
    """Gaps in the computation of the rank with index `at`, divided among what delayed the operation after each gap; longest first."""
    sim, times = result.input, result.times
    program = sim.programs[at]
    ops = {op.id: op for op in program.ops}
    groups = {group.id: group.ranks for group in program.groups}
    mine = np.arange(sim.first[at], sim.first[at + 1])
    compute = mine[np.asarray(sim.side[mine]) == 0]
    chain = _Chain(result, at)
    found: dict[tuple[str, str, str, str], list[int]] = {}
    free = 0
    for item in compute[np.argsort(times.start[compute], kind="stable")].tolist():
        for link in chain.back_from(item, free):
            op = ops[int(sim.op[link.item])] if link.item >= 0 else None
            group = group_text(groups.get(op.group, ())) if op and is_collective(op) else ""
            why = link.why or (_why(result, at, link, item) if op and is_collective(op) else "")
            found.setdefault((layer_pattern(op.layer), op.kind, group, why) if op else ("", "host", "", ""), []).append(link.wait_ns)
        free = max(free, int(times.end[item]))
    rows = [Wait(layer, kind, sum(parts), len(parts), group, why) for (layer, kind, group, why), parts in found.items()]
    return sorted(rows, key=lambda row: (-row.wait_ns, row.layer, row.kind, row.group, row.why))


class _Link(NamedTuple):
    """An op instance (-1 for the host) that delays another one, by how long, and why if that is known already."""

    item: int
    wait_ns: int
    why: str = ""


@dataclass(slots=True)
class _Chain:
    """Chains of op instances of one rank, each of which delays the next.

    Attributes:
        before: Op instance -> the one before it on its stream.
        syncs: Op instances after which the host waits.
    """

    result: Result
    at: int
    before: dict[int, int] = field(default_factory=dict)
    syncs: Ints = field(init=False)

    def __post_init__(self) -> None:
        """Compute `before` and `syncs`."""
        sim = self.result.input
        mine, last = np.arange(sim.first[self.at], sim.first[self.at + 1]), dict[int, int]()
        for item, stream in zip(mine.tolist(), sim.stream[mine].tolist(), strict=True):
            if stream in last:
                self.before[item] = last[stream]
            last[stream] = item
        self.syncs = mine[sim.awaits[mine] >= 0]

    def back_from(self, item: int, free: int) -> Iterator[_Link]:
        """Parts of the time from `free` to the start of an op instance, latest first, each with the link that caused it.

        Time in which an instance was ready and waited for its peers counts for the instance, with the peers as reason. Time before that
        counts for what it waited for: the last to end of its operands and of what precedes it on its stream, or else the host.
        """
        times = self.result.times
        until, why = int(times.start[item]), ""
        while until > free:
            ready = max(free, int(times.ready[item]))
            if until > ready:
                yield _Link(item, until - ready, _peers(self.result, item))
                until = ready
            last, why = self._last(item, free)
            ended = int(times.end[last]) if last >= 0 else free
            if until > ended:
                held = self._held_host(item)
                if held >= 0 and times.end[held] > ended:
                    last, ended, why = held, int(times.end[held]), "the host waits for it"
                if until > ended:
                    yield _Link(-1, until - ended)
                until = ended
            if until > free:
                start = max(free, int(times.start[last]))
                yield _Link(last, until - start, why)
                until, item = start, last

    def _last(self, item: int, free: int) -> tuple[int, str]:
        """What ended last, after `free`, of what an op instance needs and what precedes it on its stream (-1 for nothing); and a reason if
        it only precedes it."""
        end, needs = self.result.times.end, self.result.input.needs(item)
        before = self.before.get(item, -1)
        last = max((k for k in needs if end[k] > free), key=lambda k: int(end[k]), default=-1)
        if before >= 0 and end[before] > (end[last] if last >= 0 else free):
            reads = set(self.result.input.op_at(before).results).intersection(self.result.input.op_at(item).operands)
            return before, "" if reads else "what is waited for comes after it on its stream"
        return last, ""

    def _held_host(self, item: int) -> int:
        """The op instance whose end the host waited for last before it issued this one; -1 for none."""
        sim, end = self.result.input, self.result.times.end
        earlier = self.syncs[self.syncs < item]
        if not len(earlier):
            return -1
        late = end[sim.awaits[earlier]] - sim.issue[earlier]
        return int(sim.awaits[earlier[np.argmax(late)]]) if late.max() > 0 else -1


def _peers(result: Result, item: int) -> str:
    """What a communication waited for: for a transfer, the other stage."""
    sim = result.input
    meet, follow = int(sim.meet[item]), int(sim.follow[item])
    mates = sim.mates_at(meet) if meet >= 0 else [follow]
    others = [sim.rank_index(mate) for mate in mates if mate not in (item, -1)]
    if is_p2p(sim.op_at(item)) and others:
        return f"stage {sim.programs[others[0]].pipeline.stage} comes later"
    return "its peers come later"


def _why(result: Result, at: int, link: _Link, reader: int) -> str:
    """Why a collective was exposed while its reader waited. Independent computation later in the job counts only if it takes as long as the
    wait."""
    sim, comm = result.input, link.item
    end = min((int(first) for _, first in sim.job_first[at] if first > reader), default=int(sim.first[at + 1]))
    bound, other_ns = {comm}, 0
    for k in range(comm + 1, end):
        if bound.intersection(sim.needs(k)):
            bound.add(k)
        elif k > reader and not sim.side[k]:
            other_ns += int(sim.dur[k])
    return "what could run meanwhile comes later in its job" if other_ns >= link.wait_ns else "the rest of its job needs it"


def group_text(ranks: Sequence[int]) -> str:
    """A group in words that are the same for every rank of a stage.

    >>> group_text((4, 5)), group_text((0, 4, 8)), group_text((0, 1, 3))
    ('2 neighbours', '3 ranks 4 apart', '3 ranks')
    """
    steps = {b - a for a, b in pairwise(sorted(ranks))}
    if len(steps) != 1:
        return f"{len(ranks)} ranks" if ranks else ""
    return f"{len(ranks)} neighbours" if steps == {1} else f"{len(ranks)} ranks {steps.pop()} apart"


def held(live: Iterable[LiveBytes]) -> list[LiveBytes]:
    """Live bytes summed over layers with the same pattern, largest first."""
    found = grouped(((layer_pattern(each.layer), each.kind), each) for each in live)
    rows = [LiveBytes(layer, kind, sum(h.size_bytes for h in group), sum(h.count for h in group)) for (layer, kind), group in found.items()]
    return sorted(rows, key=lambda row: (-row.size_bytes, row.layer, row.kind))


def waits_text(rows: list[Wait], limit: int = 8) -> str:
    """The longest waits, in one line."""
    found = [
        f"{_name(', '.join(filter(None, (row.layer, row.group))), row.kind)} {ms(row.wait_ns)} in {_count(row.count, 'wait')}"
        + (f" ({row.why})" if row.why else "")
        for row in rows[:limit]
    ]
    more = [f"{len(rows) - limit} more, {ms(sum(row.wait_ns for row in rows[limit:]))}"] if len(rows) > limit else []
    return "; ".join(found + more) or "nothing"


def held_text(rows: list[LiveBytes], limit: int = 4) -> str:
    """The largest holders of memory, in one line."""
    found = (
        f"parameters and optimizer state {size(row.size_bytes)}"  # a single block, so without a count
        if row.kind == "parameters"
        else f"{_name(row.layer, row.kind)} {size(row.size_bytes)} in {_count(row.count, 'value')}"
        for row in rows[:limit]
    )
    return "; ".join(found) or "nothing"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _name(layer: str, kind: str) -> str:
    return f"{kind} ({layer})" if layer else kind
