"""The ranks of each pipeline stage, as Paddle counts them, and whether one of them can stand for the others. No Paddle here."""

from __future__ import annotations

from interlace.errors import ProgramError
from interlace.ir import Program
from interlace.ir.difference import first_unlike
from interlace.ir.equivalent_ranks import sends_within_stage
from interlace.units import ranks_text


def stages_of(program: Program) -> list[range]:
    """The ranks of each stage of the world that a captured program is of. Raises ProgramError where the world is no multiple of its stages,
    or ranks of a stage send to each other (as where no pipeline schedule says which ranks are of a stage).

    >>> stages_of(Program((), (), world=4))
    [range(0, 4)]
    """
    count = program.pipeline.num_stages
    if program.world % count:
        raise ProgramError(
            f"--stages: {program.world} ranks do not divide into {count} stages; expected as many ranks on each, or dump all ranks"
        )
    sends = sends_within_stage(program)
    if sends is not None:
        hint = "set strategy.pipeline.enable, which the script does not ask for, or dump all ranks" if count == 1 else "dump all ranks"
        raise ProgramError(
            f"--stages: rank {program.rank} has #{sends.id} {sends.name} to or from a rank of its own stage "
            f"{program.pipeline.stage} of {count}, so one rank does not stand for the others; {hint}"
        )
    size = program.world // count
    return [range(stage * size, (stage + 1) * size) for stage in range(count)]


def require_alike(first: Program, last: Program) -> None:
    """Refuse a stage of which one rank cannot stand for the others. Raises ProgramError with the first thing in which the two differ."""
    told = first_unlike(last, first)
    if told:
        raise ProgramError(
            f"--stages: {ranks_text((first.rank, last.rank))} of stage {first.pipeline.stage} are not equivalent: {told} (as "
            f"rank {first.rank} has it); dump all ranks, without --stages"
        )
