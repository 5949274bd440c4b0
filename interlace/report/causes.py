"""Where a simulated step's waiting and memory come from: by layer and kind of operation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from interlace.ir.kinds import is_collective
from interlace.scheduler.memory.live import LiveBytes
from interlace.scheduler.simulate.simulator import Result
from interlace.units import ms, size


class Wait(msgspec.Struct, frozen=True, gc=False):
    """What compute waited for: the kind of operation, or `host`; its layer with `*` for numbers; how long, how often, and why.

    Attributes:
        wait_ns: Time in which no compute ran before an operation that waited for it.
        count: Number of such gaps.
        group: Of a collective: its ranks, in words that are the same for all ranks of a stage.
        why: Of a collective: why nothing else ran meanwhile.
    """

    layer: str
    kind: str
    wait_ns: int
    count: int
    group: str = ""
    why: str = ""


class Held(msgspec.Struct, frozen=True, gc=False):
    """Live memory at the peak: values by kind of the operation that produced them and name of layer; bytes and number."""

    layer: str
    kind: str
    size_bytes: int
    count: int


def waits(result: Result, at: int) -> list[Wait]:
    """Gaps in the computation of the rank with index `at`, by what the operation after each waited for last; longest first."""
    sim, times = result.input, result.times
    program = sim.programs[at]
    ops = {op.id: op for op in program.ops}
    groups = {group.id: group.ranks for group in program.groups}
    mine = np.arange(sim.first[at], sim.first[at + 1])
    compute = mine[np.asarray(sim.side[mine]) == 0]
    found: dict[tuple[str, str, str, str], list[int]] = {}
    free = 0
    for item in compute[np.argsort(times.start[compute], kind="stable")].tolist():
        gap = int(times.start[item]) - free
        if gap > 0:
            needs = [k for k in _needs(result, item) if times.end[k] > free]
            last = max(needs, key=lambda k: int(times.end[k]), default=-1)
            op = ops[int(sim.op[last])] if last >= 0 else None
            exposed = op is not None and is_collective(op)
            words = (group_text(groups.get(op.group, ())), _why(result, at, last, item, free)) if op and exposed else ("", "")
            found.setdefault((*((layer_pattern(op.layer), op.kind) if op else ("", "host")), *words), []).append(gap)
        free = max(free, int(times.end[item]))
    rows = [Wait(layer, kind, sum(gaps), len(gaps), group, why) for (layer, kind, group, why), gaps in found.items()]
    return sorted(rows, key=lambda row: (-row.wait_ns, row.layer, row.kind, row.group, row.why))


def _needs(result: Result, item: int) -> list[int]:
    sim = result.input
    return [int(k) for k in sim.dep[sim.dep_first[item] : sim.dep_first[item + 1]]]


def _why(result: Result, at: int, comm: int, reader: int, free: int) -> str:
    """Why a collective was exposed, when computation was free and its reader waited: work counts that is as long as the wait."""
    sim, times = result.input, result.times
    if times.start[comm] > max(free, int(times.ready[comm])):
        return "its peers come later"
    before = [k for k in range(int(sim.first[at]), comm) if sim.stream[k] == sim.stream[comm] and times.end[k] > free]
    if before:
        return "behind others on its stream"
    end = min((int(first) for _, first in sim.job_first[at] if first > reader), default=int(sim.first[at + 1]))
    bound, other_ns = {comm}, 0
    for k in range(comm + 1, end):
        if bound.intersection(_needs(result, k)):
            bound.add(k)
        elif k > reader and not sim.side[k]:
            other_ns += int(sim.dur[k])
    return "what could run meanwhile comes later in its job" if other_ns >= times.start[reader] - free else "the rest of its job needs it"


def group_text(ranks: Sequence[int]) -> str:
    """A group in words that hold for every rank of a stage.

    >>> group_text((4, 5)), group_text((0, 4, 8)), group_text((0, 1, 3))
    ('2 neighbours', '3 ranks 4 apart', '3 ranks')
    """
    steps = {b - a for a, b in pairwise(sorted(ranks))}
    if len(steps) != 1:
        return f"{len(ranks)} ranks" if ranks else ""
    return f"{len(ranks)} neighbours" if steps == {1} else f"{len(ranks)} ranks {steps.pop()} apart"


def held(live: Iterable[LiveBytes]) -> list[Held]:
    """Live bytes summed over layers with one name, largest first."""
    found: dict[tuple[str, str], list[LiveBytes]] = {}
    for each in live:
        found.setdefault((layer_pattern(each.layer), each.kind), []).append(each)
    rows = [Held(layer, kind, sum(h.size_bytes for h in group), sum(h.count for h in group)) for (layer, kind), group in found.items()]
    return sorted(rows, key=lambda row: (-row.size_bytes, row.layer, row.kind))


def waits_text(rows: list[Wait], limit: int = 8) -> str:
    """The longest in one line."""
    found = [f"{_name(', '.join(filter(None, (row.layer, row.group))), row.kind)} {ms(row.wait_ns)} in {_count(row.count, 'wait')}"
             + (f" ({row.why})" if row.why else "") for row in rows[:limit]]  # fmt: skip
    more = [f"{len(rows) - limit} more, {ms(sum(row.wait_ns for row in rows[limit:]))}"] if len(rows) > limit else []
    return "; ".join(found + more) or "nothing"


def held_text(rows: list[Held], limit: int = 4) -> str:
    """The largest in one line."""
    found = (f"{_name(row.layer, row.kind)} {size(row.size_bytes)} in {_count(row.count, 'value')}" for row in rows[:limit])
    return "; ".join(found) or "nothing"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def layer_pattern(layer: str) -> str:
    """`blocks.3.mlp` -> `blocks.*.mlp`."""
    return ".".join("*" if part.isdigit() else part for part in layer.split("."))


def _name(layer: str, kind: str) -> str:
    return f"{kind} ({layer})" if layer else kind
