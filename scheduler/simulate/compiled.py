"""The simulator compiled by numba: the same results from the same arrays as `simulator.Simulation`, which is the specification.

Each stream has at most one future event: the end of the op instance that runs there, or the issue of its next one. A tree of
minima over streams gives the earliest. Cost O(events x log streams).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numba.extending
import numpy as np
import numpy.typing as npt

from interlace.compiling import compiled
from interlace.cost_model import interference
from interlace.cost_model.interference import START_NS
from interlace.ir.arrays import Flags, Ints
from interlace.scheduler.simulate import arrays, power, simulator
from interlace.scheduler.simulate.arrays import ONE, TO_DEVICE, TO_HOST, BothDirections, SimInput
from interlace.scheduler.simulate.power import TICK_NS, PowerInput, PowerTrace
from interlace.scheduler.simulate.simulator import NEVER

_jit = partial(compiled, sources=(arrays, interference, simulator, power))
WAITS, UNBLOCKS, BLOCKS, MEETS, FOLLOWS, LEADS = 1, 2, 4, 8, 16, 32
"""Flags of op instances: waits for others; others wait for it; the host waits for it; is part of a rendezvous; is a buffered receive; is
the send of a buffered receive."""
TOGETHER = MEETS | FOLLOWS | LEADS
"""Flags of op instances whose start affects others, or depends on them."""
CONCERNS = UNBLOCKS | BLOCKS | TOGETHER
"""Flags of op instances whose end affects more than their stream."""

for helper in simulator.SPLIT_HELPERS:
    numba.extending.register_jitable(helper)
numba.extending.register_jitable(power.level_at)
_limiter, _at_clock = _jit(power.limiter), _jit(power.at_clock)
split_rank = _jit(simulator.split_rank)
"""The one definition of `simulator.split_rank`, compiled."""


class Columns(NamedTuple):
    """Columns of `SimInput` and `BothDirections`, and the rank of each stream, as numba takes them. Without the latter, `way` and `devices`
    are 0."""

    first: Ints
    first_stream: Ints
    rank_of: Ints
    stream: Ints
    issue: Ints
    dur: Ints
    side: Flags
    awaits: Ints
    kind: Ints
    excess: Ints
    blocked_excess: Ints
    way: Ints
    both_excess: Ints
    host: Ints
    devices: Ints
    dep_first: Ints
    dep: Ints
    meet: Ints
    meet_first: Ints
    mates: Ints
    meet_size: Ints
    follow: Ints
    tail: Flags


class Limits(NamedTuple):
    """`PowerInput` as numba takes it; without a limit, the first tick is NEVER and the rest is unused."""

    first_tick: int
    draw: Ints
    share: Ints
    own: Ints
    moves: Flags
    slower: Ints
    energy: Ints
    load: Ints
    room_mw: int
    waiting_mw: int
    beside_mw: int
    response: int

    @classmethod
    def of(cls, power: PowerInput | None) -> Limits:
        """Limits of a simulation; `power` is None without a power limit."""
        if power is None:
            nothing = np.zeros(1, np.int64)
            return cls(NEVER, nothing, nothing, nothing, np.zeros(1, np.bool_), nothing, nothing, nothing, 0, 0, 0, 0)
        clocks = power.clocks
        return cls(
            TICK_NS,
            power.draw,
            power.share,
            power.own,
            power.moves,
            clocks.slower,
            clocks.energy,
            clocks.load,
            power.limit_mw - power.static_mw,
            power.waiting_mw,
            power.beside_mw,
            power.response,
        )


def run_items(sim: SimInput, trace: PowerTrace | None = None) -> tuple[Ints, Ints, Ints]:
    """Start, ready and end of every op instance; -1 for those that never end. `trace` is updated to the end of the step."""
    start, ready, end = (np.full(sim.num_items, -1, np.int64) for _ in range(3))
    rank_of = np.repeat(np.arange(len(sim.ranks)), np.diff(sim.first_stream))
    made = ("rank_of", "way", "both_excess", "host", "devices", "tail")
    columns = {name: getattr(sim, name) for name in Columns._fields if name not in made}
    none, no_rank = np.zeros((1, 2), np.int64), np.zeros(len(sim.ranks), np.int64)
    both = sim.both or BothDirections(np.zeros(len(sim.blocked_excess), np.int64), none, no_rank, no_rank)
    columns |= {"way": both.way, "both_excess": both.excess, "host": both.host, "devices": both.devices}
    tail = sim.tail if sim.tail is not None else np.zeros(sim.num_items, np.bool_)
    trace = trace or PowerTrace.begin(len(sim.ranks))
    before = trace.level.tolist()
    given = Columns(rank_of=rank_of, tail=tail, **columns)
    changes = _run(given, Limits.of(sim.power), trace.level, trace.mean, trace.spent, start, ready, end)
    trace.changes = np.concatenate([np.array([(0, at, level) for at, level in enumerate(before)], np.int64).reshape(-1, 3), changes]).T
    return start, ready, end


@_jit
def _grouped(keys: Ints, count: int) -> tuple[Ints, Ints]:
    """Indices grouped by key, each group ascending, and the offsets of the groups (by counting sort)."""
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
def _unblocks(dep_first: Ints, dep: Ints) -> tuple[Ints, Ints, Ints]:
    """Successors from predecessors: successors of all op instances, their offsets, and how many others each op instance waits for."""
    count = len(dep_first) - 1
    by_before, first = _grouped(dep, count)
    waits = np.empty(count, np.int64)
    after = np.empty(len(dep), np.int64)
    for item in range(count):
        waits[item] = dep_first[item + 1] - dep_first[item]
        for k in range(dep_first[item], dep_first[item + 1]):
            after[k] = item
    return after[by_before], first, waits


@_jit
def _marks(dep_first: Ints, unblock_first: Ints, awaits: Ints, meet: Ints, follow: Ints) -> npt.NDArray[np.uint8]:
    """Flags of each op instance, which save most other look-ups."""
    marks = np.zeros(len(meet), np.uint8)
    for item in range(len(meet)):
        mark = WAITS * (dep_first[item + 1] > dep_first[item]) + UNBLOCKS * (unblock_first[item + 1] > unblock_first[item])
        mark += MEETS * (meet[item] >= 0) + FOLLOWS * (follow[item] >= 0)
        marks[item] |= mark
        if awaits[item] >= 0:
            marks[awaits[item]] |= BLOCKS
        if follow[item] >= 0:
            marks[follow[item]] |= LEADS
    return marks


@_jit
def _followers(follow: Ints) -> Ints:
    """The buffered receive that waits for each op instance's message, or -1."""
    follower = np.full(len(follow), -1, np.int64)
    for item in range(len(follow)):
        if follow[item] >= 0:
            follower[follow[item]] = item
    return follower


