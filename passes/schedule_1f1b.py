"""`schedule-1f1b`: the jobs of a step."""

from __future__ import annotations

from typing import Literal

import msgspec

from interlace.errors import ConfigError
from interlace.ir import Job, Op, Program
from interlace.ir.kinds import is_boundary, is_receive, is_send
from interlace.passes.base import Context, Pass, register
from interlace.passes.events import events_of
from interlace.scheduler.interleave import Form, PairPlan, plan_pairs
from interlace.scheduler.schedule import SCHEDULES, Slot, interleaved, pair_up, paired, stall

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
    what one job gives on a stream (a receive, say) is read in another job on another.

    Options:
        interleave: `off` gives Paddle's own job list; `dx-first` runs backward's chain of input gradients first and keeps weight
            gradients for backward's and forward's collectives, at Paddle's warm-up depth; `mixed` mixes both op by op and
            holds `2 (stages - 1 - stage) + 1` micro-batches, which it needs.
        allowance_bytes: Live memory a pair may use beyond the plain order's.
        max_ops_per_job: A pair larger than this is left as two jobs (the executor's build is quadratic in it).

    Source: PaddlePaddle/Paddle#57446; measured orders in benchmarks/results/h200.
    """

    name = "schedule-1f1b"
    gives = frozenset({"scheduled"})
    after = ("split-backward", "overlap-column-backward")

    interleave: Literal["off", "dx-first", "mixed"] = "dx-first"
    allowance_bytes: int = 0
    max_ops_per_job: int = 4000

    def run(self, program: Program, context: Context) -> Program:
        slots, form = self._slots(program, context)
        parts = Parts(program, split_p2p=any(slot.kind in "RS" for slot in slots))
        pairs = self._pairs(program, slots, parts, context, form)
        jobs = tuple(_job(slot, parts, pairs, program) for slot in slots)
        jobs = tuple(job for job in jobs if job.items)
        if form == "mixed" and program.pipeline.schedule == "1F1B":
            jobs = receive_early(jobs, program, self._depth(program, program.pipeline.stage - 1))
        context.changed.append(f"{len(jobs)} jobs: {' '.join(map(str, slots[:12]))}{' ...' if len(slots) > 12 else ''}")
        program = msgspec.structs.replace(program, jobs=jobs)
        return msgspec.structs.replace(program, events=tuple(events_of(program)))

    def _slots(self, program: Program, context: Context) -> tuple[list[Slot], Form]:
        pipe = program.pipeline
        if pipe.schedule not in SCHEDULES:
            raise ConfigError(f"schedule {pipe.schedule!r} is not known; there are {sorted(SCHEDULES)}")
        plain = SCHEDULES[pipe.schedule](pipe.stage, pipe.num_stages, pipe.num_micro_batches, pipe.num_chunks)
        if not any(op.role == "backward" for op in program.ops):
            return [slot for slot in plain if slot.kind == "F"], "dx-first"
        if self.interleave == "off":
            return plain, "dx-first"
        if pipe.schedule in ("FThenB", "none"):
            context.declined.append(f"interleaving: schedule {pipe.schedule} has no backward beside a forward; its own order stays")
            return plain, "dx-first"
        if self.interleave == "mixed":
            rows = [self._row(program, stage, mixed=True) for stage in range(pipe.num_stages)]
            stuck = stall(rows, pipe.num_chunks)
            if not stuck:
                return rows[pipe.stage], "mixed"
            context.declined.append(f"mixed: stages would wait for each other at this depth, dx-first instead:\n{stuck}")
        return self._row(program, pipe.stage, mixed=False), "dx-first"

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


def receive_early(jobs: tuple[Job, ...], program: Program, neighbour_depth: int) -> tuple[Job, ...]:
    """Put receives of activations in front of the gradient sends that the previous stage takes only after sending them.

    The previous stage sends `neighbour_depth + b` activations before it receives gradient b. With sends that wait for their
    receiver, this stage must have received as many before it sends gradient b, whatever its own depth is.
    """
    ops = {op.id: op for op in program.ops}
    receives = sorted({(m, op_id) for job in jobs for op_id, m in job.items if ops[op_id].role == "forward" and is_receive(ops[op_id])})
    items: list[list[tuple[int, int]]] = []
    done: set[tuple[int, int]] = set()
    for job in jobs:
        line: list[tuple[int, int]] = []
        for op_id, m in job.items:
            if ops[op_id].role == "backward" and is_send(ops[op_id]):
                early = [(r, k) for k, r in receives if k < neighbour_depth + m and (r, k) not in done]
                line += early
                done.update(early)
            if (op_id, m) not in done:
                line.append((op_id, m))
                done.add((op_id, m))
        items.append(line)
    return tuple(msgspec.structs.replace(job, items=tuple(line)) for job, line in zip(jobs, items, strict=True))


class Parts:
    """The program's operations by slot kind and chunk, in program order."""

    def __init__(self, program: Program, split_p2p: bool) -> None:
        self.chunked = program.pipeline.num_chunks > 1
        self.ops: dict[tuple[str, int], list[Op]] = {}
        for chunk in range(program.pipeline.num_chunks):
            for kind in KIND_NAMES:
                self.ops[kind, chunk] = []
        for op in program.ops:
            if not is_boundary(op):
                self.ops[self._kind(op, split_p2p), 0 if op.role == "optimize" else op.chunk].append(op)

    @staticmethod
    def _kind(op: Op, split_p2p: bool) -> str:
        if op.role == "optimize":
            return "O"
        if op.role == "forward":
            return "R" if split_p2p and is_receive(op) else "F"
        return "S" if split_p2p and is_send(op) else "B"

    def kind_name(self, slot: Slot) -> str:
        """Paddle's name of a slot's job type."""
        if slot.other is not None:
            return "pair"
        return KIND_NAMES[slot.kind] + (str(slot.chunk) if self.chunked and slot.kind != "O" else "")


def _job(slot: Slot, parts: Parts, pairs: dict[tuple[int, int], PairPlan], program: Program) -> Job:
    kind = parts.kind_name(slot)
    if slot.kind == "O":
        return Job(kind, kind, 0, tuple((op.id, 0) for op in parts.ops["O", 0]))
    if slot.other is None:
        return Job(f"{kind}_{slot.micro_batch}", kind, slot.micro_batch, tuple((op.id, slot.micro_batch) for op in parts.ops[slot.kind, slot.chunk]))
    b, f = slot.micro_batch, slot.other.micro_batch
    order = pairs[slot.chunk, slot.other.chunk].order
    name = f"pair_{b}_{f}" if not parts.chunked else f"pair{slot.chunk}_{b}_{slot.other.chunk}_{f}"
    return Job(name, kind, b, tuple((op_id, b if way == "B" else f) for way, op_id in order))
