"""A first order for a pair: a list scheduler that prefers the node that hides most of the communication in flight, under a memory cap.

It postpones fillers only while the rest still fits: after every choice enough memory is left to run the postponed fillers, then
backward in program order, then forward. So its order stays within the cap if the plain order does.

As in `clock.py`, the functions over columns run as plain Python on lists, or compiled on arrays, with the same results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from interlace.cost_model.interference import START_NS
from interlace.grouping import grouped
from interlace.scheduler.interleave.clock import find_heads, is_blocked, run_node
from interlace.scheduler.interleave.columns import Columns, Places, Times, Whole, inverted, rows
from interlace.scheduler.interleave.live_bytes import PairBytes, Walk

CANDIDATES = 6
"""Number of fillers that each decision considers."""
FAR = 1e18
"""Compute time to the next communication if none follows."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of a choice, as shares of the node's own duration.

    Attributes:
        lead: Added for a node that later communication waits for.
        save: Subtracted for a node that hides communication well, while none is in flight.
        backward: Added for a node of backward.
        keep: Whether fillers wait until the last input gradient is computed: the gradient then leaves as early as it can.
        early: Whether fillers that communication waits for, such as weight gradients that are then reduced, come first, unless the next
            node of a part starts communication itself. Without such fillers, this is not tried.
    """

    lead: float = 0.1
    save: float = 0.0
    backward: float = 0.0
    keep: bool = False
    early: bool = False


USUAL = (Weights(), Weights(0.3), Weights(0.0, 0.2), Weights(0.1, 0.2, 0.1), Weights(0.6, 0.0, 0.2), Weights(keep=True))
TRIES = (*USUAL, Weights(early=True))
"""Weights that are tried, without and with `Pair.reduced_first`; the local search starts from the fastest order."""


def task_of(columns: Columns, sides: Sequence[str], table: PairBytes, hides: Sequence[float]) -> Columns:
    """The columns of nodes extended by the state of the list scheduler, as lists. `sides` are the labels of the parts; `hides` as in
    `Places`."""
    count = range(columns.at.num_nodes)
    dep_first, dep = columns.part("dep_first", len(count) + 1), columns.whole[columns.at.dep :]
    users = inverted([dep[first:end] for first, end in pairwise(dep_first)], len(count))
    forward, filler = (columns.part(name, len(count)) for name in ("forward", "filler"))
    lines = grouped((sides[k], k) for k in sorted((k for k in count if not filler[k]), key=lambda k: forward[k]))
    peaks, largest = _plain_backward(forward, filler, table)
    leads = _leads_to(columns, users, filler)
    of_storages = [0] * len(table.size)
    whole: dict[str, Sequence[int]] = {
        "leads": leads,
        **_rows("user_first", "user", users),
        **_rows("line_first", "line", list(lines.values())),
        "line_at": [0] * len(lines),
        "is_backward": [1 - forward[line[0]] for line in lines.values()],
        "size": table.size,
        "num_readers": [len(readers) for readers in table.readers],
        "live_before": [int(each) for each in table.live_before],
        "live_after": [int(each) for each in table.live_after],
        "born": of_storages,
        "waiting": of_storages,
        **_rows("alloc_first", "alloc", table.allocs),
        **_rows("read_first", "read", table.reads),
        "backward_peak": peaks,
        **dict.fromkeys(("pending", "issued", "fillers", "nexts", "choices", "order"), [0] * len(count)),
        **{name: [0] for name in ("live", "live_forward", "num_fillers", "num_nexts", "num_choices", "num_issued")},
    }
    times = {"distance": _comm_distance(columns, lines.values()), "hides": hides, "ranks": [0.0] * len(count)}
    return columns.with_parts(
        whole,
        times,
        num_lines=len(lines),
        num_storages=len(table.size),
        num_leading=sum(each < len(count) for each in leads),
        start_bytes=table.start,
        largest_bytes=largest,
    )


def _rows(first: str, entries: str, listed: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    return dict(zip((first, entries), rows(listed), strict=True))


def _plain_backward(forward: Sequence[int], filler: Sequence[int], table: PairBytes) -> tuple[list[int], int]:
    """For each node of backward, the peak of live memory from it on in program order; and the most bytes that a filler allocates."""
    walk = Walk(table)
    peaks = [0] * (len(forward) + 1)
    line, largest = [k for k, each in enumerate(forward) if not each], 0
    for k in line:
        need = walk.need(k)
        largest = max(largest, need) if filler[k] else largest
        peaks[k] = walk.live + need
        walk.run(k)
    ahead = walk.live
    peaks[len(forward)] = ahead
    for k in reversed(line):
        ahead = peaks[k] = max(peaks[k], ahead)
    return peaks, largest


def _leads_to(columns: Columns, users: Sequence[Sequence[int]], filler: Sequence[int]) -> list[int]:
    """For each filler, the first communication that waits for it or for fillers that need it; the number of nodes if there is none."""
    none = len(filler)
    stream, found = columns.part("stream", none), [none] * none
    for k in reversed(range(none)):
        if filler[k]:
            found[k] = k if stream[k] >= 0 else min((found[user] for user in users[k]), default=none)
    return found


def _comm_distance(columns: Columns, lines: Iterable[Sequence[int]]) -> list[float]:
    """Compute time from each node to the next communication of its side."""
    whole, times, at = columns
    far = [0.0] * at.num_nodes
    for line in lines:
        ahead = FAR
        for k in reversed(line):
            ahead = 0.0 if whole[at.stream + k] >= 0 else ahead + times[at.dur + k]
            far[k] = ahead
    return far


def find_order(
    whole: Whole, times: Times, at: Places, cap_bytes: int, lead: float, save: float, backward: float, keep: bool, early: bool
) -> None:
    """Issue all nodes within a memory cap; weights as in `Weights`. The result is the part `order`."""
    whole[at.live] = at.start_bytes
    for s in range(at.num_storages):
        whole[at.born + s] = whole[at.live_before + s]
        whole[at.waiting + s] = whole[at.num_readers + s]
    for k in range(at.num_nodes):
        whole[at.pending + k] = whole[at.dep_first + k + 1] - whole[at.dep_first + k]
        if whole[at.filler + k] and not whole[at.pending + k]:
            whole[at.fillers + whole[at.num_fillers]] = k
            whole[at.num_fillers] += 1
    while whole[at.num_issued] < at.num_nodes:
        _issue(whole, times, at, _choose(whole, times, at, cap_bytes, lead, save, backward, keep, early))


def _choose(
    whole: Whole, times: Times, at: Places, cap_bytes: int, lead: float, save: float, backward: float, keep: bool, early: bool
) -> int:
    _find_heads(whole, at)
    first_ready, num_open = -1, 0
    for h in range(whole[at.num_nexts]):
        k = whole[at.nexts + h]
        if whole[at.pending + k]:
            continue
        first_ready = k if first_ready < 0 else first_ready
        if whole[at.stream + k] >= 0:
            if _fits(whole, times, at, k, cap_bytes):
                return k
        elif not is_blocked(whole, times, at, k):
            whole[at.choices + num_open] = k
            num_open += 1
    whole[at.num_choices] = num_open
    if early:
        k = _first_that_leads(whole, times, at, cap_bytes)
        if k >= 0:
            return k
    if keep and first_ready >= 0 and _goes_on(whole, at):
        k = _first_that_fits(whole, times, at, cap_bytes)
        k = k if k >= 0 else _first_ready_that_fits(whole, times, at, cap_bytes)
        return k if k >= 0 else first_ready
    flying = whole[at.num_flying] > 0  # the one that was issued first waits for none
    if flying and (at.is_mixed or not num_open):
        _add_free_fillers(whole, times, at)
    if early and not whole[at.num_choices]:
        k = _first_to_be_ready(whole, times, at, cap_bytes)
        if k >= 0:
            return k
    if whole[at.num_choices] > 1:
        _rank(whole, times, at, flying, lead, save, backward)
        _sort_choices(whole, times, at)
    k = _first_that_fits(whole, times, at, cap_bytes)
    if k >= 0:
        return k
    if whole[at.num_fillers]:
        whole[at.num_choices] = 0
        _add_free_fillers(whole, times, at)
        return whole[at.choices] if whole[at.num_choices] else whole[at.fillers]
    k = _first_ready_that_fits(whole, times, at, cap_bytes)
    return k if k >= 0 else first_ready


def _goes_on(whole: Whole, at: Places) -> bool:
    """Whether a backward has nodes left other than fillers."""
    for part in range(at.num_lines):  # noqa: SIM110  (numba takes no generator)
        if whole[at.is_backward + part] and _head(whole, at, part) >= 0:
            return True
    return False


def _first_that_leads(whole: Whole, times: Times, at: Places, cap_bytes: int) -> int:
    """The filler that the first communication waits for, of those that wait for none in flight and fit; -1 if there is none, or one of the
    choices starts communication itself."""
    for c in range(whole[at.num_choices]):
        k = whole[at.choices + c]
        if times[at.distance + k] <= times[at.dur + k]:
            return -1
    found, first = -1, at.num_nodes
    for c in range(whole[at.num_fillers]):
        k = whole[at.fillers + c]
        if whole[at.leads + k] < first and not is_blocked(whole, times, at, k) and _fits(whole, times, at, k, cap_bytes):
            found, first = k, whole[at.leads + k]
    return found


def _first_to_be_ready(whole: Whole, times: Times, at: Places, cap_bytes: int) -> int:
    """Where all wait for communication in flight: the next node of a part, or the filler, that waits least and fits; -1 if none fits."""
    found, least = -1, 0.0
    for c in range(whole[at.num_nexts] + whole[at.num_fillers]):
        k = whole[at.nexts + c] if c < whole[at.num_nexts] else whole[at.fillers + c - whole[at.num_nexts]]
        if whole[at.pending + k] or whole[at.stream + k] >= 0 or not _fits(whole, times, at, k, cap_bytes):
            continue
        wait = 0.0
        for d in range(whole[at.dep_first + k], whole[at.dep_first + k + 1]):
            wait = max(wait, _left_until(whole, times, at, whole[at.dep + d]))
        if found < 0 or wait < least:
            found, least = k, wait
    return found


def _left_until(whole: Whole, times: Times, at: Places, node: int) -> float:
    """Remaining time of a communication in flight and of those before it on its stream; 0 if it is not in flight."""
    left = 0.0
    if whole[at.flies + node]:
        each = whole[at.front + whole[at.stream + node]]
        while each != node:
            left += times[at.left + each]
            each = whole[at.behind + each]
        left += times[at.left + node]
    return left


def _first_that_fits(whole: Whole, times: Times, at: Places, cap_bytes: int) -> int:
    """The first of the choices that fits, or -1."""
    for k in range(whole[at.num_choices]):
        if _fits(whole, times, at, whole[at.choices + k], cap_bytes):
            return whole[at.choices + k]
    return -1


def _first_ready_that_fits(whole: Whole, times: Times, at: Places, cap_bytes: int) -> int:
    """The first of the lines' next nodes that could be issued and fits, or -1."""
    for h in range(whole[at.num_nexts]):
        k = whole[at.nexts + h]
        if not whole[at.pending + k] and _fits(whole, times, at, k, cap_bytes):
            return k
    return -1


