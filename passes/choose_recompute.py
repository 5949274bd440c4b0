"""`choose-recompute`: which values of forward stay in memory for backward, and which backward computes again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from interlace.cost_model import Costs
from interlace.cost_model.base import tables_of
from interlace.errors import ConfigError
from interlace.ir import Program
from interlace.ir.per_ops import remembered
from interlace.ir.remarks import remark
from interlace.passes.base import Context, Pass, check_unscheduled, register
from interlace.scheduler.recompute.choices import LEVELS, RecomputeLevels
from interlace.scheduler.recompute.copies import Recomputation, recomputes
from interlace.scheduler.recompute.early_repeats import with_early_repeats
from interlace.scheduler.recompute.repeats import ADDED, with_repeats

Level = Annotated[float, msgspec.Meta(ge=0, le=1)]
Groups = tuple[tuple[tuple[int, int], ...], ...]
"""Groups of values under names that are the same on all ranks that run the same operations (`Recomputation.names`)."""


class RecomputeFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank sends to the others: its stage, its groups of values, and the indices of those that it would recompute."""

    stage: int
    groups: Groups
    recomputed: tuple[int, ...]


@register
class ChooseRecompute(Pass, frozen=True, kw_only=True):
    """Choose what backward computes again.

    Recomputation in the user's program is removed if nothing reads its results. With `interleave: auto` or under a memory budget, more is
    removed where memory has room for the values, and some is added where the memory it frees is worth its time.

    Contract: keeps every value that is read, bit for bit; removes operations that repeat others exactly, including collectives, and
    adds exact repetitions, both identically on all ranks of a stage. Never removes or adds an operation that draws random numbers, or
    may; never adds one that works in place, nor one that communicates unless `repeat_collectives` allows it.

    Before / After, where the result of the matmul is kept instead of being computed again:
        #3 %3 = pd_op.matmul(%2, %0) forward {"fwd_recompute_id":0}     #3 %3 = pd_op.matmul(%2, %0) forward
        #4 %4 = pd_op.gelu(%3) forward {"fwd_recompute_id":0}           #4 %4 = pd_op.gelu(%3) forward
        #7 %7 = pd_op.matmul(%2, %0) backward {"bwd_recompute_id":0}
        #8 %8 = pd_op.gelu(%7) backward {"bwd_recompute_id":0}          #8 %8 = pd_op.gelu(%3) backward

    Steps: 1 match each copy with its original; 2 remove copies whose results nothing reads (with full recomputation the last product of
    every segment is one); 3 with `level`, add to backward a repetition of each forward value that it reads and can compute from the
    others that it reads, choose the repetitions that free this share of the peak of Paddle's own schedule in the least time, and let
    backward read the originals of the rest.

    Options:
        level: How much backward recomputes, as a share of the memory that recomputation can free at the peak of Paddle's own schedule: 0
            keeps everything, 1 recomputes everything possible. One number, or one for each stage. When: to try another level than the
            chosen one. Details: by default the search over whole steps decides, with `interleave: auto` or under a `memory_budget`;
            otherwise the program's own recomputation stays, except for results that nothing reads.
        repeat_collectives: Whether added recomputation may repeat collectives within the stage, such as the sums of tensor parallelism.
            When: no plan fits the memory budget: this needs less memory, but makes the step longer. Details: collectives in the program's
            own recomputation are repeated in any case.

    Source: POET (joint rematerialisation and paging, 2022) weighs the same costs.
    """

    name = "choose-recompute"
    gives = frozenset({"recompute-chosen"})
    is_default = True
    follows_budget = True
    decides = "recomputation"
    in_baseline = False

    level: Level | tuple[Level, ...] | None = None
    repeat_collectives: bool = False

    @property
    def level_index(self) -> int | tuple[int, ...] | None:
        """The level, or one for each stage, on the scale of `RecomputeLevels`: 0 to `LEVELS`; None if not given."""
        if isinstance(self.level, tuple):
            return tuple(round(each * LEVELS) for each in self.level)
        return None if self.level is None else round(self.level * LEVELS)

    def facts(self, program: Program, context: Context) -> RecomputeFacts:
        """This rank's groups of values, and those that it would recompute."""
        check_unscheduled(program)
        found = self._found(program, context)
        return RecomputeFacts(program.pipeline.stage, found.names(), self._chosen(found, program, context))

    def run(self, program: Program, context: Context) -> Program:
        everyone: Sequence[RecomputeFacts] = context.facts
        mine = everyone[program.rank if context.is_whole else 0]
        found = self._found(program, context)
        if not found.copies:
            context.declined("nothing-recomputed")
            return program
        ours = [each for each in everyone if each.stage == mine.stage]
        if any(each.groups != mine.groups for each in ours):
            context.declined("ranks-differ")
            found = recomputation(program, context.cost, context.memo, adds=False)  # what the user's program recomputes, nothing added
            return self._applied(found, frozenset(range(len(found.groups))), context)
        recomputed = frozenset(ours[0].recomputed)
        made = self._applied(found, recomputed, context)
        return made if recomputed or recomputes(program) else program

    def _chosen(self, found: Recomputation, program: Program, context: Context) -> tuple[int, ...]:
        """Indices of the groups that this stage recomputes. Raises ConfigError if `level` does not have one number for each stage."""
        index = LEVELS if self.level_index is None else self.level_index
        if not isinstance(index, int):
            if len(index) != program.pipeline.num_stages:
                given = [each / LEVELS for each in index]
                raise ConfigError(
                    f"choose_recompute.level: {len(index)} numbers {given}; expected one number, or "
                    f"one for each of {program.pipeline.num_stages} stages"
                )
            index = index[program.pipeline.stage]
        if index in (0, LEVELS) or not found.groups:
            return tuple(range(len(found.groups) if index else 0))
        return tuple(sorted(choices(program, context.cost, context.memo, self.repeat_collectives).at(index)))

    def _found(self, program: Program, context: Context) -> Recomputation:
        return recomputation(program, context.cost, context.memo, adds=self.level is not None, collectives=self.repeat_collectives)

    def _applied(self, found: Recomputation, recomputed: frozenset[int], context: Context) -> Program:
        kept = [group for k, group in enumerate(found.groups) if k not in recomputed]
        made = with_early_repeats(found.without(kept), set(found.copies))
        if self.level is None:
            self._report_unread(found, kept, made, context)
        else:
            self._report_choice(found, recomputed, made, context)
        return made

    def _report_unread(self, found: Recomputation, kept: Sequence[tuple[int, ...]], made: Program, context: Context) -> None:
        left = {op.id for op in made.ops}
        gone = [op for op in found.copies.values() if op.id not in left]
        took = sum(found.op_ns[op.id] for op in gone)
        whole = sum(found.op_ns[op_id] for op_id in found.copies)
        if gone:
            context.applied(
                "unread-dropped",
                operations=len(gone),
                repeated=len(found.copies),
                dropped_ns=took,
                repeated_ns=whole,
                kept=len(kept),
                groups=len(found.groups),
                kept_bytes=sum(found.bytes_of(group) for group in kept),
            )
        else:
            context.declined("every-copy-read")

    def _report_choice(self, found: Recomputation, recomputed: frozenset[int], made: Program, context: Context) -> None:
        """Report each group, whether or not it is treated as in the program before, and the totals first."""
        runs = {op.id for op in made.ops} & set(found.copies)
        users = {op.id for op in found.copies.values() if op.attrs.get("bwd_recompute_id") != ADDED}
        sums = {"recomputed": 0, "kept": 0}
        for at, group in enumerate(found.groups):
            again, freed = at in recomputed, found.bytes_of(group)
            sums["recomputed" if again else "kept"] += freed
            maker = found.producer[group[0]]
            took = found.op_ns[maker.id]
            original = found.maker_of[found.original[group[0]]]
            if again and maker.id not in users:
                context.applied("recomputation-added", original, freed_bytes=freed, took_ns=took)
            elif not again and maker.id in users:
                context.applied("recomputation-dropped", original, kept_bytes=freed, took_ns=took)
            elif again:
                context.declined("recomputed-as-before", original, freed_bytes=freed, took_ns=took)
            else:
                context.declined("kept-as-before", original, kept_bytes=freed, took_ns=took)
        took, whole = (sum(found.op_ns[op_id] for op_id in ids) for ids in (runs, users))
        chosen = remark(
            "applied",
            "recomputation-chosen",
            groups=len(found.groups),
            recomputed=len(recomputed),
            recomputed_bytes=sums["recomputed"],
            recomputed_ns=took,
            before_ns=whole,
            kept=len(found.groups) - len(recomputed),
            kept_bytes=sums["kept"],
        )
        context.remarks.insert(0, chosen)


def recomputation(program: Program, costs: Costs, memo: dict[Any, Any], *, adds: bool, collectives: bool = False) -> Recomputation:
    """What backward of a captured program recomputes, computed once for each program and kept in `memo`. `adds` first adds a repetition of
    everything that backward could compute again; `collectives` includes collectives within the stage."""

    def make() -> Recomputation:
        whole = with_repeats(program, collectives) if adds else program
        tables, timed = tables_of(whole), whole.ops if recomputes(whole) else ()
        return Recomputation(whole, {op.id: costs.op_time(op, *tables).dur_ns for op in timed if op.role == "backward"})

    return remembered(memo, ("recomputation", adds, collectives), program, make)


def choices(program: Program, costs: Costs, memo: dict[Any, Any], collectives: bool = False) -> RecomputeLevels:
    """What is recomputed at each level, including what is added; computed once for each program. Arguments as in `recomputation`."""
    return remembered(
        memo,
        ("choices", collectives),
        program,
        lambda: RecomputeLevels(recomputation(program, costs, memo, adds=True, collectives=collectives)),
    )
