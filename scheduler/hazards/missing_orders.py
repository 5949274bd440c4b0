"""Orders that a plan still needs to be safe, found by the checker's walk, which here supplies them instead of reporting faults.

`passes/insert_events.py` turns them into events.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from interlace.ir import OpInstance, Program
from interlace.ir.target import GPU, Target
from interlace.scheduler.hazards.flat_plan import flatten
from interlace.scheduler.hazards.freed_memory import freed_in_use, overlapping_steps
from interlace.scheduler.hazards.happens_before import Fault, Trace, Tracer

STRICT = Target("any", free=GPU.free, host_memory_edges=False)
"""The target that orders least by itself: a plan that is safe here is safe on every target that knows the last readers of freed memory."""


@dataclass(frozen=True, slots=True)
class Needs:
    """The orders that a plan lacks.

    Attributes:
        trace: The walk, with all missing orders supplied.
        orders: Missing orders `(earlier op instance, op instance that must wait)`; none of them follows from the others.
        frees: Uses of memory that may still run when the memory is reused: `first` is the use, `second` the op instance after which the
            memory is free.
        carried: Orders within each step that keep accesses in the next step after uses in this one. Either the last op instance on the
            stream of the access waits for the use, or, if the use is issued last, the access waits for the first op instance on the
            stream of the use, which in the next step runs after the use.
    """

    trace: Trace
    orders: tuple[tuple[OpInstance, OpInstance], ...]
    frees: tuple[Fault, ...]
    carried: tuple[tuple[OpInstance, OpInstance], ...]


def needs_of(program: Program, memo: dict[Any, Any] | None = None) -> Needs:
    """Walk a plan and collect the orders that it lacks; cost as `check` for one rank. `memo` keeps the last result, for the same plan."""
    if memo is None:
        return _needs_of(program)
    parts = (program.ops, program.values, program.pipeline, program.jobs, program.events)
    known = memo.pop("needs", None)  # only one walk is kept, as it is large
    needs: Needs = known[1] if known and all(map(operator.is_, known[0], parts)) else _needs_of(program)
    memo["needs"] = (parts, needs)
    return needs


def _needs_of(program: Program) -> Needs:
    plan = flatten(program)
    trace = Tracer(plan, STRICT, supply=True).run()
    faults = overlapping_steps(trace, STRICT)
    behind_start = _behind_start(trace, [fault for fault in faults if _is_kept_on_host(trace, fault)])
    carried = [*behind_start, *(_carried(trace, fault) for fault in faults if not _is_kept_on_host(trace, fault))]
    orders = tuple((plan.item(before), plan.item(item)) for before, item in trace.wanted)
    pairs = dict.fromkeys((plan.item(before), plan.item(item)) for before, item in carried if before < item)
    return Needs(trace, orders, tuple(freed_in_use(trace, STRICT)), tuple(pairs))


def _is_kept_on_host(trace: Trace, fault: Fault) -> bool:
    """Whether a fault concerns a value that stays in host memory from step to step."""
    storage = trace.plan.storage(fault.key)
    return storage.persistable and storage.memory != "device"


def _behind_start(trace: Trace, faults: Sequence[Fault]) -> list[tuple[int, int]]:
    """Orders that make accesses wait for the first op instance on the stream of the use, which in the next step runs after the use. It
    suffices that the first access on each stream that can wait does so. A copy of the previous step may then run until its value is needed
    again."""
    stream = trace.plan.stream
    start = {number: stream.index(number) for number in {stream[fault.first] for fault in faults}}
    found: dict[tuple[int, int], int] = {}
    for fault in faults:
        pair = (start[stream[fault.first]], stream[fault.second])
        found[pair] = min(found.get(pair, fault.second), fault.second)
    return [(before, item) for (before, _), item in found.items()]


def _carried(trace: Trace, fault: Fault) -> tuple[int, int]:
    """An order within a step that makes an access in the next step wait for a use in this one."""
    stream = trace.plan.stream
    end = trace.last[stream[fault.second]]
    if fault.first < end:
        return fault.first, end
    start = stream.index(stream[fault.first])
    cut = trace.plan.num_fed - 1  # the job that splits the batch records one event, after its last piece
    return (cut if start <= cut else start), fault.second