def _add_free_fillers(whole: Whole, times: Times, at: Places) -> None:
    """Add the first fillers that wait for no communication in flight to the choices."""
    for k in range(min(CANDIDATES, whole[at.num_fillers])):
        if not is_blocked(whole, times, at, whole[at.fillers + k]):
            whole[at.choices + whole[at.num_choices]] = whole[at.fillers + k]
            whole[at.num_choices] += 1


def _rank(whole: Whole, times: Times, at: Places, flying: bool, lead: float, save: float, backward: float) -> None:
    """Rank each choice by the communication that it hides or, with nothing in flight, by minus the compute time to the next communication;
    in the latter case nodes that hide communication well count as further away."""
    running = find_heads(whole, times, at)
    for c in range(whole[at.num_choices]):
        k = whole[at.choices + c]
        if flying:
            times[at.ranks + c] = _gain(whole, times, at, k, running, lead, backward)
        else:
            times[at.ranks + c] = -times[at.distance + k] * (1 + save * times[at.hides + k])


def _gain(whole: Whole, times: Times, at: Places, node: int, running: int, lead: float, backward: float) -> float:
    """Communication time that a node hides, minus its slow-down, as a share of its own duration."""
    if not times[at.dur + node]:
        return 2.0
    gain, row = 0.0, whole[at.category + node] * at.num_categories
    for h in range(running):
        head = whole[at.heads + h]
        pair = row + whole[at.category + head]
        if times[at.holds + pair] and times[at.now] <= times[at.began + head] + START_NS:
            continue
        slow, other = times[at.slow + pair], times[at.other + pair]
        together = min(times[at.dur + node] * slow, times[at.left + head] * other)
        gain += together / other - together * (1 - 1 / slow)
    gain /= times[at.dur + node]
    if not whole[at.filler + node]:
        gain += lead
    return gain + (0.0 if whole[at.forward + node] else backward)


