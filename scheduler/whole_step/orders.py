"""Orders between op instances that are decided for all ranks at once, from a simulation of the whole step.

A send and its receive are kernels that wait for each other on the device, and a kernel that waits occupies multiprocessors: products
beside one take 1.2 to 1.9 times as long on an H200. The one that is ready first is therefore made to wait for a compute op of its own
rank that ends shortly before the other is ready, and is issued behind it where that is issued later in its job. A receive that would keep
a busier sender waiting, because it is issued late, is issued behind an earlier one. Nothing else is ordered anew.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from interlace.cost_model import Costs
from interlace.errors import PlanError
from interlace.ir import Event, Graph, Job, OpInstance, Program
from interlace.ir.graph import dependencies
from interlace.ir.kinds import is_collective, is_comm, is_copy, is_p2p, is_receive
from interlace.ir.per_ops import once_per_ops
from interlace.ir.stand_ins import groups_within_stage
from interlace.scheduler.simulate.arrays import COMPUTE, Options
from interlace.scheduler.simulate.simulator import Result, simulate

Order = tuple[OpInstance, OpInstance]
"""The second one, a transfer, waits for the first, a compute op of its rank."""
ROUNDS = 8
"""Times that orders are looked for at most: transfers start earlier once computation is not slowed."""
LEAST_GAIN = 0.001
"""Share of the step that two rounds of orders must bring."""
Simulation = Callable[[Sequence[Program]], Result]


class Orders(msgspec.Struct, frozen=True):
    """What was decided.

    Attributes:
        of_plans: Orders of each plan.
        before_ns, step_ns: Simulated step without and with them.
    """

    of_plans: tuple[tuple[Order, ...], ...] = ()
    before_ns: int = 0
    step_ns: int = 0


def simulation(cost: Costs, stands_for: dict[int, int]) -> Simulation:
    """Simulates plans of one rank of each stage; a rank that is alone finds its peers ready."""
    options = Options(peers_ready=not stands_for, stands_for=stands_for)
    return lambda programs: simulate(programs, cost, options, with_memory=False)


def find_orders(plans: Sequence[Program], run: Simulation, margin_ns: int) -> Orders:
    """Orders that post each transfer `margin_ns` before its peer is ready, as far as they make the simulated step shorter.

    Raises:
        PlanError: The step without them cannot be simulated.
    """
    result = run(plans)
    best = Orders(tuple(() for _ in plans), result.step_ns, result.step_ns)
    found: list[dict[OpInstance, OpInstance]] = [{} for _ in plans]
    steps = [result.step_ns]
    for _ in range(ROUNDS):
        found = transfers_in_time(plans, found, result, margin_ns)
        orders = tuple(tuple((after, transfer) for transfer, after in each.items()) for each in found)
        try:
            result = run([with_orders(plan, mine) for plan, mine in zip(plans, orders, strict=True)])
        except PlanError:  # ranks would wait for each other in a circle
            break
        if result.step_ns < best.step_ns:
            best = Orders(orders, best.before_ns, result.step_ns)
        steps.append(best.step_ns)
        if steps[-1] > (1 - LEAST_GAIN) * steps[max(0, len(steps) - 3)]:
            break
    return best


def transfers_in_time(plans: Sequence[Program], known: Sequence[Mapping[OpInstance, OpInstance]], result: Result,
                      margin_ns: int) -> list[dict[OpInstance, OpInstance]]:  # fmt: skip
    """For each plan, transfers -> the compute op to wait for, so that each is posted `margin_ns` before its peer is ready.

    One that was ready earlier waits for the last compute op that ends by then, of those that are issued before it or that it may be
    issued behind (`_places`). One that now keeps its peer waiting, as all has moved since, waits for an earlier one, and so does a
    receive that was issued late, if its sender's stage has more to compute. Others wait for what they did.

    Args:
        plans: Without orders of this kind.
        known: What transfers wait for already.
        result: The simulation of the plans with these.
    """
    alone = len({plan.pipeline.stage for plan in plans}) == len(plans)
    return [_of_rank(plan, mine, _Rank(result, at), margin_ns, alone) for at, (plan, mine) in enumerate(zip(plans, known, strict=True))]


class _Rank:
    """When op instances of one rank ran. `index`: their items in the simulator's arrays."""

    def __init__(self, result: Result, at: int) -> None:
        self.result, self.at = result, at
        self.items = range(int(result.input.first[at]), int(result.input.first[at + 1]))
        sim, times = result.input, result.times
        op, batch, self._issue, self._ready, self._start, self._end = (
            column[self.items.start : self.items.stop].tolist()
            for column in (sim.op, sim.micro_batch, times.issue, times.ready, times.start, times.end)
        )
        self.index = {item: k for k, item in enumerate(zip(op, batch, strict=True))}

    def times(self, item: OpInstance) -> tuple[int, int, int, int]:
        """Issue, ready, start, end."""
        k = self.index[item]
        return self._issue[k], self._ready[k], self._start[k], self._end[k]

    def computes(self, kernels: Collection[int]) -> list[OpInstance]:
        """Instances of these operations that took time on the compute stream, in the order they ran in."""
        sim = self.result.input
        took_time = (item for item, k in self.index.items() if item[0] in kernels and self._end[k] > self._start[k])
        return [item for item in took_time if sim.stream_names[sim.stream[self.items[self.index[item]]]] == COMPUTE]

    def peers(self, item: OpInstance) -> list[int]:
        """Items of other ranks that a transfer meets."""
        sim, mine = self.result.input, self.items[self.index[item]]
        meet = int(sim.meet[mine])
        mates = sim.mates[sim.meet_first[meet] : sim.meet_first[meet + 1]].tolist() if meet >= 0 else ()
        return [mate for mate in mates if mate != mine]

    def peer_ready(self, item: OpInstance) -> int | None:
        """When the other side of a transfer was ready; None if it is not simulated."""
        return min((int(self.result.times.ready[mate]) for mate in self.peers(item)), default=None)

    def peer_is_busier(self, item: OpInstance) -> bool:
        """Whether the other side has more to compute in a step."""
        ranks, first = self.result.ranks, self.result.input.first
        others = (int(np.searchsorted(first, mate, "right")) - 1 for mate in self.peers(item))
        return all(ranks[other].compute_ns > ranks[self.at].compute_ns for other in others)


