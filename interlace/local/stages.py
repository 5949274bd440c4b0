"""The ranks of each pipeline stage, as Paddle counts them, and whether one of them can represent the others. No Paddle here."""

from __future__ import annotations

from interlace.errors import ProgramError
from interlace.ir import Program
from interlace.ir.difference import first_unlike
from interlace.ir.equivalent_ranks import sends_within_stage
from interlace.units import ranks_text


def stages_of(program: Program) -> list[range]:
    """The ranks of each stage of a captured program's world. Raises ProgramError if the number of ranks is no multiple of the number of
    stages, or ranks of a stage send to each other (as they do if the script uses pipeline stages without enabling the pipeline strategy).

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
    """Check that one rank of a stage can represent the others. Raises ProgramError with the first difference between the two."""
    told = first_unlike(last, first)
    if told:
        raise ProgramError(
            f"--stages: {ranks_text((first.rank, last.rank))} of stage {first.pipeline.stage} are not equivalent: {told} (as "
            f"rank {first.rank} has it); dump all ranks, without --stages"
        )
