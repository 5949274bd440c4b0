"""The jobs of a stage's slots: the operations of each, and their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from interlace.cost_model import Costs
from interlace.ir import Graph, Job, Op, OpInstance, Program
from interlace.ir.kinds import is_receive, is_send
from interlace.ir.per_ops import FEW, once_per_ops, remembered
from interlace.ir.schedule import OPTIMIZER, Slot, sent_before
from interlace.scheduler.interleave import planner
from interlace.scheduler.interleave.inline_weights import inline_weights
from interlace.scheduler.interleave.optimizer import in_completion_order
from interlace.scheduler.interleave.part_order import EarlyCollectives
from interlace.scheduler.interleave.planner import FREE_SHARE, REDUCTIONS_SHARE, SMALL_SHARE, Form, Pair, PairPlan, PartOps, plan_pair
from interlace.scheduler.interleave.slot_times import SlotTimes, slot_times
from interlace.scheduler.jobs.options import ScheduleOptions, of_stage
from interlace.scheduler.jobs.parts import Parts, job_of

Kinds = tuple[tuple[str, str, int], ...]
"""`(label, kind, chunk)` of each part of a slot. Slots that differ only in micro-batches get the same order."""
_pairs: Callable[[Program], dict[Any, Pair]] = once_per_ops(lambda program: {}, FEW)
"""Pairs, of few programs only: each holds the dependencies between all its operations, so those of all programs that a search compares
would take more memory than anything else. All forms of a program are requested one after another."""


class Jobs:
    """Makes the jobs of one program with given options.

    Args:
        program: The program.
        memo: Keeps results for the same programs, for all options.
        has_budget: Whether there is a memory budget; orders then may exceed their memory by less.
        extra_bytes: Bytes by which orders may exceed their memory besides.
    """

    def __init__(
        self, program: Program, options: ScheduleOptions, cost: Costs, memo: dict[Any, Any], has_budget: bool, extra_bytes: int
    ) -> None:
        self.program, self.options, self.cost, self.memo, self.extra_bytes = program, options, cost, memo, extra_bytes
        self.share = SMALL_SHARE if has_budget else FREE_SHARE
        stage = program.pipeline.stage
        self.early, self.inline_share = of_stage(options.send_latency_weight, stage), of_stage(options.inline_share, stage)

    def plans(self, slots: Sequence[Slot], parts: Parts, form: Form, joins: bool, orders_optimizer: bool) -> dict[Kinds, PairPlan]:
        """The order of each kind of slot that has a choice: slots with several parts; if the stage `joins` any, whole backwards; and with
        `orders_optimizer`, an optimizer in a slot of its own."""
        mixed = {kinds_of(slot) for slot in slots if len(slot.parts) > 1}
        choice = {"B", "I"} if parts.early else {"B"}
        whole = {kinds_of(slot) for slot in slots if slot.parts[0].kind in choice} if joins or parts.early else set()
        alone = {kinds_of(slot) for slot in slots if slot == OPTIMIZER} if orders_optimizer else set()
        return {kinds: self.order(parts, kinds, form)[0] for kinds in sorted(mixed | whole | alone)}

    def parts(self, kinds: set[str]) -> Parts:
        """The operations of each kind of part, with collectives as early as they can start; `off` keeps program order. Weight gradients
        that are not delayed belong to the input gradients."""
        program, options = self.program, self.options
        if options.interleave == "off":
            return Parts(program, kinds)
        now = self.inline_share if "I" in kinds else 0.0
        key = ("parts", id(program.ops), frozenset(kinds & set("IRS")), self.extra_bytes, self.early, now)
        return remembered(self.memo, key, program.ops, lambda: self._early_parts(kinds, now))

    def _early_parts(self, kinds: set[str], inline_share: float) -> Parts:
        parts = Parts(self.program, kinds, self._inline_weights(inline_share))
        for kind, chunk in parts.ops:
            parts.ops[kind, chunk] = self._early_collectives(parts.part(kind, kind, chunk))
        return parts

    def _inline_weights(self, part: float) -> frozenset[int]:
        if not part:
            return frozenset()
        graph, halves = Graph(self.program), Parts(self.program, {"I", "W"})
        return frozenset().union(*(inline_weights(graph, ops, self.cost, part) for (kind, _), ops in halves.ops.items() if kind == "W"))

    def _early_collectives(self, part: PartOps) -> list[Op]:
        """The operations of a part with early collectives; orders are computed once per part of a program."""
        key = ("part", id(self.program.ops), part.kind, tuple(op.id for op in part.ops), self.extra_bytes)
        found = remembered(self.memo, key, self.program.ops, lambda: EarlyCollectives(self.program, part, self.cost, self.extra_bytes))
        return found.fastest(self.early)

    def order(self, parts: Parts, kinds: Kinds, form: Form) -> tuple[PairPlan, SlotTimes]:
        """The order of one kind of job, and its times and memory; computed once for the same program."""
        options = self.options
        items = tuple(tuple(op.id for op in parts.ops[kind, chunk]) for _, kind, chunk in kinds)
        same = (kinds, items, options.search, options.reductions_first)
        has_more = options.reductions_first and len(kinds) > 1 and kinds[-1][1] == "O"
        share = min(self.share, REDUCTIONS_SHARE) if has_more else self.share
        key = ("order", id(self.program.ops), *same, form, self.extra_bytes, options.max_ops_per_job, share, self.early)

        def make() -> tuple[PairPlan, SlotTimes]:
            known = _pairs(self.program)
            if same not in known or known[same].cost is not self.cost:
                work = planner.SEARCH_WORK if options.search else 0
                known[same] = Pair(self.program, self._ops(parts, kinds), self.cost, self.early, work, options.reductions_first)
            pair = known[same].with_early(self.early)
            plan = plan_pair(pair, form, self.extra_bytes, options.max_ops_per_job, share)
            return plan, slot_times(pair, list(plan.order))

        return remembered(self.memo, key, self.program.ops, make)

    def _ops(self, parts: Parts, kinds: Kinds) -> list[PartOps]:
        """The operations of each part. An optimizer in the same job as gradients reduces these in the order of their completion."""
        found = [parts.part(label, kind, chunk) for label, kind, chunk in kinds]
        if len(found) > 1 and found[-1].kind == "O":
            before = [op for part in found[:-1] for op in part.ops]
            found[-1] = PartOps("O", "O", in_completion_order(Graph(self.program), before, found[-1].ops))
        return found

    def of(self, slot: Slot, parts: Parts, plans: dict[Kinds, PairPlan]) -> list[Job]:
        """The job of a slot; if it would be too large, a job for each part, cut after the part's last operation."""
        kinds = kinds_of(slot)
        if kinds not in plans:
            return [job_of(slot.parts[0], parts)]
        of_label = {label: part for (label, _, _), part in zip(kinds, slot.parts, strict=True)}
        items = tuple((op_id, of_label[label].micro_batch) for label, op_id in plans[kinds].order)
        if len(slot.parts) == 1:
            return [msgspec.structs.replace(job_of(slot.parts[0], parts), items=items)]
        if len(items) <= self.options.max_ops_per_job:
            name = "_".join(str(part).replace(".", "c") for part in slot.parts)
            return [Job(f"pair_{name}", "pair", slot.parts[0].micro_batch, items)]
        last = {label: k for k, (label, _) in enumerate(plans[kinds].order)}
        cuts = [0, *(1 + max(last[label] for label, _, _ in kinds[: k + 1]) for k in range(len(kinds)))]
        return [
            msgspec.structs.replace(job_of(part, parts), items=items[start:end])
            for part, start, end in zip(slot.parts, cuts, cuts[1:], strict=False)
        ]


