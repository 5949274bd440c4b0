"""Names by which different ranks refer to the same communication group.

A group is identified by its ranks, in the ring's order, and, if several groups have the same ranks, by its number. Paddle numbers
rings in the order in which a process creates them, and names a communicator by its ranks and that number
(`process_group.ProcessGroup.instantiate`), so equal numbers are the same ring. If programs share no number for the same ranks, groups
are matched in ascending order of their numbers.

>>> known = RingNames({0: (Group(7, (0, 1)), Group(8, (0, 1))), 1: (Group(8, (0, 1)),)})
>>> known.name(0, 8) == known.name(1, 8), known.name(0, 7) == known.name(1, 8)
(True, False)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain

from interlace.ir.program import Group

Ranks = tuple[int, ...]
RingName = tuple[Ranks, int]


class RingNames:
    """Names of the groups in the programs of several ranks; groups with equal names are the same ring.

    Attributes:
        unclear: Ranks of groups -> rank -> its numbers of these groups, where ranks share no number and have different counts of groups,
            so that it is not known which are the same.
    """

    def __init__(self, groups: Mapping[int, Sequence[Group]]) -> None:
        self._ranks = {rank: {group.id: group.ranks for group in listed} for rank, listed in groups.items()}
        lists: dict[Ranks, dict[int, list[int]]] = defaultdict(dict)
        for rank, listed in groups.items():
            for group in sorted(listed, key=lambda group: group.id):
                if rank in group.ranks:
                    lists[group.ranks].setdefault(rank, []).append(group.id)
        self._index: dict[tuple[Ranks, int], dict[int, int]] = {}
        self.unclear: dict[Ranks, dict[int, list[int]]] = {}
        for ranks, by_rank in lists.items():
            numbers = list(by_rank.values())
            if _numbered_alike(numbers):
                continue
            if len({len(each) for each in numbers}) > 1:
                self.unclear[ranks] = by_rank
            for rank, each in by_rank.items():
                self._index[ranks, rank] = {number: index for index, number in enumerate(each)}

    def name(self, rank: int, group: int) -> RingName:
        """The name of one rank's group, equal for all its ranks."""
        ranks = self._ranks[rank][group]
        return ranks, self._index.get((ranks, rank), {}).get(group, group)


def _numbered_alike(numbers: Sequence[Sequence[int]]) -> bool:
    """Whether any two ranks share a number, or there is only one rank."""
    return len(numbers) < 2 or len(set(chain.from_iterable(numbers))) < sum(map(len, numbers))
