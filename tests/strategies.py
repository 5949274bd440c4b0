"""Random programs and random plans that are right by construction, for tests of every pass, plan and checker.

Everything is a pure function of a `World`, a small record of sizes and switches; `worlds()` draws one for hypothesis, which
shrinks it to the smallest that fails. Values are tiny (`[2, 4]`), so that `tests.interpreter` runs a world in milliseconds.

>>> program, = programs(World(micro_batches=2))
>>> program.jobs
()
>>> [job.name for job in plan(World(micro_batches=1))[0].jobs]
['forward_0', 'backward_0', 'optimizer']
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import strategies as st

from interlace.ir import Event, Graph, Group, Job, Op, Pipeline, Program, Value
from interlace.ir.kinds import BOUNDARY, is_boundary
from interlace.ir.program import Role, TensorType
from tests.closure import Closure

ROW = TensorType((2, 4), "float32")
SQUARE = TensorType((4, 4), "float32")
Item = tuple[int, int]


class World(msgspec.Struct, frozen=True):
    """What to generate.

    Attributes:
        pp, mp, dp: Pipeline stages, ranks of a tensor-parallel group, and replicas: a stage has `mp * dp` ranks.
        micro_batches, layers: Per step, and per stage.
        schedule: `1F1B`, `FThenB`, `VPP` or `accumulate`; `plan` knows the first two.
        chunks: Model chunks of each stage, `layers` in each; more than one with `VPP`, and two stages at least.
        streams: Communication on streams of its own. Sends of 1F1B are so always: a send that waits for its receiver on the
            compute stream is a deadlock there.
        pairs: Steady-state backward and forward mixed op by op in one job.
        offload: Some saved activations of some micro-batches go to pinned memory and come back.
        hoist: Receives and copies in are issued at the end of the job before.
        cut: Some jobs are cut in two.
        dropout: Some layers draw random numbers.
        masks: An input goes from stage to stage, first thing, and every layer reads it.
        gather: The loss of each token is compared with zero and gathered over the replicas, then its mean taken; also the output
            may be what a collective gives.
        seed: Of every other choice.
    """

    pp: int = 1
    mp: int = 1
    micro_batches: int = 1
    layers: int = 1
    schedule: str = "1F1B"
    streams: bool = False
    pairs: bool = False
    offload: bool = False
    hoist: bool = False
    cut: bool = False
    dropout: bool = False
    dp: int = 1
    masks: bool = False
    gather: bool = False
    chunks: int = 1
    seed: int = 0

    @property
    def stage_ranks(self) -> int:
        """Ranks of each stage."""
        return self.mp * self.dp


def worlds(
    max_pp: int = 3, max_mp: int = 2, max_micro_batches: int = 5, max_layers: int = 3, max_dp: int = 1, **fixed: Any
) -> st.SearchStrategy[World]:
    """Worlds up to a size; `fixed` sets fields for good."""
    drawn: dict[str, st.SearchStrategy[Any]] = {
        "pp": st.integers(1, max_pp),
        "mp": st.integers(1, max_mp),
        "micro_batches": st.integers(1, max_micro_batches),
        "layers": st.integers(1, max_layers),
        "schedule": st.sampled_from(["1F1B", "FThenB"]),
        "seed": st.integers(0, 2**16),
        "dp": st.integers(1, max_dp),
        **{name: st.booleans() for name in ("streams", "pairs", "offload", "hoist", "cut", "masks", "gather")},
    }
    return st.builds(World, **{**drawn, **{name: st.just(value) for name, value in fixed.items()}})


def random_world(seed: int, **fixed: Any) -> World:
    """A world drawn from a seed, for loops without hypothesis."""
    rng = random.Random(seed)
    drawn = {
        "pp": rng.choice([1, 2, 2, 3]),
        "mp": rng.choice([1, 2]),
        "micro_batches": rng.randint(1, 4),
        "layers": rng.randint(1, 2),
        "schedule": rng.choice(["1F1B", "1F1B", "FThenB"]),
        "seed": seed,
        **{name: rng.random() < 0.7 for name in ("streams", "pairs", "offload", "hoist", "cut")},
        "masks": rng.random() < 0.3,
        "gather": rng.random() < 0.3,
        "dp": rng.choice([1, 1, 1, 2]),
    }
    return World(**{**drawn, **fixed})


# --------------------------------------------------------------------------------------------------------------- programs


@dataclass(slots=True)
class Builder:
    """Collects operations and values."""

    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    role: Role = "forward"
    layer: str = ""
    chunk: int = 0

    def value(self, kind: TensorType, storage: int = -1, **more: Any) -> int:
        """A new value; gives its id."""
        number = len(self.values)
        self.values.append(Value(number, kind.shape, kind.dtype, number if storage < 0 else storage, **more))
        return number

    def vector(self, kinds: Iterable[TensorType]) -> int:
        """A new vector of tensors."""
        return self.value(TensorType((), "vector"), elements=tuple(kinds))

    def op(self, name: str, operands: Iterable[int] = (), results: Iterable[TensorType] = (), **more: Any) -> list[int]:
        """A new operation; gives the ids of its results. `inplace` and `views` results share their operand's storage."""
        operands = tuple(operands)
        shared = {r: o for pairs in (more.get("inplace", ()), more.get("views", ())) for r, o in pairs}
        made = [
            self.value(
                kind,
                self.values[operands[shared[k]]].storage if k in shared else -1,
                persistable=k in shared and self.values[operands[shared[k]]].persistable,
            )
            for k, kind in enumerate(results)
        ]
        return self.raw(name, operands, made, **more)

    def raw(self, name: str, operands: Iterable[int], results: Iterable[int], **more: Any) -> list[int]:
        """A new operation on values that exist already."""
        results = tuple(results)
        self.ops.append(Op(len(self.ops), name, tuple(operands), results, self.role, layer=self.layer, chunk=self.chunk, **more))
        return list(results)

    def named(self, name: str, kind: TensorType, label: str, persistable: bool = False) -> int:
        """A parameter or an input."""
        return self.raw(name, (), [self.value(kind, name=label, persistable=persistable)])[0]


