"""Random plans of many ranks: pipeline x tensor parallel, forward, backward and optimizer, jobs in 1F1B order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import strategies as st

from interlace.ir import Group, Job, Op, Pipeline, Program, Value, parse
from interlace.ir.waits import computes

MP, PP, DP_NORM = "mp", "pp", "norm"


@dataclass(frozen=True)
class Shape:
    """What a plan looks like; `streams` names those of collectives, sends, receives and copies (empty: compute).

    In the jobs of the `held` micro-batches the host waits in the middle and at the end.
    """

    stages: int = 2
    tensor: int = 2
    micro_batches: int = 2
    layers: int = 1
    streams: tuple[str, str, str, str] = ("", "", "", "")
    offloaded: frozenset[int] = frozenset()
    norm: bool = False
    fetch: bool = False
    held: frozenset[int] = frozenset()
    width: int = 4


@dataclass
class _Builder:
    shape: Shape
    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    role: str = "forward"
    layer: str = ""

    def op(
        self,
        name: str,
        operands: tuple[int, ...] = (),
        dims: tuple[int, ...] | None = None,
        *,
        like: int | None = None,
        persistable: bool = False,
        memory: str = "device",
        **fields: Any,
    ) -> int:
        """Append an op with one result (none where neither `dims` nor `like` is given); gives the result's id."""
        results: tuple[int, ...] = ()
        if dims is not None or like is not None:
            number = len(self.values)
            base = self.values[like] if like is not None else None
            made = Value(number, base.shape if base else dims or (), "float32", base.storage if base else number)
            lasting = base.persistable if base else persistable
            self.values.append(msgspec.structs.replace(made, persistable=lasting, memory=memory))
            results = (number,)
        self.ops.append(Op(len(self.ops), name, operands, results, self.role, layer=self.layer, **fields))  # type: ignore[arg-type]
        return results[0] if results else -1


def world(shape: Shape) -> list[Program]:
    """The programs of all ranks; rank = stage * tensor + place in the tensor group."""
    return [program(shape, stage, place) for stage in range(shape.stages) for place in range(shape.tensor)]


def program(shape: Shape, stage: int, place: int) -> Program:
    """One rank's program with its jobs."""
    build = _Builder(shape)
    rank = stage * shape.tensor + place
    count = shape.stages * shape.tensor
    mp, send, receive, copy = shape.streams
    size, last = shape.width, stage == shape.stages - 1
    groups = [
        Group(10 + stage, tuple(range(stage * shape.tensor, (stage + 1) * shape.tensor))),
        Group(5, tuple(range(count))),
    ]
    for k, pair in enumerate(((rank - shape.tensor, rank), (rank, rank + shape.tensor))):
        if pair[0] >= 0 and pair[1] < count:
            groups += [Group(100 + pair[0], pair), Group(200 + pair[0], pair[::-1])]
        del k

    def reduce(value: int) -> int:
        if shape.tensor == 1:
            return value
        return build.op("pd_op.all_reduce_", (value,), like=value, group=10 + stage, stream=mp, inplace=((0, 0),))

    weights = [build.op("builtin.parameter", (), (size, size), persistable=True) for _ in range(shape.layers)]
    sums = [build.op("builtin.parameter", (), (size, size), persistable=True) for _ in range(shape.layers)]
    if stage == 0:
        hidden = build.op("pd_op.data", (), (2, size))
    else:
        hidden = build.op("pd_op.recv_v2", (), (2, size), group=100 + rank - shape.tensor, stream=receive, attrs={"peer": 0})
    saved: list[tuple[int, int, int]] = []
    for number, weight in enumerate(weights):
        build.layer = f"layers.{number}.fc"
        inside = reduce(build.op("pd_op.matmul", (hidden, weight), (2, size)))
        out = build.op("pd_op.gelu", (inside,), (2, size))
        kept = hidden
        if shape.offloaded and number:
            kept = build.op("pd_op.memcpy_d2h", (hidden,), (2, size), memory="pinned", stream=copy, attrs={"dst_place_type": 2})
        saved.append((kept, inside, weight))
        hidden = out
    build.layer = ""
    if last:
        loss = build.op("pd_op.mean", (hidden,), (1,))
        if shape.fetch:
            build.op("pd_op.memcpy_d2h", (loss,), (1,), memory="host", attrs={"dst_place_type": 0})
        build.role = "backward"
        grad = build.op("pd_op.mean_grad", (hidden, loss), (2, size), no_buffer=(0,))
    else:
        build.op("pd_op.send_v2", (hidden,), group=100 + rank, stream=send, attrs={"peer": 1})
        build.role = "backward"
        grad = build.op("pd_op.recv_v2", (), (2, size), group=200 + rank, stream=receive, attrs={"peer": 0})
    for number in reversed(range(shape.layers)):
        build.layer = f"layers.{number}.fc"
        kept, inside, weight = saved[number]
        if build.values[kept].memory == "pinned":
            kept = build.op("pd_op.memcpy_h2d", (kept,), (2, size), stream=copy, attrs={"dst_place_type": 1})
        grad = build.op("pd_op.gelu_grad", (inside, grad), (2, size))
        down = reduce(build.op("pd_op.matmul", (grad, weight), (2, size), attrs={"transpose_y": True}))
        change = build.op("pd_op.matmul", (kept, grad), (size, size), attrs={"transpose_x": True})
        build.op("pd_op.add_", (sums[number], change), like=sums[number], inplace=((0, 0),))
        grad = down
    build.layer = ""
    if stage:
        build.op("pd_op.send_v2", (grad,), group=200 + rank - shape.tensor, stream=send, attrs={"peer": 1})
    build.role = "optimize"
    if shape.norm and count > 1:
        norm = build.op("pd_op.p_norm", (sums[0],), (1,))
        build.op("pd_op.all_reduce_", (norm,), like=norm, group=5, inplace=((0, 0),))
    for weight, total in zip(weights, sums, strict=True):
        build.op("pd_op.sgd_", (weight, total), like=weight, inplace=((0, 0),))
    pipe = Pipeline(stage, shape.stages, shape.micro_batches, 1, "1F1B")
    made = Program(tuple(build.ops), tuple(build.values), tuple(groups), pipe, rank, count)
    return Program(made.ops, made.values, made.groups, pipe, rank, count, jobs=_jobs(shape, made.ops, made.values, stage))


