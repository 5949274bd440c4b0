"""`insert-events`: orders between streams that the executor does not keep by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from interlace.errors import PlanError
from interlace.ir import Event, OpInstance, Program, describe
from interlace.ir.kinds import takes_events
from interlace.ir.storage import with_fetches
from interlace.passes.base import Context, Pass, register
from interlace.scheduler.hazards.flat_plan import FlatPlan
from interlace.scheduler.hazards.missing_orders import Needs, needs_of
from interlace.scheduler.whole_step.orders import merged

ROUNDS = 5
"""Limit on rounds of analysis; the last one must find nothing missing. More than one is needed: a wait added for one reader of a block may
reveal another reader under which the block would be freed."""


@register
class InsertEvents(Pass, frozen=True, kw_only=True):
    """Add the events that dependencies between jobs need if they cross streams: the consumer waits for the producer.

    Contract: needs a schedule; keeps every value, operation, job and event; adds the events that the proof (`interlace check`) requires,
    including those for the jobs that split the batch and collect the outputs, and no others.

    Before / After:
        job forward_0: 3@0 4@0                          job forward_0: 3@0 4@0
        job backward_0: 9@0                             job backward_0: 9@0
                                                        event interlace_4_0: recorded after 4@0, waited for by 9@0

    Source: rules 5 to 7 in docs/gpu-place.md.
    """

    name = "insert-events"
    needs = frozenset({"scheduled"})
    gives = frozenset({"events"})
    after = ("extend-lifetimes",)
    is_default = True
    in_drafts = False

    def run(self, program: Program, context: Context) -> Program:
        events = events_of(program, program.events, memo=context.memo)
        if {event.name: set(event.waits) for event in events} != {event.name: set(event.waits) for event in program.events}:
            known = {"known": len(program.events)} if program.events else {}
            context.applied("events-inserted", events=len(events), **known)
        else:
            context.declined("no-order-missing")
        return msgspec.structs.replace(program, events=events)


def events_of(program: Program, known: Iterable[Event] = (), memo: dict[Any, Any] | None = None) -> tuple[Event, ...]:
    """The events of a plan: the known ones, and one for each order that the proof's analysis finds missing, sorted in host order.

    What the executor or an earlier event orders gets no event. The last op instance that uses a block waits for readers on other streams
    that may not have completed, because Paddle frees a block after its last reader. No event reaches into the next step, so this step's
    accesses to a persistable value are waited for by the last op instance of the stream that accesses it first in the next step. For
    `memo` see `needs_of`.

    Raises PlanError, which names the first missing order, if some are still missing after `ROUNDS` rounds.
    """
    plan = msgspec.structs.replace(program, events=tuple(known))
    for _ in range(ROUNDS):
        needs = needs_of(plan, memo=memo)
        pairs = _missed(needs)
        if not pairs:
            return _in_host_order(plan.events, needs)
        plan = msgspec.structs.replace(plan, events=merged(plan.events, pairs))
    ops = {op.id: op for op in program.ops}
    (first, m), (second, n) = pairs[0]
    raise PlanError(
        f"rank {program.rank}: after {ROUNDS} rounds of events the plan still misses {len(pairs)} order(s), the first: "
        f"{describe(ops[second])} of micro-batch {n} must wait for {describe(ops[first])} of micro-batch {m}; "
        "expected none. Put both on one stream, or leave "
        "their streams as Paddle named them (name_streams: off)"
    )


def _missed(needs: Needs) -> list[tuple[OpInstance, OpInstance]]:
    """Missing orders as pairs: the op instance to record an event after, and the one that must wait for it."""
    plan = needs.trace.plan
    takes = [takes_events(op) for op in plan.program.ops]
    pairs = [(plan.index[record], plan.index[wait]) for record, wait in (*needs.orders, *needs.carried)]
    pairs += [(fault.first, fault.second) for fault in needs.frees]
    placed = (_where_events_are_taken(plan, takes, record, wait) for record, wait in pairs if record != wait)
    return list(dict.fromkeys((plan.item(record), plan.item(wait)) for record, wait in placed))


def _where_events_are_taken(plan: FlatPlan, takes: Sequence[bool], record: int, wait: int) -> tuple[int, int]:
    """Indices, in issue order, of the op instances that record and wait for an event. An operation for which the executor takes no event is
    replaced by the next one of the recorder's stream, or the previous one of the waiter's, for which it does. If there are none, the pair
    is returned as given, and the next round finds the order missing again."""
    between = range(record, wait + 1)
    after = next((k for k in between if plan.stream[k] == plan.stream[record] and takes[plan.op[k]]), record)
    before = next((k for k in reversed(between) if plan.stream[k] == plan.stream[wait] and takes[plan.op[k]]), wait)
    return (after, before) if after < before else (record, wait)


def _in_host_order(events: Iterable[Event], needs: Needs) -> tuple[Event, ...]:
    index = needs.trace.plan.index
    sorted_waits = [msgspec.structs.replace(event, waits=tuple(sorted(event.waits, key=index.__getitem__))) for event in events]
    return tuple(sorted(sorted_waits, key=lambda event: index[event.record]))


def fetching(program: Program, values: Sequence[int]) -> Program:
    """The plan, changed to fetch these values as well, with the events that this needs."""
    if not values:
        return program
    wider = with_fetches(program, tuple(values))
    return msgspec.structs.replace(wider, events=events_of(wider, program.events))
