"""`schedule-1f1b`: cuts a step into jobs, and orders the operations inside jobs of several parts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeVar

import msgspec

from interlace.cost_model import Costs
from interlace.errors import ConfigError, PlanError
from interlace.files import read_text
from interlace.ir import Graph, Job, Op, Program
from interlace.ir.effects import is_ordered
from interlace.ir.kinds import is_collective, is_receive, is_send
from interlace.ir.remarks import Place
from interlace.passes.base import Context, Pass, register
from interlace.scheduler.interleave import planner
from interlace.scheduler.interleave.inline_weights import inline_weights
from interlace.scheduler.interleave.optimizer import reductions_first
from interlace.scheduler.interleave.part_order import EarlyCollectives
from interlace.scheduler.interleave.planner import EARLY, FREE_SHARE, SMALL_SHARE, Form, Pair, PairPlan, PartOps, plan_pair
from interlace.scheduler.jobs import Parts, job_of
from interlace.scheduler.legal_rows import check_rows, stall
from interlace.scheduler.memory.saved import saved_bytes
from interlace.scheduler.schedule import (
    Schedule,
    Slot,
    find_schedule,
    in_flight,
    joined,
    last_forward,
    parse_rows,
    sent_before,
    with_optimizer,
    zero_bubble,
)
from interlace.scheduler.whole_step.slot_times import SlotTimes, slot_times

T = TypeVar("T", int, float, str)
MOST_SCHEDULE_BYTES = 1 << 20
MOST_SLOTS = 12
"""Slots of a stage that a report names; `interlace show --rows` has all."""


@register
class Schedule1F1B(Pass, frozen=True, kw_only=True):
    """Cut the step into jobs of `(operation, micro-batch)` in Paddle's order, or with backward and forward mixed.

    Contract: needs nothing; keeps every operation once for each micro-batch (the optimizer's once a step), every sum's order
    over micro-batches and each group's order of collectives; gives a scheduled program.

    Steps: 1 take the schedule of the program's strategy; 2 with interleaving join each steady backward with the forward after
    it; 3 order every such pair with the cost model (`scheduler/interleave/planner.py`), within the memory of the plain order plus
    `extra_live_bytes`; 4 issue receives before the sends that the neighbour takes only after sending; 5 inside jobs of one part start
    collectives as early as they can (`scheduler/interleave/part_order.py`). `insert-events` orders what crosses streams between jobs.

    Options:
        interleave: How work of different micro-batches is mixed: `auto`, or a form by name; a list has `dx-first` or `mixed` for each
            stage. When: `auto` unless you compare forms; `off` to use offload or streams alone; a named form to plan faster, or if
            measurements show that it is better. Details: `auto` simulates whole steps and takes the fastest of Paddle's baseline, the
            named forms, and schedules with a form, weight-gradient delay, depth, orders and recomputation for each stage; no stage may
            need more memory than Paddle's baseline does on its fullest stage (plus `extra_live_bytes`), or than the `memory_budget`.
            `off` keeps Paddle's own list of jobs, to which the other passes still apply. `dx-first` computes the chain of input gradients
            first and the weight gradients during the collectives of backward and forward, at Paddle's warm-up depth. `mixed` mixes
            backward and forward operation by operation, with the `2 (stages - 1 - stage) + 1` micro-batches in flight that this needs.
            `zb-h1` postpones weight gradients to fill bubbles. All but `off` put an optimizer that communicates into the job of the last
            gradients. With a list, stages may wait for each other forever; give `depth` too in that case.
        weight_delay: Number of micro-batches by which weight gradients are computed later than input gradients, with `dx-first` and
            `mixed`; one number, or one for each stage. When: trying by hand what `auto` decides: pipelines whose last stages wait at the
            end of the step, with memory to spare. Details: from 1 on, weight gradients do not depend on the rest of their job: they run
            during its first collectives, and the last ones fill the end of the pipeline. Each micro-batch of weight-gradient delay keeps
            the operands of its weight gradients live. With VPP the weight-gradient delay counts backwards of one chunk.
        weight_delay_at_end: The weight-gradient delay after a stage's last forward, where memory only falls; by default that of
            `weight_delay`. One number, or one for each stage. When: trying by hand what `auto` decides: last stages that send their last
            gradients late because weight gradients of other micro-batches run first. Details: no stage may have less than its
            `weight_delay`, and a stage whose `weight_delay` is 0 has 0.
        inline_share: Share of weight gradients, by time, that are computed with their own input gradients while the others trail; one
            number, or one for each stage. When: trying by hand what `auto` decides: a weight-gradient delay that does not quite fit into
            memory. Details: these are the weight gradients whose operands take the most memory for their time. They run during the
            collectives of their own job, which leaves memory for a larger weight-gradient delay of the others.
        depth: Micro-batches in flight on each stage, with `dx-first` and `mixed`; by default as in 1F1B, or as `mixed` needs them. When:
            trying by hand what `auto` decides: messages between stages that arrive late. Details: a deeper stage sends activations before
            it needs the next gradient, so a late message does not stop the pipeline.
        send_latency_weight: Weight of the start times of a job's sends against the job's duration when its operations are ordered; 0
            minimizes the duration alone. One number, or one for each stage. When: trying by hand what `auto` decides: 0 without a
            pipeline, more if stages wait for gradients.
        send_latency_weight_at_end: The same for jobs after a stage's last forward, which empty the pipeline; by default that of
            `send_latency_weight`. One number, or one for each stage. When: trying by hand what `auto` decides: a last stage with `mixed`,
            whose jobs are short but send their gradient at their end. Details: while the pipeline empties, the previous stage waits for
            every gradient.
        search: Whether a local search improves the order of operations in each kind of job; `auto` does not use it. When: off to plan in a
            fraction of the time. Details: the search sees one job at a time, and what it finds makes whole steps slower as often as
            faster. Off keeps the order of the list scheduler.
        schedule_file: A file with one line of slots for each stage (`0 | 0F 1F 0B+2F ...`, docs/guide-schedule.md), instead of
            `weight_delay` and `depth`. When: you have your own schedule, or changed the one that `interlace plan` wrote. Details: jobs of
            several parts are ordered as with `dx-first`, or with `mixed` if `interleave` says so.
        extra_live_bytes: Bytes by which a stage may exceed the memory of Paddle's baseline. When: the device has memory that Paddle's plan
            leaves free: some GB allow more communication to be hidden. Details: a job may exceed the live memory of its plain order (all
            parts one after another) by the same amount. A difference of one percent of the stage's memory is always allowed. What
            `extend-lifetimes` later keeps alive for side streams is not counted here, but a `memory_budget` counts it.
        max_ops_per_job: A pair with more operations stays two jobs, because the executor's build time grows with their square. When: the
            first step of a very deep model takes too long to start; smaller jobs start faster and hide less.
        only_gains: Fall back to a simpler form (`dx-first`, then `off`) if the simulated step would be slower than with `off`. When: off
            for tests on models too small to gain anything.

    Source: PaddlePaddle/Paddle#57446; measured orders in benchmarks/results/h200.
    """

    name = "schedule-1f1b"
    gives = frozenset({"scheduled"})
    after = ("split-backward", "overlap-column-backward")
    is_default = True
    instead_of_off = "{interleave: off}, for Paddle's baseline order"
    renamed: ClassVar[Mapping[str, str]] = {"rows": "schedule_file", "allowance_bytes": "extra_live_bytes"}

    interleave: Literal["auto", "off", "dx-first", "mixed", "zb-h1"] | tuple[Literal["dx-first", "mixed"], ...] = "auto"
    weight_delay: Annotated[int, msgspec.Meta(ge=0)] | tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = 0
    weight_delay_at_end: Annotated[int, msgspec.Meta(ge=0)] | tuple[Annotated[int, msgspec.Meta(ge=0)], ...] | None = None
    depth: tuple[Annotated[int, msgspec.Meta(ge=1)], ...] = ()
    inline_share: Annotated[float, msgspec.Meta(ge=0, lt=1)] | tuple[Annotated[float, msgspec.Meta(ge=0, lt=1)], ...] = 0.0
    send_latency_weight: Annotated[float, msgspec.Meta(ge=0, le=4)] | tuple[Annotated[float, msgspec.Meta(ge=0, le=4)], ...] = EARLY
    send_latency_weight_at_end: (
        Annotated[float, msgspec.Meta(ge=0, le=4)] | tuple[Annotated[float, msgspec.Meta(ge=0, le=4)], ...] | None
    ) = None
    search: bool = True
    schedule_file: str = ""
    extra_live_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_ops_per_job: Annotated[int, msgspec.Meta(ge=1)] = 4000
    only_gains: bool = True

    def mistake(self) -> tuple[str, str] | None:
        if not self.schedule_file:
            return self._misplaced()
        if self.interleave in ("off", "zb-h1"):
            return "interleave", (
                f"schedule_file gives every job, so interleave={self.interleave} would do nothing; leave one of the two "
                "out (dx-first and mixed say how jobs of several parts are ordered)"
            )
        try:
            read_schedule(self.schedule_file)
        except (ConfigError, PlanError) as error:
            return "schedule_file", str(error)
        return None

    def _misplaced(self) -> tuple[str, str] | None:
        """A weight-gradient delay or depth beside what has its own, and why that contradicts."""
        if self.send_latency_weight_at_end is not None and self.interleave in ("auto", "off") and not self.schedule_file:
            return "send_latency_weight_at_end", (
                f"found {_numbers(self.send_latency_weight_at_end)} beside interleave: {self.interleave}, which "
                f"{'chooses its own' if self.interleave == 'auto' else 'keeps the order of operations'}; "
                "write dx-first, mixed or zb-h1, or leave it out"
            )
        for name, given in (
            ("weight_delay", self.weight_delay or None),
            ("weight_delay_at_end", self.weight_delay_at_end),
            ("depth", self.depth or None),
        ):
            if given is not None and (self.interleave in ("auto", "off", "zb-h1") or self.schedule_file):
                chosen = "auto, which chooses its own" if self.interleave == "auto" else _names(self.interleave)
                beside, advice = (
                    (f"schedule_file: {self.schedule_file}", "leave one of them out")
                    if self.schedule_file
                    else (f"interleave: {chosen}", f"write one of them, or leave {name} out")
                )
                return name, f"found {_numbers(given)} beside {beside}; it goes with interleave dx-first or mixed; {advice}"
        return None

    def fallbacks(self) -> tuple[Pass, ...]:
        """For pairs `dx-first`, then `off`. A schedule file and `zb-h1` have none: they are used as given."""
        forms: dict[Form, tuple[Literal["dx-first", "off"], ...]] = {"mixed": ("dx-first", "off"), "dx-first": ("off",)}
        if not self.only_gains or self.schedule_file:
            return ()
        plain = msgspec.structs.replace(self, weight_delay=0, weight_delay_at_end=None, depth=(), inline_share=0.0)
        names = () if self.interleave in ("auto", "off", "zb-h1") else forms["mixed" if self.mixes() else "dx-first"]
        simpler = tuple(plain.baseline() if name == "off" else msgspec.structs.replace(plain, interleave=name) for name in names)
        return (plain, *simpler) if simpler and (self.weight_delay or self.depth) else simpler

    def is_open(self) -> bool:
        """Whether the whole step decides on the form (interlace/planning/search.py)."""
        return self.interleave == "auto" and not self.schedule_file

    def send_weight(self) -> float:
        """The weight of sends where a schedule lets them leave early."""
        return self.send_latency_weight if isinstance(self.send_latency_weight, float) else EARLY

    def named(self, program: Program, draws: bool) -> list[Schedule1F1B]:
        """The forms by name that are possible for a program, the same on every rank; `draws`: whether `draws_twice` of any of them."""
        pipe = program.pipeline
        names: tuple[Literal["dx-first", "mixed", "zb-h1"], ...] = ("dx-first", "mixed")
        if pipe.schedule in ("FThenB", "none"):
            return []
        if pipe.num_chunks == 1 and pipe.num_stages > 1:
            names = (*names, "zb-h1")
        forms = [msgspec.structs.replace(self, interleave=name) for name in names]
        return [form for form in forms if not (draws and form.changes_depth(program))]

    def changes_depth(self, program: Program) -> bool:
        """Whether a pipeline has another number of micro-batches in flight than its strategy's without being asked for by number."""
        pipe = program.pipeline
        stages, count = pipe.num_stages, pipe.num_micro_batches
        if self.depth or self.schedule_file or stages == 1 or pipe.schedule in ("FThenB", "none"):
            return False
        if isinstance(self.interleave, str) or len(self.interleave) != stages or pipe.num_chunks > 1:
            return self.mixes()
        return any(self.form_of(s) == "mixed" and mixed_depth(s, stages, count) != in_flight(s, stages, count) for s in range(stages))

    def mixes(self) -> bool:
        """Whether any stage mixes pairs op by op."""
        return "mixed" in self.interleave

    def form_of(self, stage: int) -> Form:
        """The form of a stage's jobs."""
        return "mixed" if _of_stage(self.interleave, stage) == "mixed" else "dx-first"

    def at_plain_depth(self) -> Schedule1F1B:
        """What takes the place of a form that changes the depth where forward and backward of any rank both draw random numbers."""
        return msgspec.structs.replace(self, interleave="dx-first")

    def draft(self) -> Schedule1F1B:
        """Without the local search."""
        return msgspec.structs.replace(self, search=False)

    def baseline(self) -> Schedule1F1B:
        """Paddle's own list of jobs, or that of the schedule file."""
        return msgspec.structs.replace(
            self, interleave="off", weight_delay=0, weight_delay_at_end=None, depth=(), inline_share=0.0, send_latency_weight_at_end=None
        )

    def label(self) -> str:
        """The form of interleaving."""
        more = [f"weight_delay {_numbers(self.weight_delay)}"] * bool(self.weight_delay)
        more += [f"weight_delay_at_end {_numbers(self.weight_delay_at_end)}"] if self.weight_delay_at_end is not None else []
        more += [f"depth {_numbers(self.depth)}"] * bool(self.depth)
        more += [f"inline_share {_numbers(self.inline_share)}"] * bool(self.inline_share)
        more += [f"send_latency_weight {_numbers(self.send_latency_weight)}"] * (self.send_latency_weight != EARLY)
        more += (
            [f"send_latency_weight_at_end {_numbers(self.send_latency_weight_at_end)}"]
            if self.send_latency_weight_at_end is not None
            else []
        )
        return ", ".join([f"interleave: {_names(self.interleave)}", *more])

    def run(self, program: Program, context: Context) -> Program:
        """The program with its jobs; see the class."""
        rows, form = self._rows(program, context)
        slots = rows[program.pipeline.stage]
        if self._joins_optimizer(program):
            slots = with_optimizer(slots)
        kinds = {part.kind for slot in slots for part in slot.parts}
        jobs = self._all_jobs(program, slots, kinds, form, context)
        if program.pipeline.stage and program.pipeline.num_chunks == 1 and "R" not in kinds:
            jobs = receive_early(jobs, program, rows[program.pipeline.stage - 1])
        more = {"more": len(slots) - MOST_SLOTS} if len(slots) > MOST_SLOTS else {}
        context.applied("jobs-cut", jobs=len(jobs), slots=[str(slot) for slot in slots[:MOST_SLOTS]], **more)
        return msgspec.structs.replace(program, jobs=jobs)

    def _joins_optimizer(self, program: Program) -> bool:
        """Whether the optimizer goes into the job of the last gradients: it has communication, and the jobs are not given or Paddle's."""
        ours = self.interleave != "off" and not self.schedule_file
        return ours and any(op.role == "optimize" and is_collective(op) for op in program.ops)

    def _rows(self, program: Program, context: Context) -> tuple[dict[int, list[Slot]], Form]:
        """Slots of every stage, and the form of pairs."""
        pipe = program.pipeline
        self._check_shape(program)
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
        if self.interleave == "zb-h1":
            return self._zero_bubble(program, context)
        return self._paired(program, context)

    def _check_shape(self, program: Program) -> None:
        """Check lists, delays and depth against the program and the other options. Raises ConfigError."""
        pipe = program.pipeline
        for name in ("send_latency_weight", "send_latency_weight_at_end", "inline_share", "interleave"):
            given = getattr(self, name)
            if isinstance(given, tuple) and len(given) != pipe.num_stages:
                kind, text = ("form", _names(given)) if name == "interleave" else ("number", _numbers(given))
                raise ConfigError(
                    f"schedule_1f1b.{name}: found {text}, {len(given)} {kind}s; "
                    f"expected one {kind}, or one for each of {pipe.num_stages} stages"
                )
        if self.inline_share and not (self.weight_delay or self.schedule_file or self.interleave == "zb-h1"):
            raise ConfigError(
                f"schedule_1f1b.inline_share: found {_numbers(self.inline_share)} beside interleave: {_names(self.interleave)} "
                "without weight-gradient delay, where no weight gradients trail; give weight_delay, schedule_file or interleave: zb-h1, "
                "or leave inline_share out"
            )
        if misplaced := self._misplaced():
            raise ConfigError("schedule_1f1b.{}: {}".format(*misplaced))
        for name, given in (("weight_delay", self.weight_delay), ("weight_delay_at_end", self.weight_delay_at_end), ("depth", self.depth)):
            if not given:
                continue
            found = f"schedule_1f1b.{name}: found {_numbers(given)}"
            if name == "depth" and pipe.num_chunks > 1:
                raise ConfigError(f"{found} with {pipe.num_chunks} chunks a stage; expected a pipeline without chunks; leave {name} out")
            if isinstance(given, tuple) and len(given) != pipe.num_stages:
                raise ConfigError(f"{found}, {len(given)} numbers; expected one for each of {pipe.num_stages} stages")
        weight_delays = [self._weight_delays(stage) for stage in range(pipe.num_stages)]
        if any(at_end < weight_delay or (at_end and not weight_delay) for weight_delay, at_end in weight_delays):
            raise ConfigError(
                f"schedule_1f1b.weight_delay_at_end: found {_numbers(self.weight_delay_at_end or 0)} "
                f"beside weight_delay {_numbers(self.weight_delay)}; "
                "expected no less than weight_delay on any stage, and 0 where weight_delay is 0"
            )

    def _every_stage(self, program: Program, schedule: Schedule) -> dict[int, list[Slot]]:
        pipe = program.pipeline
        return {s: schedule(s, pipe.num_stages, pipe.num_micro_batches, pipe.num_chunks) for s in range(pipe.num_stages)}

    def _given_rows(self, program: Program) -> dict[int, list[Slot]]:
        pipe = program.pipeline
        rows = read_schedule(self.schedule_file)
        check_rows(rows, pipe.num_stages, pipe.num_micro_batches, pipe.num_chunks, self.schedule_file)
        return rows

    def _zero_bubble(self, program: Program, context: Context) -> tuple[dict[int, list[Slot]], Form]:
        if program.pipeline.num_chunks > 1:
            raise ConfigError("schedule_1f1b.interleave: zb-h1 has no chunks; expected a 1F1B pipeline, found VPP")
        return self._every_stage(program, zero_bubble), "dx-first"

    def _paired(self, program: Program, context: Context) -> tuple[dict[int, list[Slot]], Form]:
        """Slots with backward and forward joined, and the form: mixed if asked for, unless stages would wait for each other for ever."""
        pipe = program.pipeline
        stages = range(pipe.num_stages)
        if self.changes_depth(program) and draws_twice(program):
            context.declined("random-draws")
        elif self.mixes() and not self.depth:
            rows = {stage: self._row(program, stage, self.form_of(stage) == "mixed") for stage in stages}
            stuck = stall(list(rows.values()), program.pipeline.num_chunks)
            if not stuck:
                if self.form_of(pipe.stage) == "mixed":
                    self._report_depth(program, context)
                return rows, self.form_of(pipe.stage)
            if isinstance(self.interleave, tuple):
                raise ConfigError(
                    f"schedule_1f1b.interleave: found {_names(self.interleave)} without depth; give depth, a number for each "
                    f"stage, as stages would wait for each other:\n{stuck}"
                )
            context.declined("mixed-would-stall", grid=stuck)
        rows = {stage: self._row(program, stage, mixed=False) for stage in stages}
        if self.depth and (stuck := stall(list(rows.values()))):
            raise ConfigError(f"schedule_1f1b.depth: found {_numbers(self.depth)}; stages would wait for each other:\n{stuck}")
        if (
            self.depth
            and draws_twice(program)
            and any(depth != in_flight(s, pipe.num_stages, pipe.num_micro_batches) for s, depth in enumerate(self.depth))
        ):
            raise ConfigError(
                f"schedule_1f1b.depth: found {_numbers(self.depth)}; forward and backward both draw random numbers, "
                "or may, and another depth than 1F1B's would change the order; leave depth out"
            )
        return rows, self.form_of(pipe.stage) if self.depth else "dx-first"

    def _row(self, program: Program, stage: int, mixed: bool) -> list[Slot]:
        """A stage's slots with backward and forward joined."""
        pipe = program.pipeline
        weight_delay, weight_delay_at_end = self._weight_delays(stage)
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

    def _weight_delays(self, stage: int) -> tuple[int, int]:
        """Before the last forward, and from there on."""
        return _of_stage(self.weight_delay, stage), _of_stage(
            self.weight_delay if self.weight_delay_at_end is None else self.weight_delay_at_end, stage
        )

    def _report_depth(self, program: Program, context: Context) -> None:
        """The memory of the depth, if it is larger than Paddle's."""
        pipe = program.pipeline
        depth, plain = (count(pipe.stage, pipe.num_stages, pipe.num_micro_batches) for count in (mixed_depth, in_flight))
        if pipe.schedule != "VPP" and depth > plain:
            context.found("more-in-flight", Place(stage=pipe.stage), depth=depth, more=depth - plain, each_bytes=saved_bytes(program))

    def _all_jobs(self, program: Program, slots: list[Slot], kinds: set[str], form: Form, context: Context) -> tuple[Job, ...]:
        """The jobs of a stage's slots, those at its end ordered for sends of another weight where there is one."""
        end = len(slots) if self.send_latency_weight_at_end is None else last_forward(slots)
        at_end = (
            self
            if self.send_latency_weight_at_end is None
            else msgspec.structs.replace(self, send_latency_weight=self.send_latency_weight_at_end)
        )
        joins, jobs = any(len(slot.parts) > 1 for slot in slots), list[Job]()
        for each, some in ((self, slots[:end]), (at_end, slots[end:])):
            when = {"when": "at the end"} if each is not self else {}
            parts = each.parts(program, kinds, context)
            plans = each._plans(program, some, parts, context, form, joins)
            context.remarks += [plan.remark(_job_name(key, parts.chunked), **when) for key, plan in plans.items()]
            jobs += [job for slot in some for job in self._jobs(slot, parts, plans) if job.items]
        return tuple(jobs)

    def _plans(self, program: Program, slots: list[Slot], parts: Parts, context: Context, form: Form, joins: bool) -> dict[Kinds, PairPlan]:
        """The order of each kind of slot that has a choice: slots of several parts, and where the stage `joins` any whole backwards too."""
        mixed = {_kinds(slot) for slot in slots if len(slot.parts) > 1}
        choice = {"B", "I"} if parts.early else {"B"}
        whole = {_kinds(slot) for slot in slots if slot.parts[0].kind in choice} if joins or parts.early else set()
        return {kinds: self.order(program, parts, kinds, form, context)[0] for kinds in sorted(mixed | whole)}

    def parts(self, program: Program, kinds: set[str], context: Context) -> Parts:
        """The operations of each kind of part, with collectives as early as they can start; `off` keeps program order. Weight gradients
        that do not trail go with the input gradients."""
        if self.interleave == "off":
            return Parts(program, kinds)
        stage = program.pipeline.stage
        early, now = _of_stage(self.send_latency_weight, stage), _of_stage(self.inline_share, stage) if "I" in kinds else 0.0
        key = ("parts", id(program.ops), frozenset(kinds & set("IRS")), self.extra_live_bytes, early, now)
        if key not in context.memo:
            parts = Parts(program, kinds, self._inline_weights(program, context.cost, now))
            for kind, chunk in parts.ops:
                parts.ops[kind, chunk] = self._early_collectives(program, parts.part(kind, kind, chunk), early, context)
            context.memo[key] = (parts, program)
        found: Parts = context.memo[key][0]
        return found

    def _inline_weights(self, program: Program, cost: Costs, part: float) -> frozenset[int]:
        if not part:
            return frozenset()
        graph, halves = Graph(program), Parts(program, {"I", "W"})
        return frozenset().union(*(inline_weights(graph, ops, cost, part) for (kind, _), ops in halves.ops.items() if kind == "W"))

    def _early_collectives(self, program: Program, part: PartOps, early: float, context: Context) -> list[Op]:
        """Orders are found once for a part of the same program, whatever the other parts are."""
        key = ("part", id(program.ops), part.kind, tuple(op.id for op in part.ops), self.extra_live_bytes)
        if key not in context.memo:
            context.memo[key] = (EarlyCollectives(program, part, context.cost, self.extra_live_bytes), program)
        found: EarlyCollectives = context.memo[key][0]
        return found.fastest(early)

    def order(self, program: Program, parts: Parts, kinds: Kinds, form: Form, context: Context) -> tuple[PairPlan, SlotTimes]:
        """The order of one kind of job, and its times and memory; computed once for the same program."""
        early = _of_stage(self.send_latency_weight, program.pipeline.stage)
        items = tuple(tuple(op.id for op in parts.ops[kind, chunk]) for _, kind, chunk in kinds)
        same = ("pair", id(program.ops), kinds, items, self.search)
        share = FREE_SHARE if context.memory_limit is None else SMALL_SHARE
        key = (*same, form, self.extra_live_bytes, self.max_ops_per_job, share, early)
        if same not in context.memo:
            ops = self._ops(program, parts, kinds)
            context.memo[same] = (Pair(program, ops, context.cost, early, planner.SEARCH_WORK if self.search else 0), program)
        if key not in context.memo:
            pair = context.memo[same][0].with_early(early)
            plan = plan_pair(pair, form, self.extra_live_bytes, self.max_ops_per_job, share)
            context.memo[key] = (plan, slot_times(pair, list(plan.order)))
        plan, times = context.memo[key]
        return plan, times

    @staticmethod
    def _ops(program: Program, parts: Parts, kinds: Kinds) -> list[PartOps]:
        """The operations of each part; the optimizer beside gradients reduces them in the order in which they are complete."""
        found = [parts.part(label, kind, chunk) for label, kind, chunk in kinds]
        if len(found) > 1 and found[-1].kind == "O":
            before = [op for part in found[:-1] for op in part.ops]
            found[-1] = PartOps("O", "O", reductions_first(Graph(program), before, found[-1].ops))
        return found

    def _jobs(self, slot: Slot, parts: Parts, plans: dict[Kinds, PairPlan]) -> list[Job]:
        """The job of a slot; if it would be too large, a job for each part, cut after the part's last operation."""
        kinds = _kinds(slot)
        if kinds not in plans:
            return [job_of(slot.parts[0], parts)]
        of_label = {label: part for (label, _, _), part in zip(kinds, slot.parts, strict=True)}
        items = tuple((op_id, of_label[label].micro_batch) for label, op_id in plans[kinds].order)
        if len(slot.parts) == 1:
            return [msgspec.structs.replace(job_of(slot.parts[0], parts), items=items)]
        if len(items) <= self.max_ops_per_job:
            name = "_".join(str(part).replace(".", "c") for part in slot.parts)
            return [Job(f"pair_{name}", "pair", slot.parts[0].micro_batch, items)]
        last = {label: k for k, (label, _) in enumerate(plans[kinds].order)}
        cuts = [0, *(1 + max(last[label] for label, _, _ in kinds[: k + 1]) for k in range(len(kinds)))]
        return [
            msgspec.structs.replace(job_of(part, parts), items=items[start:end])
            for part, start, end in zip(slot.parts, cuts, cuts[1:], strict=False)
        ]


def read_schedule(path: str) -> dict[int, list[Slot]]:
    """Slots of every stage in a schedule file.

    Raises:
        ConfigError: The file is missing, cannot be read, or holds no stage.
        PlanError: A line is no row of slots; it has the line.
    """
    expected = "a line `<stage> | 0F 1F 0B ...` for each stage"
    try:
        rows = parse_rows(read_text(os.path.abspath(path), MOST_SCHEDULE_BYTES, expected, ConfigError), path)
    except ConfigError as error:
        raise ConfigError(f"schedule file {error}") from error
    if not rows:
        raise ConfigError(f"schedule file {path!r} holds no stage; expected {expected}")
    return rows


def _of_stage(given: T | tuple[T, ...], stage: int) -> T:
    """An option that is one value for all stages, or one for each."""
    return given[stage] if isinstance(given, tuple) else given


def _numbers(each: float | tuple[float, ...]) -> str:
    return f"[{', '.join(f'{number:g}' for number in each)}]" if isinstance(each, tuple) else f"{each:g}"


def _names(forms: str | tuple[str, ...]) -> str:
    return forms if isinstance(forms, str) else f"[{', '.join(forms)}]"


Kinds = tuple[tuple[str, str, int], ...]
"""`(label, kind, chunk)` of each part of a slot: slots with the same parts, in any micro-batches, get the same order."""


def _kinds(slot: Slot) -> Kinds:
    """The parts of a slot; a label is the kind, with a number if the kind occurs twice."""
    seen: dict[str, int] = {}
    found = []
    for part in slot.parts:
        seen[part.kind] = seen.get(part.kind, 0) + 1
        found.append((part.kind + (str(seen[part.kind]) if seen[part.kind] > 1 else ""), part.kind, part.chunk))
    return tuple(found)


def _job_name(kinds: Kinds, chunked: bool) -> str:
    """A kind of job as remarks name it (`Place.job`)."""
    return "+".join(kind + (f".{chunk}" if chunked else "") for _, kind, chunk in kinds)


def receive_early(jobs: tuple[Job, ...], program: Program, neighbour: list[Slot]) -> tuple[Job, ...]:
    """Issue receives of activations before the gradient sends that the previous stage receives only after sending them.

    If sends wait for their receiver, this stage must receive, before it sends a gradient, every activation that the previous stage
    (with the slots `neighbour`) sends before it receives that gradient.
    """
    sends = {op.id for op in program.ops if op.role == "backward" and is_send(op)}
    receiving = {op.id for op in program.ops if op.role == "forward" and is_receive(op)}
    waiting = sorted({(m, op_id) for job in jobs for op_id, m in job.items if op_id in receiving}, reverse=True)
    done: set[tuple[int, int]] = set()
    items: list[list[tuple[int, int]]] = []
    for job in jobs:
        line: list[tuple[int, int]] = []
        for op_id, m in job.items:
            count = sent_before(neighbour, m) if op_id in sends else 0
            while waiting and waiting[-1][0] < count:
                micro_batch, receive = waiting.pop()
                if (receive, micro_batch) not in done:
                    line.append((receive, micro_batch))
                    done.add((receive, micro_batch))
            if (op_id, m) not in done:
                line.append((op_id, m))
            if op_id in receiving:
                done.add((op_id, m))
        items.append(line)
    return tuple(msgspec.structs.replace(job, items=tuple(line)) for job, line in zip(jobs, items, strict=True))


def mixed_depth(stage: int, num_stages: int, num_micro_batches: int) -> int:
    """Micro-batches in flight on a stage with which mixed pairs of neighbours do not wait for each other."""
    return min(2 * (num_stages - 1 - stage) + 1, num_micro_batches)


def draws_twice(program: Program) -> bool:
    """Whether forward and backward both draw random numbers, or act on the world: another depth would change the order."""
    return _draws(program, "forward") and _draws(program, "backward")


def _draws(program: Program, role: str) -> bool:
    return any(op.role == role and is_ordered(op) for op in program.ops)
