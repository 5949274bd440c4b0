"""`schedule-1f1b`: cuts a step into jobs, and orders the operations inside jobs of several parts."""

from __future__ import annotations

import msgspec

from interlace.errors import ConfigError, PlanError
from interlace.ir import Job, Program
from interlace.ir.effects import draws_twice
from interlace.ir.kinds import is_collective
from interlace.ir.remarks import Place
from interlace.ir.schedule import Schedule, Slot, find_schedule, in_flight, joined, last_forward, mixed_depth, with_optimizer, zero_bubble
from interlace.passes.base import Context, Pass, register
from interlace.scheduler.interleave.planner import Form
from interlace.scheduler.jobs.legal_rows import check_rows, stall
from interlace.scheduler.jobs.making import Jobs, Kinds, receive_early
from interlace.scheduler.jobs.options import ScheduleOptions, numbers_text
from interlace.scheduler.memory.live import saved_bytes

MOST_SLOTS = 12
"""Jobs of a stage that a report names by their slots; `interlace show --rows` has all."""


@register
class Schedule1F1B(ScheduleOptions, Pass, frozen=True, kw_only=True):
    """Cut the step into jobs of `(operation, micro-batch)` in Paddle's order, or with backward and forward mixed.

    Contract: needs nothing; keeps every operation once for each micro-batch (the optimizer's once a step), every sum's order
    over micro-batches and each group's order of collectives; gives a scheduled program.

    Steps: 1 take the schedule of the program's strategy; 2 with interleaving join each steady backward with the forward after
    it; 3 order every such pair with the cost model (`scheduler/interleave/planner.py`), within the memory of the plain order plus
    `Context.extra_bytes`; 4 issue receives before the sends that the neighbour takes only after sending; 5 inside jobs of one part start
    collectives as early as they can (`scheduler/interleave/part_order.py`). `insert-events` orders what crosses streams between jobs.
    The options are described in `scheduler/jobs/options.py`.

    Source: PaddlePaddle/Paddle#57446; measured orders in benchmarks/results/h200.
    """

    name = "schedule-1f1b"
    gives = frozenset({"scheduled"})
    after = ("split-backward", "overlap-column-backward", "reduce-in-place")
    is_default = True
    decides = "schedule"
    instead_of_off = "{interleave: off}, for Paddle's baseline order"

    def run(self, program: Program, context: Context) -> Program:
        """The program with its jobs; see the class."""
        rows, form = self._rows(program, context)
        slots = rows[program.pipeline.stage]
        if self._joins_optimizer(program):
            slots = with_optimizer(slots)
        kinds = {part.kind for slot in slots for part in slot.parts}
        jobs_of = self._jobs_of(program, slots, kinds, form, context)
        jobs = tuple(job for _, job in jobs_of)
        if program.pipeline.stage and program.pipeline.num_chunks == 1 and "R" not in kinds:
            jobs = receive_early(jobs, program, rows[program.pipeline.stage - 1])
        more = {"more": len(jobs) - MOST_SLOTS} if len(jobs) > MOST_SLOTS else {}
        context.applied("jobs-cut", jobs=len(jobs), slots=[slot for slot, _ in jobs_of[:MOST_SLOTS]], **more)
        return msgspec.structs.replace(program, jobs=jobs)

    def _joins_optimizer(self, program: Program) -> bool:
        """Whether the optimizer goes into the job of the last gradients: it has communication, and the jobs are not given or Paddle's."""
        ours = self.interleave != "off" and not self.schedule_file
        return ours and any(op.role == "optimize" and is_collective(op) for op in program.ops)

    def _rows(self, program: Program, context: Context) -> tuple[dict[int, list[Slot]], Form]:
        """Slots of every stage, and the form of pairs."""
        pipe = program.pipeline
        self.check(pipe)
        plain = self._every_stage(program, find_schedule(pipe.schedule))
        if not any(op.role == "backward" for op in program.ops):
            return {stage: [slot for slot in row if slot.parts[0].kind == "F"] for stage, row in plain.items()}, "dx-first"
        if self.schedule_file:
            return self._given_rows(program), self.form_of(pipe.stage)
        if self.interleave == "off":
            return plain, "dx-first"
        if self.interleave == "auto":
            context.declined("auto-not-simulated")
        if pipe.schedule in ("FThenB", "none"):
            context.declined("never-alternates", schedule=pipe.schedule)
            return plain, "dx-first"
        if self.interleave != "zb-h1":
            return self._paired(program, context)
        if pipe.num_chunks > 1:
            raise ConfigError("schedule_1f1b.interleave: zb-h1 has no chunks; expected a 1F1B pipeline, found VPP")
        return self._every_stage(program, zero_bubble), "dx-first"

    def _every_stage(self, program: Program, schedule: Schedule) -> dict[int, list[Slot]]:
        pipe = program.pipeline
        return {s: schedule(s, pipe.num_stages, pipe.num_micro_batches, pipe.num_chunks) for s in range(pipe.num_stages)}

    def _given_rows(self, program: Program) -> dict[int, list[Slot]]:
        pipe = program.pipeline
        try:
            rows = self.given_rows()
            check_rows(rows, pipe.num_stages, pipe.num_micro_batches, pipe.num_chunks, self.schedule_file)
        except PlanError as error:
            raise ConfigError(str(error)) from error
        return rows

    def _paired(self, program: Program, context: Context) -> tuple[dict[int, list[Slot]], Form]:
        """Slots with backward and forward joined, and the form: mixed if asked for, unless stages would wait for each other for ever."""
        pipe = program.pipeline
        stages = range(pipe.num_stages)
        if self.changes_depth(pipe) and draws_twice(program):
            context.declined("random-draws")
        elif self.mixes() and not self.depth:
            rows = {stage: self._row(program, stage, self.form_of(stage) == "mixed") for stage in stages}
            stuck = stall(list(rows.values()), pipe.num_chunks)
            if not stuck:
                if self.form_of(pipe.stage) == "mixed":
                    self._report_depth(program, context)
                return rows, self.form_of(pipe.stage)
            if isinstance(self.interleave, tuple):
                raise ConfigError(
                    f"schedule_1f1b.interleave: found {self.form_text()} without depth; give depth, a number for each "
                    f"stage, as stages would wait for each other:\n{stuck}"
                )
            context.declined("mixed-would-stall", grid=stuck)
        rows = {stage: self._row(program, stage, mixed=False) for stage in stages}
        if self.depth and (stuck := stall(list(rows.values()))):
            raise ConfigError(f"schedule_1f1b.depth: found {numbers_text(self.depth)}; stages would wait for each other:\n{stuck}")
        own = [in_flight(stage, pipe.num_stages, pipe.num_micro_batches) for stage in stages]
        if self.depth and list(self.depth) != own and draws_twice(program):
            raise ConfigError(
                f"schedule_1f1b.depth: found {numbers_text(self.depth)}; forward and backward both draw random numbers, "
                "or may, and another depth than 1F1B's would change the order; leave depth out"
            )
        return rows, self.form_of(pipe.stage) if self.depth else "dx-first"

    def _row(self, program: Program, stage: int, mixed: bool) -> list[Slot]:
        """A stage's slots with backward and forward joined."""
        pipe = program.pipeline
        weight_delay, weight_delay_at_end = self.weight_delays(stage)
        depth = self.depth[stage] if self.depth else mixed_depth(stage, pipe.num_stages, pipe.num_micro_batches) if mixed else None
        return joined(
            stage,
            pipe.num_stages,
            pipe.num_micro_batches,
            pipe.num_chunks,
            weight_delay=weight_delay,
            warmup=depth,
            weight_delay_at_end=weight_delay_at_end,
        )

    def _report_depth(self, program: Program, context: Context) -> None:
        """The memory of the depth, if it is larger than Paddle's."""
        pipe = program.pipeline
        depth, plain = (count(pipe.stage, pipe.num_stages, pipe.num_micro_batches) for count in (mixed_depth, in_flight))
        if pipe.schedule != "VPP" and depth > plain:
            context.found("more-in-flight", Place(stage=pipe.stage), depth=depth, more=depth - plain, each_bytes=saved_bytes(program))

    def _jobs_of(self, program: Program, slots: list[Slot], kinds: set[str], form: Form, context: Context) -> list[tuple[str, Job]]:
        """The jobs of a stage's slots, each with the slot, or the part of it, that it runs; a slot without operations has none. Those at
        the end are ordered for sends of another weight where there is one."""
        end, at_end, weight = len(slots), self, self.send_latency_weight_at_end
        if weight is not None:
            end, at_end = last_forward(slots), msgspec.structs.replace(self, send_latency_weight=weight)
        joins, jobs = any(len(slot.parts) > 1 for slot in slots), list[tuple[str, Job]]()
        for each, some in ((self, slots[:end]), (at_end, slots[end:])):
            when = {"when": "at the end"} if each is not self else {}
            make = Jobs(program, each, context.cost, context.memo, context.memory_limit is not None, context.extra_bytes)
            parts = make.parts(kinds)
            plans = make.plans(some, parts, form, joins)
            context.remarks += [plan.remark(_job_name(key, parts.chunked), **when) for key, plan in plans.items()]
            for slot in some:
                made = make.of(slot, parts, plans)
                names = [str(slot)] if len(made) == 1 else map(str, slot.parts)
                jobs += [(name, job) for name, job in zip(names, made, strict=True) if job.items]
        return jobs


def _job_name(kinds: Kinds, chunked: bool) -> str:
    """A kind of job as remarks name it (`Place.job`)."""
    return "+".join(kind + (f".{chunk}" if chunked else "") for _, kind, chunk in kinds)