def groups(world: World, rank: int) -> dict[str, Group]:
    """Groups of a rank by purpose; each direction between two stages has a group (ring) of its own.

    Rank = (stage * dp + replica) * mp + place in the tensor-parallel group.
    """
    stage, lane = divmod(rank, world.stage_ranks)
    replica, place = divmod(lane, world.mp)
    found = {}
    if world.mp > 1:
        found["mp"] = Group(10 + stage * world.dp + replica, tuple(rank - place + k for k in range(world.mp)))
    if world.dp > 1:
        found["dp"] = Group(50 + stage * world.mp + place, tuple(stage * world.stage_ranks + r * world.mp + place for r in range(world.dp)))
    for s in (stage - 1, stage):
        if 0 <= s < world.pp - 1:
            side = "prev" if s < stage else "next"
            pair = (s * world.stage_ranks + lane, (s + 1) * world.stage_ranks + lane)
            found[f"act_{side}"] = Group(100 + 2 * pair[0], pair)
            found[f"grad_{side}"] = Group(101 + 2 * pair[0], pair)
    if world.chunks > 1 and stage in (0, world.pp - 1):
        pair = ((world.pp - 1) * world.stage_ranks + lane, lane)
        side = "prev" if stage == 0 else "next"
        found |= {f"act_{side}": Group(1000 + lane, pair), f"grad_{side}": Group(2000 + lane, pair)}
    return found


