"""Weight gradients, and collectives of activation gradients, in a backward program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from interlace.errors import PassError
from interlace.ir import ABSENT, Graph, Op, Program
from interlace.ir.effects import is_ordered
from interlace.ir.graph import written_operands
from interlace.ir.kinds import PARAMETER, is_boundary, is_collective, is_comm
from interlace.ir.operators import names
from interlace.ir.remarks import Place
from interlace.passes.base import Context
from interlace.scheduler.offload import names_layer
from interlace.scheduler.recompute.copies import COPY

WEIGHT_FORMS = frozenset(
    {"cast", "all_gather", "c_allgather", "share_data", "assign", "c_identity", "reshape", "view_shape", "transpose", "slice", "contiguous"}
)
"""Kinds whose result is still the weight, in another form: AMP's cast, a gathered shard (sharding stage 3), a view."""
GEMM_GRADS = frozenset({"matmul_grad", "bmm_grad", "linear_grad", "linear_v2_grad", "fused_gemm_epilogue_grad"})
"""Gradients of a product: x and y are the first two operands, dout is the last; dx and dy are the first two results."""
UPDATES = names("""
    cast scale add add_n combine split clip multiply divide assign slice share_data reshape concat split_with_num
    check_finite_and_unscale
""")
"""Kinds that occur between the gradient of a parameter and its sum."""
ACCUMULATING = "fused_linear_param_grad_add"
"""Kind that computes dW and adds it to its sum; the first operands are x and dout."""


def weight_values(graph: Graph) -> set[int]:
    """Ids of values that are a parameter, or a form of one (`WEIGHT_FORMS`)."""
    found: set[int] = set()
    for op in graph.program.ops:
        first = op.operands[0] if op.operands else ABSENT
        if op.name == PARAMETER or (op.kind in WEIGHT_FORMS and first in found):
            found.update(op.results)
    return found


def weight_index(op: Op, weights: set[int]) -> int | None:
    """Index of the operand of a product or its gradient (0 is x, 1 is y) that is a weight; None if neither or both are."""
    found = [k for k in (0, 1) if k < len(op.operands) and op.operands[k] in weights]
    return found[0] if len(found) == 1 else None


def is_used(graph: Graph, op: Op, index: int) -> bool:
    """Whether the operation computes the result with this index, and something reads it."""
    if index >= len(op.results):
        return False
    value = op.results[index]
    return graph.values[value].dtype != "null" and bool(graph.users.get(value))


def check_modules(modules: Sequence[str], program: Program, context: Context) -> None:
    """Check that each name or glob matches a layer of some rank; `context.facts` has the layers. Raises PassError, which lists the
    layers, if one matches none; if other stages are unknown, it only reports what this stage lacks."""
    known = sorted({layer for layers in context.facts for layer in layers if layer})
    for pattern in modules:
        if not any(names_layer(pattern, layer) for layer in known):
            stage = program.pipeline.stage
            if context.is_whole or program.pipeline.num_stages == 1:
                where = "any rank" if context.is_whole else f"stage {stage}"
                raise PassError(f"modules: {pattern!r} matches no layer of {where}; there are {', '.join(known) or 'no named layers'}")
            context.declined("no-such-layer", Place(stage=stage), pattern=pattern, layers=known or ["no named layers"])


def in_modules(modules: Sequence[str], layer: str) -> bool:
    """Whether a name or glob matches the layer; without any, every layer is chosen."""
    return not modules or any(names_layer(pattern, layer) for pattern in modules)


