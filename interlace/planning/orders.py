"""The order of communication that a user's pass must keep: its plan is refused by name where partners end in different orders."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from interlace.errors import PassError
from interlace.ir import Program
from interlace.passes import PassReport
from interlace.passes.peers import Peers, gather
from interlace.passes.pipeline import built_in
from interlace.scheduler.hazards.captured_calls import strays
from interlace.scheduler.hazards.pass_orders import REMEDY, Calls, Change, History, breaks, calls_on, changes, first_difference, orders_of


def captured_orders(captured: Program) -> tuple[Change, ...]:
    """The orders of a captured program's calls."""
    return changes({}, orders_of(captured))


def history_of(captured: Program, planned: Program, orders: Sequence[Change], reports: Sequence[PassReport]) -> History:
    """The orders of a rank's calls from pass to pass, as they were captured and as the passes told, and which captured calls are left."""
    seat = msgspec.structs.replace(planned, ops=(), values=(), jobs=(), events=(), notes=())
    ours = {kind.name for kind in built_in()}
    return History(seat, tuple(orders), tuple((report.name, report.orders) for report in reports),
                   tuple(report.name for report in reports if report.name not in ours), strays(captured, planned))  # fmt: skip


def require_one_order(captured: Program, planned: Program, reports: Sequence[PassReport], peers: Peers | None) -> None:
    """Refuse a plan in which partners have different orders of calls because of a pass.

    Raises:
        PassError: On every rank alike, with the pass and the first calls that differ.
    """
    found = breaks(gather(peers, "orders of communication", history_of(captured, planned, captured_orders(captured), reports)))
    if found:
        first, rank = found[0], planned.rank
        mine = calls_on(planned, first.channels[first.ranks.index(rank)]) if rank in first.ranks else Calls()
        told = gather(peers, "calls in different orders", mine)
        where = first_difference([told[rank] for rank in first.ranks], first.ranks)
        raise PassError("; ".join(filter(None, (f"pass {first.name!r}: {first.message()}", where, REMEDY))))
