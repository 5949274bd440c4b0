"""`offload-activations`: saved activations are copied to the host between forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from interlace.errors import PassError
from interlace.ir import ABSENT, Edit, Graph, Op, OpInstance, Program, Value
from interlace.ir.copies import index_of_items
from interlace.ir.edit import with_items
from interlace.ir.effects import is_constant
from interlace.ir.per_ops import remembered
from interlace.passes.base import Context, Pass, register
from interlace.passes.streams import AutoParallelStreamType
from interlace.scheduler.offload import (
    COPY_BACK,
    COPY_OUT,
    PINNED,
    Measured,
    Move,
    Names,
    OffloadOptions,
    OffloadPlan,
    agree,
    measure,
    plan_offload,
)
from interlace.scheduler.offload.selection import mistake_of

OUT, BACK = AutoParallelStreamType.D2H.value, AutoParallelStreamType.H2D.value


@register
class OffloadActivations(Pass, OffloadOptions, frozen=True, kw_only=True):
    """Copy chosen saved activations to pinned memory after forward, and back before backward reads them.

    Contract: needs a schedule; keeps every value, every operation and the order of all op instances; adds copies. A copy to the
    host and its copy back are in different jobs. In a micro-batch whose jobs contain neither copy the value stays on the device:
    both copies then act as the identity, and no memory is taken. The memory for a copy back is taken on the compute stream, from whose
    pool it comes.

    Before / After:
        #3 %3 = pd_op.gelu(%2) forward                  #3 %3 = pd_op.gelu(%2) forward
        #4 %4 = pd_op.matmul(%3, %1) forward            #4 %4 = pd_op.matmul(%3, %1) forward
        #9 %9, %10 = pd_op.matmul_grad(%3, %1, %8)      #20 %20^pinned = pd_op.memcpy_d2h(%3) forward
                                                        #21 %21 = pd_op.empty() backward
                                                        #22 %22~21 = pd_op.memcpy_h2d(%20, %21) backward no_buffer=1 inplace=0:1
                                                        #9 %9, %10 = pd_op.matmul_grad(%22, %1, %8) backward
        job forward_0: 3-4@0                            job forward_0: 3-4@0 20@0
        job backward_0: 9@0                             job backward_0: 21-22@0 9@0

    Steps: 1 ask the planner which values move and when they are copied out and back (`scheduler/offload`, where the options are
    described: modules, exclude_ops, min_bytes, fraction, keep_bytes, max_in_flight, include_integers, prefetch_slack; under a memory
    budget as little as necessary moves, or as much as possible if no choice is enough); 2 add both copies for each chosen value, let
    backward's readers of its contents read the value that was copied back, and compute saved views of it again; 3 insert the copies
    into the jobs.

    Source: NVIDIA/Megatron-LM#1752, NVIDIA/TransformerEngine#2435 (our tests cover the cases of theirs, with a pipeline added).
    """

    name = "offload-activations"
    needs = frozenset({"scheduled"})
    gives = frozenset({"offloaded"})
    after = ("schedule-1f1b", "offload-optimizer-state")
    follows_budget = True
    decides = "offload"

    def mistake(self, has_budget: bool = False) -> tuple[str, str] | None:
        return mistake_of(self.modules, self.fraction, has_budget)

    def facts(self, program: Program, context: Context) -> OffloadFacts:
        """Names, times and bytes of the values that this rank could move. Raises PassError if the program has no jobs."""
        if not program.jobs:
            raise PassError("the program has no jobs to put copies into; put a schedule pass before it")
        key = ("could move", id(program))
        names, measured = remembered(context.memo, key, program, lambda: (Names.of(program), measure(program, context.cost)))
        return OffloadFacts(program.pipeline.stage, names, msgspec.structs.replace(measured, memory_limit=context.memory_limit))

    def run(self, program: Program, context: Context) -> Program:
        told: Sequence[OffloadFacts] = context.facts
        everyone = {id(each): each for each in told}.values()  # equivalent ranks share one object
        mine = told[program.rank if context.is_whole else 0]
        alike = [each.measured for each in everyone if each.stage == mine.stage and _times_the_same(each, mine)]
        names = [each.names for each in everyone] if context.is_whole else None
        plan = self._plan(program, agree(alike), names, context)
        context.remarks += plan.remarks(program)
        return self._applied(program, plan, context)

    def _plan(self, program: Program, measured: Measured, names: Sequence[Names] | None, context: Context) -> OffloadPlan:
        """Plan once for the same program, times, bytes and names: most stages keep their plan when another stage gets less memory."""
        key = ("offload", id(program), msgspec.msgpack.encode((self, measured, names)))
        return remembered(context.memo, key, program, lambda: plan_offload(program, measured, self, names))

    @staticmethod
    def _applied(program: Program, plan: OffloadPlan, context: Context) -> Program:
        """Return the identical object for the same program and moves, so that results cached for it are found again."""
        key = ("moved", id(program), msgspec.msgpack.encode(plan.moves))
        return remembered(context.memo, key, program, lambda: apply(program, plan))


class OffloadFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank sends to the others before the decision."""

    stage: int
    names: Names
    measured: Measured


