"""Explanation of a stall: the cycle of op instances that wait for each other, or the one whose partner is never issued."""

from __future__ import annotations

from interlace.ir.arrays import Ints
from interlace.scheduler.simulate.arrays import SimInput


def explain_stall(sim: SimInput, end: Ints) -> str:
    """Text that explains why the simulation stopped; `end` is -1 for op instances that never ended."""
    stuck = next(item for item in range(sim.num_items) if end[item] < 0)
    path: list[tuple[int, str]] = []
    index: dict[int, int] = {}
    item, why = stuck, ""
    while item not in index:
        index[item] = len(path)
        item, why = _blocker(sim, end, item)
        path.append((list(index)[-1], why))
        if item < 0:
            break
    circle = path[index[item] :] if item >= 0 else path
    head = f"{int((end < 0).sum())} of {sim.num_items} op instances never run; " + (
        "ranks wait in a circle" if item >= 0 else "what is waited for never comes"
    )
    return "\n  ".join([head + ":", *(f"{sim.describe(k)} waits for {reason}" for k, reason in circle)])


def _blocker(sim: SimInput, end: Ints, item: int) -> tuple[int, str]:
    """An unfinished op instance that this one waits for (-1: one that no rank issues), and the reason as text."""
    if held := _held(sim, end, item):
        return held
    meet = int(sim.meet[item])
    if meet < 0:
        return int(sim.follow[item]), f"the message of {sim.describe(int(sim.follow[item]))}"
    if meet in sim.absent:
        return -1, f"its mates: {sim.absent[meet]}"
    mate = next(k for k in sim.mates_at(meet) if k != item and _held(sim, end, k))
    return mate, f"its mate, {sim.describe(mate)}"


def _held(sim: SimInput, end: Ints, item: int) -> tuple[int, str] | None:
    """As `_blocker`; None if an unfinished op instance waits only for its mates or its message."""
    before = range(int(sim.first[sim.rank_index(item)]), item)
    awaited = next((int(sim.awaits[k]) for k in before if sim.awaits[k] >= 0 and end[sim.awaits[k]] < 0), -1)
    if awaited >= 0:
        return awaited, f"the host, which waits for {sim.describe(awaited)}"
    ahead = next((k for k in before if sim.stream[k] == sim.stream[item] and end[k] < 0), -1)
    if ahead >= 0:
        return ahead, f"its stream, where {sim.describe(ahead)} comes first"
    needed = next((k for k in sim.needs(item) if end[k] < 0), None)
    return None if needed is None else (needed, sim.describe(needed))
