"""Equivalent ranks, which are ranks of a stage that do the same: which they are, and worlds in which one program represents several ranks
(`Program.equivalent_ranks`)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from interlace.errors import ProgramError
from interlace.ir.difference import without_place
from interlace.ir.kinds import is_p2p
from interlace.ir.program import Group, Op, Program


def stage_of(rank: int, program: Program) -> int:
    """The stage to which Paddle 3.3.1 assigns a rank (`auto_parallel/static/utils.py`, get_pp_stage_by_rank)."""
    return rank // max(1, program.world // program.pipeline.num_stages)


def groups_within_stage(program: Program) -> set[int]:
    """Ids of the groups all of whose ranks lie on this rank's stage."""
    own = stage_of(program.rank, program)
    return {group.id for group in program.groups if all(stage_of(rank, program) == own for rank in group.ranks)}


def sends_within_stage(program: Program) -> Op | None:
    """The first send or receive whose partner lies on the same stage; ranks of a stage that do this are not equivalent."""
    within = groups_within_stage(program)
    return next((op for op in program.ops if is_p2p(op) and op.group in within), None)


def equivalence_key(program: Program) -> bytes:
    """A key that is equal for equivalent ranks: those of one stage whose programs differ only in attributes, streams and the ranks of
    groups. A rank that sends or receives within its stage is equivalent to no other. O(operations)."""
    plain = without_place(program)
    alone = program.rank if sends_within_stage(program) is not None else -1
    return hashlib.sha256(msgspec.msgpack.encode((alone, plain.pipeline, plain.ops, plain.values))).digest()[:16]


def representatives(programs: Sequence[Program]) -> dict[int, int]:
    """Rank without a program of its own -> the rank whose program represents it. Raises ProgramError if two programs cover one rank."""
    program_of: dict[int, int] = {}
    for program in programs:
        for rank in program.ranks:
            if rank in program_of:
                raise ProgramError(
                    f"rank {rank} is given twice, in the dumps of ranks {program_of[rank]} and {program.rank}; give one "
                    "dump per rank, and one world at a time"
                )
            program_of[rank] = program.rank
    return {rank: other for rank, other in program_of.items() if rank != other}


def missing_ranks(programs: Sequence[Program]) -> list[int]:
    """Ranks of the world that no program covers, in ascending order."""
    known = {rank for program in programs for rank in program.ranks}
    return [rank for rank in range(max((program.world for program in programs), default=0)) if rank not in known]


def seats(programs: Sequence[Program]) -> list[int] | None:
    """For each rank of a world, the index of its program in `programs`; None if these are not all programs of one world."""
    if not programs or len({program.world for program in programs}) > 1 or missing_ranks(programs):
        return None
    stands = representatives(programs)
    index_of = {program.rank: index for index, program in enumerate(programs)}
    return [index_of[stands.get(rank, rank)] for rank in range(programs[0].world)]


def with_given_partners(programs: Sequence[Program]) -> list[Program]:
    """The programs, with groups in which ranks of other stages that have no program are replaced by the ranks that represent them.

    Ranks of the same stage are not replaced: they issue what their representative issues, in the same order.
    """
    stands = representatives(programs)
    if not stands:
        return list(programs)
    groups = (tuple(_within(group, program, stands) for group in program.groups) for program in programs)
    return [msgspec.structs.replace(program, groups=mine) for program, mine in zip(programs, groups, strict=True)]


def _within(group: Group, program: Program, stands: dict[int, int]) -> Group:
    ranks = list(group.ranks)
    for index, rank in enumerate(ranks):
        other = stands.get(rank, rank)
        if other != program.rank and other not in ranks:
            ranks[index] = other
    return Group(group.id, tuple(ranks))
