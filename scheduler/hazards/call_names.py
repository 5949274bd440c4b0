"""Names of communication calls for findings. Only the rank that issues a call knows its operation, so other ranks ask it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from interlace.ir import describe
from interlace.scheduler.hazards.finding import Where, stream_text, where
from interlace.scheduler.hazards.flat_plan import HOST
from interlace.scheduler.hazards.happens_before import NO_ITEM, Trace
from interlace.scheduler.hazards.skeleton import call_items


class CallQuery(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A request for the names of a rank's call, given by number, and of an earlier call that it waits for (`NO_ITEM`: none)."""

    rank: int
    call: int
    earlier: int = NO_ITEM


class CallAnswer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The answer: the call, the earlier one, and why the call waits for it."""

    call: Where
    earlier: Where | None = None
    why: str = ""


AnswerQueries = Callable[[Sequence[CallQuery]], list[CallAnswer]]
"""A function that answers requests, in their order."""


def answer_queries(trace: Trace, rank: int, queries: Sequence[CallQuery]) -> list[CallAnswer]:
    """Answers to those requests that concern this rank."""
    items = call_items(trace.plan) if queries else []
    return [_answer(trace, rank, items, ask) for ask in queries]


def _answer(trace: Trace, rank: int, items: list[int], ask: CallQuery) -> CallAnswer:
    item = items[ask.call]
    if ask.earlier == NO_ITEM:
        return CallAnswer(_where(trace, item, rank))
    earlier = items[ask.earlier]
    return CallAnswer(_where(trace, item, rank), _where(trace, earlier, rank), _reason(trace, earlier, item))


def _where(trace: Trace, item: int, rank: int) -> Where:
    return where(rank, trace.plan.op_of(item), trace.plan.micro_batch[item])


def _reason(trace: Trace, earlier: int, item: int) -> str:
    """Why a call waits for an earlier one: same stream, same ring, or the chain of events and data between them."""
    plan = trace.plan
    if plan.stream[earlier] == plan.stream[item]:
        return f"earlier on {stream_text(plan.op_of(item).stream)}"
    if not trace.before(earlier, item):
        return "next on the same ring" if plan.op_of(earlier).group == plan.op_of(item).group else "ordered after it"
    path = _path(trace, earlier, item)
    return "through " + ", ".join(path) if path else "ordered after it"


def _path(trace: Trace, earlier: int, item: int) -> list[str]:
    """The op instances and reasons that order one stream after another, from the later one backwards."""
    plan = trace.plan
    previous: list[int] = [NO_ITEM] * len(plan.streams)
    before: dict[int, int] = {}
    for k in range(item + 1):
        if plan.stream[k] != HOST:
            before[k] = previous[plan.stream[k]]
            previous[plan.stream[k]] = k
    came: dict[int, tuple[int, str]] = {}
    queue = [item]
    for at in queue:
        if at <= earlier or plan.stream[at] == plan.stream[earlier]:
            if at >= earlier:
                return _hops(trace, came, at, item)
            continue
        for source, why in [*trace.joins.get(at, ()), (before[at], "")]:
            if source != NO_ITEM and source not in came and source != item:
                came[source] = (at, why)
                queue.append(source)
    return []


def _hops(trace: Trace, came: dict[int, tuple[int, str]], at: int, item: int) -> list[str]:
    hops = []
    while at != item:
        nxt, why = came[at]
        if why:
            hops.append(f"{why} to {describe(trace.plan.op_of(nxt))}")
        at = nxt
    return hops[:6]
