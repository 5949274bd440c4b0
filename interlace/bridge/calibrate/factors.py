"""From times of operations beside a message to the factors by which the two slow each other down; see `beside.py`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from interlace.cost_model.interference import BothWays

LEAST_LEFT = 0.05
"""The least share of the message's time that must be left when the operations have ended, and that must have passed."""
LEAST_HELD = 0.1
"""The shortest operation for which it is known whether it holds a message up, as a share of the message's time: two readings of a message
differ by up to 9 % (H100)."""
HELD = 0.5
"""An operation holds a message up if, while the operation runs, the message advances less than this share of what it does otherwise."""


class Times(NamedTuple):
    """When the operations, and when everything had ended, in seconds after a step's begin."""

    ops_s: float
    all_s: float


class Round(NamedTuple):
    """Times of steps that ran one after another: with a message only, with operations only, with both, and with both where an operation
    begins first; the last is None if that was not measured."""

    message: Times
    alone: Times
    both: Times
    first: Times | None = None


class Factors(NamedTuple):
    """Factors on the time of operations and on that of the message, and whether operations hold the message up (None: not known)."""

    op: float
    beside: float
    holds: bool | None = None


def factors(rounds: Sequence[Round], once_s: float = 0.0, *, waits: bool = False) -> Factors | None:
    """Factors by which operations and a message that begins before them slow each other down, from medians over rounds.

    Args:
        rounds: Times of the steps. Only differences between steps of one round count, as the device's speed drifts.
        once_s: Seconds that one operation takes alone. In `Round.first` there is one, and whether it holds the message up is only known if
            it takes `LEAST_HELD` of the message's time.
        waits: Whether the message only waits, so that nothing slows it down.

    Returns:
        None if the operations ended after the message, or the message made no progress meanwhile (unless it only waits).

    >>> alone, both = Times(1.5, 1.5), Times(2.0, 5.0)  # of 4 s of the message alone, 3 are left after the operations
    >>> factors([Round(Times(0.5, 4.5), alone, both)])
    Factors(op=1.5, beside=1.5, holds=None)
    >>> factors([Round(Times(0.5, 4.5), alone, both, Times(1.5, 5.5))], once_s=1.0)  # after the operation all of the message is left
    Factors(op=1.5, beside=1.5, holds=True)
    """
    took_s = median(each.both.ops_s - each.message.ops_s for each in rounds)
    alone_s = median(each.alone.ops_s - each.message.ops_s for each in rounds)
    whole_s = median(each.message.all_s - each.message.ops_s for each in rounds)
    left_s = median(each.both.all_s - each.both.ops_s for each in rounds)
    done_s = whole_s - left_s
    if left_s < LEAST_LEFT * whole_s or min(took_s, alone_s) <= 0:
        return None
    if waits:
        return Factors(took_s / alone_s, 1.0)
    if done_s < LEAST_LEFT * whole_s:
        return None
    found = Factors(took_s / alone_s, took_s / done_s)
    firsts = [round.first.all_s - round.first.ops_s for round in rounds if round.first is not None]
    if not firsts or once_s < LEAST_HELD * whole_s:
        return found
    return found._replace(holds=whole_s - median(firsts) < HELD * once_s * found.op / found.beside)


TURNS = BothWays(2.0, 2.0)
"""Factors of directions that share all of a link in equal parts."""


def both_ways(rounds: Sequence[Sequence[float]], few: int, many: int) -> BothWays | str:
    """Factors by which copies of the two directions slow each other down, from medians over rounds.

    While both run, a copy to the device takes `h2d` times as long as alone, and one to the host `d2h` times. If `few` copies to the device
    end before `many` copies to the host, they take `few * alone_s * h2d`; meanwhile the others advance by `1 / d2h` of it, and their rest
    runs alone. So the step is longer than the copies to the host alone by `few * alone_s * h2d * (1 - 1 / d2h)`, and likewise the other way
    round. If that is the time of the few copies alone or more, the directions take turns (`TURNS`).

    Args:
        rounds: Times in seconds of steps that differ in their numbers of copies to the host and to the device: `(0, 0)`, `(many, 0)`,
            `(0, many)`, `(many, few)` and `(few, many)`.
        few, many: These numbers.

    Returns:
        The factors, or the reason why there are none.

    >>> seconds = [1.0, 13.0, 13.0, 13.0 + 4 * 1.5 * 0.2, 13.0 + 4 * 1.25 / 3]
    >>> [round(factor, 6) for factor in both_ways([seconds], few=4, many=12)]
    [1.5, 1.25]
    """

    def apart_s(longer: int, shorter: int) -> float:
        return median(each[longer] - each[shorter] for each in rounds)

    out_s, in_s = apart_s(1, 0) / many, apart_s(2, 0) / many
    if min(out_s, in_s) <= 0:
        return "their times do not differ from noise"
    by_in, by_out = max(0.0, apart_s(3, 1)) / (few * in_s), max(0.0, apart_s(4, 2)) / (few * out_s)
    if max(by_in, by_out) >= 1:
        return TURNS
    h2d, d2h = by_in + (1 - by_in) / (1 - by_out), by_out + (1 - by_out) / (1 - by_in)
    # if the few copies end last, the factors found here satisfy `few * in_s * h2d == many * out_s * d2h` or its counterpart
    if few * in_s * h2d > many * out_s or few * out_s * d2h > many * in_s:
        return f"a copy of one direction takes up to {many / few:g} times as long as one of the other, or longer"
    return BothWays(h2d, d2h)
