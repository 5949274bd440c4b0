"""`overlap-column-backward`: collectives of dX start before dW is computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from interlace.cost_model.base import Costs, Groups, tables_of
from interlace.cost_model.work import Values
from interlace.ir import Graph, Op, Program, dependencies
from interlace.ir.graph import is_topological, written_operands
from interlace.ir.kinds import is_boundary, is_comm, stream_of
from interlace.ir.remarks import Place, Remark, remark
from interlace.passes.base import Context, Pass, check_unscheduled, register
from interlace.passes.streams import AutoParallelStreamType, ring_stream
from interlace.passes.weight_gradients import ACCUMULATING, GEMM_GRADS, Backward, check_modules, in_modules

PRODUCTS = frozenset({"matmul", ACCUMULATING, *GEMM_GRADS})
REACH = 2
"""A collective borrows only weight gradients that come after the second collective before it, because a postponed dW keeps its activation
and its gradient alive. A limit of one would leave the all_gathers of sequence parallelism without any."""


@register
class OverlapColumnBackward(Pass, frozen=True, kw_only=True):
    """Start the collective of a layer's dX before the layer's dW is computed, and let dW fill the time.

    Contract: needs separate dX and dW, and no schedule yet; keeps every operation, every value and the order of communication
    within each group; moves weight gradients, and operations that only serve them (casts, sums into merge buffers, clips), to after the
    collective, and names the collective's stream; changes nothing else.

    Before / After:
        %5 = pd_op.matmul(%4, %1)                       %5 = pd_op.matmul(%4, %1)
        %9, %6 = pd_op.matmul_grad(%2, %1, %4)          %8 = pd_op.all_reduce(%5) stream="auto_parallel_mp"
        %7 = pd_op.add_(%0, %6)                         %9, %6 = pd_op.matmul_grad(%2, %1, %4)
        %8 = pd_op.all_reduce(%5)                       %7 = pd_op.add_(%0, %6)
        %10 = pd_op.layer_norm_grad(%8, ...)            %10 = pd_op.layer_norm_grad(%8, ...)

    Steps:
        1. A *site* is a backward collective of activation gradients: not p2p, and not of a weight or its gradient. Walking back from its
           operand, through sums, casts, reshapes and transposes, finds its dX products (three for q, k, v; two for gate, up; none if the
           collective comes before a product).
        2. Its own weight gradients are those that read the same dout. They are moved to immediately after it with their sinks, as is
           everything else after the last dX that the collective does not need.
        3. While its duration is not covered, it borrows weight gradients that come before it, the nearest first.
        4. The cost model computes the gain, counting how much each side slows the other. A site that would lose time is not changed.

    Source: PaddlePaddle/Paddle#57446; patterns as PaddlePaddle 3.3.1 emits them.

    Attributes:
        min_bytes: Smaller collectives are not moved. When: small collectives that run during computation are slower on your device than in
            the profile.
        modules: Names or globs of layers, of any stage; empty means all layers. When: only some layers are to change.
        only_gains: Do not overlap a collective where this would take longer than running it and the products one after another. When: off
            for tests on models too small to gain anything.
        borrow: Also move weight gradients that come earlier in backward if a layer's own do not cover its collective. When: off to keep
            each weight gradient in its own layer, for example to read a trace.
    """

    name = "overlap-column-backward"
    needs = frozenset({"dw-split"})
    gives = frozenset({"tp-overlapped"})
    after = ("split-backward",)
    is_default = True
    in_baseline = False
    min_bytes: int = 0
    modules: tuple[str, ...] = ()
    only_gains: bool = True
    borrow: bool = True

    @property
    def asks_ranks(self) -> bool:
        return bool(self.modules)

    def facts(self, program: Program, context: Context) -> tuple[str, ...]:
        """The layers with a collective in backward; needed only if `modules` chooses some of them."""
        work = Work(Graph(program), context, self)
        return tuple(sorted({work.layer(op) for op in work.sites}))

    def run(self, program: Program, context: Context) -> Program:
        """The program with its collectives moved up. Raises PassError if it has a schedule already, or a name in `modules` matches no
        layer."""
        check_unscheduled(program)
        work = Work(Graph(program), context, self)
        check_modules(self.modules, program, context)
        for op in work.sites:
            work.visit(op)
        return work.result()


@dataclass(frozen=True, slots=True)
class Overlap:
    """A collective and the fillers that run during it; times in ns.

    Attributes:
        comm, fill: Durations of the collective and of the fillers, each alone.
        done: Part of `comm` that is complete when the fillers end: less than the time they ran together if they slow it.
        both: From the start of the collective until it and its fillers have ended.
    """

    comm: int
    fill: int
    done: int
    both: int

    @property
    def gain(self) -> int:
        """Time saved by overlapping, compared with running one after the other; negative if it takes longer."""
        return self.comm + self.fill - self.both


def beside(costs: Costs, tables: tuple[Values, Groups], comm: Op, fillers: Iterable[Op]) -> Overlap:
    """Simulate a collective beside operations that run one after the other; each side slows the other while both run."""
    values, groups = tables
    alone = costs.op_time(comm, values, groups).dur_ns
    left, both, fill = float(alone), 0.0, 0
    for op in fillers:
        dur = costs.op_time(op, values, groups).dur_ns
        fill += dur
        comm_stretch, op_stretch = costs.stretch(comm, op, values, groups) if left and dur else (1.0, 1.0)
        shared = min(dur * op_stretch, left * comm_stretch)
        left -= shared / comm_stretch
        both += shared + dur - shared / op_stretch
    return Overlap(alone, fill, round(alone - left), round(both + left))


class Work:
    """The current order, and its constraints.

    Attributes:
        order: Ids of all operations.
        after: The operations that each one must come after in every order.
        used: Fillers that are assigned to a collective.
        done: Collectives that were started early.
    """

    def __init__(self, graph: Graph, context: Context, options: OverlapColumnBackward) -> None:
        self.graph, self.context, self.options = graph, context, options
        self.tables, self.backward = tables_of(graph.program), Backward(graph)
        self.sites = self.backward.collectives()
        self.order, self.index = [op.id for op in graph.program.ops], dict(graph.position)
        self.after = dependencies(graph, graph.program.ops)
        self.used: set[int] = set()
        self.done: dict[int, Op] = {}

    def layer(self, comm: Op) -> str:
        """The layer of a site: that of its dX, else of the collective itself."""
        return next((op.layer for op in self.backward.sources(comm) if op.layer), comm.layer)

    def visit(self, comm: Op) -> None:
        """Move one site's collective up, or say why not."""
        why = self._refusal(comm)
        if why:
            self.context.remarks.append(why)
            return
        own = self._own(comm)
        moved, why = self._dragged(own, comm)
        if why:
            self.context.remarks.append(why)
            return
        moved = self._with_bystanders(moved, comm) if own else moved
        self._finish(comm, own, self._with_borrowed(moved, comm))

    def result(self) -> Program:
        """The program in its new order, streams named."""
        rings = {op.group for op in self.done.values()}
        assert is_topological(self.order, self.after)
        named = {
            comm.id: msgspec.structs.replace(comm, stream=stream_of(comm) or ring_stream(AutoParallelStreamType.MP, comm.group, rings))
            for comm in self.done.values()
        }
        return self.graph.program.with_ops([named.get(op_id, self.graph.ops[op_id]) for op_id in self.order])

    def _refusal(self, comm: Op) -> Remark | None:
        moved_bytes = sum(max(self.graph.values[value].size_bytes, 0) for value in comm.operands)
        if not in_modules(self.options.modules, self.layer(comm)):
            return remark("declined", "other-module", comm, modules=self.options.modules)
        if moved_bytes < self.options.min_bytes:
            return remark("declined", "below-min-bytes", comm, size_bytes=moved_bytes, min_bytes=self.options.min_bytes)
        if not any(self.backward.sources(op) for op in self.sites if op.group == comm.group):
            return remark("declined", "not-tensor-parallel", comm, group=comm.group)
        fused = [op for op in self.backward.sources(comm) if self.backward.is_fused(op)]
        return remark("declined", "gradient-not-split", comm, gradient=fused[0]) if fused else None

    def _dragged(self, chosen: set[int], comm: Op) -> tuple[set[int], Remark | None]:
        """The operations that must move after a collective together with the chosen ones, or why they cannot."""
        moved = set(chosen)
        start = min((self.index[op_id] for op_id in chosen), default=self.index[comm.id])
        for op_id in self.order[start : self.index[comm.id] + 1]:
            movers = self.after[op_id] & moved
            if movers and op_id not in moved:
                why = self._hindrance(self.graph.ops[op_id], [self.graph.ops[each] for each in sorted(movers)], comm)
                if why:
                    return set(), why
                moved.add(op_id)
        return moved, None

    def _hindrance(self, op: Op, movers: list[Op], comm: Op) -> Remark | None:
        """Why an operation that must come after moved ones cannot move with them; None if it can."""
        for mover in movers:
            spoiled = self._spoiled(op, mover)
            if spoiled:
                return remark("declined", "overwrites-operand", Place.of(comm, spoiled[0]), writer=op, reader=mover)
        if op.id in self.backward.sinks:
            return None
        if op.id == comm.id or is_comm(op):
            return remark("declined", "communication-keeps-order", comm, first=movers[0], group=op.group)
        return remark("declined", "needs-moved", comm, between=op, first=movers[0])

    def _spoiled(self, op: Op, mover: Op) -> list[int]:
        """Values that `mover` reads and `op` overwrites, without buffers that live across steps, whose sums keep their order."""
        storages = self.graph.storages
        read = {n: value for value in mover.operands for n in storages.numbers(value)}
        written = {n for value in written_operands(op) for n in storages.numbers(value) if not storages.storages[n].persistable}
        return [read[n] for n in sorted(written) if n in read]

    def _readers_of_dout(self, comm: Op) -> list[Op]:
        douts = {self.backward.upstream(op) for op in self.backward.sources(comm)}
        return [user for dout in sorted(douts) for user in self.graph.user_ops(dout)]

    def _own(self, comm: Op) -> set[int]:
        return self.backward.chain_of([user.id for user in self._readers_of_dout(comm)], self._free_sinks(comm))

    def _free_sinks(self, comm: Op) -> set[int]:
        """Sinks before a collective that do not fill another one yet."""
        return {op_id for op_id in self.backward.sinks - self.used if self.index[op_id] < self.index[comm.id]}

    def _with_bystanders(self, moved: set[int], comm: Op) -> set[int]:
        start = 1 + max(self.index[op.id] for op in self.backward.sources(comm))
        needed = set(self.after[comm.id])
        idle: set[int] = set()
        for op_id in reversed(self.order[start : self.index[comm.id]]):
            op = self.graph.ops[op_id]
            if op_id in needed or is_comm(op) or is_boundary(op):
                needed |= self.after[op_id]
            else:
                idle.add(op_id)
        both, why = self._dragged(moved | idle, comm)
        return moved if why else both

    def _with_borrowed(self, moved: set[int], comm: Op) -> set[int]:
        known = self._estimate(moved, comm)
        within = self._free_sinks(comm) if self.options.borrow else set()
        for head in self._lenders(comm, within):
            if known.done >= known.comm:
                break
            more = self.backward.chain_of([head], within)
            both, why = self._dragged(moved | more, comm)
            if not why and self._estimate(both, comm).gain > known.gain:
                moved, known = both, self._estimate(both, comm)
        return moved

    def _lenders(self, comm: Op, within: set[int]) -> list[int]:
        """Products in `within` before a collective, nearest first, from which it may borrow: as far back as `REACH` allows."""
        found, passed = [], 0
        sites = {op.id for op in self.sites}
        for op_id in reversed(self.order[: self.index[comm.id]]):
            passed += op_id in sites
            if passed == REACH:
                break
            if op_id in within and self.graph.ops[op_id].kind in PRODUCTS:
                found.append(op_id)
        return found

    def _fillers(self, moved: set[int], comm: Op) -> list[int]:
        """What runs beside a collective: the moved operations, and those after it up to its first reader or other communication."""
        start = min((self.index[op_id] for op_id in moved), default=self.index[comm.id])
        found = [op_id for op_id in self.order[start : self.index[comm.id]] if op_id in moved]
        for op_id in self.order[self.index[comm.id] + 1 :]:
            if comm.id in self.after[op_id] or is_comm(self.graph.ops[op_id]):
                break
            found.append(op_id)
        return found

    def _estimate(self, moved: set[int], comm: Op) -> Overlap:
        return beside(self.context.cost, self.tables, comm, [self.graph.ops[op_id] for op_id in self._fillers(moved, comm)])

    def _finish(self, comm: Op, own: set[int], moved: set[int]) -> None:
        fillers = self._fillers(moved, comm)
        found = self._estimate(moved, comm)
        later = self.backward.sinks.intersection(op.id for op in self._readers_of_dout(comm))
        if not moved and not later.intersection(fillers):
            self.context.remarks.append(self._nothing(comm))
        elif found.gain < 0 and self.options.only_gains:
            self.context.declined("overlap-slower", comm, overlapped_ns=found.both, serial_ns=found.comm + found.fill)
        else:
            self.move(moved, comm)
            self.used.update(op_id for op_id in fillers if op_id in self.backward.sinks)
            self._report(comm, own, moved)

    def move(self, moved: set[int], comm: Op) -> None:
        end = self.index[comm.id] + 1
        start = min((self.index[op_id] for op_id in moved), default=end)
        self.order[start:end] = sorted(self.order[start:end], key=lambda op_id: op_id in moved)
        self.index.update((op_id, start + k) for k, op_id in enumerate(self.order[start:end]))
        self.done[comm.id] = comm

    def _nothing(self, comm: Op) -> Remark:
        """Why nothing can run beside a collective."""
        products = {op.id for op in self.backward.sources(comm)}
        known = products | self.backward.sinks
        bound = [
            op
            for op in self._readers_of_dout(comm)
            if op.kind in PRODUCTS and op.id not in known and self.index[op.id] < self.index[comm.id]
        ]
        if bound:
            return remark("declined", "feeds-more", comm, first=bound[0])
        return remark("declined", "no-weight-gradient", comm) if products else remark("declined", "no-weight-product", comm)

    def _report(self, comm: Op, own: set[int], moved: set[int]) -> None:
        """Report what was moved. How much of the collective is finally hidden is not known yet, as later passes order the step."""
        lent = sum(self.graph.ops[op_id].kind in PRODUCTS for op_id in moved - own)
        borrowed = {"borrowed": lent} if lent else {}
        if own:
            self.context.applied("started-after-dx", comm, dx=self.backward.sources(comm), moved=len(moved), **borrowed)
        else:
            self.context.applied("started-before-others", comm, moved=len(moved), **borrowed)
