"""What a plan still needs to be safe, for whoever makes it: the walk that proves a plan, supplying the orders that it lacks."""

from __future__ import annotations

from dataclasses import dataclass

from interlace.ir import Program
from interlace.ir.storage import Item
from interlace.scheduler.hazards.flat_plan import flatten
from interlace.scheduler.hazards.freed_memory import freed_in_use, overlapping_steps
from interlace.scheduler.hazards.happens_before import Fault, Trace, Tracer
from interlace.scheduler.target import GPU, Target

STRICT = Target("any", free=GPU.free, host_memory_edges=False)
"""No target does less by itself: what is safe here is safe wherever the last readers of freed memory are known."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a plan lacks.

    Attributes:
        trace: The walk, with all missing orders supplied.
        orders: Orders that it lacks, `(earlier item, item that must wait)`, none following from the others.
        frees: Uses of memory that would be handed out again under them: `first` is the use, `second` the item behind which
            the memory is free.
        carried: Uses that an access of the next step may overtake, as orders within each step: the last item of that access's
            stream waits for the use, or the access waits for the first item of the use's stream, which comes behind the use then.
    """

    trace: Trace
    orders: tuple[tuple[Item, Item], ...]
    frees: tuple[Fault, ...]
    carried: tuple[tuple[Item, Item], ...] = ()

    def item(self, place: int) -> Item:
        """The operation and micro-batch at a place in host order."""
        plan = self.trace.plan
        return plan.program.ops[plan.op[place]].id, plan.micro_batch[place]


def needs_of(program: Program, target: Target = STRICT) -> Needs:
    """Walk a plan and collect what it lacks; cost as of `check` for one rank."""
    trace = Tracer(flatten(program, target.serial), target, supply=True).run()
    found = Needs(trace, (), tuple(freed_in_use(trace, target)))
    orders = [(found.item(before), found.item(item)) for before, item in trace.wanted]
    carried = [_carried(trace, fault) for fault in overlapping_steps(trace, target)]
    pairs = [(found.item(before), found.item(item)) for before, item in carried if before < item]
    return Needs(trace, tuple(orders), found.frees, tuple(dict.fromkeys(pairs)))


def _carried(trace: Trace, fault: Fault) -> tuple[int, int]:
    """An order within the step that carries a use of one step to an access of the next."""
    stream = trace.plan.stream
    end = trace.last[stream[fault.second]]
    return (fault.first, end) if fault.first < end else (stream.index(stream[fault.first]), fault.second)
