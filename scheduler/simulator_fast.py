"""The compiled twin of `simulator.Simulation`: the same results from the same arrays, by numba.

Events wait in a tree of minima over streams, one leaf a stream: the end of what runs there, or the issue of what comes next.
Cost O(events x log streams), about 50 ns an item.
"""

from __future__ import annotations

import numba
import numba.extending
import numpy as np

from interlace.scheduler import simulator
from interlace.scheduler.lower_to_sim import ONE as _ONE
from interlace.scheduler.lower_to_sim import Ints, SimInput

ONE = int(_ONE)
NEVER = int(simulator.NEVER)
_jit = numba.njit(cache=True)

numba.extending.register_jitable(simulator.covered)
split_rank = _jit(simulator.split_rank)
"""The one definition of `simulator.split_rank`, compiled."""


def run_items(sim: SimInput) -> tuple[Ints, Ints, Ints]:
    """Start, ready and end of every item; -1 for those that never end."""
    by_stream, fifo_first = _grouped(sim.stream, len(sim.stream_names))
    rank = np.repeat(np.arange(len(sim.ranks)), np.diff(sim.first_stream))
    out = np.full((3, sim.num_items), -1, np.int64)
    _run(by_stream, fifo_first, sim.first, sim.first_stream, rank, sim.stream, sim.issue, sim.dur, sim.blocking, sim.kind,
         sim.excess, sim.dep_first, sim.dep, sim.meet, sim.meet_first, sim.mates, sim.meet_size, sim.follow, out[0], out[1],
         out[2])  # fmt: skip
    return out[0], out[1], out[2]


@_jit
def _grouped(keys, count):
    """Places grouped by key, each group ascending, and the groups' offsets; a counting sort."""
    first = np.zeros(count + 1, np.int64)
    for key in keys:
        first[key + 1] += 1
    for key in range(count):
        first[key + 1] += first[key]
    at = first[:-1].copy()
    order = np.empty(len(keys), np.int64)
    for k in range(len(keys)):
        order[at[keys[k]]] = k
        at[keys[k]] += 1
    return order, first


@_jit
def _followers(follow):
    """The receive that waits for each item's message, or -1."""
    follower = np.full(len(follow), -1, np.int64)
    for item in range(len(follow)):
        if follow[item] >= 0:
            follower[follow[item]] = item
    return follower


@_jit
def _unblocks(dep_first, dep):
    """Successors from predecessors: offsets and items; and how many each item waits for."""
    count = len(dep_first) - 1
    by_before, first = _grouped(dep, count)
    waits = np.empty(count, np.int64)
    after = np.empty(len(dep), np.int64)
    for item in range(count):
        waits[item] = dep_first[item + 1] - dep_first[item]
        for k in range(dep_first[item], dep_first[item + 1]):
            after[k] = item
    return first, after[by_before], waits


