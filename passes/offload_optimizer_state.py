"""`offload-optimizer-state`: moments and master weights stay in host memory between updates."""

from __future__ import annotations

import msgspec

from interlace.errors import PassError
from interlace.ir import Edit, Graph, Op, OpInstance, Program, TensorType, Value
from interlace.ir.edit import with_items
from interlace.ir.kinds import is_boundary
from interlace.passes.base import Context, Pass, register
from interlace.passes.streams import AutoParallelStreamType
from interlace.scheduler.offload.measures import COPY_BACK, COPY_OUT, PINNED
from interlace.scheduler.offload.optimizer_state import StateMove, StateOptions, StatePlan, measure_states, plan_states
from interlace.scheduler.offload.selection import mistake_of

MARK = "pd_op.full"
"""A constant computed on the stream of copies out; it exists once the earlier work of that stream has ended."""
MARKED = TensorType((1,), "float32")
IN, OUT = AutoParallelStreamType.H2D.value, AutoParallelStreamType.D2H.value
ZERO = {"dtype": "float32", "place": "Place(undefined:0)", "shape": [1], "value": 0.0}


@register
class OffloadOptimizerState(Pass, StateOptions, frozen=True, kw_only=True):
    """Keep optimizer state in pinned host memory: copy it to the device before its update, and back to the host afterwards.

    Contract: needs a schedule; keeps every value, every operation and the order of all op instances; adds copies. A moved value keeps its
    name in the scope, and its bits between steps, so that checkpoints stay the same. No update starts before the previous step's copies
    out have ended.

    Before / After:
        #0 %0!"moment" = pd_op.data()                   #0 %0!"moment"^pinned = pd_op.data()
        #9 %9~0 = pd_op.momentum_(%8, %0)               #21 %21 = pd_op.memcpy_h2d(%0) optimize
                                                        #9 %9~21 = pd_op.momentum_(%8, %21)
                                                        #22 %22~0^pinned = pd_op.memcpy_d2h(%9, %0) optimize no_buffer=1 inplace=0:1
        job backward_0: 5@0                             job backward_0: 21@0 5@0
        job optimizer: 9@0                              job optimizer: 9@0 22@0

    Steps: 1 choose values (`scheduler/offload/optimizer_state.py`, where the options are described: modules, min_bytes, fraction); 2 add a
    copy in and, if the update writes the value, a copy out into the same buffer, and let the update use the copy on the device; 3 insert
    the copies into the jobs, and at the start of the step a constant on the stream of copies out. Events do not reach into the next step,
    so copies in wait for this constant, which is computed after the previous step's copies out.

    Source: microsoft/DeepSpeed (DeepCompile moves optimizer states by a compiler pass, without a pipeline).
    """

    name = "offload-optimizer-state"
    needs = frozenset({"scheduled"})
    gives = frozenset({"states-offloaded"})
    after = ("schedule-1f1b",)
    follows_budget = True
    decides = "states"

    def mistake(self, has_budget: bool = False) -> tuple[str, str] | None:
        return mistake_of(self.modules, self.fraction, has_budget)

    def run(self, program: Program, context: Context) -> Program:
        if not program.jobs:
            raise PassError("the program has no jobs to put copies into; put a schedule pass before it")
        plan = plan_states(program, measure_states(program, context.cost, context.memory_limit), self)
        context.remarks += plan.remarks()
        return _Rewrite(program, plan).run() if plan.moves else program