@_jit
def _next_syncs(first: Ints, awaits: Ints) -> Ints:
    """For each op instance, the first from there on after which the host of its rank waits, or the index after the rank's last."""
    found = np.empty(len(awaits), np.int64)
    for at in range(len(first) - 1):
        upto = first[at + 1]
        for item in range(first[at + 1] - 1, first[at] - 1, -1):
            upto = item if awaits[item] >= 0 else upto
            found[item] = upto
    return found


@_jit
def _put(tree: Ints, leaves: int, stream: int, when: int) -> None:
    """Set the event of a stream."""
    node = leaves + stream
    tree[node] = when
    node //= 2
    while node:
        least = min(tree[2 * node], tree[2 * node + 1])
        if tree[node] == least:
            return
        tree[node] = least
        node //= 2


@_jit
def _spend(at: int, charge: Ints, spent: Ints) -> int:
    """As `Simulation._spend`."""
    found: int = charge[at]
    charge[at] = 0
    spent[at] += found
    return found


@_jit
def _energy(work: int, draw: int, factor: int) -> int:
    """Energy of an amount of work at a clock; as in `Simulation._charge`."""
    found: int = _at_clock(((work >> 10) * draw) >> 10, factor)
    return found


@_jit
def _clock_stretch(share: int, own: int, level: int, slower: Ints) -> int:
    """By how much a clock below its own stretches an op instance, over 1, in units of 1 / ONE."""
    found: int = (share * (slower[max(own, level)] - slower[own])) >> 20
    return found


