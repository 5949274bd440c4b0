"""Random delays before work on the device, and the smallest set of them that still makes a case fail.

A *site* identifies a piece of work by its stream number and the number of pieces issued to that stream before it. The host issues work in
a fixed order, so sites are the same in every run of a plan.

    TESTBED_DELAYS="seed=7,permille=50,max_us=2000,kinds=compute+copy+collective"
    TESTBED_DELAYS="sites=0:17:900;1/3:2:1500"      # stream:ordinal:microseconds, on all ranks, or only on rank 1

`python -m testbed.shrink` finds the sites that make a training run fail.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from testbed.device import TestbedError, plugin

DELAYS_VARIABLE = "TESTBED_DELAYS"
TAKEN_VARIABLE = "TESTBED_TAKEN"  # folder where each rank writes the delays that it applied
KINDS = {"compute": 1, "copy": 2, "collective": 4}
ALL_KINDS = "+".join(KINDS)
EVERY_RANK = -1
_APART = 7919  # makes each rank's seed different, so that ranks are not delayed together


class Site(NamedTuple):
    """A delay before one piece of work, on one rank or on all."""

    stream: int
    ordinal: int
    us: int
    rank: int = EVERY_RANK

    def __str__(self) -> str:
        rank = "" if self.rank == EVERY_RANK else f"{self.rank}/"
        return f"{rank}{self.stream}:{self.ordinal}:{self.us}"


@dataclass(frozen=True, slots=True)
class Taken:
    """A delay that was applied, and the work that it delayed; without `begin_step`, `step` is 0 and `op` is meaningless."""

    site: Site
    kind: str
    name: str
    step: int = 0
    op: int = -1


def draw(seed: int, permille: int, max_us: int, kinds: str = ALL_KINDS) -> None:
    """Delay `permille` of all pieces of work of these kinds by up to `max_us`."""
    unknown = [kind for kind in kinds.split("+") if kind not in KINDS]
    if unknown:
        raise TestbedError(f"delays: unknown kind {unknown[0]!r}; there are {list(KINDS)}")
    plugin().tb_delays_drawn(seed, permille, max_us, sum(KINDS[kind] for kind in kinds.split("+")))


def only(sites: Sequence[Site]) -> None:
    """Delay only these sites."""
    plugin().tb_delays_listed()
    for site in sites:
        plugin().tb_delay_add(site.stream, site.ordinal, site.us)


def restart() -> None:
    """Count sites from zero again, and clear the list of applied delays."""
    plugin().tb_delays_restart()


def off() -> None:
    """Delay nothing from now on, and clear the list of applied delays."""
    restart()
    only([])


def hold(run: Callable[[], object], us: int, name: str = "") -> None:
    """Call `run` once to find the first piece of work with this name (empty: any name), and delay that piece from then on."""
    restart()
    draw(0, 1000, 1)
    run()
    plugin().tb_sync()
    found = next(each.site for each in taken() if name in ("", each.name))
    restart()
    only([found._replace(us=us)])


def begin_step() -> None:
    """Start a step: delays applied from now on record the step's number, and which of its operations they precede."""
    plugin().tb_delays_step()


def taken() -> list[Taken]:
    """Delays applied since counting started, in order."""
    return _log()[0]


def step_ops() -> list[str]:
    """Names of the operations issued since the last step began, in host order."""
    return _log()[1]


def _log() -> tuple[list[Taken], list[str]]:
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        plugin().tb_delays_write(file.name.encode())
        lines = Path(file.name).read_text().splitlines()
    rows = [line.split("\t") for line in lines]
    kinds = list(KINDS)
    found = [
        Taken(Site(int(row[0]), int(row[1]), int(row[2])), kinds[int(row[3])], row[4], int(row[5]), int(row[6]))
        for row in rows
        if row[0] != "op"
    ]
    return found, [row[1] for row in rows if row[0] == "op"]


def apply_words(text: str, rank: int = EVERY_RANK) -> None:
    """Set a rank's delays from text in the form of `TESTBED_DELAYS`; empty text means no delays."""
    words = dict(word.partition("=")[::2] for word in text.split(",") if word.strip())
    if "sites" in words:
        only([site for site in parse_sites(words["sites"]) if site.rank in (EVERY_RANK, rank)])
    elif words:
        seed = int(words.get("seed", 0)) + _APART * max(rank, 0)
        draw(seed, int(words.get("permille", 50)), int(words.get("max_us", 1000)), words.get("kinds", ALL_KINDS))


def parse_sites(text: str) -> list[Site]:
    """Parse sites.

    >>> parse_sites("0:17:900;1/3:2:1500")
    [Site(stream=0, ordinal=17, us=900, rank=-1), Site(stream=3, ordinal=2, us=1500, rank=1)]
    """
    found = []
    for word in filter(None, text.split(";")):
        rank, slash, rest = word.rpartition("/")
        stream, ordinal, us = map(int, rest.split(":"))
        found.append(Site(stream, ordinal, us, int(rank) if slash else EVERY_RANK))
    return found


def show_sites(sites: Sequence[Site]) -> str:
    """The inverse of `parse_sites`."""
    return ";".join(map(str, sites))


def shrink(sites: Sequence[Site], fails: Callable[[Sequence[Site]], bool]) -> list[Site]:
    """A minimal set of delays under which a case still fails: it passes if any one of them is left out.

    Delta debugging (Zeller and Hildebrandt, 2002): O(n^2) runs at worst, O(log n) if a single delay is enough.

    Raises:
        TestbedError: The case does not fail with all of them.

    >>> show_sites(shrink([Site(0, k, 1) for k in range(9)], lambda some: {3, 7} <= {site.ordinal for site in some}))
    '0:3:1;0:7:1'
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
    """A chunk that fails alone, or all other chunks if they fail without one; None if neither exists."""
    for chunk in chunks:
        if len(chunks) > 1 and fails(chunk):
            return list(chunk)
    for left_out in range(len(chunks) if len(chunks) > 2 else 0):
        rest = [site for k, chunk in enumerate(chunks) if k != left_out for site in chunk]
        if fails(rest):
            return rest
    return None