def kinds_of(slot: Slot) -> Kinds:
    """The parts of a slot; a label is the kind, with a number if the kind occurs twice."""
    seen: dict[str, int] = {}
    found = []
    for part in slot.parts:
        seen[part.kind] = seen.get(part.kind, 0) + 1
        found.append((part.kind + (str(seen[part.kind]) if seen[part.kind] > 1 else ""), part.kind, part.chunk))
    return tuple(found)


def receive_early(jobs: tuple[Job, ...], program: Program, neighbour: list[Slot]) -> tuple[Job, ...]:
    """Issue receives of activations before the gradient sends that the previous stage receives only after sending them.

    If sends wait for their receiver, this stage must receive, before it sends a gradient, every activation that the previous stage
    (with the slots `neighbour`) sends before it receives that gradient.
    """
    sends = {op.id for op in program.ops if op.role == "backward" and is_send(op)}
    receiving = {op.id for op in program.ops if op.role == "forward" and is_receive(op)}
    waiting = sorted({(m, op_id) for job in jobs for op_id, m in job.items if op_id in receiving}, reverse=True)
    done: set[OpInstance] = set()
    made = list[Job]()
    for job in jobs:
        line: list[OpInstance] = []
        for item in job.items:
            op_id, m = item
            if op_id in sends:
                count = sent_before(neighbour, m)
                while waiting and waiting[-1][0] < count:
                    micro_batch, receive = waiting.pop()
                    if (receive, micro_batch) not in done:
                        line.append((receive, micro_batch))
                        done.add((receive, micro_batch))
            elif op_id in receiving:
                if item in done:
                    continue
                done.add(item)
            line.append(item)
        items = tuple(line)
        made.append(job if items == job.items else msgspec.structs.replace(job, items=items))
    return tuple(made)
