"""Time as a function of size and depth, from measured points: exact at a point, interpolated between points, scaled beyond them.

The depth of a kernel is the length over which it computes one element of its result: the contracted size of a product, the row length of a
softmax.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import exp, log
from statistics import median

from interlace.grouping import grouped

FEW_POINTS_ERROR = 0.5
"""Expected error of a curve through fewer than three points, which cannot be checked against itself."""


class Curve:
    """Time as a non-decreasing function of size; straight lines in log-log between points `(size, ns)`.

    Points of equal size are averaged (geometric mean); neighbours whose times decrease are pooled into their weighted mean, so a
    larger size never takes less. Below the first point time falls linearly towards `floor_ns` at size 0, above the last it grows in
    proportion to the size.

    >>> round(Curve([(100, 10), (400, 40)], floor_ns=2).at(200), 9)
    20.0
    """

    def __init__(self, points: Iterable[tuple[float, float]], floor_ns: float = 0.0) -> None:
        self._sizes, self._logs = _rising(points)
        self._floor_ns = min(floor_ns, exp(self._logs[0])) if self._logs else 0.0

    def __len__(self) -> int:
        return len(self._sizes)

    def at(self, size: float) -> float:
        """Time at a size, in nanoseconds; needs at least one point."""
        sizes, logs = self._sizes, self._logs
        if size <= sizes[0]:
            return self._floor_ns + (exp(logs[0]) - self._floor_ns) * size / sizes[0]
        if size >= sizes[-1]:
            return exp(logs[-1]) * size / sizes[-1]
        right = bisect_left(sizes, size)
        share = log(size / sizes[right - 1]) / log(sizes[right] / sizes[right - 1])
        return exp(logs[right - 1] + share * (logs[right] - logs[right - 1]))

    @property
    def smallest(self) -> float:
        """The smallest measured size."""
        return self._sizes[0]

    @property
    def largest(self) -> float:
        """The largest measured size."""
        return self._sizes[-1]

    def inside(self, size: float) -> bool:
        """Whether a size lies between the smallest and the largest point."""
        return bool(self._sizes) and self._sizes[0] <= size <= self._sizes[-1]


class Surface:
    """Time as a function of depth and size, with one curve over size for each measured depth.

    Points are `(depth, size, ns)`; at a fixed number of results the size (FLOPs, bytes) is proportional to the depth. Beyond its own
    points, a depth's curve has the shape of the curve through all points. Between two depths, time is a straight line in log-log at the
    same number of results (size / depth), and never less than at a smaller depth. Below the first depth it falls linearly towards
    `floor_ns` at depth 0, above the last it grows in proportion to the depth.

    >>> surface = Surface([(10, 100, 8), (10, 200, 16), (40, 400, 16), (40, 800, 32)])
    >>> round(surface.at(10, 150), 9), round(surface.at(20, 200), 9), round(surface.at(80, 800), 9)
    (12.0, 11.313708499, 32.0)
    """

    def __init__(self, points: Iterable[tuple[float, float, float]], floor_ns: float = 0.0) -> None:
        by_depth = grouped((depth, (size, dur_ns)) for depth, size, dur_ns in points)
        self.whole = Curve([point for found in by_depth.values() for point in found], floor_ns)
        self._depths = sorted(by_depth)
        self._curves = [Curve(by_depth[depth], floor_ns) for depth in self._depths]
        self._floor_ns = floor_ns

    def at(self, depth: float, size: float) -> float:
        """Time at a depth and size, in nanoseconds; needs at least one point. O(number of depths)."""
        depths, results = self._depths, size / depth
        right = bisect_left(depths, depth)
        below = max((self._along(place, results) for place in range(right)), default=0.0)
        if right == len(depths):
            return below * depth / depths[-1]
        above = max(below, self._along(right, results))
        if not below:
            floor_ns = min(self._floor_ns, above)
            return floor_ns + (above - floor_ns) * depth / depths[0]
        share = log(depth / depths[right - 1]) / log(depths[right] / depths[right - 1])
        return exp(log(below) + share * log(above / below))

    def _along(self, place: int, results: float) -> float:
        """Time at measured depth number `place`, for this number of results (size / depth)."""
        curve, size = self._curves[place], self._depths[place] * results
        edge = min(max(size, curve.smallest), curve.largest)
        return curve.at(edge) * self.whole.at(size) / self.whole.at(edge)

    def inside(self, depth: float, size: float) -> bool:
        """Whether a depth and a size lie between the smallest and the largest measured ones."""
        return self.whole.inside(size) and self._depths[0] <= depth <= self._depths[-1]


@lru_cache(maxsize=256)
def check_error(points: tuple[tuple[float, float, float], ...], floor_ns: float = 0.0) -> float:
    """Expected relative error of a surface: the upper quartile of each point's error when predicted from the others. O(points^2)."""
    if len(points) < 3:
        return FEW_POINTS_ERROR
    errors = []
    for left_out, (depth, size, dur_ns) in enumerate(points):
        others = [point for place, point in enumerate(points) if place != left_out]
        errors.append(abs(Surface(others, floor_ns).at(depth, size) / dur_ns - 1))
    errors.sort()
    return errors[(3 * (len(errors) - 1) + 3) // 4]


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Latency (ns, at least 0) and time per byte (ns) from measured points `(bytes, ns)`: median intercept and median slope.

    >>> line([(100, 15), (200, 20)])
    (10.0, 0.05)
    """
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :] if a[0] != b[0]]
    slope = median(slopes) if slopes else 0.0
    if slope <= 0:
        return 0.0, median(dur / size for size, dur in points)
    latency = median(dur - slope * size for size, dur in points)
    return (latency, slope) if latency > 0 else (0.0, median(dur / size for size, dur in points))


def _rising(points: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Sizes in order and the logarithms of their times, pooled so that they never fall (pool adjacent violators)."""
    blocks: list[tuple[float, list[float]]] = []
    for size, logs in sorted(grouped((size, log(dur_ns)) for size, dur_ns in points).items()):
        mean, sizes = sum(logs) / len(logs), [size]
        while blocks and blocks[-1][0] > mean:
            other, more = blocks.pop()
            mean = (mean * len(sizes) + other * len(more)) / (len(sizes) + len(more))
            sizes = more + sizes
        blocks.append((mean, sizes))
    return [size for _, sizes in blocks for size in sizes], [mean for mean, sizes in blocks for _ in sizes]