@_jit
def _run(fifo, fifo_first, first, first_stream, rank_of, stream_of, issue, dur, blocking, kind, excess, dep_first, dep, meet,
         meet_first, mates, meet_size, follow, start, ready, end):  # fmt: skip
    """Fill `start`, `ready` and `end`."""
    unblock_first, unblocks, waits = _unblocks(dep_first, dep)
    follower = _followers(follow)
    num_streams, num_ranks = len(fifo_first) - 1, len(first) - 1
    leaves = 1
    while leaves < num_streams:
        leaves *= 2
    tree = np.full(2 * leaves, NEVER, np.int64)  # tree[1] is the earliest event, tree[leaves + s] stream s's own
    head = fifo_first[:-1].copy()
    running = np.full(num_streams, -1, np.int64)
    lead = np.zeros(num_streams, np.int64)  # stream that keeps the books of what runs here
    stretch = np.zeros(num_streams, np.int64)
    left = np.zeros(num_streams, np.int64)
    pace = np.zeros(num_streams, np.int64)
    since = np.zeros(num_streams, np.int64)
    arrived = np.zeros(len(meet_size), np.int64)
    late = np.zeros(num_ranks, np.int64)
    bound = np.zeros(num_ranks, np.int64)  # last item that the host can issue now
    next_block = np.empty(len(start), np.int64)
    for at in range(num_ranks):
        upto = first[at + 1]
        for item in range(first[at + 1] - 1, first[at] - 1, -1):
            upto = item if blocking[item] else upto
            next_block[item] = upto
        bound[at] = next_block[first[at]] if first[at + 1] > first[at] else 0
    look = np.empty(4 * num_streams + 8, np.int64)  # streams whose next item may be able to start
    queued = np.zeros(num_streams, np.bool_)
    touched = np.empty(num_ranks, np.int64)
    is_touched = np.zeros(num_ranks, np.bool_)
    num_look, num_touched, now = 0, 0, 0
    for s in range(num_streams):
        look[num_look] = s
        queued[s] = True
        num_look += 1
    while True:
        while num_look:
            num_look -= 1
            s = look[num_look]
            queued[s] = False
            if running[s] >= 0 or head[s] == fifo_first[s + 1]:
                continue
            item = fifo[head[s]]
            at = rank_of[s]
            if ready[item] < 0:
                if item > bound[at]:
                    continue
                issued = issue[item] + late[at]
                if issued > now:
                    _put(tree, leaves, s, issued)
                    continue
                if waits[item] > 0:
                    continue
                ready[item] = now
                if meet[item] >= 0:
                    arrived[meet[item]] += 1
            m = meet[item]
            if m < 0:
                f = follow[item]
                if f >= 0 and start[f] < 0:
                    continue
                start[item] = now
                running[s] = item
                lead[s] = s
                pace[s] = 0
                since[s] = now
                left[s] = dur[item] * ONE
                if f >= 0:
                    left[s] = 0 if end[f] >= 0 else NEVER
                    if end[f] < 0:
                        _put(tree, leaves, s, NEVER)
                if not is_touched[at]:
                    is_touched[at] = True
                    touched[num_touched] = at
                    num_touched += 1
                f = follower[item]
                if f >= 0 and ready[f] >= 0 and not queued[stream_of[f]]:
                    queued[stream_of[f]] = True
                    look[num_look] = stream_of[f]
                    num_look += 1
            elif arrived[m] == meet_size[m]:
                longest = 0
                for k in range(meet_first[m], meet_first[m + 1]):
                    longest = max(longest, dur[mates[k]])
                leader = stream_of[mates[meet_first[m]]]
                pace[leader] = 0
                since[leader] = now
                left[leader] = longest * ONE
                for k in range(meet_first[m], meet_first[m + 1]):
                    mate = mates[k]
                    start[mate] = now
                    other = stream_of[mate]
                    running[other] = mate
                    lead[other] = leader
                    stretch[other] = ONE
                    _put(tree, leaves, other, NEVER)
                    if not is_touched[rank_of[other]]:
                        is_touched[rank_of[other]] = True
                        touched[num_touched] = rank_of[other]
                        num_touched += 1
        # The new pace of everything that runs on a touched rank.
        for n in range(num_touched):
            at = touched[n]
            for s in range(first_stream[at], first_stream[at + 1]):
                if running[s] >= 0:
                    total = ONE
                    mine = kind[running[s]]
                    for other in range(first_stream[at], first_stream[at + 1]):
                        if other != s and running[other] >= 0:
                            total += excess[mine, kind[running[other]]]
                    stretch[s] = total
        for n in range(num_touched):
            at = touched[n]
            is_touched[at] = False
            for s in range(first_stream[at], first_stream[at + 1]):
                item = running[s]
                if item < 0:
                    continue
                leader = lead[s]
                if left[leader] == NEVER:
                    continue
                worst = stretch[s]
                m = meet[item]
                if m >= 0:
                    for k in range(meet_first[m], meet_first[m + 1]):
                        worst = max(worst, stretch[stream_of[mates[k]]])
                new = max(1, ONE * ONE // worst) if worst != ONE else ONE
                if new != pace[leader]:
                    left[leader] -= pace[leader] * (now - since[leader])
                    since[leader] = now
                    pace[leader] = new
                    need = (left[leader] + ONE - 1) >> 20 if new == ONE else (left[leader] + new - 1) // new
                    _put(tree, leaves, leader, now + max(0, need))
        num_touched = 0
        # The next event.
        now = tree[1]
        if now >= NEVER:
            return
        node = 1
        while node < leaves:
            node = 2 * node if tree[2 * node] == now else 2 * node + 1
        s = node - leaves
        item = running[s]
        _put(tree, leaves, s, NEVER)
        if item < 0:
            look[num_look] = s
            queued[s] = True
            num_look += 1
            continue
        m = meet[item]
        from_, to = (0, 1) if m < 0 else (meet_first[m], meet_first[m + 1])
        for k in range(from_, to):
            done = item if m < 0 else mates[k]
            while done >= 0:  # the item, then a receive that waits for its message
                end[done] = now
                s = stream_of[done]
                at = rank_of[s]
                running[s] = -1
                head[s] += 1
                if not is_touched[at]:
                    is_touched[at] = True
                    touched[num_touched] = at
                    num_touched += 1
                if not queued[s]:
                    queued[s] = True
                    look[num_look] = s
                    num_look += 1
                for j in range(unblock_first[done], unblock_first[done + 1]):
                    later = unblocks[j]
                    waits[later] -= 1
                    if waits[later] == 0 and not queued[stream_of[later]]:
                        queued[stream_of[later]] = True
                        look[num_look] = stream_of[later]
                        num_look += 1
                if blocking[done]:
                    late[at] = now - issue[done]
                    bound[at] = next_block[done + 1] if done + 1 < first[at + 1] else done
                    for other in range(first_stream[at], first_stream[at + 1]):
                        if not queued[other]:
                            queued[other] = True
                            look[num_look] = other
                            num_look += 1
                f = follower[done]
                done = f if f >= 0 and start[f] >= 0 and end[f] < 0 else -1


@_jit
def _put(tree, leaves, s, when):
    """Set the event of stream `s`."""
    node = leaves + s
    tree[node] = when
    node //= 2
    while node:
        least = min(tree[2 * node], tree[2 * node + 1])
        if tree[node] == least:
            return
        tree[node] = least
        node //= 2