def waits_of(items: list[tuple[int, int]], ops: tuple[Op, ...], values: tuple[Value, ...]) -> tuple[Any, ...]:
    """In the middle for the first computation, at the end for the last."""
    computed = [item for item in items if computes(ops[item[0]], {value.id: value for value in values})]
    if not computed:
        return ()
    first, last, middle = computed[0], computed[-1], max(items.index(computed[0]), len(items) // 2)
    return ((items[middle], first), (items[-1], last)) if middle < len(items) - 1 else ((items[-1], last),)


def _jobs(shape: Shape, ops: tuple[Op, ...], values: tuple[Value, ...], stage: int) -> tuple[Job, ...]:
    mine: dict[str, list[Op]] = {role: [] for role in ("forward", "backward", "optimize")}
    for op in ops:
        if op.name not in ("builtin.parameter", "pd_op.data"):
            mine[op.role].append(op)

    def job(role: str, micro_batch: int) -> Job:
        items = [
            (op.id, micro_batch)
            for op in mine[role]
            if op.kind != "memcpy_h2d" or micro_batch in shape.offloaded
            if op.attrs.get("dst_place_type") != 2 or micro_batch in shape.offloaded
        ]
        waits = waits_of(items, ops, values) if role != "optimize" and micro_batch in shape.held else ()
        return Job(f"{role}_{micro_batch}", role, micro_batch, tuple(items), waits)

    ahead = min(shape.stages - stage - 1, shape.micro_batches)
    jobs = [job("forward", m) for m in range(ahead)]
    for m in range(shape.micro_batches):
        if m + ahead < shape.micro_batches:
            jobs.append(job("forward", m + ahead))
        jobs.append(job("backward", m))
    return (*jobs, job("optimize", 0))


@st.composite
def shapes(draw: st.DrawFn, max_stages: int = 3, max_tensor: int = 2) -> Shape:
    """Shapes of small worlds."""
    names = st.sampled_from(["", "mp", "pp", "side"])
    micro_batches = draw(st.integers(1, 4))
    return Shape(
        draw(st.integers(1, max_stages)),
        draw(st.integers(1, max_tensor)),
        micro_batches,
        draw(st.integers(1, 3)),
        # Receives share no stream with sends: 1F1B with rendezvous would wait in a circle.
        (draw(names), draw(st.sampled_from(["send", "send2"])), draw(st.sampled_from(["receive", "receive2"])), draw(names)),
        draw(st.frozensets(st.integers(0, micro_batches - 1))),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.frozensets(st.integers(0, micro_batches - 1))),
        draw(st.sampled_from([4, 64])),
    )


def rank(ops: str, jobs: str, number: int = 0, count: int = 1, groups: str = "", micro_batches: int = 1) -> Program:
    """A program from its lines; `#0` gives an input `%0` of 8 bytes."""
    head = f"program rank={number} world={count} mode=train\n"
    pipe = f"pipeline stage=0 of 1 micro_batches={micro_batches} chunks=1 schedule=none\n"
    return parse(f"{head}{pipe}{groups}#0 %0:float32[2] = pd_op.data() forward\n{ops.strip()}\n{jobs.strip()}\n")
