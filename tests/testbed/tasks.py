"""What ranks of `planted.py` are asked for, and what they answer. No Paddle here: both sides import it."""

from __future__ import annotations

import msgspec

VARIABLE = "PLANTED_WORK"
"""A folder with `tasks.json`; each rank leaves `done<r>.json` there."""
NUM_STEPS = 2
Item = tuple[int, int]


class Front(msgspec.Struct, frozen=True):
    """A delay in front of an item of one rank, in the first step."""

    rank: int
    item: Item
    us: int


class Task(msgspec.Struct, frozen=True):
    """One training run: a folder of plans (empty: the rank's own), and where work is delayed.

    Attributes:
        fronts: Delays in front of single items.
        switches: Of the testbed, while it runs.
        fetch: Whether the losses are fetched, for which the host waits at the end of a step.
        turns: `(kind, k, n, microseconds)`: a delay in front of each piece of work of a kind whose number is k modulo n.
    """

    name: str
    plans: str = ""
    fronts: tuple[Front, ...] = ()
    switches: dict[str, int] = {}
    fetch: bool = True
    turns: tuple[str, int, int, int] | None = None


class Done(msgspec.Struct, frozen=True):
    """What a task gave: bits of the losses and digests of all that lasts; how many delays were taken; or the error that stopped it."""

    name: str
    losses: tuple[str, ...] = ()
    lasting: dict[str, str] = {}
    taken: tuple[str, ...] = ()
    error: str = ""
