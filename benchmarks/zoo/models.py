"""Networks of the zoo at any size, trained under `dist.to_static`; `interlace dump` builds their programs without parameters.

    interlace dump benchmarks/zoo/models.py --world 2 --stages -- KIND --pp 2 [options]

KIND:
    decoder           causal blocks with grouped queries and SwiGLU (a language model)
    bert              blocks that attend to all tokens, norms after the residual sums, dropout; token and segment embeddings
    encoder-decoder   an encoder on the first half of the stages; on the others a decoder, each block of which reads its result (T5)
    vision            patches of images by a convolution, blocks that attend to all patches, their mean, classes (ViT)
    diffusion         patches of latents, blocks modulated by an embedded time, mean squared error (DiT)
    parallel          attention and MLP of a block in parallel, after one norm (GPT-J)
    convolution       residual blocks of convolutions, with images halved in size between stages (ResNet)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import common

import interlace

KINDS = ("decoder", "bert", "encoder-decoder", "vision", "diffusion", "parallel", "convolution")
PATCH = 2
"""Side of a patch of latents; that of images is 16."""
CHANNELS, TIMES = 4, 256
SEQUENCE_FIRST = {"blocks.*.attention": dist.SequenceParallelDisable(), "blocks.*.mlp": dist.SequenceParallelDisable()}


# Placement of tensors -----------------------------------------------------------------------------------------


class Unplaced(common.Stage):
    """A stage of a model written for one device, which `dist.parallelize` places afterwards."""

    def parameter(self, tensor: paddle.Tensor, over_mp: dist.Placement | None = None) -> paddle.Tensor:
        return tensor

    def between_blocks(self, x: paddle.Tensor) -> paddle.Tensor:
        return x

    def whole(self, x: paddle.Tensor) -> paddle.Tensor:
        return x

    def batch_first(self, x: paddle.Tensor) -> paddle.Tensor:
        return x

    over_replicas = per_sequence = batch_first

    def over_dp(self, x: paddle.Tensor, dim: int) -> paddle.Tensor:
        return x


def stages_of(args: argparse.Namespace) -> list[common.Stage]:
    """The stages of the model; with `dist.parallelize` those that place nothing themselves."""
    found = common.stages(args)
    return [Unplaced(stage.mesh, False) for stage in found] if args.parallelize else found


def plan_of(args: argparse.Namespace) -> dict:
    """The configuration for `dist.parallelize`."""
    plan = {
        "embedding": dist.ColWiseParallel(),
        "blocks.*.attention.q": dist.ColWiseParallel(),
        "blocks.*.attention.k": dist.ColWiseParallel(),
        "blocks.*.attention.v": dist.ColWiseParallel(),
        "blocks.*.attention.out": dist.RowWiseParallel(),
        "blocks.*.mlp.up": dist.ColWiseParallel(),
        "blocks.*.mlp.gate": dist.ColWiseParallel(),
        "blocks.*.mlp.down": dist.RowWiseParallel(),
        "head": dist.ColWiseParallel(),
    }
    if args.sequence_parallel:
        plan["embedding"] = [plan["embedding"], dist.SequenceParallelBegin()]
        plan["head"] = [plan["head"], dist.SequenceParallelEnd()]
        plan |= SEQUENCE_FIRST
    told = {"mp_config": {"parallelize_plan": plan}} if args.mp > 1 else {}
    told |= {"dp_config": {"sharding_level": args.sharding_stage}} if args.dp > 1 else {}
    each = args.layers // args.pp
    ends = {f"blocks.{(stage + 1) * each - 1}": dist.SplitPoint.END for stage in range(args.pp - 1)}
    return told | ({"pp_config": {"split_spec": ends}} if args.pp > 1 else {})


# Layers -------------------------------------------------------------------------------------------------------


class Attention(nn.Layer):
    """Attention to the same tokens or to another sequence; each group of query heads shares a key and value head."""

    def __init__(self, args: argparse.Namespace, stage: common.Stage, *, causal: bool) -> None:
        super().__init__()
        self.stage, self.causal, self.kind = stage, causal, args.attention
        self.heads, self.kv_heads = args.heads, args.kv_heads
        narrow = args.hidden // args.heads * args.kv_heads
        self.q = common.ColumnLinear(stage, args.hidden, args.hidden, args.bias)
        self.k = common.ColumnLinear(stage, args.hidden, narrow, args.bias)
        self.v = common.ColumnLinear(stage, args.hidden, narrow, args.bias)
        self.out = common.RowLinear(stage, args.hidden, args.hidden, args.bias)

    def forward(self, x: paddle.Tensor, other: paddle.Tensor | None = None) -> paddle.Tensor:
        x = self.stage.whole(x)
        source = x if other is None else other
        q = self.stage.split_heads(self.q(x), self.heads, heads_first=False)
        k = self.stage.split_heads(self.k(source), self.kv_heads, heads_first=False)
        v = self.stage.split_heads(self.v(source), self.kv_heads, heads_first=False)
        if self.kind == "flash":
            found = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            k, v = (paddle.concat([each.unsqueeze(3)] * (self.heads // self.kv_heads), axis=3).flatten(2, 3) for each in (k, v))
            q, k, v = (each.transpose([0, 2, 1, 3]) for each in (q, k, v))
            weights = F.softmax(paddle.matmul(q, k, transpose_y=True) * q.shape[3] ** -0.5, axis=-1)
            found = paddle.matmul(weights, v).transpose([0, 2, 1, 3])
        return self.out(self.stage.merge_heads(found, heads_first=False))


class MLP(nn.Layer):
    """Two linear layers with GELU between them, or three with SwiGLU."""

    def __init__(self, args: argparse.Namespace, stage: common.Stage) -> None:
        super().__init__()
        self.stage = stage
        self.up = common.ColumnLinear(stage, args.hidden, args.intermediate, args.bias)
        self.gate = common.ColumnLinear(stage, args.hidden, args.intermediate, args.bias) if args.gated else None
        self.down = common.RowLinear(stage, args.intermediate, args.hidden, args.bias)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.stage.whole(x)
        return self.down(F.gelu(self.up(x), approximate=True) if self.gate is None else F.silu(self.gate(x)) * self.up(x))


class Block(nn.Layer):
    """Attention and MLP, each with a residual connection. `beside` is read by all blocks: the encoder's result, or the embedded time."""

    def __init__(self, args: argparse.Namespace, stage: common.Stage, *, kind: str, recomputed: bool) -> None:
        super().__init__()
        self.stage, self.kind, self.recomputed = stage, kind, recomputed
        self.attention = Attention(args, stage, causal=kind in ("decoder", "parallel", "cross"))
        self.mlp = MLP(args, stage)
        self.first = stage.replicated(nn.LayerNorm(args.hidden))
        self.second = None if kind == "parallel" else stage.replicated(nn.LayerNorm(args.hidden))
        if kind == "cross":
            self.cross, self.third = Attention(args, stage, causal=False), stage.replicated(nn.LayerNorm(args.hidden))
        if kind == "diffusion":
            self.modulation = stage.replicated(nn.Linear(args.hidden, 6 * args.hidden))
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x: paddle.Tensor, beside: paddle.Tensor | None = None) -> paddle.Tensor:
        if self.kind == "bert":
            x = self.first(x + self.dropout(self.attention(x)))
            return self.second(x + self.dropout(self.mlp(x)))
        if self.kind == "parallel":
            y = self.first(x)
            return x + self.attention(y) + self.mlp(y)
        if self.kind == "diffusion":
            shift, scale, gate, shift_2, scale_2, gate_2 = self.modulation(F.silu(beside)).unsqueeze(1).chunk(6, axis=-1)
            x = x + gate * self.attention(self.first(x) * (1 + scale) + shift)
            return x + gate_2 * self.mlp(self.second(x) * (1 + scale_2) + shift_2)
        x = x + self.dropout(self.attention(self.first(x)))
        if self.kind == "cross":
            x = x + self.dropout(self.cross(self.third(x), beside))
        return x + self.dropout(self.mlp(self.second(x)))


