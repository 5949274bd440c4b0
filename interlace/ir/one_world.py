"""Checks that captured programs, or plans, belong to the ranks of one world: built by one script, with calls that match."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from interlace.errors import ProgramError
from interlace.ir.dump import Script, script_of
from interlace.ir.equivalent_ranks import representatives, with_given_partners
from interlace.ir.kinds import is_comm, is_p2p, is_send
from interlace.ir.program import Op, Program
from interlace.ir.rings import RingName, RingNames
from interlace.ir.signatures import Signature, agree, signature
from interlace.ir.verify import describe

Call = tuple[Signature, Op]
Line = tuple[RingName, int, int]
"""Calls whose order ranks must share: those of a ring and, for messages, one sender and one receiver (-1 for collectives)."""
TOGETHER = "give the dumps of one script with one set of arguments: `interlace dump` makes those of all ranks at once"


def require_one_world(programs: Sequence[Program], paths: Sequence[Path], *, with_calls: bool = True) -> None:
    """Check that programs, read from these files, can run together; O(operations). With `with_calls`, the calls that ranks share are
    compared too if no program has a schedule; the proof compares them in any case.

    Raises ProgramError with the first rank that is given twice, or that differs from another one, and the difference.
    """
    first: dict[int, Path] = {}
    for program, path in zip(programs, paths, strict=True):
        if program.rank in first:
            raise ProgramError(
                f"rank {program.rank} is given twice, in {first[program.rank]} and {path}; give one dump per rank, and one world at a time"
            )
        first[program.rank] = path
    representatives(programs)
    if len(programs) > 1:
        bare = with_calls and not any(program.jobs for program in programs)
        told = _of_settings(programs) or _of_scripts(programs, paths) or (_of_calls(programs) if bare else None)
        if told:
            raise ProgramError(f"{told[1]} (in {first[told[0]]}); {TOGETHER}")


def _of_settings(programs: Sequence[Program]) -> tuple[int, str] | None:
    """The first rank whose world, mode, pipeline or version of Paddle differs, and how; None if there is none."""
    one = programs[0]
    for other in programs[1:]:
        pairs = [(name, getattr(one, name), getattr(other, name)) for name in ("world", "mode")]
        pairs += [("version of Paddle", one.paddle, other.paddle)] if one.paddle and other.paddle else []
        pairs += [
            (name.replace("_", " "), getattr(one.pipeline, name), getattr(other.pipeline, name))
            for name in one.pipeline.__struct_fields__
            if name != "stage"
        ]
        for name, expected, found in pairs:
            if found != expected:
                return other.rank, f"rank {other.rank} is of another world than rank {one.rank}: {name} is {found} there, {expected} here"
    return None


def _of_scripts(programs: Sequence[Program], paths: Sequence[Path]) -> tuple[int, str] | None:
    """The first rank whose script or arguments differ, and how; None if there is none. Unknown scripts are skipped."""
    known: tuple[int, Script] | None = None
    for program, path in zip(programs, paths, strict=True):
        script = None if program.jobs else script_of(path)
        if script is None:
            continue
        known = known or (program.rank, script)
        if script.digest != known[1].digest or script.arguments != known[1].arguments:
            what = "another text of the script" if str(script) == str(known[1]) else f"`{script}`"
            return program.rank, f"rank {program.rank} was built from {what}, rank {known[0]} from `{known[1]}`"
    return None


def _of_calls(programs: Sequence[Program]) -> tuple[int, str] | None:
    """A rank whose calls differ from those of another rank that shares them, and how; None if all match."""
    calls: dict[Line, dict[int, list[Call]]] = defaultdict(dict)
    given = sorted(with_given_partners(programs), key=lambda program: program.rank)
    ranks, names = {program.rank for program in given}, RingNames({program.rank: program.groups for program in given})
    for program in given:
        groups, values = {group.id: group.ranks for group in program.groups}, {value.id: value for value in program.values}
        for op in program.ops:
            line = _line(op, program.rank, groups, names) if is_comm(op) else None
            if line is not None:
                for rank in ranks.intersection(line[1:] if line[1] >= 0 else line[0][0]):
                    calls[line].setdefault(rank, [])
                calls[line][program.rank].append((signature(op, values), op))
    for by_rank in calls.values():
        (one, expected), *others = sorted(by_rank.items())
        for rank, found in others:
            told = _first_difference(one, expected, rank, found)
            if told:
                return rank, told
    return None


def _line(op: Op, rank: int, groups: dict[int, tuple[int, ...]], names: RingNames) -> Line | None:
    """The line of a call; None if no other rank takes part in it, or if its ring cannot be identified, which the proof refuses."""
    ranks = groups.get(op.group, ())
    if rank not in ranks or ranks in names.unclear:
        return None
    if not is_p2p(op):
        return names.name(rank, op.group), -1, -1
    peer = int(op.attrs.get("peer", -1))
    if not 0 <= peer < len(ranks) or ranks[peer] == rank:
        return None
    return (names.name(rank, op.group), rank, ranks[peer]) if is_send(op) else (names.name(rank, op.group), ranks[peer], rank)


def _first_difference(one: int, expected: list[Call], rank: int, found: list[Call]) -> str:
    for k, (mine, theirs) in enumerate(zip_longest(expected, found)):
        if mine is None or theirs is None or not agree(mine[0], theirs[0]):
            return (
                f"ranks {one} and {rank} do not fit: call {k + 1} between them is {_said(mine)} on rank {one}, {_said(theirs)} on rank "
                f"{rank}"
            )
    return ""


def _said(call: Call | None) -> str:
    return f"{describe(call[1])} of {call[0][1]} bytes of {call[0][2]}" if call else "none"
