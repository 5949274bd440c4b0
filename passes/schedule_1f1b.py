"""`schedule-1f1b`: cuts a step into jobs, and orders the operations inside jobs of several parts."""

from __future__ import annotations

import msgspec

from interlace.errors import ConfigError, PlanError
from interlace.ir import Job, Program
from interlace.ir.effects import draws_twice
from interlace.ir.remarks import Place
from interlace.ir.schedule import Schedule, Slot, find_schedule, in_flight, joined, last_forward, mixed_depth, with_optimizer, zero_bubble
from interlace.passes.base import Context, Pass, register
from interlace.scheduler.interleave.optimizer import optimizer_communicates
from interlace.scheduler.interleave.planner import Form
from interlace.scheduler.jobs.legal_rows import check_rows, stall
from interlace.scheduler.jobs.making import Jobs, Kinds, receive_early
from interlace.scheduler.jobs.options import ScheduleOptions, numbers_text
from interlace.scheduler.memory.live import saved_bytes

MOST_SLOTS = 12
"""Number of jobs that a remark lists by their slots; `interlace show --rows` lists all."""


@register
class Schedule1F1B(ScheduleOptions, Pass, frozen=True, kw_only=True):
    """Split the step into jobs, in Paddle's order or with backward and forward of different micro-batches mixed.

    Contract: needs nothing; runs every operation once for each micro-batch (the optimizer's once per step); keeps the order of every sum
    over micro-batches and of each group's collectives; gives a scheduled program.

    Steps: 1 take the schedule of the program's strategy; 2 with interleaving, join each backward of the steady phase with the forward after
    it; 3 order every such pair with the cost model (`scheduler/interleave/planner.py`), within the memory of the plain order plus
    `Context.extra_bytes`; 4 issue each receive before sends that the neighbour accepts only after its own send; 5 in jobs of one part,
    start collectives as early as possible (`scheduler/interleave/part_order.py`). `insert-events` later orders what crosses streams
    between jobs. The options are described in `scheduler/jobs/options.py`.

    Source: PaddlePaddle/Paddle#57446; measured orders in benchmarks/results/h200.
    """

    name = "schedule-1f1b"
    gives = frozenset({"scheduled"})
    after = ("split-backward", "overlap-column-backward", "reduce-in-place")
    is_default = True
    decides = "schedule"
    instead_of_off = "{interleave: off}, for Paddle's baseline order"

    def run(self, program: Program, context: Context) -> Program:
        """The program with its jobs. Raises ConfigError if the options do not fit the pipeline, or its stages would wait for each other."""
        rows, form = self._rows(program, context)
        slots = rows[program.pipeline.stage]
        if self._orders_optimizer(program) and self.join_optimizer:
            slots = with_optimizer(slots)
        kinds = {part.kind for slot in slots for part in slot.parts}
        jobs_of = self._jobs_of(program, slots, kinds, form, context)
        jobs = tuple(job for _, job in jobs_of)
        if program.pipeline.stage and program.pipeline.num_chunks == 1 and "R" not in kinds:
            jobs = receive_early(jobs, program, rows[program.pipeline.stage - 1])
        more = {"more": len(jobs) - MOST_SLOTS} if len(jobs) > MOST_SLOTS else {}
        context.applied("jobs-cut", jobs=len(jobs), slots=[slot for slot, _ in jobs_of[:MOST_SLOTS]], **more)
        return msgspec.structs.replace(program, jobs=jobs)

    def _orders_optimizer(self, program: Program) -> bool:
        """Whether the optimizer's operations are ordered: if it communicates, and the jobs are neither Paddle's nor from a file."""
        return self.interleave != "off" and not self.schedule_file and optimizer_communicates(program)

    def _rows(self, program: Program, context: Context) -> tuple[dict[int, list[Slot]], Form]:
        """Stage -> its slots, and the form of this stage's pairs."""
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
        if not pipe.alternates:
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
        """Stage -> its slots, with backward and forward joined, and the form of this stage's pairs: the one that the options ask for, but
        `dx-first` where stages would wait for each other forever or the depth must not change."""
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
        """Report the memory of the micro-batches in flight beyond Paddle's, if there are any."""
        pipe = program.pipeline
        depth, plain = (count(pipe.stage, pipe.num_stages, pipe.num_micro_batches) for count in (mixed_depth, in_flight))
        if pipe.schedule != "VPP" and depth > plain:
            context.found("more-in-flight", Place(stage=pipe.stage), depth=depth, more=depth - plain, each_bytes=saved_bytes(program))

    def _jobs_of(self, program: Program, slots: list[Slot], kinds: set[str], form: Form, context: Context) -> list[tuple[str, Job]]:
        """The jobs of a stage's slots, each with the text of the slot, or part of a slot, that it runs; a slot without operations gets no
        job. Those after the last forward use `send_latency_weight_at_end`, if it is given."""
        end, at_end, weight = len(slots), self, self.send_latency_weight_at_end
        if weight is not None:
            end, at_end = last_forward(slots), msgspec.structs.replace(self, send_latency_weight=weight)
        joins, jobs = any(len(slot.parts) > 1 for slot in slots), list[tuple[str, Job]]()
        for each, some in ((self, slots[:end]), (at_end, slots[end:])):
            when = {"when": "at the end"} if each is not self else {}
            make = Jobs(program, each, context.cost, context.memo, context.memory_limit is not None, context.extra_bytes)
            parts = make.parts(kinds)
            plans = make.plans(some, parts, form, joins, self._orders_optimizer(program))
            context.remarks += [plan.remark(_job_name(key, parts.chunked), **when) for key, plan in plans.items()]
            for slot in some:
                made = make.of(slot, parts, plans)
                names = [str(slot)] if len(made) == 1 else map(str, slot.parts)
                jobs += [(name, job) for name, job in zip(names, made, strict=True) if job.items]
        return jobs


def _job_name(kinds: Kinds, chunked: bool) -> str:
    """The name of a kind of job in remarks (`Place.job`)."""
    return "+".join(kind + (f".{chunk}" if chunked else "") for _, kind, chunk in kinds)
