"""Orders between streams that the executor does not keep by itself: events of a scheduled program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from interlace.ir import Event, Program
from interlace.ir.storage import Item, with_fetches
from interlace.scheduler.hazards.needs import needs_of

ROUNDS = 4
"""A wait that keeps memory from being freed under a reader may leave another one as the first to be overtaken."""


def events_of(program: Program, known: Iterable[Event] = ()) -> tuple[Event, ...]:
    """The events that a plan needs beside those that are known: it is walked as the proof does, and each order that the walk misses
    becomes an event. What the executor or an earlier event orders gets none.

    The last item that uses a block waits for readers on other streams, where these are not over by then: the collector knows the
    last reader only. No event reaches into the next step: what lasts is waited for by the last item of the stream that touches it
    first there.
    """
    plan = msgspec.structs.replace(program, events=tuple(known))
    for _ in range(ROUNDS):
        needs = needs_of(plan)
        pairs = [*needs.orders, *needs.carried, *((needs.item(fault.first), needs.item(fault.second)) for fault in needs.frees)]
        pairs = [(record, wait) for record, wait in pairs if record != wait]
        if not pairs:
            break
        plan = msgspec.structs.replace(plan, events=merged(plan.events, pairs))
    place = needs.trace.steps.index
    events = [msgspec.structs.replace(event, waits=tuple(sorted(event.waits, key=place.__getitem__))) for event in plan.events]
    return tuple(sorted(events, key=lambda event: place[event.record]))


def fetching(program: Program, values: Sequence[int]) -> Program:
    """A plan that also hands out these values, with the events that this needs."""
    if not values:
        return program
    wider = with_fetches(program, tuple(values))
    return msgspec.structs.replace(wider, events=events_of(wider, program.events))


def merged(events: Iterable[Event], pairs: Iterable[tuple[Item, Item]]) -> tuple[Event, ...]:
    """Events with more pairs (recorded after, waited for by); an item records one event."""
    found = {event.record: event for event in events}
    for record, wait in pairs:
        event = found.get(record, Event(f"interlace_{record[0]}_{record[1]}", record, ()))
        if wait not in event.waits:
            found[record] = msgspec.structs.replace(event, waits=(*event.waits, wait))
    return tuple(found.values())
