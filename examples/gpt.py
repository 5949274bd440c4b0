"""GPT, trained under `dist.to_static`: learned positions, pre-LayerNorm, GELU.

interlace run examples/gpt.py --world 4 -- --pp 2 --mp 2 --micro-batches 8
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import common
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.nn import functional as F

import interlace

_SIZES = ("layers", "hidden", "heads", "vocab", "seq_len")
PRESETS = {
    "gpt3-1.3b": dict(zip(_SIZES, (24, 2048, 16, 50304, 2048), strict=True)),
    "gpt3-6.7b": dict(zip(_SIZES, (32, 4096, 32, 50304, 2048), strict=True)),
    "gpt3-13b": dict(zip(_SIZES, (40, 5120, 40, 50304, 2048), strict=True)),
    "gpt3-175b": dict(zip(_SIZES, (96, 12288, 96, 50304, 2048), strict=True)),
}


class Attention(nn.Layer):
    """Causal self-attention, q, k and v from one matmul or from three."""

    def __init__(self, args: argparse.Namespace, stage: common.Stage) -> None:
        super().__init__()
        h = args.hidden
        self.stage, self.heads, self.kind = stage, args.heads, args.attention
        if args.split_qkv:
            self.q, self.k, self.v = (common.ColumnLinear(stage, h, h) for _ in range(3))
        else:
            self.qkv = common.ColumnLinear(stage, h, 3 * h)
        self.split = args.split_qkv
        self.out = common.RowLinear(stage, h, h)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.stage.whole(x)
        if self.split:
            q, k, v = (self.stage.split_heads(f(x), self.heads) for f in (self.q, self.k, self.v))
        else:
            q, k, v = self.stage.split_heads(self.qkv(x), self.heads).chunk(3, axis=-1)
        return self.out(self.stage.merge_heads(common.causal_attention(q, k, v, self.kind)))


class MLP(nn.Layer):
    """hidden -> intermediate -> GELU -> hidden."""

    def __init__(self, args: argparse.Namespace, stage: common.Stage) -> None:
        super().__init__()
        width = args.intermediate or 4 * args.hidden
        self.stage = stage
        self.up = common.ColumnLinear(stage, args.hidden, width)
        self.down = common.RowLinear(stage, width, args.hidden)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.down(F.gelu(self.up(self.stage.whole(x)), approximate=True))


class Block(nn.Layer):
    """x + attention(norm(x)), then the same with the MLP."""

    def __init__(self, args: argparse.Namespace, stage: common.Stage) -> None:
        super().__init__()
        self.stage, self.recompute = stage, args.recompute
        self.attention_norm = stage.replicated(nn.LayerNorm(args.hidden))
        self.attention = Attention(args, stage)
        self.mlp_norm = stage.replicated(nn.LayerNorm(args.hidden))
        self.mlp = MLP(args, stage)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        y = common.maybe_recompute(self.recompute == "attention", self.attention, self.attention_norm(x))
        x = x + self.dropout(y)
        y = common.maybe_recompute(self.recompute == "mlp", self.mlp, self.mlp_norm(x))
        return x + self.dropout(y)


class Embedding(nn.Layer):
    """Token and position embeddings; the tokens' is split over mp by vocabulary if it is also the head.

    `--amp` makes embeddings float32: without the cast back, so would be all between blocks, and what stages send.
    """

    def __init__(self, args: argparse.Namespace, stage: common.Stage) -> None:
        super().__init__()
        self.stage = stage
        self.tokens = nn.Embedding(args.vocab, args.hidden)
        self.tokens.weight = stage.parameter(self.tokens.weight, dist.Shard(0) if args.tie_embeddings else dist.Shard(1))
        self.positions = stage.replicated(nn.Embedding(args.seq_len, args.hidden))

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        positions = paddle.arange(tokens.shape[1], dtype="int64")
        x = (self.tokens(tokens) + self.positions(positions)).astype(self.tokens.weight.dtype)
        return self.stage.between_blocks(self.stage.batch_first(x))


class GPT(nn.Layer):
    """Tokens in, logits out."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args, self.stages = args, common.stages(args)
        last = self.stages[-1]
        self.embedding = Embedding(args, self.stages[0])
        self.blocks = nn.LayerList([Block(args, self.stages[common.stage_of_layer(args, i)]) for i in range(args.layers)])
        self.norm = last.replicated(nn.LayerNorm(args.hidden))
        if not args.tie_embeddings:
            self.head = common.ColumnLinear(last, args.hidden, args.vocab, bias=False)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        last = self.stages[-1]
        x = common.run_blocks(self.args, self.blocks, self.embedding(tokens))
        x = last.batch_first(last.whole(self.norm(x)))
        if not self.args.tie_embeddings:
            return self.head(x)
        weight = dist.reshard(self.embedding.tokens.weight, last.mesh, [dist.Replicate(), dist.Shard(0)])
        return paddle.matmul(x, weight, transpose_y=True)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, from `argv` or the command line."""
    parser = common.parser("Train a GPT.", PRESETS)
    parser.add_argument("--split-qkv", action="store_true", help="three matmuls for q, k and v instead of one")
    parser.add_argument("--tie-embeddings", action="store_true", help="the head is the token embedding")
    return common.parse(parser, PRESETS, argv)


def build(args: argparse.Namespace) -> tuple:
    """(DistModel, loader); nothing has run yet."""
    with common.construction(args):
        model = GPT(args)
    strategy = common.make_strategy(args)
    interlace.enable(strategy)
    return common.to_static(args, model, strategy)


if __name__ == "__main__":
    common.main(parse(), build)
