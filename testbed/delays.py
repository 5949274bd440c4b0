"""Random delays in front of work on the device, and the smallest set of them that still makes a case fail.

A *site* is a piece of work: (stream number, how many pieces that stream was given before). The host gives work in one order, so
sites are the same in every run of the same plan.

    TESTBED_DELAYS="seed=7,permille=50,max_us=2000,kinds=compute+copy+collective"
    TESTBED_DELAYS="sites=0:17:900;3:2:1500"        # stream:ordinal:microseconds
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from testbed.device import TestbedError, plugin

DELAYS_VARIABLE = "TESTBED_DELAYS"
KINDS = {"compute": 1, "copy": 2, "collective": 4}
ALL_KINDS = "+".join(KINDS)


class Site(NamedTuple):
    """A delay in front of one piece of work."""

    stream: int
    ordinal: int
    us: int


@dataclass(frozen=True, slots=True)
class Taken:
    """A delay that was taken, and what stood behind it."""

    site: Site
    kind: str
    name: str


def draw(seed: int, permille: int, max_us: int, kinds: str = ALL_KINDS) -> None:
    """Delay `permille` of all pieces of work of these kinds by up to `max_us`."""
    unknown = [kind for kind in kinds.split("+") if kind not in KINDS]
    if unknown:
        raise TestbedError(f"delays: unknown kind {unknown[0]!r}; there are {list(KINDS)}")
    plugin().tb_delays_drawn(seed, permille, max_us, sum(KINDS[kind] for kind in kinds.split("+")))


def only(sites: Sequence[Site]) -> None:
    """Delay these sites and no others."""
    plugin().tb_delays_listed()
    for site in sites:
        plugin().tb_delay_add(site.stream, site.ordinal, site.us)


def restart() -> None:
    """Count sites from the start again, and forget the delays taken."""
    plugin().tb_delays_restart()


def taken() -> list[Taken]:
    """Delays since the start, in order."""
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        plugin().tb_delays_write(file.name.encode())
        lines = Path(file.name).read_text().splitlines()
    rows = [line.split("\t") for line in lines]
    kinds = list(KINDS)
    return [Taken(Site(int(row[0]), int(row[1]), int(row[2])), kinds[int(row[3])], row[4]) for row in rows]


def apply_words(text: str) -> None:
    """Set delays from words, as in `TESTBED_DELAYS`; no words, no delays."""
    words = dict(word.partition("=")[::2] for word in text.split(",") if word.strip())
    if "sites" in words:
        only(parse_sites(words["sites"]))
    elif words:
        draw(int(words.get("seed", 0)), int(words.get("permille", 50)), int(words.get("max_us", 1000)), words.get("kinds", ALL_KINDS))


def parse_sites(text: str) -> list[Site]:
    """Sites in words.

    >>> parse_sites("0:17:900;3:2:1500")
    [Site(stream=0, ordinal=17, us=900), Site(stream=3, ordinal=2, us=1500)]
    """
    return [Site(*map(int, word.split(":"))) for word in text.split(";") if word]


def show_sites(sites: Sequence[Site]) -> str:
    """The inverse of `parse_sites`."""
    return ";".join(f"{site.stream}:{site.ordinal}:{site.us}" for site in sites)


def shrink(sites: Sequence[Site], fails: Callable[[Sequence[Site]], bool]) -> list[Site]:
    """The smallest set of delays found under which a case still fails: none of them can be left out.

    Delta debugging (Zeller and Hildebrandt, 2002): O(n^2) runs at worst, O(log n) where one delay is enough.

    Raises:
        TestbedError: The case does not fail with all of them.

    >>> shrink([Site(0, k, 1) for k in range(9)], lambda some: {3, 7} <= {site.ordinal for site in some})
    [Site(stream=0, ordinal=3, us=1), Site(stream=0, ordinal=7, us=1)]
    """
    kept = list(sites)
    if not fails(kept):
        raise TestbedError(f"the case passes with all {len(kept)} delays; there is nothing to shrink")
    parts = 2
    while len(kept) > 1:
        size = -(-len(kept) // parts)
        chunks = [kept[start : start + size] for start in range(0, len(kept), size)]
        smaller = _smaller(chunks, fails)
        if smaller is not None:
            kept, parts = smaller, max(parts - 1, 2)
        elif size == 1:
            break
        else:
            parts = min(2 * parts, len(kept))
    return kept


def _smaller(chunks: Sequence[Sequence[Site]], fails: Callable[[Sequence[Site]], bool]) -> list[Site] | None:
    """A chunk that fails alone, or the rest without one."""
    for chunk in chunks:
        if len(chunks) > 1 and fails(chunk):
            return list(chunk)
    for left_out in range(len(chunks) if len(chunks) > 2 else 0):
        rest = [site for k, chunk in enumerate(chunks) if k != left_out for site in chunk]
        if fails(rest):
            return rest
    return None
