"""What passes did and declined, told by rule: lines that differ in numbers, layers and operations alone are one."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ID = re.compile(r"(?<!\w)[#%]\d+\b ?")
_LAYER = re.compile(r"(?<=[A-Za-z_]\.)\d+(?=[.)\s:]|$)")
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?!\w)")


def by_rule(lines: Iterable[str]) -> list[tuple[str, list[int]]]:
    """Each rule and the numbers of the lines that follow it, in the order of their first lines; figures that differ become a range.

    >>> by_rule(["#1 pd_op.add (blocks.0.mlp): %3 (2.0 MiB) moves", "#9 pd_op.add (blocks.1.mlp): %8 (4.0 MiB) moves", "no gain"])
    [('add (blocks.*.mlp): (2.0 to 4.0 MiB) moves', [0, 1]), ('no gain', [2])]
    """
    found: dict[str, list[tuple[int, str]]] = {}
    for number, line in enumerate(lines):
        plain = _LAYER.sub("*", _ID.sub("", line)).replace("pd_op.", "").replace("builtin.", "")
        found.setdefault(_NUMBER.sub("\0", plain), []).append((number, plain))
    return [(_joined([plain for _, plain in group]), [number for number, _ in group]) for group in found.values()]


def _joined(lines: list[str]) -> str:
    """One text for lines that differ in numbers alone."""
    columns = list(zip(*(_NUMBER.findall(line) for line in lines), strict=True))
    turn = iter(columns)

    def shown(_: re.Match[str]) -> str:
        numbers = sorted(set(next(turn)), key=float)
        return numbers[0] if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"

    return _NUMBER.sub(shown, lines[0])