def _of_rank(program: Program, known: Mapping[OpInstance, OpInstance], rank: _Rank, margin_ns: int,
             alone: bool) -> dict[OpInstance, OpInstance]:  # fmt: skip
    """What the transfers of one rank wait for. `alone`: it is the only one of its stage."""
    issued = {item: k for k, item in enumerate(item for job in program.jobs for item in job.items)}
    computes = rank.computes(_recorders(program))
    number = {item: k for k, item in enumerate(computes)}
    ends, places = [rank.times(item)[3] for item in computes], [issued.get(item, -1) for item in computes]
    receives, recorded = _receives(program), {event.record for event in program.events}
    waits_for = {item: issued.get(event.record, -1) for event in program.events for item in event.waits}
    collectives = _not_passed(program, alone)
    waits: dict[OpInstance, OpInstance] = {}
    for job in (job for job in program.jobs if job.items):
        begin, limit = (bisect_left(places, place) for place in (issued[job.items[0]], issued[job.items[-1]] + 1))
        for transfer, after, before in reversed(_places(program, job, collectives)):
            at, most = (bisect_left(places, issued[item]) if item else limit for item in (transfer, before))
            least = bisect_left(places, max(issued[after], waits_for.get(transfer, -1)))
            limit = at if transfer in recorded else max(at, min(limit, most))  # transfers of a job keep their order
            issue, ready, start, _ = rank.times(transfer)
            peer = rank.peer_ready(transfer)
            keeps_peer = peer is not None and start - peer > margin_ns
            can_go_up = transfer[0] in receives
            last = number.get(known[transfer], -1) if transfer in known else -1
            if start - ready > margin_ns:
                until = min(bisect_right(ends, start - margin_ns), limit) - 1
                last = until if until >= 0 and ends[until] > ready else last
            elif peer is not None and keeps_peer and can_go_up and issue > peer and rank.peer_is_busier(transfer):
                until = max(bisect_right(ends, peer - margin_ns) - 1, least)
                last = until if until + 1 < at else -1
            elif peer is not None and keeps_peer and transfer in known:
                last = bisect_right(ends, peer - margin_ns) - 1
            last = min(last, limit - 1)
            if last >= (least if can_go_up and last >= begin else 0):
                waits[transfer] = computes[last]
                limit = max(at, last + 1)
    return waits


