"""Where a simulated step's waiting and memory come from: by layer and kind of operation."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from interlace.scheduler.memory.live import LiveBytes
from interlace.scheduler.simulate.simulator import Result
from interlace.units import ms, size


class Wait(msgspec.Struct, frozen=True, gc=False):
    """What compute waited for: the kind of operation, or `host`; its layer with `*` for numbers; how long, how often.

    Attributes:
        wait_ns: Time in which no compute ran before an operation that waited for it.
        count: Number of such gaps.
    """

    layer: str
    kind: str
    wait_ns: int
    count: int


class Held(msgspec.Struct, frozen=True, gc=False):
    """Live memory at the peak: values by kind of the operation that produced them and name of layer; bytes and number."""

    layer: str
    kind: str
    size_bytes: int
    count: int


def waits(result: Result, at: int) -> list[Wait]:
    """Gaps in the computation of the rank with index `at`, by what the operation after each waited for last; longest first."""
    sim, times = result.input, result.times
    ops = {op.id: op for op in sim.programs[at].ops}
    mine = np.arange(sim.first[at], sim.first[at + 1])
    compute = mine[np.asarray(sim.side[mine]) == 0]
    found: dict[tuple[str, str], list[int]] = {}
    free = 0
    for item in compute[np.argsort(times.start[compute], kind="stable")].tolist():
        gap = int(times.start[item]) - free
        if gap > 0:
            needs = [k for k in sim.dep[sim.dep_first[item] : sim.dep_first[item + 1]].tolist() if times.end[k] > free]
            last = max(needs, key=lambda k: int(times.end[k]), default=-1)
            op = ops[int(sim.op[last])] if last >= 0 else None
            found.setdefault((layer_pattern(op.layer), op.kind) if op else ("", "host"), []).append(gap)
        free = max(free, int(times.end[item]))
    rows = [Wait(layer, kind, sum(gaps), len(gaps)) for (layer, kind), gaps in found.items()]
    return sorted(rows, key=lambda row: (-row.wait_ns, row.layer, row.kind))


def held(live: Iterable[LiveBytes]) -> list[Held]:
    """Live bytes summed over layers with one name, largest first."""
    found: dict[tuple[str, str], list[LiveBytes]] = {}
    for each in live:
        found.setdefault((layer_pattern(each.layer), each.kind), []).append(each)
    rows = [Held(layer, kind, sum(h.size_bytes for h in group), sum(h.count for h in group)) for (layer, kind), group in found.items()]
    return sorted(rows, key=lambda row: (-row.size_bytes, row.layer, row.kind))


def waits_text(rows: list[Wait], limit: int = 4) -> str:
    """The longest in one line."""
    return "; ".join(f"{_name(row.layer, row.kind)} {ms(row.wait_ns)} in {_count(row.count, 'wait')}" for row in rows[:limit]) or "nothing"


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
