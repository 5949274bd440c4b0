"""Small models unlike a transformer, for `interlace run`: `zoo.py KINDS [--pp N] [--micro-batches N] [--optimizer NAME] ...`.

KINDS, joined by commas: `conv` (a network of convolutions, else blocks of linear layers), `norm` (batch norm that trains its
running statistics), `frozen` (batch norm on global statistics), `branch` (a conditional with gradient), `tied` (the embedding is
the head too), `skip` (a value goes past a stage), `table` (the first stage gives all others a table, as a mask or positions), `beside`
(each stage hands it on to the next beside the activation, from an operation of its own), `placed` (blocks hold a table that was put
on their stage before any program), `dropout`, `fractional` (with `conv`: regions that are pooled are drawn).
"""

from __future__ import annotations

import argparse
import contextlib

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.nn import functional

import interlace

HIDDEN, WORDS, LENGTH, STEPS = 16, 20, 4, 3
HERE, EVERYWHERE = [dist.Replicate(), dist.Replicate()], [dist.Shard(0), dist.Replicate()]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds")
    for name, default in {"pp": 1, "dp": 1, "mp": 1, "micro_batches": 4, "rows": 2, "vpp": 1}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--layers", type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--predict", action="store_true", help="try to predict after the first step")
    return parser.parse_args()


def placed(layer: nn.Layer, mesh: dist.ProcessMesh, **split: int) -> nn.Layer:
    """The layer with all it holds on one stage; `split` names the dimension in which a parameter is cut over `mp`."""
    for each in layer.sublayers(include_self=True):
        for name, parameter in list(each.named_parameters(include_sublayers=False)):
            over = dist.Shard(split[name]) if name in split else dist.Replicate()
            setattr(each, name, dist.shard_tensor(parameter, mesh, [dist.Replicate(), over]))
        for name, buffer in list(each.named_buffers(include_sublayers=False)):
            each._buffers[name] = dist.shard_tensor(buffer, mesh, HERE, stop_gradient=True)
    return layer


class Block(nn.Layer):
    """Norm, two linear layers, residual."""

    def __init__(self, kinds: set[str], mesh: dist.ProcessMesh) -> None:
        super().__init__()
        self.mesh, self.hands_on, self.has_table = mesh, "beside" in kinds, "placed" in kinds
        batch_norm = {"norm", "frozen"} & kinds
        self.norm = placed(nn.BatchNorm1D(HIDDEN, use_global_stats="frozen" in kinds or None) if batch_norm else nn.LayerNorm(HIDDEN), mesh)
        self.turn = [0, 2, 1] if batch_norm else [0, 1, 2]
        self.up = placed(nn.Linear(HIDDEN, 2 * HIDDEN), mesh, weight=1, bias=0)
        self.down = placed(nn.Linear(2 * HIDDEN, HIDDEN), mesh, weight=0)
        self.dropout = nn.Dropout(0.1 if "dropout" in kinds else 0.0)

    def forward(self, x: paddle.Tensor, table: paddle.Tensor | None = None) -> paddle.Tensor | tuple[paddle.Tensor, paddle.Tensor]:
        x = x * self.positions if self.has_table else x
        y = self.norm((x if table is None else x * table).transpose(self.turn)).transpose(self.turn)
        y = dist.reshard(self.down(functional.gelu(self.up(y))), self.mesh, EVERYWHERE)
        return (x + self.dropout(y), table * 1.0) if self.hands_on else x + self.dropout(y)


class Words(nn.Layer):
    """Embedding, blocks over the stages, head."""

    def __init__(self, args: argparse.Namespace, meshes: list[dist.ProcessMesh]) -> None:
        super().__init__()
        self.kinds, self.meshes = set(args.kinds.split(",")), meshes
        layers = args.layers or [1] * len(meshes) * args.vpp
        self.stages = [stage % len(meshes) for stage, count in enumerate(layers) for _ in range(count)]
        self.embedding = placed(nn.Embedding(WORDS, HIDDEN), meshes[0])
        self.blocks = nn.LayerList([Block(self.kinds, meshes[stage]) for stage in self.stages])
        self.head = placed(nn.Linear(HIDDEN, WORDS), meshes[-1])
        if "placed" in self.kinds:
            world = dist.auto_parallel.get_mesh()
            table = dist.shard_tensor(paddle.linspace(0.5, 1.5, LENGTH).reshape([1, LENGTH, 1]), world, [dist.Replicate()] * 3)
            tables = [dist.reshard(table, mesh, HERE) for mesh in meshes]
            for stage, block in zip(self.stages, self.blocks, strict=True):
                block.register_buffer("positions", tables[stage], persistable=False)

    def forward(self, words: paddle.Tensor) -> paddle.Tensor:
        h = first = self.embedding(words)
        table = (words > 3).astype("float32").unsqueeze(-1) + 0.5 if {"table", "beside"} & self.kinds else None
        tables = {0: table}
        for place, block in enumerate(self.blocks):
            stage, before = self.stages[place], self.stages[max(0, place - 1)]
            if stage != before and table is not None and ("beside" in self.kinds or stage not in tables):
                tables[stage] = dist.reshard(table, self.meshes[stage], EVERYWHERE)
            h = block(h if stage == before else dist.reshard(h, self.meshes[stage], EVERYWHERE), tables.get(stage))
            if "beside" in self.kinds:
                h, table = h
        last = self.meshes[-1]
        if "skip" in self.kinds:
            h = h + dist.reshard(first, last, EVERYWHERE)
        if "branch" in self.kinds:
            h = paddle.static.nn.cond(h.mean() > 0, lambda: functional.tanh(h) * 2.0, lambda: h * 0.5)
        out = self.head(h)
        return out + paddle.matmul(h, dist.reshard(self.embedding.weight, last, HERE), transpose_y=True) if "tied" in self.kinds else out