def _places(program: Program, job: Job, collectives: set[int]) -> list[tuple[OpInstance, OpInstance, OpInstance | None]]:
    """The transfers of a job, each with the op instances that it may be issued between: the last before it that it needs and the first
    after it that needs it, or one of these collectives. The first of the job, and None, if there is none."""
    around = _around(program)
    found = []
    for k, item in enumerate(job.items):
        if item[0] in around:
            needs, followers = around[item[0]]
            after = next((other for other in reversed(job.items[:k]) if other[0] in needs or other[0] in collectives), job.items[0])
            before = next((other for other in job.items[k + 1 :] if other[0] in followers or other[0] in collectives), None)
            found.append((item, after, before))
    return found


@once_per_ops
def _around(program: Program) -> dict[int, tuple[set[int], set[int]]]:
    """Transfers -> operations that come directly before and after them, but for other transfers, whose order is kept."""
    found: dict[int, tuple[set[int], set[int]]] = {op.id: (set(), set()) for op in program.ops if is_p2p(op)}
    for op_id, needs in dependencies(Graph(program), program.ops).items():
        if op_id in found:
            found[op_id][0].update(needs - found.keys())
        else:
            for transfer in needs & found.keys():
                found[transfer][1].add(op_id)
    return found


def _not_passed(program: Program, alike: bool) -> set[int]:
    """Collectives that transfers stay before: those with other stages, and, where plans of one stage are not alike, all, as its ranks
    would call them and send in different orders."""
    inside = groups_within_stage(program) if alike else set()
    return {op.id for op in program.ops if is_collective(op) and op.group not in inside}


def _recorders(program: Program) -> set[int]:
    """Operations that compute from tensors, after which an event can be recorded: constants are folded away."""
    tensors = {value.id for value in program.values if value.dtype not in ("vector", "null")}
    kernels = (op for op in program.ops if op.name.startswith("pd_op.") and op.operands and not is_comm(op) and not is_copy(op))
    return {op.id for op in kernels if not tensors.isdisjoint(op.results)}


def _receives(program: Program) -> set[int]:
    return {op.id for op in program.ops if is_receive(op)}


def with_orders(program: Program, orders: Iterable[Order]) -> Program:
    """The plan with an event for each order besides its own. A transfer that was issued before what it waits for is issued right behind
    it, and so is a receive in any case, if both are of one job. Transfers of a job keep their order."""
    after = {transfer: record for record, transfer in orders}
    transfers, receives = {op.id for op in program.ops if is_p2p(op)}, _receives(program)
    jobs = tuple(_reissued(job, after, transfers, receives) for job in program.jobs)
    return msgspec.structs.replace(program, jobs=jobs, events=merged(program.events, ((record, item) for item, record in after.items())))


def _reissued(job: Job, after: Mapping[OpInstance, OpInstance], transfers: set[int], receives: set[int]) -> Job:
    at = {item: k for k, item in enumerate(job.items)}
    place: dict[OpInstance, float] = {}  # between others: transfers that were moved stand behind the item of that number
    last = -1.0
    for item in (item for item in job.items if item[0] in transfers):
        behind = at.get(after[item], -1) if item in after else -1
        moves = behind > at[item] or (behind >= 0 and item[0] in receives)
        last = place[item] = max(last, behind + 0.5 if moves else at[item])
    items = tuple(sorted(job.items, key=lambda item: place.get(item, at[item])))
    return job if items == job.items else msgspec.structs.replace(job, items=items)


def merged(events: Iterable[Event], pairs: Iterable[Order]) -> tuple[Event, ...]:
    """Events with more pairs (recorded after, waited for by); an op instance records at most one event."""
    found = {event.record: event for event in events}
    for record, wait in pairs:
        event = found.get(record, Event(f"interlace_{record[0]}_{record[1]}", record, ()))
        if wait not in event.waits:
            found[record] = msgspec.structs.replace(event, waits=(*event.waits, wait))
    return tuple(found.values())
