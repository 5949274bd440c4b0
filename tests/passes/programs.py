"""Programs for tests of the backward passes: single gradients for Paddle, random tensor-parallel backwards."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from hypothesis import strategies as st

from interlace.ir import Group, Pipeline, Program, TensorType
from tests.strategies import Builder

TOKENS, WIDTH = 4, 4
ROW = TensorType((2, TOKENS // 2, WIDTH), "float32")
SQUARE = TensorType((WIDTH, WIDTH), "float32")
MP = 17


def one_gradient(
    x: Sequence[int],
    y: Sequence[int],
    dout: Sequence[int],
    transpose_x: bool,
    transpose_y: bool,
    dtype: str = "float32",
    weight: int = 1,
) -> Program:
    """A matmul_grad of a weight, both results named: `dx`, `dy`."""
    build = Builder()
    kinds = [TensorType(tuple(shape), dtype) for shape in (x, y)]
    names = ["pd_op.data", "pd_op.data"]
    names[weight] = "builtin.parameter"
    operands = [build.named(names[k], kinds[k], "xy"[k], k == weight) for k in (0, 1)]
    operands.append(build.named("pd_op.data", TensorType(tuple(dout), dtype), "dout"))
    build.role = "backward"
    attrs = {"transpose_x": transpose_x, "transpose_y": transpose_y}
    for name, value in zip(("dx", "dy"), build.op("pd_op.matmul_grad", operands, kinds, attrs=attrs), strict=True):
        build.raw("builtin.shadow_output", [value], [], attrs={"output_name": name})
    return Program(tuple(build.ops), tuple(build.values))


class Recipe(msgspec.Struct, frozen=True):
    """What a random backward is made of: the forms of its layers, from the last to the first, and a seed for the rest."""

    layers: tuple[str, ...]
    sinks: tuple[str, ...] = ("add_",)
    transposes: bool = False
    overwrite: bool = False
    inplace: bool = False
    seed: int = 0


LAYERS = ("column", "qkv", "gate_up", "row", "sequence", "moe", "net_sequence", "recompute", "attention")
SINKS = ("add_", "cast", "clip", "fused", "synchronized")


def recipes() -> st.SearchStrategy[Recipe]:
    """Recipes of one to five layers."""
    return st.builds(
        Recipe,
        st.lists(st.sampled_from(LAYERS), min_size=1, max_size=5).map(tuple),
        st.lists(st.sampled_from(SINKS), min_size=1, max_size=3).map(tuple),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.integers(0, 2**16),
    )


@dataclass
class Maker:
    """Builds one rank's program of a recipe. Ranks of the group get the same operations."""

    recipe: Recipe
    rank: int
    build: Builder = field(default_factory=Builder)
    count: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.recipe.seed)
        self.x = self.build.named("pd_op.data", ROW, "x")
        named = self.build.named
        self.slots = [
            (named("builtin.parameter", SQUARE, f"w{k}", True), named("builtin.kwarg", SQUARE, f"g{k}", True))
            for k in range(3 * len(self.recipe.layers))
        ]
        self.saved = [self.build.op("pd_op.gelu", [self.x], [ROW])[0] for _ in self.slots]

    def program(self) -> Program:
        """Forward values, the layers' backward, an optimizer that reads every buffer."""
        self.build.role = "backward"
        g = self.build.op("pd_op.mean_grad", [self.x], [ROW])[0]
        for k, form in enumerate(self.recipe.layers):
            self.build.layer = f"layers.{len(self.recipe.layers) - k - 1}.{form}"
            g = getattr(self, form)(g)
        self.build.raw("builtin.shadow_output", [g], [], attrs={"output_name": "dx"})
        self.build.role, self.build.layer = "optimize", ""
        for weight, buffer in self.slots[: self.count]:
            self.build.op("pd_op.sgd_", [weight, buffer], [SQUARE], inplace=((0, 0),))
        return Program(tuple(self.build.ops), tuple(self.build.values), (Group(MP, (0, 1)),), Pipeline(), self.rank, 2)

    def comm(self, name: str, operand: int, kind: TensorType = ROW) -> int:
        """A collective of the tensor-parallel group."""
        inplace = ((0, 0),) if name.endswith("_") else ()
        return self.build.op(name, [operand], [kind], group=MP, inplace=inplace, attrs={"ring_id": MP})[0]

    def reduce(self, operand: int) -> int:
        """all_reduce in either form."""
        return self.comm("pd_op.all_reduce_" if self.recipe.inplace else "pd_op.all_reduce", operand)

    def linear(self, dout: int) -> int:
        """A linear layer's gradient with its sink; gives dX."""
        k, self.count = self.count, self.count + 1
        weight, buffer = self.slots[k]
        op, x = self.build.op, self.saved[k]
        sink = self.rng.choice(self.recipe.sinks)
        if sink == "fused":
            dx = op("pd_op.matmul", [dout, weight], [ROW], attrs={"transpose_x": False, "transpose_y": True})[0]
            op("pd_op.fused_linear_param_grad_add_", [x, dout, buffer], [SQUARE], inplace=((0, 2),))
            return dx
        transpose_y = self.recipe.transposes and self.rng.random() < 0.5
        attrs = {"transpose_x": False, "transpose_y": transpose_y}
        dx, dw = op("pd_op.matmul_grad", [x, weight, dout], [ROW, SQUARE], attrs=attrs)
        self.sink(sink, dw, buffer)
        if self.recipe.overwrite and self.rng.random() < 0.4:
            op("pd_op.relu_", [dout], [ROW], inplace=((0, 0),))
        return dx

    def sink(self, form: str, dw: int, buffer: int) -> None:
        """What becomes of dW."""
        op = self.build.op
        if form == "synchronized":
            dw = self.comm("pd_op.all_reduce", dw, SQUARE)
        if form == "cast":
            dw = op("pd_op.cast", [dw], [SQUARE], attrs={"dtype": "float32"})[0]
        if form == "clip":
            dw = op("pd_op.clip", [dw], [SQUARE])[0]
        op("pd_op.add_", [buffer, dw], [SQUARE], inplace=((0, 0),), attrs={"grad_merge_add": True})

    def join(self, parts: list[int]) -> int:
        """A sum of several dX, as add_n or as a chain of adds."""
        if self.rng.random() < 0.5:
            vector = self.build.vector([ROW] * len(parts))
            self.build.raw("builtin.combine", parts, [vector])
            return self.build.op("pd_op.add_n", [vector], [ROW])[0]
        total = parts[0]
        for part in parts[1:]:
            total = self.build.op("pd_op.add", [total, part], [ROW])[0]
        return total

    def branches(self, g: int, count: int) -> int:
        """Several linear layers of one input, with work between."""
        parts = []
        for _ in range(count):
            parts.append(self.linear(self.build.op("pd_op.tanh_grad", [self.x, g], [ROW])[0]))
        return self.reduce(self.join(parts))

    def column(self, g: int) -> int:
        """dX straight into all_reduce."""
        return self.reduce(self.linear(g))

    def qkv(self, g: int) -> int:
        """Three branches."""
        return self.branches(g, 3)

    def gate_up(self, g: int) -> int:
        """Two branches."""
        return self.branches(g, 2)

    def row(self, g: int) -> int:
        """A row-parallel layer: no collective behind it."""
        return self.build.op("pd_op.gelu_grad", [self.x, self.linear(g)], [ROW])[0]

    def sequence(self, g: int) -> int:
        """all_gather, a row-parallel and a column-parallel layer, reduce_scatter."""
        half = TensorType((1, *ROW.shape[1:]), "float32")
        part = self.build.op("pd_op.slice", [g], [half], attrs={"axes": [0], "starts": [0], "ends": [1]})[0]
        dx = self.linear(self.row(self.comm("pd_op.all_gather", part)))
        vector = self.build.vector([half, half])
        self.build.raw("builtin.combine", [self.comm("pd_op.reduce_scatter", dx, half)] * 2, [vector])
        return self.build.op("pd_op.concat", [vector], [ROW], attrs={"axis": 0})[0]

    def moe(self, g: int) -> int:
        """dX through reshape and transpose into all_to_all."""
        dx = self.linear(g)
        flat = self.build.op("pd_op.reshape", [dx], [TensorType((TOKENS, WIDTH), "float32")])[0]
        wide = TensorType((WIDTH, TOKENS), "float32")
        turned = self.build.op("pd_op.transpose", [flat], [wide], attrs={"perm": [1, 0]})[0]
        return self.comm("pd_op.all_to_all", self.build.op("pd_op.reshape", [turned], [ROW])[0])

    def net_sequence(self, g: int) -> int:
        """cast, all_reduce, transpose."""
        dx = self.reduce(self.build.op("pd_op.cast", [self.linear(g)], [ROW])[0])
        return self.build.op("pd_op.transpose", [dx], [ROW], attrs={"perm": [1, 0, 2]})[0]

    def recompute(self, g: int) -> int:
        """A forward product and its all_reduce inside backward, then the layer's own gradient."""
        weight = self.slots[self.count][0]
        attrs = {"transpose_x": False, "transpose_y": False}
        again = self.build.op("pd_op.matmul", [self.saved[self.count], weight], [ROW], attrs=attrs)
        self.saved[self.count] = self.reduce(again[0])
        return self.column(g)

    def attention(self, g: int) -> int:
        """The gradient of a product of two activations."""
        attrs = {"transpose_x": False, "transpose_y": True}
        scores = self.build.op("pd_op.matmul", [g, self.x], [TensorType((2, 2, 2), "float32")], attrs=attrs)[0]
        return self.build.op("pd_op.matmul_grad", [self.x, self.x, scores], [ROW, ROW], attrs=attrs)[0]


def backward_programs(recipe: Recipe) -> list[Program]:
    """Both ranks' programs."""
    return [Maker(recipe, rank).program() for rank in (0, 1)]


def shapes_of(x: Sequence[int], y: Sequence[int], transpose_x: bool, transpose_y: bool) -> tuple[int, ...]:
    """Shape of the product's result."""
    rows = x[-1] if transpose_x else x[-2]
    columns = y[-2] if transpose_y else y[-1]
    batches = [max(pair) for pair in zip(_padded(x, y), _padded(y, x), strict=True)]
    return (*batches, rows, columns)


def _padded(mine: Sequence[int], other: Sequence[int]) -> list[int]:
    batches = list(mine[:-2])
    return [1] * (len(other) - 2 - len(batches)) + batches