def _sort_choices(whole: Whole, times: Times, at: Places) -> None:
    """Sort choices, best first; ties are broken by node number."""
    for c in range(1, whole[at.num_choices]):
        k, rank, to = whole[at.choices + c], times[at.ranks + c], c
        while to and (times[at.ranks + to - 1] < rank or (times[at.ranks + to - 1] == rank and whole[at.choices + to - 1] > k)):
            whole[at.choices + to], times[at.ranks + to] = whole[at.choices + to - 1], times[at.ranks + to - 1]
            to -= 1
        whole[at.choices + to], times[at.ranks + to] = k, rank


def _fits(whole: Whole, times: Times, at: Places, node: int, cap_bytes: int) -> bool:
    """Whether all remaining nodes would still fit into memory after this node."""
    live, forward = whole[at.live], whole[at.live_forward]
    need, frees = 0, 0
    for k in range(whole[at.alloc_first + node], whole[at.alloc_first + node + 1]):
        if not whole[at.born + whole[at.alloc + k]]:
            need += whole[at.size + whole[at.alloc + k]]
    if live + need > cap_bytes:
        return False
    for k in range(whole[at.read_first + node], whole[at.read_first + node + 1]):
        s = whole[at.read + k]
        if whole[at.waiting + s] == 1 and not whole[at.live_after + s]:
            frees += whole[at.size + s]
    after = live + need - frees
    others = whole[at.num_fillers] > 1 or (whole[at.num_fillers] == 1 and whole[at.fillers] != node)
    postponed = at.largest_bytes if others else 0
    if after + postponed > cap_bytes:
        return False
    if whole[at.forward + node]:
        return forward + after - live + _backward_ahead(whole, at) <= cap_bytes
    return not forward or forward + _backward_ahead(whole, at) <= cap_bytes