class Backward:
    """The backward part of a program: operations that compute dX, that compute dW, and communication.

    Attributes:
        weights: Ids of values that are a parameter in some form.
        sinks: Ids of operations whose results reach only gradients of parameters: dW, and what only dW leads to. None of them feeds an
            activation's gradient, so each may run later.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.weights = graph, weight_values(graph)
        self.sinks: set[int] = set()
        self._updates: set[int] = set()
        self._sources: dict[int, list[Op]] = {}
        bound: set[int] = set()
        found = self._sweep(bound)
        while found:
            bound |= found
            found = self._sweep(bound)

    def _sweep(self, bound: set[int]) -> set[int]:
        """Find the sinks other than `bound`. Returns those that overwrite a value that no sink produced."""
        self.sinks, self._updates = set(), set()
        for op in reversed(self.graph.program.ops):
            users = [user for value in op.results for user in self.graph.user_ops(value)]
            if op.role == "backward" and self._is_update(op, users):
                self._updates.add(op.id)
            if op.role == "backward" and op.id not in bound and self._is_sink(op, users):
                self.sinks.add(op.id)
        return {op_id for op_id in self.sinks if self._overwrites(self.graph.ops[op_id])}

    def _overwrites(self, op: Op) -> bool:
        written = [value for value in written_operands(op) if not self.graph.storages.is_persistable(value)]
        return any(self.graph.producer[value] not in self.sinks for value in written)

    def _frees(self, op: Op) -> bool:
        """Whether an operation is recomputation whose results are smaller than its operands: postponing it would keep these alive."""
        read = {value for value in op.reads if not self.graph.storages.is_persistable(value)}
        return COPY in op.attrs and self._bytes(op.results) < self._bytes(read)

    def _bytes(self, values: Iterable[int]) -> int:
        return sum(max(0, self.graph.values[value].size_bytes) for value in values)

    def _is_update(self, op: Op, users: list[Op]) -> bool:
        """Whether an operation only carries a parameter's gradient to its sum or to the optimizer."""
        summed = any(self.graph.storages.is_persistable(value) for value in written_operands(op))
        carried = bool(users) and all(user.id in self._updates or user.role == "optimize" for user in users)
        return (op.kind in UPDATES or is_collective(op)) and (summed or carried)

    def _is_sink(self, op: Op, users: list[Op]) -> bool:
        if op.num_blocks or is_ordered(op) or (is_comm(op) and op.id not in self._updates) or self._frees(op):
            return False
        return all(user.id in self.sinks or user.role == "optimize" or is_boundary(user) for user in users)

    def collectives(self) -> list[Op]:
        """Backward collectives of activation gradients, not of weights or their gradients, in program order."""
        return [
            op
            for op in self.graph.program.ops
            if op.role == "backward" and is_collective(op) and op.id not in self.sinks and not self.weights.intersection(op.operands)
        ]

    def sources(self, op: Op) -> list[Op]:
        """Products with a weight that feed an operation without another such product or communication between, in program order."""
        if op.id not in self._sources:
            self._sources[op.id] = self._walk(op)
        return self._sources[op.id]

    def _walk(self, op: Op) -> list[Op]:
        found: dict[int, Op] = {}
        seen: set[int] = set()
        rest = [value for value in op.operands if value != ABSENT]
        while rest:
            value = rest.pop()
            maker = self.graph.producer_op(value)
            if value in seen or maker is None or maker.role != "backward" or is_comm(maker):
                continue
            seen.add(value)
            if self.is_weight_product(maker):
                found.update({} if self._is_weight_gradient(maker, value) else {maker.id: maker})
            else:
                rest += self.graph.reads(maker)
        return sorted(found.values(), key=lambda each: self.graph.position[each.id])

    def is_weight_product(self, op: Op) -> bool:
        """Whether the operation multiplies by a weight: a dX, or a recomputed forward product."""
        return (op.kind == "matmul" or op.kind in GEMM_GRADS) and weight_index(op, self.weights) is not None

    def _is_weight_gradient(self, product: Op, value: int) -> bool:
        return product.kind in GEMM_GRADS and product.results.index(value) != 1 - (weight_index(product, self.weights) or 0)

    def upstream(self, product: Op) -> int:
        """The activation-side operand of a product with a weight: dout of a dX."""
        index = weight_index(product, self.weights)
        if product.kind == "matmul":
            return product.operands[1 - (index or 0)]
        return product.operands[-1]

    def is_fused(self, product: Op) -> bool:
        """Whether one operation still computes both dX and dW."""
        return product.kind in GEMM_GRADS and is_used(self.graph, product, 0) and is_used(self.graph, product, 1)

    def chain_of(self, heads: Iterable[int], within: set[int]) -> set[int]:
        """Ids of the operations in `within` that are `heads`, depend on them, or are needed only by operations found so."""
        found: set[int] = set()
        rest = [head for head in heads if head in within]
        while rest:
            op = self.graph.ops[rest.pop()]
            if op.id not in found:
                found.add(op.id)
                rest += [user.id for value in op.results for user in self.graph.user_ops(value) if user.id in within]
                rest += [maker for maker in self._makers(op) if maker in within and self._private(maker, found)]
        return found

    def _makers(self, op: Op) -> set[int]:
        return {self.graph.producer[value] for value in op.operands if value in self.graph.producer}

    def _private(self, op_id: int, readers: set[int]) -> bool:
        return all(user in readers for value in self.graph.ops[op_id].results for user in self.graph.users.get(value, ()))