class Stage:
    """Builds one rank's program; ranks of one stage get the same operations."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.stage = world, rank, rank // world.stage_ranks
        self.rng = random.Random(world.seed * 1009 + self.stage)
        self.groups = groups(world, rank)
        self.build = Builder()
        self.saved: list[dict[str, int]] = []
        self.mask = -1

    def is_first(self) -> bool:
        """Whether the model starts with what is being built."""
        return self.stage == self.build.chunk == 0

    def is_last(self) -> bool:
        """Whether the model ends with what is being built."""
        return (self.stage, self.build.chunk) == (self.world.pp - 1, self.world.chunks - 1)

    def program(self) -> Program:
        """Forward, backward, optimizer."""
        layers, chunks = self.world.layers, range(self.world.chunks)
        names = [(f"w{k}", f"g{k}") for k in range(layers * self.world.chunks)]
        weights = [self.build.named("builtin.parameter", SQUARE, w, True) for w, _ in names]
        buffers = [self.build.named("builtin.parameter", SQUARE, g, True) for _, g in names]
        outputs = []
        for self.build.chunk in chunks:
            mine = slice(self.build.chunk * layers, (self.build.chunk + 1) * layers)
            outputs.append(self.forward(weights[mine]))
        self.build.role = "backward"
        for self.build.chunk in reversed(chunks):
            mine = slice(self.build.chunk * layers, (self.build.chunk + 1) * layers)
            self.backward(weights[mine], buffers[mine], outputs[self.build.chunk], self.saved[mine])
        self.build.role, self.build.chunk = "optimize", 0
        self.optimizer(weights, buffers)
        world = self.world
        pipe = Pipeline(self.stage, world.pp, world.micro_batches, world.chunks, world.schedule)
        return Program(
            tuple(self.build.ops), tuple(self.build.values), tuple(self.groups.values()), pipe, self.rank, world.pp * world.stage_ranks
        )

    def comm(self, name: str, purpose: str, operands: list[int], results: list[TensorType], **attrs: Any) -> list[int]:
        """A communication operation, on its ring's own stream where the world wants streams."""
        group = self.groups[purpose].id
        inplace = ((0, 0),) if name.endswith("_") else ()
        apart = self.world.streams or (name.endswith("send_v2") and self.world.schedule in ("1F1B", "VPP"))
        stream = f"{purpose}_{group}" if apart else ""
        return self.build.op(name, operands, results, group=group, stream=stream, inplace=inplace, attrs=attrs)

    def forward(self, weights: list[int]) -> int:
        """The stage's forward; gives its output."""
        if self.world.masks:
            self.mask = self.build.named("pd_op.data", ROW, "mask") if self.is_first() else self.received()
            if not self.is_last():
                self.comm("pd_op.send_v2", "act_next", [self.mask], [], peer=1)
        x = self.build.named("pd_op.data", ROW, "x") if self.is_first() else self.received()
        for k, weight in enumerate(weights):
            self.build.layer = self.layer(k)
            x = self.forward_layer(x, weight)
        self.build.layer = "head"
        if not self.is_last():
            self.comm("pd_op.send_v2", "act_next", [x], [], peer=1)
        else:
            loss = self.gathered_loss(x) if self.world.gather else self.build.op("pd_op.mean", [x], [TensorType((1,), "float32")])[0]
            self.build.raw("builtin.shadow_output", [loss], [], attrs={"output_name": "loss"})
        return x

    def layer(self, number: int) -> str:
        """Name of a layer of the chunk that is being built."""
        return f"layers.{(self.build.chunk * self.world.pp + self.stage) * self.world.layers + number}"

    def received(self) -> int:
        """What the stage before sends."""
        return self.comm("pd_op.recv_v2", "act_prev", [], [ROW], peer=0)[0]

    def gathered_loss(self, x: int) -> int:
        """Losses of tokens, gathered over the replicas behind a mask of those above zero, in random forms."""
        op, rng, purpose = self.build.op, self.rng, "dp" if "dp" in self.groups else "mp"
        one, token = TensorType((1,), "float32"), TensorType((2, 1), "float32")
        losses = op("pd_op.cross_entropy_with_softmax", [x], [token])[0]
        if purpose not in self.groups:
            return op("pd_op.mean", [losses], [one])[0]
        every = TensorType((2 * len(self.groups[purpose].ranks), 1), "float32")
        gather = lambda value: self.comm("pd_op.all_gather", purpose, [value], [every])[0]  # noqa: E731
        late = rng.random() < 0.5
        above = op("pd_op.greater_than", [losses], [token])[0] if not late else -1
        gathered = gather(losses)
        above = op("pd_op.greater_than", [losses], [token])[0] if late else above
        chosen = op("pd_op.masked_select", [gathered, gather(above)], [every])[0] if rng.random() < 0.7 else above
        loss = op("pd_op.mean", [chosen], [one])[0]
        if rng.random() < 0.5:
            loss = self.comm(rng.choice(["pd_op.all_reduce", "pd_op.all_reduce_"]), purpose, [loss], [one], reduce_type=0)[0]
        return loss

    def forward_layer(self, x: int, weight: int) -> int:
        """matmul, all_reduce, a view, an activation, vectors, a residual add, in random forms."""
        op, rng = self.build.op, self.rng
        h = op("pd_op.matmul", [x, weight], [ROW])[0]
        if self.mask >= 0:
            h = op("pd_op.multiply", [h, self.mask], [ROW])[0]
        if "mp" in self.groups:
            h = self.comm(rng.choice(["pd_op.all_reduce", "pd_op.all_reduce_"]), "mp", [h], [ROW], reduce_type=0)[0]
        if rng.random() < 0.4:
            h = op("pd_op.reshape", [h], [TensorType((4, 2), "float32")], views=((0, 0),))[0]
            h = op("pd_op.reshape", [h], [ROW], views=((0, 0),))[0]
        inplace = rng.random() < 0.3
        a = op("pd_op.relu_" if inplace else "pd_op.gelu", [h], [ROW], inplace=((0, 0),) if inplace else ())[0]
        if self.world.dropout and rng.random() < 0.5:
            a = op("pd_op.dropout", [a], [ROW])[0]
        if rng.random() < 0.4:
            a = self.through_vectors(a)
        y = op("pd_op.add", [x, a], [ROW])[0]
        self.saved.append({"x": x, "h": a if inplace else h, "a": a})
        return y

    def through_vectors(self, a: int) -> int:
        """Split in two, take apart, put together again."""
        half = TensorType((2, 2), "float32")
        vector = self.build.vector([half, half])
        self.build.raw("pd_op.split_with_num", [a], [vector], attrs={"axis": 1, "num": 2})
        left, right = self.build.op("builtin.split", [vector], [half, half])
        joined = self.build.vector([half, half])
        self.build.raw("builtin.combine", [left, right], [joined])
        return self.build.op("pd_op.concat", [joined], [ROW], attrs={"axis": 1})[0]

    def backward(self, weights: list[int], buffers: list[int], out: int, saved: list[dict[str, int]]) -> None:
        """A chunk's backward: activations' gradients, weights' gradients, accumulation."""
        self.build.layer = "head"
        if self.is_last():
            g = self.build.op("pd_op.mean_grad", [out], [ROW], no_buffer=(0,))[0]
        else:
            g = self.comm("pd_op.recv_v2", "grad_next", [], [ROW], peer=1)[0]
        for k in reversed(range(self.world.layers)):
            self.build.layer = self.layer(k)
            g = self.backward_layer(g, weights[k], buffers[k], saved[k])
        self.build.layer = "head"
        if not self.is_first():
            self.comm("pd_op.send_v2", "grad_prev", [g], [], peer=0)

    def backward_layer(self, g: int, weight: int, buffer: int, saved: dict[str, int]) -> int:
        """add_grad, gelu_grad, matmul_grad, all_reduce, accumulation, add_n, in random forms."""
        op, rng = self.build.op, self.rng
        ga = g
        if rng.random() < 0.4:
            ga = op("pd_op.add_grad", [saved["x"], saved["a"], g], [ROW], no_buffer=(0, 1))[0]
        gh = op("pd_op.gelu_grad", [saved["h"], ga], [ROW])[0]
        dx, dw = op("pd_op.matmul_grad", [saved["x"], weight, gh], [ROW, SQUARE])
        if "mp" in self.groups:
            dx = self.comm(rng.choice(["pd_op.all_reduce", "pd_op.all_reduce_"]), "mp", [dx], [ROW], reduce_type=0)[0]
        op("pd_op.add_", [buffer, dw], [SQUARE], inplace=((0, 0),))
        if rng.random() < 0.5:
            vector = self.build.vector([ROW, ROW])
            self.build.raw("builtin.combine", [dx, g], [vector])
            return op("pd_op.add_n", [vector], [ROW])[0]
        return op("pd_op.add", [dx, g], [ROW])[0]

    def optimizer(self, weights: list[int], buffers: list[int]) -> None:
        """A norm over the tensor-parallel group, then in-place updates."""
        op = self.build.op
        self.build.layer = "optimizer"
        norm = op("pd_op.squared_l2_norm", [buffers[0]], [TensorType((1,), "float32")])[0]
        if "mp" in self.groups:
            norm = self.comm("pd_op.all_reduce_", "mp", [norm], [TensorType((1,), "float32")], reduce_type=0)[0]
        for weight, buffer in zip(weights, buffers, strict=True):
            op("pd_op.sgd_", [weight, norm, buffer], [SQUARE], inplace=((0, 0),))
            op("pd_op.scale_", [buffer], [SQUARE], inplace=((0, 0),), attrs={"scale": 0})


