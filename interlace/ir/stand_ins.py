"""Worlds of which one rank of each stage is given: who stands for whom (`Program.alike`)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from interlace.errors import ProgramError
from interlace.ir.program import Group, Program


def stand_ins(programs: Sequence[Program]) -> dict[int, int]:
    """Rank that is not given -> the rank whose program stands for it.

    Raises:
        ProgramError: A rank has two programs, its own or one that stands for it.
    """
    seats: dict[int, int] = {}
    for program in programs:
        for rank in program.ranks:
            if rank in seats:
                raise ProgramError(f"rank {rank} is given twice, in the dumps of ranks {seats[rank]} and {program.rank}; give one dump a "
                                   "rank, and one world at a time")  # fmt: skip
            seats[rank] = program.rank
    return {rank: seat for rank, seat in seats.items() if rank != seat}


def missing_ranks(programs: Sequence[Program]) -> list[int]:
    """Ranks of the world of which neither the program is given nor one that stands for it, rising."""
    known = {rank for program in programs for rank in program.ranks}
    return [rank for rank in range(max((program.world for program in programs), default=0)) if rank not in known]


def seats(programs: Sequence[Program]) -> list[int] | None:
    """For each rank of a world the place of its program among these; None where they are not the whole of one world."""
    if not programs or len({program.world for program in programs}) > 1 or missing_ranks(programs):
        return None
    stands = stand_ins(programs)
    places = {program.rank: place for place, program in enumerate(programs)}
    return [places[stands.get(rank, rank)] for rank in range(programs[0].world)]


def with_given_partners(programs: Sequence[Program]) -> list[Program]:
    """The programs with groups in which partners of other stages that are not given are replaced by the ranks that stand for them.

    Ranks of the same stage stay as they are: they issue what their stand-in issues, in the same order.
    """
    stands = stand_ins(programs)
    return [msgspec.structs.replace(program, groups=tuple(_within(group, program, stands) for group in program.groups))
            for program in programs] if stands else list(programs)  # fmt: skip


def _within(group: Group, program: Program, stands: dict[int, int]) -> Group:
    ranks = list(group.ranks)
    for place, rank in enumerate(ranks):
        seat = stands.get(rank, rank)
        if seat != program.rank and seat not in ranks:
            ranks[place] = seat
    return Group(group.id, tuple(ranks))
