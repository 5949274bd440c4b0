"""Finds Paddle's process groups in a table. For each group that it needs, Paddle compares the joined ranks of all existing groups, which
takes half of the time to build the program of one rank of 2,048."""

from __future__ import annotations

from typing import Any


def patch() -> None:
    """Make Paddle's `new_process_group` use the table; groups and their numbers stay the same.

    Many modules import the function, so the function object stays, and only its code is replaced.
    """
    from paddle.distributed.auto_parallel.static import process_group

    process_group._interlace_table = Table()
    process_group.new_process_group.__code__ = _new_process_group.__code__


class Table:
    """Groups by their ranks, kept up to date with Paddle's map of them, which Paddle extends or replaces as a whole."""

    def __init__(self) -> None:
        self._map: Any = None
        self._count = 0
        self._found: dict[tuple[int, ...], Any] = {}

    def find(self, groups: dict[int, Any], ranks: Any) -> Any:
        """The first group with these ranks, except group 0 (the world); None if there is none."""
        if groups is not self._map or len(groups) < self._count:
            self._map, self._count, self._found = groups, 0, {}
        if len(groups) > self._count:
            for number in list(groups)[self._count :]:
                if number != 0:
                    self._found.setdefault(tuple(groups[number].ranks), groups[number])
            self._count = len(groups)
        return self._found.get(tuple(ranks))


def _new_process_group(ranks, group_id=None, force_new_group=False, group_type=None):  # type: ignore[no-untyped-def]
    """Code for Paddle's function of this name; runs with the global names of Paddle's module."""
    known = None if force_new_group else _interlace_table.find(_g_process_group_map, ranks)  # type: ignore[name-defined] # noqa: F821
    if known is not None:
        return known
    if group_id is None:
        group_id = _new_ring_id() + len(_g_process_group_map) + 1  # type: ignore[name-defined] # noqa: F821
    made = ProcessGroup(group_id, ranks, group_type)  # type: ignore[name-defined] # noqa: F821
    _g_process_group_map[group_id] = made  # type: ignore[name-defined] # noqa: F821
    return made
