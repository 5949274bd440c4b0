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
            mine = dict(so_far.get(own, {}))
            for variable in given.get(op_id, ()):
                at, other = writer.get((variable, m), (-1, own))
                if other != own:
                    _wait_too(mine, found[at] | {other: at}, own)
            so_far[own] = mine
            found.append(mine)
            writer.update(((variable, m), (k, own)) for variable in made.get(op_id, ()))
    return found


def _wait_too(mine: dict[str, int], other: dict[str, int], own: str) -> None:
    """Let a stream wait for what another has waited for."""
    for name, at in other.items():
        if name != own:
            mine[name] = max(mine.get(name, -1), at)
