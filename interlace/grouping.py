"""Pairs by what comes first in them, and keys that differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The second of the pairs by their first, keys and values in the order in which they come.

    >>> grouped([("a", 1), ("b", 2), ("a", 3)])
    {'a': [1, 3], 'b': [2]}
    """
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def numbered(values: Iterable[V], key: Callable[[V], K]) -> dict[tuple[K, int], V]:
    """Values by their key and their number among those with an equal key, in the order in which they come.

    >>> numbered(["at", "by", "as"], lambda word: word[0])
    {('a', 0): 'at', ('b', 0): 'by', ('a', 1): 'as'}
    """
    seen, found = Counter[K](), dict[tuple[K, int], V]()
    for value in values:
        name = key(value)
        found[name, seen[name]] = value
        seen[name] += 1
    return found
