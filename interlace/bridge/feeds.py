"""Checks that a fed batch has the shape that a plan was made for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from interlace.bridge.lower import Lowered
from interlace.errors import PlanError


@contextmanager
def matching_feed(lowered: Lowered, data: Any) -> Iterator[None]:
    """Context for a step with a batch that the plan can cut into its micro-batches. If nothing is sent between stages, a smaller batch is
    tried, because some programs do not depend on shapes.

    Raises PlanError before anything runs if the batch cannot be run, or afterwards if Paddle failed with a smaller batch.
    """
    found = different_feed(lowered, data)
    if found is None:
        yield
        return
    if not found.possible:
        raise PlanError(str(found))
    try:
        yield
    except Exception as error:
        raise PlanError(str(found)) from error


class Different:
    """A fed array whose shape differs from the plan's."""

    def __init__(self, lowered: Lowered, name: str, found: tuple[int, ...]) -> None:
        self.name, self.found, self.expected = name, found, lowered.fed[name]
        self.count = lowered.num_micro_batches
        rows_alone = len(found) == len(self.expected) and fits(found[1:], self.expected[1:])
        smaller = rows_alone and 0 < found[0] < self.expected[0] and found[0] % self.count == 0
        self.possible = smaller and not lowered.has_p2p

    def __str__(self) -> str:
        each = f"{self.count} micro-batches of {self.expected[0] // self.count} rows" if self.expected else f"{self.count} micro-batches"
        return (
            f"feed {self.name!r}: found shape {list(self.found)}, expected {list(self.expected)}, which the plan runs as {each}; "
            "feed whole batches: drop the last, smaller one (drop_last=True of the sampler or loader) or fill it up, "
            "and use a model of its own for another batch size"
        )


def different_feed(lowered: Lowered, data: Any) -> Different | None:
    """The first fed array whose shape differs from the plan's; None if there is none. Arrays that the plan does not read do not count."""
    for name, expected in lowered.fed.items():
        for given in data if isinstance(data, Sequence) else [data]:
            array = given.get(name) if isinstance(given, Mapping) else None
            found = None if array is None else shape_of(array)
            if found is not None and not fits(found, expected):
                return Different(lowered, name, found)
    return None


def fits(found: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether a shape is the expected one; -1 stands for any size.

    >>> fits([4, 8], [-1, 8]), fits([4, 8], [8, 8])
    (True, False)
    """
    return len(found) == len(expected) and all(want in (-1, size) for size, want in zip(found, expected, strict=True))


def shape_of(array: Any) -> tuple[int, ...] | None:
    """Shape of a fed object: an array, or a tensor of the scope, whose shape is a method; None if it has none."""
    shape = getattr(array, "shape", None)
    shape = shape() if callable(shape) else shape
    return None if shape is None else tuple(int(size) for size in shape)