def programs(world: World) -> list[Program]:
    """The programs of all ranks, without jobs."""
    return [Stage(world, rank).program() for rank in range(world.pp * world.stage_ranks)]


# ------------------------------------------------------------------------------------------------------------------ plans


def plan(world: World) -> list[Program]:
    """The programs of all ranks with jobs, streams, copies and events: safe on a GPU, free of deadlock."""
    planned = []
    for program in programs(world):
        rng = random.Random(world.seed * 7919 + program.pipeline.stage)
        program, absent = offload(program, rng) if world.offload else (program, set())
        jobs = cut(schedule(program, world, rng, absent), program, world, rng)
        jobs = hoist(jobs, program, rng) if world.hoist else jobs
        planned.append(with_events(msgspec.structs.replace(program, jobs=tuple(jobs))))
    return planned


def offload(program: Program, rng: random.Random) -> tuple[Program, set[Item]]:
    """Copies out and back for some saved activations; also the items of micro-batches that keep theirs on the device."""
    graph = Graph(program)
    made, values, absent = list(program.ops), list(program.values), set()
    for value in program.values:
        if rng.random() < 0.3 or not _movable(graph, value):
            continue
        last = max(graph.position[op.id] for op in [*graph.user_ops(value.id), graph.ops[graph.producer[value.id]]] if op.role == "forward")
        first = min(graph.position[op.id] for op in _content_readers(graph, value) if op.role == "backward")
        out, back = len(values), len(values) + 1
        values += [Value(out, value.shape, value.dtype, out, memory="pinned"), Value(back, value.shape, value.dtype, back)]
        d2h = Op(
            len(made),
            "pd_op.memcpy",
            (value.id,),
            (out,),
            "forward",
            attrs={"dst_place_type": 2},
            layer=program.ops[last].layer,
            stream="d2h",
        )
        h2d = Op(len(made) + 1, "pd_op.memcpy_h2d", (out,), (back,), "backward", layer=program.ops[first].layer, stream="h2d")
        made = [_reading(op, value.id, back) if op.role == "backward" else op for op in made] + [d2h, h2d]
        keep = {m for m in range(program.pipeline.num_micro_batches) if rng.random() < 0.4}
        absent |= {(op.id, m) for op in (d2h, h2d) for m in keep}
    return program.with_ops(_placed(made, values), values), absent


