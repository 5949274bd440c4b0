"""Figures in texts for users: times in ms, memory in KiB, MiB and GiB."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


def ms(dur_ns: float) -> str:
    """Nanoseconds as text, short times with more digits.

    >>> [ms(3_200_000), ms(68_678), ms(5), ms(0), ms(-5_000_000)]
    ['3.200 ms', '0.069 ms', '0.000005 ms', '0.000 ms', '-5.000 ms']
    """
    return f"{ms_figure(dur_ns)} ms"


def ms_figure(dur_ns: float) -> str:
    """The same without its unit, for `1.2 -> 1.1 ms`."""
    return f"{dur_ns / 1e6:.{3 if dur_ns == 0 or abs(dur_ns) >= 10_000 else 6}f}"


def size(size_bytes: int) -> str:
    """Bytes as text, in the largest unit of which it is one or more once rounded; below a KiB they are counted one by one.

    >>> [size(5_153_325_072), size(3 << 19), size(1_023_084), size(512)]
    ['4.799 GiB', '1.5 MiB', '999.1 KiB', '512 B']
    >>> [size((1 << 30) - 1), size((1 << 20) - 1), size(-3 << 19), size(-512)]
    ['1.000 GiB', '1.0 MiB', '-1.5 MiB', '-512 B']
    """
    unit = Unit.of([size_bytes])
    return f"{unit.figure(size_bytes)} {unit.name}"


class Unit(NamedTuple):
    """A unit of memory, and the decimals that figures in it have."""

    name: str
    bytes: int
    decimals: int

    def figure(self, size_bytes: float) -> str:
        """Bytes in this unit, as text."""
        return f"{size_bytes / self.bytes:.{self.decimals}f}"

    @classmethod
    def of(cls, sizes: Iterable[float]) -> Unit:
        """The unit for sizes that are compared with each other: that of the largest as `size` tells it.

        >>> [Unit.of(each).name for each in ([5 << 30, 512], [100, 3 << 10], [], [(1 << 30) - 1])]
        ['GiB', 'KiB', 'B', 'GiB']
        """
        most = max((abs(each) for each in sizes), default=0)
        return next((unit for unit in _UNITS if float(unit.figure(most)) < 1 << 10), _UNITS[-1])


_UNITS = (Unit("B", 1, 0), Unit("KiB", 1 << 10, 1), Unit("MiB", 1 << 20, 1), Unit("GiB", 1 << 30, 3))


def ranges(numbers: list[int] | tuple[int, ...] | range) -> str:
    """Rising numbers as text, runs of them joined.

    >>> [ranges([0, 1, 2, 5]), ranges([3])]
    ['0-2, 5', '3']
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def ranks_text(ranks: list[int] | tuple[int, ...] | range) -> str:
    """Ranks as messages name them.

    >>> [ranks_text([2]), ranks_text([0, 1, 3])]
    ['rank 2', 'ranks 0-1, 3']
    """
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}"