def _times_the_same(one: OffloadFacts, other: OffloadFacts) -> bool:
    """Whether two ranks have times for the same operations and copies, so that they must decide alike."""
    ours, theirs = ((each.measured.op_ns, each.measured.out_ns or {}, each.measured.back_ns or {}) for each in (one, other))
    return all(a.keys() == b.keys() for a, b in zip(ours, theirs, strict=True))


def apply(program: Program, plan: OffloadPlan) -> Program:
    """The program with the copies of a plan; decides nothing."""
    return _Rewrite(program, plan).run() if plan.moves else program


def _sorted(copies: Mapping[OpInstance, Iterable[tuple[int, OpInstance]]]) -> dict[OpInstance, list[OpInstance]]:
    """The copies at each op instance, sorted by their indices."""
    return {at: [copy for _, copy in sorted(found)] for at, found in copies.items()}


class _Rewrite:
    """Applies a plan.

    Attributes:
        copied_back: Saved value -> the value that backward reads in its place.
        new_storage: Storage in forward -> storage of the value that was copied back.
        issue_after, issue_before: Op instance -> copies to issue after and before it, each with the index by which they are sorted: that of
            the value's last reader before a copy out, or of its first reader after a copy back.
        views: Op instance -> views to compute before it.
    """

    def __init__(self, program: Program, plan: OffloadPlan) -> None:
        self.program, self.plan = program, plan
        self.graph = Graph(program)
        self.edit = Edit(program)
        self.copied_back: dict[int, int] = {}
        self.new_storage: dict[int, int] = {}
        self.issue_after: dict[OpInstance, list[tuple[int, OpInstance]]] = {}
        self.issue_before: dict[OpInstance, list[tuple[int, OpInstance]]] = {}
        self.views: dict[OpInstance, list[OpInstance]] = {}
        self.index = index_of_items(program)

    def run(self) -> Program:
        for move in self.plan.moves:
            self._move(move)
        for op in self.program.ops:
            if op.role == "backward":
                self._redirect(op)
        built = self.edit.build()
        values = [self._in_new_storage(value) for value in built.values]
        before, after = _sorted(self.issue_before), _sorted(self.issue_after)
        for at, views in self.views.items():
            before.setdefault(at, []).extend(views)
        return msgspec.structs.replace(built, values=tuple(values), jobs=with_items(self.program.jobs, before, after))

    def _move(self, move: Move) -> None:
        saved = move.saved
        value = self.graph.values[saved.value]
        host, like = self.edit.value(value.type, memory="pinned"), self.graph.ops[saved.producer]
        out_op = self.edit.op(COPY_OUT, [value.id], [host], like=like, attrs=dict(PINNED), role="forward", stream=OUT)
        memory_op, memory = self.edit.take(value.type, like=like, role="backward")
        back = self.edit.value(value.type, storage=memory.storage)
        back_op = self.edit.copy_into(COPY_BACK, host.id, memory.id, back, like=like, attrs=dict(PINNED), role="backward", stream=BACK)
        self.edit.after(self._by_position(saved.before)[-1], [out_op])
        self.edit.before(self._by_position(saved.readers)[0], [memory_op, back_op])
        self.copied_back[value.id], self.new_storage[saved.storage] = back.id, back.storage
        for transfer in move.transfers:
            last_read = max(self.index[op, transfer.micro_batch] for op in saved.before)
            first_read = min(self.index[op, transfer.micro_batch] for op in saved.readers)
            self.issue_after.setdefault(transfer.out_after, []).append((last_read, (out_op.id, transfer.micro_batch)))
            issued = self.issue_before.setdefault(transfer.back_before, [])
            issued += [(first_read, (op.id, transfer.micro_batch)) for op in (memory_op, back_op)]
        self._remake(move, back)

    def _remake(self, move: Move, back: Value) -> None:
        """Recompute the other saved values of the storage, which are views, from the value that was copied back."""
        wanted = {value for each in move.saved.rebuilt for op in each.ops for value in self.graph.ops[op].results}
        readers = self._by_position(op for op in move.saved.readers if wanted & set(self.graph.ops[op].operands))
        made: list[Op] = []
        for op_id in self._by_position({op for each in move.saved.rebuilt for op in each.ops}):
            op = self.graph.ops[op_id]
            source = next(op.operands[operand] for _, operand in op.views)
            constants = {v: self._constant(v, op, made) for v in op.operands if v not in (ABSENT, source)}
            names = {**constants, source: self.copied_back[source]}
            results = [self._result(value, op, back) for value in op.results]
            made.append(
                self.edit.op(
                    op.name,
                    [names.get(v, v) for v in op.operands],
                    results,
                    like=op,
                    attrs=op.attrs,
                    role="backward",
                    views=op.views,
                    no_buffer=op.no_buffer,
                )
            )
            self.copied_back.update(zip(op.results, made[-1].results, strict=True))
        if made:
            self.edit.before(readers[0], made)
            for micro_batch in range(self.program.pipeline.num_micro_batches):
                first = min(((op, micro_batch) for op in readers), key=self.index.__getitem__)
                self.views.setdefault(first, []).extend((op.id, micro_batch) for op in made)

    def _constant(self, value_id: int, like: Op, made: list[Op]) -> int:
        op = self.graph.ops[self.graph.producer[value_id]]
        assert is_constant(op)
        kinds = [self.graph.values[v].type for v in op.results]
        made.append(self.edit.op(op.name, [], kinds, like=like, attrs=op.attrs, role="backward"))
        return made[-1].results[op.results.index(value_id)]

    def _result(self, value_id: int, op: Op, back: Value) -> Value:
        value = self.graph.values[value_id]
        is_view = any(op.results[result] == value_id for result, _ in op.views)
        return self.edit.value(value.type, storage=back.storage if is_view else None)

    def _redirect(self, op: Op) -> None:
        read = set(self.graph.reads(op))
        operands = tuple(self.copied_back.get(v, v) if v in read and k not in op.no_buffer else v for k, v in enumerate(op.operands))
        if operands != op.operands:
            self.edit.replace(op.id, [msgspec.structs.replace(op, operands=operands)])

    def _in_new_storage(self, value: Value) -> Value:
        """The value; if backward computes it and it aliases a moved value, in the storage of the value that was copied back."""
        made = self.graph.producer.get(value.id)
        if value.storage not in self.new_storage or made is None or self.graph.ops[made].role != "backward":
            return value
        return msgspec.structs.replace(value, storage=self.new_storage[value.storage])

    def _by_position(self, ops: Iterable[int]) -> list[int]:
        return sorted(ops, key=lambda op: self.graph.position[op])