class Network(nn.Layer):
    """Blocks distributed over the stages; subclasses define what comes before and after them. Layers are created in the order in which they
    run, from which `dist.parallelize` derives their stages."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args, self.stages = args, stages_of(args)
        self.make_first(args, self.stages[0])
        self.blocks = nn.LayerList([self.block(layer) for layer in range(args.layers)])
        self.make_last(args, self.stages[-1])

    def make_first(self, args: argparse.Namespace, stage: common.Stage) -> None:
        """Create the layers before the first block."""
        raise NotImplementedError

    def make_last(self, args: argparse.Namespace, stage: common.Stage) -> None:
        """Create the layers after the last block."""
        self.norm = stage.replicated(nn.LayerNorm(args.hidden))
        self.head = common.ColumnLinear(stage, args.hidden, args.vocab, bias=False)

    def block(self, layer: int) -> nn.Layer:
        """The block of one layer."""
        every = self.args.recompute_every
        return Block(self.args, self.stage_of(layer), kind=self.kind_of(layer), recomputed=bool(every) and layer % every == 0)

    def kind_of(self, layer: int) -> str:
        """The kind of a layer's block."""
        return self.args.kind

    def stage_of(self, layer: int) -> common.Stage:
        """The stage that holds a layer."""
        counts = self.args.stage_layers
        stage = int(np.searchsorted(np.cumsum(counts), layer, side="right")) if counts else common.stage_of_layer(self.args, layer)
        return self.stages[stage]

    def through(self, x: paddle.Tensor, blocks: Sequence[nn.Layer], beside: paddle.Tensor | None = None) -> paddle.Tensor:
        """Run blocks; move `x` and `beside` from stage to stage."""
        stage = blocks[0].stage
        for block in blocks:
            if block.stage is not stage:
                stage = block.stage
                x = stage.between_blocks(x)
                beside = beside if beside is None else stage.per_sequence(beside)
            given = (x,) if beside is None else (x, beside)
            x = common.maybe_recompute(block.recomputed, block, *given)
        return x


