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
"""Least expected relative error at the very size and group size that were measured. Of eight collectives of 16 MiB that two programs
measured on H200s, seven differ by up to 8 %, one (all_to_all over 2) by 16 %; in two sessions on H100s calls differ by up to 12 %, copies
by up to 5 %."""
CALL_ERROR_NS, CALL_ERROR = 1000, 0.20
"""Least expected error of a call: this many nanoseconds, but as a relative error at most `CALL_ERROR`. In two sessions on H100s, short
calls differ by up to 1.5 us, 0.9 us in the median."""
SIZE_ERROR = 0.12
"""Least expected error at a size between measured ones (the H200's all-reduces differ by 6 % between two runs)."""
BEYOND_ERROR = 0.50
"""Expected error at a size outside the measured ones, from the fitted latency and bandwidth."""
GROUP_ERROR = 0.30
"""Least expected error at a group size that was not measured (on the H200, all-reduce over 4 derived from over 2 is 20 % off)."""
NETWORK_ERROR = 0.50
"""Least expected error across hosts, from the network's bandwidth and latency."""
PROXY_ERROR = 0.80
"""Least expected error of a kind that was not measured, derived from another by ring traffic (on the H200s, broadcast and reduce come out
17 to 137 % too slow, four in five of them by up to 77 %)."""
_PROXIES = {
    "broadcast": "all_gather",
    "reduce": "reduce_scatter",
    "barrier": "all_reduce",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_gather",
}


class Found(NamedTuple):
    """A time, how it was determined (`exact`: measured at this very size and group size), its expected relative error, and a line for
    reports."""

    dur_ns: float
    how: How
    rel_error: float
    detail: str


def traffic(kind: str, ranks: int) -> float:
    """Bytes that pass through each rank's link per byte of the tensor, in a ring.

    >>> traffic("all_reduce", 4), traffic("all_gather", 4), traffic("broadcast", 4)
    (1.5, 0.75, 1.0)
    """
    if kind in ("broadcast", "reduce", "send_recv"):
        return 1.0
    return (2.0 if kind in ("all_reduce", "barrier") else 1.0) * (ranks - 1) / ranks


Within = Callable[[str, int, int], Found | None]
"""Time of a collective within a host, by kind, number of ranks, and bytes; None if not known."""


def across_hosts(kind: str, ranks: int, hosts: int, size_bytes: int, network: Network, within: Within) -> Found | None:
    """Estimate of one collective over `ranks` devices, divided equally among `hosts` hosts. The devices of a host divide the tensor among
    themselves over their own links, and each exchanges its share with its counterparts on the other hosts at the network's rate.

    None if neither the part within a host nor anything comparable was measured.
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
    """Bytes that each device sends over the network, and the number of messages in sequence. This is a lower bound, as few bytes as a ring
    of hosts sends and as few messages as a tree: libraries choose one of the two."""
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
    """The collectives among the devices of one host that it consists of, by kind and bytes."""
    if kind in ("all_reduce", "barrier"):
        return [("reduce_scatter", size_bytes), ("all_gather", size_bytes)]
    if kind == "all_to_all":
        return [("all_to_all", size_bytes // hosts)]
    return [] if kind == "send_recv" else [(kind, size_bytes)]


class CommTimes:
    """Look-ups of times for collectives and exchanges with a limit of `ctas` on NCCL's CTAs (0: none); kinds without samples at this limit
    are answered by those without a limit."""

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
        """Time of one collective; None if nothing comparable was measured."""
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
        """Expected relative error at a size; between two measured sizes at least the error of predicting these from their neighbours."""
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
        """Latency (ns) and time per byte (ns).

        If only one size is known for this group size, the latency is the median of the group sizes with several. If the known size takes no
        longer than that latency, it says nothing about the time per byte, which is then also that of the others, scaled by ring traffic.
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
    """Relative error of predicting a point from the curve through its two neighbours; 0 for the first and the last point."""
    if not 0 < at < len(points) - 1:
        return 0.0
    size, dur_ns = points[at]
    return abs(Curve((points[at - 1], points[at + 1])).at(size) / dur_ns - 1)


def _has_sizes(points: list[tuple[float, float]]) -> bool:
    return len({size for size, _ in points}) > 1


class CopyTimes:
    """Look-ups of times for copies while `ranks` devices of the host copy at once (default: the largest number measured)."""

    def __init__(self, samples: Iterable[CopySample], ranks: int | None = None) -> None:
        samples = [sample for sample in samples if sample.direction != "both"]
        self._points: dict[str, list[CopySample]] = {}
        for way in sorted({sample.direction for sample in samples}):
            wanted = nearest_count({sample.ranks for sample in samples if sample.direction == way}, ranks)
            self._points[way] = [s for s in samples if s.direction == way and s.ranks == wanted]

    def time(self, direction: str, size_bytes: int) -> Found | None:
        """Time of one copy; None if none was measured in this direction."""
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