class _Rewrite:
    """Applies a plan.

    Attributes:
        issue_before, issue_after: Op instance -> op instances to issue before and after it.
        issue_last: Op instances to issue at the end of the step.
        has_copies_out: Whether a moved value is written.
        moved_to: Storage of a moved value -> that of its copy on the device.
    """

    def __init__(self, program: Program, plan: StatePlan) -> None:
        self.program, self.plan = program, plan
        self.graph, self.edit = Graph(program), Edit(program)
        self.issue_before: dict[OpInstance, list[OpInstance]] = {}
        self.issue_after: dict[OpInstance, list[OpInstance]] = {}
        self.issue_last: list[OpInstance] = []
        self.has_copies_out = False
        self.replaced: dict[int, Op] = {}
        self.moved_to: dict[int, int] = {}

    def run(self) -> Program:
        for move in self.plan.moves:
            self._move(move)
        self._mark()
        for op_id, op in self.replaced.items():
            self.edit.replace(op_id, [op])
        built = self.edit.build()
        values = tuple(self._placed(value) for value in built.values)
        jobs = with_items(self.program.jobs, self.issue_before, self.issue_after)
        jobs = (*jobs[:-1], msgspec.structs.replace(jobs[-1], items=(*jobs[-1].items, *self.issue_last)))
        return msgspec.structs.replace(built, values=values, jobs=jobs)

    def _move(self, move: StateMove) -> None:
        state = move.state
        value = self.graph.values[state.value]
        first, last = self.graph.ops[state.users[0]], self.graph.ops[state.users[-1]]
        there = self.edit.value(value.type)
        copy_in = self.edit.op(COPY_BACK, [value.id], [there], like=first, attrs=dict(PINNED), role="optimize", stream=IN)
        self.edit.before(first.id, [copy_in])
        self.issue_before.setdefault(move.in_before, []).append((copy_in.id, 0))
        self.moved_to[value.storage] = there.storage
        newest = there
        for op_id in state.users:
            op = self.replaced.get(op_id, self.graph.ops[op_id])
            self.replaced[op_id] = msgspec.structs.replace(op, operands=tuple(there.id if v == value.id else v for v in op.operands))
            newest = next((self.graph.values[v] for v in op.results if self.graph.values[v].storage == value.storage), newest)
        if state.is_written:
            back = self.edit.value(value.type, storage=value.storage, memory="pinned")
            copy_out = self.edit.copy_into(COPY_OUT, newest.id, value.id, back, like=last, attrs=dict(PINNED), role="optimize", stream=OUT)
            behind = self._constant(copy_out)
            self.edit.after(last.id, [copy_out, behind])
            self.issue_after.setdefault((last.id, 0), []).extend([(copy_out.id, 0), (behind.id, 0)])
            self.has_copies_out = True
            self._give_back(move, last, behind, newest, there)

    def _give_back(self, move: StateMove, last: Op, behind: Op, newest: Value, there: Value) -> None:
        """Make the last reader of the copy's memory run on the stream of copies in, which allocated it. The reader comes after another one
        of `behind`, a constant that exists once the copy out has ended."""
        (end,) = behind.results
        order = self._reader(end, MARKED, end, last)
        reader = self._reader(newest.id, newest.type, there.storage, last)
        self.edit.after(last.id, [order, reader])
        at = self.issue_last if move.back_before is None else self.issue_before.setdefault(move.back_before, [])
        at += [(order.id, 0), (reader.id, 0)]

    def _constant(self, like: Op) -> Op:
        return self.edit.op(MARK, [], [MARKED], like=like, attrs=dict(ZERO), role="optimize", stream=OUT)

    def _reader(self, value: int, kind: TensorType, storage: int, like: Op) -> Op:
        return self.edit.reader(value, kind, storage, like=like, role="optimize", stream=IN)

    def _mark(self) -> None:
        """Make the stream of copies in wait, at the start of the step, for the previous step's copies out."""
        if not self.has_copies_out:
            return
        first = next(item for job in self.program.jobs for item in job.items)
        like = self.graph.ops[self.plan.moves[0].state.users[0]]
        mark = self._constant(like)
        (end,) = mark.results
        order = self._reader(end, MARKED, end, like)
        self.edit.before(like.id, [mark, order])
        self.issue_before.setdefault(first, [])[:0] = [(mark.id, 0), (order.id, 0)]

    def _placed(self, value: Value) -> Value:
        """The value with its new placement: a moved value is in host memory, and its updated versions share the storage of its copy."""
        if value.storage not in self.moved_to or value.memory == "pinned":
            return value
        if is_boundary(self.graph.ops[self.graph.producer[value.id]]):
            return msgspec.structs.replace(value, memory="pinned")
        return msgspec.structs.replace(value, storage=self.moved_to[value.storage])
