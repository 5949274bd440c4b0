"""Paddle looks for a known process group by comparing the joined ranks of every group there is, for each group that it asks for: half of
the time that a rank of 2,048 takes to build. Here it looks in a table."""

from __future__ import annotations

from typing import Any


def patch() -> None:
    """Give Paddle's `new_process_group` the table; groups and their numbers stay what they are.

    Many modules have the function by a name of their own, so it keeps its identity and gets other code.
    """
    from paddle.distributed.auto_parallel.static import process_group

    process_group._interlace_table = Table()
    process_group.new_process_group.__code__ = _new_process_group.__code__


class Table:
    """Groups by their ranks, kept up with Paddle's map of them, which it renews as a whole or adds to."""

    def __init__(self) -> None:
        self._map: Any = None
        self._count = 0
        self._found: dict[tuple[int, ...], Any] = {}

    def find(self, groups: dict[int, Any], ranks: Any) -> Any:
        """The first group of these ranks that is not the world's; None if there is none."""
        if groups is not self._map or len(groups) < self._count:
            self._map, self._count, self._found = groups, 0, {}
        if len(groups) > self._count:
            for number in list(groups)[self._count :]:
                if number != 0:
                    self._found.setdefault(tuple(groups[number].ranks), groups[number])
            self._count = len(groups)
        return self._found.get(tuple(ranks))


def _new_process_group(ranks, group_id=None, force_new_group=False, group_type=None):  # type: ignore[no-untyped-def]
    """Runs with the names of Paddle's module."""
    known = None if force_new_group else _interlace_table.find(_g_process_group_map, ranks)  # type: ignore[name-defined] # noqa: F821
    if known is not None:
        return known
    if group_id is None:
        group_id = _new_ring_id() + len(_g_process_group_map) + 1  # type: ignore[name-defined] # noqa: F821
    made = ProcessGroup(group_id, ranks, group_type)  # type: ignore[name-defined] # noqa: F821
    _g_process_group_map[group_id] = made  # type: ignore[name-defined] # noqa: F821
    return made
