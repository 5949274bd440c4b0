"""The order of communication that a user's pass must keep. If ranks that communicate end up with different orders, the pass is named."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from interlace.errors import PassError
from interlace.ir import Program
from interlace.ir.equivalent_ranks import equivalence_key
from interlace.passes import PassReport
from interlace.passes.pipeline import built_in
from interlace.planning.tasks import task
from interlace.planning.worker import Worker
from interlace.planning.world import World
from interlace.scheduler.hazards.captured_calls import strays
from interlace.scheduler.hazards.pass_orders import Call, Change, History, breaks, calls_on, changes, first_difference, orders_of
from interlace.scheduler.hazards.skeleton import Channel


def captured_orders(captured: Program) -> tuple[Change, ...]:
    """The orders of a captured program's communication calls."""
    return changes({}, orders_of(captured))


def history_of(captured: Program, planned: Program, orders: Sequence[Change], reports: Sequence[PassReport]) -> History:
    """The orders of a rank's calls from pass to pass: as captured (`orders`) and as the passes reported, with the calls that passes
    changed."""
    seat = msgspec.structs.replace(planned, ops=(), values=(), jobs=(), events=(), refusals=())
    ours = {kind.name for kind in built_in()}
    found = strays(captured, planned)
    return History(
        seat,
        tuple(orders),
        tuple((report.name, report.orders) for report in reports),
        tuple(report.name for report in reports if report.name not in ours),
        found,
        equivalence_key(captured) if found else b"",
    )


def require_one_order(world: World) -> None:
    """Raise PassError, with the pass and the first calls that differ, if in finished plans a pass has left ranks that communicate with
    different orders of calls."""
    found = breaks(world.map(order_history))
    if found:
        first = found[0]
        told = world.map(calls_of_line, first.ranks, first.channels)
        where = first_difference([told[rank] for rank in first.ranks], first.ranks)
        raise PassError("; ".join(filter(None, (f"pass {first.name!r}: {first.message()}", where, first.remedy))))


@task
def order_history(worker: Worker) -> History:
    """The orders of a rank's calls from pass to pass, up to its finished plan."""
    planned, reports = worker.finished
    return history_of(worker.captured, planned, captured_orders(worker.captured), reports)


@task
def calls_of_line(worker: Worker, ranks: tuple[int, int], channels: tuple[Channel | None, Channel | None]) -> tuple[Call, ...]:
    """The rank's calls on its channel, if it is one of the two `ranks`; otherwise none."""
    planned, _ = worker.finished
    return calls_on(planned, channels[ranks.index(planned.rank)]) if planned.rank in ranks else ()
