"""What the stream of each op instance has waited for, by the data that its operations read."""

from __future__ import annotations

from interlace.ir.kinds import COMBINE, SPLIT, stream_of
from interlace.ir.program import Program
from interlace.ir.storage import storages_of


def waited_for(program: Program) -> list[dict[str, int]]:
    """For each op instance, in the issue order, what its stream has waited for by then: other stream -> index of the last op instance in
    the same job."""
    table, streams = storages_of(program), {op.id: stream_of(op) for op in program.ops}
    passes = {op.id for op in program.ops if op.name in (COMBINE, SPLIT)}
    given, made = (
        {op.id: {part.variable for v in values(op) for part in table.parts[v]} for op in program.ops if op.id not in passes}
        for values in (table.reads, lambda op: op.results)
    )
    found = list[dict[str, int]]()
    for job in program.jobs:
        writer: dict[tuple[int, int], tuple[int, str]] = {}
        so_far: dict[str, dict[str, int]] = {}
        for op_id, m in job.items:
            k, own = len(found), streams[op_id]
            mine = so_far.get(own, {})
            for variable in given.get(op_id, ()):
                at, other = writer.get((variable, m), (-1, own))
                if other != own and mine.get(other, -1) < at:  # what is later on a stream has waited for as much
                    mine = _waiting_too(mine, found[at] | {other: at}, own)
            so_far[own] = mine
            found.append(mine)
            writer.update(((variable, m), (k, own)) for variable in made.get(op_id, ()))
    return found


def _waiting_too(mine: dict[str, int], other: dict[str, int], own: str) -> dict[str, int]:
    """What a stream has waited for if it also waits for what another has waited for."""
    return mine | {name: max(mine.get(name, -1), at) for name, at in other.items() if name != own}