def _backward_ahead(whole: Whole, at: Places) -> int:
    """Peak of live memory of backward from its next operation on, in program order."""
    most = -1
    for part in range(at.num_lines):
        if whole[at.is_backward + part]:
            head = _head(whole, at, part)
            if head >= 0:
                most = max(most, whole[at.backward_peak + head])
    return most if most >= 0 else whole[at.backward_peak + at.num_nodes]


def _find_heads(whole: Whole, at: Places) -> None:
    """Collect the next node of each part. If parts are not mixed, a part waits for the end of those before it, except for receives that
    must come before a send."""
    count = 0
    for part in range(at.num_lines):
        head = _head(whole, at, part)
        if head >= 0:
            whole[at.nexts + count] = head
            count += 1
            if not at.is_mixed:
                for k in range(whole[at.dep_first + head], whole[at.dep_first + head + 1]):
                    dep = whole[at.dep + k]
                    if whole[at.forward + dep] and not whole[at.issued + dep]:
                        whole[at.nexts + count] = dep
                        count += 1
                break
    whole[at.num_nexts] = count


def _head(whole: Whole, at: Places, part: int) -> int:
    """The next node of a part; -1 after the last."""
    first, count = at.line + whole[at.line_first + part], whole[at.line_first + part + 1] - whole[at.line_first + part]
    here = whole[at.line_at + part]
    while here < count and whole[at.issued + whole[first + here]]:
        here += 1
    whole[at.line_at + part] = here
    return whole[first + here] if here < count else -1


def _issue(whole: Whole, times: Times, at: Places, node: int) -> None:
    whole[at.issued + node] = 1
    whole[at.order + whole[at.num_issued]] = node
    whole[at.num_issued] += 1
    run_node(whole, times, at, node)
    _hold(whole, at, node)
    if whole[at.filler + node]:
        _drop_filler(whole, at, node)
    for k in range(whole[at.user_first + node], whole[at.user_first + node + 1]):
        user = whole[at.user + k]
        whole[at.pending + user] -= 1
        if not whole[at.pending + user] and whole[at.filler + user]:
            _add_filler(whole, at, user)


def _hold(whole: Whole, at: Places, node: int) -> None:
    """Allocate a node's storages, then free those that nothing reads any more."""
    change = 0
    for k in range(whole[at.alloc_first + node], whole[at.alloc_first + node + 1]):
        s = whole[at.alloc + k]
        if not whole[at.born + s]:
            whole[at.born + s] = 1
            change += whole[at.size + s]
    for k in range(whole[at.read_first + node], whole[at.read_first + node + 1]):
        s = whole[at.read + k]
        whole[at.waiting + s] -= 1
        if not whole[at.waiting + s] and not whole[at.live_after + s]:
            change -= whole[at.size + s]
    whole[at.live] += change
    if whole[at.forward + node]:
        whole[at.live_forward] += change


def _drop_filler(whole: Whole, at: Places, node: int) -> None:
    k = at.fillers
    while whole[k] != node:
        k += 1
    whole[at.num_fillers] -= 1
    for later in range(k, at.fillers + whole[at.num_fillers]):
        whole[later] = whole[later + 1]


def _add_filler(whole: Whole, at: Places, node: int) -> None:
    k = at.fillers + whole[at.num_fillers]
    while k > at.fillers and whole[k - 1] > node:
        whole[k] = whole[k - 1]
        k -= 1
    whole[k] = node
    whole[at.num_fillers] += 1


HELPERS = (
    _choose,
    _goes_on,
    _first_that_leads,
    _first_to_be_ready,
    _left_until,
    _first_that_fits,
    _first_ready_that_fits,
    _add_free_fillers,
    _rank,
    _gain,
    _sort_choices,
    _fits,
    _backward_ahead,
    _find_heads,
    _head,
    _issue,
    _hold,
    _drop_filler,
    _add_filler,
)
"""The functions that `find_order` calls; the compiled engine registers them with numba."""
