"""What passes did and declined, told by rule: lines that differ in figures, layers and operations alone are one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

from interlace.passes.pipeline import PassReport

_ID = re.compile(r" ?(?<!\w)[#%]\d+\b(?:(?:,| and) [#%]\d+\b)*")
"""An operation or value, or a list of them: what separates them goes with them."""
_LAYER = re.compile(r"(?<=[A-Za-z_]\.)\d+(?=[.)\s:]|$)")
_WHERE = re.compile(r"^(\w+) \(([\w.*]+)\): ")
_NUMBER = re.compile(r"(?:(?<![\w.)\]%-])[-+])?(?<![\w.])\d+(?:\.\d+)?(?!\w)")
"""A figure with its sign; behind another figure or a word `-` is no sign."""


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one pass did, or declined, in `count` places of one rank of each of these stages.

    Attributes:
        name: Of the pass.
        layers: In which layers, `*` for their numbers; empty where the lines name none.
    """

    name: str
    text: str
    layers: list[str]
    count: int
    stages: list[int]


def rules(reports: Mapping[int, Sequence[PassReport]], lines: Callable[[PassReport], Sequence[str]]) -> list[Rule]:
    """What passes say, by rule, in the order of the passes.

    Args:
        reports: Of one rank of each stage, by stage.
        lines: Which lines of a report are meant.
    """
    found: dict[tuple[str, str], list[tuple[int, str, str]]] = {}
    order: dict[str, None] = {}
    for stage, each in sorted(reports.items()):
        for report in each:
            order.setdefault(report.name)
            for line in lines(report):
                plain, layer = _plain(line)
                found.setdefault((report.name, _NUMBER.sub("\0", plain)), []).append((stage, plain, layer))
    rows = [
        Rule(
            name,
            joined([plain for _, plain, _ in group]),
            sorted({layer for _, _, layer in group if layer}),
            len(group),
            sorted({stage for stage, _, _ in group}),
        )
        for (name, _), group in found.items()
    ]
    return sorted(rows, key=lambda rule: list(order).index(rule.name))


def _plain(line: str) -> tuple[str, str]:
    """A line without numbers of operations and values, and the layer that it is about.

    >>> _plain("#1 pd_op.add (blocks.0.mlp): %3 (2.0 MiB) moves")
    ('add: (2.0 MiB) moves', 'blocks.*.mlp')
    >>> _plain("starts right after dX #5, #6, #7; 3 moved")[0]
    'starts right after dX; 3 moved'
    """
    plain = _LAYER.sub("*", _ID.sub("", line).lstrip()).replace("pd_op.", "").replace("builtin.", "")
    where = _WHERE.match(plain)
    return (f"{where[1]}: {plain[where.end() :]}", where[2]) if where else (plain, "")


def joined(lines: Sequence[str]) -> str:
    """One text for lines that differ in figures alone; those that differ become a range.

    >>> joined(["moves 2.0 MiB in 3 copies", "moves 4.0 MiB in 3 copies"])
    'moves 2.0 to 4.0 MiB in 3 copies'
    >>> joined(["5 ms (-5.6 %)", "5 ms (-7.8 %)", "5 ms (+0.1 %)"])
    '5 ms (-7.8 to +0.1 %)'
    """
    columns = iter(list(zip(*(_NUMBER.findall(line) for line in lines), strict=True)))

    def shown(_: re.Match[str]) -> str:
        figures = sorted(set(next(columns)), key=float)
        return figures[0] if len(figures) == 1 else f"{figures[0]} to {figures[-1]}"

    return _NUMBER.sub(shown, lines[0])
