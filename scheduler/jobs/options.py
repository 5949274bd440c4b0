"""Options of the schedule, checked here: by themselves (`mistake`) and against a pipeline (`check`)."""

from __future__ import annotations

import os
from typing import Annotated, Literal, TypeVar

import msgspec

from interlace.errors import ConfigError, PlanError
from interlace.files import read_text
from interlace.ir.program import Pipeline
from interlace.ir.schedule import Slot, in_flight, mixed_depth, parse_rows
from interlace.scheduler.interleave.planner import EARLY, Form

T = TypeVar("T", int, float, str)
Delay = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
InlineShare = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Weight = Annotated[float, msgspec.Meta(ge=0, le=4)]
MOST_SCHEDULE_BYTES = 1 << 20
OWN_ORDER = ("auto", "off", "zb-h1")
"""Values of `interleave` that say when everything runs: weight_delay and depth go with the others."""


class ScheduleOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a step is cut into jobs, and how the operations of jobs with several parts are ordered.

    Attributes:
        interleave: How work of different micro-batches is mixed: `auto`, or a form by name; a list has `dx-first` or `mixed` for each
            stage. When: `auto` unless you compare forms; `off` to use only offload or streams; a named form to plan faster, or if
            measurements show that it is better. Details: `auto` simulates whole steps and chooses the fastest of Paddle's baseline, the
            named forms, and schedules with a separate form, weight-gradient delay, depth, order and recomputation for each stage. Tensors
            of a stage may need no more memory on a GPU than those of the fullest one with Paddle's baseline, or than the `memory_budget`
            allows. `auto` uses `return_memory` and offload if that gives a faster step, unless they are turned off. `off` keeps Paddle's
            own list of jobs, to which the other passes still apply. `dx-first` computes the chain of input gradients first, and the weight
            gradients during the collectives of backward and forward, at Paddle's warm-up depth. `mixed` mixes backward and forward
            operation by operation, with the `2 (stages - 1 - stage) + 1` micro-batches in flight that this needs. `zb-h1` postpones weight
            gradients to fill bubbles. With a list, stages may wait for each other forever; then give `depth` too.
        weight_delay: Number of micro-batches by which weight gradients are computed later than input gradients, with `dx-first` and
            `mixed`; one number, or one for each stage. When: to try by hand what `auto` decides, if last stages of a pipeline wait at
            the end of the step and memory is left. Details: from 1 on, weight gradients do not depend on the rest of their job: they run
            during its first collectives, and the last ones fill the end of the pipeline. Each micro-batch of weight-gradient delay keeps
            the operands of its weight gradients live. With VPP the weight-gradient delay counts backwards of one chunk.
        weight_delay_at_end: The weight-gradient delay after a stage's last forward, where memory only falls; by default that of
            `weight_delay`. One number, or one for each stage. When: to try by hand what `auto` decides, if last stages send their last
            gradients late because weight gradients of other micro-batches run first. Details: no stage may have less than its
            `weight_delay`; a stage whose `weight_delay` is 0 has 0.
        inline_share: Share of weight gradients, by time, that are computed with their own input gradients while the others trail; one
            number, or one for each stage. When: to try by hand what `auto` decides, if a weight-gradient delay does not quite fit into
            memory. Details: these are the weight gradients whose operands take the most memory for their time. They run during the
            collectives of their own job, which leaves memory for a larger weight-gradient delay of the others.
        depth: Micro-batches in flight on each stage, with `dx-first` and `mixed`; by default as in 1F1B, or as `mixed` needs them. When: to
            try by hand what `auto` decides, if messages between stages arrive late. Details: a deeper stage sends activations before
            it needs the next gradient, so a late message does not stop the pipeline.
        send_latency_weight: Weight of the start times of a job's sends against the job's duration when its operations are ordered; 0
            minimizes the duration alone. One number, or one for each stage. When: to try by hand what `auto` decides: 0 without a
            pipeline, more if stages wait for gradients.
        send_latency_weight_at_end: The same for jobs after a stage's last forward, which empty the pipeline; by default that of
            `send_latency_weight`. One number, or one for each stage. When: to try by hand what `auto` decides, for a last stage with
            `mixed`, whose jobs are short but send their gradient at their end. Details: while the pipeline empties, the previous stage
            waits for every gradient.
        join_optimizer: Whether an optimizer that communicates is put into the job of the last gradients, where its collectives run beside
            backward. When: off if memory is short at the end of backward: the optimizer then has a job of its own, in which its collectives
            run beside its own computation. `auto` tries both.
        reductions_first: Whether weight gradients that are then reduced come before input gradients. A job with the optimizer may hold 2 %
            more for it. When: to try by hand what `auto` decides, if the step ends with reductions of gradients that hide behind nothing.
        search: Whether a local search improves the order of operations in each kind of job. When: off to plan in a fraction of the time.
            Details: the search optimizes one job at a time, and its results make whole steps slower as often as faster. `auto` therefore
            tries it on the plan that it takes, if the programs of all stages together have at most 3000 operations. Off keeps the order of
            the list scheduler.
        schedule_file: A file with one line of slots for each stage (`0 | 0F 1F 0B+2F ...`, docs/guide-schedule.md), instead of
            `weight_delay` and `depth`. When: you have your own schedule, or changed the one that `interlace plan` wrote. Details: jobs of
            several parts are ordered as with `dx-first`, or with `mixed` if `interleave` says so.
        max_ops_per_job: A pair with more operations stays two jobs, because the executor's build time grows with their square. When: the
            first step of a very deep model takes too long to start; smaller jobs start faster and hide less.
        only_gains: Fall back to a simpler form (`dx-first`, then `off`) if the simulated step would be slower than with `off`. When: off
            for tests on models too small to gain anything.
    """

    interleave: Literal["auto", "off", "dx-first", "mixed", "zb-h1"] | tuple[Literal["dx-first", "mixed"], ...] = "auto"
    weight_delay: Delay | tuple[Delay, ...] = 0
    weight_delay_at_end: Delay | tuple[Delay, ...] | None = None
    depth: tuple[Positive, ...] = ()
    inline_share: InlineShare | tuple[InlineShare, ...] = 0.0
    send_latency_weight: Weight | tuple[Weight, ...] = EARLY
    send_latency_weight_at_end: Weight | tuple[Weight, ...] | None = None
    join_optimizer: bool = True
    reductions_first: bool = False
    search: bool = True
    schedule_file: str = ""
    max_ops_per_job: Positive = 4000
    only_gains: bool = True

    def mistake(self, has_budget: bool = False) -> tuple[str, str] | None:
        """An option that cannot be as it is, and why; see `Pass.mistake`."""
        if not self.schedule_file:
            return self._misplaced()
        if self.interleave in ("off", "zb-h1"):
            return "interleave", (
                f"schedule_file gives every job, so interleave={self.interleave} would do nothing; leave one of the two "
                "out (dx-first and mixed say how jobs of several parts are ordered)"
            )
        try:
            self.given_rows()
        except (ConfigError, PlanError) as error:
            return "schedule_file", str(error)
        return None

    def _misplaced(self) -> tuple[str, str] | None:
        """A weight-gradient delay, a depth or a place of the optimizer beside what has its own, and why that contradicts."""
        if not self.join_optimizer and (self.interleave == "off" or self.schedule_file):
            beside = f"schedule_file: {self.schedule_file}" if self.schedule_file else "interleave: off"
            return "join_optimizer", f"found off beside {beside}, with which the optimizer has a job of its own in any case; leave it out"
        if self.reductions_first and self.interleave == "off":
            return "reductions_first", "found on beside interleave: off, with which jobs keep Paddle's order of operations; leave it out"
        if self.send_latency_weight_at_end is not None and self.interleave in ("auto", "off") and not self.schedule_file:
            return "send_latency_weight_at_end", (
                f"found {numbers_text(self.send_latency_weight_at_end)} beside interleave: {self.interleave}, which "
                f"{'chooses its own' if self.interleave == 'auto' else 'keeps the order of operations'}; "
                "write dx-first, mixed or zb-h1, or leave it out"
            )
        for name, given in (
            ("weight_delay", self.weight_delay or None),
            ("weight_delay_at_end", self.weight_delay_at_end),
            ("depth", self.depth or None),
        ):
            if given is not None and (self.interleave in OWN_ORDER or self.schedule_file):
                chosen = "auto, which chooses its own" if self.interleave == "auto" else self.form_text()
                beside, advice = (
                    (f"schedule_file: {self.schedule_file}", "leave one of them out")
                    if self.schedule_file
                    else (f"interleave: {chosen}", f"write one of them, or leave {name} out")
                )
                return name, f"found {numbers_text(given)} beside {beside}; it goes with interleave dx-first or mixed; {advice}"
        return None

    def check(self, pipe: Pipeline) -> None:
        """Hold lists, delays and depth against a pipeline and the other options. Raises ConfigError."""
        for name in ("send_latency_weight", "send_latency_weight_at_end", "inline_share", "interleave"):
            given = getattr(self, name)
            if isinstance(given, tuple) and len(given) != pipe.num_stages:
                kind, text = ("form", self.form_text()) if name == "interleave" else ("number", numbers_text(given))
                raise ConfigError(
                    f"schedule_1f1b.{name}: found {text}, {len(given)} {kind}s; "
                    f"expected one {kind}, or one for each of {pipe.num_stages} stages"
                )
        if self.inline_share and not (self.weight_delay or self.schedule_file or self.interleave == "zb-h1"):
            raise ConfigError(
                f"schedule_1f1b.inline_share: found {numbers_text(self.inline_share)} beside interleave: {self.form_text()} "
                "without weight-gradient delay, where no weight gradients trail; give weight_delay, schedule_file or interleave: zb-h1, "
                "or leave inline_share out"
            )
        if misplaced := self._misplaced():
            raise ConfigError("schedule_1f1b.{}: {}".format(*misplaced))
        for name, given in (("weight_delay", self.weight_delay), ("weight_delay_at_end", self.weight_delay_at_end), ("depth", self.depth)):
            if not given:
                continue
            found = f"schedule_1f1b.{name}: found {numbers_text(given)}"
            if name == "depth" and pipe.num_chunks > 1:
                raise ConfigError(f"{found} with {pipe.num_chunks} chunks a stage; expected a pipeline without chunks; leave {name} out")
            if isinstance(given, tuple) and len(given) != pipe.num_stages:
                raise ConfigError(f"{found}, {len(given)} numbers; expected one for each of {pipe.num_stages} stages")
        weight_delays = [self.weight_delays(stage) for stage in range(pipe.num_stages)]
        if any(at_end < weight_delay or (at_end and not weight_delay) for weight_delay, at_end in weight_delays):
            raise ConfigError(
                f"schedule_1f1b.weight_delay_at_end: found {numbers_text(self.weight_delay_at_end or 0)} "
                f"beside weight_delay {numbers_text(self.weight_delay)}; "
                "expected no less than weight_delay on any stage, and 0 where weight_delay is 0"
            )

    def given_rows(self) -> dict[int, list[Slot]]:
        """Slots of every stage in the schedule file. Raises ConfigError where it is missing, cannot be read, or holds no stage; PlanError,
        with the line, where that is no row of slots."""
        path, expected = self.schedule_file, "a line `<stage> | 0F 1F 0B ...` for each stage"
        try:
            rows = parse_rows(read_text(os.path.abspath(path), MOST_SCHEDULE_BYTES, expected, ConfigError), path)
        except ConfigError as error:
            raise ConfigError(f"schedule file {error}") from error
        if not rows:
            raise ConfigError(f"schedule file {path!r} holds no stage; expected {expected}")
        return rows

    def changes_depth(self, pipe: Pipeline) -> bool:
        """Whether a pipeline has another number of micro-batches in flight than its strategy's without being asked for by number."""
        stages, count = pipe.num_stages, pipe.num_micro_batches
        if self.depth or self.schedule_file or stages == 1 or not pipe.alternates:
            return False
        if isinstance(self.interleave, str) or len(self.interleave) != stages or pipe.num_chunks > 1:
            return self.mixes()
        return any(self.form_of(s) == "mixed" and mixed_depth(s, stages, count) != in_flight(s, stages, count) for s in range(stages))

    def mixes(self) -> bool:
        """Whether any stage mixes pairs op by op."""
        return "mixed" in self.interleave

    def form_of(self, stage: int) -> Form:
        """The form of a stage's jobs."""
        return "mixed" if of_stage(self.interleave, stage) == "mixed" else "dx-first"

    def weight_delays(self, stage: int) -> tuple[int, int]:
        """Before the last forward, and from there on."""
        at_end = self.weight_delay if self.weight_delay_at_end is None else self.weight_delay_at_end
        return of_stage(self.weight_delay, stage), of_stage(at_end, stage)

    def form_text(self) -> str:
        """The form, or the forms of the stages."""
        return self.interleave if isinstance(self.interleave, str) else f"[{', '.join(self.interleave)}]"


def of_stage(given: T | tuple[T, ...], stage: int) -> T:
    """An option that is one value for all stages, or one for each."""
    return given[stage] if isinstance(given, tuple) else given


def numbers_text(each: float | tuple[float, ...]) -> str:
    """One number, or one for each stage."""
    return f"[{', '.join(f'{number:g}' for number in each)}]" if isinstance(each, tuple) else f"{each:g}"