def _movable(graph: Graph, value: Value) -> bool:
    producer = graph.producer_op(value.id)
    return (
        value.dtype == "float32"
        and not value.persistable
        and len(graph.storages.of(value.id)[0].values) == 1
        and producer is not None
        and producer.name not in BOUNDARY
        and producer.role == "forward"
        and producer.name != "builtin.split"
        and any(op.role == "backward" for op in _content_readers(graph, value))
        and all(op.name != "builtin.combine" for op in graph.user_ops(value.id))
    )


def _content_readers(graph: Graph, value: Value) -> list[Op]:
    return [op for op in graph.user_ops(value.id) if value.id in graph.reads(op)]


def _reading(op: Op, old: int, new: int) -> Op:
    """The operation with another content operand; shapes are still taken from the old one."""
    operands = tuple(new if v == old and k not in op.no_buffer else v for k, v in enumerate(op.operands))
    return msgspec.structs.replace(op, operands=operands)


def _placed(ops: list[Op], values: list[Value]) -> list[Op]:
    """Copies out behind their last forward reader, copies in before their first reader; the rest stays."""
    copies = [op for op in ops if op.name in ("pd_op.memcpy", "pd_op.memcpy_h2d")]
    order = [op for op in ops if op not in copies]
    for copy in copies:
        if copy.name == "pd_op.memcpy":
            users = [k for k, op in enumerate(order) if op.role == "forward" and {*op.operands, *op.results} & set(copy.operands)]
            order.insert(users[-1] + 1, copy)
        else:
            order.insert(min(k for k, op in enumerate(order) if copy.results[0] in op.operands), copy)
    return order