class Pictures(nn.Layer):
    """Convolutions, batch norm and pooling over one or two stages."""

    def __init__(self, args: argparse.Namespace, meshes: list[dist.ProcessMesh]) -> None:
        super().__init__()
        self.last = meshes[-1]
        self.pool = nn.FractionalMaxPool2D(5) if "fractional" in args.kinds.split(",") else nn.MaxPool2D(2)
        self.first, self.norm = placed(nn.Conv2D(3, 8, 3, padding=1), meshes[0]), placed(nn.BatchNorm2D(8), meshes[0])
        self.second, self.head = placed(nn.Conv2D(8, 8, 3, padding=1), meshes[-1]), placed(nn.Linear(8, WORDS), meshes[-1])

    def forward(self, pictures: paddle.Tensor) -> paddle.Tensor:
        h = self.pool(functional.relu(self.norm(self.first(pictures))))
        h = functional.relu(self.second(dist.reshard(h, self.last, EVERYWHERE)))
        return self.head(functional.adaptive_avg_pool2d(h, 1).flatten(1))


def loss(out: paddle.Tensor, wanted: paddle.Tensor) -> paddle.Tensor:
    """Mean cross entropy of all words or pictures."""
    return functional.cross_entropy(out.reshape([-1, WORDS]), wanted.reshape([-1]))


class Data(paddle.io.Dataset):
    """Seeded noise."""

    def __init__(self, pictures: bool, count: int) -> None:
        random = np.random.default_rng(3)
        shape = (count,) if pictures else (count, LENGTH)
        self.inputs = random.standard_normal((count, 3, 8, 8)).astype("float32") if pictures else random.integers(0, WORDS, shape)
        self.labels = random.integers(0, WORDS, shape)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        return self.inputs[place], np.asarray(self.labels[place])


def main() -> None:
    args = parse()
    kinds = set(args.kinds.split(","))
    paddle.seed(7)
    ranks = np.arange(args.pp * args.dp * args.mp).reshape(args.pp, args.dp, args.mp)
    dist.auto_parallel.set_mesh(dist.ProcessMesh(ranks, dim_names=["pp", "dp", "mp"]))
    meshes = [dist.ProcessMesh(stage, dim_names=["dp", "mp"]) for stage in ranks]
    layer = (Pictures if "conv" in kinds else Words)(args, meshes)
    rate = paddle.optimizer.lr.LinearWarmup(paddle.optimizer.lr.StepDecay(0.05, 1, 0.5), 2, 0.01, 0.05)
    optimizer = getattr(paddle.optimizer, args.optimizer)(rate, parameters=layer.parameters(), grad_clip=nn.ClipGradByGlobalNorm(1.0))
    strategy = dist.Strategy()
    pipeline = strategy.pipeline
    pipeline.enable, pipeline.schedule_mode, pipeline.pp_degree = True, args.schedule, args.pp
    pipeline.accumulate_steps, pipeline.micro_batch_size = args.micro_batches, args.rows
    if args.vpp > 1:
        pipeline.vpp_degree, pipeline.vpp_seg_method = args.vpp, "Block"
    interlace.enable(strategy)
    rows = args.micro_batches * args.rows * args.dp
    loader = paddle.io.DataLoader(Data("conv" in kinds, rows * STEPS), batch_size=rows, drop_last=True)
    sharded = dist.shard_dataloader(loader, meshes=[meshes[0], meshes[-1]], shard_dims="dp")
    model = dist.to_static(layer, sharded, loss, optimizer, strategy)
    model.train()
    for step, batch in enumerate(sharded()):
        model(*batch)
        rate.step()
        if args.predict and step == 0:
            with contextlib.suppress(AssertionError, KeyError):  # what Paddle 3.3.1 raises there, by schedule
                model.predict()
                model(*batch)
            model.train()


main()
