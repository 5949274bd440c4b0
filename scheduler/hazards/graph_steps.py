"""Operations that a captured step must not contain: those that need the host while it runs, and those that must differ between launches.

Everything else is safe by construction. In the graph all streams start after the first one and end before its end, so each step comes
after the whole previous step, and a plan without races in eager execution has none in any number of launches. A block of memory is reused
only in the order of the graph, after the last reader that the allocator knows. That this reader comes after all others is checked as
`freed-in-use`, as for eager execution.
"""

from __future__ import annotations

from collections.abc import Iterator

from interlace.grouping import grouped
from interlace.ir import Op, Program
from interlace.ir.effects import is_ordered, is_random, why_ordered
from interlace.ir.kinds import is_copy
from interlace.ir.storage import FETCH
from interlace.ir.target import Target
from interlace.scheduler.hazards.finding import Finding, Kind, where


def kept_from_graph(program: Program, target: Target) -> list[Finding]:
    """Findings for operations and host waits that prevent the plan's step from being captured; empty if the target runs no graph."""
    if not target.is_graph:
        return []
    ops = {op.id: op for op in program.ops}
    found: list[Finding] = []
    for after, micro_batches in grouped(after for job in program.jobs for after, _ in job.host_waits).items():
        why = "the host waits for the device behind it"
        found.append(_finding("host-in-graph", program, ops[after], micro_batches, why, "leave the waits out (throttle_host: off)"))
    issued = grouped(item for job in program.jobs for item in job.items)
    on_host = {value.id for value in program.values if value.memory == "host"}
    to_host = {op.id for op in program.ops if not on_host.isdisjoint(op.results)}
    for op in program.ops:
        for kind, why, remedy in _reasons(op, target, op.id in to_host):
            found.append(_finding(kind, program, op, issued.get(op.id, [0]), why, remedy))
    return found


def _reasons(op: Op, target: Target, to_host: bool) -> Iterator[tuple[Kind, str, str]]:
    if FETCH in op.attrs:
        yield "host-in-graph", "its operand is fetched, and the host waits for the copy", "fetch losses only"
    if is_copy(op) and (to_host or (op.origin >= 0 and op.kind in target.blocking)):
        yield "host-in-graph", "the host waits for its copy", "copy to pinned memory with `memcpy`"
    if op.num_blocks:
        yield "host-in-graph", "the host decides in each step which operations of it run", "write the branch as arithmetic (paddle.where)"
    elif is_random(op):
        yield "draw-in-graph", f"it {why_ordered(op)}: each launch would repeat the first", "train without it"
    elif is_ordered(op):
        yield "host-in-graph", f"it {why_ordered(op)}: the host would do so once, and in no launch", "train without it"


def _finding(kind: Kind, program: Program, op: Op, micro_batches: list[int], why: str, remedy: str) -> Finding:
    at = where(program.rank, op, micro_batches[0])
    return Finding(
        kind,
        (program.rank,),
        (at,),
        f"{at} is in a captured step, and {why}",
        f"{remedy}, or do not capture (capture: off)",
        len(micro_batches),
    )
