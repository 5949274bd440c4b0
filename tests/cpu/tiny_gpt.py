"""A training script for tests: a GPT of small blocks, built and trained by Paddle's static auto-parallel."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import nn

HIDDEN, HEADS, VOCABULARY, SEQUENCE, BATCH = 16, 2, 32, 4, 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("--dp", "--mp", "--pp", "--vpp", "--micro-batches"):
        parser.add_argument(name, type=int, default=1)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--schedule", default="")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--sharding", action="store_true", help="optimizer states sharded over dp, fused")
    parser.add_argument("--no-clip", action="store_true", help="no clipping of gradients")
    parser.add_argument("--eval", action="store_true", help="one step of evaluation between training steps")
    return parser.parse_args()


class Layout:
    """The meshes of all stages and where parameters and activations lie on them."""

    def __init__(self, args: argparse.Namespace) -> None:
        degrees = {"pp": args.pp, "dp": args.dp, "mp": args.mp}
        names = [name for name, degree in degrees.items() if degree > 1] or ["pp"]
        self.world = dist.ProcessMesh(np.arange(args.pp * args.dp * args.mp).reshape([degrees[n] for n in names]), names)
        self.axes = [name for name in names if name != "pp"] or ["x"]
        shape = [degrees.get(name, 1) for name in self.axes]
        ranks = np.arange(args.pp * args.dp * args.mp).reshape(args.pp, -1)
        self.stages = [dist.ProcessMesh(row.reshape(shape), self.axes) for row in ranks]
        blocks_a_chunk = args.layers // (args.pp * args.vpp)
        self.stage_of = [index // blocks_a_chunk % args.pp for index in range(args.layers)]

    def place(self, parameter: Any, stage: int, split_dim: int | None = None) -> Any:
        placements = [dist.Shard(split_dim) if a == "mp" and split_dim is not None else dist.Replicate() for a in self.axes]
        return dist.shard_tensor(parameter, self.stages[stage], placements)

    def activation(self) -> list[Any]:
        return [dist.Shard(0) if axis == "dp" else dist.Replicate() for axis in self.axes]


class Block(nn.Layer):  # type: ignore[misc]
    def __init__(self, layout: Layout, stage: int) -> None:
        super().__init__()
        self.norms = nn.LayerList([nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)])
        self.query, self.key, self.value, self.out = (nn.Linear(HIDDEN, HIDDEN, bias_attr=False) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        for linear in (self.query, self.key, self.value, self.up):
            linear.weight = layout.place(linear.weight, stage, 1)
        for linear in (self.out, self.down):
            linear.weight = layout.place(linear.weight, stage, 0)
        self.up.bias, self.down.bias = layout.place(self.up.bias, stage, 0), layout.place(self.down.bias, stage)
        for norm in self.norms:
            norm.weight, norm.bias = layout.place(norm.weight, stage), layout.place(norm.bias, stage)

    def forward(self, x: Any) -> Any:
        batch, length, _ = x.shape
        y = self.norms[0](x)
        heads = [batch, length, HEADS, HIDDEN // HEADS]
        q, k, v = (part(y).reshape(heads).transpose([0, 2, 1, 3]) for part in (self.query, self.key, self.value))
        scores = F.softmax(paddle.matmul(q, k, transpose_y=True) * 0.3, axis=-1)
        mixed = paddle.matmul(scores, v).transpose([0, 2, 1, 3]).reshape([batch, length, HIDDEN])
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class TinyGPT(nn.Layer):  # type: ignore[misc]
    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.embedding.weight = layout.place(self.embedding.weight, 0)
        self.blocks = nn.LayerList([Block(layout, stage) for stage in layout.stage_of])
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias_attr=False)
        self.head.weight = layout.place(self.head.weight, len(layout.stages) - 1)

    def forward(self, tokens: Any) -> Any:
        x, at = self.embedding(tokens), 0
        for stage, block in zip(self.layout.stage_of, self.blocks):  # noqa: B905 - Paddle's transcriber knows no strict
            if stage != at:
                x, at = dist.reshard(x, self.layout.stages[stage], self.layout.activation()), stage
            x = block(x)
        return self.head(x)


class Loss(nn.Layer):  # type: ignore[misc]
    def forward(self, logits: Any, labels: Any) -> Any:
        return F.cross_entropy(logits, labels.unsqueeze(-1), reduction="none").mean()


class Tokens(paddle.io.Dataset):  # type: ignore[misc]
    def __init__(self) -> None:
        self.data = np.random.default_rng(1).integers(0, VOCABULARY, (64, 2, SEQUENCE))

    def __getitem__(self, index: int) -> Any:
        return self.data[index][0], self.data[index][1]

    def __len__(self) -> int:
        return len(self.data)


def strategy_of(args: argparse.Namespace) -> Any:
    strategy = dist.Strategy()
    if args.schedule:
        pipeline = strategy.pipeline
        pipeline.enable, pipeline.schedule_mode = True, args.schedule
        pipeline.micro_batch_size, pipeline.accumulate_steps = BATCH // args.micro_batches, args.micro_batches
        pipeline.pp_degree, pipeline.vpp_degree, pipeline.vpp_seg_method = args.pp, args.vpp, "Block"
    elif args.micro_batches > 1:
        merge = strategy.gradient_merge
        merge.enable, merge.k_steps, merge.avg = True, args.micro_batches, True
    if args.sharding:
        strategy._sharding.enable_tensor_fusion = True
    return strategy


def main() -> None:
    args = arguments()
    paddle.seed(3)
    layout = Layout(args)
    dist.auto_parallel.set_mesh(layout.world)
    model = TinyGPT(layout)
    clip = None if args.no_clip else nn.ClipGradByGlobalNorm(1.0)
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters(), grad_clip=clip)
    optimizer = dist.shard_optimizer(optimizer, dist.ShardingStage1("dp", layout.world) if args.sharding else None)
    sampler = paddle.io.BatchSampler(Tokens(), batch_size=BATCH, drop_last=True)
    meshes = [layout.stages[0], layout.stages[-1]] if args.pp > 1 else layout.stages[0]
    loader = dist.shard_dataloader(paddle.io.DataLoader(Tokens(), batch_sampler=sampler), meshes, shard_dims="dp" if args.dp > 1 else None)
    trained = dist.to_static(model, loader, Loss(), optimizer, strategy=strategy_of(args))
    trained.train()
    for step, (tokens, labels) in enumerate(loader()):
        if step == args.steps:
            break
        print("loss", trained(tokens, labels), flush=True)
        if args.eval and step == 0:
            trained.eval()
            trained(tokens, labels)
            trained.train()


if __name__ == "__main__":
    main()