class Words(Network):
    """Tokens in, logits out: `decoder`, `parallel` and `bert`."""

    def make_first(self, args: argparse.Namespace, stage: common.Stage) -> None:
        self.embedding = nn.Embedding(args.vocab, args.hidden)
        self.embedding.weight = stage.parameter(self.embedding.weight, dist.Shard(1))
        if args.kind == "bert":
            self.positions, self.segments = (stage.replicated(nn.Embedding(size, args.hidden)) for size in (args.seq_len, 2))

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        first, last = self.stages[0], self.stages[-1]
        x = self.embedding(tokens)
        if self.args.kind == "bert":
            places = paddle.arange(tokens.shape[1], dtype="int64")
            x = x + self.positions(places) + self.segments(places * 2 // tokens.shape[1])
        x = first.between_blocks(first.batch_first(x.astype(self.embedding.weight.dtype)))
        return self.head(last.batch_first(last.whole(self.norm(self.through(x, self.blocks)))))


class EncoderDecoder(Network):
    """Source and target tokens in, logits of the target out."""

    def make_first(self, args: argparse.Namespace, stage: common.Stage) -> None:
        self.half = args.layers // 2
        middle = self.stage_of(self.half)
        self.source, self.target = nn.Embedding(args.vocab, args.hidden), nn.Embedding(args.vocab, args.hidden)
        self.source.weight = stage.parameter(self.source.weight, dist.Shard(1))
        self.target.weight = middle.parameter(self.target.weight, dist.Shard(1))
        self.encoded = middle.replicated(nn.LayerNorm(args.hidden))

    def kind_of(self, layer: int) -> str:
        return "encoder" if layer < self.half else "cross"

    def forward(self, source: paddle.Tensor, target: paddle.Tensor) -> paddle.Tensor:
        first, middle, dtype = self.stages[0], self.blocks[self.half].stage, self.source.weight.dtype
        x = self.through(first.between_blocks(self.source(source).astype(dtype)), self.blocks[: self.half])
        y = middle.between_blocks(self.target(middle.over_dp(target, 0)).astype(dtype))
        encoded = self.encoded(middle.between_blocks(x))
        return self.head(self.norm(self.through(y, self.blocks[self.half :], encoded)))


class Vision(Network):
    """Images in, logits of classes out."""

    def make_first(self, args: argparse.Namespace, stage: common.Stage) -> None:
        self.patches = stage.replicated(nn.Conv2D(3, args.hidden, 16, stride=16))
        self.positions = stage.parameter(self.create_parameter([1, args.seq_len, args.hidden]))

    def forward(self, pictures: paddle.Tensor) -> paddle.Tensor:
        x = self.patches(pictures).flatten(2).transpose([0, 2, 1])
        x = self.through(self.stages[0].between_blocks((x + self.positions).astype(self.positions.dtype)), self.blocks)
        return self.head(self.norm(x).mean(axis=1))


class Diffusion(Network):
    """Noisy latents and times in, the noise of each patch out."""

    def make_first(self, args: argparse.Namespace, stage: common.Stage) -> None:
        self.patches = stage.replicated(nn.Conv2D(CHANNELS, args.hidden, PATCH, stride=PATCH))
        self.positions = stage.parameter(self.create_parameter([1, args.seq_len, args.hidden]))
        self.time, self.more_time = (stage.replicated(nn.Linear(size, args.hidden)) for size in (TIMES, args.hidden))

    def make_last(self, args: argparse.Namespace, stage: common.Stage) -> None:
        self.norm = stage.replicated(nn.LayerNorm(args.hidden))
        self.out = stage.replicated(nn.Linear(args.hidden, PATCH * PATCH * CHANNELS))

    def forward(self, latents: paddle.Tensor, times: paddle.Tensor) -> paddle.Tensor:
        first, dtype = self.stages[0], self.positions.dtype
        beside = first.per_sequence(self.more_time(F.silu(self.time(times.astype(dtype)))))
        x = self.patches(latents).flatten(2).transpose([0, 2, 1]).astype(dtype) + self.positions
        return self.out(self.norm(self.through(first.between_blocks(x), self.blocks, beside)))


class Residual(nn.Layer):
    """Two convolutions with batch norm and a residual connection."""

    def __init__(self, stage: common.Stage, width: int) -> None:
        super().__init__()
        self.stage, self.recomputed = stage, False
        self.layers = nn.LayerList([stage.replicated(nn.Conv2D(width, width, 3, padding=1, bias_attr=False)) for _ in range(2)])
        self.norms = nn.LayerList([self._norm(stage, width) for _ in range(2)])

    def _norm(self, stage: common.Stage, width: int) -> nn.Layer:
        norm, whole = stage.replicated(nn.BatchNorm2D(width)), [dist.Replicate()] * stage.mesh.ndim
        for name, buffer in list(norm.named_buffers()):
            norm._buffers[name] = dist.shard_tensor(buffer, stage.mesh, whole, stop_gradient=True)
        return norm

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        y = F.relu(self.norms[0](self.layers[0](x)))
        return F.relu(x + self.norms[1](self.layers[1](y)))


class Convolution(Network):
    """Images in, logits of classes out; from stage to stage height and width are halved and the number of channels is doubled."""

    def make_first(self, args: argparse.Namespace, stage: common.Stage) -> None:
        self.widths = [args.hidden << s for s in range(len(self.stages))]
        self.stem = stage.replicated(nn.Conv2D(3, args.hidden, 7, stride=2, padding=3))
        pairs = zip(self.stages[1:], self.widths, self.widths[1:], strict=False)
        self.down = nn.LayerList([each.replicated(nn.Conv2D(narrow, wide, 2, stride=2)) for each, narrow, wide in pairs])

    def make_last(self, args: argparse.Namespace, stage: common.Stage) -> None:
        self.head = stage.replicated(nn.Linear(self.widths[-1], args.vocab))

    def block(self, layer: int) -> nn.Layer:
        stage = self.stage_of(layer)
        return Residual(stage, self.widths[self.stages.index(stage)])

    def forward(self, pictures: paddle.Tensor) -> paddle.Tensor:
        x, stage, passed = F.relu(self.stem(pictures)), self.stages[0], 0
        for block in self.blocks:
            if block.stage is not stage:
                stage = block.stage
                x, passed = self.down[passed](stage.between_blocks(x)), passed + 1
            x = block(x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


# Losses and data ----------------------------------------------------------------------------------------------


class ClassLoss(common.NextTokenLoss):
    """Mean cross entropy of [batch, classes]."""


class SquaredError(common.NextTokenLoss):
    """Mean over all values."""

    def forward(self, found: paddle.Tensor, wanted: paddle.Tensor) -> paddle.Tensor:
        found = self.stage.over_dp(found, 0).astype("float32")
        return self.stage.over_replicas((found - wanted).square().mean())


class Random(paddle.io.Dataset):
    """Inputs and labels of a network: integers below `bound`, normal numbers otherwise. `DISTINCT` samples are drawn and then repeated,
    so that no step waits for them."""

    DISTINCT = 64

    def __init__(self, count: int, fields: Sequence[tuple[tuple[int, ...], str]], bound: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.count = count
        self.samples = [
            tuple(rng.integers(0, bound, shape) if dtype == "int64" else rng.standard_normal(shape, dtype) for shape, dtype in fields)
            for _ in range(min(count, self.DISTINCT))
        ]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> tuple[np.ndarray, ...]:
        return self.samples[place % len(self.samples)]


def fields_of(args: argparse.Namespace) -> list[tuple[tuple[int, ...], str]]:
    """Inputs of one sample, and its label."""
    words, side = ((args.seq_len,), "int64"), int(args.seq_len**0.5)
    if args.kind == "encoder-decoder":
        return [words, words, words]
    if args.kind in ("vision", "convolution"):
        return [((3, 16 * side, 16 * side), "float32"), ((), "int64")]
    if args.kind == "diffusion":
        noise = ((args.seq_len, PATCH * PATCH * CHANNELS), "float32")
        return [((CHANNELS, PATCH * side, PATCH * side), "float32"), ((TIMES,), "float32"), noise]
    return [words, words]


NETWORKS = {"encoder-decoder": EncoderDecoder, "vision": Vision, "diffusion": Diffusion, "convolution": Convolution}
LOSSES = {"vision": ClassLoss, "convolution": ClassLoss, "diffusion": SquaredError}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, from `argv` or the command line."""
    parser = common.parser("Train a network of the zoo.", {"": {}})
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--kv-heads", type=int, default=0, help="key and value heads; 0 is as many as --heads")
    parser.add_argument("--gated", action="store_true", help="SwiGLU in place of GELU")
    parser.add_argument("--no-bias", dest="bias", action="store_false", help="linear layers without bias")
    parser.add_argument("--stage-layers", type=lambda text: [int(word) for word in text.split(",")], help="blocks of each stage, else even")
    parser.add_argument("--recompute-every", type=int, default=0, metavar="N", help="recompute each so-many-th block, from the first on")
    parser.add_argument("--parallelize", action="store_true", help="leave placement to dist.parallelize")
    args = common.parse(parser, {}, argv)
    args.kv_heads = args.kv_heads or args.heads
    args.intermediate = args.intermediate or 4 * args.hidden
    args.recompute = "parts" if args.recompute_every else args.recompute
    if args.kind in ("vision", "diffusion", "convolution") and int(args.seq_len**0.5) ** 2 != args.seq_len:
        parser.error(f"--seq-len {args.seq_len} is the number of patches of a square: expected a square number")
    if args.stage_layers and (len(args.stage_layers) != args.pp or sum(args.stage_layers) != args.layers):
        parser.error(f"--stage-layers {args.stage_layers}: expected {args.pp} numbers that add up to {args.layers}")
    return args


def build(args: argparse.Namespace) -> tuple:
    """Returns (DistModel, loader); nothing has run yet."""
    with common.construction(args):
        model = NETWORKS.get(args.kind, Words)(args)
    strategy, fields = common.make_strategy(args), fields_of(args)
    interlace.enable(strategy)
    loss = LOSSES.get(args.kind, common.NextTokenLoss)(model.stages[-1])
    first, last = model.stages[0], model.stages[-1]
    samples = Random(args.batch_size * max(args.steps, 1), fields, args.vocab, args.seed)
    loader = paddle.io.DataLoader(samples, batch_size=args.batch_size, drop_last=True)
    loader = dist.shard_dataloader(loader, meshes=[first.mesh] * (len(fields) - 1) + [last.mesh], shard_dims="dp")
    optimizer = common.make_optimizer(args, model)
    if args.parallelize:
        model, optimizer = dist.parallelize(model, optimizer, config=plan_of(args))
    else:
        sharding = {1: dist.ShardingStage1, 2: dist.ShardingStage2, 3: dist.ShardingStage3}.get(args.sharding_stage)
        optimizer = dist.shard_optimizer(optimizer, sharding("dp") if sharding else None)
    return dist.to_static(model, loader, loss, optimizer, strategy), loader


if __name__ == "__main__":
    common.main(parse(), build)
