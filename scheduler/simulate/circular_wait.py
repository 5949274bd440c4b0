"""Why a plan does not end: the cycle of op instances that wait for each other, or one whose mate is never issued."""

from __future__ import annotations

from interlace.scheduler.simulate.arrays import Ints, SimInput


def explain_stall(sim: SimInput, end: Ints) -> str:
    """Why nothing goes on: the circle of items that wait for each other, or the one whose mate never comes."""
    stuck = next(item for item in range(sim.num_items) if end[item] < 0)
    path: list[tuple[int, str]] = []
    places: dict[int, int] = {}
    item, why = stuck, ""
    while item not in places:
        places[item] = len(path)
        item, why = _blocker(sim, end, item)
        path.append((list(places)[-1], why))
        if item < 0:
            break
    circle = path[places[item] :] if item >= 0 else path
    head = f"{int((end < 0).sum())} of {sim.num_items} items never run; " + (
        "ranks wait in a circle" if item >= 0 else "what is waited for never comes"
    )
    return "\n  ".join([head + ":", *(f"{sim.describe(k)} waits for {reason}" for k, reason in circle)])


def _blocker(sim: SimInput, end: Ints, item: int) -> tuple[int, str]:
    """An unfinished item that this one waits for (-1: one that no rank issues), and in words."""
    at = sim.rank_index(item)
    before = range(int(sim.first[at]), item)
    held = next((int(sim.awaits[k]) for k in before if sim.awaits[k] >= 0 and end[sim.awaits[k]] < 0), -1)
    if held >= 0:
        return held, f"the host, which waits for {sim.describe(held)}"
    ahead = next((k for k in before if sim.stream[k] == sim.stream[item] and end[k] < 0), -1)
    if ahead >= 0:
        return ahead, f"its stream, where {sim.describe(ahead)} comes first"
    for k in sim.dep[sim.dep_first[item] : sim.dep_first[item + 1]].tolist():
        if end[k] < 0:
            return k, f"{sim.describe(k)}"
    meet = int(sim.meet[item])
    if meet < 0:
        return int(sim.follow[item]), f"the message of {sim.describe(int(sim.follow[item]))}"
    if meet in sim.absent:
        return -1, f"its mates: {sim.absent[meet]}"
    mates = sim.mates[sim.meet_first[meet] : sim.meet_first[meet + 1]].tolist()
    mate = next(k for k in mates if k != item and not _is_ready(sim, end, k))
    return mate, f"its mate, {sim.describe(mate)}"


def _is_ready(sim: SimInput, end: Ints, item: int) -> bool:
    """Whether only its mates keep an unfinished item from starting."""
    at = sim.rank_index(item)
    before = range(int(sim.first[at]), item)
    return (
        not any(sim.awaits[k] >= 0 and end[sim.awaits[k]] < 0 for k in before)
        and not any(end[k] < 0 and sim.stream[k] == sim.stream[item] for k in before)
        and not (end[sim.dep[sim.dep_first[item] : sim.dep_first[item + 1]]] < 0).any()
    )