def schedule(program: Program, world: World, rng: random.Random, absent: set[Item]) -> list[Job]:
    """Jobs of FThenB or 1F1B; with `pairs` a steady backward and the forward after it are one job, mixed op by op."""

    def items(role: str, m: int) -> list[Item]:
        return [(op.id, m) for op in program.ops if op.role == role and not is_boundary(op) and (op.id, m) not in absent]

    count = world.micro_batches
    warm = count if world.schedule == "FThenB" else min(world.pp - program.pipeline.stage, count)
    jobs = [Job(f"forward_{m}", "forward", m, tuple(items("forward", m))) for m in range(warm)]
    for m in range(count):
        ahead = m + warm
        if ahead < count and world.pairs:
            mixed = _mix(items("backward", m), items("forward", ahead), rng)
            jobs.append(Job(f"pair_{m}", "pair", m, tuple(mixed)))
            continue
        jobs.append(Job(f"backward_{m}", "backward", m, tuple(items("backward", m))))
        if ahead < count:
            jobs.append(Job(f"forward_{ahead}", "forward", ahead, tuple(items("forward", ahead))))
    return [*jobs, Job("optimizer", "optimizer", 0, tuple(items("optimize", 0)))]


def _mix(left: list[Item], right: list[Item], rng: random.Random) -> list[Item]:
    """Two sequences merged at random, each in its own order."""
    picks = [0] * len(left) + [1] * len(right)
    rng.shuffle(picks)
    sides = (iter(left), iter(right))
    return [next(sides[side]) for side in picks]


def cut(jobs: list[Job], program: Program, world: World, rng: random.Random) -> list[Job]:
    """Some jobs in two, never between a vector and its reader."""
    made = []
    for job in jobs:
        places = [k for k in range(1, len(job.items)) if not _crosses_vector(program, job, k)]
        if not world.cut or not places or rng.random() < 0.5:
            made.append(job)
            continue
        k = rng.choice(places)
        made += [
            msgspec.structs.replace(job, name=f"{job.name}_{part}", items=items)
            for part, items in (("a", job.items[:k]), ("b", job.items[k:]))
        ]
    return made


def _crosses_vector(program: Program, job: Job, place: int) -> bool:
    values = {value.id: value for value in program.values}
    ops = {op.id: op for op in program.ops}
    made = {(v, m) for op, m in job.items[:place] for v in ops[op].results if values[v].dtype == "vector"}
    split = {(v, m) for op, m in job.items[:place] if ops[op].name == "builtin.split" for v in ops[op].results}
    return any((v, m) in made | split for op, m in job.items[place:] for v in ops[op].operands)


def hoist(jobs: list[Job], program: Program, rng: random.Random) -> list[Job]:
    """Some leading receives and copies in go to the end of the job before, with their order kept."""
    ops = {op.id: op for op in program.ops}
    lists = [list(job.items) for job in jobs]
    for k in range(1, len(jobs)):
        inside = set(lists[k - 1])
        for item in [i for i in lists[k] if ops[i[0]].kind in ("recv_v2", "memcpy_h2d") and ops[i[0]].stream]:
            made_there = {v for op, m in inside if m == item[1] for v in ops[op].results}
            earlier = lists[k][: lists[k].index(item)]
            same_ring = any(ops[op].stream == ops[item[0]].stream for op, _ in earlier)
            made_here = {v for op, m in earlier if m == item[1] for v in ops[op].results}
            if rng.random() < 0.5 and not same_ring and not made_there | made_here & set(ops[item[0]].operands):
                lists[k].remove(item)
                lists[k - 1].append(item)
    return [msgspec.structs.replace(job, items=tuple(items)) for job, items in zip(jobs, lists, strict=True)]


def with_events(program: Program) -> Program:
    """Events for every order between jobs that streams do not give, the first sufficient one each; then for frees."""
    closure = None
    for _ in range(10_000):
        closure = Closure(program, closure)
        races = [(a, b) for a, b, _ in closure.races() if b < closure.count]
        wanted = races or [(use, last) for use, last in closure.freed_early()]
        if not wanted:
            return program
        record, wait = min(wanted, key=lambda pair: (pair[1], -pair[0]))
        record = closure.num_fed - 1 if record < closure.num_fed else record
        program = with_event(program, closure.items[record], closure.items[wait])
    raise AssertionError("no set of events orders this plan")


def with_event(program: Program, record: Item, wait: Item) -> Program:
    """One event more; an item records at most one."""
    known = {event.record: event for event in program.events}
    old = known.get(record, Event(f"e{len(known)}", record, ()))
    known[record] = msgspec.structs.replace(old, waits=(*old.waits, wait))
    return msgspec.structs.replace(program, events=tuple(known.values()))