@_jit
def _pace(stretch: int) -> int:
    """Work done per nanosecond, in units of 1 / ONE ns."""
    return ONE if stretch == ONE else (ONE * ONE + stretch - 1) // stretch


@_jit
def _run(columns: Columns, limits: Limits, level: Ints, mean: Ints, spent: Ints, start: Ints, ready: Ints, end: Ints) -> Ints:
    """Fill `start`, `ready` and `end`: advance streams that may go on, set the paces, take the next event, repeat. With a power limit,
    `level`, `mean` and `spent` are updated to the end of the step. Returns the clock changes (time, rank, level). `[num_changes, 3]`

    It is one long function for speed: with helpers that share a record of its arrays it took ten times as long (0.66 s instead of 0.06 s
    for 450,000 op instances, numba 0.68). `Simulation` has the same steps as methods.
    """
    (
        first,
        first_stream,
        rank_of,
        stream_of,
        issue,
        dur,
        side,
        awaits,
        kind,
        excess,
        blocked_excess,
        way,
        both_excess,
        host,
        devices,
        dep_first,
        dep,
        meet,
        meet_first,
        mates,
        meet_size,
        follow,
        tail,
    ) = columns
    num_ranks, num_streams = len(first) - 1, len(rank_of)
    (next_tick, draw, share, own, moves, slower, energy, load, room_mw, waiting_mw, beside_mw, response) = limits
    powered, left_in_step = next_tick != NEVER, len(tail) - np.sum(tail)
    # For energy, per stream: the work of what runs there, and how much of it is counted. Per rank: the energy counted since the last tick.
    work, charged, charge = np.zeros(num_streams, np.int64), np.zeros(num_streams, np.int64), np.zeros(num_ranks, np.int64)
    # Per rank: since when a communication has run beside computation, or NEVER; for how long one did since the last tick.
    both_since, both_ns = np.full(num_ranks, NEVER, np.int64), np.zeros(num_ranks, np.int64)
    changes, num_changes = np.zeros((16, 3), np.int64), 0
    fifo, fifo_first = _grouped(stream_of, num_streams)
    unblocks, unblock_first, waits = _unblocks(dep_first, dep)
    marks, follower = _marks(dep_first, unblock_first, awaits, meet, follow), _followers(follow)
    next_sync = _next_syncs(first, awaits)
    # Per stream: next index in `fifo`; what runs, and its class; whether the next one is blocked at a rendezvous; the stream that
    # keeps the remaining work, the pace, and the time since when the pace holds for all mates of a rendezvous; and these three.
    head, running, running_kind = fifo_first[:-1].copy(), np.full(num_streams, -1, np.int64), np.zeros(num_streams, np.int64)
    is_blocked = np.zeros(num_streams, np.bool_)
    lead, stretch = np.arange(num_streams), np.full(num_streams, ONE, np.int64)
    left, pace, since = np.zeros(num_streams, np.int64), np.zeros(num_streams, np.int64), np.zeros(num_streams, np.int64)
    # Per rank: the delay of its host, the last op instance that it can issue now, how many run, how many are blocked.
    late, bound, num_running = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    num_blocked = np.zeros(num_ranks, np.int64)
    for at in range(num_ranks):
        bound[at] = next_sync[first[at]] if first[at + 1] > first[at] else 0
    arrived = np.zeros(len(meet_size), np.int64)
    # Per rank: in how many directions it copies. Per host: the sum over its devices.
    counts_copying = np.any(way)
    directions, num_copying = np.zeros(num_ranks, np.int64), np.zeros(1 + np.max(host) if num_ranks else 1, np.int64)
    # Events: tree[1] is the earliest, tree[leaves + s] that of stream s; due[s] is what the latter should be.
    leaves = 1
    while leaves < num_streams:
        leaves *= 2
    tree, due = np.full(2 * leaves, NEVER, np.int64), np.full(num_streams, NEVER, np.int64)
    # Streams to look at, and ranks on which the set of running or blocked op instances has changed.
    look, queued, num_look = np.arange(num_streams), np.ones(num_streams, np.bool_), num_streams
    changed, is_changed, num_changed = np.empty(num_ranks, np.int64), np.zeros(num_ranks, np.bool_), 0
    now, last = 0, -1
    while True:
        while num_look:
            num_look -= 1
            s = look[num_look]
            queued[s] = False
            if running[s] >= 0 or head[s] == fifo_first[s + 1]:
                continue
            item = fifo[head[s]]
            at = rank_of[s]
            mark = marks[item]
            if ready[item] < 0:
                if item > bound[at]:
                    continue
                issued = issue[item] + late[at]
                if issued > now:
                    due[s] = issued
                    _put(tree, leaves, s, issued)
                    continue
                if mark & WAITS and waits[item] > 0:
                    continue
                ready[item] = now
                if due[s] != NEVER and mark & (MEETS | FOLLOWS):  # the event was its issue; its start will set new events
                    due[s] = NEVER
                    _put(tree, leaves, s, NEVER)
                if mark & MEETS:
                    arrived[meet[item]] += 1
            is_short = False
            if mark & MEETS:
                is_short = arrived[meet[item]] < meet_size[meet[item]]
            elif mark & FOLLOWS:
                is_short = start[follow[item]] < 0
            if is_short:
                if not is_blocked[s]:
                    is_blocked[s] = True
                    num_blocked[at] += 1
                    if not is_changed[at]:
                        is_changed[at], changed[num_changed] = True, at
                        num_changed += 1
                continue
            if mark & MEETS:
                m = meet[item]
                longest, leader = 0, stream_of[mates[meet_first[m]]]
                for k in range(meet_first[m], meet_first[m + 1]):
                    mate = mates[k]
                    other = stream_of[mate]
                    at = rank_of[other]
                    longest = max(longest, dur[mate])
                    start[mate], running[other], running_kind[other] = now, mate, kind[mate]
                    lead[other], stretch[other] = leader, ONE
                    work[other], charged[other] = 0, 0
                    num_running[at] += 1
                    num_blocked[at] -= is_blocked[other]
                    is_blocked[other] = False
                    if not is_changed[at]:
                        is_changed[at], changed[num_changed] = True, at
                        num_changed += 1
                pace[leader], since[leader], left[leader] = 0, now, longest * ONE
                for k in range(meet_first[m], meet_first[m + 1]):
                    work[stream_of[mates[k]]] = longest * ONE
                continue
            start[item], running[s], running_kind[s] = now, item, kind[item]
            lead[s], stretch[s] = s, ONE
            num_running[at] += 1
            num_blocked[at] -= is_blocked[s]
            is_blocked[s] = False
            pace[s], since[s], left[s] = 0, now, dur[item] * ONE
            work[s], charged[s] = 0 if mark & FOLLOWS else left[s], 0
            if mark & FOLLOWS:
                left[s] = 0 if end[follow[item]] >= 0 else NEVER
            if not is_changed[at]:
                is_changed[at], changed[num_changed] = True, at
                num_changed += 1
            if mark & LEADS and ready[follower[item]] >= 0 and not queued[stream_of[follower[item]]]:
                other = stream_of[follower[item]]
                queued[other], look[num_look] = True, other
                num_look += 1
        # Where the number of directions in which devices of a host copy has changed, all ranks there that copy in both have changed.
        if counts_copying:
            for n in range(num_changed):
                at, is_in, is_out = changed[n], False, False
                for s in range(first_stream[at], first_stream[at + 1]):
                    if running[s] >= 0:
                        is_in |= way[running_kind[s]] == TO_DEVICE
                        is_out |= way[running_kind[s]] == TO_HOST
                if is_in + is_out != directions[at]:
                    num_copying[host[at]] += devices[at] * (is_in + is_out - directions[at])
                    directions[at] = is_in + is_out
                    for other in range(num_ranks):
                        if directions[other] == 2 and host[other] == host[at] and not is_changed[other]:
                            is_changed[other], changed[num_changed] = True, other
                            num_changed += 1
        # Stretch of all that runs on the changed ranks; then its pace, which needs the stretch of mates on other ranks.
        for n in range(num_changed):
            at = changed[n]
            low, high = first_stream[at], first_stream[at + 1]
            alone = num_running[at] == 1
            is_moving = is_computing = False
            for s in range(low, high):
                if running[s] >= 0:
                    total = ONE + (blocked_excess[running_kind[s]] if num_blocked[at] else 0)
                    if not alone:
                        if powered:
                            is_moving |= moves[running[s]]
                            is_computing |= not side[running[s]]
                        for other in range(low, high):
                            if running[other] >= 0 and other != s:
                                a, b, computes_first = running[s], running[other], 0
                                if side[a] and not side[b]:
                                    computes_first = int(start[b] <= ready[a] + START_NS)
                                elif side[b] and not side[a]:
                                    computes_first = int(start[a] <= ready[b] + START_NS)
                                total += excess[computes_first, running_kind[s], running_kind[other]]
                                if way[running_kind[s]] + way[running_kind[other]] == TO_DEVICE + TO_HOST:
                                    total += both_excess[num_copying[host[at]], way[running_kind[s]] - 1]
                    if powered:
                        total += _clock_stretch(share[running[s]], own[running[s]], level[at], slower)
                    stretch[s] = total
            if both_since[at] != NEVER:
                both_ns[at] += now - both_since[at]
            both_since[at] = now if is_moving and is_computing else NEVER
        for n in range(num_changed):
            at = changed[n]
            is_changed[at] = False
            for s in range(first_stream[at], first_stream[at + 1]):
                item, leader = running[s], lead[s]
                if item < 0 or left[leader] == NEVER:
                    continue
                worst = stretch[s]
                if marks[item] & MEETS:
                    m = meet[item]
                    for k in range(meet_first[m], meet_first[m + 1]):
                        worst = max(worst, stretch[stream_of[mates[k]]])
                new = _pace(worst)
                if new != pace[leader]:
                    left[leader] -= pace[leader] * (now - since[leader])
                    since[leader], pace[leader] = now, new
                    need = (left[leader] + ONE - 1) >> 20 if new == ONE else (left[leader] + new - 1) // new
                    then = now + max(0, need)
                    if num_running[at] == 1 and num_blocked[at] == 0:
                        # It runs alone, and nothing on the rank waits for others: what follows it on its stream runs undisturbed until
                        # something concerns another stream, the host, another rank or the clock.
                        until = next_tick
                        for other in range(first_stream[at], first_stream[at + 1]):
                            if other != s:
                                until = min(until, due[other])
                        while then < until and not marks[item] & CONCERNS and head[s] + 1 < fifo_first[s + 1]:
                            following = fifo[head[s] + 1]
                            if following > bound[at] or issue[following] + late[at] > then or marks[following] & TOGETHER:
                                break
                            if marks[following] & WAITS and waits[following] > 0:
                                break
                            if way[kind[following]] != way[kind[item]]:  # concerns copies of other ranks
                                break
                            end[item] = then
                            left_in_step -= not tail[item]
                            stretched = ONE
                            if powered:
                                charge[at] += _energy(work[s] - charged[s], draw[item], energy[max(own[item], level[at])])
                                stretched += _clock_stretch(share[following], own[following], level[at], slower)
                            head[s] += 1
                            item = following
                            ready[item], start[item], running[s], running_kind[s] = then, then, item, kind[item]
                            pace[s], since[s] = _pace(stretched), then
                            work[s], left[s], charged[s] = dur[item] * ONE, dur[item] * ONE, 0
                            then += dur[item] if stretched == ONE else (left[s] + pace[s] - 1) // pace[s]
                    due[leader] = then
                    _put(tree, leaves, leader, then)
        num_changed = 0
        # The next event. That of the last stream was left in the tree, in case a new one replaces it at once.
        if last >= 0 and due[last] == NEVER:
            _put(tree, leaves, last, NEVER)
        now = tree[1]
        if now >= NEVER:
            if powered:
                for at in range(num_ranks):
                    charge[at] += _at_clock(beside_mw * both_ns[at], energy[level[at]])
                    _spend(at, charge, spent)
            return changes[:num_changes]
        if left_in_step and next_tick <= now:
            now, last = next_tick, -1
            next_tick += TICK_NS
            for s in range(num_streams):
                if running[s] >= 0 and left[lead[s]] != NEVER:
                    rest = left[lead[s]] - pace[lead[s]] * (now - since[lead[s]])
                    done = work[s] - min(work[s], max(0, rest))
                    at = rank_of[s]
                    charge[at] += _energy(done - charged[s], draw[running[s]], energy[max(own[running[s]], level[at])])
                    charged[s] = done
            for at in range(num_ranks):
                if both_since[at] != NEVER:
                    both_ns[at] += now - both_since[at]
                    both_since[at] = now
                charge[at] += _at_clock(beside_mw * both_ns[at], energy[level[at]])
                both_ns[at] = 0
                charge[at] += _at_clock(waiting_mw * num_blocked[at] * TICK_NS, energy[level[at]])
                mean[at], chosen = _limiter(mean[at], level[at], _spend(at, charge, spent), response, room_mw, load)
                if chosen != level[at]:
                    level[at] = chosen
                    if num_changes == len(changes):
                        changes = np.concatenate((changes, np.zeros_like(changes)))
                    changes[num_changes, 0], changes[num_changes, 1], changes[num_changes, 2] = now, at, chosen
                    num_changes += 1
                    is_changed[at], changed[num_changed] = True, at
                    num_changed += 1
            continue
        node = 1
        while node < leaves:
            node = 2 * node if tree[2 * node] == now else 2 * node + 1
        last = node - leaves
        due[last] = NEVER
        item = running[last]
        if item < 0:
            queued[last], look[0] = True, last
            num_look = 1
            continue
        group, upto = 0, 1
        if marks[item] & MEETS:
            group, upto = meet_first[meet[item]], meet_first[meet[item] + 1]
        for k in range(group, upto):
            done = mates[k] if marks[item] & MEETS else item
            while done >= 0:  # the item, then a receive that waits for its message
                end[done] = now
                left_in_step -= not tail[done]
                s = stream_of[done]
                at = rank_of[s]
                if powered:
                    charge[at] += _energy(work[s] - charged[s], draw[done], energy[max(own[done], level[at])])
                mark = marks[done]
                running[s] = -1
                num_running[at] -= 1
                head[s] += 1
                if not is_changed[at]:
                    is_changed[at], changed[num_changed] = True, at
                    num_changed += 1
                if not queued[s]:
                    queued[s], look[num_look] = True, s
                    num_look += 1
                if mark & UNBLOCKS:
                    for j in range(unblock_first[done], unblock_first[done + 1]):
                        waits[unblocks[j]] -= 1
                        s = stream_of[unblocks[j]]
                        if waits[unblocks[j]] == 0 and not queued[s]:
                            queued[s], look[num_look] = True, s
                            num_look += 1
                if mark & BLOCKS:
                    while bound[at] < first[at + 1] and end[awaits[bound[at]]] >= 0:
                        sync = bound[at]
                        late[at] = max(late[at], end[awaits[sync]] - issue[sync])
                        bound[at] = next_sync[sync + 1] if sync + 1 < first[at + 1] else first[at + 1]
                    for s in range(first_stream[at], first_stream[at + 1]):
                        if not queued[s]:
                            queued[s], look[num_look] = True, s
                            num_look += 1
                following = follower[done] if mark & LEADS else -1
                done = following if following >= 0 and start[following] >= 0 and end[following] < 0 else -1
