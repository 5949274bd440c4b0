"""`schedule-1f1b`: the jobs of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from interlace.errors import ConfigError
from interlace.ir import Graph, Job, Op, Program
from interlace.ir.kinds import is_boundary, is_random, is_receive, is_send
from interlace.passes.assign_streams import AssignStreams
from interlace.passes.base import Context, Pass, register
from interlace.passes.events import events_of
from interlace.scheduler.interleave import Form, PairPlan, chain_ops, plan_pairs
from interlace.scheduler.pair_memory import PairMemory
from interlace.scheduler.schedule import (
    SCHEDULES,
    Schedule,
    Slot,
    check_rows,
    interleaved,
    pair_up,
    paired,
    parse_rows,
    sent_before,
    stall,
    zero_bubble,
)
from interlace.units import size

KIND_NAMES = {"F": "forward", "B": "backward", "R": "recv_forward", "S": "send_backward", "I": "backward_b", "W": "backward_w",
              "O": "optimizer"}  # fmt: skip


@register
class Schedule1F1B(Pass, frozen=True, kw_only=True):
    """Cut the step into jobs of `(operation, micro-batch)` in Paddle's order, or with backward and forward mixed.

    Contract: needs nothing; keeps every operation once for each micro-batch (the optimizer's once a step), every sum's order
    over micro-batches and each group's order of collectives; gives a scheduled program.

    Steps: 1 take the schedule of the program's strategy; 2 with interleaving join each steady backward with the forward behind
    it; 3 order every such pair with the cost model (`scheduler/interleave.py`), within the memory of the plain order plus the
    allowance; 4 keep receives ahead of sends where the neighbour's order asks for it; 5 events where
    what one job gives on a stream (a receive, say) is read in another job on another, unless `assign-streams` follows and makes
    them.

    Options:
        interleave: `off` gives Paddle's own job list; `dx-first` runs backward's chain of input gradients first and keeps weight
            gradients for backward's and forward's collectives, at Paddle's warm-up depth; `mixed` mixes both op by op and
            holds `2 (stages - 1 - stage) + 1` micro-batches, which it needs; `zb-h1` puts weight gradients off to fill bubbles.
        rows: A file with one line of slots a stage (`0 | 0F 1F 0B+2F ...`, scheduler/schedule.py), in the place of all that.
        allowance_bytes: Live memory a pair may use beyond the plain order's.
        max_ops_per_job: A pair larger than this is left as two jobs (the executor's build is quadratic in it).
        only_gains: Take a milder form (`dx-first`, then `off`) where the whole step would be simulated slower than with `off`.

    Source: PaddlePaddle/Paddle#57446; measured orders in benchmarks/results/h200.
    """

    name = "schedule-1f1b"
    gives = frozenset({"scheduled"})
    after = ("split-backward", "overlap-column-backward")

    interleave: Literal["off", "dx-first", "mixed", "zb-h1"] = "dx-first"
    rows: str = ""
    allowance_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_ops_per_job: Annotated[int, msgspec.Meta(ge=1)] = 4000
    only_gains: bool = True

    def fallbacks(self) -> tuple[Pass, ...]:
        """Of pairs: `dx-first`, then `off`. A schedule that is spelled out, or `zb-h1`, is what the user wants as it is."""
        forms: dict[str, tuple[Literal["dx-first", "off"], ...]] = {"mixed": ("dx-first", "off"), "dx-first": ("off",)}
        names = forms.get(self.interleave, ()) if self.only_gains and not self.rows else ()
        return tuple(msgspec.structs.replace(self, interleave=name) for name in names)

    def label(self) -> str:
        """The form of interleaving."""
        return f"interleave: {self.interleave}"

    def run(self, program: Program, context: Context) -> Program:
        rows, form = self._rows(program, context)
        slots = rows[program.pipeline.stage]
        parts = Parts(program, {slot.kind for slot in slots})
        pairs = self._pairs(program, slots, parts, context, form)
        jobs = tuple(job for slot in slots for job in self._jobs(slot, parts, pairs) if job.items)
        if program.pipeline.stage and program.pipeline.num_chunks == 1 and not any(slot.kind == "R" for slot in slots):
            jobs = receive_early(jobs, program, rows[program.pipeline.stage - 1])
        context.changed.append(f"{len(jobs)} jobs: {' '.join(map(str, slots[:12]))}{' ...' if len(slots) > 12 else ''}")
        program = msgspec.structs.replace(program, jobs=jobs)
        if AssignStreams.name in context.later:
            return program
        return msgspec.structs.replace(program, events=tuple(events_of(program)))

    def _rows(self, program: Program, context: Context) -> tuple[dict[int, list[Slot]], Form]:
        """Slots of every stage, and the form of pairs."""
        pipe = program.pipeline
        if pipe.schedule not in SCHEDULES:
            raise ConfigError(f"schedule {pipe.schedule!r} is not known; there are {sorted(SCHEDULES)}")
        plain = self._every_stage(program, SCHEDULES[pipe.schedule])
        if not any(op.role == "backward" for op in program.ops):
            return {stage: [slot for slot in row if slot.kind == "F"] for stage, row in plain.items()}, "dx-first"
        if self.rows:
            return self._given_rows(program), "dx-first"
        if self.interleave == "off":
            return plain, "dx-first"
        if pipe.schedule in ("FThenB", "none"):
            context.declined.append(f"interleaving: schedule {pipe.schedule} has no backward beside a forward; its own order stays")
            return plain, "dx-first"
        if self.interleave == "zb-h1":
            return self._zero_bubble(program, context)
        return self._paired(program, context)

    def _every_stage(self, program: Program, schedule: Schedule) -> dict[int, list[Slot]]:
        pipe = program.pipeline
        return {s: schedule(s, pipe.num_stages, pipe.num_micro_batches, pipe.num_chunks) for s in range(pipe.num_stages)}

    def _given_rows(self, program: Program) -> dict[int, list[Slot]]:
        pipe = program.pipeline
        try:
            text = Path(self.rows).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"schedule_1f1b.rows: {self.rows} cannot be read ({error.strerror})") from error
        rows = parse_rows(text, self.rows)
        check_rows(rows, pipe.num_stages, pipe.num_micro_batches, pipe.num_chunks, self.rows)
        return rows

    def _zero_bubble(self, program: Program, context: Context) -> tuple[dict[int, list[Slot]], Form]:
        if program.pipeline.num_chunks > 1:
            raise ConfigError("schedule_1f1b.interleave: zb-h1 has no chunks; expected a 1F1B pipeline, found VPP")
        return self._every_stage(program, zero_bubble), "dx-first"

    def _paired(self, program: Program, context: Context) -> tuple[dict[int, list[Slot]], Form]:
        """Backward and forward joined, mixed where that was asked for and no stage would wait for another for ever."""
        stages = range(program.pipeline.num_stages)
        if self.interleave == "mixed" and program.pipeline.num_stages > 1 and _draws(program, "forward") and _draws(program, "backward"):
            context.declined.append("mixed: forward and backward both draw random numbers, and another depth would change the order of "
                                    "draws; dx-first instead")  # fmt: skip
        elif self.interleave == "mixed":
            rows = {stage: self._row(program, stage, mixed=True) for stage in stages}
            stuck = stall(list(rows.values()), program.pipeline.num_chunks)
            if not stuck:
                context.changed += self._depth_report(program)
                return rows, "mixed"
            context.declined.append(f"mixed: stages would wait for each other at this depth, dx-first instead:\n{stuck}")
        return {stage: self._row(program, stage, mixed=False) for stage in stages}, "dx-first"

    def _row(self, program: Program, stage: int, mixed: bool) -> list[Slot]:
        """A stage's slots with backward and forward joined."""
        pipe = program.pipeline
        if pipe.schedule == "VPP":
            return pair_up(interleaved(stage, pipe.num_stages, pipe.num_micro_batches, pipe.num_chunks))
        return paired(stage, pipe.num_stages, pipe.num_micro_batches, warmup=self._depth(program, stage) if mixed else None)

    @staticmethod
    def _depth(program: Program, stage: int) -> int:
        """Micro-batches a stage holds so that mixed pairs of neighbours do not wait for each other."""
        return min(2 * (program.pipeline.num_stages - 1 - stage) + 1, program.pipeline.num_micro_batches)

    def _depth_report(self, program: Program) -> list[str]:
        """What the depth costs, where it is more than Paddle's."""
        pipe = program.pipeline
        depth, plain = self._depth(program, pipe.stage), min(pipe.num_stages - pipe.stage, pipe.num_micro_batches)
        if pipe.schedule == "VPP" or depth <= plain:
            return []
        held = PairMemory(Graph(program), [op for op in program.ops if op.role == "backward" and not is_boundary(op)], ()).start
        return [f"mixed holds {depth} micro-batches in flight on stage {pipe.stage}, {depth - plain} more than 1F1B: "
                f"{size(held)} of activations each"]  # fmt: skip

    def _pairs(self, program: Program, slots: list[Slot], parts: Parts, context: Context,
               form: Form) -> dict[tuple[int, int], PairPlan]:  # fmt: skip
        kinds = sorted({(slot.chunk, slot.other.chunk) for slot in slots if slot.other is not None})
        plans = {}
        for b, f in kinds:
            plan = plan_pairs(program, parts.ops["B", b], parts.ops["F", f], context.cost, form,
                              self.allowance_bytes, self.max_ops_per_job)  # fmt: skip
            context.changed.append(f"pair of backward chunk {b} and forward chunk {f}: {plan.text()}")
            plans[b, f] = plan
        return plans

    def _jobs(self, slot: Slot, parts: Parts, pairs: dict[tuple[int, int], PairPlan]) -> list[Job]:
        """A slot's job; of a pair that is too large two, cut behind the backward's last operation."""
        if slot.other is None:
            return [_job(slot, parts)]
        b, f = slot.micro_batch, slot.other.micro_batch
        order = pairs[slot.chunk, slot.other.chunk].order
        items = tuple((op_id, b if way == "B" else f) for way, op_id in order)
        if len(items) > self.max_ops_per_job:
            cut = 1 + max(k for k, (way, _) in enumerate(order) if way == "B")
            halves = zip((slot, slot.other), (items[:cut], items[cut:]), strict=True)
            return [msgspec.structs.replace(_job(msgspec.structs.replace(half, other=None), parts), items=part) for half, part in halves]
        name = f"pair_{b}_{f}" if not parts.chunked else f"pair{slot.chunk}_{b}_{slot.other.chunk}_{f}"
        return [Job(name, parts.kind_name(slot), b, items)]


def receive_early(jobs: tuple[Job, ...], program: Program, neighbour: list[Slot]) -> tuple[Job, ...]:
    """Put receives of activations in front of the gradient sends that the previous stage takes only after sending them.

    With sends that wait for their receiver, this stage must have received, before it sends a gradient, every activation that
    the previous stage (its slots are `neighbour`) sends before it takes that gradient.
    """
    ops = {op.id: op for op in program.ops}
    receives = sorted({(m, op_id) for job in jobs for op_id, m in job.items if ops[op_id].role == "forward" and is_receive(ops[op_id])})
    items: list[list[tuple[int, int]]] = []
    done: set[tuple[int, int]] = set()
    for job in jobs:
        line: list[tuple[int, int]] = []
        for op_id, m in job.items:
            if ops[op_id].role == "backward" and is_send(ops[op_id]):
                early = [(r, k) for k, r in receives if k < sent_before(neighbour, m) and (r, k) not in done]
                line += early
                done.update(early)
            if (op_id, m) not in done:
                line.append((op_id, m))
                done.add((op_id, m))
        items.append(line)
    return tuple(msgspec.structs.replace(job, items=tuple(line)) for job, line in zip(jobs, items, strict=True))


def _draws(program: Program, role: str) -> bool:
    return any(op.role == role and is_random(op) for op in program.ops)


class Parts:
    """The program's operations by slot kind and chunk, in program order."""

    def __init__(self, program: Program, kinds: set[str]) -> None:
        self.chunked = program.pipeline.num_chunks > 1
        self.kinds = kinds
        backward = [op for op in program.ops if op.role == "backward" and not is_boundary(op)]
        self.chain = chain_ops(Graph(program), backward) if "I" in kinds else set()
        chunks = range(program.pipeline.num_chunks)
        self.ops: dict[tuple[str, int], list[Op]] = {(kind, chunk): [] for chunk in chunks for kind in KIND_NAMES}
        for op in program.ops:
            if not is_boundary(op):
                self.ops[self._kind(op), 0 if op.role == "optimize" else op.chunk].append(op)

    def _kind(self, op: Op) -> str:
        if op.role == "optimize":
            return "O"
        if op.role == "forward":
            return "R" if "R" in self.kinds and is_receive(op) else "F"
        if "S" in self.kinds and is_send(op):
            return "S"
        return "B" if "I" not in self.kinds else "I" if op.id in self.chain else "W"

    def kind_name(self, slot: Slot) -> str:
        """Paddle's name of a slot's job type."""
        if slot.other is not None:
            return "pair"
        return KIND_NAMES[slot.kind] + (str(slot.chunk) if self.chunked and slot.kind != "O" else "")


def _job(slot: Slot, parts: Parts) -> Job:
    kind = parts.kind_name(slot)
    if slot.kind == "O":
        return Job(kind, kind, 0, tuple((op.id, 0) for op in parts.ops["O", 0]))
    m = slot.micro_batch
    return Job(f"{kind}_{m}", kind, m, tuple((op.id, m) for op in parts.ops[slot.kind, slot.chunk]))
