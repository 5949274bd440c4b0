"""Orders between op instances that are decided for all ranks at once, from a simulation of the whole step.

A send and its receive are kernels that wait for each other on the device, and a kernel that waits occupies multiprocessors: products
beside one take 1.2 to 1.9 times as long on an H200. The one that is ready first is therefore made to wait for a compute op of its own
rank that ends shortly before the other is ready, and where that is issued later in its job, the transfer is issued behind it. Nothing
else is ordered anew.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from interlace.cost_model import Costs
from interlace.errors import PlanError
from interlace.ir import Event, Graph, Job, OpInstance, Program
from interlace.ir.graph import dependencies
from interlace.ir.kinds import is_collective, is_comm, is_copy, is_p2p
from interlace.ir.per_ops import once_per_ops
from interlace.ir.stand_ins import groups_within_stage
from interlace.scheduler.simulate.arrays import COMPUTE, Options
from interlace.scheduler.simulate.simulator import Result, simulate

Order = tuple[OpInstance, OpInstance]
"""The second one, a transfer, waits for the first, a compute op of its rank."""
ROUNDS = 8
"""Times that orders are looked for at most: transfers start earlier once computation is not slowed."""
LEAST_GAIN = 0.001
"""Share of the step that a round of orders must bring."""
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
    for _ in range(ROUNDS):
        for mine, more in zip(found, early_transfers(result, margin_ns), strict=True):
            mine.update(more)
        orders = tuple(tuple((after, transfer) for transfer, after in each.items()) for each in found)
        try:
            result = run([with_orders(plan, mine) for plan, mine in zip(plans, orders, strict=True)])
        except PlanError:  # ranks would wait for each other in a circle
            break
        if result.step_ns > (1 - LEAST_GAIN) * best.step_ns:
            break
        best = Orders(orders, best.before_ns, result.step_ns)
    return best


def early_transfers(result: Result, margin_ns: int) -> list[dict[OpInstance, OpInstance]]:
    """For each plan, transfers that are ready more than `margin_ns` before they start -> the compute op to wait for instead: the last
    that ends by then, of those that are issued before the transfer or that it may be issued behind (`_latest_places`)."""
    sim, times = result.input, result.times
    stages = {program.pipeline.stage for program in sim.programs}
    found = []
    for at, program in enumerate(sim.programs):
        mine = range(int(sim.first[at]), int(sim.first[at + 1]))
        op, batch, ready, start, end = (each[mine.start : mine.stop].tolist()
                                        for each in (sim.op, sim.micro_batch, times.ready, times.start, times.end))  # fmt: skip
        kernels = _recorders(program)
        computes = [k for k, item in enumerate(mine)
                    if op[k] in kernels and end[k] > start[k] and sim.stream_names[sim.stream[item]] == COMPUTE]  # fmt: skip
        ends = [end[k] for k in computes]
        place = {item: k for k, item in enumerate(zip(op, batch, strict=True))}
        waits: dict[OpInstance, OpInstance] = {}
        recorded = {event.record for event in program.events}
        collectives = _not_passed(program, alike=len(stages) == len(sim.programs))
        for job in (job for job in program.jobs if job.items):
            limit = end_of_job = place[job.items[-1]] + 1
            for transfer, before in reversed(_latest_places(program, job, collectives)):
                k = place[transfer]
                limit = max(k, min(limit, place[before] if before else end_of_job))  # transfers of a job keep their order
                limit = k if transfer in recorded else limit
                last = min(bisect_right(ends, start[k] - margin_ns), bisect_left(computes, limit)) - 1
                if start[k] - ready[k] > margin_ns and last >= 0 and ends[last] > ready[k]:
                    waits[transfer] = (op[computes[last]], batch[computes[last]])
                    limit = max(k, computes[last] + 1)
                else:
                    limit = k
        found.append(waits)
    return found


def _latest_places(program: Program, job: Job, collectives: set[int]) -> list[tuple[OpInstance, OpInstance | None]]:
    """The transfers of a job, each with the first op instance that must be issued after it: one that depends on it, or one of these
    collectives. None if it can be issued last."""
    followers = _followers(program)
    found = []
    for k, item in enumerate(job.items):
        if item[0] in followers:
            after = followers[item[0]]
            found.append((item, next((other for other in job.items[k + 1 :] if other[0] in after or other[0] in collectives), None)))
    return found


@once_per_ops
def _followers(program: Program) -> dict[int, set[int]]:
    """Transfers -> operations that come directly after them, but for other transfers, whose order is kept."""
    found: dict[int, set[int]] = {op.id: set() for op in program.ops if is_p2p(op)}
    for op_id, before in dependencies(Graph(program), program.ops).items():
        for transfer in before & found.keys():
            if op_id not in found:
                found[transfer].add(op_id)
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


def with_orders(program: Program, orders: Iterable[Order]) -> Program:
    """The plan with an event for each order besides its own. A transfer that was issued before what it waits for is issued right behind
    it, in the same job."""
    after = {transfer: record for record, transfer in orders}
    jobs = tuple(_reissued(job, after) for job in program.jobs)
    return msgspec.structs.replace(program, jobs=jobs, events=merged(program.events, ((record, item) for item, record in after.items())))


def _reissued(job: Job, after: Mapping[OpInstance, OpInstance]) -> Job:
    at = {item: k for k, item in enumerate(job.items)}
    moved = {item: at[after[item]] for item in job.items if item in after and at.get(after[item], -1) > at[item]}
    if not moved:
        return job
    items = sorted(job.items, key=lambda item: (moved.get(item, at[item]), item in moved, at[item]))
    return msgspec.structs.replace(job, items=tuple(items))


def merged(events: Iterable[Event], pairs: Iterable[Order]) -> tuple[Event, ...]:
    """Events with more pairs (recorded after, waited for by); an op instance records at most one event."""
    found = {event.record: event for event in events}
    for record, wait in pairs:
        event = found.get(record, Event(f"interlace_{record[0]}_{record[1]}", record, ()))
        if wait not in event.waits:
            found[record] = msgspec.structs.replace(event, waits=(*event.waits, wait))
    return tuple(found.values())
