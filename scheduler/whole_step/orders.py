"""Orders between op instances that are decided for all ranks at once, from a simulation of the whole step.

A send and its receive are kernels that wait for each other on the device, and a waiting kernel occupies multiprocessors: matrix products
beside one take 1.2 to 1.9 times as long on an H200. The one that is ready first is therefore made to wait for a compute op of its own
rank that ends shortly before the other is ready; if that compute op is issued later in the job, the transfer is issued right after it. A
receive that is issued so late that a busier sender waits for it is issued after an earlier compute op. No other order changes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import msgspec
import numpy as np

from interlace.cost_model import Costs
from interlace.errors import PlanError
from interlace.ir import Event, Graph, Job, OpInstance, Program
from interlace.ir.arrays import Ints, pairs_of
from interlace.ir.copies import items_of, job_bounds, places_of
from interlace.ir.equivalent_ranks import groups_within_stage
from interlace.ir.graph import dependencies
from interlace.ir.kinds import is_collective, is_comm, is_copy, is_p2p, is_receive, takes_events
from interlace.ir.per_ops import once_per_items, once_per_ops
from interlace.scheduler.simulate.arrays import COMPUTE, Options
from interlace.scheduler.simulate.simulator import Result, simulate

Order = tuple[OpInstance, OpInstance]
"""The second one, a transfer, waits for the first, a compute op of its rank."""
ROUNDS = 8
"""Most rounds of the search: once computation is no longer slowed, transfers start earlier and need other orders."""
LEAST_GAIN = 0.001
"""Share of the step that two rounds must gain for the search to continue."""
Simulation = Callable[[Sequence[Program]], Result]


class Orders(msgspec.Struct, frozen=True):
    """The chosen orders and their effect.

    Attributes:
        before_ns, step_ns: Simulated step without and with the orders.
        joules: Energy per step of the simulated ranks with the orders; 0 if it is not known.
    """

    of_plans: tuple[tuple[Order, ...], ...] = ()
    before_ns: int = 0
    step_ns: int = 0
    joules: float = 0.0


def simulation(cost: Costs, representative: dict[int, int], host_waits: bool = True) -> Simulation:
    """A function that simulates plans of one rank of each stage. The peers of a single rank are always ready. `host_waits` as in
    `Options`."""
    options = Options(peers_ready=not representative, representative=representative, host_waits=host_waits)
    return lambda programs: simulate(programs, cost, options, with_memory=False)


def find_orders(plans: Sequence[Program], run: Simulation, margin_ns: int, rounds: int = ROUNDS) -> Orders:
    """Orders by which each transfer is posted `margin_ns` before its peer is ready, as long as they shorten the simulated step, after at
    most `rounds` rounds. Raises PlanError if the step without them cannot be simulated."""
    result, transfers = run(plans), transfers_of(plans)
    best = Orders(tuple(() for _ in plans), result.step_ns, result.step_ns, sum(result.joules))
    found: list[dict[OpInstance, OpInstance]] = [{} for _ in plans]
    steps = [result.step_ns]
    for _ in range(rounds):
        found = transfers_in_time(transfers, found, result, margin_ns)
        orders = tuple(tuple((after, transfer) for transfer, after in each.items()) for each in found)
        try:
            result = run([with_orders(plan, mine) for plan, mine in zip(plans, orders, strict=True)])
        except PlanError:  # ranks would wait for each other in a circle
            break
        if result.step_ns < best.step_ns:
            best = Orders(orders, best.before_ns, result.step_ns, sum(result.joules))
        steps.append(best.step_ns)
        if steps[-1] > (1 - LEAST_GAIN) * steps[max(0, len(steps) - 3)]:
            break
    return best


def transfers_in_time(
    plans: Sequence[Transfers], known: Sequence[Mapping[OpInstance, OpInstance]], result: Result, margin_ns: int
) -> list[dict[OpInstance, OpInstance]]:
    """For each plan, transfers -> the compute op to wait for, so that each is posted `margin_ns` before its peer is ready. `plans` have no
    orders of this kind, `known` is what transfers wait for already, and `result` the simulation with that.

    One that was ready earlier waits for the last compute op that ends by then, of those that are issued before it or that it may be issued
    behind (`Span`). One that now keeps its peer waiting, as all has moved since, waits for an earlier one, and so does a receive that was
    issued late, if its sender's stage has more to compute. Others wait for what they did.
    """
    return [_of_rank(plan, mine, _Rank(plan, result, at), margin_ns) for at, (plan, mine) in enumerate(zip(plans, known, strict=True))]


def transfers_of(plans: Sequence[Program]) -> list[Transfers]:
    alone = len({plan.pipeline.stage for plan in plans}) == len(plans)
    return [Transfers(plan, alone) for plan in plans]


class Span(NamedTuple):
    """The range in which a transfer may be issued, as indices into the plan's issue order.

    Attributes:
        begin, end: First index of its job, and the index after its last.
        at: Index of the transfer.
        after: Last earlier op instance of its job that it needs, or a collective that it may not pass; `begin` if there is none.
        waits_for: Op instance that an event makes it wait for; -1 if there is none.
        before: First later op instance of its job that needs it, or a collective that it may not pass; `end` if there is none, and `at` if
            an event is recorded after the transfer.
    """

    begin: int
    end: int
    at: int
    after: int
    waits_for: int
    before: int


class Transfers:
    """The transfers of a plan and the bounds on when they may be issued, which are the same in every round.

    Attributes:
        spans: Span of each transfer; within a job, the last transfer comes first.
        places: Indices of the transfers in the issue order. `[transfers]`
        receives: Ids of the operations that receive.
    """

    def __init__(self, program: Program, alone: bool) -> None:
        """`alone`: whether the plan is the only one of its stage."""
        self._program, collectives = program, _not_passed(program, alone)
        recorded = _places(program, [event.record for event in program.events])
        waits_for = {item: recorded[event.record] for event in program.events for item in event.waits}
        self.spans: dict[OpInstance, Span] = {}
        for job, (begin, end) in zip(program.jobs, pairwise(job_bounds(program)), strict=True):
            for k, after, before in reversed(_between(program, job, collectives)):
                item, at = job.items[k], begin + k
                self.spans[item] = Span(begin, end, at, begin + after, waits_for.get(item, -1), at if item in recorded else begin + before)
        self.receives, self._spans = _receives(program), np.array([*self.spans.values()], np.int64).reshape(-1, len(Span._fields))
        self.places = self._spans[:, Span._fields.index("at")]
        num_ops = 1 + max((op.id for op in program.ops), default=0)
        self.records = np.zeros(num_ops, np.bool_)
        self.records[list(_recorders(program))] = True

    def issued(self, op: Ints, micro_batch: Ints) -> Ints:
        """Indices of op instances in the issue order; -1 for those that no job runs."""
        return places_of(self._program, op, micro_batch)

    def spans_among(self, places: Ints) -> list[Span]:
        """Spans with indices that count only the op instances at these places, which must be ascending."""
        return [Span(*each) for each in np.searchsorted(places, self._spans).tolist()]


class _Rank:
    """Times of the op instances of one rank.

    Attributes:
        places, ends: Indices in the issue order, and end times, of those that took time on the compute stream and after which an event can
            be recorded; in the order in which they ran.
        transfers: Items of the plan's transfers in the simulator's arrays.
    """

    def __init__(self, plan: Transfers, result: Result, at: int) -> None:
        self.result, self.at = result, at
        sim, times = result.input, result.times
        items = slice(int(sim.first[at]), int(sim.first[at + 1]))
        op, micro_batch, end = sim.op[items], sim.micro_batch[items], times.end[items]
        on_compute = np.array([name == COMPUTE for name in sim.stream_names])[sim.stream[items]]
        chosen = np.flatnonzero(plan.records[op] & on_compute & (end > times.start[items]))
        issued = plan.issued(op, micro_batch)
        self._op, self._micro_batch = op[chosen], micro_batch[chosen]
        self.places, self.ends = issued[chosen], end[chosen].tolist()
        item_at = np.zeros(2 + issued.max(initial=-1), np.int64)  # the last one for those of no job
        item_at[issued] = np.arange(items.start, items.stop)
        self.transfers = item_at[plan.places]

    def compute(self, k: int) -> OpInstance:
        """The k-th compute op instance of `places`."""
        return int(self._op[k]), int(self._micro_batch[k])

    def numbers(self, plan: Transfers, items: Sequence[OpInstance]) -> dict[OpInstance, int]:
        """Op instance -> its index in `places`, for those of `items` that are there."""
        places = plan.issued(*pairs_of(items).T)
        found = np.searchsorted(self.places, places)
        there = np.append(self.places, -1)[found] == places
        return {item: k for item, k, known in zip(items, found.tolist(), there.tolist(), strict=True) if known}

    def times(self) -> Iterator[tuple[int, int, int]]:
        """Issue, ready, start of each transfer."""
        times = self.result.times
        return zip(*(column[self.transfers].tolist() for column in (times.issue, times.ready, times.start)), strict=True)

    def peers(self) -> list[list[int]]:
        """For each transfer, the items of other ranks that it meets; empty if these are not simulated."""
        sim = self.result.input
        return [
            [mate for mate in sim.mates_at(meet) if mate != item] if meet >= 0 else []
            for item, meet in zip(self.transfers.tolist(), sim.meet[self.transfers].tolist(), strict=True)
        ]

    def is_less_busy(self, peers: Sequence[int]) -> bool:
        """Whether the ranks of these items have more to compute in a step."""
        compute_ns, rank_index = self.result.compute_ns, self.result.input.rank_index
        return all(compute_ns[rank_index(peer)] > compute_ns[self.at] for peer in peers)


def _of_rank(plan: Transfers, known: Mapping[OpInstance, OpInstance], rank: _Rank, margin_ns: int) -> dict[OpInstance, OpInstance]:
    """What the transfers of one rank wait for."""
    ends, number, waits = rank.ends, rank.numbers(plan, [*known.values()]), dict[OpInstance, OpInstance]()
    job, limit = -1, 0
    columns = (plan.spans.items(), plan.spans_among(rank.places), rank.times(), rank.peers())
    for (transfer, of_plan), span, (issue, ready, start), peers in zip(*columns, strict=True):
        if of_plan.begin != job:
            job, limit = of_plan.begin, span.end
        limit = max(span.at, min(limit, span.before))  # transfers of a job keep their order
        least = max(span.after, span.waits_for)
        peer_ready = min((int(rank.result.times.ready[peer]) for peer in peers), default=start)
        keeps_peer, can_go_up = start - peer_ready > margin_ns, transfer[0] in plan.receives
        last = number.get(known[transfer], -1) if transfer in known else -1
        if start - ready > margin_ns:
            until = min(bisect_right(ends, start - margin_ns), limit) - 1
            last = until if until >= 0 and ends[until] > ready else last
        elif keeps_peer and can_go_up and issue > peer_ready and rank.is_less_busy(peers):
            until = max(bisect_right(ends, peer_ready - margin_ns) - 1, least)
            last = until if until + 1 < span.at else -1
        elif keeps_peer and transfer in known:
            last = bisect_right(ends, peer_ready - margin_ns) - 1
        last = min(last, limit - 1)
        if last >= (least if can_go_up and last >= span.begin else 0):
            waits[transfer] = rank.compute(last)
            limit = max(span.at, last + 1)
    return waits


def _between(program: Program, job: Job, collectives: frozenset[int]) -> list[tuple[int, int, int]]:
    """Numbers in a job of its transfers, and of the op instances that each may be issued between: the last before it that it needs and
    the first behind it that needs it, or one of these collectives. The first of the job, and the number of all, if there is none."""
    ops = tuple(op for op, _ in job.items)
    known = _known_between(program)
    if (ops, collectives) not in known:
        known[ops, collectives] = [*_between_ops(program, ops, collectives)]
    return known[ops, collectives]


_Between = dict[tuple[tuple[int, ...], frozenset[int]], list[tuple[int, int, int]]]
_known_between: Callable[[Program], _Between] = once_per_ops(lambda program: {})
"""Results by the operations of a job, without micro-batches, as most jobs of a step run the same operations; and by the collectives."""


def _between_ops(program: Program, ops: Sequence[int], collectives: frozenset[int]) -> Iterator[tuple[int, int, int]]:
    around = _around(program)
    for k, op in enumerate(ops):
        if op in around:
            needs, followers = around[op]
            yield (
                k,
                next((n for n in range(k - 1, 0, -1) if ops[n] in needs or ops[n] in collectives), 0),
                next((n for n in range(k + 1, len(ops)) if ops[n] in followers or ops[n] in collectives), len(ops)),
            )


@once_per_ops
def _around(program: Program) -> dict[int, tuple[set[int], set[int]]]:
    """Transfer -> its direct predecessors and successors other than transfers, whose order is kept anyway."""
    found: dict[int, tuple[set[int], set[int]]] = {op.id: (set(), set()) for op in program.ops if is_p2p(op)}
    for op_id, needs in dependencies(Graph(program), program.ops).items():
        if op_id in found:
            found[op_id][0].update(needs - found.keys())
        else:
            for transfer in needs & found.keys():
                found[transfer][1].add(op_id)
    return found


def _not_passed(program: Program, are_equivalent: bool) -> frozenset[int]:
    """Collectives that transfers stay before: those with other stages, and, where ranks of one stage are not equivalent, all, as its ranks
    would call them and send in different orders."""
    inside = groups_within_stage(program) if are_equivalent else set()
    return frozenset(op.id for op in program.ops if is_collective(op) and op.group not in inside)


@once_per_ops
def _recorders(program: Program) -> set[int]:
    """Ids of operations that compute from tensors, after which an event can be recorded; constants are excluded as they are folded."""
    tensors = {value.id for value in program.values if value.dtype not in ("vector", "null")}
    kernels = (op for op in program.ops if takes_events(op) and op.operands and not is_comm(op) and not is_copy(op))
    return {op.id for op in kernels if not tensors.isdisjoint(op.results)}


@once_per_ops
def _receives(program: Program) -> set[int]:
    return {op.id for op in program.ops if is_receive(op)}


def with_orders(program: Program, orders: Iterable[Order]) -> Program:
    """The plan with an event added for each order. A transfer that was issued before the op that it waits for is issued right after it, and
    so is every receive if both are in the same job. Transfers of a job keep their order."""
    after = {transfer: record for record, transfer in orders}
    issued, bounds, jobs = _reissued(program, after), job_bounds(program), [*program.jobs]
    elsewhere = np.flatnonzero(issued != np.arange(len(issued)))
    for at in np.unique(np.searchsorted(bounds, elsewhere, side="right") - 1).tolist():
        places = (issued[bounds[at] : bounds[at + 1]] - bounds[at]).tolist()
        jobs[at] = msgspec.structs.replace(jobs[at], items=itemgetter(*places)(jobs[at].items))
    events = merged(program.events, ((record, item) for item, record in after.items()))
    found = msgspec.structs.replace(program, jobs=tuple(jobs), events=events)
    items_of.give(found, items_of(program)[issued])
    return found


def _reissued(program: Program, after: Mapping[OpInstance, OpInstance]) -> Ints:
    """The new issue order if transfers wait for these op instances, as indices into the old one. `[items]`"""
    transfers, begin, end = _transfers_of_jobs(program)
    mine, awaited = (places_of(program, *pairs_of(items).T) for items in ([*after], [*after.values()]))
    which = np.searchsorted(transfers, mine)
    there = np.append(transfers, -1)[which] == mine
    behind = np.full(len(transfers), -1, np.int64)
    behind[which[there]] = awaited[there]
    receives = np.isin(items_of(program)[transfers, 0], [*_receives(program)])
    moves = ((behind > transfers) | ((behind >= begin) & receives)) & (behind < end)
    last = np.maximum.accumulate(np.where(moves, behind, transfers))  # no job's reaches into the next one
    turn = 2 * np.arange(len(items_of(program)))
    moved = last != transfers
    turn[transfers[moved]] = 2 * last[moved] + 1
    found: Ints = np.argsort(turn, kind="stable")
    return found


def _places(program: Program, items: Sequence[OpInstance]) -> dict[OpInstance, int]:
    """Indices of op instances in the issue order of a program's jobs; -1 for those that no job runs."""
    return dict(zip(items, places_of(program, *pairs_of(items).T).tolist(), strict=True))


@once_per_items
def _transfers_of_jobs(program: Program) -> tuple[Ints, Ints, Ints]:
    """Indices of all transfers, and for each the first index of its job and of the next job."""
    transfers = np.flatnonzero(np.isin(items_of(program)[:, 0], [op.id for op in program.ops if is_p2p(op)]))
    bounds = np.array(job_bounds(program), np.int64)
    of = np.searchsorted(bounds, transfers, side="right")
    return transfers, bounds[of - 1], bounds[np.minimum(of, len(bounds) - 1)]


def merged(events: Iterable[Event], pairs: Iterable[Order]) -> tuple[Event, ...]:
    """Events with more pairs (recorded after, waited for by); an op instance records at most one event."""
    found = {event.record: event for event in events}
    for record, wait in pairs:
        event = found.get(record, Event(f"interlace_{record[0]}_{record[1]}", record, ()))
        if wait not in event.waits:
            found[record] = msgspec.structs.replace(event, waits=(*event.waits, wait))
    return tuple(found.values())
