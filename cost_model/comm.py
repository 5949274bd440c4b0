"""Times of collectives, exchanges and copies from measured sizes, groups and directions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from math import ceil, log, log2
from statistics import median
from typing import NamedTuple

from interlace.cost_model.base import How
from interlace.cost_model.curves import Curve, line
from interlace.cost_model.profile import CommSample, CopySample, Network, nearest_count

SAME_ERROR = 0.10
"""Least expected error at the very size and group that was measured: of eight collectives of 16 MiB that two programs measured on
the H200s, seven differ by up to 8 %, one (all_to_all over 2) by 16 %; calls of two sittings on H100s by up to 12 %, copies by up to 5 %."""
CALL_ERROR_NS, CALL_ERROR = 1000, 0.20
"""... and least expected amount of it, up to this share: short calls of two sittings on H100s differ by up to 1.5 us, in the median by
0.9."""
SIZE_ERROR = 0.12
"""Least expected error at a size between or near measured ones (the H200's all-reduces differ by 6 % between two runs)."""
BEYOND_ERROR = 0.50
"""... at a size outside the measured ones, from the fitted latency and bandwidth."""
GROUP_ERROR = 0.30
"""... at a group size that was not measured (all-reduce over 4 from over 2 on the H200: 20 % off)."""
NETWORK_ERROR = 0.50
"""... across hosts, from the network's bandwidth and latency."""
PROXY_ERROR = 0.80
"""... of a kind that was not measured, from one whose traffic is known (on the H200s, broadcast and reduce so found are 17 to 137 %
too slow, four in five by up to 77 %)."""
_PROXIES = {
    "broadcast": "all_gather",
    "reduce": "reduce_scatter",
    "barrier": "all_reduce",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_gather",
}


class Found(NamedTuple):
    """A time, how it was found (`exact`: measured at just this size and group), its expected error, and a line for people."""

    dur_ns: float
    how: How
    rel_error: float
    detail: str


def traffic(kind: str, ranks: int) -> float:
    """Bytes through each rank's link for a byte of tensor, in a ring.

    >>> traffic("all_reduce", 4), traffic("all_gather", 4), traffic("broadcast", 4)
    (1.5, 0.75, 1.0)
    """
    if kind in ("broadcast", "reduce", "send_recv"):
        return 1.0
    return (2.0 if kind in ("all_reduce", "barrier") else 1.0) * (ranks - 1) / ranks


Within = Callable[[str, int, int], Found | None]
"""Time of a collective within a host, by kind, ranks and bytes."""


def across_hosts(kind: str, ranks: int, hosts: int, size_bytes: int, network: Network, within: Within) -> Found | None:
    """Estimate of one collective over `ranks` devices of `hosts` hosts, as many of each: the devices of a host share the tensor among
    themselves over their own links, and each exchanges its share with its like on the other hosts at the network's rate.

    None where what happens within a host was not measured, nor anything comparable.
    """
    local = max(1, ranks // hosts)
    between_bytes, steps = _between(kind, ranks, hosts, local, size_bytes)
    inside = [within(name, local, part) for name, part in _inside(kind, local, hosts, size_bytes)] if local > 1 else []
    known = [each for each in inside if each is not None]
    if len(known) < len(inside):
        return None
    dur_ns = between_bytes * 1e9 / network.bytes_per_s + steps * network.latency_ns + sum(each.dur_ns for each in known)
    error = max([NETWORK_ERROR, *(each.rel_error for each in known)])
    return Found(dur_ns, "roofline", error, f"estimated: {kind} over {hosts} hosts of {local}, the network's {network.source} rate")


def _between(kind: str, ranks: int, hosts: int, local: int, size_bytes: int) -> tuple[float, int]:
    """Bytes that each device sends over the network, and messages that follow one another: as many bytes as in a ring of hosts, in as few
    steps as in a tree; the libraries choose between the two, and are not faster than both."""
    share, tree = size_bytes / local, ceil(log2(hosts))
    if kind in ("all_reduce", "barrier"):
        return 2 * share * (hosts - 1) / hosts, 2 * tree
    if kind == "all_to_all":
        return size_bytes * (ranks - local) / ranks, 1
    if kind == "send_recv":
        return float(size_bytes), 1
    if kind in ("broadcast", "reduce"):
        return share, tree
    return share * (hosts - 1) / hosts, tree


def _inside(kind: str, local: int, hosts: int, size_bytes: int) -> list[tuple[str, int]]:
    """What the devices of one host do among themselves for it."""
    if kind in ("all_reduce", "barrier"):
        return [("reduce_scatter", size_bytes), ("all_gather", size_bytes)]
    if kind == "all_to_all":
        return [("all_to_all", size_bytes // hosts)]
    return [] if kind == "send_recv" else [(kind, size_bytes)]


class CommTimes:
    """Look-ups for collectives and exchanges under one limit on NCCL's CTAs (0: none)."""

    def __init__(self, samples: Iterable[CommSample], ctas: int = 0, floor_ns: int = 0) -> None:
        self._floor_ns = floor_ns
        self._points: dict[tuple[str, int], list[tuple[float, float]]] = {}
        self._errors: dict[tuple[str, int, int], float] = {}
        self._published: set[tuple[str, int, int]] = set()
        samples = list(samples)
        limited = {sample.kind for sample in samples if ctas and sample.ctas == ctas}
        self._unlimited = {sample.kind for sample in samples if ctas} - limited
        for sample in samples:
            if sample.ctas == (ctas if sample.kind in limited else 0):
                self._published |= {(sample.kind, sample.group_size, sample.size_bytes)} if sample.source == "published" else set()
                key = (sample.kind, sample.group_size)
                self._points.setdefault(key, []).append((sample.size_bytes, sample.dur_ns))
                self._errors[(*key, sample.size_bytes)] = sample.spread_ns / sample.dur_ns

    def time(self, kind: str, ranks: int, size_bytes: int) -> Found | None:
        """Time of one collective; None where nothing comparable was measured."""
        source = next((name for name in (kind, _PROXIES.get(kind, "")) if self._groups(name)), None)
        if source is None:
            return None
        near = min(self._groups(source), key=lambda n: (abs(log(n / ranks)), n))
        dur_ns, how = self._line(source, near, size_bytes)
        scale = traffic(kind, ranks) / traffic(source, near)
        error, notes = max(self._error(source, near, size_bytes), min(CALL_ERROR, CALL_ERROR_NS / max(1.0, dur_ns))), []
        if near != ranks:
            error, notes = max(error, GROUP_ERROR), [f"derived: over {near} ranks, scaled by ring traffic to {ranks}"]
        if source != kind:
            error, notes = max(error, PROXY_ERROR), [*notes, f"derived from {source}"]
        if source in self._unlimited:
            notes.append("measured without the limit on CTAs only")
        by_others = ", published" if (kind, ranks, size_bytes) in self._published else ""
        return Found(dur_ns * scale, "proxy" if notes else how, error, "; ".join(notes) or f"{kind} over {ranks} ranks{by_others}")

    def _error(self, kind: str, ranks: int, size_bytes: int) -> float:
        """Between two measured sizes what these are off when predicted from their neighbours, if that is more."""
        points = sorted(self._points[kind, ranks])
        sizes = [size for size, _ in points]
        if size_bytes in sizes:
            return max(self._errors[kind, ranks, size_bytes], SAME_ERROR)
        if not sizes[0] <= size_bytes <= sizes[-1]:
            return BEYOND_ERROR
        right = bisect_left(sizes, size_bytes)
        return max(SIZE_ERROR, *(_left_out(points, at) for at in (right - 1, right)))

    def _groups(self, kind: str) -> list[int]:
        return [ranks for name, ranks in self._points if name == kind]

    def _line(self, kind: str, ranks: int, size_bytes: int) -> tuple[float, How]:
        points = self._points[kind, ranks]
        for size, dur_ns in points:
            if size == size_bytes:
                return dur_ns, "exact"
        curve = Curve(points)
        latency, slope = self._fit(kind, ranks)
        if _has_sizes(points) and curve.inside(size_bytes):
            return curve.at(size_bytes), "interpolated"
        small, large = min(points), max(points)
        if size_bytes < small[0]:
            start = min(max(latency, self._floor_ns), small[1])
            return start + (small[1] - start) * size_bytes / small[0], "extrapolated"
        return large[1] + slope * (size_bytes - large[0]), "extrapolated"

    def _fit(self, kind: str, ranks: int) -> tuple[float, float]:
        """Latency (ns) and time a byte.

        Of a group of which one size is known, with the latency of those of which several are; where that size takes no longer than this
        latency it says nothing of bytes, and their time is that of the other groups, by ring traffic.
        """
        points = self._points[kind, ranks]
        known = [
            (*line(found), traffic(kind, ranks) / traffic(kind, group))
            for (name, group), found in self._points.items()
            if name == kind and _has_sizes(found)
        ]
        if _has_sizes(points) or not known:
            return line(points)
        (size_bytes, dur_ns), latency = points[0], median(latency for latency, _, _ in known)
        if dur_ns <= latency:
            return dur_ns, median(slope * share for _, slope, share in known)
        return latency, (dur_ns - latency) / size_bytes


def _left_out(points: list[tuple[float, float]], at: int) -> float:
    """Relative error of a point on the curve through its neighbours; 0 of the first and the last."""
    if not 0 < at < len(points) - 1:
        return 0.0
    size, dur_ns = points[at]
    return abs(Curve((points[at - 1], points[at + 1])).at(size) / dur_ns - 1)


def _has_sizes(points: list[tuple[float, float]]) -> bool:
    return len({size for size, _ in points}) > 1


class CopyTimes:
    """Look-ups for copies while `ranks` devices of the host copy at once (default: the most that was measured)."""

    def __init__(self, samples: Iterable[CopySample], ranks: int | None = None) -> None:
        samples = [sample for sample in samples if sample.direction != "both"]
        self._points: dict[str, list[CopySample]] = {}
        for way in sorted({sample.direction for sample in samples}):
            wanted = nearest_count({sample.ranks for sample in samples if sample.direction == way}, ranks)
            self._points[way] = [s for s in samples if s.direction == way and s.ranks == wanted]

    def time(self, direction: str, size_bytes: int) -> Found | None:
        """Time of one copy; None where none was measured in this direction."""
        samples = self._points.get(direction)
        if not samples:
            return None
        note = f"{samples[0].ranks} device(s) of the host copying at once"
        for sample in samples:
            if sample.size_bytes == size_bytes:
                return Found(sample.dur_ns, "exact", max(sample.spread_ns / sample.dur_ns, SAME_ERROR), note)
        curve = Curve((s.size_bytes, s.dur_ns) for s in samples)
        inside = curve.inside(size_bytes)
        return Found(curve.at(size_bytes), "interpolated" if inside else "extrapolated", SIZE_ERROR if inside else BEYOND_ERROR, note)
