"""Types of arrays of integers and flags, and helpers that make them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def offsets(counts: Sequence[int] | Ints) -> Ints:
    """Running sums of `counts`, with a 0 in front. `[len(counts) + 1]`"""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(counts, np.int64))])


def ints(numbers: Sequence[int]) -> Ints:
    """Numbers as an array of 64-bit integers."""
    return np.array(numbers, np.int64)


def pairs_of(pairs: Sequence[tuple[int, int]]) -> Ints:
    """Pairs as an array `[n, 2]`, also if there are none."""
    return np.array(pairs, np.int64).reshape(-1, 2)
